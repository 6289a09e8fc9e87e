"""What a request may define, and the error when something is wrong."""

from __future__ import annotations

import json

import pytest

from pagedjax.text.tools.definitions import NO_PARAMETERS, Tool, choice_of, tools_of
from tests.refusals import refused

F = {"type": "function", "function": {"name": "f"}}


def tool_named(name) -> dict:
    return {"type": "function", "function": {"name": name}}


def with_parameters(parameters) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_a_tool_has_defaults():
    (tool,) = tools_of([F])
    assert tool == Tool("f", None, NO_PARAMETERS, True)
    (tool,) = tools_of(
        [{"type": "function", "function": {"name": "f", "description": "D", "strict": None}}]
    )
    assert tool.shown()["function"] == {
        "name": "f",
        "description": "D",
        "parameters": NO_PARAMETERS,
    }
    (tool,) = tools_of([with_parameters({"properties": {"a": {}}})])
    assert tool.parameters == {"type": "object", "properties": {"a": {}}}
    assert tools_of(None) == tools_of([]) == ()
    assert len(tools_of([tool_named(f"f{i}") for i in range(128)])) == 128


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "tools is 'f'; it must be a list"),
        ([1], "tools.0 is 1; it must be an object"),
        (
            [F, {"type": "web_search"}],
            "tools.1.type is 'web_search'; there are no tools but functions",
        ),
        ([{"type": "function"}], "tools.0.function is None"),
        (
            [{"type": "function", "function": {"name": "f", "x": 1}}],
            "tools.0.function has the unknown field 'x'",
        ),
        ([tool_named("")], "tools.0.function.name is ''; it must be 1 to 64 of the characters"),
        ([tool_named("a b")], "tools.0.function.name is 'a b'"),
        ([tool_named("é")], "tools.0.function.name is 'é'"),
        ([tool_named("a" * 65)], "tools.0.function.name is 'aaa"),
        ([tool_named("f\n")], r"tools.0.function.name is 'f\\n'"),
        ([tool_named(3)], "tools.0.function.name is 3"),
        (
            [F, tool_named("g"), F],
            "tools.2.function.name is 'f' again; give each tool a name of its own",
        ),
        ([tool_named(f"f{i}") for i in range(129)], "tools has 129 of them; the limit is 128"),
        (
            [with_parameters([])],
            r"tools.0.function.parameters is \[\]; it must be a JSON schema of type object",
        ),
        (
            [with_parameters({"default": json.loads("[" * 301 + "]" * 301)})],
            "more than 300 levels; make it flatter",
        ),
        (
            [with_parameters({"type": "array"})],
            "tools.0.function.parameters.type is 'array'; arguments are an object",
        ),
        (
            [{"type": "function", "function": {"name": "f", "strict": 1}}],
            "tools.0.function.strict is 1",
        ),
        (
            [{"type": "function", "function": {"name": "f", "description": 1}}],
            "tools.0.function.description is 1",
        ),
    ],
)
def test_a_wrong_tool_is_named_by_its_place(tools, message):
    with refused(message):
        tools_of(tools)


def test_a_choice_has_four_forms():
    tools = tools_of([F, tool_named("g")])
    assert choice_of(None, ()) == ("none", None)
    assert choice_of("none", ()) == ("none", None)
    assert choice_of(None, tools) == ("auto", None)
    assert [choice_of(kind, tools) for kind in ("auto", "none", "required")] == [
        ("auto", None),
        ("none", None),
        ("required", None),
    ]
    assert choice_of(tool_named("g"), tools) == ("required", "g")


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("auto", [], "tool_choice goes with tools; give at least one tool"),
        (tool_named("f"), [], "tool_choice goes with tools"),
        (tool_named("h"), [F], r"tool_choice names 'h', which is none of the tools \(f\)"),
        ("any", [F], 'tool_choice is \'any\'; it must be "auto", "none", "required", or'),
        ({"type": "function"}, [F], "tool_choice is {'type': 'function'}"),
        (3, [F], "tool_choice is 3"),
    ],
)
def test_a_wrong_choice_is_refused(choice, tools, message):
    with refused(message):
        choice_of(choice, tools_of(tools))
