"""The keys of an engine's config and of an experiment's YAML, from the dataclasses: names, types,
defaults, texts.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from _generate.docstrings import field_names, field_texts, text_of, to_rst
from _generate.rst import directive, inline, literal, title

INTRODUCTION = """The fields of `EngineConfig` are arguments of `LLM`, options of `pagedjax serve`, and the keys of
the section `engine` of an experiment. An unknown key is an error that suggests the near name.

`arrivals[poisson].rate` is the key `rate` of a section `arrivals` whose kind is `poisson`. A section that stands in
several places is listed once."""


class Key(NamedTuple):
    """A key of a section. `type` and `default` are as Python writes them; `default` is None for a
    key without one.
    """

    name: str
    type: str
    default: str | None
    text: str


class Section(NamedTuple):
    """The keys of a dataclass. `path`: how they are named, such as `arrivals[poisson]`; "" at the
    top of a file.
    """

    path: str
    cls: type
    keys: tuple[Key, ...]


def keys(cls: type) -> tuple[Key, ...]:
    """The keys that a dataclass has."""
    hints, texts = get_type_hints(cls), {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= field_texts(base) | _comments(base)
    return tuple(
        Key(field.name, type_name(hints[field.name]), _default(field), texts.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.init
    )


def sections(cls: type, path: str = "", seen: set[type] | None = None) -> Iterator[Section]:
    """The section of a dataclass, and those of the dataclasses among the types of its fields; each
    class once.
    """
    seen = {cls} if seen is None else seen
    yield Section(path, cls, keys(cls))
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = [one for one in _parts(hints[field.name]) if dataclasses.is_dataclass(one)]
        for one in inner:
            if one not in seen:
                seen.add(one)
                kind = _kind(one)
                yield from sections(one, f"{field.name}[{kind}]" if kind else field.name, seen)


def type_name(hint: Any) -> str:
    """A type as a user reads it: the values of a Literal, the name of a class."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(type_name(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_args(hint):
        inner = ", ".join("..." if part is Ellipsis else type_name(part) for part in get_args(hint))
        return f"{getattr(get_origin(hint), '__name__', get_origin(hint))}[{inner}]"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


def page() -> list[str]:
    from experiments.core import config, workloads
    from experiments.core.config import Experiment
    from pagedjax.options import exclusions
    from pagedjax.options.config import EngineConfig

    lines = [*title("Config keys"), *to_rst(INTRODUCTION)]
    seen = {EngineConfig}
    for section in sections(EngineConfig, "engine", seen):
        lines += _section(section)
    lines += title("Options that exclude each other", "~")
    tables = (exclusions.ENGINE, exclusions.SPECULATIVE, exclusions.SAMPLING)
    for exclusion in (exclusion for table in tables for exclusion in table):
        names = " and ".join(map(literal, exclusion.options))
        reason = re.sub(r"\{.*?\}", "...", exclusion.error)
        lines += [f"- {names}: {inline(reason)}", ""]
    lines += [*title("An experiment", "-"), *to_rst(config.__doc__ or "")]
    for section in sections(Experiment, "", seen | {Experiment}):
        lines += _section(section)
        if section.path == "":
            lines += [*title("workload", "~"), *to_rst(workloads.__doc__ or "")]
    return lines


def _section(section: Section) -> list[str]:
    name = section.path or "The top of the file"
    lines = [*title(f"`{section.path}`" if section.path else name, "~"), *_about(section.cls)]
    for key in section.keys:
        full = f"{section.path}.{key.name}" if section.path else key.name
        default = "" if key.default is None else f", the default is {literal(key.default)}"
        text = ["", inline(key.text)] if key.text else []
        lines += directive("confval", full, [literal(key.type) + default, *text])
    return lines


def _about(cls: type) -> list[str]:
    """The class's docstring without its fields, which have entries of their own."""
    names, lines, kept = field_names(cls), to_rst(text_of(cls), field_names(cls)), True
    found = []
    for line in lines:
        if line and not line.startswith(" "):
            kept = not any(line.split(", ")[0] == literal(name) for name in names)
        found += [line] if kept else []
    return found


def _parts(hint: Any) -> Iterator[Any]:
    """The types in a union or a container; the type itself otherwise."""
    if get_origin(hint) is Literal:
        return
    inner = [part for part in get_args(hint) if part is not Ellipsis]
    if not inner:
        yield hint
    for part in inner:
        yield from _parts(part)


def _kind(cls: type) -> str:
    """The value of the field that tells the kinds of a section apart: `kind: prompts`, `process:
    poisson`.
    """
    for hint in get_type_hints(cls).values():
        if get_origin(hint) is Literal and len(get_args(hint)) == 1:
            return str(get_args(hint)[0])
    return ""


def _default(field: Any) -> str | None:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return f"{getattr(field.default_factory, '__name__', field.default_factory)}()"
    return None


@cache
def _comments(cls: type) -> dict[str, str]:
    """By field: the comment behind its line, of fields that the docstring does not explain."""
    explained = field_texts(cls)
    source = textwrap.dedent(inspect.getsource(cls))
    lines, found = source.split("\n"), {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, mark, said = lines[(node.end_lineno or node.lineno) - 1].rpartition("  # ")
            if mark and node.target.id not in explained:
                found[node.target.id] = said.strip()
    return found
