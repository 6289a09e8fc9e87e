"""`ParamSource`: the named tensors of a checkpoint that make one parameter. A family's `param_table` lists them."""

from __future__ import annotations

from typing import NamedTuple


class ParamSource(NamedTuple):
    """One parameter of a model: the named tensors, each [out, in] or [n], joined on axis 0, then transposed if asked.

    path: where it goes in the tree of parameters, e.g. ("layers", "0", "qkv").
    shape: of the finished parameter.
    rows: rows of each source, for a message that says which one is wrong; () where there is one source, or to check
        only their sum.
    optional: leave the parameter out when none of its sources is there.
    """

    path: tuple[str, ...]
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool = False
    rows: tuple[int, ...] = ()
    optional: bool = False
