"""The decoder of a mesh has what the simulator counts: its arrays, its cache and the sums in its
program.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from experiments.simulation.collectives import Exchanged, exchanges
from experiments.simulation.cost import part, shape_of
from pagedjax.device import attention, cache
from pagedjax.device.batch import Batch
from pagedjax.device.models import split
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.options.config import MeshConfig
from pagedjax.weights.architectures import FAMILIES, normalised

LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MESHES = [
    (LLAMA, MeshConfig(tensor=2)),
    (LLAMA, MeshConfig(tensor=4)),
    (LLAMA, MeshConfig(tensor=5)),
    (MIXTRAL, MeshConfig(tensor=2, expert=2)),
    (MIXTRAL, MeshConfig(expert=4)),
]


def one_device(config: dict[str, Any], mesh: MeshConfig) -> DecoderConfig:
    return split.device_config(
        FAMILIES[config["model_type"]].from_hf(normalised(config, "a test")), mesh
    )


@pytest.mark.parametrize(("config", "mesh"), MESHES)
def test_part_has_the_matrices_of_the_decoder_on_one_device(config, mesh):
    state = nnx.eval_shape(
        lambda: nnx.state(Decoder(one_device(config, mesh), "bfloat16"), nnx.Param)
    )
    matrices = [array for array in jax.tree.leaves(state) if array.ndim > 1]
    assert part(shape_of(config), mesh).total_bytes == sum(
        2 * math.prod(array.shape) for array in matrices
    )


@pytest.mark.parametrize(("config", "mesh"), MESHES)
def test_token_takes_the_bytes_of_the_cache_on_one_device(config, mesh):
    device_config = one_device(config, mesh)
    blocks = 7
    size = 4
    sizes = {
        "layers": device_config.layers,
        "blocks": blocks,
        "kv_heads": device_config.kv_heads,
        "head_dim": device_config.head_dim,
    }
    pages = jax.eval_shape(lambda: cache.init(block_size=size, dtype="bfloat16", **sizes))
    stored = sum(2 * math.prod(array.shape) for array in (*pages.k, *pages.v))
    # the trash block too
    assert part(shape_of(config), mesh).token_bytes * (blocks + 1) * size == stored


def sums(jaxpr: Any) -> Iterator[tuple[int, str]]:
    """Numbers and dtype of every array that is summed over devices, in a program and those it
    calls.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("psum"):
            yield from ((math.prod(x.aval.shape), str(x.aval.dtype)) for x in equation.invars)
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sums(inner)


@pytest.mark.parametrize(("config", "mesh"), MESHES)
def test_summed_bytes_are_those_of_the_decoders_program(config, mesh):
    device_config = one_device(config, mesh)
    tokens = 5
    pages = cache.init(
        layers=device_config.layers,
        blocks=3,
        block_size=4,
        kv_heads=device_config.kv_heads,
        head_dim=device_config.head_dim,
        dtype="bfloat16",
    )
    per_token = np.zeros(tokens, np.int32)
    zero = np.zeros(1, np.int32)
    ends = np.array([0, tokens], np.int32)
    batch: Any = Batch(
        per_token,
        per_token,
        per_token,
        np.zeros((1, 2), np.int32),
        zero + tokens,
        ends,
        zero,
        zero,
        per_token,
        sampling=None,
    )

    def logits(ids: jax.Array) -> jax.Array:
        model = Decoder(device_config, "bfloat16")
        attend = attention.attend("xla", device_config.attn_scale)
        return model.logits(model.hidden(pages, batch._replace(tokens=ids), attend)[1])

    devices = AbstractMesh((mesh.expert, mesh.tensor), split.AXES)
    program = jax.shard_map(logits, mesh=devices, in_specs=P(), out_specs=P(), check_vma=False)
    counts = Counter(sums(jax.make_jaxpr(program)(batch.tokens).jaxpr))
    width = {"float32": 4, "bfloat16": 2}
    sizes = Exchanged(
        device_config.layers, device_config.hidden, device_config.vocab_size, activation_bytes=2
    )
    counted = [x for x in exchanges(sizes, mesh.size, tokens, 1) if x.kind == "all-reduce"]
    assert Counter({x.bytes: x.times for x in counted}) == Counter(
        {numbers * width[dtype]: times for (numbers, dtype), times in counts.items()}
    )
