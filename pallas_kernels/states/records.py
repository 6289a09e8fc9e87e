"""What implementations of states get."""

from __future__ import annotations

from typing import NamedTuple

import jax


class StateShape(NamedTuple):
    """key_heads: each serves heads / key_heads heads, one behind the other."""

    heads: int  # N
    key_heads: int  # K
    key_dim: int  # E
    value_dim: int  # D
    delta: bool  # whether updates follow the delta rule, for which inputs have rates


class Part(NamedTuple):
    """Where some of the words of an array are: in page array number `array`, in the layer's pages
    from `first` to `end`.
    """

    array: int
    first: int
    end: int


class Memory(NamedTuple):
    """The pages of a layer.

    arrays: one or two page arrays [P, heads of keys, rows, L], of 16 or 32 bits a word.
    tables: [pages of the layer, B, M] int32, which blocks of the pool have the pages of the blocks
        of each row.
    tokens: where keys, updates and decays are.
    states: where the states are.
    block_size: S.
    """

    arrays: tuple[jax.Array, ...]
    tables: jax.Array
    tokens: tuple[Part, ...]
    states: tuple[Part, ...]
    block_size: int


class Inputs(NamedTuple):
    """What the T tokens of a step bring, in float32."""

    query: jax.Array  # [T, K, E]
    key: jax.Array  # [T, K, E]
    value: jax.Array  # [T, N, D]
    decay: jax.Array  # [T, N] at most 0
    rate: jax.Array | None  # [T, N]; None: the update is the value


class Spans(NamedTuple):
    """Which tokens of a step each row has, and their positions: int32."""

    starts: jax.Array  # [B] among the step's tokens
    counts: jax.Array  # [B]
    positions: jax.Array  # [B] of the first one; 0 in padding
