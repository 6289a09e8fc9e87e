"""The capacities of the cells of a sweep: each over its seeds, as sentences and tables.

A cell is a combination of the swept keys without `seed`. Each seed has its own capacity. A cell has
the geometric mean of its seeds' capacities, and an interval by Student's t on the logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.analysis import by_key
from experiments.analysis.ratios import CONFIDENCE, Effect, effect_of_pairs
from experiments.analysis.sweep_points import aligned, number
from experiments.core.selection import value_text, values_in


class SeedAnswer(NamedTuple):
    """The answer of one search.

    seed: the workload's seed; None if the config has one seed, and the median of repeats counts.
    met, unmet: the highest rate that was met, or 0; the lowest rate that was not, or infinity.
    sentences: the answer in words.
    too_short: why the run at `met` is too short for the answer; () if it is long enough.
    probes: of each probe its rate, whether it was met, and the deciding numbers.
    """

    seed: int | None
    met: float
    unmet: float
    sentences: tuple[str, ...]
    too_short: tuple[str, ...]
    probes: tuple[tuple[float, bool, dict[str, float]], ...]

    @property
    def is_found(self) -> bool:
        return 0.0 < self.met < self.unmet < math.inf


class CellAnswer(NamedTuple):
    """The answers of a cell.

    swept: its swept keys and their values.
    """

    swept: dict[str, Any]
    label: str
    unit: str
    seeds: tuple[SeedAnswer, ...]

    @property
    def is_found(self) -> bool:
        return all(seed.is_found for seed in self.seeds)

    @property
    def capacity(self) -> Effect | None:
        """The geometric mean over seeds and its interval; None if a seed has no capacity."""
        if not self.is_found:
            return None
        logs = [math.log(seed.met) for seed in self.seeds]
        return effect_of_pairs(logs, "ratio", CONFIDENCE)

    @property
    def num_short(self) -> int:
        """The number of seeds whose runs are too short."""
        return sum(bool(seed.too_short) for seed in self.seeds)


def interval_text(cell: CellAnswer) -> str:
    """The interval over seeds, or why there is none."""
    capacity = cell.capacity
    if capacity is None:
        return "-"
    if capacity.low is not None and capacity.high is not None:
        return f"{number(capacity.low)} to {number(capacity.high)}"
    return "one seed" if capacity.pairs == 1 else f"the same for {capacity.pairs} seeds"


def range_text(cell: CellAnswer) -> str:
    """The least and the largest capacity of a seed, or the bounds that the search has."""
    low = min(seed.met for seed in cell.seeds)
    high = max(seed.met for seed in cell.seeds)
    if cell.is_found:
        return number(low) if low == high else f"{number(low)} to {number(high)}"
    num_found = sum(seed.is_found for seed in cell.seeds)
    return f"{num_found} of {len(cell.seeds)} found"


def length_text(cell: CellAnswer) -> str:
    if not cell.is_found:
        return "-"
    if not cell.num_short:
        return "no"
    return "yes" if len(cell.seeds) == 1 else f"{cell.num_short} of {len(cell.seeds)} seeds"


def text_table(cells: Sequence[CellAnswer]) -> str:
    """The cells as a table for a terminal."""
    units = list(dict.fromkeys(cell.unit for cell in cells))
    capacities = [cell.capacity for cell in cells]
    estimates = [capacity.estimate if capacity else None for capacity in capacities]
    columns = {
        "cell": [cell.label for cell in cells],
        f"capacity ({' or '.join(units)})": list(map(number, estimates)),
        f"{100 * CONFIDENCE:g} % interval over seeds": list(map(interval_text, cells)),
        "of the seeds": list(map(range_text, cells)),
        "too short": list(map(length_text, cells)),
    }
    return aligned(columns)


class Compared(NamedTuple):
    """The capacities of the values of one key, paired by seed."""

    key: str
    baseline: Any
    rows: list[by_key.Row]
    notes: list[str]

    @property
    def text(self) -> str:
        """Tables for a terminal."""
        return by_key.tables(self.rows, self.key, self.baseline, CONFIDENCE)


def compared(cells: Sequence[CellAnswer], key: str, tolerance: float) -> Compared:
    """The other values of a key against its first value, by the methods of `compare --by`.

    Args:
        tolerance: the tolerance of the searches, as a share of the rate.
    """
    runs = [
        {
            "swept": cell.swept | ({} if seed.seed is None else {by_key.SEED: seed.seed}),
            "repeat": 0,
            "run": f"{cell.label}, seed {seed.seed}",  # no folder: there are no requests to compare
            "label": cell.label,
            "workload": {},
            "metrics": {"capacity": seed.met if seed.is_found else None},
        }
        for cell in cells
        for seed in cell.seeds
    ]
    values = values_in(runs, key)
    places = by_key.cells_of(runs, key)
    margin = math.log1p(tolerance)
    rows = by_key.rows_of(places, values, values[0], ["capacity"], CONFIDENCE, margin)
    notes = [
        *by_key.notes(rows, places, CONFIDENCE),
        f"A capacity is up to {100 * tolerance:g} % too low (--tolerance). Intervals are wider by "
        "this, and p is that of a ratio which is nearer to 1 by it.",
    ]
    return Compared(key, values[0], rows, notes)


def too_short_sentences(cells: Sequence[CellAnswer]) -> list[str]:
    """Why runs are too short: the first reason of each kind, and how many more there are."""
    reasons = [(name, reason) for name, seed in _named_answers(cells) for reason in seed.too_short]
    return [f"Too short for the answer: {text}" for text in _first_of_each_kind(reasons)]


def unmet_sentences(cells: Sequence[CellAnswer]) -> list[str]:
    """The answers of searches that found no capacity or were not monotone: the first answer of each
    kind, and how many more there are.
    """
    sentences = []
    for name, seed in _named_answers(cells):
        # the first sentence of a search that found a capacity says the capacity
        answers = seed.sentences[1:] if seed.is_found else seed.sentences
        sentences += [(name, sentence) for sentence in answers]
    return _first_of_each_kind(sentences)


def _named_answers(cells: Sequence[CellAnswer]) -> list[tuple[str, SeedAnswer]]:
    """Each seed of each cell, with a name in words."""
    return [
        (cell.label if seed.seed is None else f"{cell.label}, seed {seed.seed}", seed)
        for cell in cells
        for seed in cell.seeds
    ]


def _first_of_each_kind(sentences: Sequence[tuple[str, str]]) -> list[str]:
    """The first sentence of each kind, with its name. A kind is what stands before the colon."""
    by_kind: dict[str, list[str]] = {}
    for name, sentence in sentences:
        by_kind.setdefault(sentence.partition(":")[0], []).append(f"{name}: {sentence}")
    return [
        f"{first} ({len(similar)} more like it.)" if similar else first
        for first, *similar in by_kind.values()
    ]


def json_fields(cell: CellAnswer) -> dict[str, Any]:
    """A cell as JSON."""
    capacity = cell.capacity
    return {
        "cell": cell.swept,
        "label": cell.label,
        "unit": cell.unit,
        "capacity": capacity.estimate if capacity else None,
        "low": capacity.low if capacity else None,
        "high": capacity.high if capacity else None,
        "confidence": CONFIDENCE,
        "too_short": cell.num_short > 0,
        "seeds": [_plain_seed(seed) for seed in cell.seeds],
    }


def _plain_seed(seed: SeedAnswer) -> dict[str, Any]:
    return {
        "seed": seed.seed,
        "met": seed.met,
        "unmet": seed.unmet if seed.unmet < math.inf else None,
        "answer": " ".join(seed.sentences),
        "too_short": list(seed.too_short),
        "probes": [
            {"rate": rate, "met": met, "values": values} for rate, met, values in seed.probes
        ],
    }


def page_table(cells: Sequence[CellAnswer]) -> dict[str, Any]:
    """Head and body of the page's table of cells, in the form of `report.table`."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.swept))
    heads = [{"title": key, "unit": ""} for key in keys or ["cell"]]
    heads += [
        {"title": "capacity", "unit": " or ".join(dict.fromkeys(cell.unit for cell in cells))},
        {"title": "over seeds", "unit": f"{100 * CONFIDENCE:g} % interval"},
        {"title": "of the seeds", "unit": "least to largest"},
        {"title": "too short", "unit": "for the answer"},
    ]
    estimates = [cell.capacity.estimate for cell in cells if cell.capacity]
    body = []
    for cell in cells:
        estimate = cell.capacity.estimate if cell.capacity else None
        is_best = estimate is not None and estimate == max(estimates) and len(cells) > 1
        words = [value_text(cell.swept.get(key, "")) for key in keys] or [cell.label]
        cells_of_row: list[dict[str, Any]] = [{"text": word, "sort": word} for word in words]
        bar = None if estimate is None else round(100 * estimate / max(estimates), 1)
        cells_of_row.append(
            {"text": number(estimate), "sort": "" if estimate is None else estimate, "bar": bar}
        )
        texts = (interval_text(cell), range_text(cell), length_text(cell))
        cells_of_row += [{"text": text, "sort": text} for text in texts]
        body.append({"cells": cells_of_row, "best": is_best})
    return {"heads": heads, "body": body}


def tiles(cells: Sequence[CellAnswer]) -> list[dict[str, str]]:
    """The main numbers, for the top of the page."""
    numbers = []
    estimates = [(cell.capacity.estimate, cell) for cell in cells if cell.capacity]
    ends = {}
    if len(estimates) == 1:
        ends = {"capacity": estimates[0]}
    elif estimates:
        ends = {
            "highest capacity": max(estimates, key=lambda pair: pair[0]),
            "lowest capacity": min(estimates, key=lambda pair: pair[0]),
        }
    for title, (estimate, cell) in ends.items():
        tile = {"value": number(estimate), "unit": cell.unit, "title": title, "note": cell.label}
        numbers.append(tile)
    searches = [seed for cell in cells for seed in cell.seeds]
    num_found = sum(seed.is_found for seed in searches)
    num_short = sum(seed.is_found and bool(seed.too_short) for seed in searches)
    note = f"of {len(searches)}: cells times seeds"
    numbers.append({"value": str(num_found), "unit": "", "title": "capacities found", "note": note})
    note = "of those that were found"
    numbers.append({"value": str(num_short), "unit": "", "title": "too short", "note": note})
    return numbers
