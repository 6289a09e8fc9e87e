"""Which worker makes which run: workers of several kinds of machines that start, work and die in
any order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from experiments.core import assignment, config
from experiments.core.assignment import Assignment, choose
from experiments.core.engines import Run, engine_key, plan_runs
from tests import drawn
from tests.experiments.core.summaries import BASE


def plan_of(sizes: list[int], repeats: int) -> list[Run]:
    raw = {**BASE, "repeats": repeats, "sweep": {"grid": {"engine.block_size": sizes}}}
    return plan_runs(config.expand(raw, Path()), alive=4)


def key_of(run: Run) -> Any:
    return engine_key(run.point.experiment)


def name_of(run: Run) -> tuple[int, int]:
    return run.place, run.repeat


def give_all(state: Assignment, minimum: int) -> Assignment:
    """Each idle worker asks. A transition leaves the state that it is given as it was."""
    for place in assignment.idle(state):
        before = (state.waiting, dict(state.workers))
        after, run = assignment.give_run(state, place, minimum)
        assert (state.waiting, dict(state.workers)) == before
        assert len(after.waiting) == len(state.waiting) - (run is not None)
        state = after
    return state


@drawn.given(
    25,
    150,
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.randoms(),
)
def test_every_run_ends_once_and_each_engine_s_results_are_of_one_kind(
    places, repeats, minimum, losses, random
):
    """Places whose workers begin, finish and are lost in any order; a new worker may be on another
    kind of machine.
    """
    plan = plan_of([1, 2, 4, 8, 16], repeats)
    state = assignment.new(plan, places)
    finished = []
    failed = []
    while assignment.active(state):
        busy = [place for place, at in state.workers.items() if at.run is not None]
        place = random.choice(sorted(state.starting) + busy)
        if random.random() < losses:
            state, run = assignment.lose_worker(state, place)
            failed += [] if run is None else [run]
            assert (place in state.starting) == (run is not None), (
                "one that dies before it began is not replaced"
            )
        elif place in state.starting:
            state = assignment.add_worker(state, place, random.choice(["slow", "fast"]))
        else:
            finished.append((state.workers[place].run, state.workers[place].kind))
            state = assignment.end_run(state, place)
        state = give_all(state, minimum)
    ends = [run for run, _ in finished] + failed + list(state.waiting)
    assert sorted(map(name_of, ends)) == sorted(map(name_of, plan))
    kinds = {(key_of(run), kind) for run, kind in finished}
    assert len(kinds) == len({key for key, _ in kinds})
    kinds_left = {at.kind for at in state.workers.values()}
    assert all(
        not kinds_left or state.machines[key_of(run)] not in kinds_left for run in state.waiting
    ), "a worker could make it"
    assert losses or not state.waiting


def test_the_rest_of_a_point_waits_for_the_new_worker_of_its_kind():
    plan = plan_of([4], 4)
    state = assignment.new(plan, 2)
    state = give_all(assignment.add_worker(state, 0, "slow"), 2)
    state = give_all(assignment.add_worker(state, 1, "fast"), 2)
    assert state.workers[1].run is None, "the engine runs on the slow kind"
    state = give_all(assignment.end_run(state, 0), 2)
    state, run = assignment.lose_worker(state, 0)
    assert run is plan[1]
    state = give_all(state, 2)
    assert state.workers[1].run is None, "a result is on the slow kind, whose worker starts again"
    restarted = give_all(assignment.add_worker(state, 0, "slow"), 2)
    assert restarted.workers[0].run is plan[2]
    with_fast = give_all(assignment.add_worker(state, 0, "fast"), 2)
    assert not assignment.active(with_fast)
    assert with_fast.waiting == tuple(plan[2:])


def test_an_engine_without_a_result_may_change_its_kind():
    plan = plan_of([4], 2)
    state = assignment.new(plan, 2)
    state = give_all(assignment.add_worker(assignment.add_worker(state, 1, "fast"), 0, "slow"), 2)
    assert state.workers[1].run is plan[0]
    state, _ = assignment.lose_worker(state, 1)
    state = give_all(state, 2)
    assert state.workers[0].run is plan[1]


def test_workers_that_never_start_do_not_keep_a_finished_sweep():
    state = give_all(assignment.add_worker(assignment.new(plan_of([4], 1), 3), 2, "slow"), 2)
    assert assignment.active(state)
    state = assignment.end_run(state, 2)
    assert state.starting == {0, 1}
    assert not assignment.active(state)


def test_a_worker_prefers_its_own_engines_and_then_new_ones():
    waiting = plan_of([4, 8], 2)
    keys = [engine_key(run.point.experiment) for run in waiting]
    assert keys == [keys[0], keys[1], keys[1], keys[0]]
    every = set(keys)
    assert choose(waiting, set(), set(), {}, "m") is waiting[0]
    assert choose(waiting, set(), {keys[0]}, {keys[0]: "m"}, "m") is waiting[1], (
        "another worker has the first engine"
    )
    assert choose(waiting, {keys[0]}, set(), {keys[0]: "m"}, "m") is waiting[0]
    assert choose(waiting, set(), every, dict.fromkeys(keys, "m"), "m") is waiting[0], (
        "it helps, and builds one too"
    )
    assert choose(waiting[1:], set(), every, {}, "m") is waiting[1]
    assert choose(waiting[2:], set(), every, {}, "m") is None, (
        "the last run of an engine is for who has it"
    )
    assert choose(waiting[2:], set(), every, {}, "m", min_runs=1) is waiting[2]
    assert choose(waiting, set(), every, dict.fromkeys(keys, "m"), "other") is None
