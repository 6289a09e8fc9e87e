"""Sizes of the GPU kernels' tiles, a file a device: data that a tuner may write, and numbers that no code holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FALLBACK = "h100"  # the first Hopper: what fits there fits its successors


class Tiles(NamedTuple):
    """What a device's kernels are built with. Sizes by head size are pairs (head size, value).

    multiprocessors: what a split decode has to fill; two blocks of threads fit on each.
    decode_tile: context tokens that a decode computes at a time, by head size.
    decode_stages: such tiles under way.
    min_split: context tokens that are worth a part of their own.
    chunk_tile, chunk_stages: the same for chunks.
    """

    multiprocessors: int
    decode_tile: tuple[tuple[int, int], ...]
    decode_stages: int
    min_split: int
    chunk_tile: int
    chunk_stages: int

    @classmethod
    def of(cls, device_kind: str) -> Tiles:
        """Those of the file whose name is in the device's, such as "h200" in "NVIDIA H200"; else FALLBACK's."""
        names = [file.stem for file in sorted(Path(__file__).parent.glob("*.json"))]
        found = [name for name in names if name in device_kind.lower()]
        return cls.read((found or [FALLBACK])[0])

    @classmethod
    def read(cls, name: str) -> Tiles:
        fields = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
        fields.pop("note", None)
        fields["decode_tile"] = tuple((int(size), tile) for size, tile in fields["decode_tile"].items())
        return cls(**fields)
