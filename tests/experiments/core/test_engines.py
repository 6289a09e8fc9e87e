"""The order of runs, and engines: built once, few alive at a time, weights shared."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.core import config
from experiments.core.engines import Engines, engine_key, plan_runs

WORKLOAD = {
    "kind": "synthetic",
    "count": 2,
    "prompt": {"dist": "fixed", "value": 4},
    "output": {"dist": "fixed", "value": 2},
}


def points(repeats: int = 2, num_blocks: int | None = 8, **grid: list[Any]) -> list[config.Point]:
    paths = {name.replace("__", "."): values for name, values in grid.items()}
    base = {
        "name": "unit",
        "workload": WORKLOAD,
        "engine": {"num_blocks": num_blocks},
        "repeats": repeats,
    }
    return config.expand({**base, "sweep": {"grid": paths}} if paths else base, Path("."))


def labels(runs: Any) -> list[str]:
    return [f"{run.point.label} r{run.repeat}" for run in runs]


def test_repeats_interleave_and_odd_repeats_run_in_reverse():
    runs = plan_runs(points(engine__block_size=[8, 16], seed=[1, 2]), alive=4)
    one_way = [
        "block_size=8, seed=1",
        "block_size=8, seed=2",
        "block_size=16, seed=1",
        "block_size=16, seed=2",
    ]
    assert labels(runs) == [f"{label} r0" for label in one_way] + [
        f"{label} r1" for label in one_way[::-1]
    ]


def test_engine_sized_by_free_memory_shares_no_group():
    runs = plan_runs(points(num_blocks=None, engine__block_size=[8, 16]), alive=4)
    assert labels(runs) == [
        "block_size=8 r0",
        "block_size=8 r1",
        "block_size=16 r0",
        "block_size=16 r1",
    ]


def values(*options: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(options), min_size=1, max_size=3, unique=True)


GRIDS = {
    "model": values("a", "b"),
    "engine__block_size": values(8, 16, 32),
    "seed": values(*range(6)),
    "engine__num_blocks": values(4, 8, None),
}


@settings(max_examples=12)
@given(st.integers(1, 3), st.integers(1, 3), st.fixed_dictionaries(GRIDS))
def test_every_run_happens_once_and_each_engine_is_built_once(
    alive: int, repeats: int, grid: dict[str, list[Any]]
):
    grid_points = points(repeats, **grid)
    runs = plan_runs(grid_points, alive)
    assert sorted((run.place, run.repeat) for run in runs) == [
        (i, r) for i in range(len(grid_points)) for r in range(repeats)
    ]
    assert all(grid_points[run.place] is run.point for run in runs)
    built: list[Any] = []
    loaded: list[str] = []
    engines = Engines(
        alive,
        lambda model, **dtypes: loaded.append(model) or model,
        lambda **fields: built.append(fields) or fields,
    )
    for run in runs:
        # these engines hold nothing, and there are hundreds
        with patch("experiments.core.engines.gc"):
            engine = engines.get(run.point.experiment)
        assert engine["model"] == run.point.experiment.model
        assert engine["block_size"] == run.point.experiment.engine.block_size
        assert len(engines._engines) <= (1 if engine["num_blocks"] is None else alive)
    assert len(built) == len({engine_key(point.experiment) for point in grid_points})
    assert loaded == grid["model"]
    assert set(engines.startup_seconds) == {engine_key(point.experiment) for point in grid_points}


def test_weights_are_loaded_once_per_dtype():
    loaded = []

    def load(model: str, *, dtype: Any, weight_dtype: Any, **places: Any) -> str:
        loaded.append((dtype, weight_dtype))
        assert places == {"mesh": None, "devices": None, "model_family": None}
        return model

    engines = Engines(4, load, lambda **fields: fields)
    grid = {"engine__dtype": ["float32", "bfloat16"], "engine__weight_dtype": [None, "int8"]}
    for run in plan_runs(points(engine__block_size=[8, 16], **grid), alive=4):
        options = run.point.experiment.engine
        engine = engines.get(run.point.experiment)
        assert (engine["dtype"], engine["weight_dtype"]) == (options.dtype, options.weight_dtype)
    assert loaded == list(product(*grid.values()))


def test_failed_engine_build_is_not_repeated():
    tries = []

    def make(**_: Any) -> Any:
        tries.append(1)
        raise MemoryError("no room")

    engines = Engines(1, lambda model, **dtypes: model, make)
    (point,) = points()
    with pytest.raises(MemoryError, match="no room"):
        engines.get(point.experiment)
    with pytest.raises(RuntimeError, match="MemoryError: no room"):
        engines.get(point.experiment)
    assert len(tries) == 1
