"""Admission: a request that can never run is rejected when it comes. Waiting sequences enter in the
policy's order while tokens, rows and blocks suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple

from pagedjax.host import blocks, prefix_sharing, reservation, views
from pagedjax.host.blocks import BlockPool
from pagedjax.host.policies import Policy, called, decision
from pagedjax.host.preemption import Pairs
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import HOLE, CurrentSeqs, Request, Running, SchedulerConfig, Seq
from pagedjax.options.own_errors import placed

# new requests -------------------------------------------------------------------------------------


class Rejected(ValueError):
    """A request that can never run. The message names the value, the limit and the remedy."""


def final_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens of the request at its longest: prompt + max_tokens, cut off at max_model_len."""
    return min(request.prompt_len + request.max_tokens, config.max_model_len)


def with_ids(state: SchedulerState, request: Request) -> SchedulerState:
    """The state that knows the ids and the stop tokens of a new request."""
    names = request.names
    stops = request.stop_token_ids
    if state.ids:  # else no request is unfinished, and the stop tokens of ended ones are forgotten
        stops = state.stops | stops
    return state._replace(
        arrivals=state.arrivals + len(names),
        ids=state.ids.update(dict.fromkeys(names)),
        stops=stops,
    )


def check_request(state: SchedulerState, request: Request) -> None:
    """Raises Rejected for an empty prompt, an id in use, a deadline that is no time, a negative
    prediction, or a request beyond a limit of the scheduler.
    """
    config = state.config
    if request.prompt_len < 1:
        raise Rejected(
            f"request {request.request_id!r} has an empty prompt; give it at least one token"
        )
    if request.max_tokens < 0 or (request.max_tokens == 0 and request.forks):
        branches = " and branches" if request.forks else ""
        raise Rejected(
            f"request {request.request_id!r} has max_tokens {request.max_tokens}{branches}; "
            "it must be at least 1, or 0 to sample nothing"
        )
    longest_prompt = config.max_model_len - min(request.max_tokens, 1)
    if request.prompt_len > longest_prompt:
        output = " and one token must be left for output" if request.max_tokens else ""
        raise Rejected(
            f"request {request.request_id!r} has a prompt of {request.prompt_len} tokens, "
            f"but max_model_len is {config.max_model_len}{output}; "
            f"shorten the prompt to {longest_prompt} tokens or raise max_model_len"
        )
    deadline = request.deadline
    if deadline is not None and not (isfinite(deadline) and deadline > 0):
        raise Rejected(
            f"request {request.request_id!r} has a deadline of {deadline} seconds after its "
            "arrival; it must be a finite number above 0, or None"
        )
    if request.predicted is not None and request.predicted < 0:
        raise Rejected(
            f"request {request.request_id!r} has {request.predicted} predicted output tokens; give "
            "a number of at least 0, or None"
        )
    names = request.names
    _check_pool(state, request)
    for i, name in enumerate(names):
        if name in state.ids or name in names[:i]:
            raise Rejected(
                f"request id {name!r} is in use; ids must be unique among unfinished requests"
            )
    if len(names) > config.max_running:
        raise Rejected(
            f"request {request.request_id!r} has {len(names)} branches, "
            f"but at most {config.max_running} sequences run at a time; "
            "lower n or beam_width, or raise max_num_seqs "
            "(and max_num_batched_tokens, which gives each a token)"
        )
    if len(request.hashes) > request.prompt_len // config.block_size:
        raise Rejected(
            f"request {request.request_id!r} has {len(request.hashes)} hashes; "
            "its prompt has fewer full blocks"
        )


def _check_pool(state: SchedulerState, request: Request) -> None:
    """Raises Rejected for a request that can grow beyond the pool, or beyond a baseline's limit."""
    config = state.config
    limit = final_length(request, config)
    # the beams of a request must fit together even if they share no block
    beams = 1 + len(request.forks) if request.beams else 1
    if not config.chunked_prefill or config.reservation != "none":
        seq = Seq(request, state.arrivals, limit, request.prompt_len, hashes=request.hashes)
        _check_baselines(config, seq, beams)
    if config.views:
        need = beams * views.smallest_pool(config, request, limit)
    else:
        need = beams * blocks.needed(limit, config.block_size)
    if need > config.num_blocks:
        in_each = f" in each of {beams} beams" if beams > 1 else ""
        size = f"{need} blocks of {config.block_size}"
        if config.views:
            takes = f"needs {size} at one time (in {config.groups} groups of layers)"
        else:
            takes = f"is {size}"
        options = "max_tokens, beam_width" if beams > 1 else "max_tokens"
        raise Rejected(
            f"request {request.request_id!r} can grow to {limit} tokens{in_each}, "
            f"which {takes}, but the pool has {config.num_blocks}; "
            f"raise num_blocks to {need}, or lower {options} or the prompt's length"
        )


def _check_baselines(config: SchedulerConfig, seq: Seq, beams: int) -> None:
    """Raises Rejected for a request beyond the limits of whole prompts or of contiguous
    reservations.
    """
    name = seq.request_id
    if not config.chunked_prefill and beams * seq.limit > config.max_num_batched_tokens:
        in_each = f" in each of {beams} beams" if beams > 1 else ""
        raise Rejected(
            f"request {name!r} can grow to {seq.limit} tokens{in_each}, "
            "which have to fit into one step without chunked_prefill, "
            f"but max_num_batched_tokens is {config.max_num_batched_tokens}; "
            "raise it, or lower max_tokens"
        )
    if config.reservation == "none":
        return
    if seq.hashes or not seq.request.advances_alone:
        raise Rejected(
            f"request {name!r} has branches or a shareable prefix, "
            f"and a contiguous reservation ({config.reservation!r}) shares nothing; "
            "use reservation='none', or n=1 and enable_prefix_caching=False"
        )
    need = reservation.piece(config, seq)
    largest = reservation.largest(config)
    if need > largest:
        raise Rejected(
            f"request {name!r} reserves {need} blocks in a row "
            f"(reservation {config.reservation!r}), "
            f"but the largest piece of the pool has {largest}; "
            f"raise num_blocks to {need}, or lower max_model_len or max_tokens"
        )


# waiting sequences --------------------------------------------------------------------------------

# what does not suffice for a sequence that would enter; "piece": contiguous blocks
# (reservation.py); "policy": its `admit` refuses
Shortage = Literal["tokens", "rows", "blocks", "piece", "policy"]


class Refusal(NamedTuple):
    """Why sequences do not enter: what is short, how much of it they need, how much is free."""

    shortage: Shortage
    need: int
    free: int


class Admission(NamedTuple):
    """The sequences admitted so far, and what is left for others."""

    pool: BlockPool
    # key of a block -> the block, for the blocks that rows of this step fill; `enter` adds to it
    filling_now: dict[str, int]
    budget: int  # tokens
    free_rows: int
    # host block -> device block, for the full blocks that this step moves back
    swapped_in: Mapping[int, int]
    admitted: tuple[Seq, ...] = ()
    swap_in: Pairs = ()
    promised: int = 0  # blocks that sequences still need, beside those that they have (views.py)
    # whether a sequence may share blocks that other rows of this step fill. Not if the policy
    # composes the step: then a row may compute fewer tokens than it is given here
    shares_filling: bool = True


def admit(
    admission: Admission,
    policy: Policy,
    waiting: tuple[Seq, ...],
    active: Running,
    config: SchedulerConfig,
) -> Admission:
    """Admits as many sequences as fit. The first that does not fit ends the admission, so that no
    sequence is overtaken for ever.

    Raises:
        ValueError: the policy's `order` returns something else than waiting sequences, or its
            `admit` something else than True or False, or one of them raises.
    """
    for group in groups(ordered(admission.pool, policy, waiting, active, config)):
        trial = enter(admission, policy, group, config)
        if isinstance(trial, Refusal):
            break
        admission = trial
    return admission


def enter(
    admission: Admission, policy: Policy, group: Sequence[Seq], config: SchedulerConfig
) -> Admission | Refusal:
    """Admits a sequence, or all beams of a request; or says what does not suffice for them."""
    if admission.budget <= 0:
        return Refusal("tokens", 1, admission.budget)
    num_rows = sum([seq.num_rows for seq in group])
    if num_rows > admission.free_rows:
        return Refusal("rows", num_rows, admission.free_rows)
    trial = admission
    # all or none: the changes of the first ones are dropped if the last does not fit
    if len(group) > 1:
        trial = admission._replace(filling_now=dict(admission.filling_now))
    if config.views:
        need = sum([views.entry_need(config, seq) for seq in group])
        trial = trial._replace(promised=trial.promised + need)
    for seq in group:
        entered = _admit_one(trial, policy, seq, config)
        if isinstance(entered, Refusal):
            return entered
        trial = entered
    return trial


def ordered(
    pool: BlockPool,
    policy: Policy,
    waiting: tuple[Seq, ...],
    active: Running,
    config: SchedulerConfig,
) -> tuple[Seq, ...]:
    """The waiting sequences that the policy offers, in its order.

    Raises:
        ValueError: the policy offers something else.
    """
    records: Any = CurrentSeqs(active)
    queue = called(
        policy,
        "order",
        waiting,
        active._replace(seqs=records),
        lambda seq: prefix_sharing.cached_tokens(pool, seq, config),
    )
    if queue is waiting:
        return waiting
    remedy = "return the waiting sequences in an order, or some of them, each once"
    if not isinstance(queue, Iterable):
        raise ValueError(f"order of the policy {policy.name!r} returned {queue!r:.200}; {remedy}")
    with placed(f"order of the policy {policy.name!r}"):
        offered = tuple(queue)  # a generator runs now
    places = {id(seq) for seq in waiting}
    for seq in offered:
        if id(seq) not in places:
            raise ValueError(
                f"order of the policy {policy.name!r} returned {seq!r:.200}, which does not wait "
                f"or is there twice; {remedy}"
            )
        places.remove(id(seq))
    return offered


def groups(queue: Sequence[Seq]) -> Iterator[list[Seq]]:
    """The sequences one by one, but the beams of a request together, in order of arrival, at the
    place of the first of them.
    """
    groups_of_beams: set[int | None] = set()
    for seq in queue:
        if not seq.is_beam:
            yield [seq]
        elif seq.group not in groups_of_beams:
            groups_of_beams.add(seq.group)
            beams = [beam for beam in queue if beam.group == seq.group]
            yield sorted(beams, key=lambda beam: beam.arrival)


def _admit_one(
    admission: Admission, policy: Policy, seq: Seq, config: SchedulerConfig
) -> Admission | Refusal:
    """Admits a sequence and gives it its blocks; or says what does not suffice for it."""
    cached = _cached_blocks(admission, seq, config)
    need, free = _need(admission, seq, cached, config)
    if need > free:
        return Refusal("blocks", need, free)
    if not decision(policy, "admit", seq, need, free):
        return Refusal("policy", need, free)
    pool = admission.pool
    promised = admission.promised
    if config.views:
        # blocks for what this step computes; later steps allocate the others
        need, later_need = views.entry_blocks(config, seq, cached, free, admission.budget)
        promised += later_need - views.entry_need(config, seq)
    if config.reservation == "none":
        allocation = blocks.allocate(blocks.share(pool, cached), need)
        assert allocation is not None, "need was compared with the free blocks"
    else:
        allocation = blocks.allocate_run(pool, need)
        if allocation is None:
            return Refusal("piece", need, free)
    pool, new_blocks = allocation
    swap_in = admission.swap_in
    swapped_in = admission.swapped_in
    if seq.blocks:
        swapped_in = dict(swapped_in)
        table, moves = _swap_in(swapped_in, seq, new_blocks, config)
        swap_in += moves
        entered = seq._replace(blocks=table)
    else:
        num_shared = len(cached) // config.groups
        entered = seq._replace(
            computed=num_shared * config.block_size,
            blocks=cached + new_blocks,
            junction=prefix_sharing.junction(admission.pool, seq, config, num_shared),
        )
    count = chunk_size(entered, admission.budget, config)
    end = entered.computed + count
    if not config.chunked_prefill and end < entered.length:
        return Refusal("tokens", entered.length - entered.computed, admission.budget)
    if admission.shares_filling:
        prefix_sharing.add_filled(admission.filling_now, entered, entered.computed, end, config)
    return Admission(
        pool,
        admission.filling_now,
        budget=admission.budget - count,
        free_rows=admission.free_rows - seq.num_rows,
        swapped_in=swapped_in,
        admitted=(*admission.admitted, entered),
        swap_in=swap_in,
        promised=promised,
        shares_filling=admission.shares_filling,
    )


def chunk_size(seq: Seq, budget: int, config: SchedulerConfig) -> int:
    """The number of tokens that a step computes of a sequence that enters."""
    covered = len(seq.blocks) // config.groups * config.block_size
    return min(seq.length, covered, seq.computed + budget) - seq.computed


def _cached_blocks(admission: Admission, seq: Seq, config: SchedulerConfig) -> tuple[int, ...]:
    """The device blocks that a sequence shares.

    A sequence in the swap space shares the full blocks that this step moves back for another
    branch. Any other sequence shares the cached blocks of its beginning, with holes.
    """
    if not seq.blocks:
        return prefix_sharing.find(admission.pool, admission.filling_now, seq, config)
    full = seq.blocks[: _full_entries(seq, config)]
    return tuple([admission.swapped_in[block] for block in full if block in admission.swapped_in])


def _need(
    admission: Admission, seq: Seq, cached: tuple[int, ...], config: SchedulerConfig
) -> tuple[int, int]:
    """(number of blocks that must be free for a sequence to enter, number of free blocks)"""
    pool = admission.pool
    # an idle block in the cache is not free
    num_free = pool.num_free - sum(block in pool.stamps for block in cached)
    if config.views:
        need = views.entry_need(config, seq)
        return need - views.held(cached), num_free - (admission.promised - need)
    if config.reservation == "none":
        return blocks.needed(seq.length, config.block_size) - len(cached), num_free
    return reservation.piece(config, seq) - len(cached), num_free


def _full_entries(seq: Seq, config: SchedulerConfig) -> int:
    """The number of entries of a block table that belong to full blocks."""
    return seq.computed // config.block_size * config.groups


def _swap_in(
    swapped_in: dict[int, int], seq: Seq, new_blocks: tuple[int, ...], config: SchedulerConfig
) -> tuple[tuple[int, ...], Pairs]:
    """Returns the block table of a sequence that leaves the swap space, and (host block, device
    block) of the blocks to move.

    Branches share a full block, which is moved once and added to `swapped_in`. A block that is not
    full is moved once for each branch, because each of them writes to it in this step.
    """
    num_full = _full_entries(seq, config)
    free_blocks = iter(new_blocks)
    table: list[int] = []
    moves: list[tuple[int, int]] = []
    for entry, host_block in enumerate(seq.blocks):
        if host_block == HOLE:
            table.append(HOLE)
        elif entry < num_full and host_block in swapped_in:
            table.append(swapped_in[host_block])
        else:
            block = next(free_blocks)
            table.append(block)
            moves.append((host_block, block))
            if entry < num_full:
                swapped_in[host_block] = block
    return (*table, *free_blocks), tuple(moves)
