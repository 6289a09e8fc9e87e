"""Binds a model's products to one implementation, in whose layout its matrices are stored.

An implementation is one record, `Implementation`. Its name is one of `IMPLS`; the name of your own
is "folder/file.py:NAME" or "module:NAME".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedjax.options.own_values import own_value
from pallas_kernels.linear import (
    BLOCKS,
    IMPLS,
    Blocks,
    Implementation,
    LowRank,
    Matrix,
    Norm,
    linear,
)
from pallas_kernels.linear.cpu import differentiable
from pallas_kernels.linear.implementation import rows_of

__all__ = [
    "BLOCKS",
    "DIFFERENTIABLE",
    "IMPLS",
    "Blocks",
    "Implementation",
    "LowRank",
    "Matrix",
    "Norm",
    "choose",
    "find",
    "is_built_in",
    "linear",
    "prepare",
    "rows_of",
]

BUILT_IN = dict(IMPLS)  # a copy: what a user adds to IMPLS is not built in
# The first one that can serve is the default. "xla" runs everywhere. As with attention, "pallas_gpu"
# and "pallas_tpu" are not here until they have run on their devices.
DEFAULTS = "cpu", "xla"
DIFFERENTIABLE = differentiable.IMPLEMENTATION.name  # for `score`, and not for engines


def find(name: str) -> Implementation:
    """Returns the implementation of that name: one of IMPLS, or your own.

    Raises:
        ValueError: there is no such implementation, module, file or value.
    """
    if name in IMPLS:
        return IMPLS[name]
    if name == DIFFERENTIABLE:
        return differentiable.IMPLEMENTATION
    return own_value("linear_impl", name, Implementation, IMPLS, shared=True)


def is_built_in(name: str) -> bool:
    """Returns whether the implementation of this name is a built-in one, as it was shipped."""
    return name in BUILT_IN and find(name) == BUILT_IN[name]


def choose(name: str | None, device: Any, *, weight_dtypes: Sequence[str], **facts: Any) -> str:
    """Returns the name of a model's implementation: `name`, or the default if that is None.

    Args:
        weight_dtypes: of the model's matrices; those in blocks have the name of their blocks.
        facts: the other keyword arguments of `Implementation.obstacle`.

    Raises:
        ValueError: the implementation `name` cannot serve this model on this device; the message
            gives the reason. There is no fallback.
    """

    def obstacle_of(impl: str) -> str:
        for weight_dtype in weight_dtypes:
            if weight_dtype in BLOCKS and not find(impl).blocks:
                return f"has no products of matrices in blocks, and some are {weight_dtype}"
            obstacle = find(impl).obstacle(device, weight_dtype=weight_dtype, **facts)
            if obstacle:
                return obstacle
        return find(impl).model_obstacle(weight_dtypes)

    if name is None:
        return next(impl for impl in DEFAULTS if not obstacle_of(impl))
    obstacle = obstacle_of(name)
    if obstacle:
        raise ValueError(f"linear_impl {name!r} {obstacle}; 'xla' has no such limit")
    return name


def prepare(name: str | None, *, dtype: str, weight_dtype: str, low_rank: bool) -> None:
    """Starts the work that an implementation does once in a process, before there is a model to
    trace.

    Args:
        dtype, weight_dtype, low_rank: see `Implementation.prepare`.
    """
    find(name or DEFAULTS[0]).prepare(dtype=dtype, weight_dtype=weight_dtype, low_rank=low_rank)
