"""What a request defines: tools, and the choice among them, in OpenAI's format. Checked here, with places in errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOOLS = 128  # as OpenAI's
MAX_LEVELS = 300  # of a schema or of arguments
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = ("auto", "none", "required")
CHOICE_FORM = '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that may be called. `parameters`: the JSON schema of its arguments, which are an object."""

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


def tools_of(given: Any) -> tuple[Tool, ...]:
    """The tools of a request.

    Raises:
        ValueError: one of them is wrong; names its place.
    """
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise ValueError(f"tools is {given!r:.80}; it must be a list of functions")
    if len(given) > MAX_TOOLS:
        raise ValueError(f"tools has {len(given)} of them; the limit is {MAX_TOOLS}")
    tools = tuple(_tool(f"tools.{i}", one) for i, one in enumerate(given))
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise ValueError(
                f"tools.{i}.function.name is {tool.name!r} again; give each tool a name of its own"
            )
        seen.add(tool.name)
    return tools


def _tool(place: str, given: Any) -> Tool:
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is {given!r:.80}; it must be an object of type 'function'")
    if (kind := given.get("type")) != "function":
        what = f"{place}.type is {kind!r:.80}; there are no tools but functions"
        raise ValueError(f'{what}: {{"type": "function", "function": {{"name": ...}}}}')
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{place}.function is {function!r:.80}; it must be an object with a name")
    place = f"{place}.function"
    if unknown := sorted(map(str, set(function) - {"name", "description", "parameters", "strict"})):
        raise ValueError(f"{place} has the unknown field {unknown[0]!r:.80}; a function has name, description, "
                         "parameters and strict")  # fmt: skip
    name, description, strict = (
        function.get("name"),
        function.get("description"),
        function.get("strict"),
    )
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{place}.name is {name!r:.80}; it must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -"
        )
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{place}.description is {description!r:.80}; it must be a text")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{place}.strict is {strict!r:.80}; it must be true or false")
    return Tool(
        name,
        description,
        _parameters(f"{place}.parameters", function.get("parameters")),
        strict is not False,
    )


def _parameters(place: str, given: Any) -> Mapping[str, Any]:
    if given is None:
        return NO_PARAMETERS
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is {given!r:.80}; it must be a JSON schema of type object")
    if too_deep(given):
        raise ValueError(f"{place} has more than {MAX_LEVELS} levels; make it flatter")
    if given.get("type", "object") != "object":
        raise ValueError(
            f"{place}.type is {given['type']!r:.80}; arguments are an object, so it must be 'object'"
        )
    return {"type": "object", **given}


def too_deep(value: Any) -> bool:
    """Whether a JSON value has more than MAX_LEVELS, which would exhaust the stack where it is written again."""
    level = [value]
    for _ in range(MAX_LEVELS):
        inner = [
            one.values() if isinstance(one, Mapping) else one
            for one in level
            if isinstance(one, (Mapping, list))
        ]
        level = [item for several in inner for item in several]
        if not level:
            return False
    return True


def choice_of(given: Any, tools: Sequence[Tool]) -> tuple[str, str | None]:
    """(one of CHOICES, the name of the one tool that is to be called).

    Raises:
        ValueError: no choice, or one that does not fit the tools.
    """
    if given is None:
        return ("auto" if tools else "none"), None
    if not tools and given != "none":
        raise ValueError(
            "tool_choice goes with tools; give at least one tool, or leave tool_choice out"
        )
    if isinstance(given, str) and given in CHOICES:
        return given, None
    function = (
        given.get("function")
        if isinstance(given, Mapping) and given.get("type") == "function"
        else None
    )
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"tool_choice is {given!r:.80}; it must be {CHOICE_FORM}")
    names = [tool.name for tool in tools]
    if name not in names:
        raise ValueError(
            f"tool_choice names {name!r:.80}, which is none of the tools ({', '.join(names):.200})"
        )
    return "required", name
