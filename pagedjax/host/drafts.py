"""Speculative decoding in the scheduler: which decodes get drafts, and which tokens are kept.

A draft is a guess of a sequence's next tokens (Leviathan et al. 2023, Chen et al. 2023). The
scheduler knows how many tokens a draft has, never which tokens. A decode with k drafts computes
1 + k tokens in one step. The device then samples k + 1 tokens, and the first 1 to k + 1 of them are
kept: those before the first wrong draft, and one more.

    length           a known token: its value is decided
    drafts           behind the known tokens, at positions length ... length + k - 1
    commit           keeps n of k + 1 sampled tokens: length += n, computed += n, so that
                     computed == length - 1 again

Nothing is rolled back. The slots of rejected drafts are written again by later steps, and blocks
that only rejected drafts needed are free again after the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagedjax.host import blocks, views
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
    config: SchedulerConfig,
) -> Granted:
    """Gives decodes as many of the offered drafts as tokens, blocks and their limits allow, in the
    order of the rows.

    Drafts come last: every other row has its tokens, and no sequence is preempted for a draft. A
    sequence with k drafts may grow by k + 1 tokens, so k is at most limit - length - 1. Only a
    sequence that advances alone gets drafts.

    Args:
        num_decodes: the number of first rows that compute one token each.
        counts: the tokens of each row.
        offered: by sequence id, the number of drafts that its drafter has.
    """
    budget = config.max_num_batched_tokens - sum(counts)
    drafts = [0] * len(counts)
    seqs = list(active.seqs)
    for i in range(min(num_decodes, len(counts))):
        if budget <= 0:
            break
        seq = seqs[i]
        length = active.lengths[i]
        k = min(offered.get(seq.request.request_id, 0), budget, seq.limit - length - 1)
        k = min(k, views.coverable_tokens(config, pool, seq.blocks) - length)
        if k <= 0 or not seq.request.advances_alone:
            continue
        pool, table = views.extend(config, pool, seq.blocks, length + k)
        if table is not seq.blocks:
            seqs[i] = seq._replace(length=length, computed=active.computed[i], blocks=table)
        drafts[i] = k
        budget -= k
    if not any(drafts):
        return Granted(pool, active, counts, ())
    counts = [count + k for count, k in zip(counts, drafts, strict=True)]
    return Granted(pool, active._replace(seqs=tuple(seqs)), counts, tuple(drafts))


def cut_at_the_end(plan: Plan, sampled: Sequence[Sample]) -> tuple[Sample, ...]:
    """Cuts the samples of a plan with drafts -> the samples that are kept. A row ends at its first
    stop token and at its limit.

    Raises:
        ValueError: a row with no token, or with more tokens than its drafts and one.
    """
    samples: list[Sample] = []
    for seq, length, k, sample in zip(plan.seqs, plan.lengths, plan.drafts, sampled, strict=True):
        tokens = sample if isinstance(sample, tuple) else (sample,)
        if not 1 <= len(tokens) <= k + 1:
            raise ValueError(
                f"{seq.request_id!r} has {k} drafts and {len(tokens)} sampled tokens; "
                f"1 to {k + 1} fit"
            )
        samples.append(_until_the_end(seq, length, tokens) if k else tokens[0])
    return tuple(samples)


def _until_the_end(seq: Seq, length: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The first tokens after `length` known ones, up to the one that ends the sequence."""
    ends = (n for n, token in enumerate(tokens, 1) if seq.finish_reason(length + n, token))
    return tokens[: next(ends, len(tokens))]


class Accepted(NamedTuple):
    """The columns of a plan after its accepted drafts became known tokens: as if each row had
    sampled one token.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]  # the last token of each row


def accepted_columns(plan: Plan, samples: Sequence[Sample]) -> Accepted:
    """The columns of a plan with its accepted drafts.

    Args:
        samples: what `cut_at_the_end` returned for this plan.
    """
    tokens = [sample if isinstance(sample, tuple) else (sample,) for sample in samples]
    num_accepted = [len(row) - 1 for row in tokens]
    counts = [n - k + m for n, k, m in zip(plan.counts, plan.drafts, num_accepted, strict=True)]
    lengths = [length + m for length, m in zip(plan.lengths, num_accepted, strict=True)]
    return Accepted(tuple(lengths), tuple(counts), tuple([row[-1] for row in tokens]))


def give_back(
    pool: BlockPool,
    seqs: tuple[Seq, ...],
    rows: Sequence[int],
    computed: Sequence[int],
    config: SchedulerConfig,
) -> tuple[BlockPool, tuple[Seq, ...]]:
    """Frees the blocks that only rejected drafts of some rows needed -> (pool, all rows)."""
    updated = list(seqs)
    for i in rows:
        table = seqs[i].blocks
        entries = blocks.needed(computed[i], config.block_size) * config.groups
        pool = blocks.release(pool, table[entries:][::-1])
        updated[i] = seqs[i]._replace(blocks=table[:entries])
    return pool, tuple(updated)


def flat(ids: Sequence[str], samples: Sequence[Sample]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Flattens samples for an event -> (ids, tokens), with an id for each token."""
    flat_ids: list[str] = []
    tokens: list[int] = []
    for request_id, sample in zip(ids, samples, strict=True):
        row = sample if isinstance(sample, tuple) else (sample,)
        flat_ids += [request_id] * len(row)
        tokens += row
    return tuple(flat_ids), tuple(tokens)
