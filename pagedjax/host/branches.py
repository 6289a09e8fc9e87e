"""Branches of one request: how they fork, how beams continue each other, and which blocks need a
copy before a write.

A branch that forks, or a beam that continues a sibling, becomes one more owner of existing blocks.
A block is copied only before a write to a block that others own or can find (`shared`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pagedjax.host import blocks, prefix_sharing
from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import Beamed, Choice, Event, Forked, Running, SchedulerConfig, Seq


def unforked(seqs: Sequence[Seq], rows: Sequence[int]) -> list[int]:
    """The rows among `rows` of requests whose branches have not forked yet, and of beams."""
    return [i for i in rows if not seqs[i].request.advances_alone]


def fork(
    pool: BlockPool,
    seqs: tuple[Seq, ...],
    grouped: Sequence[int],
    samples: Sequence[bool],
    config: SchedulerConfig,
) -> tuple[BlockPool, tuple[Seq, ...], tuple[Seq, ...]]:
    """Forks the branches of the rows whose prompt is computed -> (pool, rows, new sequences).

    A branch computes the last token of the prompt again, and samples with its own seed.

    Args:
        grouped: the rows that `unforked` returns.
        samples: whether each row samples.
    """
    ready = [i for i in grouped if seqs[i].request.forks and samples[i]]
    if not ready:
        return pool, seqs, ()
    updated = list(seqs)
    forks: list[Seq] = []
    for i in ready:
        seq = seqs[i]
        request = seq.request._replace(forks=())
        updated[i] = seq._replace(request=request)
        computed = request.prompt_len - 1
        table = seq.blocks[: blocks.needed(computed, config.block_size) * config.groups]
        for k, name in enumerate(seq.request.forks, 1):
            branch = seq._replace(
                request=request._replace(request_id=name),
                arrival=seq.arrival + k,
                length=request.prompt_len,
                computed=computed,
                blocks=table,
            )
            forks.append(branch)
            pool = blocks.share(pool, table)
    return pool, tuple(updated), tuple(forks)


def fork_events(step: int, forks: Sequence[Seq]) -> list[Event]:
    """An event for each request whose branches forked in a step."""
    by_group: dict[int | None, list[Seq]] = {}
    for seq in forks:
        by_group.setdefault(seq.group, []).append(seq)
    return [Forked(step, tuple([seq.request_id for seq in group])) for group in by_group.values()]


def advance(
    pool: BlockPool,
    active: Running,
    choices: Mapping[str, Choice],
    step: int,
    config: SchedulerConfig,
) -> tuple[BlockPool, Running, list[Event]]:
    """Advances the beams of some requests: each continues its parent's blocks with a new token. The
    text of a beam that nobody continues ends, and may be the best one.

    Args:
        choices: by the id of a request's first beam.

    Raises:
        ValueError: not a beam, a beam with tokens left to compute, another number of beams, or a
        beam at its limit.
    """
    events: list[Event] = []
    for name, choice in choices.items():
        first = next((seq for seq in active.seqs if seq.request_id == name), None)
        if first is None or not first.request.beams:
            raise ValueError(f"{name!r} is not the first beam of a running request")
        rows = [i for i, seq in enumerate(active.seqs) if seq.group == first.group]
        beams = active.pick(sorted(rows, key=lambda i: active.seqs[i].arrival))
        # before the first choice there is one beam
        names = (*(seq.request_id for seq in beams.seqs), *first.request.forks)
        _check_choice(names, first.limit, beams, choice)
        dropped = [seq for seq in beams.seqs if seq.request_id not in choice.parents]
        texts = [(seq, beams.computed[0]) for seq in dropped]
        pool = prefix_sharing.publish_ends(pool, texts, config)
        pool, children = _continue_beams(pool, names, beams, choice)
        old_rows = set(rows)
        other_rows = [i for i in range(len(active.seqs)) if i not in old_rows]
        active = active.pick(other_rows).concat(children)
        events.append(Beamed(step, names, choice.parents, choice.token_ids))
    return pool, active, events


def _check_choice(names: Sequence[str], limit: int, beams: Running, choice: Choice) -> None:
    """Raises ValueError if the beams of a request cannot continue as chosen."""
    length = beams.lengths[0]
    if {*beams.lengths, *beams.computed} != {length}:
        raise ValueError(
            f"a beam of {names[0]!r} has tokens left to compute; all beams advance together"
        )
    parents = {seq.request_id for seq in beams.seqs}
    if not len(names) == len(choice.parents) == len(choice.token_ids) or not parents.issuperset(
        choice.parents
    ):
        raise ValueError(f"{len(names)} beams of {names[0]!r} cannot continue {choice.parents}")
    if length + 1 >= limit:
        raise ValueError(
            f"the beams of {names[0]!r} would reach their limit of {limit} tokens; they end instead"
        )


def _continue_beams(
    pool: BlockPool, names: Sequence[str], beams: Running, choice: Choice
) -> tuple[BlockPool, Running]:
    """Gives each beam the blocks of its parent, and frees those of beams that nobody continues ->
    (pool, beams with a new token).
    """
    num_children = Counter(choice.parents)
    parents = {seq.request_id: seq for seq in beams.seqs}
    for parent, number in num_children.items():
        pool = blocks.share(pool, parents[parent].blocks * (number - 1))
    for parent, seq in parents.items():
        if parent not in num_children:
            pool = blocks.release(pool, seq.blocks[::-1])
    first = beams.seqs[0]
    request = first.request._replace(forks=())
    children: list[Seq] = []
    for k, (name, parent) in enumerate(zip(names, choice.parents, strict=True)):
        child = request._replace(request_id=name)
        children.append(parents[parent]._replace(request=child, arrival=first.arrival + k))
    count = len(children)
    lengths = (beams.lengths[0] + 1,) * count
    return pool, Running(tuple(children), lengths, (beams.computed[0],) * count)


def arrivals(
    active: Running, forks: Sequence[Seq], choices: Mapping[str, Choice]
) -> frozenset[int]:
    """The arrivals of the sequences that may write to a shared block in the next step: branches
    after a fork, and beams.
    """
    groups = {seq.group for seq in forks} | {
        seq.group for seq in active.seqs if seq.request_id in choices
    }
    return frozenset([seq.arrival for seq in active.seqs if seq.group in groups])


def shared(
    pool: BlockPool, active: Running, forked: frozenset[int], config: SchedulerConfig
) -> list[tuple[int, int]]:
    """Returns (index of a branch, index in its block table) of each block that must be copied: the
    branch writes to it next, and others own it or can find it. The last owner keeps the block.

    Only the first token after a fork can be written to such a block; after that the branch has its
    own.

    Args:
        forked: what `arrivals` returned.
    """
    if not forked:
        return []
    entries: list[tuple[int, int]] = []
    num_owners: dict[int, int] = {}  # of a block, without the branches that copy it
    size = config.block_size
    groups = config.groups
    for i, seq in enumerate(active.seqs):
        if seq.arrival not in forked:
            continue
        if active.computed[i] * groups >= len(seq.blocks) * size:
            continue  # its next token is in a new block
        first = active.computed[i] // size * groups
        for entry in range(first, first + groups):
            block = seq.blocks[entry]
            owners = num_owners.setdefault(block, pool.owners[block])
            if owners > 1 or block in pool.hashes:
                entries.append((i, entry))
                num_owners[block] = owners - 1
    return entries
