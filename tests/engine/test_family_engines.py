"""Each family of 2024 and 2025 in engines of several kinds: all give the same answers.

That the answers are right is in tests/device/test_model_families.py and test_plain_families.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from pagedjax import LLM, LoRARequest, Taps, load_model
from pagedjax.models import score
from tests.engine.runs import answers, greedy, logprobs_of, small_llm
from tests.weights.test_family_files import CONFIGS
from tests.weights.tiny_adapters import merged, tiny_adapter
from tests.weights.tiny_families import write_family

PROMPTS = [np.random.default_rng(n).integers(3, 320, n).tolist() for n in (5, 40, 1)]
PARAMS = greedy(8, logprobs=0)
LENGTH = {"max_model_len": 64}  # the short frequencies of "longrope"
KINDS: dict[str, dict[str, Any]] = {
    "small chunks and blocks": {"max_num_batched_tokens": 12, "block_size": 4},
    "two devices": {"mesh": {"tensor": 2}},
    "four devices": {"mesh": {"tensor": 4}},
    "plain attention": {"attention_impl": "reference"},
    "products of XLA": {"linear_impl": "xla"},
}
# A mesh of four devices has the parts of two, and products of XLA. Plain attention is that of
# tests/device/test_plain_families.py.
SLOW_KINDS = ("small chunks and blocks", "four devices")
MATRICES = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


# A family takes two minutes. These have each new part of the decoder.
SLOW = ("gpt_neox", "olmo3", "deepseek_v3")
FAMILIES = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.exhaustive)
    for name in CONFIGS
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return write_family(
        tmp_path_factory.mktemp("family") / request.param, CONFIGS[request.param], seed=3
    )


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return small_llm(folder, **LENGTH)


def check_equal(results: list[Any], expected: list[Any], atol: float = 2e-4) -> None:
    for result, expected_result in zip(results, expected, strict=True):
        assert result.token_ids == expected_result.token_ids
        chex.assert_trees_all_close(logprobs_of(result), logprobs_of(expected_result), atol=atol)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SLOW_KINDS else pytest.mark.exhaustive)
        for kind in KINDS
    ],
)
def test_answers_do_not_depend_on_the_kind_of_engine(folder, llm, kind):
    other_llm = small_llm(folder, **(LENGTH | KINDS[kind]))
    check_equal(answers(other_llm, PROMPTS, PARAMS), answers(llm, PROMPTS, PARAMS))


def test_int8_is_close_and_the_same_for_all_products(folder, llm):
    cpu, xla = (
        answers(small_llm(folder, weight_dtype="int8", linear_impl=impl, **LENGTH), PROMPTS, PARAMS)
        for impl in ("cpu", "xla")
    )
    check_equal(cpu, xla, atol=5e-4)
    for result, result_of_llm in zip(cpu, answers(llm, PROMPTS, PARAMS), strict=True):
        assert abs(logprobs_of(result)[0] - logprobs_of(result_of_llm)[0]) < 0.2


def test_an_adapter_answers_as_the_model_that_has_it_merged(folder, tmp_path):
    kinds = MATRICES.get(folder.name, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
    adapter = tiny_adapter(tmp_path / "adapter", folder, kinds=kinds)
    tensors = load_file(adapter / "adapter_model.safetensors")
    factors = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            factors[module] = a, tensors[name.replace("lora_A", "lora_B")]
    assert {name.rpartition(".")[2] for name in factors} == set(kinds)
    adapted = small_llm(folder, enable_lora=True, max_loras=2, max_lora_rank=8, **LENGTH)
    request = LoRARequest("one", 1, str(adapter))
    results = answers(adapted, PROMPTS, PARAMS, lora_request=request)
    expected = small_llm(merged(tmp_path / "merged", folder, factors, 0.5), **LENGTH)
    check_equal(results, answers(expected, PROMPTS, PARAMS), atol=1e-3)
    base = answers(adapted, PROMPTS, PARAMS)
    assert any(a.token_ids != b.token_ids for a, b in zip(base, results, strict=True))


def test_taps_and_scores(folder, llm):
    layers = llm.model.model.config.layers
    params = replace(PARAMS, taps=Taps(hidden_states=(0, layers), attention={1: 0}))
    expected = answers(llm, PROMPTS, PARAMS)
    results = answers(llm, PROMPTS, params)
    check_equal(results, expected)
    for result, prompt in zip(results, PROMPTS, strict=True):
        shape = len(prompt) + len(result.token_ids) - 1, 64
        chex.assert_shape([result.taps.hidden_states[i] for i in (0, layers)], shape)
    model = load_model(folder, linear_impl="xla").model
    if "longrope" in str(model.config.ropes):
        return  # a module alone has the frequencies of long texts
    module = nnx.merge(model.graphdef, model.params)
    for result, prompt in zip(results, PROMPTS, strict=True):
        tokens = np.array([[*prompt, *result.token_ids]])
        scored = score(module, tokens)[0, len(prompt) :]
        chex.assert_trees_all_close(np.asarray(scored, np.float64), logprobs_of(result), atol=2e-4)
