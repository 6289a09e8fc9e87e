"""Reads a guide, and runs what it shows: python tests/docs/guide_blocks.py PAGE.md

In the order of the page, in the current folder:

- A block of any language that begins with `# NAME.py`, `# NAME.yaml` ... is written to that file.
- Other blocks of Python run in one namespace.
- A block of shell commands runs if the line before it is RUNS. Its commands are those of the
  repository.

Then each row of the guide's table of mistakes whose first cell is code is tried: it must fail, with
the text of the second cell, in which `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from pagedjax.commands import cli

RUNS = "<!-- runs -->"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w[\w.-]*\.\w+)\n")
COMMANDS = ("pagedjax ", "python -m ")
OF_SHELL = re.compile(r"[|&;<>*$`]")


class Block(NamedTuple):
    """line: of its first line in the page, from 1. file: the name of the file that it is, or "".
    runs: below RUNS.
    """

    line: int
    language: str
    source: str
    file: str
    runs: bool


class Mistake(NamedTuple):
    """A row of the table: what is done (code without backticks), the text of the error, what to do
    instead.
    """

    action: str
    says: str
    instead: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    parts = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        name = NAMED.match(match[2])
        runs = before.rstrip("\n").endswith(RUNS)
        parts.append(
            Block(before.count("\n") + 2, match[1], match[2], name[1] if name else "", runs)
        )
    return parts


def mistakes(text: str) -> Iterator[Mistake]:
    """The rows of the section "Usual mistakes" whose first cell is one span of code."""
    _, _, section = text.partition("\n## Usual mistakes\n")
    for row in re.findall(r"^\|(.*)\|$", section.partition("\n## ")[0], re.MULTILINE):
        cells = [cell.strip() for cell in row.split(" | ")]
        if len(cells) == 3 and re.fullmatch(r"`[^`]+`", cells[0]):
            action, says, instead = cells
            yield Mistake(action.strip("`"), says.strip("`"), instead)


def commands(source: str) -> list[str]:
    """The commands of a block of shell, one a line, without comments and with continued lines
    joined.
    """
    lines = re.sub(r"\s*\\\n\s*", " ", source).splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def matches(says: str, error: str) -> bool:
    """Whether an error has the text of a guide. Line breaks do not count."""
    parts = map(re.escape, re.split(r"\.\.\.", " ".join(says.split())))
    return re.search(".*?".join(parts), " ".join(error.split())) is not None


def write(block: Block, folder: Path) -> None:
    """Writes the file that a block is. A table of values has no comments, so its name is left
    out.
    """
    source = block.source.partition("\n")[2] if block.file.endswith(".csv") else block.source
    (folder / block.file).write_text(source, "utf-8")


def run_here(command: str) -> tuple[object, str]:
    """Runs a command of the repository in this process -> (what it gives to `sys.exit`, what it
    prints): a process of its own takes seconds to import what the command needs.
    """
    status: object = None
    module, *words = shlex.split(command.removeprefix("python -m "))
    output = io.StringIO()
    before = sys.argv
    sys.argv = [module, *words]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            if module == "pagedjax":
                status = cli.main(words)
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = before
    return status, output.getvalue()


def run_shell(command: str) -> tuple[int, str]:
    """Runs a line of shell, where `python` and `pagedjax` are those of this interpreter and this
    repository; engines of `pagedjax` are compiled quickly.
    """
    python = f'"{sys.executable}"'
    words = re.sub(r"^((?:\w+=\S+ )*)pagedjax(?= )", rf"\1{python} -m tests.quickly", command)
    words = re.sub(r"^((?:\w+=\S+ )*)python(?= )", rf"\1{python}", words)
    child = subprocess.run(["bash", "-euc", words], capture_output=True, text=True, timeout=500)
    return child.returncode, child.stdout + child.stderr


def run_commands(source: str) -> None:
    """Runs the commands of a block; each must end with 0."""
    for command in commands(source):
        is_plain = command.startswith(COMMANDS) and not OF_SHELL.search(command)
        status, output = run_here(command) if is_plain else run_shell(command)
        print(output[-4000:])
        assert not status, f"{command!r} ends with {status}"


def error_of_command(action: str) -> str:
    """What a command prints, which must fail."""
    status, output = run_here(action)
    assert status, f"{action!r} does not fail"
    return output


def error_of(action: str, space: dict[str, object]) -> str:
    """The text of the error of a mistake, which must fail."""
    if action.startswith(COMMANDS):
        return error_of_command(action)
    try:
        exec(compile(action, "mistake", "exec", dont_inherit=True), space)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{action!r} does not fail")


def run(path: Path) -> None:
    """Runs a page in the current folder.

    Raises:
        AssertionError: a command fails, or a mistake does not fail as the page says. Errors of its
        Python are raised.
    """
    text = path.read_text("utf-8")
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    space = vars(module)
    for block in blocks(text):
        if block.file:
            write(block, Path())
        elif block.language == "python":
            print(f"--- line {block.line}", flush=True)
            exec(
                compile(
                    "\n" * (block.line - 1) + block.source, str(path), "exec", dont_inherit=True
                ),
                space,
            )
        elif block.runs:
            print(f"--- line {block.line}", flush=True)
            run_commands(block.source)
    wrong = []
    for action, says, _ in mistakes(text):
        error = error_of(action, space)
        print(f"--- {action}\n{error[-600:]}")
        if not matches(says, error):
            wrong.append(f"{action}\n  page: {says}\n  real: {error[-600:]}")
    assert not wrong, "\n".join(wrong)
    print("the guide ran")


if __name__ == "__main__":
    from tests import quickly

    quickly.compile_quickly()
    sys.path.insert(0, "")  # files that the page writes can be imported
    run(Path(sys.argv[1]))
