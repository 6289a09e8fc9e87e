"""Text in, text out, and every way to ask for something impossible: a clear error, and an engine
that still works.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.host import scheduler
from pagedjax.text.outputs import RequestOutput
from tests.engine.runs import small_llm
from tests.refusals import refused

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "the cat and the other cat"


def greedy(**options) -> SamplingParams:
    return dataclasses.replace(GREEDY, **options)


def run(llm: LLM, prompts: Any = TEXT, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params)


def branch_of(llm: LLM, params: Any = GREEDY) -> Any:
    return run(llm, TEXT, params)[0].outputs[0]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [branch.text for out in outputs for branch in out.outputs]


@pytest.fixture
def llm(tiny_llm):
    """Nothing may be left behind, whatever the test did."""
    yield tiny_llm
    scheduler.check(tiny_llm.engine.scheduler_state)
    assert not tiny_llm.engine.has_work
    assert tiny_llm.engine.scheduler_state.pool.num_free == tiny_llm.engine.config.num_blocks


def test_prompts_are_strings_token_ids_or_lists_of_either(llm):
    ids = llm.tokenizer.encode(TEXT)
    (output,) = run(llm)
    assert output.prompt == TEXT
    assert output.prompt_token_ids == tuple(ids)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"
    by_ids = run(llm, ids)
    assert by_ids[0].prompt is None
    assert texts(by_ids) == texts([output])
    outputs = run(llm, [TEXT, ids, "rain"])
    assert texts(outputs)[:2] == texts([output]) * 2
    assert [out.request_id for out in outputs] == ["0", "1", "2"]


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [GREEDY, greedy(max_tokens=3)]
    lengths = [len(out.outputs[0].token_ids) for out in run(llm, [TEXT, TEXT], params)]
    assert lengths == [12, 3]
    with refused("2 SamplingParams for 1 prompts"):
        run(llm, [TEXT], params)


def test_an_engine_seed_fixes_requests_without_one(tiny):
    def texts_with(seed: int) -> list[str]:
        llm = small_llm(tiny, seed=seed)
        return texts(run(llm, [TEXT, TEXT], SamplingParams(max_tokens=10, ignore_eos=True)))

    first = texts_with(0)
    assert first[0] != first[1]
    assert texts_with(0) == first
    assert texts_with(1) != first


def test_stream_yields_the_same_text(llm):
    pieces = list(llm.stream(TEXT, GREEDY))
    assert "".join(pieces) == texts(run(llm))[0]
    with refused("n is 2; a stream has one branch"):
        next(llm.stream(TEXT, SamplingParams(n=2)))
    with refused("best_of is 3; a stream has one branch, use generate"):
        next(llm.stream(TEXT, SamplingParams(best_of=3)))
    assert list(llm.stream(TEXT, dataclasses.replace(GREEDY, best_of=1))) == pieces


def test_interleaved_streams_and_calls_lose_no_text(llm):
    """A step serves all unfinished requests, of every call."""
    long = greedy(max_tokens=30)
    expected = [texts(run(llm, prompt, long))[0] for prompt in (TEXT, "rain")]
    streams = [llm.stream(TEXT, long), llm.stream("rain", long)]
    got = [next(streams[0]), next(streams[1])]
    between = greedy(max_tokens=10)
    assert texts(run(llm, ["the"], between)) == texts(run(llm, ["the"], between))
    pairs = list(zip_longest(*streams, fillvalue=""))
    assert [
        first + "".join(pieces) for first, pieces in zip(got, zip(*pairs, strict=True), strict=True)
    ] == expected


def test_a_stream_that_other_calls_ended_yields_all_text(llm):
    expected = texts(run(llm))[0]
    stream = llm.stream(TEXT, GREEDY)
    first = next(stream)
    run(llm, "rain", greedy(max_tokens=30))
    assert not llm.engine.has_work
    assert first + "".join(stream) == expected


def test_chat_renders_the_template_of_the_model(llm):
    messages = [{"role": "user", "content": TEXT}]
    (out,) = llm.chat(messages, GREEDY)
    assert out.prompt_token_ids == tuple(llm.tokenizer.apply_chat_template(messages))
    assert "<|im_start|>assistant" in out.prompt
    assert texts(llm.chat([messages, messages], GREEDY)) == texts([out]) * 2


def test_a_stop_string_ends_the_text_inside_a_token(llm):
    full = texts(run(llm))[0]
    assert len(full) > 8, "the tiny model's text is too short for this test"
    for start, end in ((3, 4), (2, 7), (len(full) - 2, len(full))):
        stop = full[start:end]
        first = full.find(stop)
        params = greedy(stop=stop)
        branch = branch_of(llm, params)
        assert branch.text == full[:first]
        assert (branch.finish_reason, branch.stop_reason) == ("stop", stop)
        assert not llm.engine.has_work, "the scheduler still runs it"
        inclusive = greedy(stop=stop, include_stop_str_in_output=True)
        assert texts(run(llm, TEXT, inclusive)) == [full[:first] + stop]
    late = greedy(min_tokens=12, stop=full[0])
    assert len(branch_of(llm, late).token_ids) == 12


def test_an_incomplete_character_at_the_end_is_marked(llm):
    first_byte = llm.tokenizer.encode("é")[0]
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=(first_byte,))
    assert texts(run(llm, TEXT, params)) == ["\ufffd"]
    assert list(llm.stream(TEXT, params)) == ["\ufffd"]


def test_a_stop_token_is_the_stop_reason(llm):
    tokens = branch_of(llm).token_ids
    stop = tokens[4]
    params = greedy(stop_token_ids=(stop,))
    branch = branch_of(llm, params)
    assert branch.token_ids == tokens[: tokens.index(stop) + 1]
    assert (branch.finish_reason, branch.stop_reason) == ("stop", stop)
    assert branch.text == llm.tokenizer.decode(branch.token_ids[:-1])


def test_eos_is_the_stop_reason_only_if_it_is_ignored_and_a_stop_token(llm):
    eos = llm.model.eos_token_ids[0]
    options = {"temperature": 0, "logit_bias": {eos: 100.0}, "stop_token_ids": (eos,)}
    for ignored, reason in ((True, eos), (False, None)):
        params = SamplingParams(**options, ignore_eos=ignored)
        branch = branch_of(llm, params)
        assert (branch.token_ids, branch.text) == ((eos,), "")
        assert (branch.finish_reason, branch.stop_reason) == ("stop", reason)


def test_min_tokens_defers_eos(llm):
    eos = llm.model.eos_token_ids[0]
    branch = branch_of(llm, SamplingParams(temperature=0, logit_bias={eos: 100.0}, min_tokens=5))
    assert len(branch.token_ids) == 6
    assert branch.token_ids.index(eos) == 5


def test_each_token_has_log_probabilities_and_the_best_others(llm):
    params = greedy(max_tokens=5, logprobs=3, prompt_logprobs=1)
    (out,) = run(llm, TEXT, params)
    branch = out.outputs[0]
    assert branch.logprobs is not None
    for token, entry in zip(branch.token_ids, branch.logprobs, strict=True):
        assert entry[token].rank == 1  # greedy
        assert len(entry) == 3
        assert all(entry[token].logprob >= alternative.logprob for alternative in entry.values())
        assert entry[token].decoded_token == llm.tokenizer.decode_token(token)
    assert branch.cumulative_logprob == pytest.approx(
        sum(entry[t].logprob for t, entry in zip(branch.token_ids, branch.logprobs, strict=True))
    )
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    assert all(
        t in entry
        for t, entry in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
    )


BAD_REQUESTS = {
    "an empty string": ("", {}, "the prompt is empty"),
    "no token ids": ([[]], {}, "the prompt is empty"),
    "no prompts": ([], {}, "there are no prompts"),
    "a prompt beyond the limit": (
        [TEXT, [5] * 600, TEXT],
        {},
        "prompt of 600 tokens, but max_model_len is 512",
    ),
    "a negative token": ([[5, -1]], {}, "token id -1"),
    "a bias beyond the vocabulary": (
        TEXT,
        {"logit_bias": {400: 1.0}},
        "logit_bias has token id 400",
    ),
    "a stop token beyond the vocabulary": (
        TEXT,
        {"stop_token_ids": (999,)},
        "stop_token_ids has token id 999",
    ),
    "only stop tokens": (
        TEXT,
        {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 1},
        "only stop tokens",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_next_one_is_served(llm, name):
    prompts, params, message = BAD_REQUESTS[name]
    before = texts(run(llm))
    with refused(message.replace("(", r"\(")):
        run(llm, prompts, SamplingParams(**params))
    assert not llm.engine.has_work
    assert texts(run(llm)) == before


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is None; give a string"),
        (b"the cat", "prompts is b'the cat'; give a string"),
        ({"text": "the cat"}, "a prompt has 'text'; models here take text alone"),
        ({}, r"a prompt is \{\}; a mapping has 'prompt' or 'prompt_token_ids'"),
        ([{"prompt": 5}], "the 'prompt' of a prompt is 5; it must be a string"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "a prompt has 'multi_modal_data'; models here take text",
        ),
        (
            {"prompt": "a", "cache_salt": "b"},
            r"a prompt has 'cache_salt'; use SamplingParams\(cache_salt=...\)",
        ),
        (
            {"prompt_token_ids": ["a"]},
            r"a prompt is \['a'\]; it must be a string or a list of token ids",
        ),
        ([None], "a prompt is None; it must be a string or a list of token ids"),
        ([[5, 6.5]], r"a prompt is \[5, 6.5\]; it must be"),
        ([b"the cat"], "a prompt is b'the cat'; it must be"),
    ],
)
def test_an_invalid_prompt_is_refused(llm, prompts, message):
    with refused(message):
        run(llm, prompts)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 5, [None], [{"n": 2}]])
def test_invalid_sampling_params_are_refused(llm, params):
    for call in (llm.generate, llm.stream):
        with refused(r"sampling_params is .*; it must be SamplingParams or Beam"):
            list(call("the cat", params))


@pytest.mark.parametrize(
    "messages", [None, [], "hi", 5, [5], {"role": "user", "content": "hi"}, ["hi"], [[]], [[5]]]
)
def test_an_invalid_conversation_is_refused(llm, messages):
    with refused(r"give a conversation|a conversation has|must be a mapping"):
        llm.chat(messages, GREEDY)


def test_token_ids_may_be_numpy_integers(llm):
    expected = texts(run(llm, [5, 6, 7]))
    ids = np.array([5, 6, 7])
    for prompts in (ids, [ids], list(ids), ids[None]):
        assert texts(run(llm, prompts)) == expected


def test_what_policies_read_reaches_them(llm, tmp_path):
    path = tmp_path / "run.jsonl"
    llm.engine.record(path)
    try:
        llm.generate(
            [TEXT, "rain"],
            GREEDY,
            user="ann",
            predicted=[7, None],
            service_class=["chat", "batch"],
            deadline=[2, None],
        )
    finally:
        llm.engine.record(None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    submits = [line["submit"] for line in lines if "submit" in line]
    names = ("user", "predicted", "service_class", "deadline")
    fields = [[submit.get(name) for name in names] for submit in submits]
    assert fields == [["ann", 7, "chat", 2.0], ["ann", None, "batch", None]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"predicted": 1.5}, "predicted is 1.5; it must be of type int"),
        ({"predicted": -1}, "has -1 predicted output tokens; give a number of at"),
        ({"deadline": "soon"}, "deadline is 'soon'; it must be of type float"),
        ({"deadline": -2.0}, r"has a deadline of -2\.0 seconds"),
        ({"service_class": None}, "service_class is None; it must be of type str"),
        ({"predicted": [1, 2, 3]}, "3 values of predicted for 2 prompts"),
    ],
    ids=str,
)
def test_wrong_fields_for_policies_are_refused(llm, fields, words):
    with pytest.raises(ValueError, match=words):
        llm.generate([TEXT, "rain"], GREEDY, **fields)
