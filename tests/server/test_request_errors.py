"""An invalid body gives one short error message, however large it is."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from pagedjax.server.schema import (
    MAX_STOP,
    MAX_TEXT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LectureRequest,
    TokenizeRequest,
    first_error,
)

MANY_ITEMS = 20_000
FIELDS = {f"a{i}": 1 for i in range(MANY_ITEMS)}
PROMPT = "prompt must be a text, a list of token ids, or a list of texts or of such lists"
CONTENT = 'messages.0.content must be a text, or a list of {"type": "text", "text": ...}'


def errors(kind: type[BaseModel], fields: dict) -> list:
    """The errors of a body with wrong fields, in FastAPI's format."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**RIGHT.get(kind, {}), **fields})
    return [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]


def user(content: object, **fields: object) -> list[dict]:
    return [{"role": "user", "content": content, **fields}]


RIGHT: dict[type[BaseModel], dict] = {
    CompletionRequest: {"prompt": "a"},
    LectureRequest: {"prompt": "a"},
    ChatRequest: {"messages": user("a")},
}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CompletionRequest, {"prompt": [{}] * MANY_ITEMS}, PROMPT),
        (CompletionRequest, {"prompt": ["a", *[{}] * MANY_ITEMS]}, PROMPT),
        (CompletionRequest, {"prompt": [[20], *[[{}]] * 4000]}, PROMPT),
        (CompletionRequest, {"prompt": [[{}] * MANY_ITEMS]}, PROMPT),
        (CompletionRequest, {"prompt": [20, *["a"] * MANY_ITEMS]}, PROMPT),
        (
            CompletionRequest,
            {"stop": [{}] * MANY_ITEMS},
            "stop must be a text, or a list of texts",
        ),
        (
            CompletionRequest,
            {"stop_token_ids": ["a"] * MANY_ITEMS},
            "stop_token_ids.0: Input should be",
        ),
        (
            CompletionRequest,
            {"allowed_token_ids": [20] * MANY_ITEMS},
            "allowed_token_ids: List should have",
        ),
        (
            CompletionRequest,
            {"taps": {"hidden_states": [0]}},
            "unknown field 'taps'",
        ),
        (
            CompletionRequest,
            {"vllm_xargs": FIELDS},
            "vllm_xargs: it has 20000 fields; the limit is",
        ),
        (
            CompletionRequest,
            {"vllm_xargs": {"b": {}}},
            "vllm_xargs: 'b' must be a text, a number,",
        ),
        (
            CompletionRequest,
            {"vllm_xargs": {"b": [1] * MANY_ITEMS}},
            "vllm_xargs: 'b' must be a text, a number,",
        ),
        (
            CompletionRequest,
            {"logit_bias": FIELDS},
            "logit_bias: it has 20000 fields; the limit is",
        ),
        (
            CompletionRequest,
            FIELDS,
            "the body: it has 20001 fields; the limit is 256",
        ),
        (
            CompletionRequest,
            {"stream_options": FIELDS},
            "stream_options: it has 20000 fields; the",
        ),
        (ChatRequest, {"messages": [{}] * MANY_ITEMS}, "messages.0.role: Field required"),
        (ChatRequest, {"messages": user([{}] * MANY_ITEMS)}, CONTENT),
        (ChatRequest, {"messages": user([{"type": "text", "text": "a", **FIELDS}])}, CONTENT),
        (
            ChatRequest,
            {"messages": user("a", **FIELDS)},
            "messages.0: it has 20002 fields; the limit is 256",
        ),
        (
            ChatRequest,
            {"tools": [{}] * MANY_ITEMS},
            "tools: List should have at most 128 items",
        ),
        (
            ChatRequest,
            {"modalities": ["a"] * MANY_ITEMS},
            "modalities: answers are text",
        ),
        (
            TokenizeRequest,
            {"prompt": "a" * (MAX_TEXT + 1)},
            f"prompt: String should have at most {MAX_TEXT}",
        ),
        (EmbeddingRequest, {"input": ["a", *[{}] * MANY_ITEMS]}, "input must be a text, a list of"),
        (
            DetokenizeRequest,
            {"tokens": ["a"] * MANY_ITEMS},
            "tokens.0: Input should be a valid integer",
        ),
        (
            DetokenizeRequest,
            {"tokens": [20] * (MAX_TEXT + 1)},
            f"tokens: List should have at most {MAX_TEXT}",
        ),
    ],
)
def test_a_repeated_mistake_gives_one_message(kind, fields, message):
    mistakes = errors(kind, fields)
    assert len(mistakes) <= 3
    text, _ = first_error(mistakes)
    assert text.startswith(message)
    assert len(text) < 200


@pytest.mark.parametrize(
    "prompt", [3, None, {}, [], [[]], [1.5], [True], [-1], ["a", 20], [20, "a"], [[20], "a"]]
)
def test_other_forms_of_a_prompt_are_refused(prompt):
    message, field = first_error(errors(CompletionRequest, {"prompt": prompt}))
    assert (message, field) == (PROMPT, "prompt")


HUGE = 10**400


@pytest.mark.parametrize(
    ("kind", "fields", "limit"),
    [
        (CompletionRequest, {"max_tokens": HUGE}, "less than 2147483648"),
        (CompletionRequest, {"min_tokens": HUGE}, "less than 2147483648"),
        (CompletionRequest, {"top_k": 2**31}, "less than 2147483648"),
        (CompletionRequest, {"length_penalty": 1e308}, "less than or equal to 10"),
        (
            CompletionRequest,
            {"length_penalty": -1e308},
            "greater than or equal to -10",
        ),
        (CompletionRequest, {"stop": "a" * (MAX_STOP + 1)}, "at most 1000 characters"),
        (
            CompletionRequest,
            {"stop": ["b", "a" * (MAX_STOP + 1)]},
            "at most 1000 characters",
        ),
        (ChatRequest, {"max_tokens": HUGE}, "less than 2147483648"),
        (
            ChatRequest,
            {"max_completion_tokens": HUGE},
            "less than 2147483648",
        ),
        (LectureRequest, {"max_length": HUGE}, "less than 2147483648"),
    ],
)
def test_a_number_above_its_limit_is_refused_with_the_limit(kind, fields, limit):
    name = list(fields)[-1]
    message, field = first_error(errors(kind, fields))
    assert message.startswith(f"{name}: ")
    assert limit in message
    assert field == name


@pytest.mark.parametrize(
    ("error", "message", "field"),
    [
        (
            {
                "type": "json_invalid",
                "loc": ("body", 15),
                "msg": "JSON decode error",
                "ctx": {"error": "Expecting ','"},
            },
            "the body is not JSON: Expecting ',' at character 15",
            None,
        ),
        (
            {"type": "int_parsing", "loc": ("query", "since"), "msg": "Input should be"},
            "since: Input should be",
            "since",
        ),
        (
            {"type": "int_parsing", "loc": ("path", "since"), "msg": "Input should be"},
            "since: Input should be",
            "since",
        ),
    ],
)
def test_a_parameter_of_the_url_and_a_place_in_json_are_named(error, message, field):
    assert first_error([error]) == (message, field)
