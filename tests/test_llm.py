"""Text in, text out, and every way to ask for something impossible: a clear error, and an engine
that still works.
"""

from __future__ import annotations

import dataclasses
from itertools import zip_longest

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.host import scheduler
from pagedjax.text.outputs import RequestOutput
from pagedjax.weights.locate import embedded_file

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "the cat and the other cat"


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
    (output,) = llm.generate(TEXT, GREEDY, use_tqdm=False)
    assert output.prompt == TEXT
    assert output.prompt_token_ids == tuple(ids)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"
    by_ids = llm.generate(ids, GREEDY, use_tqdm=False)
    assert by_ids[0].prompt is None
    assert texts(by_ids) == texts([output])
    outputs = llm.generate([TEXT, ids, "rain"], GREEDY, use_tqdm=False)
    assert texts(outputs)[:2] == texts([output]) * 2
    assert [out.request_id for out in outputs] == ["0", "1", "2"]


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)]
    lengths = [
        len(out.outputs[0].token_ids) for out in llm.generate([TEXT, TEXT], params, use_tqdm=False)
    ]
    assert lengths == [12, 3]
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
        llm.generate([TEXT], params, use_tqdm=False)


def test_default_parameters_equal_vllm(llm):
    assert len(llm.generate(TEXT, use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_branch_i_equals_a_request_with_seed_plus_i(llm):
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=10, ignore_eos=True)
    branches = llm.generate(TEXT, params, use_tqdm=False)[0].outputs
    assert [branch.index for branch in branches] == [0, 1, 2]
    assert len({branch.token_ids for branch in branches}) > 1
    for i, branch in enumerate(branches):
        alone = SamplingParams(temperature=1.0, seed=11 + i, max_tokens=10, ignore_eos=True)
        assert llm.generate(TEXT, alone, use_tqdm=False)[0].outputs[0].token_ids == branch.token_ids


def test_an_engine_seed_fixes_requests_without_one(tiny):
    def run(seed: int) -> list[str]:
        sizes = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "token_buckets": (64,),
            "num_blocks": 256,
        }
        llm = LLM(tiny, progress=False, seed=seed, **sizes)
        return texts(
            llm.generate(
                [TEXT, TEXT], SamplingParams(max_tokens=10, ignore_eos=True), use_tqdm=False
            )
        )

    first = run(0)
    assert first[0] != first[1]
    assert run(0) == first
    assert run(1) != first


def test_stream_yields_the_same_text(llm):
    pieces = list(llm.stream(TEXT, GREEDY))
    assert "".join(pieces) == texts(llm.generate(TEXT, GREEDY, use_tqdm=False))[0]
    with pytest.raises(ValueError, match="n is 2; a stream has one branch"):
        next(llm.stream(TEXT, SamplingParams(n=2)))
    with pytest.raises(ValueError, match="best_of is 3; a stream has one branch, use generate"):
        next(llm.stream(TEXT, SamplingParams(best_of=3)))
    assert list(llm.stream(TEXT, dataclasses.replace(GREEDY, best_of=1))) == pieces


def test_an_abandoned_stream_frees_its_blocks(llm):
    stream = llm.stream(TEXT, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work


def test_interleaved_streams_and_calls_lose_no_text(llm):
    """A step serves all unfinished requests, of every call."""
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = [texts(llm.generate(prompt, long, use_tqdm=False))[0] for prompt in (TEXT, "rain")]
    streams = [llm.stream(TEXT, long), llm.stream("rain", long)]
    got = [next(streams[0]), next(streams[1])]
    between = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    assert texts(llm.generate(["the"], between, use_tqdm=False)) == texts(
        llm.generate(["the"], between, use_tqdm=False)
    )
    pairs = list(zip_longest(*streams, fillvalue=""))
    assert [
        first + "".join(pieces) for first, pieces in zip(got, zip(*pairs, strict=True), strict=True)
    ] == expected


def test_a_stream_that_other_calls_ended_yields_all_text(llm):
    expected = texts(llm.generate(TEXT, GREEDY, use_tqdm=False))[0]
    stream = llm.stream(TEXT, GREEDY)
    first = next(stream)
    llm.generate(
        "rain", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    assert not llm.engine.has_work
    assert first + "".join(stream) == expected


def test_chat_renders_the_template_of_the_model(llm):
    messages = [{"role": "user", "content": TEXT}]
    (out,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert out.prompt_token_ids == tuple(llm.tokenizer.apply_chat_template(messages))
    assert "<|im_start|>assistant" in out.prompt
    assert texts(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == texts([out]) * 2


def test_a_stop_string_ends_the_text_inside_a_token(llm):
    full = texts(llm.generate(TEXT, GREEDY, use_tqdm=False))[0]
    assert len(full) > 8, "the tiny model's text is too short for this test"
    for start, end in ((3, 4), (2, 7), (len(full) - 2, len(full))):
        stop = full[start:end]
        first = full.find(stop)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
        branch = llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0]
        assert branch.text == full[:first]
        assert (branch.finish_reason, branch.stop_reason) == ("stop", stop)
        assert not llm.engine.has_work, "the scheduler still runs it"
        inclusive = SamplingParams(
            temperature=0,
            max_tokens=12,
            ignore_eos=True,
            stop=stop,
            include_stop_str_in_output=True,
        )
        assert texts(llm.generate(TEXT, inclusive, use_tqdm=False)) == [full[:first] + stop]
    late = SamplingParams(
        temperature=0, max_tokens=12, min_tokens=12, ignore_eos=True, stop=full[0]
    )
    assert len(llm.generate(TEXT, late, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_text_that_might_begin_a_stop_string_is_returned_at_the_end(llm):
    full = texts(llm.generate(TEXT, GREEDY, use_tqdm=False))[0]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=full[-4:] + "!")
    assert texts(llm.generate(TEXT, params, use_tqdm=False)) == [full]
    assert "".join(llm.stream(TEXT, params)) == full


def test_an_incomplete_character_at_the_end_is_marked(llm):
    first_byte = llm.tokenizer.encode("é")[0]
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=(first_byte,))
    assert texts(llm.generate(TEXT, params, use_tqdm=False)) == ["\ufffd"]
    assert list(llm.stream(TEXT, params)) == ["\ufffd"]


def test_a_stop_token_is_the_stop_reason(llm):
    tokens = llm.generate(TEXT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stop = tokens[4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    branch = llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0]
    assert branch.token_ids == tokens[: tokens.index(stop) + 1]
    assert (branch.finish_reason, branch.stop_reason) == ("stop", stop)
    assert branch.text == llm.tokenizer.decode(branch.token_ids[:-1])


def test_eos_that_is_ignored_and_a_stop_token_is_the_stop_reason(llm):
    eos = llm.model.eos_token_ids[0]
    options = {"temperature": 0, "logit_bias": {eos: 100.0}, "stop_token_ids": (eos,)}
    for ignored, reason in ((True, eos), (False, None)):
        params = SamplingParams(**options, ignore_eos=ignored)
        branch = llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0]
        assert (branch.token_ids, branch.text) == ((eos,), "")
        assert (branch.finish_reason, branch.stop_reason) == ("stop", reason)


def test_eos_has_no_stop_reason_and_min_tokens_defers_it(llm):
    eos = llm.model.eos_token_ids[0]
    bias = {eos: 100.0}
    branch = llm.generate(TEXT, SamplingParams(temperature=0, logit_bias=bias), use_tqdm=False)[
        0
    ].outputs[0]
    assert (branch.token_ids, branch.text) == ((eos,), "")
    assert (branch.finish_reason, branch.stop_reason) == ("stop", None)
    later = SamplingParams(temperature=0, logit_bias=bias, min_tokens=5)
    branch = llm.generate(TEXT, later, use_tqdm=False)[0].outputs[0]
    assert len(branch.token_ids) == 6
    assert branch.token_ids.index(eos) == 5


def test_each_token_has_log_probabilities_and_the_best_others(llm):
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    (out,) = llm.generate(TEXT, params, use_tqdm=False)
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
        [[5] * 600],
        {},
        "prompt of 600 tokens, but max_model_len is 512",
    ),
    "a token beyond the vocabulary": ([[5, 320]], {}, "token id 320; the vocabulary is 0 to 319"),
    "a negative token": ([[5, -1]], {}, "token id -1"),
    "a token beyond 64 bits": ([[5], [2**70]], {}, f"token id {2**70}; the vocabulary is 0 to 319"),
    "temperature -1": (TEXT, {"temperature": -1}, "temperature is -1; it must be between 0"),
    "top_p 0": (TEXT, {"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
    "n 0": (TEXT, {"n": 0}, "n is 0; it must be at least 1"),
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
    before = texts(llm.generate(TEXT, GREEDY, use_tqdm=False))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    assert not llm.engine.has_work
    assert texts(llm.generate(TEXT, GREEDY, use_tqdm=False)) == before


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is None; give a string"),
        (5, "prompts is 5; give a string"),
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
        (["the cat", ["sat"]], r"a prompt is \['sat'\]; it must be"),
        ([5.0, 6.0], "a prompt is 5.0; it must be"),
        ([[5, 6.5]], r"a prompt is \[5, 6.5\]; it must be"),
        ([b"the cat"], "a prompt is b'the cat'; it must be"),
    ],
)
def test_an_invalid_prompt_is_refused(llm, prompts, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 5, [None], [{"n": 2}]])
def test_invalid_sampling_params_are_refused(llm, params):
    for call in (llm.generate, llm.stream):
        with pytest.raises(
            ValueError, match=r"sampling_params is .*; it must be SamplingParams or Beam"
        ):
            list(call("the cat", params))


@pytest.mark.parametrize(
    "messages", [None, [], "hi", 5, [5], {"role": "user", "content": "hi"}, ["hi"], [[]], [[5]]]
)
def test_an_invalid_conversation_is_refused(llm, messages):
    with pytest.raises(
        ValueError, match=r"give a conversation|a conversation has|must be a mapping"
    ):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_token_ids_may_be_numpy_integers(llm):
    expected = texts(llm.generate([5, 6, 7], GREEDY, use_tqdm=False))
    ids = np.array([5, 6, 7])
    for prompts in (ids, [ids], list(ids), ids[None]):
        assert texts(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_one_bad_prompt_runs_none_of_the_call(llm):
    with pytest.raises(ValueError, match="prompt of 600 tokens"):
        llm.generate([TEXT, [5] * 600, TEXT], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work


def test_a_pool_too_small_for_one_request_names_the_needed_size(tiny):
    llm = LLM(
        tiny,
        progress=False,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        token_buckets=(16,),
        num_blocks=2,
    )
    with pytest.raises(
        ValueError, match=r"can grow to 105 tokens, which is 7 blocks of 16, but the pool has 2"
    ):
        llm.generate([[5] * 5], SamplingParams(max_tokens=100), use_tqdm=False)
    assert len(llm.generate([[5] * 5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_sise": 16}, "unknown key 'block_sise'; did you mean 'block_size'?"),
        ({"block_size": "16"}, "block_size is '16'; it must be an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of"),
        ({"policy": "fifo"}, "policy is 'fifo'; it must be one of"),
        ({"attention_impl": "triton"}, "attention_impl is 'triton'; it must be one of"),
        ({"dtype": "bfloat16"}, "the model was loaded with 'float32'; load it again"),
        (
            {"attention_impl": "pallas_gpu"},
            "attention_impl 'pallas_gpu' runs on platform 'gpu' and not on 'cpu'; 'xla' has no",
        ),
        ({"max_model_len": 100_000}, "max_model_len is 100000, but the model was made for 512"),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_remedy(tiny, config, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        LLM(tiny, progress=False, **config)


def test_a_missing_model_lists_the_accepted_forms():
    with pytest.raises((ValueError, FileNotFoundError), match=r"a directory with config\.json"):
        LLM("no/such/model/here", progress=False)


def test_a_truncated_gguf_is_named(tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(embedded_file("smollm2-135m").read_bytes()[:50_000_000])
    with pytest.raises(ValueError, match=r"short\.gguf"):
        LLM(short, progress=False)
