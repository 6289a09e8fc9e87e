"""OpenAI's Responses API, by OpenAI's client: the answers of a chat in another format."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "the cat"}]


def chat_text(client, messages) -> str:
    options = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, **options)
    return answer.choices[0].message.content


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


def token_counts(response) -> tuple[int, int]:
    """Tokens of the input and the output. How many were cached depends on earlier requests."""
    return response.usage.input_tokens, response.usage.output_tokens


def test_text_is_that_of_a_chat(tool_client):
    answer = ask(tool_client, max_output_tokens=12)
    assert answer.output_text == chat_text(tool_client, MESSAGES)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 12
    system = ask(
        tool_client,
        max_output_tokens=12,
        instructions="Be brief.",
        input=[{**MESSAGES[0], "type": "message"}],
    )
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert system.output_text == chat_text(tool_client, messages)
    parts = [{"type": "input_text", "text": text} for text in ("the ", "cat")]
    in_parts = ask(tool_client, max_output_tokens=12, input=[{"role": "user", "content": parts}])
    assert in_parts.output_text == answer.output_text
    assert token_counts(in_parts) == token_counts(answer)


def test_a_stream_has_the_events_of_the_answer(tool_client):
    unstreamed = ask(tool_client, max_output_tokens=12)
    events = list(ask(tool_client, max_output_tokens=12, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * (len(events) - 8),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert "".join(event.delta for event in events[4:-4]) == unstreamed.output_text
    assert events[0].response.output == []
    assert events[-1].response.output_text == unstreamed.output_text
    assert token_counts(events[-1].response) == token_counts(unstreamed)


def test_a_model_is_parsed(tool_client):
    request = {
        "model": "tiny",
        "input": "the cat",
        "text_format": Turn,
        "extra_body": {"seed": 3},
    }
    parsed = tool_client.responses.parse(**request)
    assert isinstance(parsed.output_parsed, Turn)
    assert parsed.status == "completed"
    with tool_client.responses.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_parsed == parsed.output_parsed
    text_format = {"format": {"type": "json_object"}}
    answer = ask(tool_client, text=text_format, max_output_tokens=5, temperature=1)
    assert answer.output_text.startswith("{")


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


def test_another_model_and_another_function_are_named(tool_client):
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        ask(tool_client, model="other")
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'g'"):
        ask(tool_client, tools=[TOOL], tool_choice={"type": "function", "name": "g"})
