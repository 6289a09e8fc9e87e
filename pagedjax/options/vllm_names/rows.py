"""The rows of a table: what happens to some arguments of vLLM. `read` applies a table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

log = logging.getLogger("pagedjax.vllm_names")

Effect = Literal["taken", "changes nothing", "refused"]


class Row(NamedTuple):
    """What happens to arguments.

    Attributes:
        names: the arguments, as vLLM has them.
        effect: "taken" has the meaning that vLLM gives it; "changes nothing" is accepted and
            logged; "refused" is an error.
        text: for the reader. Of a refused argument it ends the error's sentence and names the
            alternative.
        becomes: (name, value) -> options of this project, for an argument that has another name or
            other values here. It may raise ValueError with the part of the message after "name is
            value; ".
        asks_nothing: values that ask for nothing, so they are not refused. None, False, 0 and
            empty values are not listed; they ask for nothing of any argument.
        warns: a value that asks for something may break what a user expects.
    """

    names: tuple[str, ...]
    effect: Effect
    text: str
    becomes: Callable[[str, Any], Mapping[str, Any]] | None = None
    asks_nothing: tuple[Any, ...] = ()
    warns: bool = False


def translation(
    names: str, text: str, becomes: Callable[[str, Any], Mapping[str, Any]] | None = None
) -> Row:
    return Row(tuple(names.split()), "taken", text, becomes)


def no_effect(names: str, text: str, *asks_nothing: Any, warns: bool = False) -> Row:
    return Row(
        tuple(names.split()), "changes nothing", text, asks_nothing=asks_nothing, warns=warns
    )


def refusal(names: str, text: str, *asks_nothing: Any) -> Row:
    return Row(tuple(names.split()), "refused", text, asks_nothing=asks_nothing)


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """The row of each argument, by its name."""
    return {name: row for row in rows for name in row.names}


def read(
    arguments: Mapping[str, Any], table: Mapping[str, Row], error: type[Exception] = ValueError
) -> dict[str, Any]:
    """Read arguments of vLLM -> options of this project; log arguments that change nothing.

    Names that are not in the table stay as they are.

    Raises:
        ValueError, or `error`: an argument that is refused, or a value that its row refuses.
        ValueError: two arguments are the same option.
    """
    options: dict[str, Any] = {
        name: value for name, value in arguments.items() if name not in table
    }
    without_effect: dict[int, list[str]] = {logging.INFO: [], logging.WARNING: []}
    for name, value in arguments.items():
        if name not in table:
            continue
        row = table[name]
        asks_something = _asks_something(value, row)
        if row.effect == "refused" and asks_something:
            raise error(f"{name} is {value!r:.80}; {row.text}")
        if row.effect == "changes nothing":
            level = logging.WARNING if row.warns and asks_something else logging.INFO
            without_effect[level].append(f"{name} ({row.text})")
        if row.effect == "taken":
            translated = _options(name, value, row, error)
            for option in translated:
                if option in options:
                    raise ValueError(
                        f"{name} is vLLM's name of {option}, and both are given; leave one of them "
                        "out"
                    )
            options |= translated
            # No value is logged: it may be secret
            log.debug("%s is taken as %s", name, ", ".join(translated) or "the default")
    for level, lines in without_effect.items():
        if lines:
            log.log(level, "accepted, and changes nothing: %s", "; ".join(lines))
    return options


def _options(name: str, value: Any, row: Row, error: type[Exception]) -> dict[str, Any]:
    if row.becomes is None:
        return {} if value is None else {name: value}  # vLLM's None leaves the choice to the engine
    try:
        return dict(row.becomes(name, value))
    except ValueError as reason:
        raise error(f"{name} is {value!r:.80}; {reason}") from None


def _asks_something(value: Any, row: Row) -> bool:
    """Whether a value is neither off nor vLLM's default: some scripts give all arguments."""
    if value is None:
        return False
    if isinstance(value, (int, float, str, list, tuple, dict, set)) and not value:
        return False
    return not any(
        type(value) is type(neutral) and value == neutral for neutral in row.asks_nothing
    )
