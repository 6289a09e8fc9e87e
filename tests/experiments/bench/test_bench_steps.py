"""The benchmarks of decode steps (lower_bounds and idle), with a tiny model."""

from __future__ import annotations

import json
from collections import namedtuple
from types import SimpleNamespace

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import idle, lower_bounds


def test_floor_products_have_the_shapes_of_the_step(tiny):
    model = tiny.model
    matrices = [(np.asarray(w), m.gated) for w, m in lower_bounds.weights_of(model)]
    # the head too; an embedding of its own is not multiplied
    assert len(matrices) == 4 * model.config.layers + 1
    assert sum(gated for _, gated in matrices) == model.config.layers
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    expected = [
        silu(w[0].sum()) * w[len(w) // 2].sum() if gated else w[0].sum() for w, gated in matrices
    ]
    for batch, samples in ((3, 3), (8, 1)):
        products = lower_bounds.weight_products(model, batch, samples=samples)()
        chex.assert_trees_all_close(products, expected, rtol=1e-3, atol=1e-4)
        chex.assert_type(products, jnp.float32)
    sums = lower_bounds.read_weights(model)()
    chex.assert_trees_all_close(sums, [w.sum() for w, _ in matrices], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_lower_bounds_command(tiny_folder, tmp_path):
    out = tmp_path / "lower_bounds.json"
    sizes = ["--batches", "1", "3", "--prompts", "9", "--context", "20", "--repeats", "3"]
    lower_bounds.main(["--model", str(tiny_folder), *sizes, "--json", str(out)])
    report = json.loads(out.read_text())
    rows = report["decodes"]
    prompts = report["prompts"]
    assert [row["batch"] for row in rows] == [1, 3]
    names = ("step", "host", "read weights", "weight products", "attention", "read cache")
    assert all(row[name] > 0 for row in rows for name in names)
    assert [row["prompt"] for row in prompts] == [9]
    assert all(row[name] > 0 for row in prompts for name in ("step", "host", "weight products"))


@pytest.mark.slow
def test_attention_of_lower_bounds_reads_every_page_and_as_many_bytes(tiny_folder):
    llm = lower_bounds.make_llm(64, 3, 40, (), {"model": str(tiny_folder), "progress": False})
    c = llm.engine.model.config
    chex.assert_shape(lower_bounds.paged_attention(llm, 3, 20)(), (3, c.heads, c.head_dim))
    numbers = 2 * 3 * 20 * c.kv_heads * c.head_dim
    sums = lower_bounds.read_cache(llm, 3, 20)()
    chex.assert_trees_all_close(sums, [np.float32(numbers * (1 + i)) for i in range(c.layers)])


@pytest.mark.exhaustive  # it measures for half a minute
def test_idle_command_reads_trace(tiny_folder, tmp_path):
    out = tmp_path / "idle.json"
    for _ in range(3):  # other processes can disturb the clocks of the trace and of the engine
        idle.main(
            ["--model", str(tiny_folder), "--sequences", "8", "--steps", "6", "--json", str(out)]
        )
        plain, with_lookahead = json.loads(out.read_text())["rows"]
        if plain["idle"] > plain["host"]:
            break
    assert (plain["sequences"], plain["lookahead"], with_lookahead["lookahead"]) == (8, 0, 1)
    for row in (plain, with_lookahead):
        assert row["idle"] <= row["longest"]
        assert row["step"] > 0
    assert plain["idle"] > plain["host"] > 0, "without lookahead the device waits for the host"


def test_programs_of_a_trace():
    event = namedtuple("event", "name start_ns end_ns")
    caller = [
        event(idle.BEGIN_EVENT, 5, 6),
        event(idle.END_EVENT, 6, 9),
        event("something else", 9, 10),
    ]
    caller += [
        event(idle.BEGIN_EVENT, 20, 21),
        event(idle.END_EVENT, 22, 30),
        event(idle.END_EVENT, 31, 40),
    ]
    lines = [SimpleNamespace(name=f"{idle.CALLERS}/1", events=caller[::-1])]
    lines += [
        SimpleNamespace(
            name="a helper", events=[event(idle.BEGIN_EVENT, 1, 2), event(idle.END_EVENT, 3, 4)]
        )
    ]
    trace = SimpleNamespace(planes=[SimpleNamespace(lines=lines)])
    assert list(idle.programs(trace)) == [(5, 9), (20, 30)]
