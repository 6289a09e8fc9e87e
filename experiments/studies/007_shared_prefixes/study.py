"""007: shared prefixes, after Fig. 16 of the PagedAttention paper (Kwon et al. 2023)."""

from __future__ import annotations

from pathlib import Path

from experiments.analysis import figures
from experiments.studies.findings import Claim, Findings, markdown, over, ratios, simulated

QUESTION = (
    "What is sharing a prefix worth, against engines that compute and keep it for every request?"
)
PAPER = "PagedAttention, Fig. 16"
PUBLISHED = {80: 1.67, 341: 3.58}  # throughput over Orca (Oracle)
NAMES = ("Orca (Oracle)", "paged", "paged, prefix shared")
WHY = (
    "the lengths of the translated sentences are not printed, and a roofline has the prefix "
    "computed at full speed"
)


def run(folder: Path, quick: bool) -> Findings:
    claims = []
    rows = []
    lines = {name: [] for name in NAMES}
    prefixes = list(PUBLISHED) if quick else [0, 80, 160, 341, 700]
    for prefix in prefixes:
        points = simulated(
            folder / "config.yaml",
            f"workload.shared_prefix={prefix}",
            f"workload.count={300 if quick else 1500}",
            repeats=2 if quick else None,
        )
        runs = dict(zip(NAMES, (summaries for _, summaries in points), strict=True))
        for name, summaries in runs.items():
            rate = over(summaries, "requests_per_s")
            hits = over(summaries, "prefix_hit_share")
            lines[name].append((prefix, rate.middle))
            rows.append(
                (
                    prefix,
                    name,
                    rate.middle,
                    100 * hits.middle,
                    over(summaries, "sequences_per_step.mean").middle,
                )
            )
        if prefix in PUBLISHED:
            gain = ratios(runs[NAMES[2]], runs[NAMES[0]], "requests_per_s")
            assert gain is not None, "every engine serves some requests"
            claims.append(
                Claim(
                    PAPER,
                    f"throughput, prefix of {prefix} tokens",
                    PUBLISHED[prefix],
                    gain,
                    1.25,
                    "x",
                    WHY,
                )
            )
    reserved = dict(lines[NAMES[0]])
    paged = dict(lines[NAMES[1]])
    answer = [
        f"Behind a prefix of 341 tokens, sharing makes {claims[-1].ours.middle:.1f} times the "
        "throughput of reservations that know every length; paging alone makes "
        f"{paged[341] / reserved[341]:.1f}. The prefix is computed once and stored once.",
    ]
    head = ("prefix", "engine", "requests/s", "tokens found, %", "sequences a step")
    figure = figures.curves(
        {"LLaMA-13B, A100": lines}, "tokens of the shared prefix", "requests a second", lowest=0
    )
    return Findings(claims, answer, {"throughput.svg": figure}, [markdown(head, rows)])
