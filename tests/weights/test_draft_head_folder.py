"""A draft head's folder: what is written is read again to the same bits, and every fault gives a
sentence.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from pagedjax import load_model
from pagedjax.device.models.eagle import assemble_eagle, blank_eagle, eagle_config
from pagedjax.options.config import Speculative
from pagedjax.weights.draft_model import load_draft_model, read_eagle, write_eagle
from pagedjax.weights.tree import named, nested
from tests.refusals import refused

IDS = np.array([0, 3, 4, 17, 99, 200, 319], np.int32)


@pytest.fixture(scope="module")
def head(tiny, tmp_path_factory) -> SimpleNamespace:
    """A head of random parameters for the tiny model, and its folder."""
    target = tiny.model.config
    rng = np.random.default_rng(0)
    config = eagle_config(target, len(IDS))
    shapes = named(blank_eagle(config, "float32")[1])
    values = {
        name: jax.device_put(rng.standard_normal(x.shape, np.float32)) for name, x in shapes.items()
    }
    graphdef, state = assemble_eagle(config, IDS, nested(values), "float32")
    folder = write_eagle(tmp_path_factory.mktemp("head") / "head", target, IDS.tolist(), state)
    return SimpleNamespace(
        target=target, values=values, module=nnx.merge(graphdef, state), state=state, folder=folder
    )


def copied(head: SimpleNamespace, tmp_path: Path, **changes) -> Path:
    """The folder with other entries in config.json; None removes one."""
    folder = shutil.copytree(head.folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text()) | changes
    fields = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_written_head_is_read_again_to_the_same_bits(head, dtype):
    loaded = read_eagle(head.folder, head.target, dtype)
    expected = {name: np.asarray(x).astype(dtype) for name, x in head.values.items()}
    chex.assert_trees_all_equal(dict(named(loaded.params)), expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(dict(named(loaded.params)), expected)
    module = nnx.merge(loaded.graphdef, loaded.params)
    chex.assert_trees_all_equal(module.ids[...], IDS)
    chex.assert_trees_all_equal(module.angles[...], head.module.angles[...])  # computed, not stored
    assert (loaded.dtype, loaded.features, loaded.taps) == (dtype, head.target.hidden, (0, 1, 1))


def test_a_read_head_gives_the_same_logits_and_none_to_tokens_that_it_does_not_know(head):
    loaded = read_eagle(str(head.folder), head.target, "float32")
    u = np.random.default_rng(1).standard_normal((5, head.target.hidden), np.float32)
    compute = jax.jit(
        lambda graphdef, params: nnx.merge(graphdef, params).logits(u), static_argnums=0
    )
    logits = np.asarray(compute(loaded.graphdef, loaded.params))
    expected = np.asarray(compute(loaded.graphdef, head.state))
    chex.assert_shape(logits, (5, head.target.vocab_size))
    chex.assert_type(logits, np.float32)
    chex.assert_trees_all_equal(logits, expected)
    is_known = np.isin(np.arange(head.target.vocab_size), IDS)
    assert np.isneginf(logits[:, ~is_known]).all()
    chex.assert_tree_all_finite(logits[:, is_known])


def test_the_folder_has_no_computed_arrays_and_says_what_it_is_for(head):
    stored = json.loads((head.folder / "config.json").read_text())
    assert (stored["model_type"], stored["ids"]) == ("eagle", IDS.tolist())
    assert stored["model"]["vocab_size"] == 320
    with ocp.StandardCheckpointer() as orbax:
        tree = orbax.metadata(head.folder / "params").item_metadata.tree
    assert set(jax.tree.leaves(list(tree))) == set(head.values)


def test_a_folder_that_is_not_empty_is_not_overwritten(head, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with refused("is not an empty folder"):
        write_eagle(tmp_path, head.target, IDS.tolist(), head.state)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_no_folder_is_left_if_writing_fails(head, tmp_path):
    with refused("invalid literal"):
        write_eagle(tmp_path / "head", head.target, ["x"], head.state)  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_names_the_command_that_trains_a_head(head, tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(
            FileNotFoundError,
            match=r"no draft head in .*python -m experiments\.training\.train_draft",
        ):
            read_eagle(folder, head.target, "float32")


@pytest.mark.parametrize("model_type", ["llama", None])
def test_the_folder_of_a_model_is_no_head(head, tmp_path, model_type):
    with refused(rf"model_type in .*config\.json is {model_type!r}; a head has 'eagle'"):
        read_eagle(copied(head, tmp_path, model_type=model_type), head.target, "float32")


def test_a_head_for_another_model_is_refused_with_all_differences(head):
    other_target = replace(head.target, hidden=128, kinds=head.target.kinds * 2)
    with refused(r"another model \(hidden 64, not 128; layers 2, not 4\); train one"):
        read_eagle(head.folder, other_target, "float32")


@pytest.mark.parametrize("ids", [[3, 0, 4], [0, 0, 4], [-1, 0, 4], [0, 4, 320], [[0, 4]], [], None])
def test_ids_that_are_not_ascending_tokens_are_refused(head, tmp_path, ids):
    with refused(r"ids in .*config\.json are not ascending token ids below 320"):
        read_eagle(copied(head, tmp_path, ids=ids), head.target, "float32")


def test_missing_and_unexpected_parameters_are_named(head, tmp_path):
    values = {name: x for name, x in head.values.items() if name != "fuse.weight"}
    folder = write_eagle(
        tmp_path / "head", head.target, IDS.tolist(), nested(values | {"more": jnp.zeros(3)})
    )
    message = r"params is not a head of this version; differences: 2\n  missing: fuse\.weight \(64, 192\)\n  unexpected: "
    with refused(message + r"more \(3,\)"):
        read_eagle(folder, head.target, "float32")


@pytest.mark.parametrize("damage", ["config", "params"])
def test_a_damaged_folder_is_an_error_that_names_it(head, tmp_path, damage):
    folder = copied(head, tmp_path)
    if damage == "config":
        (folder / "config.json").write_text("{")
    else:
        shutil.rmtree(folder / "params")
    with refused(rf"{damage}.* (damaged|not .*JSON)"):
        read_eagle(folder, head.target, "float32")


def test_options_choose_what_is_loaded(head, tiny, tiny_folder):
    assert load_draft_model(None, tiny) is None
    assert load_draft_model(Speculative(method="ngram"), tiny) is None
    loaded = load_draft_model(
        Speculative(method="eagle", model=str(head.folder)),
        load_model(tiny_folder, dtype="float32"),
    )
    assert loaded is not None
    chex.assert_trees_all_equal(dict(named(loaded.params)), head.values)
    for method, remedy in (("eagle", "the folder of a trained head"), ("draft", "a smaller model")):
        with refused(rf"speculative\.model is None; name {remedy}"):
            load_draft_model(Speculative(method=method), tiny)
