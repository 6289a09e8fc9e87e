"""Requests of a mixed batch against PEFT on torch, which serves each adapter alone."""

from __future__ import annotations

from typing import Any

import chex
import numpy as np
import pytest

from pagedjax import LoRARequest
from tests.engine.runs import greedy, small_llm
from tests.weights.tiny_adapters import tiny_adapter

pytestmark = pytest.mark.oracle
PROMPTS = [[5, 6, 7], list(range(10, 27)), [40, 41], [9] * 12]
OPTIONS: dict[str, dict[str, Any]] = {"one": {}, "two": {"use_rslora": True, "lora_alpha": 3}}
NAMES = [None, "two", "one", "two"]


def test_log_probabilities_of_a_mixed_batch_are_those_of_peft(tiny_folder, tmp_path):
    torch, peft, transformers = (
        pytest.importorskip(name) for name in ("torch", "peft", "transformers")
    )
    each = enumerate(OPTIONS.items())
    folders = {
        name: tiny_adapter(tmp_path / name, tiny_folder, 4 + i, seed=i, **more)
        for i, (name, more) in each
    }
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "num_blocks": 64,
    }
    llm = small_llm(tiny_folder, enable_lora=True, max_loras=2, max_lora_rank=8, **sizes)
    params = greedy(6, logprobs=0)
    wanted = [name and LoRARequest(name, 1, folders[name]) for name in NAMES]
    outputs = llm.generate(PROMPTS, params, lora_request=wanted)
    for name, prompt, output in zip(NAMES, PROMPTS, outputs, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype="float32")
        if name:
            model = peft.PeftModel.from_pretrained(model, folders[name])
        (one,) = output.outputs
        ids = torch.tensor([[*prompt, *one.token_ids]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1).numpy()
        assert tuple(logits.argmax(-1).tolist()) == one.token_ids
        found = [
            entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)
        ]
        expected = logits[np.arange(len(found)), list(one.token_ids)]
        chex.assert_trees_all_close(np.array(found, np.float32), expected, atol=1e-4)
