"""A leader's engine and a follower's make the same transitions; what differs is named in the step
in which it matters.

Here both are whole engines on one device each, in two threads. tests/processes/test_processes.py
has real processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import chex
import jax
import numpy as np
import pytest

from pagedjax import BeamSearchParams, EngineConfig, PoolingParams, SamplingParams, Taps
from pagedjax.device.row_features.truncation import MIN_P
from pagedjax.engine.drafters import Drafter
from pagedjax.engine.processes import engines
from pagedjax.engine.processes.connection import Message
from pagedjax.engine.processes.engines import (
    FollowerEngine,
    LeaderEngine,
    decoded_params,
    decoded_request,
    encoded_params,
    encoded_request,
    make_engine,
)
from pagedjax.engine.processes.group import ProcessFailed
from pagedjax.engine.requests import Begun, EngineRequest
from pagedjax.host.policies import FCFS
from pagedjax.host.types import StepResult
from tests.engine.runs import greedy, small_llm, steps
from tests.engine.test_lookahead import CONFIG, play, tokens
from tests.processes.pairs import Connected, connected
from tests.refusals import refused

GREEDY = greedy(8)
SWAPPED = {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001, "max_model_len": 64}
SWAPPED |= {"token_buckets": (24,)}
SPECULATIVE = {"speculative": {"method": "ngram", "num_tokens": 3, "adaptive": True}}


class Pair:
    """leader, follower: engines. outcome: how `follow` returned, or what it raised."""

    def __init__(self, model, group: Connected, log, **config: Any) -> None:
        self.group = group
        engine_config = EngineConfig(**{**CONFIG, "compilation": "lazy", **config})
        options = {"eos_token_ids": model.eos_token_ids}
        self.leader = LeaderEngine(group.leader, model.model, engine_config, **options)
        self.follower = FollowerEngine(group.followers[0], model.model, engine_config, **options)
        self.log = log
        self.outcome = None

    def follow(self, **options: Any) -> None:
        self.group.start(self._follow, **options)

    def _follow(self, **options: Any) -> None:
        try:
            self.outcome = self.follower.follow(record=self.log, **options)
        except BaseException as error:
            self.outcome = error

    def begin(self, count: int = 4) -> None:
        """Start the follower, and give the leader requests."""
        self.follow()
        add(self.leader, count)

    def distort(self, change: Callable[[Iterator[Message]], Iterator[Message]]) -> None:
        """Have the follower receive other inputs than the leader sent."""
        follower = self.group.followers[0]
        follower.receive = change(iter(follower.receive, None)).__next__

    def mark(self, flag: threading.local) -> None:
        """Sets `flag.follows` in the follower's thread."""
        follow = self.follower.follow

        def marked(**options: Any) -> bool:
            flag.follows = True
            return follow(**options)

        self.follower.follow = marked

    def finish(self) -> list[StepResult]:
        """Run all steps, and release the follower."""
        results = list(steps(self.leader))
        self.leader.release_followers()
        self.group.threads[-1].join(60)
        assert self.outcome is True, self.outcome
        return results

    def failed(self) -> str:
        """Step until both ends know what is wrong -> the reason."""
        with suppress(ProcessFailed):
            for _ in range(200):
                self.leader.step()
        self.group.leader._over.wait(120)
        self.group.threads[-1].join(120)
        assert isinstance(self.outcome, ProcessFailed), self.outcome
        assert {i for i, _ in self.group.exits} == {0, 1}
        assert self.group.leader.failure == self.outcome.reason
        return self.outcome.reason


@pytest.fixture
def pair(tiny, tmp_path):
    with connected() as group:
        # two threads that need a program at once would both compile it
        yield Pair(tiny, group, tmp_path / "follower.jsonl", compilation="eager")


@pytest.mark.default_cases("", "timed policy")
@pytest.mark.parametrize(
    "config",
    [{}, SWAPPED, {"lookahead": 2}, SPECULATIVE, {"policy": "deadline"}],
    ids=["", "swapped", "lookahead", "adaptive drafts", "timed policy"],
)
def test_a_follower_makes_the_recording_of_the_leader(tiny, one_layer, tmp_path, config):
    """Also with drafts whose number depends on times, which differ between processes."""
    model = one_layer if config is SWAPPED else tiny
    config_of_both = {"compilation": "eager"} | config
    alone = small_llm(model, **CONFIG | config_of_both).engine
    # its programs are kept: else both would compile that for log-probabilities of prompts at once
    alone.add("first", tokens(3, 1), greedy(1, prompt_logprobs=1))
    list(steps(alone))
    with connected() as group:
        pair = Pair(model, group, tmp_path / "follower.jsonl", **config_of_both)
        pair.follow()
        for seed in (0, 2):
            play(pair.leader, seed, tmp_path / "leader.jsonl")
        recording = (tmp_path / "leader.jsonl").read_bytes()
        if config is SWAPPED:
            assert play(alone, 2, tmp_path / "alone.jsonl").preempted > 3
            assert (tmp_path / "alone.jsonl").read_bytes() == recording
        pair.finish()
        assert pair.log.read_bytes() == recording
        states = [engine._state for engine in (pair.leader, pair.follower)]
        assert states[0].scheduler == states[1].scheduler
        assert (b'"now":' in recording) == (config.get("policy") == "deadline")
        chex.assert_trees_all_equal(states[0].cache, states[1].cache)
        assert group.exits == []
        if config is SPECULATIVE:
            accepted = [state.drafting and state.drafting.acceptance for state in states]
            assert accepted[0] == accepted[1] is not None


def test_without_a_fault_nothing_differs(pair):
    pair.begin()
    pair.finish()


@pytest.mark.slow
def test_prompts_that_are_pooled_go_through_all_processes(tiny, tmp_path):
    with connected(timeout=300) as group:  # a step compiles in both
        pair = Pair(tiny, group, tmp_path / "follower.jsonl")
        pair.begin(2)
        pair.leader.add("last", tokens(30, 8), PoolingParams())
        pair.leader.add("mean", tokens(30, 9), PoolingParams(pooling_type="MEAN"))
        vectors = dict(pooled for result in pair.finish() for pooled in result.pooled)
    chex.assert_shape([vectors["last"], vectors["mean"]], (64,))
    assert not pair.follower._state.readers
    assert pair.leader._state.scheduler == pair.follower._state.scheduler


def test_several_processes_compile_for_a_pooled_prompt_only_if_they_may(pair):
    """The others would count a long compilation as a step that does not end, and end."""
    with refused(r"'MEAN' compiles .* while several processes wait; use 'LAST', or compilation"):
        pair.leader.add("mean", tokens(30, 9), PoolingParams(pooling_type="MEAN"))
    assert not pair.leader.has_work


def add(engine, count: int = 4) -> None:
    for i in range(count):
        engine.add(f"r{i}", tokens(5 + i, i), dataclasses.replace(GREEDY, seed=i))


def lost(messages: Iterator[Message]) -> Iterator[Message]:
    """The second request does not arrive."""
    return (message for message in messages if message.get("request_id") != "r1")


def changed(messages: Iterator[Message]) -> Iterator[Message]:
    """The third request has another token in its prompt."""
    for message in messages:
        if message.get("request_id") == "r2":
            message = message | {"prompt": [9, *message["prompt"][1:]]}
        yield message


def twice(messages: Iterator[Message]) -> Iterator[Message]:
    """The second request comes twice, which an engine refuses."""
    for message in messages:
        yield message
        if message.get("request_id") == "r1":
            yield message


def without_a_step(messages: Iterator[Message]) -> Iterator[Message]:
    return (message for message in messages if message.get("number") != 3)


def without_requests(messages: Iterator[Message]) -> Iterator[Message]:
    return (message for message in messages if message["input"] != "add")


@pytest.mark.parametrize(
    ("fault", "step", "leaders_text", "followers_text"),
    [
        (lost, 1, '{"submit":{"request_id":"r1"', '{"submit":{"request_id":"r2"'),
        (changed, 1, '{"submit":{"request_id":"r2"', '"hashes":["'),
        (twice, 1, '{"submit":{"request_id":"r2"', '{"refused":"request id'),
        (without_requests, 1, '{"submit":{"request_id":"r0"', ""),
        (without_a_step, 3, "it did not get the input of this step", ""),
    ],
)
def test_a_fault_of_inputs_is_named_in_the_next_step(
    pair, fault, step, leaders_text, followers_text
):
    pair.distort(fault)
    pair.begin()
    reason = pair.failed()
    assert reason.startswith(f"process 1 differs from process 0 in step {step}: "), reason
    first, _, second = reason.partition(", and process 1 ")
    assert leaders_text in first
    assert followers_text in second


def test_a_policy_that_reads_a_clock_is_named_in_its_first_plan_that_differs(tiny, tmp_path):
    """The clocks of the processes differ, so plans do before anything is computed."""
    clock = threading.local()

    def order(waiting: Any, running: Any, cached: Any) -> Any:
        return waiting[::-1] if hasattr(clock, "follows") else waiting

    with connected() as group:
        pair = Pair(tiny, group, tmp_path / "follower.jsonl", compilation="eager")
        for engine in (pair.leader, pair.follower):
            policy = FCFS._replace(order=order)
            engine.runtime = dataclasses.replace(engine.runtime, policy=policy)
        pair.mark(clock)
        pair.begin()
        reason = pair.failed()
    assert reason.startswith("process 1 differs from process 0 in step 1: ")
    assert '{"schedule":{"step":0,"ids":["r0","r1","r2","r3"]' in reason
    assert '{"schedule":{"step":0,"ids":["r3","r2","r1","r0"]' in reason


@pytest.mark.slow
def test_drafts_that_differ_are_named_before_they_are_computed(tiny, tmp_path):
    """A drafter that draws random numbers: as many drafts, and others."""
    role = threading.local()
    drafter = Drafter("random", lambda memory, name, context, k: [8 - hasattr(role, "follows")] * k)
    with connected() as group:
        options = {"speculative": {"method": "ngram", "adaptive": False}}
        pair = Pair(tiny, group, tmp_path / "follower.jsonl", **options)
        for engine in (pair.leader, pair.follower):
            drafting = engine._state.drafting._replace(drafter=drafter)
            engine._state = engine._state._replace(drafting=drafting)
        pair.mark(role)
        pair.begin(1)
        message = "drafts or predicted plans, or what was before this step"
        assert pair.failed() == f"process 1 differs from process 0 in step 2: {message}"


def test_an_exception_in_a_follower_ends_both(pair, monkeypatch, capsys):
    scheduled = FollowerEngine._schedule
    numbers = itertools.count(1)

    def fails(self, now=None):
        if next(numbers) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nmore")
        return scheduled(self, now)

    monkeypatch.setattr(FollowerEngine, "_schedule", fails)
    pair.begin()
    message = "process 1 failed in step 3: RuntimeError: RESOURCE_EXHAUSTED: no memory"
    assert pair.failed() == message
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_an_exception_in_a_step_of_the_leader_ends_both(pair, monkeypatch, error):
    """It cannot be rolled back: others may have computed the step. Ctrl-C is deferred, unless it is
    pressed twice.
    """
    pair.begin()
    pair.leader.step()

    def enter(stage: str) -> None:
        if stage == "running":
            raise error

    monkeypatch.setattr(pair.leader.group, "enter", enter)
    assert pair.failed() == f"process 0 failed in step 2: {type(error).__name__}: {error}"


def test_requests_that_are_refused_reach_nobody(pair):
    pair.follow()
    with refused(r"request .bad. has token id 999; the vocabulary"):
        pair.leader.add("bad", [999], GREEDY)
    with refused("request 'taps': taps run in one process, and this engine has several; leave"):
        pair.leader.add("taps", [5], SamplingParams(taps=Taps(hidden_states=0)))
    with refused("process 1 follows process 0, which takes the requests"):
        pair.follower.add("other", [5], GREEDY)
    add(pair.leader)
    pair.leader.cancel("nobody")
    pair.leader.cancel("r2", "stop")
    list(steps(pair.leader))
    pair.leader.reset()
    pair.leader.reset_prefix_cache()
    add(pair.leader)
    pair.finish()


def test_new_parameters_come_from_each_process_itself(pair, tiny):
    """An engine whose parameters become others says what they say."""
    scaled = jax.tree.map(lambda x: x * 1.5, tiny.model.params)
    pair.follow(new_params=lambda: scaled)
    pair.leader.update_params(scaled)
    add(pair.leader)
    pair.finish()
    chex.assert_trees_all_equal(pair.leader.model.leaves, pair.follower.model.leaves)
    embed = pair.follower.model.params["embed"][...]
    assert np.abs(embed - tiny.model.params["embed"][...]).max() > 0


def test_new_parameters_that_differ_are_named(pair, tiny):
    scaled = jax.tree.map(lambda x: x * 1.5, tiny.model.params)
    pair.follow(new_params=lambda: tiny.model.params)
    pair.leader.update_params(scaled)
    assert "ValueError: the new parameters are others than in process 0; give all" in pair.failed()


def test_blocks_of_an_id_that_comes_again_after_a_reset_are_in_the_digest(pair):
    pair.follow()
    group = pair.group.leader
    for _ in range(2):
        add(pair.leader)
        pair.leader.step()
        pair.leader.step()
        lines = [line for line in group._lines[group.steps - 1] if line.startswith('{"schedule')]
        assert [len(json.loads(line)["schedule"]["blocks"]) for line in lines] == [4]
        pair.leader.reset()
    pair.finish()


def test_what_cannot_be_sent_is_refused_before_it_is_taken(pair, tmp_path):
    """The leader's state would have it, and the others' would not."""
    pair.follow()
    with pytest.raises(TypeError):
        pair.leader.add("a", tokens(5, 1), GREEDY, user=object())
    with refused(r"has no folder; make .*, or name a file elsewhere"):
        pair.leader.record(tmp_path / "nowhere" / "run.jsonl")
    pair.leader.add("a", np.array(tokens(5, 1)), GREEDY, priority=np.int64(3))
    list(steps(pair.leader))
    pair.leader.record(tmp_path / "leader.jsonl")
    add(pair.leader)
    list(steps(pair.leader))
    pair.leader.record(None)
    pair.finish()
    assert pair.log.read_bytes() == (tmp_path / "leader.jsonl").read_bytes()


def test_steps_of_another_engine_are_named(pair):
    pair.follower.number = 7
    pair.begin()
    assert pair.failed().endswith("in step 1: it follows engine 7, and process 0 uses engine 1")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"config": {"token_buckets": (16, 24)}},
            "engine.token_buckets is [16, 24] here and [24] in process 0",
        ),
        ({"eos_token_ids": (5,)}, "eos_token_ids is [5] here and "),
        ({"row_features": (MIN_P,)}, "row_features is ['min_p'] here and [] in process 0"),
        ({"params": 1.5}, "weights is "),
        ({}, None),
    ],
    ids=["options", "stop tokens", "sampling options", "weights", "equal"],
)
def test_what_engines_are_built_from_is_compared_before_they_are_built(tiny, change, named):
    """Other programs would wait for each other on the devices."""
    options = {"eos_token_ids": tiny.eos_token_ids}
    expected = engines.given_facts(tiny.model, EngineConfig(**CONFIG), options)
    model = tiny.model
    if "params" in change:
        model = model._replace(params=jax.tree.map(lambda x: x * change["params"], model.params))
    facts = engines.given_facts(
        model, EngineConfig(**CONFIG | change.pop("config", {})), options | change
    )
    reason = engines.first_difference(facts, expected)
    assert (reason is None) == (named is None)
    assert reason is None or reason.startswith(str(named))


def test_new_parameters_of_one_process_alone_are_refused(pair, tiny):
    pair.follow()
    pair.leader.update_params(tiny.model.params)
    assert pair.failed().startswith(
        "process 1 failed at the input 'update_params': ValueError: process 0 has new parameters"
    )


def test_other_options_in_one_process_are_named(pair, tiny):
    config = EngineConfig(**CONFIG | {"block_size": 8, "compilation": "lazy"})
    options = {"eos_token_ids": tiny.eos_token_ids}
    pair.follower = FollowerEngine(pair.group.followers[0], tiny.model, config, **options)
    pair.begin()
    message = "engine.block_size is 8 here and 4 in process 0; start all processes with the same options, versions"
    assert message in pair.failed()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(
            n=3,
            best_of=4,
            temperature=0.1 + 0.2,
            top_k=-1,
            stop=("a", "b"),
            logit_bias={5: -0.1, 7: 3.0},
        ),
        SamplingParams(
            allowed_token_ids=(3, 1),
            extra_args={"x": (1, ("y", None)), "z": True},
            cache_salt="\u00e9",
        ),
        SamplingParams(
            seed=2**32 - 1, prompt_logprobs=0, enable_prefix_caching=False, min_tokens=2
        ),
        BeamSearchParams(
            beam_width=3, early_stopping="never", length_penalty=-0.5, stop_token_ids=(4, 2)
        ),
        PoolingParams(
            dimensions=3, pooling_type="MEAN", normalize=False, truncate_prompt_tokens=-1
        ),
    ],
)
def test_parameters_survive_the_wire(params):
    assert decoded_params(json.loads(json.dumps(encoded_params(params)))) == params


def test_a_request_survives_the_wire():
    request = EngineRequest(
        names=("a", "b"),
        prompt_token_ids=[5, 6],
        params=SamplingParams(n=2, seed=3),
        priority=-1,
        user="u",
        tags=("t",),
        predicted=7,
        begun=Begun(3, [4]),
        service_class="chat",
        deadline=1.5,
        given={"a": [5], "b": [6, 7]},
    )
    defaults = EngineRequest((), [], GREEDY)
    unsent = [name for name in request._fields if getattr(request, name) == getattr(defaults, name)]
    assert unsent == ["grammar", "adapter"], "these stay in their process; all others are sent"
    assert decoded_request(json.loads(json.dumps(encoded_request(request)))) == request


def test_several_processes_without_a_connection_or_a_mesh_are_refused(tiny, monkeypatch):
    config = EngineConfig(**CONFIG)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with refused(
        r"JAX runs in 2 processes, and they are not connected; call pagedjax\.engine\.processes\.join"
    ):
        make_engine(tiny.model, config)
    monkeypatch.setattr(engines, "joined", lambda: object())
    with refused(r"2 processes have \d+ devices, and mesh is None; set mesh=\{'tensor': \d+\}"):
        make_engine(tiny.model, config)
