"""Spaces of actions and observations, with the attributes and functions of gymnax (Lange 2022)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Box(NamedTuple):
    """Arrays of one shape and dtype, with values from `low` to `high`, both included."""

    low: Any
    high: Any
    shape: tuple[int, ...]
    dtype: Any

    def sample(self, key: jax.Array) -> jax.Array:
        """A random array of this space. Each value is as likely as any other. Floats are drawn
        within a million of 0, because their whole range has no middle.
        """
        if jnp.issubdtype(self.dtype, jnp.floating):
            low = max(float(self.low), -1e6)
            high = min(float(self.high), 1e6)
            return jax.random.uniform(key, self.shape, self.dtype, low, high)
        if np.dtype(self.dtype) == np.dtype(bool):
            return jax.random.bernoulli(key, shape=self.shape)
        return jax.random.randint(key, self.shape, self.low, self.high, self.dtype)

    def contains(self, x: Any) -> jax.Array:
        """bool []: whether an array has this shape and lies within the limits."""
        if jnp.shape(x) != self.shape:
            return jnp.bool_(False)
        return jnp.all(jnp.asarray(x) >= self.low) & jnp.all(jnp.asarray(x) <= self.high)


class Dict(NamedTuple):
    """Spaces by name. A member is a named tuple, or a mapping, with these names."""

    spaces: Mapping[str, Any]

    @property
    def num_spaces(self) -> int:
        """How many spaces it has."""
        return len(self.spaces)

    def sample(self, key: jax.Array) -> OrderedDict[str, Any]:
        """A random member, as a dictionary."""
        keys = jax.random.split(key, len(self.spaces))
        pairs = zip(self.spaces.items(), keys, strict=True)
        return OrderedDict([(name, space.sample(part)) for (name, space), part in pairs])

    def contains(self, x: Any) -> jax.Array:
        """bool []: whether each part lies in its space."""
        values = x if isinstance(x, Mapping) else x._asdict()
        inside = [space.contains(values[name]) for name, space in self.spaces.items()]
        return jnp.all(jnp.stack(inside))


def space_like(value: Any) -> Box | Dict:
    """The space of all values with the shapes and dtypes of this one, which is a named tuple, a
    mapping or an array.

    Raises:
        ValueError: it is something else.
    """
    parts = value if isinstance(value, Mapping) else getattr(value, "_asdict", dict)()
    if parts:
        return Dict({name: space_like(part) for name, part in parts.items()})
    array: Any = value
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise ValueError(
            f"an observation has a {type(array).__name__}; return arrays, or a named tuple or a "
            "dictionary of arrays"
        )
    dtype = np.dtype(array.dtype)
    if dtype == np.dtype(bool):
        return Box(False, True, array.shape, dtype)
    limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return Box(limits.min, limits.max, array.shape, dtype)
