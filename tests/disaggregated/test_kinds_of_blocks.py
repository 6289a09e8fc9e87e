"""Handovers of blocks that are more than keys and values of all tokens: windows, policies,
adapters, meshes.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.disaggregated import PrefillDecode
from pagedjax.host import replay, scheduler
from pagedjax.options.params import LoRARequest
from tests.device.test_model_families import BODY
from tests.engine.runs import check_idle, token_ids
from tests.engine.test_adapters import LORA, SIZES
from tests.engine.test_kv_policies import (
    GEMMA,
    GREEDY,
    PROMPTS,
    STREAMING,
    make,
    random_model,
    tokens_of,
)
from tests.engine.test_quest import QUEST
from tests.refusals import refused
from tests.weights.test_family_files import CONFIGS
from tests.weights.tiny import tiny_llama
from tests.weights.tiny_adapters import tiny_adapter

LLAMA = BODY | {"model_type": "llama"}
# model, options of both, options of the engine that decodes
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "windows": (GEMMA, {}, {}),
    "windows, small pool": (GEMMA | {"num_hidden_layers": 3}, {}, {"num_blocks": 13}),
    "streaming": (LLAMA, {"kv_policy": STREAMING}, {}),
    "quest": (LLAMA, {"kv_policy": QUEST}, {}),
    "smaller cache": (LLAMA, {"kv_cache_dtype": "float8_e4m3fn"}, {}),
    "latents": (CONFIGS["deepseek_v3"], {}, {}),
    "mesh to a device": (LLAMA, {"num_blocks": 61}, {"mesh": {"tensor": 2}, "devices": (2, 3)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_one_engine(tmp_path, name):
    config, shared, decode_only = CASES[name]
    model = random_model(config)
    single, prefill, decode = (make(model, **shared | options) for options in ({}, {}, decode_only))
    if "mesh" in decode_only:
        prefill, decode = decode, prefill
    for file, llm in (("prefill", prefill), ("decode", decode)):
        llm.engine.record(tmp_path / f"{file}.jsonl")
    pair = PrefillDecode(prefill, decode)
    expected = tokens_of(single)
    for _ in range(2):
        assert tokens_of(pair) == expected  # type: ignore[arg-type]
        for llm in (prefill, decode):
            scheduler.check(llm.engine.scheduler_state)
            check_idle(llm.engine)
    for file, llm in (("prefill", prefill), ("decode", decode)):
        llm.engine.record(None)
        assert replay.verify(tmp_path / f"{file}.jsonl").identical
    text = (tmp_path / "decode.jsonl").read_text()
    assert text.count('{"adopt":') >= len(PROMPTS)
    assert '"copies":[[' in text


def test_an_adapter_is_found_by_its_content_in_another_slot(tmp_path):
    folder = tiny_llama(tmp_path / "model", intermediate=104, tied=False)
    adapters = [
        LoRARequest(name, i + 1, str(tiny_adapter(tmp_path / name, folder, 4, seed=i)))
        for i, name in enumerate(("one", "two"))
    ]
    prefill, decode = (LLM(folder, **SIZES, **LORA) for _ in range(2))
    prompts = [list(range(5, 25))] * 2
    for adapter in adapters:
        prefill.load_adapter(adapter.lora_name, adapter.lora_path)
    expected = token_ids(prefill, prompts, GREEDY, lora_request=adapters)
    pair = PrefillDecode(prefill, decode)
    with refused(r"needs the adapter of content \w+, and the engine that goes on with it has none"):
        pair.generate(prompts, GREEDY, lora_request=adapters)
    for adapter in reversed(adapters):
        decode.load_adapter(adapter.lora_name, adapter.lora_path)
    assert token_ids(pair, prompts, GREEDY, lora_request=adapters) == expected  # type: ignore[arg-type]
    assert expected[0] != expected[1], "the adapters say different things"
    prefill.engine.add("x", list(range(5, 30)), SamplingParams(max_tokens=5), adapter="one")
    prefill.engine.step()
    prefill.engine.unload_adapter("one")
    with refused("'x' has an adapter that was unloaded or replaced; let it end here"):
        prefill.engine.handover("x")
    prefill.engine.cancel("x")
