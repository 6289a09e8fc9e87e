"""Orbax checkpoints: written by `convert` or by a trainer, restored identically, and an error for
every difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import nnx

from pagedjax import load_model
from pagedjax.weights import open_checkpoint, orbax_checkpoint
from pagedjax.weights.convert import convert
from pagedjax.weights.pretrained import read_model
from pagedjax.weights.tree import named
from tests import fresh_python
from tests.refusals import refused

assert_equal = partial(chex.assert_trees_all_equal, strict=True)  # dtypes, too


def params(folder: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    return {
        name: np.asarray(x)
        for name, x in named(
            read_model(open_checkpoint(folder), dtype, linear_impl="xla").params
        ).items()
    }


def save(folder: Path, tree, like: Path) -> Path:
    """A folder like a trainer's: the trainer's tree, and the files of a model."""
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(folder / "params", tree)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((like / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def folder(source) -> Path:
    return convert(source, source.parent / "orbax", "orbax")


# --- the written model ----------------------------------------------------------------------------


def test_values_are_rounded_once_when_written_or_restored_in_another_dtype(
    tmp_path, source, folder
):
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in params(source).items()}
    assert_equal(params(folder, "bfloat16"), rounded)
    assert_equal(
        params(convert(source, tmp_path / "b", "orbax", dtype="bfloat16"), "bfloat16"), rounded
    )


def test_one_tensor_can_be_read_by_its_path(source, folder):
    tensor = open_checkpoint(folder).tensors["blocks.1.attn.qkv.bias"]
    assert (tensor.shape, tensor.dtype, tensor.file) == ((128,), np.float32, folder / "params")
    chex.assert_trees_all_equal(tensor.read(), params(source)["blocks.1.attn.qkv.bias"])


def test_orbax_itself_reads_the_folder(source, folder):
    with ocp.StandardCheckpointer() as orbax:
        tree = orbax.restore(folder / "params")
    assert_equal({name: np.asarray(x) for name, x in named(tree).items()}, params(source))


def test_a_trainers_checkpoint_is_read_with_or_without_computed_arrays(tmp_path, source):
    state = load_model(source, linear_impl="xla").model.params
    for i, tree in enumerate(
        (state, nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.filter_state(state, nnx.Param)))
    ):
        assert_equal(params(save(tmp_path / str(i), tree, source)), params(source))


@pytest.mark.slow
def test_parameters_are_restored_with_the_given_sharding(folder):
    """Two devices need another process."""
    program = f"""
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pagedjax.weights import architectures
from pagedjax.weights.pretrained import read_model
from pagedjax.weights import open_checkpoint
from pagedjax.weights.load import restore_params
opened = open_checkpoint({str(folder)!r})
family = architectures.FAMILIES["llama"]
table = family.param_table(family.from_hf(opened.config))
mesh = Mesh(jax.devices(), "x")
params = restore_params(opened, table, "bfloat16",
                        sharding=lambda name, shape: NamedSharding(mesh, P("x" if len(shape) == 2 else None)))
embed, norm = params["embed"], params["norm"]["weight"]
print([s.data.shape for s in embed.addressable_shards], [s.data.shape for s in norm.addressable_shards], embed.dtype)
print(float(embed.astype("float32").sum()))
"""
    printed = fresh_python.output_of(program, JAX_NUM_CPU_DEVICES="2", JAX_PLATFORMS="cpu")
    shapes, total = printed.splitlines()
    assert shapes == "[(160, 64), (160, 64)] [(64,), (64,)] bfloat16"
    assert float(total) == float(
        jax.numpy.asarray(params(folder, "bfloat16")["embed"]).astype("float32").sum()
    )


# --- errors ---------------------------------------------------------------------------------------


def test_one_error_lists_every_difference_and_the_folder(tmp_path, source):
    tree = nnx.to_pure_dict(load_model(source, linear_impl="xla").model.params)
    del tree["norm"]
    tree["embed"] = tree["embed"][:300]
    folder = save(tmp_path / "t", tree, source)
    message = (
        rf"(?s)^{folder} does not fit the llama model its config describes"
        r"(?=.*shape of embed: expected \(320, 64\), found \(300, 64\) in params)"
        r"(?=.*missing: norm.weight \(64,\))"
    )
    with refused(message):
        load_model(folder)


def test_another_orbax_folder_is_refused_with_what_is_missing(tmp_path, source, folder):
    with pytest.raises(
        FileNotFoundError, match=r"params is an Orbax checkpoint without params/ .*from_params"
    ):
        open_checkpoint(folder / "params")
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "run" / "items", {"a": np.ones(3)})
    with pytest.raises(
        FileNotFoundError,
        match=r"run is an Orbax .* without params/ \(Orbax's files are in items/\)",
    ):
        open_checkpoint(tmp_path / "run")
    (tmp_path / "run" / "items").rename(tmp_path / "run" / "params")
    with pytest.raises(
        FileNotFoundError,
        match=r"run is an Orbax checkpoint without config\.json; a model's folder",
    ):
        open_checkpoint(tmp_path / "run")


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_truncated_data_names_the_parameters_and_the_folder(tmp_path, folder):
    broken = copy(folder, tmp_path / "broken")
    largest = max(
        (file for file in broken.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    opened = open_checkpoint(broken)
    with refused(rf"^{broken}/params is damaged or incomplete; parameters: \d+") as caught:
        read_model(opened, "float32")
    name = str(caught.value).split("unreadable: ")[1].split()[0]
    with refused(f"unreadable: {name}"):
        opened.tensors[name].read()


def test_a_read_that_ends_after_orbax_closed_its_loop_prints_nothing(monkeypatch):
    """TensorStore notifies a closed event loop. Other messages are printed as before."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: heard.append(str(about.exc_value)))

    async def wait(read):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(awaited(read))), 0.01)

    async def awaited(read):
        await read

    class Loud:
        def __del__(self):
            raise ValueError("heard")

    for quiet in (contextlib.nullcontext, orbax_checkpoint._quiet):
        promise, read = tensorstore.Promise.new()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(wait(read))
        loop.close()
        with quiet():
            promise.set_result(1)
            while not read.done():
                time.sleep(0.001)
            time.sleep(0.05)
            Loud()
        del read, promise
    assert heard == ["Event loop is closed", "heard", "heard"]


@pytest.mark.default_cases("0.5-manifest.ocdbt", "None-_METADATA")
@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
@pytest.mark.parametrize("share", [0.5, None])
def test_damaged_metadata_is_named(tmp_path, folder, name, share):
    broken = copy(folder, tmp_path / "broken")
    file = broken / "params" / name
    file.write_bytes(
        file.read_bytes()[: int(file.stat().st_size * share)]
    ) if share else file.unlink()
    with refused(rf"{broken}/params .*(cannot|can) be read"):
        open_checkpoint(broken)
