"""The figures of capacity.html."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments.analysis.capacities import CellAnswer, interval_text
from experiments.analysis.plots import PAGE, WIDE_INCHES, Bar, Palette, Plot, bars_plot
from experiments.analysis.report_figures import Figure, Section, draw
from experiments.analysis.sweep_points import Range, number


def sections(cells: Sequence[CellAnswer], limits: Mapping[str, Sequence[float]]) -> list[Section]:
    """The figures of the page.

    Args:
        limits: the targets, by the column of a deciding number.
    """
    legend = ("", tuple(cell.label for cell in cells)) if len(cells) > 1 else None
    seeds_note = (
        "Points: the mean over seeds; bands: its interval, which may end beyond the plot; small "
        "lines: each seed."
    )
    probes_note = "What the search of the first seed saw at each rate. Dashed: the target."
    groups = [
        Section(
            "Capacity", seeds_note, [Figure("Capacity", partial(plot_of_cells, cells), wide=True)]
        )
    ]
    for column, targets in limits.items():
        title = f"{column} against the rate"
        figure = Figure(title, partial(plot_of_probes, cells, column, targets), wide=True)
        groups.append(Section(title, probes_note, [figure], legend))
    return draw(groups)


def plot_of_cells(cells: Sequence[CellAnswer], palette: Palette = PAGE) -> Plot | None:
    """The capacity of each cell with its interval over seeds, and a small mark for each seed. None
    if no cell has a capacity.
    """
    bars = []
    for cell in cells:
        capacity = cell.capacity
        if capacity:
            low = capacity.low or capacity.estimate
            high = capacity.high or capacity.estimate
            tip = f"{cell.label}\n{number(capacity.estimate)} {cell.unit}, {interval_text(cell)}"
            spread = Range(capacity.estimate, low, high)
            bars.append(Bar(cell.label, spread, tip, [seed.met for seed in cell.seeds]))
    if not bars:
        return None
    return bars_plot(
        "Capacity of each cell",
        bars,
        " or ".join(dict.fromkeys(cell.unit for cell in cells)),
        palette,
        width=WIDE_INCHES,
        # a wide interval of few seeds would leave no room for the capacities
        limit=1.5 * max(rate for bar in bars for rate in bar.parts),
    )


def _ticks_of_factors(lowest: float, highest: float) -> list[float]:
    """Seven numbers of two digits from the lowest to the highest, with about equal factors."""
    start = math.log(lowest)
    width = math.log(highest) - start
    return [float(f"{math.exp(start + part * width / 6):.2g}") for part in range(7)]


def plot_of_probes(
    cells: Sequence[CellAnswer],
    column: str,
    limits: Sequence[float],
    palette: Palette = PAGE,
) -> Plot | None:
    """The deciding number against the rate: a line for the first seed of each cell, and a dashed
    line for each limit. None if there are fewer than two probes.
    """
    title = f"{column} against the rate"
    plot = Plot(title, palette, width=WIDE_INCHES, height=3.4)
    rates: list[float] = []
    for limit in limits:
        plot.axes.axhline(limit, color=plot.colour(6), lw=1, ls=(0, (4, 3)))
    for index, cell in enumerate(cells):
        probes = sorted(cell.seeds[0].probes, key=lambda probe: probe[0])
        points = [(rate, values[column]) for rate, _, values in probes if column in values]
        if not points:
            continue
        rates += [rate for rate, _ in points]
        style: dict[str, Any] = {"color": plot.colour(index), "lw": 1.4, **plot.marker(index, 5)}
        plot.axes.plot([rate for rate, _ in points], [value for _, value in points], **style)
        for rate, value in points:
            plot.tip(rate, value, f"{cell.label}\n{rate:g} {cell.unit}: {column} {number(value)}")
    if len(rates) < 2:
        return None
    plot.axes.set_xscale("log")
    ticks = _ticks_of_factors(min(rates), max(rates))
    plot.axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    plot.axes.minorticks_off()
    plot.axes.set_xlabel(f"rate, {' or '.join(dict.fromkeys(cell.unit for cell in cells))}")
    plot.name_y(column)
    return plot
