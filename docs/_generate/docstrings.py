"""Docstrings of this project as reStructuredText, and the texts of fields in them.

    block_size: token slots in a cache block (S).      a field of the class, with indented lines that continue it
    Args: / Attributes: / Raises:                      names with their texts, indented
    Returns: / Yields:                                 text, indented
    `name`                                             code

Other indented lines, and lines with columns, are shown as they are.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection, Iterable
from typing import Any

from _generate.rst import code, definitions, indented, inline, literal

NAMED = ("Args", "Attributes", "Raises")
TEXT = ("Returns", "Yields")
ENTRY = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): ?(.*)")


def text_of(item: Any) -> str:
    """The docstring of an object, or of the class that it extends; "" without one, and for those
    that Python writes.
    """
    if not inspect.isclass(item):
        return inspect.getdoc(item) or ""
    for cls in inspect.getmro(item):
        text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        if (
            text
            and cls.__module__ not in ("builtins", "typing")
            and not text.startswith(f"{cls.__name__}(")
        ):
            return text
    return ""


def field_names(item: Any) -> tuple[str, ...]:
    """Names of the fields of a dataclass or of a named tuple; () of anything else."""
    if dataclasses.is_dataclass(item):
        return tuple(field.name for field in dataclasses.fields(item))
    return tuple(getattr(item, "_fields", ()))


def entries(
    lines: Iterable[str], names: Collection[str] | None = None
) -> list[tuple[tuple[str, ...], str]]:
    """(names, text) of each entry `name, name: text`; indented lines continue one. `names`: those
    that exist.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    for line in lines:
        match = ENTRY.fullmatch(line)
        if match and _known(match[1], names):
            found.append((tuple(match[1].split(", ")), match[2]))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}".strip())
    return [one for entry in found for one in _apart(*entry, names)]


def _known(words: str, names: Collection[str] | None) -> bool:
    return names is None or set(words.split(", ")) <= set(names)


def _apart(
    first: tuple[str, ...], text: str, names: Collection[str] | None
) -> list[tuple[tuple[str, ...], str]]:
    """Several fields on one line: `low: of the range. high: of the range.`"""
    parts = re.split(r"(?<=\.) (\w+(?:, \w+)*): ", text) if names else [text]
    found = [(first, parts[0])]
    for words, rest in zip(parts[1::2], parts[2::2], strict=True):
        if _known(words, names):
            found.append((tuple(words.split(", ")), rest))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]} {words}: {rest}")
    return found


def field_texts(item: Any) -> dict[str, str]:
    """By field of a class: its text in the class's docstring, or in that of the class that it
    extends.
    """
    found: dict[str, str] = {}
    for cls in reversed(inspect.getmro(item)):
        names = field_names(cls)
        for block in _blocks(inspect.cleandoc(cls.__dict__.get("__doc__") or "")) if names else ():
            for some, text in entries(_flat(block), names):
                found |= dict.fromkeys(some, text)
    return found


def signature(text: str) -> str:
    """A signature whose defaults are names of functions, without their addresses, which differ in
    each build.
    """
    named = re.sub(
        r"<function (?:[\w.]|<locals>)*?(\w+|<lambda>)(?: at 0x[0-9a-f]+)?>", r"\1", text
    )
    return named.replace("<lambda>", "...")


def to_rst(text: str, fields: Collection[str] = ()) -> list[str]:
    """A docstring as lines of reStructuredText. `fields`: the names of the class's fields."""
    found: list[str] = []
    for block in _blocks(inspect.cleandoc(text)):
        head = block[0].rstrip(":")
        if block[0] == f"{head}:" and head in NAMED and len(block) > 1:
            found += [
                f":{_TITLES[head]}:",
                *indented(_named(entries(inspect.cleandoc(_body(block)).split("\n")))),
                "",
            ]
        elif block[0] == f"{head}:" and head in TEXT and len(block) > 1:
            found += [f":{head}:", *indented(to_rst(_body(block))), ""]
        elif fields and (some := entries(block, fields)):
            found += _named(some)
        else:
            found += _paragraph(block)
    return found


_TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises"}


def _named(items: Iterable[tuple[tuple[str, ...], str]]) -> list[str]:
    return definitions(
        (", ".join(map(literal, names)), [inline(text)] if text else []) for names, text in items
    )


def _body(block: list[str]) -> str:
    return "\n" + "\n".join(block[1:])


def _flat(block: list[str]) -> list[str]:
    """The lines of a section, or those of a block that has no title."""
    return (
        inspect.cleandoc(_body(block)).split("\n")
        if block[0] in ("Args:", "Attributes:")
        else block
    )


def _blocks(text: str) -> list[list[str]]:
    """Paragraphs, apart where an empty line is, or where a section, a field list or indented text
    begins.

    A section keeps its empty lines, up to the next line that is not indented.
    """
    found: list[list[str]] = []
    section = apart = False
    for line in text.rstrip().split("\n"):
        if not line.strip():
            apart = not section or apart
            if section:
                found[-1].append("")
            continue
        begins = line.rstrip(":") in (*NAMED, *TEXT) and line.endswith(":")
        if not found or apart or begins or (section and not line.startswith(" ")):
            found.append([])
            section = begins
        found[-1].append(line.rstrip())
        apart = False
    return found


def _paragraph(block: list[str]) -> list[str]:
    if all(line.startswith(" ") or re.search(r"\S {2,}\S", line) for line in block):
        return code(inspect.cleandoc("\n" + "\n".join(block)).split("\n"))
    if block[0].startswith(("- ", "* ")):
        return _bullets(block)
    for i, line in enumerate(block):  # a paragraph that goes over into indented lines or a list
        if i and (line.startswith("    ") or line.startswith("- ")):
            return [inline(" ".join(block[:i])), "", *_paragraph(block[i:])]
    return [inline(" ".join(block)), ""]


def _bullets(block: list[str]) -> list[str]:
    items: list[str] = []
    for line in block:
        if line.startswith(("- ", "* ")):
            items.append(line[2:])
        else:
            items[-1] += f" {line.strip()}"
    return [*(f"- {inline(item)}" for item in items), ""]
