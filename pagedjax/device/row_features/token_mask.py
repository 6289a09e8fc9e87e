"""`structured_outputs` and `trace_decode_token_ids`: the tokens that may come next, as bits that
the host computes for each sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.row_features.feature import RowContext, RowFeature

TOKEN_MASK = "token_mask"


def _apply(logits: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    """Minus infinity for each token whose bit is 0. The bit of token t is bit t % 32 of word
    t // 32.
    """
    words = rows["allowed"]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]]
    return jnp.where(allowed == 1, logits, -jnp.inf)


def token_mask(vocab_size: int) -> RowFeature:
    """The option for a model with this vocabulary. It is the first one of the chain. No later
    option can allow a token again.
    """
    all_allowed = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    return RowFeature(
        name=TOKEN_MASK,
        stage="logits",
        off={"allowed": all_allowed},
        read=lambda p, _: {"allowed": all_allowed},  # engine/pack.py puts the sample's mask there
        apply=_apply,
        params=("structured_outputs", "trace_decode_token_ids"),
        per_step=True,
        reads_tokens=False,
    )
