"""What a scheduler carries from step to step, and what is always true of it. Immutable."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from immutables import Map

from pagedjax.config import EngineConfig, Reservation
from pagedjax.host import blocks
from pagedjax.host.blocks import BlockPool
from pagedjax.host.branches import together, width
from pagedjax.host.types import Running, Seq, current


class SchedulerConfig(NamedTuple):
    """Integers of at least 1; `host_blocks` may be 0. `num_blocks` counts blocks that can be owned, without the trash
    block. What follows `host_blocks` is how earlier engines did it: turns.py and reservation.py."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    host_blocks: int = 0  # of the swap space; 0: preemption is by recomputation
    chunked_prefill: bool = True
    mixed_steps: bool = True
    reservation: Reservation = "none"


def limits(c: EngineConfig, host_blocks: int = 0) -> SchedulerConfig:
    """What a scheduler has to know of an engine, in whose configuration length and blocks are chosen."""
    assert c.max_model_len is not None, "resolve the configuration first"
    assert c.num_blocks is not None, "resolve the configuration first"
    return SchedulerConfig(
        c.block_size,
        c.num_blocks,
        c.max_num_batched_tokens,
        c.max_num_seqs,
        c.max_model_len,
        host_blocks,
        c.chunked_prefill,
        c.mixed_steps,
        c.reservation,
    )


class SchedulerState(NamedTuple):
    config: SchedulerConfig
    pool: BlockPool
    waiting: tuple[Seq, ...]
    running: Running  # after `schedule`: the plan's sequences, then those that got no token
    step: int
    arrivals: int
    host: BlockPool | None  # the swap space: who is waiting and has blocks has them there
    forked: frozenset[int]  # arrivals of those that begin, since the last commit, to write behind shared blocks
    ids: Map[str, None]  # of the waiting and the running: looking through them made a long queue quadratic
    stops: frozenset[int] = frozenset()  # every token that may stop one of them, and perhaps some of those gone


def max_running(config: SchedulerConfig) -> int:
    """Sequences that can run at a time: each must be able to get a token in every step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def running(state: SchedulerState) -> tuple[Seq, ...]:
    """The running sequences as current records."""
    return current(*state.running)


def check(state: SchedulerState) -> None:
    """The invariants that hold between any two transitions. Raises AssertionError."""
    c, active = state.config, running(state)
    blocks.check(state.pool, [seq.blocks for seq in active])
    away = [seq for seq in state.waiting if seq.blocks]
    assert state.host is not None or not away, "a waiting sequence holds cache"
    if state.host is not None:
        blocks.check(state.host, [seq.blocks for seq in away])
    held = all(len(seq.blocks) == blocks.needed(seq.computed, c.block_size) for seq in state.waiting)
    assert held, "content is lost"
    assert sum(map(width, active)) <= max_running(c), "too many sequences run, or will"
    for seq in active:
        behind = 0 if seq.request.beams else 1
        assert 0 <= seq.computed <= seq.length - behind, "computed must chase length"
        assert seq.length <= seq.limit <= c.max_model_len, "a sequence is longer than it may be"
        assert seq.computed <= len(seq.blocks) * c.block_size, "computed tokens lie outside the blocks"
        assert len(seq.hashes) <= seq.length // c.block_size, "a hash of a block that is not full"
        assert seq.request.stop_token_ids <= state.stops, "a stop token would be missed"
    arrivals = [seq.arrival for seq in (*state.waiting, *active)]
    assert len(arrivals) == len(set(arrivals)), "a sequence is in two places"
    beams = {seq.group for seq in active if together(seq)}
    assert beams.isdisjoint(seq.group for seq in state.waiting), "some beams of a request run and others wait"
    named = Counter(name for seq in (*state.waiting, *active) for name in (seq.request_id, *seq.request.forks))
    assert Counter(list(state.ids)) == named, "an id is lost, left over or used twice"
