"""Speculation changes how many tokens a step gives, and no token: outputs equal those of an engine
without drafts.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, EngineConfig, SamplingParams
from pagedjax.engine import runtime
from pagedjax.engine.drafters import Drafter
from pagedjax.host import scheduler
from pagedjax.host.replay import replay, verify
from pagedjax.host.types import Admitted, Finished, Preempted, Verified
from pagedjax.options.config import Speculative
from tests.engine import test_lookahead as lookahead
from tests.engine.runs import check_idle, greedy, sampled, steps, token_ids
from tests.engine.test_lookahead import OFTEN, tokens
from tests.refusals import refused

CONFIG = lookahead.CONFIG | {"compilation": "eager"}  # no step compiles


def make(model: Any, **config: Any) -> LLM:
    return LLM(model, progress=False, **CONFIG | config)


KINDS = ("plain", "stops", "forks", "penalties", "minimum", "logprobs", "bias")


class Ask(NamedTuple):
    names: tuple[str, ...]
    prompt: list[int]
    params: SamplingParams


def asks(seed: int, number: int = 14, of_prompts: bool = False) -> list[Ask]:
    """Requests of many kinds, each with a seed of its own. of_prompts: log-probabilities of prompts
    are wanted too, which have programs of their own.
    """
    draw = random.Random(seed)
    requests = []
    for i in range(number):
        kind = draw.choice(KINDS)
        names = (f"r{i}",)
        params: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "ignore_eos": True, "seed": i}
        params |= {"temperature": draw.choice([0.0, 1.0]), "top_p": draw.choice([1.0, 0.9])}
        if kind in ("stops", "minimum"):
            params["stop_token_ids"] = list(OFTEN)
        if kind == "minimum":
            params["min_tokens"] = min(6, params["max_tokens"])
        if kind == "forks":
            names = tuple(f"r{i}{branch}" for branch in ("", "b", "c"))
            params["temperature"] = 1.0
        if kind == "penalties":
            params |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
        if kind == "logprobs":
            params |= {"logprobs": 2, "prompt_logprobs": 1 if of_prompts else None}
        if kind == "bias":
            params["logit_bias"] = {7: 4.0, 8: 4.0}
        shared = tokens(12, 0) if draw.random() < 0.4 else []
        requests.append(
            Ask(names, shared + tokens(draw.randint(1, 40), i), SamplingParams(**params))
        )
    return requests


class Outcome(NamedTuple):
    tokens: dict[str, list[int]]
    reasons: dict[str, str]
    logprobs: dict[tuple[str, bool, int], tuple]  # by sequence, prompt or not, and position
    steps: int
    drafted: int
    accepted: int
    preempted: int


def run(engine, requests: list[Ask], seed: int, path=None, cancel: float = 0.0) -> Outcome:
    """Requests arrive between random steps; some of their sequences are cancelled."""
    draw = random.Random(seed)
    pending = list(requests)
    names = [name for ask in requests for name in ask.names]
    engine.reset()
    engine.record(path)
    results = []
    events = []
    logprobs = {}
    while pending or engine.has_work:
        while pending and draw.random() < 0.5:
            ask = pending.pop(0)
            engine.add(ask.names[0], ask.prompt, ask.params, forks=ask.names[1:])
        if draw.random() < cancel:
            events += engine.cancel(draw.choice(names))
        result = engine.step()
        if result is None:
            continue
        results.append(result)
        events += result.events
        scheduler.check(engine.scheduler_state)
        # else a step gave log-probabilities of a prompt, whose program is compiled at its first use
        assert result.compilations == 0 or any(place.prompt for place in result.logprobs)
        assert result.plan.num_tokens <= engine.config.max_num_batched_tokens
        for entry in result.logprobs:
            ranked = entry.token_id, entry.rank, entry.top_ids
            logprobs[entry.request_id, entry.prompt, entry.position] = ranked, entry.logprob
        assert len(results) < 2000
    check_idle(engine)
    engine.record(None)
    outputs = {name: [] for name in names} | sampled(results)
    ends = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert all(end.num_output == len(outputs[name]) for name, end in ends.items())
    verified = [event for event in events if isinstance(event, Verified)]
    return Outcome(
        outputs,
        {name: end.reason for name, end in ends.items()},
        logprobs,
        steps=len(results),
        drafted=sum(sum(event.drafts) for event in verified),
        accepted=sum(sum(event.accepted) for event in verified),
        preempted=sum(isinstance(event, Preempted) for event in events),
    )


def oracle_drafter(
    outcomes: dict[int, Outcome], requests_by_seed: dict[int, list[Ask]], right: float
) -> Drafter:
    """A drafter that knows what the engine will say, and is right with probability `right` at each
    token.
    """
    texts = [
        ask.prompt + outcomes[seed].tokens[name]
        for seed, requests in requests_by_seed.items()
        for ask in requests
        for name in ask.names
    ]
    draw = random.Random(0)

    def propose(memory: Any, sequence_id: str, context: np.ndarray, k: int) -> list[int]:
        start = context.tolist()
        text = next((text for text in texts if text[: len(start)] == start), start)
        following = (text[len(start) :] + [9] * k)[:k]  # also past the end
        return [token if draw.random() < right else (token + 1) % 320 for token in following]

    return Drafter("rehearsed", propose)


@pytest.fixture(scope="module")
def plain(tiny):
    """By seed, requests and their outcome without drafts."""
    return plain_runs(tiny)


def plain_runs(tiny, of_prompts: bool = False) -> tuple[dict[int, Outcome], dict[int, list[Ask]]]:
    engine = make(tiny).engine
    requests = {seed: asks(seed, of_prompts=of_prompts) for seed in range(3)}
    return {seed: run(engine, requests[seed], seed) for seed in requests}, requests


def speculative_engine(tiny, k: int, drafter: Drafter, monkeypatch, **config):
    monkeypatch.setattr(runtime.drafters, "find", lambda options: drafter)
    options = Speculative(num_tokens=k, adaptive=False)
    return make(tiny, speculative=options, **config).engine


CASES = {
    "k 1": (1, {}),
    "k 3": (3, {}),
    "k 7": (7, {}),
    "blocks of 1": (3, {"block_size": 1, "num_blocks": 256}),
    "blocks of 16": (7, {"block_size": 16, "num_blocks": 24}),
    "a small budget": (3, {"max_num_batched_tokens": 8, "token_buckets": (8,)}),
    "two buckets": (3, {"token_buckets": (8, 24)}),
    "no prefix cache": (3, {"enable_prefix_caching": False}),
    "few blocks, computed again": (3, {"num_blocks": 20, "max_model_len": 80}),
    "few blocks, swapped": (
        3,
        {"num_blocks": 20, "max_model_len": 80, "preemption": "swap", "swap_space_gib": 0.001},
    ),
    "prompts and decodes in turn": (3, {"mixed_steps": False}),
    "shortest first": (3, {"policy": "shortest"}),
}


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    """Log-probabilities may differ by what rounding explains."""
    assert outcome.tokens == expected.tokens
    assert outcome.reasons == expected.reasons
    assert outcome.logprobs.keys() == expected.logprobs.keys()
    for at, (ranked, value) in outcome.logprobs.items():
        expected_ranked, expected_value = expected.logprobs[at]
        assert ranked == expected_ranked
        assert value == pytest.approx(expected_value, abs=1e-4)


@pytest.mark.slow
def test_log_probabilities_of_prompts_are_those_without_drafts(tiny, monkeypatch):
    plain = plain_runs(tiny, of_prompts=True)
    engine = speculative_engine(tiny, 3, oracle_drafter(*plain, right=0.7), monkeypatch)
    outcomes, requests = plain
    for seed, expected in outcomes.items():
        assert any(prompt for _, prompt, _ in expected.logprobs)
        assert_same(run(engine, requests[seed], seed + 100), expected)


# each case compiles an engine


@pytest.mark.default_cases("k 3", "prompts and decodes in turn")
# "k 7" and "two buckets" with a draft model; the other sizes change the same numbers
@pytest.mark.slow_cases(
    "k 1",
    "blocks of 1",
    "no prefix cache",
    "few blocks, computed again",
    "few blocks, swapped",
    "shortest first",
)
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_without_drafts(tiny, plain, monkeypatch, tmp_path, case):
    k, config = CASES[case]
    outcomes, requests = plain
    engine = speculative_engine(tiny, k, oracle_drafter(*plain, right=0.7), monkeypatch, **config)
    runs = []
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed + 100, tmp_path / "log.jsonl")
        assert_same(outcome, expected)
        assert verify(tmp_path / "log.jsonl").identical
        runs.append(outcome)
    assert sum(outcome.accepted for outcome in runs) >= (10 if "budget" in case else 75)
    assert any(outcome.preempted for outcome in runs) or "few blocks" not in case


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_that_are_always_wrong_or_always_right_change_no_token(
    tiny, plain, monkeypatch, right
):
    outcomes, requests = plain
    engine = speculative_engine(tiny, 4, oracle_drafter(*plain, right=right), monkeypatch)
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed)
        assert (outcome.tokens, outcome.reasons) == (expected.tokens, expected.reasons)
        if right:
            assert outcome.steps < expected.steps
        else:
            # some differ from what they were made from
            assert outcome.accepted < 10, "a wrong draft was accepted"


def test_sequences_that_are_cancelled_between_steps_get_no_late_token(
    tiny, plain, monkeypatch, tmp_path
):
    outcomes, requests = plain
    engine = speculative_engine(tiny, 5, oracle_drafter(*plain, right=0.9), monkeypatch)
    cancelled = 0
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed, tmp_path / "log.jsonl", cancel=0.3)
        for name, output in outcome.tokens.items():
            assert output == expected.tokens[name][: len(output)]
            assert len(output) == len(expected.tokens[name]) or outcome.reasons[name] == "abort"
        cancelled += list(outcome.reasons.values()).count("abort")
        assert verify(tmp_path / "log.jsonl").identical
    assert cancelled >= 5


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_built_in_drafters_change_no_token(tiny, plain, method):
    outcomes, requests = plain
    options = {"method": method, "num_tokens": 4, "adaptive": False}
    engine = make(tiny, speculative=options).engine
    accepted = 0
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed)
        assert (outcome.tokens, outcome.reasons) == (expected.tokens, expected.reasons)
        accepted += outcome.accepted
    assert accepted or method == "ngram", "suffixes of earlier outputs were never right"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "rejection"])
def test_given_tokens_have_a_step_each_beside_requests_with_drafts(tiny, rule):
    options = {"method": "ngram", "num_tokens": 4, "adaptive": False, "ngram_min": 1, "rule": rule}
    engine = make(tiny, speculative=options).engine
    given_tokens = [7, 8, 9] * 8  # with drafts in its prompt
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True)
    engine.add("given", [7, 8, 9] * 6, replace(params, trace_decode_token_ids=tuple(given_tokens)))
    engine.add("free", list(range(3, 150)), params)
    results = list(steps(engine))
    assert sampled(results)["given"] == given_tokens
    plans = [result.plan for result in results if result.plan.drafts]
    drafts = {
        seq.request_id: k
        for plan in plans
        for seq, k in zip(plan.seqs, plan.drafts, strict=True)
        if k
    }
    assert drafts.keys() == {"free"}


def test_stop_strings_inside_accepted_drafts_end_the_text_at_the_same_place(tiny, monkeypatch):
    options = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "n": 2}
    free = [SamplingParams(seed=i, **options) for i in range(8)]
    params = [replace(unstopped, stop=("e", "th")) for unstopped in free]
    prompts = [tokens(5 + 3 * i, i) for i in range(8)]
    undrafted = make(tiny)
    expected = undrafted.generate(prompts, params)
    texts = [
        prompt + list(branch.token_ids)
        for prompt, out in zip(prompts, undrafted.generate(prompts, free), strict=True)
        for branch in out.outputs
    ]

    def propose(memory: Any, sequence_id: str, context: np.ndarray, k: int) -> list[int]:
        start = context.tolist()
        return next((text[len(start) :][:k] for text in texts if text[: len(start)] == start), [])

    drafter = Drafter("true", propose)
    monkeypatch.setattr(runtime.drafters, "find", lambda options: drafter)
    llm = make(tiny, speculative=Speculative(num_tokens=6, adaptive=False))
    assert llm.engine.runtime.drafter is drafter
    outputs = llm.generate(prompts, params)
    assert {out.outputs[0].finish_reason for out in expected} == {"stop", "length"}
    pairs = zip(
        [branch for output in outputs for branch in output.outputs],
        [branch for output in expected for branch in output.outputs],
        strict=True,
    )
    for branch, expected_branch in pairs:
        for name in ("text", "token_ids", "finish_reason"):
            assert getattr(branch, name) == getattr(expected_branch, name)
        total = expected_branch.cumulative_logprob
        assert branch.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert [set(p) for p in branch.logprobs] == [set(p) for p in expected_branch.logprobs]


def test_a_prefix_is_found_with_the_blocks_of_accepted_drafts(tiny, monkeypatch):
    """Blocks that accepted drafts filled are published, those of rejected drafts are not."""
    prompt = tokens(9, 3)
    (answer,) = token_ids(make(tiny), [prompt], greedy(30))

    def propose(memory: Any, sequence_id: str, context: np.ndarray, k: int) -> list[int]:
        following = [*prompt, *answer][len(context) :][:k]
        return [*following[:-1], 0]  # the last one is wrong

    outputs = []
    for engine in (
        make(tiny).engine,
        speculative_engine(tiny, 5, Drafter("nearly", propose), monkeypatch),
    ):
        engine.add("first", prompt, greedy(30))
        list(steps(engine))
        engine.add("second", [*prompt, *answer], greedy(5))
        results = list(steps(engine))
        events = [event for result in results for event in result.events]
        (admitted,) = [event for event in events if isinstance(event, Admitted)]
        assert admitted.num_cached == 36
        outputs.append(sampled(results))
    assert outputs[0] == outputs[1]


def test_a_replay_knows_offered_drafts(tiny, plain, monkeypatch, tmp_path):
    outcomes, requests = plain
    log = tmp_path / "log.jsonl"
    engine = speculative_engine(tiny, 4, oracle_drafter(*plain, right=0.7), monkeypatch)
    run(engine, requests[0], 0, log)
    outputs = {name: output for name, output in outcomes[0].tokens.items() if output}
    assert sampled(replay(log)) == outputs
    log.write_text(re.sub(r'"offered":{"(\w+)":\d', r'"offered":{"\1":1', log.read_text()))
    assert not verify(log).identical, "other offers, and the same plans"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_tokens": 0},
            r"speculative\.num_tokens is 0; it must be an integer from 1 to 32; to switch speculation off",
        ),
        ({"num_tokens": 33}, r"speculative\.num_tokens is 33; it must be an integer from 1 to 32"),
        ({"num_tokens": True}, r"speculative\.num_tokens is True"),
        (
            {"method": "ngrams"},
            r"speculative\.method is 'ngrams'; it must be one of 'ngram', .*, 'eagle', or FILE\.py:NAME",
        ),
        ({"ngram_min": 4}, r"speculative\.ngram_min is 4; it must be at most ngram_max 3"),
        ({"adaptive": 1}, r"speculative\.adaptive is 1; it must be True or False"),
        ({"num_token": 3}, r"unknown key speculative\.'num_token'; did you mean 'num_tokens'"),
        (3, r"speculative is 3; it must be None, or its fields by name"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with refused(message):
        EngineConfig(speculative=options)


@pytest.mark.slow
def test_a_drafter_of_ones_own_is_a_value_in_a_file(tiny, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from pagedjax.engine.drafters import Drafter\n"
        "LAST = Drafter('last', lambda memory, sequence_id, tokens, k: [int(tokens[-1])] * k)\n"
        "MINE = Drafter('mine', None)\n"
    )
    options = {"method": f"{file}:LAST", "num_tokens": 2, "adaptive": False}
    llm = make(tiny, speculative=options)
    llm.engine.add("a", tokens(5, 1), greedy(8))
    assert sum(sum(result.plan.drafts) for result in steps(llm.engine)) >= 5
    for name, message in (
        ("NONE", r"speculative\.method is '.*mine\.py:NONE', but NONE in .* is no Drafter"),
        ("MINE", r"mine\.py:MINE', and its propose is None; give it a function"),
    ):
        with refused(message):
            make(tiny, speculative={"method": f"{file}:{name}"})


@pytest.mark.default_cases("320", "-1")
@pytest.mark.parametrize("wrong", [320, -1, 2**40, 0.5])
def test_a_draft_outside_the_vocabulary_is_refused_and_nothing_is_lost(tiny, monkeypatch, wrong):
    drafts = [wrong]
    drafter = Drafter("other", lambda memory, name, context, k: [5, *drafts])
    engine = speculative_engine(tiny, 3, drafter, monkeypatch)
    engine.add("a", tokens(5, 1), greedy(8))
    results = [engine.step()]
    with refused(
        r"drafter 'other' drafted .* for 'a'; the vocabulary is 0 to 319, .*; use a drafter with"
    ):
        engine.step()
    drafts.clear()  # the drafter is mended, and the request goes on
    results += steps(engine)
    assert [tuple(sampled(results)["a"])] == token_ids(make(tiny), [tokens(5, 1)], greedy(8))


def test_a_beam_search_beside_drafts_finds_what_it_finds_alone(tiny, monkeypatch):
    """Beams have no drafts themselves. A row with drafts before them has several samples: theirs
    come later.
    """
    drafter = Drafter("always", lambda memory, name, context, k: [5] * k)
    searches = []
    shared_steps = 0
    for engine in (make(tiny).engine, speculative_engine(tiny, 3, drafter, monkeypatch)):
        engine.add("plain", tokens(7, 2), SamplingParams(temperature=0, max_tokens=30))
        engine.step()
        engine.add("a", tokens(5, 1), BeamSearchParams(beam_width=2, max_tokens=6), forks=["b"])
        results = list(steps(engine))
        searches.append([beams for result in results for beams in result.beams])
        for plan in [result.plan for result in results]:
            names = [seq.request_id for seq in plan.seqs]
            drafts = dict(zip(names, plan.drafts, strict=False))
            assert not drafts.get("a")
            assert not drafts.get("b")
            shared_steps += bool("a" in drafts and drafts.get("plain"))
    assert shared_steps > 2, "no step had drafts and beams"
    assert searches[0] == searches[1]
