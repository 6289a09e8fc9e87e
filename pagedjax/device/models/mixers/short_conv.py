"""`ShortConv`: the gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404).

    b, c, x = in(x)
    u = b * x
    y = out(c * sum over j < L of weight[:, L - 1 - j] * u of the token j before)

What a token keeps is u [H]. A convolution of L tokens is a window of L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch
from pagedjax.device.cache import Pages
from pagedjax.device.layers import Linear, values
from pagedjax.device.models.mixers.mixer import (
    CONV_INPUT,
    Kept,
    KeptNumbers,
    Mixer,
    MixerLayer,
    convolution,
)


@dataclass(frozen=True)
class ShortConv(Mixer):
    """length: of the convolution in tokens (L). bias: whether both products and it have one."""

    length: int
    bias: bool = False

    def kept(self, c: Any, dtype: str) -> Kept:
        return Kept({CONV_INPUT: jax.ShapeDtypeStruct((c.hidden,), jnp.dtype(dtype))})

    def window(self, block_size: int) -> int:
        return self.length

    def layer(self, c: Any, dtype: str) -> MixerLayer:
        return ShortConvLayer(self, c, dtype)


class ShortConvLayer(MixerLayer):
    def __init__(self, mixer: ShortConv, c: Any, dtype: str):
        super().__init__(mixer, c, dtype)
        options = {"bias": mixer.bias, "dtype": dtype, "stored": c.stored, "impl": c.linear}
        self.inner = Linear(c.hidden, 3 * c.hidden, **options)
        self.out = Linear(c.hidden, c.hidden, **options)
        self.weight = nnx.Param(jnp.zeros((c.hidden, 1, mixer.length), dtype))  # as in files
        self.bias = nnx.Param(jnp.zeros((c.hidden,), dtype)) if mixer.bias else None

    def __call__(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        b, c, x = self._parts(x, norm, batch)
        kept = self.pages(arrays, batch).with_tokens(CONV_INPUT, b * x)
        return self._output(c, kept, batch, residual), kept.arrays

    def write(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm) -> Pages:
        """The pages with the inputs of the convolution."""
        b, _, x = self._parts(x, norm, batch)
        return self.pages(arrays, batch).with_tokens(CONV_INPUT, b * x).arrays

    def read(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        """As `__call__`, for tokens whose inputs of the convolution are in the pages."""
        size = self.config.hidden
        rows = size, 2 * size
        c = self.inner(x, norm=norm, rows=rows, sizes=batch.used_tokens)
        return self._output(c, self.pages(arrays, batch), batch, residual)

    def _parts(self, x: jax.Array, norm, batch: Batch) -> list[jax.Array]:
        """b, c and x, [T, H] each."""
        return jnp.split(self.inner(x, norm=norm, sizes=batch.used_tokens), 3, axis=1)

    def _output(self, c: jax.Array, kept: KeptNumbers, batch: Batch, residual) -> jax.Array:
        y = convolution(kept, CONV_INPUT, batch, self.weight[:, 0], values(self.bias))
        y = c * y.astype(c.dtype)
        return self.out(y, residual=residual, sizes=batch.used_tokens)
