"""The hits of prefix caching are the cached tokens of first admissions. A sequence that is admitted
again finds its own blocks, which is no hit.
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
    """(hits, queries): the cached tokens of first admissions, and all of their tokens."""
    admissions = FirstAdmissions()
    first = [event for events in steps for event in admissions.among(events)]
    return sum(event.num_cached for event in first), sum(event.num_tokens for event in first)


def test_sequences_that_come_back_have_no_hits():
    requests = [with_hashes(ask(name, PROMPT, max_tokens=70), count=2, name=name) for name in "ab"]
    steps = played(*requests)
    events = [event for step in steps for event in step]
    assert any(isinstance(event, Preempted) for event in events)
    assert sum(event.num_cached for event in events if isinstance(event, Admitted)) > 0
    assert counted(steps) == (0, 2 * PROMPT)


def test_a_restart_adds_no_queries():
    requests = [with_hashes(ask(name, PROMPT, max_tokens=20), count=2, name=name) for name in "ab"]
    assert counted(played(*requests, num_blocks=16)) == (0, 2 * PROMPT)
    steps = played(*requests, num_blocks=16, restart_after=3)
    assert sum(isinstance(event, Admitted) for step in steps for event in step) == 4
    assert counted(steps) == (0, 2 * PROMPT)


def test_equal_prompts_have_hits():
    later = with_hashes(ask("b", PROMPT, max_tokens=2), count=2, name="x")
    state = start(
        with_hashes(ask("a", PROMPT, max_tokens=1), count=2, name="x"),
        model_len=112,
        num_blocks=16,
        block_size=BLOCK,
    )
    state, plan = scheduler.schedule(state, FCFS)
    state, first = scheduler.commit(state, plan, [EOS])
    state = scheduler.submit(state, later)
    state, plan = scheduler.schedule(state, FCFS)
    _, second = scheduler.commit(state, plan, [WORD])
    assert counted([list(first), list(second)]) == (BLOCK, 2 * PROMPT)


# how a branch "a1" of "a" begins, and the requests that are first admitted with it
BEGINNINGS = [
    (Forked(step=0, request_ids=("a", "a1")), ["a"]),
    (Beamed(step=0, request_ids=("a", "a1"), parents=("a", "a"), token_ids=(1, 2)), ["a"]),
    (Admitted(step=0, request_id="a1", num_tokens=8, num_cached=0), ["a", "a1"]),
]


@pytest.mark.parametrize(("beginning", "expected_first"), BEGINNINGS)
def test_a_branch_that_has_begun_has_no_first_admission_later(beginning, expected_first):
    admissions = FirstAdmissions()
    leader = Admitted(step=0, request_id="a", num_tokens=8, num_cached=4)
    first = admissions.among([leader, beginning])
    assert [event.request_id for event in first] == expected_first
    later = [
        Admitted(step=3, request_id="a1", num_tokens=9, num_cached=8),
        Admitted(step=3, request_id="a", num_tokens=9, num_cached=8),
    ]
    assert admissions.among(later) == []


@pytest.mark.parametrize("beginning", [beginning for beginning, _ in BEGINNINGS])
def test_an_id_is_new_again_after_its_request_has_ended_or_left(beginning):
    admissions = FirstAdmissions()
    admissions.among([Admitted(step=0, request_id="a", num_tokens=8, num_cached=4), beginning])
    ends = [
        Finished(step=4, request_id="a", reason="stop", num_output=3),
        Finished(step=4, request_id="a1", reason="stop", num_output=3),
    ]
    assert admissions.among(ends) == []
    new_request = [Admitted(step=5, request_id="a", num_tokens=8, num_cached=8)]
    assert admissions.among(new_request) == new_request
    admissions.left("a")
    assert admissions.among(new_request) == new_request
