"""Where do two recorded runs differ first, and which requests does it take?

    pagedjax diff a.jsonl b.jsonl
    pagedjax diff a.jsonl b.jsonl --shrink small_a.jsonl small_b.jsonl

Both recordings are replayed, and must replay byte for byte. They are compared step by step: what
came from outside, what each step decided, and which tokens it sampled. Times and the names of
blocks are not compared. The output has the first step that decides differently, both schedulers in
that step, and the inputs that differ before it.

--shrink leaves out requests as long as both schedulers, run again without them, still differ in the
same kind of decision, and writes the two recordings of what is left (docs/design/laboratory.md).

Exit status: 0 if the runs are equal, 1 if they differ, 2 if they cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.laboratory import differences, past, rerun, shrink
from pagedjax.host.event_log import check_target
from pagedjax.host.replay import with_own


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"cannot compare {options.a} and {options.b}: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    for path in options.shrink or ():
        check_target(path)
        past.check_other_file(path, (options.a, options.b))
    if options.json:
        check_target(options.json, "result", "diff.json")
    known_policies = with_own(options.policy)
    first = past.read(options.a, known_policies)
    second = past.read(options.b, known_policies)
    result = differences.difference(first, second)
    print(differences.text(result))
    values = {"a_file": options.a, "b_file": options.b} | differences.as_json(result)
    if options.shrink and not result.equal:
        smallest = shrink.shrink(first, second)
        requests = [first.requests[arrival].request_id for arrival in smallest.arrivals]
        rerun.record(options.shrink[0], smallest.first)
        rerun.record(options.shrink[1], smallest.second)
        print(
            f"{len(requests)} of {len(first.requests)} requests show it: {' '.join(requests)} "
            f"({smallest.tries} sets tried); `pagedjax diff {options.shrink[0]} "
            f"{options.shrink[1]}` shows how"
        )
        if smallest.scale < 1.0:
            print(f"their times are {smallest.scale:g} of the recorded ones")
        values["shrunk"] = {
            "requests": requests,
            "tries": smallest.tries,
            "scale": smallest.scale,
        }
    if options.json:
        text = json.dumps(values, indent=2, default=int)
        Path(options.json).write_text(f"{text}\n", encoding="utf-8")
    return 0 if result.equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.diff",
        description="Where do two recorded runs differ first?",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A", help="a recording")
    parser.add_argument("b", metavar="B", help="another recording")
    parser.add_argument(
        "--shrink",
        nargs=2,
        metavar=("OUT_A", "OUT_B"),
        help="leave out requests as long as the difference is shown, and write these recordings",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        help="of your own, that a run had: module:NAME or folder/file.py:NAME; may be given twice",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
