"""The order of runs and the engines they share: weights are loaded once, repeats of different
points interleave.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from experiments.core.config import Experiment, Point
from experiments.core.pools import PooledLLM
from experiments.simulation.simulate import SimulatedLLM

# fields of `EngineConfig` that say how a model is loaded
LOAD_OPTIONS = ("dtype", "weight_dtype", "mesh", "devices", "model_family")


class PlacedPoint(NamedTuple):
    """A point, and its place in the sweep."""

    place: int
    point: Point


class Run(NamedTuple):
    """One measurement of a point. place: the point's place in the sweep."""

    point: Point
    repeat: int
    place: int


# the points that share an engine
EnginePoints = list[PlacedPoint]


def engine_key(experiment: Experiment) -> Hashable:
    """Points with equal keys share one engine.

    They differ in workload, sampling or repeats only.
    """
    engine = dataclasses.astuple(experiment.engine_config)
    # parameters of a user's own functions are mappings, which cannot be hashed
    sections = repr((experiment.simulate, experiment.pools))
    return experiment.model, sections, experiment.num_replicas, engine


def simulated_llm(experiment: Experiment) -> SimulatedLLM | PooledLLM:
    """The simulated engines of an experiment. Raises ValueError if it cannot be simulated."""
    if experiment.pools:
        return PooledLLM(experiment)
    assert experiment.simulate is not None, "a simulated experiment has the section"
    return SimulatedLLM(
        experiment.simulate, experiment.engine_config, experiment.model, experiment.num_replicas
    )


def weights_key(experiment: Experiment) -> tuple[Any, ...]:
    """Points with equal keys share one copy of the weights."""
    engine = experiment.engine
    return (experiment.model, *(getattr(engine, name) for name in LOAD_OPTIONS))


def plan_runs(points: Sequence[Point], alive: int) -> list[Run]:
    """All runs, the repeats of every point, in the order of measurement. At most `alive` engines
    exist at a time.

    Engines form groups of `alive`. Within a group, repeat 0 of every point comes before repeat 1 of
    any point, so a slow minute of the machine does not affect all repeats of one point. Odd repeats
    run in reverse order, so no point is always the first. No engine is built twice, and points with
    the same weights stay together.

    An engine that sizes its cache by the free memory (num_blocks is None) is the only one of its
    group: its size must not depend on other engines.
    """
    placed_points = [PlacedPoint(place, point) for place, point in enumerate(points)]
    by_weights: dict[Hashable, list[PlacedPoint]] = {}
    for placed in placed_points:
        by_weights.setdefault(weights_key(placed.point.experiment), []).append(placed)
    by_engine: dict[Hashable, EnginePoints] = {}
    for same_weights in by_weights.values():
        for placed in same_weights:
            by_engine.setdefault(engine_key(placed.point.experiment), []).append(placed)
    runs: list[Run] = []
    for group in _groups(list(by_engine.values()), alive):
        group_points = [placed for engine_points in group for placed in engine_points]
        for repeat in range(max(point.experiment.repeats for _, point in group_points)):
            ordered = group_points if repeat % 2 == 0 else group_points[::-1]
            runs += [
                Run(point, repeat, place)
                for place, point in ordered
                if repeat < point.experiment.repeats
            ]
    return runs


def _groups(engines: list[EnginePoints], alive: int) -> list[list[EnginePoints]]:
    """The groups of engines that are alive together: consecutive engines with the same weights, at
    most `alive`.
    """

    def kind(engine_points: EnginePoints) -> tuple[Any, bool]:
        experiment = engine_points[0].point.experiment
        return weights_key(experiment), experiment.engine_config.num_blocks is None

    groups = []
    for (_, is_sized_by_memory), members in groupby(engines, key=kind):
        same_kind = list(members)
        size = 1 if is_sized_by_memory else alive
        groups += [same_kind[i : i + size] for i in range(0, len(same_kind), size)]
    return groups


class Engines:
    """The engines that are alive.

    Dropping an engine frees its cache; weights stay while an engine uses them.
    """

    def __init__(
        self, alive: int, load_model: Callable[..., Any], make: Callable[..., Any]
    ) -> None:
        """Begin without an engine.

        Args:
            alive: the largest number of engines at a time.
            load_model: called as load_model(model, dtype=..., weight_dtype=..., ...).
            make: called as make(model=..., **fields of EngineConfig), with a result of
            `load_model`.
        """
        self._alive = alive
        self._load_model = load_model
        self._make = make
        self._weights_key: Hashable = None
        self._weights: Any = None  # the result of load_model; None: no weights are loaded
        self._engines: OrderedDict[Hashable, Any] = OrderedDict()
        self._broken: dict[Hashable, str] = {}
        self.startup_seconds: dict[Hashable, float] = {}

    def get(self, experiment: Experiment) -> Any:
        """The engine of `experiment`.

        If an engine cannot be built, later calls raise the same error at once. A simulated engine
        costs nothing and is tried again, so its error is the same in every process.
        """
        key = engine_key(experiment)
        if key in self._broken:
            raise RuntimeError(self._broken[key])
        if key not in self._engines:
            started = time.perf_counter()
            try:
                self._engines[key] = self._build(experiment)
            except Exception as error:
                if experiment.simulate is None:
                    # the exception itself would keep arrays alive
                    self._broken[key] = f"{type(error).__name__}: {error}"
                raise
            self.startup_seconds[key] = time.perf_counter() - started
        self._engines.move_to_end(key)
        return self._engines[key]

    def _build(self, experiment: Experiment) -> Any:
        if experiment.simulate is not None:
            return simulated_llm(experiment)
        key = weights_key(experiment)
        config = experiment.engine_config
        num_alive = len(self._engines)
        if self._weights is not None and self._weights_key != key:
            self._engines.clear()
            self._weights = None
        room = 1 if config.num_blocks is None else self._alive
        while len(self._engines) >= room:
            self._engines.popitem(last=False)
        if len(self._engines) < num_alive:
            gc.collect()  # before the new cache is made: memory may not suffice for both
        if self._weights is None:
            options = {name: getattr(experiment.engine, name) for name in LOAD_OPTIONS}
            self._weights = self._load_model(experiment.model, **options)
            self._weights_key = key
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return self._make(model=self._weights, **fields)


def simulated_engines() -> Engines:
    """The engines of a process that has no device."""
    return Engines(1, _no_device, _no_device)


def _no_device(*_: Any, **__: Any) -> Any:
    raise AssertionError("a simulated run builds no engine of a device")
