"""The two sides of a comparison: the runs of two points, whether they are paired, and a metric of
both.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.analysis.ratios import (
    LATENCIES,
    NOISE,
    Comparison,
    comparison,
    effect_of_requests,
    effect_of_runs,
    median,
)
from experiments.analysis.sweep_points import OWN, SPECULATION, find_metric
from experiments.core import store
from experiments.core.records import RequestRecord
from experiments.core.store import flatten
from experiments.simulation.cost import SIMULATED

METRICS = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "itl_s.p50", "itl_s.p99", "e2e_s.p50")
DRAFTS = tuple(metric.column for metric in SPECULATION)  # of points with speculation
# Percentiles over tokens and steps are of rounded numbers in a run that keeps sums
# (core/totals.py).
ROUNDED = ("itl_s", "step_s", "device_s", "host_s", "sequences_per_step")
ROUNDING = 1 / 1024
# what runs may differ in beside their config; source: the hash of the code, committed or not
ORIGIN = ("device", "commit", "source", "jax")


class Side(NamedTuple):
    """The successful runs of one point, in order of repeat."""

    label: str
    runs: tuple[dict[str, Any], ...]

    @property
    def repeats(self) -> list[int]:
        return [run["repeat"] for run in self.runs]


def why_unpaired(a: Side, b: Side) -> str | None:
    """Why the runs of two points are not paired; None if they are.

    One run each is always a pair.
    """
    if len(a.runs) == len(b.runs) == 1:
        return workload_difference(a.runs[0], b.runs[0])
    for name, side in (("A", a), ("B", b)):
        if len(set(side.repeats)) < len(side.runs):
            return f"{name} has a repeat twice"
    if a.repeats != b.repeats:
        return f"A has repeats {_list_text(a.repeats)}, B {_list_text(b.repeats)}"
    for run_a, run_b in zip(a.runs, b.runs, strict=True):
        difference = workload_difference(run_a, run_b)
        if difference:
            return difference
    return None


def workload_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """The difference between the workloads of two runs, in total or in a request; None if they are
    the same.
    """
    totals_b = request_totals(b["workload"])
    totals_a = request_totals(a["workload"])
    differ = [key for key, value in totals_a.items() if totals_b.get(key) != value]
    if differ:
        return f"the workloads of repeat {a['repeat']} differ in {', '.join(differ)}"
    try:
        inputs_a = _inputs_of_run(a)
        inputs_b = _inputs_of_run(b)
    except ValueError as error:  # a folder of results may have the summaries only
        return f"whether repeat {a['repeat']} had the same requests is not known: {error}"
    for i, (request_a, request_b) in enumerate(zip(inputs_a, inputs_b, strict=True)):
        for name, value in request_a.items():
            if request_b[name] != value:
                return (
                    f"the workloads of repeat {a['repeat']} differ in {name} of request {i}: "
                    f"{value}, {request_b[name]}"
                )
    return None


def request_totals(workload: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a summary's workload says of the requests. Predictions are no part of a request."""
    return {key: value for key, value in (workload or {}).items() if key != "predicted_error"}


def _inputs_of_run(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The inputs of the requests of a run, from its folder."""
    return [_inputs(request) for request in store.read_requests(Path(run["run"]))]


def _inputs(request: RequestRecord) -> dict[str, Any]:
    """The input of a request: its record without the results."""
    results = ("request_id", "first_scheduled", "replica")
    inputs = {key: value for key, value in request._asdict().items() if key not in results}
    return {**inputs, "branches": len(request.branches)}


def origin_notes(a: Side, b: Side) -> list[str]:
    """Notes on simulated sides, and on differences of device, code and version of JAX."""
    origins_a = _origins(a)
    origins_b = _origins(b)
    devices = dict.fromkeys([*origins_a["device"], *origins_b["device"]])
    simulated = [device for device in devices if device.startswith(SIMULATED)]
    calculated = [f"{' and '.join(simulated)}: every time is calculated"] if simulated else []
    return calculated + [
        f"{key} differs: A {' and '.join(origins_a[key])}, B {' and '.join(origins_b[key])}"
        for key in ORIGIN
        if origins_a[key] != origins_b[key]
    ]


def _origins(side: Side) -> dict[str, list[str]]:
    """The different values of each key of ORIGIN over the runs of a side, sorted."""
    origins = [_origin(run) for run in side.runs]
    return {key: sorted({origin[key] for origin in origins}) for key in ORIGIN}


def _origin(run: dict[str, Any]) -> dict[str, str]:
    """The device and the code that made a run; "not known" for a value that the run does not have."""
    values = {key: run.get(key) for key in ORIGIN}
    file = Path(run["run"]) / "env.json"
    if not values["jax"] and file.is_file():  # summaries of earlier versions do not have it
        env = json.loads(file.read_text(encoding="utf-8"))
        values["jax"] = env.get("versions", {}).get("jax")
    return {key: str(value or "not known") for key, value in values.items()}


def _list_text(repeats: Sequence[int]) -> str:
    return ", ".join(map(str, repeats))


def choose_metrics(metrics: Sequence[str] | None, *sides: Side) -> tuple[str, ...]:
    """The metrics to compare: those of --metric, or METRICS, with drafts if a side speculates.

    Raises:
        ValueError: no run has such a number; the message names the existing ones.
    """
    if metrics:
        runs = [run for side in sides for run in side.runs]
        return tuple(find_metric("--metric", name, runs).column for name in metrics)
    own_columns = _columns_of_all([_own_columns(side) for side in sides])
    return (*METRICS, *(DRAFTS if any(map(speculates, sides)) else ()), *own_columns)


def _own_columns(side: Side) -> list[str]:
    """The columns of a user's own metrics that all runs of a point have."""
    return _columns_of_all(
        [
            [column for column in flatten(run["metrics"]) if column.startswith(OWN)]
            for run in side.runs
        ]
    )


def _columns_of_all(lists: Sequence[Sequence[str]]) -> list[str]:
    """The columns that are in every list, in the order of the first one."""
    first, *_ = lists
    return [column for column in first if all(column in columns for columns in lists)]


def speculates(side: Side) -> bool:
    return any(map(run_speculates, side.runs))


def run_speculates(run: dict[str, Any]) -> bool:
    return "speculation" in run["metrics"]


def values_of(side: Side, metric: str) -> list[float]:
    """A metric in each run of a point that has a value."""
    values = [number_of(run, metric) for run in side.runs]
    return [value for value in values if value is not None]


def number_of(run: dict[str, Any], metric: str) -> float | None:
    """A metric of a run; None if the run has no such number, such as drafts without speculation."""
    if metric in DRAFTS and not run_speculates(run):
        return None
    value = flatten(run["metrics"]).get(metric)
    return None if value is None else float(value)


def compared(
    a: Side, b: Side, metric: str, *, unpaired_because: str | None, confidence: float
) -> Comparison:
    """The comparison of a metric of two points.

    Args:
        unpaired_because: why the runs are not paired; None if they are; see `why_unpaired`.
    """
    values_a = values_of(a, metric)
    values_b = values_of(b, metric)
    if not values_a or not values_b:
        return of_one_side(values_a, values_b)
    rounded = of_rounded(a, b, metric, values_a, values_b)
    if rounded is not None:
        return rounded
    if len(values_a) == len(values_b) == 1:
        effect = effect_of_runs(values_a, values_b, paired=True, confidence=confidence)
        result = comparison(effect, values_a, values_b)
        return result if unpaired_because else over_requests(result, a, b, metric, confidence)
    if min(len(values_a), len(values_b)) == 1:
        name = "A" if len(values_a) == 1 else "B"
        note = f"{name} has one run: {NOISE}"
        return Comparison(median(values_a), median(values_b), note=note)
    complete = len(values_a) == len(a.runs) and len(values_b) == len(b.runs)
    paired = complete and unpaired_because is None
    effect = effect_of_runs(values_a, values_b, paired=paired, confidence=confidence)
    return comparison(effect, values_a, values_b)


def of_one_side(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """The comparison of a number that one side or both do not have."""
    note = "only one side has this number" if a or b else "no run has this number"
    return Comparison(median(a), median(b), note=note)


def of_rounded(
    a: Side, b: Side, metric: str, values_a: Sequence[float], values_b: Sequence[float]
) -> Comparison | None:
    """The comparison of a percentile that one side or both have of rounded numbers, if their values
    cannot be compared; else None.
    """
    name, percentile = percentile_of(metric)
    if name not in ROUNDED or percentile is None:
        return None
    methods = {
        run["metrics"].get("percentile_method", "linear") for side in (a, b) for run in side.runs
    }
    medians = statistics.median(values_a), statistics.median(values_b)
    if len(methods) > 1:
        note = (
            "one side keeps sums, whose percentiles are of rounded numbers; compare two sides that "
            "keep the same"
        )
        return Comparison(*medians, note=note)
    low, high = sorted(medians)
    if methods != {"linear"} and high - low <= ROUNDING * high:
        note = "no difference is shown beyond the rounding of runs that keep sums"
        return Comparison(*medians, note=note)
    return None


def percentile_of(metric: str) -> tuple[str, int | None]:
    """The quantity of a metric, and which percentile of it the metric is, such as ("ttft_s", 99);
    None: the metric is no percentile.
    """
    name, _, percentile = metric.partition(".p")
    return name, int(percentile) if percentile.isdigit() else None


def over_requests(
    result: Comparison, a: Side, b: Side, metric: str, confidence: float
) -> Comparison:
    """The comparison of one pair of runs of the same requests, with an interval over the requests
    if it can be computed.
    """
    name, percentile = percentile_of(metric)
    if name not in LATENCIES or percentile is None:
        return result
    requests_a = store.read_requests(Path(a.runs[0]["run"]))
    requests_b = store.read_requests(Path(b.runs[0]["run"]))
    if name == "itl_s" and not all(request.has_gaps for request in (*requests_a, *requests_b)):
        return result
    effect, words = effect_of_requests(requests_a, requests_b, name, percentile, confidence)
    return result._replace(effect=effect or result.effect, note=f"{result.note}; {words}")
