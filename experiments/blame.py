"""Who delayed whom in a recorded run?

    pagedjax blame run.jsonl                     by user
    pagedjax blame run.jsonl --by class
    pagedjax blame run.jsonl --page blame.html   a page, and those of the worst cases
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
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from experiments.analysis.sweep_points import aligned
from experiments.laboratory import blame_page, command, outcomes, rerun
from experiments.laboratory.blame import (
    MOST_EXACT,
    Audit,
    Case,
    Matrix,
    Result,
    Shares,
    caused,
    order,
    runs_of_sample,
    suffered,
)
from experiments.laboratory.contents import Refused

SHOWN = 8  # groups in a table of the terminal
WORST = 5  # cases
LONGEST_NAME = 80  # characters of a group in the name of a file
ALL = "all"  # names of recordings
WITHOUT = "without-"


def main(words: Sequence[str] | None = None) -> int:
    return command.run(
        _parser(), words, _run, lambda options: f"cannot blame anybody in {options.recording}"
    )


def _run(options: argparse.Namespace) -> int:
    _check(options)
    recorded = command.read(options.recording, options)
    audit = Audit(recorded, options.by, buckets=options.buckets, steps=options.steps)
    _check_runs(audit, options)
    added, cases = audit.without()
    shares = _shares(audit, options)
    result = Result(
        by=options.by,
        unit="s" if audit.seconds_of_step else "steps",
        added=added,
        shares=shares,
        delays={} if shares is None else audit.delays(),
        worst=[case for case in cases if case.seconds > 0][:WORST],
    )
    _print(audit, result)
    if options.record:
        everyone, without = _record(Path(options.record), audit, result.worst)
        for path in without.values():
            print(command.view_command((everyone, recorded.own_policy), (path, None)))
    if options.page:
        _write_page(audit, result, options)
    command.write_json(options.json, _as_json(audit, result))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be, before anything runs."""
    if options.permutations < 2:
        raise ValueError(f"permutations is {options.permutations}; it must be at least 2")
    command.check_results(options, "blame", recordings=[options.recording], written=[])
    if not options.record:
        return
    folder = Path(options.record)
    if folder.is_file():
        raise ValueError(f"--record is {folder}, which is a file; name a folder")
    recording = Path(options.recording)
    is_inside = recording.resolve().parent == folder.resolve()
    if is_inside and (recording.stem == ALL or recording.stem.startswith(WITHOUT)):
        raise ValueError(
            f"--record is {folder}, whose {recording.name} is the recording that is read, and may "
            "be overwritten; name another folder"
        )


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


def _print(audit: Audit, result: Result) -> None:
    by = result.by
    unit = result.unit
    if audit.seconds_of_step:
        error = audit.seconds_of_step.model.error
        print(f"seconds of a fit to the recorded steps; its median error is {100 * error:.1f} %")
    print(f"\nadded by each {by} to the times of the others ({unit}, with all minus without it)")
    print(_table(audit, result.added))
    shares = result.shares
    if shares is not None:
        how = "exact"
        if shares.permutations:
            how = f"{shares.permutations} orders drawn, +- 95 %"
        print(f"\nthe delay of each {by}, shared among the others ({unit}, Shapley values, {how})")
        print(_table(audit, shares.shares, shares.error))
        print(f"total delay: {sum(result.delays.values()):.4g} {unit}")
    print("\nworst cases")
    for case in result.worst:
        print(f"  {case.causer} delayed {case.request_id} of {case.sufferer} by {case.seconds:.4g}")
    for name, number in audit.inexact.items():
        print(f"NOTE: not exact: {number} {name}")
    print(f"{audit.num_runs} runs")


def _table(audit: Audit, matrix: Matrix, error: Mapping[str, float] | None = None) -> str:
    """A matrix for a terminal: a row causes, a column suffers. Sums come first, because a row may
    be longer than the terminal is wide.
    """
    names, sufferers = order(list(audit.groups), matrix, SHOWN)
    totals = [f"{caused(matrix, name):.4g}" for name in names]
    if error:
        totals = [
            f"{total} +- {error[name]:.2g}" for total, name in zip(totals, names, strict=True)
        ]
    everyone = f"{sum(matrix.values()):.4g}"
    columns: dict[str, list[str]] = {"": [*names, "all"], "to all": [*totals, everyone]}
    for sufferer in sufferers:
        columns[f"to {sufferer}"] = [
            "-" if name == sufferer else f"{matrix[name, sufferer]:.4g}" for name in names
        ]
        columns[f"to {sufferer}"].append(f"{suffered(matrix, sufferer):.4g}")
    text = aligned(columns)
    hidden = len(audit.groups) - len(names)
    return f"{text}\nand {hidden} more, see --json" if hidden else text


def _record(folder: Path, audit: Audit, worst: Sequence[Case]) -> tuple[Path, dict[str, Path]]:
    """Writes the recordings of the worst cases -> that with all, and by causer that without it."""
    folder.mkdir(parents=True, exist_ok=True)
    everyone = folder / f"{ALL}.jsonl"
    rerun.record(everyone, audit.run(audit.everyone))
    without: dict[str, Path] = {}
    for causer, name in _file_names(worst).items():
        without[causer] = folder / f"{name}.jsonl"
        rerun.record(without[causer], audit.run(audit.everyone - {causer}))
    return everyone, without


def _file_names(worst: Sequence[Case]) -> dict[str, str]:
    """The name of a file for the run without each causer."""
    names: dict[str, str] = {}
    for causer in dict.fromkeys([case.causer for case in worst]):
        name = f"{WITHOUT}{re.sub('[^A-Za-z0-9._-]', '_', causer)[:LONGEST_NAME]}"
        while name in names.values():
            name += "_"
        names[causer] = name
    return names


def _write_page(audit: Audit, result: Result, options: argparse.Namespace) -> None:
    """Writes the page, and beside it the viewer's pages of the worst cases, if the recording is
    short.
    """
    path = Path(options.page)
    about = blame_page.About(Path(options.recording).name, options.command_line, [])
    if command.has_steps_page(options.recording):
        about = about._replace(links=_write_case_pages(path, audit, result.worst))
    else:
        note = f"{command.TOO_LONG} --record FOLDER writes their recordings, for pagedjax view."
        about = about._replace(links=[""] * len(result.worst), links_note=note)
    command.write_page(path, blame_page.page(audit, result, about))


def _write_case_pages(path: Path, audit: Audit, worst: Sequence[Case]) -> list[str]:
    """Writes a page of the run with all beside that without each causer of the worst cases -> the
    link of each case to the step in which its longest wait begins.
    """
    policy = audit.past.policy
    names = _file_names(worst)
    with tempfile.TemporaryDirectory() as folder:
        everyone, without = _record(Path(folder), audit, worst)
        for causer, recording in without.items():
            text = command.steps_page(
                (everyone, policy), (recording, policy), names=("all", f"without {causer}")
            )
            command.write_page(path.with_name(f"{path.stem}.{names[causer]}.html"), text)
    steps = outcomes.steps_of_waits(audit.run(audit.everyone), [case.arrival for case in worst])
    return [
        f"{quote(f'{path.stem}.{names[case.causer]}.html')}#step={steps[case.arrival]}"
        f"&request={quote(case.request_id, safe='')}"
        for case in worst
    ]


def _as_json(audit: Audit, result: Result) -> dict[str, Any]:
    def nested(matrix: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
        return {
            causer: {name: matrix[causer, name] for name in audit.groups if name != causer}
            for causer in audit.groups
        }

    values: dict[str, Any] = {
        "by": result.by,
        "unit": result.unit,
        "requests": {name: len(group) for name, group in audit.groups.items()},
        "without": nested(result.added),
        "worst": [case._asdict() for case in result.worst],
        "runs": audit.num_runs,
        "inexact": dict(audit.inexact),
    }
    if audit.seconds_of_step:
        values["fit_error"] = audit.seconds_of_step.model.error
    shares = result.shares
    if shares is not None:
        values |= {
            "delays": result.delays,
            "shares": nested(shares.shares),
            "permutations": shares.permutations,
            "error": dict(shares.error),
            "errors": nested(shares.errors) if shares.errors else {},
        }
    return values


def _parser() -> argparse.ArgumentParser:
    parser = command.new_parser("blame", "Who delayed whom in a recorded run?")
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
    parser.add_argument("--record", metavar="FOLDER", help="write recordings of the worst cases")
    command.add_results(
        parser, page="write a page with the matrices, and pages of the worst cases beside it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
