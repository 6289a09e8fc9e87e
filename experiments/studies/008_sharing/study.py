"""008: blocks shared by parallel sampling and beam search, after Fig. 15 of PagedAttention (Kwon et al. 2023).

No config: it runs the two measurements of experiments.bench, sharing (the scheduler alone, on lengths like the paper's)
and beams (beams of a real model on English text), with their own settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.analysis import figures
from experiments.bench import beams as bench_beams
from experiments.bench import sharing
from experiments.bench.sharing import ALPACA, SHAREGPT, Row
from experiments.core.distributions import AT_ONCE
from experiments.studies.findings import Claim, Findings, Interval, interval, markdown
from pagedjax import load_model
from pagedjax.weights.pretrained import DEFAULT_MODEL

QUESTION = (
    "What share of the cache's blocks do parallel sampling and beam search save by sharing them?"
)
PAPER = "PagedAttention, Fig. 15"
TITLES = {ALPACA.name: "Alpaca", SHAREGPT.name: "ShareGPT"}
BLOCK = 16
FACTOR = 1.25
MEANS = (
    "ours are exponential lengths with the data set's means, and means do not determine the prompt's share of a "
    "sequence"
)
BEAMS = "the model decides where beams diverge; ours is SmolLM2-135M on English prose, not OPT-13B on instructions"

Pair = tuple[Row, Row]  # branches with own lengths, and branches of one length


def pairs(requests: int) -> list[Pair]:
    """Both kinds of lengths for every data set and number of branches, in the order of the paper."""

    def row(data: sharing.Dataset, n: int, lengths: sharing.Lengths) -> Row:
        return sharing.measure(data, n, lengths, requests, BLOCK, 0, AT_ONCE)

    return [
        (row(data, n, "own"), row(data, n, "same"))
        for data in (ALPACA, SHAREGPT)
        for n in data.paper
    ]


def between(own: float, same: float) -> Interval:
    """From branches that end one by one to branches that end together, and the middle."""
    return Interval(own, (own + same) / 2, same, "range")


def sampling_claim(own: Row, same: Row) -> Claim | None:
    """The claim, or None if the paper prints no number."""
    if same.paper is None:
        return None
    what = f"{TITLES[same.dataset]}, {same.n} samples: blocks saved, from lengths of their own to one length"
    side = "outside" if not own.saved <= same.paper <= same.saved else "inside"
    why = f"the published value lies {side} of the range; {MEANS}"
    return Claim(PAPER, what, same.paper, between(own.saved, same.saved), FACTOR, "%", why)


def constant(saved: Mapping[int, float | None]) -> float:
    """c of saved = (n - 1) / n * c, per cent: the common part of n branches of one length, mean over n."""
    return statistics.fmean(share * n / (n - 1) for n, share in saved.items() if share is not None)


def beams(widths: Sequence[int], draws: int, requests: int) -> dict[int, list[float]]:
    """Per cent saved by width, one for each draw of `requests` requests."""
    model = load_model(DEFAULT_MODEL, progress=False)
    llm = bench_beams.searcher(model, BLOCK)
    tokens = model.tokenizer.encode(bench_beams.TEXT.read_text("utf-8"))
    saved: dict[int, list[float]] = {width: [] for width in widths}
    for seed in range(draws):
        drawn = bench_beams.draw(tokens, ALPACA, requests, seed)
        for width in widths:
            saved[width].append(100 * bench_beams.measure(llm, drawn, width).share)
    return saved


def run(folder: Path, quick: bool) -> Findings:
    sampled = pairs(200 if quick else 800)
    claims = [claim for pair in sampled if (claim := sampling_claim(*pair)) is not None]
    searched = beams((4,), 2, 3) if quick else beams(tuple(ALPACA.beams), 3, 8)
    for width, shares in searched.items():
        published = ALPACA.beams[width]
        assert published is not None, "all values of Alpaca are printed"
        what = f"Alpaca, beams of {width}: blocks saved"
        claims.append(Claim(PAPER, what, published, interval(shares), FACTOR, "%", BEAMS))

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    sentences = []
    for data in (ALPACA, SHAREGPT):
        rows = [pair for pair in sampled if pair[0].dataset == data.name]
        same = {one.n: one.saved for _, one in rows}
        title = TITLES[data.name]
        panels[f"{title}, parallel sampling"] = {
            "branches of one length": list(same.items()),
            "lengths of their own": [(own.n, own.saved) for own, _ in rows],
            "published": [(n, share) for n, share in data.paper.items() if share is not None],
        }
        given = f"(published values give {constant(data.paper):.0f})"
        sentences.append(f"{constant(same):.0f} % with {title}'s lengths {given}")
    panels["Alpaca, beam search"] = {
        "beams of a real model": [
            (width, statistics.fmean(shares)) for width, shares in searched.items()
        ],
        "published": [(width, share) for width, share in ALPACA.beams.items() if share is not None],
    }
    low, high = min(searched), max(searched)
    shown = f"{low} beams save {statistics.fmean(searched[low]):.0f} %"
    shown += f" and {high} beams {statistics.fmean(searched[high]):.0f} %" if high > low else ""
    answer = [
        f"n samples of one length save (n - 1) / n of what they have in common, {' and '.join(sentences)}; samples "
        "that end one by one save less, because the last runs alone.",
        f"Beams continue from each other in every step and share more: {shown} of the blocks with Alpaca's lengths.",
    ]
    table = markdown(
        (
            "lengths like",
            "n",
            "one length, saved, %",
            "+-",
            "own lengths, saved, %",
            "+-",
            "published, %",
        ),
        [
            (
                TITLES[own.dataset],
                own.n,
                same.saved,
                same.error,
                own.saved,
                own.error,
                same.paper or "-",
            )
            for own, same in sampled
        ],
    )
    figure = figures.curves(
        panels, "branches", "% of blocks saved", lowest=0, dashed=("published",)
    )
    return Findings(claims, answer, {"saved.svg": figure}, [table])
