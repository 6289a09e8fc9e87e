"""A matcher's answers depend on the output alone; its masks are those of a search through all
tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.options.params import StructuredOutputsParams
from pagedjax.text.structured.matcher import MaskRow, first_line, masks
from tests.structured.schemas import integer, opened, typed

EOS = (2, 0)  # of the model; a form ends by any of them
PATTERNS = [
    "[a-c]{2,6}",
    "(the|then|there) cat( sat)?",
    r"\d{1,3}(\.\d+)?",
    "(ab|ba)*",
    "x?y?z?",
    "[^a-m]{1,4}e",
]


def bits(mask: np.ndarray, vocab: int) -> np.ndarray:
    """Indices of the set bits."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab])


def search(pattern: str, tokenizer, output: list[int], vocab: int) -> list[int]:
    """The tokens that may follow, by trying each: the text so far is a beginning of a match, or a
    match and its end.
    """
    text = b"".join(tokenizer.token_bytes(token) for token in output)
    matches = []
    compiled = regex.compile(pattern.encode())
    for token in range(vocab):
        if token in tokenizer.special_ids:
            if token in EOS and compiled.fullmatch(text):
                matches.append(token)
        elif (piece := tokenizer.token_bytes(token)) and compiled.fullmatch(
            text + piece, partial=True
        ):
            matches.append(token)
    return matches


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_a_mask_has_the_tokens_that_a_search_finds(grammars, pattern, random):
    matcher = grammars.compiled(StructuredOutputsParams(regex=pattern)).matcher()
    output: list[int] = []
    for _ in range(8):
        (mask,) = masks([MaskRow(matcher, output, [], 0, EOS)], 1)
        expected = search(pattern, grammars.tokenizer, output, grammars.vocab_size)
        # bytes above 127 are half of a character, which `regex` does not know on bytes
        is_plain = lambda token: max(grammars.tokenizer.token_bytes(token), default=0) < 128  # noqa: E731
        plain = [int(token) for token in bits(mask, grammars.vocab_size) if is_plain(token)]
        # of several ways to cut a text that must come, one is allowed
        if forced := matcher.forced(output, 1):
            assert plain == forced
            assert forced[0] in expected
        else:
            assert plain == [token for token in expected if is_plain(token)]
        token = random.choice(plain)
        if token in EOS:
            break
        output.append(token)


SCHEMA = opened(["a", "b"], a=integer(), b=typed("string"))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_answers_do_not_depend_on_what_was_asked_before(grammars, lengths):
    tokens = grammars.tokenizer.encode('{"a": 12, "b": "some words"}')
    grammar = grammars.compiled(StructuredOutputsParams(json=SCHEMA))
    used = grammar.matcher()
    for length in lengths:
        output = tokens[:length]
        row = [MaskRow(matcher, output, [], 0, EOS) for matcher in (used, grammar.matcher())]
        np.testing.assert_array_equal(masks(row[:1], 1), masks(row[1:], 1))
        assert used.forced(output, 9) == grammar.matcher().forced(output, 9)


def test_masks_of_drafts_are_those_of_the_tokens_they_follow(grammars):
    tokens = grammars.tokenizer.encode('{"a": 12, "b": "x"}')
    grammar = grammars.compiled(StructuredOutputsParams(json=SCHEMA))
    together = masks([MaskRow(grammar.matcher(), tokens[:3], tokens[3:8], 1, EOS)], 8)
    assert (together[0] == 0xFFFFFFFF).all()  # no row's sample
    assert (together[7] == 0xFFFFFFFF).all()
    for i in range(6):
        alone = masks([MaskRow(grammar.matcher(), tokens[: 3 + i], [], 0, EOS)], 1)
        np.testing.assert_array_equal(together[1 + i], alone[0])


def test_only_allowed_drafts_count(grammars):
    tokens = grammars.tokenizer.encode('{"a": 1')
    matcher = grammars.compiled(StructuredOutputsParams(json=SCHEMA)).matcher()
    wrong = grammars.tokenizer.encode("}")
    assert matcher.allowed([], tokens) == len(tokens)
    assert matcher.allowed([], [*tokens[:4], *wrong, *tokens[4:]]) == 4
    assert matcher.error is None


def test_forced_tokens_are_the_text_that_must_come(grammars):
    matcher = grammars.compiled(StructuredOutputsParams(regex="one and only text[0-9]")).matcher()
    forced = matcher.forced([], 99)
    assert (
        grammars.tokenizer.decode(forced)
        == "one and only text"[: len(grammars.tokenizer.decode(forced))]
    )
    assert len(forced) > 3
    assert matcher.forced([], 2) == forced[:2]


def test_a_failed_matcher_allows_everything_but_the_end(grammars):
    """Its sequence is cancelled after the step, and must not end before as if its form was
    complete.
    """
    matcher = grammars.compiled(StructuredOutputsParams(regex="abc")).matcher()
    (mask,) = masks([MaskRow(matcher, grammars.tokenizer.encode("x"), [], 0, EOS)], 1)
    assert matcher.error is not None
    assert "doesn't satisfy the grammar" in matcher.error
    assert sorted({*range(grammars.vocab_size)} - {*bits(mask, grammars.vocab_size).tolist()}) == [
        0,
        2,
    ]
    assert matcher.forced([], 5) == []
    assert matcher.allowed([], [5]) == 0


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "wrong form\n  error: no such rule\n<state>many lines</state>",
            "wrong form error: no such rule",
        ),
        ("error: no such rule\nerror: and another", "error: no such rule"),
        ("<non-verbose/>\ntoo large\n", "too large"),
        ("<state>nothing else</state>", ""),
    ],
)
def test_the_reason_is_one_line_of_the_library_s_message(message, line):
    assert first_line(message) == line
