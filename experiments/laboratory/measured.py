"""Measured times beside recorded and predicted ones: medians over requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.analysis.sweep_points import aligned
from experiments.laboratory import paired


class Cell(NamedTuple):
    """The medians over requests of one measure; without a prediction, two equal runs are compared."""

    change: str
    measure: str
    recorded: float
    measured: float
    predicted: float | None
    difference: float  # median of the paired differences, measured
    predicted_difference: float | None

    @property
    def error(self) -> float:
        """Of the predicted median; without a prediction, the change between two equal runs."""
        reference = self.recorded if self.predicted is None else self.predicted
        return reference / self.measured - 1


def cells(
    change: str,
    recorded: Mapping[int, paired.Times],
    measured: Mapping[int, paired.Times],
    predicted: Sequence[paired.Row] | None,
) -> list[Cell]:
    """The medians of a change."""
    table: list[Cell] = []
    predictions = {row.measure: row for row in predicted or () if row.group == paired.EVERYBODY}
    for row in paired.rows({paired.EVERYBODY: list(recorded)}, recorded, measured):
        prediction = predictions.get(row.measure)
        table.append(
            Cell(
                change,
                row.measure,
                row.before,
                row.after,
                prediction and prediction.after,
                row.differences[0],
                prediction and prediction.differences[0],
            )
        )
    return table


def text_of(table: Sequence[Cell]) -> str:
    """The table for a terminal, in milliseconds."""

    def milliseconds(seconds: float | None) -> str:
        return "" if seconds is None else f"{1000 * seconds:.1f}"

    columns = {
        "change": [cell.change for cell in table],
        "median of": [cell.measure for cell in table],
        "recorded": [milliseconds(cell.recorded) for cell in table],
        "measured": [milliseconds(cell.measured) for cell in table],
        "predicted": [milliseconds(cell.predicted) for cell in table],
        "off by": [f"{cell.error:+.1%}" for cell in table],
        "difference": [milliseconds(cell.difference) for cell in table],
        "predicted difference": [milliseconds(cell.predicted_difference) for cell in table],
    }
    return aligned(columns)
