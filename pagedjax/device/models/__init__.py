"""Model families: each one is a configuration of the same decoder (decoder.py).
`weights/architectures.py` lists them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.device import formats
from pagedjax.device.layers import Weight
from pagedjax.device.linear import Matrix, find
from pagedjax.device.models.decoder import Decoder, DecoderConfig, angle_tables

if TYPE_CHECKING:
    from pagedjax.device.placement import Placement


class Model(NamedTuple):
    """A model after `nnx.split`; the step merges it inside the jit.

    config: of the whole model.
    graphdef: of what one device runs: the whole model, or its part.
    dtype: of the activations, and of parameters that are not in a stored format.
    placement: on which devices the parameters are, in parts; None: they are whole, on one device.
    """

    config: DecoderConfig
    graphdef: nnx.GraphDef
    params: Any
    dtype: str
    placement: Placement | None = None

    @property
    def part(self) -> DecoderConfig:
        """The shape of what one device has."""
        return self.placement.part if self.placement else self.config

    @property
    def weight_dtype(self) -> str:
        return formats.weight_dtype_of(self.config.stored) or self.dtype

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The parameters for a step, as a flat tuple. To flatten nnx's containers in each call
        would take longer than the scheduler does.
        """
        return tuple(jax.tree.leaves(self.params))


def assemble(
    config: DecoderConfig, params: dict[str, Any], dtype: str, placement: Placement | None = None
) -> Model:
    """A model from parameters nested by `ParamSource.path`. Arrays that the configuration
    determines are added.

    Args:
        placement: where the parameters are, if it is a mesh.
    """
    part = placement.part if placement else config
    angles = angle_tables(config)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(part, dtype)))
    angles = placement.put(("angles",), angles) if placement else jnp.asarray(angles)
    nnx.replace_by_pure_dict(state, _numbered({**params, "angles": angles}))
    return Model(config, graphdef, state, dtype, placement)


def for_context(model: Model, length: int) -> Model:
    """The model with the rotations for texts of at most `length` tokens: "longrope" turns short
    texts by other angles. Another model is returned as it is.
    """
    if not any(rope.depends_on_context for rope in model.config.ropes):
        return model
    angles = angle_tables(model.config, length)
    placement = model.placement
    angles = placement.put(("angles",), angles) if placement else jnp.asarray(angles)
    params = jax.tree.map(lambda x: x, model.params)  # other variables of the same arrays
    nnx.replace_by_pure_dict(params, {"angles": angles})
    return model._replace(params=params)


@cache
def matrices(config: DecoderConfig) -> dict[str, Matrix]:
    """The matrices of a model's products, by the names of their parameters."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32")))
    leaves = nnx.to_flat_state(state)
    return {
        ".".join(map(str, path)): leaf.matrix for path, leaf in leaves if isinstance(leaf, Weight)
    }


def packed(config: DecoderConfig, name: str, stored: np.ndarray) -> np.ndarray:
    """A parameter in the layout in which `config.linear` has it; `stored` is how checkpoints and
    trainers have it.
    """
    matrix = matrices(config).get(name)
    return stored if matrix is None else find(config.linear).pack(stored, matrix)


def _numbered(tree: Any) -> Any:
    """The tree with each key "0", "1", ... as an integer: nnx.List has integer keys, and paths of
    parameters have strings.
    """
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: _numbered(value) for key, value in tree.items()}
