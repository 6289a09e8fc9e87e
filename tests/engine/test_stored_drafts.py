"""A draft model with weights as its file stores them: which ones, their memory, and its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest

from pagedjax import LLM, load_model
from pagedjax.device.draft_model import DraftModel
from pagedjax.device.formats import restored
from pagedjax.host.types import Verified
from pagedjax.options.config import Speculative
from pagedjax.weights.convert import convert
from pagedjax.weights.draft_model import load_draft_model
from pagedjax.weights.pretrained import LoadedModel
from pagedjax.weights.tree import named
from tests.engine.runs import SMALL, greedy, sampled, steps
from tests.refusals import refused
from tests.weights.tiny import tiny_gguf, tiny_llama


class Files(NamedTuple):
    """A tiny model in floats, rounded to 4 bits, and as a GGUF file of 4 bits."""

    floats: Path
    rounded: Path
    gguf: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    root = tmp_path_factory.mktemp("stored")
    floats = tiny_llama(root / "floats")
    matrices = {"": "Q4_1", "embed": "Q8_0"}
    return Files(
        floats,
        convert(floats, root / "rounded", "safetensors", weights="int4-g32"),
        tiny_gguf(root / "model.gguf", floats, matrices=matrices),
    )


@pytest.fixture(scope="module")
def stored_target(files) -> LoadedModel:
    return load_model(files.gguf, weight_dtype="stored", linear_impl="xla")


def loaded(
    target: LoadedModel, model: Path, linear_impl: str | None = None, **options: Any
) -> DraftModel:
    speculative = Speculative(method="draft", model=str(model), **options)
    draft = load_draft_model(speculative, target, linear_impl=linear_impl)
    assert draft is not None
    return draft


def nbytes(params: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params))


# --- which weights --------------------------------------------------------------------------------


def test_beside_a_stored_model_the_numbers_of_a_file_stay_as_they_are(files, stored_target):
    draft = loaded(stored_target, files.gguf, "xla")
    widened = loaded(stored_target, files.gguf, "xla", weight_dtype="float32")
    assert isinstance(draft.layers.stored, tuple)
    assert widened.layers.stored is None
    formats = dict(draft.layers.stored)
    assert (formats["blocks.0.mlp.down.weight"], formats["embed"]) == ("q4_1", "q8_0")
    params = {name: np.asarray(x) for name, x in named(draft.params).items()}
    floats = named(widened.params)
    for name, x in floats.items():
        is_stored = name in formats
        values = restored(draft.layers.stored, params, name) if is_stored else params[name]
        chex.assert_trees_all_equal(values, np.asarray(x), custom_message=name)
    matrices = sum(floats[name].size for name in formats)
    embedding = floats["embed"].size
    # 4 bits and two halves for 32 inputs; the embedding has 8 bits and one
    file_bytes = (matrices - embedding) * 5 // 8 + embedding * 17 // 16
    assert nbytes(widened.params) - nbytes(draft.params) == 4 * matrices - file_bytes


def test_the_option_decides_and_else_the_model_and_the_file(files, tiny):
    stored = load_model(files.rounded, weight_dtype="stored", linear_impl="xla")

    def stored_as(target: LoadedModel, model: Path, **options: Any) -> Any:
        return loaded(target, model, "xla", **options).layers.stored

    assert stored_as(tiny, files.rounded) is None
    assert stored_as(stored, files.floats) is None
    assert isinstance(stored_as(stored, files.rounded), tuple)
    assert isinstance(stored_as(tiny, files.rounded, weight_dtype="stored"), tuple)
    assert stored_as(tiny, files.floats, weight_dtype="int8") == "int8"


def test_products_are_those_of_the_engine_where_they_are_of_use(files, stored_target):
    assert loaded(stored_target, files.gguf, "xla").layers.linear == "xla"
    assert loaded(stored_target, files.gguf, "cpu_int8").layers.linear == "cpu_int8"
    stored = load_model(files.rounded, weight_dtype="stored", linear_impl="xla")
    assert loaded(stored, files.floats, "cpu_int8").layers.linear == "cpu"  # the default


def test_what_a_draft_model_cannot_have_is_refused(files, tiny):
    with refused(
        "speculative.model is '.*floats': weight_dtype is 'stored', and .* has no matrix whose num"
    ):
        loaded(tiny, files.floats, weight_dtype="stored")
    with refused(
        "speculative.weight_dtype is 'bfloat16'; it must be one of None, 'int8', 'stored'"
    ):
        loaded(tiny, files.floats, weight_dtype="bfloat16")
    with refused("speculative.weight_dtype is 'int4'; it must be one of"):
        Speculative(method="draft", model="x", weight_dtype="int4")


# --- drafts ---------------------------------------------------------------------------------------


# numbers of such a draft model are tested above, stored models and draft models in engines by default
@pytest.mark.slow
@pytest.mark.parametrize("impl", ["cpu", "xla", "cpu_int8"])
def test_tokens_and_drafts_are_those_of_widened_weights(files, stored_target, impl):
    """The model drafts for itself. With the CPU kernel all drafts are accepted, stored or not,
    because both have the same bits.
    """
    prompts = [list(range(3, 20)), [7, 8, 9]]
    runs = []
    for weight_dtype in ("stored", "float32"):
        drafter = {"method": "draft", "model": str(files.gguf), "num_tokens": 3, "adaptive": False}
        speculative = drafter | {"weight_dtype": weight_dtype}
        llm = LLM(stored_target, speculative=speculative, linear_impl=impl, **SMALL)
        for i, prompt in enumerate(prompts):
            llm.engine.add(f"r{i}", prompt, greedy(12))
        results = list(steps(llm.engine))
        verified = [x for result in results for x in result.events if isinstance(x, Verified)]
        drafts = sum(sum(x.drafts) for x in verified)
        runs.append((sampled(results), drafts, sum(sum(x.accepted) for x in verified)))
    assert runs[0][0] == runs[1][0]
    assert all(drafts > 10 for _, drafts, _ in runs)
    if impl != "cpu_int8":  # it rounds the tokens of stored weights alone
        assert runs[0] == runs[1]
    if impl == "cpu":
        assert runs[0][1] == runs[0][2]
