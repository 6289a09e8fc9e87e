"""Mixtures of experts: the choice of a router and the results of the layer, against numpy in float64;
what sizes cannot be; corrections of a router in a model of 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax import from_params, load_model
from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.deepseek_experts import corrected_experts, greedy_experts, is_sparse
from pagedjax.device.models.mlp import Experts, Groups, Router, SparseMLP
from pagedjax.weights.convert import convert
from pagedjax.weights.trained import whole
from tests.refusals import refused
from tests.weights.tiny_families import random_tensors, write_family

pytestmark = pytest.mark.few_optimisations

T = 33
H = 16
PLAIN = Experts(count=12, chosen=3, intermediate=8, normalised=False)
CASES = {
    "softmax": PLAIN,
    "softmax, the best of groups": replace(
        PLAIN, groups=Groups(4, 2, best=1), factor=2.5, rounds_scores=False
    ),
    "sigmoid, corrected": replace(PLAIN, scores="sigmoid", corrected=True, normalised=True),
    "sigmoid, corrected, the two best of groups": replace(
        PLAIN,
        scores="sigmoid",
        corrected=True,
        normalised=True,
        groups=Groups(3, 2, best=2),
        factor=1.8,
        rounds_scores=False,
    ),
    "a shared MLP": replace(PLAIN, shared=20),
    "a shared MLP with a gate": replace(PLAIN, normalised=True, shared=20, shared_gate=True),
}
SIZES = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
}
GLM = {
    "model_type": "glm4_moe",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "eos_token_id": 2,
}
CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


def config_of(experts: Experts) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=8,
        hidden=H,
        intermediate=24,
        heads=2,
        kv_heads=2,
        head_dim=8,
        max_len=16,
        tied=True,
        eps=1e-6,
        kinds=(LayerKind(sparse=True),),
        ropes=(),
        experts=experts,
    )


def random_mlp(experts: Experts, dtype: str = "float32") -> tuple[SparseMLP, np.ndarray]:
    """A layer with random weights, and x [T, H]."""
    rng = np.random.default_rng(0)
    mlp = SparseMLP(config_of(experts), dtype)
    matrices = [mlp.router.weight, mlp.up, mlp.down]
    if mlp.shared is not None:
        matrices += [mlp.shared.up.weight, mlp.shared.down.weight]
    for matrix in matrices:
        shape = matrix[...].shape
        matrix.set_value(jnp.asarray(rng.standard_normal(shape) * shape[-1] ** -0.5, dtype))
    if mlp.router.correction is not None:
        mlp.router.correction.set_value(jnp.asarray(rng.normal(0, 0.3, experts.count), jnp.float32))
    return mlp, np.asarray(jnp.asarray(rng.standard_normal((T, H)), dtype).astype(jnp.float32))


def plain_routes(mlp: SparseMLP, x: np.ndarray, e: Experts) -> list[dict[int, float]]:
    """Of each token, the weight of each expert that it chooses."""
    products = x.astype(np.float64) @ np.asarray(mlp.router.weight[...], np.float64).T
    routes = []
    for row in products[:, : e.count]:
        scores = 1 / (1 + np.exp(-row))
        if e.scores == "softmax":
            scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        correction = mlp.router.correction
        ranks = scores + (0 if correction is None else np.asarray(correction[...], np.float64))
        allowed = set(range(e.count))
        if e.groups is not None:
            size = e.count // e.groups.count
            groups = [range(i, i + size) for i in range(0, e.count, size)]

            def score(group: range, ranks: np.ndarray = ranks) -> float:
                return sum(sorted(ranks[list(group)])[-e.groups.best :])  # type: ignore[union-attr]

            best = sorted(groups, key=score, reverse=True)[: e.groups.chosen]
            allowed = {i for group in best for i in group}
        chosen = sorted(allowed, key=lambda i: -ranks[i])[: e.chosen]
        total = sum(scores[i] for i in chosen) if e.normalised else 1.0
        routes.append({i: e.factor * scores[i] / total for i in chosen})
    return routes


def gated(x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = np.split(x @ up.T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_a_loop_over_tokens_and_their_experts(name):
    e = CASES[name]
    mlp, x = random_mlp(e)
    routes = plain_routes(mlp, x, e)
    ups = np.split(np.asarray(mlp.up[...], np.float64), e.count)
    downs = np.split(np.asarray(mlp.down[...], np.float64), e.count)
    expected = np.zeros((T, H))
    for token, weights in enumerate(routes):
        for expert, weight in weights.items():
            expected[token] += weight * gated(x[token], ups[expert], downs[expert])
    if mlp.shared is not None:
        up, down = (np.asarray(m.weight[...], np.float64) for m in (mlp.shared.up, mlp.shared.down))
        shared = gated(x.astype(np.float64), up, down)
        if e.shared_gate:
            gate = x.astype(np.float64) @ np.asarray(mlp.router.weight[-1], np.float64)
            shared /= 1 + np.exp(-gate[:, None])
        expected += shared

    @jax.jit
    def computed(x: jax.Array, used: jax.Array) -> Any:
        """With a residual, and of the first tokens."""
        return mlp.routed(x, norm=None, residual=x), mlp.routed(x, norm=None, used=used)

    (y, routed), (padded, _) = computed(x, np.array([20], np.int32))
    chex.assert_trees_all_close(np.asarray(y), (expected + x).astype(np.float32), atol=2e-5)
    chosen = np.array([list(weights) for weights in routes], np.int32)
    weights = np.array([list(weights.values()) for weights in routes], np.float32)
    chex.assert_trees_all_equal(np.asarray(routed.experts), chosen)
    chex.assert_trees_all_close(np.asarray(routed.weights), weights, atol=1e-6)
    chex.assert_trees_all_close(
        np.asarray(padded)[:20], expected[:20].astype(np.float32), atol=2e-5
    )


def test_scores_that_are_not_rounded_choose_as_float32_does():
    """In 16 bits many products of a router are equal after they are rounded."""
    e = replace(PLAIN, count=256, chosen=8)
    x = jnp.asarray(random_mlp(e, "bfloat16")[1], jnp.bfloat16)
    chosen = {}
    for rounds in (True, False):
        mlp, _ = random_mlp(replace(e, rounds_scores=rounds), "bfloat16")
        routes, _ = jax.jit(mlp.router)(x)
        chosen[rounds] = np.asarray(routes.experts)
    expected = plain_routes(mlp, np.asarray(x, np.float32), e)
    expected = np.array([list(weights) for weights in expected], np.int32)
    chex.assert_trees_all_equal(chosen[False], expected)
    assert (chosen[True] != expected).any()


def test_sigmoids_that_are_all_zero_give_weights_of_zero():
    e = replace(PLAIN, scores="sigmoid", normalised=True)
    router = Router(config_of(e), e, "float32")
    router.weight.set_value(jnp.full((e.count, H), -100.0))
    routes, _ = router(jnp.ones((2, H)))
    chex.assert_trees_all_equal(np.asarray(routes.weights), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": 13}, "a token uses 13 of 12 experts"),
        ({"scores": "tanh"}, "scores is 'tanh'; it must be 'softmax' or 'sigmoid'"),
        ({"shared_gate": True}, "shared_gate is true and shared is 0"),
        ({"groups": Groups(5, 2, 1)}, "12 experts are not 5 groups of equal size"),
        ({"groups": Groups(4, 5, 1)}, "a token uses 5 of 4 groups of experts"),
        ({"groups": Groups(6, 1, 1)}, "3 experts, and the 1 groups that it uses have 2"),
        ({"groups": Groups(12, 6, 2)}, "sum of its 2 largest scores, and a group has 1 experts"),
    ],
)
def test_experts_that_do_not_fit_are_refused(change, message):
    with refused(message):
        replace(PLAIN, **change)


def test_configs_of_deepseek_become_experts():
    """Tests of attention with latent keys need a family; the experts are those of GLM-4.5 too."""
    assert corrected_experts(SIZES) == Experts(
        12, 3, 8, True, scores="sigmoid", corrected=True, groups=Groups(4, 2, 2), factor=2.5,
        rounds_scores=False, shared=16,
    )  # fmt: skip
    assert greedy_experts(SIZES) == Experts(
        12, 3, 8, True, groups=Groups(4, 2, 1), factor=2.5, rounds_scores=False, shared=16
    )
    assert greedy_experts(SIZES | {"topk_method": "greedy"}).groups is None
    assert corrected_experts(SIZES | {"n_group": 1, "topk_group": 1}).groups is None
    with refused("topk_method is 'noaux_tc'; it must be 'greedy' or 'group_limited_greedy'"):
        greedy_experts(SIZES | {"topk_method": "noaux_tc"})
    layers = {"first_k_dense_replace": 1, "moe_layer_freq": 2}
    assert [is_sparse(layers, i) for i in range(5)] == [False, False, True, False, True]


@pytest.fixture
def glm(tmp_path) -> Any:
    """A folder with weights in bfloat16, and corrections whose differences need 32 bits."""
    folder = write_family(tmp_path / "glm", GLM)
    short = {name: x.astype(jnp.bfloat16) for name, x in random_tensors(GLM).items()}
    short[CORRECTION] = np.array([8, 8.001, 8.002, 8.003], np.float32)
    save_file(short, folder / "model.safetensors")
    return folder


def test_corrections_keep_32_bits_in_a_model_of_16(glm, tmp_path):
    exact = np.array([8, 8.001, 8.002, 8.003], np.float32)
    loaded = load_model(glm, dtype="bfloat16")
    parameters = whole(loaded.model)
    router = parameters["blocks"]["1"]["mlp"]["router"]
    chex.assert_trees_all_equal(router["correction"], exact)
    assert router["weight"].dtype == jnp.bfloat16
    copied = from_params(parameters, loaded.model.config)
    assert copied.model.dtype == "bfloat16"
    chex.assert_trees_all_equal(whole(copied.model), parameters)
    orbax = convert(glm, tmp_path / "orbax", "orbax")
    chex.assert_trees_all_equal(whole(load_model(orbax, dtype="bfloat16").model), parameters)
    back = load_file(convert(orbax, tmp_path / "back", "safetensors") / "model.safetensors")
    original = load_file(glm / "model.safetensors")
    chex.assert_trees_all_equal(back, original)
    assert {x.dtype.name for x in back.values()} == {"bfloat16", "float32"}


def test_layers_that_predict_several_tokens_are_left_out(glm):
    tensors = load_file(glm / "model.safetensors")
    name = "model.layers.1.input_layernorm.weight"
    save_file(tensors | {name.replace("1", "2"): tensors[name]}, glm / "model.safetensors")
    load_model(glm)
    save_file(tensors | {name.replace("1", "3"): tensors[name]}, glm / "model.safetensors")
    with refused("unexpected: model.layers.3.input_layernorm.weight"):
        load_model(glm)
