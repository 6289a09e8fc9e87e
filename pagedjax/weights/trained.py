"""Parameters in memory, as a trainer holds them, into a model: a new one, or one that is running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

from pagedjax.config import DType, one_of
from pagedjax.device.models import Model, assemble
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.weights.huggingface import np_dtype
from pagedjax.weights.int8 import SCALES, with_scales
from pagedjax.weights.tree import buffers, differences, is_float, name_of, named, nested


def model_of(tree: Any, config: DecoderConfig, dtype: str | None = None, *, int8: bool = False) -> Model:
    """A model of copies of the parameters, on the default device; see `pagedjax.from_params`.

    Raises:
        ValueError: everything in which the tree and the configuration differ.
    """
    one_of("dtype", dtype, (None, *get_args(DType)))
    int8, config = int8 or config.int8, replace(config, int8=False)
    blank = nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32")))
    found, wanted = named(tree), named(blank)
    found = {name: x for name, x in found.items() if name not in buffers(blank)}
    _check(differences(wanted, found, cast=True), "its configuration")
    dtype = dtype or _one_dtype(found)
    place = jax.device_put(np.zeros(())).sharding
    params = {name: found[name] for name in wanted}
    if int8:
        config, params = replace(config, int8=True), dict(with_scales(params))
    copies = {name: _copied(x, _kept(name, x, params, np_dtype(dtype)), place) for name, x in params.items()}
    return assemble(config, nested(copies), dtype)


def replaced(params: nnx.State, tree: Any) -> nnx.State:
    """The same state with copies of the tree's parameters in it, each where the old one is. Compiles nothing.

    Matrices that are in int8 there are rounded, unless the tree has them like that, with their scales.

    Raises:
        ValueError: everything in which they differ: names, shapes, dtypes. `params` stays as it is in any case.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    old = {name_of(keys): leaf for keys, leaf in leaves}
    computed = buffers(params)
    found = {name: x for name, x in named(tree).items() if name not in computed}
    found |= dict(with_scales({name: x for name, x in found.items() if name + SCALES in old and _can_be_rounded(x)}))
    _check(differences({n: x for n, x in old.items() if n not in computed}, found, cast=False), "the model in use")
    new = (x if name in computed else _copied(found[name], x.dtype, x.sharding) for name, x in old.items())
    return structure.unflatten(new)


def _can_be_rounded(x: Any) -> bool:
    """Whether it has numbers, and floats; what has none is told of with all other differences."""
    gone = isinstance(x, jax.Array) and x.is_deleted()
    return not gone and is_float(np.dtype(getattr(x, "dtype", None) or np.asarray(x).dtype))


def _kept(name: str, x: Any, params: Mapping[str, Any], dtype: np.dtype) -> np.dtype:
    """The dtype of a parameter of a model of `dtype`: matrices with scales, and those, have their own."""
    return x.dtype if name + SCALES in params or name.endswith(SCALES) else dtype


def _copied(values: Any, dtype: np.dtype, place: jax.sharding.Sharding) -> jax.Array:
    """An array of its own: a trainer donates its arrays to its next step, or writes into them."""
    if not isinstance(values, jax.Array):  # one of numpy's may be taken as it is, if it happens to be aligned
        return jax.device_put(np.array(values, dtype), place)
    if values.dtype != dtype:
        return jax.device_put(values.astype(dtype), place)
    return jax.device_put(values, place, may_alias=False)


def _one_dtype(found: Mapping[str, Any]) -> str:
    names = sorted({np.dtype(x.dtype).name for x in found.values()})
    if len(names) > 1 or names[0] not in get_args(DType):
        raise ValueError(
            f"the parameters are of {' and '.join(names)}; say which dtype the model is to have: {get_args(DType)}"
        )
    return names[0]


def _check(problems: list[str], what: str) -> None:
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"the given parameters do not fit {what}; differences: {len(problems)}\n  {lines}")
