"""Drafters alone: prompt lookup against its definition and transformers, the tree of suffixes
against a count.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.engine import drafters
from pagedjax.engine.drafters import ngram, suffix
from pagedjax.options.config import Speculative

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def looked_up(tokens: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """Prompt lookup by its definition."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if n < len(tokens) and tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


@given(texts, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_prompt_lookup_is_its_definition(tokens, k, longest, shortest):
    shortest = min(shortest, longest)
    drafts = ngram.drafter(longest, shortest).propose(None, "a", np.array(tokens, np.int32), k)
    assert list(drafts) == looked_up(tokens, k, longest, shortest)


def test_a_match_inside_the_bytes_of_a_token_is_none():
    """The bytes of 1, 256 contain those of 65536 at an odd place."""
    tokens = np.array([0x01000000, 0x00000001, 5, 0x00000100], np.int32)
    assert list(ngram.drafter(3, 1).propose(None, "a", tokens, 4)) == []


@pytest.mark.oracle
def test_prompt_lookup_proposes_what_transformers_does():
    torch = pytest.importorskip("torch")
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    draw = random.Random(0)
    matches = 0
    for _ in range(2000):
        tokens = [draw.randrange(4) for _ in range(draw.randint(1, 60))]
        k, longest = draw.randint(1, 8), draw.randint(1, 4)
        theirs = PromptLookupCandidateGenerator(
            num_output_tokens=k, max_matching_ngram_size=longest, max_length=len(tokens) + 100
        )
        expected = theirs.get_candidates(torch.tensor([tokens]))[0][0].tolist()[len(tokens) :]
        drafts = ngram.drafter(longest, 1).propose(None, "a", np.array(tokens, np.int32), k)
        assert list(drafts) == expected
        matches += bool(expected)
    assert matches > 1000


@given(texts, st.integers(1, 6))
def test_the_longest_suffix_of_a_sequence_is_found_in_it(tokens, k):
    length, drafts = suffix.repeated_suffix(np.array(tokens, np.int32), k)
    fits = [n for n in range(1, len(tokens)) if looked_up(tokens, k, n, n)]
    assert length == max(fits, default=0)
    assert list(drafts) == (looked_up(tokens, k, length, length) if length else [])


def runs(outputs: list[list[int]]) -> Counter[tuple[int, ...]]:
    """How often each run of up to DEPTH tokens occurs."""
    return Counter(
        tuple(output[start:stop])
        for output in outputs
        for start in range(len(output))
        for stop in range(start + 1, min(start + suffix.DEPTH, len(output)) + 1)
    )


def counted(node: suffix.Node, before: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    counts = {before: node.count} if before else {}
    for token, child in node.children.items():
        counts |= counted(child, (*before, token))
    return counts


@given(st.lists(texts, max_size=6), st.integers(1, 400))
def test_the_tree_counts_every_run_of_the_outputs_it_keeps(outputs, limit):
    tree = suffix.Outputs(limit)
    for output in outputs:
        tree.add(output)
    remembered = list(tree._outputs)
    assert remembered == outputs[len(outputs) - len(remembered) :]
    expected = runs(remembered)
    assert counted(tree.root) == dict(expected)
    assert tree.nodes == len(expected) <= max(limit, 0)


def test_the_tree_continues_with_the_token_that_was_seen_most_often():
    tree = suffix.Outputs()
    for output in ([1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 5, 6]):
        tree.add(output)
    assert list(suffix.propose(tree, "a", np.array([7, 2, 3], np.int32), 4)) == [5, 6]
    # both were seen once: the first
    assert list(suffix.propose(tree, "a", np.array([1, 2, 3], np.int32), 1)) == [4]
    assert list(suffix.propose(tree, "a", np.array([8], np.int32), 4)) == []
    assert list(suffix.propose(tree, "a", np.array([3, 7, 2, 3], np.int32), 2)) == [5, 6], (
        "the longer match wins"
    )


def test_the_end_of_a_long_output_is_remembered():
    drafter = suffix.drafter()
    tree = suffix.Outputs()
    drafter.finished(tree, "a", np.arange(3000, dtype=np.int32))
    assert tree._outputs[0] == list(range(3000 - suffix.LEARNED_TOKENS, 3000))


def test_unlikely_continuations_are_not_drafted():
    tree = suffix.Outputs()
    for last in range(40):
        tree.add([1, 2, 100 + last])
    assert list(suffix.propose(tree, "a", np.array([1], np.int32), 4)) == [2]


def test_the_methods_are_found_by_name():
    assert drafters.find(Speculative()).name == "ngram"
    assert drafters.find(Speculative(method="suffix")).name == "suffix"
