"""Arrays and programs on the devices of a mesh: the parts, the exchanges, and what must not
happen.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pagedjax import LLM, load_model
from pagedjax.device import memory
from pagedjax.device.batch import StepShape
from pagedjax.device.placement import fingerprint, fingerprint_of, make_placement
from pagedjax.options.config import MeshConfig
from pagedjax.weights.tree import named
from tests.refusals import refused
from tests.weights.tiny import tiny_llama

pytestmark = pytest.mark.few_optimisations

CONFIG = {
    "max_num_seqs": 24,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "block_size": 4,
    "num_blocks": 50,
}
V = 320
R = 24  # no tile of sampling has so many rows


def engine(model, **config):
    return LLM(model, progress=False, **{**CONFIG, **config}).engine


def exchanges(text: str) -> Counter[str]:
    """How often each collective is in an optimised program, by its name and the shape of what it
    returns.
    """
    kinds = (
        "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    )
    return Counter(re.findall(rf" (\w+\[[\d,]*\])\S* ({kinds})(?:-start)?\(", text))


@pytest.fixture(scope="module")
def on_one_device(one_layer):
    return engine(one_layer)


@pytest.fixture(scope="module", params=[4, pytest.param(2, marks=pytest.mark.slow)])
def on_mesh(one_layer, request):
    return engine(one_layer, mesh={"tensor": request.param})


@pytest.mark.slow
def test_a_step_exchanges_what_it_must_and_no_more(one_layer, on_mesh):
    text = on_mesh.runtime.programs[StepShape(64, R)].as_text()
    layers = one_layer.model.config.layers
    hidden = one_layer.model.config.hidden
    kinds = Counter()
    sums = Counter()
    for (shape, kind), count in exchanges(text).items():
        kinds[kind] += count
        if kind == "all-reduce":
            sums[shape] += count
    # attention and MLP of each layer, and the embedding; the last layer's for sampled tokens alone
    assert sums == {f"f32[64,{hidden}]": 2 * layers - 1, f"f32[{R},{hidden}]": 2}
    # logits of samples; what was sampled
    assert kinds["all-to-all"] == 1
    assert kinds["all-gather"] == 1
    assert set(kinds) == {"all-reduce", "all-to-all", "all-gather"}


def test_no_device_has_all_logits_and_the_cache_is_not_copied(on_one_device, on_mesh):
    shape = StepShape(64, R)
    texts = [side.runtime.programs[shape].as_text() for side in (on_one_device, on_mesh)]
    every = rf"f32\[({V},{R}|{R},{V}|{V},64|64,{V})\]"
    assert re.search(every, texts[0]), "the search finds nothing: it is blind"
    assert not re.search(every, texts[1])
    pages = on_mesh._state.cache.k[0]
    part = pages.sharding.shard_shape(pages.shape)
    stats = on_mesh.runtime.programs[shape].memory_analysis()
    assert stats.alias_size_in_bytes == memory.nbytes(on_mesh._state.cache), (
        "the cache is not updated in place"
    )
    copies = re.findall(rf"= f32\[{','.join(map(str, part))}\]\S* copy\(", texts[1])
    assert len(copies) <= len(
        re.findall(rf"= f32\[{','.join(map(str, pages.shape))}\]\S* copy\(", texts[0])
    )


def test_each_device_has_its_part_and_reports_it(on_one_device, on_mesh):
    devices = on_mesh.config.mesh.size
    for name, x in named(on_mesh.model.params).items():
        chex.assert_type(x, jnp.float32)
        assert len(x.sharding.device_set) == devices, name
        split = [i for i, size in enumerate(x.shape) if x.sharding.shard_shape(x.shape)[i] < size]
        assert bool(split) != ("norm" in name), name
    # norms and rotations are on each device
    assert on_mesh.memory.weights < 1.6 / devices * on_one_device.memory.weights
    tokens = 4 * CONFIG["block_size"]
    # two key heads on two or four devices: each device has one of them
    assert on_mesh.memory.block_bytes - tokens == (on_one_device.memory.block_bytes - tokens) // 2
    assert on_mesh.memory.cache == memory.nbytes(on_mesh._state.cache)


@pytest.mark.default_cases("mesh0-8", "mesh1-1", "mesh1-13", "mesh2-5")
@pytest.mark.parametrize("rows", [1, 5, 8, 13])
@pytest.mark.parametrize("mesh", [{"tensor": 4}, {"tensor": 3}, {"tensor": 2, "expert": 2}])
def test_rows_on_their_devices_give_what_one_device_gives(tiny, rows, mesh):
    """For any number of rows, where the vocabulary and the rows do not divide too."""
    sizes = MeshConfig(**mesh)
    model = tiny.model.config
    placement = make_placement(model, MeshConfig(tensor=sizes.size), None, jax.devices())
    if sizes.expert > 1:  # the exchange itself does not depend on experts
        grid = np.array(jax.devices()[: sizes.size]).reshape(sizes.expert, sizes.tensor)
        placement = replace(
            placement, mesh=jax.sharding.Mesh(grid, placement.mesh.axis_names), sizes=sizes
        )
    vocab = -(-V // sizes.size) * sizes.size
    logits = np.zeros((rows, vocab), np.float32)
    logits[:, :V] = np.random.default_rng(rows).normal(size=(rows, V))
    logits[:, V:] = 100.0  # padding of the vocabulary must not be read
    weights = {
        "scale": np.arange(1, rows + 1, dtype=np.float32),
        "add": np.ones((rows, 2), np.int32),
    }

    def function(x, weights):
        chex.assert_shape(x, (len(weights["scale"]), V))
        best = jnp.argmax(x * weights["scale"][:, None], axis=-1).astype(jnp.int32)
        return {"best": best, "sum": (x.sum(-1)[:, None] * weights["add"]), "most": x.max(-1)}

    spread = jax.shard_map(
        lambda x, w: placement.by_rows(function, x, w),
        mesh=placement.mesh,
        in_specs=(P(None, ("expert", "tensor")), P()),
        out_specs=P(),
        check_vma=False,
    )
    spread_out = jax.jit(spread)(logits, weights)
    expected = jax.jit(function)(logits[:, :V], weights)
    chex.assert_trees_all_equal_shapes_and_dtypes(spread_out, expected)
    chex.assert_trees_all_close(spread_out, expected, rtol=1e-5, atol=1e-5)


def test_an_engine_on_given_devices_uses_those(tiny):
    chosen = engine(tiny, mesh={"tensor": 2}, devices=[5, 3])
    assert [device.id for device in chosen.model.placement.devices] == [5, 3]
    assert chosen._state.cache.k[0].sharding.device_set == {jax.devices()[5], jax.devices()[3]}
    assert engine(tiny, devices=[6])._state.cache.tokens.sharding.device_set == {jax.devices()[6]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mesh": {"tensor": 0}}, r"mesh\.tensor is 0; it must be an integer of at least 1"),
        ({"mesh": {"tnsor": 2}}, r"unknown key mesh\.'tnsor'; did you mean 'tensor'"),
        (
            {"mesh": {"data": 2}},
            r"mesh has the axis 'data', and an engine has one cache.*start an engine for each slice",
        ),
        ({"mesh": 4}, r"mesh is 4; it must be None, or sizes by axis, such as \{'tensor': 4\}"),
        (
            {"mesh": {"tensor": 2}, "devices": [1]},
            r"devices has 1 positions, and the mesh 2 devices; make them equal",
        ),
        (
            {"devices": [1, 1]},
            r"devices is \(1, 1\); it must be different positions in jax\.devices\(\)",
        ),
        ({"devices": [0, 1]}, r"devices has 2 positions, and the mesh 1 devices"),
        (
            {"devices": [99]},
            r"the mesh needs 1 devices \(positions \(99,\)\), and there are 8 of 'cpu'; use a smaller",
        ),
        (
            {"mesh": {"tensor": 16}},
            r"the mesh has 16 devices, and the model 4 heads; use at most 4 devices",
        ),
    ],
)
def test_a_wrong_mesh_is_refused(tiny, config, message):
    with refused(message):
        engine(tiny, **config)


def test_a_model_on_a_mesh_is_used_where_it_is(tiny_folder):
    loaded = load_model(tiny_folder, mesh={"tensor": 2})
    loaded_engine = engine(loaded)
    assert loaded_engine.config.mesh == MeshConfig(tensor=2)
    assert loaded_engine.model.leaves == loaded.model.leaves, "the parameters were copied"
    with refused(r"mesh is 4 devices.*was loaded onto 2 devices.*load it again"):
        engine(loaded, mesh={"tensor": 4})


def test_a_fingerprint_differs_if_a_parameter_does_and_is_that_of_the_stored_values(
    tiny_folder, tmp_path
):
    on_two, on_one, on_four = (
        load_model(tiny_folder, mesh=mesh).model for mesh in ({"tensor": 2}, None, {"tensor": 4})
    )
    assert fingerprint(on_two) == fingerprint(on_four), "on any mesh"
    other_folder = tiny_llama(tmp_path / "other", tied=False, seed=5)
    assert fingerprint(on_two) != fingerprint(load_model(other_folder, mesh={"tensor": 2}).model)
    assert (
        fingerprint(on_one)
        == fingerprint(load_model(tiny_folder).model)
        != fingerprint(load_model(other_folder).model)
    )


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (4, 100), (2, 3, 70)])
def test_a_sample_of_an_array_depends_on_its_values_and_not_on_its_layout(shape):
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    chex.assert_equal(fingerprint_of({"x": x}), fingerprint_of({"x": jnp.asarray(x)}))
    if x.size:
        assert fingerprint_of({"x": x}) != fingerprint_of({"x": x + 1})
    if x.ndim == 2 and x.size:
        fingerprint_of({"x": x.T})  # a view that is not contiguous
