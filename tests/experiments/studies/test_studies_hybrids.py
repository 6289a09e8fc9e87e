"""Study 030: the texts of a trace, the rule of thumb against brute force, and its run on a small
trace.
"""

from __future__ import annotations

import importlib
import json
import math

import numpy as np
import pytest
from hypothesis import strategies as st

from experiments import reproduce
from experiments.simulation.checkpoint_replay import CacheSizes, CheckpointCache, Content, Text
from experiments.studies.findings import NoTraces
from pagedjax.host.types import EMPTY_PLAN, StepResult
from pagedjax.options.config import PrefixCheckpoints
from tests import drawn

hybrids = importlib.import_module("experiments.studies.030_hybrid_prefixes.study")
measured = importlib.import_module("experiments.studies.030_hybrid_prefixes.measured")
BLOCK_SIZE = hybrids.BLOCK_SIZE
CONVERSATIONS = 4
TURNS = 3


def lines() -> list[str]:
    """Conversations in turn, behind one system prompt. Each turn adds a block and an answer."""
    rows = []
    for turn in range(TURNS):
        for number in range(CONVERSATIONS):
            tokens = 1100 + 600 * turn
            ids = [0, *range(100 * number + 1, 100 * number + 1 + (tokens - 1) // 512)]
            ids[-1] += 50 + turn  # the last block is not whole, and becomes another one
            rows.append(
                {
                    "timestamp": 1000 * len(rows),
                    "input_length": tokens,
                    "output_length": 40,
                    "hash_ids": ids,
                }
            )
    return [json.dumps(row) for row in rows]


@pytest.fixture
def traces(tmp_path):
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(lines()), encoding="utf-8")
    return tmp_path


def test_texts_have_the_answers_of_earlier_turns(traces):
    texts = hybrids.texts_of(hybrids.recorded(traces, None))
    assert [text.prompt for text in texts[::CONVERSATIONS]] == [1100, 1700, 2300]
    first, second, third = texts[::CONVERSATIONS]
    assert len(first.keys) == (1100 + 39) // BLOCK_SIZE
    for earlier, later in ((first, second), (second, third)):
        # a turn begins with the whole text before it, of which the last token is not computed
        assert later.keys[: len(earlier.keys)] == earlier.keys
    other = texts[1]
    common = [a == b for a, b in zip(first.keys, other.keys, strict=True)]
    assert common == [True] * (512 // BLOCK_SIZE) + [False] * (len(common) - 512 // BLOCK_SIZE)


def test_states_at_ends_of_texts_find_conversations_and_junctions_the_system_prompt(traces):
    texts = hybrids.texts_of(hybrids.recorded(traces, None))
    ends = [0, *[(1100 + 600 * turn + 39) // BLOCK_SIZE * BLOCK_SIZE for turn in range(TURNS)]]
    of_texts = [ends[turn] for turn in range(TURNS) for _ in range(CONVERSATIONS)]
    roomy = 100_000
    hits = hybrids.replay(texts, roomy, 3, PrefixCheckpoints(texts=True))
    assert hits.hit_tokens.tolist() == of_texts
    hits = hybrids.replay(texts, roomy, 3, PrefixCheckpoints(texts=True, junctions=True))
    # the second conversation comes to the end of the system prompt, and the third finds its state
    assert hits.hit_tokens.tolist() == [0, 0, 512, 512, *of_texts[CONVERSATIONS:]]
    assert hybrids.replay(texts, 1024, 3, None) is None, "a text does not fit"


# --- the rule of thumb ----------------------------------------------------------------------------


@drawn.given(
    20,
    200,
    rho=st.floats(1, 3e4),
    slope=st.floats(0.01, 0.5),
    share=st.floats(0.05, 1),
    mean=st.floats(500, 3e4),
)
def test_the_best_interval_is_where_the_rate_is_highest(rho, slope, share, mean):
    def rate(length):
        return -slope * np.log(1 + rho / length) - share * length / 2 / mean

    best = hybrids.best_interval(rho, slope, share, mean)
    lengths = best * np.geomspace(0.01, 100, 4001)
    assert rate(lengths).max() <= rate(best) + 1e-9
    assert best <= 2 * slope * mean / share * (1 + 1e-9), "for a large rho"
    assert best <= math.sqrt(2 * slope * rho * mean / share) * (1 + 1e-9), "for a small rho"


def test_a_prediction_is_that_of_attention_alone_in_less_room():
    sizes = hybrids.Sizes(token_bytes=1024, layers=8, attention=2, states=10)
    assert (sizes.rho, sizes.widening) == (640, 4)
    assert sizes.reserve == 32 * 640
    tokens = 200_000
    room = (tokens - 32 * 640) / (1 + 640 / 256)
    texts = [Text(range(3), 250, 1), Text(range(3), 250, 1)]
    curve = hybrids.Curve(texts, (10_000, 90_000))
    assert curve.rate(20_000) == 192 / 500
    assert curve.rate(9_999) is None
    assert curve.rate(20_000, 128) == 128 / 500
    curve.hits[90_000] = np.array([192, 192])
    part = math.log(room / 10_000) / math.log(9)
    assert hybrids.predicted(curve, sizes, tokens, 64) == pytest.approx(
        curve.rate((tokens - sizes.reserve) / 11)
    )
    assert curve.rate(room) == pytest.approx(192 / 500 * (1 + part))
    assert hybrids.predicted(curve, sizes, tokens, 256) == 0.0, "all lies behind a checkpoint"
    assert hybrids.predicted(curve, sizes, 20_000, 256) is None, "the states of a chunk fill it"


def test_the_reserve_is_what_a_chunk_takes():
    """A pool with room for a prompt and the states of a chunk, less one block, cuts the chunk: and
    what was cached before is evicted for states that are given back at once.
    """
    states = 4
    sizes = CacheSizes(BLOCK_SIZE, 40 + 8 * states, states, 8 * BLOCK_SIZE)
    cache = CheckpointCache(sizes, PrefixCheckpoints(texts=True))
    cache.serve(Text(range(8), 8 * BLOCK_SIZE, 1))
    assert cache.content == Content(attention=8, states=states)
    # 24 blocks of keys and values, and the states of two chunks at most: what was there stays
    cache.serve(Text(range(100, 124), 24 * BLOCK_SIZE, 1))
    assert cache.content.attention == 32
    assert cache.content.states == 2 * states
    # eight more take the room of the reserve
    cache.serve(Text(range(200, 208), 8 * BLOCK_SIZE, 1))
    assert cache.content.attention < 40


# --- preemptions and measurements -----------------------------------------------------------------


def result_of(end: float, **fields) -> StepResult:
    return StepResult(EMPTY_PLAN._replace(**fields), (), 0.0, end, 0.0, 1, 0)


def test_tokens_that_are_computed_again_are_those_of_sequences_that_come_back():
    results = [
        result_of(1.0, admitted=("a", "b"), known=(10, 20), cached=(0, 8)),
        result_of(2.0, preempted=("b",)),
        result_of(3.0, admitted=("b",), known=(26,), cached=(16,)),
        result_of(4.0, preempted=("a",)),
        result_of(5.0, admitted=("a",), known=(31,), cached=(30,)),
    ]
    assert hybrids.preempted(results) == hybrids.Preempted(2, 25 - 16, 5.0)


def test_small_requests_are_the_conversations_at_a_smaller_scale(traces):
    small = measured.small_requests(hybrids.recorded(traces, None), 2)
    assert len(small) == 2 * TURNS
    assert {item.turn for item in small} == {0, 1, 2}
    first, second = small[0], small[2]
    assert len(first.prompt_token_ids) == -(-1100 // measured.SCALE)
    assert second.follows == first.request_id
    assert second.history == len(first.prompt_token_ids) + measured.OUTPUT
    block = measured.SMALL_BLOCK
    assert first.prompt_token_ids[:block] == small[1].prompt_token_ids[:block], "a system prompt"
    assert first.prompt_token_ids[block:] != small[1].prompt_token_ids[block:]


def test_without_the_trace_nothing_runs(tmp_path):
    with pytest.raises(NoTraces, match=r"there is no \*conversation\*.jsonl"):
        hybrids.run(reproduce.STUDIES / "030_hybrid_prefixes", True, tmp_path)


@pytest.mark.slow
def test_the_study_on_a_small_trace(traces):
    findings = hybrids.run(reproduce.STUDIES / "030_hybrid_prefixes", True, traces)
    assert len(findings.tables) == 7
    assert "are those of the simulation in 4 of 4 runs" in " ".join(findings.answer)
    (claim,) = findings.claims
    assert claim.ours.low > 0
