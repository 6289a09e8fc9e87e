"""A Hugging Face directory as a checkpoint: config.json and safetensors, in one file or in
shards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.weights.architectures import (
    FAMILIES,
    IMAGE_STARTS,
    TEXT_STARTS,
    normalised,
    renamed_start,
)
from pagedjax.weights.checkpoint import Checkpoint, Tensor
from pagedjax.weights.quantized import joined, zero_biases

if TYPE_CHECKING:
    from pagedjax.weights.architectures import Family

log = logging.getLogger("pagedjax.weights")
INDEX = "model.safetensors.index.json"
# safetensors' name of a dtype -> numpy's or ml_dtypes'
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}
MAX_HEADER = 100_000_000  # bytes; the format's own limit


def open_directory(path: Path, family: Family | None = None) -> Checkpoint:
    """Open a directory with config.json and *.safetensors.

    Args:
        family: the user's own family, if it is not a built-in one.

    Raises:
        FileNotFoundError: config.json, the weights or a shard is missing.
        ValueError: damaged JSON or safetensors, or a model that is not supported.
    """
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} has no config.json; it must be the directory of a Hugging Face model"
        )
    stored_config = read_json(path / "config.json")
    config = normalised(stored_config, path / "config.json", family)
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    architecture = (family or FAMILIES[config["model_type"]]).architecture
    stored = _tensors(path)
    if stored_config["model_type"] != config["model_type"]:
        stored = text_tensors(stored, path, stored_config["model_type"])
    tensors = {architecture.tensor_name(name): tensor for name, tensor in stored.items()}
    if family is None and "embed_tokens.weight" in tensors:
        # A model that was saved without its head, e.g. for embeddings: the names lack "model.".
        tensors = {
            key if key.startswith("lm_head.") else f"model.{key}": tensor
            for key, tensor in tensors.items()
        }
    quantization = config.pop("quantization_config", None)
    spare = frozenset()
    if quantization:
        tensors = joined(tensors, quantization)
        spare = zero_biases(tensors)
    return Checkpoint(
        path, "huggingface", config, tensors, generation_config, family=family, spare=spare
    )


def text_tensors(tensors: Mapping[str, Tensor], path: Path, model_type: str) -> dict[str, Tensor]:
    """The tensors of the text model of a composite, by the names in files of text models. Those of
    images are left out, and the log says so.
    """
    text = {}
    left_out = []
    for name, tensor in tensors.items():
        if name.startswith(IMAGE_STARTS):
            left_out.append(name)
        else:
            text[renamed_start(name, TEXT_STARTS)] = tensor
    if left_out:
        log.warning(
            "%s is a model of text and images (%s); its %d tensors of images are left out: it reads "
            "and writes text alone",
            path,
            model_type,
            len(left_out),
        )
    return text


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a ValueError with the file and the position."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} contains a JSON {type(value).__name__}; it must contain an object"
        )
    return value


def _tensors(path: Path) -> dict[str, Tensor]:
    if not (path / INDEX).is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            names = []
            for pattern in ("*.bin", "*.pth", "*.gguf"):
                names += [file.name for file in sorted(path.glob(pattern))]
            hint = f"; it has {', '.join(names)}" if names else ""
            raise FileNotFoundError(
                f"{path} has no *.safetensors{hint}; save the model with safe_serialization=True"
            )
        files = [path / "model.safetensors"] if path / "model.safetensors" in files else files
        return {name: tensor for file in files for name, tensor in read_safetensors(file).items()}

    weight_map = read_json(path / INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        raise ValueError(
            f"{path / INDEX} has no weight_map of tensor names to files; fetch it again"
        )
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (path / shard).is_file()]:
        raise FileNotFoundError(
            f"{path} lacks {', '.join(missing)}, listed in {INDEX}; fetch the missing shards"
        )
    stored = {shard: read_safetensors(path / shard) for shard in shards}
    if absent := [name for name, shard in weight_map.items() if name not in stored[shard]]:
        raise ValueError(
            f"{path}: {INDEX} lists {absent[0]} in {weight_map[absent[0]]}, but that file does not "
            f"contain it ({len(absent)} such tensors); the index and the shards do not match; "
            "fetch all of them again"
        )
    return {name: stored[shard][name] for name, shard in weight_map.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Checks that each tensor's bytes are inside the file.

    Raises:
        ValueError: truncated or damaged; names the file, the tensor if it is known, and the sizes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(
                f"{path} is truncated or not a safetensors file: its header needs {length} bytes "
                f"after the first 8, the file has {size} in all; fetch it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} has a damaged header ({type(error).__name__}: {error}); fetch it again"
        ) from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{path} has a damaged header: a JSON {type(header).__name__}, not an object; fetch it "
            "again"
        )
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: Any, start: int, file_size: int) -> Tensor:
    match entry:
        case {"dtype": str(code), "shape": [*dims], "data_offsets": [int(begin), int(end)]} if all(
            isinstance(n, int) and n >= 0 for n in dims
        ):
            shape = tuple(dims)
            begin += start
            end += start
        case _:
            raise ValueError(
                f"{path} has a damaged header: the entry of {name} is {entry!r}; fetch it again"
            )
    if code not in DTYPES:
        raise ValueError(
            f"{path}: tensor {name} has dtype {code!r}; supported: {', '.join(DTYPES)}"
        )
    dtype = np_dtype(DTYPES[code])
    if end - begin != prod(shape) * dtype.itemsize or begin < start:
        raise ValueError(
            f"{path} is damaged: {name} {shape} {code} has {end - begin} bytes of data; fetch it "
            "again"
        )
    if end > file_size:
        raise ValueError(
            f"{path} is truncated: tensor {name} {shape} {code} takes bytes {begin} to {end}, "
            f"the file has {file_size}; fetch it again"
        )
    return Tensor(name, shape, dtype, path, code, partial(_read, path, name, shape, dtype, begin))


def _read(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype, begin: int) -> np.ndarray:
    values = np.fromfile(path, dtype, prod(shape), offset=begin)
    if values.size != prod(shape):
        raise ValueError(
            f"{path} is truncated: {name} has {values.size} of its {prod(shape)} values; fetch it "
            "again"
        )
    return values.reshape(shape)


def np_dtype(name: str) -> np.dtype:
    """numpy's dtype, or that of ml_dtypes if numpy has none (bfloat16, float8)."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
