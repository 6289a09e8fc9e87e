"""Read a GGUF file: its header, with every length checked, and its tensors one at a time.
Independent of the model.

The `gguf` package dequantises here, but its reader is not used. The reader makes a numpy array of
every string of the vocabulary, which takes seconds. For a damaged file it raises unrelated errors
of numpy.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagedjax.weights.checkpoint import Rows, Tensor

if TYPE_CHECKING:
    from pagedjax.device.linear import Blocks

VERSIONS = (2, 3)
# the numbers of value types; a scalar with its code in the module struct
STRING = 8
ARRAY = 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# Levels of nested arrays. No writer nests them, but the bytes of a damaged file may look so.
MAX_DEPTH = 4
# Encodings whose numbers can be kept: (the kind of numbers, how many share a scale), as in `Rows`.
# gguf_blocks.py reads them.
KINDS = {
    "Q4_0": ("q4_0", 32),
    "Q4_1": ("q4_1", 32),
    "Q5_0": ("q5_0", 32),
    "Q5_1": ("q5_1", 32),
    "Q8_0": ("q8_0", 32),
    "Q4_K": ("q4_k_super", 256),
    "Q5_K": ("q5_k_super", 256),
    "Q6_K": ("q6_k_super", 256),
}
# Values that are dequantised at once. They fit into the cache of a core.
PIECE = 2**16


class GGUFFile(NamedTuple):
    """The content of a file.

    metadata: key -> int, float, bool, str or a list of these.
    tensors: by their names in GGUF, in the order of the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header. Shapes are in numpy's order (GGUF lists the fastest dimension first).

    Raises:
        FileNotFoundError: no such file.
        ValueError: not GGUF, an unknown version or type, or truncated; names the file, the position
            and the sizes.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.stat().st_size < 24:
        raise ValueError(
            f"{path} is not a GGUF file: it has {path.stat().st_size} bytes, but a header has 24"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = Cursor(path, data)
        _check_magic(cursor)
        num_tensors = cursor.scalar("Q", "tensor count")
        num_pairs = cursor.scalar("Q", "key count")
        metadata = {}
        for index in range(num_pairs):
            key = cursor.string(f"key {index} of {num_pairs}")
            metadata[key] = cursor.value(cursor.scalar("I", f"type of {key}"), key)
        entries = [
            _entry(cursor, f"tensor {index} of {num_tensors}") for index in range(num_tensors)
        ]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(
                f"{path}: general.alignment is {alignment!r}; it must be a power of two"
            )
        start = -(-cursor.position // alignment) * alignment
        tensors = {entry.name: _tensor(path, entry, start, len(data)) for entry in entries}
    if len(tensors) != len(entries):
        raise ValueError(
            f"{path} lists a tensor name twice; the file is damaged, fetch or convert it again"
        )
    return GGUFFile(path, metadata, tensors)


# llama.cpp's names of parts, and the most parts that such names can count
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_PARTS = 99_999


def read_parts(path: Path) -> GGUFFile:
    """The headers of a model that is one file, or several files in one folder.

    The metadata is that of the first part, as llama.cpp's splitter writes it.

    Args:
        path: any of the files.

    Raises:
        FileNotFoundError: as `read_gguf`, or a part is missing.
        ValueError: as `read_gguf`, or the files are not the parts of one model.
    """
    file = read_gguf(path)
    count = file.metadata.get("split.count", 0)
    if count in (0, 1):
        return file
    number = file.metadata.get("split.no", 0)
    if (
        not isinstance(count, int)
        or not isinstance(number, int)
        or not 0 <= number < count <= MOST_PARTS
    ):
        raise ValueError(
            f"{path} is damaged: split.no is {number!r:.80} and split.count {count!r:.80}; fetch "
            "it again"
        )
    label = f"{path} is part {number + 1} of {count}"
    name = PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        expected = f"NAME-{number + 1:05}-of-{count:05}.gguf"
        raise ValueError(f"{label}, and the others are found by their names; call it {expected}")
    paths = [path.with_name(f"{name['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for part_path in paths:
        if not part_path.is_file():
            raise FileNotFoundError(
                f"{label}, and {part_path.name} is not beside it; put all parts into one folder"
            )
    parts = [file if part_path == path else read_gguf(part_path) for part_path in paths]
    tensors: dict[str, Tensor] = {}
    for i, part in enumerate(parts):
        part_number = part.metadata.get("split.no")
        part_count = part.metadata.get("split.count")
        if (part_number, part_count) != (i, count):
            raise ValueError(
                f"{part.path} says that it is part {part_number!r} (from 0) of {part_count!r}, and "
                f"its name says {i + 1} of {count}; fetch the parts again"
            )
        repeated_names = tensors.keys() & part.tensors.keys()
        if repeated_names:
            raise ValueError(
                f"{part.path} has {min(repeated_names)}, which an earlier part has too; fetch the "
                "parts again"
            )
        tensors |= part.tensors
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ValueError(
            f"the {count} parts of {path} have {len(tensors)} tensors of {total}; fetch them again"
        )
    return GGUFFile(path, parts[0].metadata, tensors)


class Cursor:
    """Reads forward through the header. A read past the end of the file is an error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, count: int, label: str) -> bytes:
        if count > len(self.data) - self.position:
            raise ValueError(
                f"{self.path} is truncated or damaged: {label} needs {count} bytes at offset "
                f"{self.position}, the file has {len(self.data)} in all; fetch it again"
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, code: str, label: str) -> Any:
        value = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), label))[0]
        return _shortest_decimal(value) if code == "f" else value

    def string(self, label: str) -> str:
        raw = self.take(self.scalar("Q", f"the length of {label}"), label)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is damaged: {label} is not valid UTF-8 ({error}); fetch it again"
            ) from error

    def value(self, kind: int, label: str, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], label)
        if kind == STRING:
            return self.string(label)
        if kind != ARRAY or depth == MAX_DEPTH:
            raise ValueError(
                f"{self.path} is damaged: {label} has value type {kind}, which GGUF does not define"
            )
        item_kind = self.scalar("I", f"the type of {label}")
        count = self.scalar("Q", f"the length of {label}")
        if item_kind in SCALARS:
            code = SCALARS[item_kind]
            raw = self.take(count * struct.calcsize(f"<{code}"), label)
            values = struct.unpack(f"<{count}{code}", raw)
            return [_shortest_decimal(value) for value in values] if code == "f" else list(values)
        if item_kind == STRING:  # a vocabulary has about 100,000
            return [self.string(label) for _ in range(count)]
        return [
            self.value(item_kind, f"item {index} of {label}", depth + 1) for index in range(count)
        ]


def _shortest_decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _check_magic(cursor: Cursor) -> None:
    if (magic := cursor.take(4, "the magic number")) != b"GGUF":
        raise ValueError(f"{cursor.path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = cursor.scalar("I", "the version")
    if version not in VERSIONS:
        hint = (
            "it is big-endian"
            if version & 0xFFFF == 0
            else "convert the model again with a current llama.cpp"
        )
        raise ValueError(
            f"{cursor.path} has GGUF version {version}; versions {VERSIONS} are supported ({hint})"
        )


class Entry(NamedTuple):
    """A tensor in the header.

    kind: the number of its encoding.
    offset: bytes from the start of all data to its data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _entry(cursor: Cursor, label: str) -> Entry:
    name = cursor.string(f"the name of {label}")
    num_dims = cursor.scalar("I", f"the rank of {name}")
    if num_dims > 4:
        raise ValueError(
            f"{cursor.path} is damaged: {name} has {num_dims} dimensions, GGUF allows 4; fetch it "
            "again"
        )
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, f"the shape of {name}"))
    return Entry(
        name,
        dims[::-1],
        cursor.scalar("I", f"the type of {name}"),
        cursor.scalar("Q", f"offset of {name}"),
    )


def _tensor(path: Path, entry: Entry, start: int, file_size: int) -> Tensor:
    """The entry as a Tensor. Checks that its bytes are inside the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        encoding = GGMLQuantizationType(entry.kind)
    except ValueError as error:
        raise ValueError(
            f"{path}: tensor {entry.name} has type number {entry.kind}, which the installed gguf "
            "package does not know; update it with: pip install -U gguf"
        ) from error
    per_block, block_bytes = GGML_QUANT_SIZES[encoding]
    row_length = entry.shape[-1] if entry.shape else 1
    if row_length % per_block:
        raise ValueError(
            f"{path}: tensor {entry.name} has rows of {row_length}, not multiples of {per_block} "
            f"({encoding.name})"
        )
    begin = start + entry.offset
    size = prod(entry.shape) // per_block * block_bytes
    if begin + size > file_size:
        raise ValueError(
            f"{path} is truncated: tensor {entry.name} {entry.shape} ({encoding.name}) takes bytes "
            f"{begin} to {begin + size}, the file has {file_size}; fetch it again"
        )
    load = partial(_read, path, entry.name, entry.shape, encoding, begin, size)
    rows = None
    if len(entry.shape) == 2 and encoding.name in KINDS:
        load_rows = partial(_read_rows, path, entry.name, entry.shape, encoding, begin, size)
        rows = Rows(*KINDS[encoding.name], load_rows)
    return Tensor(entry.name, entry.shape, np.dtype(np.float32), path, encoding.name, load, rows)


def _bytes_at(path: Path, name: str, begin: int, size: int) -> np.ndarray:
    """The bytes of a tensor."""
    raw = np.fromfile(path, np.uint8, size, offset=begin)
    if raw.size != size:
        raise ValueError(
            f"{path} is truncated: tensor {name} has {raw.size} of its {size} bytes; fetch it again"
        )
    return raw


def _read_rows(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    encoding: Any,
    begin: int,
    size: int,
    blocks: Blocks,
) -> np.ndarray:
    """The rows of a matrix in blocks: uint8 [out, bytes]."""
    from gguf.constants import GGML_QUANT_SIZES

    from pagedjax.weights.gguf_blocks import rows_of

    _, block_bytes = GGML_QUANT_SIZES[encoding]
    raw = _bytes_at(path, name, begin, size)
    kind = KINDS[encoding.name][0]
    return rows_of(raw, shape, block_bytes, encoding.name, kind, blocks)


def _read(
    path: Path, name: str, shape: tuple[int, ...], encoding: Any, begin: int, size: int
) -> np.ndarray:
    """The values as float32 of `shape`."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    raw = _bytes_at(path, name, begin, size)
    if encoding.name == "F64":
        return raw.view("<f8").astype(np.float32).reshape(shape)
    if encoding.name == "F32":
        return raw.view("<f4").reshape(shape)
    # gguf dequantises into pieces and joins them, so the data is cut into pieces that are placed
    # where they belong.
    per_block, block_bytes = GGML_QUANT_SIZES[encoding]
    blocks = raw.reshape(-1, block_bytes)
    values = np.empty((len(blocks), per_block), np.float32)
    piece = max(1, PIECE // per_block)
    try:
        for start in range(0, len(blocks), piece):
            row = blocks[start : start + piece].reshape(1, -1)
            values[start : start + piece] = dequantize(row, encoding).reshape(-1, per_block)
    except NotImplementedError as error:
        raise ValueError(
            f"{path}: tensor {name} is stored as {encoding.name}, which cannot be dequantised "
            "here; convert the model to F16, BF16, Q8_0 or another common type"
        ) from error
    return values.reshape(shape)


def with_name(
    tensor: Tensor, name: str, change: Callable[[np.ndarray], np.ndarray] | None
) -> Tensor:
    """The tensor under another name. `change` is applied to the values when they are read. It must
    keep the shape. That of a matrix is another order of its rows.
    """

    def read(load: Callable[[], np.ndarray]) -> np.ndarray:
        values = load()
        try:
            return values if change is None else change(values)
        except ValueError as error:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} {tensor.shape} does not fit the metadata: "
                f"{error}"
            ) from error

    rows = tensor.rows
    if rows is not None:
        load_rows = rows.load
        rows = rows._replace(load=lambda blocks: read(partial(load_rows, blocks)))
    return replace(tensor, name=name, load=partial(read, tensor.load), rows=rows)
