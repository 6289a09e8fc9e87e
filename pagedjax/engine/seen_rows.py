"""Rows of attention under a KV policy: which blocks each query of a step sees, as compact block
tables.

A chunk is cut where a block begins, because queries in different blocks see different blocks. While
the window reaches back to the sequence's beginning, they see the same blocks, so the first part of
a chunk is not cut:

    blocks of a sequence   0  1  2  3  4  5        window 2, block 0 kept, a chunk over all of them
    rows                   |0 1 2    |3   |4   |5  |
    tables                  0 1 2     0 2 3  0 3 4  0 4 5

So no kernel knows a policy: what a table does not list is not read. Positions in a table are not
those in the sequence, but causal order is the same, and keys were rotated when they were written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedjax.device.batch import Shapes
from pagedjax.device.extras import AttentionRows


def rows_of(
    shapes: Shapes,
    t: int,
    tables: np.ndarray,
    starts: Sequence[int],
    counts: Sequence[int],
    last: np.ndarray,
) -> AttentionRows:
    """The rows of attention of a step of T tokens.

    Args:
        tables: [B, M] the whole block tables of the rows.
        starts, counts: of each row, the first token that it computes, and how many.
        last: [R] the token that each sample follows.
    """
    assert shapes.view is not None
    size = shapes.block_size
    padded_rows = shapes.attention_rows(t)
    step_row, begin, count = _cut(starts, counts, _blocks_of_first_part(*shapes.view), size)
    num_rows = len(step_row)
    end = begin + count
    blocks, lengths = _seen_blocks(end, *shapes.view, size)
    entries = np.take_along_axis(tables[step_row], np.minimum(blocks, tables.shape[1] - 1), axis=1)

    block_tables = np.zeros((padded_rows, entries.shape[1]), np.int32)
    block_tables[:num_rows] = np.where(blocks * size < end[:, None], entries, 0)
    seq_lens = np.zeros(padded_rows, np.int32)
    seq_lens[:num_rows] = lengths
    cu_q_lens = np.zeros(padded_rows + 1, np.int32)
    cu_q_lens[1 : num_rows + 1] = np.cumsum(count)
    cu_q_lens[num_rows + 1 :] = cu_q_lens[num_rows]
    row_of_sample = np.searchsorted(cu_q_lens[1 : num_rows + 1], last, side="right")
    row_of_sample = row_of_sample.clip(max=max(num_rows - 1, 0)).astype(np.int32)
    return AttentionRows(block_tables, seq_lens, cu_q_lens, row_of_sample)


def _blocks_of_first_part(window: int, sinks: Sequence[int]) -> int:
    """Blocks at a sequence's beginning that all of its queries see at least."""
    first_hidden = next(block for block in range(len(sinks) + 1) if block not in sinks)
    return first_hidden + window


def _seen_blocks(
    end: np.ndarray, window: int, sinks: Sequence[int], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """[A, sinks + window] the blocks of a sequence that each row of attention sees, and [A] its
    tokens in them.

    First the sinks before the window, then the window's blocks.

    Args:
        end: [A] the number of tokens of the sequence up to the row's last token, which counts.
    """
    window_first = np.maximum((end - 1) // size - window + 1, 0)
    outside = np.asarray(sinks, np.int64)[None] < window_first[:, None]  # [A, sinks]
    hidden = window_first - outside.sum(1)
    blocks = hidden[:, None] + np.arange(len(sinks) + window)
    blocks[:, : len(sinks)] = np.where(outside, sinks, blocks[:, : len(sinks)])
    return blocks, end - hidden * size


def _cut(
    starts: Sequence[int], counts: Sequence[int], first_part: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row of the step, first token, number of tokens) of each row of attention.

    Args:
        first_part: what `_blocks_of_first_part` returned.
    """
    start = np.asarray(starts, np.int64)
    count = np.asarray(counts, np.int64)
    first = np.maximum(start // size, first_part - 1)
    last = np.maximum((start + count - 1) // size, first_part - 1)
    num_pieces = last - first + 1
    row = np.repeat(np.arange(len(start)), num_pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    begin = np.where(piece == 0, start[row], (first[row] + piece) * size)
    end = np.minimum((first[row] + piece + 1) * size, (start + count)[row])
    return row, begin, end - begin
