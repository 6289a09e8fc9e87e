"""Matrices that are kept as they are stored: which format each has, and how it is read.

The numbers of a matrix are of a kind, and so many inputs share a scale (`checkpoint.Rows`). A format
of blocks that holds them may have smaller blocks, which repeat a scale: a scale for a whole row is
that of each of its blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pagedjax.device import formats
from pagedjax.device.formats import is_stored
from pagedjax.device.linear import BLOCKS
from pagedjax.device.models.param_table import ParamSource
from pagedjax.weights.checkpoint import Checkpoint, Rows, Tensor

log = logging.getLogger("pagedjax.weights")
# The kinds of numbers, each with one of its formats. Those of GGUF have the names of formats.
KINDS = BLOCKS | {
    "int4": BLOCKS["int4_128"],
    "uint4": BLOCKS["uint4_128"],
    "int8": BLOCKS["int8_128"],
    "uint8": BLOCKS["uint8_128"],
    "fp8": BLOCKS["fp8_128"],
}
Fits = Callable[[str, str], bool]  # (name of a matrix, format): whether devices have whole blocks


def everywhere(name: str, format_name: str) -> bool:
    """The `Fits` of a model that is not split."""
    return True


def formats_of(
    checkpoint: Checkpoint, table: Sequence[ParamSource], fits: Fits = everywhere
) -> tuple[tuple[str, str], ...]:
    """The formats of matrices whose numbers are kept, by the names of their parameters. A parameter
    of several tensors has the smallest format that holds all of them.

    Raises:
        ValueError: there are none.
    """
    names = {
        ".".join(entry.path): format_name
        for entry in table
        if (format_name := _format_of(checkpoint.tensors, entry, fits)) is not None
    }
    if not names:
        encodings = sorted({tensor.encoding for tensor in checkpoint.tensors.values()})
        raise ValueError(
            f"weight_dtype is 'stored', and {checkpoint.path} has no matrix whose numbers can be "
            f"kept, only {', '.join(encodings)}; leave weight_dtype out, or take int8"
        )
    return tuple(names.items())


def _format_of(tensors: Mapping[str, Tensor], entry: ParamSource, fits: Fits) -> str | None:
    sources = [tensors[name] for name in entry.sources if name in tensors]
    if not sources or not is_stored(entry.path, entry.shape):
        return None
    rows = [tensor.rows for tensor in sources if tensor.rows is not None]
    if len(rows) < len(sources) or (entry.transpose and not entry.stacked):
        return None
    name = ".".join(entry.path)
    inputs = entry.shape[1]
    stored = [KINDS[x.kind]._replace(inputs=x.group) for x in rows]
    holding = [
        blocks
        for blocks in BLOCKS.values()
        if inputs % blocks.inputs == 0 and all(blocks.holds(x) for x in stored)
    ]
    holding.sort(key=lambda blocks: blocks.row_bytes(inputs))
    suffix = formats.ORDERED if _order(rows) is not None else ""
    if not holding or (suffix and not _have_one_order(name, rows)):
        return None
    smallest = holding[0]
    # the same numbers in smaller blocks, where a device would have a part of a larger one; those of
    # 5 or 6 bits may have more bits there
    same_numbers = [
        x
        for x in holding
        if x.numbers == smallest.numbers and (x.bits == smallest.bits or smallest.bits_apart)
    ]
    chosen = next((x for x in same_numbers if fits(name, x.name + suffix)), smallest)
    return chosen.name + suffix


def _order(rows: Sequence[Rows]) -> np.ndarray | None:
    """The order of the inputs of the first tensor that has one."""
    orders = [x.order() for x in rows]
    return next((order for order in orders if order is not None), None)


def _have_one_order(name: str, rows: Sequence[Rows]) -> bool:
    """Whether all tensors of a parameter have the same order. If not, the log says so."""
    orders = [order for x in rows if (order := x.order()) is not None]
    have_one = len(orders) == len(rows) and all(np.array_equal(orders[0], x) for x in orders[1:])
    if not have_one:
        log.warning(
            "%s is kept as floats: the tensors that it is made of have inputs in different orders "
            "(act-order)",
            name,
        )
    return have_one


def assembled(
    tensors: Mapping[str, Tensor], entry: ParamSource, format_name: str
) -> dict[str, np.ndarray]:
    """The arrays of a matrix, by name, in a format that `formats_of` gave it."""
    chosen = formats.find(format_name)
    assert chosen.blocks is not None, "`formats_of` names formats of blocks"
    sources = [_rows_of(tensors[name]) for name in entry.sources]
    parts = [source.load(chosen.blocks) for source in sources]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    rows = rows[np.asarray(entry.order)] if entry.order else rows
    arrays: list[Any] = [rows, _order(sources)]
    names = chosen.names(".".join(entry.path))
    return dict(zip(names, arrays[: len(names)], strict=True))


def _rows_of(tensor: Tensor) -> Rows:
    assert tensor.rows is not None, "`formats_of` names no other ones"
    return tensor.rows
