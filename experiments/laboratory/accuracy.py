"""How well does a recording predict the run of another configuration?

    python -m experiments.laboratory.accuracy smollm2-135m --json accuracy.json

The same requests, at the same times, run as recorded, once more as recorded, and with each of four
changes: block size, token budget, policy and number of sequences. Each change is predicted from the
first recording. The table has medians over requests, measured and predicted. The row `again` has the
second equal run in place of a prediction: no prediction can be nearer than that. The tokens differ
by rounding at most, and all lengths are given.

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

from experiments.core.drive import drive
from experiments.core.environment import environment
from experiments.core.workloads import WorkItem
from experiments.laboratory import paired, past
from experiments.laboratory.measured import Cell, cells, text_of
from experiments.laboratory.past import Past
from experiments.laboratory.prediction import predict, reading
from experiments.laboratory.rerun import run, unchanged
from pagedjax import LLM, routing
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
AGAIN = "again"


class Measured(NamedTuple):
    """A measured run.

    due: when each request was due, by its arrival: up to a step before the engine took it.
    times: of each request, since it was due.
    """

    recorded: Past
    due: Mapping[int, float]
    times: Mapping[int, paired.Times]


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


def measure(model: str, items: Sequence[WorkItem], path: Path, **changed: Any) -> Measured:
    """Runs and records the requests on an engine of its own."""
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
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    drive(llm.engine, [item._replace(arrival=0.0) for item in items[:8]], sampling)
    llm.engine.reset()
    recording_start = time.perf_counter()
    llm.engine.record(path, times=True, prompts=True)
    start, _ = drive(llm.engine, items, sampling)
    llm.engine.record(None)
    recorded = past.read(path)
    outcomes = reading(run(recorded, unchanged(recorded))).outcomes
    due = {i: start - recording_start + item.arrival for i, item in enumerate(items)}
    return Measured(recorded, due, paired.times_of(outcomes, due))


def compare(model: str, items: Sequence[WorkItem], folder: Path) -> tuple[list[Cell], float]:
    """Measures and predicts all changes -> (the table, the fit's median error)."""
    before = measure(model, items, folder / "recorded.jsonl")
    second = measure(model, items, folder / "again.jsonl")
    table = cells(AGAIN, before.times, second.times, None)
    error = 0.0
    for name, changed in CHANGES.items():
        after = measure(model, items, folder / "changed.jsonl", **changed)
        fields = {field: value for field, value in changed.items() if field != "policy"}
        change = unchanged(before.recorded)._replace(
            config=before.recorded.config._replace(**fields),
            policy=policies.find(changed.get("policy", RECORDED["policy"])),
        )
        result = predict(before.recorded, change, router=routing.ROUND_ROBIN, buckets=BUCKETS)
        assert result.times is not None, "the recordings have times"
        error = result.times.model.error
        # also since it was due, else predictions would miss what requests wait for a step's end
        predicted = paired.times_of(result.changed.outcomes, before.due)
        everybody = {paired.EVERYBODY: list(before.times)}
        rows = paired.rows(everybody, before.times, predicted)
        table += cells(name, before.times, after.times, rows)
    return table, error


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    items = requests(options.count, options.rate, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        table, error = compare(options.model, items, Path(folder))
    print(f"median error of the fit to the recorded steps: {error:.1%}")
    print(text_of(table))
    if options.json:
        values = {
            "model": options.model,
            "date": time.strftime("%Y-%m-%d"),
            "requests": options.count,
            "rate": options.rate,
            "fit_error": error,
            "cells": [{**cell._asdict(), "error": cell.error} for cell in table],
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
    parser.add_argument("--count", type=int, default=60, help="requests of each run (60)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    parser.add_argument("--json", metavar="FILE", help="also write the result to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
