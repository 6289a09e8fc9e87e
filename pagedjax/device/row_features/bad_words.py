"""`bad_words`: sequences of tokens that an output never has in it. The last token of one is
forbidden after the others.

A row compares the end of its history with all of its sequences at once. Only tokens of the output
count as history, as in vLLM: a word that begins in the prompt may be completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.row_features.feature import RowContext, RowFeature

if TYPE_CHECKING:
    from pagedjax.params import SamplingParams

MAX_TOKENS = 1024  # of all sequences of a request
MAX_LENGTH = 32  # tokens of one sequence
OUTSIDE = -1  # no token


def _read(params: SamplingParams, stop_ids: tuple[int, ...]) -> dict[str, Any] | None:
    if params.bad_words:
        raise ValueError(
            f"bad_words is {params.bad_words!r:.80}, and an engine knows no text; use LLM or a "
            "Session, or give bad_words_token_ids"
        )
    sequences = tuple(dict.fromkeys(params.bad_words_token_ids))
    if not sequences:
        return None
    longest, total = max(sequences, key=len), sum(map(len, sequences))
    if len(longest) > MAX_LENGTH:
        raise ValueError(
            f"a bad word has {len(longest)} tokens; the limit is {MAX_LENGTH}; forbid a part of it"
        )
    if total > MAX_TOKENS:
        raise ValueError(
            f"the bad words have {total} tokens in all; the limit is {MAX_TOKENS}; list fewer"
        )
    allowed, alone = params.allowed_token_ids, {one[0] for one in sequences if len(one) == 1}
    if allowed is not None and set(allowed) <= alone:
        raise ValueError("allowed_token_ids has only bad words of one token")
    ids, after, word = np.full(MAX_TOKENS, OUTSIDE, np.int32), *np.zeros((2, MAX_TOKENS), np.int32)
    ids[:total] = [token for one in sequences for token in one]
    after[:total] = [left for one in sequences for left in reversed(range(len(one)))]
    word[:total] = [i for i, one in enumerate(sequences) for _ in one]
    return {"ids": ids, "after": after, "word": word}


def _apply(logits: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    (b, v), row = logits.shape, jnp.arange(len(logits))[:, None]
    ids, after, word = rows["ids"], rows["after"], rows["word"]
    ends = after == 0
    # a token with `after` others of its word behind it must have been sampled so many tokens before
    # the next one
    differs = ~ends & (_sampled_before(after, context) != ids)
    broken = jnp.zeros((b, MAX_TOKENS), bool).at[row, word].max(differs)
    forbidden = (ids >= 0) & ends & ~broken[row, word]
    # v is past the end: dropped
    return logits.at[row, jnp.where(forbidden, ids, v)].set(-jnp.inf, mode="drop")


def _sampled_before(distance: jax.Array, context: RowContext) -> jax.Array:
    """[B, n] the output tokens at some distances before the next one, or OUTSIDE. Distances are
    below MAX_LENGTH.
    """
    size, row = context.tokens.shape[1], jnp.arange(len(distance))[:, None]
    back = jnp.arange(MAX_LENGTH)  # these few are read from the cache, and the rest is a lookup
    at = context.seq_lens[:, None] - back
    near = jnp.maximum(at, 0)
    blocks = context.block_tables.at[row, near // size].get(mode="clip")
    tokens = context.tokens.at[blocks, near % size].get(mode="promise_in_bounds")
    sampled = jnp.where((back > 0) & (at >= context.prompt_len[:, None]), tokens, OUTSIDE)
    return sampled[row, distance]


BAD_WORDS = RowFeature(
    name="bad_words",
    stage="logits",
    off={
        "ids": np.full(MAX_TOKENS, OUTSIDE, np.int32),  # the tokens of all sequences
        "after": np.zeros(
            MAX_TOKENS, np.int32
        ),  # of each: how many tokens of its sequence come after it
        "word": np.zeros(MAX_TOKENS, np.int32),  # of each: the number of its sequence
    },
    read=_read,
    apply=_apply,
    params=("bad_words", "bad_words_token_ids"),
)
