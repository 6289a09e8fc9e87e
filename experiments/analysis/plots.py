"""Plots of a sweep as inline SVG. Colours are CSS variables, set by the page's light or dark theme.

matplotlib draws with placeholder colours; `svg()` replaces them by var(--...) and gives every point
a tooltip.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from experiments.analysis.sweep_points import (
    DEVICE,
    HOST,
    THROUGHPUT,
    Axes,
    Metric,
    PointRow,
    lines,
    number,
    pareto,
)

WIDE = 11.0  # inches; text then has the same size as in a narrow plot after the page scales both
MOST_STEPS = 2000  # steps of a timeline; of more steps, every second, third ... is shown
SERIES = 8  # colours and markers before they repeat
_MARKERS = "osD^vPXp"
# Placeholders: no other colour may be equal to one of these.
_INK = "#010203"
_MUTED = "#010204"
_GRID = "#010205"
_PAPER = "#010206"
_SERIES = [f"#02{i:02x}07" for i in range(SERIES)]
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--grid", _PAPER: "--paper"}
_VARIABLES |= {placeholder: f"--s{i}" for i, placeholder in enumerate(_SERIES)}
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "svg.hashsalt": "pagedjax",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "axes.axisbelow": True,
}


class Plot:
    """One pair of axes with its tooltips; `svg` draws it."""

    def __init__(self, width: float = 3.7, height: float = 2.5) -> None:
        """`width` and `height` in inches; the page scales the result."""
        with matplotlib.rc_context(_STYLE):
            self.figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
            # the page's background is visible
            self.axes = self.figure.add_subplot(facecolor="none")
            self.axes.grid(color=_GRID, linewidth=0.8)
            self.axes.tick_params(length=0, pad=5)
        self._tips: list[str] = []

    def tip(self, x: Any, y: Any, text: str) -> None:
        """An invisible target around a point that shows `text` under the pointer."""
        gid = f"tip-{len(self._tips)}"
        self._tips.append(text)
        self.axes.plot([x], [y], "o", ms=15, alpha=0.0, color=_INK, gid=gid, zorder=9)

    def svg(self, title: str) -> str:
        """The plot as an <svg> element with the accessible name `title`."""
        buffer = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for placeholder, variable in _VARIABLES.items():
            text = text.replace(placeholder, f"var({variable})")
        for index, tip in enumerate(self._tips):
            text = text.replace(f'<g id="tip-{index}">', f"<g><title>{html.escape(tip)}</title>")
        size = re.compile(r'<svg ([^>]*?)width="[^"]*"([^>]*?)>', re.DOTALL)
        text = size.sub(
            lambda m: "<svg " + re.sub(r'\bheight="[^"]*"', "", m[1] + m[2]) + ">", text, count=1
        )
        return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def colour(index: int) -> str:
    """The placeholder colour of line `index`; `Plot.svg` turns it into var(--s...)."""
    return _SERIES[index % SERIES]


def marker(index: int, size: float) -> dict[str, Any]:
    """Marker of line `index` with a rim in the background colour, so that lines differ without
    colours.
    """
    return {
        "marker": _MARKERS[index % SERIES],
        "ms": size,
        "markeredgecolor": _PAPER,
        "markeredgewidth": 0.8,
    }


def metric_plot(rows: Sequence[PointRow], axes: Axes, metric: Metric) -> str | None:
    """`metric` along x, one line for each combination of the other keys, a band from least to most
    over repeats.

    Without an x, points are side by side. None if fewer than two points have the metric.
    """
    if sum(metric.column in row.values for row in rows) < 2:
        return None
    if axes.x is None:
        return _side_by_side([row for row in rows if metric.column in row.values], metric)
    plot = Plot()
    for index, line in enumerate(lines(rows, axes).values()):
        members = [row for row in line if metric.column in row.values]
        xs = [row.swept[axes.x] for row in members]
        ranges = [row.values[metric.column] for row in members]
        lows = [spread.low for spread in ranges]
        highs = [spread.high for spread in ranges]
        plot.axes.fill_between(xs, lows, highs, color=colour(index), alpha=0.16, lw=0)
        # later lines are thinner, so that coinciding lines are all visible
        width = max(1.4, 3.0 - 0.6 * index)
        middles = [spread.middle for spread in ranges]
        plot.axes.plot(
            xs, middles, color=colour(index), lw=width, **marker(index, 3.2 + 1.3 * width)
        )
        for x, row in zip(xs, members, strict=True):
            plot.tip(x, row.middle(metric), tooltip(row, metric))
    _scale_x(plot, sorted({row.swept[axes.x] for row in rows}))
    plot.axes.set_xlabel(axes.x)
    _from_zero(
        plot, max(row.values[metric.column].high for row in rows if metric.column in row.values)
    )
    return plot.svg(f"{metric.title} against {axes.x}")


def tooltip(row: PointRow, metric: Metric) -> str:
    middle, low, high = row.values[metric.column]
    over = (
        f" ({number(low)} to {number(high)} over {row.repeats} repeats)" if row.repeats > 1 else ""
    )
    return f"{row.label}\n{metric.title}: {number(middle)} {metric.unit}{over}"


def _scale_x(plot: Plot, values: list[float]) -> None:
    """Ticks at the swept values; a logarithmic axis if they grow by factors."""
    if len(values) > 2 and values[0] > 0 and values[-1] / values[0] >= 4:
        plot.axes.set_xscale("log", base=2)
    plot.axes.set_xticks(values, labels=[f"{value:g}" for value in values])
    plot.axes.xaxis.set_minor_locator(NullLocator())
    plot.axes.xaxis.set_minor_formatter(NullFormatter())
    if len(values) > 12:  # too many to write each
        plot.axes.set_xticks(values[:: math.ceil(len(values) / 12)])


def _from_zero(plot: Plot, highest: float) -> None:
    """A y axis that begins at zero: heights compare as the numbers do."""
    plot.axes.set_ylim(0, highest * 1.08 if highest > 0 else 1)


def _row_axis(plot: Plot, rows: Sequence[PointRow]) -> None:
    """A y axis with a line for each point."""
    plot.axes.set_yticks(range(len(rows)), labels=[row.label for row in rows])
    plot.axes.set_ylim(len(rows) - 0.5, -0.5)


def _side_by_side(rows: Sequence[PointRow], metric: Metric) -> str:
    plot = Plot(height=0.7 + 0.28 * len(rows))
    for place, row in enumerate(rows):
        middle, low, high = row.values[metric.column]
        plot.axes.plot(
            [low, high], [place, place], color=colour(0), lw=6, alpha=0.25, solid_capstyle="round"
        )
        plot.axes.plot([middle], [place], "o", color=colour(0), ms=6)
        plot.tip(middle, place, tooltip(row, metric))
    _row_axis(plot, rows)
    plot.axes.set_xlim(0, 1.08 * max(row.values[metric.column].high for row in rows) or 1)
    plot.axes.set_xlabel(metric.unit)
    return plot.svg(f"{metric.title} of every point")


def time_plot(rows: Sequence[PointRow]) -> str | None:
    """Device and host time of a step in milliseconds, one bar for each point."""
    rows = [row for row in rows if DEVICE.column in row.values and HOST.column in row.values]
    if not rows:
        return None
    plot = Plot(WIDE, height=0.8 + 0.27 * len(rows))
    for place, row in enumerate(rows):
        device = row.middle(DEVICE)
        host = row.middle(HOST)
        plot.axes.barh(place, device, height=0.62, color=colour(0))
        plot.axes.barh(place, host, left=device, height=0.62, color=colour(1))
        share = host / (device + host) if device + host else 0.0
        note = (
            f"{row.label}\n"
            f"device {number(device)} ms, host {number(host)} ms a step ({share:.1%} host)"
        )
        end = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        plot.axes.annotate(
            f"host {share:.1%}", (device + host, place), color=_MUTED, fontsize=8, **end
        )
        plot.tip(device / 2, place, note)
    _row_axis(plot, rows)
    plot.axes.set_xlim(0, 1.12 * max(row.middle(DEVICE) + row.middle(HOST) for row in rows))
    plot.axes.grid(axis="y", visible=False)
    plot.axes.set_xlabel("milliseconds a step")
    return plot.svg("Host and device time per step")


def pareto_plot(rows: Sequence[PointRow], axes: Axes, latency: Metric) -> str | None:
    """Throughput against `latency`, with the Pareto front joined; None below three points."""
    rows = [row for row in rows if latency.column in row.values and THROUGHPUT.column in row.values]
    if len(rows) < 3:
        return None
    plot = Plot(WIDE, height=3.9)
    at = [(row.middle(latency), row.middle(THROUGHPUT)) for row in rows]
    front = pareto(at)
    plot.axes.plot(
        *zip(*(at[i] for i in front), strict=True), color=_MUTED, lw=1.2, ls=(0, (4, 3)), zorder=1
    )
    best = {rows[i].key for i in front}
    for index, members in enumerate(lines(rows, axes).values()):
        for row in members:
            cost = row.values[latency.column]
            rate = row.values[THROUGHPUT.column]
            shade: dict[str, Any] = {"color": colour(index), "lw": 1, "alpha": 0.45, "zorder": 2}
            plot.axes.plot([cost.low, cost.high], [rate.middle, rate.middle], **shade)
            plot.axes.plot([cost.middle, cost.middle], [rate.low, rate.high], **shade)
            size = 8 if row.key in best else 5
            plot.axes.plot(
                [cost.middle], [rate.middle], color=colour(index), zorder=3, **marker(index, size)
            )
            words = f"{latency.title}: {number(cost.middle)} {latency.unit}"
            plot.tip(cost.middle, rate.middle, f"{tooltip(row, THROUGHPUT)}\n{words}")
    costs = [cost for cost, _ in at]
    logarithmic = min(costs) > 0 and max(costs) > 20 * min(costs)
    if logarithmic:
        plot.axes.set_xscale("log")
        plot.axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    positions = [(math.log(cost) if logarithmic else cost, rate) for cost, rate in at]
    for i in _labelled(positions, front):
        plot.axes.annotate(
            rows[i].label,
            at[i],
            xytext=(9, -11),
            textcoords="offset points",
            fontsize=8,
            color=_INK,
        )
    plot.axes.margins(x=0.16, y=0.16)
    plot.axes.set_xlabel(f"{latency.title}, {latency.unit} (less is better)")
    plot.axes.set_ylabel(f"{THROUGHPUT.title}, {THROUGHPUT.unit}")
    return plot.svg(f"{THROUGHPUT.title} against {latency.title}")


def _labelled(positions: Sequence[tuple[float, float]], front: Sequence[int]) -> list[int]:
    """The points of the front whose labels do not overlap; the others have tooltips."""
    width, height = (max(values) - min(values) for values in zip(*positions, strict=True))
    labelled: list[int] = []
    for i in front:
        x, y = positions[i]
        if all(
            abs(x - positions[j][0]) > width / 3 or abs(y - positions[j][1]) > height / 20
            for j in labelled
        ):
            labelled.append(i)
    return labelled


def timeline_plot(edges: Sequence[float], series: Mapping[str, Sequence[float]], title: str) -> str:
    """Values over the seconds of a run, constant between two edges; there is one more edge than
    values.
    """
    every = -(-len(edges) // MOST_STEPS)
    edges = [*edges[:-1:every], edges[-1]]
    series = {name: values[::every] for name, values in series.items()}
    plot = Plot()
    for index, values in enumerate(series.values()):
        plot.axes.stairs(
            values, edges, baseline=None, color=colour(index), lw=max(1.4, 2.4 - 0.6 * index)
        )
    # a few hundred tooltips are enough
    for step in range(0, len(edges) - 1, max(1, len(edges) // 200)):
        values = ", ".join(f"{number(values[step])} {name}" for name, values in series.items())
        middle = (edges[step] + edges[step + 1]) / 2
        plot.tip(
            middle, max(values[step] for values in series.values()), f"{number(middle)} s: {values}"
        )
    plot.axes.set_xlabel("seconds")
    plot.axes.set_xlim(edges[0], edges[-1])
    _from_zero(plot, max(map(max, series.values())))
    return plot.svg(title)
