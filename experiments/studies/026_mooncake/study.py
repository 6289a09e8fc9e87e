"""026: how much of the prompts of Mooncake's traces a prefix cache holds, by its size; and requests
that are turned away under overload (Qin et al. 2024, arXiv 2407.00079; FAST 2025).

Two versions of the paper have two sets of traces. The technical report of 2024 has one, of 23,608
requests, whose hit rates are in its table 1. FAST 2025 has three (FAST25-release/traces of
https://github.com/kvcache-ai/Mooncake, Apache-2.0): table 2 has the share of each that a cache
without a limit holds, and figure 9 the rates by the size of the cache. The figure is drawn as
lines, and FIGURE_9 has their points. A trace that is not in the folder has no claims.

The caches are block pools of this project (pagedjax/host/blocks.py), with the transitions of a
scheduler that serves one request after the other: figure 9, too, has the order of requests alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.analysis import figures
from experiments.core.field_files import BLOCK, MOONCAKE, mooncake_rows
from experiments.studies.findings import (
    Claim,
    Findings,
    NoTraces,
    Summary,
    dig,
    exactly,
    interval,
    markdown,
    simulated,
)
from pagedjax.host import blocks

QUESTION = (
    "How much of the prompts of recorded services does a prefix cache hold, by its size, and how "
    "many requests does an engine at twice its load turn away?"
)
FETCH = MOONCAKE  # which files, and where they are
REPORT = "technical report"
TRACES = {  # the word in the name of each file
    "conversation": "conversation",
    "tool and agent": "toolagent",
    "synthetic": "synthetic",
    REPORT: "mooncake_trace",
}
# hit rate of the technical report's trace by blocks of 512 tokens (table 1, LRU); None: no limit
TABLE_1 = {1_000: 0.30, 10_000: 0.40, 30_000: 0.48, 50_000: 0.50, 100_000: 0.51, None: 0.51}
LOCAL = 3_000_000  # tokens that the DRAM of one node holds, section 5.3.1
SIZES = (1_000_000, LOCAL, 10_000_000, 50_000_000)  # tokens


class Published(NamedTuple):
    """The hit rates of a trace of FAST 2025.

    unlimited: of a cache without a limit, table 2. The top of its line in figure 9 is as high,
        within 0.005.
    local: the part of `unlimited` with LOCAL tokens, as figure 9 prints it.
    line: points of figure 9: the rate with 1, 2, 4, 5, 8, 10, 50 and 100 million tokens.
    """

    unlimited: float
    local: float
    line: tuple[float, ...]


LINE = tuple(1e6 * millions for millions in (1, 2, 4, 5, 8, 10, 50, 100))
FIGURE_9 = {
    "conversation": Published(0.40, 0.41, (0.087, 0.120, 0.215, 0.247, 0.300, 0.326, 0.398, 0.401)),
    "tool and agent": Published(
        0.59, 0.75, (0.386, 0.414, 0.484, 0.505, 0.544, 0.561, 0.595, 0.595)
    ),
    "synthetic": Published(0.66, 0.46, (0.146, 0.235, 0.381, 0.435, 0.545, 0.589, 0.658, 0.658)),
}
# table 3: 23,000 requests at twice their speed, 8 + 8 nodes
BASELINE = 4183
EARLY = 3771
PREDICTED = 3589
EARLY_REJECTION = "engine.policy={name: early_rejection, ttft_s: 30.0, itl_s: 0.1}"
NONE = "fcfs"
WITHOUT = "early_rejection, no predicted lengths"
WITH = "early_rejection, predicted lengths"
POLICIES = {
    NONE: (),
    WITHOUT: (EARLY_REJECTION, "workload.predicted=null"),
    WITH: (EARLY_REJECTION,),
}
TWICE = 0.418  # requests/s, as in config.yaml

WHY_BLOCKS = (
    "the trace has ids of 512 tokens: the last block of a prompt is counted whole, and what a "
    "continued prompt shares of it is not found"
)
WHY_TRACE = "not known: the rates are of the file that the paper names"
WHY_BASELINE = (
    "another baseline: Mooncake's looks at the load before each of two stages and turns away what "
    "it has computed; an engine that does both has one stage, and `fcfs` serves all, late"
)
WHY_PREDICTED = (
    "without predictions our policy lets no request end before a new one's turn, and Mooncake's "
    "looks at the load of the moment, so predictions matter more here"
)


def hit_rate(prompts: Sequence[Sequence[int]], num_blocks: int) -> float:
    """The share of the blocks of prompts that a pool of this size has when they come, one after the
    other.

    Args:
        prompts: the ids of the blocks of each prompt. Equal ids have equal ids before them.

    Raises:
        ValueError: a prompt has more blocks than the pool.
    """
    pool = blocks.init(num_blocks)
    num_found = 0
    for ids in prompts:
        keys = [str(block) for block in ids]
        shared = blocks.find(pool, keys)
        num_found += len(shared)
        allocated = blocks.allocate(blocks.share(pool, shared), len(keys) - len(shared))
        if allocated is None:
            raise ValueError(f"a prompt has {len(keys)} blocks, and the pool has {num_blocks}")
        pool, new_blocks = allocated
        table = shared + new_blocks
        pool = blocks.publish(pool, zip(table, keys, strict=True))
        pool = blocks.release(pool, reversed(table))
    return num_found / sum(map(len, prompts))


def trace_files(traces: Path) -> dict[str, Path]:
    """The files of the traces that the folder has.

    Raises:
        NoTraces: the conversation trace is not there.
    """
    files = {name: sorted(traces.glob(f"*{word}*.jsonl")) for name, word in TRACES.items()}
    if not files["conversation"]:
        raise NoTraces(f"there is no *conversation*.jsonl in the folder of --traces. {FETCH}")
    return {name: paths[0] for name, paths in files.items() if paths}


def rates_of(name: str, file: Path, quick: bool) -> dict[int | None, float]:
    """Hit rates by the blocks of the cache; None: no limit."""
    rows = mooncake_rows(file.name, file.read_text(encoding="utf-8"))
    prompts = [row.blocks for row in (rows[:300] if quick else rows)]
    sizes = [*TABLE_1] if name == REPORT else [*(size // BLOCK for size in SIZES), None]
    num_different = len({block for prompt in prompts for block in prompt})
    return {size: hit_rate(prompts, num_different if size is None else size) for size in sizes}


def rate_claims(name: str, rates: Mapping[int | None, float]) -> list[Claim]:
    """The published hit rates of a trace, and ours."""
    if name == REPORT:
        return [
            Claim(
                "Mooncake, technical report, table 1",
                f"LRU, {'no limit' if size is None else f'{size:,} blocks'}: hit rate",
                rate,
                exactly(rates[size]),
                why=WHY_TRACE,
            )
            for size, rate in TABLE_1.items()
        ]
    published = FIGURE_9[name]
    unlimited = rates[None]
    line = dict(zip(LINE, published.line, strict=True))
    numbers = [
        ("table 2", "no limit: hit rate", published.unlimited, unlimited),
        ("figure 9", "3M tokens: part of that", published.local, rates[LOCAL // BLOCK] / unlimited),
        ("figure 9", "10M tokens: hit rate", line[1e7], rates[10_000_000 // BLOCK]),
        ("figure 9", "50M tokens: hit rate", line[5e7], rates[50_000_000 // BLOCK]),
    ]
    return [
        Claim(
            f"Mooncake, FAST 2025, {source}",
            f"{name}, {quantity}",
            rate,
            exactly(rate_here),
            why=WHY_BLOCKS,
        )
        for source, quantity, rate, rate_here in numbers
    ]


Losses = Mapping[tuple[str, float], Sequence[Summary]]  # by policy and requests/s


def losses(folder: Path, file: Path, quick: bool) -> Losses:
    """The runs of each policy."""
    file_option = f"workload.file={file.resolve()}"
    count_option = ("workload.num_requests=30",) if quick else ()
    return {
        (policy, point.swept["workload.rate"]): summaries
        for policy, options in POLICIES.items()
        for point, summaries in simulated(
            folder / "config.yaml",
            file_option,
            *count_option,
            *options,
            repeats=2 if quick else None,
        )
    }


def loss_rate(summary: Summary) -> float:
    """The share of requests that were turned away or missed a target."""
    return 1.0 - dig(summary, "goodput.share")


def rejection_rate(summary: Summary) -> float:
    """The share of requests that were turned away."""
    return summary["finished"].get("rejected", 0) / summary["requests"]


def loss_claims(runs: Losses) -> list[Claim]:
    pairs = [
        ("early rejection over none", EARLY / BASELINE, (WITHOUT, NONE), WHY_BASELINE),
        ("with predictions over without", PREDICTED / EARLY, (WITH, WITHOUT), WHY_PREDICTED),
    ]
    claims = []
    for quantity, published, (above, below), why in pairs:
        ratios = [
            loss_rate(a) / loss_rate(b)
            for a, b in zip(runs[above, TWICE], runs[below, TWICE], strict=True)
            if loss_rate(b)
        ]
        if ratios:
            claims.append(
                Claim(
                    "Mooncake, technical report, table 3",
                    f"twice the load, requests that are turned away or late: {quantity}",
                    published,
                    interval(ratios),
                    unit="x",
                    why=why,
                )
            )
    return claims


def run(folder: Path, quick: bool, traces: Path) -> Findings:
    files = trace_files(traces)
    rates = {name: rates_of(name, file, quick) for name, file in files.items()}
    runs = losses(folder, files["conversation"], quick)
    claims = [claim for name in rates for claim in rate_claims(name, rates[name])]
    tables = [rate_table(rates), loss_table(runs)]
    return Findings(
        [*claims, *loss_claims(runs)], answer(rates, runs), {"rates.svg": figure(rates)}, tables
    )


Rates = Mapping[str, Mapping[int | None, float]]  # of each trace, by blocks


def with_limit(by_size: Mapping[int | None, float]) -> list[tuple[float, float]]:
    """Hit rates by the tokens of the cache."""
    return [(size * BLOCK, rate) for size, rate in by_size.items() if size is not None]


def figure(rates: Rates) -> str:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, by_size in rates.items():
        panels[name] = {"our block pool": with_limit(by_size)}
        if name in FIGURE_9:
            line = zip(LINE, FIGURE_9[name].line, strict=True)
            panels[name]["published, figure 9"] = [point for point in line if point[0] <= SIZES[-1]]
        panels[name]["published, table 1 (another trace)"] = with_limit(TABLE_1)
    dashed = ("published, figure 9", "published, table 1 (another trace)")
    return figures.curves(
        panels, "tokens of the cache", "hit rate of blocks", log_x=10, lowest=0, dashed=dashed
    )


def rate_table(rates: Rates) -> str:
    rows = [
        (name, "no limit" if size is None else f"{size:,}", rate)
        for name, by_size in rates.items()
        for size, rate in by_size.items()
    ]
    return markdown(("trace", "blocks of 512 tokens", "hit rate"), rows)


def loss_table(runs: Losses) -> str:
    rows = [
        (
            rate,
            policy,
            100 * interval([rejection_rate(run) for run in summaries]).middle,
            100 * interval([loss_rate(run) for run in summaries]).middle,
            interval([dig(run, "ttft_s.p90") for run in summaries]).middle,
            interval([dig(run, "goodput.requests_per_s") for run in summaries]).middle,
        )
        for (policy, rate), summaries in sorted(runs.items(), key=lambda item: item[0][1])
    ]
    head = (
        "requests/s",
        "policy",
        "turned away, %",
        "turned away or late, %",
        "first token, p90, s",
        "in time, requests/s",
    )
    return markdown(head, rows)


def answer(rates: Rates, runs: Losses) -> list[str]:
    def loss(policy: str, rate: float) -> float:
        return interval([loss_rate(run) for run in runs[policy, rate]]).middle

    def percent(policy: str, rate: float) -> str:
        return f"{100 * loss(policy, rate):.1f} %"

    parts = [
        f"{name}: {by_size[None]:.3f} without a limit, "
        f"{100 * by_size[LOCAL // BLOCK] / by_size[None]:.0f} % of that with 3 million tokens"
        for name, by_size in rates.items()
        if name != REPORT
    ]
    absent = [name for name in TRACES if name not in rates]
    sentences = [
        f"Hit rates of this project's block pool, of blocks with 512 tokens: {'; '.join(parts)}.",
        "Such a pool has exactly the hits of an LRU cache of ids in which a prompt's last block is "
        "the oldest one: a test compares both.",
    ]
    if absent:
        sentences.append(
            f"Not here: the files of {' and '.join(absent)}. The rates of table 1 (0.30, 0.40, "
            "0.48, 0.50, 0.51 and 0.51 with 1, 10, 30, 50, 100 thousand blocks and all) are of the "
            f"{REPORT}'s file. They are drawn for comparison, and are no claim about other files: "
            "of the conversation trace a cache of equal size holds less."
        )
    sentences += [
        f"An engine that serves a sixteenth of the conversation trace loses {percent(NONE, TWICE)} "
        f"of the requests at twice its speed if it serves all, first come, first served; "
        f"{percent(WITHOUT, TWICE)} with `early_rejection`, and {percent(WITH, TWICE)} if that "
        "reads predicted lengths. At the recorded speed it is "
        f"{percent(NONE, TWICE / 2)}, {percent(WITHOUT, TWICE / 2)} and "
        f"{percent(WITH, TWICE / 2)}.",
        "What cannot be compared: Mooncake has eight nodes for prompts and eight for decodes. Its "
        "baseline turns requests away after their prompts are computed, and early rejection saves "
        "that work. Here one engine does both, so nothing is computed in vain, and a policy turns "
        "away only requests without output. In pools, a policy of the engines for prompts does not "
        "know the load of the others. The targets of the paper's experiment are not given. The "
        "ratios of losses vary much between parts of the trace, so whether they agree with the "
        "paper's says little.",
    ]
    worse = [policy for policy in (WITHOUT, WITH) if loss(policy, TWICE) > loss(NONE, TWICE)]
    if worse:
        sentences.insert(
            -1,
            f"So {' and '.join(worse)} turn away more than would have been late: a prediction does "
            "not know which of the others end early.",
        )
    return sentences
