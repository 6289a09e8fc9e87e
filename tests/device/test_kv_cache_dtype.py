"""A cache in another dtype than the model's: smaller blocks, the same transitions, and numbers that
are near.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from tests.device.test_llama import chosen
from tests.engine import test_swapping
from tests.engine.test_swapping import DRAWN, GREEDY, PROMPTS
from tests.refusals import refused

KINDS = "float32", "bfloat16", "float16", "float8_e4m3fn"


def make(tiny, **config):
    sizes = {
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (64,),
    }
    return LLM(tiny, progress=False, **(sizes | {"num_blocks": 128} | config))


def prompt_logprobs(llm) -> np.ndarray:
    """Of every prompt's tokens but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(list(PROMPTS.values()), params)
    return np.concatenate(
        [chosen(output.prompt_token_ids[1:], output.prompt_logprobs[1:]) for output in outputs]
    )


@pytest.mark.default_cases("float8_e4m3fn-0.3-cpu")
@pytest.mark.parametrize("impl", ["cpu", "xla"])
@pytest.mark.parametrize(
    ("kind", "error"), [("bfloat16", 0.02), ("float16", 0.003), ("float8_e4m3fn", 0.3)]
)
def test_log_probabilities_differ_by_no_more_than_the_rounding_explains(tiny, kind, error, impl):
    if (kind, impl) == ("float16", "cpu"):
        with refused("reads pages of float32, bfloat16, float8_e4m3fn and not of float16"):
            make(tiny, kv_cache_dtype=kind, attention_impl=impl)
        return
    sizes = {"block_size": 16, "num_blocks": 256, "attention_impl": impl}  # those of `tiny_llm`
    exact = prompt_logprobs(make(tiny, kv_cache_dtype="float32", **sizes))
    # sizes of other tests here
    rounded = prompt_logprobs(make(tiny, kv_cache_dtype=kind, attention_impl=impl))
    assert 0 < np.abs(exact - rounded).max() < error


def test_pages_of_the_cpu_kernel_are_integers_of_the_bits(tiny):
    """XLA converts a whole array of float8, and in JAX 0.10 of bfloat16, to write a few numbers of
    it.
    """
    for kind, stored in (
        ("float32", "float32"),
        ("bfloat16", "uint16"),
        ("float8_e4m3fn", "uint8"),
    ):
        pages = make(tiny, kv_cache_dtype=kind, attention_impl="cpu").engine._state.cache
        chex.assert_type([*pages.k, *pages.v], jnp.dtype(stored))


@pytest.mark.slow
@pytest.mark.default_cases("drawn")
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_preemption_changes_no_token_in_8_bits_either(tiny, params):
    """Keys and values are rounded once, when they are written; whoever reads them, whenever, reads
    the same.
    """
    small_pool = {"num_blocks": 10, "kv_cache_dtype": "float8_e4m3fn"}
    roomy = test_swapping.run(make(tiny, kv_cache_dtype="float8_e4m3fn"), params)[0]
    assert test_swapping.run(make(tiny, **small_pool), params)[0] == roomy
    swapping = make(tiny, **small_pool, preemption="swap", swap_space_gib=0.001)
    assert test_swapping.run(swapping, params)[0] == roomy


@pytest.mark.slow
def test_without_a_word_the_cache_is_in_the_dtype_of_the_model(tiny_folder):
    config = LLM(
        tiny_folder, dtype="bfloat16", num_blocks=8, max_num_batched_tokens=8, progress=False
    ).engine.config
    assert config.kv_cache_dtype == "bfloat16"
