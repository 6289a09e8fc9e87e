"""Lookahead changes when steps run and nothing else: plans, events, tokens and log-probabilities
are the same.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, EngineConfig, SamplingParams
from pagedjax.engine import lookahead
from pagedjax.engine import state as engine_state
from pagedjax.host import scheduler
from pagedjax.host.replay import verify
from pagedjax.host.types import EMPTY_PLAN, Request, Sampled, Seq, StepResult
from tests.engine.runs import greedy, sampled
from tests.refusals import refused

DEPTHS = (1, 3)
# One bucket, so that each engine of these tests and of those of drafts and meshes compiles one
# program, not two.
CONFIG = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "token_buckets": (24,),
    "block_size": 4,
    "num_blocks": 64,
}
OFTEN = tuple(range(0, 320, 8))  # stop tokens that a random model meets after some ten tokens


def make(tiny, depth: int, **config):
    return LLM(tiny, progress=False, lookahead=depth, **CONFIG | config)


@pytest.fixture(scope="module")
def llms(tiny):
    """They have the programs of users: without lookahead that of test_speculation.py. The engines of
    other modes, below, have plain programs, too."""
    return {depth: make(tiny, depth, compilation="eager") for depth in (0, *DEPTHS)}


class Observed:
    """An engine's results without times; how many steps it sent, how many programs computed them,
    and how many of these began with a plan that was not predicted (`late`).
    """

    def __init__(self, engine) -> None:
        self.engine = engine
        self.results = []
        self.steps = 0
        self.sent = 0
        self.programs = 0
        self.late = 0
        self.preempted = 0

    def step(self):
        send = engine_state.send

        def counted(runtime, state, cache, run, previous=None, unsampled=frozenset()):
            self.sent += len(run)
            self.programs += 1
            self.late += previous is None
            return send(runtime, state, cache, run, previous, unsampled)

        with mock.patch.object(engine_state, "send", counted):
            result = self.engine.step()
        scheduler.check(self.engine.scheduler_state)
        self.steps += 1
        self.preempted += len(result.plan.preempted)
        self.results.append(
            (result.plan, result.events, result.logprobs, result.beams, result.padded_tokens > 0)
        )
        return result

    def finish(self) -> list[StepResult]:
        results = []
        while self.engine.has_work:
            results.append(self.step())
        return results


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, n).tolist()


KINDS = ("plain", "stops", "forks", "beams", "penalties")
WITH_GIVEN = (*KINDS, "given")  # tokens


def play(
    engine, seed: int, path, *, kinds=KINDS, hottest: float = 1.0, of_prompts: bool = True
) -> Observed:
    """Requests of many kinds that come, and are cancelled, between any two steps; recorded to
    `path`.

    hottest: temperature of the requests that are not greedy.
    of_prompts: whether some requests want log-probabilities of their prompts.
    """
    draw = random.Random(seed)
    engine.reset()
    engine.record(path)
    run = Observed(engine)
    number = 0
    while number < 14 or engine.has_work:
        while number < 14 and draw.random() < 0.5:
            add_request(engine, draw, number, draw.choice(kinds), hottest, of_prompts)
            number += 1
        if draw.random() < 0.1:
            run.results.append(
                engine.cancel(f"r{draw.randrange(14)}{draw.choice(['', '', 'b', 'c'])}")
            )
        if draw.random() < 0.03:
            engine.reset_prefix_cache()
        if engine.has_work:
            run.step()
        assert run.steps < 2000
    engine.record(None)
    return run


def add_request(
    engine, draw: random.Random, number: int, kind: str, hottest: float, of_prompts: bool
) -> None:
    name = f"r{number}"
    prompt = tokens(draw.randint(1, 40), number + 1)
    forks = []
    params: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "ignore_eos": True}
    params |= {"seed": number + 1, "temperature": draw.choice([0.0, hottest])}
    if kind == "beams":
        beam = BeamSearchParams(beam_width=2, max_tokens=6)
        engine.add(name, prompt, beam, forks=[f"{name}b"])
        return
    if kind == "stops":
        params |= {"stop_token_ids": list(OFTEN)}
        params |= {"min_tokens": min(draw.randint(0, 4), params["max_tokens"])}
    if kind == "forks":
        forks = [f"{name}b", f"{name}c"]
        params["temperature"] = hottest
    if kind == "penalties":
        params |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    if kind == "given":
        params["trace_decode_token_ids"] = tokens(params["max_tokens"], 100 + number)
    if draw.random() < 0.3:
        params |= {"logprobs": 2, "prompt_logprobs": 1 if of_prompts else None}
    shared = tokens(12, 0) if draw.random() < 0.4 else []
    engine.add(name, shared + prompt, SamplingParams(**params), forks=forks)


def compare(engines, seed: int, folder: Path, **options) -> tuple[Observed, Observed]:
    """Plays the same on an engine without lookahead and one with it: recordings and results are
    equal.
    """
    runs = [
        play(engine, seed, folder / f"{i}.jsonl", **options) for i, engine in enumerate(engines)
    ]
    assert runs[1].results == runs[0].results
    assert (folder / "1.jsonl").read_bytes() == (folder / "0.jsonl").read_bytes()
    return runs[0], runs[1]


@pytest.mark.default_cases("3-4")
@pytest.mark.slow_cases("1-10")
@pytest.mark.parametrize(("depth", "seeds"), [(1, 10), (3, 4), (3, 10)])
def test_recordings_are_byte_identical_with_lookahead(llms, tmp_path, depth, seeds):
    engines = llms[0].engine, llms[depth].engine
    # in slow runs; by default a follower has log-probabilities of prompts (test_replicated_engines.py)
    of_prompts = seeds > 4
    pairs = [compare(engines, seed, tmp_path, of_prompts=of_prompts) for seed in range(seeds)]
    for plain, _ in pairs:
        assert plain.sent == plain.late == plain.steps
    steps = sum(run.steps for _, run in pairs)
    assert sum(run.late for _, run in pairs) < 0.9 * steps, "no step was predicted"
    assert sum(run.sent for _, run in pairs) >= steps + 5, "no prediction was wrong"


@pytest.mark.slow_cases("recomputed", "swapped")
@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 20, "enable_prefix_caching": False},
        {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001},
        {"num_blocks": 10, "block_size": 8, "policy": "shortest"},
    ],
    ids=["recomputed", "swapped", "shortest first"],
)
def test_recordings_are_byte_identical_under_preemption(tiny, tmp_path, config):
    engines = [make(tiny, depth, max_model_len=64, **config).engine for depth in (0, 3)]
    pairs = [compare(engines, seed, tmp_path) for seed in range(3)]
    assert any(plain.preempted for plain, _ in pairs), "no sequence was preempted"


@pytest.mark.slow
@pytest.mark.default_cases("separate steps")
@pytest.mark.parametrize(
    "config",
    [
        {"mixed_steps": False},
        {"token_buckets": (8, 24)},
        {
            "chunked_prefill": False,
            "mixed_steps": False,
            "max_num_batched_tokens": 128,
            "token_buckets": (8, 128),
        },
        {"reservation": "pow2", "enable_prefix_caching": False},
        {
            "reservation": "oracle",
            "enable_prefix_caching": False,
            "mixed_steps": False,
            "policy": "static",
        },
    ],
    ids=[
        "separate steps",
        "two buckets",
        "whole prompts first",
        "reserved",
        "reserved, separate steps, static",
    ],
)
def test_recordings_are_byte_identical_in_baseline_modes(tiny, tmp_path, config):
    """Without mixed steps a decode may wait; then its newest token is not on the device when a step
    is predicted.
    """
    engines = [make(tiny, depth, **config).engine for depth in (0, 3)]
    kinds = ("plain", "stops", "penalties") if "reservation" in config else KINDS
    pairs = [compare(engines, seed, tmp_path, kinds=kinds) for seed in range(4)]
    assert verify(tmp_path / "0.jsonl").identical
    steps = sum(run.steps for _, run in pairs)
    assert sum(run.late for _, run in pairs) < 0.9 * steps, "no step was predicted"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_branch_that_is_cancelled_before_its_fork_lends_its_row_to_no_other(llms, depth):
    """The branches behind it have other arrivals than in the step that was predicted."""
    outputs = []
    for engine in (llms[0].engine, llms[depth].engine):
        engine.reset()
        params = SamplingParams(temperature=2.0, seed=1, max_tokens=8, ignore_eos=True)
        engine.add("a", tokens(57, 1), params, forks="bcd")
        run = Observed(engine)
        results = [run.step(), run.step()]
        assert engine.scheduler_state.running.seqs[0].request.forks == ("b", "c", "d")
        engine.cancel("b")
        outputs.append(sampled([*results, *run.finish()]))
    assert outputs[0] == outputs[1]
    assert outputs[0].keys() == {"a", "c", "d"}


def test_stop_strings_end_at_the_same_token(llms):
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, stop=["e", "th"], ignore_eos=True)
        for i in range(8)
    ]
    prompts = [tokens(5 + 3 * i, i) for i in range(8)]
    expected = llms[0].generate(prompts, params)
    assert {out.outputs[0].finish_reason for out in expected} == {"stop", "length"}
    for depth in DEPTHS:
        assert llms[depth].generate(prompts, params) == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_step_but_the_first_is_predicted_when_nothing_stops(llms, depth):
    engine = llms[depth].engine
    engine.reset()
    for i in range(8):  # more than run at a time: all ends are known in advance
        engine.add(str(i), tokens(3 + i, i), greedy(9 + i))
    run = Observed(engine)
    for result in run.finish():
        assert 0 <= result.device_seconds <= result.finished - result.started
        assert result.compilations == 0
        for event in result.events:
            assert not isinstance(event, Sampled) or lookahead.NO_TOKEN not in event.token_ids
    assert run.late == 1
    assert run.sent == run.steps


@pytest.mark.parametrize("depth", DEPTHS)
def test_given_tokens_are_on_the_device_in_steps_that_are_predicted(llms, depth, tmp_path):
    """Beside requests that sample, and computed again when blocks run out."""
    given_requests = {f"given{i}": tokens(20 + i, 50 + i) for i in range(4)}
    runs = []
    for engine in (llms[0].engine, llms[depth].engine):
        engine.reset()
        for i, (name, output) in enumerate(given_requests.items()):
            params = greedy(len(output), logprobs=1, trace_decode_token_ids=output)
            engine.add(name, tokens(30 + i, i), params)
            engine.add(f"free{i}", tokens(30 + i, 10 + i), greedy(20 + i, logprobs=1))
        runs.append(Observed(engine))
        outputs = sampled(runs[-1].finish())
        assert {name: outputs[name] for name in given_requests} == given_requests
    plain, with_lookahead = runs
    assert with_lookahead.results == plain.results
    assert plain.preempted
    assert with_lookahead.late < 0.5 * with_lookahead.steps


def test_a_stop_token_costs_at_most_one_extra_step(llms):
    """No request waits: a row that ends is ignored in the step that is on the device already."""
    engine = llms[1].engine
    engine.reset()
    for i in range(6):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=40, stop_token_ids=list(OFTEN))
        engine.add(str(i), tokens(4, i), params)
    run = Observed(engine)
    ends = sum(
        any(getattr(event, "reason", None) == "stop" for event in result.events)
        for result in run.finish()
    )
    assert ends >= 4
    assert run.sent - run.steps <= ends  # at worst one wrong prediction for each


@pytest.mark.slow
def test_no_prediction_overwrites_cached_content(tiny):
    """Nearly every block holds cached content, so a step that would overwrite some waits until it
    is certain.
    """
    runs = {}
    for depth in (0, 1):
        engine = make(tiny, depth, num_blocks=32, max_model_len=64).engine
        for i in range(4):  # fill the cache
            engine.add(f"a{i}", tokens(31, i), greedy(1))
            Observed(engine).finish()
        assert len(engine.scheduler_state.pool.contents) == 4 * (31 // 4)
        runs[depth] = Observed(engine)
        engine.add("b", tokens(10, 99), greedy(40))
        runs[depth].finish()
    assert runs[1].results == runs[0].results
    assert runs[1].sent == runs[1].steps, "a prediction was wrong"
    assert 5 <= runs[1].late < runs[1].steps, "each block taken from the cache is waited for"


def fill_cache(engine) -> None:
    """Afterwards each block holds cached content, or is one of `empty_blocks`."""
    engine.reset()
    for i in range(9):
        engine.add(f"a{i}", tokens(32, i), greedy(1))
        Observed(engine).finish()
    pool = engine.scheduler_state.pool
    assert pool.num_free - len(pool.idle) == engine.config.empty_blocks


def test_a_cache_that_could_keep_no_block_is_refused(tiny):
    with refused("empty_blocks is 64, and there are 64 blocks.*; choose at most 63, or more num_b"):
        make(tiny, 0, empty_blocks=64)


def test_predictions_go_on_beside_a_full_cache_with_empty_blocks(tiny):
    runs = []
    for depth, kept in ((0, 4), (1, 4), (1, 0)):
        engine = make(tiny, depth, empty_blocks=kept).engine
        fill_cache(engine)
        for i in range(3):
            engine.add(f"b{i}", tokens(10, 99 + i), greedy(40))
        run = Observed(engine)
        run.finish()
        runs.append(run)
    plain, ahead, without = runs
    assert ahead.results == plain.results
    assert ahead.sent == ahead.steps, "a prediction was wrong"
    assert ahead.late <= 3, "a step was not predicted"
    assert without.late > 10, "predictions go on without empty blocks"


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_an_invalid_depth_is_refused(value):
    with refused(r"lookahead is .*; it must be an integer of at least 0"):
        EngineConfig(lookahead=value)


@pytest.mark.slow
def test_predicted_steps_are_dropped_when_a_recording_starts(tiny, tmp_path):
    """A predicted step knows a sequence by its arrival number, which starts again at zero."""
    events = {}
    for depth in (0, 1):
        engine = make(tiny, depth, max_num_seqs=1, enable_prefix_caching=False).engine
        engine.add("a", tokens(4, 1), greedy(1))
        engine.add("b", tokens(4, 2), greedy(1))
        engine.step()
        assert len(engine._state.ahead.sent) == depth  # a step of b, which is cancelled now
        engine.cancel("b")
        engine.record(tmp_path / "log.jsonl")
        for name in ("x", "y"):
            engine.add(name, tokens(4, 3), greedy(1))
        engine.cancel("x")
        events[depth] = engine.step().events
        engine.record(None)
    assert events[1] == events[0]


def test_rows_match_if_their_work_and_their_blocks_do():
    seqs = tuple([Seq(Request(f"r{i}", 3, 9), i, 20, 4, 3, (i, i + 9)) for i in range(4)])
    plan = EMPTY_PLAN._replace(
        seqs=seqs, lengths=(5, 6, 7, 8), starts=(4, 5, 6, 7), counts=(1,) * 4
    )
    part = plan._replace(seqs=seqs[1::2], lengths=(6, 8), starts=(5, 7), counts=(1, 1))
    assert lookahead.matching_rows(plan, plan) == range(4)
    assert lookahead.matching_rows(part, plan) == [1, 3]
    assert lookahead.matching_rows(plan, part) is None, "a row is missing"
    other_branch = seqs[3]._replace(request=Request("another", 3, 9))
    other_block = seqs[3]._replace(blocks=(3, 13))
    for column, value in (
        ("lengths", (6, 9)),
        ("starts", (5, 6)),
        ("counts", (1, 2)),
        ("copies", ((1, 2),)),
        ("seqs", seqs[3::-2]),
        ("seqs", (seqs[1], other_branch)),
        ("seqs", (seqs[1], other_block)),
    ):
        changed = part._replace(**{column: value})
        assert lookahead.matching_rows(changed, plan) is None, (column, value)
