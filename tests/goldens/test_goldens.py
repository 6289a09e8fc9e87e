"""The goldens belong to today's tokenizer and, where torch is there (marker `oracle`), to today's
reference.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.weights import open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer
from tests.weights.bpe_oracle import smollm
from tests.weights.embedded import needs_gemma

HERE = Path(__file__).parent


@cache
def greedy() -> dict:
    return json.loads((HERE / "greedy.json").read_text(encoding="utf-8"))


def test_prompts_are_what_the_tokenizer_makes_of_their_texts():
    tokenizer = smollm()
    for entry in greedy()["prompts"]:
        ids = (
            tokenizer.encode(entry["text"])
            if "text" in entry
            else tokenizer.apply_chat_template(entry["messages"])
        )
        assert ids == entry["prompt_token_ids"], entry["name"]


def test_entries_are_complete_and_free_of_near_ties():
    prompts = greedy()["prompts"]
    assert len(prompts) >= 24
    assert len({entry["name"] for entry in prompts}) == len(prompts)
    assert {len(entry["prompt_token_ids"]) for entry in prompts} >= {1, 289}
    for entry in prompts:
        assert len(entry["token_ids"]) == len(entry["logprobs"]) == len(entry["margins"]) == 64
        assert entry["min_margin"] == min(entry["margins"]) > 1e-3
        for token, logprob, best in zip(
            entry["token_ids"], entry["logprobs"], entry.get("top5", []), strict=False
        ):
            assert best[0] == [token, logprob]
    assert sum("top5" in entry for entry in prompts) == 3
    assert sum("prompt_logprobs" in entry for entry in prompts) == 3
    assert os.path.getsize(HERE / "greedy.json") < 300_000


@pytest.mark.oracle
def test_our_tensors_equal_transformers():
    from tests.goldens.make_greedy import compare_with_transformers

    assert (
        compare_with_transformers(open_checkpoint("smollm2-135m"))
        == greedy()["tensors_equal_to_transformers"]
    )


@pytest.mark.oracle
def test_goldens_regenerate():
    import torch

    from tests.goldens import make_greedy

    torch.set_num_threads(1)
    model = make_greedy.load_model(open_checkpoint("smollm2-135m"))
    chosen = [entry for entry in greedy()["prompts"] if entry["name"] in ("name", "class", "chat")]
    assert len(chosen) == 3
    for entry in chosen:
        repeated = make_greedy.greedy(model, entry["prompt_token_ids"], 8)
        assert repeated["token_ids"] == entry["token_ids"][:8]
        # another CPU may sum in another order
        np.testing.assert_allclose(repeated["logprobs"], entry["logprobs"][:8], atol=2e-3)
        np.testing.assert_allclose(repeated["margins"], entry["margins"][:8], atol=2e-3)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "options", [{}, {"tied": False, "qkv_bias": True, "o_bias": True}, {"llama3": True}]
)
def test_tiny_models_are_what_transformers_loads(tmp_path, options):
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from tests.weights.tiny import llama3_scaling, tiny_llama

    options = dict(options)
    scaling = llama3_scaling() if options.pop("llama3", False) else None
    folder = tiny_llama(tmp_path, rope_scaling=scaling, shards=2, **options)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in open_checkpoint(folder).tensors.items():
        np.testing.assert_array_equal(tensor.read(), model.state_dict()[name].numpy())
    rope = model.config.rope_parameters
    assert rope["rope_type"] == ("llama3" if scaling else "default")
    tokenizer = load_tokenizer(open_checkpoint(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "the cat"}]
    assert tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


# --- Gemma 3 270M ---------------------------------------------------------------------------------


@cache
def gemma() -> dict:
    return json.loads((HERE / "greedy-gemma3.json").read_text(encoding="utf-8"))


def test_gemmas_entries_are_complete_and_free_of_near_ties():
    prompts = gemma()["prompts"]
    assert len(prompts) >= 20
    assert max(len(entry["prompt_token_ids"]) for entry in prompts) > 512 + 64
    for entry in prompts:
        assert len(entry["token_ids"]) == 64
        assert entry["min_margin"] > 1e-3


@pytest.mark.slow
@needs_gemma
def test_gemma_gives_the_tokens_of_transformers():
    """Each prompt's tokens are those of today's tokenizer too."""
    llm = LLM(
        "gemma3-270m",
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        progress=False,
    )
    prompts = gemma()["prompts"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate([entry["text"] for entry in prompts], params)
    for entry, output in zip(prompts, outputs, strict=True):
        assert list(output.prompt_token_ids) == entry["prompt_token_ids"], entry["name"]
        assert list(output.outputs[0].token_ids) == entry["token_ids"], entry["name"]


@pytest.mark.oracle
@needs_gemma
def test_gemmas_goldens_regenerate():
    import torch

    from tests.goldens import make_greedy

    torch.set_num_threads(1)
    checkpoint = open_checkpoint("gemma3-270m")
    model = make_greedy.load_model(checkpoint)
    for entry in gemma()["prompts"][:3]:
        repeated = make_greedy.greedy(model, entry["prompt_token_ids"], 8)
        assert repeated["token_ids"] == entry["token_ids"][:8]


@pytest.mark.oracle
@needs_gemma
def test_gemmas_tensors_equal_transformers():
    from tests.goldens.make_greedy import compare_with_transformers

    checkpoint = open_checkpoint("gemma3-270m")
    assert compare_with_transformers(checkpoint) == gemma()["tensors_equal_to_transformers"]
