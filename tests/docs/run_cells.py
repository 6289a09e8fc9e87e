"""Runs the code cells of a tutorial as a notebook does: python tests/docs/run_cells.py PAGE.md

All cells have one namespace. The value of a cell's last expression is shown, by its picture or by
its text. Lines in a traceback are those of the page.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FENCE = "```"
RICH = ("_repr_svg_", "_repr_html_")  # what a notebook calls before the text


class Cell(NamedTuple):
    line: int  # of its first line in the page, from 1
    source: str


def cells(text: str) -> list[Cell]:
    """The code cells of a page, without their options (`:tags: ...`).

    Raises:
        ValueError: a cell is not closed.
    """
    code_cells: list[Cell] = []
    lines = iter(enumerate(text.splitlines(), 1))
    for opened, line in lines:
        if not line.startswith(FENCE + "{code-cell}"):
            continue
        body: list[tuple[int, str]] = []
        for number, inner in lines:
            if inner.rstrip() == FENCE:
                break
            body.append((number, inner))
        else:
            raise ValueError(f"the cell of line {opened} has no end; close it with {FENCE}")
        while body and body[0][1].startswith(":"):
            del body[0]
        code_cells.append(
            Cell(body[0][0] if body else opened + 1, "\n".join(inner for _, inner in body))
        )
    return code_cells


def run(path: Path) -> int:
    """Run every cell of a page. Returns how many there were. An error of a cell is raised."""
    notebook = ModuleType("__main__")  # as in a notebook, what cells define is in the main module
    sys.modules["__main__"] = notebook
    space = vars(notebook)
    code_cells = cells(path.read_text("utf-8"))
    for cell in code_cells:
        tree = ast.increment_lineno(ast.parse(cell.source), cell.line - 1)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec", dont_inherit=True), space)
        if last is not None:
            show(
                eval(
                    compile(ast.Expression(last.value), str(path), "eval", dont_inherit=True), space
                )
            )
    return len(code_cells)


def show(value: Any) -> None:
    """Makes what a notebook would show, so that an error of it is an error here."""
    if value is None:
        return
    rich = [getattr(value, name)() for name in RICH if hasattr(value, name)]
    print(rich[0][:80] if rich and rich[0] else repr(value)[:2000])


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]))} cells ran")
