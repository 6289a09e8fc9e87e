"""Copy parameters in memory, e.g. from a trainer, into a new model or into a running one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

from pagedjax.config import DType, EngineConfig, MeshConfig, one_of
from pagedjax.device import linear
from pagedjax.device.models import Model, assemble, matrices, packed
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.device.models.split import AXES
from pagedjax.device.placement import make_placement
from pagedjax.weights.huggingface import np_dtype
from pagedjax.weights.int8 import SCALES, with_scales
from pagedjax.weights.tree import buffers, differences, is_float, name_of, named, nested


def model_of(
    tree: Any,
    config: DecoderConfig,
    dtype: str | None = None,
    *,
    int8: bool = False,
    linear_impl: str | None = None,
) -> Model:
    """A model of copies of the parameters, on the default device; see `pagedjax.from_params`.

    Raises:
        ValueError: the tree does not fit the configuration; lists all differences.
    """
    one_of("dtype", dtype, (None, *get_args(DType)))
    _check_whole(tree)
    int8, config = int8 or config.int8, replace(config, int8=False, linear="xla")
    blank = nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32")))
    found, wanted = named(tree), named(blank)
    found = {name: x for name, x in found.items() if name not in buffers(blank)}
    _check(differences(wanted, found, cast=True), "its configuration")
    dtype = dtype or _one_dtype(found)
    place = jax.device_put(np.zeros(())).sharding
    params = {name: found[name] for name in wanted}
    if int8:
        config, params = replace(config, int8=True), dict(with_scales(params))
    config = replace(config, linear=linear_of(linear_impl, config, dtype))

    def copied(name: str, x: Any) -> jax.Array:
        return _copied(config, name, x, _kept(name, x, params, np_dtype(dtype)), place)

    return assemble(config, nested({name: copied(name, x) for name, x in params.items()}), dtype)


def linear_of(wanted: str | None, config: DecoderConfig, dtype: str, *, mesh: bool = False) -> str:
    """The implementation of a model's products: the wanted one, or the default.

    Raises:
        ValueError: the wanted one cannot serve the model.
    """
    facts = {"dtype": dtype, "weight_dtype": "int8" if config.int8 else dtype, "mesh": mesh}
    gates = config.activation if config.gated else None
    return linear.choose(wanted, jax.local_devices()[0], **facts, activation=gates)


def with_linear(model: Model, wanted: str | None) -> Model:
    """The model with its matrices in the layout of another implementation of products. The arrays
    are copies.

    Args:
        wanted: None is the default.
    """
    chosen = linear_of(wanted, model.config, model.dtype, mesh=model.placement is not None)
    if chosen == model.config.linear:
        return model
    config = replace(model.config, linear=chosen)
    params = {
        name: jax.device_put(packed(config, name, x)) for name, x in named(whole(model)).items()
    }
    return assemble(config, nested(params), model.dtype)


def on_mesh(model: Model, config: EngineConfig) -> Model:
    """The model on the devices of the configuration's mesh. Without one it stays where it is.

    Raises:
        ValueError: the model cannot be split so, or it is on another mesh already.
    """
    if config.mesh is None and config.devices is None:
        return model
    wanted = make_placement(
        model.config, config.mesh or MeshConfig(), config.devices, jax.devices()
    )
    if model.placement is None:
        c = replace(
            model.config, linear=linear_of(config.linear_impl, model.config, model.dtype, mesh=True)
        )
        wanted = replace(wanted, model=c, part=replace(wanted.part, linear=c.linear))
        params = {name: wanted.put(name.split("."), x) for name, x in named(whole(model)).items()}
        return assemble(c, nested(params), model.dtype, wanted)
    same = model.placement.devices == wanted.devices or config.devices is None
    if model.placement.sizes != wanted.sizes or not same:
        raise ValueError(
            f"the engine's mesh is {wanted}, but the model was loaded onto {model.placement}; load "
            "it again, or leave mesh and devices out"
        )
    return model


def whole(model: Model) -> dict[str, Any]:
    """A model's parameters as arrays on the host, nested by name; those of a mesh in one piece, in
    the stored order.
    """

    def one(name: str, x: jax.Array) -> np.ndarray:
        if model.placement:
            return model.placement.whole(name.split("."), x)
        return np.asarray(x)

    return nested({name: one(name, x) for name, x in named(model.params).items()})


def replaced(model: Model, tree: Any) -> nnx.State:
    """The model's state with copies of the tree's parameters, each where the old one is. Compiles
    nothing.

    If the state has a matrix in int8, the tree's matrix is rounded, unless it is already int8 and
    has scales.

    Args:
        tree: of whole parameters, also if the model is split over a mesh.

    Raises:
        ValueError: lists all differences in names, shapes and dtypes. The model is never changed.
    """
    _check_whole(tree)
    leaves, structure = jax.tree_util.tree_flatten_with_path(model.params)
    used = {name_of(keys): leaf for keys, leaf in leaves}
    computed, placement = buffers(model.params), model.placement
    stored = nnx.state(nnx.eval_shape(lambda: Decoder(model.config, model.dtype)))
    old = {name_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(stored)[0]}
    found = {name: x for name, x in named(tree).items() if name not in computed}
    found |= dict(
        with_scales(
            {name: x for name, x in found.items() if name + SCALES in old and _can_be_rounded(x)}
        )
    )
    _check(
        differences({n: x for n, x in old.items() if n not in computed}, found, cast=False),
        "the model in use",
    )

    def copied(name: str, x: jax.Array) -> jax.Array:
        if placement:
            return placement.put(name.split("."), np.array(found[name]))
        return _copied(model.config, name, found[name], x.dtype, x.sharding)

    return structure.unflatten(
        x if name in computed else copied(name, x) for name, x in used.items()
    )


def _check_whole(tree: Any) -> None:
    """Raises ValueError for parameters of a model on a mesh: their rows are in the order of the
    devices.
    """
    for name, x in named(tree).items():
        axes = getattr(getattr(x, "sharding", None), "mesh", None)
        if axes is not None and axes.axis_names == AXES:
            raise ValueError(
                f"{name} is from a model on a mesh, in the order of its devices; give whole "
                "parameters, as pagedjax.weights.trained.whole(model) returns them"
            )


def _can_be_rounded(x: Any) -> bool:
    """Whether it has values, and they are floats. Otherwise the check of differences reports it."""
    gone = isinstance(x, jax.Array) and x.is_deleted()
    return not gone and is_float(np.dtype(getattr(x, "dtype", None) or np.asarray(x).dtype))


def _kept(name: str, x: Any, params: Mapping[str, Any], dtype: np.dtype) -> np.dtype:
    """The dtype of a parameter: `dtype`, but matrices with scales, and the scales, keep their
    own.
    """
    return x.dtype if name + SCALES in params or name.endswith(SCALES) else dtype


def _copied(
    config: DecoderConfig, name: str, values: Any, dtype: np.dtype, place: jax.sharding.Sharding
) -> jax.Array:
    """A copy in the model's layout: a trainer donates its arrays to its next step, or writes into
    them.
    """
    if config.linear != "xla" and name in matrices(config):
        return jax.device_put(packed(config, name, np.array(values, dtype)), place)
    if not isinstance(values, jax.Array):
        # JAX may use a numpy array without a copy, if it is aligned
        return jax.device_put(np.array(values, dtype), place)
    if values.dtype != dtype:
        return jax.device_put(values.astype(dtype), place)
    return jax.device_put(values, place, may_alias=False)


def _one_dtype(found: Mapping[str, Any]) -> str:
    names = sorted({np.dtype(x.dtype).name for x in found.values()})
    if len(names) > 1 or names[0] not in get_args(DType):
        raise ValueError(
            f"the parameters are of {' and '.join(names)}; set the dtype of the model: "
            f"{get_args(DType)}"
        )
    return names[0]


def _check(problems: list[str], what: str) -> None:
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(
            f"the given parameters do not fit {what}; differences: {len(problems)}\n  {lines}"
        )
