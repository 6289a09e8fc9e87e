"""Which worker makes which run: a state and its transitions, without Ray.

    new(runs, places)          -> state         a worker starts at each place
    began(state, place, kind)  -> state         it has answered, from this kind of machine
    give(state, place, least)  -> (state, run)  its next run; None: the runs that are left are for others
    finished(state, place)     -> state         its run has a result
    lost(state, place)         -> (state, run)  it is gone; if it had a run, that has failed, and a new worker starts
    active(state)              -> bool          whether a run may still get a result

The runs of an engine are made on one kind of machine: that of its results and of its runs in
progress. If no worker of that kind is left, `waiting` has the rest when the state is no longer
active. They are never made on another kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from experiments.core.engines import Run, engine_key

# of machine: repeats on equal kinds differ by noise alone. Empty: simulated runs, which depend on
# none
Kind = str


class AtPlace(NamedTuple):
    """A worker that has answered. run: in progress; built: keys of its engines."""

    kind: Kind
    built: frozenset[Hashable] = frozenset()
    run: Run | None = None


class Assignment(NamedTuple):
    """starting: places whose worker has not answered. made: engines that have results -> the kind
    of their machine.
    """

    waiting: tuple[Run, ...]
    starting: frozenset[int]
    workers: Mapping[int, AtPlace]  # by the number of their place
    made: Mapping[Hashable, Kind]


def new(runs: Iterable[Run], places: int) -> Assignment:
    return Assignment(tuple(runs), frozenset(range(places)), {}, {})


def began(state: Assignment, place: int, kind: Kind) -> Assignment:
    workers = {**state.workers, place: AtPlace(kind)}
    return state._replace(starting=state.starting - {place}, workers=workers)


def give(state: Assignment, place: int, least: int = 2) -> tuple[Assignment, Run | None]:
    worker = state.workers[place]
    others = {key for other, at in state.workers.items() if other != place for key in at.built}
    run = choose(state.waiting, worker.built, others, kinds(state), worker.kind, least)
    if run is None:
        return state, None
    built = worker.built | {engine_key(run.point.experiment)}
    workers = {**state.workers, place: worker._replace(built=built, run=run)}
    waiting = tuple(one for one in state.waiting if one is not run)
    return state._replace(waiting=waiting, workers=workers), run


def finished(state: Assignment, place: int) -> Assignment:
    worker = state.workers[place]
    assert worker.run is not None, f"the worker at place {place} has no run"
    made = {**state.made, engine_key(worker.run.point.experiment): worker.kind}
    return state._replace(made=made, workers={**state.workers, place: worker._replace(run=None)})


def lost(state: Assignment, place: int) -> tuple[Assignment, Run | None]:
    worker = state.workers.get(place)
    run = None if worker is None else worker.run
    starting = state.starting - {place} if run is None else state.starting | {place}
    workers = {other: at for other, at in state.workers.items() if other != place}
    return state._replace(starting=starting, workers=workers), run


def active(state: Assignment) -> bool:
    return running(state) or bool(state.waiting and state.starting)


def running(state: Assignment) -> bool:
    """Whether a run is in progress."""
    return any(at.run is not None for at in state.workers.values())


def idle(state: Assignment) -> list[int]:
    """Places of workers that have answered and have no run."""
    return [place for place, at in state.workers.items() if at.run is None]


def kinds(state: Assignment) -> dict[Hashable, Kind]:
    """The kind of machine of each engine that has a result or a run in progress."""
    now = {
        engine_key(at.run.point.experiment): at.kind
        for at in state.workers.values()
        if at.run is not None
    }
    return {**state.made, **now}


def choose(
    waiting: Sequence[Run],
    mine: Set[Hashable],
    others: Set[Hashable],
    kinds: Mapping[Hashable, Kind],
    kind: Kind,
    least: int = 2,
) -> Run | None:
    """The next run of a worker on this kind of machine: the first of an engine that it has or that
    no one has.

    Else it helps: the first run of an engine with at least `least` runs that wait, because it
    builds that engine too.
    None: the runs that are left are for others.

    Args:
        mine: keys of the engines that this worker has built.
        others: those that other workers have built.
        kinds: of the machine that an engine has run on.
    """
    keys = [engine_key(run.point.experiment) for run in waiting]
    allowed = [i for i, key in enumerate(keys) if kinds.get(key, kind) == kind]
    near = (i for i in allowed if keys[i] in mine or keys[i] not in others)
    much = (i for i in allowed if keys.count(keys[i]) >= least)
    at = next(near, next(much, None))
    return None if at is None else waiting[at]
