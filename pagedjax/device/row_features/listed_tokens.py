"""`allowed_token_ids`, `logit_bias` and `min_tokens`: options that name tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.row_features.feature import RowContext, RowFeature

if TYPE_CHECKING:
    from pagedjax.options.params import SamplingParams

# entries of logit_bias, allowed_token_ids and stop tokens under min_tokens that a request can have
MAX_LISTED = 1024


def _read(params: SamplingParams, stop_ids: tuple[int, ...]) -> dict[str, Any] | None:
    bias = dict(params.logit_bias or {})
    allowed = params.allowed_token_ids
    entries = bias if allowed is None else {token: bias.get(token, 0.0) for token in allowed}
    stops = stop_ids if params.min_tokens > 0 else ()
    if not (entries or stops):
        return None
    num_listed = len(bias if allowed is None else allowed) + len(stops)  # repeated tokens, too
    if num_listed > MAX_LISTED:
        raise ValueError(
            f"{num_listed} tokens are listed in logit_bias, allowed_token_ids and (with "
            f"min_tokens) the stop tokens; the limit is {MAX_LISTED}; list fewer"
        )
    if allowed is not None and stops and set(allowed) <= set(stops):
        raise ValueError(
            f"allowed_token_ids has only stop tokens, but min_tokens is {params.min_tokens}"
        )
    num_entries = len(entries) + len(stops)
    ids = np.full(MAX_LISTED, -1, np.int32)
    ids[:num_entries] = [*entries, *stops]
    biases = np.zeros(MAX_LISTED, np.float32)
    biases[:num_entries] = [*entries.values(), *[-np.inf] * len(stops)]
    return {
        "ids": ids,
        "bias": biases,
        "always_count": len(entries),
        "min_tokens": params.min_tokens,
        "only_listed": allowed is not None,
    }


def _apply(logits: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    b, v = logits.shape
    row = jnp.arange(b)[:, None]
    entry = jnp.arange(MAX_LISTED)
    is_stop = entry >= rows["always_count"][:, None]
    is_entry = rows["ids"] >= 0
    # stop tokens apply until min_tokens are sampled
    applies = is_entry & (~is_stop | (context.position < rows["min_tokens"])[:, None])
    ids = jnp.where(applies, rows["ids"], v)  # v is past the end of the row, so it is dropped
    is_listed = jnp.zeros((b, v), bool).at[row, ids].set(True, mode="drop")
    logits = jnp.where(rows["only_listed"][:, None] & ~is_listed, -jnp.inf, logits)
    return logits.at[row, ids].add(rows["bias"], mode="drop")


LISTED_TOKENS = RowFeature(
    name="listed_tokens",
    stage="logits",
    off={
        "ids": np.full(MAX_LISTED, -1, np.int32),
        "bias": np.zeros(MAX_LISTED, np.float32),
        # the number of entries that apply at every position; those behind them are stop tokens,
        # which apply before min_tokens are sampled
        "always_count": np.int32(0),
        "min_tokens": np.int32(0),
        "only_listed": np.bool_(False),  # tokens that are not listed are forbidden
    },
    read=_read,
    apply=_apply,
    params=("logit_bias", "allowed_token_ids", "min_tokens"),
    reads_tokens=False,
)
