"""`GatedDelta`: the gated delta rule (Yang et al. 2024, arXiv 2412.06464) as in Qwen3-Next and
Qwen3.5.

    inputs = of queries, keys and values            [2 K E + N D]
    q, k, v = silu(convolution(inputs))
    decay = -exp(decay_log) * softplus(a + decay_bias);  rate = sigmoid(b)
    y = state read by q / (|q| sqrt(E)), with k / |k|    (decayed_state.py)
    out(norm(y) * silu(z))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.attention import Attend, states_of
from pagedjax.device.batch import Batch
from pagedjax.device.cache import Pages
from pagedjax.device.layers import Linear
from pagedjax.device.models.mixers import decayed_state
from pagedjax.device.models.mixers.decayed_state import Inputs, StateMixer
from pagedjax.device.models.mixers.mixer import (
    CONV_INPUT,
    KeptNumbers,
    MixerLayer,
    StepInputs,
    convolution,
    with_inputs,
)
from pagedjax.device.row_reductions import reciprocal_sqrt, row_means

EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True)
class GatedDelta(StateMixer):
    """Channels: queries, keys and values."""

    readers: ClassVar[int] = 2

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of the joined product: inputs of the convolution, z, b and a."""
        return self.channels, self.values, self.heads, self.heads

    def layer(self, c: Any, dtype: str) -> MixerLayer:
        return GatedDeltaLayer(self, c, dtype)


class GatedDeltaLayer(MixerLayer):
    def __init__(self, mixer: GatedDelta, c: Any, dtype: str):
        super().__init__(mixer, c, dtype)
        options = {"dtype": dtype, "stored": c.stored, "impl": c.linear}
        self.inner = Linear(c.hidden, sum(mixer.parts), **options)
        self.out = Linear(mixer.values, c.hidden, **options)
        self.conv = nnx.Param(jnp.zeros((mixer.channels, 1, mixer.length), dtype))  # as in files
        self.decay_log = nnx.Param(jnp.zeros((mixer.heads,), dtype))
        self.decay_bias = nnx.Param(jnp.zeros((mixer.heads,), dtype))
        self.norm = nnx.Param(jnp.zeros((mixer.value_dim,), dtype))

    def __call__(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        kept, y, gate = self._run(x, arrays, batch, attend, norm)
        return self._output(y, gate, batch, residual), kept.arrays

    def write(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm) -> Pages:
        """The pages with the tokens of x."""
        return self._run(x, arrays, batch, attend, norm)[0].arrays

    def read(self, x, arrays, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        """As `__call__`, for tokens that are in the pages."""
        m = self.mixer
        kept = self.pages(arrays, batch)
        assert states_of(attend) is None, "a decoder computes layers with states once"
        rows = m.channels, m.channels + m.values
        gate = self.inner(x, norm=norm, rows=rows, sizes=batch.used_tokens)
        query, _, _ = self._convolved(kept, batch)
        y = decayed_state.read(kept, m.sizes, query, batch)
        return self._output(y, gate, batch, residual)

    def _run(
        self, x, arrays, batch: Batch, attend: Attend, norm
    ) -> tuple[KeptNumbers, jax.Array, jax.Array]:
        """(pages, outputs of the state [T, N, D], z [T, N D])."""
        m = self.mixer
        inputs, gate, rate, decay = m.split(self.inner(x, norm=norm, sizes=batch.used_tokens))
        kernel = states_of(attend)
        pages = self.pages(arrays, batch)
        kept, of_step = with_inputs(pages, CONV_INPUT, inputs, batch, m.length, kernel)
        query, key, value = self._convolved(kept, batch, of_step)
        of_tokens = Inputs(
            query=query,
            key=key,
            value=value,
            decay=self._decay(decay),
            rate=jax.nn.sigmoid(rate.astype(jnp.float32)),
        )
        kept, y = decayed_state.run(kept, m.sizes, of_tokens, batch, kernel)
        return kept, y, gate

    def _decay(self, product: jax.Array) -> jax.Array:
        """-exp(decay_log) softplus(product + bias), [T, N]."""
        bias = self.decay_bias[...].astype(jnp.float32)
        speed = -jnp.exp(self.decay_log[...].astype(jnp.float32))
        return speed * jax.nn.softplus(product.astype(jnp.float32) + bias)

    def _convolved(
        self, kept: KeptNumbers, batch: Batch, of_step: StepInputs | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys [T, K, E], and values [T, N, D]."""
        m = self.mixer
        y = jax.nn.silu(convolution(kept, CONV_INPUT, batch, self.conv[:, 0], None, of_step))
        y = y.astype(self.dtype).astype(jnp.float32)  # rounded as the model was trained
        query, key, value = jnp.split(y, [m.keys, 2 * m.keys], axis=1)
        query = _unit(query.reshape(-1, m.key_heads, m.key_dim)) * m.key_dim**-0.5
        key = _unit(key.reshape(-1, m.key_heads, m.key_dim))
        return query, key, value.reshape(-1, m.heads, m.value_dim)

    def _output(self, y: jax.Array, gate: jax.Array, batch: Batch, residual) -> jax.Array:
        """out(norm(y) * silu(gate))."""
        y = y.astype(self.dtype).astype(jnp.float32)
        y = y * reciprocal_sqrt(row_means(y * y) + self.config.eps)
        y = y * self.norm[...].astype(jnp.float32)
        y = y.reshape(len(y), -1) * jax.nn.silu(gate.astype(jnp.float32))
        return self.out(y.astype(self.dtype), residual=residual, sizes=batch.used_tokens)


def _unit(x: jax.Array) -> jax.Array:
    """x [..., E] divided by its length."""
    return x * reciprocal_sqrt((x * x).sum(axis=-1, keepdims=True) + EPS)
