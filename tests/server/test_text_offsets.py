"""`text_offset` of completions: where each token begins in the text, against decoded prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from pagedjax import SamplingParams
from pagedjax.engine.session import GenerationRequest
from pagedjax.server.responses import OutputOffsets, Style, completion_logprobs, prompt_offsets
from pagedjax.text.outputs import CompletionOutput, Logprob, RequestOutput
from pagedjax.text.tokenizer import Tokenizer
from tests import drawn
from tests.structured.test_vocabulary import TOKENIZERS
from tests.weights import bpe_oracle

TEXT = "😀 hi ünï 漢字 end"


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return bpe_oracle.smollm()


def style(tokenizer: Tokenizer, **options: Any) -> Style:
    return Style("m", chat=False, tokenizer=tokenizer, logprobs=0, **options)


def prompt_of(tokens: list[int], text: str | None = None) -> Any:
    return GenerationRequest(tokens, SamplingParams(), text)


def offsets_of(style: Style, prompt: tuple[int, ...], tokens: list[int], text: str) -> list[int]:
    """The offsets of a whole answer, from its JSON."""
    positions = tuple({token: Logprob(-1.0, 1, "")} for token in tokens)
    completion = CompletionOutput(0, text, tuple(tokens), "stop", None, None, positions)
    of_prompt = (None, *({token: Logprob(-1.0, 1, "")} for token in prompt[1:]))
    output = RequestOutput("0", None, prompt, (completion,), of_prompt if style.echo else None)
    return completion_logprobs(style, output, completion)["text_offset"]


def decoded(tokenizer: Tokenizer, tokens: list[int], skips: bool) -> str:
    """The whole characters of tokens: the beginning of a character at the end does not count."""
    visible = [token for token in tokens if not (skips and token in tokenizer.special_ids)]
    raw = b"".join(map(tokenizer.token_bytes, visible))
    cut = next((count for count in (3, 2, 1) if begins_a_character(raw[len(raw) - count :])), 0)
    return raw[: len(raw) - cut].decode(errors="replace")


def begins_a_character(raw: bytes) -> bool:
    """As Python's incremental decoder sees it: a third byte is awaited also behind half of a
    surrogate pair.
    """
    if len(raw) == 2 and raw[0] == 0xED and 0xA0 <= raw[1] <= 0xBF:
        return True
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return (error.start, error.reason) == (0, "unexpected end of data")
    return False


def test_the_offsets_of_a_text_with_characters_of_several_tokens(smollm):
    tokens = [*smollm.encode(TEXT), *smollm.eos_token_ids[:1]]
    expected = [0, 0, 0, 1, 4, 5, 6, 7, 8, 9, 9, 10, 11]
    offsets = offsets_of(style(smollm), (), tokens, TEXT)
    assert offsets == [*expected, 15]
    assert prompt_offsets(style(smollm), prompt_of(tokens[:-1], TEXT)) == expected


def test_an_echo_counts_on_behind_its_prompt(smollm):
    prompt = tuple(smollm.encode(TEXT))
    tokens = smollm.encode(" 漢 ok")
    offsets = offsets_of(style(smollm, echo=True), prompt, tokens, " 漢 ok")
    assert offsets[: len(prompt)] == offsets_of(style(smollm), (), list(prompt), TEXT)
    assert offsets[len(prompt)] == len(TEXT)
    assert [at - len(TEXT) for at in offsets[len(prompt) :]] == offsets_of(
        style(smollm), prompt, tokens, " 漢 ok"
    )


def test_a_bos_token_that_was_added_and_a_first_space_have_no_place():
    tokenizer = TOKENIZERS["SentencePiece"]
    bos, *tokens = [1, *tokenizer.encode("a b")]
    assert prompt_offsets(style(tokenizer), prompt_of([bos, *tokens], "a b")) == [0, 0, 1, 2]
    assert prompt_offsets(style(tokenizer), prompt_of([bos, *tokens])) == [0, 3, 4, 5]


def sentencepiece() -> Tokenizer:
    """With pieces of whole words, as Llama 2 has."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in pieces[:3]])
    return Tokenizer(backend, (2,), {})


def test_the_first_space_of_sentencepiece_has_no_place():
    tokenizer = sentencepiece()
    tokens = tokenizer.encode("a b a b")
    assert prompt_offsets(style(tokenizer), prompt_of([1, *tokens], "a b a b")) == [0, 0, 1, 3, 5]
    assert offsets_of(style(tokenizer), (), tokens, "a b a b") == [0, 1, 3, 5]


def test_offsets_do_not_pass_the_end_of_a_text_that_a_stop_string_cut(smollm):
    tokens = smollm.encode("one two three four")
    assert offsets_of(style(smollm), (), tokens, "one tw") == [0, 3, 6, 6]


def test_special_tokens_have_places_if_they_are_shown(smollm):
    tokens = [*smollm.encode("a"), 1, *smollm.encode("b")]
    assert offsets_of(style(smollm), (), tokens, "ab") == [0, 1, 1]
    visible = style(smollm, skips_special_tokens=False)
    text = smollm.decode(tokens, skip_special_tokens=False)
    assert offsets_of(visible, (), tokens, text) == [0, 1, 1 + len("<|im_start|>")]


@drawn.examples(60, 3_000)
@pytest.mark.parametrize("skips", [True, False])
def test_offsets_are_the_lengths_of_decoded_prefixes(number, skips):
    tokenizer = TOKENIZERS["in the vocabulary"]
    texts = st.text(max_size=8).map(lambda text: tokenizer.encode(text))
    tokens = st.lists(
        texts | st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5), max_size=5
    )

    def holds(pieces: list[list[int]]) -> None:
        ids = [token for piece in pieces for token in piece]
        offsets = OutputOffsets(style(tokenizer, skips_special_tokens=skips), prompt_of([]))
        counted = [offsets.next(token) for token in ids]
        assert counted == [len(decoded(tokenizer, ids[:i], skips)) for i in range(len(ids))]

    drawn.check(number, holds, tokens)
