"""Formats in which matrices are stored: floats of the model's dtype, or one of
`config.STORED_FORMATS`.

format.py  the record of a format
floats.py  as they are
int8.py    8 bits, and a scale for each row

Another format is a file with one `Format`, and its name in `STORED_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pagedjax.device.formats import floats
from pagedjax.device.formats.format import Array, Format
from pagedjax.options.config import STORED_FORMATS
from pagedjax.options.own_values import own_value

__all__ = ["Array", "Format", "find", "is_stored", "name_of", "packed_matrices", "restored"]


def find(name: str | None) -> Format:
    """Returns the format of that name; None is floats of the model's dtype."""
    if name is None:
        return floats.FORMAT
    return own_value("weight_dtype", STORED_FORMATS[name], Format, ())


def name_of(weight_dtype: str | None) -> str | None:
    """Returns the name of the format of a `weight_dtype`; None for floats."""
    return (
        weight_dtype if isinstance(weight_dtype, str) and weight_dtype in STORED_FORMATS else None
    )


def is_stored(path: Sequence[str], shape: Sequence[int]) -> bool:
    """Returns whether a parameter is stored in a format: matrices of products and the embedding,
    but not learned positions or routers.
    """
    return (
        len(shape) == 2 and path[-1] in ("weight", "embed", "up", "down") and "router" not in path
    )


def packed_matrices(
    stored: str | None, params: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the value of each array that stores a matrix among `params`, which are
    given by name. For floats there is nothing to pack.
    """
    if stored is None:
        return
    chosen = find(stored)
    for name, x in params.items():
        if is_stored(name.split("."), np.shape(x)):
            yield from zip(chosen.names(name), chosen.pack(x), strict=True)


def restored(stored: str | None, params: Mapping[str, Any], name: str) -> np.ndarray:
    """Returns the matrix `name` as float32 [out, in], from a model's parameters by name."""
    chosen = find(stored)
    return chosen.restore([np.asarray(params[part]) for part in chosen.names(name)])
