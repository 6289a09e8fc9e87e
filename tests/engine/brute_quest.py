"""Quest's selection as its paper defines it, by brute force, for tests."""

from __future__ import annotations

import numpy as np


def chosen_blocks(queries: np.ndarray, keys: np.ndarray, size: int, blocks: int) -> set[int]:
    """The blocks that the last token of a context reads, for one key head.

    Args:
        queries: [G, D] of the query heads that share the key head, times the factor of q k.
        keys: [context, D].
        size: tokens of a block.
        blocks: that are read at most.
    """
    own_block = (len(keys) - 1) // size
    parts = keys[: own_block * size].reshape(own_block, 1, size, keys.shape[1])
    bounds = np.maximum(queries * parts.min(2), queries * parts.max(2))
    upper = bounds.sum(-1).T  # [G, own]
    shares = np.exp(upper - upper.max(1, keepdims=True)) if own_block else upper
    scores = (shares / shares.sum(1, keepdims=True)).sum(0)
    best = sorted(range(own_block), key=lambda i: -scores[i])[: blocks - 1]
    return {own_block, *best}
