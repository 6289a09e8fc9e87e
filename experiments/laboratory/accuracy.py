"""How well does a recording predict the run of another configuration?

    python -m experiments.laboratory.accuracy smollm2-135m --json accuracy.json

The same requests, at the same times, run as recorded, once more as recorded, and with each of four
changes: block size, token budget, policy and number of sequences. Each change is predicted from the
first recording. That is a round; every second round has the opposite order. The table has medians
over requests, measured and predicted, and of these the median over the rounds. The row `again` has
the second equal run in place of a prediction, and `spread` is how far equal runs are apart: no
prediction can be nearer than that. The tokens differ by rounding at most; all lengths are
given.

Give it a quiet machine: a time that was measured beside other jobs is not a result.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import at_least_1
from experiments.core.drive import drive
from experiments.core.environment import environment
from experiments.core.workloads import WorkItem
from experiments.laboratory import paired, past
from experiments.laboratory.measured import Cell, cells, text_of
from experiments.laboratory.past import Past
from experiments.laboratory.prediction import predict, reading
from experiments.laboratory.rerun import run, unchanged
from pagedjax import LLM, Engine, routing
from pagedjax.host import policies
from pagedjax.options.params import SamplingParams

RECORDED = {
    "block_size": 16,
    "num_blocks": 256,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "policy": "fcfs",
}
BUCKETS = (8, 32, 128)
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "block_size 64": {"block_size": 64, "num_blocks": 64},
    "budget 32": {"max_num_batched_tokens": 32},
    "policy shortest": {"policy": "shortest"},
    "max_num_seqs 4": {"max_num_seqs": 4},
}
RECORDED_RUN = "recorded"
AGAIN = "again"  # on the engine of the recorded run
ENGINES: Mapping[str, Mapping[str, Any]] = {AGAIN: {}, **CHANGES}


class Measured(NamedTuple):
    """A measured run.

    due: when each request was due, by its arrival: up to a step before the engine took it.
    times: of each request, since it was due.
    """

    recorded: Past
    due: Mapping[int, float]
    times: Mapping[int, paired.Times]


class Round(NamedTuple):
    """All changes, measured and predicted once.

    fit_error: the median error of the fit to the recorded steps.
    """

    table: list[Cell]
    fit_error: float


def requests(count: int, rate: float, seed: int) -> list[WorkItem]:
    """Requests of random tokens with Poisson arrivals."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / rate, count))
    return [
        WorkItem(
            f"r{i}",
            float(arrivals[i]),
            tuple(draw.integers(17, 300, int(draw.integers(20, 200))).tolist()),
            int(draw.integers(8, 64)),
        )
        for i in range(count)
    ]


def engine_of(model: str, changed: Mapping[str, Any]) -> Engine:
    """An engine with all programs compiled, and the options of the recording or changed ones."""
    options = {**RECORDED, **changed}
    buckets = [size for size in BUCKETS if size <= options["max_num_batched_tokens"]]
    llm = LLM(
        model,
        max_model_len=512,
        token_buckets=tuple(buckets),
        compilation="eager",
        progress=False,
        **options,
    )
    return llm.engine


def measure(engine: Engine, items: Sequence[WorkItem], path: Path) -> Measured:
    """Runs and records the requests."""
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    drive(engine, [item._replace(arrival=0.0) for item in items[:8]], sampling)
    engine.reset()
    recording_start = time.perf_counter()
    engine.record(path, times=True, prompts=True)
    start, _ = drive(engine, items, sampling)
    engine.record(None)
    engine.reset()
    recorded = past.read(path)
    outcomes = reading(run(recorded, unchanged(recorded))).outcomes
    due = {i: start - recording_start + item.arrival for i, item in enumerate(items)}
    return Measured(recorded, due, paired.times_of(outcomes, due))


def predicted(before: Measured, changed: Mapping[str, Any]) -> tuple[list[paired.Row], float]:
    """What a run would give with a change -> (its rows, the fit's median error)."""
    fields = {field: value for field, value in changed.items() if field != "policy"}
    change = unchanged(before.recorded)._replace(
        config=before.recorded.config._replace(**fields),
        policy=policies.find(changed.get("policy", RECORDED["policy"])),
    )
    result = predict(before.recorded, change, router=routing.ROUND_ROBIN, buckets=BUCKETS)
    assert result.times is not None, "the recordings have times"
    # also since it was due, else predictions would miss what requests wait for a step's end
    times = paired.times_of(result.changed.outcomes, before.due)
    everybody = {paired.EVERYBODY: list(before.times)}
    return paired.rows(everybody, before.times, times), result.times.model.error


def round_of(
    engines: Mapping[str, Engine], items: Sequence[WorkItem], folder: Path, opposite: bool
) -> Round:
    """Measures and predicts all changes.

    Args:
        engines: by the names of `CHANGES`, and `AGAIN`.
        opposite: the recorded run is the last one.
    """
    names = [RECORDED_RUN, *engines]
    runs: dict[str, Measured] = {}
    for name in reversed(names) if opposite else names:
        engine = engines[AGAIN if name == RECORDED_RUN else name]
        runs[name] = measure(engine, items, folder / "run.jsonl")
    before = runs[RECORDED_RUN]
    table = cells(AGAIN, before.times, runs[AGAIN].times, None)
    error = 0.0
    for name, changed in CHANGES.items():
        rows, error = predicted(before, changed)
        table += cells(name, before.times, runs[name].times, rows)
    return Round(table, error)


def median_of(rounds: Sequence[Round]) -> Round:
    """The median over rounds of every number."""

    def median(numbers: Sequence[float | None]) -> float | None:
        """Without a prediction, a cell has None in each round."""
        values = [number for number in numbers if number is not None]
        return float(np.median(values)) if values else None

    def middle(cells_of_rounds: Sequence[Cell]) -> Cell:
        fields = Cell._fields[2:]  # behind the names
        numbers = {
            field: median([getattr(cell, field) for cell in cells_of_rounds]) for field in fields
        }
        return cells_of_rounds[0]._replace(**numbers)

    tables = [measured_round.table for measured_round in rounds]
    table = [middle(cells_of_rounds) for cells_of_rounds in zip(*tables, strict=True)]
    errors = [measured_round.fit_error for measured_round in rounds]
    return Round(table, float(np.median(errors)))


def spreads(rounds: Sequence[Round]) -> dict[str, float]:
    """How far the medians of equal runs are apart, of their median, by measure."""
    equal: dict[str, list[float]] = {}
    for measured_round in rounds:
        for cell in measured_round.table:
            if cell.change == AGAIN:
                equal.setdefault(cell.measure, []).extend((cell.recorded, cell.measured))
    return {
        measure: float((max(numbers) - min(numbers)) / np.median(numbers))
        for measure, numbers in equal.items()
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(words)
    if not 0 < options.rate < float("inf"):  # nan, too, is no rate
        parser.error(f"--rate is {options.rate}; it must be above 0 and finite")
    items = requests(options.count, options.rate, options.seed)
    engines = {name: engine_of(options.model, change) for name, change in ENGINES.items()}
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            round_of(engines, items, Path(folder), opposite=number % 2 == 1)
            for number in range(options.rounds)
        ]
    result = median_of(rounds)
    print(f"median error of the fit to the recorded steps: {result.fit_error:.1%}")
    print(text_of(result.table))
    for measure_name, spread in spreads(rounds).items():
        print(f"spread of equal runs, {measure_name}: {spread:.1%}")
    if options.json:
        values = {
            "model": options.model,
            "date": time.strftime("%Y-%m-%d"),
            "requests": options.count,
            "rate": options.rate,
            "rounds": options.rounds,
            "fit_error": result.fit_error,
            "spreads": spreads(rounds),
            "cells": [{**cell._asdict(), "error": cell.error} for cell in result.table],
            "errors_of_rounds": [
                [cell.error for cell in measured_round.table] for measured_round in rounds
            ],
            "where": environment(),
        }
        Path(options.json).write_text(f"{json.dumps(values, indent=2)}\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.laboratory.accuracy",
        description="How well does a recording predict the run of another configuration?",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a model (smollm2-135m)")
    parser.add_argument("--count", type=at_least_1, default=60, help="requests of each run (60)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (1)")
    parser.add_argument(
        "--rounds", type=at_least_1, default=3, help="measurements of each change (3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    parser.add_argument("--json", metavar="FILE", help="also write the result to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
