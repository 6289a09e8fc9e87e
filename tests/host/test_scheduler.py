"""Rules of admission, budget, preemption and ends by example. test_scheduler_machine.py checks all of
them in any order.
"""

from __future__ import annotations

import pytest

from pagedjax.host import scheduler
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


# --- budget and order -----------------------------------------------------------------------------


def test_whole_prompts_are_admitted_together_in_order_of_arrival():
    _state, plan, events = step(start(request("a", 5), request("b", 3), request("c", 9)))
    assert rows(plan) == [("a", 0, 5), ("b", 0, 3), ("c", 0, 9)]
    assert events == (
        *(Admitted(0, n, k, 0) for n, k in (("a", 5), ("b", 3), ("c", 9))),
        Sampled(0, ("a", "b", "c"), (WORD,) * 3),
    )
    assert (plan.blocks_used, plan.num_blocks, plan.num_waiting) == (2 + 1 + 3, 64, 0)


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


# --- the end of a request -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "tokens", "reason"),
    [
        (8, 0, [WORD, EOS], "stop"),
        (2, 0, [WORD, WORD], "length"),
        (2, 0, [WORD, EOS], "stop"),
        (50, 0, [WORD] * 7, "length"),  # max_model_len is 10
        (1, 0, [WORD], "length"),
        (8, 4, [WORD, WORD, EOS, EOS], "stop"),
    ],
)
def test_a_request_ends_with_a_stop_token_or_at_its_limit(max_tokens, min_tokens, tokens, reason):
    state = start(request("a", 3, max_tokens, min_tokens), model_len=10)
    events: tuple[Event, ...] = ()
    for token in tokens:
        assert state.running.seqs or state.waiting
        state, _, events = step(state, token)
    assert events[-1] == Finished(len(tokens) - 1, "a", reason, len(tokens))
    assert state.pool.num_free == state.config.num_blocks


# --- commit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [[], [WORD], [WORD] * 3])
def test_a_wrong_number_of_sampled_tokens_is_an_error(sampled):
    state, plan = scheduler.schedule(start(request("a", 1), request("b", 1)), FCFS)
    with pytest.raises(ValueError, match=f"{len(sampled)} sampled tokens for 2 rows"):
        scheduler.commit(state, plan, sampled)


# --- cancel ---------------------------------------------------------------------------------------


def test_an_id_submitted_again_between_schedule_and_commit_is_another_request():
    state, plan = scheduler.schedule(start(request("a", 2)), FCFS)
    state, _ = scheduler.cancel(state, "a")
    state = scheduler.submit(state, request("a", 5))
    state, events = scheduler.commit(state, plan, [EOS])
    assert not any(isinstance(event, (Sampled, Finished)) for event in events)
    assert [(seq.length, seq.arrival) for seq in state.waiting] == [(5, 1)]
