"""Paired differences of two runs of one past, request by request. Pure functions.

The times of a request are counted from when it came, so a step in progress counts, as a client sees
it. With several branches, the first token is that of the fastest one, and the end is that of the
last one. A request that did not end by itself in both runs has a first token only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from experiments.laboratory.outcomes import Outcome, by_request
from experiments.laboratory.rerun import Predecessor

STATISTICS = ("median", "p90", "p99", "worst")
EVERYBODY = "all"
CONFIDENCE = 0.9


class Times(NamedTuple):
    """What a request got: seconds, or steps.

    first_token, end: since it came.
    mean_gap, largest_gap: between tokens of a sequence that follow each other.
    """

    first_token: float | None = None
    mean_gap: float | None = None
    largest_gap: float | None = None
    end: float | None = None


MEASURES = Times._fields


class Row(NamedTuple):
    """One measure of a group of requests in two runs.

    requests: those that have the measure in both.
    before, after: its median in each run.
    differences: after - before of each request: the statistics of `STATISTICS`.
    low, high: their intervals; (): none.
    """

    group: str
    measure: str
    requests: int
    before: float
    after: float
    differences: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


def came(
    recorded: Mapping[int, Outcome],
    outcomes: Mapping[int, Outcome],
    predecessors: Mapping[int, Predecessor],
) -> dict[int, float]:
    """When each request came in a run, by its arrival: as recorded, or after the end of the request
    that it follows.
    """
    times: dict[int, float] = {}
    for first in {outcome.first for outcome in outcomes.values()}:
        at = recorded[first].submitted
        if first in predecessors:
            ended_at = end_of(outcomes, predecessors[first].arrival)
            at = at if ended_at is None else ended_at + predecessors[first].seconds
        times[first] = at
    return times


def end_of(outcomes: Mapping[int, Outcome], first: int) -> float | None:
    """When the last sequence of a request ended; None: one has not."""
    number = len(outcomes[first].request.names) if first in outcomes else 0
    ends = [outcomes[arrival].ended for arrival in range(first, first + number)]
    times = [end for end in ends if end is not None]
    return max(times) if times and len(times) == len(ends) else None


def times_of(outcomes: Mapping[int, Outcome], came: Mapping[int, float]) -> dict[int, Times]:
    """What each request got, by the arrival of its first sequence."""
    return {first: _times(group, came[first]) for first, group in by_request(outcomes).items()}


def _times(sequences: Sequence[Outcome], came: float) -> Times:
    token_times = [outcome.token_times for outcome in sequences if outcome.token_times]
    first_token = min([times[0] for times in token_times]) - came if token_times else None
    ends = [outcome.ended for outcome in sequences if outcome.ended is not None]
    by_itself = all(outcome.reason in ("stop", "length") for outcome in sequences)
    if not by_itself or not ends:
        return Times(first_token)
    gaps = [b - a for times in token_times for a, b in pairwise(times)]
    return Times(
        first_token,
        sum(gaps) / len(gaps) if gaps else None,
        max(gaps, default=None),
        max(ends) - came,
    )


def groups_of(outcomes: Mapping[int, Outcome]) -> dict[str, list[int]]:
    """The requests of all, of each user and of each class, where there are several, by the arrivals
    of their first sequences; large groups first.
    """
    requests = {outcome.first: outcome.request for outcome in outcomes.values()}
    groups = {EVERYBODY: list(requests)}
    for kind, field in (("user", "user"), ("class", "service_class")):
        names = {first: getattr(request, field) for first, request in requests.items()}
        sizes = Counter(names.values())
        if len(sizes) > 1:
            for name, _ in sizes.most_common():
                members = [first for first, member_name in names.items() if member_name == name]
                groups[f"{kind} {name or '(none)'}"] = members
    return groups


def rows(
    groups: Mapping[str, Sequence[int]], before: Mapping[int, Times], after: Mapping[int, Times]
) -> list[Row]:
    """The paired differences of each group and measure that has any."""
    table: list[Row] = []
    for group, firsts in groups.items():
        for measure in MEASURES:
            pairs = [
                (getattr(before[first], measure), getattr(after[first], measure))
                for first in firsts
                if first in before and first in after
            ]
            values = np.array([pair for pair in pairs if None not in pair], np.float64)
            if values.size:
                table.append(_row(group, measure, values))
    return table


def _row(group: str, measure: str, values: np.ndarray) -> Row:
    """Args:
    values: [requests, 2], before and after.
    """
    differences = values[:, 1] - values[:, 0]
    statistics = (*np.percentile(differences, (50, 90, 99)), differences.max())
    before, after = np.median(values, 0)
    return Row(
        group,
        measure,
        len(values),
        float(before),
        float(after),
        tuple([float(number) for number in statistics]),
    )


def with_intervals(table: Sequence[Row], draws: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows with the interval of their statistics over tables that were drawn.

    It holds the row's own statistics: those of a single clock may lie beside most draws.
    """
    if not draws:
        return list(table)
    tail = 50 * (1 - CONFIDENCE)
    by_key: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for drawn_table in draws:
        for row in drawn_table:
            by_key.setdefault((row.group, row.measure), []).append(row.differences)
    rows_with_intervals: list[Row] = []
    for row in table:
        values = np.array(by_key[row.group, row.measure])
        low = np.minimum(np.percentile(values, tail, 0), row.differences)
        high = np.maximum(np.percentile(values, 100 - tail, 0), row.differences)
        rows_with_intervals.append(row._replace(low=tuple(low.tolist()), high=tuple(high.tolist())))
    return rows_with_intervals
