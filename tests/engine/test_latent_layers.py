"""A model with latents in an engine: a token costs one row a layer, and tokens do not depend on how
blocks are cut, shared, copied, moved or found again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.device.draft_model import of_decoder
from pagedjax.device.memory import GIB, DeviceMemory, nbytes
from pagedjax.device.models import Model, assemble
from pagedjax.device.models.eagle import eagle_config
from pagedjax.device.models.latent import Latent
from pagedjax.engine.geometry import geometry
from pagedjax.engine.resolve import resolve
from pagedjax.host.replay import verify
from pagedjax.options.config import EngineConfig
from pagedjax.weights.architectures import FAMILIES, normalised
from tests.device.test_llama import chosen
from tests.device.test_model_families import REAL
from tests.engine.runs import answers, greedy, logprobs_of, small_llm
from tests.engine.test_mixer_layers import (
    BEAMS,
    PARAMS,
    check_same,
    prompts,
    random_parameters,
    tokens_of,
)
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

LATENT = Latent(rank=16, rotated=8, key=4, value=6, query_rank=20)
SWAPPED = {
    "block_size": 4,
    "max_num_batched_tokens": 7,
    "num_blocks": 16,
    "preemption": "swap",
    "swap_space_gib": 0.05,
}


@pytest.fixture(scope="module")
def loaded(tiny) -> Any:
    """The tiny model's tokenizer and sizes, with random layers with latents."""
    config = replace(
        tiny.model.config, latent=LATENT, kv_heads=1, head_dim=LATENT.row, attn_scale=0.0
    )
    return replace(tiny, model=assemble(config, random_parameters(config), "float32"))


@pytest.fixture(scope="module")
def plain(loaded) -> LLM:
    """Whole prompts and no sharing, and attention by its definition."""
    return small_llm(
        loaded,
        enable_prefix_caching=False,
        block_size=16,
        max_num_batched_tokens=128,
        attention_impl="reference",
    )


@pytest.fixture(scope="module")
def expected(plain) -> list[Any]:
    return tokens_of(plain)


CASES: dict[str, dict[str, Any]] = {
    "swapped": SWAPPED,
    "recomputed": {"block_size": 4, "max_num_batched_tokens": 12, "num_blocks": 16},
    "blocks of a token": {"block_size": 1, "max_num_batched_tokens": 9},
    "plain XLA": {"block_size": 8, "attention_impl": "xla", "max_num_batched_tokens": 32},
    "drafts": {
        "block_size": 8,
        "speculative": {"method": "ngram", "num_tokens": 3},
        "max_num_batched_tokens": 32,
    },
    "no lookahead": {"block_size": 8, "lookahead": 0},
    "a baseline": {"mixed_steps": False, "max_num_batched_tokens": 32},
    "a draft model": {"block_size": 8, "max_num_batched_tokens": 32},
    "three devices, heads of zeros": {"block_size": 8, "mesh": {"tensor": 3}},
}


# memory -------------------------------------------------------------------------------------------


def test_a_token_costs_one_row_a_layer(loaded):
    llm = small_llm(loaded, block_size=4, num_blocks=20)
    runtime = llm.engine.runtime
    layers = loaded.model.config.layers
    chex.assert_shape(runtime.cache_shapes.k, (21, 1, 4, LATENT.row))
    assert runtime.cache_shapes.v == (None,) * layers
    block_bytes = 4 * (layers * 4 * LATENT.row + 4)  # and the token ids
    assert llm.engine.memory.block_bytes == block_bytes
    assert nbytes(llm.engine._state.cache) == 21 * block_bytes


def test_the_plan_of_memory_counts_576_numbers_a_token_and_layer_of_a_deepseek():
    model_type, settings, _, token_bytes = REAL["DeepSeek-V2-Lite"]
    config = normalised({"model_type": model_type, **settings}, "a test")
    decoder = FAMILIES[model_type].from_hf(config)
    model = Model(decoder, None, {}, "bfloat16")  # type: ignore[arg-type]  # shapes alone
    options = EngineConfig(block_size=16, max_model_len=1024, max_num_seqs=1000)
    assert token_bytes == 2 * 27 * 576
    token_bytes += 4  # its id
    assert geometry(options, model, "bfloat16").block_bytes == 16 * token_bytes
    resolved = resolve(options, model, DeviceMemory("a device", 8 * GIB, 2 * GIB))
    fraction = options.memory_fraction
    assert resolved.num_blocks == int(2 * GIB * fraction) // (16 * token_bytes) - 1


@pytest.mark.slow
def test_bits_of_8_take_a_quarter(loaded, plain):
    llm = small_llm(
        loaded, block_size=16, kv_cache_dtype="float8_e4m3fn", max_num_batched_tokens=128
    )
    layers = loaded.model.config.layers
    assert llm.engine.memory.block_bytes == 16 * (layers * LATENT.row + 4)
    params = greedy(1, logprobs=0, prompt_logprobs=0)
    outputs, plain_outputs = (engine.generate(prompts(), params) for engine in (llm, plain))
    for output, plain_output, prompt in zip(outputs, plain_outputs, prompts(), strict=True):
        assert output.prompt_logprobs
        assert plain_output.prompt_logprobs
        logprobs = chosen(prompt[1:], output.prompt_logprobs[1:])
        errors = np.abs(logprobs - chosen(prompt[1:], plain_output.prompt_logprobs[1:]))
        assert 0 < errors.mean() < 0.2


# tokens -------------------------------------------------------------------------------------------


def test_tokens_of_a_request_do_not_depend_on_its_company(loaded, expected, tmp_path):
    """Together they are cut, swapped and copied; alone they find what is in the cache."""
    llm = small_llm(loaded, **SWAPPED)
    llm.engine.record(tmp_path / "run.jsonl")
    check_same(tokens_of(llm), expected)
    llm.engine.record(None)
    assert verify(tmp_path / "run.jsonl").identical
    text = (tmp_path / "run.jsonl").read_text()
    for moved in ("swap_out", "swap_in", "copies"):
        assert f'"{moved}":[[' in text, moved
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts()]
    assert outputs[-1].num_cached_tokens == 12  # three blocks that all prompts share
    alone = [branch for output in outputs for branch in output.outputs]
    check_same([(branch.token_ids, branch.cumulative_logprob) for branch in alone], expected)


@pytest.mark.slow_cases(
    "swapped",
    "recomputed",
    "plain XLA",
    "drafts",
    "a draft model",
    "three devices, heads of zeros",
)
@pytest.mark.parametrize("name", CASES)
def test_tokens_do_not_depend_on_how_pages_are_kept(name, loaded, tiny_folder, expected):
    options = CASES[name]
    if name == "a draft model":
        drafter = {"method": "draft", "model": str(tiny_folder), "num_tokens": 3}
        options = options | {"speculative": drafter}
    llm = small_llm(loaded, **options)
    check_same(tokens_of(llm, rounds=2), expected * 2)


def test_a_prefix_is_found_at_every_boundary(loaded, plain):
    """A prompt of 20 tokens, in blocks of 4, of which another one has the first n."""
    llm = small_llm(loaded, **SWAPPED | {"num_blocks": 60})
    rng = np.random.default_rng(5)
    first = rng.integers(3, 320, 20).tolist()
    llm.generate([first], greedy(1))
    params = greedy(2, logprobs=0)
    for shared in range(1, 20):
        prompt = first[:shared] + rng.integers(3, 320, 3).tolist()
        (output,) = llm.generate([prompt], params)
        assert output.num_cached_tokens == shared // 4 * 4
        (plain_answer,) = answers(plain, [prompt], params)
        assert output.outputs[0].token_ids == plain_answer.token_ids
        logprobs = [logprobs_of(answer) for answer in (output.outputs[0], plain_answer)]
        chex.assert_trees_all_close(*logprobs, atol=1e-3)


@pytest.mark.slow
def test_a_beam_search_has_the_same_beams_in_any_blocks(loaded):
    searches = []
    for sizes in ({"block_size": 16}, {"block_size": 4, "max_num_batched_tokens": 11}):
        llm = small_llm(loaded, **sizes)
        searches.append([output.sequences for output in llm.beam_search(prompts(), BEAMS)])
    first, second = ([[beam.tokens for beam in beams] for beams in search] for search in searches)
    assert first == second


# refusals -----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "equal bits": (
        {"batch_invariant": True},
        r"the model keeps latents \(rows of 24 numbers\), whose results may depend on a chunk's",
    ),
    "selected blocks": (
        {"kv_policy": {"name": "quest", "tokens": 32}},
        "of which no blocks are selected yet, and kv_policy is 'quest'",
    ),
    "a kernel for GPUs": (
        {"attention_impl": "pallas_gpu"},
        "attention_impl 'pallas_gpu' runs on platform 'gpu'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_such_a_model_cannot_have_is_refused(name, loaded):
    options, text = REFUSED[name]
    with refused(text):
        small_llm(loaded, **options)


def test_drafters_that_do_not_go_with_latents_are_refused(loaded):
    with refused("the draft model keeps latents .* use one with usual attention"):
        of_decoder(loaded.model)
    with refused("a draft head is for models with usual .* or a draft model that has usual"):
        eagle_config(loaded.model.config, 100)
