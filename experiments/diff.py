"""Where do two recorded runs differ first, and which requests does it take?

    pagedjax diff a.jsonl b.jsonl
    pagedjax diff a.jsonl b.jsonl --page both.html       both runs at that step, in a browser
    pagedjax diff a.jsonl b.jsonl --shrink small_a.jsonl small_b.jsonl

Both recordings are replayed, and must replay byte for byte. They are compared step by step: what
came from outside, what each step decided, and which tokens it sampled. Times and the names of
blocks are not compared. The output has the first step that decides differently, both schedulers in
that step (lines that differ have a | between them), and the inputs that differ before it.

--shrink leaves out requests as long as both schedulers, run again without them, still differ in the
same kind of decision, and writes the two recordings of what is left (docs/design/laboratory.md).

Exit status: 0 if the runs are equal, 1 if they differ, 2 if they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from experiments.laboratory import command, differences, rerun, shrink
from experiments.laboratory.differences import Difference
from experiments.laboratory.past import Past
from pagedjax.viewer.pair import different_names


def main(words: Sequence[str] | None = None) -> int:
    return command.run(
        _parser(), words, _run, lambda options: f"cannot compare {options.a} and {options.b}"
    )


def _run(options: argparse.Namespace) -> int:
    recordings = [options.a, options.b]
    command.check_results(options, "diff", recordings=recordings, written=options.shrink or [])
    first = command.read(options.a, options)
    second = command.read(options.b, options)
    result = differences.difference(first, second)
    print(differences.text(result))
    values = {"a_file": options.a, "b_file": options.b} | differences.as_json(result)
    if options.page:
        _write_page(options, first, second, result)
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
    command.write_json(options.json, values)
    return 0 if result.equal else 1


def _write_page(options: argparse.Namespace, first: Past, second: Past, result: Difference) -> None:
    """Writes the viewer's page of both runs, which opens at the first step that differs."""
    names = different_names(options.a, options.b)
    plans = [step.plan for step in (result.first, result.second) if step and step.plan]
    opens = f"step={plans[0].step}" if plans else ""
    if plans and (result.first is None or result.first.plan is None):
        opens = f"run=2&{opens}"  # the first run has no such step
    text = command.steps_page(
        (options.a, first.policy), (options.b, second.policy), names=names, opens=opens
    )
    command.write_page(options.page, text)


def _parser() -> argparse.ArgumentParser:
    parser = command.new_parser("diff", "Where do two recorded runs differ first?")
    parser.add_argument("a", metavar="A", help="a recording")
    parser.add_argument("b", metavar="B", help="another recording")
    parser.add_argument(
        "--shrink",
        nargs=2,
        metavar=("OUT_A", "OUT_B"),
        help="leave out requests as long as the difference is shown, and write these recordings",
    )
    command.add_results(
        parser, page="write the viewer's page of both runs, opened at the first step that differs"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
