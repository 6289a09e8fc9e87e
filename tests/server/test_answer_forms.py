"""`response_format` and `structured_outputs` over HTTP: answers have their form, and wrong forms
are refused early.
"""

from __future__ import annotations

import json
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.support import idle, wait_until
from tests.structured.schemas import SMALL as SCHEMA

MESSAGES = [{"role": "user", "content": "the cat"}]


class Point(BaseModel):
    x: int = Field(ge=-9, le=9)
    kind: Literal["up", "down"]
    inner: list[bool] = Field(max_length=2)


def response_format(schema: dict, **fields) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def ask(client, **options):
    defaults = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200}
    return client.chat.completions.create(**defaults | options)


def test_an_answer_obeys_its_schema_whole_and_streamed(tool_client):
    options = {
        "response_format": response_format(SCHEMA, strict=True, description="D"),
        "n": 3,
        "seed": 5,
    }
    texts = [choice.message.content for choice in ask(tool_client, **options).choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    pieces = ["", "", ""]
    for chunk in ask(tool_client, stream=True, **options):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts


def test_a_completion_has_the_same_forms(tool_client):
    create = tool_client.completions.create
    options = {"model": "tiny", "prompt": ["the", "cat"], "max_tokens": 200, "seed": 1}
    for choice in create(
        **options, extra_body={"response_format": response_format(SCHEMA)}
    ).choices:
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    for choice in create(
        **options, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    ).choices:
        assert choice.text in ("yes", "no")


def test_the_forms_of_vllm(tool_client):
    for form, rule in (
        ({"regex": "[ab]{3}"}, "(a|b){3}$"),
        ({"grammar": 'start: "x" "y"'}, "xy$"),
        ({"json": {"enum": [7]}}, "7$"),
    ):
        text = (
            ask(tool_client, seed=2, extra_body={"structured_outputs": form})
            .choices[0]
            .message.content
        )
        jsonschema.validate(text, {"type": "string", "pattern": f"^{rule}"})


def test_a_json_object_begins_as_one(tool_client):
    options = {
        "response_format": {"type": "json_object"},
        "max_tokens": 12,
        "seed": 3,
        "temperature": 1.0,
    }
    choice = ask(tool_client, **options).choices[0]
    assert choice.message.content.startswith("{")
    text = {"response_format": {"type": "text"}, "max_tokens": 5, "temperature": 0}
    assert ask(tool_client, **text).choices == ask(tool_client, max_tokens=5, temperature=0).choices


def test_a_pydantic_model_is_parsed(tool_client):
    options = {
        "model": "tiny",
        "messages": MESSAGES,
        "response_format": Point,
        "seed": 4,
        "max_tokens": 300,
    }
    message = tool_client.chat.completions.parse(**options).choices[0].message
    assert isinstance(message.parsed, Point)
    with tool_client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == message.parsed


def test_keywords_are_ignored_on_request_and_named_in_a_header(tool_client):
    schema = {
        **SCHEMA,
        "properties": {
            **SCHEMA["properties"],
            "é": {"not": {}, "type": "array", "uniqueItems": True},
        },
    }
    for stream in (False, True):
        options = {
            "response_format": response_format(schema, strict=False),
            "stream": stream,
            "seed": 1,
        }
        raw = tool_client.chat.completions.with_raw_response
        answer = ask(type("Client", (), {"chat": type("C", (), {"completions": raw})}), **options)
        places = answer.headers["X-Ignored-Keywords"].split(", ")
        assert places == ["#/properties/%C3%A9/not", "#/properties/%C3%A9/uniqueItems"]
        answer.parse()
        if stream:
            answer.http_response.close()
    fine = tool_client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1
    )
    assert "X-Ignored-Keywords" not in fine.headers


BEAMS = {"use_beam_search": True}
WRONG = [
    (
        {"response_format": response_format({"type": "object", "properties": {"a": {"not": {}}}})},
        "response_format.json_schema.schema has the keyword 'not' at #/properties/a/not, which is not supported; "
        "remove it, or set strict: false beside the schema",
        "response_format",
    ),
    (
        {"response_format": response_format({"typ": "object"})},
        "'typ' at #/typ, .*did you mean 'type'",
        "response_format",
    ),
    (
        {"response_format": response_format({"type": "objec"})},
        "response_format.*cannot be used",
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format needs a json_schema",
        "response_format",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
        "set it to 'json_schema'",
        "response_format",
    ),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type: Input should be 'text', 'json",
        "response_format",
    ),
    (
        {
            "response_format": {"type": "json_object"},
            "extra_body": {"structured_outputs": {"regex": "a"}},
        },
        "response_format and structured_outputs both give the answer's form",
        "response_format",
    ),
    (
        {"extra_body": {"structured_outputs": {"regexp": "a"}}},
        "unknown field 'regexp'; did you mean 'regex'",
        "structured_outputs",
    ),
    ({"extra_body": {"structured_outputs": {}}}, "give exactly one of", "structured_outputs"),
    (
        {"extra_body": {"structured_outputs": {"regex": "(?=a)"}}},
        "structured_outputs.regex cannot be used",
        "structured_outputs",
    ),
    (
        {"extra_body": {"guided_json": {}}},
        "guided_json: .*use structured_outputs: {json: ...}",
        "guided_json",
    ),
    (
        {"extra_body": {"guided_choice": ["a"]}},
        "guided_choice: .*structured_outputs: {choice: ...}",
        "guided_choice",
    ),
    (
        {"extra_body": {"guided_decoding_backend": "x"}},
        "there is one backend",
        "guided_decoding_backend",
    ),
    (
        {"response_format": {"type": "json_object"}, "extra_body": BEAMS},
        "response_format does not go with use_beam_search",
        "response_format",
    ),
    (
        {"extra_body": {**BEAMS, "structured_outputs": {"regex": "a"}}},
        "structured_outputs does not go with use_beam_search",
        "structured_outputs",
    ),
]


@pytest.mark.parametrize(
    ("options", "message", "param"), WRONG, ids=[str(options)[:60] for options, *_ in WRONG]
)
def test_a_wrong_form_is_a_400_before_anything_is_queued(
    tool_client, tool_server, options, message, param
):
    wait_until(lambda: idle(tool_server.worker))
    before = tool_server.worker._submitted
    with pytest.raises(openai.BadRequestError, match=message) as error:
        ask(tool_client, **options)
    assert error.value.param == param
    assert tool_server.worker._submitted == before
