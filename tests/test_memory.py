"""How the engine sizes its cache, and what it chooses when nothing was said."""

from __future__ import annotations

import jax
import pytest

from pagedjax import EngineConfig, cache, memory
from pagedjax.engine import resolve

SMOLLM2 = {"layers": 30, "kv_heads": 3, "head_dim": 64}
TINYLLAMA = {"layers": 22, "kv_heads": 4, "head_dim": 64}


def test_bytes_of_a_block_are_those_of_the_lectures():
    assert cache.block_bytes(**SMOLLM2, block_size=1, dtype="float32") == 46_080
    assert cache.block_bytes(**TINYLLAMA, block_size=1, dtype="bfloat16") == 22 * 1024
    assert cache.block_bytes(**TINYLLAMA, block_size=16, dtype="bfloat16") / 2**20 == 0.34375


def test_an_allocated_cache_has_the_bytes_it_was_counted_with():
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 16, "block_size": 8, "dtype": "float32"}
    arrays = jax.tree.leaves(cache.init(blocks=5, **sizes))
    assert sum(a.nbytes for a in arrays) == 6 * cache.block_bytes(**sizes)  # the trash block is the sixth


def test_blocks_fill_the_fraction_and_leave_room_for_the_trash_block(monkeypatch):
    device = jax.devices("cpu")[0]
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1000)
    assert memory.blocks_that_fit(100, 0.5, device) == 4
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2**50)
    assert memory.blocks_that_fit(2**20, 0.5, device) == memory.CPU_LIMIT // 2**20 - 1
    monkeypatch.setattr(memory, "free_bytes", lambda _: 300)
    with pytest.raises(ValueError, match="raise memory_fraction or lower block_size"):
        memory.blocks_that_fit(100, 0.5, device)


def test_free_memory_is_read_from_the_system():
    assert 2**26 < memory.free_bytes(jax.devices("cpu")[0]) < 2**50


def test_resolve_leaves_nothing_open(tiny):
    resolved = resolve(EngineConfig(max_num_batched_tokens=100, max_num_seqs=4, block_size=16), tiny.model)
    assert resolved.num_blocks == 4 * 32  # four sequences of the model's 512 tokens; memory would hold more
    assert resolved.max_model_len == 512
    assert resolved.token_buckets == (1, 2, 4, 8, 16, 32, 64, 100)
    assert (resolved.dtype, resolved.attention_impl) == ("float32", "xla")


def test_resolve_refuses_more_tokens_than_the_model_was_made_for(tiny):
    with pytest.raises(ValueError, match="max_model_len is 513, but the model was made for 512"):
        resolve(EngineConfig(max_model_len=513), tiny.model)


def test_no_product_of_one_row_in_16_bit_on_a_cpu(tiny_folder):
    from pagedjax import load_model

    model = load_model(tiny_folder, dtype="bfloat16").model
    assert resolve(EngineConfig(max_num_batched_tokens=8), model).token_buckets == (2, 4, 8)
    assert resolve(EngineConfig(max_num_batched_tokens=1, max_num_seqs=1), model).token_buckets == (2,)
    with pytest.raises(ValueError, match="the smallest step is 2 tokens"):
        resolve(EngineConfig(max_num_batched_tokens=8, token_buckets=(1, 8)), model)


def test_a_lone_sequence_in_16_bit_gets_a_second_row_of_logits_on_a_cpu(tiny_folder):
    from pagedjax import LLM

    llm = LLM(tiny_folder, dtype="bfloat16", max_num_seqs=1, max_num_batched_tokens=4, num_blocks=8, progress=False)
    assert [llm.engine._shapes.rows(t) for t in llm.engine.config.token_buckets] == [2, 2]
    assert len(llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids) > 0
