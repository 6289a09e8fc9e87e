"""Is a difference real? python -m experiments.compare A B [--metric output_tokens_per_s ...] [--confidence 0.95]

A and B are folders of a sweep, a point or a run, or globs of such folders ('runs/w1/*/0', in
quotes). Sweeps over the same keys are compared point by point; otherwise each side must be one
point. Failed runs are left out.

The ratio B / A has an interval:

    several runs each   of geometric means over repeats, by Student's t on the logarithms: over pairs of repeats with
                        one number if both sides have the same repeats of the same workload, else Welch's. It covers
                        other repeats on the same machine.
    one run each        of a percentile of latencies (ttft_s.p90 ...) if both ran the same requests: a bootstrap over
                        requests, each drawn on both sides together, with all its gaps. It covers other requests, not
                        other runs: it does not show a slow minute of the machine, and it is rather too narrow, because
                        neighbours in a queue are alike. A number of the whole run (throughput) has no interval.

Two runs have the same requests if arrival times, prompt lengths, maximum output tokens and numbers
of branches agree, one by one (requests.jsonl; the prompts' tokens are not recorded). A difference
of device, commit or version of JAX between the sides is reported.

Points with speculation are also compared by the numbers of their drafts. If only one side
speculates, its numbers are shown without a ratio.

A difference is called real if the interval excludes 1. This is weak with few repeats: two or three
show only large differences, and t assumes normally distributed logarithms. Methods without that
assumption are not better: a bootstrap of three repeats calls a quarter of all equal things
different, and a permutation test of three can call none different at 0.95. Repeats with one seed
say nothing about other workloads (use `reseed`). Of many comparisons, some look real by chance; the
last line says how many.

Exit status: 0 for any verdict, 2 if the folders cannot be compared.
"""

from __future__ import annotations

import argparse
import glob
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.analysis.ratios import LATENCIES, NOISE, ONCE, Ratio, of_requests, of_runs, times
from experiments.analysis.sweep_points import OWN, SPECULATION, aligned, number
from experiments.core import store
from experiments.core.records import RequestRecord
from experiments.core.store import flatten
from experiments.simulation.cost import SIMULATED
from pagedjax.options.config import one_of

METRICS = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "itl_s.p50", "itl_s.p99", "e2e_s.p50")
DRAFTS = tuple(metric.column for metric in SPECULATION)  # of points with speculation
# Percentiles over tokens and steps are of rounded numbers in a run that keeps sums
# (core/totals.py).
ROUNDED = ("itl_s", "step_s", "device_s", "host_s", "sequences_per_step")
ROUNDING = 1 / 1024
# what makes runs differ beside their config; source: the hash of the code, committed or not
ORIGIN = ("device", "commit", "source", "jax")


class Side(NamedTuple):
    """The successful runs of one point, in order of repeat."""

    label: str
    runs: tuple[dict[str, Any], ...]

    @property
    def repeats(self) -> list[int]:
        return [run["repeat"] for run in self.runs]


class Comparison(NamedTuple):
    """A metric of two points: the medians and their ratio."""

    point: str
    runs: str  # how the runs are compared
    metric: str
    a: float | None
    b: float | None
    ratio: Ratio

    def flat(self) -> dict[str, Any]:
        """The fields, with those of the ratio among them."""
        values = self._asdict()
        del values["ratio"]
        return {**values, **self.ratio._asdict()}


def read(pattern: str) -> tuple[list[Side], list[str]]:
    """The points that a folder or a glob names, and notes on runs that are left out."""
    folders = [pattern]
    if not Path(pattern).is_dir():
        folders = sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
    if not folders:
        raise ValueError(
            f"there is no folder {pattern!r}; give a folder of a sweep, a point or a run, or a glob"
        )
    runs = list({run["run"]: run for folder in folders for run in store.read_runs(folder)}.values())
    good = [run for run in runs if not run["failed"]]
    if not good:
        raise ValueError(f"all {len(runs)} runs of {pattern} failed; there is nothing to compare")
    points: dict[str, list[dict[str, Any]]] = {}
    for run in good:
        points.setdefault(run["point"], []).append(run)
    sides = [
        Side(point_runs[0]["label"], tuple(sorted(point_runs, key=lambda run: run["repeat"])))
        for point_runs in points.values()
    ]
    notes = []
    if len(good) < len(runs):
        num_failed = len(runs) - len(good)
        notes.append(f"{num_failed} of {len(runs)} runs of {pattern} failed and are left out")
    return sides, notes


def match(a: Sequence[Side], b: Sequence[Side]) -> tuple[list[tuple[str, Side, Side]], list[str]]:
    """The pairs of points to compare, with their labels, and notes on points without a partner."""
    if len(a) == len(b) == 1:
        label = a[0].label
        if label != b[0].label:
            label = f"{label} (A) against {b[0].label} (B)"
        return [(label, a[0], b[0])], []
    keys = [sorted({path for side in sides for path in side.runs[0]["swept"]}) for sides in (a, b)]
    if keys[0] != keys[1]:
        texts = [
            f"{len(sides)} points over {', '.join(k) or 'nothing'}"
            for sides, k in zip((a, b), keys, strict=True)
        ]
        raise ValueError(
            f"A has {texts[0]}, and B {texts[1]}: give sweeps over the same keys, or one point of "
            "each"
        )
    sides_a = _by_swept("A", a)
    sides_b = _by_swept("B", b)
    pairs = [
        (side.label, side, sides_b[swept]) for swept, side in sides_a.items() if swept in sides_b
    ]
    if not pairs:
        raise ValueError(
            f"A and B sweep {', '.join(keys[0])}, but share no point; give the folder of one "
            "point of each"
        )
    notes = [f"only in A: {side.label}" for swept, side in sides_a.items() if swept not in sides_b]
    notes += [f"only in B: {side.label}" for swept, side in sides_b.items() if swept not in sides_a]
    return pairs, notes


def _by_swept(name: str, sides: Sequence[Side]) -> dict[str, Side]:
    """The points by their swept values, as JSON."""
    by_swept: dict[str, Side] = {}
    for side in sides:
        swept = json.dumps(side.runs[0]["swept"], sort_keys=True)
        if swept in by_swept:
            raise ValueError(
                f"{name} has two points with {side.label} that differ in what is not swept "
                f"({by_swept[swept].runs[0]['run']} and {side.runs[0]['run']}); give the folder of "
                "one sweep"
            )
        by_swept[swept] = side
    return by_swept


def why_unpaired(a: Side, b: Side) -> str | None:
    """Why the runs of two points are not paired; None if they are.

    One run each is always a pair.
    """
    if len(a.runs) == len(b.runs) == 1:
        return workload_difference(a.runs[0], b.runs[0])
    for name, side in (("A", a), ("B", b)):
        if len(set(side.repeats)) < len(side.runs):
            return f"{name} has a repeat twice"
    if a.repeats != b.repeats:
        return f"A has repeats {_list_text(a.repeats)}, B {_list_text(b.repeats)}"
    for run_a, run_b in zip(a.runs, b.runs, strict=True):
        difference = workload_difference(run_a, run_b)
        if difference:
            return difference
    return None


def workload_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """The difference between the workloads of two runs, in total or in a request; None if they are
    the same.
    """
    differ = [
        key
        for key, value in a["workload"].items()
        if b["workload"].get(key) != value and key != "predicted_error"  # no part of a request
    ]
    if differ:
        return f"the workloads of repeat {a['repeat']} differ in {', '.join(differ)}"
    try:
        inputs_a, inputs_b = (
            [_inputs(request) for request in store.read_requests(Path(run["run"]))]
            for run in (a, b)
        )
    except ValueError as error:  # a folder of results may have the summaries only
        return f"whether repeat {a['repeat']} had the same requests is not known: {error}"
    for i, (request_a, request_b) in enumerate(zip(inputs_a, inputs_b, strict=True)):
        for name, value in request_a.items():
            if request_b[name] != value:
                return (
                    f"the workloads of repeat {a['repeat']} differ in {name} of request {i}: "
                    f"{value}, {request_b[name]}"
                )
    return None


def _inputs(request: RequestRecord) -> dict[str, Any]:
    """The input of a request: its record without the results."""
    results = ("request_id", "first_scheduled", "replica")
    inputs = {key: value for key, value in request._asdict().items() if key not in results}
    return {**inputs, "branches": len(request.branches)}


def origin_notes(a: Side, b: Side) -> list[str]:
    """Notes on simulated sides, and on differences of device, code and version of JAX."""
    origins_a, origins_b = (
        {key: sorted({_origin(run)[key] for run in side.runs}) for key in ORIGIN} for side in (a, b)
    )
    devices = dict.fromkeys([*origins_a["device"], *origins_b["device"]])
    simulated = [device for device in devices if device.startswith(SIMULATED)]
    calculated = [f"{' and '.join(simulated)}: every time is calculated"] if simulated else []
    return calculated + [
        f"{key} differs: A {' and '.join(origins_a[key])}, B {' and '.join(origins_b[key])}"
        for key in ORIGIN
        if origins_a[key] != origins_b[key]
    ]


def _origin(run: dict[str, Any]) -> dict[str, str]:
    """The device and the code that made a run; "not known" for what it does not tell."""
    values = {key: run.get(key) for key in ORIGIN}
    file = Path(run["run"]) / "env.json"
    if not values["jax"] and file.is_file():  # summaries of earlier versions do not have it
        env = json.loads(file.read_text(encoding="utf-8"))
        values["jax"] = env.get("versions", {}).get("jax")
    return {key: str(value or "not known") for key, value in values.items()}


def _list_text(repeats: Sequence[int]) -> str:
    return ", ".join(map(str, repeats))


def choose_metrics(metrics: Sequence[str] | None, a: Side, b: Side) -> tuple[str, ...]:
    """The metrics to compare: those of --metric, or METRICS, with drafts if a side speculates."""
    if metrics:
        return tuple(metrics)
    common = [_own_columns(side) for side in (a, b)]
    own = tuple([column for column in common[0] if column in common[1]])
    return METRICS + (DRAFTS if speculates(a) or speculates(b) else ()) + own


def _own_columns(side: Side) -> list[str]:
    """The columns of a user's own metrics that all runs of a point have."""
    columns = [
        [column for column in flatten(run["metrics"]) if column.startswith(OWN)]
        for run in side.runs
    ]
    return [column for column in columns[0] if all(column in others for others in columns)]


def speculates(side: Side) -> bool:
    return any("speculation" in run["metrics"] for run in side.runs)


def values_of(side: Side, metric: str) -> list[float]:
    """A metric in each run of a point.

    Raises:
        ValueError: a summary has no such number; the message names the known ones.
    """
    values = []
    for run in side.runs:
        flat = {
            key: value
            for key, value in flatten(run["metrics"]).items()
            if not isinstance(value, str)
        }
        one_of("--metric", metric, tuple(flat))
        if flat[metric] is not None:
            values.append(float(flat[metric]))
    return values


def compare(
    a: Side, b: Side, metric: str, *, apart: str | None, confidence: float
) -> tuple[float | None, float | None, Ratio]:
    """The medians of both sides and their ratio.

    Args:
        apart: why the runs are not paired; see `why_unpaired`.
    """
    if metric in DRAFTS and speculates(a) != speculates(b):
        return one_sided(a, b, metric)
    values_a = values_of(a, metric)
    values_b = values_of(b, metric)
    if not values_a or not values_b:
        return None, None, Ratio(None, None, None, "there is no such value in A or in B")
    medians = statistics.median(values_a), statistics.median(values_b)
    rounded = of_rounded(a, b, metric, *medians)
    if rounded is not None:
        return *medians, rounded
    if len(values_a) > 1 and len(values_b) > 1:
        complete = len(values_a) == len(a.runs) and len(values_b) == len(b.runs)
        paired = complete and apart is None
        return *medians, of_runs(values_a, values_b, paired=paired, confidence=confidence)
    if len(values_a) + len(values_b) > 2:
        name = "A" if len(values_a) == 1 else "B"
        return *medians, Ratio(None, None, None, f"{name} has one run: {NOISE}")
    name, _, percentile = metric.partition(".p")
    if name in LATENCIES and percentile.isdigit() and apart is None:
        before, after = (store.read_requests(Path(side.runs[0]["run"])) for side in (a, b))
        if name != "itl_s" or all(request.has_gaps for request in (*before, *after)):
            return *medians, of_requests(before, after, name, int(percentile), confidence)
    ratio = medians[1] / medians[0] if medians[0] > 0 else None
    words = ONCE if ratio is None else f"{ONCE} (B is {times(ratio)} times A)"
    return *medians, Ratio(ratio, None, None, words)


def of_rounded(a: Side, b: Side, metric: str, median_a: float, median_b: float) -> Ratio | None:
    """The result for a percentile that one side or both have of rounded numbers; None if the values
    can be compared.
    """
    name, _, percentile = metric.partition(".p")
    if name not in ROUNDED or not percentile.isdigit():
        return None
    methods = {
        run["metrics"].get("percentile_method", "linear") for side in (a, b) for run in side.runs
    }
    if len(methods) > 1:
        verdict = (
            "one side keeps sums, whose percentiles are of rounded numbers; compare two sides that "
            "keep the same"
        )
        return Ratio(None, None, None, verdict)
    if methods != {"linear"} and abs(median_b - median_a) <= ROUNDING * max(median_a, median_b):
        return Ratio(None, None, None, "no difference beyond the rounding of runs that keep sums")
    return None


def one_sided(a: Side, b: Side, metric: str) -> tuple[float | None, float | None, Ratio]:
    """The median of a number of drafts on the side that has it: the other does not speculate, or is
    an older run.
    """
    values = values_of(a if speculates(a) else b, metric)
    middle = statistics.median(values) if values else None
    if speculates(a):
        return middle, None, Ratio(None, None, None, "only A has numbers of drafts")
    return None, middle, Ratio(None, None, None, "only B has numbers of drafts")


def how(a: Side, b: Side, apart: str | None) -> str:
    """How the runs of two points are compared, in words."""
    if len(a.runs) == len(b.runs) == 1:
        return apart or "one run each of the same requests"
    return (
        f"{len(a.runs)} pairs of repeats" if apart is None else f"repeats are not paired: {apart}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if not 0.0 < options.confidence < 1.0:
            raise ValueError(
                f"--confidence is {options.confidence}; it must be above 0 and below 1, such as "
                "0.95"
            )
        sides_a, notes_a = read(options.a)
        sides_b, notes_b = read(options.b)
        pairs, unmatched = match(sides_a, sides_b)
        reasons = {label: why_unpaired(a, b) for label, a, b in pairs}
        rows = [
            Comparison(
                label,
                how(a, b, reasons[label]),
                metric,
                *compare(a, b, metric, apart=reasons[label], confidence=options.confidence),
            )
            for label, a, b in pairs
            for metric in choose_metrics(options.metric, a, b)
        ]
        origins = dict.fromkeys(note for _, a, b in pairs for note in origin_notes(a, b))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    notes = [*notes_a, *notes_b, *unmatched, *origins, *chance_notes(rows, options.confidence)]
    for label, a, b in pairs:
        print(f"{label} ({how(a, b, reasons[label])})")
        print(f"{table([row for row in rows if row.point == label])}\n")
    for note in notes:
        print(note)
    if options.json:
        result = {
            "a": options.a,
            "b": options.b,
            "confidence": options.confidence,
            "notes": notes,
            "comparisons": [row.flat() for row in rows],
        }
        store.write_file(Path(options.json), store.json_text(result))
    return 0


def table(rows: Sequence[Comparison]) -> str:
    """The metrics of two points as a table for a terminal."""
    columns = {
        "": [row.metric for row in rows],
        "A": [_number(row.a) for row in rows],
        "B": [_number(row.b) for row in rows],
        "verdict": [row.ratio.verdict for row in rows],
    }
    return aligned(columns)


def chance_notes(rows: Sequence[Comparison], confidence: float) -> list[str]:
    """A note on how many of several intervals exclude 1 by chance."""
    judged = sum(
        row.ratio.low is not None and row.ratio.low < (row.ratio.high or 0.0) for row in rows
    )
    if judged < 2:
        return []
    chance = (1 - confidence) * judged
    return [f"of {judged} intervals at {confidence:g}, {chance:.2g} exclude 1 by chance alone"]


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare",
        description="Is a difference real?",
        allow_abbrev=False,
    )
    parser.add_argument("a", help="folder of a sweep, a point or a run, or a glob of such folders")
    parser.add_argument("b", help="the other one; ratios are B / A")
    parser.add_argument(
        "--metric",
        nargs="+",
        help=f"numbers of summary.json (default: {' '.join(METRICS)}, and those of speculation if "
        "a side has them)",
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, help="of the intervals (default: 0.95)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all results to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
