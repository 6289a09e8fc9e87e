"""Formats in which matrices are stored: floats of the model's dtype, or one of
`config.STORED_FORMATS`.

format.py  the record of a format
floats.py  as they are
int8.py    8 bits, and a scale for each row
blocks.py  4 to 8 bits, and a scale for some inputs of a row, as checkpoints store them

Another format is a file with one `Format`, and its name in `STORED_FORMATS`.

The matrices of a model have one format, or each its own (`Stored`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pagedjax.device.formats import blocks, floats
from pagedjax.device.formats.blocks import ORDERED
from pagedjax.device.formats.format import Array, Format
from pagedjax.options.config import AS_STORED, STORED_FORMATS
from pagedjax.options.own_values import own_value

__all__ = [
    "ORDERED",
    "Array",
    "Format",
    "Stored",
    "dtypes_of",
    "find",
    "format_name",
    "is_stored",
    "name_of",
    "packed_matrices",
    "restored",
    "weight_dtype_of",
]

# How a model's matrices are stored: the name of the format of all of them; pairs of the name of a
# matrix and that of its format, and floats for the others; or None, floats.
Stored = str | tuple[tuple[str, str], ...] | None


def find(name: str | None) -> Format:
    """Returns the format of that name, which may be that of blocks; None is floats of the model's
    dtype.
    """
    if name is None:
        return floats.FORMAT
    if name in blocks.FORMATS:
        return blocks.FORMATS[name]
    return own_value("weight_dtype", STORED_FORMATS[name], Format, ())


def name_of(weight_dtype: str | None) -> str | None:
    """Returns the name of the format of a `weight_dtype`; None for floats."""
    return (
        weight_dtype if isinstance(weight_dtype, str) and weight_dtype in STORED_FORMATS else None
    )


def format_name(stored: Stored, name: str) -> str | None:
    """Returns the name of the format of the matrix `name`; None for floats."""
    return dict(stored).get(name) if isinstance(stored, tuple) else stored


def weight_dtype_of(stored: Stored) -> str | None:
    """Returns the `weight_dtype` of matrices that are stored so; None for floats."""
    return AS_STORED if isinstance(stored, tuple) else stored


def dtypes_of(stored: Stored, dtype: str) -> list[str]:
    """Returns the dtypes of all matrices of a model of `dtype`, as `Format.numbers_dtype`."""
    if not isinstance(stored, tuple):
        return [find(stored).numbers_dtype(dtype)]
    return [dtype, *sorted({find(name).numbers_dtype(dtype) for _, name in stored})]


def is_stored(path: Sequence[str], shape: Sequence[int]) -> bool:
    """Returns whether a parameter is stored in a format: matrices of products and the embedding,
    but not learned positions or routers.
    """
    return (
        len(shape) == 2 and path[-1] in ("weight", "embed", "up", "down") and "router" not in path
    )


def packed_matrices(stored: Stored, params: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the value of each array that stores a matrix among `params`, which are
    given by name. For floats there is nothing to pack.
    """
    if stored is None:
        return
    for name, x in params.items():
        chosen_name = format_name(stored, name)
        if chosen_name is not None and is_stored(name.split("."), np.shape(x)):
            chosen = find(chosen_name)
            yield from zip(chosen.names(name), chosen.pack(x), strict=True)


def restored(stored: Stored, params: Mapping[str, Any], name: str) -> np.ndarray:
    """Returns the matrix `name` as float32 [out, in], from a model's parameters by name."""
    chosen = find(format_name(stored, name))
    return chosen.restore([np.asarray(params[part]) for part in chosen.names(name)])
