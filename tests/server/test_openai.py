"""OpenAI's client against the running server: the same tokens as the library, in OpenAI's
formats.
"""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from tests.server.support import serving
from tests.server.test_text_offsets import decoded

GREEDY = {"temperature": 0.0}
PROMPT = "abc def"


def generate(reference, prompt, **params):
    (output,) = reference.generate(prompt, SamplingParams(**params))
    return output


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("huge")
    assert error.value.code == "model_not_found"


def test_a_greedy_completion_matches_the_library(client, reference):
    expected = generate(reference, PROMPT, temperature=0.0, max_tokens=12)
    completion = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, **GREEDY)
    (choice,) = completion.choices
    assert choice.text == expected.outputs[0].text
    assert (choice.finish_reason, choice.index) == (expected.outputs[0].finish_reason, 0)
    assert (completion.object, completion.model) == ("text_completion", "tiny")
    assert completion.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert completion.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert (
        completion.usage.total_tokens
        == completion.usage.prompt_tokens + completion.usage.completion_tokens
    )


def test_defaults_are_those_of_openai(client):
    completion = client.completions.create(model="tiny", prompt=PROMPT)
    assert completion.usage.completion_tokens <= 16
    assert len(completion.choices) == 1


@pytest.mark.parametrize(
    "prompts", [["abc", "b", "cc dd"], [[20, 30, 40], [50]]], ids=["texts", "ids"]
)
def test_several_prompts_are_answered_in_order(client, reference, prompts):
    expected = reference.generate(prompts, SamplingParams(temperature=0.0, max_tokens=5))
    completion = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=5, n=1, **GREEDY
    )
    assert [choice.text for choice in completion.choices] == [
        output.outputs[0].text for output in expected
    ]
    assert [choice.index for choice in completion.choices] == list(range(len(prompts)))


def test_a_prompt_may_be_token_ids(client, reference):
    expected = generate(reference, [20, 30, 40], temperature=0.0, max_tokens=5)
    extra = {"return_token_ids": True}
    completion = client.completions.create(
        model="tiny", prompt=[20, 30, 40], max_tokens=5, extra_body=extra, **GREEDY
    )
    assert completion.choices[0].token_ids == list(expected.outputs[0].token_ids)
    assert completion.choices[0].prompt_token_ids == [20, 30, 40]


def test_branches_have_different_seeds(client, reference):
    expected = generate(reference, PROMPT, n=3, seed=7, max_tokens=6)
    completion = client.completions.create(model="tiny", prompt=PROMPT, n=3, seed=7, max_tokens=6)
    assert [choice.text for choice in completion.choices] == [
        branch.text for branch in expected.outputs
    ]
    repeated = client.completions.create(model="tiny", prompt=PROMPT, n=3, seed=7, max_tokens=6)
    assert [choice.text for choice in repeated.choices] == [
        choice.text for choice in completion.choices
    ]
    other_seed = client.completions.create(model="tiny", prompt=PROMPT, n=3, seed=8, max_tokens=6)
    assert [choice.text for choice in other_seed.choices] != [
        choice.text for choice in completion.choices
    ]
    negative = client.completions.create(
        model="tiny", prompt=PROMPT, n=3, seed=7 - 2**32, max_tokens=6
    )
    assert [choice.text for choice in negative.choices] == [
        choice.text for choice in completion.choices
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.5, "seed": 1},
        {"presence_penalty": 1.5, "frequency_penalty": -1.0, "temperature": 0.0},
        {"logit_bias": {"40": 100}, "temperature": 0.0},
        {
            "extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4},
            "seed": 3,
        },
        {
            "extra_body": {
                "stop_token_ids": [33],
                "ignore_eos": True,
                "allowed_token_ids": [33, 34, 35],
            },
            "seed": 3,
        },
        {"best_of": 3, "seed": 5},
    ],
    ids=str,
)
def test_sampling_options_reach_the_engine(client, reference, options):
    extra = {key: value for key, value in options.items() if key != "extra_body"} | options.get(
        "extra_body", {}
    )
    expected = generate(reference, PROMPT, **extra, max_tokens=10).outputs[0]
    choice = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=10, **options
    ).choices[0]
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.stop_reason == expected.stop_reason


def test_a_stop_string_ends_an_answer(client, reference):
    text = generate(reference, PROMPT, temperature=0.0, max_tokens=20).outputs[0].text
    stop = text[5:7]
    expected = generate(reference, PROMPT, temperature=0.0, max_tokens=20, stop=stop).outputs[0]
    choice = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, stop=[stop], **GREEDY
    ).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (expected.text, "stop", stop)
    assert stop not in choice.text


def test_log_probabilities_match_the_library(client, reference):
    expected = generate(reference, PROMPT, temperature=0.0, max_tokens=6, logprobs=3)
    choice = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, logprobs=3, **GREEDY
    ).choices[0]
    branch = expected.outputs[0]
    chosen = [
        position[token] for token, position in zip(branch.token_ids, branch.logprobs, strict=True)
    ]
    assert choice.logprobs.token_logprobs == pytest.approx([c.logprob for c in chosen], abs=1e-5)
    assert choice.logprobs.tokens == [c.decoded_token for c in chosen]
    for top, position in zip(choice.logprobs.top_logprobs, branch.logprobs, strict=True):
        ranked = sorted(
            (entry for entry in position.values() if entry.rank <= 3), key=lambda entry: -entry.rank
        )
        # of one text, the best comes last
        best = {entry.decoded_token: entry.logprob for entry in ranked}
        assert top == pytest.approx(best, abs=1e-5)
    before = [
        decoded(reference.tokenizer, list(branch.token_ids[:i]), True)
        for i in range(len(branch.token_ids))
    ]
    assert choice.logprobs.text_offset == [len(text) for text in before]


def test_an_echo_has_the_prompt_with_its_log_probabilities(client, reference):
    """Evaluation harnesses score texts with it."""
    output = generate(
        reference, PROMPT, temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1
    )
    ids = output.prompt_token_ids
    expected = [p[t].logprob for t, p in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    for max_tokens in (1, 0):
        completion = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=max_tokens, echo=True, logprobs=1, **GREEDY
        )
        (choice,) = completion.choices
        assert choice.text == PROMPT + (output.outputs[0].text if max_tokens else "")
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-5)
        assert len(choice.logprobs.tokens) == len(ids) + max_tokens
        assert "".join(choice.logprobs.tokens[: len(ids)]) == PROMPT
        assert completion.usage.completion_tokens == max_tokens
    with_ids = client.completions.create(
        model="tiny", prompt=list(ids), max_tokens=0, echo=True, logprobs=1, **GREEDY
    )
    assert with_ids.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert with_ids.choices[0].text == PROMPT


def test_prompt_log_probabilities_have_vllms_format(client, reference):
    expected = generate(reference, PROMPT, temperature=0.0, max_tokens=1, prompt_logprobs=2)
    choice = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2}, **GREEDY
    ).choices[0]
    assert choice.prompt_logprobs[0] is None
    for entries, position in zip(
        choice.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True
    ):
        assert {int(token) for token in entries} == set(position)
        for token, entry in position.items():
            assert entries[str(token)]["logprob"] == pytest.approx(entry.logprob, abs=1e-5)
            assert entries[str(token)]["rank"] == entry.rank


def test_beam_search_matches_the_library(client, reference):
    (expected,) = reference.generate(PROMPT, BeamSearchParams(beam_width=3, max_tokens=6))
    completion = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        n=3,
        max_tokens=6,
        extra_body={"use_beam_search": True},
        **GREEDY,
    )
    assert [choice.text for choice in completion.choices] == [
        branch.text for branch in expected.outputs
    ]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_answer_in_pieces(client, reference, n):
    output = generate(reference, PROMPT, n=n, seed=3, max_tokens=9)
    texts = [""] * n
    ends = {}
    chunks = 0
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        n=n,
        seed=3,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        assert chunk.usage is None or not chunk.choices
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [branch.text for branch in output.outputs]
    assert ends == {branch.index: branch.finish_reason for branch in output.outputs}
    assert usage.completion_tokens == sum(len(branch.token_ids) for branch in output.outputs)
    assert chunks > 3


def test_a_stream_of_several_prompts_numbers_their_choices(client, reference):
    prompts = ["abc", "b", "cc dd"]
    outputs = reference.generate(prompts, SamplingParams(n=2, seed=4, max_tokens=5))
    texts = {i: "" for i in range(6)}
    for chunk in client.completions.create(
        model="tiny", prompt=prompts, n=2, seed=4, max_tokens=5, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [branch.text for output in outputs for branch in output.outputs]


def test_a_stream_may_have_an_echo_and_log_probabilities(client, reference):
    text = "".join(
        choice.text
        for chunk in client.completions.create(
            model="tiny", prompt=PROMPT, echo=True, max_tokens=5, stream=True, **GREEDY
        )
        for choice in chunk.choices
    )
    assert (
        text == PROMPT + generate(reference, PROMPT, temperature=0.0, max_tokens=5).outputs[0].text
    )
    unstreamed = client.completions.create(
        model="tiny", prompt=PROMPT, logprobs=2, max_tokens=5, **GREEDY
    ).choices[0]
    tokens = []
    values = []
    offsets = []
    for chunk in client.completions.create(
        model="tiny", prompt=PROMPT, logprobs=2, max_tokens=5, stream=True, **GREEDY
    ):
        for choice in chunk.choices:
            tokens += choice.logprobs.tokens
            values += choice.logprobs.token_logprobs
            offsets += choice.logprobs.text_offset
    assert tokens == unstreamed.logprobs.tokens
    assert values == pytest.approx(unstreamed.logprobs.token_logprobs, abs=1e-5)
    assert offsets == unstreamed.logprobs.text_offset


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abc"}]


def test_a_chat_uses_the_models_template(client, reference):
    (expected,) = reference.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=8))
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=8, **GREEDY
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert (answer.object, choice.finish_reason) == (
        "chat.completion",
        expected.outputs[0].finish_reason,
    )
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    older = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, **GREEDY)
    assert older.choices[0].message.content == choice.message.content
    parts = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        }
    ]
    in_parts = client.chat.completions.create(
        model="tiny", messages=[*parts, MESSAGES[1]], max_tokens=8, **GREEDY
    )
    assert in_parts.choices[0].message.content == choice.message.content


def test_a_chat_without_max_tokens_ends_at_the_models_limit(client, reference):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True}, **GREEDY
    )
    assert answer.usage.total_tokens == reference.engine.config.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_streams_with_its_role_first(client):
    unstreamed = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=2, **GREEDY
    ).choices[0]
    assert len(unstreamed.logprobs.content) == 8 or unstreamed.finish_reason == "stop"
    assert all(len(entry.top_logprobs) == 2 for entry in unstreamed.logprobs.content)
    assert all(
        bytes(entry.bytes).decode(errors="replace") == entry.token
        for entry in unstreamed.logprobs.content
    )
    roles = []
    text = ""
    content = []
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        **GREEDY,
    ):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            roles.append(choice.delta.role)
            text += choice.delta.content or ""
            content += choice.logprobs.content if choice.logprobs else []
    assert roles == ["assistant", *[None] * (len(roles) - 1)]
    assert text == unstreamed.message.content
    assert [entry.token for entry in content] == [
        entry.token for entry in unstreamed.logprobs.content
    ]
    assert [entry.logprob for entry in content] == pytest.approx(
        [entry.logprob for entry in unstreamed.logprobs.content], abs=1e-5
    )


def test_a_chat_has_its_prompt_fields_beside_its_choices(client):
    """As in vLLM."""
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, max_tokens=2, extra_body=extra
    )
    assert len(answer.prompt_token_ids) == len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None
    for choice in answer.choices:
        assert not {"prompt_logprobs", "prompt_token_ids"} & set(choice.model_extra)
        assert len(choice.token_ids) == 2


def test_a_stream_begins_with_the_ids_of_its_prompt(client, reference):
    extra = {"return_token_ids": True}
    ids = reference.tokenizer.encode(PROMPT)
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, stream=True, extra_body=extra, **GREEDY
    )
    first, *later_chunks = chat
    assert first.prompt_token_ids == reference.tokenizer.apply_chat_template(MESSAGES)
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in later_chunks)
    stream = client.completions.create(
        model="tiny", prompt=[PROMPT, "b"], max_tokens=2, stream=True, extra_body=extra, **GREEDY
    )
    first_ids = {}
    for chunk in stream:
        for choice in chunk.choices:
            first_ids.setdefault(choice.index, choice.model_extra.get("prompt_token_ids"))
    assert first_ids == {0: ids, 1: reference.tokenizer.encode("b")}


def test_continuous_usage_of_a_stream_counts_one_branch(client, reference):
    options = {
        "stream": True,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }
    prompts = [[20, 30, 40], [50]]
    extra = {"ignore_eos": True}
    last = {}
    generated = {}
    for chunk in client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=3, extra_body=extra, seed=1, **options
    ):
        for choice in chunk.choices:
            last[choice.index] = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            generated.setdefault(choice.index, []).append(chunk.usage.completion_tokens)
    assert last == {0: (3, 3), 1: (3, 3), 2: (1, 3), 3: (1, 3)}
    assert all(counts == [1, 2, 3] for counts in generated.values())
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (4, 12)
    echo = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, **options
    )
    assert {chunk.usage.completion_tokens for chunk in echo} == {0}


def test_each_of_many_clients_gets_its_answer(served, reference):
    prompts = [[20 + i, 30, 40 + i] for i in range(24)]
    outputs = reference.generate(prompts, SamplingParams(temperature=0.0, max_tokens=10))

    async def all_clients():
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", timeout=60
        ) as client:
            create = client.completions.create
            calls = (
                create(model="tiny", prompt=prompt, max_tokens=10, **GREEDY) for prompt in prompts
            )
            return await asyncio.gather(*calls)

    completions = asyncio.run(all_clients())
    assert [completion.choices[0].text for completion in completions] == [
        output.outputs[0].text for output in outputs
    ]


BEAMS = {"use_beam_search": True}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
WRONG = [
    ({"temperature": 3.0}, "temperature is 3.0; it must be between 0", "temperature"),
    ({"max_tokens": -1}, "max_tokens: .*greater than or equal to 0", "max_tokens"),
    ({"max_tokens": 0}, "max_tokens is 0.*needs echo: true", "max_tokens"),
    ({"prompt": ""}, "prompt is empty", "prompt"),
    ({"prompt": []}, "prompt", "prompt"),
    ({"prompt": [400]}, "token id 400; the vocabulary is 0 to 319", None),
    ({"prompt": [20] * 600}, "prompt: 600 tokens, but max_model_len is 512", "prompt"),
    ({"suffix": "x"}, "suffix", "suffix"),
    ({"extra_body": {"top_q": 1}}, "unknown field 'top_q'; did you mean 'top_", "top_q"),
    ({"n": 2, "best_of": 3, "stream": True}, "best_of above n", "best_of"),
    ({"extra_body": {**BEAMS, "min_p": 0.5}}, "min_p does not go", "min_p"),
    ({"extra_body": {**BEAMS, "vllm_xargs": {"a": 1}}}, "vllm_xargs does not go", "vllm_xargs"),
    (
        {"extra_body": {"vllm_xargs": {"a": 1}}},
        "extra_args has 'a'; the names that this engine knows are: none",
        None,
    ),
    ({"extra_body": {"taps": {"hidden_states": [0]}}}, "unknown field 'taps'", "taps"),
    ({"stream": True, "extra_body": BEAMS}, "stream does not go", "stream"),
    ({"extra_body": {"length_penalty": 0.5}}, "goes with use_beam_search", "length_penalty"),
    (
        {"echo": True, "stream": True, "logprobs": 1},
        "echo with logprobs does not go with stream",
        "echo",
    ),
    ({"max_tokens": 10**400}, "max_tokens: .*less than 2147483648", "max_tokens"),
    ({"extra_body": {"top_k": 10**30}}, "top_k: .*less than 2147483648", "top_k"),
    (
        {"extra_body": {**BEAMS, "length_penalty": -1e308}},
        "length_penalty: .*equal to -10",
        "length_penalty",
    ),
    ({"stop": "a" * 1001}, "stop: .*at most 1000 characters", "stop"),
    (
        {"stream": True, "extra_body": {"prompt_logprobs": 1}},
        "prompt_logprobs do not go with stream",
        "prompt_logprobs",
    ),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options go with stream: true",
        "stream_options",
    ),
    ({"messages": []}, "messages", "messages"),
    (
        {"messages": [{"role": "user", "content": "a" * 600}]},
        "messages: 6.. tokens, but max_model_len",
        "messages",
    ),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs goes with logprobs", "top_logprobs"),
    (
        {"messages": IMAGE},
        "messages.0.content: a part has the type 'image_url', and models here read",
        "messages",
    ),
    (
        {"messages": MESSAGES, "modalities": ["text", "audio"]},
        "modalities: answers are text",
        "modalities",
    ),
    (
        {"messages": MESSAGES, "audio": {"voice": "alloy", "format": "mp3"}},
        "audio: answers are text",
        "audio",
    ),
    (
        {"messages": MESSAGES, "functions": [{"name": "f"}]},
        "functions: this is the older form of tools",
        "functions",
    ),
    (
        {"messages": MESSAGES, "function_call": "auto"},
        "function_call: .*; use tool_choice",
        "function_call",
    ),
    (
        {"messages": MESSAGES, "extra_body": {"web_search_options": {}}},
        "searches no web",
        "web_search_options",
    ),
]


@pytest.mark.parametrize(
    ("options", "message", "param"), WRONG, ids=[str(options)[:50] for options, *_ in WRONG]
)
def test_an_invalid_field_is_a_400_that_names_it(client, options, message, param):
    create = client.chat.completions.create if "messages" in options else client.completions.create
    options = options if "messages" in options else {"prompt": PROMPT} | options
    with pytest.raises(openai.BadRequestError, match=message) as error:
        create(model="tiny", **options)
    assert error.value.type == "invalid_request_error"
    assert error.value.param == param


def test_another_model_is_a_404(client):
    with pytest.raises(
        openai.NotFoundError, match="'gpt-5' is not served here; 'tiny' is"
    ) as error:
        client.completions.create(model="gpt-5", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


@pytest.mark.slow
def test_the_embedded_model_gives_the_same_text_over_http(smollm2):
    """Greedy, with a real tokenizer and chat template."""
    options = {
        "max_num_seqs": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "token_buckets": (64,),
    }
    llm = LLM(smollm2, progress=False, **options)
    prompts = [
        "The capital of France is",
        "Once upon a time, in 2024, ",
        "Write “émigré” in capitals:",
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    messages = [{"role": "user", "content": "Name three colours."}]
    (answer,) = llm.chat(messages, params)
    with (
        serving(llm, name="smollm2-135m") as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client,
    ):
        options = {"model": "smollm2-135m", "max_tokens": 24, **GREEDY}
        texts = [
            choice.text for choice in client.completions.create(prompt=prompts, **options).choices
        ]
        stream = client.chat.completions.create(messages=messages, stream=True, **options)
        text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert texts == expected
    assert text == answer.outputs[0].text


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": MESSAGES}),
        ("responses", {"input": "a"}),
    ],
)
def test_streams_are_not_kept_back_by_proxies(client, route, fields):
    length = "max_output_tokens" if route == "responses" else "max_tokens"
    body = {"model": "tiny", "stream": True, length: 2, **fields}
    url = f"{client.base_url}{route}"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.read()
