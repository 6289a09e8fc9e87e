"""Prefill by one engine and decode by another: the tokens of one engine, whatever happens on the
way.
"""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
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
from pagedjax.host.types import Preempted, Sampled
from pagedjax.viewer import read_recording
from tests.engine.runs import greedy
from tests.engine.test_batch_invariance import VOCAB, model_of
from tests.engine.test_row_features import FAVOUR
from tests.engine.test_update_params import SIZES
from tests.refusals import refused

pytest.importorskip("llvmlite")


PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (3, 20, 37, 58, 16, 1)]
PARAMS = [
    greedy(24, logprobs=2),
    SamplingParams(
        temperature=0.8, top_p=0.9, seed=5, max_tokens=24, logprobs=1, prompt_logprobs=1
    ),
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
def single(model) -> LLM:
    return LLM(model, **SIZES)


@pytest.fixture(scope="module")
def plain(model) -> LLM:
    return LLM(model, **SIZES)


def answers(llm: Any, prompts=PROMPTS, params: Any = PARAMS) -> list[Any]:
    """Token ids, log-probabilities and why they ended, of every branch."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [
        [
            (branch.token_ids, branch.logprobs, branch.cumulative_logprob, branch.finish_reason)
            for branch in output.outputs
        ]
        for output in outputs
    ] + [output.prompt_logprobs for output in outputs]


def check_empty(*llms: LLM) -> None:
    """Checks that all requests have ended, and that no block is owned."""
    for llm in llms:
        state = llm.engine.scheduler_state
        scheduler.check(state)
        assert not llm.engine.has_work
        assert state.pool.num_free == state.pool.num_blocks
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


@pytest.mark.default_cases("plain", "small pool")
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_those_of_one_engine_bit_for_bit(
    model, single, plain, tmp_path, name
):
    """Twice: then both prefix caches have the prompts. Both recordings replay."""
    decode, prefill = (
        plain if options is None else LLM(model, **SIZES | options) for options in CASES[name]
    )
    for llm in (prefill, decode):
        llm.engine.reset()
    for file, llm in (("prefill", prefill), ("decode", decode)):
        llm.engine.record(tmp_path / f"{file}.jsonl")
    expected = answers(single)
    pair = PrefillDecode(prefill, decode)
    steps = watch_steps(pair.session)
    for _ in range(2):
        chex.assert_trees_all_equal(answers(pair), expected)
        check_empty(prefill, decode)
    moved = [sequence for step in steps for sequence in step.moved]
    assert len(moved) == len(set(moved)) >= 4
    assert not any(step.again for step in steps)
    if name in ("plain", "drafts", "shares nothing"):
        assert len(moved) == 2 * 7, "all branches but the one of a single token"
    for file, llm in (("prefill", prefill), ("decode", decode)):
        llm.engine.record(None)
        report = replay.verify(tmp_path / f"{file}.jsonl")
        assert report.identical, report.difference
        assert len(read_recording.read(tmp_path / f"{file}.jsonl").frames) >= report.steps
        if "small pool" in name:
            assert bool(report.preemptions) == (
                file == ("prefill" if "prefill" in name else "decode")
            )
    text = (tmp_path / "decode.jsonl").read_text()
    assert (
        text.count('{"adopt":')
        == len(moved)
        == (tmp_path / "prefill.jsonl").read_text().count('{"release":')
    )


def test_blocks_that_the_decoding_engine_has_are_not_copied(model, plain):
    decode = LLM(model, **SIZES)
    plain.engine.reset()
    pair = PrefillDecode(plain, decode)
    fetched = []
    pages = plain.engine.padded_pages
    plain.engine.padded_pages = lambda blocks: fetched.append(len(blocks)) or pages(blocks)  # type: ignore[method-assign]
    try:
        for tail in ([5], [6], [6, 7, 8, 9, 10, 11, 12, 13]):
            pair.generate([{"prompt_token_ids": PROMPTS[3][:48] + tail}], PARAMS[0])
    finally:
        del plain.engine.padded_pages
    assert fetched == [7, 1, 1], "six full blocks were there, and the last one is full"
    assert len(decode.engine.scheduler_state.pool.contents) > 8, "what it generates is shared too"


def test_a_transfer_that_fails_is_computed_again(model, single, plain, tmp_path, caplog):
    decode = LLM(model, **SIZES)
    plain.engine.reset()
    plain.engine.record(tmp_path / "prefill.jsonl")
    decode.engine.record(tmp_path / "decode.jsonl")
    pair = PrefillDecode(plain, decode)
    count = [0]
    pages = plain.engine.padded_pages
    steps = watch_steps(pair.session)

    def breaks(blocks):
        count[0] += 1
        if count[0] == 5:  # as if the program that writes had failed: it was given the cache
            for array in jax.tree.leaves(decode.engine._state.cache):
                array.delete()
        if count[0] % 2:
            raise ConnectionError("the cable is out")
        return pages(blocks)

    plain.engine.padded_pages = breaks  # type: ignore[method-assign]
    try:
        chex.assert_trees_all_equal(answers(pair), answers(single))
    finally:
        del plain.engine.padded_pages
    check_empty(plain, decode)
    assert sum(len(step.again) for step in steps) >= 3
    assert '{"restart":{}}' in (tmp_path / "decode.jsonl").read_text()
    assert (
        "is computed again, because its blocks did not arrive: ConnectionError('the cable is out')"
        in caplog.text
    )
    for llm in (plain, decode):
        llm.engine.record(None)
    assert replay.verify(tmp_path / "prefill.jsonl").identical
    assert replay.verify(tmp_path / "decode.jsonl").identical


def note(llm: LLM, tokens: dict[str, list[int]]) -> Any:
    """Runs a step, adds its tokens to those of each sequence, and returns the events of the
    step.
    """
    result: Any = llm.engine.step()
    for event in result.events:
        for name, token in (
            zip(event.request_ids, event.token_ids, strict=True)
            if isinstance(event, Sampled)
            else ()
        ):
            tokens.setdefault(name, []).append(token)
    return result.events


def test_pages_are_those_that_were_asked_for(model):
    llm = LLM(model, **SIZES)
    llm.engine.add("a", PROMPTS[2], PARAMS[0])
    llm.engine.step()
    (seq,) = scheduler.running(llm.engine.scheduler_state)
    table = seq.blocks
    computed = seq.computed
    assert len(table) == 5
    assert computed > 0
    pages = llm.engine.pages(table)
    padded = llm.engine.padded_pages(table)
    chex.assert_tree_shape_prefix(pages, (5,))
    chex.assert_tree_shape_prefix(padded, (8,))
    chex.assert_trees_all_equal(pages, jax.tree.map(lambda x: x[:5], padded))
    assert pages.tokens.reshape(-1)[:computed].tolist() == PROMPTS[2][:computed]
    chex.assert_tree_shape_prefix(llm.engine.pages([]), (0,))
    last = llm.engine.config.num_blocks
    for block in (-1, last + 1):
        with refused(f"block {block} is not in the cache; its blocks are 0 to {last}: use ids"):
            llm.engine.pages([0, block])
    for wrong in ([1.9], [True], 5, ["a"], [[1]]):
        for take in (llm.engine.pages, llm.engine.padded_pages):
            with refused(r"give a sequence of block ids, integers from 0 to"):
                take(wrong)  # type: ignore[arg-type]
    with refused(r"block -1 is not in the cache"):
        llm.engine.padded_pages([-1])
    llm.engine.cancel("a")
    llm.sleep()
    with refused(r"the engine sleeps; call wake_up\(\) first"):
        llm.engine.pages([0])
    llm.wake_up()
    llm.engine._set(state.roll_back(llm.engine._state))
    with refused("the last step failed, and its cache is gone; run a step"):
        llm.engine.pages([0])


def test_without_room_a_sequence_is_queued_and_computed_again(model, single, plain):
    """What `adopt` does by itself. `PrefillDecode` waits for room."""
    decode = LLM(model, **SIZES)
    plain.engine.reset()
    params = PARAMS[0]
    expected = answers(single, PROMPTS[:3], params)
    tokens: dict[str, list[int]] = {}
    for i in range(SIZES["max_num_seqs"] - 1):  # leaves one of its rows
        decode.engine.add(f"other {i}", PROMPTS[0], params)
    note(decode, {})
    for i, prompt in enumerate(PROMPTS[:3]):
        plain.engine.add(f"r{i}", prompt, params)
    while len(tokens) < 3:
        note(plain, tokens)
    adopted = []
    for i in range(3):
        handed = plain.engine.handover(f"r{i}")
        assert decode.engine.has_room(handed) == (i == 0)
        adopted.append(decode.engine.adopt(f"r{i}", handed, plain.engine.pages))
        plain.engine.release(f"r{i}")
    assert adopted == [True, False, False]
    assert not plain.engine.has_work
    while decode.engine.has_work:
        assert not any(isinstance(event, Preempted) for event in note(decode, tokens))
    assert [tuple(tokens[f"r{i}"]) for i in range(3)] == [expected[i][0][0] for i in range(3)]
    check_empty(plain, decode)


def test_a_cancelled_or_failed_call_leaves_nothing_behind(model, plain):
    decode = LLM(model, **SIZES)
    pair = PrefillDecode(plain, decode)
    step = pair.session.step
    count = [0]

    def breaks():
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt
        return step()

    pair.session.step = breaks  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        answers(pair)
    check_empty(plain, decode)
    assert not pair.session._ids
    assert not pair.session._mine


def test_calls_of_either_engine_alone_may_come_between(model, single, plain):
    decode = LLM(model, **SIZES)
    pair = PrefillDecode(plain, decode)
    expected = answers(single)
    (branches,) = pair.session.add([GenerationRequest(PROMPTS[0], PARAMS[0])])
    pair.session.step()
    for llm in (decode, plain, pair):
        assert answers(llm) == expected
    while any(branch.finish_reason is None for branch in branches.values()):
        pair.session.step()
    assert [list(branch.token_ids) for branch in branches.values()] == [
        list(ids) for ids, *_ in expected[0]
    ]
    assert not pair.session._ids
    check_empty(plain, decode)


def test_threads_may_call_pairs_in_both_directions_and_engines_alone(model, single, plain):
    second = LLM(model, **SIZES)
    callers = [PrefillDecode(plain, second), PrefillDecode(second, plain), plain, second]

    def tokens(caller: Any) -> list[Any]:
        return [[ids for ids, *_ in branches] for branches in answers(caller)[: len(PROMPTS)]]

    expected = tokens(single)
    with ThreadPoolExecutor(len(callers)) as pool:
        calls = [pool.submit(tokens, caller) for caller in callers * 3]
        assert [call.result(300) for call in calls] == [expected] * len(calls)
    check_empty(plain, second)


def test_a_sequence_that_the_other_engine_refuses_ends_where_it_is(model, single, plain, caplog):
    decode = LLM(model, **SIZES)
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


SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (8, 64),
    "num_blocks": 256,
}


@pytest.fixture(scope="module")
def tinies(tiny) -> tuple[LLM, LLM]:
    return LLM(tiny, progress=False, **SMALL), LLM(tiny, progress=False, **SMALL)


def test_stop_strings_text_and_structured_outputs_continue(tiny_llm, tinies):
    pair = PrefillDecode(*tinies)
    steps = watch_steps(pair.session)
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=40, stop=chr(ord("a") + i), logprobs=1)
        for i in range(4)
    ]
    form = StructuredOutputsParams(regex="[a-c]{3}-[0-9]{4}")
    params += [
        SamplingParams(temperature=1.0, seed=i, max_tokens=30, structured_outputs=form)
        for i in range(3)
    ]
    prompts = [f"some words {i} and " for i in range(len(params))]
    outputs, expected = (llm.generate(prompts, params) for llm in (pair, tiny_llm))
    facts = [
        [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].stop_reason) for o in x]
        for x in (outputs, expected)
    ]
    assert facts[0] == facts[1]
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs[:4])
    assert all(len(output.outputs[0].text) == 8 for output in outputs[4:])
    assert sum(len(step.moved) for step in steps) >= 6
    assert "".join(pair.stream(prompts[0], params[0])) == outputs[0].outputs[0].text
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
            {"row_features": (FAVOUR,)},
            r"row_features is \[.*\] where the sequence was and \[.*'favour'",
        ),
        ({"seed": 3}, "seed is 0 where the sequence was and 3 here"),
        (
            {"kv_policy": {"name": "streaming", "sinks": 16, "window": 32}},
            r"kv_policy is \(\) where the sequence was",
        ),
    ],
)
def test_engines_that_differ_are_refused(tiny, tinies, options: Any, message):
    with refused(message):
        PrefillDecode(tinies[0], LLM(tiny, progress=False, **SMALL | options))


def test_another_model_or_another_version_of_the_weights_is_refused(tinies, plain, tiny):
    with refused(r"model\.head_dim is 16 where the sequence was and 32 here"):
        PrefillDecode(tinies[0], plain)
    decode = LLM(tiny, progress=False, **SMALL)
    pair = PrefillDecode(tinies[0], decode)
    decode.update_params(tiny.model.params)
    with refused("params_version is 0 where the sequence was and 1 here"):
        pair.generate("hello", SamplingParams(max_tokens=4))


def test_a_request_that_the_decoding_engine_can_never_run_is_refused_before_any_step(tiny, tinies):
    sizes: dict[str, Any] = SMALL | {"num_blocks": 3}
    pair = PrefillDecode(tinies[0], LLM(tiny, progress=False, **sizes))
    with refused("raise num_blocks to 6"):
        pair.generate("hello", SamplingParams(max_tokens=90))
    check_empty(tinies[0])


@pytest.mark.slow
def test_the_example_of_the_page_runs(documented_file, tiny, tiny_llm):
    example = runpy.run_path(str(documented_file("disaggregation.md", "two_engines.py")))
    sizes: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 64, "progress": False}
    outputs = example["answers"](tiny, ["one and ", "two and "], **sizes)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
    expected = tiny_llm.generate(["one and ", "two and "], params)
    assert [output.outputs[0].text for output in outputs] == [
        output.outputs[0].text for output in expected
    ]
