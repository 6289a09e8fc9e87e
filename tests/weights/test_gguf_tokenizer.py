"""Tokenizers built from GGUF metadata: every known pre-tokenizer, SentencePiece, and errors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.text.tokenizer import Detokenizer, Tokenizer
from pagedjax.weights import open_checkpoint
from pagedjax.weights.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from tests import drawn
from tests.refusals import refused
from tests.weights.bpe_oracle import (
    GPT2_WORDS,
    GPT4O_WORDS,
    LLAMA3_WORDS,
    QWEN2_WORDS,
    TEXTS,
    BruteForce,
    BruteForceSentencePiece,
)
from tests.weights.embedded import needs_gemma
from tests.weights.tiny import SPECIAL, tiny_gguf, tiny_llama, tiny_vocab

GOLDENS = Path(__file__).parents[1] / "goldens"

ORACLES = {
    "gpt-2": {"words": GPT2_WORDS, "digits": False},
    "smollm": {"words": GPT2_WORDS, "digits": True},
    "llama-bpe": {"words": LLAMA3_WORDS, "digits": False, "whole_words": True},
    "dbrx": {"words": LLAMA3_WORDS, "digits": False},
    "gpt-4o": {"words": GPT4O_WORDS, "digits": False},
    "qwen2": {"words": QWEN2_WORDS, "digits": False, "composed": True},
}


@cache
def embedded_as(pre: str) -> tuple:
    """The embedded vocabulary with the pre-tokenizer of another model: (our tokenizer, the
    oracle).
    """
    metadata = {**open_checkpoint("smollm2-135m").metadata, "tokenizer.ggml.pre": pre}
    return build_tokenizer("test.gguf", metadata), BruteForce(metadata, **ORACLES[pre])


@pytest.mark.parametrize("pre", ORACLES)
@drawn.examples(30, 300)
def test_pre_tokenizers_equal_brute_force(pre, number):
    tokenizer, oracle = embedded_as(pre)

    def holds(text: str) -> None:
        assert tokenizer.encode(text).ids == oracle.encode(text)

    drawn.check(number, holds, TEXTS)


@cache
def qwen2() -> tuple:
    """A small vocabulary as that of a Qwen 2: (our tokenizer, transformers')."""
    from tokenizers import AddedToken
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    tokens, merges = tiny_vocab(320)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    vocab = {token: i for i, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    theirs.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    )
    return build_tokenizer("qwen2.gguf", metadata), theirs


@settings(max_examples=60)
@given(TEXTS)
def test_qwen2_is_split_as_transformers_splits_it(text):
    tokenizer, theirs = qwen2()
    assert tokenizer.encode(text).ids == theirs.encode(text).ids


def test_llama3_adds_bos_unless_the_file_disables_it():
    metadata = dict(open_checkpoint("smollm2-135m").metadata) | {"tokenizer.ggml.pre": "llama-bpe"}
    assert build_tokenizer("x", metadata).encode("Hello").ids == [19556]  # the file disables it
    del metadata["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer("x", metadata).encode("Hello").ids == [1, 19556]
    assert build_tokenizer("x", metadata).encode("Hello", add_special_tokens=False).ids == [19556]
    assert build_tokenizer("x", metadata | {"tokenizer.ggml.add_eos_token": True}).encode(
        "Hello"
    ).ids == [1, 19556, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.pre": "default"},
            "tokenizer.ggml.pre is 'default'.*supported: gpt-2, smollm",
        ),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        (
            {"tokenizer.ggml.model": "t5"},
            "tokenizer.ggml.model is 't5'; supported are 'gpt2'.*and 'llama'",
        ),
        ({"tokenizer.ggml.tokens": []}, "the vocabulary has 0 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "and 1 token types"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab' is not two tokens"),
        ({"tokenizer.ggml.merges": ["zzz yyy"]}, "do not fit together"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores for 320 tokens"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 999},
            "adds BOS, but .* is 999",
        ),
    ],
)
def test_tokenizers_that_cannot_be_built_are_refused(tmp_path, change, message):
    metadata = {
        **open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path))).metadata,
        **change,
    }
    with refused(f"(?s)m.gguf.*{message}"):
        build_tokenizer(tmp_path / "m.gguf", metadata)


def test_every_known_pre_tokenizer_has_an_oracle():
    assert {PRE_TOKENIZERS[name] for name in ORACLES} == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize(
    ("kind", "decoded"),
    [(2, "ab"), (3, "ab"), (4, "a<think>b")],
    ids=["unknown", "control", "user"],
)
def test_tokens_of_these_kinds_are_matched_whole(kind, decoded, tmp_path):
    """Unknown and control tokens are special: a decoded text does not have them."""
    folder = tiny_llama(tmp_path)
    metadata = dict(open_checkpoint(tiny_gguf(tmp_path / "m.gguf", folder)).metadata)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    kinds = list(metadata["tokenizer.ggml.token_type"])
    tokens[-1] = "<think>"
    kinds[-1] = kind
    merges = [m for m in metadata["tokenizer.ggml.merges"] if "".join(m.split(" ")) in tokens]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = kinds
    metadata["tokenizer.ggml.merges"] = merges
    tokenizer = build_tokenizer("x", metadata)
    ids = tokenizer.encode("a<think>b").ids
    assert ids[1] == len(tokens) - 1
    assert tokenizer.decode(ids) == decoded


# --- SentencePiece --------------------------------------------------------------------------------


@cache
def sentencepiece_golden() -> dict:
    return json.loads((GOLDENS / "sentencepiece.json").read_text(encoding="utf-8"))


def sentencepiece_metadata(**extra) -> dict:
    golden = sentencepiece_golden()
    lists = {f"tokenizer.ggml.{key}": golden[key] for key in ("tokens", "scores", "token_type")}
    return lists | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, **extra}


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer(build_tokenizer("x", sentencepiece_metadata()), (2,), {})


def test_scores_give_the_tokens_of_the_sentencepiece_library():
    tokenizer = sentencepiece()
    for text, ids, decoded in sentencepiece_golden()["encodings"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == decoded


def test_sentencepiece_adds_bos_and_a_space_unless_the_file_disables_it():
    assert sentencepiece().encode("the") == [
        1,
        *sentencepiece().encode("the", add_special_tokens=False),
    ]
    off = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    plain = Tokenizer(build_tokenizer("x", sentencepiece_metadata(**off)), (2,), {})
    assert plain.backend.encode("the").tokens == ["the"]
    assert plain.decode(plain.encode(" the")) == " the"
    extra = {"tokenizer.ggml.remove_extra_whitespaces": True}
    with refused("removes extra spaces"):
        build_tokenizer("x", sentencepiece_metadata(**extra))


def test_sentencepiece_pieces_and_words_are_spaced_by_their_context():
    tokenizer = sentencepiece()
    the, cat = (tokenizer.backend.token_to_id(piece) for piece in ("▁the", "▁cat"))
    assert tokenizer.decode_token(cat) == " cat"
    after_text = Detokenizer(tokenizer, [1, the])
    assert after_text.push(cat) == " cat"
    at_start = Detokenizer(tokenizer, [1])
    assert [at_start.push(the), at_start.push(cat)] == ["the", " cat"]


@settings(max_examples=100)
@given(st.text(alphabet=" thecandog\né中😀", max_size=30))
def test_sentencepiece_pushes_join_to_the_text(text):
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_control_tokens_of_a_phi_3_take_the_spaces_behind_them():
    """As in its tokenizer.json; no key of a GGUF file says it, and of no other model is it so."""
    golden = sentencepiece_golden()
    plain = sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False})
    plain["tokenizer.ggml.tokens"] = [*golden["tokens"], "<|end|>", "<|endoftext|>"]
    plain["tokenizer.ggml.scores"] = [*golden["scores"], -1000.0, -1000.0]
    plain["tokenizer.ggml.token_type"] = [*golden["token_type"], 3, 3]
    phi3 = plain | {"general.architecture": "phi3"}
    line_break = golden["tokens"].index("<0x0A>")
    llama, phi = (build_tokenizer("x", metadata) for metadata in (plain, phi3))
    for token, stripped in (("<|end|>", True), ("<|endoftext|>", False)):
        llama_ids, phi_ids = (x.encode(f"the{token}\n the").ids for x in (llama, phi))
        assert llama_ids[1] == phi_ids[1] == llama.token_to_id(token)
        assert line_break in llama_ids
        assert (line_break in phi_ids) != stripped


# --- Gemma ----------------------------------------------------------------------------------------

WHOLE = ("  ", "   ", "    ", "\n\n", "<b>", "</b>")


def gemma_metadata() -> dict:
    """The small vocabulary as a Gemma has it: no space before the text, and runs of spaces, of line
    breaks and tags as tokens that a user defined. llama.cpp writes their spaces as spaces.
    """
    golden = sentencepiece_golden()
    pieces = [
        (token, score, kind)
        for token, score, kind in zip(
            golden["tokens"], golden["scores"], golden["token_type"], strict=True
        )
        if token != "▁" * max(2, len(token))
    ]
    first = next(i for i, (_, _, kind) in enumerate(pieces) if kind == 1)  # they precede the words
    pieces[first:first] = [(token, -1000.0, 4) for token in WHOLE]
    tokens, scores, kinds = map(list, zip(*pieces, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


@cache
def gemma() -> tuple:
    """(our tokenizer, the oracle, transformers' GemmaTokenizer of the same vocabulary)."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    metadata = gemma_metadata()
    theirs, _ = convert_gguf_tokenizer(
        "gemma3",
        {
            "tokenizer_type": "llama",
            "tokens": metadata["tokenizer.ggml.tokens"],
            "scores": metadata["tokenizer.ggml.scores"],
            "token_type": metadata["tokenizer.ggml.token_type"],
        },
    )
    oracle = BruteForceSentencePiece(metadata, space_first=False)
    return build_tokenizer("gemma.gguf", metadata), oracle, theirs


@settings(max_examples=100)
@given(
    st.lists(
        st.sampled_from([*WHOLE, *" thecandog\n", "é", "中", "😀", " the cat", "<", "b>", "7"]),
        max_size=30,
    ).map("".join)
)
def test_a_gemma_is_split_as_defined_and_as_transformers_splits_it(text):
    tokenizer, oracle, theirs = gemma()
    ids = tokenizer.encode(text).ids
    assert ids == oracle.encode(text)
    # transformers makes runs of spaces by merges, so it cuts a run differently that no token has
    if " " * 5 not in text:
        assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    stream = Detokenizer(Tokenizer(tokenizer, (2,), {}))
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@pytest.mark.slow
@needs_gemma
@settings(max_examples=200)
@given(TEXTS)
def test_gemmas_own_vocabulary_is_split_as_defined(text):
    tokenizer, oracle = gemma3_270m()
    assert tokenizer.encode(text, add_special_tokens=False).ids == oracle.encode(text)


@cache
def gemma3_270m() -> tuple:
    metadata = open_checkpoint("gemma3-270m").metadata
    oracle = BruteForceSentencePiece(dict(metadata), space_first=False)
    return build_tokenizer("gemma.gguf", metadata), oracle
