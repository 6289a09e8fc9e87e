"""The points of a sweep, from the summaries of its runs, and the axes of their plots.

All functions are pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from experiments.core import own_metrics
from experiments.core.overrides import short_names
from experiments.core.selection import swept_keys, value_text
from experiments.core.store import flatten
from pagedjax.options.config import one_of

OWN = f"{own_metrics.OWN}."  # what the column of a user's own metric begins with
CLASSES = "classes"  # the section of a summary that has the numbers of classes
NOISE = 1e-9  # a number below this is an error of rounding: nothing is measured so exactly


class Metric(NamedTuple):
    """A number of a summary, how it is shown, and whether high or low numbers are better.

    It is shown times `scale`, in `unit`. `better` is "" where it is not known.
    """

    column: str
    title: str
    unit: str
    scale: float
    better: Literal["high", "low", ""]
    short: str


THROUGHPUT = Metric("output_tokens_per_s", "Output throughput", "tokens/s", 1.0, "high", "output")
TTFT = Metric("ttft_s.p50", "Time to first token, p50", "ms", 1e3, "low", "TTFT p50")
ITL = Metric("itl_s.p50", "Inter-token latency, p50", "ms", 1e3, "low", "ITL p50")
TTFT_P99 = Metric("ttft_s.p99", "Time to first token, p99", "ms", 1e3, "low", "TTFT p99")
ITL_P99 = Metric("itl_s.p99", "Inter-token latency, p99", "ms", 1e3, "low", "ITL p99")
E2E = Metric("e2e_s.p50", "End to end, p50", "s", 1.0, "low", "E2E p50")
E2E_P99 = Metric("e2e_s.p99", "End to end, p99", "s", 1.0, "low", "E2E p99")
GOODPUT = Metric("goodput.requests_per_s", "Goodput", "requests/s", 1.0, "high", "goodput")
ATTAINMENT = Metric(
    "goodput.share", "Requests that met the targets", "%", 1e2, "high", "attainment"
)
FRAGMENTATION = Metric(
    "fragmentation_share", "Empty slots in used blocks", "%", 1e2, "low", "empty slots"
)
PADDING = Metric("padding_share", "Padding in computed tokens", "%", 1e2, "low", "padding")
PEAK_SLOTS = Metric("slots_used.peak", "Peak cache use", "token slots", 1.0, "low", "peak cache")
JAIN = Metric("fairness.jain", "Jain's index of users' speeds", "", 1.0, "high", "Jain's index")
WORST_USER = Metric(
    "fairness.worst_ttft",
    "TTFT p99 of the worst user over the median one's",
    "times",
    1.0,
    "low",
    "worst user",
)
SERVICE_DIFFERENCE = Metric(
    "service_difference",
    "Largest difference of service of two backlogged users",
    "weighted tokens",
    1.0,
    "low",
    "service difference",
)
DEVICE = Metric("device_s.mean", "Device time per step, mean", "ms", 1e3, "low", "device a step")
HOST = Metric("host_s.mean", "Host time per step, mean", "ms", 1e3, "low", "host a step")
DRAFTS = Metric("speculation.drafts", "Draft tokens", "", 1.0, "low", "drafts")
ACCEPTED = Metric(
    "speculation.accepted", "Accepted draft tokens", "", 1.0, "high", "accepted drafts"
)
ACCEPTANCE = Metric(
    "speculation.acceptance", "Accepted share of drafts", "%", 1e2, "high", "acceptance"
)
TOKENS_PER_DECODE = Metric(
    "speculation.tokens_per_decode",
    "Tokens of a decode row in a step, mean",
    "tokens",
    1.0,
    "high",
    "decode row",
)
SPECULATION = DRAFTS, ACCEPTED, ACCEPTANCE, TOKENS_PER_DECODE
TABLE = (
    THROUGHPUT,
    Metric(
        "steady_output_tokens_per_s", "Steady output throughput", "tokens/s", 1.0, "high", "steady"
    ),
    TTFT,
    TTFT_P99,
    ITL,
    ITL_P99,
    E2E,
    E2E_P99,
    GOODPUT,
    ATTAINMENT,
    Metric("steps", "Steps", "", 1.0, "low", "steps"),
    DEVICE,
    HOST,
    PADDING,
    FRAGMENTATION,
    PEAK_SLOTS,
    Metric("blocks_saved_share", "Blocks saved by sharing", "%", 1e2, "high", "saved by sharing"),
    Metric(
        "prefix_hit_share",
        "Tokens of admitted sequences found in the cache",
        "%",
        1e2,
        "high",
        "prefix hits",
    ),
    Metric("preemptions", "Preemptions", "", 1.0, "low", "preemptions"),
    *SPECULATION,
    JAIN,
    WORST_USER,
    SERVICE_DIFFERENCE,
)


class Range(NamedTuple):
    """A metric over the repeats of a point, in its shown unit."""

    middle: float  # the median, because one noisy minute changes a mean
    low: float
    high: float


class PointRow(NamedTuple):
    """One point of a sweep.

    swept: the swept values, by short names of their keys.
    values: by a metric's column; only metrics that at least one repeat has.
    samples: by a metric's column, the number of each repeat, in the shown unit.
    """

    label: str
    key: str
    swept: dict[str, Any]
    repeats: int
    values: dict[str, Range]
    samples: dict[str, dict[int, float]]

    def middle(self, metric: Metric) -> float:
        """The median over repeats; NaN if the point has no such value."""
        spread = self.values.get(metric.column)
        return math.nan if spread is None else spread.middle


class Axes(NamedTuple):
    """How the swept keys become a plot.

    x: the key on the x axis; None: points stand side by side.
    lines: points that have equal values of these keys make a line.
    facet: each value of this key has a plot; None: one plot has all lines.
    """

    x: str | None
    lines: tuple[str, ...]
    facet: str | None = None


def points(runs: Sequence[dict[str, Any]], metrics: Sequence[Metric] = TABLE) -> list[PointRow]:
    """The points with a successful run, in the order of `runs` (from store.read_runs), with the
    values of some metrics.
    """
    runs_of_points: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if not run["failed"]:
            runs_of_points.setdefault(run["point"], []).append(run)
    names = short_names(swept_keys(runs))
    rows = []
    for key, repeats in runs_of_points.items():
        summaries = {run["repeat"]: flatten(run["metrics"]) for run in repeats}
        samples = {}
        point_metrics = [
            *metrics,
            *class_metrics(summaries.values()),
            *_own_metrics(summaries.values()),
        ]
        for metric in point_metrics:
            numbers = {
                repeat: summary[metric.column] * metric.scale
                for repeat, summary in summaries.items()
                if summary.get(metric.column) is not None
            }
            if numbers:
                samples[metric.column] = numbers
        rows.append(
            PointRow(
                label=repeats[0]["label"],
                key=key,
                swept={names[path]: value for path, value in repeats[0]["swept"].items()},
                repeats=len(repeats),
                values={column: _range(numbers) for column, numbers in samples.items()},
                samples=samples,
            )
        )
    return rows


def _range(numbers: Mapping[int, float]) -> Range:
    values = numbers.values()
    return Range(statistics.median(values), min(values), max(values))


def find_metric(option: str, name: str, runs: Sequence[dict[str, Any]]) -> Metric:
    """A number of the summaries by its dotted name, with or without the unit of its seconds
    (`ttft_s.p99`, `ttft_p99`), or by its short name in the report (`goodput`).

    Raises:
        ValueError: no run has such a number; the message names the option and the numbers.
    """
    columns = {
        column: None
        for run in runs
        if not run["failed"]
        for column, value in flatten(run["metrics"]).items()
        if isinstance(value, (int, float))
    }
    metrics = {metric.column: metric for metric in (*TABLE, *class_metrics([columns]))}
    aliases = {column.replace("_s.", "_").replace(".", "_"): column for column in columns}
    aliases |= {metric.short.replace(" ", "_"): metric.column for metric in TABLE}
    column = name if name in columns else aliases.get(name, name)
    one_of(option, column, tuple(columns))
    quantity = column.split(".")[0]
    is_seconds = quantity.endswith("_s") and not quantity.endswith("_per_s")
    unit = "s" if is_seconds else ""
    return metrics.get(column) or Metric(column, column, unit, 1.0, "", column)


def class_metrics(summaries: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """The metrics of classes in some flattened summaries."""
    columns = dict.fromkeys(column for row in summaries for column in row)
    return [metric for metric in map(_class_metric, columns) if metric is not None]


def _class_metric(column: str) -> Metric | None:
    """The metric of a column such as "classes.chat.qoe"; None for columns that reports do not show."""
    section, _, class_column = column.partition(".")
    name, _, quantity = class_column.partition(".")
    if section != CLASSES:
        return None
    metrics = {
        "goodput.share": Metric(
            column,
            f"Requests of {name} that met its targets",
            "%",
            1e2,
            "high",
            f"{name} attainment",
        ),
        "qoe": Metric(column, f"Mean QoE of {name}", "", 1.0, "high", f"{name} QoE"),
        "ttft_s.p99": Metric(
            column, f"Time to first token of {name}, p99", "ms", 1e3, "low", f"{name} TTFT p99"
        ),
    }
    return metrics.get(quantity)


def _own_metrics(summaries: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """A user's own metrics in some flattened summaries."""
    columns = dict.fromkeys(column for row in summaries for column in row if column.startswith(OWN))
    return [_own_metric(column) for column in columns]


def _own_metric(column: str) -> Metric:
    name = column.removeprefix(OWN)
    return Metric(column, name, "", 1.0, "", name)  # nobody says whether more is better


def shown_metrics(rows: Sequence[PointRow]) -> list[Metric]:
    """The metrics that some point has: first the metrics of TABLE, then those of classes, and a
    user's own.
    """
    columns = dict.fromkeys(column for row in rows for column in row.values)
    metrics = [metric for metric in TABLE if metric.column in columns]
    metrics += class_metrics([columns])
    return metrics + [_own_metric(column) for column in columns if column.startswith(OWN)]


def short_keys(rows: Sequence[PointRow]) -> list[str]:
    """The short name of every swept key, in the order of the points."""
    return list(dict.fromkeys(key for row in rows for key in row.swept))


def choose_axes(rows: Sequence[PointRow], x: str | None = None, facet: str | None = None) -> Axes:
    """Block size on x and one line per token budget if they are swept; else the first numeric key
    on x.

    Args:
        x, facet: short names of swept keys that were chosen; None: not chosen.
    """

    def values(key: str) -> list[Any]:
        return [row.swept.get(key) for row in rows]

    varied_keys = [key for key in short_keys(rows) if len(set(map(repr, values(key)))) > 1]
    keys = [key for key in varied_keys if key != facet]
    if x is None:
        numeric = [key for key in keys if _all_numbers(values(key))]
        if not numeric:
            return Axes(None, tuple(keys), facet)
        x = "block_size" if "block_size" in numeric else numeric[0]
    line_keys = [key for key in keys if key != x]
    # the token budget first, the others in their order
    line_keys.sort(key=lambda key: key != "max_num_batched_tokens")
    return Axes(x, tuple(line_keys), facet)


def _all_numbers(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


class XAxis(NamedTuple):
    """The values of the x axis, in order.

    numeric: whether they are numbers. Other values stand side by side at 0, 1, 2, ...
    """

    values: tuple[Any, ...]
    numeric: bool

    def place(self, value: Any) -> float:
        return value if self.numeric else self.values.index(value)


def x_axis(rows: Sequence[PointRow], x: str) -> XAxis:
    """Numbers by size, other values in the order of the points."""
    by_text = {repr(row.swept.get(x)): row.swept.get(x) for row in rows}
    values: list[Any] = list(by_text.values())
    if _all_numbers(values):
        return XAxis(tuple(sorted(values)), numeric=True)
    return XAxis(tuple(values), numeric=False)


def lines(rows: Sequence[PointRow], axes: Axes) -> dict[str, list[PointRow]]:
    """The points of each line, ordered along x, by the line's name ("" when everything is one
    line).
    """
    by_line: dict[str, list[PointRow]] = {}
    x = axes.x
    ordered = list(rows)
    if x is not None:
        axis = x_axis(rows, x)
        ordered.sort(key=lambda row: axis.place(row.swept.get(x)))
    for row in ordered:
        name = ", ".join(f"{key}={value_text(row.swept.get(key))}" for key in axes.lines)
        by_line.setdefault(name, []).append(row)
    return by_line


def facets(rows: Sequence[PointRow], axes: Axes) -> dict[str, list[PointRow]]:
    """The points of each plot, by the end of its title: "key=value" ("" if one plot has all)."""
    if axes.facet is None:
        return {"": list(rows)}
    by_value: dict[str, list[PointRow]] = {}
    for row in rows:
        name = f"{axes.facet}={value_text(row.swept.get(axes.facet))}"
        by_value.setdefault(name, []).append(row)
    return by_value


def pareto(costs_and_gains: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, gain) that no other point dominates, in ascending order of both.

    A point dominates another if it costs no more, gains no less and is better in one of them. Equal
    points do not.
    """
    pairs = costs_and_gains
    front: list[int] = []
    for place in sorted(range(len(pairs)), key=lambda i: (pairs[i][0], -pairs[i][1])):
        last = pairs[front[-1]] if front else (-math.inf, -math.inf)
        if pairs[place][1] > last[1] or pairs[place] == last:
            front.append(place)
    return front


def highest(rows: Sequence[PointRow], metric: Metric) -> PointRow | None:
    """The point with the highest median, or None if no point has the number."""
    with_metric = [row for row in rows if metric.column in row.values]
    return max(with_metric, key=lambda row: row.middle(metric), default=None)


def widest_spread(rows: Sequence[PointRow], metric: Metric) -> float | None:
    """The widest range over repeats, as a share of its point's median; None if no point has two
    repeats.
    """
    spreads = [row.values.get(metric.column) for row in rows if row.repeats > 1]
    shares = [(spread.high - spread.low) / spread.middle for spread in spreads if spread]
    return max(shares, default=None)


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits, or more if its whole part has more.

    A whole number has no decimal point. A thin space is between thousands. "-" for None, NaN and
    infinity, "0" for what rounding leaves of a difference.
    """
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < NOISE:
        return "0"
    is_whole = value == round(value)
    places = 0 if is_whole else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}".replace(",", "\u2009")


def text_table(rows: Sequence[PointRow]) -> str:
    """The points as a small table for a terminal: medians, and the range over repeats of the
    throughput.
    """
    if not rows:
        return "no good run"
    ranges = [row.values[THROUGHPUT.column] for row in rows]
    columns = {
        "point": [row.label for row in rows],
        "output tokens/s": [
            f"{number(r.middle)} ({number(r.low)} to {number(r.high)})" for r in ranges
        ],
    }
    drafts = [
        metric
        for metric in (ACCEPTANCE, TOKENS_PER_DECODE)
        if any(metric.column in row.values for row in rows)
    ]
    metrics = shown_metrics(rows)
    attainments = [metric for metric in metrics if _is_attainment_of_class(metric.column)]
    users_metrics = [metric for metric in metrics if metric.column.startswith(OWN)]
    for metric in (TTFT, ITL, PADDING, FRAGMENTATION, *drafts, *attainments, *users_metrics):
        columns[f"{metric.short} {metric.unit}".strip()] = [
            number(row.middle(metric)) for row in rows
        ]
    return aligned(columns)


def _is_attainment_of_class(column: str) -> bool:
    return column.startswith(f"{CLASSES}.") and column.endswith(".goodput.share")


def aligned(columns: Mapping[str, Sequence[str]]) -> str:
    """Columns of text under their names, as lines for a terminal."""
    columns_with_names = [[name, *cells] for name, cells in columns.items()]
    widths = [max(map(len, column)) for column in columns_with_names]
    lines_of_text = zip(*columns_with_names, strict=True)
    padded_lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines_of_text
    )
    return "\n".join(line.rstrip() for line in padded_lines)
