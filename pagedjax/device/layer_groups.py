"""Groups of layers with block tables of their own, for models whose layers see different windows.

Every group has the same number of layers n, so a block of the pool fits any group: it has the keys
and values of S tokens in n layers, in n arrays of the cache. Array i has layer i of each group, in
different blocks. Layers of one group have one window. Where layers of a kind do not divide by n,
the last group of the kind has fewer and leaves the rest of its blocks unused, as in vLLM's hybrid
manager of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax


@jax.tree_util.register_static
@dataclass(frozen=True)
class LayerGroups:
    """
    Attributes:
        windows: of each group, what its queries see, in tokens; None: everything. Group 0 sees the
            most: its blocks have the token ids.
        places: of each layer, its group and its array.
        size: layers of a group (n).
    """

    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    size: int


def layer_groups(windows: Sequence[int | None]) -> LayerGroups:
    """Groups for layers with these windows."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    ordered = sorted(kinds, key=lambda window: (window is not None, -(window or 0)))
    size = min(len(layers) for layers in kinds.values())
    places: dict[int, tuple[int, int]] = {}
    group_windows: list[int | None] = []
    for window in ordered:
        for i, layer in enumerate(kinds[window]):
            places[layer] = (len(group_windows) + i // size, i % size)
        group_windows += [window] * -(-len(kinds[window]) // size)
    return LayerGroups(
        tuple(group_windows), tuple(places[layer] for layer in range(len(windows))), size
    )
