"""A row of a table: what happens to some arguments of vLLM. Arguments are read by the table's
rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

log = logging.getLogger("pagedjax.vllm_names")

What = Literal["taken", "changes nothing", "refused"]


class Row(NamedTuple):
    """What happens to arguments.

    Attributes:
        names: the arguments, as vLLM has them.
        what: "taken" has the meaning that vLLM gives it; "changes nothing" is accepted and
            logged; "refused" is an error.
        text: for the reader. Of a refused argument it ends the error's sentence and names the
            alternative.
        becomes: (name, value) -> options of this project, for what is taken under another name or
            with other values. It may raise ValueError with the part of the message after "name is
            value; ".
        asks_nothing: values beside None, False, 0 and what is empty that ask for nothing, so they
            are not refused.
        warns: a value that asks for something may break what a user expects.
    """

    names: tuple[str, ...]
    what: What
    text: str
    becomes: Callable[[str, Any], Mapping[str, Any]] | None = None
    asks_nothing: tuple[Any, ...] = ()
    warns: bool = False


def taken(
    names: str, text: str, becomes: Callable[[str, Any], Mapping[str, Any]] | None = None
) -> Row:
    return Row(tuple(names.split()), "taken", text, becomes)


def nothing(names: str, text: str, *asks_nothing: Any, warns: bool = False) -> Row:
    return Row(
        tuple(names.split()), "changes nothing", text, asks_nothing=asks_nothing, warns=warns
    )


def refused(names: str, text: str, *asks_nothing: Any) -> Row:
    return Row(tuple(names.split()), "refused", text, asks_nothing=asks_nothing)


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    return {name: row for row in rows for name in row.names}


def read(
    given: Mapping[str, Any], table: Mapping[str, Row], error: type[Exception] = ValueError
) -> dict[str, Any]:
    """The arguments as options of this project. Names that are not in the table stay as they are.

    Raises:
        ValueError, or `error`: an argument that is refused, or a value that its row refuses.
        ValueError: two arguments are the same option.
    """
    found: dict[str, Any] = {name: value for name, value in given.items() if name not in table}
    info, warnings = [], []
    for name, value in given.items():
        if name not in table:
            continue
        row = table[name]
        asks = not _asks_nothing(value, row)
        if row.what == "refused" and asks:
            raise error(f"{name} is {value!r:.80}; {row.text}")
        if row.what == "changes nothing":
            (warnings if row.warns and asks else info).append(f"{name} ({row.text})")
        if row.what == "taken":
            options = _options(name, value, row, error)
            for option in options:
                if option in found:
                    raise ValueError(
                        f"{name} is vLLM's name of {option}, and both are given; leave one of them "
                        "out"
                    )
            found |= options
            log.debug(
                "%s is taken as %s", name, ", ".join(options) or "the default"
            )  # no value: one may be secret
    for level, lines in ((logging.INFO, info), (logging.WARNING, warnings)):
        if lines:
            log.log(level, "accepted, and changes nothing: %s", "; ".join(lines))
    return found


def _options(name: str, value: Any, row: Row, error: type[Exception]) -> dict[str, Any]:
    if row.becomes is None:
        return {} if value is None else {name: value}  # vLLM's None leaves the choice to the engine
    try:
        return dict(row.becomes(name, value))
    except ValueError as reason:
        raise error(f"{name} is {value!r:.80}; {reason}") from None


def _asks_nothing(value: Any, row: Row) -> bool:
    """Whether a value is off, or vLLM's default: some scripts give all arguments."""
    off = value is None or (
        isinstance(value, (int, float, str, list, tuple, dict, set)) and not value
    )
    return off or any(type(value) is type(one) and value == one for one in row.asks_nothing)
