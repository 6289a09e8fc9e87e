"""`pack` turns a plan into padded arrays. Nothing else turns host lists into arrays of a step.

    plan rows        |decode|decode|decode|chunk of 5 tokens|
    tokens [T]       |  a   |  b   |  c   | d  d  d  d  d   | 0 ... 0 |     T is a bucket: one compiled shape each
    cu_q_lens [B+1]  0      1      2      3                 8 8 ... 8       B = min(T, max_num_seqs)
    last [R]            0      1      2               7       0 0 ... 0       R = B without drafts

In a step of decodes alone, row b has the token b. Where such steps have a program of their own,
cu_q_lens is None, and so is `targets`: a step in which a decode wants a prompt's log-probability is
a mixed one. A row with k drafts has k more tokens, which are drafts, and k more samples: one after
its known tokens and one after each draft. Padding tokens write to block 0, the trash block; padding
rows have no tokens and length 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pagedjax.device.batch import (
    Batch,
    DraftBatch,
    DraftShape,
    GroupTables,
    SamplingBatch,
    Selecting,
    Shapes,
)
from pagedjax.device.row_features.chain import DEFAULT, RowChain
from pagedjax.device.row_features.token_mask import TOKEN_MASK
from pagedjax.engine import seen_rows, token_masks
from pagedjax.engine.requests import SequenceData, of_rows, record_of_rows
from pagedjax.host.types import Plan, Seq


def pack(
    plan: Plan,
    sequences: Mapping[str, SequenceData],
    shapes: Shapes,
    blanks: Mapping[int, SamplingBatch],
    chain: RowChain = DEFAULT,
) -> Batch:
    """Lay a plan out as the arrays of its bucket.

    Args:
        sequences: by id, for every sequence of the plan. Their options were read by `chain`. Drafts
            of the plan are in their tokens, behind the known ones.
        blanks: `blank_sampling` by R, ideally already on the device: the arrays of options that no
            row of the step uses are taken from there and cost nothing.
        chain: the sampling options of the engine.
    """
    rows, s = len(plan.seqs), shapes.block_size
    t = shapes.bucket(sum(plan.counts))
    b = shapes.rows(t)
    mine = of_rows(plan, sequences)
    starts, counts = np.asarray(plan.starts, np.int32), np.asarray(plan.counts, np.int32)

    cu_q_lens = np.zeros(b + 1, np.int32)
    np.cumsum(counts, out=cu_q_lens[1 : rows + 1])
    cu_q_lens[rows + 1 :] = total = int(cu_q_lens[rows])
    row = np.repeat(np.arange(rows), counts)
    positions = np.zeros(t, np.int32)
    positions[:total] = np.arange(total) - cu_q_lens[row] + starts[row]
    tokens = np.zeros(t, np.int32)
    if total == rows:  # decodes alone
        tokens[:total] = [m.tokens.item(i) for m, i in zip(mine, plan.starts, strict=True)]
    else:
        tokens[:total] = np.concatenate(
            [m.tokens[i : i + k] for m, i, k in zip(mine, plan.starts, plan.counts, strict=True)]
        )

    by_group = _tables(plan.seqs, mine, b, shapes)
    all_slots = np.zeros((len(by_group), t), np.int32)
    all_slots[:, :total] = by_group[:, row, positions[:total] // s] * s + positions[:total] % s
    (tables, *others), (slots, *other_slots) = by_group, all_slots
    groups = (
        GroupTables(shapes.layout, tuple(other_slots), tuple(others)) if shapes.layout else None
    )

    seq_lens = np.zeros(b, np.int32)
    seq_lens[:rows] = starts + counts
    r = shapes.samples(t, bool(plan.drafts))
    row_of, relative = _samples(plan)
    last, sampled_row = np.zeros(r, np.int32), np.zeros(r, np.int32)
    sampled_row[: len(row_of)] = row_of
    last[: len(row_of)] = cu_q_lens[1:][row_of] - 1 + relative
    records = np.frombuffer(b"".join([m.record for m in mine]), record_of_rows(chain))
    targets, prompt_lens = (
        _targets(plan, mine, records["prompt_logprobs"], t, cu_q_lens),
        records["prompt_len"],
    )
    known, masks = np.asarray(plan.lengths, np.int32), token_masks.of_samples(plan, mine)
    if plan.drafts:
        known = (
            known[row_of] + relative + np.repeat(plan.drafts, np.asarray(plan.drafts, np.int32) + 1)
        )
        mine, records = [mine[i] for i in row_of], records[row_of]
    sampling = _sampling(mine, records, known, blanks[r], chain, masks)
    seen = (
        seen_rows.rows_of(shapes, t, tables, plan.starts, plan.counts, last)
        if shapes.view
        else None
    )
    selecting = None
    if shapes.selection:
        selects = np.zeros(t, bool)
        selects[:total] = (
            positions[:total] >= prompt_lens[row] if shapes.selection.dense_prompts else True
        )
        selecting = Selecting(shapes.selection, selects)
    if total == rows and t in shapes.decode_buckets and (targets < 0).all():
        cu_q_lens = targets = None
    rows_and_samples = seq_lens, cu_q_lens, last, sampled_row, targets, sampling
    return Batch(
        tokens,
        positions,
        slots,
        tables,
        *rows_and_samples,
        seen=seen,
        groups=groups,
        selecting=selecting,
    )


def pack_drafts(
    plan: Plan,
    sequences: Mapping[str, SequenceData],
    shapes: Shapes,
    blanks: Mapping[int, SamplingBatch],
    chain: RowChain = DEFAULT,
) -> tuple[DraftShape, DraftBatch]:
    """What a drafter on the device continues: the rows of a plan with drafts. Arguments as in
    `pack`.
    """
    rows = [i for i, k in enumerate(plan.drafts) if k]
    shape = shapes.draft_shape(len(rows), shapes.bucket(sum(plan.counts)))
    seqs = [plan.seqs[i] for i in rows]
    mine = [sequences[seq.request_id] for seq in seqs]
    known, n, b = np.array([plan.lengths[i] for i in rows], np.int32), len(rows), shape.rows
    tokens, positions, counts = (np.zeros(b, np.int32) for _ in range(3))
    tokens[:n] = [m.tokens[length - 1] for m, length in zip(mine, known, strict=True)]
    positions[:n], counts[:n] = known - 1, [plan.drafts[i] for i in rows]
    records = np.frombuffer(b"".join([m.record for m in mine]), record_of_rows(chain))
    sampling = _sampling(mine, records, known, blanks[b], chain)._replace(
        num_top=np.full(b, -1, np.int32)
    )
    samples = np.zeros(shape.samples, np.int32)
    if shape.samples:
        row_of, relative = _samples(plan)
        # 0, 1, ... of each row; the last sample has none
        draft = np.asarray(plan.drafts)[row_of] + relative
        drafted = np.minimum(draft, np.maximum(np.asarray(plan.drafts)[row_of] - 1, 0))
        samples[: len(row_of)] = drafted * b + np.searchsorted(rows, row_of).clip(max=n - 1)
    (tables,) = _tables(seqs, mine, b, shapes)
    return shape, DraftBatch(tokens, positions, counts, tables, sampling, samples)


def drafted_tokens(plan: Plan, batch: Batch) -> np.ndarray:
    """[R] the draft in the place of each sample of a packed plan, -1 where there is none."""
    found = np.full(len(batch.last), -1, np.int32)
    if plan.drafts:
        relative = _samples(plan)[1]
        before = np.flatnonzero(relative < 0)  # the last sample of a row follows all of its drafts
        found[before] = batch.tokens[batch.last[before] + 1]
    return found


def _tables(
    seqs: Sequence[Seq], mine: Sequence[SequenceData], b: int, shapes: Shapes
) -> np.ndarray:
    """[groups of layers, b, M] the block tables of the sequences, in the first rows. A hole is the
    trash block.
    """
    groups = len(shapes.layout.windows) if shapes.layout else 1
    tables = np.zeros((b, shapes.table_width * groups), np.int32)
    into, at = tables.data.cast("B"), 0
    for data, seq in zip(mine, seqs, strict=True):
        ids = data.block_ids(seq.blocks)
        into[at : at + len(ids)] = ids
        at += tables.strides[0]
    if groups == 1:
        return tables[None]
    return np.ascontiguousarray(tables.reshape(b, -1, groups).transpose(2, 0, 1))


def _samples(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Of each sample its row, and where the token that it follows is, relative to the row's last
    token (0, -1, ...).
    """
    rows = np.arange(len(plan.seqs))
    if not plan.drafts:
        return rows, np.zeros(len(rows), np.int32)
    each = np.asarray(plan.drafts, np.int32) + 1
    row_of = np.repeat(rows, each)
    return row_of, np.arange(len(row_of), dtype=np.int32) - np.cumsum(each)[row_of] + 1


def _targets(
    plan: Plan, mine: Sequence[SequenceData], wanted: np.ndarray, t: int, cu_q_lens: np.ndarray
) -> np.ndarray:
    """[T] the next prompt token for rows that want prompt log-probabilities."""
    targets = np.full(t, -1, np.int32)
    for i in np.flatnonzero(wanted).tolist():
        data = mine[i]
        start, stop = plan.starts[i], min(plan.starts[i] + plan.counts[i], data.prompt_len - 1)
        if start < stop:
            targets[cu_q_lens[i] : cu_q_lens[i] + stop - start] = data.tokens[start + 1 : stop + 1]
    return targets


def _sampling(
    mine: Sequence[SequenceData],
    records: np.ndarray,
    lengths: np.ndarray,
    blank: SamplingBatch,
    chain: RowChain,
    masks: Mapping[int, bytes] | None = None,
) -> SamplingBatch:
    """How the samples are drawn. Arrays of features that no row uses are the blank ones.

    Args:
        lengths: the tokens before each sample.
        masks: by the index of a sample, the tokens that its grammar allows; None: grammars do not
            count.
    """
    n, b = len(mine), len(blank.temperature)
    packed = {
        name: np.zeros(b, records[name].dtype)
        for name in ("temperature", "num_top", "seed", "prompt_len")
    }
    packed["num_top"][n:] = -1
    for name, array in packed.items():
        array[:n] = records[name]
    position = np.zeros(b, np.int32)
    position[:n] = lengths - records["prompt_len"]

    def large(row: int, name: str) -> bytes:
        mask = masks.get(row) if masks and name == TOKEN_MASK else None
        return mine[row].options.large[name] if mask is None else mask

    features = chain.pack(
        records["options"], large, b, without=TOKEN_MASK if masks is None else None
    )
    return SamplingBatch(**packed, position=position, features=blank.features | features)
