"""The smallest set of requests that still shows a difference of two runs: `shrink(first, second)`.

Requests are left out by delta debugging, ddmin (Zeller & Hildebrandt 2002): subsets and their
complements are tried, in ever smaller parts, until no single request can be left out. What is left
is a smallest set in this sense (1-minimal), and not always the smallest of all.

Both schedulers run again with each set. A set shows the difference if the first other decision of
these runs is of the same kind. If fewer requests show it when they come closer together than
recorded, they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from experiments.laboratory.contents import Refused
from experiments.laboratory.differences import Difference, difference, kind_of_difference
from experiments.laboratory.past import Past, Recorded
from experiments.laboratory.rerun import Change, Run, StepTime, count, run, unchanged
from pagedjax.host.event_log import Cancel, Schedule, Submit
from pagedjax.host.scheduler import Rejected
from pagedjax.host.types import Plan

SCALES = (0.0, 0.125, 0.25, 0.5)  # of the times between requests


class Shrunk(NamedTuple):
    """The result of `shrink`.

    arrivals: those of the requests that are left.
    kind: of the difference that they show.
    tries: how many sets of requests were run.
    scale: the times between requests, over the recorded ones.
    first, second: both runs with these requests, not yet gone through.
    """

    arrivals: tuple[int, ...]
    kind: str
    tries: int
    scale: float
    first: Run
    second: Run


def shrink(first: Past, second: Past) -> Shrunk:
    """Leaves out requests until no further one can be.

    Raises:
        Refused: the runs do not differ in a decision, have other requests, or do not differ when
            they run again from their inputs.
    """
    result = difference(first, second)
    _check_shrinkable(first, second, result)
    sides = _sides(first, second)
    candidates = _before(first, result.step)
    tries = 0

    def shows(arrivals: Sequence[int], sides: tuple[_Side, _Side]) -> bool:
        nonlocal tries
        tries += 1
        return kind_with(sides, arrivals) == result.kind

    if not shows(candidates, sides):
        raise Refused(
            f"both schedulers run again with the {len(candidates)} requests before step "
            f"{result.step} do not differ in {result.kind!r} first, so the difference depends on "
            "times that differ between the recordings; record both without times, or simulated"
        )
    arrivals = ddmin(candidates, partial(shows, sides=sides))
    best_scale = 1.0
    for scale in SCALES:
        closer = (_closer(sides[0], scale), _closer(sides[1], scale))
        if best_scale == 1.0 and shows(arrivals, closer):
            fewer = ddmin(arrivals, partial(shows, sides=closer))
            if len(fewer) < len(arrivals):
                arrivals = fewer
                sides = closer
                best_scale = scale
    return Shrunk(tuple(arrivals), result.kind, tries, best_scale, *_runs(sides, arrivals))


def ddmin(items: Sequence[int], shows: Callable[[Sequence[int]], bool]) -> list[int]:
    """A subset of `items` that shows something, and no longer does without any one of its items.

    Args:
        shows: whether a subset shows it. All items together do.
    """
    items = list(items)
    parts = 2
    tried: set[tuple[int, ...]] = set()

    def is_new_and_shows(subset: Sequence[int]) -> bool:
        key = tuple(subset)
        if key in tried:
            return False
        tried.add(key)
        return shows(subset)

    while len(items) >= 2:
        chunks = [items[start:stop] for start, stop in _cuts(len(items), parts)]
        subset = next((chunk for chunk in chunks if is_new_and_shows(chunk)), None)
        if subset is not None:
            items = subset
            parts = 2
            continue
        complements = [
            [item for item in items if item not in excluded] for excluded in map(set, chunks)
        ]
        complement = next((part for part in complements if is_new_and_shows(part)), None)
        if complement is not None:
            items = complement
            parts = max(parts - 1, 2)
        elif parts < len(items):
            parts = min(2 * parts, len(items))
        else:
            break
    return items


def _cuts(number: int, parts: int) -> Iterator[tuple[int, int]]:
    """Where to cut a list of items into parts of almost equal size."""
    for part in range(parts):
        yield number * part // parts, number * (part + 1) // parts


class _Side(NamedTuple):
    past: Past
    change: Change


def _closer(side: _Side, scale: float) -> _Side:
    """The side whose requests come at shares of their recorded times. A client leaves as long after
    its request as recorded.
    """
    submitted: dict[int, float] = {}
    entries: list[Recorded] = []
    for recorded in side.past.entries:
        at = scale * recorded.at
        if isinstance(recorded.entry, Submit) and recorded.arrival is not None:
            submitted[recorded.arrival] = recorded.at
        elif isinstance(recorded.entry, Cancel) and recorded.arrival is not None:
            came = submitted.get(side.past.outputs[recorded.arrival].first, 0.0)
            at = scale * came + recorded.at - came
        entries.append(recorded._replace(at=at))
    past = side.past._replace(entries=tuple(entries))
    return _Side(past, side.change._replace(follows=False))


def _sides(first: Past, second: Past) -> tuple[_Side, _Side]:
    """What runs again. If the settings differ, both schedulers get the inputs of the first run;
    else it is the inputs that differ, and each has its own.
    """
    first_settings = (first.config, first.policy.name, first.own_policy)
    second_settings = (second.config, second.policy.name, second.own_policy)
    changes = [unchanged(past)._replace(seconds=_step_time(first)) for past in (first, second)]
    inputs_of_second = second if first_settings == second_settings else first
    return _Side(first, changes[0]), _Side(inputs_of_second, changes[1])


def _step_time(past: Past) -> StepTime:
    """Every step takes the median of the recorded ones."""
    if not past.timed:
        return count
    seconds = median([step.seconds for step in past.steps])
    return lambda plan: seconds


def _runs(sides: tuple[_Side, _Side], arrivals: Sequence[int]) -> tuple[Run, Run]:
    """Both runs with some requests alone."""
    requests = frozenset(arrivals)
    first, second = [
        run(side.past, side.change._replace(without=frozenset(side.past.requests) - requests))
        for side in sides
    ]
    return first, second


def kind_with(sides: tuple[_Side, _Side], arrivals: Sequence[int]) -> str:
    """The kind of the first other decision of two runs with some requests; "": there is none."""
    first, second = _runs(sides, arrivals)
    first_plans = _plans(first)
    second_plans = _plans(second)
    try:
        while True:
            first_plan = next(first_plans, None)
            second_plan = next(second_plans, None)
            kind = kind_of_difference(first_plan, second_plan)
            if kind or first_plan is None:
                return kind
    except (Refused, Rejected):
        return ""


def _plans(transitions: Run) -> Iterator[Plan]:
    for transition in transitions:
        if isinstance(transition.entry, Schedule):
            yield transition.entry.plan


def _before(past: Past, step: int) -> list[int]:
    """The arrivals of the requests that came before a step."""
    arrivals: list[int] = []
    steps = 0
    for recorded in past.entries:
        if isinstance(recorded.entry, Schedule):
            if steps == step:
                break
            steps += 1
        elif isinstance(recorded.entry, Submit) and recorded.arrival is not None:
            arrivals.append(recorded.arrival)
    return arrivals


def _check_shrinkable(first: Past, second: Past, result: Difference) -> None:
    """Raises Refused if there is no difference to show with fewer requests."""
    if not result.kind:
        raise Refused("no decision differs, so there is nothing to shrink")
    ids = [[request.request_id for request in past.requests.values()] for past in (first, second)]
    if ids[0] != ids[1]:
        raise Refused(
            f"A has {len(ids[0])} requests and B has {len(ids[1])}, not the same ones in the same "
            "order; shrink takes two runs of the same requests"
        )
