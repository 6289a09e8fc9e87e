"""010: runs predicted by a simulation against the same runs measured, after Vidur (Agrawal et al.
2024).
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from experiments.analysis import figures
from experiments.bench import lower_bounds
from experiments.bench.harness import timed
from experiments.core import config
from experiments.core.config import Point
from experiments.core.drive import Measured, measure
from experiments.core.engines import Engines, Run
from experiments.core.execution import run_files
from experiments.simulation import cost
from experiments.simulation.cost import Chip, Roofline, StepTime
from experiments.simulation.simulate import SimulatedEngine, SimulatedLLM
from experiments.studies.findings import Claim, Findings, Summary, dig, markdown, rounded, span
from pagedjax import LLM, load_model
from pagedjax.device.models import Model
from pagedjax.weights.locate import open_checkpoint

QUESTION = (
    "How well does a simulation predict runs that were not measured, and how well does a "
    "machine repeat itself?"
)
PAPER = "Vidur (arXiv 2405.05465)"
WITHIN = (0.0, 9.0)  # per cent
METRICS = {
    "output tokens/s": "output_tokens_per_s",
    "first token, p50, s": "ttft_s.p50",
    "between tokens, p50, s": "itl_s.p50",
    "between tokens, p99, s": "itl_s.p99",
    "duration, s": "duration_s",
}
PRODUCT_ROWS = 256  # rows of the products that measure the rate of arithmetic: the budget of a step
FITTED = "fitted"
ROOFLINE = "roofline"
FIT = "all at once"  # the run whose steps are fitted


class Compared(NamedTuple):
    """The summaries of the repeats of one run: measured, and predicted in two ways."""

    measured: list[Summary]
    fitted: list[Summary]
    roofline: list[Summary]

    def predicted(self, method: str) -> list[Summary]:
        return self.fitted if method == FITTED else self.roofline


def cases(rate: float, quick: bool) -> dict[str, tuple[str, ...]]:
    """Runs that differ from the fitted run in one key: their overrides, by name.

    `rate`: requests/s that the fitted run served.
    """

    def poisson(share: float) -> str:
        return f"workload.arrivals={{process: poisson, rate: {share * rate:.3f}}}"

    overrides_by_name = {
        "four fifths of the load": (poisson(0.8),),
        "budget of 64": ("engine.max_num_batched_tokens=64", "engine.token_buckets=[16, 64]"),
    }
    if not quick:
        overrides_by_name |= {
            "other requests": ("seed=1",),
            "half the load": (poisson(0.5),),
            "blocks of 128": ("engine.block_size=128",),
        }
    return overrides_by_name


def point_of(file: Path, *overrides: str) -> Point:
    (point,) = config.load(file, overrides)
    return point


def run_point(engines: Engines, point: Point, repeat: int) -> Measured:
    """Run one repeat of a point. Raises RuntimeError if the run failed."""
    result = measure(engines.get(point.experiment), point, repeat)
    if result.failed:
        raise RuntimeError(f"{point.label}: {result.failed}")
    return result


def predict(
    file: Path,
    overrides: Sequence[str],
    folder: Path,
    repeat: int,
    step_time: StepTime | None = None,
) -> Summary:
    """Simulate a run, by a fit to the steps in `folder`, or by another model of step times.

    Returns the summary.
    """
    point = point_of(file, *overrides, f"simulate={{fit: {folder}}}")
    experiment = point.experiment
    simulate = point.experiment.simulate
    assert simulate is not None, "the override sets it"
    llm = SimulatedLLM(simulate, experiment.engine_config, experiment.model)
    if step_time is not None:
        vocabulary = llm.tokenizer.vocab_size
        llm.engine = SimulatedEngine(
            llm.engine.config, step_time, vocab_size=vocabulary, simulate=simulate
        )
    return measure(llm, point, repeat).summary


def rooflines(model: Model, name: str) -> Callable[[], Roofline]:
    """Compile two programs. Returns a function that measures the roofline of this device with them.

    The roofline has the bytes/s of reading all weights once, and the operations/s of products with
    them.
    """
    probes = lower_bounds.probes(model, PRODUCT_ROWS).values()
    number_bytes = jnp.dtype(model.dtype).itemsize
    shape = cost.shape_of(open_checkpoint(name).config, number_bytes, number_bytes)

    def measure_roofline() -> Roofline:
        bandwidth, rate = [probe.amount / seconds(probe.run) for probe in probes]
        return Roofline(shape, Chip(bandwidth, rate, memory=0.0, launch=0.0))

    return measure_roofline


def seconds(work: lower_bounds.Run) -> float:
    """The median of three times, after a first call that may compile."""
    _, *times = [timed(work) for _ in range(4)]
    return statistics.median(times)


def compare(
    file: Path,
    overrides: Sequence[str],
    repeats: int,
    quick: bool,
    *,
    only: Sequence[str] | None = None,
    keep: Callable[[Mapping[str, Compared], float], None] = lambda runs, error: None,
) -> tuple[dict[str, Compared], float]:
    """Measure and predict every run `repeats` times, in turn, because machines drift.

    Args:
        overrides: overrides of all runs.
        only: names of `cases`, if not all of them are measured beside the fitted run.
        keep: called with the result so far after each repeat.

    Returns:
        The runs, and the median difference in per cent between the steps of the fitted runs and the
        fit. The prediction of a repeat uses the fitted run of that repeat only.
    """
    engines = Engines(3, partial(load_model, progress=False), partial(LLM, progress=False))
    first = point_of(file, *overrides)
    engines.get(first.experiment)  # compiles and allocates before the rate is measured
    rate = run_point(engines, first, 0).summary["requests_per_s"]
    runs = {FIT: tuple(overrides)}
    for name, case in cases(rate, quick).items():
        if only is None or name in only:
            runs[name] = (*overrides, *case)
    roofline = rooflines(engines.get(first.experiment).engine.model, first.experiment.model)
    results = {name: Compared([], [], []) for name in runs}
    fit_errors = []
    with tempfile.TemporaryDirectory() as place:
        for repeat in range(repeats):
            folder = Path(place) / str(repeat)
            folder.mkdir()
            fit_errors.append(compare_once(engines, file, runs, repeat, folder, roofline, results))
            keep(results, statistics.median(fit_errors))
    return results, statistics.median(fit_errors)


def compare_once(
    engines: Engines,
    file: Path,
    runs: Mapping[str, Sequence[str]],
    repeat: int,
    folder: Path,
    roofline: Callable[[], Roofline],
    results: Mapping[str, Compared],
) -> float:
    """Measure and predict one repeat of every run, and append the summaries to `results`.

    Args:
        runs: the overrides of each run, by name; the fitted run is the first.
        folder: where the steps of the fitted run are written.

    Returns:
        The difference in per cent between the steps of the fitted run and the fit.
    """
    llm = engines.get(point_of(file, *runs[FIT]).experiment)
    step_time = roofline()
    fit_error = math.nan
    for name, overrides in runs.items():
        point = point_of(file, *overrides)
        result = run_point(engines, point, repeat)
        if name == FIT:
            steps = run_files(Run(point, repeat, 0), llm, result)[cost.STEPS]
            (folder / cost.STEPS).write_text(steps, encoding="utf-8")
            fit_error = 100 * cost.fit(cost.read_steps(steps)).error
        results[name].measured.append(result.summary)
        results[name].fitted.append(predict(file, overrides, folder, repeat))
        results[name].roofline.append(predict(file, overrides, folder, repeat, step_time))
    return fit_error


def errors(guesses: Sequence[Summary], truth: Sequence[Summary], path: str) -> list[float]:
    """The absolute error of each guess in per cent."""
    pairs = zip(guesses, truth, strict=True)
    return [100 * abs(dig(guess, path) / dig(true, path) - 1) for guess, true in pairs]


def held_out(results: Mapping[str, Compared], method: str, path: str) -> list[float]:
    """Errors of all runs and repeats except the fitted run."""
    return [
        error
        for name, runs in results.items()
        if name != FIT
        for error in errors(runs.predicted(method), runs.measured, path)
    ]


def repeat_differences(results: Mapping[str, Compared], path: str) -> list[float]:
    """The difference of each repeat of a run from the repeat before it, in per cent.

    It is a lower bound of prediction errors.
    """
    pairs = [
        pair for name, runs in results.items() if name != FIT for pair in pairwise(runs.measured)
    ]
    return [error for before, after in pairs for error in errors([before], [after], path)]


def reason(error: float, repeat_error: float, fit_error: float) -> str:
    """The reason of a larger error than the published one, given the machine's own variation."""
    if error <= 1.5 * repeat_error:
        return f"this machine's own repeats of a run differ by {repeat_error:.1f} %"
    return (
        f"repeats of a run differ by {repeat_error:.1f} % here, and steps from the fit to them by "
        f"{fit_error:.0f} % "
        "(median), where every simulated step takes the time that is typical of its size"
    )


def run(folder: Path, quick: bool) -> Findings:
    """Measure and predict the runs of config.yaml in `folder`.

    `quick`: fewer requests, repeats and runs.
    """
    file = folder / "config.yaml"
    overrides = ("workload.count=12",) if quick else ()
    results, fit_error = compare(
        file, overrides, 2 if quick else point_of(file).experiment.repeats, quick
    )
    claims = []
    rows = []
    for metric, path in METRICS.items():
        error_range = span(held_out(results, FITTED, path))
        repeat_error = statistics.fmean(repeat_differences(results, path))
        quantity = f"{metric.removesuffix(', s')}: error of a simulation fitted to another run"
        claims.append(
            Claim(
                PAPER,
                quantity,
                WITHIN,
                error_range,
                1.0,
                "%",
                reason(error_range.middle, repeat_error, fit_error),
            )
        )
        fitted_run_error = statistics.fmean(
            errors(results[FIT].fitted, results[FIT].measured, path)
        )
        roofline_error = statistics.fmean(held_out(results, ROOFLINE, path))
        rows.append(
            (
                metric.removesuffix(", s"),
                error_range.middle,
                fitted_run_error,
                roofline_error,
                repeat_error,
            )
        )
    head = (
        "mean error, %",
        "fitted to another run",
        "the fitted run itself",
        "roofline alone",
        "a repeat of the run",
    )
    tables = [
        markdown(head, rows),
        markdown(("run", "", "measured", "fitted", "roofline"), side_by_side(results)),
    ]
    rate = rows[0]
    gap = rows[3]
    answer = [
        f"Fitted to the steps of one run, a simulation is off by {rate[1]:.1f} % in output "
        f"tokens/s and by {gap[1]:.1f} % in the 99th percentile between tokens, over "
        f"{len(results) - 1} other runs; the same run again is off by {rate[4]:.1f} and "
        f"{gap[4]:.1f} %.",
        f"A roofline that knows only the device's bandwidth and arithmetic is off by {rate[3]:.0f} "
        f"and {gap[3]:.0f} %: it is a bound, which does not include the losses of a step.",
    ]
    return Findings(claims, answer, {"predicted.svg": figure(results)}, tables)


def side_by_side(results: Mapping[str, Compared]) -> list[tuple[str, ...]]:
    """Means over repeats, and the range of the measured values."""
    rows = []
    for name, runs in results.items():
        for metric, path in METRICS.items():
            measured = [dig(summary, path) for summary in runs.measured]
            by_fit = [dig(summary, path) for summary in runs.fitted]
            by_roofline = [dig(summary, path) for summary in runs.roofline]
            spread = (
                f"{rounded(statistics.fmean(measured))} ({rounded(min(measured))} to "
                f"{rounded(max(measured))})"
            )
            rows.append(
                (
                    name,
                    metric,
                    spread,
                    rounded(statistics.fmean(by_fit)),
                    rounded(statistics.fmean(by_roofline)),
                )
            )
    return rows


def figure(results: Mapping[str, Compared]) -> str:
    """Predicted over measured values, one point for each run except the fitted run."""

    def mean(summaries: Sequence[Summary], path: str) -> float:
        return statistics.fmean(dig(summary, path) for summary in summaries)

    panels = {}
    for metric in ("output tokens/s", "first token, p50, s", "between tokens, p99, s"):
        path = METRICS[metric]
        runs = [compared for name, compared in results.items() if name != FIT]
        measured = sorted(mean(run.measured, path) for run in runs)
        panels[metric] = {
            FITTED: sorted((mean(run.measured, path), mean(run.fitted, path)) for run in runs),
            ROOFLINE: sorted((mean(run.measured, path), mean(run.roofline, path)) for run in runs),
            "as measured": [(x, x) for x in (measured[0], measured[-1])],
        }
    return figures.curves(panels, "measured", "predicted", dashed=("as measured",))
