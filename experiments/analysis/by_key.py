"""The values of one swept key compared over all cells of a sweep. The functions are pure, except
that a cell with a single pair reads the requests of its runs.

A cell is a combination of the other swept keys. In a cell, the runs of two values with the same
repeat (and the same seed, if `seed` is swept) are a pair. Pairs of one swept seed have the same
workload, so they are not independent: their mean counts as one pair. With `reseed` a pair has the
workload of seed + repeat.

The effect of a cell is the mean over its pairs of log(value) - log(baseline), by Student's t; it is
shown as a ratio. If a value of the metric is not above 0, the differences are of the numbers
themselves. For the pooled effect, the mean over the cells is taken for each repeat, then the mean
over repeats, by Student's t. Cells of one repeat often have the same requests, so they are not
independent; repeats are. If `seed` is swept, seeds take the place of repeats.

p is corrected by Holm's method for many comparisons, in two families: the comparisons of cells, and
the pooled comparisons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.analysis.ratios import (
    Comparison,
    Scale,
    columns,
    comparison,
    corrected,
    effect_of_pairs,
    method_notes,
)
from experiments.analysis.sides import (
    Side,
    number_of,
    of_one_side,
    of_rounded,
    over_requests,
    request_totals,
    values_of,
    why_unpaired,
)
from experiments.analysis.sweep_points import aligned
from experiments.core.overrides import short_names
from experiments.core.selection import Run, swept_keys, value_list, value_text
from pagedjax.options.own_names import names_own_value, own_name

SEED = "seed"
POOLED = "pooled"

Pair = tuple[Any, int]  # what two runs have in common: the swept seed or None, and the repeat
# Differences of different units are independent: the repeat, or the seed if `seed` is swept.
Unit = tuple[Any, int | None]


class Cell(NamedTuple):
    """The runs of one combination of the other keys.

    swept: the other keys and their values.
    runs: by the text of the key's value, then by pair.
    """

    swept: dict[str, Any]
    label: str
    runs: dict[str, dict[Pair, Run]]


class Row(NamedTuple):
    """A metric with one value of the key against the baseline, in a cell or pooled (cell None).

    comparison: with the medians over the pairs, of the baseline and of the value.
    differences: for each unit, the mean difference over its pairs; with the scale "ratio",
        differences of logarithms.
    left_out: labels of the cells that are no part of a pooled row, because they have no effect.
    """

    metric: str
    value: Any
    cell: Cell | None
    units: tuple[Unit, ...] = ()
    differences: tuple[float, ...] = ()
    comparison: Comparison = Comparison()
    left_out: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return POOLED if self.cell is None else self.cell.label


def cells_of(runs: Sequence[Run], key: str) -> list[Cell]:
    """The cells of the runs that have the key, in the order of the runs.

    Raises:
        ValueError: two runs have the same values of all keys, and the same repeat.
    """
    keys = [path for path in swept_keys(runs) if path not in (key, SEED)]
    names = short_names(keys)
    cells: dict[str, Cell] = {}
    for run in runs:
        if key not in run["swept"]:
            continue
        swept = {path: run["swept"][path] for path in keys if path in run["swept"]}
        label = ", ".join(f"{names[path]}={value_text(swept[path])}" for path in swept)
        cell = cells.setdefault(label, Cell(swept, label or "all runs", {}))
        by_pair = cell.runs.setdefault(value_text(run["swept"][key]), {})
        pair = (None if key == SEED else run["swept"].get(SEED), run["repeat"])
        if pair in by_pair:
            raise ValueError(
                f"two runs have {run['label']} and repeat {run['repeat']} ({by_pair[pair]['run']} "
                f"and {run['run']}); give the folder of one sweep"
            )
        by_pair[pair] = run
    return list(cells.values())


def units_of(cells: Sequence[Cell]) -> dict[Pair, Unit]:
    """The independent unit of each pair.

    If the runs have several seeds, it is the seed of the workload: the swept seed, or with `reseed`
    seed + repeat. The runs have `reseed` if the repeats of a seed have workloads with different
    totals.
    """
    runs_of_points = [runs for cell in cells for runs in cell.runs.values()]
    pairs = dict.fromkeys(pair for runs in runs_of_points for pair in runs)
    if len({seed for seed, _ in pairs}) < 2:
        return {pair: pair for pair in pairs}
    is_reseeded = any(map(_has_workloads_of_repeats, runs_of_points))
    units: dict[Pair, Unit] = {}
    for seed, repeat in pairs:
        workload_seed = seed + repeat if is_reseeded and seed is not None else seed
        units[seed, repeat] = (workload_seed, None)
    return units


def _has_workloads_of_repeats(runs: Mapping[Pair, Run]) -> bool:
    """Whether two repeats of one seed have workloads with different totals."""
    totals = {(seed, str(request_totals(run.get("workload")))) for (seed, _), run in runs.items()}
    return len(totals) > len({seed for seed, _ in runs})


class Pairing(NamedTuple):
    """The runs of the baseline (a) and of another value (b) in a cell, in the order of the pairs."""

    value: Any
    cell: Cell
    pairs: list[Pair]
    a: Side
    b: Side

    def numbers(self, metric: str) -> dict[Pair, tuple[float, float]]:
        """A metric of both runs of each pair. A pair without such a number is left out."""
        by_pair = {}
        for pair, run_a, run_b in zip(self.pairs, self.a.runs, self.b.runs, strict=True):
            number_a = number_of(run_a, metric)
            number_b = number_of(run_b, metric)
            if number_a is not None and number_b is not None:
                by_pair[pair] = (number_a, number_b)
        return by_pair


def pairing_of(cell: Cell, baseline: Any, value: Any) -> Pairing:
    """The pairs of two values of the key in a cell."""
    runs_a = cell.runs.get(value_text(baseline), {})
    runs_b = cell.runs.get(value_text(value), {})
    pairs = [pair for pair in runs_a if pair in runs_b]
    side_a = Side(value_text(baseline), tuple(runs_a[pair] for pair in pairs))
    side_b = Side(value_text(value), tuple(runs_b[pair] for pair in pairs))
    return Pairing(value, cell, pairs, side_a, side_b)


def rows_of(
    cells: Sequence[Cell],
    values: Sequence[Any],
    baseline: Any,
    metrics: Sequence[str],
    confidence: float,
    margin: float = 0.0,
) -> list[Row]:
    """Every comparison with the baseline: for each metric and value, the rows of the cells, and the
    pooled row.

    Args:
        margin: see `effect_of_pairs`.
    """
    rows: list[Row] = []
    units = units_of(cells)
    for metric in metrics:
        by_value = [
            [pairing_of(cell, baseline, value) for cell in cells]
            for value in values
            if value_text(value) != value_text(baseline)
        ]
        scale = scale_of(metric, [pairing for pairings in by_value for pairing in pairings])
        for pairings in by_value:
            cell_rows = [
                _row_of_cell(metric, pairing, units, scale, confidence, margin)
                for pairing in pairings
                if pairing.pairs
            ]
            rows += cell_rows
            if len(cells) > 1:
                with_effect = {row.label for row in cell_rows if row.comparison.effect}
                left_out = [cell.label for cell in cells if cell.label not in with_effect]
                row = pooled(metric, pairings[0].value, cell_rows, scale, confidence, margin)
                rows.append(row._replace(left_out=tuple(left_out)))
    return in_families(rows)


def scale_of(metric: str, pairings: Sequence[Pairing]) -> Scale:
    """Ratios if every number is above 0, else differences."""
    numbers = [pair for pairing in pairings for pair in pairing.numbers(metric).values()]
    return "ratio" if all(min(pair) > 0 for pair in numbers) else "difference"


def _row_of_cell(
    metric: str,
    pairing: Pairing,
    units: Mapping[Pair, Unit],
    scale: Scale,
    confidence: float,
    margin: float,
) -> Row:
    """The row of a cell."""
    numbers = pairing.numbers(metric)
    by_unit: dict[Unit, list[float]] = {}
    for pair, (a, b) in numbers.items():
        by_unit.setdefault(units[pair], []).append(difference(a, b, scale))
    row = Row(metric, pairing.value, pairing.cell, tuple(by_unit))
    if not numbers:
        values_a = values_of(pairing.a, metric)
        values_b = values_of(pairing.b, metric)
        return row._replace(comparison=of_one_side(values_a, values_b))
    numbers_a, numbers_b = zip(*numbers.values(), strict=True)
    rounded = of_rounded(pairing.a, pairing.b, metric, numbers_a, numbers_b)
    if rounded is not None:
        return row._replace(comparison=rounded)
    differences = tuple(map(statistics.fmean, by_unit.values()))
    effect = effect_of_pairs(differences, scale, confidence, margin)
    result = comparison(effect, numbers_a, numbers_b)
    if len(pairing.pairs) == 1 and why_unpaired(pairing.a, pairing.b) is None:
        result = over_requests(result, pairing.a, pairing.b, metric, confidence)
    return row._replace(differences=differences, comparison=result)


def difference(a: float, b: float, scale: Scale) -> float:
    return math.log(b) - math.log(a) if scale == "ratio" else b - a


def pooled(
    metric: str,
    value: Any,
    rows: Sequence[Row],
    scale: Scale,
    confidence: float,
    margin: float,
) -> Row:
    """The row over all cells. Its differences are means over the cells, for each unit that every
    cell has.
    """
    row = Row(metric, value, None)
    rows = [cell for cell in rows if cell.comparison.effect is not None]
    if not rows:
        return row._replace(comparison=Comparison(note="no cell has a pair"))
    by_cell = [dict(zip(cell.units, cell.differences, strict=True)) for cell in rows]
    units = [unit for unit in by_cell[0] if all(unit in cell for cell in by_cell)]
    if not units:
        note = "no repeat is in every cell; measure the missing runs"
        return row._replace(comparison=Comparison(note=note))
    means = tuple(statistics.fmean(cell[unit] for cell in by_cell) for unit in units)
    result = comparison(effect_of_pairs(means, scale, confidence, margin))
    return row._replace(units=tuple(units), differences=means, comparison=result)


def in_families(rows: Sequence[Row]) -> list[Row]:
    """The rows with p corrected by Holm's method, in the families of cells and of pooled rows."""
    by_place: dict[int, Row] = {}
    for of_cells in (True, False):
        family = {i: row for i, row in enumerate(rows) if (row.cell is not None) == of_cells}
        comparisons = corrected([row.comparison for row in family.values()])
        for (i, row), result in zip(family.items(), comparisons, strict=True):
            by_place[i] = row._replace(comparison=result)
    return [by_place[i] for i in range(len(rows))]


def signs(row: Row, rows: Sequence[Row]) -> str:
    """The numbers of cells with a higher and with a lower value of a pooled row, in words."""
    effects = [
        cell_row.comparison.effect
        for cell_row in rows
        if cell_row.cell is not None
        and cell_row.comparison.effect is not None
        and (cell_row.metric, value_text(cell_row.value)) == (row.metric, value_text(row.value))
    ]
    higher = sum(effect.sign > 0 for effect in effects)
    lower = sum(effect.sign < 0 for effect in effects)
    text = f"higher in {higher} and lower in {lower} of {len(effects)} cells"
    if not row.left_out:
        return text
    num_cells = len(effects) + len(row.left_out)
    return f"{text}; {len(row.left_out)} of {num_cells} left out: {value_list(row.left_out)}"


def short_text(value: Any) -> str:
    """A value without the folder of a user's own file."""
    text = value_text(value)
    return own_name(text).short if names_own_value(text) else text


def tables(rows: Sequence[Row], key: str, baseline: Any, confidence: float) -> str:
    """A table for each metric and value, for a terminal."""
    by_title: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{row.metric}: {key}={value_text(row.value)} against {value_text(baseline)}"
        by_title.setdefault(title, []).append(row)
    return "\n".join(
        f"{title}\n{table(members, baseline, confidence)}\n" for title, members in by_title.items()
    )


def table(rows: Sequence[Row], baseline: Any, confidence: float) -> str:
    """The rows of one metric and one value, for a terminal."""
    cells = columns(
        [row.comparison for row in rows],
        short_text(baseline),
        short_text(rows[0].value),
        confidence,
    )
    cells["verdict"] = [
        words if row.cell else f"{words} ({signs(row, rows)})"
        for words, row in zip(cells["verdict"], rows, strict=True)
    ]
    names = {"": [row.label for row in rows], "pairs": [str(len(row.units)) for row in rows]}
    return aligned({**names, **cells})


def notes(rows: Sequence[Row], cells: Sequence[Cell], confidence: float) -> list[str]:
    """How the numbers were made, and what they do not show."""
    cell_families = [row.comparison.family for row in rows if row.cell]
    pooled_families = [row.comparison.family for row in rows if not row.cell]
    families = {
        "of cells": max(cell_families, default=0),
        "pooled ones": max(pooled_families, default=0),
    }
    texts = method_notes(families, confidence)
    if len(cells) > 1:
        texts.append(
            "pooled: of each repeat the mean over the cells, then over repeats, as cells of one "
            "repeat may share their requests. A cell without a pair that has the number is left out."
        )
    if any(repeat is None for row in rows for _, repeat in row.units):
        texts.append(
            "A pair is the seed of a workload, as seeds differ. Of repeats with one workload, the "
            "mean counts."
        )
    mixed_cells = [cell.label for cell in cells if _has_different_workloads(cell)]
    if mixed_cells:
        texts.append(
            f"The values run different workloads in {len(mixed_cells)} of {len(cells)} cells (such "
            f"as {mixed_cells[0]}): pairs have the repeat and the seed in common, not the requests."
        )
    return texts


def _has_different_workloads(cell: Cell) -> bool:
    return len({_workload(cell, value) for value in cell.runs}) > 1


def _workload(cell: Cell, value: str) -> str:
    """The totals of the workloads of the pairs that all values of a cell have."""
    shared = set.intersection(*(set(pairs) for pairs in cell.runs.values()))
    pairs = sorted(shared, key=str)
    runs = [cell.runs[value][pair] for pair in pairs]
    return str([request_totals(run.get("workload")) for run in runs])


def json_fields(row: Row, confidence: float) -> dict[str, Any]:
    """A row as JSON."""
    return {
        "metric": row.metric,
        "value": row.value,
        "cell": None if row.cell is None else row.cell.swept,
        "label": row.label,
        "pairs": len(row.units),
        "left_out": list(row.left_out),
        "units": [{"seed": seed, "repeat": repeat} for seed, repeat in row.units],
        "baseline_median": row.comparison.a,
        "median": row.comparison.b,
        "differences": list(row.differences),
        **row.comparison.json_fields(confidence),
    }
