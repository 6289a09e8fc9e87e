"""Implementations of products in an engine: the default, layouts of parameters, limits, and one's
own in a file.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, EngineConfig, SamplingParams, from_params, load_model
from pagedjax.device import linear
from pagedjax.device.attention import attend
from pagedjax.device.batch import Batch, blank_sampling
from pagedjax.device.cache import init
from pagedjax.device.models import Decoder, matrices
from pagedjax.device.models.decoder import samples_of
from pagedjax.weights.trained import replacement_state, whole
from pallas_kernels.interpreted import interpreted
from pallas_kernels.linear import IMPLS, Implementation, pallas_tpu
from pallas_kernels.linear.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.shared.hopper import old_jax
from tests import quick_compiler
from tests.device.test_llama import lay_out
from tests.device.test_model_families import config_of
from tests.engine.runs import answers, greedy, logprobs_of
from tests.refusals import refused

pytest.importorskip("llvmlite")

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "token_buckets": (16,)}
PROMPTS = [[5, 6, 7], list(range(3, 30)), [9]]
FACTS: dict[str, Any] = {
    "dtype": "float32",
    "weight_dtypes": ["float32"],
    "mesh": False,
    "activation": "silu",
}
OWN = """
from pallas_kernels.linear import IMPLS, Implementation

prepared = []


def obstacle(device, *, mesh, **facts):
    return "cannot serve a mesh" if mesh else ""


MINE = IMPLS["reference"]._replace(name="mine", obstacle=obstacle, prepare=lambda **facts: prepared.append(facts))
"""


def outputs(model, impl: str, given: tuple[int, ...] = (), **options: Any) -> tuple[list[Any], LLM]:
    """(tokens and their log-probabilities of each request, the engine). Options are of the engine,
    and `given` is the tokens that each request gets.
    """
    llm = LLM(
        model,
        linear_impl=impl,
        progress=False,
        max_model_len=64,
        num_blocks=40,
        **(SIZES | options),
    )
    params = greedy(8, logprobs=0)
    if given:
        params = SamplingParams(trace_decode_token_ids=given, logprobs=0)
    results = answers(llm, PROMPTS, params)
    return [(answer.token_ids, logprobs_of(answer)) for answer in results], llm


def random_params(config: Any) -> Any:
    """Of numpy: each shape of an array of JAX would be a compilation."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32")))
    rng = np.random.default_rng(0)

    def filled(x: jax.ShapeDtypeStruct) -> np.ndarray:
        numbers = rng.standard_normal(x.shape) / np.sqrt(x.shape[-1] if len(x.shape) > 1 else 1)
        return numbers.astype(x.dtype)

    return jax.tree.map(filled, state)


@pytest.mark.default_cases
@pytest.mark.slow_cases("Gemma 2-False", "Qwen3-MoE-False", "Qwen2-True", "GPT-OSS-True")
@pytest.mark.parametrize(
    ("name", "int8"),
    [
        *((name, False) for name in ("Gemma 2", "Qwen3-MoE", "Llama 2", "Qwen2")),
        ("GPT-2, untied, exact GELU, a narrow MLP", False),
        *((name, True) for name in ("Llama 2", "Qwen3-MoE", "Gemma 2", "Qwen2", "GPT-OSS")),
    ],
)
def test_every_implementation_serves_every_family(name, int8):
    weights: dict[str, Any] = {"weight_dtype": "int8"} if int8 else {}
    fewer = {"num_hidden_layers": 1} if (name, int8) == ("Gemma 2", False) else {}  # by default
    config = config_of(name, **fewer)
    params = random_params(config)
    reference, _ = outputs(
        from_params(params, config, linear_impl="reference", **weights), "reference", **weights
    )
    for impl in ("xla", "cpu"):
        results, llm = outputs(from_params(params, config, **weights), impl, **weights)
        assert llm.engine.config.linear_impl == impl
        for (tokens, logprobs), (expected_tokens, expected) in zip(results, reference, strict=True):
            assert tokens == expected_tokens
            chex.assert_trees_all_close(logprobs, expected, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["cpu", "xla"])
def test_padding_of_a_bucket_changes_nothing_of_experts(impl):
    """Their tokens are sorted by expert, and padding has none."""
    config = config_of("Qwen3-MoE")
    model = from_params(random_params(config), config, linear_impl=impl)
    by_buckets = {
        buckets: outputs(model, impl, token_buckets=buckets)[0] for buckets in ((1, 4, 16), (16,))
    }
    for (tokens, logprobs), (expected_tokens, expected) in zip(*by_buckets.values(), strict=True):
        assert tokens == expected_tokens
        chex.assert_trees_all_close(logprobs, expected, atol=0 if impl == "cpu" else 1e-5)


def test_a_loaded_model_is_packed_once_and_unpacked_exactly(tiny_folder):
    plain, packed = (load_model(tiny_folder, linear_impl=impl).model for impl in ("xla", "cpu"))
    assert (plain.config.linear, packed.config.linear) == ("xla", "cpu")
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(packed.params)}
    for name, matrix in matrices(packed.config).items():
        chex.assert_shape(leaves[name].get_value(), (None, matrix.inputs, 32))
    chex.assert_trees_all_equal(whole(packed), whole(plain))
    engine = LLM(load_model(tiny_folder), progress=False, num_blocks=4, **SIZES).engine
    assert engine.config.linear_impl == "cpu"


def test_packed_weights_are_not_copied_by_jax(tiny_folder):
    pack = IMPLS["cpu"].pack
    for dtype in ("float32", "bfloat16", "int8"):
        stored = jnp.ones((96, 64), dtype)
        packed = pack(np.asarray(stored), linear.Matrix(96, 64))
        assert jax.device_put(packed).unsafe_buffer_pointer() == packed.ctypes.data


@pytest.mark.default_cases("Gemma 2")
@pytest.mark.parametrize("name", ["Llama 2", "Gemma 2", "GPT-2", "Qwen3-MoE"])
def test_the_last_layer_of_sampled_tokens_alone_is_that_of_all(name):
    """Chunks, decodes, several samples of a row, and padding."""
    config = config_of(name, **{"num_hidden_layers": 2} if name == "Gemma 2" else {})
    params = jax.device_put(random_params(config))
    model = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, "float32"))), params)
    size = {
        "layers": config.layers,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "dtype": "float32",
    }
    cache = init(blocks=12, block_size=4, row=config.head_dim, **size)
    prompts = np.random.default_rng(1).integers(3, 300, (4, 9))
    tables = np.arange(12, dtype=np.int32).reshape(4, 3)
    step = [(0, 5), (1, 1), (2, 3)]
    batch = lay_out(step, [4, 0, 5, 0], prompts, tables, 12, s=4)._replace(
        last=np.array([4, 5, 6, 7, 8, 0, 0], np.int32),
        sampled_row=np.array([0, 1, 2, 2, 2, 0, 0], np.int32),
        targets=np.full(12, -1, np.int32),
        sampling=blank_sampling(7),
    )
    chex.assert_trees_all_equal(
        (batch.used_tokens, batch.used_samples), (np.int32([9]), np.int32([5])), strict=True
    )

    def hidden(cache: Any, batch: Batch, only: bool) -> tuple[Any, jax.Array]:
        run = model.layers(cache, batch, attend("xla", config.attn_scale))
        return run.cache, run.finish(samples_of(batch)) if only else run.finish(None)[batch.last]

    def packed_and_plain(*arguments: Any) -> Any:
        return hidden(*arguments, True), hidden(*arguments, False)

    with quick_compiler.all_quickly():
        (packed_pages, packed_hidden), (plain_pages, plain_hidden) = jax.jit(packed_and_plain)(
            cache, batch
        )
    chex.assert_trees_all_close(packed_hidden[:5], plain_hidden[:5], atol=2e-5)
    chex.assert_trees_all_close(packed_pages, plain_pages, atol=1e-6)


def test_int8_weights_are_multiplied_by_rounded_tokens():
    """By the name "cpu_int8", with the same numbers in another layout."""
    config = config_of("Llama 2", num_hidden_layers=1)
    params = random_params(config)
    models = {
        impl: from_params(params, config, linear_impl=impl, weight_dtype="int8")
        for impl in ("cpu", "cpu_int8")
    }
    exact_model, rounded_model = (loaded.model for loaded in models.values())
    chex.assert_trees_all_equal(whole(rounded_model), whole(exact_model))
    matrices_of_model = [leaf for leaf in rounded_model.leaves if leaf.dtype == jnp.uint8]
    assert len(matrices_of_model) == 5, "four matrices of the layer, and the head"
    (exact, _), (rounded, llm) = (
        outputs(loaded, impl, given=(7, 9, 300, 4, 5, 40, 41, 8), weight_dtype="int8")
        for impl, loaded in models.items()
    )
    assert llm.engine.config.linear_impl == "cpu_int8"
    logprobs, expected = (
        np.concatenate([of_tokens for _, of_tokens in results]) for results in (rounded, exact)
    )
    chex.assert_trees_all_close(logprobs, expected, atol=0.1)
    assert not np.array_equal(logprobs, expected)


def test_a_kernel_over_words_serves_an_engine_and_takes_new_weights(monkeypatch):
    """The kernel for TPUs, interpreted, with int8 weights. Its words have another dtype."""
    kernel = IMPLS["pallas_tpu"]._replace(
        multiply=partial(pallas_tpu.multiply, interpret=True), obstacle=lambda device, **facts: ""
    )
    monkeypatch.setitem(IMPLS, "pallas_tpu", kernel)
    config = config_of("Llama 2", num_hidden_layers=1)
    params = random_params(config)
    options = {"dtype": "bfloat16", "weight_dtype": "int8"}
    plain = from_params(params, config, linear_impl="xla", **options)
    in_words = from_params(params, config, linear_impl="pallas_tpu", **options)
    leaves = [leaf.get_value() for _, leaf in nnx.to_flat_state(in_words.model.params)]
    assert {leaf.dtype.name for leaf in leaves} >= {"int32", "bfloat16", "float32"}
    chex.assert_trees_all_equal(whole(in_words.model), whole(plain.model))
    (xla, _), (pallas, llm) = (
        outputs(model, impl, weight_dtype="int8")
        for model, impl in ((plain, "xla"), (in_words, "pallas_tpu"))
    )
    assert llm.engine.config.linear_impl == "pallas_tpu"
    for (tokens, logprobs), (expected_tokens, expected) in zip(pallas, xla, strict=True):
        assert tokens == expected_tokens
        chex.assert_trees_all_close(logprobs, expected, atol=0.05)
    others = jax.tree.map(lambda x: np.asarray(2 * x, jnp.bfloat16), params)
    replaced = replacement_state(in_words.model, others)
    made = from_params(others, config, linear_impl="pallas_tpu", **options).model.params
    chex.assert_trees_all_equal(replaced, made)


class Device(NamedTuple):
    platform: str


@pytest.mark.parametrize(
    ("platform", "facts", "expected"),
    [
        ("cpu", {}, "cpu"),
        ("cpu", {"weight_dtypes": ["int8"]}, "cpu"),
        ("cpu", {"dtype": "bfloat16", "weight_dtypes": ["bfloat16"]}, "cpu"),
        ("cpu", {"dtype": "float16", "weight_dtypes": ["float16"]}, "xla"),
        ("cpu", {"activation": None}, "cpu"),
        ("cpu", {"activation": "gelu"}, "xla"),
        ("cpu", {"mesh": True}, "xla"),
        ("gpu", {}, "xla"),
        ("tpu", {}, "xla"),
    ],
)
def test_default_is_the_compiled_kernel_on_a_cpu_where_it_can_serve(platform, facts, expected):
    assert linear.choose(None, Device(platform), **FACTS | facts) == expected


@pytest.mark.parametrize(
    ("platform", "facts", "message"),
    [
        (
            "tpu",
            {},
            "linear_impl 'cpu' runs on platform 'cpu' and not on 'tpu'; 'xla' has no such limit",
        ),
        (
            "cpu",
            {"mesh": True},
            "linear_impl 'cpu' is for a device without a mesh; 'xla' has no such limit",
        ),
        (
            "cpu",
            {"activation": "gelu"},
            "linear_impl 'cpu' has the gates silu, gelu_tanh and not 'gelu'",
        ),
    ],
)
def test_an_implementation_that_cannot_serve_raises_with_its_reason(platform, facts, message):
    with refused(message):
        linear.choose("cpu", Device(platform), **FACTS | facts)


def test_own_implementation_in_one_file_gives_the_tokens_of_reference(one_layer_folder, tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    name = f"{tmp_path}/own.py:MINE"
    results, llm = outputs(one_layer_folder, name)
    chex.assert_trees_all_equal(results, outputs(one_layer_folder, "reference")[0])
    assert llm.engine.config.linear_impl == name
    assert linear.find(name).obstacle.__globals__["prepared"] == [
        {"dtype": "float32", "weight_dtype": "float32", "low_rank": False}
    ]
    with refused("MINE' cannot serve a mesh; 'xla' has no such limit"):
        linear.choose(name, Device("cpu"), **FACTS | {"mesh": True})


def test_unknown_implementations_raise_with_the_reason():
    with refused(r"linear_impl is 'nowhere.py:MINE', but there is no file nowhere.py"):
        linear.find("nowhere.py:MINE")


def test_every_implementation_is_a_record_under_its_name():
    assert all(
        isinstance(impl, Implementation) and impl.name == name for name, impl in IMPLS.items()
    )
    for name in IMPLS:  # the configuration knows the same names
        assert EngineConfig(linear_impl=name).linear_impl == name


@pytest.mark.slow
@pytest.mark.skipif(bool(old_jax()), reason="GPU interpret mode needs JAX 0.11")
def test_the_kernel_for_floats_on_gpus_serves_an_engine(monkeypatch):
    """Interpreted: with gates, residuals, and a step's keys and values as some of the outputs."""
    kernel = IMPLS["pallas_gpu"]._replace(obstacle=lambda device, **facts: "")
    monkeypatch.setitem(IMPLS, "pallas_gpu", kernel)
    activations = []

    def dense(*arrays: Any, **options: Any) -> jax.Array:
        activations.append(options["activation"])
        return pallas_gpu_dense(*arrays, **options)

    pallas_gpu_dense = pallas_gpu.dense
    monkeypatch.setattr(pallas_gpu, "dense", dense)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 320}
    config = config_of("Llama 2", num_hidden_layers=2, **sizes)
    params = random_params(config)
    results = {}
    for impl in ("xla", "pallas_gpu"):
        model = from_params(params, config, linear_impl=impl, dtype="bfloat16")
        with interpreted():
            results[impl], llm = outputs(model, impl, attention_impl="xla")
        assert llm.engine.config.linear_impl == impl
    for (tokens, logprobs), (expected_tokens, expected) in zip(
        results["pallas_gpu"], results["xla"], strict=True
    ):
        assert tokens == expected_tokens
        chex.assert_trees_all_close(logprobs, expected, atol=0.05)
    assert set(activations) == {"silu", None}
