"""`pack` turns a plan into padded arrays. The only place where host lists become arrays.

    plan rows        |decode|decode|decode|chunk of 5 tokens|
    tokens [T]       |  a   |  b   |  c   | d  d  d  d  d   | 0 ... 0 |     T is a bucket: one compiled shape each
    cu_q_lens [B+1]  0      1      2      3                 8 8 ... 8       B = min(T, max_num_seqs)

Padding tokens write to block 0, the trash block; padding rows have no tokens and length 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pagedjax.device.batch import Batch, SamplingBatch, Shapes
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import Plan


def pack(plan: Plan, sources: Mapping[str, SequenceData], shapes: Shapes, blanks: Mapping[int, SamplingBatch]) -> Batch:
    """Lay a plan out as the arrays of its bucket.

    Args:
        sources: by request id, for every sequence of the plan.
        blanks: `blank_sampling` by T, ideally already on the device: the large arrays of features that no row of
            the step uses are taken from there and cost nothing.
    """
    rows, s = len(plan.seqs), shapes.block_size
    t = shapes.bucket(sum(plan.counts))
    b = shapes.rows(t)
    mine = [sources[seq.request_id] for seq in plan.seqs]
    starts, counts = np.asarray(plan.starts, np.int32), np.asarray(plan.counts, np.int32)

    cu_q_lens = np.zeros(b + 1, np.int32)
    cu_q_lens[1 : rows + 1] = np.cumsum(counts)
    cu_q_lens[rows + 1 :] = total = int(cu_q_lens[rows])
    row = np.repeat(np.arange(rows), counts)
    positions = np.zeros(t, np.int32)
    positions[:total] = np.arange(total) - cu_q_lens[row] + starts[row]
    tokens = np.zeros(t, np.int32)
    if total == rows:  # decodes alone
        tokens[:total] = [m.tokens[i] for m, i in zip(mine, plan.starts, strict=True)]
    else:
        tokens[:total] = np.concatenate(
            [m.tokens[i : i + k] for m, i, k in zip(mine, plan.starts, plan.counts, strict=True)]
        )

    tables = np.zeros((b, shapes.table_width), np.int32)
    widths = np.array([len(seq.blocks) for seq in plan.seqs], np.int32)
    ids = np.frombuffer(b"".join([m.block_ids(seq.blocks) for m, seq in zip(mine, plan.seqs, strict=True)]), np.int32)
    owner = np.repeat(np.arange(rows), widths)
    tables[owner, np.arange(len(ids)) - np.repeat(np.cumsum(widths) - widths, widths)] = ids
    slots = np.zeros(t, np.int32)
    slots[:total] = tables[row, positions[:total] // s] * s + positions[:total] % s

    seq_lens = np.zeros(b, np.int32)
    seq_lens[:rows] = starts + counts
    last = np.zeros(b, np.int32)
    last[:rows] = cu_q_lens[1 : rows + 1] - 1
    targets, sampling = np.full(t, -1, np.int32), _sampling(mine, blanks[t])
    if not all([m.plain for m in mine]):
        targets = _targets(plan, mine, t, cu_q_lens)
        sampling = sampling._replace(**_listed(mine, blanks[t]))
    return Batch(tokens, positions, slots, tables, seq_lens, cu_q_lens, last, targets, sampling)


def _targets(plan: Plan, mine: Sequence[SequenceData], t: int, cu_q_lens: np.ndarray) -> np.ndarray:
    """[T] the next prompt token for rows that want prompt log-probabilities."""
    targets = np.full(t, -1, np.int32)
    for i, source in enumerate(mine):
        start, stop = plan.starts[i], min(plan.starts[i] + plan.counts[i], source.prompt_len - 1)
        if source.params.prompt_logprobs is not None and start < stop:
            targets[cu_q_lens[i] : cu_q_lens[i] + stop - start] = source.tokens[start + 1 : stop + 1]
    return targets


def _sampling(mine: Sequence[SequenceData], blank: SamplingBatch) -> SamplingBatch:
    """How the rows sample, as far as a number or two say it."""
    rows, b = len(mine), len(blank.temperature)
    floats, ints = np.zeros((6, b), np.float32), np.zeros((5, b), np.int64)
    floats[1], floats[5], ints[1] = 1.0, 1.0, -1  # off, in the rows that are padding
    floats[:, :rows] = np.frombuffer(b"".join([m.floats for m in mine]), np.float32).reshape(rows, 6).T
    ints[:4, :rows] = np.frombuffer(b"".join([m.ints for m in mine]), np.int64).reshape(rows, 4).T
    ints[4, :rows] = [m.length - m.prompt_len for m in mine]
    top_k, num_top, seed, prompt_len, position = ints.astype(np.int32)
    return blank._replace(
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        presence=floats[3],
        frequency=floats[4],
        repetition=floats[5],
        top_k=top_k,
        num_top=num_top,
        seed=seed.view(np.uint32),
        position=position,
        prompt_len=prompt_len,
    )


def _listed(mine: Sequence[SequenceData], blank: SamplingBatch) -> dict[str, np.ndarray]:
    if not any(m.listed or m.suppressed for m in mine):
        return {}
    listed, bias = np.full(blank.listed.shape, -1, np.int32), np.zeros(blank.bias.shape, np.float32)
    only = np.zeros(blank.only_listed.shape, bool)
    for i, m in enumerate(mine):
        only[i] = m.params.allowed_token_ids is not None
        entries = m.listed | dict.fromkeys(m.suppressed, -np.inf)
        listed[i, : len(entries)] = list(entries)
        bias[i, : len(entries)] = list(entries.values())
    return {"listed": listed, "bias": bias, "only_listed": only}
