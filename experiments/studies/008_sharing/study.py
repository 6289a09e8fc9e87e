"""008: blocks shared by parallel sampling and beam search, after Fig. 15 of PagedAttention (Kwon et
al. 2023).

It has no config: it runs two measurements of experiments.bench with their own settings, sharing
(the scheduler alone, on lengths like the paper's) and beams (beams of a real model on English
text).
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
    "ours are exponential lengths with the data set's means, and means do not determine the "
    "prompt's share of a sequence"
)
BEAMS = (
    "the model decides where beams diverge; ours is SmolLM2-135M on English prose, not "
    "OPT-13B on instructions"
)

Pair = tuple[Row, Row]  # branches with own lengths, and branches of one length


def pairs(requests: int) -> list[Pair]:
    """Measure both kinds of lengths, for each data set and number of branches as in the paper."""

    def row(data: sharing.Dataset, n: int, lengths: sharing.Lengths) -> Row:
        return sharing.measure(data, n, lengths, requests, BLOCK, 0, AT_ONCE)

    return [
        (row(data, n, "own"), row(data, n, "same"))
        for data in (ALPACA, SHAREGPT)
        for n in data.paper
    ]


def between(own_lengths: float, same_length: float) -> Interval:
    """The range from branches that end one by one to branches that end together."""
    return Interval(own_lengths, (own_lengths + same_length) / 2, same_length, "range")


def sampling_claim(own_row: Row, same_row: Row) -> Claim | None:
    """The claim, or None if the paper prints no number."""
    if same_row.paper is None:
        return None
    quantity = (
        f"{TITLES[same_row.dataset]}, {same_row.n} samples: blocks saved, "
        "from lengths of their own to one length"
    )
    side = "outside" if not own_row.saved <= same_row.paper <= same_row.saved else "inside"
    why = f"the published value lies {side} of the range; {MEANS}"
    return Claim(
        PAPER, quantity, same_row.paper, between(own_row.saved, same_row.saved), FACTOR, "%", why
    )


def constant(saved: Mapping[int, float | None]) -> float:
    """The part of a sequence that branches of one length have in common, in per cent.

    n branches save (n - 1) / n of that part. It is the mean of what the values of each n give.
    """
    return statistics.fmean(share * n / (n - 1) for n, share in saved.items() if share is not None)


def beams(widths: Sequence[int], draws: int, requests: int) -> dict[int, list[float]]:
    """Width -> per cent of blocks saved, one number for each draw of `requests` requests."""
    model = load_model(DEFAULT_MODEL, progress=False)
    llm = bench_beams.searcher(model, BLOCK)
    tokens = model.tokenizer.encode(bench_beams.TEXT.read_text("utf-8"))
    saved: dict[int, list[float]] = {width: [] for width in widths}
    for seed in range(draws):
        drawn = bench_beams.draw(tokens, ALPACA, requests, seed)
        for width in widths:
            saved[width].append(100 * bench_beams.measure(llm, drawn, width).share)
    return saved


def beam_claim(width: int, shares: Sequence[float]) -> Claim:
    published = ALPACA.beams[width]
    assert published is not None, "all values of Alpaca are printed"
    quantity = f"Alpaca, beams of {width}: blocks saved"
    return Claim(PAPER, quantity, published, interval(shares), FACTOR, "%", BEAMS)


Curves = dict[str, list[tuple[float, float]]]


def sampling_curves(data: sharing.Dataset, rows: Sequence[Pair]) -> Curves:
    """Per cent of blocks saved, by the number of branches."""
    return {
        "branches of one length": [(row.n, row.saved) for _, row in rows],
        "lengths of their own": [(row.n, row.saved) for row, _ in rows],
        "published": points_of(data.paper),
    }


def points_of(shares: Mapping[int, float | None]) -> list[tuple[float, float]]:
    """(branches, per cent) of the values that the paper prints."""
    return [(n, share) for n, share in shares.items() if share is not None]


def answer(sentences: Sequence[str], searched: Mapping[int, Sequence[float]]) -> list[str]:
    low = min(searched)
    high = max(searched)
    beam_text = f"{low} beams save {statistics.fmean(searched[low]):.0f} %"
    if high > low:
        beam_text += f" and {high} beams {statistics.fmean(searched[high]):.0f} %"
    return [
        "n samples of one length save (n - 1) / n of what they have in common, "
        f"{' and '.join(sentences)}; samples "
        "that end one by one save less, because the last runs alone.",
        f"Beams continue from each other in every step and share more: {beam_text} of the blocks "
        "with Alpaca's lengths.",
    ]


def table(sampled: Sequence[Pair]) -> str:
    return markdown(
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
                TITLES[own_row.dataset],
                own_row.n,
                same_row.saved,
                same_row.error,
                own_row.saved,
                own_row.error,
                same_row.paper or "-",
            )
            for own_row, same_row in sampled
        ],
    )


def run(folder: Path, quick: bool) -> Findings:
    sampled = pairs(200 if quick else 800)
    claims = [claim for pair in sampled if (claim := sampling_claim(*pair)) is not None]
    searched = beams((4,), 2, 3) if quick else beams(tuple(ALPACA.beams), 3, 8)
    claims += [beam_claim(width, shares) for width, shares in searched.items()]

    panels: dict[str, Curves] = {}
    sentences = []
    for data in (ALPACA, SHAREGPT):
        rows = [pair for pair in sampled if pair[0].dataset == data.name]
        title = TITLES[data.name]
        panels[f"{title}, parallel sampling"] = sampling_curves(data, rows)
        one_length = {row.n: row.saved for _, row in rows}
        sentences.append(
            f"{constant(one_length):.0f} % with {title}'s lengths "
            f"(published values give {constant(data.paper):.0f})"
        )
    panels["Alpaca, beam search"] = {
        "beams of a real model": [
            (width, statistics.fmean(shares)) for width, shares in searched.items()
        ],
        "published": points_of(ALPACA.beams),
    }
    figure = figures.curves(
        panels, "branches", "% of blocks saved", lowest=0, dashed=("published",)
    )
    return Findings(claims, answer(sentences, searched), {"saved.svg": figure}, [table(sampled)])
