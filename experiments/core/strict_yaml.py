"""Strict YAML: duplicate keys, unknown keys and wrong types are errors that name the path of the
key.

`parse(kind, value, path)` turns the value of YAML into the type `kind`: nested dataclasses, unions
of dataclasses with a one-valued Literal field (`kind: synthetic`), Literal, tuples, mappings and
plain scalars.

pydantic's TypeAdapter (2.x) does not replace it: it accepts unknown keys of our plain dataclasses,
suggests no nearest name, and reports errors for all members of a union instead of the chosen one.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from pagedjax.options.config import from_dict, one_of
from pagedjax.options.own_names import names_own_value
from pagedjax.text import yaml_words


class _Loader(yaml_words.Loader):
    """Refuses a duplicate key; plain YAML keeps the last value without a message."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in first_line:
                raise ValueError(
                    f"line {line}: the key {key!r} is given twice (first in line {first_line[key]})"
                )
            first_line[key] = line
        return super().construct_mapping(node, deep=deep)


def load_text(text: str, source: str) -> Any:
    """The YAML document `text`.

    Raises:
        ValueError: bad syntax or a duplicate key; the message begins with `source`.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError) as error:  # TypeError: a list as a mapping key
        raise ValueError(f"{source}: {error}") from None


def load_file(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file `path`.

    Raises ValueError if the file is missing or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot read the config {path}: {error.strerror or error}; name a YAML file, such as "
            "one of configs/"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read the config {path}: it is not UTF-8 text ({error})") from None
    value = load_text(text, str(path))
    if value is None:
        raise ValueError(f"{path} is empty; a config is a mapping of sections, such as `name: ...`")
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} is {type(value).__name__}; a config is a mapping of sections, such as `name: "
            "...`"
        )
    return value


def parse(kind: Any, value: Any, path: str) -> Any:
    """`value` as the type `kind`; `path` is its path in the config, such as `engine.block_size`.

    Raises:
        ValueError: the path, the value found and what it must be; for an unknown key also the
            nearest known name.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if kind is Any:  # the dataclass checks the value itself
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, path)
    if origin in (Union, types.UnionType):
        return _union(args, value, path)
    if origin is Literal:
        one_of(path, value, args)
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(parse(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin in (collections.abc.Mapping, dict) and isinstance(value, dict):
        return {
            parse(args[0], k, f"{path} key"): parse(args[1], v, f"{path}.{k}")
            for k, v in value.items()
        }
    if (
        kind is float
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    ):
        return float(value)
    if kind in (int, str, bool, types.NoneType) and type(value) is kind:
        return value
    raise ValueError(f"{path} is {value!r}; it must be {_words(kind)}{_hint(kind, value)}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields, cached: typing.get_type_hints is slower than all else here."""
    return typing.get_type_hints(cls)


def _dataclass(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        names = ", ".join(field.name for field in dataclasses.fields(cls))
        raise ValueError(
            f"{path} is {value!r}; it must be a mapping, such as {_example(cls)}, with keys from: "
            f"{names}"
        )
    hints = _hints(cls)
    prefix = f"{path}." if path else ""
    parsed = {k: parse(hints[k], v, prefix + k) if k in hints else v for k, v in value.items()}
    if set(parsed) <= set(hints):  # else from_dict reports the unknown key
        for field in dataclasses.fields(cls):
            if _is_required(field) and field.name not in parsed:
                raise ValueError(
                    f"{prefix}{field.name} is missing; it must be {_words(hints[field.name])}"
                )
    try:
        return from_dict(cls, parsed, where=prefix)
    except ValueError as error:
        # The error of an unknown key has the path. A check inside the dataclass names its field
        # alone, or the last name of the path and the field.
        message = str(error)
        if message.startswith("unknown key"):
            raise
        message = message.removeprefix(f"{path.rpartition('.')[2]}.")
        raise ValueError(prefix + message) from None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _example(cls: Any) -> str:
    """A mapping in YAML for an error: the tag of a union and the required keys, or else the first
    plain default.
    """
    tag, values = _tag(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name != tag]
    tags = [f"{tag}: {value}" for value in values]
    required = [f"{field.name}: ..." for field in fields if _is_required(field)]
    plain = [
        f"{field.name}: {field.default}" for field in fields if type(field.default) in (int, float)
    ]
    keys = [*tags, *required] or plain[:1] or [f"{fields[0].name}: ..."]
    return f"{{{', '.join(keys)}}}"


def _union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    dataclass_members = [member for member in members if dataclasses.is_dataclass(member)]
    tagged = {value: cls for cls in dataclass_members for value in _tag(cls)[1]}
    if tagged and isinstance(value, dict):
        name = _tag(next(iter(tagged.values())))[0]
        if name not in value:
            raise ValueError(
                f"{path}.{name} is missing; it must be one of {', '.join(map(repr, tagged))}"
            )
        own_classes = [cls for cls in dataclass_members if not _tag(cls)[1]]
        if own_classes and names_own_value(value[name]):  # such as `kind: mine.py:bursts`
            return parse(own_classes[0], value, path)
        one_of(f"{path}.{name}", value[name], tuple(tagged))
        return parse(tagged[value[name]], value, path)
    for member in members:
        if _fits(member, value):
            return parse(member, value, path)
    union = Union[members]  # noqa: UP007 - built from a tuple
    example = f", such as {_example(dataclass_members[0])}" if dataclass_members else ""
    raise ValueError(
        f"{path} is {value!r}; it must be {_words(union)}{example}{_hint(union, value)}"
    )


def _tag(cls: Any) -> tuple[str, tuple[Any, ...]]:
    """Name and values of the Literal field that identifies a member of a union; ("", ()) without
    such a field.
    """
    for name, hint in _hints(cls).items():
        if get_origin(hint) is Literal and len(get_args(hint)) == 1:
            return name, get_args(hint)
    return "", ()


def _fits(kind: Any, value: Any) -> bool:
    """True if `value` has the outer shape of `kind`, so that an error inside it is reported with
    its full path.
    """
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind) or origin in (collections.abc.Mapping, dict):
        return isinstance(value, dict)
    if origin is tuple:
        return isinstance(value, (list, tuple))
    if origin is Literal:
        return isinstance(value, str)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


def _words(kind: Any) -> str:
    """What a value of the type `kind` must be, in words."""
    plain = {
        int: "an integer",
        float: "a finite number",
        str: "text",
        bool: "true or false",
        types.NoneType: "null",
    }
    if kind in plain:
        return plain[kind]
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(arg) for arg in args))
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        return f"a list, each item {_words(args[0])}"
    return "a mapping"


def _hint(kind: Any, value: Any) -> str:
    """The correction, if a text looks like the number that is wanted."""
    numbers = {int, float} & {kind, *get_args(kind)}
    if not (isinstance(value, str) and numbers):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    return f" (write it without quotes: {number:g})"
