"""Helpers that build and run small schedulers, for the tests by example."""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS, POLICIES, Policy
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Event, Plan, Request

WORD = 7
EOS = 2
# the others are driven in test_policies_with_memory.py
WITHOUT_MEMORY = {name: policy for name, policy in POLICIES.items() if policy.init is None}


def start(
    *requests: Request, block_size=4, num_blocks=64, budget=64, seqs=8, model_len=64, **ways
) -> SchedulerState:
    state = scheduler.init(SchedulerConfig(block_size, num_blocks, budget, seqs, model_len, **ways))
    for request in requests:
        state = scheduler.submit(state, request)
    return state


def request(name: str, prompt_len: int, max_tokens: int = 8, min_tokens: int = 0) -> Request:
    return Request(name, prompt_len, max_tokens, min_tokens, frozenset({EOS}))


def step(
    state: SchedulerState, *tokens: int, policy: Policy = FCFS
) -> tuple[SchedulerState, Plan, tuple[Event, ...]]:
    """One whole step; every row gets WORD unless tokens are given."""
    state, plan = scheduler.schedule(state, policy)
    state, events = scheduler.commit(state, plan, tokens or [WORD] * len(plan.seqs))
    scheduler.check(state)
    return state, plan, events


def rows(plan: Plan) -> list[tuple[str, int, int]]:
    return [(row.seq.request_id, row.seq.computed, row.count) for row in plan.rows]


def names(seqs: Iterable) -> list[str]:
    return [seq.request_id for seq in seqs]


def until_end(state: SchedulerState) -> list[Event]:
    events: list[Event] = []
    while state.waiting or state.running.seqs:
        state, _, new = step(state)
        events += new
        assert state.step < 100, "does not end"
    assert state.pool.num_free == state.config.num_blocks
    return events


def crowded() -> SchedulerState:
    """a, b and c own all three blocks of 4, each block is full, and d waits."""
    state, *_ = step(start(*(request(name, 4) for name in "abc"), request("d", 1), num_blocks=3))
    return state
