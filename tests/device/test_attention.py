"""Implementations of attention in an engine: the default, limits, and one's own in a file."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import pytest

from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.device import attention
from pallas_kernels.paged_attention import IMPLS, Implementation
from tests.refusals import refused

SIZES = {"query_dtype": "float32", "head_dim": 64, "block_size": 16, "kv_heads": 3, "heads": 9}
OWN = """
from pallas_kernels.paged_attention import Implementation, paged_attention

prepared, shapes = [], []


def attend(q, k_pages, v_pages, *rest, **options):
    shapes.append(k_pages.shape)
    return paged_attention(q, k_pages, v_pages, *rest, impl="reference", **options)


def obstacle(device, *, block_size, **sizes):
    return "" if block_size == 8 else f"needs blocks of 8 tokens, and they have {block_size}"


def two_tokens(head_dim):
    return 2 * head_dim


def prepare(**facts):
    prepared.append(facts)


def bits(dtype):
    return "uint16" if dtype == "bfloat16" else dtype


MINE = Implementation("mine", attend, obstacle, page_row=two_tokens, prepare=prepare, page_dtype=bits)
SIZE = 8
"""


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return f"{tmp_path}/own.py:MINE"


def greedy(model, impl: str, **options) -> tuple[list[tuple[int, ...]], LLM]:
    sizes = {
        "block_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "token_buckets": (16,),
        "num_blocks": 40,
    }
    llm = LLM(model, attention_impl=impl, progress=False, max_model_len=64, **sizes, **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(3, 30)), [9]]
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)], llm


def test_own_implementation_in_one_file_gives_the_tokens_of_reference(one_layer_folder, own):
    """A wrapper of `reference` whose pages have rows of two tokens."""
    expected, _ = greedy(one_layer_folder, "reference")
    tokens, llm = greedy(one_layer_folder, own)
    assert tokens == expected
    assert llm.engine.config.attention_impl == own
    file = attention.find(own).attend.__globals__
    assert file["prepared"] == [{"dtype": "float32", "query_dtype": "float32", "invariant": False}]
    m = llm.engine.model.config
    assert set(file["shapes"]) == {(41, m.kv_heads, 4, 2 * m.head_dim)}


@pytest.mark.slow
def test_own_implementation_chooses_the_dtype_of_its_pages(tiny_folder, own):
    """Also of a draft model's pages, which it reads too."""
    draft = {"speculative": {"method": "draft", "model": str(tiny_folder), "num_tokens": 2}}
    expected, _ = greedy(tiny_folder, "reference", kv_cache_dtype="bfloat16")
    tokens, llm = greedy(tiny_folder, own, kv_cache_dtype="bfloat16", **draft)
    assert tokens == expected
    pages = llm.engine._state.cache
    chex.assert_type([*pages.k, *pages.v, *pages.draft.k, *pages.draft.v], jnp.uint16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere.py:MINE",
            r"attention_impl is 'nowhere.py:MINE', but there is no file nowhere.py; write one of refer",
        ),
        ("own.py:SIZE", r"SIZE in own.py is no Implementation; those in it: \['MINE'\]"),
    ],
)
def test_unknown_implementations_raise_with_the_reason(own, tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with refused(message):
        attention.find(EngineConfig(attention_impl=name).attention_impl or "")


def test_own_implementation_that_cannot_serve_raises_with_its_reason(own):
    with refused(r"attention_impl '.*own.py:MINE' needs blocks of 8 tokens, and they have 16; 'x"):
        attention.choose(own, jax.devices()[0], dtype="float32", **SIZES)


class Device(NamedTuple):
    platform: str
    device_kind: str = ""
    compute_capability: str = ""


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "expected"),
    [
        ("cpu", "float32", 64, "cpu"),
        ("cpu", "float16", 64, "xla"),
        ("cpu", "float32", 12, "xla"),
        ("gpu", "bfloat16", 64, "xla"),
        ("tpu", "bfloat16", 64, "xla"),
    ],
)
def test_default_is_the_compiled_kernel_on_a_cpu_where_it_can_serve(
    platform, dtype, head_dim, expected
):
    pytest.importorskip("llvmlite")
    sizes = SIZES | {"head_dim": head_dim}
    assert attention.choose(None, Device(platform), dtype=dtype, **sizes) == expected


@pytest.mark.parametrize(
    ("capability", "jax_version", "dtype", "expected"),
    [
        ("9.0", (0, 11, 2), "bfloat16", "pallas_gpu"),
        ("9.0", (0, 11, 2), "float32", "xla"),
        ("9.0", (0, 10, 2), "bfloat16", "xla"),
        ("8.0", (0, 11, 2), "bfloat16", "xla"),
    ],
)
def test_default_on_a_gpu_is_the_kernels_for_hopper_where_they_can_serve(
    capability, jax_version, dtype, expected, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    device = Device("gpu", "an NVIDIA GPU", capability)
    assert attention.choose(None, device, dtype=dtype, **SIZES | {"query_dtype": dtype}) == expected


def test_one_implementation_serves_heads_of_all_sizes(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    device = Device("gpu", "an NVIDIA GPU", "9.0")
    kind = {"dtype": "bfloat16", "query_dtype": "bfloat16", "block_size": 16}
    narrow, wide = ({"heads": 8, "kv_heads": 2, "head_dim": size} for size in (128, 512))
    choose = partial(attention.choose, device=device, **kind)
    assert choose(None, heads_of_layers=[narrow]) == "pallas_gpu"
    assert choose(None, heads_of_layers=[narrow, wide]) == "xla"
    with refused(
        "attention_impl 'pallas_gpu' needs a head size of .*, and it is 512; 'xla' has no"
    ):
        choose("pallas_gpu", heads_of_layers=[narrow, wide])


def test_every_implementation_is_a_record_under_its_name():
    assert all(
        isinstance(impl, Implementation) and impl.name == name for name, impl in IMPLS.items()
    )
    assert all(impl.takes_sinks for impl in IMPLS.values()), "defaults are not asked"
    for name in IMPLS:  # the configuration knows the same names
        assert EngineConfig(attention_impl=name).attention_impl == name
