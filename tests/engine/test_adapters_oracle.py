"""Requests of a mixed batch against PEFT on torch, which serves each adapter alone."""

from __future__ import annotations

from typing import Any

import chex
import numpy as np
import pytest

from pagedjax import LoRARequest
from tests.engine.runs import answers, greedy, logprobs_of, small_llm
from tests.weights.tiny_adapters import tiny_adapter

pytestmark = pytest.mark.oracle
PROMPTS = [[5, 6, 7], list(range(10, 27)), [40, 41], [9] * 12]
OPTIONS: dict[str, dict[str, Any]] = {"one": {}, "two": {"use_rslora": True, "lora_alpha": 3}}
NAMES = [None, "two", "one", "two"]


def test_log_probabilities_of_a_mixed_batch_are_those_of_peft(tiny_folder, tmp_path):
    torch, peft, transformers = map(pytest.importorskip, ("torch", "peft", "transformers"))
    folders = {
        name: tiny_adapter(tmp_path / name, tiny_folder, 4 + i, seed=i, **options)
        for i, (name, options) in enumerate(OPTIONS.items())
    }
    llm = small_llm(tiny_folder, enable_lora=True, max_loras=2, max_lora_rank=8)
    requests = [name and LoRARequest(name, 1, folders[name]) for name in NAMES]
    outputs = answers(llm, PROMPTS, greedy(6, logprobs=0), lora_request=requests)
    for name, prompt, answer in zip(NAMES, PROMPTS, outputs, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype="float32")
        if name:
            model = peft.PeftModel.from_pretrained(model, folders[name])
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1).numpy()
        assert tuple(logits.argmax(-1).tolist()) == answer.token_ids
        expected = logits[np.arange(6), list(answer.token_ids)]
        chex.assert_trees_all_close(logprobs_of(answer).astype(np.float32), expected, atol=1e-4)
