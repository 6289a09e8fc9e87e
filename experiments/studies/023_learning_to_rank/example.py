"""Three requests: the authors' example of a long request that blocks two short ones."""

from __future__ import annotations

import numpy as np


def requests(rng: np.random.Generator) -> list[tuple[int, int]]:
    """The prompt and output tokens of each request, in the order of their arrival."""
    return [(1, 10), (1, 2), (1, 1)]
