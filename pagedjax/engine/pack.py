"""`pack` turns a plan into padded arrays. Nothing else turns host lists into arrays of a step.

    plan rows        |decode|decode|decode|chunk of 5 tokens|
    tokens [T]       |  a   |  b   |  c   | d  d  d  d  d   | 0 ... 0 |     T is a bucket: one compiled shape each
    cu_q_lens [B+1]  0      1      2      3                 8 8 ... 8       B = min(T, max_num_seqs)
    last [R]            0      1      2               7       0 0 ... 0       R = B without drafts

In a step of decodes alone, row b has the token b. If a program for such steps alone exists,
cu_q_lens is None. `targets` is None unless log-probabilities of prompt tokens are wanted: such steps
have programs and buckets of their own (`Shapes.prompt_buckets`). A lazy engine has smaller programs
for steps without sampling options (`Shapes.plain`). A row with k drafts has k more
tokens, which are drafts, and k more samples: one after its known tokens and one after each draft.
Padding tokens write to block 0, the trash block; padding rows have no tokens and length 0. M is the
width of a block table, in blocks.

`ARRAYS` lists the functions that make arrays which only some engines have. A new array is a file
with a class (device/extras.py), a function of a `Packing`, and the function's name in `ARRAYS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from immutables import Map

from pagedjax.device.batch import Batch, DraftBatch, DraftShape, SamplingBatch, Shapes
from pagedjax.device.extras import (
    AttentionRows,
    Drafted,
    Extra,
    Feed,
    GroupTables,
    Selecting,
    Span,
    TokenAdapters,
)
from pagedjax.device.row_features.chain import DEFAULT, RowChain
from pagedjax.device.row_features.token_mask import TOKEN_MASK
from pagedjax.engine import adapters, seen_rows
from pagedjax.engine.adapters import AdapterTable
from pagedjax.engine.lookahead import SentStep, fed_rows
from pagedjax.engine.requests import SequenceData, record_of_rows, sequences_of_rows
from pagedjax.host.types import Plan, Seq


class Sources(NamedTuple):
    """What an engine, and the steps before, give to a step beside its plan.

    undrafted, adapters: the fields of `Runtime`.
    looks_ahead: whether the engine sends steps ahead.
    previous: the step before a predicted plan, which samples the unknown tokens.
    unknown_arrivals: arrivals of the sequences whose newest token is not known on the host.
    draft_probs: what the draft in the place of each sample was drawn from.
    masks: for each sample that may not have all tokens, the mask of those that it may have, by the
        index of the sample.
    span: of each row, in how many steps of a span it has a token; None: the step is no span.
    """

    undrafted: Mapping[int, Drafted] = Map()
    adapters: AdapterTable | None = None
    looks_ahead: bool = False
    previous: SentStep | None = None
    unknown_arrivals: Set[int] = frozenset()
    draft_probs: Any = None
    masks: Mapping[int, bytes] = Map()
    span: Sequence[int] | None = None


NOTHING_MORE = Sources()


class Packing(NamedTuple):
    """A plan whose batch is being made.

    data: of each row, the record of its sequence.
    batch: the arrays that every step has.
    tables: [groups of layers, B, M].
    slots: [groups of layers, T].
    row_of_token: [tokens] the row of each token that is not padding.
    relative: of each sample, where the token that it follows is, relative to the row's last token.
    """

    plan: Plan
    data: Sequence[SequenceData]
    shapes: Shapes
    batch: Batch
    tables: np.ndarray
    slots: np.ndarray
    row_of_token: np.ndarray
    relative: np.ndarray
    sources: Sources


def pack(
    plan: Plan,
    sequences: Mapping[str, SequenceData],
    shapes: Shapes,
    blanks: Mapping[int, SamplingBatch],
    chain: RowChain = DEFAULT,
    sources: Sources = NOTHING_MORE,
    *,
    samples: int | None = None,
) -> Batch:
    """Lay a plan out as the arrays of its bucket.

    Args:
        sequences: by id, for every sequence of the plan. Their options were read by `chain`. Drafts
            of the plan are in their tokens, behind the known ones.
        blanks: `blank_sampling` by R, ideally already on the device: the arrays of options that no
            row of the step uses are taken from there and cost nothing.
        chain: the sampling options of the engine.
        sources: of the arrays that only some engines have.
        samples: R; None: that of the plan.
    """
    data = sequences_of_rows(plan, sequences)
    t = _bucket(plan, shapes)
    queries = _queries(plan, data, t, shapes.rows(t))
    tables = _tables(plan.seqs, data, len(queries.seq_lens), shapes)
    slots = _slots(tables, queries, shapes.block_size)
    r = samples or shapes.samples(t, bool(plan.drafts))
    row_of_sample, relative = _samples(plan)
    records = _records(data, chain)
    targets = _targets(plan, data, records["prompt_logprobs"], queries)
    if targets is not None and not shapes.are_of_prompt_logprobs:
        return pack(plan, sequences, shapes.of_prompt_logprobs, blanks, chain, sources)
    sampling = _sampling_of_plan(
        plan, data, records, row_of_sample, relative, blanks[r], chain, sources.masks
    )
    if shapes.plain and not _has_options(records):
        sampling = sampling.plain()
        if not _wants_logprobs(records):
            sampling = sampling.without_logprobs()
    decodes_alone = len(queries.row_of_token) == len(data) and t in shapes.decode_buckets
    batch = Batch(
        tokens=queries.tokens,
        positions=queries.positions,
        slots=slots[0],
        block_tables=tables[0],
        seq_lens=queries.seq_lens,
        cu_q_lens=None if decodes_alone else queries.cu_q_lens,
        last=_padded(queries.cu_q_lens[1:][row_of_sample] - 1 + relative, r),
        sampled_row=_padded(row_of_sample, r),
        targets=targets,
        sampling=sampling,
    )
    return _with_extras(
        Packing(plan, data, shapes, batch, tables, slots, queries.row_of_token, relative, sources)
    )


def _bucket(plan: Plan, shapes: Shapes) -> int:
    """T of a plan's step."""
    tokens = sum(plan.counts)
    is_one_each = tokens == len(plan.counts)
    return shapes.decode_bucket(tokens) if is_one_each else shapes.bucket(tokens)


def _with_extras(packing: Packing) -> Batch:
    """The batch with the arrays of its engine's features."""
    extras = [make(packing) for make in ARRAYS]
    return packing.batch._replace(extras=tuple([extra for extra in extras if extra is not None]))


# arrays that only some engines have ----------------------------------------------------------------


def fed_tokens(packing: Packing) -> Feed | None:
    """Which tokens come from the step before."""
    sources = packing.sources
    if not sources.looks_ahead:
        return None
    t = len(packing.batch.tokens)
    previous = sources.previous
    if previous is None:
        return Feed(np.full(t, -1, np.int32), np.zeros(packing.shapes.max_seqs, np.int32))
    rows = fed_rows(packing.plan, previous, sources.unknown_arrivals, t)
    return Feed(rows, previous.output.fed)


def span_of(packing: Packing) -> Span | None:
    """In how many steps of a span each row has a token."""
    steps = packing.sources.span
    if steps is None:
        return None
    return Span(_padded(steps, len(packing.batch.tokens)), packing.shapes.span)


def drafted_tokens(packing: Packing) -> Drafted | None:
    """The draft in the place of each sample."""
    sources = packing.sources
    if not sources.undrafted:
        return None
    last = packing.batch.last
    if not packing.plan.drafts:
        return sources.undrafted[len(last)]
    drafts = np.full(len(last), -1, np.int32)
    # the last sample of a row follows all of its drafts
    samples = np.flatnonzero(packing.relative < 0)
    drafts[samples] = packing.batch.tokens[last[samples] + 1]
    return Drafted(drafts, sources.draft_probs)


def attention_rows(packing: Packing) -> AttentionRows | None:
    """The rows of attention under a KV policy."""
    if not packing.shapes.view:
        return None
    plan = packing.plan
    batch = packing.batch
    t = len(batch.tokens)
    return seen_rows.rows_of(
        packing.shapes, t, batch.block_tables, plan.starts, plan.counts, batch.last
    )


def group_tables(packing: Packing) -> GroupTables | None:
    """The block tables of the groups of layers behind the first group."""
    layout = packing.shapes.layout
    if layout is None:
        return None
    return GroupTables(layout, tuple(packing.slots[1:]), tuple(packing.tables[1:]))


def selecting_tokens(packing: Packing) -> Selecting | None:
    """Which tokens select the blocks that they read."""
    selection = packing.shapes.selection
    if selection is None:
        return None
    total = len(packing.row_of_token)
    selects = np.zeros(len(packing.batch.tokens), bool)
    selects[:total] = True
    if selection.dense_prompts:
        prompt_lens = np.array([row.prompt_len for row in packing.data], np.int32)
        positions = packing.batch.positions[:total]
        selects[:total] = positions >= prompt_lens[packing.row_of_token]
    return Selecting(selection, selects)


def token_adapters(packing: Packing) -> TokenAdapters | None:
    """The adapter of each token."""
    table = packing.sources.adapters
    if table is None:
        return None
    return adapters.of_tokens(table, packing.plan, packing.data, len(packing.batch.tokens))


# In the order in which programs take them.
ARRAYS: tuple[Callable[[Packing], Extra | None], ...] = (
    fed_tokens,
    span_of,
    drafted_tokens,
    attention_rows,
    group_tables,
    selecting_tokens,
    token_adapters,
)


# parts of a batch -----------------------------------------------------------------------------------


class Queries(NamedTuple):
    """The tokens of a step, row behind row, and what each row sees.

    row_of_token: [tokens] the row of each token that is not padding.
    """

    tokens: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    row_of_token: np.ndarray
    cu_q_lens: np.ndarray  # [B + 1]
    seq_lens: np.ndarray  # [B]


def _queries(plan: Plan, data: Sequence[SequenceData], t: int, b: int) -> Queries:
    """The tokens that a plan computes, in arrays of T tokens and B rows."""
    rows = len(data)
    starts = np.asarray(plan.starts, np.int32)
    counts = np.asarray(plan.counts, np.int32)
    cu_q_lens = np.zeros(b + 1, np.int32)
    np.cumsum(counts, out=cu_q_lens[1 : rows + 1])
    total = sum(plan.counts)
    cu_q_lens[rows + 1 :] = total
    row_of_token = np.repeat(np.arange(rows), counts)
    positions = np.arange(total) - cu_q_lens[row_of_token] + starts[row_of_token]
    tokens = _padded(_tokens(plan, data, total), t)
    seq_lens = _padded(starts + counts, b)
    return Queries(tokens, _padded(positions, t), row_of_token, cu_q_lens, seq_lens)


def _padded(values: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """[size] int32: the values, and zeros behind them."""
    array = np.zeros(size, np.int32)
    array[: len(values)] = values
    return array


def _tokens(plan: Plan, data: Sequence[SequenceData], total: int) -> Sequence[int] | np.ndarray:
    """[total] the tokens that a plan computes, row behind row."""
    if total == len(data):  # decodes alone
        pairs = zip(data, plan.starts, strict=True)
        return [row.tokens.item(start) for row, start in pairs]
    chunks = zip(data, plan.starts, plan.counts, strict=True)
    return np.concatenate([row.tokens[start : start + count] for row, start, count in chunks])


def _slots(tables: np.ndarray, queries: Queries, size: int) -> np.ndarray:
    """[groups of layers, T] where the keys and values of each token are written.

    Args:
        tables: [groups, B, M] block tables.
        size: tokens of a block.
    """
    positions = queries.positions[: len(queries.row_of_token)]
    slots = np.zeros((len(tables), len(queries.tokens)), np.int32)
    blocks = tables[:, queries.row_of_token, positions // size]
    slots[:, : len(positions)] = blocks * size + positions % size
    return slots


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
    b = shape.rows
    seqs = [plan.seqs[i] for i in rows]
    data = [sequences[seq.request_id] for seq in seqs]
    lengths = np.array([plan.lengths[i] for i in rows], np.int32)
    newest = [row.tokens.item(length - 1) for row, length in zip(data, lengths, strict=True)]
    records = _records(data, chain)
    sampling = _sampling(data, records, lengths, blanks[b], chain)
    sampling = sampling.without_logprobs()  # nobody reads those of drafts
    if shapes.plain and not _has_options(records):
        sampling = sampling.plain()
    drafts = _drafts_of_samples(plan, rows, b) if shape.samples else ()
    tables = _tables(seqs, data, b, shapes)
    batch = DraftBatch(
        tokens=_padded(newest, b),
        positions=_padded(lengths - 1, b),
        counts=_padded([plan.drafts[i] for i in rows], b),
        block_tables=tables[0],
        sampling=sampling,
        samples=_padded(drafts, shape.samples),
        group_tables=tuple(tables[1:]) if shapes.draft_layout else (),
    )
    return replace(shape, plain=sampling.is_plain), batch


def _drafts_of_samples(plan: Plan, rows: Sequence[int], b: int) -> np.ndarray:
    """For each sample of a plan, where its draft is in the drafter's flattened [k, b] output.

    Args:
        rows: the rows with drafts.
    """
    row_of_sample, relative = _samples(plan)
    num_drafts = np.asarray(plan.drafts)[row_of_sample]
    # 0, 1, ... in each row; the last sample of a row has no draft: it gets the number of the draft
    # before
    draft_number = np.minimum(num_drafts + relative, np.maximum(num_drafts - 1, 0))
    column = np.searchsorted(rows, row_of_sample).clip(max=len(rows) - 1)
    return draft_number * b + column


def _tables(
    seqs: Sequence[Seq], data: Sequence[SequenceData], b: int, shapes: Shapes
) -> np.ndarray:
    """[groups of layers, b, M] the block tables of the sequences, in the first rows. A hole is the
    trash block.
    """
    groups = len(shapes.layout.windows) if shapes.layout else 1
    tables = np.zeros((b, shapes.table_width * groups), np.int32)
    table_bytes = tables.data.cast("B")
    offset = 0
    for row, seq in zip(data, seqs, strict=True):
        ids = row.block_ids(seq.blocks)
        table_bytes[offset : offset + len(ids)] = ids
        offset += tables.strides[0]
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
    samples_of_row = np.asarray(plan.drafts, np.int32) + 1
    row_of_sample = np.repeat(rows, samples_of_row)
    ends = np.cumsum(samples_of_row)[row_of_sample]
    return row_of_sample, np.arange(len(row_of_sample), dtype=np.int32) - ends + 1


def _targets(
    plan: Plan, data: Sequence[SequenceData], wants_targets: np.ndarray, queries: Queries
) -> np.ndarray | None:
    """[T] the next prompt token for rows that want prompt log-probabilities; else -1. None if no
    token of the step has such a target.

    Args:
        wants_targets: whether each row wants them.
    """
    targets = None
    for i in np.flatnonzero(wants_targets).tolist():
        row = data[i]
        start = plan.starts[i]
        stop = min(start + plan.counts[i], row.prompt_len - 1)
        if start < stop:
            if targets is None:
                targets = np.full(len(queries.tokens), -1, np.int32)
            first = queries.cu_q_lens[i]
            targets[first : first + stop - start] = row.tokens[start + 1 : stop + 1]
    return targets


def _records(data: Sequence[SequenceData], chain: RowChain) -> np.ndarray:
    """Of each row, the record of its options."""
    return np.frombuffer(b"".join([row.record for row in data]), record_of_rows(chain))


def _wants_logprobs(records: np.ndarray) -> bool:
    """Whether a row wants log-probabilities of its samples."""
    return bool((records["num_top"] >= 0).any())


def _has_options(records: np.ndarray) -> bool:
    """Whether a row uses a sampling option."""
    return bool(records["options"]["on"].any())


def _sampling_of_plan(
    plan: Plan,
    data: Sequence[SequenceData],
    records: np.ndarray,
    row_of_sample: np.ndarray,
    relative: np.ndarray,
    blank: SamplingBatch,
    chain: RowChain,
    masks: Mapping[int, bytes],
) -> SamplingBatch:
    """How the samples of a plan are drawn.

    Args:
        data, records: of each row.
        row_of_sample, relative: what `_samples` returned.
        masks: see `Sources`.
    """
    lengths = np.asarray(plan.lengths, np.int32)
    if plan.drafts:
        lengths = (lengths + np.asarray(plan.drafts))[row_of_sample] + relative
        data = [data[i] for i in row_of_sample]
        records = records[row_of_sample]
    return _sampling(data, records, lengths, blank, chain, masks)


def _sampling(
    data: Sequence[SequenceData],
    records: np.ndarray,
    lengths: np.ndarray,
    blank: SamplingBatch,
    chain: RowChain,
    masks: Mapping[int, bytes] | None = None,
) -> SamplingBatch:
    """How the samples are drawn. Arrays of features that no row uses are those of `blank`.

    Args:
        lengths: the number of tokens before each sample.
        masks: see `Sources`; None: no mask counts.
    """
    n = len(data)
    b = len(blank.temperature)
    columns = {
        name: np.zeros(b, records[name].dtype)
        for name in ("temperature", "num_top", "seed", "prompt_len")
    }
    columns["num_top"][n:] = -1
    for name, column in columns.items():
        column[:n] = records[name]
    position = np.zeros(b, np.int32)
    position[:n] = lengths - records["prompt_len"]

    def large_value(row: int, name: str) -> bytes:
        mask = masks.get(row) if masks and name == TOKEN_MASK else None
        return data[row].options.large[name] if mask is None else mask

    without = TOKEN_MASK if masks is None else None
    features = chain.pack(records["options"], large_value, b, without=without)
    assert blank.features is not None, "a blank has all options"
    return SamplingBatch(**columns, position=position, features=blank.features | features)
