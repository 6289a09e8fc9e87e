"""012: goodput of the queue's order on recorded requests.

There is no published number: the question is ours, as in 009.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.analysis import figures
from experiments.core.workloads import AZURE
from experiments.studies.findings import (
    Findings,
    Interval,
    Summary,
    dig,
    markdown,
    over,
    recorded_file,
    simulated,
    span,
)

QUESTION = (
    "Which order of the queue keeps most of a recorded service's requests within their targets?"
)
TRACES = {"chat": "conv", "code": "code"}
FETCH = AZURE  # which files, and where they are
POLICIES = ("fcfs", "shortest")
SHARE = "goodput.share"


def run(folder: Path, quick: bool, traces: Path) -> Findings:
    panels = {}
    rows = []
    answer = []
    for name in TRACES:
        runs = windows(folder, recorded_file(traces, f"*{TRACES[name]}*.csv", FETCH), quick)
        panels[name] = {
            policy: [
                (rate, 100 * over(summaries, "goodput.share").middle)
                for (kind, rate), summaries in runs.items()
                if kind == policy
            ]
            for policy in POLICIES
        }
        for (policy, rate), summaries in runs.items():
            paths = (
                "goodput.share",
                "ttft_s.p50",
                "ttft_s.p99",
                "itl_s.p99",
                "output_tokens_per_s",
            )
            share, *cells = (over(summaries, path).middle for path in paths)
            rows.append((name, policy, rate, 100 * share, *cells))
        answer.append(sentence(name, runs))
    head = (
        "trace",
        "policy",
        "times as recorded",
        "in time, %",
        "first token, p50, s",
        "p99, s",
        "between tokens, p99, s",
        "output tokens/s",
    )
    figure = figures.curves(panels, "load, times as recorded", "% within both targets", lowest=0)
    return Findings([], answer, {"goodput.svg": figure}, [markdown(head, rows)])


def windows(
    folder: Path, file: Path, quick: bool, *overrides: str
) -> dict[tuple[str, float], list[Summary]]:
    """(policy, load) -> summaries, one for each window of the trace."""
    quick_options = (
        ("workload.limit=200", "sweep.grid.workload.time_scale=[1.0, 0.5]") if quick else ()
    )
    summaries: dict[tuple[str, float], list[Summary]] = {}
    for point, (summary,) in simulated(
        folder / "config.yaml", f"workload.file={file.resolve()}", *quick_options, *overrides
    ):
        key = str(point.experiment.engine.policy), 1 / point.swept["workload.time_scale"]
        summaries.setdefault(key, []).append(summary)
    return summaries


def sentence(name: str, runs: dict[tuple[str, float], list[Summary]]) -> str:
    rates = [rate for policy, rate in runs if policy == "fcfs"]
    gains = {rate: gain(runs["shortest", rate], runs["fcfs", rate]) for rate in rates}
    finite = {rate: ratio for rate, ratio in gains.items() if ratio is not None}
    if not finite:
        return (
            f"On {name}, first come, first served keeps none within 2 s and 60 ms in some "
            "window, at any load."
        )
    rate, best = max(finite.items(), key=lambda item: item[1].middle)
    shares = {policy: 100 * over(runs[policy, rate], "goodput.share").middle for policy in POLICIES}
    last = {
        policy: statistics.median(summary["ttft_s"]["p99"] for summary in runs[policy, rate])
        for policy in POLICIES
    }
    return (
        f"On {name}, the shorter prompt first gains most at {rate:.2g} times the recorded load: it "
        f"keeps {shares['shortest']:.0f} % of the requests within 2 s and 60 ms, first come, first "
        f"served {shares['fcfs']:.0f} % ({best.low:.2f} to {best.high:.2f} times as many, by "
        f"window); the 99th percentile of the first token is {last['shortest']:.1f} s instead of "
        f"{last['fcfs']:.1f}."
    )


def gain(above: Sequence[Summary], below: Sequence[Summary]) -> Interval | None:
    """The range of the ratios of all windows, which are scenarios of one trace.

    None if a window of `below` has no goodput.
    """
    pairs = [(dig(a, SHARE), dig(b, SHARE)) for a, b in zip(above, below, strict=True)]
    return span([a / b for a, b in pairs]) if all(b for _, b in pairs) else None
