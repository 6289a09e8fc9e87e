"""Decode steps that the simulator makes together: the records are those of steps made one by one,
bit by bit.
"""

from __future__ import annotations

import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.core import drive
from experiments.core.config import expand
from experiments.core.engines import simulated_llm
from experiments.core.store import json_lines
from experiments.simulation.cost import Work, own_step_time
from experiments.simulation.simulate import SimulatedEngine
from experiments.simulation.spans import step_times
from tests import drawn
from tests.experiments.core.summaries import BASE, changed_workload

RAW: dict[str, Any] = {
    **BASE,
    "engine": {**BASE["engine"], "max_num_seqs": 6, "max_model_len": 200},
    "cache_tokens": 512,
    "workload": changed_workload(
        shared_prefix=16,
        prefixes=3,
        output={"dist": "uniform", "low": 2, "high": 60},
        arrivals={"process": "poisson", "rate": 100.0},
    ),
    "replicas": {"count": 2, "router": "prefix"},
}


class StepCounts:
    """How many steps were made together, and how many one by one.

    evicted: the idle blocks that steps made together evicted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.together = 0
        self.one_by_one = 0
        self.preemptions = 0
        self.evicted = 0
        step = SimulatedEngine.step
        advance = SimulatedEngine.advance

        def counted_step(engine: SimulatedEngine):
            self.one_by_one += 1
            return step(engine)

        def counted_advance(engine: SimulatedEngine, times):
            self.together += len(times.started)
            idle = len(engine.scheduler_state.pool.idle)
            span = advance(engine, times)
            self.evicted += idle - len(engine.scheduler_state.pool.idle)
            return span

        monkeypatch.setattr(SimulatedEngine, "step", counted_step)
        monkeypatch.setattr(SimulatedEngine, "advance", counted_advance)


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """RAW with other values in its sections; a chip that is None is left out."""
    raw = copy.deepcopy(RAW)
    for section, values in changes.items():
        raw[section] = {**raw.get(section, {}), **values} if isinstance(values, dict) else values
    if raw["simulate"].get("chip") is None:
        raw["simulate"].pop("chip", None)
    return raw


def compare(changes: dict[str, Any]) -> StepCounts:
    """Measure with and without steps made together, and compare everything. `changes`: of the
    sections of RAW.
    """
    raw = changed(changes)
    (point,) = expand(raw, folder=Path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedEngine, "next_step_times", lambda engine: None)
        one_by_one = drive.measure(simulated_llm(point.experiment), point, 0)
    with pytest.MonkeyPatch.context() as patch:
        counts = StepCounts(patch)
        together = drive.measure(simulated_llm(point.experiment), point, 0)
    assert one_by_one.failed is None
    assert together.requests == one_by_one.requests
    assert together.steps == one_by_one.steps
    assert together.summary == one_by_one.summary
    counts.preemptions = together.summary["preemptions"]
    return counts


def test_steps_of_models_with_windows_and_states_are_made_one_by_one():
    """What a row sees stops growing, and blocks are given back."""
    for model in ("gpt-oss-20b", "granite-4-h-micro"):
        options: dict[str, Any] = {
            "simulate": {"chip": "h200", "model": model},
            "model": model,
            "workload": {"count": 3},
        }
        assert compare(options).together == 0


CHANGES = [{"at": 0.1, "fail": 1}, {"at": 0.2, "join": 1}, {"at": 0.3, "leave": 1}]
PROFILE = {"chip": None, "profile": "distserve/opt-13b/tp1", "model": "opt-13b", "padded": False}
MEASURED = {
    "chip": None,
    "profile": "splitwise/bloom-176b/a100",
    "model": "opt-13b",
    "padded": False,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"simulate": {"host_s": 0.0013}},
        {"simulate": {"mesh": {"tensor": 4}, "chip": "tpu-v5e"}},
        {"simulate": {"chip": None, "step_s": 0.01}},
        {"simulate": {"chips": 2}},
        {"simulate": {"chips": 16, "model": "deepseek-v3"}, "model": "deepseek-v3"},
        # longer windows than any sequence
        {"simulate": {"chip": "h200", "model": "gemma-3-1b"}, "model": "gemma-3-1b"},
        {"simulate": PROFILE, "model": "opt-13b"},
        {"simulate": MEASURED, "model": "opt-13b"},
        {"engine": {"enable_prefix_caching": False}},
        {"engine": {"policy": "fair", "mixed_steps": False}, "workload": {"users": 3}},
        {"engine": {"policy": "static"}},
        {"engine": {"reservation": "oracle", "enable_prefix_caching": False}},
        {"engine": {"preemption": "swap", "swap_space_gib": 1.0}, "cache_tokens": 256},
        {"cache_tokens": 208},  # with preemptions, and evictions from the prefix cache
        {"sampling": {"n": 3, "temperature": 0.7}},
        {"workload": {"arrivals": {"process": "closed_loop", "clients": 5}}},
        {"replicas": {"count": 3, "changes": CHANGES}},
        {"workload": {"max_tokens": 90}},
        {"workload": {"max_tokens": 90}, "cache_tokens": 208},
    ],
    ids=lambda changes: ",".join(f"{value}" for value in changes.values())[:60],
)
def test_records_are_those_of_steps_made_one_by_one(changes):
    counts = compare(changes)
    assert counts.together > 50  # else this would compare one way with itself
    if "cache_tokens" in changes:  # a cache that is too small
        assert counts.preemptions > 5
        assert counts.evicted > 0 or "engine" in changes


@pytest.mark.parametrize(
    "changes",
    [
        {"simulate": {"kv_cache": False}, "engine": {"enable_prefix_caching": False}},
        {"simulate": {"whole_batches": True}, "engine": {"policy": "static"}},
        {
            "simulate": {"acceptance": 0.7},
            "engine": {"speculative": {"method": "ngram", "num_tokens": 3}},
        },
        {"engine": {"kv_policy": {"name": "streaming", "sinks": 4, "window": 9}}},
    ],
    ids=["no cache", "whole batches", "speculation", "a KV policy"],
)
def test_engines_whose_steps_differ_make_them_one_by_one(changes):
    assert compare(changes).together == 0


def test_a_fitted_cost_model_gives_the_same_times(tmp_path):
    (point,) = expand(RAW, folder=Path())
    steps = drive.measure(simulated_llm(point.experiment), point, 0).steps
    (tmp_path / "steps.jsonl").write_text(
        json_lines([step._asdict() for step in steps]), encoding="utf-8"
    )
    fit = {"simulate": {"chip": None, "model": "llama-3-8b", "fit": str(tmp_path)}}
    assert compare(fit).together > 50


@pytest.mark.parametrize(
    "text",
    [
        "0.01 if work.context < 500 else 0.02",
        "1e-5 * float(np.max([work.context]))",
        "0.01 * work.context.bit_length()",
        "1e-5 * (work.context + work.pairs + work.single_context)",
    ],
)
def test_a_cost_model_of_ones_own_gets_the_integers_of_one_step(text, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"import numpy as np\ndef seconds(work):\n    return {text}\n", encoding="utf-8"
    )
    seconds = own_step_time(f"{tmp_path}/mine.py:seconds")
    work = Work(
        tokens=8, sequences=3, sampled=3, context=490, pairs=490, single=3, single_context=490
    )
    times = step_times(1.0, 10, work, seconds, 0.5)
    contexts = range(490, 520, 3)
    durations = [
        seconds(work._replace(context=context, pairs=context, single_context=context))
        for context in contexts
    ]
    chex.assert_trees_all_equal(times.device, np.array(durations))
    clock = list(accumulate(durations, lambda time, step: time + step + 0.5, initial=1.0))
    chex.assert_trees_all_equal(times.started, np.array(clock[:-1]))
    chex.assert_trees_all_equal(times.finished, np.array(clock[1:]))


@drawn.given(
    6,
    25,
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
    engine = {
        "max_num_seqs": rows,
        "policy": policy,
        "enable_prefix_caching": caching,
        "chunked_prefill": chunked,
    }
    engine |= {"max_num_batched_tokens": 64 if chunked else 256}
    changes: dict[str, Any] = {"engine": engine, "cache_tokens": 8 * blocks, "seed": seed}
    classes = [{"name": "chat"}, {"name": "batch", "priority": 1}]
    changes["workload"] = {
        "arrivals": {"process": "poisson", "rate": rate},
        "users": 3,
        "classes": classes,
    }
    compare(changes | {"replicas": {"count": replicas, "router": router}})
