"""A text that spells a special token is text in every form, with every kind of tokenizer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pagedjax import SamplingParams
from pagedjax.options.params import StructuredOutputsParams
from pagedjax.text.structured import vocabulary
from pagedjax.text.structured.grammars import Grammars
from pagedjax.text.structured.matcher import Grammar, MaskRow, masks
from pagedjax.text.tokenizer import Tokenizer, byte_alphabet
from pagedjax.text.tools.use import tool_use
from tests.engine.runs import answers, small_llm
from tests.structured.schemas import opened, shut
from tests.tools.functions import function

ENDS = (2,)
LETTERS = list(byte_alphabet())


def bits_of(matcher, output: list[int]) -> list[int]:
    """The tokens that a mask allows behind an output."""
    (mask,) = masks([MaskRow(matcher, output, [], 0, ENDS)], 1)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def byte_level(special: tuple[str, ...], later_special: tuple[str, ...] = ()) -> Tokenizer:
    """Bytes with special tokens before them, that are in the vocabulary; `later_special`
    are behind it.
    """
    pieces = {piece: i for i, piece in enumerate([*special, *LETTERS])}
    backend = Backend(models.BPE(vocab=pieces, merges=[], unk_token=special[0]))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in later_special])
    return Tokenizer(backend, ENDS, {})


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind, whose special tokens have short names."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return Tokenizer(backend, ENDS, {})


TOKENIZERS = {
    "in the vocabulary": byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "behind the vocabulary": byte_level(("[UNK]", "[BOS]", "[EOS]"), ("<|eot_id|>", "<think>")),
    "SentencePiece": byte_fallback(),
}
TEXTS = (
    "see <|im_end|> here",
    "<|im_end|>!",
    "the </s> tag",
    "a<think>b<|eot_id|>",
    "[EOS]",
    "<s>",
)


def forms(text: str) -> dict[str, tuple[StructuredOutputsParams, str]]:
    """By kind, a form that allows one answer alone, and that answer."""
    quoted = json.dumps(text)
    escaped = "".join(f"\\x{{{ord(character):x}}}" for character in text)

    def tight(schema: dict) -> StructuredOutputsParams:
        return StructuredOutputsParams(json=schema, disable_any_whitespace=True)

    return {
        "choice": (StructuredOutputsParams(choice=[text]), text),
        "regex": (StructuredOutputsParams(regex=escaped), text),
        "grammar": (StructuredOutputsParams(grammar=f"start: {quoted}"), text),
        "const": (tight({"const": text}), quoted),
        "enum": (tight({"enum": [text]}), quoted),
        "property": (tight(shut(**{text: {"const": 1}})), f"{{{quoted}:1}}"),
    }


def only_answer(grammar: Grammar) -> list[int]:
    """The tokens of an answer for which the masks allow one way alone."""
    matcher = grammar.matcher()
    output: list[int] = []
    for _ in range(200):
        (token,) = bits_of(matcher, output)
        assert matcher.error is None
        if token in ENDS:
            return output
        assert matcher.forced(output, 1) in ([token], [])
        output.append(token)
    raise AssertionError("no end after 200 tokens")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_masks_and_forced_tokens_spell_the_whole_text(kind):
    tokenizer = TOKENIZERS[kind]
    grammars = Grammars(tokenizer, tokenizer.vocab_size, ENDS)
    for text in TEXTS:
        for name, (form, answer) in forms(text).items():
            tokens = only_answer(grammars.compiled(form))
            assert tokenizer.decode(tokens) == answer, name
            assert not tokenizer.special_ids & set(tokens)


def test_arguments_of_tools_may_spell_special_tokens(tiny):
    text = "rm <|im_end|> <|im_start|>"
    tool = function("run", parameters=opened(["cmd"], cmd={"const": text}))
    use = tool_use(tiny.tokenizer, [tool], "required", parallel=False)
    params, _ = use.with_grammar(SamplingParams(), tiny.tokenizer)
    size = tiny.model.config.vocab_size
    matcher = Grammars(tiny.tokenizer, size, ENDS).compiled(params.structured_outputs).matcher()
    output: list[int] = []
    while matcher.error is None:
        allowed = bits_of(matcher, output)
        if ENDS[0] in allowed:
            break
        output.append(allowed[-1])  # white space comes first
    assert json.dumps(text) in tiny.tokenizer.decode(output, skip_special_tokens=False)


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_tokens": 3}])
def test_an_answer_has_the_whole_text(tiny, tiny_llm, speculative):
    llm = small_llm(tiny, speculative=speculative) if speculative else tiny_llm
    cases = forms("see <|im_end|> here")
    params = [SamplingParams(max_tokens=80, structured_outputs=form) for form, _ in cases.values()]
    outputs = answers(llm, ["x"] * len(params), params)
    assert [answer.text for answer in outputs] == [text for _, text in cases.values()]
    assert {answer.finish_reason for answer in outputs} == {"stop"}


def test_a_grammar_may_name_special_tokens_and_spell_them():
    marks = {"<|im_start|>": 1, "<think>": 300}
    grammar = 'start: <|im_start|> "<|im_start|>" /<think>/ <think> // <think>\n# <think>\n<other>'
    assert vocabulary.grammar_with_ids(grammar, marks) == (
        'start: <[1]> "<|im_start|>" /<think>/ <[300]> // <think>\n# <think>\n<other>'
    )
    assert vocabulary.grammar_with_ids("root ::= [<think>]", marks) == "root ::= [<think>]"
    tokenizer = TOKENIZERS["in the vocabulary"]
    form = StructuredOutputsParams(grammar='start: "a" <|im_start|> "<|im_start|>"')
    tokens = only_answer(Grammars(tokenizer, tokenizer.vocab_size, ENDS).compiled(form))
    assert tokens[1] == 1
    assert tokenizer.decode(tokens) == "a<|im_start|>"


def test_other_text_is_cut_as_by_the_tokenizer(tiny):
    import llguidance

    size = tiny.model.config.vocab_size
    library = vocabulary.library_tokenizer(llguidance, tiny.tokenizer, size, ENDS)
    for text in ("the cat sat", "42 wörds 😀\n\n  x", '{"a": [1, 2]}'):
        assert library.tokenize_str(text) == tiny.tokenizer.encode(text, add_special_tokens=False)
    assert all(library.is_special_token(token) for token in (0, 1, 2))


def test_an_end_before_the_form_is_complete_fails_the_matcher(grammars, monkeypatch):
    """Of a wrong library: no answer may end as if its form was complete."""
    form = StructuredOutputsParams(grammar='start: "a" <|im_end|> "b"')
    matcher = grammars.compiled(form).matcher()
    output = grammars.tokenizer.encode("a")
    (mask,) = masks([MaskRow(matcher, output, [], 0, ENDS)], 1)
    assert matcher.error == "an end token is allowed before the form is complete"
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: grammars.vocab_size]
    assert np.flatnonzero(allowed == 0).tolist() == [2]
    drafted = grammars.compiled(form).matcher()
    masks([MaskRow(drafted, [], output, 0, ENDS)], 2)
    assert drafted.error == "an end token is allowed before the form is complete"


def described(**model: Any) -> str:
    added = [
        {"id": 0, "content": "<a>", "special": False},
        {"id": 1, "content": "b", "special": False},
    ]
    return json.dumps({"added_tokens": added, "model": model, "post_processor": {"type": "X"}})


def test_ids_stay_and_names_of_marks_go():
    bpe = json.loads(
        vocabulary.rename_marks(described(vocab={"<a>": 0, "b": 1}, merges=["< a>", "x y"]))
    )
    assert list(bpe["model"]["vocab"].values()) == [0, 1]
    assert "<a>" not in bpe["model"]["vocab"]
    assert bpe["added_tokens"][1]["content"] == "b"
    assert bpe["model"]["merges"] == ["x y"]
    unigram = json.loads(
        vocabulary.rename_marks(described(vocab=[["<a>", 0.0], ["b", -1.0]], unk_token="<a>"))
    )
    assert unigram["model"]["vocab"][1] == ["b", -1.0]
    assert unigram["model"]["unk_token"] == unigram["model"]["vocab"][0][0] != "<a>"
