"""Decode steps that the simulator makes together: the records are those of steps made one by one, bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.core import drive
from experiments.core.config import expand
from experiments.core.engines import simulated
from experiments.simulation.simulate import SimulatedEngine

RAW: dict[str, Any] = {
    "name": "runs",
    "model": "nothing is loaded",
    "engine": {"max_num_seqs": 6, "max_model_len": 200, "max_num_batched_tokens": 64, "block_size": 8},
    "cache_tokens": 512,
    "workload": {
        "kind": "synthetic",
        "count": 40,
        "shared_prefix": 16,
        "prefixes": 3,
        "prompt": {"dist": "uniform", "low": 4, "high": 40},
        "output": {"dist": "uniform", "low": 2, "high": 60},
        "arrivals": {"process": "poisson", "rate": 100.0},
    },
    "sampling": {"temperature": 0.0, "ignore_eos": True},
    "simulate": {"chip": "h200", "model": "llama-3-8b"},
    "replicas": {"count": 2, "router": "prefix"},
}


class Counting:
    """How many steps were made together, and how many one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.together, self.alone = 0, 0
        step, advance = SimulatedEngine.step, SimulatedEngine.advance

        def counted_step(engine: SimulatedEngine):
            self.alone += 1
            return step(engine)

        def counted_advance(engine: SimulatedEngine, times):
            self.together += len(times.started)
            return advance(engine, times)

        monkeypatch.setattr(SimulatedEngine, "step", counted_step)
        monkeypatch.setattr(SimulatedEngine, "advance", counted_advance)


def compare(changes: dict[str, dict[str, Any]]) -> Counting:
    """Measure with and without steps made together, and compare everything. `changes`: of the sections of RAW."""
    raw = copy.deepcopy(RAW)
    for section, values in changes.items():
        raw[section] = {**raw.get(section, {}), **values} if isinstance(values, dict) else values
    if raw["simulate"].get("chip") is None:
        raw["simulate"].pop("chip", None)
    (point,) = expand(raw, folder=Path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedEngine, "ahead", lambda engine: None)
        one_by_one = drive.measure(simulated(point.experiment), point, 0)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counting(patch)
        together = drive.measure(simulated(point.experiment), point, 0)
    assert one_by_one.failed is None
    assert together.requests == one_by_one.requests
    assert together.steps == one_by_one.steps
    assert together.summary == one_by_one.summary
    return counted


CHANGES = [{"at": 0.1, "fail": 1}, {"at": 0.2, "join": 1}, {"at": 0.3, "leave": 1}]
PROFILE = {"chip": None, "profile": "distserve/opt-13b/tp1", "model": "opt-13b", "padded": False}
MEASURED = {"chip": None, "profile": "splitwise/bloom-176b/a100", "model": "opt-13b", "padded": False}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"simulate": {"host_s": 0.0013}},
        {"simulate": {"mesh": {"tensor": 4}, "chip": "tpu-v5e"}},
        {"simulate": {"chip": None, "step_s": 0.01}},
        {"simulate": PROFILE},
        {"simulate": MEASURED},
        {"engine": {"enable_prefix_caching": False}},
        {"engine": {"policy": "fair", "mixed_steps": False}},
        {"engine": {"policy": "static"}},
        {"engine": {"reservation": "oracle", "enable_prefix_caching": False}},
        {"engine": {"preemption": "swap", "swap_space_gib": 1.0}, "cache_tokens": 256},
        {"cache_tokens": 208},  # with preemptions, and evictions from the prefix cache
        {"sampling": {"n": 3, "temperature": 0.7}},
        {"workload": {"arrivals": {"process": "closed_loop", "clients": 5}}},
        {
            "replicas": {
                "count": 3,
                "changes": ({"at": 0.1, "fail": 1}, {"at": 0.2, "join": 1}, {"at": 0.3, "leave": 1}),
            }
        },
    ],
    ids=lambda changes: ",".join(f"{value}" for value in changes.values())[:60],
)
def test_records_are_those_of_steps_made_one_by_one(changes):
    counted = compare(changes)
    assert counted.together > 50  # else this would compare one way with itself


@pytest.mark.parametrize(
    "changes",
    [
        {"simulate": {"kv_cache": False}, "engine": {"enable_prefix_caching": False}},
        {"simulate": {"whole_batches": True}, "engine": {"policy": "static"}},
        {"simulate": {"acceptance": 0.7}, "engine": {"speculative": {"method": "ngram", "num_tokens": 3}}},
    ],
    ids=["no cache", "whole batches", "speculation"],
)
def test_engines_whose_steps_differ_make_them_one_by_one(changes):
    assert compare(changes).together == 0


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.integers(26, 80),
    rows=st.integers(1, 8),
    rate=st.sampled_from([1.0, 30.0, 200.0, 2000.0]),
    replicas=st.integers(1, 3),
    router=st.sampled_from(["round_robin", "least_loaded", "prefix"]),
    policy=st.sampled_from(["fcfs", "priority", "shortest", "fair", "longest_prefix", "static"]),
    caching=st.booleans(),
    chunked=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_records_of_drawn_runs_are_those_of_steps_made_one_by_one(
    blocks, rows, rate, replicas, router, policy, caching, chunked, seed
):
    engine = {"max_num_seqs": rows, "policy": policy, "enable_prefix_caching": caching, "chunked_prefill": chunked}
    engine |= {"max_num_batched_tokens": 64 if chunked else 256}
    changes: dict[str, Any] = {"engine": engine, "cache_tokens": 8 * blocks, "seed": seed}
    changes["workload"] = {"arrivals": {"process": "poisson", "rate": rate}}
    compare(changes | {"replicas": {"count": replicas, "router": router}})
