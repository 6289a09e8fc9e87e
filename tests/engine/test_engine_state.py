"""The engine as a value: `step(runtime, state)`, what a state holds, and what is refused."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pagedjax import EngineConfig, SamplingParams
from pagedjax.engine import runtime as runtimes
from pagedjax.engine import state as states
from pagedjax.engine.engine import Engine
from pagedjax.engine.requests import EngineRequest, SequenceData, appended
from pagedjax.engine.state import step
from tests.engine.runs import greedy, sampled, small_llm, steps
from tests.refusals import refused

SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "token_buckets": (64,), "num_blocks": 256}
GREEDY = greedy(6)
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": list(range(20, 50))}
REQUEST = EngineRequest(("a",), PROMPTS["a"], GREEDY)


@pytest.fixture(scope="module")
def runtime(tiny):
    return runtimes.build(tiny.model, EngineConfig(**SIZES), tiny.eos_token_ids)


def submitted(runtime, state, params=GREEDY):
    for name, prompt in PROMPTS.items():
        state = states.submit(runtime, state, EngineRequest((name,), prompt, params))
    return state


def completed(runtime, state):
    """Steps until no request is unfinished -> (the last state, tokens by sequence)."""
    results = []
    while state.has_work:
        state, result = step(runtime, state)
        results.append(result)
    return state, sampled(results)


def test_two_states_of_one_runtime_do_not_know_each_other(runtime, tiny):
    engine = Engine(tiny.model, EngineConfig(**SIZES))
    first, second = (submitted(runtime, states.init(runtime)) for _ in range(2))
    first, result = step(runtime, first)  # one is ahead of the other
    assert result.plan.num_tokens == sum(map(len, PROMPTS.values()))
    assert second.scheduler.running.seqs == ()
    _, expected = completed(runtime, second)
    assert completed(runtime, first)[1] == {name: tokens[1:] for name, tokens in expected.items()}
    engine.add("a", PROMPTS["a"], GREEDY)
    assert sampled(steps(engine)) == {"a": expected["a"]}


def test_transitions_leave_the_state_before_them_unchanged(runtime):
    empty = states.init(runtime)
    state = states.submit(runtime, empty, REQUEST)
    assert not empty.has_work
    assert empty.sequences.get("a") is None
    after, events = states.cancel(state, "a")
    assert [event.request_id for event in events] == ["a"]
    assert (state.unfinished, after.unfinished) == (1, 0)
    assert set(state.sequences) == {"a"}
    assert not after.sequences
    rolled = states.roll_back(states.submit(runtime, after, REQUEST))
    assert rolled.cache is None
    assert rolled.unfinished == 1
    assert all(array.is_deleted() for array in jax.tree.leaves(state.cache))


def test_a_step_keeps_the_cache_where_it_is(runtime):
    state = submitted(runtime, states.init(runtime))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), state.cache)
    addresses = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state.cache)]
    state, _ = step(runtime, state)
    chex.assert_trees_all_equal(jax.tree.map(lambda a: (a.shape, a.dtype), state.cache), shapes)
    chex.assert_tree_all_finite(state.cache)
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state.cache)] == addresses


def test_branches_of_a_queued_request_share_one_array(tiny):
    """64 branches of 3 tokens with a limit of 131,072 once took 32 MiB before they ran."""
    engine = small_llm(tiny).engine
    names = [f"{i}" for i in range(8)]
    params = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
    engine.add(names[0], [5, 6, 7], params, forks=names[1:])
    queued = engine._state.sequences
    arrays = {id(data.tokens): data.tokens for data in queued.values()}
    assert sum(array.nbytes for array in arrays.values()) <= 4 * 3
    while len(engine.scheduler_state.running.seqs) < 8:
        engine.step()
    engine.step()
    running = [data.tokens for data in engine._state.sequences.values()]
    assert len(set(map(id, running))) == 8, "each branch writes to an array of its own"
    assert sum(tokens.nbytes for tokens in running) < 8 * 4 * 100


@pytest.mark.parametrize("spare", [0, 3])
def test_appended_tokens_never_reach_a_shared_prompt(spare):
    prompt = np.array([1, 2, 3] + [0] * spare, np.int32)
    before = prompt.copy()
    a, b = (SequenceData(GREEDY, 0, 3, prompt) for _ in range(2))
    for length, token in enumerate((7, 8, 9), start=3):
        a = appended(a, length, token, spare)
        b = appended(b, length, token + 10, spare)
    chex.assert_trees_all_equal(a.tokens[:6], np.array([1, 2, 3, 7, 8, 9], np.int32))
    chex.assert_trees_all_equal(b.tokens[:6], np.array([1, 2, 3, 17, 18, 19], np.int32))
    chex.assert_trees_all_equal(prompt, before)
    assert len(a.tokens) >= 6 + spare


def test_appending_copies_each_token_a_bounded_number_of_times():
    data, copies = SequenceData(GREEDY, 0, 1, np.array([1], np.int32)), 0
    for length in range(1, 5000):
        longer = appended(data, length, length, 0)
        copies += length if longer is not data else 0
        data = longer
    assert copies < 6 * 5000
    chex.assert_trees_all_equal(data.tokens[1:5000], np.arange(1, 5000, dtype=np.int32))


def test_a_dtype_that_the_model_does_not_have_is_refused(tiny):
    with refused("dtype is 'bfloat16', but the model was loaded with 'float32'; load it again"):
        Engine(tiny.model, EngineConfig(dtype="bfloat16", **SIZES))
    assert Engine(tiny.model, EngineConfig(dtype="float32", **SIZES)).config.dtype == "float32"


def test_new_parameters_make_another_runtime_of_the_same_programs(runtime, tiny):
    other_runtime = runtime.with_params(jax.tree.map(lambda x: x * 1.5, runtime.model.params))
    assert other_runtime.programs is runtime.programs
    chex.assert_trees_all_equal_shapes_and_dtypes(other_runtime.leaves, runtime.leaves)
    tokens = [
        completed(one_runtime, submitted(one_runtime, states.init(one_runtime)))[1]
        for one_runtime in (runtime, other_runtime)
    ]
    assert tokens[0] != tokens[1]


def test_a_runtime_and_a_state_cannot_be_changed(runtime):
    with pytest.raises(dataclasses.FrozenInstanceError):
        runtime.policy = None
    with pytest.raises(AttributeError):
        states.init(runtime).cache = None
