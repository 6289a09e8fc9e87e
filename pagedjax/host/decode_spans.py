"""Several steps at once, for a simulator: steps in which all running sequences decode, and nothing
else happens.

Between the arrival of a request and the end of another one, the steps of a scheduler are often
alike: each running sequence gets one token, and from time to time a block. `steps_ahead` says how
many such steps come next, and `after_decodes` gives the state after some of them: the one that as
many calls of `schedule` and `commit` give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from pagedjax.host import blocks
from pagedjax.host.blocks import BlockPool
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import NO_HASHES, Running, Seq


def steps_ahead(state: SchedulerState) -> int:
    """How many of the next steps certainly compute one token of each running sequence, and nothing
    else.

    In none of them does a sequence enter, fork, end or lose its blocks. 0: the next step may be
    another one. That is also said where this function would have to know more: if a request waits
    and there is room for another row, if there are stop tokens, beams, branches that may have to
    copy a block, or queries that do not see all blocks.
    """
    c, (seqs, lengths, computed) = state.config, state.running
    if not seqs or state.stops or state.forked or c.views or (state.waiting and _admits(state)):
        return 0
    steps = c.max_model_len
    for seq, length, done in zip(seqs, lengths, computed, strict=True):
        request = seq.request
        if length - done != 1 or length <= request.prompt_len or request.forks or request.beams:
            return 0
        steps = min(steps, seq.limit - length - 1)
    if _blocks_for(state, steps) <= state.pool.num_free:
        return max(steps, 0)
    low, high = 0, steps  # room for `low`, none for `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if _blocks_for(state, middle) <= state.pool.num_free else (low, middle)
        )
    return low


def _admits(state: SchedulerState) -> bool:
    """Whether there is a row for another request in the next step."""
    c, seqs = state.config, state.running.seqs
    return sum([seq.num_rows for seq in seqs]) < c.max_running


def _blocks_for(state: SchedulerState, steps: int) -> int:
    size, (seqs, _, computed) = state.config.block_size, state.running
    tables = zip(seqs, computed, strict=True)
    return sum(
        [max(0, blocks.needed(done + steps, size) - len(seq.blocks)) for seq, done in tables]
    )


def after_decodes(
    state: SchedulerState, steps: int, hashes: Mapping[str, tuple[str, ...]] = NO_HASHES
) -> tuple[SchedulerState, tuple[int, ...]]:
    """The state after some steps -> (state, how many blocks each of the steps allocated).

    Args:
        steps: at most `steps_ahead(state)`.
        hashes: by sequence id, of the blocks that these steps fill and whose hashes the sequence
            does not have yet, in the order of the blocks. Without them, these blocks are not
            shared.

    Raises:
        ValueError: the free blocks do not suffice, so that there are more steps than
        `steps_ahead(state)`.
    """
    size, (seqs, lengths, computed) = state.config.block_size, state.running
    allocated, filled = [0] * steps, []
    # (step, whether a block is filled, row), in the order of the steps
    events: list[tuple[int, bool, int]] = []
    for i, (seq, done) in enumerate(zip(seqs, computed, strict=True)):
        for step in range(len(seq.blocks) * size - done, steps, size):
            events.append((step, False, i))
            allocated[step] += 1
        if seq.hashes or seq.request.request_id in hashes:
            filled += [(step, True, i) for step in range(-(done + 1) % size, steps, size)]
    events = sorted(events + filled)
    pool, tables = _with_events(state, events, hashes)
    last = {i: step for step, fills, i in events if not fills}
    fills = {i for _, _, i in filled}
    changed = list(seqs)
    for i in {*last, *fills}:
        seq, at = seqs[i], last.get(i)
        known = seq.hashes + hashes.get(seq.request.request_id, ()) if i in fills else seq.hashes
        # a record has the length of the step that gave it its last block, as `schedule` makes it
        length, done = (
            (seq.length, seq.computed) if at is None else (lengths[i] + at, computed[i] + at)
        )
        changed[i] = Seq(
            seq.request, seq.arrival, seq.limit, length, done, tuple(tables[i]), known, seq.group
        )
    active = Running(
        tuple(changed),
        tuple([length + steps for length in lengths]),
        tuple([done + steps for done in computed]),
    )
    return state._replace(pool=pool, running=active, step=state.step + steps), tuple(allocated)


def _with_events(
    state: SchedulerState,
    events: Sequence[tuple[int, bool, int]],
    hashes: Mapping[str, tuple[str, ...]],
) -> tuple[BlockPool, dict[int, list[int]]]:
    """The pool after blocks were allocated and filled -> (pool, the block tables of the rows with
    an event).

    All allocations come before all publications if no allocation evicts a block, because then their
    order does not matter. Else the steps are taken one by one.
    """
    pool, size, (seqs, _, computed) = state.pool, state.config.block_size, state.running
    tables = {i: list(seqs[i].blocks) for _, _, i in events}
    known = {
        i: seqs[i].hashes + hashes.get(seqs[i].request.request_id, ())
        for _, fills, i in events
        if fills
    }
    wanted = sum([not fills for _, fills, _ in events])
    if wanted > pool.num_free:
        raise ValueError(
            f"the steps need {wanted} blocks and {pool.num_free} are free; see `steps_ahead`"
        )
    evicts = wanted > pool.num_free - len(pool.idle)
    for _, group in groupby(events, key=lambda event: event[0] if evicts else 0):
        found = list(group)
        rows = [i for _, fills, i in found if not fills]
        taken = blocks.allocate(pool, len(rows))
        assert taken is not None, "checked for all steps together"
        pool, ids = taken
        for i, block in zip(rows, ids, strict=True):
            tables[i].append(block)
        full = [((computed[i] + step) // size, i) for step, fills, i in found if fills]
        published = [
            (tables[i][block], known[i][block]) for block, i in full if block < len(known[i])
        ]
        pool = blocks.publish(pool, published) if published else pool
    return pool, tables
