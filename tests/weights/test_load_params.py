"""A table of parameters applied to a checkpoint; one error lists everything that does not fit."""

from __future__ import annotations

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax.device.models.param_table import ParamSource
from pagedjax.weights import open_checkpoint
from pagedjax.weights.load import load_params
from tests.refusals import refused
from tests.weights.tiny import tiny_gguf, tiny_llama

LAYER = "model.layers.{}."


def table(layers: int = 2, *, tied: bool = True, bias: bool = False) -> list[ParamSource]:
    """Fused q, k, v and gate, up; projections transposed to [in, out]. Sizes are `tiny_llama`'s."""
    rows = [ParamSource(("embed",), ("model.embed_tokens.weight",), (320, 64))]
    rows.append(ParamSource(("norm",), ("model.norm.weight",), (64,)))
    for i in range(layers):
        at = ("layers", str(i))
        name = LAYER.format(i)
        qkv = tuple(f"{name}self_attn.{x}_proj" for x in "qkv")
        weights = tuple(f"{x}.weight" for x in qkv)
        biases = tuple(f"{x}.bias" for x in qkv)
        rows += [
            ParamSource((*at, "qkv"), weights, (64, 128), True, rows=(64, 32, 32)),
            ParamSource((*at, "qkv_bias"), biases, (128,), optional=not bias),
            ParamSource((*at, "o"), (f"{name}self_attn.o_proj.weight",), (64, 64), True),
            ParamSource(
                (*at, "gate_up"),
                (f"{name}mlp.gate_proj.weight", f"{name}mlp.up_proj.weight"),
                (64, 192),
                True,
            ),
            ParamSource((*at, "down"), (f"{name}mlp.down_proj.weight",), (96, 64), True),
            ParamSource((*at, "norm1"), (f"{name}input_layernorm.weight",), (64,)),
            ParamSource((*at, "norm2"), (f"{name}post_attention_layernorm.weight",), (64,)),
        ]
    return rows if tied else [*rows, ParamSource(("head",), ("lm_head.weight",), (64, 320), True)]


def change(folder: Path, *, drop: tuple[str, ...] = (), **add: np.ndarray) -> Path:
    file = folder / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if name not in drop}
    save_file(tensors | {name.replace("__", "."): x for name, x in add.items()}, file)
    return folder


def test_parameters_are_joined_transposed_and_cast(tmp_path):
    folder = tiny_llama(tmp_path, tied=False, qkv_bias=True)
    stored = load_file(folder / "model.safetensors")
    params = load_params(open_checkpoint(folder), table(tied=False, bias=True), "float32")
    q, k, v = (stored[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    chex.assert_trees_all_equal(params["layers"]["1"]["qkv"], np.concatenate([q, k, v]).T)
    bias = np.concatenate([stored[f"model.layers.0.self_attn.{x}_proj.bias"] for x in "qkv"])
    chex.assert_trees_all_equal(params["layers"]["0"]["qkv_bias"], bias)
    chex.assert_trees_all_equal(params["head"], stored["lm_head.weight"].T)
    assert all(
        isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
        for leaf in jax.tree.leaves(params)
    )
    # the rows of the fused product are those of the three products
    x = jnp.arange(64.0) / 64
    np.testing.assert_allclose(
        x @ params["layers"]["1"]["qkv"],
        np.concatenate([q @ x, k @ x, v @ x]),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_are_cast_on_the_host_by_rounding_once(tmp_path, dtype):
    folder = tiny_llama(tmp_path)
    params = load_params(open_checkpoint(folder), table(), dtype)
    expected = jnp.asarray(
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    ).astype(dtype)
    assert params["embed"].dtype == dtype
    chex.assert_trees_all_equal(params["embed"], expected)


def test_shards_gguf_and_a_progress_bar_change_nothing(tmp_path, capfd):
    in_one = load_params(open_checkpoint(tiny_llama(tmp_path / "a")), table(), "float32")
    assert capfd.readouterr().err == ""
    in_shards = load_params(
        open_checkpoint(tiny_llama(tmp_path / "b", shards=3)), table(), "float32", progress=True
    )
    assert "loading 0 M parameters" in capfd.readouterr().err
    from_gguf = load_params(
        open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tmp_path / "a")), table(), "float32"
    )
    chex.assert_trees_all_equal(in_one, in_shards)
    chex.assert_trees_all_equal(in_one, from_gguf)


def test_optional_parameters_are_left_out_when_absent(tmp_path):
    params = load_params(open_checkpoint(tiny_llama(tmp_path)), table(), "float32")
    assert "qkv_bias" not in params["layers"]["0"]


def test_known_buffers_tied_heads_and_ignored_names_are_allowed(tmp_path):
    ones = np.ones(8, np.float32)
    folder = change(
        tiny_llama(tmp_path),
        model__layers__0__self_attn__rotary_emb__inv_freq=ones,
        lm_head__weight=ones,
        vision__tower=ones,
    )
    with refused(r"(?s)differences: 1 .*unexpected: vision\.tower \(8,\) in model\.safe"):
        load_params(open_checkpoint(folder), table(), "float32")
    assert load_params(open_checkpoint(folder), table(), "float32", ignore=["vision.*"])[
        "embed"
    ].shape == (320, 64)


def test_one_error_lists_everything_that_does_not_fit(tmp_path):
    folder = change(
        tiny_llama(tmp_path),
        drop=(
            "model.norm.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.1.mlp.up_proj.weight",
        ),
        model__layers__0__self_attn__v_proj__weight=np.zeros((31, 64), np.float32),
        model__layers__0__mlp__up_proj__weight=np.zeros((95, 64), np.float32),
        model__layers__1__mlp__gate_proj__weight=np.zeros((96, 63), np.float32),
        model__layers__1__input_layernorm__weight=np.zeros((64, 1), np.float32),
        model__layers__1__self_attn__q_norm__weight=np.zeros(16, np.float32),
    )
    with refused(f"^{folder} does not fit the llama model") as caught:
        load_params(open_checkpoint(folder), table(), "float32")
    lines = str(caught.value).split("\n  ")[1:]
    assert lines == [
        "missing: model.norm.weight (64,)",
        "missing: model.layers.0.self_attn.k_proj.weight (32, 64)",
        "shape of model.layers.0.self_attn.v_proj.weight: expected (32, 64), found (31, 64) in model.safetensors",
        "shape of model.layers.0.mlp.gate_proj.weight: expected 192 rows together, not 191, found (96, 64) in "
        "model.safetensors",
        "shape of model.layers.0.mlp.up_proj.weight: expected 192 rows together, not 191, found (95, 64) in "
        "model.safetensors",
        "missing: model.layers.1.mlp.up_proj.weight",
        "shape of model.layers.1.mlp.gate_proj.weight: expected (any, 64), found (96, 63) in model.safetensors",
        "shape of model.layers.1.input_layernorm.weight: expected (64,), found (64, 1) in model.safetensors",
        "unexpected: model.layers.1.self_attn.q_norm.weight (16,) in model.safetensors",
    ]


def test_part_of_an_optional_parameter_is_an_error(tmp_path):
    folder = change(
        tiny_llama(tmp_path), model__layers__0__self_attn__q_proj__bias=np.zeros(64, np.float32)
    )
    with refused(r"missing: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_params(open_checkpoint(folder), table(), "float32")
