"""OpenAI's Responses API, by OpenAI's client: the answers of a chat in another format."""

from __future__ import annotations

import json
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.support import error_of

MESSAGES = [{"role": "user", "content": "the cat"}]


class Turn(BaseModel):
    """Turns round."""

    side: Literal["left", "right"]
    times: int = Field(ge=0, le=9)


TOOL = {
    "type": "function",
    "name": "turn",
    "strict": True,
    "parameters": openai.pydantic_function_tool(Turn)["function"]["parameters"],
}


def ask(client, **options):
    defaults = {"model": "tiny", "input": "the cat", "max_output_tokens": 300, "temperature": 0}
    return client.responses.create(**defaults | options)


def test_text_is_that_of_a_chat(tool_client):
    answer = ask(tool_client, max_output_tokens=12)
    chat = tool_client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    system = ask(
        tool_client,
        max_output_tokens=12,
        instructions="Be brief.",
        input=[{**MESSAGES[0], "type": "message"}],
    )
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    chat = tool_client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    assert system.output_text == chat.choices[0].message.content
    parts = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "the "},
                {"type": "input_text", "text": "cat"},
            ],
        }
    ]
    assert ask(tool_client, max_output_tokens=12, input=parts).output_text == answer.output_text


def test_a_stream_has_the_events_of_the_answer(tool_client):
    unstreamed = ask(tool_client, max_output_tokens=12)
    events = list(ask(tool_client, max_output_tokens=12, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert (
        "".join(event.delta for event in events[4:-4])
        == unstreamed.output_text
        == events[-1].response.output_text
    )
    assert events[0].response.output == []
    assert events[-1].response.usage == unstreamed.usage


def test_a_model_is_parsed(tool_client):
    parsed = tool_client.responses.parse(
        model="tiny", input="the cat", text_format=Turn, extra_body={"seed": 3}
    )
    assert isinstance(parsed.output_parsed, Turn)
    assert parsed.status == "completed"
    with tool_client.responses.stream(
        model="tiny", input="the cat", text_format=Turn, extra_body={"seed": 3}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_parsed == parsed.output_parsed
    text_format = {"format": {"type": "json_object"}}
    assert ask(
        tool_client, text=text_format, max_output_tokens=5, temperature=1
    ).output_text.startswith("{")


def test_a_loop_of_calls(tool_client):
    conversation = list(MESSAGES)
    options = {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
    }
    for seed in range(2):
        answer = ask(tool_client, input=conversation, extra_body={"seed": seed}, **options)
        (call,) = answer.output
        assert (call.type, call.name, answer.status) == ("function_call", "turn", "completed")
        turn = Turn.model_validate_json(call.arguments)
        conversation += [item.model_dump(exclude_none=True) for item in answer.output]
        conversation.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": turn.side}
        )
    final = ask(
        tool_client, input=conversation, max_output_tokens=8, tools=[TOOL], tool_choice="none"
    )
    assert final.output_text
    named = {"type": "function", "name": "turn"}
    with tool_client.responses.stream(
        model="tiny", input=conversation, tools=[TOOL], tool_choice=named, extra_body={"seed": 1}
    ) as stream:
        deltas = "".join(
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        )
        (call,) = stream.get_final_response().output
    assert call.arguments == deltas
    Turn.model_validate(json.loads(deltas))


WRONG = [
    (
        {"previous_response_id": "resp_1"},
        "previous_response_id: this server stores no answers",
        "previous_response_id",
    ),
    ({"background": True}, "background: an answer is made while its client waits", "background"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "'input_image', and models here",
        "input",
    ),
    ({"input": [{"type": "computer_call"}]}, "input.0 has the type 'computer_call'", "input"),
    (
        {"input": [{"role": "tool", "content": "x"}]},
        "input.0 has the type 'message' and no role of",
        "input",
    ),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "c"}]},
        "input.0.tool_calls.0",
        "input",
    ),
    (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input.0 has the role 'tool' and no tool_call_id",
        "input",
    ),
    (
        {"tools": [{"type": "web_search"}]},
        "tools.0.type is 'web_search'; there are no tools but functions",
        "tools",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice names 'g'",
        "tool_choice",
    ),
    (
        {"text": {"format": {"type": "xml"}}},
        "text.type: Input should be 'text', 'json_object' or 'json_schema'",
        "text",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
        "text.json_schema.schema has the keyword 'not' at #/not",
        "text",
    ),
    ({"model": "other"}, "the model 'other' is not served here", "model"),
    ({"temperature": 9}, "temperature is 9.0; it must be between 0", "temperature"),
    ({"input": []}, "input", "input"),
]


@pytest.mark.parametrize(
    ("fields", "message", "param"), WRONG, ids=[str(fields)[:60] for fields, *_ in WRONG]
)
def test_what_is_wrong_is_named(tool_server, fields, message, param):
    answer = httpx.post(
        f"{tool_server.url}/v1/responses", json={"model": "tiny", "input": "the cat", **fields}
    )
    assert answer.status_code == (404 if param == "model" else 400)
    error = error_of(answer)
    assert message in error["message"]
    assert error["param"] == param
