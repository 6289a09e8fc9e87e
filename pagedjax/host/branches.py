"""Branches of one request: how they fork, how beams continue each other, and which blocks need a
copy before a write.

A branch that forks, or a beam that continues a sibling, becomes one more owner of existing blocks.
A block is copied only before a write to a block that others own or can find (`shared`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pagedjax.host import blocks
from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import Beamed, Choice, Event, Forked, Running, SchedulerConfig, Seq


def unforked(seqs: Sequence[Seq], rows: Sequence[int]) -> list[int]:
    """Those of some rows whose branches have not forked yet, and the beams."""
    return [i for i in rows if seqs[i].request.forks or seqs[i].request.beams]


def fork(
    pool: BlockPool,
    seqs: tuple[Seq, ...],
    grouped: Sequence[int],
    samples: Sequence[bool],
    config: SchedulerConfig,
) -> tuple[BlockPool, tuple[Seq, ...], tuple[Seq, ...]]:
    """Fork the branches of the rows whose prompt is computed -> (pool, rows, new sequences).

    A branch computes the last token of the prompt again, and samples with its own seed.

    Args:
        grouped: the rows that `unforked` returns.
        samples: whether each row samples.
    """
    ready = [i for i in grouped if seqs[i].request.forks and samples[i]]
    if not ready:
        return pool, seqs, ()
    changed, forks = list(seqs), []
    for i in ready:
        seq = seqs[i]
        request = seq.request._replace(forks=())
        changed[i] = seq._replace(request=request)
        table = seq.blocks[
            : blocks.needed(request.prompt_len - 1, config.block_size) * config.groups
        ]
        for k, name in enumerate(seq.request.forks, 1):
            branch = changed[i]._replace(
                request=request._replace(request_id=name), arrival=seq.arrival + k
            )
            forks.append(
                branch._replace(
                    length=request.prompt_len, computed=request.prompt_len - 1, blocks=table
                )
            )
            pool = blocks.share(pool, table)
    return pool, tuple(changed), tuple(forks)


def forked(step: int, forks: Sequence[Seq]) -> list[Event]:
    by_group: dict[int | None, list[Seq]] = {}
    for seq in forks:
        by_group.setdefault(seq.group, []).append(seq)
    return [Forked(step, tuple([seq.request_id for seq in group])) for group in by_group.values()]


def advance(
    pool: BlockPool, active: Running, choices: Mapping[str, Choice], step: int
) -> tuple[BlockPool, Running, list[Event]]:
    """Advance the beams of some requests: each continues its parent's blocks with a new token.

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
        old = sorted(
            (i for i, seq in enumerate(active.seqs) if seq.group == first.group),
            key=lambda i: active.seqs[i].arrival,
        )
        names = (*(active.seqs[i].request_id for i in old), *first.request.forks)
        at = {active.seqs[i].request_id: i for i in old}
        length, computed = active.lengths[old[0]], active.computed[old[0]]
        if any((active.lengths[i], active.computed[i]) != (length, length) for i in old):
            raise ValueError(
                f"a beam of {name!r} has tokens left to compute; all beams advance together"
            )
        if not len(names) == len(choice.parents) == len(choice.token_ids) or not set(
            choice.parents
        ) <= set(at):
            raise ValueError(f"{len(names)} beams of {name!r} cannot continue {choice.parents}")
        if length + 1 >= first.limit:
            raise ValueError(
                f"the beams of {name!r} would reach their limit of {first.limit} tokens; they end instead"
            )

        children = Counter(choice.parents)
        for parent, number in children.items():
            pool = blocks.share(pool, active.seqs[at[parent]].blocks * (number - 1))
        for parent, i in at.items():
            pool = pool if parent in children else blocks.release(pool, active.seqs[i].blocks[::-1])
        request = first.request._replace(forks=())
        beams = tuple(
            active.seqs[at[parent]]._replace(
                request=request._replace(request_id=mine), arrival=first.arrival + k
            )
            for k, (mine, parent) in enumerate(zip(names, choice.parents, strict=True))
        )
        gone = set(old)
        rest = active.pick([i for i in range(len(active.seqs)) if i not in gone])
        count = len(names)
        active = rest.joined(Running(beams, (length + 1,) * count, (computed,) * count))
        events.append(Beamed(step, names, *choice))
    return pool, active, events


def arrivals(
    active: Running, forks: Sequence[Seq], choices: Mapping[str, Choice]
) -> frozenset[int]:
    """Arrivals of the sequences that write after shared blocks in the next step: branches after a
    fork, and beams.
    """
    groups = {seq.group for seq in forks} | {
        seq.group for seq in active.seqs if seq.request_id in choices
    }
    return frozenset([seq.arrival for seq in active.seqs if seq.group in groups])


def shared(
    pool: BlockPool, active: Running, forked: frozenset[int], config: SchedulerConfig
) -> list[tuple[int, int]]:
    """(index of a branch, entry of its block table) whose next write is to a block that others own
    or can find. The last owner keeps it.

    Only the first token after a fork can be written to such a block; after that the branch has its
    own.
    """
    copying: list[tuple[int, int]] = []
    left: dict[int, int] = {}
    size, groups = config.block_size, config.groups
    for i, seq in enumerate(active.seqs) if forked else ():
        if seq.arrival not in forked or not active.computed[i] * groups < len(seq.blocks) * size:
            continue
        first = active.computed[i] // size * groups
        for at in range(first, first + groups):
            block = seq.blocks[at]
            owners = left.setdefault(block, pool.owners[block])
            if owners > 1 or block in pool.hashes:
                copying.append((i, at))
                left[block] = owners - 1
    return copying
