"""An engine on a mesh makes the recordings of an engine on one device, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from pagedjax import SamplingParams, from_params, load_model
from pagedjax.options.config import MeshConfig
from pagedjax.weights.convert import convert
from pagedjax.weights.trained import whole
from pagedjax.weights.tree import named
from tests.engine.runs import greedy, small_llm, token_ids
from tests.engine.test_batch_invariance import model_of
from tests.engine.test_lookahead import CONFIG, play, tokens
from tests.refusals import refused
from tests.weights.tiny import tiny_llama

# 8 query heads with 4 or 2 key heads, and SmolLM2's 9 with 3
HEADS = {"8/4": (8, 4), "8/2": (8, 2), "9/3": (9, 3)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    # a vocabulary and a width that some meshes do not divide
    return {name: save_model(root / name.replace("/", "-"), name) for name in HEADS}


def save_model(folder: Path, name: str, seed: int = 0) -> Path:
    heads, kv_heads = HEADS[name]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 8, "intermediate": 90}
    return tiny_llama(folder, **sizes, tied=False, seed=seed)


def compare_runs(
    folder,
    tmp_path,
    *,
    mesh: dict[str, int],
    seeds: tuple[int, ...] = (0, 1),
    devices: list[int] | None = None,
    hottest: float = 1.0,
    atol: float = 1e-5,
    **config: Any,
) -> list[Any]:
    """Recordings of one device and of the mesh are equal; returns the results of both."""
    runs = []
    logs = []
    for name, placement in (("one", {}), ("mesh", {"mesh": mesh, "devices": devices})):
        engine = small_llm(folder, **CONFIG | config, **placement).engine
        assert (engine.model.placement is not None) == (name == "mesh")
        files = [tmp_path / f"{name}{seed}.jsonl" for seed in seeds]
        runs.append(
            [
                play(engine, seed, file, hottest=hottest)
                for seed, file in zip(seeds, files, strict=True)
            ]
        )
        logs.append([file.read_bytes() for file in files])
    assert logs[0] == logs[1]
    for single, split in zip(*runs, strict=True):
        compare_logprobs(single.results, split.results, atol)
    return runs


def compare_logprobs(single: list[Any], split: list[Any], atol: float) -> None:
    """Sums are added in another order, so log-probabilities differ in their last bits."""
    logprobs = [
        [entry for result in results if len(result) == 5 for entry in result[2]]
        for results in (single, split)
    ]
    assert logprobs[0], "no log-probability was asked for"
    for a, b in zip(*logprobs, strict=True):
        assert (a.request_id, a.position, a.token_id) == (b.request_id, b.position, b.token_id)
        # unlikely tokens are so near that rounding orders them
        assert abs(a.rank - b.rank) <= a.rank // 1000
        if a.logprob is not None:
            chex.assert_trees_all_close(a.logprob, b.logprob, atol=atol)


# more devices than key heads; below, tests have fewer, and as many
@pytest.mark.slow_cases("9/3-4", "8/2-8")
@pytest.mark.parametrize(
    ("name", "n"), [(name, n) for name in ("8/4", "8/2", "9/3") for n in (2, 4, 8)]
)
def test_recordings_are_byte_identical(folders, tmp_path, name, n):
    compare_runs(folders[name], tmp_path, mesh={"tensor": n})


# "swapped": on a slice of devices, below
@pytest.mark.slow_cases("recomputed", "lookahead", "int8", "float8", "xla")
@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001, "max_model_len": 64},
        {"num_blocks": 20, "enable_prefix_caching": False, "max_model_len": 64},
        {"lookahead": 2},
        {"weight_dtype": "int8"},
        {"kv_cache_dtype": "float8_e4m3fn"},
        {"attention_impl": "xla", "compilation": "lazy"},
    ],
    ids=["swapped", "recomputed", "lookahead", "int8", "float8", "xla"],
)
def test_recordings_are_byte_identical_in_every_mode(folders, tmp_path, config):
    single, _ = compare_runs(folders["8/4"], tmp_path, mesh={"tensor": 4}, **config)
    if "num_blocks" in config:
        assert sum(run.preempted for run in single) > 5


EXPERT_MESHES = (
    ({"tensor": 2, "expert": 2}, "int8"),
    ({"tensor": 3}, None),
    ({"expert": 2}, None),
    ({"expert": 3}, "int8"),
    ({"tensor": 2, "expert": 2}, None),
)
SPARSE = ("Qwen3-MoE", "GLM-4.5", "GPT-OSS")


def split_marks(name: str, number: int) -> Any:
    """The first mesh is for every model, each other one for one model."""
    is_slow = number == 0 or SPARSE[number % len(SPARSE)] == name
    return pytest.mark.slow if is_slow else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "mesh", "dtype"),
    [
        pytest.param(name, *values, marks=split_marks(name, number))
        for name in SPARSE
        for number, values in enumerate(EXPERT_MESHES)
    ],
    ids=str,
)
def test_experts_are_split_by_number_and_by_width(tmp_path, name, mesh, dtype):
    """One of three layers has no experts; three devices do not divide the width."""
    model = model_of(name, weight_dtype=dtype)
    compare_runs(model, tmp_path, seeds=(0,), mesh=mesh, max_model_len=128)


@pytest.mark.slow_cases("draft", "rejection")  # drafts of ngrams come from the host
@pytest.mark.parametrize(
    "options",
    [
        {"method": "ngram", "num_tokens": 3, "adaptive": False},
        {"method": "draft", "num_tokens": 2, "adaptive": False},
        {"method": "draft", "num_tokens": 2, "adaptive": False, "rule": "rejection"},
    ],
    ids=["ngram", "draft", "rejection"],
)
def test_drafts_are_verified_on_a_mesh(folders, tmp_path, options):
    """A draft model has a copy on each device. With itself as its draft model, an engine accepts
    every draft.
    """
    if options["method"] == "draft":
        options = options | {"model": str(folders["8/2"])}
    single, mesh = compare_runs(
        folders["8/2"], tmp_path, seeds=(0,), mesh={"tensor": 4}, speculative=options
    )
    assert sum(run.steps for run in mesh) == sum(run.steps for run in single)
    assert any(result[0].drafts for run in mesh for result in run.results if len(result) == 5)


@pytest.mark.slow_cases("9/3")  # the heads are padded too
@pytest.mark.parametrize("name", ["8/2", "9/3"])
def test_new_parameters_are_split_as_the_old_ones(folders, tmp_path, name):
    """An engine with the parameters of another model says what that model says."""
    folder = save_model(tmp_path / "other", name, seed=5)
    prompts = [tokens(9, 1), tokens(30, 2)]
    split = small_llm(folders[name], mesh={"tensor": 4}, **CONFIG)
    before = token_ids(split, prompts, greedy(12))
    old = split.engine.model.leaves
    split.update_params(load_model(folder).model.params)
    single = small_llm(folder, **CONFIG)
    after = token_ids(split, prompts, greedy(12))
    assert after == token_ids(single, prompts, greedy(12)) != before
    chex.assert_trees_all_equal_shapes_and_dtypes(old, split.engine.model.leaves)
    assert [x.sharding for x in old] == [x.sharding for x in split.engine.model.leaves]
    short = named(whole(split.engine.model)) | {"embed": np.zeros((3, 64), np.float32)}
    with refused(r"shape of embed: expected \(320, 64\), found \(3, 64\)"):
        split.update_params(short)


@pytest.mark.parametrize("dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_an_orbax_checkpoint_goes_to_the_same_parts(folders, tmp_path, dtype):
    orbax = tmp_path / "orbax"
    convert(folders["9/3"], orbax, "orbax")
    mesh = MeshConfig(tensor=4)
    converted, restored = (
        load_model(folder, mesh=mesh, weight_dtype=dtype).model.leaves
        for folder in (folders["9/3"], orbax)
    )
    chex.assert_trees_all_equal(converted, restored)
    assert [x.sharding for x in converted] == [x.sharding for x in restored]
    alone, placed = (
        load_model(orbax, mesh=mesh, dtype="bfloat16", weight_dtype=dtype).model
        for mesh in (None, mesh)
    )
    chex.assert_trees_all_equal(whole(alone), whole(placed))


@pytest.mark.slow_cases("Mixtral")
@pytest.mark.parametrize("name", ["Llama 2", "Mixtral"])
def test_in_16_bits_log_probabilities_are_close(name):
    """Partial sums are added in float32 before they are rounded, so a mesh differs by roundings of
    sums alone.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    model = model_of(name, "bfloat16")
    logprobs = []
    for mesh in (None, {"tensor": 4}):
        llm = small_llm(model, mesh=mesh, **CONFIG)
        (output,) = llm.generate([tokens(40, 3)], params)
        logprobs.append(
            [next(iter(ranked.values())).logprob for ranked in output.prompt_logprobs[1:]]
        )
    chex.assert_trees_all_close(*map(np.array, logprobs), atol=0.05)


@pytest.mark.slow
def test_parameters_in_the_order_of_a_mesh_are_refused_and_come_back_whole(folders, tmp_path):
    """8 and 4 heads on 2 devices: nothing is padded, so shapes cannot tell. They would be permuted
    twice.
    """
    llm = small_llm(folders["8/4"], mesh={"tensor": 2}, **CONFIG)
    placed = llm.engine.model
    message = "is from a model on a mesh, in the order of its devices; give whole"
    with refused(message):
        llm.update_params(placed.params)
    with refused(message):
        from_params(placed.params, placed.config)
    chex.assert_trees_all_equal(whole(placed), whole(load_model(folders["8/4"]).model))
    for name in HEADS:  # heads of zeros, and heads that several devices have
        placed = load_model(folders[name], mesh={"tensor": 8}).model
        chex.assert_trees_all_equal(whole(placed), whole(load_model(folders[name]).model))
    before = token_ids(llm, [tokens(9, 1)], greedy(12))
    llm.update_params(whole(llm.engine.model))
    assert token_ids(llm, [tokens(9, 1)], greedy(12)) == before


@pytest.mark.slow
def test_an_engine_on_a_slice_of_devices_leaves_the_others_alone(folders, tmp_path):
    """Swapping, copies of branches, and an engine that is reset."""
    config = {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001, "max_model_len": 64}
    single, split = compare_runs(
        folders["8/4"], tmp_path, mesh={"tensor": 4}, devices=[6, 3, 5, 2], **config
    )
    assert sum(run.preempted for run in split) == sum(run.preempted for run in single) > 5
    used = {
        device
        for x in jax.tree.leaves(split[0].engine._state.cache)
        for device in x.sharding.device_set
    }
    assert used == {jax.devices()[i] for i in (6, 3, 5, 2)}
    assert split[0].engine.config.devices == (6, 3, 5, 2)
