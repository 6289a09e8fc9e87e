"""A step of decodes alone, or a span of them, packed from an earlier one that had its rows.

Most steps have the rows of the step before, each one token further on. Their options and nearly all
of their block tables are the same. So the words that were sent (`joined` of device/batch.py) are
copied once, and positions, lengths, slots and the tables that grew are written into the copy. What
was sent is never changed, because a CPU may read it where it is.

A step with a row that is new, with drafts or with masks of tokens is packed by `pack`. So is one
where a row with sampling options (`RowChain`) may have ended, and so are all steps of an engine that
sends other arrays than `Feed` (device/extras.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import is_not
from typing import NamedTuple

import numpy as np

from pagedjax.device.batch import (
    CORE,
    Batch,
    OneTransfer,
    SamplingBatch,
    Shapes,
    StepShape,
    joined,
    places,
)
from pagedjax.device.extras import Feed, Span
from pagedjax.engine.lookahead import SentStep, fed_rows
from pagedjax.engine.pack import Sources
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import Plan, Seq, pick


class Packed(NamedTuple):
    """A step of decodes alone that was packed, or a span of them.

    plan: of a span, what `lookahead.merged_plans` returned.
    last: the plan of the last step of its program.
    arrivals: of its rows.
    places: where each array is in the words of the transfer, by the name of its field.
    blank: what `blanks` of `pack` had for this step. Its arrays are part of the transfer.
    """

    plan: Plan
    last: Plan
    arrivals: tuple[int, ...]
    shape: StepShape
    transfer: OneTransfer
    places: Mapping[str, slice]
    blank: SamplingBatch


def packed(
    plan: Plan,
    batch: Batch,
    shape: StepShape,
    blank: SamplingBatch,
    sources: Sources,
    last: Plan | None = None,
) -> tuple[OneTransfer, Packed | None]:
    """What `pack` made of a plan, for its program; and for `pack_next`, if a later step can be packed
    from it.

    Args:
        last: of a span, the plan of its last step.
    """
    transfer = joined(batch)
    others = [extra for extra in batch.extras if not isinstance(extra, Feed | Span)]
    if not plan.seqs or _positions(plan) is None or sources.masks or others:
        return transfer, None
    core, sampling, extras = places(transfer)
    names = [*Batch._fields[:CORE], *SamplingBatch._fields[: len(sampling)]]
    slices = dict(zip(names, (*core, *sampling), strict=True))
    for extra, words in zip(batch.extras, extras, strict=True):
        (slices["feed" if isinstance(extra, Feed) else "steps"],) = words
    arrivals = tuple([seq.arrival for seq in plan.seqs])
    return transfer, Packed(plan, last or plan, arrivals, shape, transfer, slices, blank)


def pack_next(
    before: Packed,
    plan: Plan,
    sequences: Mapping[str, SequenceData],
    shapes: Shapes,
    blanks: Mapping[int, SamplingBatch],
    sources: Sources,
    last: Plan | None = None,
) -> Packed | None:
    """A step packed from an earlier one of the same engine; None if `pack` must make it.

    It is what `pack` makes, but for the tokens that the device takes from the step before: in their
    places is any number.

    Args:
        sequences, shapes, blanks, sources: see `pack`.
        last: of a span, the plan of its last step.
    """
    if not _fits(before, plan, shapes, blanks, sources):
        return None
    starts = _positions(plan)
    rows = None if starts is None else _rows_before(before, plan)
    if starts is None or rows is None:
        return None
    count = len(rows)
    arrivals = before.arrivals
    words = before.transfer.words.copy()
    arrays = {name: words[place] for name, place in before.places.items() if place is not None}
    tables = arrays["block_tables"].reshape(-1, shapes.table_width)
    if count < len(arrivals):
        if _has_features(before):
            return None  # their rows would move, too
        if shapes.plain and (before.shape.logprobs or not before.shape.plain):
            return None  # the rows that are left may have a smaller program
        _keep_rows(arrays, tables, rows, len(arrivals))
        arrivals = pick(arrivals, rows.tolist())
    _write_tables(tables, _seqs_before(before, rows), plan.seqs)
    arrays["slots"][:count] = _slots_of(tables, starts, shapes.block_size)
    arrays["positions"][:count] = starts
    arrays["seq_lens"][:count] = starts + 1
    arrays["position"][:count] = starts + 1 - arrays["prompt_len"][:count]
    if sources.span is not None:
        arrays["steps"][:count] = sources.span
    features, extras = before.transfer.rest
    all_fed = False
    if sources.looks_ahead:
        feed = arrays["feed"]
        feed[:] = -1
        fed_tokens = np.zeros(shapes.max_seqs, np.int32)
        if sources.previous is not None:
            _write_feed(feed, before, plan, rows, arrivals, sources.previous, sources)
            fed_tokens = sources.previous.output.fed
        extras = [Feed(None, fed_tokens) if isinstance(extra, Feed) else extra for extra in extras]
        all_fed = (feed[:count] >= 0).all()
    if not all_fed:
        arrays["tokens"][:count] = _newest_tokens(plan, sequences)
    transfer = before.transfer
    transfer = OneTransfer(words, (features, extras), transfer.tree, transfer.layout)
    return before._replace(plan=plan, last=last or plan, arrivals=arrivals, transfer=transfer)


def _fits(
    before: Packed,
    plan: Plan,
    shapes: Shapes,
    blanks: Mapping[int, SamplingBatch],
    sources: Sources,
) -> bool:
    """Whether a plan runs in the program of the step before, with its options."""
    tokens, samples, decodes_alone, span, *_ = before.shape
    return (
        bool(plan.seqs)
        and span == (1 if sources.span is None else shapes.span)
        and not sources.masks
        and shapes.decode_bucket(len(plan.seqs)) == tokens
        and (tokens in shapes.decode_buckets) == decodes_alone
        and blanks[samples] is before.blank
    )


def _positions(plan: Plan) -> np.ndarray | None:
    """Where each row has its newest token, if the plan computes this token alone of all rows; else
    None.
    """
    count = len(plan.seqs)
    if plan.drafts or plan.counts.count(1) < count:
        return None
    starts = np.array(plan.starts, np.int32)
    # else a token of a prompt, whose log-probability may be wanted
    return starts if (starts + 1 == np.array(plan.lengths, np.int32)).all() else None


def _rows_before(before: Packed, plan: Plan) -> np.ndarray | None:
    """Of each row of a plan, its row in the step before; None if a row is new."""
    count = len(plan.seqs)
    rows = np.arange(count)
    if count != len(before.arrivals):
        row_of = {arrival: i for i, arrival in enumerate(before.arrivals)}
        rows = np.array([row_of.get(seq.arrival, -1) for seq in plan.seqs])
        if (rows < 0).any():
            return None
    past_seqs = _seqs_before(before, rows)
    for i in _others(past_seqs, plan.seqs):
        past = past_seqs[i]
        seq = plan.seqs[i]
        # options are those of a request, and a beam has another arrival than its siblings
        if seq.request is not past.request or seq.arrival != past.arrival:
            return None
    return rows


def _seqs_before(before: Packed, rows: np.ndarray) -> tuple[Seq, ...]:
    """The records of some rows in the step before; `rows` are all of them or fewer."""
    seqs = before.plan.seqs
    return seqs if len(rows) == len(seqs) else pick(seqs, rows.tolist())


def _has_features(before: Packed) -> bool:
    """Whether the step before has arrays of sampling options (`RowChain`)."""
    features, _ = before.transfer.rest
    if features is None:
        return False
    assert before.blank.features is not None, "a blank has all options"
    return any([features[name] is not before.blank.features[name] for name in features])


def _slots_of(tables: np.ndarray, starts: np.ndarray, block_size: int) -> np.ndarray:
    """The slot of the token at starts [B], by block tables of B rows or more."""
    blocks = tables[np.arange(len(starts)), starts // block_size]
    return blocks * block_size + starts % block_size


def _others(past_seqs: tuple[Seq, ...], seqs: tuple[Seq, ...]) -> list[int]:
    """The rows that have another record than before."""
    return list(compress(range(len(seqs)), map(is_not, past_seqs, seqs)))


def _keep_rows(
    arrays: Mapping[str, np.ndarray], tables: np.ndarray, rows: np.ndarray, past_count: int
) -> None:
    """Moves rows to the front, as they are in a plan, and makes those behind them padding."""
    count = len(rows)
    tables[:count] = tables[rows]
    tables[count:past_count] = 0
    for name in ("temperature", "num_top", "seed", "prompt_len"):
        if name in arrays:
            arrays[name][:count] = arrays[name][rows]
    for name, array_of_rows in arrays.items():
        if name not in ("block_tables", "cu_q_lens", "targets"):
            array_of_rows[count:past_count] = -1 if name in ("num_top", "feed") else 0
    if "cu_q_lens" in arrays:
        arrays["cu_q_lens"][count + 1 :] = count


def _write_tables(tables: np.ndarray, past_seqs: tuple[Seq, ...], seqs: tuple[Seq, ...]) -> None:
    """Writes the block tables that changed.

    Args:
        tables: [B, M] those of `past_seqs`, in the first rows.
    """
    rows: list[int] = []
    entries: list[int] = []
    new_blocks: list[int] = []
    for i in _others(past_seqs, seqs):
        table = seqs[i].blocks
        past = past_seqs[i].blocks
        if table is past:
            continue
        count = len(past)
        if len(table) == count + 1 and table[:count] == past:  # as most tables that changed
            rows.append(i)
            entries.append(count)
            new_blocks.append(table[count])
        else:
            tables[i, : len(table)] = table
            tables[i, len(table) : count] = 0
    if rows:
        tables[rows, entries] = new_blocks


def _write_feed(
    feed: np.ndarray,
    before: Packed,
    plan: Plan,
    rows: np.ndarray,
    arrivals: Sequence[int],
    previous: SentStep,
    sources: Sources,
) -> None:
    """Writes which tokens come from the step before, see `lookahead.fed_rows`.

    Args:
        rows: what `_rows_before` returned.
        arrivals: of the plan's rows.
    """
    unknown = sources.unknown_arrivals
    has_all_rows = len(before.last.seqs) == len(before.plan.seqs)
    is_next = previous.plan is before.last and has_all_rows
    if is_next and all(map(unknown.__contains__, arrivals)):
        feed[: len(rows)] = rows
    else:
        feed[:] = fed_rows(plan, previous, unknown, len(feed))


def _newest_tokens(plan: Plan, sequences: Mapping[str, SequenceData]) -> list[int]:
    """The token that each row computes."""
    pairs = zip(plan.seqs, plan.starts, strict=True)
    return [sequences[seq.request.request_id].tokens.item(start) for seq, start in pairs]
