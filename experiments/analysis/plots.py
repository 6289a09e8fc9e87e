"""Plots of a sweep: inline SVG of a page, whose colours are CSS variables set by its light or dark
theme, and files for papers.

For a page, matplotlib draws with placeholder colours; `Plot.svg()` replaces them by var(--...) and
gives every point a tooltip.
"""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from experiments.analysis.differences import mark_of, of_points, words_of
from experiments.analysis.latencies import Bins, cumulative
from experiments.analysis.ratios import Comparison, corrected
from experiments.analysis.sweep_points import (
    DEVICE,
    HOST,
    THROUGHPUT,
    Axes,
    Metric,
    PointRow,
    Range,
    XAxis,
    lines,
    number,
    pareto,
    x_axis,
)
from experiments.core.selection import value_text

WIDE_INCHES = (
    11.0  # inches; text then has the same size as in a narrow plot after the page scales both
)
MOST_STEPS = 2000  # steps of a timeline; of more steps, every second, third ... is shown
NUM_COLOURS = 8  # colours and markers before they repeat
MOST_MARKED = 4  # lines whose differences from the first one are marked above a plot
MOST_CHARACTERS = 28  # in a line of a label of an axis
MIN_SKEW = 20  # the largest value over the least one, above which an axis is logarithmic
_MARKERS = "osD^vPXp"
MARKS = {"up": "^", "down": "v", "open": "o", "same": "_"}  # of differences, above a plot


class Palette(NamedTuple):
    """The colours of a plot."""

    ink: str
    muted: str
    grid: str
    paper: str
    series: tuple[str, ...]


# Placeholders: no other colour may be equal to one of these.
PAGE = Palette(
    ink="#010203",
    muted="#010204",
    grid="#010205",
    paper="#010206",
    series=tuple(f"#02{i:02x}07" for i in range(NUM_COLOURS)),
)
# The page's light theme.
PRINT = Palette(
    ink="#22252a",
    muted="#6a6f78",
    grid="#e9e6df",
    paper="#ffffff",
    series=(
        "#0b6fb0",
        "#cf5b04",
        "#0a8a66",
        "#b25592",
        "#a97800",
        "#3f9bd6",
        "#55585e",
        "#8a7f00",
    ),
)
_VARIABLES = {PAGE.ink: "--ink", PAGE.muted: "--muted", PAGE.grid: "--grid", PAGE.paper: "--paper"}
_VARIABLES |= {placeholder: f"--s{i}" for i, placeholder in enumerate(PAGE.series)}


def _style(palette: Palette) -> Any:
    return {
        # on a page, text stays text, in the page's font
        "svg.fonttype": "none" if palette is PAGE else "path",
        "svg.hashsalt": "pagedjax",
        "pdf.fonttype": 42,  # text of a PDF can be searched
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.edgecolor": palette.muted,
        "axes.labelcolor": palette.muted,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": palette.ink,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "axes.axisbelow": True,
    }


class Plot:
    """One pair of axes with its tooltips; `svg` and `save` draw it."""

    def __init__(
        self, title: str, palette: Palette = PAGE, width: float = 3.7, height: float = 2.5
    ) -> None:
        """`title` is the accessible name; `width` and `height` in inches, a page scales them."""
        self.title = title
        self.palette = palette
        with matplotlib.rc_context(_style(palette)):
            self.figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
            # the page's background is visible
            self.axes = self.figure.add_subplot(facecolor="none")
            self.axes.grid(color=palette.grid, linewidth=0.8)
            self.axes.tick_params(length=0, pad=5)
        self._tips: list[str] = []

    def tip(self, x: Any, y: Any, text: str, *, size: float = 15, **place: Any) -> None:
        """An invisible target around a point that shows `text` under the pointer of a page.

        Args:
            place: options of matplotlib such as a transform, for a point that is not in the
                coordinates of the data.
        """
        if self.palette is not PAGE:
            return
        gid = f"tip-{len(self._tips)}"
        self._tips.append(text)
        style: dict[str, Any] = {"alpha": 0.0, "color": PAGE.ink, "zorder": 9, "in_layout": False}
        self.axes.plot([x], [y], "o", ms=size, gid=gid, **style, **place)

    def mark_above(self, x: Any, height: float, index: int, kind: str, words: str) -> None:
        """A mark above the axes at x, in the colour of line `index`; `words` are shown under the
        pointer.

        Args:
            height: 1 is the top of the axes.
            kind: a result of `differences.mark_of`.
        """
        shape = MARKS[kind.removeprefix("hollow ")]
        face = self.colour(index) if kind in ("up", "down") else "none"
        style = {"color": self.colour(index), "markerfacecolor": face, "ms": 4.5, "mew": 0.9}
        place = {"transform": self.axes.get_xaxis_transform(), "clip_on": False}
        self.axes.plot([x], [height], shape, **style, **place)
        self.tip(x, height, words, size=8, **place)

    def name_y(self, *parts: str) -> None:
        """Name the y axis of a file. On a page, the figure's caption does it."""
        if self.palette is not PAGE:
            self.axes.set_ylabel(", ".join(filter(None, parts)))

    def colour(self, index: int) -> str:
        """The colour of line `index`."""
        return self.palette.series[index % NUM_COLOURS]

    def marker(self, index: int, size: float) -> dict[str, Any]:
        """Marker of line `index` with a rim in the background colour, so that lines differ without
        colours.
        """
        return {
            "marker": _MARKERS[index % NUM_COLOURS],
            "ms": size,
            "markeredgecolor": self.palette.paper,
            "markeredgewidth": 0.8,
        }

    def save(self, path: Path, title: str, legend: Sequence[str] = (), key: str = "") -> None:
        """Write the plot as a file of its own, with its title and legend in it.

        Args:
            path: its ending chooses the format, .svg or .pdf.
            legend: the names of the colours, in order.
            key: the swept key whose values are the entries of the legend; "" if the entries name
                their keys.
        """
        with matplotlib.rc_context(_style(self.palette)):
            self.figure.set_facecolor(self.palette.paper)
            self.figure.suptitle(title, fontsize=9, color=self.palette.ink, wrap=True)
            columns = 1 if max(map(len, legend), default=0) > 20 else min(3, len(legend))
            rows = math.ceil(len(legend) / max(1, columns)) + bool(key)
            width, height = self.figure.get_size_inches()
            self.figure.set_size_inches(width, height + 0.18 * (rows + 2))  # title and legend
            if legend:
                handles = [
                    Line2D([], [], color=self.colour(i), lw=2, **self.marker(i, 5))
                    for i in range(len(legend))
                ]
                self.figure.legend(
                    handles,
                    legend,
                    title=key or None,
                    title_fontsize=8,
                    loc="outside lower center",
                    frameon=False,
                    fontsize=8,
                    ncols=columns,
                )
            if path.suffix == ".pdf":
                FigureCanvasPdf(self.figure).print_pdf(str(path), metadata={"CreationDate": None})
            else:
                FigureCanvasSVG(self.figure).print_svg(
                    str(path), metadata={"Date": None, "Creator": None}
                )

    def svg(self) -> str:
        """The plot as an <svg> element of a page."""
        buffer = io.StringIO()
        with matplotlib.rc_context(_style(self.palette)):
            FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for placeholder, variable in _VARIABLES.items():
            text = text.replace(placeholder, f"var({variable})")
        for index, tip in enumerate(self._tips):
            text = text.replace(f'<g id="tip-{index}">', f"<g><title>{html.escape(tip)}</title>")
        # the page chooses the size, so width and height are removed
        head = text[: text.index(">")]
        sizeless_head = re.sub(r'\b(width|height)="[^"]*"', "", head)
        text = text.replace(head, sizeless_head, 1)
        return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(self.title)}" ', 1)


def metric_plot(
    rows: Sequence[PointRow],
    axes: Axes,
    metric: Metric,
    palette: Palette = PAGE,
    *,
    members: Sequence[PointRow] | None = None,
) -> Plot | None:
    """`metric` along x: a line of medians for each combination of the other keys, with a band from
    the least to the largest number over repeats.

    Without an x, points are side by side. None if fewer than two points have the metric.

    Args:
        rows: all points, which decide the limits of the axes and the colours of the lines.
        members: the points of this plot; None: all.
    """
    with_metric = [row for row in rows if metric.column in row.values]
    drawn = [row for row in members or rows if metric.column in row.values]
    if len(with_metric) < 2 or not drawn:
        return None
    if axes.x is None:
        bars = [Bar(row.label, row.values[metric.column], tooltip(row, metric)) for row in drawn]
        return bars_plot(f"{metric.title} of every point", bars, metric.unit, palette)
    x = axes.x
    axis = x_axis(rows, x)
    plot = Plot(f"{metric.title} against {x}", palette)
    drawn_by_line = _drawn_by_line(rows, axes, drawn)
    for index, on_line in enumerate(drawn_by_line.values()):
        shift = 0.0 if axis.numeric else _shift_among_names(index, len(drawn_by_line))
        xs = [axis.place(row.swept.get(x)) + shift for row in on_line]
        if on_line:
            _draw_line(plot, index, xs, [row.values[metric.column] for row in on_line], axis)
        for place, row in zip(xs, on_line, strict=True):
            plot.tip(place, row.middle(metric), tooltip(row, metric))
    _scale_x(plot, axis)
    plot.axes.set_xlabel(x)
    plot.name_y(metric.title, metric.unit)
    _from_zero(plot, max(row.values[metric.column].high for row in with_metric))
    if can_mark(rows, axes):
        _mark_differences(plot, drawn_by_line, axis, x, metric)
    return plot


def _drawn_by_line(
    rows: Sequence[PointRow], axes: Axes, drawn: Sequence[PointRow]
) -> dict[str, list[PointRow]]:
    """The drawn points of each line. rows: all points, which decide the lines."""
    keys = {row.key for row in drawn}
    return {
        name: [row for row in line if row.key in keys] for name, line in lines(rows, axes).items()
    }


def _shift_among_names(index: int, num_lines: int) -> float:
    """How far a line is from the place of a name: lines over names stand side by side."""
    return 0.5 * ((index + 0.5) / num_lines - 0.5)


def _draw_line(
    plot: Plot, index: int, xs: Sequence[float], ranges: Sequence[Range], axis: XAxis
) -> None:
    """Medians and ranges of a metric along x."""
    colour = plot.colour(index)
    lows = [spread.low for spread in ranges]
    highs = [spread.high for spread in ranges]
    middles = [spread.middle for spread in ranges]
    if axis.numeric:
        # later lines are thinner, so that coinciding lines are all visible
        width = max(1.4, 3.0 - 0.6 * index)
        plot.axes.fill_between(xs, lows, highs, color=colour, alpha=0.16, lw=0)
        style = plot.marker(index, 3.2 + 1.3 * width)
        plot.axes.plot(xs, middles, color=colour, lw=width, **style)
    else:  # names have no order, so that nothing is between them
        plot.axes.vlines(xs, lows, highs, color=colour, alpha=0.35, lw=4)
        plot.axes.plot(xs, middles, color=colour, ls="", **plot.marker(index, 6.5))


def can_mark(rows: Sequence[PointRow], axes: Axes) -> bool:
    """Whether differences between lines can be marked: there are a few, with repeats.

    Args:
        rows: all points of a report.
    """
    num_lines = len(lines(rows, axes))
    repeated = any(row.repeats > 1 for row in rows)
    return axes.x is not None and 2 <= num_lines <= MOST_MARKED + 1 and repeated


def _mark_differences(
    plot: Plot, by_line: Mapping[str, Sequence[PointRow]], axis: XAxis, x: str, metric: Metric
) -> None:
    """Marks above the axes: at each x, whether a line differs from the first line. No marks where
    the first line has no such number.

    Args:
        by_line: the points of this plot, by the line. All lines of the report are there, in the
            order of their colours.
    """
    reference_line, *compared_lines = [
        {axis.place(row.swept.get(x)): row for row in line} for line in by_line.values()
    ]
    results: dict[tuple[int, Any], Comparison] = {}  # by the index of the line and the place
    for index, line in enumerate(compared_lines, 1):
        for place, row in line.items():
            reference = reference_line.get(place)
            result = of_points(reference, row, metric) if reference else None
            if result:
                results[index, place] = result
    marked = dict(zip(results, corrected(list(results.values())), strict=True))
    marked_lines = sorted({index for index, _ in marked})
    names = list(by_line)
    for (index, place), result in marked.items():
        height = 1.06 + 0.07 * marked_lines.index(index)
        words = f"{names[index]}: {words_of(result, reference_line[place].label, metric.unit)}"
        plot.mark_above(place, height, index, mark_of(result), words)


def tooltip(row: PointRow, metric: Metric) -> str:
    middle, low, high = row.values[metric.column]
    text = f"{row.label}\n{metric.title}: {number(middle)} {metric.unit}"
    if row.repeats > 1:
        text += f" ({number(low)} to {number(high)} over {row.repeats} repeats)"
    return text


def _scale_x(plot: Plot, axis: XAxis) -> None:
    """Ticks at the swept values; a logarithmic axis if they grow by factors."""
    if not axis.numeric:
        _name_places(plot, list(map(value_text, axis.values)))
        return
    values: list[float] = list(axis.values)
    if len(values) > 2 and values[0] > 0 and values[-1] / values[0] >= 4:
        plot.axes.set_xscale("log", base=2)
    plot.axes.set_xticks(values, labels=[f"{value:g}" for value in values])
    plot.axes.xaxis.set_minor_locator(NullLocator())
    plot.axes.xaxis.set_minor_formatter(NullFormatter())
    if len(values) > 12:  # too many to write each
        plot.axes.set_xticks(values[:: math.ceil(len(values) / 12)])


def _scale_skewed_x(plot: Plot, values: Sequence[float]) -> bool:
    """Make the x axis logarithmic if the largest value is many times the least one. Returns whether
    it is logarithmic.
    """
    is_skewed = min(values) > 0 and max(values) > MIN_SKEW * min(values)
    if is_skewed:
        plot.axes.set_xscale("log")
        plot.axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        plot.axes.xaxis.set_minor_formatter(NullFormatter())
    return is_skewed


def _name_places(plot: Plot, names: Sequence[str]) -> None:
    """Names at 0, 1, 2, ... on the x axis; slanted where they would touch."""
    is_long = sum(map(len, names)) > 36
    slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if is_long else {}
    plot.axes.set_xticks(range(len(names)), labels=_in_lines(names), **slant)
    plot.axes.set_xlim(-0.5, len(names) - 0.5)


def _from_zero(plot: Plot, highest: float) -> None:
    """A y axis that begins at zero: heights compare as the numbers do."""
    plot.axes.set_ylim(0, highest * 1.08 if highest > 0 else 1)


def _row_axis(plot: Plot, labels: Sequence[str]) -> None:
    """A y axis with a line for each label."""
    plot.axes.set_yticks(range(len(labels)), labels=labels)
    plot.axes.set_ylim(len(labels) - 0.5, -0.5)


def _in_lines(labels: Sequence[str]) -> list[str]:
    """Long labels in several lines; else they leave no room for the axes."""
    return [textwrap.fill(label, MOST_CHARACTERS, subsequent_indent="  ") for label in labels]


def _height_of(labels: Sequence[str], min_inches: float) -> float:
    """Inches of the rows of an axis with these labels; a row has at least `min_inches`."""
    most_lines = max((label.count("\n") for label in labels), default=0) + 1
    return len(labels) * max(min_inches, 0.14 * most_lines)


class Bar(NamedTuple):
    """A number with its range, on a line of its own.

    tip: words for the pointer.
    parts: numbers that have small marks on the same line.
    """

    label: str
    spread: Range
    tip: str
    parts: Sequence[float] = ()


def bars_plot(
    title: str,
    bars: Sequence[Bar],
    unit: str,
    palette: Palette = PAGE,
    *,
    width: float = 3.7,
    limit: float | None = None,
) -> Plot:
    """Numbers with their ranges, under each other.

    Args:
        limit: the end of the x axis; None: all ranges end before it.
    """
    labels = _in_lines([bar.label for bar in bars])
    plot = Plot(title, palette, width, height=0.7 + _height_of(labels, 0.28))
    for place, (_, (middle, low, high), tip, parts) in enumerate(bars):
        style: dict[str, Any] = {"lw": 6, "alpha": 0.25, "solid_capstyle": "round"}
        plot.axes.plot([low, high], [place, place], color=plot.colour(0), **style)
        plot.axes.plot(parts, [place] * len(parts), "|", color=plot.colour(1), ms=9)
        plot.axes.plot([middle], [place], "o", color=plot.colour(0), ms=6)
        plot.tip(middle, place, tip)
    _row_axis(plot, labels)
    plot.axes.set_xlim(0, limit or 1.08 * max(bar.spread.high for bar in bars) or 1)
    plot.axes.set_xlabel(unit)
    return plot


def time_plot(rows: Sequence[PointRow], palette: Palette = PAGE) -> Plot | None:
    """Device and host time of a step in milliseconds, one bar for each point."""
    rows = [row for row in rows if DEVICE.column in row.values and HOST.column in row.values]
    if not rows:
        return None
    labels = _in_lines([row.label for row in rows])
    height = 0.8 + _height_of(labels, 0.27)
    plot = Plot("Host and device time per step", palette, WIDE_INCHES, height)
    for place, row in enumerate(rows):
        device = row.middle(DEVICE)
        # rounding may put it below 0 for a simulated step without host time
        host = max(row.middle(HOST), 0.0)
        plot.axes.barh(place, device, height=0.62, color=plot.colour(0))
        plot.axes.barh(place, host, left=device, height=0.62, color=plot.colour(1))
        share = host / (device + host) if device + host else 0.0
        note = (
            f"{row.label}\n"
            f"device {number(device)} ms, host {number(host)} ms a step ({share:.1%} host)"
        )
        end = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        plot.axes.annotate(
            f"host {share:.1%}", (device + host, place), color=plot.palette.muted, fontsize=8, **end
        )
        plot.tip(device / 2, place, note)
    _row_axis(plot, labels)
    plot.axes.set_xlim(0, 1.12 * max(row.middle(DEVICE) + row.middle(HOST) for row in rows))
    plot.axes.grid(axis="y", visible=False)
    plot.axes.set_xlabel("milliseconds a step")
    return plot


def pareto_plot(
    rows: Sequence[PointRow], axes: Axes, latency: Metric, palette: Palette = PAGE
) -> Plot | None:
    """Throughput against `latency`, with the Pareto front joined; None below three points."""
    rows = [row for row in rows if latency.column in row.values and THROUGHPUT.column in row.values]
    if len(rows) < 3:
        return None
    plot = Plot(f"{THROUGHPUT.title} against {latency.title}", palette, WIDE_INCHES, height=3.9)
    medians = [(row.middle(latency), row.middle(THROUGHPUT)) for row in rows]
    front = pareto(medians)
    plot.axes.plot(
        *zip(*(medians[i] for i in front), strict=True),
        color=plot.palette.muted,
        lw=1.2,
        ls=(0, (4, 3)),
        zorder=1,
    )
    best = {rows[i].key for i in front}
    for index, members in enumerate(lines(rows, axes).values()):
        for row in members:
            cost = row.values[latency.column]
            rate = row.values[THROUGHPUT.column]
            shade: dict[str, Any] = {
                "color": plot.colour(index),
                "lw": 1,
                "alpha": 0.45,
                "zorder": 2,
            }
            plot.axes.plot([cost.low, cost.high], [rate.middle, rate.middle], **shade)
            plot.axes.plot([cost.middle, cost.middle], [rate.low, rate.high], **shade)
            size = 8 if row.key in best else 5
            plot.axes.plot(
                [cost.middle],
                [rate.middle],
                color=plot.colour(index),
                zorder=3,
                **plot.marker(index, size),
            )
            words = f"{latency.title}: {number(cost.middle)} {latency.unit}"
            plot.tip(cost.middle, rate.middle, f"{tooltip(row, THROUGHPUT)}\n{words}")
    _scale_skewed_x(plot, [cost for cost, _ in medians])
    plot.axes.margins(x=0.16, y=0.16)
    plot.axes.set_xlabel(f"{latency.title}, {latency.unit} (less is better)")
    plot.axes.set_ylabel(f"{THROUGHPUT.title}, {THROUGHPUT.unit}")
    labels = {i: rows[i].label for i in front}
    _label_points(plot, medians, labels, [medians[i] for i in front])
    return plot


class Box(NamedTuple):
    """A part of a plot, in points (1/72 inch)."""

    left: float
    bottom: float
    right: float
    top: float

    def touches(self, box: Box) -> bool:
        """Whether two boxes have a point in common."""
        across = self.left < box.right and box.left < self.right
        return across and self.bottom < box.top and box.bottom < self.top


class LabelPlace(NamedTuple):
    """A place for a label beside a marker.

    crossed: whether a line goes through the label.
    dy: how high the label is above the marker, in points.
    """

    crossed: bool
    is_right: bool
    dy: int
    box: Box


def _label_points(
    plot: Plot,
    markers: Sequence[tuple[float, float]],
    labels: Mapping[int, str],
    line: Sequence[tuple[float, float]],
) -> None:
    """Write labels beside markers, where they meet no other marker, no other label and, if there is
    such a place, not the line. A marker without a place has a tooltip only.

    Args:
        markers: the places of all markers, in the coordinates of the data.
        labels: the labels, by the index of the marker.
        line: the ends of the parts of the line, in the coordinates of the data.
    """
    with matplotlib.rc_context(_style(plot.palette)):
        FigureCanvasSVG(plot.figure)
        plot.figure.draw_without_rendering()  # so that the axes have their place
    boxes = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in _in_points(plot, markers)]
    spots = [
        Box(*spot, *spot)
        for begin, end in pairwise(_in_points(plot, line))
        for spot in np.linspace(begin, end, 100).tolist()
    ]
    for i, label in labels.items():
        places = _label_places(plot, boxes[i], label, boxes, spots)
        if places:
            place = min(places, key=lambda place: place.crossed)
            boxes.append(place.box)
            plot.axes.annotate(
                label,
                markers[i],
                xytext=(9 if place.is_right else -9, place.dy),
                textcoords="offset points",
                ha="left" if place.is_right else "right",
                fontsize=8,
                color=plot.palette.ink,
            )


def _in_points(plot: Plot, places: Sequence[tuple[float, float]]) -> Any:
    """Places of the data in points, float64 [n, 2]."""
    return 72 / plot.figure.dpi * plot.axes.transData.transform(np.array(places))


def _label_places(
    plot: Plot, marker: Box, label: str, boxes: Sequence[Box], spots: Sequence[Box]
) -> list[LabelPlace]:
    """The free places for a label: below and above, at the right and at the left of its marker.

    Args:
        boxes: what the label must not touch: markers and other labels.
        spots: boxes without size along the line.
    """
    axes = plot.axes.get_window_extent()
    scale = 72 / plot.figure.dpi
    width = 5.0 * len(label)  # at most, for text that is 8 points high
    places = []
    for is_right, dy in ((True, -11), (True, 5), (False, -11), (False, 5)):
        label_left = marker.right + 4 if is_right else marker.left - 4 - width
        bottom = marker.bottom + 5 + dy
        box = Box(label_left, bottom - 2, label_left + width, bottom + 8)
        fits = scale * axes.x0 < box.left and box.right < scale * axes.x1
        if fits and not any(map(box.touches, boxes)):
            places.append(LabelPlace(any(map(box.touches, spots)), is_right, dy, box))
    return places


def timeline_plot(
    edges: Sequence[float],
    series: Mapping[str, Sequence[float]],
    title: str,
    palette: Palette = PAGE,
) -> Plot:
    """Values over the seconds of a run, constant between two edges; there is one more edge than
    values.
    """
    stride = -(-len(edges) // MOST_STEPS)
    edges = [*edges[:-1:stride], edges[-1]]
    series = {name: values[::stride] for name, values in series.items()}
    plot = Plot(title, palette)
    for index, values in enumerate(series.values()):
        plot.axes.stairs(
            values, edges, baseline=None, color=plot.colour(index), lw=max(1.4, 2.4 - 0.6 * index)
        )
    # a few hundred tooltips are enough
    for step in range(0, len(edges) - 1, max(1, len(edges) // 200)):
        words = ", ".join(f"{number(values[step])} {name}" for name, values in series.items())
        middle = (edges[step] + edges[step + 1]) / 2
        top = max(values[step] for values in series.values())
        plot.tip(middle, top, f"{number(middle)} s: {words}")
    plot.axes.set_xlabel("seconds")
    plot.name_y(title)
    plot.axes.set_xlim(edges[0], edges[-1])
    _from_zero(plot, max(map(max, series.values())))
    return plot


def cumulative_plot(
    curves: Mapping[int, tuple[str, Any]], latency: str, unit: str, palette: Palette = PAGE
) -> Plot | None:
    """The cumulative distribution of a latency, a curve for each line; None without values.

    Args:
        curves: the number of a line -> its name, and its values in `unit`, float64 [n].
    """
    drawn = {index: curve for index, curve in curves.items() if len(curve[1])}
    if not drawn:
        return None
    plot = Plot(f"Cumulative distribution of {latency}", palette)
    for index, (name, values) in drawn.items():
        xs, shares = cumulative(values)
        plot.axes.plot(
            xs,
            100 * shares,
            color=plot.colour(index),
            lw=max(1.4, 2.6 - 0.5 * index),
            ls="-" if index < NUM_COLOURS else "--",
            drawstyle="steps-post",
        )
        for share in (50, 90, 99):
            place = min(int(shares.searchsorted(share / 100)), len(xs) - 1)
            words = f"{share} % within {number(xs[place])} {unit}, of {len(values)}"
            plot.tip(xs[place], 100 * shares[place], f"{name}\n{words}".strip())
    ends = [float(end) for _, values in drawn.values() for end in (values.min(), values.max())]
    if not _scale_skewed_x(plot, ends):
        plot.axes.set_xlim(left=0)
        plot.axes.xaxis.set_major_locator(MaxNLocator(5))
    plot.axes.set_ylim(0, 102)
    plot.axes.set_xlabel(unit)
    plot.name_y("% within this time")
    return plot


def length_plot(
    medians: Mapping[int, tuple[str, Mapping[int, float]]],
    bins: Bins,
    latency: str,
    unit: str,
    palette: Palette = PAGE,
) -> Plot | None:
    """The median of a latency by the length of the prompt, a line for each line of the sweep.

    Args:
        medians: the number of a line -> its name, and its medians in `unit` by the number of the
            bin.
    """
    drawn = {index: line for index, line in medians.items() if line[1]}
    if not drawn:
        return None
    plot = Plot(f"{latency} by prompt length", palette)
    for index, (name, by_bin) in drawn.items():
        width = max(1.4, 3.0 - 0.6 * index)
        plot.axes.plot(
            list(by_bin),
            list(by_bin.values()),
            color=plot.colour(index),
            lw=width,
            **plot.marker(index, 3.2 + 1.3 * width),
        )
        for place, median in by_bin.items():
            words = f"prompts of {bins.labels[place]} tokens: {number(median)} {unit}"
            plot.tip(place, median, f"{name}\n{words}".strip())
    _name_places(plot, bins.labels)
    plot.axes.set_xlabel("prompt tokens")
    plot.name_y(latency, unit)
    _from_zero(plot, max(max(by_bin.values()) for _, by_bin in drawn.values()))
    return plot
