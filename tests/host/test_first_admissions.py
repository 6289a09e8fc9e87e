"""Hits of prefix caching are those of first admissions: what a sequence finds again of its own is
none.
"""

from __future__ import annotations

import pytest

from pagedjax.host import scheduler
from pagedjax.host.first_admissions import FirstAdmissions
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Admitted, Beamed, Event, Finished, Forked, Preempted
from tests.host.scheduler_steps import EOS, WORD, start
from tests.host.test_policies import ask, with_hashes

PROMPT = 32
BLOCK = 16


def played(*requests, restart_after: int | None = None, num_blocks: int = 8) -> list[list[Event]]:
    """The events of each step until all requests are done."""
    state = start(*requests, model_len=112, num_blocks=num_blocks, block_size=BLOCK)
    steps: list[list[Event]] = []
    while state.waiting or scheduler.running(state):
        state, plan = scheduler.schedule(state, FCFS)
        state, events = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
        steps.append(list(events))
        if len(steps) == restart_after:
            state = scheduler.restart(state)
        assert len(steps) < 1000
    return steps


def counted(steps: list[list[Event]]) -> tuple[int, int]:
    """(hits, queries) in tokens."""
    admissions = FirstAdmissions()
    first = [event for events in steps for event in admissions.among(events)]
    return sum(event.num_cached for event in first), sum(event.num_tokens for event in first)


def test_sequences_that_come_back_have_no_hits():
    requests = [with_hashes(ask(name, PROMPT, 70), 2, name) for name in "ab"]
    steps = played(*requests)
    events = [event for step in steps for event in step]
    assert any(isinstance(event, Preempted) for event in events)
    assert sum(event.num_cached for event in events if isinstance(event, Admitted)) > 0
    assert counted(steps) == (0, 2 * PROMPT)


def test_a_restart_adds_no_queries():
    requests = [with_hashes(ask(name, PROMPT, 20), 2, name) for name in "ab"]
    assert counted(played(*requests, num_blocks=16)) == (0, 2 * PROMPT)
    steps = played(*requests, num_blocks=16, restart_after=3)
    assert sum(isinstance(event, Admitted) for step in steps for event in step) == 4
    assert counted(steps) == (0, 2 * PROMPT)


def test_equal_prompts_have_hits():
    later = with_hashes(ask("b", PROMPT, 2), 2, "x")
    state = start(
        with_hashes(ask("a", PROMPT, 1), 2, "x"), model_len=112, num_blocks=16, block_size=BLOCK
    )
    state, plan = scheduler.schedule(state, FCFS)
    state, first = scheduler.commit(state, plan, [EOS])
    state = scheduler.submit(state, later)
    state, plan = scheduler.schedule(state, FCFS)
    _, second = scheduler.commit(state, plan, [WORD])
    assert counted([list(first), list(second)]) == (BLOCK, 2 * PROMPT)


@pytest.mark.parametrize(
    "begun",
    [Forked(0, ("a", "a1")), Beamed(0, ("a", "a1"), ("a", "a"), (1, 2)), Admitted(0, "a1", 8, 0)],
)
def test_a_branch_that_is_admitted_after_its_leader_is_no_first_one(begun):
    admissions = FirstAdmissions()
    assert len(admissions.among([Admitted(0, "a", 8, 4), begun])) == 1 + isinstance(begun, Admitted)
    assert admissions.among([Admitted(3, "a1", 9, 8), Admitted(3, "a", 9, 8)]) == []
    assert admissions.among([Finished(4, "a", "stop", 3), Finished(4, "a1", "stop", 3)]) == []
    readmission = [Admitted(5, "a", 8, 8)]  # a new request with the same id
    assert admissions.among(readmission) == readmission
    admissions.left("a")
    assert admissions.among(readmission) == readmission
