"""Rules of admission, budget, preemption and ends by example. test_scheduler_machine.py checks all of
them in any order.
"""

from __future__ import annotations

import pytest

from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SIZES, Rejected, SchedulerConfig
from tests.host.scheduler_steps import (
    WORD,
    crowded,
    names,
    request,
    start,
)
from tests.refusals import refused

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
        (
            request("a", 1)._replace(deadline=0.0),
            "request 'a' has a deadline of 0.0 seconds after its arrival; "
            "it must be a finite number above 0, or None",
        ),
    ],
)
def test_a_request_that_can_never_run_is_rejected_with_the_remedy(bad, message):
    state = start(request("b", 1), num_blocks=5)
    with pytest.raises(Rejected, match=message):
        scheduler.submit(state, bad)
    assert names(state.waiting) == ["b"]


def test_a_rejection_is_a_value_error():
    assert issubclass(Rejected, ValueError)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_below_the_least_are_refused(name):
    smallest = 0 if name in ("host_blocks", "empty_blocks") else 1
    with refused(f"{name} is {smallest - 1}; it must be at least {smallest}"):
        scheduler.init(SchedulerConfig(1, 1, 1, 1, 1)._replace(**{name: smallest - 1}))


def test_a_cache_that_could_keep_no_block_is_refused():
    remedy = "choose at most 3, or more num_blocks"
    with refused(f"empty_blocks is 4, and there are 4 blocks, .* stay in the cache; {remedy}"):
        scheduler.init(SchedulerConfig(1, 4, 1, 1, 1, empty_blocks=4))


@pytest.mark.parametrize("name", ["chunked_prefill", "mixed_steps"])
@pytest.mark.parametrize("value", [0, 1, None, "no"])
def test_a_switch_must_be_a_boolean(name, value):
    with refused(rf"^{name} is {value!r}; it must be True or False$"):
        scheduler.init(SchedulerConfig(1, 1, 1, 1, 1)._replace(**{name: value}))


@pytest.mark.parametrize("value", ["pow3", "", None, False])
def test_an_unknown_reservation_is_refused(value):
    with refused(rf"^reservation is {value!r}; it must be one of 'none', 'oracle', 'pow2', 'm"):
        scheduler.init(SchedulerConfig(1, 1, 1, 1, 1, reservation=value))


# --- budget and order -----------------------------------------------------------------------------


# --- preemption -----------------------------------------------------------------------------------


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


# --- commit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [[], [WORD], [WORD] * 3])
def test_a_wrong_number_of_sampled_tokens_is_an_error(sampled):
    state, plan = scheduler.schedule(start(request("a", 1), request("b", 1)), FCFS)
    with refused(f"{len(sampled)} sampled tokens for 2 rows"):
        scheduler.commit(state, plan, sampled)
