"""Which worker makes which run: a state and its transitions, without Ray.

    new(runs, places)                 -> state         a worker starts at each place
    add_worker(state, place, kind)    -> state         the worker has answered: its kind of machine
    give_run(state, place, min_runs)  -> (state, run)  the worker's next run; None: others make the
                                                       rest
    end_run(state, place)             -> state         the worker's run has a result
    lose_worker(state, place)         -> (state, run)  the worker is gone; if it had a run, the run
                                                       has failed, and a new worker starts
    active(state)                     -> bool          whether a run may still get a result

The runs of an engine are made on one kind of machine: that of its results and of its runs in
progress. They are never made on another kind. If no worker of that kind is left, the other runs of
the engine are still in `waiting` when the state is no longer active.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from experiments.core.engines import Run, engine_key

# A kind of machine: repeats on equal kinds differ by noise alone. "" is the kind for simulated
# runs, which depend on no machine.
Kind = str


class WorkerState(NamedTuple):
    """A worker that has answered.

    built: keys of the engines that it has built.
    run: its run in progress.
    """

    kind: Kind
    built: frozenset[Hashable] = frozenset()
    run: Run | None = None


class Assignment(NamedTuple):
    """The runs that wait, and the workers with their runs."""

    waiting: tuple[Run, ...]
    starting: frozenset[int]  # places whose worker has not answered
    workers: Mapping[int, WorkerState]  # by the number of their place
    machines: Mapping[Hashable, Kind]  # by the key of an engine that has results


def new(runs: Iterable[Run], places: int) -> Assignment:
    return Assignment(tuple(runs), frozenset(range(places)), {}, {})


def add_worker(state: Assignment, place: int, kind: Kind) -> Assignment:
    workers = {**state.workers, place: WorkerState(kind)}
    return state._replace(starting=state.starting - {place}, workers=workers)


def give_run(state: Assignment, place: int, min_runs: int) -> tuple[Assignment, Run | None]:
    """Give the worker at a place its next run; see `choose`."""
    worker = state.workers[place]
    built_by_others = {
        key
        for other_place, other_worker in state.workers.items()
        if other_place != place
        for key in other_worker.built
    }
    run = choose(state.waiting, worker.built, built_by_others, kinds(state), worker.kind, min_runs)
    if run is None:
        return state, None
    built = worker.built | {engine_key(run.point.experiment)}
    workers = {**state.workers, place: worker._replace(built=built, run=run)}
    waiting = tuple(waiting_run for waiting_run in state.waiting if waiting_run is not run)
    return state._replace(waiting=waiting, workers=workers), run


def end_run(state: Assignment, place: int) -> Assignment:
    worker = state.workers[place]
    assert worker.run is not None, f"the worker at place {place} has no run"
    machines = {**state.machines, engine_key(worker.run.point.experiment): worker.kind}
    workers = {**state.workers, place: worker._replace(run=None)}
    return state._replace(machines=machines, workers=workers)


def lose_worker(state: Assignment, place: int) -> tuple[Assignment, Run | None]:
    worker = state.workers.get(place)
    run = None if worker is None else worker.run
    if run is None:  # a worker without a run is not replaced
        starting = state.starting - {place}
    else:
        starting = state.starting | {place}
    workers = {
        other_place: other_worker
        for other_place, other_worker in state.workers.items()
        if other_place != place
    }
    return state._replace(starting=starting, workers=workers), run


def active(state: Assignment) -> bool:
    return running(state) or bool(state.waiting and state.starting)


def running(state: Assignment) -> bool:
    """Whether a run is in progress."""
    return any(worker.run is not None for worker in state.workers.values())


def idle(state: Assignment) -> list[int]:
    """Places of workers that have answered and have no run."""
    return [place for place, worker in state.workers.items() if worker.run is None]


def kinds(state: Assignment) -> dict[Hashable, Kind]:
    """The kind of machine of each engine that has a result or a run in progress."""
    in_progress = {
        engine_key(worker.run.point.experiment): worker.kind
        for worker in state.workers.values()
        if worker.run is not None
    }
    return {**state.machines, **in_progress}


def choose(
    waiting: Sequence[Run],
    built: Set[Hashable],
    built_by_others: Set[Hashable],
    kinds: Mapping[Hashable, Kind],
    kind: Kind,
    min_runs: int = 2,
) -> Run | None:
    """The next run of a worker on this kind of machine: the first run of an engine that this worker
    has built, or that no worker has built.

    If there is none, the worker helps others: it gets the first run of an engine with at least
    `min_runs` runs that wait. With fewer it is not worth building that engine again. None: the runs
    that are left are for other workers.

    Args:
        built: keys of the engines that this worker has built.
        built_by_others: keys of the engines that other workers have built.
        kinds: the kind of machine that an engine has run on, by the engine's key.
    """
    keys = [engine_key(run.point.experiment) for run in waiting]
    allowed = [i for i, key in enumerate(keys) if kinds.get(key, kind) == kind]
    for i in allowed:
        if keys[i] in built or keys[i] not in built_by_others:
            return waiting[i]
    for i in allowed:
        if keys.count(keys[i]) >= min_runs:
            return waiting[i]
    return None
