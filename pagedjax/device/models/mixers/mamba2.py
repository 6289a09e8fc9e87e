"""`Mamba2`: the state space layer of Dao & Gu 2024 (arXiv 2405.21060), as in Mamba 2 and in hybrids
such as Granite 4, Bamba and Nemotron-H.

    z, inputs, dt = in(x)
    v, k, q = silu(convolution(inputs))             values [N D], keys [K E], queries [K E]
    dt = clip(softplus(dt + dt_bias));  decay = -exp(decay_log) * dt
    y = state read by q, with the update dt * v     (decayed_state.py)
    out(norm((y + skip * v) * silu(z)))             norm: of each of `norm_parts` parts by itself
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.attention import Attend, states_of
from pagedjax.device.batch import Batch
from pagedjax.device.cache import Pages
from pagedjax.device.layers import Linear, values
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


@dataclass(frozen=True)
class Mamba2(StateMixer):
    """The sizes of a layer. The channels of its convolution are values, keys and queries, in this
    order.

    step_limits: the least and the largest dt.
    bias: whether the first and the last product add one.
    conv_bias: whether the convolution adds one.
    norm_parts: the number of equal parts of the values, each of which is normalised by itself.
    """

    step_limits: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    conv_bias: bool = True
    norm_parts: int = 1

    @property
    def parts(self) -> tuple[int, ...]:
        """How many outputs of the first product are z, inputs of the convolution, and dt."""
        return self.values, self.channels, self.heads

    def layer(self, c: Any, dtype: str) -> MixerLayer:
        return Mamba2Layer(self, c, dtype)


class Mamba2Layer(MixerLayer):
    def __init__(self, mixer: Mamba2, c: Any, dtype: str):
        super().__init__(mixer, c, dtype)
        options = {"bias": mixer.bias, "dtype": dtype, "stored": c.stored, "impl": c.linear}
        self.inner = Linear(c.hidden, sum(mixer.parts), **options)
        self.out = Linear(mixer.values, c.hidden, **options)
        self.conv = nnx.Param(jnp.zeros((mixer.channels, 1, mixer.length), dtype))  # as in files
        bias = jnp.zeros((mixer.channels,), dtype)
        self.conv_bias = nnx.Param(bias) if mixer.conv_bias else None
        self.decay_log = nnx.Param(jnp.zeros((mixer.heads,), dtype))
        self.step_bias = nnx.Param(jnp.zeros((mixer.heads,), dtype))
        self.skip = nnx.Param(jnp.zeros((mixer.heads,), dtype))
        self.norm = nnx.Param(jnp.zeros((mixer.values,), dtype))

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
        gate = self.inner(x, norm=norm, rows=(0, m.values), sizes=batch.used_tokens)
        value, _, query = self._convolved(kept, batch)
        y = decayed_state.read(kept, m.sizes, query, batch)
        return self._output(y + self._skipped(value), gate, batch, residual)

    def _run(
        self, x, arrays, batch: Batch, attend: Attend, norm
    ) -> tuple[KeptNumbers, jax.Array, jax.Array]:
        """The pages with these tokens; what the state gives plus skip * v [T, N, D]; z [T, N D]."""
        m = self.mixer
        gate, inputs, step = m.split(self.inner(x, norm=norm, sizes=batch.used_tokens))
        kernel = states_of(attend)
        pages = self.pages(arrays, batch)
        kept, of_step = with_inputs(pages, CONV_INPUT, inputs, batch, m.length, kernel)
        value, key, query = self._convolved(kept, batch, of_step)
        speed = -jnp.exp(self.decay_log[...].astype(jnp.float32))
        step = step.astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        step = jnp.clip(jax.nn.softplus(step), *m.step_limits)
        of_tokens = Inputs(query, key, step[..., None] * value, speed * step, rate=None)
        kept, y = decayed_state.run(kept, m.sizes, of_tokens, batch, kernel)
        return kept, y + self._skipped(value), gate

    def _convolved(
        self, kept: KeptNumbers, batch: Batch, of_step: StepInputs | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Values [T, N, D], and keys and queries [T, K, E]."""
        m = self.mixer
        y = convolution(kept, CONV_INPUT, batch, self.conv[:, 0], values(self.conv_bias), of_step)
        y = jax.nn.silu(y).astype(self.dtype).astype(jnp.float32)  # rounded as it was trained
        value, key, query = jnp.split(y, [m.values, m.values + m.keys], axis=1)
        value = value.reshape(-1, m.heads, m.value_dim)
        key = key.reshape(-1, m.key_heads, m.key_dim)
        query = query.reshape(-1, m.key_heads, m.key_dim)
        return value, key, query

    def _skipped(self, value: jax.Array) -> jax.Array:
        return self.skip[...].astype(jnp.float32)[:, None] * value

    def _output(self, y: jax.Array, gate: jax.Array, batch: Batch, residual) -> jax.Array:
        """out(norm(y * silu(gate)))."""
        y = y.reshape(len(y), -1) * jax.nn.silu(gate.astype(jnp.float32))
        parts = y.reshape(len(y), self.mixer.norm_parts, -1)
        parts = parts * reciprocal_sqrt(row_means(parts * parts) + self.config.eps)
        y = parts.reshape(y.shape) * self.norm[...].astype(jnp.float32)
        return self.out(y.astype(self.dtype), residual=residual, sizes=batch.used_tokens)
