"""A tree of parameters as a mapping of names ("blocks.0.attn.qkv.weight") to arrays; differences of
two trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def name_of(keys: Any) -> str:
    """A jax key path as a name, without the final `value` of an nnx variable."""
    parts = [_key_text(key) for key in keys]
    if len(parts) > 1 and parts[-1] == "value":
        parts = parts[:-1]
    return ".".join(parts)


def _key_text(key: Any) -> str:
    """The text of one entry of a jax key path, whose types have different attributes."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def dtype_of(path: Sequence[str], dtype: str) -> str:
    """The dtype of a parameter in a model of `dtype`. The corrections of a router are never
    rounded: they grow in training, and only their small differences matter.
    """
    return "float32" if path[-1] == "correction" else dtype


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = name.split(".")
        branch = tree
        for key in above:
            branch = branch.setdefault(key, {})
        branch[last] = value
    return tree


def named(tree: Any) -> dict[str, Any]:
    """The arrays of an nnx module or state, or of nested mappings and lists, by name. Packed
    matrices are unpacked.

    Variables of the type `Buffer` are left out: they are computed from the configuration. In plain
    mappings they look like parameters and are not left out.
    """
    import jax
    from flax import nnx

    from pagedjax.device.layers import Buffer

    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    if not isinstance(tree, nnx.State):
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {name_of(keys): leaf for keys, leaf in leaves}
    return {
        ".".join(map(str, path)): _stored_form(leaf)
        for path, leaf in nnx.to_flat_state(tree)
        if not isinstance(leaf, Buffer)
    }


def _stored_form(variable: Any) -> Any:
    """The array of an nnx variable, or the shape in its place. A matrix that an implementation has
    packed is unpacked.
    """
    from pagedjax.device.layers import Weight

    x = variable.get_value() if hasattr(variable, "get_value") else variable
    if isinstance(variable, Weight) and np.shape(x) != variable.stored_shape:
        return variable.implementation.unpack(x, variable.matrix)
    return x


def buffers(state: Any) -> frozenset[str]:
    """Names of a state's computed arrays."""
    from flax import nnx

    from pagedjax.device.layers import Buffer

    return frozenset(
        ".".join(map(str, path))
        for path, leaf in nnx.to_flat_state(state)
        if isinstance(leaf, Buffer)
    )


def differences(expected: Mapping[str, Any], arrays: Mapping[str, Any], *, cast: bool) -> list[str]:
    """A line for each parameter that is missing or unexpected, has another shape or dtype, or has
    no values.

    Args:
        expected: arrays, or objects with their shape and dtype.
        cast: allow any floating point type.
    """
    problems = [
        f"missing: {name} {tuple(x.shape)}" for name, x in expected.items() if name not in arrays
    ]
    for name, x in expected.items():
        if name in arrays:
            problems += _problems(name, x, arrays[name], cast)
    return problems + [
        f"unexpected: {name} {np.shape(x)}" for name, x in arrays.items() if name not in expected
    ]


def _problems(name: str, expected: Any, array: Any, cast: bool) -> list[str]:
    import jax

    problems = []
    dtype = np.dtype(getattr(array, "dtype", None) or np.asarray(array).dtype)
    if np.shape(array) != tuple(expected.shape):
        problems.append(
            f"shape of {name}: expected {tuple(expected.shape)}, found {np.shape(array)}"
        )
    if cast and not is_float(dtype):
        problems.append(f"dtype of {name}: expected a floating point type, found {dtype.name}")
    if not cast and dtype != expected.dtype:
        problems.append(f"dtype of {name}: expected {expected.dtype}, found {dtype.name}")
    if isinstance(array, jax.ShapeDtypeStruct):
        problems.append(f"values of {name}: none, only a shape")
    if isinstance(array, jax.Array) and array.is_deleted():
        problems.append(f"values of {name}: deleted (donated to a function?)")
    return problems


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a float of any width, including bfloat16 and float8."""
    return dtype.name.startswith(("float", "bfloat"))
