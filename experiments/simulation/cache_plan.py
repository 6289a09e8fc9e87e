"""What a simulated engine's scheduler must know of a model's layers: groups of layers, what their
queries see, and the bytes of a block.

Where layers are not all alike, this is the engine's own plan (`engine/geometry.py`), made from the
shape alone. So a simulated engine gives back the blocks that a real one gives back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from experiments.simulation.cost import Shape
from experiments.simulation.layer_kinds import decoder_of
from pagedjax.host import kv_policies
from pagedjax.host.kv_policies import View
from pagedjax.host.reservation import table_width
from pagedjax.options.config import EngineConfig


class CachePlan(NamedTuple):
    """The blocks of a cache, and who sees them.

    views: what queries see, by group of layers; () if all of them see everything.
    block_bytes: of one block of each group, without the ids of its tokens.
    layers: pairs of arrays that one block of a group has pages in.
    shares_filling: as in `SchedulerConfig`.
    shape: of the model, whose windows and states a step's work counts.
    """

    views: tuple[View, ...]
    block_bytes: float
    layers: int
    shares_filling: bool
    shape: Shape

    @property
    def groups(self) -> int:
        """Blocks of the pool for each block of tokens."""
        return max(1, len(self.views))


def cache_plan(config: EngineConfig, shape: Shape) -> CachePlan:
    """The plan of a configuration whose max_model_len is known.

    Args:
        shape: what one device has of the model.

    Raises:
        ValueError: an option that the model's layers cannot have.
    """
    assert config.max_model_len is not None, "resolve the configuration first"
    if not shape.kinds:
        return CachePlan(
            views=kv_policies.views(config, table_width(config, config.max_model_len)),
            block_bytes=config.block_size * shape.token_bytes,
            layers=shape.layers,
            shares_filling=True,
            shape=shape,
        )
    from pagedjax.device import cache  # these import jax, but start no backend
    from pagedjax.device.models import Model
    from pagedjax.engine import geometry

    decoder = decoder_of(shape)
    no_arrays: Any = None
    model = Model(decoder, no_arrays, no_arrays, config.dtype or "bfloat16")
    geometry.check_layers(config, model)
    layouts = geometry.layers_in_groups(config, model)
    kv_dtype = config.kv_cache_dtype or model.dtype
    block = geometry.block_shape(config.block_size, model, kv_dtype, layouts=layouts)
    views = geometry.views(config, model)
    num_bytes = cache.block_bytes(**block) - cache.TOKEN_BYTES * config.block_size
    return CachePlan(
        views=views,
        block_bytes=num_bytes * layouts.groups,
        layers=block["layers"],
        shares_filling=not geometry.keeps_states(model),
        shape=shape,
    )
