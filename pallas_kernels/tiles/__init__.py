"""Sizes of the kernels' tiles: a JSON file for each device. `pallas_kernels.tune` can write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

BY_SIZE = "decode_tile", "product_parts"  # of `Tiles`: pairs, which are objects in a file
FALLBACK = "h100"  # the first Hopper: tiles that fit it fit its successors
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
TPU_FALLBACK = "v5e"


class Tiles(NamedTuple):
    """The sizes of a GPU's kernels. Sizes by head size are pairs (head size, value).

    multiprocessors: a split decode must fill them; two blocks of threads fit on each.
    decode_tile: context tokens that a decode computes at a time, by head size.
    decode_stages: such tiles in shared memory.
    min_split: the fewest context tokens of a part of a split context.
    chunk_tile: context tokens that a chunk computes at a time.
    chunk_stages: such tiles in shared memory.
    product_parts: parts of the inputs of a weight of 16 bits, by its outputs: pairs (outputs at
        most, parts), ascending; a weight with more outputs has one part.
    """

    multiprocessors: int
    decode_tile: tuple[tuple[int, int], ...]
    decode_stages: int
    min_split: int
    chunk_tile: int
    chunk_stages: int
    product_parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, device_kind: str) -> Tiles:
        """Reads the file whose name is in the device's name, such as "h200" in "NVIDIA H200".

        If there is none, it reads the file of FALLBACK.
        """
        files = [file.stem for file in sorted(Path(__file__).parent.glob("h*.json"))]
        names = [name for name in files if name in device_kind.lower()]
        return cls.read((names or [FALLBACK])[0])

    @classmethod
    def read(cls, name: str) -> Tiles:
        fields = _fields(name)
        for key in BY_SIZE:
            fields[key] = tuple((int(size), value) for size, value in fields[key].items())
        return cls(**fields)


def _fields(name: str) -> dict[str, Any]:
    """Reads the fields of a device's file, without its note for people."""
    fields = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    fields.pop("note", None)
    return fields


class TpuTiles(NamedTuple):
    """The sizes of a TPU's kernels, and its maker's numbers, for estimates.

    device_kinds: JAX's names of the device.
    bandwidth, flops: HBM's bytes a second, and operations of bfloat16 products a second, of the
        device for which `pallas_kernels.aot` compiles: one core of a v4 and of a tpu7x, both cores
        of a v5p. The kernels use one core.
    hbm: bytes that XLA gives a program. vmem: bytes of one core.
    vmem_limit: bytes of VMEM that a kernel may use.
    decode_step: bytes of keys and values that a decode copies and computes at a time.
    shortest_span, longest_span: the fewest and the most context tokens of such a step.
    decode_stages: such steps in VMEM; all but one of them are being copied.
    decode_units: rows of the batch in one step of the grid.
    chunk_rows: query tokens times query heads of a key head in a chunk's tile.
    chunk_span, chunk_stages: context tokens of a chunk's step, and steps in VMEM.
    """

    device_kinds: tuple[str, ...]
    bandwidth: float
    flops: float
    hbm: int
    vmem: int
    vmem_limit: int
    decode_step: int
    shortest_span: int
    longest_span: int
    decode_stages: int
    decode_units: int
    chunk_rows: int
    chunk_span: int
    chunk_stages: int

    @classmethod
    def names(cls, device_kind: str) -> list[str]:
        """Returns the name of a device's file; an empty list if there is none."""
        return [name for name in TPUS if device_kind in cls.read(name).device_kinds]

    @classmethod
    def of(cls, device_kind: str) -> TpuTiles:
        """Reads the device's file; else TPU_FALLBACK, which interpretation uses."""
        return cls.read((cls.names(device_kind) or [TPU_FALLBACK])[0])

    @classmethod
    def read(cls, name: str) -> TpuTiles:
        fields = _fields(name)
        fields["device_kinds"] = tuple(fields["device_kinds"])
        return cls(**fields)
