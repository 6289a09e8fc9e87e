"""The highest rate that meets the targets.

    python -m experiments.capacity CONFIG [--set slo.ttft=0.5] [--share 0.9]

    --share 0.9         at least this share of requests meets every target of the config's `slo`, as goodput counts them
    --percentile 99     or: the 99th percentiles of TTFT and ITL (all gaps pooled) are each within slo.ttft and slo.itl

Each probe measures the config at one rate: workload.arrivals.rate, or of a trace its speed as a
multiple of the recorded one, 1 / time_scale. It is a point of the sweep <out>/<name>-capacity, so
the same command resumes after the finished probes. The first probe has the config's own rate. The
next ones double or halve it until one probe meets the targets and one does not; then the geometric
middle of the two is probed, until they are within `tolerance`. The median of repeats counts.

Bisection assumes that every rate below a met rate is met too. This need not hold: a batch that
happens to fill better can reverse it. So two rates above the answer are probed as well, and the
answer says if a rate was met above a rate that was not. The answer is valid for this workload: with
few requests, the queue of a rate that is too high has no time to grow, and the answer is too high.

Exit status: 0 found, 1 not found or a run failed (the last line gives the reason), 2 the config is
wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
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

from experiments.analysis.sweep_points import aligned, number
from experiments.core import config, store, sweep, what_ran
from experiments.core.config import Point, Slo
from experiments.core.distributions import AtOnce, Changing, ClosedLoop
from experiments.core.engines import Engines, plan_runs
from experiments.core.overrides import override_all
from experiments.core.records import RequestRecord
from experiments.core.store import flatten
from experiments.core.strict_yaml import load_file
from experiments.core.workloads import Recorded, Spec
from pagedjax.server.load_client.summary import PERCENTILES

MAX_BRACKET_PROBES = 12  # to find one met rate and one unmet rate
BEYOND = 2  # probes above the answer


@dataclass(frozen=True)
class Criterion:
    """The condition on a rate: a share of requests, or a percentile of each latency, within the
    targets.
    """

    slo: Slo
    share: float = 0.9
    percentile: int | None = None

    def __post_init__(self) -> None:
        if self.slo.ttft is None and self.slo.itl is None:
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
        flat = [flatten(summary["metrics"]) for summary in summaries]
        if self.slo.ttft is None and all(row["itl_s.p50"] is None for row in flat):
            raise ValueError(
                "slo has itl alone, and no request has a second token, so every rate would meet "
                "it; set slo.ttft, or give the workload longer outputs"
            )
        columns = ["goodput.share"]
        if self.percentile is not None:
            targets = {"ttft_s": self.slo.ttft, "itl_s": self.slo.itl}
            columns = [
                f"{name}.p{self.percentile}"
                for name, target in targets.items()
                if target is not None
            ]
        values = {name: [row[name] for row in flat if row[name] is not None] for name in columns}
        # without gaps there is no ITL
        return {name: statistics.median(repeats) for name, repeats in values.items() if repeats}

    def is_met(self, values: dict[str, float]) -> bool:
        if self.percentile is None:
            return values["goodput.share"] >= self.share
        limits = {
            f"ttft_s.p{self.percentile}": self.slo.ttft,
            f"itl_s.p{self.percentile}": self.slo.itl,
        }
        for name, value in values.items():
            limit = limits[name]
            assert limit is not None, "`values` has only latencies with a target"
            if value > limit:
                return False
        return True

    def __str__(self) -> str:
        targets = {"TTFT": self.slo.ttft, "ITL": self.slo.itl}
        words = " and ".join(
            f"{name} within {target:g} s" for name, target in targets.items() if target is not None
        )
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
    """The range of the search: from `start`, or within `low` and `high`."""

    start: float
    low: float | None = None
    high: float | None = None
    tolerance: float = 0.05


def bracket(probes: Sequence[Probe]) -> tuple[float, float]:
    """The two rates that the capacity is between.

    Returns:
        (highest met rate below the other one, or 0; lowest rate that was not met, or infinity).
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
    for rate in given_rates or [start]:  # these first
        if rate not in probed:
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
    for i in range(1, BEYOND + 1):
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
    if isinstance(workload, Recorded):
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
    return workload.arrivals.rate, "requests/s", "workload.arrivals.rate"


def read_config(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Point]:
    """The raw config after `overrides`, and the one point that it is."""
    raw = load_file(path)
    override_all(raw, overrides)
    points = config.expand(raw, folder=path.parent)
    if len(points) > 1:
        keys = " and ".join(points[0].swept)
        raise ValueError(
            f"the config has {len(points)} points and a capacity is one point's; fix {keys} with "
            "--set"
        )
    return raw, points[0]


def at_rates(raw: dict[str, Any], base: Point, folder: Path, rates: Sequence[float]) -> list[Point]:
    """The config as a sweep over `rates`, under the name <name>-capacity."""
    key = rate_of(base.experiment.workload)[2]
    is_trace = isinstance(base.experiment.workload, Recorded)
    values = [1 / rate if is_trace else rate for rate in rates]  # of a trace: its time_scale
    rates_section = {"list": [{**base.swept, key: value} for value in values]}
    return config.expand({**raw, "name": _name(base), "sweep": rates_section}, folder)


def _name(base: Point) -> str:
    # not the config's own folder, which has another sweep
    return f"{base.experiment.name}-capacity"


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    path = Path(options.config)
    try:
        raw, base = read_config(path, options.set)
        criterion = Criterion(base.experiment.slo, options.share, options.percentile)
        start, unit, _ = rate_of(base.experiment.workload)
        bounds = _bounds(rounded(start), options)
        folder = Path(options.out) / _name(base)
        store.clean(folder)
        engines = sweep.make_engines(1, quiet=options.quiet)
        probes: list[Probe] = []
        while (rate := next_rate(probes, bounds)) is not None:
            rates = sorted([rate, *(probe.rate for probe in probes)])
            points = at_rates(raw, base, path.parent, rates)
            summaries = _measure_rates(points, folder, arguments, engines)[rates.index(rate)]
            probes.append(probe_of(rate, summaries, criterion, folder))
            if not options.quiet:
                print(f"{rate:g} {unit}: {'met' if probes[-1].met else 'not met'}", file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes after the finished probes", file=sys.stderr)
        return 130
    highest_met, lowest_unmet = bracket(probes)
    _write_result(folder, probes, criterion, unit)
    if simulated := what_ran.simulated(points):
        print(f"{simulated}: every time is calculated")
    print(table(probes, unit))
    print(*answer_sentences(probes, bounds, criterion, unit))
    print(f"runs: {folder}")
    return 0 if 0.0 < highest_met < lowest_unmet < math.inf else 1


def _measure_rates(
    points: Sequence[Point], folder: Path, arguments: Sequence[str], engines: Engines
) -> list[list[dict[str, Any]]]:
    """Measure what is missing of the points at all rates so far -> the summaries of each point."""
    remedy = f"Delete {folder} to measure all probes again"
    plan = plan_runs(points, 1)
    command = ["python", "-m", "experiments.capacity", *arguments]
    sweep.write_sweep(folder, points, shlex.join(command))
    done = sweep.finished_runs(plan, folder, remedy)
    measure_all = partial(sweep.run_in_turn, engines=engines)
    summaries = sweep.measure_missing(plan, folder, done, measure_all, quiet=True, remedy=remedy)
    return [
        [summary for summary in summaries if summary["order"] == order]
        for order in range(len(points))
    ]


def _write_result(folder: Path, probes: Sequence[Probe], criterion: Criterion, unit: str) -> None:
    highest_met, lowest_unmet = bracket(probes)
    result = {
        "criterion": str(criterion),
        "unit": unit,
        "met": highest_met,
        "unmet": lowest_unmet if lowest_unmet < math.inf else None,
        "above": met_above_limit(probes),
        "probes": [probe._asdict() for probe in probes],
    }
    store.write_file(folder / "capacity.json", store.json_text(result))


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
    parser.add_argument(
        "config", help="a YAML file of one point, with arrivals that have a rate and with an slo"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="override a key; c is YAML"
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
    parser.add_argument("--out", default="runs", help="folder of results (default: runs)")
    parser.add_argument("--quiet", action="store_true", help="print nothing until the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
