"""What a product is given, and the record that describes an implementation of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.linear.blocks import Blocks, restored

if TYPE_CHECKING:
    import numpy as np


class Matrix(NamedTuple):
    """The shape of a weight [M, K] and what its rows are.

    Implementations store the numbers in layouts of their own.

    outputs: M, of all matrices.
    inputs: K.
    gated: the first half of each matrix's rows are the gates of the second half.
    count: the number of matrices of equal size in M, such as the experts of a mixture.
    blocks: how rows are stored, as bytes; None: as numbers.
    """

    outputs: int
    inputs: int
    gated: bool = False
    count: int = 1
    blocks: Blocks | None = None

    @property
    def cells(self) -> Blocks | None:
        """The blocks, or their parts if they have some: inputs that share a scale in float32."""
        return self.blocks.part if self.blocks else None

    @property
    def width(self) -> int:
        """Outputs of a token: of one matrix, after its gates."""
        return self.outputs // self.count // (2 if self.gated else 1)


class Norm(NamedTuple):
    """An RMS norm of x (Zhang & Sennrich 2019).

    x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) if `plus_one`.
    """

    weight: jax.Array  # [K]
    eps: float
    plus_one: bool = False


class LowRank(NamedTuple):
    """Products of low rank beside the weight's, one for each token (LoRA, Hu et al. 2021).

    y += b[s]^T (a[s] x) for the token's slot s.

    A weight may be several matrices that were joined: the parts. Each part has products of its own.
    The rows of `a` are those of the first part, then of the second one, and so on. b is zero where
    its row and its output are of different parts.

    a: [S, R, K'] of x's dtype: K numbers, and zeros up to a multiple of 16.
    b: [S, R, M] of x's dtype, as `Implementation.pack_low` of the implementation made it.
    slots: [T] int32: s of each token; 0 is no adapter.
    order: [T] int32: the tokens in the order of their slots.
    sizes: [S] int32: the number of tokens of each slot.
    parts: the last output + 1 of each part. Each part has as many rows in R, a multiple of 4.
    """

    a: jax.Array
    b: jax.Array
    slots: jax.Array
    order: jax.Array
    sizes: jax.Array
    parts: tuple[int, ...]

    def ranks(self, first: int, last: int) -> tuple[int, int]:
        """Returns (first, last + 1) of the rows of `a` that the outputs first : last need."""
        part_rows = self.a.shape[1] // len(self.parts)
        # the parts that end before an output are as many as the number of the output's part
        first_part = sum(end <= first for end in self.parts)
        last_part = sum(end <= last - 1 for end in self.parts)
        return part_rows * first_part, part_rows * (last_part + 1)


class Epilogue(NamedTuple):
    """What is done with the sums of a product, in this order and in float32.

    scales: [M] float32, with which the sums of int8 weights are multiplied.
    bias: [M] is added.
    low: its products are added.
    activation: of the gates, which then multiply the other half; None for a weight that is not
        gated.
    residual: [T, width] is added.
    """

    scales: jax.Array | None = None
    bias: jax.Array | None = None
    low: LowRank | None = None
    activation: str | None = None
    residual: jax.Array | None = None


def _no_obstacle(device: Any, **facts: Any) -> str:
    return ""


def _serves(weight_dtypes: Sequence[str]) -> str:
    return ""


def _nothing(**facts: Any) -> None:
    pass


def as_it_is(weight: Any, matrix: Matrix) -> Any:
    return weight


def low_as_it_is(b: Any, matrix: Matrix) -> Any:
    return b


def rows_of(weight: jax.Array, matrix: Matrix, ids: jax.Array) -> jax.Array:
    rows = weight[ids]
    return rows if matrix.blocks is None else restored(rows, matrix.blocks, jnp)


class Implementation(NamedTuple):
    """An implementation of products.

    name: its name in error messages and in `api.IMPLS`.
    multiply: (x, weight, matrix, norm, epilogue, rows, sizes, dtype) -> [T, width], as in
        `api.linear`.
    obstacle: (device, *, dtype, weight_dtype, mesh, activation) -> the reason why it cannot serve a
        model on the device, as the rest of a sentence; empty if it can. mesh: whether the model is
        split over devices. activation: that of the gates, or None.
    model_obstacle: (weight_dtypes of a model's matrices) -> the reason why it is of no use to the
        model, as the rest of a sentence; empty if it is.
    pack: (weight [M, K] on the host, or [M, bytes] of blocks, matrix) -> the same numbers in its
        own layout, on the host.
    unpack: (packed weight on the host or a device, matrix) -> [M, K] or [M, bytes]: the inverse.
    gather: (packed weight on the device, matrix, ids [T]) -> [T, K]: rows of a matrix, as an
        embedding needs them. Those of blocks are restored, in float32.
    prepare: (*, dtype, weight_dtype, low_rank) -> None. Starts work that is needed once in a
        process, before any tracing, for activations and weights of these dtypes. low_rank: whether
        some products have products of low rank beside them.
    invariant: whether a token's results have the same bits beside any other tokens, for any number
        of tokens and of threads.
    low_rank: whether `multiply` adds products of low rank. If not, it never gets any.
    blocks: whether it takes matrices in blocks. If not, it never gets any.
    pack_low: (b [S, R, M] of a `LowRank`, matrix) -> the same numbers [S, ...] in its own layout. b
        is an array of numpy or of jax.numpy, also in a trace, and the result is of the same kind.
    """

    name: str
    multiply: Callable[..., jax.Array]
    obstacle: Callable[..., str] = _no_obstacle
    model_obstacle: Callable[[Sequence[str]], str] = _serves
    pack: Callable[[np.ndarray, Matrix], np.ndarray] = as_it_is
    unpack: Callable[[Any, Matrix], Any] = as_it_is
    gather: Callable[[jax.Array, Matrix, jax.Array], jax.Array] = rows_of
    prepare: Callable[..., None] = _nothing
    invariant: bool = False
    low_rank: bool = False
    blocks: bool = False
    pack_low: Callable[[Any, Matrix], Any] = low_as_it_is
