"""A model on the devices of a mesh: each has a part of every large array, and all run the same
program (SPMD).

The whole step runs inside one `jax.shard_map`. A device sees its own heads, its own part of the
cache and its own rows of the vocabulary (models/split.py), so kernels and the scheduler know
nothing of a mesh. Devices exchange

    the sums of attention and MLP     two all-reduces a layer, and one for the embedding
    the logits                        one all-to-all by rows: a device gets whole rows and samples them
    the sampled tokens                one all-gather

Everything else has a copy on each device: norms, the batch, token ids, a drafter's parameters and
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pagedjax.device.cache import CacheSharding, KVCache
from pagedjax.device.models import split
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.split import AXES, PADDING
from pagedjax.options.config import MeshConfig

FINGERPRINT_VALUES = 64  # of a row, which a fingerprint reads
RowFunction = Callable[[jax.Array, Any], Any]


@dataclass(frozen=True)
class Placement:
    """Which device has what of a model.

    mesh: of the axes `expert` and `tensor`.
    sizes: of the mesh.
    model: the shape of the whole model.
    part: the shape of one device's part.
    samples: by name, some bytes of each stored parameter that was put on the devices: equal bytes
        mean equal files.
    """

    mesh: Mesh
    sizes: MeshConfig
    model: DecoderConfig
    part: DecoderConfig
    samples: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        """What each device has, for people."""
        part = self.part
        kinds = sorted({device.device_kind for device in self.mesh.devices.flat})
        has = (
            f"{part.heads} heads, {part.kv_heads} key heads, MLP width {part.intermediate}, "
            f"{part.vocab_size} tokens"
        )
        if part.experts:
            experts = part.experts.count // part.experts.devices
            has += f", {experts} experts of width {part.experts.intermediate}"
        notes = "".join(f"; {note}" for note in split.padding(self.model, self.sizes))
        plural = "s" * (self.sizes.size > 1)
        names = f"{', '.join(kinds)}; {', '.join(str(device.id) for device in self.devices)}"
        return f"{self.sizes.size} device{plural} ({names}), each with {has}{notes}"

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    def sharding(self, *axes: Any) -> NamedSharding:
        """A sharding by the axes of the mesh that split each dimension. Without axes it is a copy
        on each device.
        """
        return NamedSharding(self.mesh, P(*axes))

    # arrays ---------------------------------------------------------------------------------------

    def put(self, path: Sequence[str], stored: np.ndarray) -> jax.Array:
        """A stored parameter on the devices, with rows and columns in the order of the devices."""
        splits = self._splits(path, stored.ndim)
        self.samples[".".join(path)] = _sample(stored)

        def part(indices: Any) -> np.ndarray:  # a slice of each dimension
            values = stored
            for axis, (dim, index) in enumerate(zip(splits, indices, strict=True)):
                values = _take(values, dim.order, index, axis)
            return np.ascontiguousarray(values)

        shape, place = self.layout(path, stored.shape)
        return jax.make_array_from_callback(shape, place, part)

    def copies(self, tree: Any) -> Any:
        """Arrays, whole on each device; every process has the same ones."""

        def put(x: Any) -> jax.Array:
            return jax.make_array_from_callback(x.shape, self.sharding(), np.asarray(x).__getitem__)

        return jax.tree.map(put, tree)

    def whole(self, path: Sequence[str], placed: jax.Array) -> np.ndarray:
        """The inverse of `put`: the stored parameter, on the host."""
        values = np.asarray(placed)
        for axis, dim in enumerate(self._splits(path, placed.ndim)):
            if dim.order is not None:
                positions = np.flatnonzero(dim.order != PADDING)
                places = np.empty(dim.order.max() + 1, np.intp)
                # several devices may have copies of a key head: the last copy is taken
                places[dim.order[positions]] = positions
                values = np.take(values, places, axis=axis)
        return values

    def layout(
        self, path: Sequence[str], stored: Sequence[int]
    ) -> tuple[tuple[int, ...], NamedSharding]:
        """The shape of a parameter with its padding, and its sharding.

        Args:
            stored: its shape without a mesh.
        """
        splits = self._splits(path, len(stored))
        shape = (
            size if dim.order is None else len(dim.order)
            for dim, size in zip(splits, stored, strict=True)
        )
        return tuple(shape), self.sharding(*(dim.axes or None for dim in splits))

    def _splits(self, path: Sequence[str], ndim: int) -> tuple[split.Split, ...]:
        splits = split.split(self.model, self.sizes, path)
        return (*splits, *(split.WHOLE,) * (ndim - len(splits)))

    @property
    def cache_sharding(self) -> CacheSharding:
        """Where a cache is: each device has the pages of its heads, and a copy of everything
        else.
        """
        return CacheSharding(self.sharding(None, AXES), self.sharding(), self.sizes.size)

    # programs -------------------------------------------------------------------------------------

    def mapped(
        self, program: Callable[..., Any], leaves: Sequence[jax.Array]
    ) -> Callable[..., Any]:
        """program(leaves, cache, batch) -> (cache, output) as what each device does with its part.

        Args:
            leaves: the parameters, or their shapes with shardings.
        """
        heads: Any = P(None, AXES)
        copies: Any = P()
        cache = KVCache(k=heads, v=heads, tokens=copies, draft=copies, bounds=heads, others=heads)
        shardings = cast("list[NamedSharding]", [x.sharding for x in leaves])
        specs = tuple(sharding.spec for sharding in shardings), cache, copies
        # check_vma is False because loops of attention carry values that are equal on all devices
        # beside values that are not
        return jax.shard_map(
            program, mesh=self.mesh, in_specs=specs, out_specs=(cache, copies), check_vma=False
        )

    def by_rows(self, function: RowFunction, logits: jax.Array, rows: Any) -> Any:
        """function([b, V], arrays [b, ...]) -> arrays [b, ...]: each device computes its share b of
        all R rows.

        Called inside of `mapped`. A device never has more than its rows' logits.

        Args:
            logits: [R, V / devices] of this device's part of the vocabulary.
            rows: arrays [R, ...], the same on each device.

        Returns:
            arrays [R, ...] of 32-bit numbers, the same on each device.
        """
        count = len(logits)
        share = -(-count // self.sizes.size)
        extra = share * self.sizes.size - count

        def share_of(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, extra), *((0, 0),) * (x.ndim - 1)), mode="edge")
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXES) * share, share)

        padded = jnp.pad(logits, ((0, extra), (0, 0)))
        # [R, V / devices] -> [b, V]
        logits = jax.lax.all_to_all(padded, AXES, split_axis=0, concat_axis=1, tiled=True)
        arrays, tree = jax.tree.flatten(
            function(logits[:, : self.model.vocab_size], jax.tree.map(share_of, rows))
        )
        # All results are one array of bits. So there is one exchange, and no compiler has to
        # combine several.
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32).reshape(share, -1) for x in arrays]
        gathered = jax.lax.all_gather(jnp.concatenate(bits, axis=1), AXES, tiled=True)[:count]
        parts = jnp.split(gathered, np.cumsum([x.shape[1] for x in bits])[:-1], axis=1)
        results = [
            jax.lax.bitcast_convert_type(part, x.dtype).reshape(count, *x.shape[1:])
            for part, x in zip(parts, arrays, strict=True)
        ]
        return tree.unflatten(results)


def whole_rows(function: RowFunction, logits: jax.Array, rows: Any) -> Any:
    """`Placement.by_rows` of one device."""
    return function(logits, rows)


def make_placement(
    config: DecoderConfig,
    sizes: MeshConfig,
    positions: Sequence[int] | None,
    devices: Sequence[Any],
) -> Placement:
    """The placement of a model on a mesh of these sizes.

    Args:
        positions: of the devices to use, in `devices`; None: the first ones are used.

    Raises:
        ValueError: there are not so many devices, or the model cannot be split over them.
    """
    split.check(config, sizes)
    positions = range(sizes.size) if positions is None else positions
    if max(positions) >= len(devices):
        platform = devices[0].platform
        remedy = "; for a test, JAX_NUM_CPU_DEVICES=N makes N of a CPU"
        raise ValueError(
            f"the mesh needs {sizes.size} devices ({_positions(positions)}), and there are "
            f"{len(devices)} of {platform!r}; use a smaller "
            f"mesh{remedy if platform == 'cpu' else ''}"
        )
    unused_processes = {device.process_index for device in devices}
    unused_processes -= {devices[i].process_index for i in positions}
    # in a single process, devices of other processes are those of a topology that is not here
    if unused_processes and jax.process_count() > 1:
        process = min(unused_processes)
        raise ValueError(
            f"the mesh has {sizes.size} of {len(devices)} devices, and process {process} has "
            "none of them; use a mesh with devices of every process"
        )
    shape = sizes.expert, sizes.tensor
    mesh = Mesh(np.array([devices[i] for i in positions], object).reshape(shape), AXES)
    return Placement(mesh, sizes, config, split.device_config(config, sizes))


def fingerprint(model: Any) -> str:
    """A short text that differs if the parameters differ in the values that it reads: some of each
    parameter. It is the same in all processes.
    """
    return _hash(model.placement.samples) if model.placement else fingerprint_of(model.params)


def fingerprint_of(params: Any) -> str:
    """The `fingerprint` of parameters that are whole on one device."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return _hash({jax.tree_util.keystr(path): _sample(np.asarray(x)) for path, x in leaves})


def _hash(samples: dict[str, bytes]) -> str:
    return blake2b(repr(sorted(samples.items())).encode(), digest_size=16).hexdigest()


def _sample(x: np.ndarray) -> bytes:
    """The bytes of the first values of the first row and of the last row."""
    if x.ndim == 0 or not x.size:
        return x.tobytes()
    return b"".join(
        np.ascontiguousarray(x[(row,) * (x.ndim - 1)][:FINGERPRINT_VALUES]).tobytes()
        for row in (0, -1)
    )


def _positions(positions: Sequence[int]) -> str:
    return (
        f"positions {positions[0]} to {positions[-1]}"
        if isinstance(positions, range)
        else f"positions {positions}"
    )


def _take(x: np.ndarray, order: np.ndarray | None, index: slice, axis: int) -> np.ndarray:
    """The part `index` of an axis of x, after that axis was brought into this order. PADDING gives
    zeros.

    Args:
        order: for each place, its index in x, or PADDING; None: as x is.
    """
    if order is None:
        return x[(slice(None),) * axis + (index,)]
    places = order[index]
    first = places[0]
    count = len(places)
    if first != PADDING and np.array_equal(places, np.arange(first, first + count)):
        # a view, without a copy
        return x[(slice(None),) * axis + (slice(first, first + count),)]
    values = np.take(x, np.maximum(places, 0), axis=axis)
    values[(slice(None),) * axis + (places == PADDING,)] = 0
    return values
