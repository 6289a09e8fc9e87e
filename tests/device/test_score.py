"""`score`: log-probabilities of whole sequences, against the engine's own, and their gradients."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax import LLM, LoRARequest, SamplingParams, from_params
from pagedjax.device import score as scores
from pagedjax.device.adapters import Part, sizes_of
from pagedjax.device.models import Model
from pagedjax.engine.resolve import resolve
from pagedjax.models import Decoder, score
from pagedjax.options.config import EngineConfig
from pagedjax.weights.adapter_files import adapter_parts, modules_of, read_adapter, write_adapter
from pagedjax.weights.trained import whole
from tests import quick_compiler
from tests.device.test_linear_impl import random_params
from tests.device.test_llama import chosen
from tests.device.test_model_families import config_of
from tests.engine.test_batch_invariance import COMMON, ENGINES, VOCAB
from tests.refusals import refused

pytest.importorskip("llvmlite")

pytestmark = pytest.mark.optimised  # bits are compared

ENGINE: dict[str, Any] = {**COMMON, **ENGINES["large steps"]}
# Of the models of the default run: the time of a compilation grows with the layers. Those of Gemma
# 2 are of two kinds.
LAYERS = {"Qwen3": 1, "Gemma 2, caps that bind": 2}
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (1, 5, 23, 88, 40, 71)]
DRAWN = SamplingParams(
    temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0
)
# tokens [B, L], lengths [B], log-probabilities [B, L]
Rollout = tuple[np.ndarray, np.ndarray, np.ndarray]


def rollout(llm: LLM, prompts: list[list[int]] = PROMPTS, **options: Any) -> Rollout:
    """What an engine draws, padded with other tokens, and the log-probabilities that it gives."""
    outs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], DRAWN, **options)
    ids = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outs]
    lengths = np.array([len(sequence) for sequence in ids])
    tokens = np.full((len(ids), lengths.max()), 7, np.int32)
    logprobs = np.zeros(tokens.shape, np.float32)
    for i, (out, sequence) in enumerate(zip(outs, ids, strict=True)):
        entries: Any = [*(out.prompt_logprobs or ())[1:], *(out.outputs[0].logprobs or ())]
        tokens[i, : len(sequence)] = sequence
        logprobs[i, 1 : len(sequence)] = chosen(sequence[1:], entries)
    return tokens, lengths, logprobs


def model_of(name: str, dtype: str = "float32", **options: Any) -> Any:
    config = config_of(name, **{"num_hidden_layers": LAYERS[name]} if name in LAYERS else {})
    params = jax.tree.map(lambda x: np.asarray(x).astype(dtype), random_params(config))
    return from_params(params, config, **options)


def module_of(name: str, dtype: str = "float32") -> Decoder:
    """As a trainer has it."""
    model = model_of(name, dtype, linear_impl="xla").model
    return nnx.merge(model.graphdef, model.params)


def parts(module: Decoder) -> Any:
    return nnx.split(module, nnx.Param, ...)


# Each part of a layer is in one of the first; the last are made of the same parts.
FAMILIES = ["GPT-2", "Qwen3-MoE"]
OTHERS = [
    pytest.param(name, marks=pytest.mark.exhaustive)
    for name in (
        "Llama 3",
        "Mistral",
        "Qwen2",
        "Mixtral",
        "Gemma 2, caps that bind",
        "Gemma 3",
        "SmolLM3",
        "GPT-NeoX",
        "OLMo 3",
        "GLM-4",
    )
]
SLOW = [
    ("Llama 3", "bfloat16"),
    ("Granite 3", "float32"),
    ("GPT-OSS", "float32"),
]


every_family = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Qwen3", "float32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        pytest.param("Qwen3-MoE", "float32", marks=pytest.mark.exhaustive),  # so has GPT-OSS
        *(pytest.param(*family.values, "float32", marks=family.marks) for family in OTHERS),
    ],
)


def weighted(module: Decoder, tokens: np.ndarray, lengths: np.ndarray, exact: bool) -> Any:
    """((a sum of the scores with weights, the scores), its gradient) of parameters, as a jitted
    function of them.
    """
    graphdef, _, other_state = parts(module)

    def total(params: Any) -> Any:
        logprobs = score(
            nnx.merge(graphdef, params, other_state), tokens, lengths, batch_invariant=exact
        )
        return (logprobs * np.linspace(0, 1, tokens.shape[1], dtype=np.float32)).sum(), logprobs

    return jax.jit(jax.value_and_grad(total, has_aux=True))


@pytest.mark.slow
@every_family
def test_differentiated_scores_are_the_engines_to_the_bit_in_batch_invariant_mode(name, dtype):
    tokens, lengths, expected = rollout(LLM(model_of(name, dtype), **ENGINE))
    assert tokens.size > scores.TILE, "several tiles of logits"
    module = module_of(name, dtype)
    (_, exact), gradient = weighted(module, tokens, lengths, True)(parts(module)[1])
    chex.assert_shape(exact, tokens.shape)
    chex.assert_trees_all_equal(exact, expected)
    chex.assert_tree_all_finite(gradient)


@pytest.mark.slow  # by default: gradients in batch-invariant mode against finite differences, below
@pytest.mark.parametrize("name", ["Qwen3", *FAMILIES, *OTHERS])
def test_scores_and_gradients_of_both_modes_are_close(name):
    tokens = np.random.default_rng(0).integers(3, VOCAB, (6, 108))
    lengths = np.array([21, 25, 43, 108, 60, 91])
    module = module_of(name)
    params = parts(module)[1]
    with quick_compiler.all_quickly():
        (_, exact), exact_gradient = weighted(module, tokens, lengths, True)(params)
        (_, close), close_gradient = weighted(module, tokens, lengths, False)(params)
    chex.assert_trees_all_close(close, exact, rtol=0, atol=1e-4)
    scale = jax.tree.map(lambda x: np.abs(x).max() + 1e-9, close_gradient)
    by_scale = [
        jax.tree.map(lambda x, s: np.asarray(x) / s, tree, scale)
        for tree in (exact_gradient, close_gradient)
    ]
    chex.assert_trees_all_close(*by_scale, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def module() -> Decoder:
    return module_of("Gemma 2, caps that bind")


def params_along(params: Any, way: Any, size: float) -> Any:
    return jax.tree.map(lambda x, d: np.asarray(x) + np.float32(size) * d, params, way)


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_are_those_of_finite_differences(module, exact):
    graphdef, params, other_state = parts(module)
    tokens = np.random.default_rng(0).integers(3, VOCAB, (2, 60))  # longer than the window
    rng = np.random.default_rng(1)
    way = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), params)

    def mean(params):
        return score(nnx.merge(graphdef, params, other_state), tokens, batch_invariant=exact).mean()

    step = 2e-4
    with quick_compiler.all_quickly():
        compute = jax.jit(jax.value_and_grad(mean))
        before, after = (compute(params_along(params, way, size))[0] for size in (-step, step))
        # of numpy too: arrays of a device need a program of their own
        _, gradient = compute(params_along(params, way, 0))
    slope = (after - before) / (2 * step)
    predicted = sum(
        jax.tree.leaves(jax.tree.map(lambda g, d: (np.asarray(g) * d).sum(), gradient, way))
    )
    assert abs(slope) > 0.1, "the direction hardly matters: the comparison is blind"
    chex.assert_trees_all_close(predicted, slope, rtol=0.02, atol=0)


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 24), min_size=3, max_size=3),
    seed=st.integers(0, 99),
    exact=st.booleans(),
)
def test_padding_changes_no_bit_and_has_zeros(module, lengths, seed, exact):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCAB, (3, 24))
    padding = np.arange(24) >= np.array(lengths)[:, None]
    repadded = np.where(padding, rng.integers(3, VOCAB, tokens.shape), tokens)
    with quick_compiler.all_quickly():
        scored, rescored = (
            score(module, x, np.array(lengths), batch_invariant=exact) for x in (tokens, repadded)
        )
    chex.assert_trees_all_equal(scored, rescored)
    assert (np.asarray(scored)[padding] == 0).all()
    assert (np.asarray(scored)[:, 0] == 0).all()
    assert (np.asarray(scored)[:, 1:][~padding[:, 1:]] < 0).all()


def test_a_sequence_has_the_same_bits_in_any_batch_in_batch_invariant_mode(module):
    tokens = np.random.default_rng(3).integers(3, VOCAB, (8, 90))
    together = score(module, tokens, batch_invariant=True)
    for i in (0, 5):
        alone = score(module, tokens[i : i + 1, :33], batch_invariant=True)[0]
        chex.assert_trees_all_equal(alone, together[i, :33])


@pytest.mark.slow
def test_an_engines_own_module_is_scored_without_gradients(module):
    llm = LLM(model_of("Qwen3"), **ENGINE)
    tokens, lengths, expected = rollout(llm, PROMPTS[:2])
    model = llm.engine.model
    own_module = nnx.merge(model.graphdef, model.params)
    chex.assert_trees_all_equal(score(own_module, tokens, lengths, batch_invariant=True), expected)
    chex.assert_trees_all_close(score(own_module, tokens, lengths), expected, rtol=0, atol=1e-4)
    assert whole(model)


# --- adapters -------------------------------------------------------------------------------------

ALPHA = {"lora_alpha": 5}


def factors_of(config: Any, rank: int) -> Any:
    rng = np.random.default_rng(0)
    factors = {}
    for name, places in modules_of(config).items():
        sizes = [sizes_of(config, place) for place in places]
        shapes = (rank, sizes[0][0]), (sum(outputs for _, outputs in sizes), rank)
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        factors[name] = a / np.float32(a.shape[1]) ** 0.5, b / np.float32(4)
    return factors


def with_merged(module: Decoder, parts: Any) -> Decoder:
    """Each W replaced by W + b a, in a copy."""
    graphdef, state = nnx.split(module)
    copy: Any = nnx.merge(graphdef, jax.tree.map(jnp.array, state))
    for place, (a, b) in parts.items():
        layer = copy.blocks[place.layer]
        name = place.matrix.split(".")
        matrix = getattr(getattr(layer, name[0]), name[1]).weight
        first, last = (0, *module.config.parts[place.matrix])[place.part : place.part + 2]
        matrix[...] = matrix[...].at[first:last].add(b @ a)
    return copy


@pytest.mark.slow_cases("Qwen3-True", "GPT-2-False")
@pytest.mark.parametrize(("name", "exact"), [*product(("Qwen3", "GPT-2"), (True, False))])
def test_an_adapter_scores_as_the_model_that_has_it_merged_with_its_gradient(name, exact):
    module = module_of(name)
    factors = factors_of(module.config, 5)
    tokens = np.random.default_rng(0).integers(3, VOCAB, (3, 40))
    lengths = np.array([40, 7, 29])

    def total(factors: Any, merge: bool) -> Any:
        parts = adapter_parts(factors, module.config, ALPHA, name)
        options = {} if merge else {"adapter": parts, "batch_invariant": exact}
        logprobs = score(
            with_merged(module, parts) if merge else module, tokens, lengths, **options
        )
        return (
            logprobs * np.linspace(0, 1, tokens.shape[1], dtype=np.float32)
        ).sum() / tokens.size, logprobs

    merged, added = (
        jax.jit(jax.value_and_grad(partial(total, merge=merge), has_aux=True))
        for merge in (True, False)
    )
    none = jax.tree.map(np.zeros_like, factors)
    with quick_compiler.all_quickly():
        (_, expected), gradient = merged(factors)
        (_, scored), added_gradient = added(factors)
        (_, without), _ = merged(none)
        (_, of_zeros), _ = added(none)
    assert np.abs(expected - without).max() > 0.1, "the adapter hardly matters"
    chex.assert_trees_all_close(scored, expected, rtol=0, atol=1e-4)
    chex.assert_trees_all_close(added_gradient, gradient, rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(of_zeros, without, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_adapter_has_the_bits_of_a_batch_invariant_engine(tmp_path):
    module = module_of("Qwen3")
    factors = factors_of(module.config, 5)
    folder = write_adapter(tmp_path / "adapter", factors, ALPHA)
    llm = LLM(model_of("Qwen3"), **ENGINE, enable_lora=True, max_loras=2, max_lora_rank=12)
    llm.load_adapter("one", folder)
    tokens, lengths, expected = rollout(llm, lora_request=LoRARequest("one"))
    adapter = read_adapter(folder, module.config, "one").parts
    chex.assert_trees_all_equal(
        score(module, tokens, lengths, batch_invariant=True, adapter=adapter), expected
    )
    chex.assert_trees_all_close(
        score(module, tokens, lengths, adapter=adapter), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({}, "adapter has no factors; give those of one matrix at least, or None"),
        (
            {Part(9, "attn.out", 0): (1, 1)},
            r"at Part\(layer=9, .* layers 0 to 1 have attn.qkv, attn.out, mlp.up, mlp.down",
        ),
        ({Part(0, "attn.out", 1): (1, 1)}, r"part=1\), and none belong there in this model"),
        (
            {Part(0, "attn.out", 0): (np.zeros((2, 3)), np.zeros((4, 2)))},
            r"adapter has a \[2, 3\] and b \[4, 2\] at Part.*; \[r, \d+\] and \[\d+, r\] fit",
        ),
    ],
)
def test_factors_of_another_model_are_refused(module, adapter, message):
    with refused(message):
        score(module, np.ones((1, 4), int), adapter=adapter)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (
            [1, 2, 3],
            None,
            r"tokens is int64 \[3\]; it must be integers \[B, L\], shorter sequences padded to L",
        ),
        (np.zeros((2, 3)), None, r"tokens is float64 \[2, 3\]; it must be integers"),
        (
            np.zeros((1, 257), int),
            None,
            r"tokens is \[1, 257\]; the model's longest context is 256: cut the sequences",
        ),
        (np.full((2, 3), 320), None, r"tokens are 320 to 320; this vocabulary has 0 to 319"),
        (
            np.zeros((2, 3), int),
            np.array([1, 4]),
            r"lengths is int64 \[1, 4\]; each must be an integer from 0 to 3",
        ),
        (
            np.zeros((2, 3), int),
            np.array([1.5, 2]),
            r"lengths is float64 .* must be an integer from 0 to 3",
        ),
        (
            np.zeros((2, 3), int),
            np.ones(3),
            r"lengths is \[3\]; tokens \[2, 3\] need one for each sequence",
        ),
    ],
)
def test_wrong_shapes_are_refused(module, tokens, lengths, message):
    with refused(message):
        score(module, tokens, lengths)


def test_what_cannot_be_batch_invariant_is_refused():
    message = r"batch_invariant is True, and attention_impl 'cpu', .* not of float16; .* set batch_invariant=False"
    with refused(message):
        score(module_of("Qwen3", "float16"), np.ones((1, 4), int), batch_invariant=True)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("DeepSeek V2", {}, r"the model keeps latents \(rows of \d+ numbers\), whose results may"),
        ("Qwen3.5", {}, r"layers without attention \(GatedDelta\), whose bits may depend"),
        ("Qwen3", {"hidden_size": 72}, "the hidden size of the model is 72: beyond a multiple"),
    ],
)
def test_a_model_that_no_engine_serves_with_equal_bits_is_not_scored_so(name, change, message):
    config = config_of(name, **change)
    module = nnx.eval_shape(lambda: Decoder(config, "float32"))
    with refused(rf"batch_invariant is True, and .*{message}.* set batch_invariant=False"):
        score(module, np.ones((1, 4), int), batch_invariant=True)
    model = Model(config, *nnx.split(module), "float32")
    with refused(message):
        resolve(EngineConfig(batch_invariant=True, num_blocks=8, max_model_len=64), model)
