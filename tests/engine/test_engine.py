"""The engine's shell on a tiny model: nothing around a request changes its tokens, and no block is
ever lost.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from pagedjax import BeamSearchParams, SamplingParams, from_params
from pagedjax.device.models import llama
from pagedjax.engine import compilations
from pagedjax.engine.runtime import COPIES
from pagedjax.host import replay
from pagedjax.host.types import Finished, StepResult
from tests.device.test_linear_impl import random_params
from tests.device.test_model_families import BODY
from tests.engine.runs import greedy, sampled, small_llm, steps
from tests.refusals import refused

LENGTHS = (3, 17, 40, 1, 64, 9)
PROMPTS = [np.random.default_rng(i).integers(3, 320, n).tolist() for i, n in enumerate(LENGTHS)]
GREEDY = greedy(24)
DRAWN = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
SMALL = {"block_size": 8, "max_num_batched_tokens": 16, "num_blocks": 14}


@pytest.fixture(scope="module")
def engine(tiny):
    return small_llm(tiny).engine


def run(engine, requests) -> tuple[dict[str, list[int]], list[StepResult]]:
    """Requests {id: (prompt, params)} to their end -> (tokens by id, results); checks the
    invariants at each step.
    """
    for request_id, (prompt, params) in requests.items():
        engine.add(request_id, prompt, params)
    results = list(itertools.islice(steps(engine), 2000))
    assert not engine.has_work, "no progress"
    return sampled(results), results


@pytest.fixture(scope="module")
def expected(engine):
    """Each request alone, greedy and drawn."""
    alone = {}
    for name, request in all_requests().items():
        alone |= run(engine, {name: request})[0]
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone), (
        "the model must not say the same always"
    )
    return alone


def all_requests() -> dict:
    greedy = {f"g{i}": (prompt, GREEDY) for i, prompt in enumerate(PROMPTS)}
    return greedy | {f"d{i}": (prompt, DRAWN) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.slow  # by default the next test has another block size and budget
@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 1, "num_blocks": 600},
        {"block_size": 8, "max_num_batched_tokens": 16},
        {"block_size": 64},
        {"block_size": 16, "max_num_batched_tokens": 512, "token_buckets": (8, 512)},
        {"block_size": 16, "attention_impl": "reference"},
    ],
    ids=str,
)
def test_block_size_budget_and_batch_change_no_token(tiny, expected, config):
    engine = small_llm(tiny, **config).engine
    assert run(engine, all_requests())[0] == expected
    backwards = dict(reversed(all_requests().items()))
    assert run(engine, backwards)[0] == expected


def test_small_blocks_a_small_budget_and_preemption_change_no_token(tiny, expected):
    tokens, results = run(small_llm(tiny, **SMALL).engine, all_requests())
    assert sum(len(result.plan.preempted) for result in results) > 3
    ends = [e for result in results for e in result.events if isinstance(e, Finished)]
    assert len(ends) == len(expected)
    assert tokens == expected


def test_no_step_compiles_after_start_up(tiny):
    """Only log-probabilities of prompts and side outputs have programs that are compiled later."""
    engine = small_llm(tiny, compilation="eager").engine
    features = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 5, "min_p": 0.1},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {5: 3.0}, "min_tokens": 3},
        {"allowed_token_ids": (5, 6, 7)},
        {"logprobs": 5},
    ]
    before = compilations.compilations()
    pairs = itertools.product(features, PROMPTS[:3])
    requests = {
        f"{i}": (prompt, SamplingParams(max_tokens=6, seed=i, **feature))
        for i, (feature, prompt) in enumerate(pairs)
    }
    _, results = run(engine, requests)
    assert compilations.compilations() == before
    assert all(result.compilations == 0 for result in results)


def test_a_step_reports_its_times_and_its_padding(engine):
    engine.reset_prefix_cache()
    _, results = run(engine, {"a": (PROMPTS[2], GREEDY)})
    for earlier, later in itertools.pairwise(results):
        assert earlier.started < earlier.finished <= later.started
    for result in results:
        assert 0 < result.device_seconds < result.finished - result.started
        assert result.plan.num_tokens <= result.padded_tokens == 64
    assert [result.plan.num_tokens for result in results] == [40] + [1] * 23


def test_reset_forgets_requests_and_cache(engine, expected):
    engine.add("a", PROMPTS[0], GREEDY)
    engine.step()
    engine.reset()
    assert not engine.has_work
    assert engine.step() is None
    assert run(engine, {"g0": (PROMPTS[0], GREEDY)})[0]["g0"] == expected["g0"]


def test_a_recorded_run_replays_byte_for_byte(tiny, tmp_path):
    engine = small_llm(tiny, **SMALL).engine
    # an engine that has worked starts its log at step 0 all the same
    run(engine, {"before": (PROMPTS[0], GREEDY)})
    engine.record(tmp_path / "run.jsonl")
    for request_id, (prompt, params) in all_requests().items():
        engine.add(request_id, prompt, params)
    engine.step()
    with refused("12 sequences are unfinished; finish or cancel them before a recording"):
        engine.record(tmp_path / "late.jsonl")
    engine.cancel("d1")
    list(steps(engine))
    engine.record(None)
    report = replay.verify(tmp_path / "run.jsonl")
    assert report.identical
    assert report.preemptions > 0


def test_a_refused_request_leaves_the_engine_unchanged(engine):
    state = engine.scheduler_state
    for prompt, params, message in (
        ([], GREEDY, "empty prompt"),
        ([5] * 512, GREEDY, "max_model_len is 512"),
        ([999], GREEDY, "token id 999"),
        ([5, 2**64], GREEDY, f"token id {2**64}; the vocabulary is 0 to 319"),
        ([5.0, 6.5], GREEDY, "token id 5.0; the vocabulary is 0 to 319, in integers"),
        ([5], SamplingParams(allowed_token_ids=tuple(range(300)) * 4), "the limit is 1024"),
    ):
        with refused(message):
            engine.add("x", prompt, params)
        assert engine.scheduler_state is state
    engine.add("x", [5], GREEDY)
    with refused("request id 'x' is in use"):
        engine.add("x", [5], GREEDY)
    engine.cancel("x")


@pytest.mark.slow
def test_many_copies_of_a_step_are_made_in_groups(tiny, monkeypatch):
    """20 branches write behind the block that they share, all in one step: more than are copied at
    a time.
    """
    prompt = PROMPTS[1][:11]
    engine = small_llm(tiny, max_num_seqs=32, num_blocks=200).engine
    names = [f"{i}" for i in range(20)]
    calls = []
    copy = engine.runtime.copy
    engine.runtime = dataclasses.replace(
        engine.runtime, copy=lambda *args: calls.append(args[1:]) or copy(*args)
    )
    engine.add(names[0], prompt, DRAWN, forks=names[1:])
    results = list(steps(engine))
    tokens = sampled(results)
    assert max(len(result.plan.copies) for result in results) > 2 * COPIES
    assert len(calls) >= 3
    for i in (0, 7, 8, 19):  # as requests of their own, with the seeds of branches
        params = dataclasses.replace(DRAWN, seed=DRAWN.seed + i)
        assert run(engine, {"alone": (prompt, params)})[0]["alone"] == tokens[names[i]]


def test_top_logprobs_of_a_vocabulary_below_twenty():
    """What pads them to twenty must not pass for token 0, and a beam cannot rank more than there
    are.
    """
    body = BODY | {"num_hidden_layers": 1, "vocab_size": 4, "tie_word_embeddings": False}
    config = llama.from_hf(body)
    model = from_params(random_params(config), config)
    engine = small_llm(model, max_num_seqs=4, max_num_batched_tokens=8, num_blocks=16).engine
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=6, logprobs=10, ignore_eos=True)
    engine.add("a", [1, 2, 3], params)
    for entry in [entry for result in steps(engine) for entry in result.logprobs]:
        assert sorted(entry.top_ids) == [0, 1, 2, 3]
        assert np.isclose(np.exp(entry.top_logprobs).sum(), 1)
    with refused(r"has beam_width 5 and 0 stop tokens; .*at most 4; lower beam_width to 4"):
        engine.add("b", [1], BeamSearchParams(5), forks=list("cdef"))
