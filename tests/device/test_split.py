"""Which part of a decoder each device of a mesh has: nothing is lost, nothing is twice, and parts
fit together.
"""

from __future__ import annotations

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.device.models import split
from pagedjax.device.models.decoder import Decoder, DecoderConfig, LayerKind
from pagedjax.device.models.mlp import Experts
from pagedjax.device.models.split import PADDING
from pagedjax.device.rope import Rope
from pagedjax.options.config import MeshConfig
from pagedjax.weights.tree import named
from tests import drawn
from tests.refusals import refused

D = 4  # head_dim
H = 16  # hidden


def decoder(
    heads: int,
    kv_heads: int,
    *,
    width: int = 24,
    vocab: int = 50,
    experts=None,
    **options,
):
    kinds = (LayerKind(), LayerKind(sparse=experts is not None))
    shape = {
        "vocab_size": vocab,
        "hidden": H,
        "intermediate": width,
        "heads": heads,
        "kv_heads": kv_heads,
    }
    fixed = {
        "head_dim": D,
        "max_len": 32,
        "tied": False,
        "eps": 1e-5,
        "kinds": kinds,
        "ropes": (Rope(1e4),),
    }
    return DecoderConfig(**shape, **fixed, experts=experts, **options)


@st.composite
def models(draw) -> tuple[DecoderConfig, MeshConfig]:
    kv_heads = draw(st.integers(1, 6))
    group = draw(st.integers(1, 5))
    expert = draw(st.sampled_from([1, 1, 2, 3]))
    experts = None
    if expert > 1 or draw(st.booleans()):
        size = draw(st.integers(1, 9))
        shared = draw(st.integers(0, 9))
        experts = Experts(expert * draw(st.integers(1, 3)), 1, size, True, shared=shared)
    heads = kv_heads * group
    tensor = draw(st.integers(1, max(heads // expert, 1)))
    c = decoder(
        heads,
        kv_heads,
        width=draw(st.integers(1, 40)),
        vocab=draw(st.integers(1, 60)),
        experts=experts,
        qk_norm=draw(st.sampled_from([None, "head", "width"])),
    )
    if expert * tensor > heads:
        expert = 1
    return c, MeshConfig(tensor=tensor, expert=expert)


def stored(order: np.ndarray) -> np.ndarray:
    return order[order != PADDING]


@given(models())
def test_each_query_head_is_once_beside_its_own_key_head(model):
    c, mesh = model
    part = split.device_config(c, mesh)
    layout = split.heads(c, mesh.size)
    n = mesh.size
    chex.assert_shape([layout.queries, layout.keys], [(n * part.heads,), (n * part.kv_heads,)])
    assert sorted(stored(layout.queries)) == list(range(c.heads))
    assert {*stored(layout.keys)} == {*range(c.kv_heads)}
    queries = layout.queries.reshape(n, -1)
    keys = layout.keys.reshape(n, -1)
    group = c.heads // c.kv_heads
    heads_per_key = part.heads // part.kv_heads
    for device in range(n):
        for i, head in enumerate(queries[device]):
            if head != PADDING:
                assert keys[device, i // heads_per_key] == head // group, (
                    "attention would read another head's keys"
                )


@drawn.given(8, 60, models())
def test_parts_have_the_shapes_that_a_device_expects(model):
    c, mesh = model
    shapes, part_shapes = (
        named(nnx.eval_shape(lambda c=c: Decoder(c, "float32")))
        for c in (c, split.device_config(c, mesh))
    )
    assert shapes.keys() == part_shapes.keys()
    sizes = {"expert": mesh.expert, "tensor": mesh.tensor}
    for name, x in shapes.items():
        splits = split.split(c, mesh, name.split("."))
        for axis, size in enumerate(x.shape):
            axis_split = splits[axis] if axis < len(splits) else split.WHOLE
            laid_out = size if axis_split.order is None else len(axis_split.order)
            devices = int(np.prod([sizes[a] for a in axis_split.axes]))
            assert laid_out == part_shapes[name].shape[axis] * devices, (name, axis)
            if axis_split.order is not None:
                assert {*stored(axis_split.order)} == {*range(size)}, f"{name} lost a row or column"


def test_a_norm_over_the_width_counts_each_number_that_devices_have():
    """Three key heads on two devices: those of zeros do not count. One on two: it counts twice."""
    part = split.device_config(decoder(9, 3, qk_norm="width"), MeshConfig(tensor=2))
    assert (part.heads * 2, part.kv_heads * 2) == (12, 4)
    assert part.qk_sizes == (9 * D, 3 * D)
    part = split.device_config(decoder(4, 1, qk_norm="width"), MeshConfig(tensor=2))
    assert part.qk_sizes == (4 * D, 2 * D)


@given(models())
def test_gate_up_and_down_of_a_device_are_the_same_columns_of_the_mlp(model):
    c, mesh = model
    (up,), (_, down) = (
        split.split(c, mesh, ("blocks", "0", "mlp", x, "weight")) for x in ("up", "down")
    )
    gate_up = up.order.reshape(mesh.size, 2, -1)
    columns = down.order.reshape(mesh.size, -1)
    chex.assert_trees_all_equal(gate_up[:, 0], columns)
    chex.assert_trees_all_equal(
        gate_up[:, 1], np.where(columns == PADDING, PADDING, columns + c.intermediate)
    )
    if c.experts is None:
        return
    (up,) = split.split(c, mesh, ("blocks", "1", "mlp", "up"))
    rows, down = split.split(c, mesh, ("blocks", "1", "mlp", "down"))
    assert (rows.axes, rows.order, down.axes) == (("expert",), None, ("tensor",))
    size = c.experts.intermediate
    local_experts = c.experts.count // mesh.expert
    gate_up = up.order.reshape(mesh.expert, mesh.tensor, local_experts, 2, -1)
    columns = down.order.reshape(mesh.tensor, -1)
    for e in range(mesh.expert):
        for i in range(local_experts):
            first = (e * local_experts + i) * 2 * size
            for t in range(mesh.tensor):
                for part in (0, 1):
                    expected = np.where(
                        columns[t] == PADDING, PADDING, first + part * size + columns[t]
                    )
                    chex.assert_trees_all_equal(gate_up[e, t, i, part], expected)


def test_an_attention_and_its_padding_written_out():
    """Three key heads with three query heads each on two devices: a fourth group of zeros."""
    c = decoder(9, 3)
    mesh = MeshConfig(tensor=2)
    assert split.padding(c, mesh) == ["heads padded from 9 to 12", "key heads padded from 3 to 4"]
    (rows,) = split.split(c, mesh, ("blocks", "0", "attn", "qkv", "weight"))
    first = [0, 1, 2, 3, 4, 5, 9, 10, 12, 13]  # of device 0, in heads: queries, keys, values
    last = [6, 7, 8, -1, -1, -1, 11, -1, 14, -1]
    chex.assert_trees_all_equal(
        rows.order[::D], np.array([x * D if x >= 0 else x for x in first + last])
    )
    assert split.padding(decoder(8, 2), MeshConfig(tensor=4)) == [
        "2 devices have the same key head",
        "vocabulary padded from 50 to 52",
    ]


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (
            decoder(8, 2),
            MeshConfig(expert=2),
            r"mesh\.expert is 2, and the model has no experts; use mesh\.tensor",
        ),
        (
            decoder(8, 2, experts=Experts(6, 2, 8, True)),
            MeshConfig(expert=4),
            r"mesh\.expert is 4, and the model's 6 experts do not divide by it; use one of \[1, 2, 3, 6\]",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model, mesh, message):
    with refused(message):
        split.check(model, mesh)


def test_scales_of_int8_are_split_as_their_rows():
    c = decoder(8, 2, experts=Experts(4, 2, 8, True))
    mesh = MeshConfig(tensor=2, expert=2)
    stored = replace(c, stored="int8")
    shapes = named(nnx.eval_shape(lambda: Decoder(c, "float32")))
    for name in shapes:
        rows, *_ = split.split(c, mesh, name.split("."))
        scales, *biases = split.split(stored, mesh, f"{name}_scales".split("."))
        if (
            name.endswith(("weight", "embed", "up", "down"))
            and len(shapes[name].shape) == 2
            and "router" not in name
        ):
            assert not biases
            assert scales.axes == rows.axes, name
            jax.tree.map(chex.assert_trees_all_equal, scales.order, rows.order)
