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
    own = (len(keys) - 1) // size
    upper = np.zeros((len(queries), own))
    for i in range(own):
        part = keys[i * size : (i + 1) * size]
        for g, q in enumerate(queries):
            upper[g, i] = sum(
                max(a, b) for a, b in zip(q * part.min(0), q * part.max(0), strict=True)
            )
    shares = np.exp(upper - upper.max(1, keepdims=True)) if own else upper
    scores = (shares / shares.sum(1, keepdims=True)).sum(0)
    best = sorted(range(own), key=lambda i: -scores[i])[: blocks - 1]
    return {own, *best}
