"""The scheduler's state and its invariants (`check`). Immutable."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from immutables import Map

from pagedjax.config import EngineConfig
from pagedjax.host import blocks, views
from pagedjax.host.blocks import BlockPool
from pagedjax.host.kv_policies import View
from pagedjax.host.types import Running, SchedulerConfig, Seq, current


def limits(
    c: EngineConfig, host_blocks: int = 0, of_groups: tuple[View, ...] = ()
) -> SchedulerConfig:
    """The scheduler's part of an engine's configuration, in which nothing is left open.

    Args:
        of_groups: what queries see, by group of layers; () if all of them see everything. A
            configured block has the keys and values of all layers; here it is a block for each
            group. The trash block needs one alone.
    """
    assert c.max_model_len is not None, "resolve the configuration first"
    assert c.num_blocks is not None, "resolve the configuration first"
    return SchedulerConfig(
        c.block_size,
        (c.num_blocks + 1) * max(1, len(of_groups)) - 1,
        c.max_num_batched_tokens,
        c.max_num_seqs,
        c.max_model_len,
        host_blocks,
        c.chunked_prefill,
        c.mixed_steps,
        c.reservation,
        of_groups,
    )


class SchedulerState(NamedTuple):
    config: SchedulerConfig
    pool: BlockPool
    waiting: tuple[Seq, ...]
    running: Running  # after `schedule`: the plan's sequences, then those that got no token
    step: int
    arrivals: int
    # the swap space; the blocks of a waiting sequence are its blocks there
    host_pool: BlockPool | None
    # arrivals of the sequences that may have to copy a shared block before the next write
    forked: frozenset[int]
    # of all unfinished sequences; a search through a long queue would make submits quadratic
    ids: Map[str, None]
    # stop tokens of all unfinished requests, and perhaps of finished ones
    stops: frozenset[int] = frozenset()


def running(state: SchedulerState) -> tuple[Seq, ...]:
    """The running sequences as current records."""
    return current(*state.running)


def check(state: SchedulerState) -> None:
    """The invariants that hold between any two transitions. Raises AssertionError."""
    c, active = state.config, running(state)
    blocks.check(state.pool, [seq.blocks for seq in active])
    away = [seq for seq in state.waiting if seq.blocks]
    assert state.host_pool is not None or not away, "a waiting sequence holds cache"
    if state.host_pool is not None:
        blocks.check(state.host_pool, [seq.blocks for seq in away])
    complete = all(
        len(seq.blocks) == blocks.needed(seq.computed, c.block_size) * c.groups
        for seq in state.waiting
    )
    assert complete, "content is lost"
    assert sum(seq.num_rows for seq in active) <= c.max_running, "too many sequences run, or will"
    for seq in active:
        behind = 0 if seq.request.beams else 1
        assert 0 <= seq.computed <= seq.length - behind, "computed must chase length"
        assert seq.length <= seq.limit <= c.max_model_len, "a sequence is longer than it may be"
        assert seq.computed * c.groups <= len(seq.blocks) * c.block_size, (
            "computed tokens lie outside the blocks"
        )
        views.check(c, seq)
        assert len(seq.hashes) <= seq.length // c.block_size, "a hash of a block that is not full"
        assert seq.request.stop_token_ids <= state.stops, "a stop token would be missed"
    arrivals = [seq.arrival for seq in (*state.waiting, *active)]
    assert len(arrivals) == len(set(arrivals)), "a sequence is in two places"
    beams = {seq.group for seq in active if seq.is_beam}
    assert beams.isdisjoint(seq.group for seq in state.waiting), (
        "some beams of a request run and others wait"
    )
    named = Counter(
        name for seq in (*state.waiting, *active) for name in (seq.request_id, *seq.request.forks)
    )
    assert Counter(list(state.ids)) == named, "an id is lost, left over or used twice"
