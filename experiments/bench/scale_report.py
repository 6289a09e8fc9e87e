"""The results of `experiments.bench.scale` as a section of experiments/results/README.md."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import markdown
from experiments.bench.scale_calculated import DTYPE, CalculatedStep, Rates, roofline
from pagedjax.device import memory

UNITS = {  # factor -> the unit of its growth: its size, and its name
    "sequences": (1, "per sequence"),
    "context": (1, "per token"),
    "layers": (1, "per layer"),
    "vocabulary": (1000, "per 1,000 tokens"),
}


class Line(NamedTuple):
    """y = start + slope * x."""

    start: float
    slope: float
    largest_error: float  # as a share of y


def line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line with the least squares of relative errors, so that small values count as much as
    large ones.
    """
    x = np.asarray(xs, float)
    y = np.asarray(ys, float)
    columns = np.stack([1 / y, x / y], axis=1)
    start, slope = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0].tolist()
    return Line(start, slope, float(np.abs((start + slope * x) / y - 1).max()))


def report(figures: Mapping[str, Any]) -> str:
    """A section of experiments/results/README.md: each factor's table, and its growth in words."""
    rates = Rates(*(float(np.percentile(figures["rates"][name], 90)) for name in Rates._fields))
    factors = {
        name: [medians(point, rates) for point in points]
        for name, points in figures["factors"].items()
    }
    parts = [heading(figures), conditions(figures, rates)]
    for name, points in factors.items():
        base_values = ", ".join(
            f"{base_name} {base_value:,}"
            for base_name, base_value in figures["base"].items()
            if base_name != name
        )
        parts += [
            f"**{name.capitalize()}** ({base_values}):",
            table(name, points),
            growth(name, points),
        ]
    return "\n\n".join(parts) + "\n"


def medians(point: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """A point with one time of each kind: of the step, of the host, and the calculated one."""
    on_paper = 1e3 * roofline(CalculatedStep(**point["paper"]), rates)
    return {
        **point,
        **{name: statistics.median(point[name]) for name in ("step_ms", "host_us")},
        "paper_ms": on_paper,
    }


COLUMNS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "products, GFLOP": lambda p: p["paper"]["products"] / 1e9,
    "attention, GFLOP": lambda p: p["paper"]["attention"] / 1e9,
    "weights, MiB": lambda p: p["paper"]["weights"] / memory.MIB,
    "keys and values read, MiB": lambda p: p["paper"]["kv_read"] / memory.MIB,
    "paper, ms": lambda p: p["paper_ms"],
    "step, ms": lambda p: p["step_ms"],
    "step / paper": lambda p: p["step_ms"] / p["paper_ms"],
    "host, us": lambda p: p["host_us"],
    "cache, MiB": lambda p: p["paper"]["cache"] / memory.MIB,
    "activations, MiB": lambda p: p["paper"]["activations"] / memory.MIB,
    "as compiled, MiB": lambda p: p["compiled"]["activations"] / memory.MIB,
}


def table(factor: str, points: Sequence[Mapping[str, Any]]) -> str:
    rows = (
        (f"{point[factor]:,}", *(number(value(point)) for value in COLUMNS.values()))
        for point in points
    )
    return markdown((factor, *COLUMNS), rows, texts=0)


def growth(factor: str, points: Sequence[Mapping[str, Any]]) -> str:
    """Each quantity of a table as a line over the factor, with its largest error, in words."""
    size, unit = UNITS[factor]
    xs = [point[factor] / size for point in points]

    def growth_text(column: str, name: str, quantity: str) -> str:
        ys = [COLUMNS[column](point) for point in points]
        if max(ys) < 1.001 * min(ys):
            return f"{name} {number(ys[0])} {quantity} everywhere"
        start, slope, largest_error = line(xs, ys)
        sign = "-" if slope < 0 else "+"
        error_text = f" ({largest_error:.0%} off at most)" if largest_error >= 0.005 else ""
        return f"{name} {number(start)} {quantity} {sign} {number(abs(slope))} {unit}{error_text}"

    def range_text(values: Sequence[float], unit: str = "") -> str:
        return " to ".join(dict.fromkeys([number(min(values)), number(max(values))])) + unit

    ratios = [COLUMNS["step / paper"](point) for point in points]
    hosts = [COLUMNS["host, us"](point) for point in points]
    planned = [point["compiled"]["activations"] / point["paper"]["activations"] for point in points]
    times = [
        growth_text("step, ms", "Step", "ms"),
        growth_text("paper, ms", "on paper", "ms"),
        f"step / paper {range_text(ratios)}",
    ]
    sizes = [
        growth_text("weights, MiB", "Weights", "MiB"),
        growth_text("cache, MiB", "cache", "MiB"),
    ]
    sizes += [
        growth_text("as compiled, MiB", "activations as compiled", "MiB"),
        f"{range_text(planned)} times those on paper",
    ]
    host = [growth_text("host, us", "Host", "us"), range_text(hosts, " us in all")]
    return wrapped(*("; ".join(parts) + "." for parts in (times, host, sizes)))


def heading(figures: Mapping[str, Any]) -> str:
    machine = figures["where"]
    commit = (machine["commit"] or "unknown")[:7] + (" with changes" if machine["dirty"] else "")
    return f"## cpu/scale: `{figures['command']}`, {figures['date']}, commit {commit}"


def conditions(figures: Mapping[str, Any], rates: Rates) -> str:
    """The conditions of the measurement, and the noise of the machine."""
    machine = figures["where"]
    body = figures["body"]
    points = [
        point for points_of_factor in figures["factors"].values() for point in points_of_factor
    ]
    spread = [spread_of(point["step_ms"]) for point in points]
    largest_difference = max(abs(difference(point)) for point in points)
    return wrapped(
        f"{machine['cpu']['usable_cores']} cores ({machine['cpu']['model']}), {DTYPE}, JAX "
        f"{machine['versions']['jax']},",
        f"Python {machine['python']}, attention {points[0]['attention_impl']!r}; random weights, "
        "hidden",
        f"{body['hidden_size']}, intermediate {body['intermediate_size']}, "
        f"{body['num_attention_heads']} heads of",
        f"queries and {body['num_key_value_heads']} of keys, tied embeddings; medians of "
        f"{figures['steps']} steps.",
        f"In its best tenth the device read {rates.read / 1e9:.1f} GB/s "
        f"({rates_text(figures['rates']['read'])} in all) and",
        f"multiplied {rates.multiply / 1e9:.0f} GFLOP/s ({rates_text(figures['rates']['multiply'])}). "
        "The middle half of a",
        f"point's steps spans {statistics.median(spread):.0%} of their median, {max(spread):.0%} "
        "at the worst point;",
        f"other processes took {figures['elsewhere'] or 0:.0%} of the processor time, and the "
        "hypervisor",
        f"{figures['stolen'] or 0:.1%}, {max(point['stolen'] for point in points):.1%} at the "
        "worst point.",
        "The compiler's count of the step's arguments is the paper's weights, cache and inputs,",
        "to the byte."
        if largest_difference == 0
        else f"but for {largest_difference:,} bytes at most.",
    )


def wrapped(*parts: str) -> str:
    """The parts as one paragraph, in lines of up to 120 characters."""
    return textwrap.fill(" ".join(parts), 120, break_on_hyphens=False)


def number(value: float) -> str:
    """The number with three digits, or with its whole integer part."""
    if abs(value) < 5e-6:
        return "0"
    value = float(f"{value:.9g}")  # the last bits of a line differ between versions of numpy
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 5)}f}"


def spread_of(times: Sequence[float]) -> float:
    """The interquartile range as a share of the median."""
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    return (high - low) / middle


def rates_text(rates: Sequence[float]) -> str:
    return f"{min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f}"


def difference(point: Mapping[str, Any]) -> int:
    """The compiler's bytes of arguments minus the calculated ones; 0 if it does not report them."""
    counted = point["compiled"]["arguments"]
    p = CalculatedStep(**point["paper"])
    return 0 if counted is None else counted - p.weights - p.cache - p.inputs
