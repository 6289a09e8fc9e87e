"""Each rule of admission, budget and preemption by example. test_scheduler_machine.py checks them
in any order.
"""

from __future__ import annotations

import pytest

from pagedjax.host import blocks, scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import Rejected, SchedulerConfig
from pagedjax.host.types import Admitted, Event, Finished, Preempted, Sampled
from tests.host.scheduler_steps import (
    EOS,
    WORD,
    crowded,
    names,
    request,
    rows,
    start,
    step,
    until_end,
)

SHORTEST = FCFS._replace(
    name="shortest",
    order=lambda waiting, running, cached: sorted(waiting, key=lambda seq: seq.length),
)

# --- submit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", 0), "request 'a' has an empty prompt; give it at least one token"),
        (
            request("a", 1, -1),
            "request 'a' has max_tokens -1; it must be at least 1, or 0 to sample nothing",
        ),
        (
            request("a", 1, 0)._replace(forks=("c",)),
            "request 'a' has max_tokens 0 and branches; it must be at least 1",
        ),
        (
            request("a", 65, 0),
            "has a prompt of 65 tokens, but max_model_len is 64; shorten the prompt to 64 tokens",
        ),
        (
            request("a", 64),
            "request 'a' has a prompt of 64 tokens, but max_model_len is 64 .*shorten the prompt to 63",
        ),
        (request("a", 99), "request 'a' has a prompt of 99 tokens, but max_model_len is 64"),
        (
            request("a", 12, 10),
            "can grow to 22 tokens, which is 6 blocks of 4, but the pool has 5; raise num_blocks to 6",
        ),
        (request("b", 1), "request id 'b' is in use; ids must be unique among unfinished requests"),
    ],
)
def test_a_request_that_can_never_run_is_rejected_with_the_remedy(bad, message):
    state = start(request("b", 1), num_blocks=5)
    with pytest.raises(Rejected, match=message):
        scheduler.submit(state, bad)
    assert names(state.waiting) == ["b"]


def test_a_rejection_is_a_value_error():
    assert issubclass(Rejected, ValueError)


def test_a_request_that_exactly_fits_is_accepted():
    state = start(request("a", 12, 8), num_blocks=5)  # 20 tokens, 5 blocks of 4
    assert until_end(state)[-1] == Finished(7, "a", "length", 8)


def test_an_id_is_rejected_while_it_is_in_use():
    state, *_ = step(start(request("a", 3, 2)))
    with pytest.raises(Rejected, match="in use"):
        scheduler.submit(state, request("a", 1))
    state, *_ = step(state)
    assert names(scheduler.submit(state, request("a", 1)).waiting) == ["a"]


@pytest.mark.parametrize("name", SchedulerConfig._fields[:6])
def test_sizes_below_the_least_are_refused(name):
    smallest = 0 if name == "host_blocks" else 1
    with pytest.raises(
        ValueError, match=f"{name} is {smallest - 1}; it must be at least {smallest}"
    ):
        scheduler.init(SchedulerConfig(1, 1, 1, 1, 1)._replace(**{name: smallest - 1}))


@pytest.mark.parametrize("name", ["chunked_prefill", "mixed_steps"])
@pytest.mark.parametrize("value", [0, 1, None, "no"])
def test_a_switch_must_be_a_boolean(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is {value!r}; it must be True or False$"):
        scheduler.init(SchedulerConfig(1, 1, 1, 1, 1)._replace(**{name: value}))


@pytest.mark.parametrize("value", ["pow3", "", None, False])
def test_an_unknown_reservation_is_refused(value):
    with pytest.raises(
        ValueError,
        match=rf"^reservation is {value!r}; it must be one of 'none', 'oracle', 'pow2', 'm",
    ):
        scheduler.init(SchedulerConfig(1, 1, 1, 1, 1, reservation=value))


def test_submit_does_not_change_the_old_state():
    old = start(request("a", 3))
    scheduler.submit(old, request("b", 3))
    assert names(old.waiting) == ["a"]


# --- budget and order -----------------------------------------------------------------------------


def test_a_step_with_nothing_to_do_is_an_empty_plan():
    _state, plan, events = step(start())
    assert (plan.seqs, plan.counts, plan.num_tokens, events) == ((), (), 0, ())


def test_whole_prompts_are_admitted_together_in_order_of_arrival():
    _state, plan, events = step(start(request("a", 5), request("b", 3), request("c", 9)))
    assert rows(plan) == [("a", 0, 5), ("b", 0, 3), ("c", 0, 9)]
    assert events == (
        *(Admitted(0, n, k, 0) for n, k in (("a", 5), ("b", 3), ("c", 9))),
        Sampled(0, ("a", "b", "c"), (WORD,) * 3),
    )
    assert (plan.blocks_used, plan.num_blocks, plan.num_waiting) == (2 + 1 + 3, 64, 0)


def test_decodes_come_before_prompt_chunks_which_share_the_rest():
    state, *_ = step(start(request("a", 2), request("b", 2), budget=6))
    for name, length in (("c", 7), ("d", 3)):
        state = scheduler.submit(state, request(name, length))
    state, plan, _ = step(state)
    assert rows(plan) == [("a", 2, 1), ("b", 2, 1), ("c", 0, 4)]
    state, plan, _ = step(state)
    assert rows(plan) == [("a", 3, 1), ("b", 3, 1), ("c", 4, 3), ("d", 0, 1)]
    state, plan, events = step(state)
    assert rows(plan) == [("a", 4, 1), ("b", 4, 1), ("c", 7, 1), ("d", 1, 2)]
    assert events == (Sampled(4 - 1, ("a", "b", "c", "d"), (WORD,) * 4),)


def test_a_budget_of_one_computes_one_token_a_step():
    state = start(request("a", 3, 2), request("b", 2, 1), budget=1)
    plans = []
    while state.waiting or state.running.seqs:
        state, plan, _ = step(state)
        plans += rows(plan)
    assert plans == [("a", 0, 1), ("a", 1, 1), ("a", 2, 1), ("a", 3, 1), ("b", 0, 1), ("b", 1, 1)]


def test_a_chunk_that_does_not_reach_the_end_samples_nothing():
    state, plan, events = step(start(request("a", 5), budget=4), EOS)
    assert [row.samples for row in plan.rows] == [False]
    assert events == (Admitted(0, "a", 5, 0),)
    assert scheduler.running(state)[0].num_output == 0


def test_no_more_sequences_run_than_the_budget_has_tokens():
    state, plan, _ = step(start(*(request(name, 1) for name in "abcde"), budget=3, seqs=5))
    assert names(plan.seqs) == ["a", "b", "c"]
    for _ in range(4):
        state, plan, _ = step(state)
        assert names(plan.seqs) == ["a", "b", "c"]


def test_no_more_sequences_run_than_max_num_seqs():
    _state, plan, _ = step(start(*(request(name, 1) for name in "abc"), seqs=2))
    assert (names(plan.seqs), plan.num_waiting) == (["a", "b"], 1)


def test_a_free_row_is_used_in_the_next_step():
    state, *_ = step(start(request("a", 1, 1), request("b", 1), seqs=1))
    assert step(state)[1].admitted == ("b",)


def test_a_request_is_admitted_only_when_blocks_for_its_whole_prompt_are_free():
    state = start(
        request("a", 9, 3), request("b", 9, 3), request("c", 1, 1), num_blocks=5, budget=4
    )
    for _ in range(3):
        state, plan, _ = step(state)
        # b needs 3 blocks and 2 are free; c would fit but does not overtake
        assert names(plan.seqs) == ["a"]
    assert names(state.waiting) == ["b", "c"]


# --- preemption -----------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_and_the_other_decodes_continue():
    _state, plan, events = step(crowded())
    assert plan.preempted == ("c", "b")
    assert rows(plan) == [("a", 4, 1)]
    assert events[:2] == (Preempted(1, "c", False), Preempted(1, "b", False))


def test_preempted_requests_return_to_the_front_of_the_queue_in_order_of_arrival():
    state, plan, _ = step(crowded())
    assert names(state.waiting) == ["b", "c", "d"]
    assert plan.num_waiting == 3


def test_nothing_is_admitted_in_a_step_that_preempted():
    """First come first served never could: the victim is next and needs more than it gave. Other
    orders could.
    """
    state, plan = scheduler.schedule(crowded(), SHORTEST)
    assert plan.preempted == ("c", "b")
    assert plan.admitted == ()
    assert state.pool.num_free == 1  # d would have fitted
    state, _ = scheduler.commit(state, plan, [WORD])
    assert scheduler.schedule(state, SHORTEST)[1].admitted == ("d",)


def test_a_preempted_request_recomputes_prompt_and_outputs_and_continues():
    state = start(request("a", 3, 6), request("b", 3, 6), num_blocks=3)
    state, *_ = step(state, 10, 20)
    # a and b: 5 tokens known, 4 computed, one block each, one is free
    state, *_ = step(state, 11, 21)
    state, plan, _ = step(state, 12)
    assert (plan.preempted, rows(plan)) == (("b",), [("a", 4, 1)])
    assert (state.waiting[0].length, state.waiting[0].computed, state.waiting[0].blocks) == (
        5,
        0,
        (),
    )
    events: list[Event] = []
    while not any(isinstance(event, Finished) for event in events):
        state, plan, events = step(state)  # type: ignore[assignment]
    state, plan, events = step(state, 22)  # type: ignore[assignment]
    assert (plan.admitted, rows(plan)) == (("b",), [("b", 0, 5)])
    assert Sampled(plan.step, ("b",), (22,)) in events
    assert until_end(state)[-1] == Finished(plan.step + 3, "b", "length", 6)


def test_blocks_of_a_preempted_request_are_free_for_the_others_in_the_same_step():
    state, plan = scheduler.schedule(crowded(), FCFS)
    assert len(plan.seqs[0].blocks) == 2
    assert plan.blocks_used == 2
    blocks.check(state.pool, [plan.seqs[0].blocks])


def test_a_decode_takes_a_block_only_when_its_last_one_is_full():
    state, plan, _ = step(start(request("a", 3)))
    tables = []
    for _ in range(6):
        state, plan, _ = step(state)
        tables.append(len(plan.seqs[0].blocks))
    assert tables == [1, 2, 2, 2, 2, 3]  # computing tokens 3, 4 ... 8 in blocks of 4


# --- policies -------------------------------------------------------------------------------------


def test_a_policy_decides_the_order_of_admission():
    plan = scheduler.schedule(
        start(request("a", 5), request("b", 3), request("c", 4), seqs=2), SHORTEST
    )[1]
    assert plan.admitted == ("b", "c")


def test_a_policy_that_refuses_a_request_ends_admission_for_the_step():
    offers = []
    picky = FCFS._replace(
        admit=lambda seq, need, free: offers.append((seq.request_id, need, free)) or len(offers) < 2
    )
    state, plan = scheduler.schedule(
        start(*(request(name, 5) for name in "abc"), num_blocks=9), picky
    )
    assert (plan.admitted, offers) == (("a",), [("a", 2, 9), ("b", 2, 7)])
    assert names(state.waiting) == ["b", "c"]
    assert state.pool.num_free == 7


def test_a_policy_chooses_the_victim():
    oldest = FCFS._replace(preempt=lambda running: min(running, key=lambda seq: seq.arrival))
    plan = scheduler.schedule(crowded(), oldest)[1]
    assert (plan.preempted, names(plan.seqs)) == (("a", "b"), ["c"])
