"""`whatif --confirm`: a real engine, run as predicted, does what was predicted."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from experiments import whatif
from experiments.laboratory import confirming, engine_tokens, past, rerun
from experiments.laboratory.confirmation import Confirmation, confirm, script_of
from experiments.laboratory.differences import BLOCKS, KINDS, kind_of_difference
from experiments.laboratory.past import Past
from experiments.laboratory.prediction import predict
from pagedjax import BeamSearchParams, SamplingParams, routing
from pagedjax.engine import block_hashes
from pagedjax.host.policies import POLICIES
from pagedjax.host.replay import verify, with_own
from pagedjax.host.types import EMPTY_PLAN
from tests import drawn
from tests.engine.runs import small_llm
from tests.experiments.laboratory import simulated
from tests.experiments.laboratory.test_whatif import Asked, asked, drive
from tests.refusals import refused

# One bucket, so that all engines share their programs.
ENGINES: dict[str, dict[str, Any]] = {
    "small": {"block_size": 4, "num_blocks": 13, "max_num_seqs": 4},
    "large": {"block_size": 8, "num_blocks": 12, "max_num_seqs": 4},
    "wide": {"block_size": 4, "num_blocks": 24, "max_num_seqs": 8},
}
BUDGET: dict[str, Any] = {"max_num_batched_tokens": 48, "token_buckets": (48,)}
OF_FIXTURE = ("--buckets", "48", "--engine", "linear_impl=xla")  # the program of `one_layer`
OF_THE_SCHEDULER: list[dict[str, Any]] = [  # the programs are the recorded ones
    {"policy": "priority"},
    {"policy": "vtc"},
    {"policy": "deadline"},
    {"caching": False},
    {"chunked_prefill": False},
    {},
]
LARGER_BLOCKS: dict[str, Any] = {"policy": "vtc", "block_size": 8, "num_blocks": 12}
CHANGES: list[dict[str, Any]] = [
    *OF_THE_SCHEDULER,
    {"policy": "longest_prefix", "max_num_batched_tokens": 9},
    {"policy": "deadline", "max_num_seqs": 3},
    LARGER_BLOCKS,
    {"num_blocks": 13},
    {"num_blocks": 13, "host_blocks": 6},
    {"max_num_seqs": 3, "mixed_steps": False},
]


def predicted(recorded: Past, **changed: Any):
    """A prediction, from fields of the change and of its configuration."""
    policy = changed.pop("policy", recorded.policy.name)
    caching = changed.pop("caching", None)
    change = rerun.unchanged(recorded)._replace(
        config=recorded.config._replace(**changed),
        policy=POLICIES.get(policy, recorded.policy),
        own_policy=None if policy in POLICIES else recorded.own_policy,
        caching=caching,
    )
    return predict(recorded, change, router=routing.ROUND_ROBIN)


def confirmed(recorded: Past, model: Any, options: dict[str, Any], **changed: Any) -> Confirmation:
    prediction = predicted(recorded, **changed)
    return confirm(recorded, prediction, model, buckets=(48,), **options)


def crowd(draw: random.Random, count: int) -> list[Asked]:
    """Requests that come close together, some with the prompt of an earlier one and more, and half
    of them without stop tokens.
    """
    requests: list[Asked] = []
    for request in asked(draw, count):
        keywords = dict(request.keywords)
        prompt = keywords["prompt_token_ids"]
        if requests and draw.random() < 0.5:
            earlier = draw.choice(requests).keywords["prompt_token_ids"]
            keywords["prompt_token_ids"] = [*earlier, *prompt[:3]][:26]
        if draw.random() < 0.5:
            params = keywords["params"]
            keywords["params"] = replace(params, stop_token_ids=(), ignore_eos=True)
        requests.append(request._replace(at=request.at // 3, keywords=keywords))
    return requests


def without_prompts(path: Path) -> Past:
    """A recording whose submits have no prompts, as that of a server."""
    lines = [re.sub(r',"prompt":\[[0-9,]*\]', "", line) for line in path.read_text().splitlines()]
    path.write_text("\n".join([*lines, ""]))
    return past.read(path)


@drawn.examples(4, 25)
def test_an_engine_does_what_was_predicted(tmp_path: Path, one_layer, number: int):
    """With seeds, stop tokens, stops from outside, branches and prefixes; decisions, blocks,
    preemptions and tokens.
    """
    path = tmp_path / "run.jsonl"
    preemptions = 0

    def holds(seed: int, engine: str, changed: dict[str, Any], prompts: bool) -> None:
        nonlocal preemptions
        draw = random.Random(seed)
        recorder = small_llm(one_layer, max_model_len=48, **BUDGET, **ENGINES[engine]).engine
        drive(recorder, path, crowd(draw, 12))
        recorded = past.read(path) if prompts else without_prompts(path)
        if not prompts:
            size = recorded.config.block_size
            changed = {**changed, "block_size": -(-changed.get("block_size", size) // size) * size}
        result = confirmed(recorded, one_layer, {}, **changed)
        assert result.holds, result.difference.causes or result.difference.kind
        assert result.steps > 0
        assert result.inputs.made_up == (not prompts)
        assert not result.without_meaning
        outputs = [len(output.tokens) for output in recorded.outputs.values()]
        assert result.tokens == sum(outputs)
        preemptions += path.read_text().count('"Preempted"')

    if number > 4:  # it has programs of its own
        holds(0, "small", LARGER_BLOCKS, prompts=True)
    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        engine=st.sampled_from(sorted(ENGINES) if number > 4 else ["small"]),
        changed=st.sampled_from(CHANGES if number > 4 else OF_THE_SCHEDULER),
        prompts=st.booleans(),
    )
    assert preemptions > number


@pytest.fixture
def small(tmp_path: Path, one_layer) -> Path:
    """A recording of a small engine with preemptions."""
    path = tmp_path / "run.jsonl"
    engine = small_llm(one_layer, max_model_len=48, **BUDGET, **ENGINES["small"]).engine
    drive(engine, path, crowd(random.Random(3), 12))
    assert '"Preempted"' in path.read_text()
    return path


def test_recorded_prompts_are_those_of_larger_blocks_too(small: Path):
    """Larger blocks have some of the recorded hashes, which are not the engine's own of that size."""
    recorded = past.read(small)
    change = predicted(recorded, **LARGER_BLOCKS).change
    script = script_of(recorded, change, 320)
    assert any(request.hashes for request in script.predicted.requests.values())
    assert not script.inputs.made_up
    prompts = {tuple(prompt) for prompt in recorded.prompts.values()}
    assert {tuple(prompt) for prompt in script.inputs.prompts.values()} == prompts


def test_requests_that_were_cut_off_get_made_up_tokens(tmp_path: Path, one_layer):
    path = tmp_path / "run.jsonl"
    engine = small_llm(one_layer, max_model_len=48, **BUDGET, **ENGINES["small"]).engine
    engine.reset()
    engine.record(path, prompts=True)
    for name in "abcd":  # as many as run at a time
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.add(name, [5, 6, 7], params)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add("e", [5], params, priority=-1)
    for _ in range(10):
        engine.step()
    engine.cancel("e")
    engine.record(None)
    result = confirmed(past.read(path), one_layer, {}, policy="priority")
    assert result.holds
    assert result.without_meaning
    (note,) = confirming.notes(result)
    assert f"{result.without_meaning} tokens are made up" in note


BY_HASH = """
from pagedjax.policies import FCFS

BY_HASH = FCFS._replace(
    name="by_hash",
    order=lambda waiting, running, cached: sorted(waiting, key=lambda seq: seq.request.hashes),
    bound=None,
)
"""


def test_what_an_engine_does_otherwise_is_shown(
    small: Path, one_layer_folder, tmp_path: Path, capsys
):
    """A policy that reads hashes, which are others where prompts are made up."""
    without_prompts(small)
    file = tmp_path / "by_hash.py"
    file.write_text(BY_HASH)
    record = tmp_path / "engine.jsonl"
    words = [str(small), "--policy", f"{file}:BY_HASH", "--confirm", str(one_layer_folder)]
    report = tmp_path / "report.json"
    words += [*OF_FIXTURE, "--record-engine", str(record), "--json", str(report)]
    page = tmp_path / "page.html"
    assert whatif.main([*words, "--page", str(page)]) == 1
    assert f"Not confirmed by {one_layer_folder}." in page.read_text("utf-8")
    text = capsys.readouterr().out
    assert "not confirmed by" in text
    assert "is the first that decides differently" in text
    result = json.loads(report.read_text())["confirmation"]
    assert result["confirmed"] is False
    assert result["difference"]["kind"] in KINDS
    assert result["steps"] == result["difference"]["step"] > 0
    assert verify(record, with_own([f"{file}:BY_HASH"])).steps == result["steps"] + 1


def test_other_blocks_are_a_difference_of_the_last_kind():
    moved = EMPTY_PLAN._replace(copies=((1, 2),))
    assert not kind_of_difference(EMPTY_PLAN, moved)
    assert kind_of_difference(EMPTY_PLAN, moved, (*KINDS, BLOCKS)) == BLOCKS


def test_the_command_confirms(small: Path, one_layer_folder, tmp_path: Path, capsys):
    report = tmp_path / "report.json"
    words = [
        str(small),
        "--policy",
        "priority",
        "--confirm",
        str(one_layer_folder),
        *OF_FIXTURE,
    ]
    page = tmp_path / "page.html"
    assert whatif.main([*words, "--json", str(report), "--page", str(page)]) == 0
    result = json.loads(report.read_text())
    assert not result["identical"]
    confirmation = result["confirmation"]
    assert confirmation["confirmed"] is True
    assert confirmation["own_tokens"] is None
    sentence = (
        f"onfirmed by {one_layer_folder}: {confirmation['steps']} steps decide the same, with the same "
        f"blocks, and {confirmation['tokens']} tokens are the same"
    )
    assert f"c{sentence}" in capsys.readouterr().out
    assert f"C{sentence}." in page.read_text("utf-8")


# --- prompts that are made up -----------------------------------------------------------------------


@drawn.examples(10, 60)
def test_made_up_prompts_share_the_blocks_that_recorded_ones_share(tmp_path: Path, number: int):
    """Equal hashes where the recorded ones are equal, and others where they are not."""
    path = tmp_path / "run.jsonl"
    engine = simulated.engine()

    def holds(seed: int) -> None:
        draw = random.Random(seed)
        arrivals = simulated.requests(draw, 6)
        simulated.record(path, engine, arrivals)
        outputs = past.read(path).outputs
        for name, arrival in (("t0", 0), ("t1", draw.randrange(6)), ("t2", 1)):  # further turns
            at, keywords = arrivals[arrival]
            prompt = [*keywords["prompt_token_ids"], *outputs[arrival].tokens, 7, 8]
            later = {**keywords, "request_id": name, "prompt_token_ids": prompt[:60]}
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            arrivals.append((at + 10, {**later, "params": params}))
        simulated.record(path, engine, arrivals)
        recorded = without_prompts(path)
        inputs = engine_tokens.engine_tokens(recorded, 320)
        assert inputs.made_up
        names: dict[str, str] = {}
        for arrival, output in recorded.outputs.items():
            tokens = [*inputs.prompts[output.first], *inputs.outputs[arrival]]
            chain = block_hashes.chain(block_hashes.root(None, 4), np.array(tokens), 4)
            for index, key in output.hashes.items():
                assert names.setdefault(key, chain[index]) == chain[index]
        assert len(set(names.values())) == len(names)

    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1))


def test_tokens_beyond_the_vocabulary_have_stand_ins(tmp_path: Path, one_layer):
    path = tmp_path / "run.jsonl"
    engine = simulated.engine(max_model_len=48, **BUDGET, **ENGINES["small"])
    simulated.record(path, engine, simulated.requests(random.Random(0), 6))
    recorded = past.read(path)
    result = confirmed(recorded, one_layer, {}, caching=False)
    assert result.holds
    tokens = {token for output in recorded.outputs.values() for token in output.tokens}
    assert set(result.inputs.stand_ins) >= {token for token in tokens if token >= 320}
    assert not tokens & set(result.inputs.stand_ins.values())
    assert any(
        "tokens are beyond the model's vocabulary" in note for note in confirming.notes(result)
    )
    with refused(
        "tokens beyond the model's vocabulary of 4, such as .*one with a larger vocabulary"
    ):
        engine_tokens.engine_tokens(recorded, 4)


# --- the engine's own tokens ------------------------------------------------------------------------


def test_the_engine_samples_the_recorded_tokens_itself(tmp_path: Path, one_layer):
    """With greedy requests, and with seeds that come from the order of arrival."""
    path = tmp_path / "run.jsonl"
    engine = small_llm(one_layer, max_model_len=48, **BUDGET, **ENGINES["small"]).engine
    for temperature in (0.0, 1.0):
        requests = [
            request._replace(
                keywords={
                    **request.keywords,
                    "params": SamplingParams(
                        temperature=temperature,
                        max_tokens=request.keywords["params"].max_tokens,
                        stop_token_ids=(5, 9),
                        n=1 + len(request.keywords["forks"]),
                    ),
                }
            )
            for request in asked(random.Random(1), 6)
        ]
        drive(engine, path, requests)
        recorded = past.read(path)
        options = {"sampling": {"temperature": temperature}}
        own_tokens = confirmed(recorded, one_layer, options, policy="priority").own_tokens
        assert own_tokens is not None
        assert own_tokens.sequences == len(recorded.outputs)
        assert (own_tokens.equal, own_tokens.differences) == (own_tokens.sequences, [])
    options = {"sampling": {"temperature": 1.0, "seed": 1}}
    result = confirmed(recorded, one_layer, options, policy="priority")
    assert result.holds
    own_tokens = result.own_tokens
    assert own_tokens is not None
    assert own_tokens.equal < own_tokens.sequences
    token = own_tokens.differences[0]
    output = recorded.outputs[0].tokens
    assert token.recorded != token.sampled
    if token.request_id == "r0":
        assert token.recorded == output[token.index]
    text = "\n".join(confirming.lines(result, "tiny"))
    assert f"{own_tokens.equal} of {own_tokens.sequences} sequences have the recorded ones" in text
    assert f"{token.request_id!r} differs from output token {token.index} on: " in text


# --- times ------------------------------------------------------------------------------------------


def test_times_are_measured_beside_predicted_ones(
    tmp_path: Path, one_layer, one_layer_folder, capsys
):
    path = tmp_path / "run.jsonl"
    engine = small_llm(one_layer, max_model_len=48, **BUDGET, **ENGINES["small"]).engine
    engine.add("warm", [5], SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    engine.record(path, times=True, prompts=True)
    for name, length, n in (("a", 9, 1), ("b", 12, 2), ("c", 8, 1), ("d", 5, 1)):
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=n)
        forks = [f"{name}/{i}" for i in range(1, n)]
        engine.add(name, [length] * length, params, forks=forks)
    for _ in range(5):
        engine.step()
    engine.cancel("c", "stop")  # as a stop string does
    engine.cancel("b/1")
    while engine.has_work:
        engine.step()
    engine.record(None)
    report = tmp_path / "report.json"
    words = [
        str(path),
        "--set",
        "max_num_seqs=2",
        "--confirm",
        str(one_layer_folder),
        "--real-time",
    ]
    words += [*OF_FIXTURE, "--json", str(report)]
    output_of_equal_runs(whatif.main([*words, "--loop", "closed", "--policy", "priority"]), capsys)
    printed = output_of_equal_runs(whatif.main(words), capsys)
    result = json.loads(report.read_text())
    times = {row["measure"]: row for row in result["confirmation"]["times"]}
    assert set(times) == {"first_token", "mean_gap", "largest_gap", "end"}
    predicted_rows = {row["measure"]: row for row in result["table"] if row["group"] == "all"}
    for measure, row in times.items():
        assert row["predicted"] == predicted_rows[measure]["after"]
        assert 0 < row["measured"] < 60
    assert times["first_token"]["measured"] <= times["end"]["measured"]
    assert "predicted difference" in printed


def output_of_equal_runs(status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What whatif printed, whose engine decided as predicted.

    Where the changed run was slow, a cancelled branch got further than in the recording. The engine
    may find its block again, and the prediction says that it cannot know this.
    """
    printed = capsys.readouterr().out
    assert status == 0 or "blocks whose content was not recorded" in printed, printed
    return printed


# --- what is refused --------------------------------------------------------------------------------


def test_what_an_engine_cannot_repeat_is_refused(tmp_path: Path, small: Path, one_layer):
    recorded = past.read(small)
    for line, message in [
        ('{"restart":{}}', "a step failed at .*, which is not repeated; record a run without"),
        ('{"update":{"version":1,"pending":"restart"}}', "the weights changed at .*not recorded"),
    ]:
        path = tmp_path / "more.jsonl"
        path.write_text(small.read_text() + line + "\n")
        with refused(message):
            engine_tokens.check(past.read(path))
    text = small.read_text().splitlines(keepends=True)
    commit = next(i for i, line in enumerate(text) if line.startswith('{"commit"'))
    cancel = '{"cancel":{"request_id":"none","reason":"abort","events":[]}}\n'
    path.write_text("".join([*text[:commit], cancel, *text[commit:]]))
    with refused("an input came while step 0 ran, .*takes it between two steps; record an engine"):
        engine_tokens.check(past.read(path))
    simulated.record(path, simulated.engine(drafting=True), simulated.requests(random.Random(0), 4))
    with refused("was offered drafts, and a sequence whose tokens are given has none; .*without"):
        engine_tokens.check(past.read(path))
    llm = small_llm(one_layer, max_model_len=48, **BUDGET, **ENGINES["small"])
    llm.engine.record(path, prompts=True)
    llm.generate([[5, 6]], BeamSearchParams(2, max_tokens=3), use_tqdm=False)
    llm.engine.record(None)
    with refused("'0' is a beam search, whose beams follow the log-probabilities.*without beams"):
        engine_tokens.check(past.read(path))
    for options, message in [
        ({"real_time": True}, "has no times, .*record with times=True, or leave --real-time out"),
        ({"options": {"block_size": 8}}, "--engine gives block_size, and the recording, --set"),
        (
            {"options": {"kv_policy": {"name": "streaming", "sinks": 4, "window": 28}}},
            "the engine has .*views.*, and the changed run has .*--engine kv_policy=NAME",
        ),
        ({"sampling": {"n": 2}}, "--sampling gives n, which the recording decides; leave it out"),
    ]:
        with refused(message):
            confirmed(recorded, one_layer, options)
    with refused("has no prompts, .*record with prompts=True, or leave --sampling out"):
        confirmed(without_prompts(small), one_layer, {"sampling": {"temperature": 0}})


@pytest.mark.slow
def test_a_recording_of_a_kv_policy_is_confirmed_with_its_name(tmp_path: Path, one_layer):
    path = tmp_path / "run.jsonl"
    options = {"kv_policy": {"name": "streaming", "sinks": 4, "window": 12}}
    engine = small_llm(one_layer, max_model_len=48, **BUDGET, **ENGINES["small"], **options).engine
    drive(engine, path, crowd(random.Random(2), 8))
    recorded = past.read(path)
    assert recorded.config.views
    assert confirmed(recorded, one_layer, {"options": options}, policy="priority").holds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--real-time"], "--real-time is for --confirm MODEL, which is not given"),
        (["--engine", "dtype=float32"], "--engine is for --confirm MODEL"),
        (["--confirm", "x", "--replicas", "2"], "replicas is 2, and --confirm runs one engine"),
        (["--confirm", "x", "--engine", "dtype"], "--engine 'dtype' is no setting; write NAME="),
        (["--confirm", "x", "--sampling", "a-b=1"], "--sampling 'a-b=1' is no setting"),
        (["--confirm", "x", "--record-engine", "no/such/x.jsonl"], "has no folder"),
        (
            ["--confirm", "x", "--real-time"],
            "the recording has no times, so its requests have none",
        ),
        (["--confirm", "no/such/model", "--draws", "0"], "no/such/model"),
    ],
)
def test_options_that_cannot_be_are_refused(small: Path, capsys, words: list[str], message: str):
    assert whatif.main([str(small), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cannot change {small}: ")
    assert message in error
