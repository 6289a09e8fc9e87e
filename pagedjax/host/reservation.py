"""Baselines: a sequence reserves one contiguous piece of the cache for its life, instead of blocks
as it grows.

The pieces are those of the PagedAttention paper (Kwon et al. 2023, section 6.1), after Orca (Yu et
al. 2022), which keeps the keys and values of a request contiguous and so must reserve them in
advance:

    none     blocks for the known tokens, and another block whenever the last is full: paging, the
             default
    oracle   the final length of the request, as if it were known
    pow2     its prompt, and the output rounded up to a power of two
    max      max_model_len tokens

A piece is a power of two of blocks, aligned to its size, as in a buddy allocator
(`blocks.allocate_run`). It has one owner: its blocks are not shared, and no sequence is preempted,
because none grows.
"""

from __future__ import annotations

from pagedjax.host import blocks
from pagedjax.host.types import SchedulerConfig, Seq
from pagedjax.options.config import EngineConfig


def tokens(config: SchedulerConfig, seq: Seq) -> int:
    """Token slots that a sequence takes when it is admitted. Not for reservation "none"."""
    if config.reservation == "max":
        return config.max_model_len
    if config.reservation == "oracle":
        return seq.limit
    output = seq.limit - seq.request.prompt_len
    return min(seq.request.prompt_len + _power_of_two(output), config.max_model_len)


def piece(config: SchedulerConfig, seq: Seq) -> int:
    """Blocks that a sequence takes when it is admitted. Not for reservation "none"."""
    return _power_of_two(blocks.needed(tokens(config, seq), config.block_size))


def table_width(config: EngineConfig, length: int) -> int:
    """Blocks that a request of at most `length` tokens can have."""
    need = blocks.needed(length, config.block_size)
    return need if config.reservation == "none" else _power_of_two(need)


def largest(config: SchedulerConfig) -> int:
    """The most blocks that one sequence can have: the largest power of two in the pool. Not for
    reservation "none".
    """
    return 1 << (config.num_blocks.bit_length() - 1)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; for n = 0 it is 1."""
    return 1 << max(n - 1, 0).bit_length()
