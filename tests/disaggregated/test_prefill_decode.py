"""Prefill by one engine and decode by another: the tokens of one engine, whatever happens on the
way.
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from pagedjax import (
    LLM,
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    Taps,
)
from pagedjax.disaggregated import PrefillDecode
from pagedjax.engine import state
from pagedjax.engine.session import GenerationRequest
from pagedjax.host import replay, scheduler
from pagedjax.viewer import read_recording
from tests.device.test_sampling import ODD
from tests.engine.runs import answers as first_branches
from tests.engine.runs import check_idle, greedy, sampled, small_llm, steps
from tests.engine.test_batch_invariance import VOCAB, model_of
from tests.engine.test_update_params import SIZES
from tests.refusals import refused

pytest.importorskip("llvmlite")


PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (3, 20, 37, 58, 16, 1)]
PARAMS = [
    greedy(24, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, logprobs=1),
    SamplingParams(temperature=1.0, seed=7, max_tokens=20, n=3, logprobs=0, ignore_eos=True),
    SamplingParams(
        temperature=1.0,
        seed=9,
        max_tokens=24,
        frequency_penalty=1.5,
        presence_penalty=0.5,
        logprobs=0,
    ),
    SamplingParams(temperature=0, repetition_penalty=1.6, max_tokens=24, min_tokens=9, logprobs=0),
    SamplingParams(temperature=0.9, seed=1, max_tokens=1, logprobs=0),
]
# log-probabilities of a prompt have a program of their own
OF_PROMPTS = [PARAMS[0], replace(PARAMS[1], prompt_logprobs=1), *PARAMS[2:]]
# of the engine that decodes, and of the one that prefills; None is the shared engine
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "plain": ({}, None),
    "small pool": ({"num_blocks": 22}, None),
    "few rows": ({"max_num_seqs": 3}, None),
    "swapping": ({"num_blocks": 22, "preemption": "swap", "swap_space_gib": 0.01}, None),
    "ahead": ({"lookahead": 2}, {"lookahead": 2}),
    "drafts": ({"speculative": {"method": "ngram", "num_tokens": 3}}, None),
    "shares nothing": ({"enable_prefix_caching": False}, None),
    "prefill small pool": ({"max_num_seqs": 1}, {"num_blocks": 15}),
    "prefill shares nothing": (None, {"enable_prefix_caching": False}),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("Qwen3", layers=2)


@pytest.fixture(scope="module")
def make(model) -> Callable[..., LLM]:
    return lambda **options: LLM(model, **SIZES | options)


@pytest.fixture(scope="module")
def single(make) -> LLM:
    return make()


@pytest.fixture(scope="module")
def plain(make) -> LLM:
    return make()


def answers(llm: Any, prompts=PROMPTS, params: Any = PARAMS) -> list[Any]:
    """Token ids, log-probabilities and why they ended, of every branch."""
    outputs = llm.generate(prompts, params)
    return [
        [
            (branch.token_ids, branch.logprobs, branch.cumulative_logprob, branch.finish_reason)
            for branch in output.outputs
        ]
        for output in outputs
    ] + [output.prompt_logprobs for output in outputs]


@contextmanager
def recorded(folder: Path, prefill: LLM, decode: LLM) -> Iterator[None]:
    """Recordings of the block, which must replay: prefill.jsonl and decode.jsonl."""
    llms = {"prefill": prefill, "decode": decode}
    for name, llm in llms.items():
        llm.engine.reset()
        llm.engine.record(folder / f"{name}.jsonl")
    yield
    for name, llm in llms.items():
        llm.engine.record(None)
        report = replay.verify(folder / f"{name}.jsonl")
        assert report.identical, report.difference


def check_empty(*llms: LLM) -> None:
    """Checks that all requests have ended, and that no block is owned."""
    for llm in llms:
        scheduler.check(llm.engine.scheduler_state)
        check_idle(llm.engine)
        assert not llm.engine._state.sequences


def watch_steps(session: Any) -> list[Any]:
    """Returns a list that gets the steps of a pair's session, as they come; each is checked."""
    steps = []
    step = session.step

    def step_and_check() -> Any:
        steps.append(step())
        for side in (session.prefill, session.decode):
            scheduler.check(side.engine.scheduler_state)
        return steps[-1]

    session.step = step_and_check
    return steps


@pytest.mark.default_cases("small pool")
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_those_of_one_engine_bit_for_bit(
    make, single, plain, tmp_path, name
):
    """Twice: then both prefix caches have the prompts. Both recordings replay."""
    decode, prefill = (plain if options is None else make(**options) for options in CASES[name])
    params = PARAMS if name == "small pool" else OF_PROMPTS  # in slow runs
    expected = answers(single, params=params)
    pair = PrefillDecode(prefill, decode)
    steps = watch_steps(pair.session)
    with recorded(tmp_path, prefill, decode):
        for _ in range(2):
            chex.assert_trees_all_equal(answers(pair, params=params), expected)
            check_empty(prefill, decode)
    moved = [sequence for step in steps for sequence in step.moved]
    assert len(moved) == len(set(moved)) >= 4
    assert not any(step.again for step in steps)
    if name in ("plain", "drafts", "shares nothing"):
        assert len(moved) == 2 * 7, "all branches but the one of a single token"
    for side, transition in (("prefill", "release"), ("decode", "adopt")):
        file = tmp_path / f"{side}.jsonl"
        report = replay.verify(file)
        assert len(read_recording.read(file).frames) >= report.steps
        if "small pool" in name:
            assert bool(report.preemptions) == ((side == "prefill") == ("prefill" in name))
        assert file.read_text().count(f'{{"{transition}":') == len(moved)


def test_blocks_that_the_decoding_engine_has_are_not_copied(make, plain, monkeypatch):
    decode = make()
    plain.engine.reset()
    pair = PrefillDecode(plain, decode)
    fetched = []
    pages = plain.engine.padded_pages
    monkeypatch.setattr(
        plain.engine, "padded_pages", lambda blocks: fetched.append(len(blocks)) or pages(blocks)
    )
    for tail in ([5], [6], [6, 7, 8, 9, 10, 11, 12, 13]):
        pair.generate([PROMPTS[3][:48] + tail], PARAMS[0])
    assert fetched == [7, 1, 1], "six full blocks were there, and the last one is full"
    assert len(decode.engine.scheduler_state.pool.contents) > 8, "what it generates is shared too"


def test_a_transfer_that_fails_is_computed_again(
    make, single, plain, tmp_path, caplog, monkeypatch
):
    decode = make()
    pair = PrefillDecode(plain, decode)
    count = itertools.count(1)
    pages = plain.engine.padded_pages
    steps = watch_steps(pair.session)

    def breaks(blocks):
        number = next(count)
        if number == 5:  # as if the program that writes had failed: it was given the cache
            for array in jax.tree.leaves(decode.engine._state.cache):
                array.delete()
        if number % 2:
            raise ConnectionError("the cable is out")
        return pages(blocks)

    monkeypatch.setattr(plain.engine, "padded_pages", breaks)
    with recorded(tmp_path, plain, decode):
        chex.assert_trees_all_equal(answers(pair), answers(single))
    check_empty(plain, decode)
    assert sum(len(step.again) for step in steps) >= 3
    assert '{"restart":{}}' in (tmp_path / "decode.jsonl").read_text()
    message = "is computed again, because its blocks did not arrive: ConnectionError('the cable is"
    assert message in caplog.text


def test_pages_are_those_that_were_asked_for(make):
    llm = make()
    engine = llm.engine
    engine.add("a", PROMPTS[2], PARAMS[0])
    engine.step()
    (seq,) = scheduler.running(engine.scheduler_state)
    table = seq.blocks
    computed = seq.computed
    assert len(table) == 5
    assert computed > 0
    pages = engine.pages(table)
    padded = engine.padded_pages(table)
    chex.assert_tree_shape_prefix(pages, (5,))
    chex.assert_tree_shape_prefix(padded, (8,))
    chex.assert_trees_all_equal(pages, jax.tree.map(lambda x: x[:5], padded))
    assert pages.tokens.reshape(-1)[:computed].tolist() == PROMPTS[2][:computed]
    chex.assert_tree_shape_prefix(engine.pages([]), (0,))
    last = engine.config.num_blocks
    for take in (engine.pages, engine.padded_pages):
        for block in (-1, last + 1):
            with refused(f"block {block} is not in the cache; its blocks are 0 to {last}: use ids"):
                take([0, block])
        for wrong in ([1.9], [True], 5, ["a"], [[1]]):
            with refused(r"give a sequence of block ids, integers from 0 to"):
                take(wrong)  # type: ignore[arg-type]
    engine.cancel("a")
    llm.sleep()
    with refused(r"the engine sleeps; call wake_up\(\) first"):
        engine.pages([0])
    llm.wake_up()
    engine._set(state.roll_back(engine._state))
    with refused("the last step failed, and its cache is gone; run a step"):
        engine.pages([0])


def test_without_room_a_sequence_is_queued_and_computed_again(make, single, plain):
    """What `adopt` does by itself. `PrefillDecode` waits for room."""
    decode = make()
    plain.engine.reset()
    params = PARAMS[0]
    expected = answers(single, PROMPTS[:3], params)
    for i in range(SIZES["max_num_seqs"] - 1):  # leaves one of its rows
        decode.engine.add(f"other {i}", PROMPTS[0], params)
    decode.engine.step()
    for i, prompt in enumerate(PROMPTS[:3]):
        plain.engine.add(f"r{i}", prompt, params)
    results = []
    while len(sampled(results)) < 3:
        results.append(plain.engine.step())
    adopted = []
    for i in range(3):
        handed = plain.engine.handover(f"r{i}")
        assert decode.engine.has_room(handed) == (i == 0)
        adopted.append(decode.engine.adopt(f"r{i}", handed, plain.engine.pages))
        plain.engine.release(f"r{i}")
    assert adopted == [True, False, False]
    assert not plain.engine.has_work
    decoded = list(steps(decode.engine))
    assert not any(result.plan.preempted for result in decoded)
    tokens = sampled([*results, *decoded])
    assert [tuple(tokens[f"r{i}"]) for i in range(3)] == [expected[i][0][0] for i in range(3)]
    check_empty(plain, decode)


def test_a_cancelled_or_failed_call_leaves_nothing_behind(make, plain, monkeypatch):
    decode = make()
    pair = PrefillDecode(plain, decode)
    step = pair.session.step
    count = itertools.count(1)

    def breaks():
        if next(count) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(pair.session, "step", breaks)
    with pytest.raises(KeyboardInterrupt):
        answers(pair)
    check_empty(plain, decode)
    assert not pair.session._ids
    assert not pair.session._in_prefill


def test_calls_of_either_engine_alone_may_come_between(make, single, plain):
    decode = make()
    pair = PrefillDecode(plain, decode)
    expected = answers(single)
    (branches,) = pair.session.add([GenerationRequest(PROMPTS[0], PARAMS[0])])
    pair.session.step()
    for llm in (decode, plain, pair):
        assert answers(llm) == expected
    (branch,) = branches.values()
    while branch.finish_reason is None:
        pair.session.step()
    assert tuple(branch.token_ids) == expected[0][0][0]
    assert not pair.session._ids
    check_empty(plain, decode)


@pytest.mark.slow
def test_threads_may_call_pairs_in_both_directions_and_engines_alone(make, single, plain):
    second = make()
    callers = [PrefillDecode(plain, second), PrefillDecode(second, plain), plain, second]

    def tokens(caller: Any) -> list[Any]:
        return [[ids for ids, *_ in branches] for branches in answers(caller)[: len(PROMPTS)]]

    expected = tokens(single)
    with ThreadPoolExecutor(len(callers)) as pool:
        calls = [pool.submit(tokens, caller) for caller in callers * 3]
        assert [call.result(300) for call in calls] == [expected] * len(calls)
    check_empty(plain, second)


def test_a_sequence_that_the_other_engine_refuses_ends_where_it_is(make, single, plain, caplog):
    decode = make()
    pair = PrefillDecode(plain, decode)
    expected = answers(single)
    decode.sleep()
    assert answers(pair) == expected
    assert "ends in the prefill engine: the engine sleeps" in caplog.text
    check_empty(plain)
    decode.wake_up()
    steps = watch_steps(pair.session)
    assert answers(pair) == expected
    assert any(step.moved for step in steps)
    check_empty(plain, decode)


@pytest.fixture(scope="module")
def tinies(tiny) -> tuple[LLM, LLM]:
    return small_llm(tiny), small_llm(tiny)


def test_stop_strings_text_and_structured_outputs_continue(tiny_llm, tinies):
    pair = PrefillDecode(*tinies)
    steps = watch_steps(pair.session)
    form = StructuredOutputsParams(regex="[a-c]{3}-[0-9]{4}")
    params = [
        *(
            SamplingParams(temperature=0.9, seed=i, max_tokens=40, stop=stop, logprobs=1)
            for i, stop in enumerate("abcd")
        ),
        *(SamplingParams(seed=i, max_tokens=30, structured_outputs=form) for i in range(3)),
    ]
    prompts = [f"some words {i} and " for i in range(len(params))]
    outputs, expected = (
        [
            (branch.text, branch.token_ids, branch.stop_reason, branch.finish_reason)
            for branch in first_branches(llm, prompts, params)
        ]
        for llm in (pair, tiny_llm)
    )
    assert outputs == expected
    assert "stop" in {reason for *_, reason in outputs[:4]}
    assert all(len(text) == 8 for text, *_ in outputs[4:])
    assert sum(len(step.moved) for step in steps) >= 6
    assert "".join(pair.stream(prompts[0], params[0])) == outputs[0][0]
    check_empty(*tinies)


def test_what_one_engine_computes_is_refused(tinies, tiny_llm):
    pair = PrefillDecode(*tinies)
    for params, feature in (
        (BeamSearchParams(beam_width=2, max_tokens=4), "BeamSearchParams"),
        (SamplingParams(max_tokens=4, taps=Taps(hidden_states=(0,))), "taps"),
    ):
        with refused(f"a request has {feature}, which one engine computes; use `prefill`"):
            pair.generate("hello", params)
    engine = tinies[0].engine
    engine.add("x", [5, 6, 7], PoolingParams())
    with refused("'x' is a prompt that samples nothing"):
        engine.handover("x")
    engine.cancel("x")
    with refused("sequence 'y' is not unfinished here"):
        engine.handover("y")
    with refused("prefill and decode are one engine"):
        PrefillDecode(tiny_llm, tiny_llm)
    check_empty(*tinies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 8}, "block_size is 16 where the sequence was and 8 here"),
        (
            {"kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype is 'float32' where the sequence was and 'bfloat16' here",
        ),
        ({"max_model_len": 64}, "max_model_len is 512 where the sequence was and 64 here"),
        (
            {"row_features": (ODD,)},
            r"row_features is \[.*\] where the sequence was and \[.*'odd'",
        ),
        ({"seed": 3}, "seed is 0 where the sequence was and 3 here"),
        (
            {"kv_policy": {"name": "streaming", "sinks": 16, "window": 32}},
            r"kv_policy is \(\) where the sequence was",
        ),
    ],
)
def test_engines_that_differ_are_refused(tiny, tinies, options, message):
    with refused(message):
        PrefillDecode(tinies[0], small_llm(tiny, **options))


def test_another_model_or_another_version_of_the_weights_is_refused(tinies, plain, tiny):
    with refused(r"model\.head_dim is 16 where the sequence was and 32 here"):
        PrefillDecode(tinies[0], plain)
    decode = small_llm(tiny)
    pair = PrefillDecode(tinies[0], decode)
    decode.update_params(tiny.model.params)
    with refused("params_version is 0 where the sequence was and 1 here"):
        pair.generate("hello", SamplingParams(max_tokens=4))


def test_a_request_that_the_decoding_engine_can_never_run_is_refused_before_any_step(tiny, tinies):
    pair = PrefillDecode(tinies[0], small_llm(tiny, num_blocks=3))
    with refused("raise num_blocks to 6"):
        pair.generate("hello", SamplingParams(max_tokens=90))
    check_empty(tinies[0])


@pytest.mark.slow
def test_the_example_of_the_page_runs(documented_file, tiny, tiny_llm):
    example = runpy.run_path(str(documented_file("disaggregation.md", "two_engines.py")))
    prompts = ["one and ", "two and "]
    outputs = example["answers"](tiny, prompts, max_num_seqs=8, num_blocks=64, progress=False)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
    assert [output.outputs[0].text for output in outputs] == [
        answer.text for answer in first_branches(tiny_llm, prompts, params)
    ]
