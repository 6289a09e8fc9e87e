"""Policies with memory: what one observes, and what it may decide in a step."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from immutables import Map

from pagedjax.host import purity, scheduler
from pagedjax.host.event_log import Cancel, Commit, Recorder, Restart, Schedule, Submit
from pagedjax.host.kv_policies import View
from pagedjax.host.policies import FCFS, Policy, find
from pagedjax.host.replay import replay, verify
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import (
    Admitted,
    Finished,
    Preempted,
    Row,
    Running,
    Sampled,
    Seq,
    Submitted,
)
from pagedjax.host.waiting import why_waiting
from pagedjax.options.config import PrefixCheckpoints
from tests import drawn
from tests.host import drawn_views
from tests.host.scheduler_steps import WORD, names, request, rows, start, step
from tests.host.test_event_log import chosen, filled, random_request
from tests.refusals import refused


def in_order(memory: Any, waiting: tuple[Seq, ...], running: Running, cached: Any) -> Any:
    return waiting


def with_memory(**functions: Any) -> Policy:
    """First come, first served, with a memory of all events so far."""
    fields: dict[str, Any] = {
        "init": tuple,
        "observe": lambda memory, events, now: (*memory, *events),
    }
    return Policy("mine", in_order, **fields | functions)


# --- memory and events ----------------------------------------------------------------------------


def test_a_memory_observes_each_event_once_in_their_order():
    policy = with_memory()
    state = start(request("a", 3, 2), request("b", 3, 2))
    first, second = state.waiting
    state, *_ = step(state, policy=policy)
    assert state.memory == (Submitted(0, first), Submitted(0, second))
    assert state.news == (
        Admitted(0, "a", 3, 0),
        Admitted(0, "b", 3, 0),
        Sampled(0, ("a", "b"), (WORD, WORD)),
    )
    state, cancelled = scheduler.cancel(state, "b")
    state = scheduler.submit(state, request("c", 3))
    third = state.waiting[-1]
    state = scheduler.restart(state)
    assert state.news is not None
    before = (*state.memory, *state.news)
    assert before[-3:] == (cancelled[0], Submitted(1, third), Preempted(1, "a", False))
    state, _, events = step(state, policy=policy)
    assert state.memory == before
    assert state.news == events
    assert events[-1] == Finished(1, "a", "length", 2)


def test_a_sequence_that_was_cancelled_in_flight_has_entered_before_it_ended():
    policy = with_memory()
    state, plan = scheduler.schedule(start(request("a", 3)), policy)
    state, _ = scheduler.cancel(state, "a")
    state, _ = scheduler.commit(state, plan, [WORD])
    assert state.news == (Admitted(0, "a", 3, 0), Finished(0, "a", "abort", 0))


def test_a_policy_with_memory_may_come_to_a_state_with_sequences():
    state, *_ = step(start(request("a", 3, 4), request("b", 3, 4), num_blocks=2, seqs=1))
    state, *_ = step(state, policy=with_memory())
    kinds = [(type(event).__name__, event[1]) for event in state.memory]
    (a,) = scheduler.running(state)
    assert [kind for kind, _ in kinds] == ["Submitted", "Submitted", "Admitted"]
    assert kinds[2][1] == a.request_id == "a"


def test_a_policy_without_memory_leaves_no_events():
    state, *_ = step(start(request("a", 3)))
    state, _ = scheduler.cancel(state, "a")
    assert (state.memory, state.news) == (None, None)


def test_a_handed_over_sequence_ends_here_and_is_submitted_there():
    policy = with_memory()
    state, *_ = step(start(request("a", 3)), policy=policy)
    adopting_state, *_ = step(start(request("b", 3)), policy=policy)
    state, released = scheduler.release(state, "a")
    assert state.news is not None
    assert state.news[-1] == Finished(1, "a", "abort", 1)
    adopting_state, adopted = scheduler.adopt(adopting_state, policy, released)
    assert adopted.computed == 3
    assert adopting_state.news is not None
    assert isinstance(adopting_state.news[-2], Submitted)
    assert adopting_state.news[-1] == Admitted(1, "a", 4, 3)
    picky = with_memory(admit=lambda memory, seq, need, free: bool(memory))
    assert not scheduler.has_room(start(), picky, released)  # its first memory is empty


def test_functions_of_a_policy_with_memory_get_it_first():
    calls: list[tuple[str, Any]] = []

    def noted(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def call(memory: Any, *arguments: Any) -> Any:
            calls.append((name, memory))
            return result(*arguments)

        return call

    policy = with_memory(
        init=lambda: "memory",
        observe=None,
        admit=noted("admit", FCFS.admit),
        preempt=noted("preempt", FCFS.preempt),
        swap=noted("swap", FCFS.swap),
        evict=noted("evict", lambda waiting, running: ()),
        compose=noted("compose", lambda rows, budget: [row.count for row in rows]),
        reject=noted("reject", lambda waiting: ()),
    )._replace(order=noted("order", FCFS.order))
    state = start(request("a", 4, 4), request("b", 4, 4), num_blocks=2, host_blocks=4)
    for _ in range(2):
        state, *_ = step(state, policy=policy)
    assert {name for name, _ in calls} == {
        *("order", "admit", "preempt", "swap", "evict", "compose", "reject")
    }
    assert {memory for _, memory in calls} == {"memory"}


# --- evict, reject, compose -----------------------------------------------------------------------


def evicts(*ids: str, at: int = 1) -> Policy:
    """Evicts these in the step of that number."""
    return with_memory(
        init=int,
        observe=lambda memory, events, now: memory + 1,
        evict=lambda memory, waiting, running: ids if memory == at + 1 else (),
    )


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_an_evicted_sequence_leaves_before_the_step_and_others_enter(host_blocks):
    state = start(*(request(name, 4) for name in "abc"), num_blocks=4, host_blocks=host_blocks)
    policy = evicts("a")
    state, plan, _ = step(state, policy=policy)
    assert plan.admitted == ("a", "b", "c")
    state = scheduler.submit(state, request("d", 4))
    before = state
    state, plan, events = step(state, policy=policy)
    assert plan.preempted == ("a",)
    assert plan.swapped == (("a",) if host_blocks else ())
    assert (plan.admitted, names(state.waiting)) == ((), ["a", "d"])  # b and c took the blocks
    assert Preempted(1, "a", bool(host_blocks)) in events
    why = why_waiting(before, policy)
    assert str(why["a"]) == "the policy mine evicted it for others"
    assert why["d"].limit == "blocks"


def test_an_evicted_sequence_is_not_offered_in_the_same_step():
    state = start(request("a", 4), request("b", 4), num_blocks=8)
    policy = evicts("a", "b")
    state, *_ = step(state, policy=policy)
    state = scheduler.submit(state, request("c", 4))
    state, plan, _ = step(state, policy=policy)
    assert rows(plan) == [("c", 0, 4)]
    state, plan, _ = step(state, policy=policy)
    assert set(plan.admitted) == {"a", "b"}


def test_branches_are_evicted_together():
    state = start(request("a", 4)._replace(forks=("a1", "a2")), request("b", 4))
    policy = evicts("a1", at=2)
    for _ in range(2):
        state, *_ = step(state, policy=policy)
    state, plan, _ = step(state, policy=policy)
    assert plan.preempted == ("a", "a1", "a2")


def test_a_rejected_request_ends_with_all_its_branches():
    policy = with_memory(reject=lambda memory, waiting: names(waiting[1:]))
    state = start(request("a", 4), request("b", 4)._replace(forks=("b1",)))
    state, plan = scheduler.schedule(state, policy)
    assert plan.rejected == ("b", "b1")
    assert names(state.running.seqs) == ["a"]
    state, events = scheduler.commit(state, plan, [WORD])
    scheduler.check(state)
    assert events[:2] == tuple(Finished(0, name, "rejected", 0) for name in ("b", "b1"))
    assert state.news == events
    assert list(state.ids) == ["a"]


def test_a_sequence_with_output_is_not_offered_to_reject():
    offered_names: list[str] = []

    def reject(memory: Any, waiting: tuple[Seq, ...]) -> tuple[str, ...]:
        offered_names.extend(names(waiting))
        return ()

    state = start(request("a", 4, 4), request("b", 4, 4), num_blocks=2)
    state, *_ = step(state)
    state, *_ = step(state)  # b is preempted
    assert names(state.waiting) == ["b"]
    step(scheduler.submit(state, request("c", 4, 4)), policy=with_memory(reject=reject))
    assert offered_names == ["c"]


def test_a_policy_lowers_the_tokens_of_rows():
    def compose(memory: Any, rows: tuple[Row, ...], budget: int) -> list[int]:
        assert budget == 16
        return [0 if row.seq.request_id == "a" else row.count // 2 for row in rows]

    policy = with_memory(compose=compose)
    state, *_ = step(start(request("a", 4), budget=16))
    for name in "bc":
        state = scheduler.submit(state, request(name, 6))
    before = state
    state, plan, _ = step(state, policy=policy)
    assert rows(plan) == [("b", 0, 3), ("c", 0, 3)]
    assert plan.admitted == ("b", "c")
    reason = why_waiting(before, policy)["a"]
    assert (reason.limit, str(reason)) == (
        "policy",
        "the policy mine gives it no token in this step",
    )
    state, plan, _ = step(state)
    assert rows(plan) == [("a", 4, 1), ("b", 3, 3), ("c", 3, 3)]


def test_a_row_that_may_be_cut_shares_no_block_that_it_fills_in_the_step():
    prompts = [request(name, 9)._replace(hashes=("x", "y")) for name in "ab"]
    cut = with_memory(compose=lambda memory, rows, budget: [min(3, row.count) for row in rows])
    _, plan, _ = step(start(*prompts))
    assert plan.cached == (0, 8)
    _, plan, _ = step(start(*prompts), policy=cut)
    assert (plan.cached, plan.counts) == ((0, 0), (3, 3))


def test_drafts_do_not_take_the_tokens_that_a_policy_withholds():
    policy = with_memory(compose=lambda memory, rows, budget: [min(row.count, 1) for row in rows])
    state, *_ = step(start(request("a", 4), budget=4, block_size=8))
    state = scheduler.submit(state, request("b", 4))
    _, plan = scheduler.schedule(state, FCFS, {"a": 3})
    assert plan.counts == (1, 3)
    state, plan = scheduler.schedule(state, policy, {"a": 3})
    assert (plan.counts, plan.drafts) == ((1, 1), ())


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"evict": lambda m, w, r: 3}, "evict of the policy 'mine' returned 3; return a list of"),
        ({"evict": lambda m, w, r: "ab"}, "evict of the policy 'mine' returned 'ab'; return a"),
        (
            {"evict": lambda m, w, r: ["b"]},
            "evict of the policy 'mine' returned 'b', which does not run; return ids of running",
        ),
        (
            {"reject": lambda m, w: ["a"]},
            "reject of the policy 'mine' returned 'a', which does not wait without output; return",
        ),
        (
            {"compose": lambda m, rows, budget: [1]},
            "compose of the policy 'mine' returned 1 numbers for 2 rows; return a number of tokens",
        ),
        ({"compose": lambda m, rows, budget: None}, "compose of the policy 'mine' returned None;"),
        (
            {"compose": lambda m, rows, budget: [2, 1]},
            "compose of the policy 'mine' returned 2 for 'a', whose row has 1 tokens; return",
        ),
        (
            {"compose": lambda m, rows, budget: [1, 0.5]},
            "compose of the policy 'mine' returned 0.5 for 'b', whose row has 2 tokens; return",
        ),
        ({"timed": True}, "the policy 'mine' is timed; give schedule(..., now=SECONDS)"),
    ],
)
def test_a_wrong_decision_is_told_what_it_was(functions, message):
    state, *_ = step(start(request("a", 3), num_blocks=8))
    state = scheduler.submit(state, request("b", 2))
    with refused(f"^{re.escape(message)}"):
        scheduler.schedule(state, with_memory(**functions))
    scheduler.check(state)


def test_a_step_of_whole_prompts_is_not_composed():
    policy = with_memory(compose=lambda memory, rows, budget: [0] * len(rows))
    with refused("'mine' composes steps, and chunked_prefill is off.*set chunked_prefill=True"):
        scheduler.schedule(start(request("a", 3), chunked_prefill=False), policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            with_memory(observe=lambda memory, events: memory),
            r"its observe takes other arguments; write observe\(memory, events, now\)",
        ),
        (
            with_memory()._replace(order=FCFS.order),
            r"its order takes other arguments; write order\(memory, waiting, running, cached\)",
        ),
        (
            with_memory(init=None),
            "policy 'mine' has observe, and no memory; give it init=lambda: MEMORY, or leave it",
        ),
        (FCFS._replace(name="mine", timed=True), "policy 'mine' has timed, and no memory"),
    ],
)
def test_functions_with_other_arguments_are_refused(policy, message):
    with refused(message):
        find(policy)


def test_a_memory_that_cannot_be_hashed_is_refused():
    policy = with_memory(observe=lambda memory, events, now: [1])
    with refused(r"observe of the policy 'mine' returned \[1\], which cannot be hashed; return an"):
        purity.find_pure(policy)
    with refused(r"init of the policy 'mine' returned \{\}, which cannot be hashed"):
        purity.find_pure(with_memory(init=dict))


def test_a_type_without_a_signature_makes_the_first_memory():
    policy = with_memory(init=Map)
    assert purity.find_pure(policy) is policy


def test_an_impure_observe_is_refused():
    calls: list[int] = []

    def observe(memory: Any, events: Any, now: None) -> tuple[int, ...]:
        calls.append(1)
        return tuple(calls)

    with refused("observe of the policy 'mine' returned"):
        purity.find_pure(with_memory(observe=observe))


# --- random policies in random runs ---------------------------------------------------------------


def random_policy(seed: int) -> Policy:
    """Decides at random, as a function of its memory: the number of the step and all events."""

    def draw(memory: tuple[Any, ...], name: str) -> random.Random:
        return random.Random(f"{seed} {memory[0]} {name}")

    def order(memory: Any, waiting: Any, running: Any, cached: Any) -> list[Seq]:
        return draw(memory, "order").sample(waiting, len(waiting))

    def evict(memory: Any, waiting: Any, running: Running) -> list[str]:
        numbers = draw(memory, "evict")
        return [seq.request_id for seq in running.seqs if numbers.random() < 0.15]

    def reject(memory: Any, waiting: Any) -> list[str]:
        numbers = draw(memory, "reject")
        return [seq.request_id for seq in waiting if numbers.random() < 0.1]

    def compose(memory: Any, rows: Sequence[Row], budget: int) -> list[int]:
        numbers = draw(memory, "compose")
        return [
            row.count if numbers.random() < 0.6 else numbers.randrange(row.count + 1)
            for row in rows
        ]

    return Policy(
        "random",
        order,
        preempt=lambda memory, running: draw(memory, "preempt").choice(running),
        init=lambda: (0, None, ()),
        observe=lambda memory, events, now: (memory[0] + 1, now, (*memory[2], *events)),
        evict=evict,
        reject=reject,
        compose=compose if seed % 2 else None,
        timed=True,
    )


def run(path: Path, config: SchedulerConfig, seed: int, policy: Policy) -> SchedulerState:
    """Records a random run of 60 steps. Each step is checked."""
    draw = random.Random(seed)
    state = scheduler.init(config)
    expected_events: list[Any] = []  # all that the policy should have observed
    with closing(Recorder(path, config, policy.name)) as recorder:
        for number in range(60):
            name = f"r{draw.randrange(8)}"
            if draw.random() < 0.6 and not any(key.startswith(name) for key in state.ids):
                new = random_request(draw, name, config, state.ids)
                try:
                    state = scheduler.submit(state, new)
                except scheduler.Rejected:
                    continue
                recorder.write(Submit(new))
                expected_events.append(Submitted(state.step, state.waiting[-1]))
            if state.ids and draw.random() < 0.1:
                name = draw.choice(sorted(state.ids))
                state, events = scheduler.cancel(state, name)
                recorder.write(Cancel(name, "abort", events))
                expected_events += events
            if draw.random() < 0.03:
                active = sorted(scheduler.running(state), key=lambda seq: seq.arrival)
                expected_events += [Preempted(state.step, seq.request_id, False) for seq in active]
                state = scheduler.restart(state)
                recorder.write(Restart())
            before = state
            time = number / 7
            offered = {seq.request_id: 2 for seq in state.running.seqs if draw.random() < 0.3}
            state, plan = scheduler.schedule(state, policy, offered, time)
            recorder.write(Schedule(plan, offered))
            assert plan.now == time
            scheduler.check(state)
            if (
                before.news is not None
            ):  # at first the sequences are told in the order of their arrival
                assert state.memory[2] == tuple(expected_events)
            expected_events = list(state.memory[2])
            unplanned = {*names(state.waiting), *names(state.running.seqs)} - {*names(plan.seqs)}
            assert set(why_waiting(before, policy, time)) == unplanned
            assert all(plan.counts)
            assert sum(plan.counts) <= config.max_num_batched_tokens
            assert not set(plan.preempted) & set(plan.admitted)
            choices, ended = chosen(state, plan, draw)
            sampled = [draw.randrange(20) for _ in plan.seqs]
            hashes = filled(plan, config.block_size, sampled)
            state, events = scheduler.commit(state, plan, sampled, hashes, choices)
            recorder.write(Commit(plan, sampled, hashes, choices, events))
            scheduler.check(state)
            expected_events += events
            for name in ended:
                state, events = scheduler.cancel(state, name, "length")
                recorder.write(Cancel(name, "length", events))
                expected_events += events
    return state


sizes = (
    st.integers(1, 4),
    st.integers(12, 20),
    st.integers(1, 16),
    st.integers(1, 6),
    st.integers(7, 14),
    st.sampled_from([0, 4, 20]),
)


@drawn.examples(10, 120)
def test_random_policies_keep_the_invariants_and_replay_byte_for_byte(tmp_path: Path, number: int):
    path = tmp_path / "run.jsonl"

    def holds(config: SchedulerConfig, seed: int) -> None:
        policy = random_policy(seed)
        state = run(path, config, seed, policy)
        policies = {policy.name: policy}
        report = verify(path, policies)
        assert report.identical, report.difference
        *_, last = replay(path, policies)
        assert last.state == state

    usual = [*map(st.just, (True, True, "none")), drawn_views.at_most_one_group]
    usual += [st.booleans(), st.none(), st.just(False), st.sampled_from([0, 3])]
    configs = drawn_views.with_checkpoints(st.builds(SchedulerConfig, *sizes, *usual))
    drawn.check(number, holds, config=configs, seed=st.integers(0, 2**32 - 1))


def test_a_block_of_beams_has_one_hash_after_steps_with_drafts(tmp_path: Path):
    """The prefix cache gets the ends of texts too, and with them blocks that beams share."""
    config = SchedulerConfig(1, 12, 5, 2, 9, views=(View(window=4, kept=()),), shares_filling=False)
    texts = config._replace(prefix_checkpoints=PrefixCheckpoints(texts=True))
    run(tmp_path / "run.jsonl", texts, 0, random_policy(0))


def test_beams_are_not_split_where_a_composed_step_leaves_blocks_unused(tmp_path: Path):
    """Three beams alone in the pool; two have a block each for a token that they do not compute."""
    window = (View(window=4, kept=()),)
    config = SchedulerConfig(1, 12, 11, 6, 8, views=window, shares_filling=False)
    run(tmp_path / "run.jsonl", config, 269, random_policy(269))


def test_random_policies_do_all_that_they_may(tmp_path: Path):
    """So that the property above is not empty."""
    config = SchedulerConfig(2, 14, 8, 4, 12, host_blocks=4)
    path = tmp_path / "run.jsonl"
    kinds: set[str] = set()
    for seed in range(1, 8):
        policy = random_policy(seed)
        run(path, config, seed, policy)
        for transition in replay(path, {"random": policy}):
            plan = transition.plan
            if plan is not None:
                enters = plan.preempted and plan.admitted
                kinds.update(
                    name
                    for name, happened in {
                        "rejected": plan.rejected,
                        "swapped": plan.swapped,
                        "admitted in a step that evicts": enters,
                        "resumed": plan.resumed,
                    }.items()
                    if happened
                )
    assert len(kinds) == 4, kinds


def test_a_recorded_time_that_is_no_time_is_refused(tmp_path: Path):
    config = SchedulerConfig(2, 14, 8, 4, 12)
    path = tmp_path / "run.jsonl"
    policy = random_policy(2)
    run(path, config, 2, policy)
    path.write_text(path.read_text().replace('"now":0.0', '"now":-1'))
    difference = verify(path, {"random": policy}).difference
    assert difference is not None
    assert difference.recomputed == "refused: now is -1; it must be a number of seconds, 0 or more"
