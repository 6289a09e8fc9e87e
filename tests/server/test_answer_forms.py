"""`response_format` and `structured_outputs` over HTTP: answers have their form, and wrong forms
are refused early.
"""

from __future__ import annotations

import json
import re
from typing import Literal

import jsonschema
from pydantic import BaseModel, Field

from tests.structured.schemas import SMALL as SCHEMA

MESSAGES = [{"role": "user", "content": "the cat"}]


def contents(answer) -> list[str]:
    return [choice.message.content for choice in answer.choices]


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
    form = response_format(SCHEMA, strict=True, description="D")
    options = {"response_format": form, "n": 3, "seed": 5}
    texts = contents(ask(tool_client, **options))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    pieces = ["", "", ""]
    for chunk in ask(tool_client, stream=True, **options):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts


def test_a_completion_has_the_same_forms(tool_client):
    def texts(**form) -> list[str]:
        options = {"model": "tiny", "prompt": ["the", "cat"], "max_tokens": 200, "seed": 1}
        answer = tool_client.completions.create(**options, extra_body=form)
        return [choice.text for choice in answer.choices]

    for text in texts(response_format=response_format(SCHEMA)):
        jsonschema.validate(json.loads(text), SCHEMA)
    assert set(texts(structured_outputs={"choice": ["yes", "no"]})) <= {"yes", "no"}


def test_the_forms_of_vllm(tool_client):
    for form, rule in (
        ({"regex": "[ab]{3}"}, "(a|b){3}"),
        ({"grammar": 'start: "x" "y"'}, "xy"),
        ({"json": {"enum": [7]}}, "7"),
    ):
        (text,) = contents(ask(tool_client, seed=2, extra_body={"structured_outputs": form}))
        assert re.fullmatch(rule, text)


def test_a_json_object_begins_as_one(tool_client):
    form = {"type": "json_object"}
    (text,) = contents(
        ask(tool_client, response_format=form, max_tokens=12, seed=3, temperature=1.0)
    )
    assert text.startswith("{")
    plain = {"max_tokens": 5, "temperature": 0}
    answer = ask(tool_client, response_format={"type": "text"}, **plain)
    assert contents(answer) == contents(ask(tool_client, **plain))


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
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == message.parsed


def test_keywords_are_ignored_on_request_and_named_in_a_header(tool_client):
    ignored = {"é": {"not": {}, "type": "array", "uniqueItems": True}}
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], **ignored}}
    create = tool_client.chat.completions.with_raw_response.create
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "seed": 1}
    options["response_format"] = response_format(schema, strict=False)
    for stream in (False, True):
        answer = create(stream=stream, **options)
        places = answer.headers["X-Ignored-Keywords"].split(", ")
        assert places == ["#/properties/%C3%A9/not", "#/properties/%C3%A9/uniqueItems"]
        answer.parse()
        if stream:
            answer.http_response.close()
    plain = create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert "X-Ignored-Keywords" not in plain.headers
