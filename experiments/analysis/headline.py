"""The result of a sweep in sentences. A best point is named where its difference from the others is
shown. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.analysis.differences import lead
from experiments.analysis.sweep_points import (
    ATTAINMENT,
    GOODPUT,
    ITL,
    THROUGHPUT,
    TTFT,
    Axes,
    Metric,
    PointRow,
    lines,
    number,
    widest_spread,
)

MOST_NAMED = 3  # points in a sentence


def result_sentences(
    runs: Sequence[dict[str, Any]], rows: Sequence[PointRow], axes: Axes
) -> list[str]:
    """The result in sentences, the most important first."""
    failed = sum(1 for run in runs if run["failed"])
    if not rows:
        return [f"All {failed} runs failed; there is no result."]
    sentences = [
        *_attainment(rows),
        *_best(rows, GOODPUT),
        *_best(rows, THROUGHPUT),
        *_noise(rows),
        *_effect_of_x(rows, axes),
        *_best(rows, TTFT),
        *_best(rows, ITL),
        *_same_tokens(runs),
    ]
    if failed:
        sentences.append(f"{failed} of {len(runs)} runs failed and are left out.")
    return sentences


def _attainment(rows: Sequence[PointRow]) -> list[str]:
    """How many requests met the targets of the config."""
    shares = [row.middle(ATTAINMENT) for row in rows if ATTAINMENT.column in row.values]
    if not shares:
        return []
    ends = list(dict.fromkeys([number(min(shares)), number(max(shares))]))
    suffix = " (medians of the points)" if len(ends) > 1 else ""
    return [f"{' to '.join(ends)} % of the requests met the targets{suffix}."]


def _best(rows: Sequence[PointRow], metric: Metric) -> list[str]:
    """The sentence that names the best point of a number, or says that no point is shown to be the
    best.
    """
    result = lead(rows, metric)
    if result is None:
        return []
    title = metric.title[0].lower() + metric.title[1:]
    best = _value_text(result.row, metric)
    if not result.others:
        return [f"{metric.title}: {best}."]
    standings = [standing for _, standing in result.others]
    if set(standings) == {"same"}:
        return [f"All {1 + len(standings)} points have the same {title}, {best}."]
    place = f"highest {title}" if metric.better == "high" else f"lowest {title}"
    worst, _ = result.others[-1]
    other_end = f"the other end is {worst.label} ({number(worst.middle(metric))})"
    label = result.row.label
    if not result.rivals:
        verdict = "is shown"
        if "exact" in standings:
            verdict = "has no noise, so it is of this workload"
            if len(set(standings)) > 1:
                verdict = "is shown, or has no noise and is of this workload"
        return [
            f"{place[0].upper()}{place[1:]}: {label}, {best}; {other_end}. The difference from "
            f"every other point {verdict}."
        ]
    noise = ""
    if "unknown" in standings:
        noise = ", as a point that ran once has no known noise"
    return [
        f"No point is shown to have the {place}{noise}: {label} has the best median, {best}; no difference is shown "
        f"from {_names(result.rivals, len(result.others))}; {other_end}."
    ]


def _value_text(row: PointRow, metric: Metric) -> str:
    """A number of a point with its unit and its range over repeats."""
    spread = row.values[metric.column]
    text = f"{number(spread.middle)} {metric.unit}"
    if row.repeats == 1:
        return f"{text} (one run)"
    return f"{text} ({number(spread.low)} to {number(spread.high)} over {row.repeats} repeats)"


def _names(rows: Sequence[PointRow], num_others: int) -> str:
    """The labels of some of the other points; if they are many, their number."""
    if len(rows) == num_others:
        return "any other point" if num_others > 1 else "the other point"
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} other points"
    return " and ".join(row.label for row in rows)


def _noise(rows: Sequence[PointRow]) -> list[str]:
    share = widest_spread(rows, THROUGHPUT)
    return [] if share is None else [f"Repeats of one point differ by up to {share:.1%}."]


def _effect_of_x(rows: Sequence[PointRow], axes: Axes) -> list[str]:
    """The effect of x with all else fixed: the largest over the least median on each line."""
    if axes.x is None or not axes.lines:
        return []
    ratios = {}
    for name, members in lines(rows, axes).items():
        rates = [row.middle(THROUGHPUT) for row in members]
        ratios[name] = max(rates) / min(rates)
    largest = max(ratios, key=lambda name: ratios[name])
    return [
        f"Along {axes.x} alone, medians of throughput differ by factors of "
        f"{min(ratios.values()):.2f} to {ratios[largest]:.2f}, most at {largest}."
    ]


def _same_tokens(runs: Sequence[dict[str, Any]]) -> list[str]:
    digests = [run["metrics"]["tokens_sha256"] for run in runs if not run["failed"]]
    if len(digests) < 2:
        return []
    if len(set(digests)) == 1:
        return [f"All {len(digests)} runs generated exactly the same tokens."]
    return [f"The {len(digests)} runs generated {len(set(digests))} different sets of tokens."]
