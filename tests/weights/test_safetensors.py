"""Hugging Face directories: one file or shards, every dtype, and an error for every damage."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pagedjax.weights import open_checkpoint
from pagedjax.weights.huggingface import INDEX, read_safetensors
from tests.refusals import refused
from tests.weights.tiny import tiny_llama


def test_every_dtype_of_the_format_reads(tmp_path):
    # numpy's letters: bool, integers of 8 to 64 bits, without a sign too, and floats
    values = {kind: np.array([[0, 1], [1, 0], [1, 1]], kind) for kind in "?bhiqBHIefd"}
    for kind in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        values[kind] = np.array([1.5, -2], getattr(ml_dtypes, kind))
    values["scalar"] = np.array(3.0, np.float32)
    values["empty"] = np.zeros((0, 4), np.float32)
    save_file(values, tmp_path / "x.safetensors")
    for name, tensor in read_safetensors(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(tensor.read(), values[name])
        assert tensor.read().shape == values[name].shape


def test_without_weights_the_error_lists_other_files(tmp_path):
    folder = tiny_llama(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError,
        match=r"no \*\.safetensors; it has pytorch_model\.bin; save the model with",
    ):
        open_checkpoint(folder)


def test_missing_shards_are_named(tmp_path):
    folder = tiny_llama(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lacks model-00002-of-00002\.safetensors, listed in .*index\.json"
    ):
        open_checkpoint(folder)


def test_an_index_that_does_not_match_its_shards_is_named(tmp_path):
    folder = tiny_llama(tmp_path, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with refused(r"model\.extra in model-00001-of-00002\.safetensors, but that"):
        open_checkpoint(folder)
    (folder / INDEX).write_text('{"weight_map": {}}')
    with refused("has no weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[1]", "contains a JSON list"), (b"\xff", "is not valid JSON")],
)
def test_broken_json_is_named(tmp_path, text, message):
    folder = tiny_llama(tmp_path)
    for name in ("config.json", "generation_config.json"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with refused(f"{name} {message}"):
            open_checkpoint(folder)
        (folder / name).write_bytes(good)


def test_missing_config_is_named(tmp_path):
    folder = tiny_llama(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has no config\.json; it must be the directory of a"
    ):
        open_checkpoint(folder)


# --- damage ---------------------------------------------------------------------------------------


def small(path: Path) -> Path:
    save_file(
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(5, np.float16)}, path
    )
    return path


@pytest.mark.parametrize("size", [0, 7, 8, 60, -1, -12])
def test_truncated_files_name_the_file_and_the_sizes(tmp_path, size):
    path = small(tmp_path / "x.safetensors")
    data = path.read_bytes()
    size_left = size if size >= 0 else len(data) + size
    path.write_bytes(data[:size_left])
    with refused(rf"x\.safetensors is truncated.*the file has {size_left}"):
        read_safetensors(path)


def test_truncated_data_names_the_tensor(tmp_path):
    path = small(tmp_path / "x.safetensors")
    tensors = read_safetensors(path)
    path.write_bytes(path.read_bytes()[:-1])
    with refused(r"tensor b \(5,\) F16 takes bytes \d+ to \d+"):
        read_safetensors(path)
    with refused("b has 4 of its 5 values"):
        tensors["b"].read()


def with_header(path: Path, header: object) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "damaged header"),
        ([1], "a JSON list"),
        ({"a": 3}, "the entry of a is 3"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "the entry of a is"),
        ({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}, "the entry of a is"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", 8]}}, "the entry of a is"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            r"a \(2,\) F32 has 4 bytes of data",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "is damaged"),
        (
            {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
            "tensor a has dtype 'F99'; supported: F64",
        ),
    ],
)
def test_damaged_headers_are_named(tmp_path, header, message):
    with refused(rf"x\.safetensors.*{message}"):
        read_safetensors(with_header(tmp_path / "x.safetensors", header))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3))
def test_any_damage_raises_our_own_error(tmp_path_factory, changes):
    path = small(tmp_path_factory.mktemp("fuzz") / "x.safetensors")
    data = bytearray(path.read_bytes())
    for at, value in changes:
        data[at % len(data)] = value
    path.write_bytes(bytes(data))
    try:
        for tensor in read_safetensors(path).values():
            tensor.read()
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017  # no error is allowed too
