"""New weights while requests are under way: `update_params(tree, pending=...)`, against engines
that had them.
"""

from __future__ import annotations

import json
from typing import Any

import chex
import jax
import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.host import replay, scheduler
from pagedjax.host.types import Admitted, Sampled
from tests.engine.test_batch_invariance import VOCAB, model_of

pytest.importorskip("llvmlite")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
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


def run_steps(engine: Any, answers: Tokens, steps: int | None = None) -> list[Any]:
    """Run some steps, or all, and note tokens -> their events."""
    events = []
    while engine.has_work and (steps is None or steps > 0):
        steps = None if steps is None else steps - 1
        result = engine.step()
        scheduler.check(engine.scheduler_state)
        events += result.events
        chances = {(e.request_id, e.position): e.logprob for e in result.logprobs if not e.prompt}
        for event in result.events:
            for name, token in (
                zip(event.request_ids, event.token_ids, strict=True)
                if isinstance(event, Sampled)
                else ()
            ):
                answer = answers.setdefault(name, [])
                answer.append((token, chances[name, len(answer)], result.params_version))
    return events


def continuation(llm: LLM, prompt: list[int], tokens: list[int]) -> list[tuple[int, float]]:
    """What an engine says greedily after a prompt and tokens, up to as many as GREEDY has."""
    num_left = GREEDY.max_tokens - len(tokens)
    params = SamplingParams(temperature=0, max_tokens=num_left, ignore_eos=True, logprobs=0)
    (answer,) = answers_of(llm, [prompt + tokens], params)
    return answer


def answers_of(
    llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, of each prompt."""
    outs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    answers = [out.outputs[0] for out in outs]
    return [
        [
            (token, entry[token].logprob)
            for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True)
        ]
        for answer in answers
    ]


@pytest.mark.default_cases("swapping")
@pytest.mark.parametrize("name", ENGINES)
def test_after_a_restart_all_is_as_if_the_weights_had_been_there_before(
    model, new, updated, tmp_path, name
):
    """Bit for bit, also of requests that were swapped out, and with predicted steps on the device."""
    engine = LLM(model, **SIZES | ENGINES[name]).engine
    engine.record(tmp_path / "run.jsonl")
    for request, prompt in PROMPTS.items():
        engine.add(request, prompt, GREEDY)
    before: Tokens = {}
    run_steps(engine, before, 9)
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
        later = answers[request][len(before.get(request, [])) :]
        assert {version for *_, version in old} <= {0}
        assert {version for *_, version in later} == {1}
        expected = continuation(updated, prompt, [token for token, *_ in old])
        chex.assert_trees_all_equal([(token, chance) for token, chance, _ in later], expected)
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
    engine = LLM(model, **SIZES | ENGINES[name]).engine
    engine.record(tmp_path / "run.jsonl")
    for request, prompt in PROMPTS.items():
        engine.add(request, prompt, GREEDY)
    answers: Tokens = {}
    run_steps(engine, answers, 9)
    before = {request: list(answer) for request, answer in answers.items()}
    started = [
        s.request_id
        for s in (*engine.scheduler_state.running.seqs, *engine.scheduler_state.waiting)
        if s.blocks
    ]
    engine.update_params(new, pending="keep")
    scheduler.check(engine.scheduler_state)
    events: list[Any] = []
    for i in range(6):  # new requests that have an old one's prompt, and what it said so far
        prompt = PROMPTS["r37"] + [token for token, *_ in answers.get("r37", [])]
        engine.add(f"new{i}", prompt, GREEDY)
        events += run_steps(engine, answers, 3)
    events += run_steps(engine, answers)
    # the first of the new ones finds nothing; those after it may find what it computed
    for event in events:
        assert not (isinstance(event, Admitted) and event.request_id == "new0" and event.num_cached)
    prompts = [
        PROMPTS["r37"] + [token for token, *_ in answers["r37"][:n]]
        for n in range(len(answers["r37"]) + 1)
    ]
    wanted_of_new = answers_of(updated, prompts, GREEDY)
    for i in range(6):
        say = [(token, chance) for token, chance, _ in answers[f"new{i}"]]
        assert say in wanted_of_new, "no old content is in it"
        assert {version for *_, version in answers[f"new{i}"]} == {1}
    unfinished = [
        request
        for request in started
        if before.get(request) and len(before[request]) < GREEDY.max_tokens
    ]
    assert unfinished, "some request had begun to answer"
    num_different = 0
    for request in unfinished:
        old = before[request]
        versions = [version for *_, version in answers[request]]
        assert versions == [0] * len(old) + [1] * (GREEDY.max_tokens - len(old))
        expected = continuation(updated, PROMPTS[request], [token for token, *_ in old])
        num_different += [
            (token, chance) for token, chance, _ in answers[request][len(old) :]
        ] != expected
    assert num_different or name == "swapping", "the old cache matters"
    engine.record(None)
    assert replay.verify(tmp_path / "run.jsonl").identical
    assert '{"update":{"version":1,"pending":"keep"}}' in (tmp_path / "run.jsonl").read_text()


def test_keep_with_the_same_weights_changes_no_token(model):
    """So the cache is kept: the continuation is that of an engine without the update."""
    answers = []
    for pending in (None, "keep", "restart"):
        llm = LLM(model, **SIZES)
        plain = model_of("Qwen3", layers=2, linear_impl="xla").model.params
        for request, prompt in PROMPTS.items():
            llm.engine.add(request, prompt, GREEDY, forks=[f"{request}/1", f"{request}/2"])
        outputs: Tokens = {}
        run_steps(llm.engine, outputs, 7)
        admitted: list[Any] = []
        if pending:
            llm.update_params(plain, pending=pending)
            admitted = [
                event for event in run_steps(llm.engine, outputs, 1) if isinstance(event, Admitted)
            ]
        assert bool(admitted) == (pending == "restart")
        run_steps(llm.engine, outputs)
        answers.append({name: [token[:2] for token in output] for name, output in outputs.items()})
        assert llm.engine.scheduler_state.pool.num_free == SIZES["num_blocks"]
    assert len(answers[0]) == 12
    chex.assert_trees_all_equal(answers[0], answers[1])
    chex.assert_trees_all_equal(answers[0], answers[2])


@pytest.mark.slow
def test_nothing_that_old_content_went_into_is_found_later(model, new, updated):
    """Blocks that are filled after the update, at the end of a prompt whose beginning is old."""
    llm = LLM(model, **SIZES | {"max_num_batched_tokens": 16, "token_buckets": (16,)})
    prompt = PROMPTS["r58"]
    llm.engine.add("old", prompt, GREEDY)
    llm.engine.step()
    llm.update_params(new, pending="keep")
    run_steps(llm.engine, {})
    (repeated,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    assert repeated.num_cached_tokens == 0
    chances: Any = repeated.outputs[0].logprobs
    answer = [
        (t, entry[t].logprob)
        for t, entry in zip(repeated.outputs[0].token_ids, chances, strict=True)
    ]
    chex.assert_trees_all_equal(answer, continuation(updated, prompt, []))
    (third,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    assert third.num_cached_tokens == 56, "what has new content alone is found"


@pytest.mark.parametrize("pending", ["restart", "keep"])
def test_beam_searches_and_pooled_prompts_go_on(model, new, pending):
    llm = LLM(model, **SIZES)
    llm.engine.add(
        "beams", PROMPTS["r20"], BeamSearchParams(beam_width=3, max_tokens=8), forks=["b1", "b2"]
    )
    for _ in range(4):
        llm.engine.step()
    llm.update_params(new, pending=pending)
    beams: list[Any] = []
    while llm.engine.has_work:
        result = llm.engine.step()
        assert result is not None
        beams += result.beams
    assert [len(sequence.token_ids) for sequence in beams[0].sequences] == [8] * 3
    assert llm.engine.scheduler_state.pool.num_free == SIZES["num_blocks"]


def test_outputs_say_which_weights_made_each_token(model, new):
    llm = LLM(model, **SIZES)
    assert llm.params_version == 0
    (first,) = llm.generate([{"prompt_token_ids": PROMPTS["r3"]}], GREEDY, use_tqdm=False)
    assert first.outputs[0].versions == (0,) * GREEDY.max_tokens
    llm.update_params(new)
    llm.update_params(new)
    assert llm.params_version == 2
    (later,) = llm.generate([{"prompt_token_ids": PROMPTS["r3"]}], GREEDY, use_tqdm=False)
    assert later.outputs[0].versions == (2,) * GREEDY.max_tokens
    (search,) = llm.generate(
        [{"prompt_token_ids": PROMPTS["r3"]}], BeamSearchParams(2, max_tokens=3), use_tqdm=False
    )
    assert [branch.versions for branch in search.outputs] == [(), ()]
    llm.engine.reset()
    assert llm.params_version == 2


def test_an_unknown_value_changes_nothing(model, new):
    llm = LLM(model, **SIZES)
    with pytest.raises(
        ValueError, match="pending is 'kept'; it must be one of None, 'restart', 'keep'"
    ):
        llm.update_params(new, pending="kept")  # type: ignore[arg-type]
    assert llm.params_version == 0


def test_an_update_of_an_idle_engine_is_recorded_too(model, new, tmp_path):
    llm = LLM(model, **SIZES)
    llm.engine.record(tmp_path / "run.jsonl")
    llm.update_params(new)
    llm.generate([{"prompt_token_ids": PROMPTS["r3"]}], GREEDY, use_tqdm=False)
    llm.engine.record(None)
    kinds = [
        next(iter(json.loads(line)))
        for line in (tmp_path / "run.jsonl").read_text().splitlines()[1:4]
    ]
    assert kinds == ["update", "submit", "schedule"]
    assert replay.verify(tmp_path / "run.jsonl").identical
