"""Baseline modes of a step, by example: whole prompts, unmixed steps, static batches."""

from __future__ import annotations

import pytest

from pagedjax import LLM
from pagedjax.host import scheduler
from pagedjax.host.policies import STATIC
from pagedjax.host.scheduler import Rejected, SchedulerState
from pagedjax.host.types import Finished, Request
from tests.engine.runs import greedy
from tests.host.scheduler_steps import request, rows, start, step, until_end

ORCA = {"chunked_prefill": False}  # whole prompts join the decodes
PROMPTS_FIRST = {"chunked_prefill": False, "mixed_steps": False}  # vLLM before chunks
ALTERNATING = {"mixed_steps": False}


def steps(state: SchedulerState, **options) -> list[list[tuple[str, int, int]]]:
    """Returns the rows of every step to the end."""
    step_rows = []
    while state.waiting or state.running.seqs:
        state, plan, _ = step(state, **options)
        step_rows.append(rows(plan))
        assert len(step_rows) < 100, "does not end"
    return step_rows


# --- whole prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [ORCA, PROMPTS_FIRST], ids=["orca", "prompts first"])
def test_a_request_longer_than_the_budget_is_refused_without_chunks(way):
    state = start(budget=16, model_len=40, **way)
    with pytest.raises(
        Rejected,
        match=r"^request 'a' can grow to 17 tokens, which have to fit into one step without chunked_prefill, but "
        r"max_num_batched_tokens is 16; raise it, or lower max_tokens$",
    ):
        scheduler.submit(state, request("a", 9, 8))
    assert until_end(scheduler.submit(state, request("a", 8, 8)))[-1] == Finished(
        7, "a", "length", 8
    )
    beams = Request("b", 4, 2, forks=("b2", "b3"), beams=True)
    with pytest.raises(
        Rejected,
        match=r"'b' can grow to 6 tokens in each of 3 beams, which have to fit into one step",
    ):
        scheduler.submit(state, beams)
    assert scheduler.submit(state, beams._replace(forks=("b2",))).waiting
    # each of these can enter alone
    assert scheduler.submit(state, beams._replace(beams=False)).waiting


# --- static batches -------------------------------------------------------------------------------


def test_static_admits_the_next_batch_when_the_last_has_ended():
    state = start(
        request("a", 1, 1), request("b", 2, 3), request("c", 1, 2), request("d", 1, 1), seqs=2
    )
    assert steps(state, policy=STATIC) == [
        [("a", 0, 1), ("b", 0, 2)],
        [("b", 2, 1)],
        [("b", 3, 1)],
        [("c", 0, 1), ("d", 0, 1)],
        [("c", 1, 1)],
    ]


def test_a_preempted_member_of_a_static_batch_is_first_in_the_next_batch():
    state = start(*(request(name, 4, 3) for name in "abc"), request("d", 1, 1), num_blocks=3)
    admitted = []
    while state.waiting or state.running.seqs:
        state, plan, _ = step(state, policy=STATIC)
        admitted.append(plan.admitted)
    assert admitted == [("a", "b", "c"), (), (), ("b",), (), ("c", "d"), ()]


# --- the engine -----------------------------------------------------------------------------------

PROMPTS = [[3 + i, 50 + i, 7] * (i + 1) for i in range(10)]
GREEDY = greedy(9)


@pytest.mark.parametrize(
    "way",
    [
        PROMPTS_FIRST,
        {**ALTERNATING, "reservation": "pow2", "enable_prefix_caching": False, "policy": "static"},
    ],
    ids=["prompts first", "alternating, reserved, static"],
)
def test_no_mode_changes_a_token(tiny, tiny_llm, way):
    sizes = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (8, 64),
        "num_blocks": 256,
    }
    llm = LLM(tiny, progress=False, **sizes, **way)
    outputs, expected = (engine.generate(PROMPTS, GREEDY) for engine in (llm, tiny_llm))
    assert [out.outputs for out in outputs] == [out.outputs for out in expected]
