"""Models with a sink in each head (GPT-OSS) in an engine; what cannot serve them is refused by
name.
"""

from __future__ import annotations

import dataclasses

import chex
import numpy as np
import pytest

from pagedjax import load_model
from pagedjax.device import attention
from pagedjax.device.attention import IMPLS
from pagedjax.device.draft_model import of_decoder
from pagedjax.engine.resolve import resolve
from pagedjax.host.replay import verify
from pagedjax.options.config import EngineConfig, Speculative
from tests.engine.runs import answers, greedy, logprobs_of, small_llm
from tests.refusals import refused
from tests.weights.tiny_families import write_family

GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
PROMPTS = [np.random.default_rng(n).integers(3, 320, n).tolist() for n in (60, 5, 33)]
GREEDY = greedy(24, logprobs=0)
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 22, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_family(tmp_path_factory.mktemp("oss") / "model", GPT_OSS))


@pytest.fixture(scope="module")
def alone(model):
    """The answers to requests of which each has all blocks."""
    llm = small_llm(model, **SMALL, enable_prefix_caching=False)
    return [answers(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]


def assert_same(results, expected):
    for result, answer in zip(results, expected, strict=True):
        assert result.token_ids == answer.token_ids
        chex.assert_trees_all_close(logprobs_of(result), logprobs_of(answer), atol=1e-4)


def test_answers_are_the_same_behind_a_preemption(model, alone, tmp_path):
    llm = small_llm(model, **SMALL)
    llm.engine.record(tmp_path / "run.jsonl")
    assert_same(answers(llm, PROMPTS, GREEDY), alone)
    llm.engine.record(None)
    assert verify(tmp_path / "run.jsonl").preemptions


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"attention_impl": "xla"}, {"speculative": {"method": "ngram", "num_tokens": 3}}],
    ids=["xla", "drafts"],
)
def test_answers_are_the_same_however_they_are_computed(model, alone, options):
    assert_same(answers(small_llm(model, **SMALL | options), PROMPTS, GREEDY), alone)


def test_what_takes_no_sinks_is_refused_with_what_does(model):
    own = IMPLS["xla"]._replace(name="own", takes_sinks=False)
    with refused(
        "takes no sinks, and the model has a sink in each head; those that take them: "
        "'reference', 'xla', 'cpu', 'pallas_gpu', 'pallas_tpu'"
    ):
        small_llm(model, attention_impl=own)


def test_a_draft_model_with_sinks_has_attention_that_takes_them(model, tiny, monkeypatch):
    draft = of_decoder(model.model)
    config = EngineConfig(
        speculative=Speculative(method="draft", model="x"), num_blocks=8, max_model_len=64
    )
    without = IMPLS["xla"]._replace(name="pallas_gpu", takes_sinks=False)
    monkeypatch.setitem(IMPLS, "pallas_gpu", without)  # as on a GPU, where it has no obstacle
    named = dataclasses.replace(config, attention_impl="pallas_gpu")
    with refused("the draft model: attention_impl 'pallas_gpu' takes no sinks"):
        resolve(named, tiny.model, draft=draft)
    monkeypatch.setattr(attention, "DEFAULTS", ("pallas_gpu", "xla"))
    assert resolve(config, tiny.model, draft=draft).attention_impl == "xla"
    without_sinks = of_decoder(tiny.model)
    assert resolve(config, tiny.model, draft=without_sinks).attention_impl == "pallas_gpu"


@pytest.fixture
def without_windows(tmp_path):
    full = GPT_OSS | {"layer_types": ["full_attention"] * 2}
    return load_model(write_family(tmp_path / "model", full), linear_impl="xla")


@pytest.mark.slow
def test_a_kv_policy_that_keeps_more_than_the_prompt_has_changes_nothing(without_windows):
    policy = {"name": "streaming", "sinks": 4, "window": 120}
    options = SMALL | {"num_blocks": 60}
    expected = answers(small_llm(without_windows, **options), PROMPTS[:1], GREEDY)
    results = answers(small_llm(without_windows, **options, kv_policy=policy), PROMPTS[:1], GREEDY)
    assert results[0].token_ids == expected[0].token_ids


def test_quest_takes_no_sinks(without_windows):
    quest = {"name": "quest", "tokens": 64, "dense_layers": 1}
    with refused("kv_policy 'quest' calls attention for one key head at a time, .* 'streaming'"):
        small_llm(without_windows, kv_policy=quest, **SMALL)
