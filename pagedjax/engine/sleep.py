"""Sleep: an engine gives its device memory to others, and compiles no program again when it wakes
up.

    put_to_sleep(runtime, level, shared) -> (runtime without parameters, SleepState)
    wake_up(runtime, SleepState) -> runtime

Level 1 keeps the parameters in host memory. Level 2 drops the model's parameters, and
`update_params` gives new ones. Both keep a draft model's parameters. These stay on the devices:
tables of angles, the blanks of steps, and, with `enable_lora`, the factors of all adapter slots.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from pagedjax.device.checks import shapes_of
from pagedjax.engine.runtime import Runtime, with_leaves
from pagedjax.weights.tree import buffers, name_of

LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")


@dataclass(frozen=True, eq=False)
class HostCopy:
    """An array in host memory.

    parts: the shards that the devices of this process have, by the indices where they begin.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: dict[tuple[int, ...], np.ndarray]


class SleepState(NamedTuple):
    """What a sleeping engine remembers.

    model: copies of the model's leaves, in their order. None: the leaf is still on the devices, or
        its values are dropped.
    draft: the same of the draft model.
    cache: whether the cache is dropped.
    """

    model: tuple[HostCopy | None, ...]
    draft: tuple[HostCopy | None, ...]
    cache: bool = True


def put_to_sleep(runtime: Runtime, level: int, shared: Set[int]) -> tuple[Runtime, SleepState]:
    """Take the parameters off the devices.

    Args:
        shared: ids of arrays that others use too. The engine drops its references and does not
            delete them.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(runtime.model.params)
    stay = buffers(runtime.model.params)
    leaving = [None if name_of(path) in stay else leaf for path, leaf in leaves]
    draft = list(runtime.draft_model.leaves) if runtime.draft_model else []
    copies = [None if leaf is None or level == 2 else _host_copy(leaf) for leaf in leaving]
    asleep = SleepState(tuple(copies), tuple(map(_host_copy, draft)))
    shapes = [leaf if name_of(path) in stay else shapes_of(leaf) for path, leaf in leaves]
    sleeping = with_leaves(runtime, shapes, shapes_of(draft))
    for leaf in (*leaving, *draft):
        if leaf is not None and id(leaf) not in shared and not leaf.is_deleted():
            leaf.delete()
    return sleeping, asleep


def wake_up(runtime: Runtime, asleep: SleepState) -> Runtime:
    """Put the copies in host memory back onto the devices. Parameters that `update_params` gave in
    the meantime stay.
    """
    model = jax.tree.leaves(runtime.model.params)
    draft = runtime.draft_model.leaves if runtime.draft_model else ()
    return with_leaves(runtime, _awake(model, asleep.model), _awake(draft, asleep.draft))


def _awake(leaves: Sequence[Any], copies: Sequence[HostCopy | None]) -> list[Any]:
    """Returns the leaves, on the devices. `copies` is empty if none is left to put back."""
    return [
        leaf if copy is None or not forgotten(leaf) else _on_devices(copy)
        for leaf, copy in zip(leaves, copies or [None] * len(leaves), strict=True)
    ]


def forgotten(leaf: Any) -> bool:
    """Returns whether a leaf of parameters has a shape and no values."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _host_copy(x: jax.Array) -> HostCopy:
    parts: dict[tuple[int, ...], np.ndarray] = {}
    for shard in x.addressable_shards:
        start = _start(shard.index, x.shape)
        if start not in parts:  # several devices may have the same part
            parts[start] = np.array(shard.data)  # no view, because the device's memory is freed
    return HostCopy(x.shape, x.sharding, parts)


def _on_devices(copy: HostCopy) -> jax.Array:
    return jax.make_array_from_callback(
        copy.shape, copy.sharding, lambda index: copy.parts[_start(index, copy.shape)]
    )


def _start(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis.indices(size)[0] for axis, size in zip(index, shape, strict=True))


def check_level(level: Any) -> None:
    if type(level) is not int or level not in LEVELS:
        raise ValueError(
            f"level is {level!r}; it must be 1 (parameters move to the host) "
            "or 2 (they are dropped)"
        )


def check_tags(tags: Any) -> tuple[str, ...]:
    """Returns the parts to wake up, by vLLM's tags; None is all of them."""
    if tags is None:
        return TAGS
    tags = tuple(tags) if isinstance(tags, (list, tuple)) else (tags,)
    for tag in tags:
        if tag not in TAGS:
            raise ValueError(
                f"tags has {tag!r}; it must be None, or some of {', '.join(map(repr, TAGS))}"
            )
    return tags
