"""The result of a study: published numbers and ours, whether they agree, and the reason if they do
not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from experiments.core import config, engines
from experiments.core.config import Point
from experiments.core.drive import Measured, drive, measure
from experiments.core.workloads import build
from experiments.simulation.simulate import SimulatedLLM
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import StepResult


class Interval(NamedTuple):
    """A number and its uncertainty.

    kind: "interval" contains the mean of independent draws with 95 %, under the assumptions of
        Student's t; "range" is from the lowest to the highest of several scenarios, or of repeats
        that are not independent.
    n: the number of values; None if the number is not a mean.
    """

    low: float
    middle: float
    high: float
    kind: Literal["interval", "range"] = "interval"
    n: int | None = None


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of independent draws, by Student's t.

    It is computed on logarithms if all values are above zero (compare.py): then the middle is the
    geometric mean. A bootstrap of a few values is too narrow: with three values, its
    95 % interval covers three quarters. One value has no interval.
    """
    n = len(values)
    positive = min(values) > 0
    if max(values) == min(values):
        return Interval(values[0], values[0], values[0], n=n)
    numbers = np.log(values) if positive else np.array(values, np.float64)
    reach = stats.t.ppf(0.975, n - 1) * numbers.std(ddof=1) / math.sqrt(n)
    ends = [float(numbers.mean() + side) for side in (-reach, 0.0, reach)]
    if positive:
        ends = [math.exp(min(end, 700.0)) for end in ends]  # avoids overflow
    low, middle, high = ends
    return Interval(low, middle, high, n=n)


def span(values: Sequence[float]) -> Interval:
    """The range of scenarios, with their mean."""
    return Interval(min(values), statistics.fmean(values), max(values), "range", len(values))


def exactly(value: float) -> Interval:
    """The interval of a number without randomness."""
    return Interval(value, value, value)


class Claim(NamedTuple):
    """A published number and ours.

    published: a number or a range.
    factor: our number agrees if it is within [low / factor, high * factor].
    why: the reason of a difference; shown only if there is a difference.
    """

    source: str
    what: str
    published: float | tuple[float, float]
    ours: Interval
    factor: float = 1.1
    unit: str = ""
    why: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest published number."""
        if isinstance(self.published, tuple):
            return self.published
        return self.published, self.published

    @property
    def ratio(self) -> float | None:
        """Ours over the nearest published number; None if that is zero."""
        low, high = self.range
        nearest = min(max(self.ours.middle, low), high)
        return self.ours.middle / nearest if nearest else None

    @property
    def agrees(self) -> bool:
        low, high = self.range
        return low / self.factor <= self.ours.middle <= high * self.factor


class NoTraces(ValueError):
    """The folder of --traces does not have the recorded files of a study."""


def recorded_file(traces: Path, pattern: str, source: str) -> Path:
    """The first file of a folder whose name fits a pattern such as `*conv*.csv`.

    Args:
        source: the sentence that says which files to fetch, and where they are.

    Raises:
        NoTraces: the folder has no such file.
    """
    files = sorted(traces.glob(pattern))
    if not files:
        raise NoTraces(f"there is no {pattern} in the folder of --traces. {source}")
    return files[0]


class Findings(NamedTuple):
    """answer: sentences, the most important first. figures: SVG by file name. tables: Markdown."""

    claims: list[Claim]
    answer: list[str]
    figures: Mapping[str, str] = {}
    tables: Sequence[str] = ()


Summary = dict[str, Any]


def simulated(
    file: Path,
    *overrides: str,
    repeats: int | None = None,
    on_run: Callable[[Point, Measured], None] | None = None,
) -> list[tuple[Point, list[Summary]]]:
    """Run every point of a config in this process. Nothing is written.

    Returns the points, each with its summaries, one for each repeat.

    Args:
        overrides: like --set of experiments.run.
        repeats: replaces the config's repeats.
        on_run: called with every run, for values that a summary does not have.

    Raises:
        RuntimeError: a run failed.
    """
    points = []
    for point in config.load(file, overrides):
        experiment = point.experiment
        assert experiment.simulate is not None, (
            "studies measure real engines through experiments.run"
        )
        llm = engines.simulated_llm(experiment)
        summaries = []
        for repeat in range(repeats or experiment.repeats):
            measured = measure(llm, point, repeat)
            if measured.failed:
                raise RuntimeError(f"{file.name}, {point.label}: {measured.failed}")
            summaries.append(measured.summary)
            if on_run is not None:
                on_run(point, measured)
        points.append((point, summaries))
    return points


def results_of(
    file: Path, *overrides: str, repeats: int | None = None
) -> list[tuple[Point, list[tuple[SchedulerConfig, list[StepResult]]]]]:
    """Run every point of a config in this process, like `simulated`.

    Returns the points, each with the scheduler's config and the steps of every repeat, for values
    that no summary has.
    """
    points = []
    for point in config.load(file, overrides):
        experiment = point.experiment
        assert experiment.simulate is not None, (
            "studies measure real engines through experiments.run"
        )
        assert experiment.num_replicas == 1, "`simulated` measures several engines"
        runs = []
        for repeat in range(repeats or experiment.repeats):
            llm = SimulatedLLM(experiment.simulate, experiment.engine_config, experiment.model)
            seed = experiment.seed + (repeat if experiment.reseed else 0)
            vocabulary = llm.tokenizer.vocab_size
            encode = llm.tokenizer.encode
            workload = build(experiment.workload, point.content, seed, vocabulary, encode)
            engine = llm.engine
            _, results = drive(
                engine,
                workload.items,
                experiment.sampling,
                engine.clock,
                engine.sleep,
                workload.clients,
            )
            runs.append((engine.scheduler_state.config, results))
        points.append((point, runs))
    return points


def over(summaries: Iterable[Summary], path: str) -> Interval:
    """The interval of one number of several summaries. path: the number's dotted name."""
    return interval([dig(summary, path) for summary in summaries])


def dig(summary: Summary, path: str) -> float:
    """A number of a summary. path: the number's dotted name."""
    value: Any = summary
    for name in path.split("."):
        value = value[name]
    return float(value)


def ratios(above: Sequence[Summary], below: Sequence[Summary], path: str) -> Interval | None:
    """The interval of the ratio of one number of two points. Ratios are of the same seed, so of
    equal requests. None if a number of `below` is zero.
    """
    pairs = [(dig(a, path), dig(b, path)) for a, b in zip(above, below, strict=True)]
    return interval([a / b for a, b in pairs]) if all(b for _, b in pairs) else None


def times(ratio: float | None) -> str:
    """A ratio as text for a table."""
    return "none" if ratio is None else f"{ratio:.2f}"


def rounded(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits."""
    if value == 0:
        return "0"
    return f"{float(f'{value:.{digits}g}'):,g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def _is_number(cell: str) -> bool:
    return cell.lstrip("-").replace(",", "").replace(".", "").isdigit()


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers are aligned right."""
    cells = [
        [rounded(cell) if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    has_numbers = [all(map(_is_number, column)) for column in zip(*cells, strict=True)]
    marks = ["---:" if numbers else "---" for numbers in has_numbers]
    lines = [head, marks, *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
