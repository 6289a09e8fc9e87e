"""New weights while requests are under way: `update_params(tree, pending=...)`, against engines
that had them.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.host import replay, scheduler
from pagedjax.host.types import Admitted
from tests.engine.runs import answers, greedy, logprobs_of, sampled, steps
from tests.engine.test_batch_invariance import VOCAB, model_of
from tests.refusals import refused

pytest.importorskip("llvmlite")

GREEDY = greedy(24, logprobs=0)
PROMPTS = {
    f"r{n}": np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (3, 20, 37, 58)
}
SIZES: dict[str, Any] = {
    "batch_invariant": True,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "max_num_seqs": 8,
    "block_size": 8,
    "max_model_len": 128,
    "num_blocks": 200,
    "progress": False,
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"lookahead": 2},
    "drafts": {"speculative": {"method": "ngram", "num_tokens": 3}},
    "swapping": {"num_blocks": 22, "preemption": "swap", "swap_space_gib": 0.01},
}
Tokens = dict[str, list[tuple[int, float, int]]]  # of each request: token, log-probability, version


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("Qwen3", layers=2)  # as tests/disaggregated, for the same programs


@pytest.fixture(scope="module")
def new(model) -> Any:
    """Weights that say other things: the old ones with noise."""
    rng = np.random.default_rng(5)
    plain = model_of("Qwen3", layers=2, linear_impl="xla").model.params
    return jax.tree.map(
        lambda x: np.asarray(x) * (1 + 0.3 * rng.standard_normal(x.shape)).astype(np.float32), plain
    )


@pytest.fixture(scope="module")
def updated(model, new) -> LLM:
    """The oracle: an engine that has the new weights from the start."""
    llm = LLM(model, **SIZES)
    llm.update_params(new)
    return llm


def run_steps(engine: Any, answers: Tokens, number: int | None = None) -> list[Any]:
    """Run some steps, or all, and note tokens -> their events."""
    results = list(itertools.islice(steps(engine), number))
    for result in results:
        chances = {(e.request_id, e.position): e.logprob for e in result.logprobs if not e.prompt}
        for name, tokens in sampled([result]).items():
            answer = answers.setdefault(name, [])
            answer += [
                (token, chances[name, position], result.params_version)
                for position, token in enumerate(tokens, len(answer))
            ]
    return [event for result in results for event in result.events]


def start(model: Any, name: str, log: Path) -> tuple[Any, Tokens]:
    """An engine that has begun to answer all prompts."""
    engine = LLM(model, **SIZES | ENGINES[name]).engine
    engine.record(log)
    for request, prompt in PROMPTS.items():
        engine.add(request, prompt, GREEDY)
    answers: Tokens = {}
    run_steps(engine, answers, 9)
    return engine, answers


def without_versions(answer: list[tuple[int, float, int]]) -> list[tuple[int, float]]:
    return [(token, chance) for token, chance, _ in answer]


def versions_of(answer: list[tuple[int, float, int]]) -> list[int]:
    return [version for _, _, version in answer]


def continuation(llm: LLM, prompt: list[int], answer: list[tuple[int, float, int]]) -> Any:
    """What an engine says greedily after a prompt and tokens, up to as many as GREEDY has."""
    tokens = [token for token, *_ in answer]
    params = replace(GREEDY, max_tokens=GREEDY.max_tokens - len(tokens))
    return answers_of(llm, [prompt + tokens], params)[0]


def answers_of(
    llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, of each prompt."""
    outputs = answers(llm, prompts, params)
    return [
        list(zip(output.token_ids, logprobs_of(output).tolist(), strict=True)) for output in outputs
    ]


@pytest.mark.default_cases("swapping")
@pytest.mark.parametrize("name", ENGINES)
def test_after_a_restart_all_is_as_if_the_weights_had_been_there_before(
    model, new, updated, tmp_path, name
):
    """Bit for bit, also of requests that were swapped out, and with predicted steps on the device."""
    engine, before = start(model, name, tmp_path / "run.jsonl")
    while name == "swapping" and not any(seq.blocks for seq in engine.scheduler_state.waiting):
        run_steps(engine, before, 1)
        assert engine.has_work, "nothing was swapped out"
    assert any(0 < len(answer) < GREEDY.max_tokens for answer in before.values())
    engine.update_params(new, pending="restart")
    scheduler.check(engine.scheduler_state)
    assert not engine.scheduler_state.running.seqs
    answers = {request: list(answer) for request, answer in before.items()}
    admitted = [event for event in run_steps(engine, answers) if isinstance(event, Admitted)]
    assert {event.request_id for event in admitted} == set(PROMPTS), "all are computed again"
    for request, prompt in PROMPTS.items():
        old = before.get(request, [])
        later = answers[request][len(old) :]
        assert set(versions_of(old)) <= {0}
        assert set(versions_of(later)) == {1}
        chex.assert_trees_all_equal(without_versions(later), continuation(updated, prompt, old))
    engine.record(None)
    assert replay.verify(tmp_path / "run.jsonl").identical
    text = (tmp_path / "run.jsonl").read_text()
    assert text.count('{"update":{"version":1,"pending":"restart"}}') == 1


@pytest.mark.default_cases("plain")
@pytest.mark.parametrize("name", ENGINES)
def test_keep_goes_on_with_the_old_cache_and_new_requests_do_not_find_it(
    model, new, updated, tmp_path, name
):
    """The oracle of old requests is a step of its own: a cache of the old weights, read by a
    program with the new.
    """
    engine, answers = start(model, name, tmp_path / "run.jsonl")
    before = {request: list(answer) for request, answer in answers.items()}
    seqs = (*engine.scheduler_state.running.seqs, *engine.scheduler_state.waiting)
    started = [seq.request_id for seq in seqs if seq.blocks]
    engine.update_params(new, pending="keep")
    scheduler.check(engine.scheduler_state)
    events: list[Any] = []
    for i in range(6):  # new requests that have an old one's prompt, and what it said so far
        prompt = PROMPTS["r37"] + [token for token, *_ in answers.get("r37", [])]
        engine.add(f"new{i}", prompt, GREEDY)
        events += run_steps(engine, answers, 3)
    events += run_steps(engine, answers)
    # the first of the new ones finds nothing; those after it may find what it computed
    admitted = [event for event in events if isinstance(event, Admitted)]
    assert not any(event.num_cached for event in admitted if event.request_id == "new0")
    tokens_of_answer = [token for token, *_ in answers["r37"]]
    expected_of_new = answers_of(
        updated, [PROMPTS["r37"] + tokens_of_answer[:n] for n in range(len(tokens_of_answer) + 1)]
    )
    for i in range(6):
        answer = answers[f"new{i}"]
        assert without_versions(answer) in expected_of_new, "no old content is in it"
        assert set(versions_of(answer)) == {1}
    unfinished = [
        request
        for request in started
        if before.get(request) and len(before[request]) < GREEDY.max_tokens
    ]
    assert unfinished, "some request had begun to answer"
    different = []
    for request in unfinished:
        old = before[request]
        versions = [0] * len(old) + [1] * (GREEDY.max_tokens - len(old))
        assert versions_of(answers[request]) == versions
        later = without_versions(answers[request][len(old) :])
        different.append(later != continuation(updated, PROMPTS[request], old))
    assert any(different) or name == "swapping", "the old cache matters"
    engine.record(None)
    assert replay.verify(tmp_path / "run.jsonl").identical
    assert '{"update":{"version":1,"pending":"keep"}}' in (tmp_path / "run.jsonl").read_text()


def test_keep_with_the_same_weights_changes_no_token(model):
    """So the cache is kept: the continuation is that of an engine without the update."""
    answers = []
    plain = model_of("Qwen3", layers=2, linear_impl="xla").model.params
    for pending in (None, "keep", "restart"):
        llm = LLM(model, **SIZES)
        for request, prompt in PROMPTS.items():
            llm.engine.add(request, prompt, GREEDY, forks=[f"{request}/1", f"{request}/2"])
        outputs: Tokens = {}
        run_steps(llm.engine, outputs, 7)
        if pending:
            llm.update_params(plain, pending=pending)
            events = run_steps(llm.engine, outputs, 1)
            assert any(isinstance(e, Admitted) for e in events) == (pending == "restart")
        run_steps(llm.engine, outputs)
        answers.append({name: without_versions(output) for name, output in outputs.items()})
    assert len(answers[0]) == 12
    chex.assert_trees_all_equal(*answers)


@pytest.mark.slow
def test_nothing_that_old_content_went_into_is_found_later(model, new, updated):
    """Blocks that are filled after the update, at the end of a prompt whose beginning is old."""
    llm = LLM(model, **SIZES | {"max_num_batched_tokens": 16, "token_buckets": (16,)})
    prompt = PROMPTS["r58"]
    llm.engine.add("old", prompt, GREEDY)
    llm.engine.step()
    llm.update_params(new, pending="keep")
    run_steps(llm.engine, {})
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 56)
    (expected,) = answers(updated, [prompt], GREEDY)
    assert first.outputs[0].token_ids == expected.token_ids
    chex.assert_trees_all_equal(logprobs_of(first.outputs[0]), logprobs_of(expected))


@pytest.mark.parametrize("pending", ["restart", "keep"])
def test_beam_searches_and_pooled_prompts_go_on(model, new, pending):
    llm = LLM(model, **SIZES)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    llm.engine.add("beams", PROMPTS["r20"], params, forks=["b1", "b2"])
    for _ in range(4):
        llm.engine.step()
    llm.update_params(new, pending=pending)
    (beams,) = [beams for result in steps(llm.engine) for beams in result.beams]
    assert [len(sequence.token_ids) for sequence in beams.sequences] == [8] * 3


def test_outputs_say_which_weights_made_each_token(model, new, tmp_path):
    """An update of an idle engine is recorded too."""
    llm = LLM(model, **SIZES)
    prompt = PROMPTS["r3"]
    (first,) = answers(llm, [prompt], GREEDY)
    assert first.versions == (0,) * GREEDY.max_tokens
    llm.engine.record(tmp_path / "run.jsonl")
    llm.update_params(new)
    llm.update_params(new)
    assert llm.params_version == 2
    (later,) = answers(llm, [prompt], GREEDY)
    assert later.versions == (2,) * GREEDY.max_tokens
    llm.engine.record(None)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()[1:5]
    kinds = [next(iter(json.loads(line))) for line in lines]
    assert kinds == ["update", "update", "submit", "schedule"]
    assert replay.verify(tmp_path / "run.jsonl").identical
    (search,) = llm.generate([prompt], BeamSearchParams(2, max_tokens=3))
    assert [branch.versions for branch in search.outputs] == [(), ()]
    llm.engine.reset()
    with refused("pending is 'kept'; it must be one of None, 'restart', 'keep'"):
        llm.update_params(new, pending="kept")  # type: ignore[arg-type]
    assert llm.params_version == 2
