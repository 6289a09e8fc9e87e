"""The highest rate that meets the targets, for each cell of a sweep.

    python -m experiments.capacity CONFIG [--set slo.ttft=0.5] [--share 0.9] [--jobs 4]
    python -m experiments.capacity CONFIG --by engine.policy

    --share 0.9         at least this share of requests meets every target of the config's `slo`,
                        as goodput counts them
    --percentile 99     or: the 99th percentiles of TTFT and ITL (all gaps pooled) are each within
                        slo.ttft and slo.itl

A request whose class has targets (workload.classes) must meet those in place of `slo`. With
--each-class the share is that of the requests of each class.

A cell is a combination of the config's swept keys, but for `seed`; without a sweep there is one.
With `reseed: true` each repeat, and with `seed` swept each seed, has a search of its own; the
cell's capacity is the geometric mean over its seeds, with a 95 % interval by Student's t on the
logarithms. Without reseed there is one seed, and the median of repeats counts at every rate.

The capacities of the values of a key (--by, or the only swept key) are compared with that of its
first value, as by `compare --by`: in each combination of the other keys and pooled, paired by seed,
with p corrected for many comparisons.

Each probe measures a cell at one rate. The rate is workload.arrivals.rate. For a trace it is
workload.rate; without one it is 1 / time_scale, a multiple of the recorded speed. A probe is a
point of the sweep <out>/<name>-capacity, so the same command resumes after the finished probes. The
first probe has the config's own rate. The next ones double or halve it until one probe meets the
targets and one does not; then the geometric middle of the two is probed, until they are within
`tolerance`. --jobs N runs N probes of different searches at a time, if they are simulated.

Bisection assumes that every rate below a met rate is met too. This need not hold: a batch that
happens to fill better can reverse it. So two rates above the answer are probed as well, and the
answer says if a rate was met above a rate that was not. The answer is valid for this workload: with
few requests, the queue of a rate that is too high has no time to grow, and the answer is too high.
The command warns if the run at the answer is too short (few requests decide, the queue still grew
at its end, or the share that misses is not known): docs/design/comparisons.md.

Results: capacity.json and capacity.html in the folder of the sweep, and --json FILE.

Exit status: 0 found for each cell, 1 not found or a run failed (the output gives the reason), 2
the config is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import report
from experiments.analysis import by_key, capacities, run_length
from experiments.analysis.capacities import CellAnswer, Compared, SeedAnswer
from experiments.analysis.sweep_points import aligned, number
from experiments.core import config, parallel, selection, store, sweep, what_ran
from experiments.core.config import Point, Slo
from experiments.core.distributions import AtOnce, Changing, ClosedLoop, ServiceClass
from experiments.core.engines import plan_runs
from experiments.core.execution import head_of
from experiments.core.optional_imports import require
from experiments.core.overrides import override_all
from experiments.core.records import RequestRecord
from experiments.core.service import has_target, meets, targets_of
from experiments.core.store import flatten
from experiments.core.strict_yaml import load_file
from experiments.core.workloads import Recorded, RecordedRun, Sessions, Spec
from pagedjax.server.load_client.summary import PERCENTILES

MAX_BRACKET_PROBES = 12  # to find one met rate and one unmet rate
PROBES_ABOVE = 2  # probes above the answer


@dataclass(frozen=True)
class Criterion:
    """The condition on a rate: a share of requests, or a percentile of each latency, within the
    targets.

    classes: those of the workload, whose targets count in place of `slo`.
    each_class: the share is that of each class.
    """

    slo: Slo
    share: float = 0.9
    percentile: int | None = None
    classes: tuple[ServiceClass, ...] = ()
    each_class: bool = False

    def __post_init__(self) -> None:
        if self.each_class and not self.classes:
            raise ValueError(
                "--each-class is given, and the workload has no classes; set workload.classes, or "
                "leave it out"
            )
        if self.each_class and self.percentile is not None:
            raise ValueError(
                "--each-class and --percentile are both given; a percentile is that of all "
                "requests, so leave one of them out"
            )
        has_class_targets = any(map(has_target, self.classes)) and self.percentile is None
        if self.slo.ttft is None and self.slo.itl is None and not has_class_targets:
            raise ValueError(
                "slo has no target to meet; give one in seconds, such as --set slo.ttft=0.5"
            )
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"--share is {self.share}; it must be above 0 and at most 1")

    def values(self, summaries: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The deciding numbers, each the median over repeats, by their columns in a summary.

        Raises:
            ValueError: ITL is the only target, and no request has a second token.
        """
        rows = [flatten(summary["metrics"]) for summary in summaries]
        if self._has_itl_alone and all(row["itl_s.p50"] is None for row in rows):
            raise ValueError(
                "slo has itl alone, and no request has a second token, so every rate would meet "
                "it; set slo.ttft, or give the workload longer outputs"
            )
        columns = [self._share_column]
        if self.percentile is not None:
            targets = {"ttft_s": self.slo.ttft, "itl_s": self.slo.itl}
            columns = [
                f"{name}.p{self.percentile}"
                for name, target in targets.items()
                if target is not None
            ]
        values = {name: [row[name] for row in rows if row[name] is not None] for name in columns}
        # without gaps there is no ITL
        return {name: statistics.median(repeats) for name, repeats in values.items() if repeats}

    @property
    def _has_itl_alone(self) -> bool:
        return self.slo.itl is not None and self.slo.ttft is None and not self.classes

    @property
    def _share_column(self) -> str:
        return "goodput.least_class_share" if self.each_class else "goodput.share"

    def limit_of(self, column: str) -> float:
        """The limit of a deciding number: the least share, or the largest latency in seconds."""
        limits = {
            self._share_column: self.share,
            f"ttft_s.p{self.percentile}": self.slo.ttft,
            f"itl_s.p{self.percentile}": self.slo.itl,
        }
        limit = limits[column]
        assert limit is not None, "`values` has only latencies with a target"
        return limit

    def is_met(self, values: dict[str, float]) -> bool:
        if self.percentile is None:
            return values[self._share_column] >= self.share
        return all(value <= self.limit_of(name) for name, value in values.items())

    def in_time(self, request: RequestRecord) -> bool:
        """Whether a request meets the targets by itself. With a percentile, one target decides:
        that of TTFT; or, if ITL alone has a target, that of the percentile of the request's gaps.
        """
        if self.percentile is None:
            classes = {service_class.name: service_class for service_class in self.classes}
            return meets(request, targets_of(request, self.slo, classes))
        if self.slo.ttft is not None:
            return request.ttft is not None and request.ttft <= self.slo.ttft
        assert self.slo.itl is not None, "a criterion has a target"
        if not request.has_gaps:
            return meets(request, self.slo)
        gaps = [gap for branch in request.branches for gap in branch.gaps]
        return not gaps or float(np.percentile(gaps, self.percentile)) <= self.slo.itl

    def __str__(self) -> str:
        targets = {"TTFT": self.slo.ttft, "ITL": self.slo.itl}
        words = " and ".join(
            f"{name} within {target:g} s" for name, target in targets.items() if target is not None
        )
        if self.classes and self.percentile is None:
            words = " and ".join(
                filter(None, ["the targets of their class", words and f"else {words}"])
            )
            whose = "requests of each class" if self.each_class else "requests"
            return f"{100 * self.share:g}% of {whose}: {words}"
        if self.percentile is None:
            return f"{100 * self.share:g}% of requests: {words}"
        return f"p{self.percentile}: {words}"


class Probe(NamedTuple):
    """The result at a rate."""

    rate: float
    met: bool
    alone: bool  # it was not met, and no two requests overlapped: a lower rate changes nothing
    values: Mapping[str, float]


class Bounds(NamedTuple):
    """The range of the search: it begins at `start`, or stays within `low` and `high`.

    tolerance: how close the answer must be, as a share of the rate.
    """

    start: float
    low: float | None = None
    high: float | None = None
    tolerance: float = 0.05


def bracket(probes: Sequence[Probe]) -> tuple[float, float]:
    """The two rates that the capacity is between.

    Returns:
        (the highest met rate below the lowest rate that was not met, or 0; the lowest rate that
        was not met, or infinity).
    """
    lowest_unmet = min((probe.rate for probe in probes if not probe.met), default=math.inf)
    met_rates = [probe.rate for probe in probes if probe.met and probe.rate < lowest_unmet]
    return max(met_rates, default=0.0), lowest_unmet


def next_rate(probes: Sequence[Probe], bounds: Bounds) -> float | None:
    """The rate to probe after `probes`; None when the search is over.

    Pure, so that a search can be resumed.
    """
    start, low, high, tolerance = bounds
    probed = {probe.rate for probe in probes}
    given_rates = [rate for rate in (low, high) if rate is not None]
    for rate in given_rates or [start]:
        if rate not in probed:  # the search begins with these rates
            return rate
    highest_met, lowest_unmet = bracket(probes)
    if highest_met == 0.0:
        ended = (
            low is not None
            or len(probes) > MAX_BRACKET_PROBES
            or any(probe.alone for probe in probes)
        )
        return None if ended else rounded(lowest_unmet / 2)
    if lowest_unmet == math.inf:
        ended = high is not None or len(probes) > MAX_BRACKET_PROBES
        return None if ended else rounded(2 * highest_met)
    middle = rounded(math.sqrt(highest_met * lowest_unmet))
    is_wide = lowest_unmet > highest_met * (1 + tolerance)
    if is_wide and highest_met < middle < lowest_unmet:
        return middle
    # the answer is known; do higher rates not meet the targets either?
    for i in range(1, PROBES_ABOVE + 1):
        rate = rounded(lowest_unmet * (1 + tolerance) ** i)
        is_probed = any(abs(rate - other_rate) < rate * tolerance / 2 for other_rate in probed)
        if not is_probed and (high is None or rate < high):
            return rate
    return None


def rounded(rate: float) -> float:
    """The rate with four digits, so that it is readable and the same in every search."""
    return float(f"{rate:.4g}")


def met_above_limit(probes: Sequence[Probe]) -> list[float]:
    """The rates that were met above the lowest rate that was not."""
    _, lowest_unmet = bracket(probes)
    return sorted(probe.rate for probe in probes if probe.met and probe.rate > lowest_unmet)


def never_overlap(requests: Sequence[RequestRecord]) -> bool:
    """Whether each request had ended before the next one came."""
    return all(a.e2e is not None and a.arrival + a.e2e <= b.arrival for a, b in pairwise(requests))


def rate_of(workload: Spec) -> tuple[float, str, str]:
    """(rate, unit, key of the config that sets it) of a workload."""
    if isinstance(workload, Recorded) and workload.rate is not None:
        return workload.rate, "requests/s", "workload.rate"
    if isinstance(workload, Recorded | RecordedRun):
        # a time_scale of 0 has no rate (all requests at once): begin with the recorded speed
        rate = 1 / workload.time_scale if workload.time_scale else 1.0
        return rate, "times as recorded", "workload.time_scale"
    if isinstance(workload.arrivals, Changing):
        return workload.arrivals.scale, "times the config's rates", "workload.arrivals.scale"
    if workload.arrivals is None:
        raise ValueError(
            f"workload.kind is {workload.kind!r}, whose arrivals have no rate; set "
            "workload.arrivals, such as {process: poisson, rate: 1.0}"
        )
    if isinstance(workload.arrivals, AtOnce | ClosedLoop):
        raise ValueError(
            f"workload.arrivals.process is {workload.arrivals.process}, which has no rate; set "
            "one that has, such as --set 'workload.arrivals={process: poisson, rate: 1.0}'"
        )
    unit = "sessions/s" if isinstance(workload, Sessions) else "requests/s"
    return workload.arrivals.rate, unit, "workload.arrivals.rate"


def read_config(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Point]]:
    """The raw config after `overrides`, and its points.

    Raises:
        ValueError: it sweeps the rate.
    """
    raw = load_file(path)
    override_all(raw, overrides)
    points = config.expand(raw, folder=path.parent)
    for point in points:
        rate, _, key = rate_of(point.experiment.workload)
        if key in point.swept:
            raise ValueError(
                f"the config sweeps {key}, which is the rate that is looked for; fix it with --set "
                f"{key}={rate:g}, where the search begins"
            )
    return raw, points


class Search(NamedTuple):
    """The search for the capacity of a cell with one seed.

    base: the point of the config.
    criterion: the condition on a rate, with the point's own targets: they may be swept.
    repeat: the only repeat that the search measures; None: it measures all, and their median
        counts.
    """

    base: Point
    criterion: Criterion
    bounds: Bounds
    repeat: int | None
    probes: tuple[Probe, ...] = ()

    @property
    def cell(self) -> dict[str, Any]:
        """The swept keys but for the seed."""
        return {key: value for key, value in self.base.swept.items() if key != "seed"}

    @property
    def cell_label(self) -> str:
        return self.base._replace(swept=self.cell).label

    @property
    def seed(self) -> int | None:
        """The seed of the search's workload; None if the cell has one seed only."""
        if self.repeat is None and "seed" not in self.base.swept:
            return None
        return self.base.experiment.seed + (self.repeat or 0)

    @property
    def name(self) -> str:
        """The cell and the seed of the search, in words."""
        return self.cell_label if self.seed is None else f"{self.cell_label}, seed {self.seed}"

    @property
    def unit(self) -> str:
        return rate_of(self.base.experiment.workload)[1]

    @property
    def repeats(self) -> list[int]:
        """The repeats that each probe of the search measures."""
        every_repeat = list(range(self.base.experiment.repeats))
        return every_repeat if self.repeat is None else [self.repeat]

    @property
    def next_rate(self) -> float | None:
        return next_rate(self.probes, self.bounds)


def searches_of(points: Sequence[Point], options: argparse.Namespace) -> list[Search]:
    """A search for each cell and seed.

    Raises:
        ValueError: a swept seed and a repeat draw the same workload; or, with --percentile, cells
            have targets for different latencies.
    """
    searches = []
    for point in points:
        experiment = point.experiment
        criterion = Criterion(
            experiment.slo,
            options.share,
            options.percentile,
            experiment.workload.classes or (),
            options.each_class,
        )
        bounds = _bounds(rounded(rate_of(experiment.workload)[0]), options)
        repeats = range(experiment.repeats) if experiment.reseed else [None]
        searches += [Search(point, criterion, bounds, repeat) for repeat in repeats]
    if options.percentile is not None:
        _check_same_latencies([search.criterion.slo for search in searches])
    names = [search.name for search in searches if search.seed is not None]
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name is not None:
        raise ValueError(
            f"two searches are of {repeated_name}: seed is swept, and with reseed repeat r has "
            "seed + r; "
            "leave one of the two out, or sweep seeds that are further apart"
        )
    return searches


def _check_same_latencies(targets: Sequence[Slo]) -> None:
    """Raises ValueError if a latency has a target in some cells and none in others."""
    for name in ("ttft", "itl"):
        if len({getattr(slo, name) is None for slo in targets}) > 1:
            raise ValueError(
                f"slo.{name} is null in some cells and a target in others, so that their "
                "percentiles are not of the same latencies; set it in all cells or in none, or "
                "give --share instead of --percentile"
            )


def point_at(raw: dict[str, Any], base: Point, folder: Path, rate: float) -> Point:
    """A point of the config at a rate, under the name <name>-capacity."""
    _, _, key = rate_of(base.experiment.workload)
    swept = {**base.swept, key: 1 / rate if key == "workload.time_scale" else rate}
    (point,) = config.expand({**raw, "name": _name(base), "sweep": {"list": [swept]}}, folder)
    return point


def compared_key(points: Sequence[Point], name: str | None) -> str | None:
    """The key whose values are compared: the named key, or else the only swept key. None if no key
    is named and none or several are swept, or the rates of the cells have several units.

    Raises:
        ValueError: a key is named, and it has less than two values, or the units differ.
    """
    units = dict.fromkeys(rate_of(point.experiment.workload)[1] for point in points)
    if len(units) > 1 and name is None:
        return None
    if len(units) > 1:
        raise ValueError(
            f"--by is {name!r}, and the rates of the cells are {' or '.join(units)}, which have no "
            "ratio; leave --by out, or sweep workloads with one unit"
        )
    runs = [{"swept": point.swept, "repeat": 0} for point in points]
    keys = [key for key in selection.differing(runs) if key != by_key.SEED]
    if name is not None:
        return selection.key_of("--by", name, keys)
    return keys[0] if len(keys) == 1 else None


def _name(base: Point) -> str:
    """The name of the sweep of probes. The config's own name is that of another sweep."""
    return f"{base.experiment.name}-capacity"


class Probed:
    """The points and runs that the searches need so far, and their summaries.

    Each round measures the missing runs of all searches, so that the folder is one sweep.
    """

    def __init__(
        self, raw: dict[str, Any], config_folder: Path, folder: Path, command: str
    ) -> None:
        self._raw = raw
        self._config_folder = config_folder
        self.folder = folder
        self._command = command
        self._points: dict[tuple[str, float], Point] = {}  # by the key of the base, and the rate
        self._repeats: dict[str, set[int]] = {}  # by the key of the point
        self._finished: dict[tuple[str, int], dict[str, Any]] = {}  # summaries, by point and repeat

    @property
    def points(self) -> list[Point]:
        """All points, in the order of their cells, and within a cell of their rates."""
        bases = list(dict.fromkeys(base for base, _ in self._points))
        places = sorted(self._points, key=lambda place: (bases.index(place[0]), place[1]))
        return [self._points[place] for place in places]

    def point(self, search: Search, rate: float) -> Point:
        """The point of a search at a rate. Its repeats are needed from now on."""
        place = (search.base.key, rate)
        if place not in self._points:
            point = point_at(self._raw, search.base, self._config_folder, rate)
            self._points[place] = point
        point = self._points[place]
        self._repeats.setdefault(point.key, set()).update(search.repeats)
        return point

    def measure(self, measure_all: sweep.Measure) -> dict[tuple[str, int], dict[str, Any]]:
        """Measure the missing runs. Returns all summaries, by key of the point and repeat."""
        remedy = f"Delete {self.folder} to measure all probes again"
        points = self.points
        plan = [run for run in plan_runs(points, 1) if run.repeat in self._repeats[run.point.key]]
        sweep.write_sweep(self.folder, points, self._command)
        new_runs = [run for run in plan if (run.point.key, run.repeat) not in self._finished]
        self._finished |= sweep.finished_runs(new_runs, self.folder, remedy)
        for run in plan:  # its place in the sweep changes with every round
            if (run.point.key, run.repeat) in self._finished:
                self._finished[run.point.key, run.repeat] |= head_of(run)
        summaries = sweep.measure_missing(
            plan, self.folder, self._finished, measure_all, quiet=True, remedy=remedy
        )
        return {(summary["point"], summary["repeat"]): summary for summary in summaries}


def run_searches(
    searches: Sequence[Search],
    probed: Probed,
    measure_all: sweep.Measure,
    *,
    quiet: bool,
) -> list[Search]:
    """Run searches in rounds until all are over. A round probes the next rate of each search.

    Returns:
        The searches with their probes.
    """
    updated_searches = list(searches)
    while True:
        next_rates = {i: search.next_rate for i, search in enumerate(updated_searches)}
        rates = {i: rate for i, rate in next_rates.items() if rate is not None}
        if not rates:
            return updated_searches
        points = {i: probed.point(updated_searches[i], rate) for i, rate in rates.items()}
        summaries = probed.measure(measure_all)
        for i, rate in rates.items():
            search = updated_searches[i]
            probe_summaries = [summaries[points[i].key, repeat] for repeat in search.repeats]
            probe = probe_of(rate, probe_summaries, search.criterion, probed.folder)
            updated_searches[i] = search._replace(probes=(*search.probes, probe))
            name = f"{search.name}: " if len(updated_searches) > 1 else ""
            if not quiet:
                text = f"{name}{rate:g} {search.unit}: {'met' if probe.met else 'not met'}"
                print(text, file=sys.stderr)


def probe_of(
    rate: float, summaries: Sequence[dict[str, Any]], criterion: Criterion, folder: Path
) -> Probe:
    """The probe of a rate.

    Raises:
        RuntimeError: a repeat failed.
        ValueError: see `Criterion.values`.
    """
    for summary in summaries:
        if summary["failed"]:
            raise RuntimeError(
                f"the run at rate {rate:g}, repeat {summary['repeat']}, failed: {summary['failed']}"
            )
    values = criterion.values(summaries)
    met = criterion.is_met(values)
    alone = not met and never_overlap(store.read_requests(folder / summaries[0]["run"]))
    return Probe(rate, met, alone, values)


def answer_sentences(
    probes: Sequence[Probe], bounds: Bounds, criterion: Criterion, unit: str
) -> list[str]:
    """The answer in sentences."""
    highest_met, lowest_unmet = bracket(probes)
    if highest_met == 0.0 and any(probe.alone for probe in probes):
        return [
            f"No capacity: not met at {lowest_unmet:g} {unit}, where no two requests overlap. "
            "Loosen the config's slo."
        ]
    if highest_met == 0.0:
        return [
            f"No capacity found: not met even at {lowest_unmet:g} {unit}. Give a lower --low, or "
            "loosen the config's slo."
        ]
    if lowest_unmet == math.inf:
        advice = "The number of requests is too small for a limit; raise it"
        if bounds.high:
            advice = "Give a higher --high"
        return [f"No limit found: met even at {highest_met:g} {unit}. {advice}."]
    sentences = [
        f"Capacity: {highest_met:g} {unit} ({lowest_unmet:g} is too much), by {criterion}."
    ]
    higher = met_above_limit(probes)
    if higher:
        rates = " and ".join(f"{rate:g}" for rate in higher)
        sentences.append(
            f"Not monotone: met at {rates} although not at {lowest_unmet:g}, so the limit is "
            f"between {highest_met:g} and a rate above {max(higher):g}. More requests or repeats "
            "give a better answer."
        )
    return sentences


def table(probes: Sequence[Probe], unit: str) -> str:
    """The probes in order of rate, with the deciding numbers."""
    rows = sorted(probes, key=lambda probe: probe.rate)
    columns = {unit: [f"{probe.rate:g}" for probe in rows]}
    for name in dict.fromkeys(name for probe in rows for name in probe.values):
        columns[name] = [number(probe.values.get(name, math.nan)) for probe in rows]
    return aligned({**columns, "": ["met" if probe.met else "not met" for probe in rows]})


def too_short(search: Search, probed: Probed) -> list[str]:
    """Why the run at the highest met rate is too short for the answer."""
    rate, lowest_unmet = bracket(search.probes)
    if not 0.0 < rate < lowest_unmet < math.inf:
        return []
    point = probed.point(search, rate)
    run_folder = store.run_folder(probed.folder, point.key, search.repeats[0])
    requests = store.read_requests(run_folder)
    criterion = search.criterion
    in_time = [criterion.in_time(request) for request in requests]
    share = criterion.share if criterion.percentile is None else criterion.percentile / 100
    return run_length.reasons(requests, in_time, share, search.bounds.tolerance)


def answers(searches: Sequence[Search], probed: Probed) -> list[CellAnswer]:
    """The answers of the searches, by cell."""
    cells: dict[str, CellAnswer] = {}
    for search in searches:
        highest_met, lowest_unmet = bracket(search.probes)
        answer = SeedAnswer(
            search.seed,
            highest_met,
            lowest_unmet,
            tuple(answer_sentences(search.probes, search.bounds, search.criterion, search.unit)),
            tuple(too_short(search, probed)),
            tuple((probe.rate, probe.met, dict(probe.values)) for probe in search.probes),
        )
        new_cell = CellAnswer(search.cell, search.cell_label, search.unit, ())
        cell = cells.get(search.cell_label, new_cell)
        cells[search.cell_label] = cell._replace(seeds=(*cell.seeds, answer))
    return list(cells.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    path = Path(options.config)
    command = shlex.join(["python", "-m", "experiments.capacity", *arguments])
    try:
        raw, points = read_config(path, options.set)
        parallel.check(points, options.jobs, "loky")
        searches = searches_of(points, options)
        key = compared_key(points, options.by)
        folder = Path(options.out) / _name(points[0])
        require("matplotlib")
        store.clean(folder)
        probed = Probed(raw, path.parent, folder, command)
        measure_all = _measure_function(options)
        finished: list[Search] = []
        for group in _groups(searches):
            finished += run_searches(group, probed, measure_all, quiet=options.quiet)
        cells = answers(finished, probed)
        compared = capacities.compared(cells, key, options.tolerance) if key else None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes after the finished probes", file=sys.stderr)
        return 130
    result = _result(finished, cells, probed.points, compared)
    store.write_file(folder / "capacity.json", store.json_text(result))
    if options.json:
        store.write_file(Path(options.json), store.json_text(result))
    store.write_file(folder / "capacity.html", page(finished, cells, folder, compared))
    if devices := what_ran.simulated_devices(probed.points):
        print(f"{devices}: every time is calculated")
    if len(finished) == 1:
        print(table(finished[0].probes, finished[0].unit))
    else:
        print(capacities.text_table(cells))
    print(*reading(finished, cells), *layers_of(folder), sep="\n")
    if compared:
        print("", compared.text, *compared.notes, sep="\n")
    print(f"runs: {folder}\nreport: {folder / 'capacity.html'}")
    return 0 if all(cell.is_found for cell in cells) else 1


def _measure_function(options: argparse.Namespace) -> sweep.Measure:
    """The function that measures probes: in several processes, or in this process."""
    if (options.jobs or 1) > 1:
        return partial(parallel.results, jobs=options.jobs)
    return partial(sweep.run_in_turn, engines=sweep.make_engines(1, quiet=options.quiet))


def _groups(searches: Sequence[Search]) -> list[list[Search]]:
    """The groups of searches that share rounds. Simulated searches are one group. Else each cell
    is a group, so that its engine is built once.
    """
    if all(search.base.experiment.simulate for search in searches):
        return [list(searches)]
    by_cell: dict[str, list[Search]] = {}
    for search in searches:
        by_cell.setdefault(search.cell_label, []).append(search)
    return list(by_cell.values())


def reading(searches: Sequence[Search], cells: Sequence[CellAnswer]) -> list[str]:
    """The answer in sentences, the most important first."""
    if len(searches) == 1:
        (answer,) = cells[0].seeds
        return [" ".join(answer.sentences), *capacities.too_short_sentences(cells)]
    criteria = " or ".join(dict.fromkeys(str(search.criterion) for search in searches))
    sentences = [
        f"Capacities by {criteria}; the next rate that was tried with a seed, at most "
        f"{100 * searches[0].bounds.tolerance:g} % higher, does not meet it."
    ]
    if all(len(cell.seeds) == 1 for cell in cells):
        sentences.append(
            "One seed: an interval over seeds needs `repeats: 3` or more, and `reseed: true`."
        )
    return [
        *sentences,
        *capacities.unmet_sentences(cells),
        *capacities.too_short_sentences(cells),
    ]


def layers_of(folder: Path) -> list[str]:
    """What sequences keep, of each kind of engine that was probed; [] if queries see all blocks."""
    environments = [report.environment(run) for run in store.read_runs(folder)]
    return list(dict.fromkeys(env["layers"] for env in environments if "layers" in env))


def page(
    searches: Sequence[Search],
    cells: Sequence[CellAnswer],
    folder: Path,
    compared: Compared | None = None,
) -> str:
    """The HTML of capacity.html: the page of a report about cells (capacity.html.jinja)."""
    from experiments.analysis import capacity_figures

    runs = store.read_runs(folder)
    limits: dict[str, list[float]] = {}
    for search in searches:
        for column in search.probes[0].values:
            limit = search.criterion.limit_of(column)
            if limit not in limits.setdefault(column, []):
                limits[column].append(limit)
    return report.render(
        "capacity.html.jinja",
        json.loads((folder / "sweep.json").read_text(encoding="utf-8")),
        runs,
        [report.environment(run) for run in runs],
        capacity_figures.sections(cells, limits),
        reading=[*reading(searches, cells), *layers_of(folder)],
        tiles=capacities.tiles(cells),
        table=capacities.page_table(cells),
        compared=compared,
        criterion=" or ".join(dict.fromkeys(str(search.criterion) for search in searches)),
        tolerance=f"{100 * searches[0].bounds.tolerance:g} %",
    )


def _result(
    searches: Sequence[Search],
    cells: Sequence[CellAnswer],
    points: Sequence[Point],
    compared: Compared | None,
) -> dict[str, Any]:
    """The content of capacity.json. If there is only one search, its answer is at the top level
    too.
    """
    result: dict[str, Any] = {
        "criterion": " or ".join(dict.fromkeys(str(search.criterion) for search in searches)),
        "unit": " or ".join(dict.fromkeys(search.unit for search in searches)),
        "tolerance": searches[0].bounds.tolerance,
        "simulated": what_ran.simulated_devices(points),
        "cells": [capacities.json_fields(cell) for cell in cells],
    }
    if compared:
        result |= {
            "by": compared.key,
            "baseline": compared.baseline,
            "comparisons": [
                by_key.json_fields(row, capacities.CONFIDENCE) for row in compared.rows
            ],
        }
    if len(searches) == 1:
        probes = searches[0].probes
        highest_met, lowest_unmet = bracket(probes)
        result |= {
            "met": highest_met,
            "unmet": lowest_unmet if lowest_unmet < math.inf else None,
            "above": met_above_limit(probes),
            "probes": [probe._asdict() for probe in probes],
        }
    return result


def _bounds(start: float, options: argparse.Namespace) -> Bounds:
    low = options.low
    high = options.high
    tolerance = options.tolerance
    for name, rate in (("--low", low), ("--high", high)):
        if rate is not None and not 0.0 < rate < math.inf:
            raise ValueError(f"{name} is {rate}; it must be a rate above 0")
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"--low is {low:g} and --high {high:g}; the lower bound must be below the higher one"
        )
    if not 0.001 <= tolerance <= 1.0:
        raise ValueError(
            f"--tolerance is {tolerance}; it is a share of the rate, at least 0.001 and at most 1"
        )
    return Bounds(start, low, high, tolerance)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.capacity",
        description="Find the highest rate at which a workload meets its targets.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="a YAML file with arrivals that have a rate and with an slo")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="override a key; c is YAML"
    )
    parser.add_argument(
        "--each-class",
        action="store_true",
        help="the share is that of the requests of each class of the workload",
    )
    criterion = parser.add_mutually_exclusive_group()
    criterion.add_argument(
        "--share",
        type=float,
        default=0.9,
        help="share of the requests that must meet the slo (default: 0.9)",
    )
    criterion.add_argument(
        "--percentile",
        type=int,
        choices=PERCENTILES,
        help="compare this percentile of TTFT and of ITL with the slo, instead of a share",
    )
    parser.add_argument(
        "--low",
        type=float,
        help="lowest rate to probe (default: the config's own rate is halved until one is met)",
    )
    parser.add_argument(
        "--high",
        type=float,
        help="highest rate to probe (default: the config's own rate is doubled until one is not "
        "met)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="how close the answer must be, as a share of the rate (default: 0.05)",
    )
    parser.add_argument(
        "--by",
        metavar="KEY",
        help="compare the capacities of the values of this swept key (default: the only one)",
    )
    parser.add_argument("--out", default="runs", help="folder of results (default: runs)")
    parser.add_argument(
        "--jobs", type=int, help="simulated probes of different searches at a time (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write capacity.json to this file")
    parser.add_argument("--quiet", action="store_true", help="print nothing until the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
