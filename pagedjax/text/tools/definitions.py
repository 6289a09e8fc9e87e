"""What a request defines: tools, and the choice among them, in OpenAI's format.

They are checked here. Errors name the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOOLS = 128  # as OpenAI's
MAX_LEVELS = 300  # nested levels of a schema or of arguments
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = ("auto", "none", "required")
CHOICE_FORM = '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that may be called.

    parameters: the JSON schema of its arguments, which are an object.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = True  # False: keywords of the schema that are not supported are ignored

    def shown(self) -> dict[str, Any]:
        """As prompts show it: as OpenAI defines it, without `strict`."""
        about = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **about, "parameters": dict(self.parameters)},
        }


def tools_of(tools: Any) -> tuple[Tool, ...]:
    """The tools of a request.

    Raises:
        ValueError: a tool is wrong; the message names its place.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise ValueError(f"tools is {tools!r:.80}; it must be a list of functions")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} of them; the limit is {MAX_TOOLS}")
    tools = tuple(_tool(f"tools.{i}", tool) for i, tool in enumerate(tools))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise ValueError(
                f"tools.{i}.function.name is {tool.name!r} again; give each tool a name of its own"
            )
        names.add(tool.name)
    return tools


def _tool(place: str, tool: Any) -> Tool:
    if not isinstance(tool, Mapping):
        raise ValueError(f"{place} is {tool!r:.80}; it must be an object of type 'function'")
    kind = tool.get("type")
    if kind != "function":
        problem = f"{place}.type is {kind!r:.80}; there are no tools but functions"
        raise ValueError(f'{problem}: {{"type": "function", "function": {{"name": ...}}}}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{place}.function is {function!r:.80}; it must be an object with a name")
    place = f"{place}.function"
    unknown_fields = set(function) - {"name", "description", "parameters", "strict"}
    if unknown_fields:
        raise ValueError(
            f"{place} has the unknown field {min(map(str, unknown_fields))!r:.80}; "
            "a function has name, description, parameters and strict"
        )
    name = function.get("name")
    description = function.get("description")
    strict = function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{place}.name is {name!r:.80}; "
            "it must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -"
        )
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{place}.description is {description!r:.80}; it must be a text")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{place}.strict is {strict!r:.80}; it must be true or false")
    return Tool(
        name,
        description,
        _parameters(f"{place}.parameters", function.get("parameters")),
        strict=strict is not False,
    )


def _parameters(place: str, schema: Any) -> Mapping[str, Any]:
    if schema is None:
        return NO_PARAMETERS
    if not isinstance(schema, Mapping):
        raise ValueError(f"{place} is {schema!r:.80}; it must be a JSON schema of type object")
    if too_deep(schema):
        raise ValueError(f"{place} has more than {MAX_LEVELS} levels; make it flatter")
    if schema.get("type", "object") != "object":
        raise ValueError(
            f"{place}.type is {schema['type']!r:.80}; "
            "arguments are an object, so it must be 'object'"
        )
    return {"type": "object", **schema}


def too_deep(value: Any) -> bool:
    """Whether a JSON value has more than MAX_LEVELS.

    Such a value would exhaust the stack where it is written again.
    """
    level = [value]
    for _ in range(MAX_LEVELS):
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                next_level += item.values()
            elif isinstance(item, list):
                next_level += item
        level = next_level
        if not level:
            return False
    return True


def choice_of(choice: Any, tools: Sequence[Tool]) -> tuple[str, str | None]:
    """(one of CHOICES, the name of the one tool that is to be called; None: any tool).

    Raises:
        ValueError: no choice, or one that does not fit the tools.
    """
    if choice is None:
        return ("auto" if tools else "none"), None
    if not tools and choice != "none":
        raise ValueError(
            "tool_choice goes with tools; give at least one tool, or leave tool_choice out"
        )
    if isinstance(choice, str) and choice in CHOICES:
        return choice, None
    function = None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"tool_choice is {choice!r:.80}; it must be {CHOICE_FORM}")
    names = [tool.name for tool in tools]
    if name not in names:
        raise ValueError(
            f"tool_choice names {name!r:.80}, which is none of the tools ({', '.join(names):.200})"
        )
    return "required", name
