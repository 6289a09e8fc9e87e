"""Speculative decoding in the scheduler: which decodes get drafts, and which tokens are kept.

A draft is a guess of a sequence's next tokens (Leviathan et al. 2023, Chen et al. 2023). The
scheduler knows how many tokens a draft has, never which ones. A decode with k drafts computes 1 + k
tokens in one step. The device then samples k + 1 tokens, and the first 1 to k + 1 of them are kept:
those before the first draft that was wrong, and one more.

    length           a known token: its value is decided
    drafts           behind the known tokens, at positions length ... length + k - 1
    commit           keeps n of k + 1 sampled tokens: length += n, computed += n, so computed == length - 1 again

Nothing is rolled back. The slots of rejected drafts are written again by later steps, and blocks
that only rejected drafts needed are free again after the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagedjax.host import blocks
from pagedjax.host.blocks import BlockPool
from pagedjax.host.types import Plan, Running, SchedulerConfig, Seq

# what a row sampled: a token; a row with drafts: the accepted ones and one more token
Sample = int | tuple[int, ...]


class Granted(NamedTuple):
    """The plan's rows after drafts were given to its decodes."""

    pool: BlockPool
    active: Running
    counts: list[int]
    drafts: tuple[int, ...]  # of each row; () if no row has one


def grant(
    pool: BlockPool,
    active: Running,
    num_decodes: int,
    counts: list[int],
    offered: Mapping[str, int],
    budget: int,
    config: SchedulerConfig,
) -> Granted:
    """Give decodes as many of the offered drafts as tokens, blocks and their limits allow, in the
    order of the rows.

    Drafts come last: every other row has its tokens, and no sequence is preempted for a draft. A
    sequence with k drafts may grow by k + 1 tokens, so k is at most limit - length - 1. Beams, and
    branches before their fork, get none.

    Args:
        num_decodes: of the first rows, which compute one token each.
        counts: the tokens of each row.
        offered: by sequence id, the drafts that its drafter has.
        budget: tokens that are left.
    """
    drafts, seqs, size, groups = (
        [0] * len(counts),
        list(active.seqs),
        config.block_size,
        config.groups,
    )
    for i in range(min(num_decodes, len(counts))):
        if budget <= 0:
            break
        seq, length = seqs[i], active.lengths[i]
        k = min(offered.get(seq.request.request_id, 0), budget, seq.limit - length - 1)
        k = min(k, (len(seq.blocks) // groups + pool.num_free // groups) * size - length)
        if k <= 0 or seq.request.beams or seq.request.forks:
            continue
        more = blocks.needed(length + k, size) * groups - len(seq.blocks)
        if more > 0:
            taken = blocks.allocate(pool, more)
            assert taken is not None, "k was bounded by the free blocks"
            pool, ids = taken
            seqs[i] = seq._replace(
                length=length, computed=active.computed[i], blocks=(*seq.blocks, *ids)
            )
        drafts[i] = k
        budget -= k
    if not any(drafts):
        return Granted(pool, active, counts, ())
    counts = [count + k for count, k in zip(counts, drafts, strict=True)]
    return Granted(pool, active._replace(seqs=tuple(seqs)), counts, tuple(drafts))


def cut_at_the_end(plan: Plan, sampled: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples of a plan with drafts that are kept: a row ends at its first stop token and at
    its limit.

    Raises:
        ValueError: a row with no token, or with more tokens than its drafts and one.
    """
    found: list[Sample] = []
    for seq, length, k, sample in zip(plan.seqs, plan.lengths, plan.drafts, sampled, strict=True):
        tokens = sample if isinstance(sample, tuple) else (sample,)
        if not 1 <= len(tokens) <= k + 1:
            raise ValueError(
                f"{seq.request_id!r} has {k} drafts and {len(tokens)} sampled tokens; 1 to {k + 1} fit"
            )
        found.append(_until_the_end(seq, length, tokens) if k else tokens[0])
    return tuple(found)


def _until_the_end(seq: Seq, length: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The first tokens after `length` known ones, up to the one that ends the sequence."""
    ends = (n for n, token in enumerate(tokens, 1) if seq.finish_reason(length + n, token))
    return tokens[: next(ends, len(tokens))]


class Accepted(NamedTuple):
    """The columns of a plan after its accepted drafts became known tokens: each row is one that
    samples one token.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]  # the last token of each row


def accepted(plan: Plan, samples: Sequence[Sample]) -> Accepted:
    """Args: samples: what `cut_at_the_end` returned for a plan with drafts."""
    tokens = [sample if isinstance(sample, tuple) else (sample,) for sample in samples]
    more = [len(row) - 1 for row in tokens]  # accepted drafts
    counts = [n - k + m for n, k, m in zip(plan.counts, plan.drafts, more, strict=True)]
    lengths = tuple([length + m for length, m in zip(plan.lengths, more, strict=True)])
    return Accepted(lengths, tuple(counts), tuple([row[-1] for row in tokens]))


def give_back(
    pool: BlockPool,
    seqs: tuple[Seq, ...],
    rows: Sequence[int],
    computed: Sequence[int],
    config: SchedulerConfig,
) -> tuple[BlockPool, tuple[Seq, ...]]:
    """Free the blocks that only rejected drafts of some rows needed."""
    changed = list(seqs)
    for i in rows:
        left = blocks.needed(computed[i], config.block_size) * config.groups
        pool = blocks.release(pool, seqs[i].blocks[left:][::-1])
        changed[i] = seqs[i]._replace(blocks=seqs[i].blocks[:left])
    return pool, tuple(changed)


def flat(ids: Sequence[str], samples: Sequence[Sample]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Ids and tokens of an event: an id for each of its tokens."""
    pairs = [
        (i, token)
        for i, s in zip(ids, samples, strict=True)
        for token in (s if isinstance(s, tuple) else (s,))
    ]
    return tuple([i for i, _ in pairs]), tuple([token for _, token in pairs])
