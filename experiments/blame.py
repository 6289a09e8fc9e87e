"""Who delayed whom in a recorded run?

    pagedjax blame run.jsonl                     by user
    pagedjax blame run.jsonl --by class
    pagedjax blame run.jsonl --record cases      recordings of the worst cases, for the viewer

The recorded scheduler runs again without each user (or class, or request), with the recorded
tokens. The first table is what each user adds to the times of the others: the sum over their
requests of the seconds from submission to end, with all minus without that user. The second one
shares the delay of each user (its time with all minus its time alone) among the others by Shapley
values, which add up to it: exactly for up to 6 users (2 ** users runs), else over orders that are
drawn (--permutations).

Seconds are those of a fit to the recorded steps, in every run. Without times, or with --steps,
steps are counted, and nothing is fitted (docs/design/laboratory.md).

Exit status: 0, or 2 if the recording cannot be used.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.analysis.sweep_points import aligned
from experiments.laboratory import past, rerun
from experiments.laboratory.blame import (
    MOST_EXACT,
    Audit,
    Case,
    Matrix,
    Shares,
    caused,
    runs_of_sample,
    suffered,
)
from experiments.laboratory.contents import Refused
from pagedjax.host.event_log import check_target
from pagedjax.host.replay import with_own

SHOWN = 8  # groups in a table of the terminal
WORST = 5  # cases


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        print(f"cannot blame anybody in {options.recording}: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    if options.permutations < 2:
        raise ValueError(f"permutations is {options.permutations}; it must be at least 2")
    if options.json:
        check_target(options.json, "result", "blame.json")
    if options.record and Path(options.record).is_file():
        raise ValueError(f"--record is {options.record}, which is a file; name a folder")
    recorded = past.read(options.recording, with_own(options.policy))
    audit = Audit(recorded, options.by, buckets=options.buckets, steps=options.steps)
    _check_runs(audit, options)
    delays: dict[str, float] = {}
    without, cases = audit.without()
    shares = _shares(audit, options)
    if shares is not None:
        delays = audit.delays()
    unit = "s" if audit.seconds_of_step else "steps"
    worst = [case for case in cases if case.seconds > 0][:WORST]
    _print(audit, options.by, unit, without, shares, delays, worst)
    if options.record:
        _record(Path(options.record), audit, worst)
    if options.json:
        values = _as_json(audit, options.by, unit, without, shares, delays, worst)
        text = json.dumps(values, indent=2)
        Path(options.json).write_text(f"{text}\n", encoding="utf-8")


def _check_runs(audit: Audit, options: argparse.Namespace) -> None:
    """Raises Refused for more runs than are allowed. The first run says how long one takes."""
    groups = len(audit.groups)
    needed = groups + 1
    if groups <= MOST_EXACT:
        needed = 2**groups
    elif options.by != "request":
        needed += runs_of_sample(groups, options.permutations)
    started = time.perf_counter()
    audit.totals(audit.everyone)
    seconds = time.perf_counter() - started
    if needed > options.most_runs:
        fewer = "--by user" if options.by == "request" else "fewer --permutations"
        raise Refused(
            f"{groups} groups by {options.by} take {needed} runs of {seconds:.1f} s each, and "
            f"most_runs is {options.most_runs}; choose {fewer}, or raise --most-runs"
        )


def _shares(audit: Audit, options: argparse.Namespace) -> Shares | None:
    """The Shapley values; None for many requests, each of which would take many runs."""
    if len(audit.groups) <= MOST_EXACT:
        return audit.exact_shares()
    if options.by == "request":
        return None
    return audit.sampled_shares(options.permutations, options.seed)


def _print(
    audit: Audit,
    by: str,
    unit: str,
    without: Matrix,
    shares: Shares | None,
    delays: dict[str, float],
    worst: Sequence[Case],
) -> None:
    if audit.seconds_of_step:
        error = audit.seconds_of_step.model.error
        print(f"seconds of a fit to the recorded steps; its median error is {100 * error:.1f} %")
    print(f"\nadded by each {by} to the times of the others ({unit}, with all minus without it)")
    print(_table(audit, without))
    if shares is not None:
        how = "exact"
        if shares.permutations:
            how = f"{shares.permutations} orders drawn"
        print(f"\nthe delay of each {by}, shared among the others ({unit}, Shapley values, {how})")
        print(_table(audit, shares.shares, shares.error))
        print(f"total delay: {sum(delays.values()):.4g} {unit}")
    print("\nworst cases")
    for case in worst:
        print(f"  {case.causer} delayed {case.request_id} of {case.sufferer} by {case.seconds:.4g}")
    for name, number in audit.inexact.items():
        print(f"NOTE: not exact: {number} {name}")
    print(f"{audit.num_runs} runs")


def _table(audit: Audit, matrix: Matrix, error: Any = None) -> str:
    """A matrix for a terminal: those who cause most, and those who suffer most."""
    names = sorted(audit.groups, key=lambda name: -caused(matrix, name))[:SHOWN]
    sufferers = sorted(audit.groups, key=lambda name: -suffered(matrix, name))[:SHOWN]
    columns: dict[str, list[str]] = {"": names}
    for sufferer in sufferers:
        columns[f"to {sufferer}"] = [
            "" if name == sufferer else f"{matrix[name, sufferer]:.4g}" for name in names
        ]
    totals = [f"{caused(matrix, name):.4g}" for name in names]
    if error:
        totals = [
            f"{total} +- {error[name]:.2g}" for total, name in zip(totals, names, strict=True)
        ]
    text = aligned(columns | {"to all": totals})
    hidden = len(audit.groups) - len(names)
    return f"{text}\nand {hidden} more, see --json" if hidden else text


def _record(folder: Path, audit: Audit, worst: Sequence[Case]) -> None:
    """Writes the recordings of the worst cases, and says how to look at them."""
    folder.mkdir(parents=True, exist_ok=True)
    everyone = folder / "all.jsonl"
    rerun.record(everyone, audit.run(audit.everyone))
    for causer in dict.fromkeys([case.causer for case in worst]):
        path = folder / f"without-{re.sub('[^A-Za-z0-9._-]', '_', causer)}.jsonl"
        rerun.record(path, audit.run(audit.everyone - {causer}))
        print(f"pagedjax view {everyone} {path}")


def _as_json(
    audit: Audit,
    by: str,
    unit: str,
    without: Matrix,
    shares: Shares | None,
    delays: dict[str, float],
    worst: Sequence[Case],
) -> dict[str, Any]:
    def nested(matrix: Matrix) -> dict[str, dict[str, float]]:
        return {
            causer: {name: matrix[causer, name] for name in audit.groups if name != causer}
            for causer in audit.groups
        }

    values: dict[str, Any] = {
        "by": by,
        "unit": unit,
        "requests": {name: len(group) for name, group in audit.groups.items()},
        "without": nested(without),
        "worst": [case._asdict() for case in worst],
        "runs": audit.num_runs,
        "inexact": dict(audit.inexact),
    }
    if audit.seconds_of_step:
        values["fit_error"] = audit.seconds_of_step.model.error
    if shares is not None:
        values |= {
            "delays": delays,
            "shares": nested(shares.shares),
            "permutations": shares.permutations,
            "error": dict(shares.error),
        }
    return values


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.blame",
        description="Who delayed whom in a recorded run?",
        allow_abbrev=False,
    )
    parser.add_argument("recording", metavar="RUN", help="a recording")
    parser.add_argument(
        "--by", choices=["user", "class", "request"], default="user", help="(default: user)"
    )
    parser.add_argument(
        "--steps", action="store_true", help="count steps, also if the recording has times"
    )
    parser.add_argument(
        "--buckets",
        type=int,
        nargs="+",
        help="the engine's token buckets, for the fit (default: those of its budget)",
    )
    parser.add_argument(
        "--permutations",
        type=int,
        default=8,
        help=f"orders that are drawn for more than {MOST_EXACT} groups (default: 8)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of these orders (default: 0)")
    parser.add_argument(
        "--most-runs", type=int, default=1000, help="refuse to make more (default: 1000)"
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        help="of your own, that the run had: module:NAME or folder/file.py:NAME",
    )
    parser.add_argument("--record", metavar="FOLDER", help="write recordings of the worst cases")
    parser.add_argument("--json", metavar="FILE", help="also write all results to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
