"""An engine that sleeps: its device memory is free for others, and no program has to be compiled
again afterwards.

    put_to_sleep(runtime, level, shared) -> (runtime without parameters, Asleep)
    wake_up(runtime, Asleep) -> runtime

Level 1 keeps the parameters in host memory. Level 2 forgets those of the model, and `update_params`
gives new ones. A draft model's parameters are kept in both. What stays on the devices: tables of
angles, the blanks of steps, and, with `enable_lora`, the factors of all adapter slots.
"""

from __future__ import annotations

from collections.abc import Set
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
    """An array in host memory: the parts that the devices of this process have, by where they
    begin.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: dict[tuple[int, ...], np.ndarray]


class Asleep(NamedTuple):
    """What a sleeping engine remembers, in the order of the leaves; None where nothing is kept.

    model: of the model. None of a leaf: it is still on the devices, or its values are forgotten.
    draft: of the draft model.
    cache: whether the cache is gone.
    """

    model: tuple[HostCopy | None, ...]
    draft: tuple[HostCopy | None, ...]
    cache: bool = True


def put_to_sleep(runtime: Runtime, level: int, shared: Set[int]) -> tuple[Runtime, Asleep]:
    """Take the parameters off the devices.

    Args:
        shared: ids of arrays that others use too. The engine lets go of them and does not delete
            them.
    """
    keys, _ = jax.tree_util.tree_flatten_with_path(runtime.model.params)
    stay = buffers(runtime.model.params)
    model = [None if name_of(key) in stay else x for key, x in keys]
    draft = list(runtime.draft_model.leaves) if runtime.draft_model else []
    copies = tuple(x if x is None or level == 2 else _host_copy(x) for x in model)
    asleep = Asleep(copies, tuple(map(_host_copy, draft)))
    if level == 2:
        asleep = asleep._replace(model=(None,) * len(model))
    shapes = [x if gone is None else shapes_of(x) for (_, x), gone in zip(keys, model, strict=True)]
    after = with_leaves(runtime, shapes, shapes_of(draft))
    for x in (*model, *draft):
        if x is not None and id(x) not in shared and not x.is_deleted():
            x.delete()
    return after, asleep


def wake_up(runtime: Runtime, asleep: Asleep) -> Runtime:
    """Put what is kept back onto the devices. Parameters that `update_params` gave in the meantime
    stay.
    """
    model = jax.tree.leaves(runtime.model.params)
    draft = runtime.draft_model.leaves if runtime.draft_model else ()

    def one(here: Any, host: HostCopy | None) -> Any:
        return here if host is None or not forgotten(here) else _placed(host)

    return with_leaves(
        runtime,
        [one(*pair) for pair in zip(model, asleep.model or (None,) * len(model), strict=True)],
        [one(*pair) for pair in zip(draft, asleep.draft or (None,) * len(draft), strict=True)],
    )


def forgotten(leaf: Any) -> bool:
    """Whether a leaf of parameters has a shape and no values."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _host_copy(x: jax.Array) -> HostCopy:
    parts: dict[tuple[int, ...], np.ndarray] = {}
    for shard in x.addressable_shards:
        where = _start(shard.index, x.shape)
        if where not in parts:  # of copies, one; and no view of memory that is freed
            parts[where] = np.array(shard.data)
    return HostCopy(x.shape, x.sharding, parts)


def _placed(copy: HostCopy) -> jax.Array:
    return jax.make_array_from_callback(
        copy.shape, copy.sharding, lambda at: copy.parts[_start(at, copy.shape)]
    )


def _start(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one.indices(size)[0] for one, size in zip(index, shape, strict=True))


def check_level(level: Any) -> None:
    if type(level) is not int or level not in LEVELS:
        raise ValueError(
            f"level is {level!r}; it must be 1 (parameters move to the host) or 2 (they are dropped)"
        )


def check_tags(tags: Any) -> tuple[str, ...]:
    """What to wake up: all of it, or some of vLLM's tags."""
    found = TAGS if tags is None else tuple(tags) if isinstance(tags, (list, tuple)) else (tags,)
    if wrong := [tag for tag in found if tag not in TAGS]:
        raise ValueError(
            f"tags has {wrong[0]!r}; it must be None, or some of {', '.join(map(repr, TAGS))}"
        )
    return found
