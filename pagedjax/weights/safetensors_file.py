"""Write safetensors files one tensor at a time: a header with the position of each tensor, then the
data.

Why not the functions of the safetensors package (0.8): `save_file` needs all tensors in memory at
once. `safe_open` for numpy cannot read float8, its errors name neither file nor sizes, and it maps
the file: if the file is truncated after opening, a read ends the process with SIGBUS. So
huggingface.py has its own reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pagedjax.weights.huggingface import DTYPES, INDEX, np_dtype

CODES = {name: code for code, name in DTYPES.items()}


class Group(NamedTuple):
    """Tensors that are read together: their names and shapes, a function that reads them in this
    order, and their dtype; `dtypes` has that of tensors with another one.
    """

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[], Iterable[np.ndarray]]
    dtype: str
    dtypes: Mapping[str, str] = {}

    def dtype_of(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        return np_dtype(self.dtypes.get(name, self.dtype))

    def bytes_of(self, name: str) -> int:
        """Bytes of data of a tensor."""
        return prod(self.shapes[name]) * self.dtype_of(name).itemsize

    @property
    def size(self) -> int:
        """Bytes of data."""
        return sum(map(self.bytes_of, self.shapes))


def write_shards(folder: Path, groups: Sequence[Group], limit: int) -> list[Path]:
    """Write model.safetensors, or numbered files of at most `limit` bytes of data and their index;
    returns the files.

    A group stays together; a group of more than `limit` bytes has its own file.
    """
    shards = shards_of(groups, limit)
    if len(shards) == 1:
        return [write_file(folder / "model.safetensors", shards[0])]
    files = []
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = folder / f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        files.append(write_file(file, shard))
        weight_map |= {name: file.name for group in shard for name in group.shapes}
    index = {
        "metadata": {"total_size": sum(group.size for group in groups)},
        "weight_map": weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def shards_of(groups: Iterable[Group], limit: int) -> list[list[Group]]:
    """The groups of each file, in order; each file is as full as `limit` allows."""
    shards = [[]]
    shard_size = 0
    for group in groups:
        group_size = group.size
        if shards[-1] and shard_size + group_size > limit:
            shards.append([])
            shard_size = 0
        shards[-1].append(group)
        shard_size += group_size
    return shards


def write_file(path: Path, groups: Sequence[Group]) -> Path:
    """Write one file. Needs memory for one group. "format" is "pt", as programs that use torch
    expect.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for group in groups:
        for name, shape in group.shapes.items():
            end = start + group.bytes_of(name)
            header[name] = {
                "dtype": CODES[group.dtype_of(name).name],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            start = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for group in groups:
            for (name, shape), values in zip(group.shapes.items(), group.read(), strict=True):
                assert (values.shape, values.dtype) == (shape, group.dtype_of(name)), name
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return path
