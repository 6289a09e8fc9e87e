"""Every command line, from its argparse parser: words, options, choices and texts.

Most commands make their parser where they read it. `parser_of` calls a command's `main` and takes
the parser at that moment, so that no command needs code for this.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from _generate.docstrings import to_rst
from _generate.rst import code, definitions, directive, inline, literal, title

ROOT = Path(__file__).parents[2]
FOLDERS = ("experiments", "pallas_kernels")
NO_COMMANDS = ("experiments.bench.peer_adapters",)  # started by experiments.bench.peers


class _Taken(BaseException):
    """Carries a parser out of a command. No `except Exception` of a command stops it."""


def modules() -> list[str]:
    """The modules that `python -m` runs as commands."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if '__name__ == "__main__"' in path.read_text("utf-8") and not name.startswith(
                NO_COMMANDS
            ):
                found.append(name)
    return sorted(found, key=lambda name: (name.count("."), name))


def parser_of(main: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser that a command's `main` reads its words with. Nothing else of the command runs.

    Raises:
        LookupError: it reads no words, or does something else first that ends it.
    """

    def take(self: argparse.ArgumentParser, *args: Any, **options: Any) -> NoReturn:
        raise _Taken(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", take):
        try:
            main([]) if inspect.signature(main).parameters else main()
        except _Taken as taken:
            return taken.args[0]
        except SystemExit as error:
            raise LookupError(
                f"{main.__module__}.main exits with {error.code!r} before it reads its words"
            ) from error
    raise LookupError(f"{main.__module__}.main reads no words of a command line")


def commands() -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """(command, its parser, a longer description) of `pagedjax`, of its commands, and of each
    module.
    """
    from pagedjax.commands import cli

    yield from _with_inner("pagedjax", cli.parser())
    for name in modules():
        module = importlib.import_module(name)
        yield f"python -m {name}", parser_of(module.main), module.__doc__ or ""


def page() -> list[str]:
    lines = title("Command lines")
    for name, parser, about in commands():
        lines += section(name, parser, about)
    return lines


def section(name: str, parser: argparse.ArgumentParser, about: str = "") -> list[str]:
    """A command: its usage, its text, and its words."""
    lines = [*title(f"`{name}`", "-"), *code(usage(name, parser).split("\n"))]
    lines += to_rst(about or _expanded(parser, parser.description))
    lines += directive("program", name)
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help is not argparse.SUPPRESS]
        if not shown or all(isinstance(one, argparse._HelpAction) for one in shown):
            continue
        if group.title not in ("positional arguments", "options"):
            lines += [
                f".. rubric:: {inline(group.title or '')}",
                "",
                *to_rst(group.description or ""),
            ]
        for action in shown:
            lines += _action(parser, action)
    return lines


def usage(name: str, parser: argparse.ArgumentParser) -> str:
    """The usage of a command, which names it as a user types it."""
    given, parser.prog = parser.prog, name
    width = mock.patch.dict("os.environ", {"COLUMNS": "100", "NO_COLOR": "1"})
    try:
        with width:
            head, *rest = parser.format_usage().removeprefix("usage: ").rstrip().split("\n")
            return "\n".join([head, *(line.removeprefix(" " * len("usage: ")) for line in rest)])
    finally:
        parser.prog = given


def _with_inner(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    yield name, parser, ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from _with_inner(f"{name} {word}", inner)


def _action(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    if isinstance(action, argparse._HelpAction):
        return []
    if isinstance(action, argparse._SubParsersAction):
        words = [(literal(one.dest), [inline(one.help or "")]) for one in action._choices_actions]
        return definitions(words)
    if action.option_strings:
        value = _value(action)
        names = ", ".join(f"{flag} {value}".strip() for flag in action.option_strings)
    else:
        names = action.metavar if isinstance(action.metavar, str) else action.dest
    return directive("option", names, _text(parser, action))


def _value(action: argparse.Action) -> str:
    """The word that stands for an option's value; "" for a switch."""
    if action.nargs == 0:
        return ""
    names = action.metavar if action.metavar is not None else action.dest.upper()
    shown = " ".join(names) if isinstance(names, tuple) else names
    return f"{shown} ..." if action.nargs in ("+", "*") else shown


def _text(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    help_text = _expanded(parser, action.help, action)
    parts = [inline(help_text[:1].upper() + help_text[1:]).rstrip(".") + "."] if help_text else []
    if action.choices is not None:
        parts.append(f"One of {', '.join(literal(str(one)) for one in action.choices)}.")
    if _tells(action) and "default" not in help_text:
        parts.append(f"The default is {literal(_shown(action.default))}.")
    return [" ".join(parts)] if parts else []


def _tells(action: argparse.Action) -> bool:
    """Whether a default is worth a sentence."""
    given = action.default
    return given not in ("", argparse.SUPPRESS, []) and given is not None and given is not False


def _shown(value: object) -> str:
    """A default, where a file of the repository is named from its top."""
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        return str(value.relative_to(ROOT))
    return str(value).replace(f"{ROOT}/", "")


def _expanded(
    parser: argparse.ArgumentParser, text: str | None, action: argparse.Action | None = None
) -> str:
    if text is None or text is argparse.SUPPRESS:
        return ""
    if action is not None:
        return parser._get_formatter()._expand_help(action)
    return text % {"prog": parser.prog} if "%(" in text else text
