"""Speculation changes how many tokens a step gives, and no token: outputs equal those of an engine
without drafts.
"""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

import chex
import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, EngineConfig, SamplingParams
from pagedjax.engine import runtime
from pagedjax.engine.drafters import Drafter
from pagedjax.host import scheduler
from pagedjax.host.replay import replay, verify
from pagedjax.host.types import Admitted, Finished, Preempted, Sampled, Verified
from pagedjax.options.config import Speculative
from tests.engine import test_lookahead as lookahead
from tests.engine.test_lookahead import OFTEN, tokens

CONFIG = lookahead.CONFIG | {"compilation": "eager"}  # no step compiles
KINDS = ("plain", "stops", "forks", "penalties", "minimum", "logprobs", "bias")


class Ask(NamedTuple):
    names: tuple[str, ...]
    prompt: list[int]
    params: SamplingParams


def asks(seed: int, number: int = 14) -> list[Ask]:
    """Requests of many kinds, each with a seed of its own."""
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
            params |= {"logprobs": 2, "prompt_logprobs": 1}
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
    engine.reset()
    engine.record(path)
    outputs = {name: [] for ask in requests for name in ask.names}
    reasons = {}
    logprobs = {}
    steps = drafted = accepted = preempted = 0
    while pending or engine.has_work:
        while pending and draw.random() < 0.5:
            ask = pending.pop(0)
            engine.add(ask.names[0], ask.prompt, ask.params, forks=ask.names[1:])
        if draw.random() < cancel:
            events = engine.cancel(draw.choice(list(outputs)))
            reasons |= {
                event.request_id: event.reason for event in events if isinstance(event, Finished)
            }
        result = engine.step()
        if result is None:
            continue
        steps += 1
        scheduler.check(engine.scheduler_state)
        assert result.compilations == 0
        assert result.plan.num_tokens <= engine.config.max_num_batched_tokens
        for event in result.events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    outputs[name].append(token)
            elif isinstance(event, Finished):
                reasons[event.request_id] = event.reason
                assert event.num_output == len(outputs[event.request_id])
            elif isinstance(event, Verified):
                drafted += sum(event.drafts)
                accepted += sum(event.accepted)
            preempted += isinstance(event, Preempted)
        for entry in result.logprobs:
            ranked = entry.token_id, entry.rank, entry.top_ids
            logprobs[entry.request_id, entry.prompt, entry.position] = ranked, entry.logprob
        assert steps < 2000
    assert engine.scheduler_state.pool.num_free == engine.scheduler_state.pool.num_blocks, (
        "blocks leaked"
    )
    engine.record(None)
    return Outcome(outputs, reasons, logprobs, steps, drafted, accepted, preempted)


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
    engine = LLM(tiny, progress=False, **CONFIG).engine
    requests_by_seed = {seed: asks(seed) for seed in range(3)}
    return {
        seed: run(engine, requests, seed) for seed, requests in requests_by_seed.items()
    }, requests_by_seed


def speculative_engine(tiny, k: int, drafter: Drafter, monkeypatch, **config):
    monkeypatch.setattr(runtime.drafters, "find", lambda options: drafter)
    options = Speculative(num_tokens=k, adaptive=False)
    return LLM(tiny, progress=False, speculative=options, **CONFIG | config).engine


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


# each case compiles an engine
SLOW = ("k 1", "blocks of 16", "two buckets", "no prefix cache", "shortest first")


@pytest.mark.default_cases("k 3", "prompts and decodes in turn")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_outputs_are_those_without_drafts(tiny, plain, monkeypatch, tmp_path, case):
    k, config = CASES[case]
    outcomes, requests = plain
    engine = speculative_engine(tiny, k, oracle_drafter(*plain, right=0.7), monkeypatch, **config)
    accepted = preempted = 0
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed + 100, tmp_path / "log.jsonl")
        assert outcome.tokens == expected.tokens
        assert outcome.reasons == expected.reasons
        assert {at: ranked for at, (ranked, _) in outcome.logprobs.items()} == {
            at: ranked for at, (ranked, _) in expected.logprobs.items()
        }
        values = [
            {at: np.float32(value) for at, (_, value) in run_outcome.logprobs.items()}
            for run_outcome in (outcome, expected)
        ]
        chex.assert_trees_all_close(*values, atol=1e-4)
        accepted += outcome.accepted
        preempted += outcome.preempted
        assert verify(tmp_path / "log.jsonl").identical
    assert accepted >= (10 if "budget" in case else 75)
    assert preempted or "few blocks" not in case


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
    engine = LLM(tiny, progress=False, speculative=options, **CONFIG).engine
    accepted = 0
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed)
        assert (outcome.tokens, outcome.reasons) == (expected.tokens, expected.reasons)
        accepted += outcome.accepted
    assert accepted or method == "ngram", "suffixes of earlier outputs were never right"


def test_stop_strings_inside_accepted_drafts_end_the_text_at_the_same_place(tiny, monkeypatch):
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=40,
            stop=["e", "th"],
            ignore_eos=True,
            logprobs=1,
            n=2,
        )
        for i in range(8)
    ]
    prompts = [tokens(5 + 3 * i, i) for i in range(8)]
    expected = LLM(tiny, progress=False, **CONFIG).generate(prompts, params, use_tqdm=False)
    free = [p.__class__(**vars(p) | {"stop": ()}) for p in params]
    long = LLM(tiny, progress=False, **CONFIG).generate(prompts, free, use_tqdm=False)
    texts = [
        prompt + list(branch.token_ids)
        for prompt, out in zip(prompts, long, strict=True)
        for branch in out.outputs
    ]

    def propose(memory: Any, sequence_id: str, context: np.ndarray, k: int) -> list[int]:
        start = context.tolist()
        return next((text[len(start) :][:k] for text in texts if text[: len(start)] == start), [])

    engine = speculative_engine(tiny, 6, Drafter("true", propose), monkeypatch)
    llm = LLM(tiny, progress=False, speculative=Speculative(num_tokens=6, adaptive=False), **CONFIG)
    assert llm.engine.runtime.drafter is engine.runtime.drafter
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert {out.outputs[0].finish_reason for out in expected} == {"stop", "length"}
    for output, expected_output in zip(outputs, expected, strict=True):
        for branch, expected_branch in zip(output.outputs, expected_output.outputs, strict=True):
            assert (branch.text, branch.token_ids, branch.finish_reason) == (
                expected_branch.text,
                expected_branch.token_ids,
                expected_branch.finish_reason,
            )
            assert branch.cumulative_logprob == pytest.approx(
                expected_branch.cumulative_logprob, abs=1e-3
            )
            assert [set(p) for p in branch.logprobs] == [set(p) for p in expected_branch.logprobs]


def test_a_prefix_is_found_with_the_blocks_of_accepted_drafts(tiny, plain, monkeypatch):
    """Blocks that accepted drafts filled are published, those of rejected drafts are not."""
    prompt = tokens(9, 3)
    observed = {}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs: list[int] = []

    def propose(memory: Any, sequence_id: str, context: np.ndarray, k: int) -> list[int]:
        following = (prompt + outputs)[len(context) :][:k]
        return [*following[:-1], 0]  # the last one is wrong

    for drafter in (None, Drafter("nearly", propose)):
        engine = (
            speculative_engine(tiny, 5, drafter, monkeypatch)
            if drafter
            else LLM(tiny, progress=False, **CONFIG).engine
        )
        engine.add("first", prompt, params)
        while engine.has_work:
            for event in engine.step().events:
                outputs += event.token_ids if isinstance(event, Sampled) and drafter is None else ()
        engine.add(
            "second", prompt + outputs, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        )
        output = []
        while engine.has_work:
            for event in engine.step().events:
                if isinstance(event, Admitted):
                    observed[drafter is not None] = event.num_cached
                output += event.token_ids if isinstance(event, Sampled) else ()
        observed[drafter is not None, "output"] = output
    assert observed[True] == observed[False] == 36
    assert observed[True, "output"] == observed[False, "output"]


@pytest.mark.slow
def test_a_draft_stops_at_the_end_of_max_model_len(tiny, monkeypatch):
    """The last token is sampled and never computed, so drafts end one position before it; 64 ends a
    block.
    """
    always = Drafter("always", lambda memory, name, context, k: [5] * k)
    for length in (61, 63, 64):
        engine = speculative_engine(tiny, 7, always, monkeypatch, max_model_len=length)
        engine.add(
            "a",
            tokens(length - 12, 1),
            SamplingParams(temperature=0, max_tokens=200, ignore_eos=True),
        )
        num_sampled = 0
        while engine.has_work:
            result = engine.step()
            ends = [
                start + count
                for start, count in zip(result.plan.starts, result.plan.counts, strict=True)
            ]
            assert max(ends) <= length - 1
            num_sampled += sum(
                len(event.token_ids) for event in result.events if isinstance(event, Sampled)
            )
        assert num_sampled == 12


def test_a_replay_knows_offered_drafts(tiny, plain, monkeypatch, tmp_path):
    outcomes, requests = plain
    engine = speculative_engine(tiny, 4, oracle_drafter(*plain, right=0.7), monkeypatch)
    run(engine, requests[0], 0, tmp_path / "log.jsonl")
    transitions = list(replay(tmp_path / "log.jsonl"))
    replayed: dict[str, list[int]] = {}
    for event in (
        event
        for transition in transitions
        for event in transition.events
        if isinstance(event, Sampled)
    ):
        for name, token in zip(event.request_ids, event.token_ids, strict=True):
            replayed.setdefault(name, []).append(token)
    assert replayed == {name: output for name, output in outcomes[0].tokens.items() if output}
    text = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(
        re.sub(r'"offered":{"(\w+)":\d', r'"offered":{"\1":1', text)
    )
    assert not verify(tmp_path / "log.jsonl").identical, "other offers, and the same plans"


def test_without_speculation_a_recording_has_no_word_of_drafts(tiny, plain, tmp_path):
    engine = LLM(tiny, progress=False, **CONFIG).engine
    run(engine, plain[1][0], 0, tmp_path / "log.jsonl")
    text = (tmp_path / "log.jsonl").read_text()
    assert "offered" not in text
    assert "Verified" not in text


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
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative=options)


def test_lookahead_and_speculation_are_refused_together():
    with pytest.raises(
        ValueError,
        match=r"lookahead is 1 and speculative is 'ngram': .*; set lookahead=0, or speculative=",
    ):
        EngineConfig(lookahead=1, speculative={"method": "ngram"})


@pytest.mark.slow
def test_a_drafter_of_ones_own_is_a_value_in_a_file(tiny, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from pagedjax.engine.drafters import Drafter\n"
        "LAST = Drafter('last', lambda memory, sequence_id, tokens, k: [int(tokens[-1])] * k)\n"
    )
    options = {"method": f"{file}:LAST", "num_tokens": 2, "adaptive": False}
    llm = LLM(tiny, progress=False, speculative=options, **CONFIG)
    drafted = 0
    llm.engine.add("a", tokens(5, 1), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    while llm.engine.has_work:
        drafted += sum(llm.engine.step().plan.drafts)
    assert drafted >= 5
    with pytest.raises(
        ValueError, match=r"speculative\.method is '.*mine\.py:NONE', but NONE in .* is no Drafter"
    ):
        LLM(tiny, progress=False, speculative={**options, "method": f"{file}:NONE"}, **CONFIG)


@pytest.mark.default_cases("320", "-1")
@pytest.mark.parametrize("wrong", [320, -1, 2**40, 0.5])
def test_a_draft_outside_the_vocabulary_is_refused_and_nothing_is_lost(tiny, monkeypatch, wrong):
    drafts = [wrong]
    engine = speculative_engine(
        tiny, 3, Drafter("other", lambda memory, name, context, k: [5, *drafts]), monkeypatch
    )
    engine.add("a", tokens(5, 1), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    output = []
    message = (
        r"drafter 'other' drafted .* for 'a'; the vocabulary is 0 to 319, .*; use a drafter with"
    )
    output += [t for e in engine.step().events if isinstance(e, Sampled) for t in e.token_ids]
    with pytest.raises(ValueError, match=message):
        engine.step()
    drafts.clear()  # the drafter is mended, and the request goes on
    while engine.has_work:
        output += [t for e in engine.step().events if isinstance(e, Sampled) for t in e.token_ids]
    plain = LLM(tiny, progress=False, **CONFIG)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert (
        tuple(output)
        == plain.generate([tokens(5, 1)], params, use_tqdm=False)[0].outputs[0].token_ids
    )


def test_a_beam_search_beside_drafts_finds_what_it_finds_alone(tiny, monkeypatch):
    """Beams have no drafts themselves. A row with drafts before them has several samples: theirs
    come later.
    """
    beam = BeamSearchParams(beam_width=2, max_tokens=6)
    params = SamplingParams(temperature=0, max_tokens=30)
    drafter = Drafter("always", lambda memory, name, context, k: [5] * k)
    engines = (
        LLM(tiny, progress=False, **CONFIG).engine,
        speculative_engine(tiny, 3, drafter, monkeypatch),
    )
    searches = []
    shared_steps = 0
    for engine in engines:
        engine.add("plain", tokens(7, 2), params)
        engine.step()
        engine.add("a", tokens(5, 1), beam, forks=["b"])
        results = []
        while engine.has_work:
            step = engine.step()
            results += step.beams
            drafts = dict(
                zip([seq.request_id for seq in step.plan.seqs], step.plan.drafts, strict=False)
            )
            assert not drafts.get("a")
            assert not drafts.get("b")
            shared_steps += bool("a" in drafts and drafts.get("plain"))
        searches.append(results)
    assert shared_steps > 2, "no step had drafts and beams"
    assert searches[0] == searches[1]
