"""The scheduler's state and its invariants (`check`). Immutable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from immutables import Map

from pagedjax.host import blocks, views
from pagedjax.host.blocks import BlockPool
from pagedjax.host.kv_policies import View
from pagedjax.host.types import Plan, PolicyEvent, Running, SchedulerConfig, Seq, current_seqs
from pagedjax.options.config import EngineConfig


def limits(
    config: EngineConfig, host_blocks: int = 0, views_of_groups: tuple[View, ...] = ()
) -> SchedulerConfig:
    """The scheduler's part of an engine's configuration, in which nothing is left open.

    Args:
        views_of_groups: what queries see, by group of layers; () if all of them see everything. A
            configured block has the keys and values of all layers; here it is a block for each
            group. There is one trash block for all groups.
    """
    assert config.max_model_len is not None, "resolve the configuration first"
    assert config.num_blocks is not None, "resolve the configuration first"
    checkpoints = config.prefix_checkpoints
    assert not isinstance(checkpoints, str), "a configuration has options in place of a name"
    if all(view.window is None for view in views_of_groups):
        checkpoints = None  # a prefix is found at every boundary
    return SchedulerConfig(
        config.block_size,
        num_blocks=(config.num_blocks + 1) * max(1, len(views_of_groups)) - 1,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        host_blocks=host_blocks,
        chunked_prefill=config.chunked_prefill,
        mixed_steps=config.mixed_steps,
        reservation=config.reservation,
        views=views_of_groups,
        prefix_checkpoints=checkpoints,
        late_stops=config.late_stops,
        empty_blocks=config.empty_blocks * max(1, len(views_of_groups)),
    )


class SchedulerState(NamedTuple):
    """All that a scheduler knows. Each transition returns another one."""

    config: SchedulerConfig
    pool: BlockPool
    waiting: tuple[Seq, ...]
    running: Running  # after `schedule`: the plan's sequences, then those that got no token
    step: int
    arrivals: int  # the arrival of the next sequence
    # the swap space; the blocks of a waiting sequence are its blocks there
    host_pool: BlockPool | None
    # arrivals of the sequences that may have to copy a shared block before the next write
    forked: frozenset[int]
    # the ids of all unfinished sequences; searching a long queue would make submits quadratic
    ids: Map[str, None]
    # stop tokens of all unfinished requests, and perhaps of finished ones
    stops: frozenset[int] = frozenset()
    # of a policy with memory (policy_memory.py): an immutable value that can be hashed
    memory: Any = None
    # what happened since the policy observed last; None: no policy with memory has scheduled
    news: tuple[PolicyEvent, ...] | None = None
    # with `late_stops`, the plans that are not committed yet, the older one first (late.py)
    in_flight: tuple[Plan, ...] = ()
    # with two plans in flight, the sequences that reach their limit in the older one
    leaving: tuple[Seq, ...] = ()


def with_news(state: SchedulerState, events: Iterable[PolicyEvent]) -> SchedulerState:
    """The state that remembers events for the memory of its policy, if the policy has one."""
    if state.news is None:
        return state
    return state._replace(news=(*state.news, *events))


def running(state: SchedulerState) -> tuple[Seq, ...]:
    """The running sequences as current records."""
    return current_seqs(*state.running)


def check(state: SchedulerState) -> None:
    """Checks the invariants that hold between any two transitions. Raises AssertionError."""
    config = state.config
    active = running(state)
    blocks.check(state.pool, [seq.blocks for seq in (*active, *state.leaving)])
    swapped = [seq for seq in state.waiting if seq.blocks]
    assert state.host_pool is not None or not swapped, "a waiting sequence holds cache"
    if state.host_pool is not None:
        blocks.check(state.host_pool, [seq.blocks for seq in swapped])
    for seq in state.waiting:
        entries = blocks.needed(seq.computed, config.block_size) * config.groups
        assert len(seq.blocks) == entries, "content is lost"
    num_rows = sum(seq.num_rows for seq in active)
    assert num_rows <= config.max_running, "too many sequences run, or will"
    for seq in active:
        to_compute = 0 if seq.request.beams else 1
        assert 0 <= seq.computed <= seq.length - to_compute, "computed must chase length"
        assert seq.length <= seq.limit <= config.max_model_len, (
            "a sequence is longer than it may be"
        )
        assert seq.computed * config.groups <= len(seq.blocks) * config.block_size, (
            "computed tokens lie outside the blocks"
        )
        views.check(config, seq)
        full_blocks = seq.length // config.block_size
        assert len(seq.hashes) <= full_blocks, "a hash of a block that is not full"
        assert seq.request.stop_token_ids <= state.stops, "a stop token would be missed"
    arrivals = [seq.arrival for seq in (*state.waiting, *active)]
    assert len(arrivals) == len(set(arrivals)), "a sequence is in two places"
    beams = {seq.group for seq in active if seq.is_beam}
    assert beams.isdisjoint(seq.group for seq in state.waiting), (
        "some beams of a request run and others wait"
    )
    unfinished = (*state.waiting, *active, *state.leaving)
    names = Counter(name for seq in unfinished for name in seq.request.names)
    assert Counter(list(state.ids)) == names, "an id is lost, left over or used twice"
