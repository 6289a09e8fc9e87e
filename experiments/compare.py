"""Is a difference more than noise? Compares two sides, or all values of a swept key.

    python -m experiments.compare A B [--metric output_tokens_per_s ...] [--confidence 0.95]
    python -m experiments.compare SWEEP --by engine.policy [--baseline fcfs]

A, B and SWEEP are folders of a sweep, a point or a run, or globs of such folders ('runs/w1/*/0', in
quotes). KEY=VALUE words after a folder choose runs by swept values: `runs/x engine.policy=fcfs
workload.arrivals.rate=4 runs/x engine.policy=shortest workload.arrivals.rate=4`. The last name of a
key is enough (`policy=fcfs`), and `repeat` is a key too. Two sides are compared point by point if
both sweep the same keys, apart from the keys that the words fix; otherwise each side must be one
point. Failed runs are left out.

With --by, the other values of a key are compared with its first one, or with --baseline, over all
cells: a cell is a combination of the other swept keys. In a cell, runs with the same repeat (and
the same seed, if `seed` is swept) are a pair; the pairs of one swept seed count as one pair. The
difference of a pair is that of the logarithms. The mean difference has an interval by Student's t,
and a p that is corrected for many comparisons (Holm). "pooled" is over all cells. See
docs/design/comparisons.md.

With two sides, the ratio B / A has an interval:

    several runs each   The ratio is that of the geometric means over repeats. The interval is by Student's t on the
                        logarithms: over pairs of repeats with the same number if both sides have the same repeats of
                        the same workload, else by Welch's method. It covers other repeats on the same machine.
    one run each        A percentile of latencies (ttft_s.p90 ...) has an interval if both sides ran the same requests:
                        a bootstrap over requests, each drawn on both sides together, with all its gaps. It covers other
                        requests and not other runs: a slow minute of the machine is not in it. So no difference is
                        called shown by it. It is rather too narrow, because neighbours in a queue are alike. A number
                        of the whole run (throughput) has no interval.

Two runs have the same requests if arrival times, prompt lengths, maximum output tokens and numbers
of branches agree, one by one (requests.jsonl; the prompts' tokens are not recorded). A difference
of device, commit or version of JAX between the sides is reported.

Points with speculation are also compared by the numbers of their drafts. If only one side
speculates, the numbers of its drafts are shown without a ratio.

A difference is shown if p, corrected by Holm's method for all comparisons of its family, is at
most 1 - confidence. This is weak with few repeats: two or three show only large differences, and t
assumes normally distributed logarithms. Methods without that assumption are not better: a bootstrap
of three repeats calls a quarter of all equal things different, and a permutation test of three can
call none different at 0.95. Repeats with one seed say nothing about other workloads (use `reseed`):
equal differences in every repeat have no p, and are not shown. Fewer metrics (--metric) are fewer
comparisons.

Exit status: 0 for any verdict, 2 if the folders cannot be compared.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from experiments.analysis import by_key
from experiments.analysis.ratios import Comparison, columns, corrected, method_notes
from experiments.analysis.sides import (
    METRICS,
    Side,
    choose_metrics,
    compared,
    origin_notes,
    why_unpaired,
)
from experiments.analysis.sweep_points import aligned
from experiments.core import selection, store
from experiments.core.overrides import short_names
from experiments.core.selection import Run, Selection, value_text


class Row(NamedTuple):
    """The comparison of a metric of two points.

    point: the label of the two points.
    runs: how the runs of the points are compared, in words.
    """

    point: str
    runs: str
    metric: str
    comparison: Comparison

    def json_fields(self, confidence: float) -> dict[str, Any]:
        """The row as JSON."""
        values = self._asdict()
        del values["comparison"]
        medians = {"a": self.comparison.a, "b": self.comparison.b}
        return values | medians | self.comparison.json_fields(confidence)


class ChosenRuns(NamedTuple):
    """The successful runs of a selection.

    fixed: the value of each key that the selection gives.
    """

    selection: Selection
    runs: list[Run]
    fixed: Mapping[str, Any]
    notes: list[str]

    @property
    def sides(self) -> list[Side]:
        """The points of these runs."""
        points: dict[str, list[Run]] = {}
        for run in self.runs:
            points.setdefault(run["point"], []).append(run)
        return [
            Side(point_runs[0]["label"], tuple(sorted(point_runs, key=lambda run: run["repeat"])))
            for point_runs in points.values()
        ]


def read(choice: Selection) -> ChosenRuns:
    """The runs that a selection names, and notes on runs that are left out."""
    pattern = choice.folder
    folders = [pattern]
    if not Path(pattern).is_dir():
        folders = sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
    if not folders:
        raise ValueError(
            f"there is no folder {pattern!r}; give a folder of a sweep, a point or a run, or a glob"
        )
    all_runs = {run["run"]: run for folder in folders for run in store.read_runs(folder)}
    runs, fixed = selection.choose(list(all_runs.values()), choice)
    good_runs = [run for run in runs if not run["failed"]]
    if not good_runs:
        raise ValueError(f"all {len(runs)} runs of {choice} failed; there is nothing to compare")
    num_failed = len(runs) - len(good_runs)
    notes = []
    if num_failed:
        notes.append(f"{num_failed} of {len(runs)} runs of {choice} failed and are left out")
    return ChosenRuns(choice, good_runs, fixed, notes)


def match(a: ChosenRuns, b: ChosenRuns) -> tuple[list[tuple[str, Side, Side]], list[str]]:
    """The pairs of points to compare, with their labels, and notes on points without a partner."""
    if len(a.sides) == len(b.sides) == 1:
        side_a = a.sides[0]
        side_b = b.sides[0]
        label = side_a.label
        if label != side_b.label:
            label = f"{label} (A) against {side_b.label} (B)"
        return [(label, side_a, side_b)], []
    keys_a = free_keys(a)
    keys_b = free_keys(b)
    if list(keys_a) != list(keys_b):
        texts = [
            f"{len(chosen.sides)} points over {_keys_text(keys)}"
            for chosen, keys in ((a, keys_a), (b, keys_b))
        ]
        raise ValueError(
            f"A has {texts[0]}, and B {texts[1]}: give sweeps over the same keys, or one point of "
            f"each: {_example(a, keys_a)}"
        )
    sides_a = _sides_by_values("A", a)
    sides_b = _sides_by_values("B", b)
    pairs = [
        (_label(side, a), side, sides_b[swept])
        for swept, side in sides_a.items()
        if swept in sides_b
    ]
    if not pairs:
        raise ValueError(
            f"A and B sweep {', '.join(keys_a)}, but share no point: A has {_keys_text(keys_a)}, and "
            f"B {_keys_text(keys_b)}; choose one point of each: {_example(a, keys_a)}"
        )
    only_a = [side for swept, side in sides_a.items() if swept not in sides_b]
    only_b = [side for swept, side in sides_b.items() if swept not in sides_a]
    notes = [f"only in A: {side.label}" for side in only_a]
    return pairs, [*notes, *(f"only in B: {side.label}" for side in only_b)]


def free_keys(chosen: ChosenRuns) -> dict[str, list[Any]]:
    """The swept keys that the selection does not give, sorted, with their values."""
    keys = sorted(set(selection.swept_keys(chosen.runs)) - set(chosen.fixed))
    return {key: selection.values_in(chosen.runs, key) for key in keys}


def _keys_text(keys: Mapping[str, Sequence[Any]]) -> str:
    texts = [f"{key} ({selection.value_list(values)})" for key, values in keys.items()]
    return ", ".join(texts) or "nothing"


def _example(chosen: ChosenRuns, keys: Mapping[str, Sequence[Any]]) -> str:
    """The words that choose one point, such as "runs/x engine.block_size=8"."""
    words = [f"{key}={value_text(values[0])}" for key, values in keys.items()]
    return " ".join([str(chosen.selection), *words])


def _free_values(side: Side, chosen: ChosenRuns) -> dict[str, Any]:
    """The swept values of a point that the selection does not give, by their keys."""
    swept = side.runs[0]["swept"]
    return {key: value for key, value in swept.items() if key not in chosen.fixed}


def _label(side: Side, chosen: ChosenRuns) -> str:
    """The label of a point without the keys that the selection gives."""
    swept = _free_values(side, chosen)
    if not chosen.fixed or not swept:
        return side.label
    names = short_names(swept)
    return ", ".join(f"{names[key]}={value_text(value)}" for key, value in swept.items())


def _sides_by_values(name: str, chosen: ChosenRuns) -> dict[str, Side]:
    """The points by their swept values that the selection does not give, as JSON."""
    sides_by_values: dict[str, Side] = {}
    for side in chosen.sides:
        text = json.dumps(_free_values(side, chosen), sort_keys=True)
        if text in sides_by_values:
            raise ValueError(
                f"{name} has two points with {side.label} that differ in what is not swept "
                f"({sides_by_values[text].runs[0]['run']} and {side.runs[0]['run']}); give the "
                "folder of one sweep"
            )
        sides_by_values[text] = side
    return sides_by_values


def pairing_text(a: Side, b: Side, unpaired_because: str | None) -> str:
    """How the runs of two points are compared, in words.

    Args:
        unpaired_because: None if the runs are paired.
    """
    if len(a.runs) == len(b.runs) == 1:
        return unpaired_because or "one run each of the same requests"
    if unpaired_because is None:
        return f"{len(a.runs)} pairs of repeats"
    return f"repeats are not paired: {unpaired_because}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if not 0.0 < options.confidence < 1.0:
            raise ValueError(
                f"--confidence is {options.confidence}; it must be above 0 and below 1, such as "
                "0.95"
            )
        chosen = [read(choice) for choice in selection.split(options.runs)]
        result = _compare_values(chosen, options) if options.by else _compare_sides(chosen, options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        store.write_file(Path(options.json), store.json_text(result))
    return 0


def _compare_sides(chosen: Sequence[ChosenRuns], options: argparse.Namespace) -> dict[str, Any]:
    """Compare two sides and print the tables. Returns the result as JSON."""
    if len(chosen) != 2:
        raise ValueError(
            f"{len(chosen)} folders are given ({', '.join(str(c.selection) for c in chosen)}); give "
            "two of them, A and B, or one and --by KEY"
        )
    if options.baseline is not None:
        raise ValueError("--baseline is given without --by; leave it out: ratios are B / A")
    a, b = chosen
    pairs, unmatched = match(a, b)
    reasons = {label: why_unpaired(side_a, side_b) for label, side_a, side_b in pairs}
    rows = [
        Row(
            label,
            pairing_text(side_a, side_b, reasons[label]),
            metric,
            compared(
                side_a,
                side_b,
                metric,
                unpaired_because=reasons[label],
                confidence=options.confidence,
            ),
        )
        for label, side_a, side_b in pairs
        for metric in choose_metrics(options.metric, side_a, side_b)
    ]
    comparisons = corrected([row.comparison for row in rows])
    rows = [row._replace(comparison=c) for row, c in zip(rows, comparisons, strict=True)]
    origins = dict.fromkeys(
        note for _, side_a, side_b in pairs for note in origin_notes(side_a, side_b)
    )
    notes = [*a.notes, *b.notes, *unmatched, *origins]
    family_sizes = {"comparisons": comparisons[0].family}
    notes += method_notes(family_sizes, options.confidence)
    if a.fixed or b.fixed:
        print(f"A: {a.selection}\nB: {b.selection}\n")
    _print_points(rows, options.confidence)
    for note in notes:
        print(note)
    return {
        "a": str(a.selection),
        "b": str(b.selection),
        "confidence": options.confidence,
        "notes": notes,
        "comparisons": [row.json_fields(options.confidence) for row in rows],
    }


def _print_points(rows: Sequence[Row], confidence: float) -> None:
    """Print the table of each point."""
    for (label, pairing), point_rows in groupby(rows, key=lambda row: (row.point, row.runs)):
        print(f"{label} ({pairing})\n{table(list(point_rows), confidence)}\n")


def _compare_values(chosen: Sequence[ChosenRuns], options: argparse.Namespace) -> dict[str, Any]:
    """Compare the values of a key over all cells and print the tables. Returns the result as
    JSON.
    """
    if len(chosen) != 1:
        raise ValueError(
            f"--by is given with {len(chosen)} folders; give one, whose sweep has the key"
        )
    (sweep,) = chosen
    key = selection.key_of(
        "--by", options.by, [*selection.swept_keys(sweep.runs), selection.REPEAT]
    )
    values = selection.values_in(sweep.runs, key)
    if key == selection.REPEAT or len(values) < 2:
        raise ValueError(
            f"--by is {options.by!r}, which has {len(values)} value(s) in {sweep.selection} "
            f"({selection.value_list(values)}); give a swept key with two, such as "
            f"{_other_keys(sweep)}"
        )
    baseline = values[0]
    if options.baseline is not None:
        baseline = selection.value_of(key, options.baseline, sweep.runs, str(sweep.selection))
    cells = by_key.cells_of(sweep.runs, key)
    metrics = choose_metrics(options.metric, *sweep.sides)
    rows = by_key.rows_of(cells, values, baseline, metrics, options.confidence)
    if not rows or all(row.cell is None for row in rows):
        changed_keys = " and ".join(path for path in free_keys(sweep) if path != key)
        raise ValueError(
            f"no cell has a run of {key}={value_text(baseline)} and one of another value, with the "
            f"same repeat: {key} changes together with {changed_keys}; give a key that is crossed "
            "with the others (sweep.grid)"
        )
    notes = [
        *sweep.notes,
        *by_key.notes(rows, cells, options.confidence),
        *sides_notes(sweep, key),
    ]
    print(by_key.tables(rows, key, baseline, options.confidence), *notes, sep="\n")
    return {
        "runs": str(sweep.selection),
        "by": key,
        "baseline": baseline,
        "values": values,
        "confidence": options.confidence,
        "correction": "Holm, a family of the cells and a family of the pooled ones",
        "notes": notes,
        "comparisons": [by_key.json_fields(row, options.confidence) for row in rows],
    }


def _other_keys(chosen: ChosenRuns) -> str:
    keys = [key for key, values in free_keys(chosen).items() if len(values) > 1]
    return " or ".join(keys) or "another sweep's"


def sides_notes(sweep: ChosenRuns, key: str) -> list[str]:
    """Notes on simulated runs, and on values that other devices or other code ran."""
    by_value: dict[str, list[Run]] = {}
    for run in sweep.runs:
        if key in run["swept"]:
            by_value.setdefault(value_text(run["swept"][key]), []).append(run)
    first_side, *other_sides = [Side(text, tuple(runs)) for text, runs in by_value.items()]
    return list(
        dict.fromkeys(note for side in other_sides for note in origin_notes(first_side, side))
    )


def table(rows: Sequence[Row], confidence: float) -> str:
    """The metrics of two points as a table for a terminal."""
    cells = columns([row.comparison for row in rows], "A", "B", confidence)
    return aligned({"": [row.metric for row in rows], **cells})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare",
        description="Is a difference more than noise?",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="FOLDER",
        help="folder of a sweep, a point or a run, or a glob of such folders; KEY=VALUE words "
        "after it choose some of its runs. Two folders (ratios are B / A), or one with --by",
    )
    parser.add_argument(
        "--by",
        metavar="KEY",
        help="compare the values of this swept key over all combinations of the others",
    )
    parser.add_argument(
        "--baseline",
        metavar="VALUE",
        help="of --by: the value that others are compared with (default: the first)",
    )
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
