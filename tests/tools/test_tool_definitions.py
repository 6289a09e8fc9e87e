"""What a request may define, and the error when something is wrong."""

from __future__ import annotations

import json

import pytest

from pagedjax.text.tools.definitions import NO_PARAMETERS, Tool, choice_of, tools_of
from tests.refusals import refused
from tests.tools.functions import function

F = function()


def test_a_tool_has_defaults():
    (tool,) = tools_of([F])
    assert tool == Tool("f", None, NO_PARAMETERS, True)
    (tool,) = tools_of([function(description="D", strict=None)])
    definition = {"name": "f", "description": "D", "parameters": NO_PARAMETERS}
    assert tool.shown()["function"] == definition
    (tool,) = tools_of([function(parameters={"properties": {"a": {}}})])
    assert tool.parameters == {"type": "object", "properties": {"a": {}}}
    assert tools_of(None) == tools_of([]) == ()
    assert len(tools_of([function(f"f{i}") for i in range(128)])) == 128


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
        ([function(x=1)], "tools.0.function has the unknown field 'x'"),
        ([function("")], "tools.0.function.name is ''; it must be 1 to 64 of the characters"),
        ([function("é")], "tools.0.function.name is 'é'"),
        ([function("a" * 65)], "tools.0.function.name is 'aaa"),
        ([function("f\n")], r"tools.0.function.name is 'f\\n'"),
        ([function(3)], "tools.0.function.name is 3"),
        (
            [F, function("g"), F],
            "tools.2.function.name is 'f' again; give each tool a name of its own",
        ),
        ([function(f"f{i}") for i in range(129)], "tools has 129 of them; the limit is 128"),
        (
            [function(parameters=[])],
            r"tools.0.function.parameters is \[\]; it must be a JSON schema of type object",
        ),
        (
            [function(parameters={"default": json.loads("[" * 301 + "]" * 301)})],
            "more than 300 levels; make it flatter",
        ),
        (
            [function(parameters={"type": "array"})],
            "tools.0.function.parameters.type is 'array'; arguments are an object",
        ),
        ([function(strict=1)], "tools.0.function.strict is 1"),
        ([function(description=1)], "tools.0.function.description is 1"),
    ],
)
def test_a_wrong_tool_is_named_by_its_place(tools, message):
    with refused(message):
        tools_of(tools)


def test_a_choice_has_four_forms():
    tools = tools_of([F, function("g")])
    assert choice_of(None, ()) == choice_of("none", ()) == ("none", None)
    assert choice_of(None, tools) == ("auto", None)
    for kind in ("auto", "none", "required"):
        assert choice_of(kind, tools) == (kind, None)
    assert choice_of(function("g"), tools) == ("required", "g")


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("auto", [], "tool_choice goes with tools; give at least one tool"),
        (function(), [], "tool_choice goes with tools"),
        (function("h"), [F], r"tool_choice names 'h', which is none of the tools \(f\)"),
        ("any", [F], 'tool_choice is \'any\'; it must be "auto", "none", "required", or'),
        ({"type": "function"}, [F], "tool_choice is {'type': 'function'}"),
        (3, [F], "tool_choice is 3"),
    ],
)
def test_a_wrong_choice_is_refused(choice, tools, message):
    with refused(message):
        choice_of(choice, tools_of(tools))
