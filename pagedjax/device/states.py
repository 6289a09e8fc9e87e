"""Binds the recurrent states of a model's layers to one implementation.

"xla" is plain JAX (models/mixers/decayed_state.py). The others are kernels of
`pallas_kernels.states`, which keep states and tokens in an order of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.states import (
    IMPLS,
    Implementation,
    Inputs,
    Memory,
    Part,
    Spans,
    StateShape,
)

__all__ = [
    "DEFAULT",
    "IMPLS",
    "Implementation",
    "Inputs",
    "Memory",
    "Part",
    "Spans",
    "StateShape",
    "choose",
    "find",
    "is_built_in",
]

BUILT_IN = tuple(IMPLS.values())
DEFAULT = "xla"  # everywhere: no kernel has run on its device yet


def find(name: str) -> Implementation | None:
    """Returns the kernel of that name; None for "xla"."""
    return None if name == DEFAULT else IMPLS[name]


def is_built_in(kernel: Implementation | None) -> bool:
    """Returns whether a kernel is a built-in one, as it was shipped; None is plain JAX."""
    return kernel is None or kernel in BUILT_IN


def choose(
    name: str,
    device: Any,
    *,
    shapes: Sequence[StateShape],
    length: int,
    inputs: str,
    page: jax.ShapeDtypeStruct | None,
    block_size: int,
    rows: int,
    tokens: int,
) -> str:
    """Returns `name`, of an engine's implementation, if that can serve.

    Args:
        shapes: of the states of the model's layers; none if no layer has a state.
        length: of their longest convolution, in tokens.
        inputs: the dtype of its inputs.
        page: a page array [P, K, rows, L]; None: the model has no keys, and so no states.
        rows, tokens: the most of a step.

    Raises:
        ValueError: the implementation `name` cannot serve these states on this device; the message
            gives the reason. There is no fallback.
    """
    kernel = find(name)
    if kernel is None:
        return name
    if not shapes or page is None:
        raise ValueError(
            f"state_impl is {name!r}, and no layer of the model has a state; leave it out"
        )
    for shape in shapes:
        obstacle = kernel.obstacle(
            device,
            shape=shape,
            length=length,
            inputs=inputs,
            page=page.shape[1:],
            dtype=str(page.dtype),
            block_size=block_size,
            rows=rows,
            tokens=tokens,
        )
        if obstacle:
            raise ValueError(f"state_impl {name!r} {obstacle}; 'xla' has no such limit")
    return name
