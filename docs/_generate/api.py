"""A page for each public module: every name of its `__all__`, by autodoc; constants with the
comment of their line.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from _generate.docstrings import field_names, to_rst
from _generate.rst import directive, inline, literal, title

MODULES = (
    "pagedjax",
    "pagedjax.models",
    "pagedjax.policies",
    "pagedjax.routing",
    "pagedjax.disaggregated",
    "pagedjax.viewer",
    "pagedjax.host.scheduler",
    "pagedjax.host.types",
    "pagedjax.host.waiting",
    "experiments",
    "pallas_kernels.paged_attention",
    "pallas_kernels.kv_write",
    "pallas_kernels.linear",
)


def public() -> list[tuple[str, str, Any]]:
    """(module, name, object) of every public name."""
    found = []
    for module in map(importlib.import_module, MODULES):
        found += [(module.__name__, name, getattr(module, name)) for name in module.__all__]
    return found


def kind(item: Any) -> str:
    """ "class", "function" (jitted ones too) or "data"."""
    if inspect.isclass(item):
        return "class"
    return (
        "function"
        if inspect.isroutine(inspect.unwrap(item) if callable(item) else item)
        else "data"
    )


def page(name: str) -> Callable[[], list[str]]:
    """The function that makes a module's page."""
    return lambda: module_page(importlib.import_module(name))


def module_page(module: ModuleType) -> list[str]:
    name = module.__name__
    lines = [*title(f"`{name}`"), *to_rst(module.__doc__ or ""), *directive("py:module", name)]
    for member in module.__all__:
        lines += entry(module, member)
    return lines


def entry(module: ModuleType, name: str) -> list[str]:
    """The directive that documents a name of a module."""
    item, full = getattr(module, name), f"{module.__name__}.{name}"
    if kind(item) == "function":
        return directive("autofunction", full)
    if kind(item) == "data":
        return directive(
            "py:data", name, constant(module, name), module=module.__name__, type=_type(item)
        )
    # which Python documents as "Alias for field number 0"
    own = field_names(item) if issubclass(item, tuple) else ()
    return directive("autoclass", full, members="", exclude_members=", ".join(own) or None)


def constant(module: ModuleType, name: str) -> list[str]:
    """What a constant is: the comment of its assignment, and what it contains if it is a table or a
    number.
    """
    item, said = getattr(module, name), comment(module, name)
    lines = [inline(said), ""] if said else []
    if isinstance(item, dict):
        lines += [f"By name: {', '.join(map(literal, item))}.", ""]
    elif isinstance(item, (int, float, str)):
        lines += [f"The value is {literal(repr(item))}.", ""]
    elif not isinstance(item, tuple):  # another name of a type
        lines += [f"Another name of {literal(_plain_type(item))}.", ""]
    return lines


def comment(module: ModuleType, name: str) -> str:
    """The comment lines directly above the assignment of a name, or the one behind it; "" without
    one.

    Raises:
        LookupError: the name is neither assigned in the module nor imported by `from ... import` of
        another one.
    """
    lines = Path(inspect.getsourcefile(module) or "").read_text("utf-8").split("\n")
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.ImportFrom) and any(
            (one.asname or one.name) == name for one in node.names
        ):
            real = next(one.name for one in node.names if (one.asname or one.name) == name)
            return comment(importlib.import_module(node.module or ""), real)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return _above(lines, node.lineno - 1) or _behind(
                lines[(node.end_lineno or node.lineno) - 1]
            )
    raise LookupError(f"{module.__name__} does not assign {name}")


def _above(lines: list[str], index: int) -> str:
    found: list[str] = []
    while index and lines[index - 1].startswith("# ") and not lines[index - 1].startswith("# ---"):
        index -= 1
        found.insert(0, lines[index][2:])
    return " ".join(found)


def _behind(line: str) -> str:
    _, mark, said = line.rpartition("  # ")
    return said.strip() if mark else ""


def _type(item: Any) -> str | None:
    return type(item).__name__ if isinstance(item, (dict, int, float, str, tuple)) else None


def _plain_type(item: Any) -> str:
    return str(item).replace("collections.abc.", "").replace("typing.", "")
