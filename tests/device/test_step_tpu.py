"""An engine on the TPU kernels: interpreted as ordinary XLA it gives the same tokens as plain XLA.

Whole steps are compiled for chips by `python -m experiments.hardware.compile_step` and its tests.
"""

from __future__ import annotations

from functools import partial

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.device import attention, cache
from pagedjax.engine import geometry
from pallas_kernels.paged_attention import IMPLS, Implementation


def interpreted(impl: Implementation) -> Implementation:
    """The TPU kernels on any device, interpreted as ordinary XLA."""
    assert impl.latents
    of_latents, attend, write = (
        partial(call, interpret=True) for call in (impl.latents.attend, impl.attend, impl.write)
    )
    accept = lambda device, **sizes: ""  # noqa: E731
    latents = impl.latents._replace(attend=of_latents, obstacle=accept)
    return impl._replace(attend=attend, write=write, obstacle=accept, latents=latents)


@pytest.fixture
def on_a_tpu(monkeypatch):
    """An engine on a CPU accepts the TPU kernels and interprets them."""
    monkeypatch.setitem(IMPLS, "pallas_tpu", interpreted(IMPLS["pallas_tpu"]))


def greedy(model, prompts, tokens: int, impl: str, **config) -> list[list[int]]:
    llm = LLM(model, attention_impl=impl, progress=False, max_model_len=64, **config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]


@pytest.mark.slow
def test_tokens_are_those_of_plain_xla(tmp_path, on_a_tpu):
    """A small random model: chunks of prompts beside decodes, and so few blocks that some sequences
    are preempted.
    """
    from pagedjax import load_model
    from tests.weights.tiny import tiny_llama

    model = load_model(tiny_llama(tmp_path / "llama", tied=False, head_dim=64))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, n).tolist() for n in (1, 5, 21)]
    config = {
        "block_size": 8,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "token_buckets": (8,),
        "num_blocks": 8,
    }
    expected = greedy(model, prompts, 12, "xla", **config)
    assert greedy(model, prompts, 12, "pallas_tpu", **config) == expected


def test_cache_has_rows_of_128_and_the_same_bytes(tiny_llm):
    model = tiny_llm.engine.model
    plain, wide = (
        geometry.block_shape(16, model, "bfloat16", impl) for impl in ("xla", "pallas_tpu")
    )
    assert cache.block_bytes(**plain) == cache.block_bytes(**wide)
    xla, tpu = (cache.init(blocks=3, **shape) for shape in (plain, wide))
    d = model.config.head_dim
    dims = chex.Dimensions(P=4, K=model.config.kv_heads, S=16, D=d, R=16 * d // 128, L=128)
    chex.assert_shape([*xla.k, *xla.v], dims["PKSD"])
    chex.assert_shape([*tpu.k, *tpu.v], dims["PKRL"])
    chex.assert_type([*tpu.k, *tpu.v], jnp.bfloat16)
    assert attention.page_row("pallas_tpu", 256) == 256
