"""The layers of decoder models. Activations are token-major, [T, H]; weights are [out, in]."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device import formats
from pagedjax.device.linear import Implementation, LowRank, Matrix, Norm, find
from pagedjax.device.row_reductions import reciprocal_sqrt, row_means, row_sums


class Buffer(nnx.Variable):
    """An array that is computed from the model's configuration: it is not in checkpoints and is not
    trained.
    """


class Weight(nnx.Param):
    """The numbers of a matrix of products, of the shape `matrix`. They are in the layout of the
    implementation `impl`. `stored` names the format (device/formats).
    """

    matrix: Matrix
    stored: str | None
    impl: str

    @property
    def implementation(self) -> Implementation:
        return find(self.impl)

    @property
    def format(self) -> formats.Format:
        return formats.find(self.stored)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the numbers before an implementation packs them."""
        return self.format.arrays[0].shape(self.matrix)


def add_weight(
    module: nnx.Module, name: str, matrix: Matrix, dtype: str, stored: formats.Stored, impl: str
) -> None:
    """Gives a module the arrays of a matrix as attributes: the `Weight` by the name `name`, and the
    other arrays of the format by `name` and their suffixes. All are zeros, in the shapes in which
    they are stored before an implementation packs them.

    Where matrices have several formats, this one has floats until the decoder stores it
    (`store_matrices`).
    """
    if isinstance(stored, tuple):
        stored = None
    stored_format = formats.find(stored)
    matrix = matrix._replace(blocks=stored_format.blocks)
    for array in stored_format.arrays:
        blank = jnp.zeros(array.shape(matrix), array.dtype or dtype)
        is_numbers = array is stored_format.arrays[0]
        variable = (
            Weight(blank, matrix=matrix, stored=stored, impl=impl)
            if is_numbers
            else nnx.Param(blank)
        )
        setattr(module, name + array.suffix, variable)


def store_matrices(model: nnx.Module, stored: formats.Stored, dtype: str) -> None:
    """Gives matrices of a model the formats that are listed by their names."""
    if not isinstance(stored, tuple):
        return  # all matrices have one format
    for name, format_name in stored:
        *path, last = name.split(".")
        module: Any = model
        for key in path:
            module = module[int(key)] if key.isdigit() else getattr(module, key)
        weight = getattr(module, last)
        if isinstance(weight, Weight):  # and not the table of an embedding, which has its format
            add_weight(module, last, weight.matrix, dtype, format_name, weight.impl)


def stored_arrays(module: nnx.Module, name: str, stored: str | None) -> list[jax.Array]:
    """The arrays of a module's matrix `name`, in the order of `Format.arrays`."""
    return [getattr(module, part)[...] for part in formats.find(stored).names(name)]


def product(module: nnx.Module, name: str, x: jax.Array, **options: Any) -> jax.Array:
    """x [T, in] times the matrix `name` of a module, as `linear` with these options."""
    weight: Weight = getattr(module, name)
    arrays = stored_arrays(module, name, weight.stored)
    options["impl"] = weight.implementation
    return weight.format.multiply(x, arrays, weight.matrix, **options)


def summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over the devices of these axes of the mesh; x itself if there are none."""
    return jax.lax.psum(x, axes) if axes else x


class Linear(nnx.Module):
    """x [T, in] -> [T, out], by a weight [out, in] (+ bias).

    gated: the weight has 2 out rows, and the first half are the gates of the second.
    stored: as in `DecoderConfig`.
    impl: a name of `device.linear`.
    axes: of a mesh whose devices each have a part of the inputs. The products of the devices are
        added in float32, and then rounded.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        bias: bool = False,
        gated: bool = False,
        dtype: str,
        stored: formats.Stored = None,
        impl: str = "xla",
        axes: tuple[str, ...] = (),
    ):
        rows = size_out * (1 + gated)
        add_weight(self, "weight", Matrix(rows, size_in, gated), dtype, stored, impl)
        self.bias = nnx.Param(jnp.zeros((rows,), dtype)) if bias else None
        self.axes = axes

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | LayerNorm | None = None,
        activation: str | None = None,
        residual: jax.Array | None = None,
        rows: tuple[int, int] | None = None,
        sizes: jax.Array | None = None,
        low: LowRank | None = None,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """norm(x), then the product, then the activation of the gates, then + residual. The options
        are those of `linear`.
        """
        fused = None
        if isinstance(norm, RMSNorm):
            fused = Norm(norm.weight[...], norm.eps, norm.plus_one)
        elif norm is not None:
            x = norm(x)
        multiply = partial(product, self, "weight", x, norm=fused, rows=rows, sizes=sizes, low=low)
        bias = values(self.bias)
        dtype = dtype or x.dtype
        if not self.axes:
            return multiply(bias=bias, activation=activation, residual=residual, dtype=dtype)
        y = summed(multiply(dtype=jnp.float32), self.axes)
        for term in (bias, residual):
            y = y if term is None else y + term
        return y.astype(dtype)


def values(param: nnx.Param | None) -> jax.Array | None:
    return None if param is None else param[...]


def rms_normed(x: jax.Array, eps: float) -> jax.Array:
    """x [..., H] with an RMS norm without a weight over its last axis, in float32."""
    y = x.astype(jnp.float32)
    return (y * reciprocal_sqrt(row_means(y * y) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Zhang & Sennrich 2019, over the last axis of x [..., H], in float32.

    plus_one: multiply by 1 + weight, and not by weight.
    axes: of a mesh whose devices each have a part of a row.
    count: with axes: how many numbers of a row all devices have together; padding does not count.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        dtype: str,
        plus_one: bool = False,
        axes: tuple[str, ...] = (),
        count: int = 0,
    ):
        self.weight = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps
        self.plus_one = plus_one
        self.axes = axes
        self.count = count

    def _means(self, x: jax.Array) -> jax.Array:
        """[..., H] float32 -> [..., 1]: the means of rows, of which devices may have parts."""
        if not self.axes:
            return row_means(x)
        return summed(row_sums(x), self.axes)[..., None] / self.count

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * reciprocal_sqrt(self._means(y * y) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return (y * (1 + weight if self.plus_one else weight)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Ba et al. 2016, over the last axis of x [..., H], in float32."""

    def __init__(self, size: int, *, eps: float, dtype: str):
        self.weight = nnx.Param(jnp.zeros((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y - row_means(y)
        y = y * reciprocal_sqrt(row_means(y * y) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        bias = self.bias[...].astype(jnp.float32)
        return (y * weight + bias).astype(x.dtype)
