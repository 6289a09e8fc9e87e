"""How the points of a sweep differ in a number, over their repeats: marks of plots, and the best
point. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from experiments.analysis.ratios import (
    CONFIDENCE,
    NO_NOISE,
    SAME,
    Comparison,
    comparison,
    corrected,
    effect_of_runs,
    effect_text,
)
from experiments.analysis.sweep_points import Metric, PointRow


def of_points(reference: PointRow, row: PointRow, metric: Metric) -> Comparison | None:
    """How a point differs from a reference point, over the repeats of both; None if they have fewer
    than two in common. Runs with the same repeat are pairs, as in `compare --by`.
    """
    reference_samples = reference.samples.get(metric.column, {})
    row_samples = row.samples.get(metric.column, {})
    repeats = sorted(reference_samples.keys() & row_samples.keys())
    if len(repeats) < 2:
        return None
    numbers_a = [reference_samples[repeat] for repeat in repeats]
    numbers_b = [row_samples[repeat] for repeat in repeats]
    effect = effect_of_runs(numbers_a, numbers_b, paired=True, confidence=CONFIDENCE)
    return comparison(effect, numbers_a, numbers_b)


def mark_of(result: Comparison) -> str:
    """The kind of a mark: "up" or "down" for a difference that is shown; "hollow up" or "hollow
    down" for a difference without noise; "open" if no difference is shown; "same" if there is none.
    """
    assert result.effect is not None, "see `of_points`"
    sign = "up" if result.effect.sign > 0 else "down"
    if result.is_shown(CONFIDENCE):
        return sign
    if result.note == NO_NOISE:
        return f"hollow {sign}"
    return "same" if result.note == SAME else "open"


def words_of(result: Comparison, reference: str, unit: str) -> str:
    """A comparison in one line: "1.10 (1.02 to 1.20) times policy=fcfs, higher: shown"."""
    effect = result.effect
    assert effect is not None, "see `of_points`"
    text = f"{effect_text(effect)} times {reference}"
    if effect.scale == "difference":
        text = f"{effect_text(effect)} {unit} against {reference}".replace("  ", " ")
    return f"{text}, {result.verdict(CONFIDENCE)}, over {effect.pairs} pairs of repeats"


# What a point is against the best point. beaten: shown to be worse. exact: worse without noise, for
# this workload. open: no difference is shown. same: the same in every repeat. unknown: it has no
# two repeats.
Standing = Literal["beaten", "exact", "open", "same", "unknown"]


class Lead(NamedTuple):
    """The point with the best median of a number, and the standing of each other point against it.

    others: the other points from the best to the worst median.
    """

    row: PointRow
    others: list[tuple[PointRow, Standing]]

    @property
    def rivals(self) -> list[PointRow]:
        """The points that may be as good."""
        return [row for row, standing in self.others if standing in ("open", "same", "unknown")]


def lead(rows: Sequence[PointRow], metric: Metric) -> Lead | None:
    """The point that is best in a number; None if no point has the number.

    The comparisons with the other points are one family. A point leads if all differences are
    shown, so the choice of the best median makes no further false leads.
    """
    with_metric = [row for row in rows if metric.column in row.values]
    if not with_metric:
        return None
    sign = -1 if metric.better == "high" else 1
    first, *other_rows = sorted(with_metric, key=lambda row: sign * row.middle(metric))
    results = [of_points(first, row, metric) for row in other_rows]
    in_family = iter(corrected([result for result in results if result is not None]))
    standings: list[tuple[PointRow, Standing]] = []
    for row, result in zip(other_rows, results, strict=True):
        if result is not None:
            standings.append((row, _standing(next(in_family), sign)))
        else:
            equal = row.middle(metric) == first.middle(metric)
            standings.append((row, "same" if equal else "unknown"))
    return Lead(first, standings)


def _standing(result: Comparison, sign: int) -> Standing:
    """The standing of a point that was compared with the best point.

    Args:
        sign: 1 if higher numbers are worse, -1 if lower numbers are.
    """
    worse = "up" if sign > 0 else "down"
    standings: dict[str, Standing] = {worse: "beaten", f"hollow {worse}": "exact", "same": "same"}
    return standings.get(mark_of(result), "open")
