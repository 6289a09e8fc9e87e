"""Looking ahead changes when things run and nothing else: plans, events, tokens and log-probabilities are the same.

So does running several steps in one dispatch, alone and together with looking ahead.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.engine import lookahead
from pagedjax.host import scheduler
from pagedjax.host.event_log import verify
from pagedjax.host.types import Sampled

DEPTHS = (1, 3)
# (lookahead, steps_per_dispatch): the first is an engine that waits for every step
MODES = ((0, 1), *((depth, 1) for depth in DEPTHS), (0, 4), (2, 3))
CONFIG = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "token_buckets": (8, 24), "block_size": 4, "num_blocks": 64}
OFTEN = tuple(range(0, 320, 8))  # stop tokens that a random model meets after some ten tokens


def make(tiny, lookahead: int, steps: int = 1, **config):
    return LLM(tiny, progress=False, lookahead=lookahead, steps_per_dispatch=steps, **{**CONFIG, **config})


@pytest.fixture(scope="module")
def modes(tiny):
    return {mode: make(tiny, *mode) for mode in MODES}


@pytest.fixture(scope="module")
def llms(modes):
    return {depth: modes[depth, 1] for depth in (0, *DEPTHS)}


class Told:
    """What an engine says, without times; the steps it sent, in how many dispatches, and how many of these it had to
    wait with because no guess had computed the step."""

    def __init__(self, engine) -> None:
        self.engine, self.said = engine, []
        self.steps = self.sent = self.dispatches = self.late = self.preempted = 0
        send = type(engine)._send

        def counted(plans, before=None):
            flights = send(engine, plans, before)
            self.sent += len(flights)
            self.dispatches += 1
            self.late += before is None
            return flights

        engine._send = counted

    def step(self):
        result = self.engine.step()
        scheduler.check(self.engine.state)
        self.steps += 1
        self.preempted += len(result.plan.preempted)
        self.said.append((result.plan, result.events, result.logprobs, result.beams, result.padded_tokens > 0))
        return result

    def forget(self) -> None:
        del self.engine._send


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, n).tolist()


def play(engine, seed: int, path, *, kinds=("plain", "stops", "forks", "beams", "penalties")) -> Told:
    """Requests of many kinds that come, and are cancelled, between any two steps; recorded to `path`."""
    draw = random.Random(seed)
    engine.reset()
    engine.record(path)
    told, number = Told(engine), 0
    while number < 14 or engine.has_work:
        while number < 14 and draw.random() < 0.5:
            kind, name, n = draw.choice(kinds), f"r{number}", draw.randint(1, 40)
            number += 1
            forks, params = [], {"max_tokens": draw.randint(1, 24), "ignore_eos": True, "seed": number}
            params |= {"temperature": draw.choice([0.0, 1.0])}
            if kind == "beams":
                beam = BeamSearchParams(beam_width=2, max_tokens=6)
                engine.add(name, tokens(n, number), beam, forks=[f"{name}b"])
                continue
            if kind == "stops":
                params |= {"stop_token_ids": list(OFTEN), "min_tokens": draw.randint(0, 4)}
                params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
            if kind == "forks":
                forks, params["temperature"] = [f"{name}b", f"{name}c"], 1.0
            if kind == "penalties":
                params |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
            if draw.random() < 0.3:
                params |= {"logprobs": 2, "prompt_logprobs": 1}
            shared = tokens(12, 0) if draw.random() < 0.4 else []
            engine.add(name, shared + tokens(n, number), SamplingParams(**params), forks=forks)
        if draw.random() < 0.1:
            told.said.append(engine.cancel(f"r{draw.randrange(14)}"))
        if draw.random() < 0.03:
            engine.reset_prefix_cache()
        if engine.has_work:
            told.step()
        assert told.steps < 2000
    engine.record(None)
    told.forget()
    return told


@pytest.fixture(scope="module")
def plain(modes, tmp_path_factory):
    """By seed, a run that waits for every step, and its log."""
    folder, engine = tmp_path_factory.mktemp("plain"), modes[0, 1].engine
    runs = {seed: play(engine, seed, folder / f"{seed}.jsonl") for seed in range(10)}
    assert all(run.sent == run.dispatches == run.late == run.steps for run in runs.values())
    return {seed: (run, (folder / f"{seed}.jsonl").read_bytes()) for seed, run in runs.items()}


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_recorded_runs_are_the_same_byte_for_byte(modes, plain, tmp_path, mode):
    runs = []
    for seed, (expected, log) in plain.items():
        guessed = play(modes[mode].engine, seed, tmp_path / "guessed.jsonl")
        assert guessed.said == expected.said
        assert (tmp_path / "guessed.jsonl").read_bytes() == log
        runs.append(guessed)
    steps, sent, dispatches, late = (
        sum(getattr(run, name) for run in runs) for name in ("steps", "sent", "dispatches", "late")
    )
    assert late < 0.9 * steps, "nothing was guessed"
    assert sent >= steps + 5, "no guess was wrong"
    assert dispatches == sent if mode[1] == 1 else dispatches < 0.9 * sent, "nothing went together"


@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 20, "enable_prefix_caching": False},
        {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001},
        pytest.param({"num_blocks": 10, "block_size": 8, "policy": "shortest"}, marks=pytest.mark.slow),
    ],
    ids=["recomputed", "swapped", "shortest first"],
)
def test_the_same_with_a_pool_that_is_too_small(tiny, tmp_path, config):
    engines = [make(tiny, *mode, max_model_len=64, **config).engine for mode in ((0, 1), (3, 1), (0, 4))]
    preempted = 0
    for seed in range(3):
        plain, *others = [play(engine, seed, tmp_path / f"{i}.jsonl") for i, engine in enumerate(engines)]
        for i, other in enumerate(others, 1):
            assert other.said == plain.said
            assert (tmp_path / f"{i}.jsonl").read_bytes() == (tmp_path / "0.jsonl").read_bytes()
        preempted += plain.preempted
    assert preempted, "no storm"


@pytest.mark.parametrize(
    "config",
    [
        {"mixed_steps": False},
        {"chunked_prefill": False, "mixed_steps": False, "max_num_batched_tokens": 128, "token_buckets": (8, 128)},
        {"reservation": "pow2", "enable_prefix_caching": False},
        {"reservation": "oracle", "enable_prefix_caching": False, "mixed_steps": False, "policy": "static"},
    ],
    ids=["by turns", "whole prompts first", "reserved", "reserved, by turns, static"],
)
def test_the_same_in_the_ways_of_earlier_engines(tiny, tmp_path, config):
    """Without mixed steps a decode may have waited; its token, of an older step, is not on the device for a guess."""
    engines = [make(tiny, *mode, **config).engine for mode in ((0, 1), (3, 1), (0, 4))]
    kinds = {"kinds": ("plain", "stops", "penalties")} if "reservation" in config else {}
    steps = late = 0
    for seed in range(4):
        plain, *others = [play(engine, seed, tmp_path / f"{i}.jsonl", **kinds) for i, engine in enumerate(engines)]
        assert verify(tmp_path / "0.jsonl").identical
        for i, other in enumerate(others, 1):
            assert other.said == plain.said
            assert (tmp_path / f"{i}.jsonl").read_bytes() == (tmp_path / "0.jsonl").read_bytes()
            steps += other.steps
            late += other.late
    assert late < 0.9 * steps, "nothing was guessed"


def test_strings_that_stop_are_the_same(modes):
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, stop=["e", "th"], ignore_eos=True) for i in range(8)
    ]
    prompts = [tokens(5 + 3 * i, i) for i in range(8)]
    expected = modes[0, 1].generate(prompts, params, use_tqdm=False)
    assert {out.outputs[0].finish_reason for out in expected} == {"stop", "length"}
    for mode in MODES[1:]:
        assert modes[mode].generate(prompts, params, use_tqdm=False) == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_run_without_surprises_is_sent_ahead_but_for_its_first_step(llms, depth):
    engine = llms[depth].engine
    engine.reset()
    for i in range(8):  # more than run at a time: who leaves is known, and so is who comes
        engine.add(str(i), tokens(3 + i, i), SamplingParams(temperature=0, max_tokens=9 + i, ignore_eos=True))
    told = Told(engine)
    while engine.has_work:
        told.step()
    told.forget()
    assert told.late == 1
    assert told.sent == told.steps


def test_a_stop_token_costs_no_step(llms):
    """Nobody waits: a row that ends is left out of what is on the device already."""
    engine = llms[1].engine
    engine.reset()
    for i in range(6):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=40, stop_token_ids=list(OFTEN))
        engine.add(str(i), tokens(4, i), params)
    told, ends = Told(engine), 0
    while engine.has_work:
        result = told.step()
        ends += any(event.reason == "stop" for event in result.events if hasattr(event, "reason"))
    told.forget()
    assert ends >= 4
    assert told.sent - told.steps <= ends  # at worst a guess for each, never a step more


def test_time_on_the_device_is_no_more_than_there_was(llms):
    engine = llms[1].engine
    engine.reset()
    engine.add("a", tokens(4, 0), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while engine.has_work:
        result = engine.step()
        assert 0 <= result.device_seconds <= result.finished - result.started
        assert result.compilations == 0


def test_a_guess_that_would_cost_the_content_of_a_block_is_not_made(tiny):
    """Nearly every block holds something that could be found again: nothing is written before it is certain to go."""
    said = {}
    for depth in (0, 1):
        engine = make(tiny, depth, num_blocks=32, max_model_len=64).engine
        for i in range(4):  # fill the cache
            engine.add(f"a{i}", tokens(31, i), SamplingParams(temperature=0, max_tokens=1))
            while engine.has_work:
                engine.step()
        held = len(engine.state.pool.contents)
        assert held == 4 * (31 // 4)
        said[depth] = told = Told(engine)
        engine.add("b", tokens(10, 99), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        while engine.has_work:
            told.step()
        told.forget()
    assert said[1].said == said[0].said
    assert said[1].sent == said[1].steps, "a guess was wrong"
    assert 5 <= said[1].late < said[1].steps, "each block that is taken from the cache is waited for"


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_a_depth_that_makes_no_sense_is_refused(value):
    from pagedjax.config import EngineConfig

    with pytest.raises(ValueError, match=r"lookahead is .*; it must be an integer of at least 0"):
        EngineConfig(lookahead=value)


def test_events_of_a_step_hold_no_placeholder(llms):
    """Tokens that nobody knows yet are no event."""
    engine = llms[3].engine
    engine.reset()
    engine.add("a", tokens(4, 0), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while engine.has_work:
        for event in engine.step().events:
            assert not isinstance(event, Sampled) or lookahead.NO_TOKEN not in event.token_ids


def test_a_guess_is_forgotten_when_a_recording_starts_to_count_again(tiny, tmp_path):
    """It had a sequence of the same number, length and blocks as one that comes later, and other tokens."""
    first = {}
    for depth in (0, 1):
        engine = make(tiny, depth, max_num_seqs=1, enable_prefix_caching=False).engine
        engine.add("a", tokens(4, 1), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        engine.add("b", tokens(4, 2), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        engine.step()
        assert len(engine._ahead.flights) == depth  # of b, which now goes
        engine.cancel("b")
        engine.record(tmp_path / "log.jsonl")
        for name in ("x", "y"):
            engine.add(name, tokens(4, 3), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        engine.cancel("x")
        first[depth] = engine.step().events
        engine.record(None)
    assert first[1] == first[0]
