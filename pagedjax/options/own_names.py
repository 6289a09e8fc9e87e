"""Names of user-defined values: "mine.py:NAME", and with parameters as a mapping.

    mine.py:aged                           a value, or a function whose parameters have defaults
    {"name": "mine.py:aged", "worth": 64}  a function and its parameters: in YAML, in Python, as JSON
    name=mine.py:aged,worth=64             the same on the command line
    mine.py:aged(worth=64)                 the same in one line: what an engine, a table and a
                                           recording keep, written as a call in Python

This module imports nothing of the package.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

# functions of `pagedjax.policies` that return the policy of their name with other parameters
SHIPPED_FUNCTIONS = ("vtc", "mlfq", "srtf", "deadline", "early_rejection")
_CALL = re.compile(r"(?P<place>.*?:\w+|\w+)(?P<call>\(.*\))", re.DOTALL)


class NamedValue(Protocol):
    """A value itself in the place of its name, such as a `Policy` or a `Drafter`."""

    @property
    def name(self) -> str: ...


class OwnName(NamedTuple):
    """The parts of a name.

    module: a module, or the path of a file, which ends in ".py"; "" in the name of a shipped value.
    attribute: the value's name there.
    call: the parameters in parentheses, by name; "" if there are none.
    """

    module: str
    attribute: str
    call: str = ""

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")

    @property
    def text(self) -> str:
        """The name in one line."""
        place = f"{self.module}:{self.attribute}" if self.module else self.attribute
        return place + self.call

    @property
    def short(self) -> str:
        """The name in one line without the folder of its file."""
        if not self.is_file:
            return self.text
        return self._replace(module=re.split(r"[/\\]", self.module)[-1]).text


def own_name(text: str) -> OwnName:
    """Returns the parts of a name in one line."""
    place, call = _place_and_call(text)
    module, _, attribute = place.rpartition(":")
    return OwnName(module, attribute, call)


def _place_and_call(text: str) -> tuple[str, str]:
    match = _CALL.fullmatch(text)
    return (match["place"], match["call"]) if match else (text, "")


def names_own_value(value: Any) -> bool:
    """Returns whether a text may be the name of a user's own value."""
    return isinstance(value, str) and ":" in _place_and_call(value)[0]


def is_value(value: Any) -> bool:
    """Returns whether this is a value itself, and not the name of a value."""
    return isinstance(value, tuple) and isinstance(getattr(value, "name", None), str)


def parameters_of(field: str, name: OwnName) -> dict[str, Any]:
    """Returns the parameters of a name, by name.

    Raises:
        ValueError: they are not written as NAME=VALUE with plain values.
    """
    if not name.call:
        return {}
    try:
        call: Any = ast.parse(f"f{name.call}", mode="eval").body
        keys = [keyword.arg for keyword in call.keywords]
        values = [ast.literal_eval(keyword.value) for keyword in call.keywords]
        if call.args or None in keys or len(set(keys)) < len(keys):
            raise ValueError(name.call)
    except (AttributeError, SyntaxError, ValueError):
        raise ValueError(
            f"{field} is {name.text!r}; write its parameters by name and once each, with plain "
            "values, such as mine.py:NAME(worth=64)"
        ) from None
    return dict(zip(keys, values, strict=True))


def name_in_one_line(field: str, value: Any) -> Any:
    """Returns a mapping or a text as a name in one line, with parameters sorted by name. Returns
    any other value unchanged.

    Raises:
        ValueError: a mapping without a name, parameters of a shipped value, or a parameter that is
            no plain value.
    """
    if isinstance(value, Mapping):
        parameters = {str(key): item for key, item in value.items()}
        text = parameters.pop("name", None)
        if not isinstance(text, str):
            raise ValueError(
                f"{field} is {dict(value)!r:.200}; it must have a name, such as "
                "{name: mine.py:NAME, worth: 64}"
            )
        name = own_name(text)
        if name.call:
            raise ValueError(
                f"{field}.name is {text!r}, which has parameters; write all of them beside it"
            )
    elif isinstance(value, str):
        text = value
        name = own_name(text)
        parameters = parameters_of(field, name)
    else:
        return value
    if not parameters:
        return text
    if "name" in parameters:
        raise ValueError(
            f"{field} is {name.text!r}, and no parameter can be called 'name'; rename it in the file"
        )
    is_policy = field.rpartition(".")[2] == "policy"
    if is_policy and name.attribute in SHIPPED_FUNCTIONS and not name.module:
        name = name._replace(module="pagedjax.policies")
    if not name.module:
        raise ValueError(
            f"{field} is {name.attribute!r}, which has no parameters, and {next(iter(parameters))} "
            "is given; leave it out, or name a function of your own, mine.py:NAME"
        )
    texts = [f"{key}={_text(field, key, parameters[key])}" for key in sorted(parameters)]
    return name._replace(call=f"({', '.join(texts)})").text


def as_mapping(value: str) -> dict[str, Any]:
    """Returns the mapping that a name in one line stands for."""
    name = own_name(value)
    return {"name": name._replace(call="").text, **parameters_of("name", name)}


def _text(field: str, key: str, value: Any) -> str:
    """A parameter as Python writes it. Lists become tuples."""
    if not key.isidentifier():
        raise ValueError(
            f"{field} has the parameter {key!r}, which is no name in Python; correct it"
        )
    if not _is_plain(value):
        raise ValueError(
            f"{field}.{key} is {value!r:.200}; a parameter is a finite number, a text, true, false, "
            "null, or a list of them"
        )
    return repr(_frozen(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
