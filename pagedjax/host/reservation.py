"""How much of the cache a sequence takes when it enters: blocks as it grows, or one contiguous piece for its life.

The pieces are the baselines of the PagedAttention paper (Kwon et al. 2023, section 6.1), after Orca (Yu et al. 2022),
which keeps a request's keys and values in one place and so has to reserve it beforehand:

    none     blocks for the tokens that are known, another whenever the last one is full: paging, the default
    oracle   the tokens that the request will have at its longest, as if that were known of every request
    pow2     its prompt, and the output rounded up to a power of two
    max      max_model_len tokens

A piece is a power of two of blocks, aligned to its size, as a buddy allocator gives (`blocks.allocate_run`). It has one
owner to its end: nothing in it is shared, and nobody is preempted, because nobody grows.
"""

from __future__ import annotations

from pagedjax.config import EngineConfig
from pagedjax.host import blocks
from pagedjax.host.state import SchedulerConfig
from pagedjax.host.types import Seq


def tokens(config: SchedulerConfig, seq: Seq) -> int:
    """Token slots that a sequence takes when it enters."""
    if config.reservation == "none":
        return seq.length
    if config.reservation == "max":
        return config.max_model_len
    if config.reservation == "oracle":
        return seq.limit
    output = seq.limit - seq.request.prompt_len
    return min(seq.request.prompt_len + _power_of_two(output), config.max_model_len)


def piece(config: SchedulerConfig, seq: Seq) -> int:
    """The same in blocks: whole pieces where it is reserved."""
    need = blocks.needed(tokens(config, seq), config.block_size)
    return need if config.reservation == "none" else _power_of_two(need)


def table_width(config: EngineConfig, length: int) -> int:
    """Blocks that a request of at most so many tokens can have."""
    need = blocks.needed(length, config.block_size)
    return need if config.reservation == "none" else _power_of_two(need)


def largest(config: SchedulerConfig) -> int:
    """Blocks that one sequence can have at most."""
    pool = config.num_blocks
    return pool if config.reservation == "none" else 1 << (pool.bit_length() - 1)


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
