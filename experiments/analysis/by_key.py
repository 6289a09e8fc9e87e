"""The values of one swept key compared over all cells of a sweep. Pure functions, but for runs of
one pair, whose requests are read.

A cell is a combination of the other swept keys. In a cell, the runs of two values with the same
repeat (and the same seed, if `seed` is swept) are a pair. Pairs of one swept seed have one workload,
so they are not independent: their mean counts as one pair. With `reseed` they have the workload of
seed + repeat.

    of a cell   the mean over its pairs of log(value) - log(baseline), by Student's t; shown as a
                ratio. If a value of the metric is not above 0, the differences are of the numbers
                themselves.
    pooled      of each repeat the mean over the cells, then the mean over repeats, by Student's t.
                Cells of one repeat often have the same requests, so they are not independent;
                repeats are. If `seed` is swept, seeds take the place of repeats.

p is corrected by Holm's method for many comparisons, in two families: all that are of a cell, and
all that are pooled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.analysis.ratios import (
    NO_NOISE,
    NOISE,
    SAME,
    Effect,
    Scale,
    digits_of,
    effect_of_pairs,
    holm,
    times,
)
from experiments.analysis.sides import (
    DRAFTS,
    Side,
    medians_and_ratio,
    number_of,
    of_rounded,
    request_totals,
    run_speculates,
    why_unpaired,
)
from experiments.analysis.sweep_points import aligned, number
from experiments.core.overrides import short_names
from experiments.core.selection import Run, swept_keys, value_list, value_text
from pagedjax.options.own_names import names_own_value, own_name

SEED = "seed"
POOLED = "pooled"

Pair = tuple[Any, int]  # what two runs have in common: the swept seed or None, and the repeat
# of which differences are independent: the repeat, or the seed of a workload if `seed` is swept
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

    a, b: the medians over the pairs, of the baseline and of the value.
    differences: of each unit, the mean over its pairs; with the scale "ratio", of logarithms.
    note: why there is no effect, or no p.
    left_out: labels of the cells that are no part of a pooled row: they have no effect.
    """

    metric: str
    value: Any
    cell: Cell | None
    units: tuple[Unit, ...] = ()
    a: float | None = None
    b: float | None = None
    differences: tuple[float, ...] = ()
    effect: Effect | None = None
    note: str = ""
    p_holm: float | None = None
    left_out: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return POOLED if self.cell is None else self.cell.label


def cells_of(runs: Sequence[Run], key: str) -> list[Cell]:
    """The cells of the runs that have the key, in their order.

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

    If the runs have several seeds, it is the seed of the workload: the swept one, or with `reseed`
    seed + repeat. Repeats have a workload each (`reseed`) if a seed's repeats have different totals.
    """
    by_pair_of_points = [runs for cell in cells for runs in cell.runs.values()]
    pairs = dict.fromkeys(pair for runs in by_pair_of_points for pair in runs)
    if len({seed for seed, _ in pairs}) < 2:
        return {pair: pair for pair in pairs}
    is_reseeded = any(map(_has_workloads_of_repeats, by_pair_of_points))
    return {
        (seed, repeat): (seed + repeat if is_reseeded and seed is not None else seed, None)
        for seed, repeat in pairs
    }


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
            number_a = _number(run_a, metric)
            number_b = _number(run_b, metric)
            if number_a is not None and number_b is not None:
                by_pair[pair] = (number_a, number_b)
        return by_pair


def _number(run: Run, metric: str) -> float | None:
    """A metric of a run; None for numbers of drafts of a run that does not speculate."""
    if metric in DRAFTS and not run_speculates(run):
        return None
    return number_of(run, metric)


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
) -> list[Row]:
    """Every comparison with the baseline: of each metric and value, the cells and the pooled one.

    Raises:
        ValueError: a metric does not exist.
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
            of_value = [
                _row_of_cell(metric, pairing, units, scale, confidence)
                for pairing in pairings
                if pairing.pairs
            ]
            rows += of_value
            if len(cells) > 1:
                with_effect = {row.label for row in of_value if row.effect is not None}
                left_out = [cell.label for cell in cells if cell.label not in with_effect]
                row = pooled(metric, pairings[0].value, of_value, scale, confidence)
                rows.append(row._replace(left_out=tuple(left_out)))
    return corrected(rows)


def scale_of(metric: str, pairings: Sequence[Pairing]) -> Scale:
    """Ratios if every number is above 0, else differences."""
    numbers = [pair for pairing in pairings for pair in pairing.numbers(metric).values()]
    return "ratio" if all(min(pair) > 0 for pair in numbers) else "difference"


def _row_of_cell(
    metric: str, pairing: Pairing, units: Mapping[Pair, Unit], scale: Scale, confidence: float
) -> Row:
    """The row of a cell."""
    numbers = pairing.numbers(metric)
    by_unit: dict[Unit, list[float]] = {}
    for pair, (a, b) in numbers.items():
        by_unit.setdefault(units[pair], []).append(difference(a, b, scale))
    row = Row(metric, pairing.value, pairing.cell, tuple(by_unit))
    if not numbers:
        return row._replace(note="there is no such number on both sides")
    medians = [statistics.median(column) for column in zip(*numbers.values(), strict=True)]
    row = row._replace(a=medians[0], b=medians[1])
    rounded = of_rounded(pairing.a, pairing.b, metric, *medians)
    if rounded is not None:
        return row._replace(note=rounded.verdict)
    differences = tuple(map(statistics.fmean, by_unit.values()))
    row = row._replace(
        differences=differences, effect=effect_of_pairs(differences, scale, confidence)
    )
    if len(pairing.pairs) == 1:
        return _with_interval_of_requests(row, pairing.a, pairing.b, confidence)
    return row._replace(note=_note(row.effect))


def _with_interval_of_requests(row: Row, a: Side, b: Side, confidence: float) -> Row:
    """The row of one pair, with the interval over its requests where there is one."""
    assert row.effect is not None
    note = f"one pair: {NOISE}"
    if row.effect.scale == "ratio":
        apart = why_unpaired(a, b)
        _, _, ratio = medians_and_ratio(a, b, row.metric, apart=apart, confidence=confidence)
        if ratio.low is not None:
            effect = row.effect._replace(low=ratio.low, high=ratio.high)
            return row._replace(effect=effect, note=f"{note}; the interval is over requests")
    return row._replace(note=note)


def difference(a: float, b: float, scale: Scale) -> float:
    return math.log(b) - math.log(a) if scale == "ratio" else b - a


def _note(effect: Effect | None) -> str:
    """Why an effect of several pairs has no p; "" if it has one."""
    if effect is None or effect.p is not None:
        return ""
    if effect.pairs == 1:
        return f"one pair: {NOISE}"
    return SAME if effect.is_neutral else NO_NOISE


def pooled(
    metric: str,
    value: Any,
    rows: Sequence[Row],
    scale: Scale,
    confidence: float,
) -> Row:
    """The row over all cells: of each unit that every cell has, the mean over the cells."""
    row = Row(metric, value, None)
    with_pairs = [other for other in rows if other.effect is not None]
    if not with_pairs:
        return row._replace(note="no cell has a pair")
    by_cell = [dict(zip(cell.units, cell.differences, strict=True)) for cell in with_pairs]
    units = [unit for unit in by_cell[0] if all(unit in cell for cell in by_cell)]
    if not units:
        return row._replace(note="no repeat is in every cell; measure the missing runs")
    means = tuple(statistics.fmean(cell[unit] for cell in by_cell) for unit in units)
    effect = effect_of_pairs(means, scale, confidence)
    return row._replace(units=tuple(units), differences=means, effect=effect, note=_note(effect))


def corrected(rows: Sequence[Row]) -> list[Row]:
    """The rows with p corrected by Holm's method, in the families of cells and of pooled ones."""
    p_holm: dict[int, float] = {}
    for of_cells in (True, False):
        family = {
            place: row.effect.p
            for place, row in enumerate(rows)
            if (row.cell is not None) == of_cells and row.effect and row.effect.p is not None
        }
        p_holm |= dict(zip(family, holm(list(family.values())), strict=True))
    return [row._replace(p_holm=p_holm.get(place)) for place, row in enumerate(rows)]


def verdict(row: Row, confidence: float) -> str:
    """What a row shows, in words."""
    if row.effect is None or row.p_holm is None:
        return row.note
    direction = "higher" if row.effect.estimate > row.effect.neutral else "lower"
    if row.p_holm <= 1 - confidence:
        return f"{direction}: real"
    if row.effect.p is not None and row.effect.p <= 1 - confidence:
        return f"{direction} by itself, not shown among so many"
    return "no difference can be shown"


def signs(row: Row, rows: Sequence[Row]) -> str:
    """In how many cells the value is higher, of a pooled row."""
    effects = [
        other.effect
        for other in rows
        if other.cell is not None
        and other.effect is not None
        and (other.metric, value_text(other.value)) == (row.metric, value_text(row.value))
    ]
    higher = sum(effect.estimate > effect.neutral for effect in effects)
    lower = sum(effect.estimate < effect.neutral for effect in effects)
    text = f"higher in {higher} and lower in {lower} of {len(effects)} cells"
    if not row.left_out:
        return text
    num_cells = len(effects) + len(row.left_out)
    return f"{text}; {len(row.left_out)} of {num_cells} left out: {value_list(row.left_out)}"


def short_text(value: Any) -> str:
    """A value without the folder of a user's own file."""
    text = value_text(value)
    return own_name(text).short if names_own_value(text) else text


def table(rows: Sequence[Row], baseline: Any, confidence: float) -> str:
    """The rows of one metric and one value, for a terminal."""
    effects = [row.effect for row in rows]
    scale = next((effect.scale for effect in effects if effect), "ratio")
    columns = {
        "": [row.label for row in rows],
        "pairs": [str(len(row.units)) for row in rows],
        short_text(baseline): [_text(row.a) for row in rows],
        short_text(rows[0].value) + " ": [_text(row.b) for row in rows],
        scale: [_effect_text(effect) for effect in effects],
        "p": ["-" if not effect or effect.p is None else f"{effect.p:.2g}" for effect in effects],
        "p (Holm)": ["-" if row.p_holm is None else f"{row.p_holm:.2g}" for row in rows],
        "verdict": [
            verdict(row, confidence) + ("" if row.cell else f" ({signs(row, rows)})")
            for row in rows
        ],
    }
    return aligned(columns)


def _text(value: float | None) -> str:
    return "-" if value is None else number(value)


def _effect_text(effect: Effect | None) -> str:
    """An effect and its interval: "0.85 (0.82 to 0.88)", or "+3 (+1 to +5)" of a difference."""
    if effect is None:
        return "-"
    low = effect.estimate if effect.low is None else effect.low
    high = effect.estimate if effect.high is None else effect.high
    numbers = [_signed(value) for value in (effect.estimate, low, high)]
    if effect.scale == "ratio":
        digits = digits_of(low, high)
        numbers = [times(value, digits) for value in (effect.estimate, low, high)]
    return numbers[0] if effect.low is None else f"{numbers[0]} ({numbers[1]} to {numbers[2]})"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


def notes(rows: Sequence[Row], cells: Sequence[Cell], confidence: float) -> list[str]:
    """How the numbers were made, and what they do not show."""
    family_sizes = [
        sum(row.p_holm is not None and (row.cell is not None) == of_cells for row in rows)
        for of_cells in (True, False)
    ]
    texts = []
    if any(family_sizes):
        texts.append(
            f"p is of a paired t test, two-sided. p (Holm) is corrected for many comparisons by "
            f"Holm's method: {family_sizes[0]} of cells and {family_sizes[1]} pooled ones, each a "
            f"family. real: p (Holm) is at most {1 - confidence:.2g}."
        )
        texts.append(f"Intervals are at {confidence:g}, of one comparison each, not corrected.")
    else:
        texts.append(
            "No comparison has a p: a cell needs two pairs with different numbers. Set `repeats` "
            "to 3 or more, with `reseed: true`."
        )
    if len(cells) > 1:
        texts.append(
            "pooled: of each repeat the mean over the cells, then over repeats, as cells of one "
            "repeat may share their requests. A cell without a pair that has the number is left out."
        )
    if any(repeat is None for row in rows for _, repeat in row.units):
        texts.append(
            "seed is swept, so a pair is the seed of a workload. Of repeats with one workload, the "
            "mean counts."
        )
    unlike = [cell.label for cell in cells if len({_workload(cell, v) for v in cell.runs}) > 1]
    if unlike:
        texts.append(
            f"The values run different workloads in {len(unlike)} of {len(cells)} cells (such as "
            f"{unlike[0]}): pairs have the repeat and the seed in common, not the requests."
        )
    return texts


def _workload(cell: Cell, value: str) -> str:
    """The totals of the workloads of the pairs that all values of a cell have."""
    shared = set.intersection(*(set(pairs) for pairs in cell.runs.values()))
    pairs = sorted(shared, key=str)
    runs = [cell.runs[value][pair] for pair in pairs]
    return str([request_totals(run.get("workload")) for run in runs])


def plain(row: Row, confidence: float) -> dict[str, Any]:
    """A row as JSON."""
    effect = row.effect
    return {
        "metric": row.metric,
        "value": row.value,
        "cell": None if row.cell is None else row.cell.swept,
        "label": row.label,
        "pairs": len(row.units),
        "left_out": list(row.left_out),
        "units": [{"seed": seed, "repeat": repeat} for seed, repeat in row.units],
        "baseline_median": row.a,
        "median": row.b,
        "scale": effect.scale if effect else None,
        "differences": list(row.differences),
        "estimate": effect.estimate if effect else None,
        "low": effect.low if effect else None,
        "high": effect.high if effect else None,
        "p": effect.p if effect else None,
        "p_holm": row.p_holm,
        "real": None if row.p_holm is None else row.p_holm <= 1 - confidence,
        "verdict": verdict(row, confidence),
    }
