"""Baseline modes of a step, by example: whole prompts, unmixed steps, static batches."""

from __future__ import annotations

import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.host import scheduler
from pagedjax.host.policies import STATIC
from pagedjax.host.scheduler import Rejected, SchedulerState
from pagedjax.host.types import Finished, Request
from tests.host.scheduler_steps import names, request, rows, start, step, until_end

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


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (
            {},
            [
                [("a", 0, 2), ("b", 0, 4), ("c", 0, 3)],
                [("a", 2, 1), ("b", 4, 1), ("c", 3, 4)],
                [("a", 3, 1), ("c", 7, 1)],
            ],
        ),
        (
            ORCA,  # 3 tokens are left beside a and b, and then 7
            [
                [("a", 0, 2), ("b", 0, 4)],
                [("a", 2, 1), ("b", 4, 1), ("c", 0, 7)],
                [("a", 3, 1), ("c", 7, 1)],
            ],
        ),
        (
            PROMPTS_FIRST,
            [
                [("a", 0, 2), ("b", 0, 4)],
                [("c", 0, 7)],
                [("c", 7, 1), ("a", 2, 1), ("b", 4, 1)],
                [("a", 3, 1)],
            ],
        ),
        (
            ALTERNATING,
            [
                [("a", 0, 2), ("b", 0, 4), ("c", 0, 3)],
                [("a", 2, 1), ("b", 4, 1)],
                [("c", 3, 4)],
                [("c", 7, 1), ("a", 3, 1)],
            ],
        ),
    ],
    ids=["usual", "orca", "prompts first", "alternating"],
)
def test_the_steps_of_three_requests_in_each_mode(way, expected):
    state = start(
        request("a", 2, 3), request("b", 4, 2), request("c", 7, 2), budget=9, model_len=9, **way
    )
    assert steps(state) == expected


# --- whole prompts --------------------------------------------------------------------------------


def test_a_whole_prompt_that_does_not_fit_waits_and_is_not_overtaken():
    state = start(request("a", 2, 3), request("b", 8, 1), request("c", 1, 1), budget=9, **ORCA)
    assert steps(state) == [[("a", 0, 2)], [("a", 2, 1), ("b", 0, 8)], [("a", 3, 1), ("c", 0, 1)]]


def test_a_preempted_sequence_is_recomputed_whole_in_one_step():
    state = start(
        request("a", 4, 8), request("b", 4, 8), num_blocks=3, budget=12, model_len=12, **ORCA
    )
    assert steps(state) == [
        [("a", 0, 4), ("b", 0, 4)],
        *([("a", i, 1)] for i in range(4, 11)),  # b gave its block to a
        [("b", 0, 5)],
        *([("b", i, 1)] for i in range(5, 11)),
    ]


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


def test_cached_prompt_tokens_need_no_budget():
    """Eight of its ten tokens are in the cache."""
    first, second = (Request(name, 10, 2, hashes=("x", "xy")) for name in "ab")
    state, *_ = step(start(first, budget=12, model_len=12, **ORCA))
    state, plan, _ = step(scheduler.submit(scheduler.submit(state, request("c", 9, 1)), second))
    assert rows(plan) == [("a", 10, 1), ("c", 0, 9), ("b", 8, 2)]


# --- unmixed steps --------------------------------------------------------------------------------


def test_decodes_wait_while_whole_prompts_arrive():
    state, *_ = step(start(request("a", 3, 3), seqs=2, **PROMPTS_FIRST))
    for i in range(5):
        state, plan, _ = step(scheduler.submit(state, request(str(i), 3, 1)))
        assert rows(plan) == [(str(i), 0, 3)]
    assert steps(state) == [[("a", 3, 1)], [("a", 4, 1)]]


def test_alternating_steps_defer_a_prompt_that_arrives_before_a_decode_step():
    state, *_ = step(start(request("a", 3, 4), **ALTERNATING))
    state = scheduler.submit(state, request("b", 2, 2))
    assert steps(state) == [[("a", 3, 1)], [("b", 0, 2)], [("b", 2, 1), ("a", 4, 1)], [("a", 5, 1)]]


def test_a_step_kind_without_work_is_replaced_by_the_other():
    assert steps(start(request("a", 10, 2), budget=4, **ALTERNATING)) == [
        [("a", 0, 4)],
        [("a", 4, 4)],  # the second step is for decodes, but there is none
        [("a", 8, 2)],
        [("a", 10, 1)],
    ]
    assert steps(start(request("a", 1, 4), **ALTERNATING)) == [[("a", i, 1)] for i in range(4)]


def test_chunks_keep_their_order_across_decode_steps():
    state = start(
        request("a", 2, 4),
        request("b", 9, 1),
        request("c", 3, 1),
        budget=4,
        model_len=12,
        **ALTERNATING,
    )
    assert steps(state) == [
        [("a", 0, 2), ("b", 0, 2)],
        [("a", 2, 1)],
        [("b", 2, 4)],
        [("a", 3, 1)],
        [("b", 6, 3), ("c", 0, 1)],
        [("a", 4, 1)],
        [("c", 1, 2)],
    ]


def test_a_deferred_decode_owns_the_block_of_its_next_token():
    """Sequences admitted before it cannot take that block."""
    state, *_ = step(start(request("a", 4, 4), num_blocks=3, **PROMPTS_FIRST))
    state, plan, _ = step(scheduler.submit(state, request("b", 8, 1)))
    # b needs two, and one is left
    assert (rows(plan), plan.blocks_used, plan.preempted) == ([("a", 4, 1)], 2, ())
    state, *_ = step(start(request("a", 4, 4), num_blocks=4, **PROMPTS_FIRST))
    state, plan, _ = step(scheduler.submit(state, request("b", 8, 1)))
    assert (rows(plan), plan.blocks_used) == ([("b", 0, 8)], 4)


@pytest.mark.parametrize("way", [PROMPTS_FIRST, ALTERNATING], ids=["prompts first", "alternating"])
def test_nothing_is_admitted_in_a_step_that_preempted(way):
    state, *_ = step(start(*(request(name, 4) for name in "abc"), num_blocks=3, **way))
    state, plan, _ = step(scheduler.submit(state, request("d", 1)))
    assert (plan.preempted, rows(plan)) == (("c", "b"), [("a", 4, 1)])
    assert names(state.waiting) == ["b", "c", "d"]


def test_a_deferred_branch_already_owns_its_copy():
    """The copy is made at once, so no block with two writers exists after the step that follows the
    fork.
    """
    state, *_ = step(start(request("a", 6, 3)._replace(forks=("b",)), **PROMPTS_FIRST))
    state, plan, _ = step(scheduler.submit(state, request("c", 2, 1)))
    assert (rows(plan), plan.copies) == ([("c", 0, 2)], ((2, 3),))
    assert [seq.blocks for seq in scheduler.running(state)] == [(1, 3), (1, 2)]
    state, plan, _ = step(state)
    assert (rows(plan), plan.copies) == ([("a", 6, 1), ("b", 5, 1)], ())


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
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


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
    outputs, expected = (
        engine.generate(PROMPTS, GREEDY, use_tqdm=False) for engine in (llm, tiny_llm)
    )
    assert [out.outputs for out in outputs] == [out.outputs for out in expected]
