"""What a model with latents keeps: a token costs one row a layer. Its tokens are tested in
test_page_contract.py.
"""

from __future__ import annotations

import chex
import pytest

from pagedjax.device.memory import GIB, DeviceMemory, nbytes
from pagedjax.device.models import Model
from pagedjax.engine.geometry import geometry
from pagedjax.engine.resolve import resolve
from pagedjax.options.config import EngineConfig
from pagedjax.weights.architectures import FAMILIES, normalised
from tests.device.test_model_families import REAL
from tests.engine.page_kinds import LATENT, Subject
from tests.engine.runs import small_llm


def test_a_token_costs_one_row_a_layer(tiny):
    loaded = Subject("latents", tiny).loaded
    llm = small_llm(loaded, block_size=4, num_blocks=20)
    runtime = llm.engine.runtime
    layers = loaded.model.config.layers
    chex.assert_shape(runtime.cache_shapes.k, (21, 1, 4, LATENT.row))
    assert runtime.cache_shapes.v == (None,) * layers
    block_bytes = 4 * (layers * 4 * LATENT.row + 4)  # and the token ids
    assert llm.engine.memory.block_bytes == block_bytes
    assert nbytes(llm.engine._state.cache) == 21 * block_bytes


@pytest.mark.parametrize(("impl", "numbers"), [("xla", 576), ("pallas_tpu", 640)])
def test_the_plan_of_memory_counts_rows_of_a_deepseek_with_their_padding(impl, numbers, on_a_tpu):
    model_type, settings, _, token_bytes = REAL["DeepSeek-V2-Lite"]
    config = normalised({"model_type": model_type, **settings}, "a test")
    decoder = FAMILIES[model_type].from_hf(config)
    model = Model(decoder, None, {}, "bfloat16")  # type: ignore[arg-type]  # shapes alone
    options = EngineConfig(
        block_size=16,
        max_model_len=1024,
        max_num_seqs=1000,
        attention_impl=impl,
        preemption="swap",
        swap_space_gib=1,
    )
    assert token_bytes == 2 * 27 * 576
    token_bytes = 2 * 27 * numbers + 4  # and its id
    shape = geometry(options, model, "bfloat16", impl)
    assert (shape.block_bytes, shape.host_block_bytes) == (16 * token_bytes, 16 * token_bytes)
    resolved = resolve(options, model, DeviceMemory("a device", 8 * GIB, 2 * GIB))
    fraction = options.memory_fraction
    assert resolved.num_blocks == int(2 * GIB * fraction) // (16 * token_bytes) - 1
