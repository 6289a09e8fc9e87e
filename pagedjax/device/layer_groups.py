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
    """Which layer is in which group, and which array of the cache has its keys and values.

    Attributes:
        windows: for each group, how many tokens its queries see; None: all. Group 0 sees the most:
            its blocks have the token ids.
        places: for each layer, its group and its array.
        size: layers of a group (n).
    """

    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    size: int


def layer_groups(windows: Sequence[int | None]) -> LayerGroups:
    """Groups for layers with these windows."""
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    # no window first, then the largest windows first
    ordered = sorted(layers_of, key=lambda window: (window is not None, -(window or 0)))
    size = min(len(layers) for layers in layers_of.values())
    places: dict[int, tuple[int, int]] = {}
    group_windows: list[int | None] = []
    for window in ordered:
        layers = layers_of[window]
        for i, layer in enumerate(layers):
            places[layer] = (len(group_windows) + i // size, i % size)
        num_groups = -(-len(layers) // size)
        group_windows += [window] * num_groups
    return LayerGroups(
        tuple(group_windows), tuple(places[layer] for layer in range(len(windows))), size
    )
