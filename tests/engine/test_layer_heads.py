"""Models whose layers have heads of several sizes: layers have parts of a page. Their tokens are
tested in test_page_contract.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax import LoRARequest, Taps, load_model
from pagedjax.device import attention
from pagedjax.device.batch import Shapes, blank_sampling, joined
from pagedjax.device.layer_groups import LayerPages, PagePart, layer_groups
from pagedjax.device.memory import nbytes
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import LayerHeads, LayerKind
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.device.rope import Rope
from pagedjax.device.step import make_step
from pagedjax.engine.geometry import geometry
from pagedjax.engine.pack import Sources, pack
from pagedjax.host.types import EMPTY_PLAN
from pagedjax.options.config import EngineConfig
from pagedjax.weights.adapter_files import adapter_parts
from pagedjax.weights.architectures import FAMILIES, normalised
from tests import quick_compiler
from tests.device.test_llama import chosen
from tests.device.test_model_families import REAL
from tests.engine.page_kinds import PARAMS, SHARED, Subject, prompts
from tests.engine.runs import greedy, logprobs_of, small_llm
from tests.refusals import refused
from tests.weights.tiny_adapters import merged, random_factors, tiny_adapter
from tests.weights.tiny_families import write_family

pytestmark = pytest.mark.few_optimisations


@pytest.fixture(scope="module")
def heads(tiny) -> Subject:
    return Subject("heads", tiny)


@pytest.fixture(scope="module")
def loaded(heads) -> Any:
    return heads.loaded


# memory -------------------------------------------------------------------------------------------


def test_layers_of_one_window_share_pages():
    full = LayerPages(None, parts=2)
    windowed = LayerPages(8)
    groups = layer_groups([windowed, full, windowed, full, full], block_size=4)
    assert groups.windows == (None, 8)
    assert groups.size == 2
    assert groups.places == ((1, 0), (0, 0), (1, 1), (0, 0), (0, 1))
    whole = PagePart(0, 1)
    assert groups.parts == (whole, PagePart(0, 2), whole, PagePart(1, 2), PagePart(0, 2))


def test_a_block_has_the_parts_of_its_layers(loaded):
    """Of 96 numbers a token: four layers of 16 and of 48 need two pages, and so do four of 32."""
    llm = small_llm(loaded, block_size=4, num_blocks=20)
    shapes = llm.engine.runtime.cache_shapes
    groups = llm.engine.runtime.geometry.layouts.model
    assert groups is not None
    assert groups.windows == (None, 9)
    chex.assert_shape((*shapes.k, *shapes.v), (2 * 21, 1, 4, 96))
    assert len(shapes.k) == groups.size == 2
    block_bytes = 4 * 2 * (2 * 2 * 96 * 4 + 4)  # two groups of two pages, and the token ids
    assert llm.engine.memory.block_bytes == block_bytes
    assert nbytes(llm.engine._state.cache) == 21 * block_bytes


def test_a_gemma_4_of_31_billion_wastes_no_page():
    """Two of its layers that see all tokens have one page of those with windows."""
    model_type, settings, _, token_bytes = REAL["Gemma-4-31B, the text"]
    config = normalised({"model_type": model_type, **settings}, "a test")
    decoder = FAMILIES[config["model_type"]].from_hf(config)
    model = Model(decoder, None, {}, "bfloat16")  # type: ignore[arg-type]  # shapes alone
    windows = geometry(EngineConfig(block_size=16, max_model_len=8192), model, "bfloat16")
    assert windows.layouts.model.windows == (None,) + 10 * (1024,)
    assert windows.block_bytes == 16 * (token_bytes + 11 * 4)
    options = EngineConfig(block_size=16, max_model_len=8192, free_window_blocks=False)
    kept = geometry(options, model, "bfloat16")
    assert kept.groups == 1
    assert kept.views == ()
    assert kept.block_bytes == 16 * (token_bytes + 4)


@pytest.mark.slow
@pytest.mark.parametrize("t", [8, 96])  # without the loop over prompt chunks, and with it
def test_a_step_updates_memory_that_layers_share_in_place(loaded, t):
    """The compiled program copies no array of a cache of 15 MB each."""
    model = loaded.model
    config = EngineConfig(block_size=16, max_model_len=128)
    shape = geometry(config, model, "float32", "xla")
    pages = shape.cache_shapes(1250, model)
    sizes = Shapes((t,), 8, 16, 8, 128, 320, layout=shape.layouts.model)
    rows = sizes.rows(t)
    batch = pack(EMPTY_PLAN, {}, sizes, {rows: blank_sampling(rows)}, sources=Sources())
    step = make_step(model, attention.attend("xla", model.config.attn_scale), seed=0)
    with quick_compiler.all_quickly():  # buffers are assigned as in a fast program
        compiled = step.lower(model.leaves, pages, joined(batch)).compile()
    arrays = jax.tree.leaves(pages)
    total = sum(array.size * array.dtype.itemsize for array in arrays)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= total > 4 * 15e6
    assert memory.temp_size_in_bytes < 15e6 / 10
    counts = "|".join(str(2 * 1251 * parts) for parts in (1, 2, 3, 6))
    all_pages = re.compile(rf"= \w+\[(?:{counts}),[\d,]+\]\S* (\S+)\(")
    kinds = {match[1] for match in all_pages.finditer(compiled.as_text())}
    assert {"parameter", "scatter", "bitcast"} & kinds, "the pattern finds nothing"
    assert not kinds & {"copy", "copy-start", "transpose", "concatenate", "select", "convert"}


# tokens -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_of_attention_do_not_depend_on_blocks(heads):
    """Of a layer in parts of six, of one in parts of two, and of one with a window."""
    taps = Taps(attention={1: (0, 3), 2: 1, 5: 0})
    params = replace(PARAMS, n=1, temperature=0.0, taps=taps)
    llms = heads.plain, small_llm(heads.loaded, block_size=4, attention_impl="xla")
    for outputs in zip(*(llm.generate(prompts(), params) for llm in llms), strict=True):
        of_plain, of_small = (output.outputs[0].taps for output in outputs)
        assert of_plain
        assert of_small
        chex.assert_trees_all_close(of_plain.attention, of_small.attention, atol=1e-4)
        assert list(of_plain.attention) == [1, 2, 5]


GEMMA_4 = {
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "max_position_embeddings": 128,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "eos_token_id": 2,
}


def gemma_4(folder: Path, **settings: Any) -> Path:
    """A folder of a random model whose scores are of the size of those of a trained one."""
    write_family(folder, GEMMA_4 | settings)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("q_norm.weight"):
            tensors[name] *= tensors[name].size ** -0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_adapters_are_those_of_merged_models(tmp_path):
    """A layer without a product of values has no adapter of it."""
    model = write_family(tmp_path / "model", GEMMA_4)
    factors = random_factors(model, 4)
    adapter = tiny_adapter(tmp_path / "adapter", model, 4)
    llm = small_llm(load_model(model), enable_lora=True, max_lora_rank=4, block_size=4)
    params = greedy(6, logprobs=0)
    outputs = llm.generate(prompts(), params, lora_request=LoRARequest("a", 1, adapter))
    whole = small_llm(load_model(merged(tmp_path / "merged", model, factors, 0.5)), block_size=4)
    for output, expected in zip(outputs, whole.generate(prompts(), params), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        numbers = [logprobs_of(x.outputs[0]) for x in (output, expected)]
        chex.assert_trees_all_close(*numbers, atol=1e-3)
    values = "model.layers.1.self_attn.v_proj"
    pair = np.zeros((2, 32), np.float32), np.zeros((16, 2), np.float32)
    with refused(f"{values}: no such matrix, or it has no adapters here"):
        adapter_parts({values: pair}, load_model(model).model.config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"weight_dtype": "int8"}, {"dtype": "bfloat16"}, {"batch_invariant": True}]
)
def test_answers_stay_near_those_in_floats(tmp_path, options):
    # with such sizes it can be batch-invariant
    model = gemma_4(tmp_path / "model", head_dim=16, global_head_dim=32)
    stored = {key: value for key, value in options.items() if key != "batch_invariant"}
    llms = [
        small_llm(load_model(model, **stored), block_size=4, **options),
        small_llm(load_model(model), block_size=4),
    ]
    params = greedy(1, prompt_logprobs=0)
    for prompt in prompts():
        logprobs = [llm.generate([prompt], params)[0].prompt_logprobs or () for llm in llms]
        near, exact = (chosen(prompt[1:], of_prompt[1:]) for of_prompt in logprobs)
        assert np.abs(near - exact).mean() < (1e-4 if "batch_invariant" in options else 0.2)


@pytest.mark.slow
def test_heads_of_256_and_512_have_one_answer_in_each_implementation(tmp_path):
    sizes = {"head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 2}
    model = load_model(gemma_4(tmp_path / "model", **sizes))
    params = greedy(1, prompt_logprobs=0)
    logprobs = {
        impl: small_llm(model, block_size=4, attention_impl=impl).generate(prompts()[3], params)
        for impl in ("reference", "xla", "cpu")
    }
    numbers = [chosen(prompts()[3][1:], x[0].prompt_logprobs[1:]) for x in logprobs.values()]
    chex.assert_trees_all_close(*numbers, atol=1e-3)


# refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_scale": 0.0}, "attn_scale is 0, and kinds have heads of their own"),
        ({"qk_norm": "width"}, "the model has qk_norm = 'width', which does not go with them"),
        (
            {"kinds": (SHARED, LayerKind(mixer=ShortConv(3)))},
            r"the model has kinds\[...\].mixer, which does not go with them",
        ),
        (
            {"kinds": (LayerKind(heads=LayerHeads(4, 3, 16)),)},
            r"kinds\[0\] has 4 query heads and 3 key heads of 16 numbers; the first must be",
        ),
        ({"ropes": (Rope(10.0), Rope(10.0))}, r"ropes\[1\] has no `rotated`, and kinds have heads"),
        (
            {"ropes": (Rope(10.0, rotated=12), Rope(10.0, rotated=12))},
            "12 of the 8 numbers of a head are rotated",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(fields, message, loaded):
    with refused(message):
        replace(loaded.model.config, **fields)
