"""Engines whose states are computed by the TPU kernel, interpreted: their tokens are those of plain
JAX, however prompts are cut, and wherever sequences are stopped, moved, copied and found again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from pagedjax.device import states
from pagedjax.engine.handover import facts
from pallas_kernels.states.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.states.pallas_tpu import tokens
from tests.engine.page_kinds import Branch, check_moves, check_same, tokens_of
from tests.engine.runs import small_llm
from tests.refusals import refused
from tests.weights.test_family_files import BODY, HYBRIDS
from tests.weights.tiny_families import write_family

pytestmark = pytest.mark.few_optimisations

HEADS = {"head_dim": 128, "num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": HYBRIDS["qwen3_next"]
    | HEADS
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 64},
    "granitemoehybrid": BODY
    | HEADS
    | {"model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 96}
    | {"layer_types": ["linear_attention", "full_attention"], "attention_multiplier": 0.1}
    | {"mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 64},
}
SIZES = {"block_size": 8, "max_num_batched_tokens": 20, "max_model_len": 64}
ENGINES: dict[str, dict[str, Any]] = {
    # chunks end within blocks, beside decodes; of so few blocks that sequences are stopped
    "swapped": SIZES | {"num_blocks": 10, "preemption": "swap", "swap_space_gib": 0.05},
    "recomputed": SIZES | {"num_blocks": 10},
    "drafts": SIZES | {"speculative": {"method": "ngram", "num_tokens": 3}},
    "two devices": SIZES | {"mesh": {"tensor": 2}},
    "wide pages of the attention's kernel": SIZES | {"attention_impl": "pallas_tpu"},
}


@pytest.fixture
def interpreted(monkeypatch, on_a_tpu) -> None:
    kernel = states.IMPLS["pallas_tpu"]
    run = partial(pallas_tpu.run, interpret=True)
    exchange = partial(tokens.exchange, interpret=True)
    accepting = kernel._replace(run=run, exchange=exchange, obstacle=lambda device, **sizes: "")
    monkeypatch.setitem(states.IMPLS, "pallas_tpu", accepting)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("states")
    return {name: write_family(folder / name, CONFIGS[name], seed=3) for name in CONFIGS}


@pytest.fixture(scope="module")
def expected(folders) -> Callable[[str], list[Branch]]:
    """What plain JAX answers, by family."""

    @cache
    def answers(family: str) -> list[Branch]:
        return tokens_of(small_llm(folders[family], **SIZES, state_impl="xla"))

    return answers


@pytest.mark.slow  # tests/pallas_kernels/test_states_tpu.py has quick ones, of the kernel alone
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_are_those_of_plain_jax(family, engine, folders, expected, interpreted, tmp_path):
    llm = small_llm(folders[family], **ENGINES[engine], state_impl="pallas_tpu")
    # a handover compares it, because blocks have another order
    assert facts(llm.engine.runtime, llm.engine._state)["state_impl"] == "pallas_tpu"
    llm.engine.record(tmp_path / "run.jsonl")
    results = tokens_of(llm, rounds=2)
    llm.engine.record(None)
    if engine == "swapped":
        check_moves(tmp_path / "run.jsonl")
    check_same(results, expected(family) * 2)


def test_the_kernel_is_refused_by_name_on_a_cpu(folders, tiny):
    with refused("state_impl 'pallas_tpu' runs on platform 'tpu' and not on 'cpu'; 'xla' has no"):
        small_llm(folders["qwen3_next"], **SIZES, state_impl="pallas_tpu")
    with refused("state_impl is 'pallas_tpu', and no layer of the model has a state; leave it out"):
        small_llm(tiny, state_impl="pallas_tpu")
