"""`convert`: folders for other programs, and refused models and targets."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax.device.models.param_table import ParamSource
from pagedjax.weights import architectures, open_checkpoint
from pagedjax.weights.convert import convert, rows_of
from pagedjax.weights.huggingface import INDEX
from pagedjax.weights.pretrained import read_model
from pagedjax.weights.tokenizer_files import load_tokenizer
from pagedjax.weights.tree import named
from tests.device.test_model_families import CASES, GPT2
from tests.refusals import refused
from tests.weights.tiny import llama3_scaling, tiny_gguf, tiny_llama, write_json, write_tokenizer

assert_equal = partial(chex.assert_trees_all_equal, strict=True)  # dtypes, too


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors, read by the safetensors package."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "float32", "tied": False, "qkv_bias": True, "o_bias": True},
        {"dtype": "bfloat16", "shards": 2, "rope_scaling": llama3_scaling()},
        {"dtype": "float16", "kv_heads": 4},
    ],
    ids=str,
)
def test_conversion_to_orbax_and_back_gives_the_tensors_of_the_source(tmp_path, kind):
    source = tiny_llama(tmp_path / "hf", **kind)
    back = convert(convert(source, tmp_path / "orbax", "orbax"), tmp_path / "back", "safetensors")
    assert_equal(tensors(back), tensors(source))
    original = open_checkpoint(source)
    converted = open_checkpoint(back)
    assert {**converted.config, "torch_dtype": ""} == {**original.config, "torch_dtype": ""}
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == kind["dtype"]
    assert converted.generation_config == original.generation_config
    assert load_tokenizer(converted).encode("the cat") == load_tokenizer(original).encode("the cat")


def test_from_safetensors_and_gguf_to_safetensors(tmp_path, source):
    assert_equal(tensors(convert(source, tmp_path / "a", "safetensors")), tensors(source))
    assert_equal(
        tensors(convert(tiny_gguf(tmp_path / "m.gguf", source), tmp_path / "b", "safetensors")),
        tensors(source),
    )
    half = tensors(convert(source, tmp_path / "c", "safetensors", dtype="float16"))
    assert_equal(half, {name: x.astype(np.float16) for name, x in tensors(source).items()})


def test_files_are_as_full_as_the_limit_allows_and_have_an_index(tmp_path, source):
    folder = convert(source, tmp_path / "out", "safetensors", shard_bytes=60_000)
    assert_equal(tensors(folder), tensors(source))
    index = json.loads((folder / INDEX).read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-00008.safetensors" for i in range(1, 9)
    ]
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(source).values())
    for file in files:
        stored = load_file(file)
        assert {
            name for name, file_name in index["weight_map"].items() if file_name == file.name
        } == set(stored)
        # embeddings of 81,920 bytes
        assert sum(x.nbytes for x in stored.values()) <= 60_000 or len(stored) == 1
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    assert_equal({n: t.read() for n, t in open_checkpoint(folder).tensors.items()}, tensors(source))


def test_a_transposed_parameter_goes_back_transposed(tmp_path):
    """GPT-2 stores [in, out], one matrix for q, k and v, and has different config keys."""
    rng = np.random.default_rng(0)
    source = tmp_path / "hf"
    source.mkdir()
    hf = GPT2 | {"model_type": "gpt2", "n_layer": 1, "n_inner": 80}
    write_json(source / "config.json", hf)
    family = architectures.FAMILIES["gpt2"]
    table = family.param_table(family.from_hf(architectures.normalised(hf, "config")))
    shapes = {x.sources[0]: x.shape[::-1] if x.transpose else x.shape for x in table}
    assert shapes["h.0.attn.c_attn.weight"] == (64, 192)
    save_file(
        {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()},
        source / "model.safetensors",
    )
    write_tokenizer(source, 320)
    back = convert(convert(source, tmp_path / "orbax", "orbax"), tmp_path / "back", "safetensors")
    assert_equal(tensors(back), tensors(source))
    written = json.loads((back / "config.json").read_text())
    assert {key: written[key] for key in hf} == hf


@pytest.mark.parametrize(
    ("sources", "rows", "shape", "expected"),
    [
        (("m.q_proj.weight", "m.k_proj.weight", "m.v_proj.weight"), (), (128, 64), (64, 32, 32)),
        (
            ("m.q_proj.weight", "m.k_proj.weight", "m.v_proj.weight"),
            (100, 14, 14),
            (128, 64),
            (100, 14, 14),
        ),
        (("e.0.w1", "e.0.w3", "e.1.w1", "e.1.w3"), (), (128, 64), (32,) * 4),
        (("one",), (), (128, 64), (128,)),
    ],
)
def test_rows_come_from_the_table_or_from_the_heads(source, sources, rows, shape, expected):
    config = architectures.FAMILIES["llama"].from_hf(open_checkpoint(source).config)
    assert rows_of(ParamSource(("a",), sources, shape, rows=rows), config) == expected
    with refused(r"a\.b has 128 rows for 3 tensors; its table must give their rows"):
        rows_of(ParamSource(("a", "b"), ("x", "y", "z"), (128, 64)), config)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_an_existing_target_is_not_changed(tmp_path, source, to):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with refused(r"full exists and is not an empty folder; choose a new folder"):
        convert(source, tmp_path / "full", to)
    with refused(r"notes\.txt exists and is not an empty folder"):
        convert(source, tmp_path / "full" / "notes.txt", to)
    assert [file.name for file in tmp_path.rglob("*")] == ["full", "notes.txt"]
    (tmp_path / "empty").mkdir()
    assert open_checkpoint(convert(source, tmp_path / "empty", to)).tensors


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_failed_conversion_leaves_no_files(tmp_path, to):
    source = tiny_llama(tmp_path / "hf")
    opened = (source / "model.safetensors").read_bytes()
    stored = load_file(source / "model.safetensors")
    save_file(
        {name: x for name, x in stored.items() if name != "model.norm.weight"},
        source / "model.safetensors",
    )
    with refused(r"hf does not fit the llama.*\n  missing: model\.norm\.weight \(64,\)"):
        convert(source, tmp_path / "out", to)
    (source / "model.safetensors").write_bytes(opened[:-4])
    with refused(r"model\.safetensors is truncated: tensor"):
        convert(source, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt("no space left")])
def test_an_incomplete_folder_is_removed(tmp_path, source, monkeypatch, error):
    from pagedjax.weights import convert as module

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "write_shards", fail)
    with pytest.raises(type(error), match="no space left"):
        convert(source, tmp_path / "out", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_models_that_transformers_lacks_are_refused_for_safetensors_only(tmp_path, source):
    scaled = tiny_gguf(tmp_path / "m.gguf", source, freq_factors=[1.0, 2.0] * 4)
    with refused(r"m\.gguf: rope_scaling is 'freqs'.*convert to orbax"):
        convert(scaled, tmp_path / "a", "safetensors")
    scaling = open_checkpoint(convert(scaled, tmp_path / "b", "orbax")).config["rope_scaling"]
    assert scaling == {"rope_type": "freqs", "factors": [1.0, 2.0] * 4}
    biased = tiny_llama(tmp_path / "hf", qkv_bias=True)
    with refused(r"hf: only q, k and v have a bias, in a llama.*convert to orbax"):
        convert(biased, tmp_path / "c", "safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf"}, "to is 'gguf'; it must be one of 'orbax', 'safetensors'"),
        ({"to": "orbax", "dtype": "int8"}, "dtype is 'int8'; it must be one of None, 'float32'"),
        ({"to": "safetensors", "shard_bytes": 0}, "shard_bytes is 0; it must be at least 1"),
    ],
)
def test_wrong_options_are_named(tmp_path, source, options, message):
    with refused(message):
        convert(source, tmp_path / "out", **options)


# --- other programs -------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize(
    "case", ["Llama 3", "Qwen2, windows from layer 1", "Gemma 3", "GPT-2", "Mixtral", "GPT-OSS"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_opens_a_model_converted_to_orbax_and_back(tmp_path, case, dtype):
    """Every weight and every logit is identical."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **deepcopy(settings))  # it writes into them
    theirs = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", 320)
    folder = convert(
        convert(tmp_path / "hf", tmp_path / "orbax", "orbax"), tmp_path / "back", "safetensors"
    )
    opened, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert opened.dtype == getattr(torch, dtype)
    stored = dict(theirs.named_parameters())
    for name, parameter in opened.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(opened.eval()(ids).logits, theirs(ids).logits)
    assert set(named(read_model(open_checkpoint(folder), dtype).params))
