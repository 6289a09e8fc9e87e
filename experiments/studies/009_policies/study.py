"""009: goodput of the queue's order under bursts. There is no published number: the question is
ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.analysis import figures
from experiments.studies.findings import Findings, Summary, markdown, over, ratios, simulated

QUESTION = (
    "Which order of the queue keeps most requests within their targets when load comes in bursts?"
)


def run(folder: Path, quick: bool) -> Findings:
    points = simulated(
        folder / "config.yaml",
        f"workload.count={200 if quick else 1000}",
        *(("sweep.grid.workload.arrivals.rate=[4.0, 8.0]",) if quick else ()),
        repeats=2 if quick else None,
    )
    lines: dict[str, list[tuple[float, float]]] = {}
    rows = []
    runs = {}
    for point, summaries in points:
        policy = point.experiment.engine.policy
        rate = point.swept["workload.arrivals.rate"]
        share = over(summaries, "goodput.share")
        runs[policy, rate] = summaries
        lines.setdefault(str(policy), []).append((rate, 100 * share.middle))
        cells = (over(summaries, path).middle for path in ("ttft_s.p50", "ttft_s.p99", "itl_s.p99"))
        rows.append((policy, rate, 100 * share.middle, *cells))
    answer = [
        *gain_sentences(runs),
        "If all requests are served in time, the order makes no difference.",
    ]
    head = (
        "policy",
        "requests/s",
        "in time, %",
        "first token, p50, s",
        "p99, s",
        "between tokens, p99, s",
    )
    figure = figures.curves(
        {"Llama-3-8B, A100": lines}, "requests a second", "% within both targets", lowest=0
    )
    return Findings([], answer, {"goodput.svg": figure}, [markdown(head, rows)])


def gain_sentences(runs: Mapping[tuple[str, float], Sequence[Summary]]) -> list[str]:
    """The sentences about the largest gain of "the shorter prompt first", and about the rates at
    which "first come, first served" has no goodput.
    """
    gains = {
        rate: ratios(runs["shortest", rate], runs["fcfs", rate], "goodput.share")
        for _, rate in runs
    }
    finite = {rate: gain for rate, gain in gains.items() if gain is not None}
    rates_without = [f"{rate:g}" for rate in gains if rate not in finite]
    none_kept = []
    if rates_without:
        none_kept = [
            f"At {' and '.join(rates_without)} requests a second first come, first served keeps "
            "none, in some seed."
        ]
    if not finite:
        return none_kept
    rate, best = max(finite.items(), key=lambda item: item[1].middle)
    worst = {
        policy: over(runs[policy, rate], "ttft_s.p99").middle for policy in ("fcfs", "shortest")
    }
    first = (
        f"The shorter prompt first keeps up to {best.middle:.2f} times as many requests within 2 s "
        f"and 60 ms as first come, first served ({best.low:.2f} to {best.high:.2f}, at {rate:g} "
        f"requests a second); its 99th percentile of the first token is {worst['shortest']:.1f} s "
        f"instead of {worst['fcfs']:.1f}."
    )
    return [first, *none_kept]
