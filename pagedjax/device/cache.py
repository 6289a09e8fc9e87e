"""The KV cache on the device: keys, values and token ids in blocks; an argument of the step, which
donates it.

Keys and values are tuples of arrays, one a layer, and not one stacked array: with an unrolled layer
loop XLA updates them in place. Block 0 is the trash block: padding tokens write there and no
sequence owns it, so no kernel needs a branch for invalid tokens.

Each slot also has its token id. Sampling reads the tokens of a sequence from there where penalties
need them, so the host sends no history. What moves blocks (copies, swaps) moves their token ids
with them.

A TPU stores the last axis of an array in rows of 128 and pads shorter ones. So for its kernel a row
of a page contains 128 / D tokens where D is below 128: [P, K, S D / 128, 128], the same numbers in
the same order, in as many bytes.

A draft model or head has pages of its own beside the model's, in the same blocks: block 7 holds the
same tokens in all arrays. So whatever moves or shares blocks moves and shares the drafter's part
too (docs/design/draft-models.md).

Keys and values in bfloat16 or float8 may be stored as integers of their bits, as the implementation
of attention wants it: XLA for a CPU writes a few such floats by converting the whole array to a
wider type and back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device.checks import check_shape

TOKEN_BYTES = 4  # of a slot's token id


class DraftPages(NamedTuple):
    """What a drafter on the device keeps of each slot: its own layers, and a feature of the model's
    layers.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    features: jax.Array | None  # [P, S, F] of the activations' dtype; a draft model needs none


class BoundedKeys(NamedTuple):
    """The keys of a layer whose queries select blocks (selection.py)."""

    pages: jax.Array  # as in `KVCache.k`
    # [P, K, 2, D] of the pages' dtype: of each full block, the least and the largest of its keys
    bounds: jax.Array

    @property
    def block_size(self) -> int:
        return self.pages.shape[2] * self.pages.shape[3] // self.bounds.shape[3]


class BlockSizes(NamedTuple):
    """The sizes of a layer's keys and values of one block.

    dtype: of the pages, `attention.page_dtype`.
    row: numbers in a row of a page, a multiple of head_dim.
    """

    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    row: int


Pages = OrderedDict[str, Any]  # by name, the arrays of a layer; programs take them in this order
PageShapes = Mapping[str, jax.ShapeDtypeStruct]  # the same, of one block


def kv_pages(sizes: BlockSizes) -> PageShapes:
    """Keys and values, [K, S, D] or in rows of several tokens."""
    rows = sizes.block_size * sizes.head_dim // sizes.row
    shape = jax.ShapeDtypeStruct((sizes.kv_heads, rows, sizes.row), jnp.dtype(sizes.dtype))
    return {"k": shape, "v": shape}


class KVCache(NamedTuple):
    """The arrays of all layers. A layer of one's own may keep `others` (`Block.pages`)."""

    # for each page array, [P, K, S, D] or rows of several tokens; None: a layer that keeps `others`
    k: tuple[Any, ...]
    v: tuple[Any, ...]
    tokens: jax.Array  # [P, S] int32
    draft: DraftPages | None = None
    # for each layer, its `BoundedKeys.bounds`; None for a dense layer; () without a selection
    bounds: tuple[jax.Array | None, ...] = ()
    others: Mapping[str, tuple[jax.Array | None, ...]] = {}  # by name, as k and v

    @property
    def layers(self) -> list[Pages]:
        """What each layer reads and writes."""
        columns = {"k": self.k, "bounds": self.bounds or (None,) * len(self.k), "v": self.v}
        columns |= self.others
        return [
            Pages((name, column[i]) for name, column in columns.items() if column[i] is not None)
            for i in range(len(self.k))
        ]

    def with_layers(self, layers: Sequence[Pages]) -> KVCache:
        """The cache with these `layers`."""

        def column(name: str) -> tuple[Any, ...]:
            return tuple([pages.get(name) for pages in layers])

        return self._replace(
            k=column("k"),
            v=column("v"),
            bounds=column("bounds") if self.bounds else (),
            others={name: column(name) for name in self.others},
        )


class DraftSizes(NamedTuple):
    """The sizes of `DraftPages`; letters as for the model's own pages."""

    layers: int
    kv_heads: int
    head_dim: int
    features: int  # F; 0: none
    feature_dtype: str
    row: int | None = None


class CacheSharding(NamedTuple):
    """Where a cache is.

    heads: the sharding of keys and values, by heads; None is the default device.
    copies: the sharding of what each device has whole.
    """

    heads: jax.sharding.Sharding | None = None
    copies: jax.sharding.Sharding | None = None
    devices: int = 1


def init(
    *,
    layers: int,
    blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    row: int | None = None,
    draft: DraftSizes | None = None,
    dense_layers: int | None = None,
    layer_pages: Sequence[PageShapes] | None = None,
    sharding: CacheSharding | None = None,
    zeros: Callable[..., Any] = jnp.zeros,
    pages: Callable[..., Any] | None = None,
) -> KVCache:
    """Zeros for `blocks` blocks that sequences can own and the trash block: P = blocks + 1.

    Args:
        dtype: of the pages, `attention.page_dtype`.
        row: numbers in a row of a page, a multiple of head_dim; None is head_dim, a token a row.
        draft: the sizes of a drafter's pages, whose keys and values are of `dtype` too.
        dense_layers: the first layers, which have no bounds; None: no layer has.
        layer_pages: for each layer that has pages in the cache, the shapes of its arrays for one
            block; None: keys and values.
        sharding: over the devices of a mesh, with kv_heads each; None is the default device.
        zeros: (shape, dtype, device=sharding) -> array.
        pages: the same, for the model's keys and values; None is `zeros`.

    Raises:
        ValueError: a block does not consist of whole rows of whole tokens.
    """
    row = row or head_dim
    if row % head_dim or block_size * head_dim % row:
        raise ValueError(
            f"a row of {row} numbers does not divide a block of {block_size} tokens of {head_dim} "
            "numbers"
        )
    sharding = sharding or CacheSharding()
    if layer_pages is None:
        layer_pages = [kv_pages(BlockSizes(block_size, kv_heads, head_dim, dtype, row))] * layers
    names_of_layers = [name for layer in layer_pages for name in layer]
    arrays = {}
    for name in dict.fromkeys(("k", "v", *names_of_layers)):  # each name once
        arrays[name] = tuple(
            [_zeros(layer.get(name), blocks, sharding, pages or zeros) for layer in layer_pages]
        )
    cache = KVCache(
        k=arrays.pop("k"),
        v=arrays.pop("v"),
        tokens=zeros((blocks + 1, block_size), jnp.int32, device=sharding.copies),
        others=arrays,
    )
    if dense_layers is not None:
        shape = blocks + 1, kv_heads * sharding.devices, 2, head_dim
        bounds = tuple(
            [
                zeros(shape, dtype, device=sharding.heads) if layer >= dense_layers else None
                for layer in range(layers)
            ]
        )
        cache = cache._replace(bounds=bounds)
    if draft is None:
        return cache
    return cache._replace(draft=_draft_pages(draft, blocks, block_size, dtype, sharding, zeros))


def _zeros(
    block: jax.ShapeDtypeStruct | None,
    blocks: int,
    sharding: CacheSharding,
    zeros: Callable[..., Any],
) -> Any:
    """A page array of all devices together.

    Args:
        block: the shape of one block on one device; None: the layer has no such array.
    """
    if block is None:
        return None
    heads, *sizes_of_head = block.shape
    shape = (blocks + 1, heads * sharding.devices, *sizes_of_head)
    return zeros(shape, block.dtype, device=sharding.heads)


def _draft_pages(
    draft: DraftSizes,
    blocks: int,
    block_size: int,
    dtype: str,
    sharding: CacheSharding,
    zeros: Callable[..., Any],
) -> DraftPages:
    """A drafter's part of `init`. Each device has all of a drafter's heads."""
    drafter = init(
        blocks=blocks,
        block_size=block_size,
        dtype=dtype,
        row=draft.row,
        sharding=CacheSharding(sharding.copies, sharding.copies),
        zeros=zeros,
        layers=draft.layers,
        kv_heads=draft.kv_heads,
        head_dim=draft.head_dim,
    )
    features = None
    if draft.features:
        shape = blocks + 1, block_size, draft.features
        features = zeros(shape, draft.feature_dtype, device=sharding.copies)
    return DraftPages(drafter.k, drafter.v, features)


def shapes(**sizes: Any) -> KVCache:
    """The shapes and shardings of what `init` returns for these sizes."""

    def without_memory(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=device)

    return init(**sizes, zeros=without_memory)


def block_bytes(**sizes: Any) -> int:
    """Bytes of one block in all arrays of a cache of these sizes. Allocates nothing."""
    arrays = jax.tree.leaves(shapes(blocks=0, **sizes))  # the trash block alone
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def write_tokens(tokens: jax.Array, ids: jax.Array, slots: jax.Array) -> jax.Array:
    """Put the T token ids of a step into their slots.

    Args:
        tokens: [P, S].
        ids: [T] int32.
        slots: [T] int32, block id * S + offset; padding tokens point into block 0.
    """
    check_shape("ids", ids, slots.shape)
    block_size = tokens.shape[1]
    return tokens.at[slots // block_size, slots % block_size].set(ids, mode="promise_in_bounds")


def copy(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copy whole blocks: all of `source` [n] is read before any of `target` [n] is written."""
    check_shape("target", target, source.shape)

    def copied(pages: jax.Array) -> jax.Array:
        blocks = pages.at[source].get(mode="promise_in_bounds")
        return pages.at[target].set(blocks, mode="promise_in_bounds")

    return jax.tree.map(copied, cache)


def read_blocks(cache: KVCache, ids: jax.Array) -> KVCache:
    """Whole blocks `ids` [n]: arrays [n, K, S, D] and [n, S]."""
    return jax.tree.map(lambda pages: pages.at[ids].get(mode="promise_in_bounds"), cache)


def write_blocks(cache: KVCache, ids: jax.Array, pages: KVCache) -> KVCache:
    """Put whole blocks, as `read_blocks` returns them, into `ids` [n]."""
    jax.tree.map(
        lambda old, new: check_shape("pages", new, (*ids.shape, *old.shape[1:])), cache, pages
    )
    return jax.tree.map(
        lambda old, new: old.at[ids].set(new, mode="promise_in_bounds"), cache, pages
    )
