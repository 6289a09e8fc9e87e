"""The benchmark of a Llama with random weights, at the smallest size."""

from __future__ import annotations

import json

import chex
import jax
import pytest

from experiments.bench import random_llama


def test_random_model_is_reproducible_and_has_the_shape():
    shape = random_llama.SHAPES["small"]
    model, repeated, of_other_seed = (
        random_llama.random_model(shape, "float32", seed).params for seed in (0, 0, 1)
    )
    chex.assert_trees_all_equal(model, repeated)
    chex.assert_trees_all_equal_shapes_and_dtypes(model, of_other_seed)
    chex.assert_tree_all_finite(model)
    matrices = [
        x for x in jax.tree.leaves(model) if x.ndim == 2 and x.shape[0] >= shape["hidden_size"]
    ]
    chex.assert_type(matrices, "float32")
    assert all(0.019 < float(x.std()) < 0.021 for x in matrices[:3])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(model, of_other_seed)


@pytest.mark.slow
def test_random_llama_command(tmp_path, capsys):
    out = tmp_path / "figures.json"
    sizes = [
        "--seqs",
        "3",
        "--context",
        "20",
        "--tokens",
        "4",
        "--budget",
        "16",
        "--dtype",
        "float32",
    ]
    arguments = [
        "--shape",
        "small",
        "--impls",
        "xla",
        "pallas_gpu",
        *sizes,
        "--json",
        str(out),
        "--bandwidth",
        "1e10",
    ]
    assert random_llama.main(arguments) == 1, "without a GPU, one implementation fails"
    runs = json.loads(out.read_text())["runs"]
    assert runs["xla"]["decode_step"] > 0
    assert runs["xla"]["compilations"] == 0
    assert "runs on platform 'gpu' and not on 'cpu'" in runs["pallas_gpu"]["error"]
    assert "xla" in capsys.readouterr().out


@pytest.mark.slow
def test_run_without_full_decode_step_is_an_error(capsys):
    sizes = [
        "--seqs",
        "3",
        "--context",
        "20",
        "--tokens",
        "2",
        "--budget",
        "16",
        "--dtype",
        "float32",
    ]
    assert random_llama.main(["--shape", "small", "--impls", "xla", *sizes]) == 1
    assert (
        "no step decoded all 3 sequences and nothing else; raise --tokens or --budget"
        in capsys.readouterr().err
    )
