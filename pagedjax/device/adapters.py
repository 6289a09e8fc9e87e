"""Adapters of low rank (LoRA, Hu et al. 2021) on the device: stacked factors of all slots, beside
the parameters.

A layer's matrix W with an adapter in slot s gives W x + b[s]^T (a[s] x). Slot 0 has no adapter: its
factors are zeros. A step gets the slot of each token, so one batch can have rows of many adapters.
An adapter is replaced by other arrays of the same shapes, without a compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.extras import Factors
from pagedjax.device.linear import Matrix, find
from pagedjax.device.models import matrices
from pagedjax.device.models.decoder import DecoderConfig

PackLow = Callable[[Any, Matrix], Any]  # the field `pack_low` of an `Implementation`
INPUT_MULTIPLE = 16  # the inputs of `a` are padded to a multiple of a vector's numbers
RANK_MULTIPLE = 4  # ranks are padded to a multiple of it


class Part(NamedTuple):
    """Where factors of an adapter belong: to the outputs of one part of a layer's matrix."""

    layer: int
    matrix: str  # "attn.qkv"
    part: int  # of `DecoderConfig.parts`


# by part: a [r, K], and b [outputs of the part, r] times the adapter's scale; of numpy or JAX
Parts = Mapping[Part, tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as it was read (weights/adapter_files.py).

    name: what requests call it by.
    parts: its a and scaled b, in float32.
    content_hash: of `parts`.
    source: where it comes from, for people.
    """

    name: str
    parts: Parts = field(repr=False)
    content_hash: str
    source: str = ""

    @property
    def rank(self) -> int:
        """The largest of all its parts."""
        return max((len(a) for a, _ in self.parts.values()), default=0)


class Slots(NamedTuple):
    """The shapes of the factors of all layers.

    count: of adapters at once; there is one slot more, slot 0.
    rank: of an adapter, at most.
    dtype: of the factors: that of the activations.
    """

    count: int
    rank: int
    dtype: str


def shapes(config: DecoderConfig, slots: Slots) -> tuple[dict[str, tuple[Any, Any]], ...]:
    """The shapes of a [slots, R, K] and of the packed b, by layer and matrix."""
    pack_low = find(config.linear).pack_low
    return tuple(
        {
            name: _shape(matrix, len(config.parts_of(i)[name]), slots, pack_low)
            for name, matrix in layer.items()
        }
        for i, layer in enumerate(adapted(config))
    )


def adapted(config: DecoderConfig) -> tuple[dict[str, Matrix], ...]:
    """By layer, the matrices that may have adapters."""
    by_name = matrices(config)
    layers = []
    for i in range(config.layers):
        with_mixer = config.kinds[i].mixer is not None
        names = [name for name in config.parts if not (with_mixer and name.startswith("attn."))]
        layer = {name: by_name.get(f"blocks.{i}.{name}.weight") for name in names}
        layers.append({name: matrix for name, matrix in layer.items() if matrix})
    return tuple(layers)


def _shape(matrix: Matrix, parts: int, slots: Slots, pack_low: PackLow) -> tuple[Any, Any]:
    s = slots.count + 1
    r = parts * _padded(slots.rank, RANK_MULTIPLE)
    packed = pack_low(np.zeros((0, r, matrix.outputs)), matrix)  # no slots: only its shape is used
    a = jax.ShapeDtypeStruct((s, r, _padded(matrix.inputs, INPUT_MULTIPLE)), slots.dtype)
    b = jax.ShapeDtypeStruct((s, *packed.shape[1:]), slots.dtype)
    return a, b


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def blank(config: DecoderConfig, slots: Slots) -> Factors:
    """No adapter in any slot. Nothing is compiled."""
    return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes(config, slots))


def with_slot(factors: Factors, slot: int, config: DecoderConfig, parts: Parts) -> Factors:
    """The factors with an adapter in a slot, in the place of what was there. It compiles nothing.

    The old arrays stay as they are: steps that were sent may read them.
    """
    pack_low = find(config.linear).pack_low
    layers = []
    for i, (stacked, layer) in enumerate(zip(factors, adapted(config), strict=True)):
        changed = {}
        for name, (a, b) in stacked.items():
            new_a = np.array(a)  # copies on the host
            new_b = np.array(b)
            new_a[slot], unpacked_b = _slot_factors(config, Part(i, name, 0), a, b, parts)
            new_b[slot] = pack_low(unpacked_b, layer[name])[0]
            changed[name] = jax.device_put(new_a, a.sharding), jax.device_put(new_b, b.sharding)
        layers.append(changed)
    return tuple(layers)


def _slot_factors(
    config: DecoderConfig, first: Part, a: jax.Array, b: jax.Array, parts: Parts
) -> tuple[np.ndarray, np.ndarray]:
    """The factors of one adapter for a matrix: a slot's a [R, K], and its b [1, R, M] before that
    is packed.

    Args:
        first: the matrix's part 0.
        a, b: the factors of all slots.
    """
    slot_a = np.zeros(a.shape[1:], a.dtype)
    unpacked_b = np.zeros((1, a.shape[1], _ends(config, first)[-1]), b.dtype)
    for a_place, part_a, b_place, part_b in _places(config, first, a.shape[1], parts):
        slot_a[a_place] = part_a
        unpacked_b[0][b_place] = part_b
    return slot_a, unpacked_b


def factors_of_one(config: DecoderConfig, parts: Parts, dtype: str) -> Factors:
    """The factors of one adapter alone, in slot 1. JAX can differentiate them with respect to
    `parts`.
    """
    rank = max(len(a) for a, _ in parts.values())
    pack_low = find(config.linear).pack_low
    layers = []
    empty = blank(config, Slots(1, rank, dtype))
    for i, (stacked, layer) in enumerate(zip(empty, adapted(config), strict=True)):
        filled = {}
        for name, (blank_a, _) in stacked.items():
            a, unpacked_b = _in_slot_1(config, Part(i, name, 0), blank_a, parts)
            filled[name] = a, pack_low(unpacked_b, layer[name])
        layers.append(filled)
    return tuple(layers)


def _in_slot_1(
    config: DecoderConfig, first: Part, a: jax.Array, parts: Parts
) -> tuple[jax.Array, jax.Array]:
    """(a, b before it is packed) of a matrix with the factors of its parts in slot 1.

    Args:
        first: the matrix's part 0.
        a: zeros.
    """
    b = jnp.zeros((2, a.shape[1], _ends(config, first)[-1]), a.dtype)
    for a_place, part_a, b_place, part_b in _places(config, first, a.shape[1], parts):
        a = a.at[1, *a_place].set(part_a.astype(a.dtype))
        b = b.at[1, *b_place].set(part_b.astype(a.dtype))
    return a, b


def _places(
    config: DecoderConfig, first: Part, rows: int, parts: Parts
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yields (place of a, a, place of b, b^T) for each part of a matrix that has factors.

    The places are indices into a slot's a [R, K], and into its b [R, M] before that is packed.

    Args:
        first: the matrix's part 0.
        rows: R, the padded rank times the number of parts.
    """
    ends = _ends(config, first)
    rank = rows // len(ends)
    for i, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        factors = parts.get(first._replace(part=i))
        if factors is not None:
            a, b = factors
            part_rows = slice(i * rank, i * rank + len(a))
            yield (part_rows, slice(a.shape[1])), a, (part_rows, slice(start, end)), b.T


def _ends(config: DecoderConfig, place: Part) -> tuple[int, ...]:
    """Where the parts of a matrix end."""
    return config.parts_of(place.layer)[place.matrix]


def sizes_of(config: DecoderConfig, place: Part) -> tuple[int, int]:
    """(inputs, outputs) of a part of a matrix."""
    first, last = (0, *_ends(config, place))[place.part : place.part + 2]
    attended = config.of_kind(config.kinds[place.layer]).attended
    inputs = {"attn.out": attended, "mlp.down": config.intermediate}
    if config.latent and config.latent.query_rank:
        inputs["attn.q_up"] = config.latent.query_rank
    return inputs.get(place.matrix, config.hidden), last - first
