"""Tools over HTTP, by OpenAI's client: calls are valid whatever the model says, whole and
streamed.
"""

from __future__ import annotations

import json
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.tools.functions import function

MESSAGES = [{"role": "user", "content": "the cat"}]


class Add(BaseModel):
    """Adds two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


class Turn(BaseModel):
    """Turns round."""

    side: Literal["left", "right"]


TOOLS = [openai.pydantic_function_tool(Add), openai.pydantic_function_tool(Turn)]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
NAMED = {"type": "function", "function": {"name": "Turn"}}


def options(**changes) -> dict:
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, "seed": 1}
    return body | changes


def create(client, **changes):
    return client.chat.completions.create(**options(**changes))


def check(call) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.default_cases("named")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_is_valid(tool_client, choice):
    answer = create(tool_client, tool_choice=choice, parallel_tool_calls=False, n=4)
    for reply in answer.choices:
        assert (reply.finish_reason, reply.message.content) == ("tool_calls", None)
        (call,) = reply.message.tool_calls
        check(call)
        assert choice == "required" or call.function.name == "Turn"
    assert len({call.message.tool_calls[0].id for call in answer.choices}) == 4


def test_a_stream_has_the_calls_of_the_whole_answer(tool_client):
    """One choice ends with a call, and one within its second."""
    arguments = {"tool_choice": "required", "seed": 10, "n": 2, "max_tokens": 150}
    unstreamed = create(tool_client, **arguments).choices
    assert {choice.finish_reason for choice in unstreamed} == {"tool_calls", "length"}
    calls = [{}, {}]
    reasons = ["", ""]
    chunks = create(tool_client, stream=True, **arguments)
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        reasons[choice.index] = choice.finish_reason or ""
        assert not choice.delta.content
        for piece in choice.delta.tool_calls or ():
            entry = calls[choice.index].setdefault(piece.index, [piece.id, piece.function.name, ""])
            assert piece.id in (None, entry[0])
            assert (piece.id is None) == (piece.function.name is None) == (piece.type is None)
            entry[2] += piece.function.arguments
    assert reasons == [expected.finish_reason for expected in unstreamed]
    for expected, streamed in zip(unstreamed, calls, strict=True):
        functions = [call.function for call in expected.message.tool_calls]
        assert [tuple(call[1:]) for call in streamed.values()] == [
            (function.name, function.arguments) for function in functions
        ]
        assert list(streamed) == list(range(len(functions)))


def test_an_answer_may_be_text(tool_client):
    """The tiny model says anything; it hardly ever writes a call by itself."""
    (answer,) = create(tool_client, max_tokens=30).choices
    assert answer.message.content
    assert answer.message.tool_calls is None
    stream = create(tool_client, max_tokens=30, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.message.content
    assert create(tool_client, max_tokens=30, tool_choice="auto").choices == [answer]


def test_an_answer_that_ends_by_length_shows_the_start_of_a_call(tool_client):
    ends = set()
    for limit in range(30, 70, 8):
        (choice,) = create(tool_client, tool_choice=NAMED, max_tokens=limit).choices
        ends.add(choice.finish_reason)
        for call in choice.message.tool_calls or ():
            assert call.function.name == "Turn"
            ended = call.function.arguments.endswith("}\n")
            assert choice.finish_reason == "tool_calls" or not ended
    assert "length" in ends


def test_the_loop_of_a_program_that_calls_its_functions(tool_client):
    """Parse, call, send the results back, and get a final answer."""
    functions = {"Add": lambda a: a.a + a.b, "Turn": lambda a: a.side}
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    one_call = {"tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(2):
        body = options(messages=messages, seed=seed, **one_call)
        message = tool_client.chat.completions.parse(**body).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert isinstance(call.function.parsed_arguments, Add | Turn)
            result = functions[call.function.name](call.function.parsed_arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    answer = create(tool_client, messages=messages, tool_choice="none", max_tokens=10)
    final = answer.choices[0].message
    assert final.tool_calls is None
    assert final.content
    body = options(messages=messages, **one_call)
    with tool_client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert isinstance(call.function.parsed_arguments, Add | Turn)


def test_an_answer_is_a_model_or_a_call(tool_client):
    """Both at once, as OpenAI's clients may ask."""
    choices = tool_client.chat.completions.parse(**options(response_format=Add, n=4)).choices
    for choice in choices:
        assert isinstance(choice.message.parsed, Add) != bool(choice.message.tool_calls)


def test_log_probabilities_are_those_of_all_tokens(tool_client):
    answer = create(tool_client, tool_choice=NAMED, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    stream = create(tool_client, tool_choice=NAMED, logprobs=True, stream=True)
    counts = [len(c.logprobs.content) for chunk in stream for c in chunk.choices if c.logprobs]
    assert sum(counts) == answer.usage.completion_tokens


def test_the_tokens_of_a_prompt_include_its_tools(tool_http):
    plain, with_tools = (
        tool_http.post("/tokenize", json={"messages": MESSAGES, **tools}).json()
        for tools in ({}, {"tools": TOOLS})
    )
    assert with_tools["count"] > plain["count"] + 100


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_ignored_keywords_of_tools_are_in_a_header(tool_http):
    body = options(max_tokens=2, tools=[function("f", parameters=UNIQUE, strict=False)])
    answer = tool_http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Keywords"] == "f#/properties/a/uniqueItems"
