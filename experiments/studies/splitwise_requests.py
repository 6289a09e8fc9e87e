"""Splitwise's targets and its requests.

Targets limit slowdowns: times over those of one request alone on a DGX-A100. Lengths are those of
recorded traces. Both follow notebooks/plots.ipynb, notebooks/perf_model.py and generate_trace.py of
its simulator (see splitwise_machines.py).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from experiments.core.records import RequestRecord
from experiments.simulation.measured import BLOOM, at
from pagedjax.server.load_client.text_files import trace_rows

QUANTILES = (0.5, 0.9, 0.99)
# the largest slowdowns of Table VI, by QUANTILES
LIMITS = {"TTFT": (2.0, 3.0, 6.0), "TBT": (1.25, 1.5, 5.0), "E2E": (1.25, 1.5, 5.0)}
START = datetime(2000, 1, 1)


def alone(prompt: int) -> tuple[float, float]:
    """The seconds of the first token and of each further one, for a request alone on a DGX-A100."""
    machine = BLOOM["a100"]
    return at(machine.prompts, prompt) / 1e3, at(machine.token_ms, prompt) / 1e3


def slowdowns(requests: Iterable[RequestRecord]) -> dict[str, tuple[float, ...]]:
    """The percentiles (QUANTILES) of each kind of slowdown.

    TBT is the time after the first token, divided by the number of all tokens of the answer, the
    first included. application.py of Splitwise's simulator computes it in this way.
    """
    by_kind: dict[str, list[float]] = {name: [] for name in LIMITS}
    for request in requests:
        assert request.ttft is not None, "a simulated run ends every request"
        assert request.e2e is not None, "a simulated run ends every request"
        first, token = alone(request.prompt_tokens)
        by_kind["TTFT"].append(request.ttft / first)
        by_kind["TBT"].append((request.e2e - request.ttft) / request.max_tokens / token)
        by_kind["E2E"].append(request.e2e / (first + token * (request.max_tokens - 1)))
    return {
        name: tuple(np.quantile(values, QUANTILES).tolist()) for name, values in by_kind.items()
    }


def missed_targets(slowdowns_by_kind: Mapping[str, tuple[float, ...]]) -> tuple[str, ...]:
    """The targets that are not met, such as "TBT P50"."""
    return tuple(
        f"{name} P{100 * quantile:.0f}"
        for name, limits in LIMITS.items()
        for quantile, limit, value in zip(QUANTILES, limits, slowdowns_by_kind[name], strict=True)
        if value >= limit
    )


def write(trace: Path, place: Path, count: int, seed: int) -> Path:
    """Write a trace of `count` requests. Returns its file.

    Arrivals are a Poisson process with one request a second. The lengths of prompts and of answers
    are drawn from a recorded trace independently, with replacement, as in generate_trace.py.
    """
    rows = trace_rows(str(trace), trace.read_text(encoding="utf-8"))
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0, count))
    prompts = rng.choice([row.prompt_tokens for row in rows], count).tolist()
    answers = rng.choice([row.output_tokens for row in rows], count).tolist()
    file = place / f"{trace.stem}-{count}-{seed}.csv"
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for arrival, prompt, answer in zip(arrivals.tolist(), prompts, answers, strict=True):
            time = START + timedelta(seconds=arrival)
            writer.writerow((time.isoformat(), prompt, answer))
    return file
