"""Groups of layers with block tables of their own, for models whose layers see different windows.

Every group has the same number n of pages of a block, so a block of the pool fits any group: it has
n pages, in n arrays of the cache. A layer of attention has one page, with the keys and values of S
tokens. A layer that keeps something else (mixers/mixer.py) has as many pages of that size as it
needs. A layer whose heads are smaller than a page has a *part* of one, and layers of its window
have the other parts. Layers of one group have one window. Where the pages of a kind do not divide
by n, the last group of the kind has fewer and leaves the rest of its blocks unused, as in vLLM's
hybrid manager of the KV cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax


class LayerPages(NamedTuple):
    """What a layer needs of the cache.

    window: how many tokens its queries see; None: all.
    pages: of each block.
    attention: whether its pages are keys and values.
    parts: how many such layers one page has room for.
    """

    window: int | None
    pages: int = 1
    attention: bool = True
    parts: int = 1


class PagePart(NamedTuple):
    """Which part of its page a layer has: part `index` of `count` equal ones."""

    index: int
    count: int


@jax.tree_util.register_static
@dataclass(frozen=True)
class LayerGroups:
    """Which layer is in which groups, and which arrays of the cache have its pages.

    Attributes:
        windows: for each group, how many tokens its queries see; None: all. Group 0 sees the most:
            its blocks have the token ids.
        places: for each layer, the group of its first page, and the array that has all of its
            pages. Its other pages are in the groups behind that one.
        pages: for each layer, how many pages it has.
        attention: for each layer, whether its pages are keys and values.
        size: pages of a group (n).
        parts: for each layer, its part of its page; (): all layers have whole pages.
        block_size: tokens of a block; 0: all layers have whole pages.
    """

    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]
    attention: tuple[bool, ...]
    size: int
    parts: tuple[PagePart, ...] = ()
    block_size: int = 0


def layer_groups(layers: Sequence[LayerPages], block_size: int = 0) -> LayerGroups:
    """Groups for these layers.

    n is the number of pages of the rarest kind of attention: what other layers keep is given back
    after two blocks, so their unused pages are few.

    Args:
        block_size: as in `LayerGroups`.
    """
    layers_of: dict[int | None, list[int]] = {}
    for number, layer in enumerate(layers):
        layers_of.setdefault(layer.window, []).append(number)
    # no window first, then the largest windows first
    ordered = sorted(layers_of, key=lambda window: (window is not None, -(window or 0)))
    size = _fewest_pages(layers)
    places: dict[int, tuple[int, int]] = {}
    page_parts: dict[int, PagePart] = {}
    group_windows: list[int | None] = []
    for window in ordered:
        used = [0] * size  # groups of this window in which each array has a page
        free_parts: dict[int, list[tuple[tuple[int, int], PagePart]]] = {}  # by their count
        for number in layers_of[window]:
            layer = layers[number]
            free = free_parts.setdefault(layer.parts, [])
            if not free:
                array = used.index(min(used))
                place = (len(group_windows) + used[array], array)
                used[array] += layer.pages
                free += [(place, PagePart(part, layer.parts)) for part in range(layer.parts)]
            places[number], page_parts[number] = free.pop(0)
        group_windows += [window] * max(used)
    return LayerGroups(
        windows=tuple(group_windows),
        places=tuple([places[number] for number in range(len(layers))]),
        pages=tuple([layer.pages for layer in layers]),
        attention=tuple([layer.attention for layer in layers]),
        size=size,
        parts=tuple([page_parts[number] for number in range(len(layers))]) if block_size else (),
        block_size=block_size,
    )


def _fewest_pages(layers: Sequence[LayerPages]) -> int:
    """The number of pages of the window whose layers of attention have the fewest."""
    with_attention = Counter((layer.window, layer.parts) for layer in layers if layer.attention)
    pages_of_windows: Counter[int | None] = Counter()
    for (window, parts), count in with_attention.items():
        pages_of_windows[window] += -(-count // parts)
    return min(pages_of_windows.values(), default=len(layers))


def beside(layout: LayerGroups, draft: LayerGroups) -> tuple[LayerGroups, LayerGroups]:
    """The groups of a model, and those of a draft model with arrays of its own, in one numbering.

    The draft model's groups are behind the model's. Its first group is the model's first one if it
    is of attention alone, and no block of both is given back.
    """
    of_first = [
        attention
        for (group, _), attention in zip(draft.places, draft.attention, strict=True)
        if group == 0
    ]
    shared = int(all(of_first) and draft.windows[0] is None and layout.windows[0] is None)
    shift = len(layout.windows) - shared
    windows = (*layout.windows, *draft.windows[shared:])
    places = tuple(
        [(group + shift if group >= shared else 0, array) for group, array in draft.places]
    )
    return replace(layout, windows=windows), replace(draft, windows=windows, places=places)
