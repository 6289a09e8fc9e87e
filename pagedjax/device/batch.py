"""The arrays of one step, as NamedTuples, and the sizes that fix their shapes."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np

MAX_TOP = 20  # log-probabilities of so many best tokens can be asked for
MAX_LISTED = 1024  # entries of logit_bias, allowed_token_ids and suppressed stop tokens a request can have


class SamplingBatch(NamedTuple):
    """How the B rows sample. Neutral values switch a feature off for a row, and off for the step if all rows agree."""

    temperature: Any  # [B] f32; 0 is greedy
    top_p: Any  # [B] f32; 1 is off
    min_p: Any  # [B] f32; 0 is off
    presence: Any  # [B] f32
    frequency: Any  # [B] f32
    repetition: Any  # [B] f32; 1 is off
    top_k: Any  # [B] i32; 0 is off
    num_top: Any  # [B] i32: top log-probabilities wanted; -1 is none at all, not even the chosen token's
    seed: Any  # [B] u32
    position: Any  # [B] i32: index of the sampled token among the request's outputs
    prompt_len: Any  # [B] i32
    listed: Any  # [B, MAX_LISTED] i32 token ids, -1 padded
    bias: Any  # [B, MAX_LISTED] f32 added to their logits
    only_listed: Any  # [B] bool: every other token is forbidden


class Feed(NamedTuple):
    """Tokens that the host does not know yet: those that the step before samples (see ahead.py)."""

    rows: Any  # [T] row of that step, -1 where `Batch.tokens` holds the token
    tokens: Any  # [max_num_seqs] what it sampled, on the device


class Batch(NamedTuple):
    """One step's arguments beside parameters and cache: all integers are int32."""

    tokens: Any  # [T]
    positions: Any  # [T]
    slots: Any  # [T] block * S + offset
    block_tables: Any  # [B, M]
    seq_lens: Any  # [B] context including this step's tokens
    cu_q_lens: Any  # [B + 1]
    last: Any  # [B] index into T of each row's last token
    targets: Any  # [T] the prompt token after this one where its log-probability is wanted, else -1
    sampling: SamplingBatch
    feed: Feed | None = None  # of an engine that looks ahead, in every step


class Shapes(NamedTuple):
    """Everything that fixes the compiled shapes of an engine."""

    tokens: tuple[int, ...]  # T of each bucket, ascending
    max_seqs: int
    block_size: int
    table_width: int  # M
    max_model_len: int
    vocab_size: int

    def bucket(self, num_tokens: int) -> int:
        """The smallest T that holds `num_tokens`."""
        return self.tokens[bisect_left(self.tokens, num_tokens)]

    def rows(self, t: int) -> int:
        return min(t, self.max_seqs)


def token_buckets(max_tokens: int, *, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two from `smallest`, and max_tokens itself at the end."""
    sizes, size = [], smallest
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return (*sizes, max(max_tokens, smallest))


def blank_sampling(shapes: Shapes, t: int) -> SamplingBatch:
    """Every feature off, for the B rows of bucket t."""
    b = shapes.rows(t)
    floats = [np.zeros(b, np.float32) for _ in range(6)]
    floats[1][:] = floats[5][:] = 1.0
    ints = [np.zeros(b, np.int32), np.full(b, -1, np.int32), np.zeros(b, np.uint32), *np.zeros((2, b), np.int32)]
    return SamplingBatch(
        *floats,
        *ints,
        listed=np.full((b, MAX_LISTED), -1, np.int32),
        bias=np.zeros((b, MAX_LISTED), np.float32),
        only_listed=np.zeros(b, bool),
    )


def blank_feed(shapes: Shapes, t: int) -> Feed:
    """The host knows every token of the step."""
    return Feed(np.full(t, -1, np.int32), np.zeros(shapes.max_seqs, np.int32))
