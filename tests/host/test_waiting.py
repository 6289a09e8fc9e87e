"""Reasons of requests that wait: with as much more as a reason names, that limit holds no more."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import strategies as st

from pagedjax.host import scheduler
from pagedjax.host.admission import Shortage
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS, SHORTEST, STATIC, Policy
from pagedjax.host.replay import replay
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Request
from pagedjax.host.waiting import Limit, Reason, why_waiting
from tests import drawn
from tests.host.scheduler_steps import WITHOUT_MEMORY, request, start, step
from tests.host.test_event_log import SMALL, record

MODES = [
    {},
    {"mixed_steps": False},
    {"chunked_prefill": False},
    {"chunked_prefill": False, "mixed_steps": False},
    {"reservation": "pow2", "num_blocks": 16, "host_blocks": 0},
    {"views": (View(1, (0,)),)},
    {"views": (ALL, View(2)), "num_blocks": 30},
]
# of its own kind: it offers some of the requests, and refuses some of those
PICKY = Policy(
    "picky",
    order=lambda waiting, running, cached: [seq for seq in waiting[::-1] if seq.arrival % 3],
    admit=lambda seq, need, free: bool(seq.arrival % 2) or free - need > 2,
    preempt=FCFS.preempt,
)


def larger_pool(state: SchedulerState, additional_blocks: int) -> SchedulerState:
    num_blocks = state.pool.num_blocks + additional_blocks
    num_free = state.pool.num_free + additional_blocks
    return state._replace(pool=state.pool._replace(num_blocks=num_blocks, num_free=num_free))


def lifted(
    state: SchedulerState, policy: Policy, reason: Reason, missing: int
) -> tuple[SchedulerState, Policy]:
    """The state and the policy without what keeps a request out."""
    config = state.config
    limit = reason.limit
    if limit == "tokens":
        budget = config.max_num_batched_tokens + missing
        return state._replace(config=config._replace(max_num_batched_tokens=budget)), policy
    if limit == "rows":
        rows = config.max_running + missing
        budget = max(config.max_num_batched_tokens, rows)
        config = config._replace(max_num_seqs=rows, max_num_batched_tokens=budget)
        return state._replace(config=config), policy
    if limit == "piece":
        return larger_pool(state, 2 * reason.need), policy
    if limit == "policy":
        return state, policy._replace(admit=FCFS.admit)
    if limit == "behind":
        assert reason.behind is not None
        return scheduler.cancel(state, reason.behind)[0], policy
    if limit == "left out":
        return state, FCFS
    if limit == "kind of step":
        return state._replace(config=config._replace(mixed_steps=True)), policy
    return larger_pool(state, missing), policy


def family(reason: Reason) -> str:
    """The beginning of the ids of the branches of the request that is before."""
    return f"{reason.behind}".split("/")[0] + "/"


def check_reasons(state: SchedulerState, policy: Policy, limits: set[str], exact: bool) -> None:
    """The reasons of the next step: those requests, and none of them stays when it is lifted."""
    queue: list[str] = []

    def order(waiting, running, cached):
        offered = list(policy.order(waiting, running, cached))
        queue[:] = [seq.request_id for seq in offered]
        return offered

    reasons = why_waiting(state, policy._replace(order=order))
    assert reasons.keys() == why_waiting(state, policy).keys()
    after, plan = scheduler.schedule(state, policy)
    rows = {seq.request_id for seq in plan.seqs}
    unfinished = (*after.waiting, *after.running.seqs)
    assert reasons.keys() == {seq.request_id for seq in unfinished} - rows
    waiting = {seq.request_id for seq in after.waiting}
    for name, reason in reasons.items():
        limit = reason.limit
        limits.add(limit)
        assert (reason.behind is not None) == (limit == "behind")
        if reason.behind is not None:
            assert reasons[reason.behind].limit in get_args(Shortage)
            # beams are tried at the place of the first of them
            beams = {beam for beam in queue if beam.startswith(family(reason))}
            assert min(map(queue.index, {reason.behind, *beams})) < queue.index(name)
        if limit == "siblings":
            assert name not in waiting
            continue
        if limit in ("tokens", "rows", "blocks", "preempted", "preemption"):
            assert reason.need > reason.free
        missing = reason.need - reason.free
        changed = why_waiting(*lifted(state, policy, reason, missing)).get(name)
        if changed and limit == changed.limit == "blocks" and state.pool.contents:
            # fewer blocks were evicted, so another one is shared that was idle
            missing += changed.need - changed.free
            changed = why_waiting(*lifted(state, policy, reason, missing)).get(name)
        admitted = scheduler.schedule(*lifted(state, policy, reason, missing))[1].admitted
        if name in admitted and name in waiting:
            continue  # a beam may enter before there is a token for it
        if limit in ("preempted", "preemption"):
            assert changed is None or changed.limit not in ("preempted", "preemption")
        else:
            assert changed is None or (changed.limit, changed.behind) != (limit, reason.behind)
        if exact and reason.need:
            reasons_with_less = why_waiting(*lifted(state, policy, reason, missing - 1))
            limits_with_less = {name: reason.limit for name, reason in reasons_with_less.items()}
            if limit in ("preempted", "preemption"):
                assert "preempted" in limits_with_less.values()
            else:
                assert limits_with_less[name] == limit, "less would have sufficed"


@drawn.examples(25, 300)
def test_without_the_limit_that_a_reason_names_a_request_enters_or_meets_another_one(
    tmp_path, number
):
    limits: set[str] = set()

    def holds(seed: int, blocks: int, host: int, mode: dict, policy: Policy, budget: int) -> None:
        config = {"num_blocks": blocks, "host_blocks": host, "max_num_batched_tokens": budget}
        config = SMALL._replace(**{**config, **mode})
        path = tmp_path / "run.jsonl"
        record(path, config, seed, 60, policy=policy)
        before = scheduler.init(config)
        for transition in replay(path, {policy.name: policy}):
            if transition.kind == "schedule":
                check_reasons(before, policy, limits, exact=False)
            before = transition.state

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        blocks=st.integers(6, 14),
        host=st.sampled_from([0, 8]),
        mode=st.sampled_from(MODES),
        policy=st.sampled_from([*WITHOUT_MEMORY.values(), PICKY]),
        budget=st.integers(4, 14),
    )
    if number > 100:
        # a policy without memory evicts nothing; test_policy_memory.py has the reasons of those with
        assert limits >= set(get_args(Limit)) - {"piece", "evicted"}


@drawn.examples(25, 300)
def test_a_reason_names_the_least_that_is_missing(number):
    """Of requests without branches and cached prefixes, where a larger pool changes nothing else."""

    def holds(seed: int, blocks: int, budget: int, policy: Policy, whole_prompts: bool) -> None:
        draw = random.Random(seed)
        config = SMALL._replace(num_blocks=blocks, max_num_batched_tokens=budget)
        state = scheduler.init(config._replace(chunked_prefill=not whole_prompts))
        for i in range(20):
            for k in range(draw.randrange(3)):
                prompt = draw.randint(1, 6)
                new = Request(f"r{i}.{k}", prompt, draw.randint(1, 6), user=f"u{k}")
                if not whole_prompts or prompt + new.max_tokens <= budget:
                    state = scheduler.submit(state, new)
            check_reasons(state, policy, set(), exact=True)
            state, *_ = step(state, policy=policy)

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        blocks=st.integers(6, 10),
        budget=st.integers(4, 12),
        policy=st.sampled_from(list(WITHOUT_MEMORY.values())),
        whole_prompts=st.booleans(),
    )


def sentences(state: SchedulerState, policy: Policy = FCFS) -> dict[str, str]:
    return {name: str(reason) for name, reason in why_waiting(state, policy).items()}


def abc(**sizes) -> SchedulerState:
    """Prompts of 9, 12 and 2 tokens, in blocks of 4."""
    lengths = {"a": 9, "b": 12, "c": 2}
    return start(*(request(name, length, 3) for name, length in lengths.items()), **sizes)


@pytest.mark.parametrize(
    ("sizes", "sentence", "need", "free"),
    [
        ({"num_blocks": 4}, "it needs 3 blocks, and 1 is free", 3, 1),
        ({"seqs": 1}, "no row is free: max_num_seqs is 1", 1, 0),
        # 7 tokens of a, then one of b
        ({"budget": 2}, "the token budget of 2 is used up", 8, 0),
        (
            {"budget": 15, "chunked_prefill": False},
            "its 12 tokens must fit into one step (chunked_prefill is off), and 6 of the budget "
            "of 15 are left",
            12,
            6,
        ),
    ],
)
def test_the_first_that_does_not_fit_has_a_limit_and_the_next_is_behind_it(
    sizes, sentence, need, free
):
    reasons = why_waiting(abc(**sizes), FCFS)
    assert (str(reasons["b"]), reasons["b"].need, reasons["b"].free) == (sentence, need, free)
    assert str(reasons["c"]) == "it is behind b in the order of the policy fcfs"
    assert reasons.keys() == {"b", "c"}


def test_the_order_is_that_of_the_policy():
    # the shorter prompt first, unless the longer one is much older
    state = start(request("long", 40, 2), request("short", 4, 2), seqs=1)
    assert sentences(state, SHORTEST) == {"long": "no row is free: max_num_seqs is 1"}
    running, *_ = step(abc())
    waiting = scheduler.submit(running, request("d", 1))
    assert sentences(waiting, STATIC) == {
        "d": "the policy static admits it when all running requests have ended"
    }


def test_the_reasons_of_a_step_that_preempts_and_of_the_next_one():
    requests = [request(name, 4) for name in "abc"]
    state, *_ = step(start(*requests, request("d", 1), num_blocks=3, host_blocks=1))
    needs = "running requests needed 3 blocks, and none is free"
    assert sentences(state) == {
        "b": f"it was preempted: {needs}",
        "c": f"it was preempted: {needs}",
        "d": f"nothing enters in a step that preempts: {needs}",
    }
    state, *_ = step(state)
    assert sentences(state)["c"] == "it is behind b in the order of the policy fcfs"
    swapped, *_ = step(start(*requests, num_blocks=3, host_blocks=4))
    swapped, *_ = step(swapped)
    assert sentences(swapped)["b"] == "it is swapped out and needs 2 blocks, and 1 is free"


def test_free_blocks_that_are_not_in_a_row():
    # a and c end, and leave blocks 1, 2, 5 and 6
    lengths = {"a": 1, "b": 3, "c": 1, "d": 3}
    requests = (request(name, 5, outputs) for name, outputs in lengths.items())
    state, *_ = step(start(*requests, num_blocks=8, reservation="oracle"))
    state = scheduler.submit(state, request("e", 9, 4))
    check_reasons(state, FCFS, set(), exact=False)
    assert sentences(state) == {"e": "it needs 4 blocks in a row, and no such piece is free"}


def test_branches_need_a_row_each():
    forked = Request("b", 4, 4, forks=("b/1", "b/2"))
    state = start(request("a", 4), forked, seqs=3)
    assert sentences(state) == {"b": "its branches need 3 rows, and 2 of 3 are free (max_num_seqs)"}


def test_a_running_request_without_a_token_has_a_reason():
    # the chunk of a is one token of two, and b is behind it in the batch
    state = start(request("a", 6), request("b", 4), budget=10, num_blocks=40)
    state, *_ = step(state)
    assert sentences(state) == {}
    tight = state._replace(config=state.config._replace(max_num_batched_tokens=2))
    for name, length in (("c", 5), ("d", 5)):
        tight = scheduler.submit(tight, request(name, length))
    wide = tight._replace(config=tight.config._replace(max_num_batched_tokens=10, max_num_seqs=4))
    wide, plan, _ = step(wide)
    assert plan.counts == (1, 1, 5, 3)
    narrow = wide._replace(config=wide.config._replace(max_num_batched_tokens=3))
    reason = why_waiting(narrow, FCFS)["d"]
    assert str(reason) == "the token budget of 3 is used up by rows before it"
    assert (reason.need, reason.free) == (1, 0)


def test_steps_that_do_not_mix_say_which_kind_they_are():
    state, *_ = step(start(request("a", 4), num_blocks=9, mixed_steps=False))
    state = scheduler.submit(state, request("b", 4))
    assert sentences(state) == {"b": "this step computes decodes alone (mixed_steps is off)"}
    state, plan, _ = step(state)
    assert plan.counts == (1,)
    assert sentences(state) == {"a": "this step computes prompts alone (mixed_steps is off)"}


def test_reasons_of_a_policy_of_ones_own():
    state = start(*(request(f"r{i}", 4) for i in range(4)))
    assert sentences(state, PICKY._replace(admit=lambda seq, need, free: seq.arrival == 2)) == {
        "r0": "the policy picky left it out of its order",
        "r1": "the policy picky holds it back: it needs 1 block, and 63 are free",
        "r3": "the policy picky left it out of its order",
    }
