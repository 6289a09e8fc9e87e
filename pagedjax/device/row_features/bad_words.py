"""`bad_words`: sequences of tokens that an output never contains. If the output ends with all
tokens of a sequence but the last one, that last token is forbidden.

The end of a row's output is compared with all of its sequences at once. Tokens of the prompt are
not compared, as in vLLM. So the output may complete a word that begins in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.row_features.feature import RowContext, RowFeature

if TYPE_CHECKING:
    from pagedjax.options.params import SamplingParams

MAX_TOKENS = 1024  # of all sequences of a request
MAX_LENGTH = 32  # tokens of one sequence
NO_TOKEN = -1


def _read(params: SamplingParams, stop_ids: tuple[int, ...]) -> dict[str, Any] | None:
    if params.bad_words:
        raise ValueError(
            f"bad_words is {params.bad_words!r:.80}, and an engine knows no text; use LLM or a "
            "Session, or give bad_words_token_ids"
        )
    sequences = tuple(dict.fromkeys(params.bad_words_token_ids))
    if not sequences:
        return None
    longest = max(sequences, key=len)
    total = sum(map(len, sequences))
    if len(longest) > MAX_LENGTH:
        raise ValueError(
            f"a bad word has {len(longest)} tokens; the limit is {MAX_LENGTH}; forbid a part of it"
        )
    if total > MAX_TOKENS:
        raise ValueError(
            f"the bad words have {total} tokens in all; the limit is {MAX_TOKENS}; list fewer"
        )
    allowed = params.allowed_token_ids
    single_tokens = {sequence[0] for sequence in sequences if len(sequence) == 1}
    if allowed is not None and set(allowed) <= single_tokens:
        raise ValueError("allowed_token_ids has only bad words of one token")
    ids = np.full(MAX_TOKENS, NO_TOKEN, np.int32)
    after = np.zeros(MAX_TOKENS, np.int32)
    word = np.zeros(MAX_TOKENS, np.int32)
    ids[:total] = [token for sequence in sequences for token in sequence]
    after[:total] = [n for sequence in sequences for n in reversed(range(len(sequence)))]
    word[:total] = [i for i, sequence in enumerate(sequences) for _ in sequence]
    return {"ids": ids, "after": after, "word": word}


def _apply(logits: jax.Array, rows: Mapping[str, jax.Array], context: RowContext) -> jax.Array:
    b, v = logits.shape
    row = jnp.arange(len(logits))[:, None]
    ids = rows["ids"]
    after = rows["after"]
    word = rows["word"]
    ends = after == 0
    # A token of a word has `after` tokens of the word behind it. The next token completes the word
    # only if each of the others is as many places before the next token. A word is broken if one of
    # them is not.
    differs = ~ends & (_sampled_before(after, context) != ids)
    broken = jnp.zeros((b, MAX_TOKENS), bool).at[row, word].max(differs)  # [B, words]
    forbidden = (ids >= 0) & ends & ~broken[row, word]
    # the index v is past the end of the row, so nothing is set there
    return logits.at[row, jnp.where(forbidden, ids, v)].set(-jnp.inf, mode="drop")


def _sampled_before(distance: jax.Array, context: RowContext) -> jax.Array:
    """[B, n] the token of the output at each distance before the next one; NO_TOKEN if the output
    is shorter. Distances are below MAX_LENGTH.
    """
    size = context.tokens.shape[1]
    row = jnp.arange(len(distance))[:, None]
    back = jnp.arange(MAX_LENGTH)  # only these tokens are read from the cache
    position = context.seq_lens[:, None] - back
    valid = jnp.maximum(position, 0)
    blocks = context.block_tables.at[row, valid // size].get(mode="clip")
    tokens = context.tokens.at[blocks, valid % size].get(mode="promise_in_bounds")
    is_output = (back > 0) & (position >= context.prompt_len[:, None])
    sampled = jnp.where(is_output, tokens, NO_TOKEN)
    return sampled[row, distance]


BAD_WORDS = RowFeature(
    name="bad_words",
    stage="logits",
    off={
        # the tokens of all sequences, one sequence behind the other
        "ids": np.full(MAX_TOKENS, NO_TOKEN, np.int32),
        # for each of these tokens, how many tokens of its sequence come after it
        "after": np.zeros(MAX_TOKENS, np.int32),
        "word": np.zeros(MAX_TOKENS, np.int32),  # for each of them, the number of its sequence
    },
    read=_read,
    apply=_apply,
    params=("bad_words", "bad_words_token_ids"),
)
