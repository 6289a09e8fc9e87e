"""Who delayed whom in a recorded run: `Audit`.

The requests of a run are in groups: users, classes, or each by itself. A group's time is the sum
over its requests of the seconds from submission to end. Two answers, each a matrix (who causes, who
suffers):

    without     the time of the sufferer minus its time in the run without the causer
    shares      the Shapley values (Shapley 1953) of the delays: a sufferer's delay, its time minus
                its time when its group is alone, is shared among the others. Each gets the mean of
                what it adds when the others come one after the other, over all orders.

The shares of a sufferer add up to its delay. Those of `without` do not: two groups of which one
would suffice for a delay cause none by this rule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import mean, stdev
from typing import NamedTuple

from experiments.laboratory.contents import Refused
from experiments.laboratory.outcomes import outcomes
from experiments.laboratory.past import Past, in_steps
from experiments.laboratory.rerun import Change, Run, count, run, unchanged
from experiments.laboratory.times import StepTimes, fitted

MOST_EXACT = 6  # groups whose Shapley values are exact; more are sampled
Matrix = dict[tuple[str, str], float]  # (who causes, who suffers) -> seconds or steps


def groups_of(past: Past, by: str) -> dict[str, frozenset[int]]:
    """The requests of each group, by their arrivals.

    Args:
        by: "user", "class" or "request".
    """
    groups: dict[str, set[int]] = {}
    for arrival, request in past.requests.items():
        name = {
            "user": request.user,
            "class": request.service_class,
            "request": request.request_id,
        }[by]
        if by == "request" and name in groups:  # an id that was used again
            name = f"{name} ({arrival})"
        groups.setdefault(name or "(none)", set()).add(arrival)
    return {name: frozenset(arrivals) for name, arrivals in groups.items()}


class Case(NamedTuple):
    """A request that a group delayed.

    seconds: its time in the whole run minus that without the group.
    arrival: of its first sequence in the past.
    """

    causer: str
    sufferer: str
    request_id: str
    seconds: float
    arrival: int


class Shares(NamedTuple):
    """Shapley values.

    shares: see the module.
    permutations: that were drawn; None: the values are exact.
    error: by causer, half the width of the 95 % interval of what it caused in total.
    errors: the same of each share.
    """

    shares: Matrix
    permutations: int | None = None
    error: Mapping[str, float] = {}
    errors: Mapping[tuple[str, str], float] = {}


class Result(NamedTuple):
    """What is said of a run.

    by: how its requests are grouped.
    unit: "s" or "steps".
    added: see `without` in the module.
    shares: None: they were not computed, and there are no delays.
    delays: by group, what its shares add up to.
    worst: the cases with the largest delays, the largest first.
    """

    by: str
    unit: str
    added: Matrix
    shares: Shares | None
    delays: Mapping[str, float]
    worst: Sequence[Case]


class Audit:
    """The runs of a past with some of its groups.

    seconds_of_step: the fit to the recording; None: steps are counted.
    num_runs: how many runs were made.
    inexact: what was made up in the run with all groups, see `Run`; empty before that run.
    """

    def __init__(
        self, past: Past, by: str, *, buckets: Sequence[int] | None = None, steps: bool = False
    ) -> None:
        """
        Args:
            buckets: see `times.fitted`.
            steps: count steps also if the recording has times.

        Raises:
            Refused: there are fewer than two groups, or steps have no seconds.
        """
        self.past = in_steps(past) if steps else past
        self.groups = groups_of(past, by)
        if len(self.groups) < 2:
            names = ", ".join(self.groups) or "none"
            raise Refused(
                f"the recording has {len(self.groups)} group by {by} ({names}), and nobody to "
                "delay it; choose another --by"
            )
        self.seconds_of_step: StepTimes | None = None
        if self.past.timed:
            self.seconds_of_step = fitted(past, buckets)
        self.num_runs = 0
        self.inexact: Mapping[str, int] = {}
        self._seconds_of_all: dict[int, float] = {}
        self._change = unchanged(past)._replace(
            seconds=self.seconds_of_step or count, follows=not self.past.timed
        )
        self._totals: dict[frozenset[str], Mapping[str, float]] = {}
        # only requests that ended by themselves: the time of others is that of a client
        self._measured = {
            output.first for output in past.outputs.values() if output.ended in ("stop", "length")
        }
        self._names = {arrival: name for name, group in self.groups.items() for arrival in group}

    @property
    def everyone(self) -> frozenset[str]:
        return frozenset(self.groups)

    def change(self, names: frozenset[str]) -> Change:
        """The run with the requests of some groups alone."""
        absent = self.everyone - names
        without = frozenset().union(*(self.groups[name] for name in absent))
        return self._change._replace(without=without)

    def run(self, names: frozenset[str]) -> Run:
        """See `change`."""
        return run(self.past, self.change(names))

    def seconds(self, names: frozenset[str]) -> dict[int, float]:
        """The time of each measured request in a run of these groups alone, until the last branch
        of the request has ended.
        """
        if names == self.everyone and self._seconds_of_all:
            return self._seconds_of_all
        self.num_runs += 1
        seconds: dict[int, float] = {}
        transitions = self.run(names)
        for outcome in outcomes(transitions).values():
            if outcome.first in self._measured:
                if outcome.seconds is None:
                    raise Refused(
                        f"request {outcome.request.request_id!r} does not end in the run with "
                        f"{', '.join(sorted(names))} alone"
                    )
                seconds[outcome.first] = max(seconds.get(outcome.first, 0.0), outcome.seconds)
        self._totals[names] = self._sums(seconds, names)
        if names == self.everyone:
            self._seconds_of_all = seconds
            self.inexact = transitions.inexact
        return seconds

    def totals(self, names: frozenset[str]) -> Mapping[str, float]:
        """The time of each group in a run of these groups alone."""
        if names not in self._totals:
            self.seconds(names)
        return self._totals[names]

    def _sums(self, seconds: Mapping[int, float], names: frozenset[str]) -> Mapping[str, float]:
        sums = dict.fromkeys(names, 0.0)
        for arrival, value in seconds.items():
            sums[self._names[arrival]] += value
        return sums

    def delays(self) -> dict[str, float]:
        """Of each group, its time in the whole run minus its time alone."""
        totals = self.totals(self.everyone)
        return {name: totals[name] - self.totals(frozenset([name]))[name] for name in self.groups}

    def without(self) -> tuple[Matrix, list[Case]]:
        """The delays by the runs without each group -> (the matrix, all cases, the worst first)."""
        matrix: Matrix = {}
        cases: list[Case] = []
        seconds_of_all = self.seconds(self.everyone)
        for causer in self.groups:
            seconds = self.seconds(self.everyone - {causer})
            matrix |= {(causer, name): 0.0 for name in self.groups if name != causer}
            for arrival, value in seconds.items():
                sufferer = self._names[arrival]
                delay = seconds_of_all[arrival] - value
                matrix[causer, sufferer] += delay
                request_id = self.past.requests[arrival].request_id
                cases.append(Case(causer, sufferer, request_id, delay, arrival))
        return matrix, sorted(cases, key=lambda case: -case.seconds)

    def exact_shares(self) -> Shares:
        """The Shapley values over all sets of groups: 2 ** (number of groups) runs."""
        shares = {
            (causer, sufferer): 0.0
            for causer in self.groups
            for sufferer in self.groups
            if causer != sufferer
        }
        num_causers = len(self.groups) - 1
        for causer, sufferer in shares:
            bystanders = sorted(self.everyone - {causer, sufferer})
            for size in range(len(bystanders) + 1):
                weight = 1 / (num_causers * math.comb(num_causers - 1, size))
                for before in combinations(bystanders, size):
                    present = frozenset([*before, sufferer])
                    added = self._added(causer, sufferer, present)
                    shares[causer, sufferer] += weight * added
        return Shares(shares)

    def sampled_shares(self, permutations: int, seed: int) -> Shares:
        """The Shapley values over some orders that are drawn. In each of them, the shares of a
        sufferer add up to its delay.
        """
        draw = random.Random(seed)
        samples: list[Matrix] = []
        for _ in range(permutations):
            order = draw.sample(sorted(self.groups), len(self.groups))
            samples.append(dict(self._added_in(order)))
        shares = {pair: mean([sample[pair] for sample in samples]) for pair in samples[0]}
        error = {
            name: half_interval([caused(sample, name) for sample in samples])
            for name in self.groups
        }
        errors = {pair: half_interval([sample[pair] for sample in samples]) for pair in shares}
        return Shares(shares, permutations, error, errors)

    def _added_in(self, order: Sequence[str]) -> Iterator[tuple[tuple[str, str], float]]:
        """For each sufferer: what each other group adds to its time, if the sufferer is there first
        and the others come in this order.
        """
        for sufferer in order:
            present = frozenset([sufferer])
            for causer in order:
                if causer != sufferer:
                    yield (causer, sufferer), self._added(causer, sufferer, present)
                    present |= {causer}

    def _added(self, causer: str, sufferer: str, present: frozenset[str]) -> float:
        """What a group adds to the time of a sufferer when it joins those who are present."""
        after = self.totals(present | {causer})[sufferer]
        return after - self.totals(present)[sufferer]


def runs_of_sample(groups: int, permutations: int) -> int:
    """How many runs `sampled_shares` makes at most."""
    return permutations * groups * groups // 2 + groups


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean, by the normal distribution."""
    return 1.96 * stdev(values) / math.sqrt(len(values))


def order(groups: Sequence[str], matrix: Matrix, limit: int) -> tuple[list[str], list[str]]:
    """The rows and the columns of a matrix, who causes and who suffers.

    If all groups fit, both have one order, those who cause most first. Else rows are those who
    cause most, and columns those who suffer most.
    """
    causers = sorted(groups, key=lambda name: -caused(matrix, name))
    if len(groups) <= limit:
        return causers, causers
    sufferers = sorted(groups, key=lambda name: -suffered(matrix, name))
    return causers[:limit], sufferers[:limit]


def caused(matrix: Matrix, name: str) -> float:
    """What a group causes to all others."""
    return sum([value for (causer, _), value in matrix.items() if causer == name])


def suffered(matrix: Matrix, name: str) -> float:
    """What all others cause to a group."""
    return sum([value for (_, sufferer), value in matrix.items() if sufferer == name])
