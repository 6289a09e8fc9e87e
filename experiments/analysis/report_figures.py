"""The figures of a report: which figures it has, what each of them says, and their files.

A figure is drawn when its page or its file is written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import latencies, plots, sweep_points
from experiments.analysis.latencies import Latencies
from experiments.analysis.plots import Plot
from experiments.analysis.sweep_points import (
    ACCEPTANCE,
    ATTAINMENT,
    E2E,
    E2E_P99,
    FRAGMENTATION,
    GOODPUT,
    ITL,
    ITL_P99,
    JAIN,
    PADDING,
    PEAK_SLOTS,
    SERVICE_DIFFERENCE,
    THROUGHPUT,
    TOKENS_PER_DECODE,
    TTFT,
    TTFT_P99,
    WORST_USER,
    Axes,
    Metric,
    PointRow,
)
from experiments.core.selection import value_text
from experiments.core.service import OUTPUT_WEIGHT, PROMPT_WEIGHT, Service

SERVICE_PARTS = 200  # of the time of a run, in figures of service
MOST_POINTS = 8  # points side by side; the distributions of more points are not shown
# latency -> title, unit, and how many of this unit are a second
DISTRIBUTIONS = {
    "ttft_s": ("Time to first token", "ms", 1e3),
    "itl_s": ("Inter-token latency", "ms", 1e3),
    "e2e_s": ("End to end", "s", 1.0),
}
BY_LENGTH = {
    "ttft_s": ("Time to first token", "ms", 1e3),
    "tpot_s": ("Mean gap of tokens", "ms", 1e3),
    "e2e_s": ("End to end", "s", 1.0),
}


class Figure(NamedTuple):
    """A figure with its words.

    legend: names of its own colours; the colours of lines are in the legend of the section.
    plot: the figure as drawn for the page.
    """

    title: str
    draw: Callable[..., Plot | None]  # called as draw(palette=...)
    unit: str = ""
    better: str = ""
    wide: bool = False
    legend: tuple[str, ...] = ()
    plot: Plot | None = None

    def about(self, *, simulated: bool) -> str:
        """Whether the figure is simulated, its unit, and whether more or less is better."""
        better = {"high": "more is better", "low": "less is better"}.get(self.better, "")
        words = ["simulated" if simulated else "", self.unit, better]
        return ", ".join(filter(None, words))


class Section(NamedTuple):
    """Figures under a heading.

    legend: the title and the entries of the colours of its figures; None: there is one colour.
    columns: how many figures are side by side on a wide page.
    is_shown: whether the section is shown even without a figure, for its note.
    """

    title: str
    note: str
    figures: list[Figure]
    legend: tuple[str, tuple[str, ...]] | None = None
    columns: int = 3
    is_shown: bool = False


def sections(
    rows: Sequence[PointRow],
    axes: Axes,
    samples: Mapping[str, Latencies],
    steps: Sequence[dict[str, Any]],
    *,
    left_out: str = "",
    slo: str = "",
    chosen: Sequence[Metric] = (),
    services: Mapping[str, Mapping[str, Service]] | None = None,
) -> list[Section]:
    """The sections of a report that have a figure, or a note why they have none.

    Args:
        samples: by the key of a point, the latencies of its requests.
        steps: lines of steps.jsonl of the run that is shown over time.
        left_out: why there are no samples, for the page; "" if that needs no word.
        slo: the targets of goodput, in words.
        chosen: numbers that get a section of their own, the first one.
        services: by the label of a point, the service of each user in its first run.
    """
    if not rows:
        return []
    of_metrics = partial(metric_section, rows, axes)
    lines_note = axes_note(rows, axes)
    targets = f" The targets: {slo}." if slo else ""
    groups = [
        chosen_section(rows, axes, chosen),
        of_metrics("Throughput", lines_note + targets, THROUGHPUT, GOODPUT, ATTAINMENT),
        of_metrics(
            "Latency",
            "Medians, and under them the 99th percentiles: one request of a hundred takes longer.",
            TTFT,
            ITL,
            E2E,
            TTFT_P99,
            ITL_P99,
            E2E_P99,
        ),
        of_metrics(
            "Fairness",
            "Between the users that requests name, in each run.",
            JAIN,
            WORST_USER,
            SERVICE_DIFFERENCE,
        ),
        of_metrics(
            "Classes",
            "The requests of each class of the workload, by the targets of the class.",
            *sweep_points.class_metrics([row.values for row in rows]),
        ),
        service_section(services),
        Section(
            "Throughput against latency",
            "Up and to the left is better. The dashed line joins the points whose medians no other "
            "point's beat in both.",
            [
                Figure(
                    f"Throughput against {latency.short}",
                    partial(plots.pareto_plot, rows, axes, latency),
                    wide=True,
                )
                for latency in (TTFT_P99, ITL_P99)
            ],
            line_legend(rows, axes),
        ),
        Section("Distribution of latencies", left_out, [], is_shown=bool(left_out)),
        *distributions(rows, axes, samples),
        of_metrics(
            "Memory",
            "Slots of used blocks without a token are internal fragmentation; padding is computed "
            "without use.",
            FRAGMENTATION,
            PEAK_SLOTS,
            PADDING,
        ),
        of_metrics(
            "Speculation",
            "A decode row gives one token in a step, and one for each draft that is accepted.",
            ACCEPTANCE,
            TOKENS_PER_DECODE,
        ),
        Section(
            "Time of a step",
            "Device: from dispatch until the sampled tokens are on the host. Host: schedule, pack, "
            "commit.",
            [Figure("Mean time of a step", partial(plots.time_plot, rows), wide=True)],
            ("", ("device", "host")),
        ),
        timeline(rows, steps),
    ]
    return draw(groups)


def service_section(services: Mapping[str, Mapping[str, Service]] | None) -> Section:
    """The service of each user over time, a figure for each point."""
    figures = []
    users: dict[str, None] = {}
    for label, by_user in (services or {}).items():
        users |= dict.fromkeys(by_user)
        end = max(service.times[-1] for service in by_user.values() if len(service.times))
        edges = np.linspace(0.0, end, SERVICE_PARTS + 1)
        series = {user: service.until(edges[1:]).tolist() for user, service in by_user.items()}
        plot = partial(plots.timeline_plot, edges.tolist(), series, "Weighted tokens")
        figures.append(Figure(f"Service, {label}", plot, unit="weighted tokens"))
    note = (
        "The tokens that each user got until each time, in the first repeat of a point: a token of "
        f"a prompt counts {PROMPT_WEIGHT:g}, and an output token {OUTPUT_WEIGHT:g}. While two users "
        "are backlogged, a fair policy gives them equal service."
    )
    return Section("Service of users", note, figures, ("user", tuple(users)))


def draw(groups: Sequence[Section]) -> list[Section]:
    """The sections with their figures as drawn for a page. Sections with nothing to show are left
    out.
    """
    drawn = [
        group._replace(figures=[figure._replace(plot=figure.draw()) for figure in group.figures])
        for group in groups
    ]
    with_plots = [
        group._replace(figures=[figure for figure in group.figures if figure.plot is not None])
        for group in drawn
    ]
    return [group for group in with_plots if group.figures or group.is_shown]


def metric_section(
    rows: Sequence[PointRow], axes: Axes, title: str, note: str, *metrics: Metric
) -> Section:
    """The figures of some numbers along x."""
    figures = [figure for metric in metrics for figure in metric_figures(rows, axes, metric)]
    num_facets = len(sweep_points.facets(rows, axes))
    columns = 2 if num_facets in (2, 4) else 3  # the facets of a metric stand together
    return Section(title, note, figures, line_legend(rows, axes), columns)


def chosen_section(rows: Sequence[PointRow], axes: Axes, chosen: Sequence[Metric]) -> Section:
    """The figures of the numbers that a user chose."""
    return metric_section(rows, axes, "Chosen numbers", axes_note(rows, axes), *chosen)


def axes_note(rows: Sequence[PointRow], axes: Axes) -> str:
    """The axes and the marks of the plots, in words."""
    facet = f" Each {axes.facet} has a plot of its own." if axes.facet else ""
    if axes.x is None:
        return f"No numeric key is swept, so the points are side by side.{facet}"
    per_line = f", one line for each {' and '.join(axes.lines)}" if axes.lines else ""
    text = (
        f"{axes.x} is the x axis{per_line}. Lines are medians over repeats; bands are the "
        f"range.{facet}"
    )
    if not plots.can_mark(rows, axes):
        return text
    first, *_ = sweep_points.lines(rows, axes)
    return (
        f"{text} Marks above a plot compare each other line with {first}, over repeats. A full "
        "triangle: shown to be higher or lower (p is at most 0.05, corrected by Holm's method for "
        "all marks of the plot). A hollow triangle: the same difference in every repeat, without "
        "noise, of this workload. A circle: no difference is shown. A dash: the same in every "
        "repeat."
    )


def line_legend(rows: Sequence[PointRow], axes: Axes) -> tuple[str, tuple[str, ...]] | None:
    """Title and entries of the colours in order; None if there is one colour.

    A single key is the title.
    """
    if axes.x is None or not axes.lines:
        return None
    entries = tuple(sweep_points.lines(rows, axes))
    key, *other_keys = axes.lines
    if other_keys:
        return "", entries
    return key, tuple(entry.removeprefix(f"{key}=") for entry in entries)


def metric_figures(rows: Sequence[PointRow], axes: Axes, metric: Metric) -> list[Figure]:
    """A metric along x, a figure for each facet."""
    return [
        Figure(
            ", ".join(filter(None, [metric.title, name])),
            partial(plots.metric_plot, rows, axes, metric, members=members),
            unit=metric.unit,
            better=metric.better,
        )
        for name, members in sweep_points.facets(rows, axes).items()
    ]


def distribution_points(rows: Sequence[PointRow], axes: Axes) -> dict[str, list[PointRow]]:
    """The points whose distributions are shown, by the words that a title has about them: for each
    facet the points at the least x, and the points at the largest x. Without an x, all points if
    there are at most MOST_POINTS.
    """
    if axes.x is None:
        return {"": list(rows)} if len(rows) <= MOST_POINTS else {}
    values = sweep_points.x_axis(rows, axes.x).values
    ends = list(dict.fromkeys([values[0], values[-1]]))
    groups = {}
    for facet, members in sweep_points.facets(rows, axes).items():
        for value in ends:
            name = ", ".join(filter(None, [facet, f"{axes.x}={value_text(value)}"]))
            groups[name] = [row for row in members if row.swept.get(axes.x) == value]
    return groups


def distributions(
    rows: Sequence[PointRow], axes: Axes, samples: Mapping[str, Latencies]
) -> list[Section]:
    """How latencies are distributed, and how they grow with the prompt's length."""
    names = {row.key: row.label for row in rows}  # key of a point -> name of its curve
    order = [row.key for row in rows]  # of colours: without an x by points, else by lines
    legend: tuple[str, tuple[str, ...]] | None = ("", tuple(names.values()))
    if axes.x is not None:
        by_line = sweep_points.lines(rows, axes)
        names = {row.key: name for name, line in by_line.items() for row in line}
        order = list(by_line)
        legend = line_legend(rows, axes)
    elif len(rows) == 1:
        legend = None
    share_figures = []
    length_figures = []
    for suffix, members in distribution_points(rows, axes).items():
        lines: dict[int, tuple[str, Latencies]] = {}
        for row in members:
            if row.key in samples:
                name = names[row.key]
                index = order.index(row.key if axes.x is None else name)
                lines[index] = (name, samples[row.key])
        share_figures += _cumulative_figures(lines, suffix)
        length_figures += _length_figures(lines, suffix)
    ends = f" The points are those at the least and at the largest {axes.x}." if axes.x else ""
    return [
        Section(
            "Distribution of latencies",
            f"The share of requests (of gaps, for ITL) that took at most so long, all repeats "
            f"together.{ends}",
            share_figures,
            legend,
        ),
        Section(
            "Latency by prompt length",
            f"Medians of requests whose prompts are about equally long, all repeats together; a "
            f"bin has at least {latencies.MIN_REQUESTS} requests.{ends}",
            length_figures,
            legend,
        ),
    ]


def _cumulative_figures(lines: Mapping[int, tuple[str, Latencies]], suffix: str) -> list[Figure]:
    figures = []
    for latency, (title, unit, scale) in DISTRIBUTIONS.items():
        curves = {
            index: (name, scale * point.values(latency)) for index, (name, point) in lines.items()
        }
        figures.append(
            Figure(
                ", ".join(filter(None, [title, suffix])),
                partial(plots.cumulative_plot, curves, title, unit),
                unit="% of the requests" if latency != "itl_s" else "% of the gaps",
            )
        )
    return figures


def _length_figures(lines: Mapping[int, tuple[str, Latencies]], suffix: str) -> list[Figure]:
    prompts = [point.prompts for _, point in lines.values()]
    bins = latencies.length_bins(np.concatenate(prompts)) if prompts else None
    if bins is None:
        return []
    figures = []
    for latency, (title, unit, scale) in BY_LENGTH.items():
        medians = {
            index: (name, latencies.medians_by_length(point, latency, bins, scale))
            for index, (name, point) in lines.items()
        }
        figures.append(
            Figure(
                ", ".join(filter(None, [title, suffix])),
                partial(plots.length_plot, medians, bins, title, unit),
                unit=f"{unit}, median",
                better="low",
            )
        )
    return figures


def timeline(rows: Sequence[PointRow], steps: Sequence[dict[str, Any]]) -> Section:
    """One run over time: sequences that run and wait, tokens, and the use of the cache. With
    replicas, only the first replica is shown.
    """
    fastest = sweep_points.highest(rows, THROUGHPUT)
    steps = [step for step in steps if not step.get("replica")]
    if len(steps) < 2 or fastest is None:
        return Section("One run over time", "", [])
    edges = [steps[0]["started"], *(step["started"] + step["seconds"] for step in steps)]
    used = [100 * step["blocks_used"] / step["num_blocks"] for step in steps]
    curves: dict[str, dict[str, list[float]]] = {
        "Sequences": {
            "in the step": [step["sequences"] for step in steps],
            "waiting": [step["waiting"] for step in steps],
        },
        "Tokens": {
            "padded": [step["padded_tokens"] for step in steps],
            "computed": [step["tokens"] for step in steps],
        },
        "Cache in use": {"% of blocks with an owner": used},
    }
    if any("drafts" in step for step in steps):
        curves["Drafts"] = {
            name: [step.get(name, 0) for step in steps] for name in ("drafts", "accepted")
        }
    figures = [
        Figure(title, partial(plots.timeline_plot, edges, series, title), legend=tuple(series))
        for title, series in curves.items()
    ]
    start = "Replica 0 in the first" if "replica" in steps[0] else "The first"
    note = f"{start} repeat of the point with the highest median throughput, {fastest.label}."
    return Section("One run over time", note, figures)


def export(groups: Sequence[Section], folder: Path, ending: str, *, simulated: bool) -> list[Path]:
    """Write each figure as a file, and return their paths.

    Args:
        ending: svg or pdf.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    paths = []
    for group in groups:
        for figure in group.figures:
            plot = figure.draw(palette=plots.PRINT)
            assert plot is not None, "see `sections`"
            name = file_name(f"{group.title} {figure.title}")
            counts[name] += 1
            if counts[name] > 1:  # another title has the same letters
                name = f"{name}--{counts[name]}"
            path = folder / f"{name}.{ending}"
            about = figure.about(simulated=simulated)
            title = f"{figure.title}\n{about}" if about else figure.title
            key, entries = group.legend or ("", ())
            if figure.legend:
                key, entries = "", figure.legend
            plot.save(path, title, entries, key)
            paths.append(path)
    return paths


def file_name(title: str) -> str:
    """A title as the name of a file: lower case, with hyphens."""
    return re.sub(r"[^a-z0-9.=]+", "-", title.lower()).strip("-")
