"""An engine that sleeps frees its devices, wakes up as it was, and compiles nothing."""

from __future__ import annotations

import gc
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, BeamSearchParams, SamplingParams, Taps, load_model
from pagedjax.engine.compilations import compilations
from pagedjax.engine.processes.engines import FollowerEngine, LeaderEngine
from pagedjax.host import replay
from pagedjax.weights.trained import whole
from tests.engine.runs import greedy, small_llm, token_ids
from tests.refusals import refused
from tests.weights.tiny import tiny_llama

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 40,
    "block_size": 8,
}
GREEDY = greedy(10)
PROMPTS = [list(range(5, 30)), [9, 10, 11], list(range(5, 25))]
KINDS: dict[str, dict[str, Any]] = {
    "packed for the compiled kernel": {"linear_impl": "cpu"},
    "plain": {"linear_impl": "xla", "compilation": "eager"},
    "int8": {"weight_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "mesh": {"mesh": {"tensor": 2}},
    "draft model": {"speculative": {"method": "draft", "num_tokens": 1}},
    "draft model on a mesh": {
        "speculative": {"method": "draft", "num_tokens": 3},
        "mesh": {"tensor": 2},
    },
    "lookahead and swap": {"lookahead": 2, "preemption": "swap", "swap_space_gib": 0.01},
    "lazy": {"compilation": "lazy"},
}


def make(folder, model: Any = None, **config: Any) -> LLM:
    if "speculative" in config:
        config["speculative"] = {**config["speculative"], "model": str(folder)}
    return small_llm(model or str(folder), **SIZES | config)


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return token_ids(llm, PROMPTS, GREEDY)


def check_asleep(llm: LLM) -> None:
    with refused(r"the engine sleeps; call wake_up\(\) first"):
        tokens(llm)


def page_bytes(llm: LLM) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(llm.engine._state.cache))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The parameters of another model."""
    folder = tiny_llama(tmp_path_factory.mktemp("other") / "m", layers=1, tied=False, seed=1)
    return load_model(folder, linear_impl="xla").model.params


def live() -> int:
    gc.collect()  # circles of an engine's making
    return sum(x.nbytes for x in jax.live_arrays())


def weights(llm: LLM) -> int:
    """Bytes of the parameters beside the model's table of angles, which stays on the devices."""
    runtime = llm.engine.runtime
    sizes = (x.size * x.dtype.itemsize for x in runtime.leaves)
    return sum(sizes) - runtime.model.params["angles"].get_value().nbytes


@pytest.mark.default_cases("lazy")
@pytest.mark.parametrize("kind", KINDS)
def test_it_frees_the_devices_and_wakes_up_as_it_was(one_layer_folder, kind):
    llm = make(one_layer_folder, **KINDS[kind])
    expected = tokens(llm)
    before = compilations()
    pages = page_bytes(llm)
    awake = live()
    llm.sleep()
    assert llm.engine.is_sleeping
    assert awake - live() >= weights(llm) + pages
    check_asleep(llm)
    llm.wake_up()
    assert live() <= awake
    (first, *_) = llm.generate(PROMPTS, GREEDY)
    assert first.num_cached_tokens == 0, "the prefix cache was emptied"
    assert tokens(llm) == expected
    assert compilations() == before


@pytest.mark.default_cases("wake_up-lazy", "update_params-lazy")
@pytest.mark.parametrize(
    "kind", ["packed for the compiled kernel", "int8", "mesh", "draft model", "lazy"]
)
@pytest.mark.parametrize("first", ["wake_up", "update_params"])
def test_level_2_drops_the_parameters_and_an_update_restores_them(
    one_layer, one_layer_folder, other, kind, first
):
    llm = make(one_layer_folder, **KINDS[kind])
    expected = tokens(llm)
    before = compilations()
    for tree in (other, one_layer.model.params):
        llm.sleep(level=2)
        if first == "wake_up":
            llm.wake_up()
            with refused(r"sleep\(level=2\) dropped the model's parameters; call update_params"):
                tokens(llm)
            llm.update_params(tree)
        else:
            llm.update_params(tree)
            check_asleep(llm)
            llm.wake_up()
        assert (tokens(llm) == expected) is (tree is not other)
    assert compilations() == before


@pytest.mark.default_cases("plain", "background")
@pytest.mark.parametrize("kind", ["plain", "lazy", "background", "draft model"])
def test_parameters_that_nobody_else_uses_are_freed(one_layer_folder, tmp_path, other, kind):
    """Programs that are compiled later, such as those of taps, keep no parameters."""
    options = {"background": {"compilation": "background"}, **KINDS}[kind] | {"linear_impl": "xla"}
    # it does not own the parameters
    llm = make(one_layer_folder, load_model(one_layer_folder, linear_impl="xla"), **options)
    pages = page_bytes(llm)
    before = live()
    llm.engine.update_params(jax.tree.map(jnp.copy, other))
    assert live() <= before
    llm.sleep()
    assert before - live() >= weights(llm) + pages
    llm.wake_up()
    params = SamplingParams(temperature=0, max_tokens=1, taps=Taps(hidden_states=(0,)))
    assert token_ids(llm, [PROMPTS[0]], params) == [tokens(llm)[0][:1]]


def test_parts_wake_up_alone(one_layer_folder):
    llm = make(one_layer_folder)
    expected = tokens(llm)
    llm.sleep()
    asleep = live()
    llm.wake_up(tags=["weights"])
    between = live()
    assert between - asleep == weights(llm)
    check_asleep(llm)
    llm.wake_up(tags=["kv_cache"])
    assert live() > between
    assert tokens(llm) == expected
    llm.wake_up()  # awake already
    with refused(r"tags has 'cache'; it must be None, or some of 'weights', 'kv_cache'"):
        llm.wake_up(tags=["cache"])
    with refused("tags has 'all'"):
        llm.wake_up(tags="all")


@pytest.mark.slow
def test_a_loaded_model_that_others_use_is_not_deleted(one_layer):
    first, second = (small_llm(one_layer, linear_impl="xla", **SIZES) for _ in range(2))
    expected = tokens(first)
    copies = jax.tree.map(np.array, whole(one_layer.model))
    first.sleep(level=2)
    assert tokens(second) == expected
    chex.assert_trees_all_equal(whole(one_layer.model), copies)
    first.update_params(one_layer.model.params)
    first.wake_up()
    owned = live()
    first.sleep()  # these are copies, and the engine's alone
    assert owned - live() >= weights(first)
    first.wake_up()
    assert tokens(first) == tokens(second) == expected


def test_new_parameters_replace_those_that_wait_on_the_host(one_layer, one_layer_folder):
    """Also in an engine that sleeps before its first step."""
    llm = make(one_layer_folder, compilation="lazy")
    llm.sleep()
    llm.wake_up()
    expected = tokens(llm)
    assert expected == tokens(make(one_layer_folder))
    zeros = jax.tree.map(lambda x: x * 0, nnx.to_pure_dict(one_layer.model.params))
    llm.update_params(zeros)
    llm.sleep()
    llm.update_params(one_layer.model.params)
    llm.wake_up()
    assert tokens(llm) == expected


def test_unfinished_requests_a_second_sleep_and_other_levels_are_refused(
    one_layer_folder, tmp_path
):
    llm = make(one_layer_folder)
    llm.engine.record(tmp_path / "run.jsonl")
    expected = tokens(llm)
    llm.engine.add("a", PROMPTS[0], GREEDY)
    with refused("1 sequences are unfinished; finish or cancel them before the engine sleeps"):
        llm.sleep()
    llm.engine.cancel("a")
    for level in (0, 3, True, "1"):
        with refused(f"level is {level!r}; it must be 1 .* or 2"):
            llm.sleep(level)
    llm.sleep()
    for call in (
        llm.sleep,
        llm.engine.reset,
        lambda: llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2)),
        lambda: next(llm.stream(PROMPTS[0], GREEDY)),
    ):
        with refused("the engine sleeps"):
            call()
    llm.reset_prefix_cache()
    llm.wake_up()
    assert tokens(llm) == expected
    llm.engine.record(None)
    assert replay.verify(tmp_path / "run.jsonl").identical


@pytest.mark.parametrize("kind", [LeaderEngine, FollowerEngine])
def test_an_engine_of_several_processes_does_not_sleep(kind):
    with refused("an engine of several processes does not sleep; end the processes to free"):
        kind.sleep(object.__new__(kind))
