"""Copy parameters in memory, e.g. from a trainer, into a new model or into a running one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

from pagedjax.device import formats, linear
from pagedjax.device.formats import is_stored, packed_matrices
from pagedjax.device.models import Model, assemble, matrices, packed
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.device.models.split import AXES
from pagedjax.device.placement import make_placement
from pagedjax.options.config import DType, EngineConfig, MeshConfig, one_of
from pagedjax.weights.huggingface import np_dtype
from pagedjax.weights.tree import (
    buffers,
    differences,
    dtype_of,
    is_float,
    name_of,
    named,
    nested,
)


def model_of(
    tree: Any,
    config: DecoderConfig,
    dtype: str | None = None,
    *,
    stored: formats.Stored = None,
    linear_impl: str | None = None,
) -> Model:
    """A model of copies of the parameters, on the default device; see `pagedjax.from_params`.

    Raises:
        ValueError: the tree does not fit the configuration; lists all differences.
    """
    one_of("dtype", dtype, (None, *get_args(DType)))
    _check_whole(tree)
    stored = stored or config.stored
    config = replace(config, stored=None, linear="xla")
    blank = nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32")))
    shapes = named(blank)
    arrays = {name: x for name, x in named(tree).items() if name not in buffers(blank)}
    _check_fit(differences(shapes, arrays, cast=True), "its configuration")
    dtype = dtype or _common_dtype(arrays)
    place = jax.device_put(np.zeros(())).sharding
    params = {name: arrays[name] for name in shapes}
    packed_arrays = dict(packed_matrices(stored, params))
    params |= packed_arrays
    config = replace(config, stored=stored)
    config = replace(config, linear=linear_of(linear_impl, config, dtype))

    def copy_of(name: str, x: Any) -> jax.Array:
        own_dtype = np_dtype(dtype_of(name.split("."), dtype))
        array_dtype = x.dtype if name in packed_arrays else own_dtype
        return _copy_of(config, name, x, array_dtype, place)

    return assemble(config, nested({name: copy_of(name, x) for name, x in params.items()}), dtype)


def linear_of(linear_impl: Any, config: DecoderConfig, dtype: str, *, mesh: bool = False) -> str:
    """The name of the implementation of a model's products.

    Args:
        linear_impl: the name that the user gave; None is the default.

    Raises:
        ValueError: `linear_impl` cannot serve the model.
    """
    return linear.choose(
        linear_impl,
        jax.local_devices()[0],
        dtype=dtype,
        weight_dtypes=formats.dtypes_of(config.stored, dtype),
        mesh=mesh,
        activation=config.activation if config.gated else None,
    )


def with_linear(model: Model, linear_impl: str | None) -> Model:
    """The model with its matrices in the layout of an implementation of products. The arrays
    are copies.

    Args:
        linear_impl: the implementation's name; None is the default.
    """
    impl = linear_of(linear_impl, model.config, model.dtype, mesh=model.placement is not None)
    if impl == model.config.linear:
        return model
    config = replace(model.config, linear=impl)
    params = {
        name: jax.device_put(packed(config, name, x)) for name, x in named(whole(model)).items()
    }
    return assemble(config, nested(params), model.dtype)


def on_mesh(model: Model, config: EngineConfig) -> Model:
    """The model on the devices of the configuration's mesh; without a mesh, `model` itself.

    Raises:
        ValueError: the model cannot be split over this mesh, or it is on another mesh already.
    """
    if config.mesh is None and config.devices is None:
        return model
    placement = make_placement(
        model.config, config.mesh or MeshConfig(), config.devices, jax.devices()
    )
    if model.placement is None:
        c = replace(
            model.config, linear=linear_of(config.linear_impl, model.config, model.dtype, mesh=True)
        )
        placement = replace(placement, model=c, part=replace(placement.part, linear=c.linear))
        params = {
            name: placement.put(name.split("."), x) for name, x in named(whole(model)).items()
        }
        return assemble(c, nested(params), model.dtype, placement)
    same_devices = model.placement.devices == placement.devices or config.devices is None
    if model.placement.sizes != placement.sizes or not same_devices:
        raise ValueError(
            f"the engine's mesh is {placement}, but the model was loaded onto {model.placement}; "
            "load it again, or leave mesh and devices out"
        )
    return model


def whole(model: Model) -> dict[str, Any]:
    """A model's parameters as arrays on the host, nested by name. Those on a mesh are joined, in
    the stored order.
    """

    def on_host(name: str, x: jax.Array) -> np.ndarray:
        if model.placement:
            return model.placement.whole(name.split("."), x)
        return np.asarray(x)

    return nested({name: on_host(name, x) for name, x in named(model.params).items()})


def replacement_state(model: Model, tree: Any) -> nnx.State:
    """The model's state with copies of `tree`'s parameters, each where the old one is. Compiles
    nothing.

    If the model has its matrices in a stored format, the tree's matrices are packed, unless they
    are in that format already.

    Args:
        tree: of whole parameters, also if the model is split over a mesh.

    Raises:
        ValueError: lists all differences in names, shapes and dtypes. The model is never changed.
    """
    _check_whole(tree)
    leaves, structure = jax.tree_util.tree_flatten_with_path(model.params)
    leaves_by_name = {name_of(keys): leaf for keys, leaf in leaves}
    computed = buffers(model.params)
    placement = model.placement
    stored = nnx.state(nnx.eval_shape(lambda: Decoder(model.config, model.dtype)))
    model_arrays = {
        name_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(stored)[0]
    }
    tree_arrays = {name: x for name, x in named(tree).items() if name not in computed}
    matrix_names = {name for name, x in model_arrays.items() if is_stored(name.split("."), x.shape)}
    floats = {n: x for n, x in tree_arrays.items() if n in matrix_names and _can_be_packed(x)}
    tree_arrays |= packed_matrices(model.config.stored, floats)
    trainable = {name: x for name, x in model_arrays.items() if name not in computed}
    _check_fit(differences(trainable, tree_arrays, cast=False), "the model in use")

    def copy_of(name: str, x: jax.Array) -> jax.Array:
        if placement:
            return placement.put(name.split("."), np.array(tree_arrays[name]))
        # an implementation may have words of another dtype than what it packs
        stored_dtype = model_arrays[name].dtype
        return _copy_of(model.config, name, tree_arrays[name], stored_dtype, x.sharding)

    return structure.unflatten(
        x if name in computed else copy_of(name, x) for name, x in leaves_by_name.items()
    )


def _check_whole(tree: Any) -> None:
    """Raises ValueError for parameters of a model on a mesh: their rows are in the order of the
    devices.
    """
    for name, x in named(tree).items():
        mesh = getattr(getattr(x, "sharding", None), "mesh", None)
        if mesh is not None and mesh.axis_names == AXES:
            raise ValueError(
                f"{name} is from a model on a mesh, in the order of its devices; give whole "
                "parameters, as pagedjax.weights.trained.whole(model) returns them"
            )


def _can_be_packed(x: Any) -> bool:
    """Whether `x` has values that are floats. If not, `differences` reports it."""
    deleted = isinstance(x, jax.Array) and x.is_deleted()
    return not deleted and is_float(np.dtype(getattr(x, "dtype", None) or np.asarray(x).dtype))


def _copy_of(
    config: DecoderConfig, name: str, values: Any, dtype: np.dtype, place: jax.sharding.Sharding
) -> jax.Array:
    """A copy in the model's layout. It must be a copy, because a trainer donates its arrays to its
    next step, or writes into them.
    """
    if config.linear != "xla" and name in matrices(config):
        return jax.device_put(packed(config, name, np.array(values, dtype)), place)
    if not isinstance(values, jax.Array):
        # JAX may use a numpy array without a copy, if it is aligned
        return jax.device_put(np.array(values, dtype), place)
    if values.dtype != dtype:
        return jax.device_put(values.astype(dtype), place)
    return jax.device_put(values, place, may_alias=False)


def _common_dtype(params: Mapping[str, Any]) -> str:
    arrays = [x for name, x in params.items() if dtype_of(name.split("."), "") == ""]
    names = sorted({np.dtype(x.dtype).name for x in arrays})
    if len(names) > 1 or names[0] not in get_args(DType):
        raise ValueError(
            f"the parameters are of {' and '.join(names)}; set the dtype of the model: "
            f"{get_args(DType)}"
        )
    return names[0]


def _check_fit(problems: list[str], target: str) -> None:
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(
            f"the given parameters do not fit {target}; differences: {len(problems)}\n  {lines}"
        )
