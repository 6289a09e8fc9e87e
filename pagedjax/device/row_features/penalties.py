"""`repetition_penalty`, `presence_penalty` and `frequency_penalty`: options that depend on the
tokens so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.row_features.feature import RowContext, RowFeature

if TYPE_CHECKING:
    from pagedjax.options.params import SamplingParams

SPAN = 512  # tokens of each row that are read at a time


def _read(params: SamplingParams, stop_ids: tuple[int, ...]) -> dict[str, float] | None:
    values = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    if values == (0.0, 0.0, 1.0):
        return None
    return dict(zip(("presence", "frequency", "repetition"), values, strict=True))


def _apply(logits: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    """Repetition (Keskar et al. 2019) over prompt and output; presence and frequency (OpenAI) over
    the output.
    """
    presence, frequency, repetition = (
        rows[name][:, None] for name in ("presence", "frequency", "repetition")
    )
    used = (presence != 0) | (frequency != 0) | (repetition != 1)
    present, counts = _token_counts(
        logits.shape[1], jnp.where(used[:, 0], context.seq_lens, 0), context
    )
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(present, penalised, logits)
    return logits - frequency * counts - presence * (counts > 0)


def _token_counts(v: int, lens: jax.Array, context: RowContext) -> tuple[jax.Array, jax.Array]:
    """([B, V] whether a token is among the first `lens` [B] tokens of a row, [B, V] how often it is
    in the row's output).

    A few blocks of each row are read at a time, as far as the longest row, so no array of
    [B, max_model_len] exists.
    """
    b, width = context.block_tables.shape
    size = context.tokens.shape[1]
    span = min(max(SPAN // size, 1), width)  # blocks of a row that are read at a time
    tables = jnp.pad(context.block_tables, ((0, 0), (0, -width % span)))
    row = jnp.arange(b)[:, None]

    def body(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        present, counts = state
        blocks = jax.lax.dynamic_slice_in_dim(tables, i * span, span, 1)
        ids = context.tokens.at[blocks].get(mode="promise_in_bounds").reshape(b, span * size)
        position = i * span * size + jnp.arange(span * size)
        valid = position < lens[:, None]
        output = valid & (position >= context.prompt_len[:, None])
        # the index v is past the end of the row, so nothing is set there
        present = present.at[row, jnp.where(valid, ids, v)].set(True, mode="drop")
        return present, counts.at[row, jnp.where(output, ids, v)].add(1.0, mode="drop")

    trips = -(-lens.max() // (span * size))
    return jax.lax.fori_loop(0, trips, body, (jnp.zeros((b, v), bool), jnp.zeros((b, v))))


PENALTIES = RowFeature(
    name="penalties",
    stage="logits",
    off={"presence": np.float32(0), "frequency": np.float32(0), "repetition": np.float32(1)},
    read=_read,
    apply=_apply,
    params=("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
