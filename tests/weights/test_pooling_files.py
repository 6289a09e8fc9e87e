"""What the files beside a model's weights say of its pooling."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax import LLM, PoolingParams
from pagedjax.weights.pooling_files import pooling_of
from tests.device.test_llama import plain_hidden
from tests.refusals import refused
from tests.weights.tiny import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:this model was not made for embeddings")
SMALL = {
    "progress": False,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "num_blocks": 32,
}
MODELS = "sentence_transformers.models"


def write(folder: Path, *kinds: str, **modes: bool) -> Path:
    """modules.json with these kinds of modules, and the configuration of a Pooling."""
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"{MODELS}.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if "Pooling" in kinds:
        pooling = folder / f"{kinds.index('Pooling')}_Pooling"
        pooling.mkdir()
        config = {"word_embedding_dimension": 64, "include_prompt": True}
        (pooling / "config.json").write_text(
            json.dumps({**config, **{f"pooling_mode_{k}": v for k, v in modes.items()}})
        )
    return folder


@pytest.mark.parametrize(
    ("kinds", "modes", "pooling"),
    [
        (("Transformer", "Pooling", "Normalize"), {"cls_token": False, "lasttoken": True}, "LAST"),
        (("Transformer", "Pooling"), {"mean_tokens": True}, "MEAN"),
        (("Transformer", "Pooling"), {"cls_token": True, "mean_tokens": False}, "CLS"),
        (("Transformer", "Pooling"), {"max_tokens": True}, "max_tokens"),
        (
            ("Transformer", "Pooling"),
            {"cls_token": True, "mean_tokens": True},
            "cls_token+mean_tokens",
        ),
        (("Transformer", "Pooling"), {}, "no mode"),
        (("Transformer", "Pooling", "Dense", "Normalize"), {"mean_tokens": True}, "Dense"),
        (("Transformer",), {}, None),
    ],
)
def test_the_pooling_of_sentence_transformers_files(tmp_path, kinds, modes, pooling):
    assert pooling_of(write(tmp_path, *kinds, **modes)) == pooling


def test_a_folder_without_such_files_says_nothing(tmp_path):
    assert pooling_of(tmp_path) is None
    assert pooling_of(tmp_path / "no" / "file.gguf") is None


@pytest.mark.parametrize("text", ["{", "{}", "[3]"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with refused(r"modules\.json .*fetch"):
        pooling_of(tmp_path)


@pytest.mark.slow
def test_a_model_pools_as_its_files_say_and_without_a_warning(tiny_folder, tmp_path):
    folder = write(
        shutil.copytree(tiny_folder, tmp_path / "model"), "Transformer", "Pooling", mean_tokens=True
    )
    llm = LLM(folder, **SMALL)
    assert llm.model.pooling == "MEAN"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_files, mean = (
            llm.embed([[5, 6, 7]], params) for params in (None, PoolingParams(pooling_type="MEAN"))
        )
    expected = plain_hidden(folder, np.array([5, 6, 7])).mean(0)
    np.testing.assert_allclose(
        by_files[0].outputs.embedding, expected / np.linalg.norm(expected), atol=2e-5
    )
    assert by_files[0].outputs == mean[0].outputs


def test_a_model_that_was_saved_without_its_head_opens(tmp_path):
    full = tiny_llama(tmp_path / "whole", layers=1)
    bare = shutil.copytree(full, tmp_path / "bare")
    tensors = load_file(full / "model.safetensors")
    save_file(
        {name.removeprefix("model."): x for name, x in tensors.items()}, bare / "model.safetensors"
    )
    outputs = [LLM(folder, **SMALL).embed([[5, 6]]) for folder in (full, bare)]
    assert outputs[0] == outputs[1]


def test_a_pooling_that_is_not_supported_is_refused(tiny_folder, tmp_path):
    folder = write(
        shutil.copytree(tiny_folder, tmp_path / "model"), "Transformer", "Pooling", max_tokens=True
    )
    llm = LLM(folder, **SMALL)
    with refused("the model's files ask for 'max_tokens', which is not supported; give pool"):
        llm.embed("abc")
