"""Simulated runs of a config, and the summary of a run from all of its records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import run
from experiments.core import engines
from experiments.core.config import Point, Slo, expand
from experiments.core.drive import Measured, measure
from experiments.core.metrics import step_sums, summary, token_sums
from experiments.core.records import RequestRecord, StepRecord
from pagedjax import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BASE: dict[str, Any] = {  # a simulated run, which tests change
    "name": "simulated",
    "model": "llama-3-8b",
    "engine": {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "block_size": 8,
    },
    "cache_tokens": 1024,
    "workload": {
        "kind": "synthetic",
        "count": 40,
        "prompt": {"dist": "uniform", "low": 4, "high": 40},
        "output": {"dist": "uniform", "low": 2, "high": 20},
        "arrivals": {"process": "poisson", "rate": 60.0},
    },
    "sampling": {"temperature": 0.0, "ignore_eos": True},
    "simulate": {"chip": "h200", "model": "llama-3-8b"},
}

MEASURED: dict[str, Any] = {  # a run on a tiny model
    "name": "unit",
    "engine": {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 32,
        "block_size": 4,
        "token_buckets": [16],
    },
    "cache_tokens": 256,
    "workload": {
        "kind": "synthetic",
        "count": 5,
        "prompt": {"dist": "uniform", "low": 2, "high": 12},
        "output": {"dist": "uniform", "low": 2, "high": 6},
        "arrivals": {"process": "poisson", "rate": 200.0},
    },
    "sampling": {"temperature": 0.0, "ignore_eos": True},
    "warmup": {"requests": 1, "max_tokens": 2},
}


def changed_workload(**fields: Any) -> dict[str, Any]:
    return {**BASE["workload"], **fields}


def simulated_run(raw: dict[str, Any], folder: Path = Path()) -> Measured:
    """The first run of a config that has one point."""
    (point,) = expand(raw, folder=folder)
    return simulated_run_at(point)


def simulated_run_at(point: Point) -> Measured:
    return measure(engines.simulated_llm(point.experiment), point, 0)


def run_files(
    folder: Path, raw: dict[str, Any], status: int = 0, *, with_report: bool = False
) -> Path:
    """Run a config by the command, in a folder with the files that it names. Returns the folder
    of its runs.

    status: that the command exits with.
    """
    (folder / "one.yaml").write_text(json.dumps(raw), encoding="utf-8")
    command = [str(folder / "one.yaml"), "--out", str(folder / "runs"), "--quiet"]
    if not with_report:  # to draw one takes a second
        command.append("--no-report")
    assert run.main(command) == status
    return folder / "runs" / raw["name"]


def summarize(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    size: int,
    slo: Slo | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Args: size: of a block, in tokens. options: of `summary`."""
    return summary(requests, step_sums(steps), token_sums(requests), size, slo, **options)
