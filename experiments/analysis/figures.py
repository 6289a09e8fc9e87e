"""Figures of studies and of trainings: SVG files for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = ("#3b82c4", "#d9772b", "#3a9a5b", "#b0529e", "#8a6d3b", "#777777")
MARKERS = "osD^vP"
_INK = "#808080"  # readable on white and on black
_STYLE: Any = {
    "svg.hashsalt": "pagedjax",  # the same data gives the same file
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
}

Curve = Sequence[tuple[float, float]]


def curves(
    panels: Mapping[str, Mapping[str, Curve]], x: str, y: str | Sequence[str], **options: Any
) -> str:
    """Panels side by side, each with named curves of (x, y).

    Args:
        y: one label, or one for each panel.
        options: log_x, log_y: base of the axis; lowest: limit of y; dashed: names of curves that
            are not measured.
    """
    with matplotlib.rc_context(_STYLE):
        figure, all_axes = _figure(len(panels))
        labels = [y] * len(panels) if isinstance(y, str) else y
        for axes, (title, lines), label in zip(all_axes, panels.items(), labels, strict=True):
            for i, (name, points) in enumerate(lines.items()):
                style: dict[str, Any] = {"marker": MARKERS[i % 6], "ms": 4, "lw": 1.4}
                if name in options.get("dashed", ()):
                    style = {"ls": "--", "lw": 1}
                axes.plot(*zip(*points, strict=True), label=name, color=COLOURS[i % 6], **style)
            axes.set(title=title, xlabel=x, ylabel=label)
            if options.get("log_x"):
                axes.set_xscale("log", base=options["log_x"])
            if options.get("log_y"):
                axes.set_yscale("log", base=options["log_y"])
            elif "lowest" in options:
                axes.set_ylim(bottom=options["lowest"])
            if len(lines) > 1:
                axes.legend(frameon=False, fontsize=8)
        return _svg(figure)


def stacks(panels: Mapping[str, Mapping[str, Mapping[str, float]]], y: str) -> str:
    """Panels of stacked bars: {panel: {bar: {part: height}}}."""
    with matplotlib.rc_context(_STYLE):
        figure, all_axes = _figure(len(panels))
        for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
            parts = list(next(iter(bars.values())))
            floor = [0.0] * len(bars)
            for i, part in enumerate(parts):
                heights = [bar[part] for bar in bars.values()]
                axes.bar(
                    list(bars), heights, bottom=floor, label=part, color=COLOURS[i % 6], width=0.65
                )
                floor = [a + b for a, b in zip(floor, heights, strict=True)]
            axes.set(title=title, ylabel=y)
            axes.grid(axis="x", visible=False)
            axes.tick_params(axis="x", labelsize=8)
        all_axes[0].legend(
            frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3
        )
        return _svg(figure)


def _figure(panels: int) -> tuple[Figure, list[Any]]:
    """A figure with panels side by side, and the axes of each panel."""
    figure = Figure(figsize=(4.4 * panels + 0.4, 3.1), layout="constrained", facecolor="none")
    all_axes = [figure.add_subplot(1, panels, i + 1, facecolor="none") for i in range(panels)]
    return figure, all_axes


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
