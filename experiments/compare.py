"""Is a difference real? python -m experiments.compare A B [--metric output_tokens_per_s ...]
[--confidence 0.95]

A and B are folders of a sweep, a point or a run, or globs of such folders ('runs/w1/*/0', in
quotes). Sweeps over the same keys are compared point by point; otherwise each side must be one
point. Failed runs are left out.

The ratio B / A has an interval:

    several runs each   of geometric means over repeats, by Student's t on the logarithms: over pairs of repeats with
                        one number if both sides have the same repeats of the same workload, else
                        Welch's. It covers other repeats on the same machine.
    one run each        of a percentile of latencies (ttft_s.p90 ...) if both ran the same requests: a bootstrap over
                        requests, each drawn on both sides together, with all its gaps. It covers
                        other requests, not other runs: it does not show a slow minute of the
                        machine, and it is rather too narrow, because neighbours in a queue are
                        alike. A number of the whole run (throughput) has no interval.

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
from experiments.analysis.sweep_points import SPECULATION, aligned, number
from experiments.core import store
from experiments.core.records import RequestRecord
from experiments.core.store import flatten
from pagedjax.config import one_of

METRICS = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "itl_s.p50", "itl_s.p99", "e2e_s.p50")
DRAFTS = tuple(metric.column for metric in SPECULATION)  # of points with speculation
# Percentiles over tokens and steps are of rounded numbers in a run that keeps sums
# (core/totals.py).
ROUNDED = ("itl_s", "step_s", "device_s", "host_s", "sequences_per_step")
ROUNDING = 1 / 1024
WHERE = ("device", "commit", "source", "jax")  # source: the hash of the code, committed or not


class Side(NamedTuple):
    """The successful runs of one point, in order of repeat."""

    label: str
    runs: tuple[dict[str, Any], ...]

    @property
    def repeats(self) -> list[int]:
        return [run["repeat"] for run in self.runs]


def read(where: str) -> tuple[list[Side], list[str]]:
    """The points that `where` names, and notes on runs that are left out."""
    folders = (
        [where]
        if Path(where).is_dir()
        else sorted(path for path in glob.glob(where) if Path(path).is_dir())
    )
    if not folders:
        raise ValueError(
            f"there is no folder {where!r}; give a folder of a sweep, a point or a run, or a glob"
        )
    runs = list({run["run"]: run for folder in folders for run in store.read_runs(folder)}.values())
    good = [run for run in runs if not run["failed"]]
    if not good:
        raise ValueError(f"all {len(runs)} runs of {where} failed; there is nothing to compare")
    points: dict[str, list[dict[str, Any]]] = {}
    for run in good:
        points.setdefault(run["point"], []).append(run)
    sides = [
        Side(found[0]["label"], tuple(sorted(found, key=lambda run: run["repeat"])))
        for found in points.values()
    ]
    left = len(runs) - len(good)
    return sides, [f"{left} of {len(runs)} runs of {where} failed and are left out"] if left else []


def match(a: Sequence[Side], b: Sequence[Side]) -> tuple[list[tuple[str, Side, Side]], list[str]]:
    """The pairs of points to compare, each with its label, and notes on points without a partner."""
    if len(a) == len(b) == 1:
        one, other = a[0].label, b[0].label
        return [(one if one == other else f"{one} (A) against {other} (B)", a[0], b[0])], []
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
    places = [_by_swept(name, sides) for name, sides in (("A", a), ("B", b))]
    both = [swept for swept in places[0] if swept in places[1]]
    if not both:
        raise ValueError(
            f"A and B sweep {', '.join(keys[0])}, but share no point; give the folder of one "
            "point of each"
        )
    notes = [
        f"only in {name}: {side.label}"
        for name, found in zip("AB", places, strict=True)
        for swept, side in found.items()
        if swept not in both
    ]
    return [(places[0][swept].label, places[0][swept], places[1][swept]) for swept in both], notes


def _by_swept(name: str, sides: Sequence[Side]) -> dict[str, Side]:
    found: dict[str, Side] = {}
    for side in sides:
        swept = json.dumps(side.runs[0]["swept"], sort_keys=True)
        if swept in found:
            raise ValueError(
                f"{name} has two points with {side.label} that differ in what is not swept "
                f"({found[swept].runs[0]['run']} and {side.runs[0]['run']}); give the folder of "
                "one sweep"
            )
        found[swept] = side
    return found


def unpaired(a: Side, b: Side) -> str | None:
    """Why the runs of two points are not paired; None if they are.

    One run each is always a pair.
    """
    if len(a.runs) == len(b.runs) == 1:
        return other_workload(a.runs[0], b.runs[0])
    for name, side in (("A", a), ("B", b)):
        if len(set(side.repeats)) < len(side.runs):
            return f"{name} has a repeat twice"
    if a.repeats != b.repeats:
        return f"A has repeats {_listed(a.repeats)}, B {_listed(b.repeats)}"
    differ = (other_workload(one, other) for one, other in zip(a.runs, b.runs, strict=True))
    return next(filter(None, differ), None)


def other_workload(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """The difference between the workloads of two runs, in total or in a request; None if they are
    the same.
    """
    differ = [key for key, value in a["workload"].items() if b["workload"].get(key) != value]
    if differ:
        return f"the workloads of repeat {a['repeat']} differ in {', '.join(differ)}"
    try:
        asked = [
            [_asked(request) for request in store.read_requests(Path(run["run"]))] for run in (a, b)
        ]
    except ValueError as error:  # a folder of results may have the summaries only
        return f"whether repeat {a['repeat']} had the same requests is not known: {error}"
    for i, (one, other) in enumerate(zip(*asked, strict=True)):
        for name, value in one.items():
            if other[name] != value:
                return f"the workloads of repeat {a['repeat']} differ in {name} of request {i}: {value}, {other[name]}"
    return None


def _asked(request: RequestRecord) -> dict[str, Any]:
    """The input of a request: its record without the results."""
    others = ("request_id", "first_scheduled", "replica")
    inputs = {key: value for key, value in request._asdict().items() if key not in others}
    return {**inputs, "branches": len(request.branches)}


def elsewhere(a: Side, b: Side) -> list[str]:
    """Notes on differences of device, code and version of JAX between the sides."""
    found = [
        {key: sorted({_where(run)[key] for run in side.runs}) for key in WHERE} for side in (a, b)
    ]
    return [
        f"{key} differs: A {' and '.join(found[0][key])}, B {' and '.join(found[1][key])}"
        for key in WHERE
        if found[0][key] != found[1][key]
    ]


def _where(run: dict[str, Any]) -> dict[str, str]:
    file = Path(run["run"]) / "env.json"  # summaries of earlier versions do not have it
    kept = (
        json.loads(file.read_text(encoding="utf-8"))
        if file.is_file() and not run.get("jax")
        else {}
    )
    found = {
        "jax": kept.get("versions", {}).get("jax"),
        **{key: run[key] for key in WHERE if run.get(key)},
    }
    return {key: str(found.get(key) or "not known") for key in WHERE}


def _listed(repeats: Sequence[int]) -> str:
    return ", ".join(map(str, repeats))


def chosen(metrics: Sequence[str] | None, a: Side, b: Side) -> tuple[str, ...]:
    """The metrics to compare: the given ones, or METRICS and those of drafts if a side speculates."""
    if metrics:
        return tuple(metrics)
    return METRICS + (DRAFTS if speculates(a) or speculates(b) else ())


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
    """The medians of both sides and their ratio. `apart`: the result of `unpaired`."""
    if metric in DRAFTS and speculates(a) != speculates(b):
        return one_sided(a, b, metric)
    ours, theirs = values_of(a, metric), values_of(b, metric)
    if not ours or not theirs:
        return None, None, Ratio(None, None, None, "there is no such value in A or in B")
    medians = statistics.median(ours), statistics.median(theirs)
    if (rounded := of_rounded(a, b, metric, *medians)) is not None:
        return *medians, rounded
    if len(ours) > 1 and len(theirs) > 1:
        whole = len(ours) == len(a.runs) and len(theirs) == len(b.runs)
        return *medians, of_runs(
            ours, theirs, paired=whole and apart is None, confidence=confidence
        )
    if len(ours) + len(theirs) > 2:
        return *medians, Ratio(
            None, None, None, f"{'A' if len(ours) == 1 else 'B'} has one run: {NOISE}"
        )
    name, _, percentile = metric.partition(".p")
    if name in LATENCIES and percentile.isdigit() and apart is None:
        before, after = (store.read_requests(Path(side.runs[0]["run"])) for side in (a, b))
        if name != "itl_s" or all(request.has_gaps for request in (*before, *after)):
            return *medians, of_requests(before, after, name, int(percentile), confidence)
    ratio = medians[1] / medians[0] if medians[0] > 0 else None
    words = ONCE if ratio is None else f"{ONCE} (B is {times(ratio)} times A)"
    return *medians, Ratio(ratio, None, None, words)


def of_rounded(a: Side, b: Side, metric: str, ours: float, theirs: float) -> Ratio | None:
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
        why = "one side keeps sums, whose percentiles are of rounded numbers; compare two sides that keep the same"
        return Ratio(None, None, None, why)
    if methods != {"linear"} and abs(theirs - ours) <= ROUNDING * max(ours, theirs):
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
        (ours, left_a), (theirs, left_b) = read(options.a), read(options.b)
        pairs, alone = match(ours, theirs)
        reasons = {label: unpaired(a, b) for label, a, b in pairs}
        rows = [
            (
                label,
                how(a, b, reasons[label]),
                metric,
                *compare(a, b, metric, apart=reasons[label], confidence=options.confidence),
            )
            for label, a, b in pairs
            for metric in chosen(options.metric, a, b)
        ]
        others = dict.fromkeys(words for _, a, b in pairs for words in elsewhere(a, b))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    notes = [*left_a, *left_b, *alone, *others]
    judged = sum(ratio.low is not None and ratio.low < (ratio.high or 0.0) for *_, ratio in rows)
    if judged > 1:
        chance = (1 - options.confidence) * judged
        notes.append(
            f"of {judged} intervals at {options.confidence:g}, {chance:.2g} exclude 1 by chance "
            "alone"
        )
    for label, a, b in pairs:
        found = [row for row in rows if row[0] == label]
        columns = {
            "": [metric for _, _, metric, *_ in found],
            "A": ["-" if middle is None else number(middle) for *_, middle, _, _ in found],
            "B": ["-" if middle is None else number(middle) for *_, middle, _ in found],
            "verdict": [ratio.verdict for *_, ratio in found],
        }
        print(f"{label} ({how(a, b, reasons[label])})\n{aligned(columns)}\n")
    for note in notes:
        print(note)
    if options.json:
        names = ("point", "runs", "metric", "a", "b")
        found = [{**dict(zip(names, row[:5], strict=True)), **row[5]._asdict()} for row in rows]
        about = {"a": options.a, "b": options.b, "confidence": options.confidence, "notes": notes}
        store.write_file(Path(options.json), store.json_text({**about, "comparisons": found}))
    return 0


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
        help=f"numbers of summary.json (default: {' '.join(METRICS)}, and those of speculation if a side has them)",
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, help="of the intervals (default: 0.95)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all results to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
