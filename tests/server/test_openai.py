"""OpenAI's client against the running server: the same tokens as the library, in OpenAI's
formats.
"""

from __future__ import annotations

import httpx
import openai
import pytest

from pagedjax import BeamSearchParams, SamplingParams
from tests.server.test_text_offsets import decoded

GREEDY = {"temperature": 0.0}
PROMPT = "abc def"


def generate(reference, prompt=PROMPT, **params):
    (output,) = reference.generate(prompt, SamplingParams(**GREEDY | params))
    return output


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(model="tiny", prompt=prompt, **GREEDY | options)


def chat(client, **options):
    options = {"messages": MESSAGES, **GREEDY, **options}
    return client.chat.completions.create(model="tiny", **options)


def texts(answer) -> list[str]:
    """Of an answer's choices, or of an output's branches."""
    return [choice.text for choice in getattr(answer, "choices", None) or answer.outputs]


def choices_of(stream) -> list:
    """Of all chunks."""
    return [choice for chunk in stream for choice in chunk.choices]


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("huge")
    assert error.value.code == "model_not_found"


def test_a_greedy_completion_matches_the_library(client, reference):
    expected = generate(reference, max_tokens=12)
    (branch,) = expected.outputs
    completion = complete(client, max_tokens=12)
    (choice,) = completion.choices
    assert choice.text == branch.text
    assert (choice.finish_reason, choice.index) == (branch.finish_reason, 0)
    assert (completion.object, completion.model) == ("text_completion", "tiny")
    usage = completion.usage
    assert usage.prompt_tokens == len(expected.prompt_token_ids)
    assert usage.completion_tokens == len(branch.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_defaults_are_those_of_openai(client):
    completion = client.completions.create(model="tiny", prompt=PROMPT)
    assert completion.usage.completion_tokens <= 16
    assert len(completion.choices) == 1


@pytest.mark.parametrize(
    "prompts", [["abc", "b", "cc dd"], [[20, 30, 40], [50]]], ids=["texts", "ids"]
)
def test_several_prompts_are_answered_in_order(client, reference, prompts):
    completion = complete(client, prompts, max_tokens=5, n=1)
    assert texts(completion) == [
        generate(reference, prompt, max_tokens=5).outputs[0].text for prompt in prompts
    ]
    assert [choice.index for choice in completion.choices] == list(range(len(prompts)))


def test_a_prompt_may_be_token_ids(client, reference):
    ids = [20, 30, 40]
    expected = generate(reference, ids, max_tokens=5)
    (choice,) = complete(client, ids, max_tokens=5, extra_body={"return_token_ids": True}).choices
    assert choice.token_ids == list(expected.outputs[0].token_ids)
    assert choice.prompt_token_ids == ids


def test_branches_have_different_seeds(client, reference):
    def drawn(seed: int) -> list[str]:
        return texts(complete(client, n=3, seed=seed, max_tokens=6, temperature=1.0))

    expected = texts(generate(reference, n=3, seed=7, max_tokens=6, temperature=1.0))
    assert drawn(7) == drawn(7) == drawn(7 - 2**32) == expected != drawn(8)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.5, "seed": 1, "temperature": 1.0},
        {"presence_penalty": 1.5, "frequency_penalty": -1.0},
        {"logit_bias": {"40": 100}},
        {
            "extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4},
            "seed": 3,
            "temperature": 1.0,
        },
        {
            "extra_body": {
                "stop_token_ids": [33],
                "ignore_eos": True,
                "allowed_token_ids": [33, 34, 35],
            },
            "seed": 3,
            "temperature": 1.0,
        },
        {"best_of": 3, "seed": 5, "temperature": 1.0},
    ],
    ids=str,
)
def test_sampling_options_reach_the_engine(client, reference, options):
    params = {**options, **options.get("extra_body", {})}
    params.pop("extra_body", None)
    (expected,) = generate(reference, **params, max_tokens=10).outputs
    (choice,) = complete(client, max_tokens=10, **options).choices
    for name in ("text", "finish_reason", "stop_reason"):
        assert getattr(choice, name) == getattr(expected, name)


def test_a_stop_string_ends_an_answer(client, reference):
    stop = generate(reference, max_tokens=20).outputs[0].text[5:7]
    expected = generate(reference, max_tokens=20, stop=stop)
    (choice,) = complete(client, max_tokens=20, stop=[stop]).choices
    assert [choice.text] == texts(expected)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert stop not in choice.text


def test_log_probabilities_match_the_library(client, reference):
    (branch,) = generate(reference, max_tokens=6, logprobs=3).outputs
    logprobs = complete(client, max_tokens=6, logprobs=3).choices[0].logprobs
    places = zip(branch.token_ids, branch.logprobs, strict=True)
    chosen = [place[token] for token, place in places]
    assert logprobs.token_logprobs == pytest.approx([c.logprob for c in chosen], abs=1e-5)
    assert logprobs.tokens == [c.decoded_token for c in chosen]
    for top, place in zip(logprobs.top_logprobs, branch.logprobs, strict=True):
        ranked = sorted(place.values(), key=lambda entry: -entry.rank)
        # of one text, the best comes last
        best = {entry.decoded_token: entry.logprob for entry in ranked if entry.rank <= 3}
        assert top == pytest.approx(best, abs=1e-5)
    ids = list(branch.token_ids)
    before = [decoded(reference.tokenizer, ids[:i], True) for i in range(len(ids))]
    assert logprobs.text_offset == [len(text) for text in before]


def test_an_echo_has_the_prompt_with_its_log_probabilities(client, reference):
    """Evaluation harnesses score texts with it."""
    output = generate(reference, max_tokens=1, logprobs=1, prompt_logprobs=1)
    ids = output.prompt_token_ids
    places = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    expected = pytest.approx([place[token].logprob for token, place in places], abs=1e-5)
    for prompt, max_tokens in ((PROMPT, 1), (PROMPT, 0), (list(ids), 0)):
        completion = complete(client, prompt, max_tokens=max_tokens, echo=True, logprobs=1)
        (choice,) = completion.choices
        logprobs = choice.logprobs
        assert choice.text == PROMPT + (output.outputs[0].text if max_tokens else "")
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1 : len(ids)] == expected
        assert len(logprobs.tokens) == len(ids) + max_tokens
        assert "".join(logprobs.tokens[: len(ids)]) == PROMPT
        assert completion.usage.completion_tokens == max_tokens


def test_prompt_log_probabilities_have_vllms_format(client, reference):
    expected = generate(reference, max_tokens=1, prompt_logprobs=2).prompt_logprobs
    (choice,) = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 2}).choices
    assert choice.prompt_logprobs[0] is None
    for entries, place in zip(choice.prompt_logprobs[1:], expected[1:], strict=True):
        assert {int(token) for token in entries} == set(place)
        for token, entry in place.items():
            assert entries[str(token)]["logprob"] == pytest.approx(entry.logprob, abs=1e-5)
            assert entries[str(token)]["rank"] == entry.rank


def test_beam_search_matches_the_library(client, reference):
    (expected,) = reference.generate(PROMPT, BeamSearchParams(beam_width=3, max_tokens=6))
    assert texts(complete(client, n=3, max_tokens=6, extra_body=BEAMS)) == texts(expected)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_answer_in_pieces(client, reference, n):
    options = {"n": n, "seed": 3, "max_tokens": 9, "temperature": 1.0}
    output = generate(reference, **options)
    streamed = [""] * n
    ends = {}
    chunks = list(complete(client, **options, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None or not chunk.choices for chunk in chunks)
    for choice in choices_of(chunks):
        streamed[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert streamed == texts(output)
    assert ends == {branch.index: branch.finish_reason for branch in output.outputs}
    tokens = sum(len(branch.token_ids) for branch in output.outputs)
    assert chunks[-1].usage.completion_tokens == tokens
    assert len(chunks) > 3


def test_a_stream_of_several_prompts_numbers_their_choices(client, reference):
    prompts = ["abc", "b", "cc dd"]
    options = {"n": 2, "seed": 4, "max_tokens": 5, "temperature": 1.0}
    streamed = [""] * 6
    for choice in choices_of(complete(client, prompts, stream=True, **options)):
        streamed[choice.index] += choice.text
    expected = [generate(reference, prompt, **options) for prompt in prompts]
    assert streamed == [text for output in expected for text in texts(output)]


def test_given_tokens_come_with_their_log_probabilities(client, reference):
    ids = [70, 9, 250, 1, 2, 3]
    (expected,) = generate(reference, trace_decode_token_ids=ids, logprobs=0).outputs
    body = {"trace_decode_token_ids": ids, "return_token_ids": True}
    (choice,) = complete(client, logprobs=0, extra_body=body).choices
    assert (choice.token_ids, choice.text, choice.finish_reason) == (ids, expected.text, "length")
    values = [at[token].logprob for at, token in zip(expected.logprobs, ids, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-5)
    stream = choices_of(complete(client, extra_body=body, stream=True))
    assert [token for part in stream for token in getattr(part, "token_ids", ())] == ids
    assert chat(client, extra_body=body).choices[0].token_ids == ids


def test_a_stream_may_have_an_echo_and_log_probabilities(client, reference):
    echo = choices_of(complete(client, echo=True, max_tokens=5, stream=True))
    (text,) = texts(generate(reference, max_tokens=5))
    assert "".join(choice.text for choice in echo) == PROMPT + text
    (unstreamed,) = complete(client, logprobs=2, max_tokens=5).choices
    stream = choices_of(complete(client, logprobs=2, max_tokens=5, stream=True))
    for name in ("tokens", "token_logprobs", "text_offset"):
        values = [value for choice in stream for value in getattr(choice.logprobs, name)]
        expected = getattr(unstreamed.logprobs, name)
        assert values == (pytest.approx(expected, abs=1e-5) if "logprobs" in name else expected)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abc"}]


def test_a_chat_uses_the_models_template(client, reference):
    (expected,) = reference.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=8))
    answer = chat(client, max_completion_tokens=8)
    (choice,) = answer.choices
    (branch,) = expected.outputs
    assert (choice.message.role, choice.message.content) == ("assistant", branch.text)
    assert (answer.object, choice.finish_reason) == ("chat.completion", branch.finish_reason)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    parts = [{"type": "text", "text": text} for text in ("Be ", "brief.")]
    developer = {"role": "developer", "content": parts}
    for messages in (MESSAGES, [developer, MESSAGES[1]]):
        older = chat(client, messages=messages, max_tokens=8)
        assert older.choices[0].message.content == branch.text


def test_a_chat_without_max_tokens_ends_at_the_models_limit(client, reference):
    answer = chat(client, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == reference.engine.config.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_streams_with_its_role_first(client):
    options = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    (unstreamed,) = chat(client, **options).choices
    entries = unstreamed.logprobs.content
    assert len(entries) == 8 or unstreamed.finish_reason == "stop"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(bytes(entry.bytes).decode(errors="replace") == entry.token for entry in entries)
    chunks = list(chat(client, stream=True, **options))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    choices = choices_of(chunks)
    assert [choice.delta.role for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == unstreamed.message.content
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in content] == [entry.token for entry in entries]
    expected = pytest.approx([entry.logprob for entry in entries], abs=1e-5)
    assert [entry.logprob for entry in content] == expected


def test_a_chat_has_its_prompt_fields_beside_its_choices(client):
    """As in vLLM."""
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = chat(client, n=2, max_tokens=2, extra_body=extra, temperature=1.0)
    assert len(answer.prompt_token_ids) == len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None
    for choice in answer.choices:
        assert not {"prompt_logprobs", "prompt_token_ids"} & set(choice.model_extra)
        assert len(choice.token_ids) == 2


def test_a_stream_begins_with_the_ids_of_its_prompt(client, reference):
    options = {"max_tokens": 2, "stream": True, "extra_body": {"return_token_ids": True}}
    first, *later_chunks = chat(client, **options)
    assert first.prompt_token_ids == reference.tokenizer.apply_chat_template(MESSAGES)
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in later_chunks)
    first_ids = {}
    for choice in choices_of(complete(client, [PROMPT, "b"], **options)):
        first_ids.setdefault(choice.index, choice.model_extra.get("prompt_token_ids"))
    assert first_ids == dict(enumerate(map(reference.tokenizer.encode, (PROMPT, "b"))))


def test_continuous_usage_of_a_stream_counts_one_branch(client):
    options = {
        "stream": True,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }
    counts = {}
    for chunk in complete(
        client,
        [[20, 30, 40], [50]],
        n=2,
        max_tokens=3,
        extra_body={"ignore_eos": True},
        seed=1,
        **options,
    ):
        usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            counts.setdefault(choice.index, []).append(usage)
    assert counts == {i: [(tokens, j) for j in (1, 2, 3)] for i, tokens in enumerate((3, 3, 1, 1))}
    assert usage == (4, 12)
    echo = complete(client, max_tokens=0, echo=True, **options)
    assert {chunk.usage.completion_tokens for chunk in echo} == {0}


BEAMS = {"use_beam_search": True}
TOO_LONG = [
    ({"prompt": [20] * 600}, "prompt: 600 tokens, but max_model_len is 512", "prompt"),
    (
        {"messages": [{"role": "user", "content": "a" * 600}]},
        "messages: 6.. tokens, but max_model_len",
        "messages",
    ),
    ({"prompt": [400]}, "token id 400; the vocabulary is 0 to 319", None),
]


@pytest.mark.parametrize(("options", "message", "param"), TOO_LONG)
def test_a_prompt_that_does_not_fit_the_model_is_a_400(client, options, message, param):
    ask = chat if "messages" in options else complete
    with pytest.raises(openai.BadRequestError, match=message) as error:
        ask(client, **options)
    assert error.value.type == "invalid_request_error"
    assert error.value.param == param


def test_another_model_is_a_404(client):
    with pytest.raises(
        openai.NotFoundError, match="'gpt-5' is not served here; 'tiny' is"
    ) as error:
        client.completions.create(model="gpt-5", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


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
