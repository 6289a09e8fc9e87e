"""Tools over HTTP, by OpenAI's client: calls are valid whatever the model says, whole and
streamed.
"""

from __future__ import annotations

import json
from typing import Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.support import error_of

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
    return {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "max_tokens": 400,
        "seed": 1,
        **changes,
    }


def check(call) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_is_valid(tool_client, choice):
    answer = tool_client.chat.completions.create(
        **options(tool_choice=choice, parallel_tool_calls=False, n=4)
    )
    for reply in answer.choices:
        assert (reply.finish_reason, reply.message.content) == ("tool_calls", None)
        (call,) = reply.message.tool_calls
        check(call)
        assert choice == "required" or call.function.name == "Turn"
    assert len({call.message.tool_calls[0].id for call in answer.choices}) == 4


def test_a_stream_has_the_calls_of_the_whole_answer(tool_client):
    for seed in range(2):
        arguments = options(tool_choice="required", seed=seed, n=2, max_tokens=150)
        unstreamed = tool_client.chat.completions.create(**arguments)
        calls = [{}, {}]
        reasons = ["", ""]
        for chunk in tool_client.chat.completions.create(stream=True, **arguments):
            for choice in chunk.choices:
                reasons[choice.index] = choice.finish_reason or ""
                assert not choice.delta.content
                for piece in choice.delta.tool_calls or ():
                    entry = calls[choice.index].setdefault(
                        piece.index, [piece.id, piece.function.name, ""]
                    )
                    assert piece.id in (None, entry[0])
                    assert (
                        (piece.id is None) == (piece.function.name is None) == (piece.type is None)
                    )
                    entry[2] += piece.function.arguments
        for expected, streamed, reason in zip(unstreamed.choices, calls, reasons, strict=True):
            expected_calls = [
                (call.function.name, call.function.arguments)
                for call in expected.message.tool_calls
            ]
            assert [tuple(call[1:]) for call in streamed.values()] == expected_calls
            assert list(streamed) == list(range(len(expected_calls)))
            assert reason == expected.finish_reason


def test_an_answer_may_be_text(tool_client):
    """The tiny model says anything; it hardly ever writes a call by itself."""
    answer = tool_client.chat.completions.create(**options(max_tokens=30)).choices[0]
    assert answer.message.content
    assert answer.message.tool_calls is None
    stream = tool_client.chat.completions.create(**options(max_tokens=30, stream=True))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.message.content
    )
    assert (
        tool_client.chat.completions.create(**options(max_tokens=30, tool_choice="auto")).choices[0]
        == answer
    )


def test_an_answer_that_ends_by_length_shows_the_start_of_a_call(tool_client):
    ends = set()
    for limit in range(30, 70, 8):
        choice = tool_client.chat.completions.create(
            **options(tool_choice=NAMED, max_tokens=limit)
        ).choices[0]
        ends.add(choice.finish_reason)
        for call in choice.message.tool_calls or ():
            assert call.function.name == "Turn"
            assert choice.finish_reason == "tool_calls" or not call.function.arguments.endswith(
                "}\n"
            )
    assert "length" in ends


def test_the_loop_of_a_program_that_calls_its_functions(tool_client):
    """Parse, call, send the results back, and get a final answer."""
    functions = {"Add": lambda a: a.a + a.b, "Turn": lambda a: a.side}
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    parse = tool_client.chat.completions.parse
    for seed in range(2):
        completion = parse(
            **options(
                messages=messages, tool_choice="required", parallel_tool_calls=False, seed=seed
            )
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert isinstance(call.function.parsed_arguments, Add | Turn)
            result = functions[call.function.name](call.function.parsed_arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    create = tool_client.chat.completions.create
    final = (
        create(**options(messages=messages, tool_choice="none", max_tokens=10)).choices[0].message
    )
    assert final.tool_calls is None
    assert final.content
    with tool_client.chat.completions.stream(
        **options(messages=messages, tool_choice="required", parallel_tool_calls=False)
    ) as stream:
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
    answer = tool_client.chat.completions.create(**options(tool_choice=NAMED, logprobs=True))
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    stream = tool_client.chat.completions.create(
        **options(tool_choice=NAMED, logprobs=True, stream=True)
    )
    counts = [len(c.logprobs.content) for chunk in stream for c in chunk.choices if c.logprobs]
    assert sum(counts) == answer.usage.completion_tokens


def test_the_tokens_of_a_prompt_include_its_tools(tool_server):
    body = {"messages": MESSAGES, "tools": TOOLS}
    count = httpx.post(f"{tool_server.url}/tokenize", json=body).json()["count"]
    assert (
        count
        > httpx.post(f"{tool_server.url}/tokenize", json={"messages": MESSAGES}).json()["count"]
        + 100
    )


def tool(name: str, **fields) -> dict:
    return {"type": "function", "function": {"name": name, **fields}}


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}],
}
WRONG = [
    (
        {"tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice names 'h', which is none",
        "tool_choice",
    ),
    (
        {"tool_choice": "any"},
        'tool_choice is \'any\'; it must be "auto", "none", "required"',
        "tool_choice",
    ),
    ({"tool_choice": 3}, 'tool_choice must be "auto", "none", "required"', "tool_choice"),
    ({"tools": [tool("f"), tool("f")]}, "tools.1.function.name is 'f' again", "tools"),
    ({"tools": [tool("a b")]}, "tools.0.function.name is 'a b'; it must be 1 to 64", "tools"),
    (
        {"tools": [tool(f"f{i}") for i in range(129)]},
        "tools: List should have at most 128 items",
        "tools",
    ),
    (
        {"tools": [tool("f", parameters=UNIQUE)]},
        "the schema of 'f' has the keyword 'uniqueItems' at #/properties/a/u",
        "tools",
    ),
    ({"tools": None, "tool_choice": "required"}, "tool_choice goes with tools", "tool_choice"),
    (
        {"messages": [*MESSAGES, {"role": "tool", "content": "3"}]},
        "messages.1 has the role 'tool' and no tool",
        "messages",
    ),
    (
        {"messages": [*MESSAGES, CALLED]},
        "messages.1.tool_calls.0.function.arguments is no JSON",
        "messages",
    ),
    (
        {"parallel_tool_calls": "no"},
        "parallel_tool_calls: Input should be a valid boolean",
        "parallel_tool_calls",
    ),
    (
        {"structured_outputs": {"regex": "a"}},
        "structured_outputs go with tools as JSON alone",
        "structured_outputs",
    ),
    ({"use_beam_search": True}, "tools do not go with a beam search", "tools"),
]


@pytest.mark.parametrize(
    ("fields", "message", "param"), WRONG, ids=[str(fields)[:60] for fields, *_ in WRONG]
)
def test_what_is_wrong_is_named(tool_server, fields, message, param):
    body = {
        name: value for name, value in options(max_tokens=5, **fields).items() if value is not None
    }
    if fields.get("use_beam_search"):
        del body["seed"]
    answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert message in error["message"]
    assert error["param"] == param


def test_ignored_keywords_of_tools_are_in_a_header(tool_server):
    body = options(max_tokens=2, tools=[tool("f", parameters=UNIQUE, strict=False)])
    answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Keywords"] == "f#/properties/a/uniqueItems"
