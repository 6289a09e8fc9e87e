"""What a study finds: published numbers beside ours, whether they agree, and in words why where they do not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import bootstrap

from experiments import config
from experiments.config import Point
from experiments.drive import Measured, drive, measure
from experiments.simulate import SimulatedLLM
from experiments.workloads import build
from pagedjax.scheduler import SchedulerConfig
from pagedjax.types import StepResult


class Interval(NamedTuple):
    """A number and how sure we are of it: a 95 % interval of the mean over seeds, or the number alone."""

    low: float
    middle: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Of the mean over independent draws (bootstrap, bias-corrected; of fewer than three values their range)."""
    middle = statistics.fmean(values)
    if len(values) < 3 or max(values) == min(values):
        return Interval(min(values), middle, max(values))
    found = bootstrap((values,), statistics.fmean, vectorized=False, n_resamples=999, rng=0)
    low, high = found.confidence_interval
    return Interval(float(low), middle, float(high))


def exactly(value: float) -> Interval:
    """Of a number in which nothing is random."""
    return Interval(value, value, value)


class Claim(NamedTuple):
    """A published number and ours.

    published: a number or a range.
    factor: how far ours may be from it to agree: within [low / factor, high * factor].
    why: what explains a difference; said only where there is one.
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
        return self.published if isinstance(self.published, tuple) else (self.published, self.published)

    @property
    def ratio(self) -> float:
        """Ours over the nearest published number."""
        low, high = self.range
        nearest = min(max(self.ours.middle, low), high)
        return self.ours.middle / nearest

    @property
    def agrees(self) -> bool:
        low, high = self.range
        return low / self.factor <= self.ours.middle <= high * self.factor


class Findings(NamedTuple):
    """answer: sentences, the most important first. figures: SVG by file name. tables: markdown."""

    claims: list[Claim]
    answer: list[str]
    figures: Mapping[str, str] = {}
    tables: Sequence[str] = ()


Summary = dict[str, Any]


def simulated(
    file: Path, *overrides: str, repeats: int | None = None, also: Callable[[Point, Measured], None] | None = None
) -> list[tuple[Point, list[Summary]]]:
    """Every point of a config with its summaries, one for each repeat. In this process; nothing is written.

    Args:
        overrides: as --set of experiments.run.
        repeats: in place of the config's own.
        also: called with every measured run, for what a summary does not have.

    Raises:
        RuntimeError: a run that must not be used.
    """
    found = []
    for point in config.load(file, overrides):
        experiment = point.experiment
        assert experiment.simulate is not None, "studies measure real engines through experiments.run"
        llm = SimulatedLLM(experiment.simulate, experiment.engine_config, experiment.model)
        summaries = []
        for repeat in range(repeats or experiment.repeats):
            measured = measure(llm, point, repeat)
            if measured.failed:
                raise RuntimeError(f"{file.name}, {point.label}: {measured.failed}")
            summaries.append(measured.summary)
            if also is not None:
                also(point, measured)
        found.append((point, summaries))
    return found


def results_of(
    file: Path, *overrides: str, repeats: int | None = None
) -> list[tuple[Point, list[tuple[SchedulerConfig, list[StepResult]]]]]:
    """As `simulated`, but the steps themselves, with what the scheduler was told: for what no summary has."""
    found = []
    for point in config.load(file, overrides):
        experiment = point.experiment
        assert experiment.simulate is not None, "studies measure real engines through experiments.run"
        runs = []
        for repeat in range(repeats or experiment.repeats):
            llm = SimulatedLLM(experiment.simulate, experiment.engine_config, experiment.model)
            seed = experiment.seed + (repeat if experiment.reseed else 0)
            vocabulary, encode = llm.tokenizer.vocab_size, llm.tokenizer.encode
            items = build(experiment.workload, point.content, seed, vocabulary, encode).items
            engine = llm.engine
            _, results = drive(engine, items, experiment.sampling, engine.clock, engine.sleep)
            runs.append((engine.state.config, results))
        found.append((point, runs))
    return found


def over(summaries: Iterable[Summary], path: str) -> Interval:
    """The interval of one number of several summaries, by its dotted name."""
    return interval([dig(summary, path) for summary in summaries])


def dig(summary: Summary, path: str) -> float:
    value: Any = summary
    for name in path.split("."):
        value = value[name]
    return float(value)


def ratios(above: Sequence[Summary], below: Sequence[Summary], path: str) -> Interval:
    """Of one number of two points, seed by seed: both drew the same requests."""
    return interval([dig(a, path) / dig(b, path) for a, b in zip(above, below, strict=True)])


def told(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, and no exponent."""
    if value == 0:
        return "0"
    return f"{float(f'{value:.{digits}g}'):,g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def _is_number(cell: str) -> bool:
    return cell.lstrip("-").replace(",", "").replace(".", "").isdigit()


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers to the right."""
    cells = [[told(c) if isinstance(c, float) else str(c) for c in row] for row in rows]
    right = [
        all(c.lstrip("-").replace(",", "").replace(".", "").isdigit() for c in column)
        for column in zip(*cells, strict=True)
    ]
    marks = ["---:" if number else "---" for number in right]
    lines = [head, marks, *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
