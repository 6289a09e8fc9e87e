"""Copy parameters in memory, e.g. from a trainer, into a new model or into a running one."""

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
        ValueError: the tree does not fit the configuration; lists all differences.
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
    """The same state with copies of the tree's parameters, each with the sharding of the old one. Compiles nothing.

    If the state has a matrix in int8, the tree's matrix is rounded, unless it is already int8 and has scales.

    Raises:
        ValueError: lists all differences in names, shapes and dtypes. `params` is never changed.
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
    """Whether it has values, and they are floats. Otherwise the check of differences reports it."""
    gone = isinstance(x, jax.Array) and x.is_deleted()
    return not gone and is_float(np.dtype(getattr(x, "dtype", None) or np.asarray(x).dtype))


def _kept(name: str, x: Any, params: Mapping[str, Any], dtype: np.dtype) -> np.dtype:
    """The dtype of a parameter: `dtype`, but matrices with scales, and the scales, keep their own."""
    return x.dtype if name + SCALES in params or name.endswith(SCALES) else dtype


def _copied(values: Any, dtype: np.dtype, place: jax.sharding.Sharding) -> jax.Array:
    """A copy: a trainer donates its arrays to its next step, or writes into them."""
    if not isinstance(values, jax.Array):  # JAX may use a numpy array without a copy, if it is aligned
        return jax.device_put(np.array(values, dtype), place)
    if values.dtype != dtype:
        return jax.device_put(values.astype(dtype), place)
    return jax.device_put(values, place, may_alias=False)


def _one_dtype(found: Mapping[str, Any]) -> str:
    names = sorted({np.dtype(x.dtype).name for x in found.values()})
    if len(names) > 1 or names[0] not in get_args(DType):
        raise ValueError(f"the parameters are of {' and '.join(names)}; set the dtype of the model: {get_args(DType)}")
    return names[0]


def _check(problems: list[str], what: str) -> None:
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"the given parameters do not fit {what}; differences: {len(problems)}\n  {lines}")
