"""Training models with layers without attention: all parameters, adapters and draft heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from experiments.training import train_draft, train_lora
from experiments.training.draft_setup import DraftSetup
from experiments.training.forward import loss, optax
from experiments.training.updates import first_state, next_state
from pagedjax.device.models import assemble
from tests.engine.page_kinds import random_parameters, with_mixers
from tests.experiments.training import test_train_draft, test_train_lora
from tests.weights.test_family_files import BODY
from tests.weights.tiny_families import write_family

pytestmark = pytest.mark.few_optimisations

TOKENS: Any = np.random.default_rng(0).integers(3, 320, (3, 97))  # more than a block of a state
HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}


# all parameters -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tiny) -> Any:
    """(structure, parameters, other values) of a model with layers of all kinds."""
    config = with_mixers(tiny.model.config)
    model = assemble(config, random_parameters(config), "float32")
    return nnx.split(nnx.merge(model.graphdef, model.params), nnx.Param, ...)


@pytest.fixture(scope="module")
def loss_of(parts) -> Any:
    """parameters -> (loss, its gradient), jitted."""
    graphdef, _, constants = parts
    return jax.jit(
        jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params, constants), TOKENS))
    )


def test_gradients_are_those_of_finite_differences(parts, loss_of):
    params = parts[1]
    rng = np.random.default_rng(1)
    way = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), params)

    def along(size: float) -> Any:
        return jax.tree.map(lambda x, d: np.asarray(x) + np.float32(size) * d, params, way)

    step = 2e-4
    slope = (loss_of(along(step))[0] - loss_of(along(-step))[0]) / (2 * step)
    _, gradient = loss_of(along(0))
    predicted = sum(
        jax.tree.leaves(jax.tree.map(lambda g, d: (np.asarray(g) * d).sum(), gradient, way))
    )
    assert abs(slope) > 0.1, "the direction hardly matters: the comparison is blind"
    chex.assert_trees_all_close(predicted, slope, rtol=0.02, atol=0)


@pytest.mark.slow  # the test of gradients is the quick one
def test_the_loss_falls_and_every_parameter_learns(parts, loss_of):
    params = parts[1]
    method = optax.adam(3e-3)
    state = first_state(method, params, may_alias=False)
    update = jax.jit(lambda state, gradient: next_state(method, state, gradient))
    losses = []
    for _ in range(8):
        value, gradient = loss_of(state.params)
        losses.append(float(value))
        state = update(state, gradient)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), state.params, params)
    assert all(jax.tree.leaves(changed))


# adapters and draft heads -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_family(tmp_path_factory.mktemp("hybrid") / "model", BODY | HYBRID)


@pytest.mark.slow
def test_adapters_of_a_hybrid_learn_and_the_engine_has_the_trainers_numbers(folder, tmp_path):
    setup = test_train_lora.SETUP
    losses, report = train_lora.train(folder, tmp_path / "run", setup, 4, say=lambda _: None)
    for name in test_train_lora.NAMES:
        assert losses[-1]["held_out"][name] < losses[0]["held_out"][name]
    assert 0 < report["largest_difference"] < 2e-4


@pytest.mark.slow
def test_a_draft_head_of_a_hybrid_learns_and_drafts(folder, tmp_path):
    sizes = test_train_draft.SIZES
    setup = DraftSetup(model=str(folder), steps=12, rate=3e-3, **sizes)
    messages: list[str] = []
    losses = train_draft.train(tmp_path / "run", setup, 4, say=messages.append)
    assert losses[-1]["held_out"] < losses[0]["held_out"]
    assert "an engine accepts" in messages[-1]
