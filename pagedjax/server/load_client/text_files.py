"""The files of recorded loads: traces in CSV, and prompts one a line.

Programs of many systems write them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
USER = "User"  # a column that a trace may have
BYTE_ORDER_MARK = "\ufeff"


class TraceRow(NamedTuple):
    at: datetime
    prompt_tokens: int
    output_tokens: int
    user: str = ""


def trace_rows(
    file: str, content: str, offset: int = 0, limit: int | None = None, hint: str = ""
) -> list[TraceRow]:
    """The rows of a recorded service, by time: `limit` of them from row `offset` of the file on.

    Args:
        file: its name in errors.
        hint: where traces are, for the error of a file that is none.

    Raises:
        ValueError: a column is missing or there twice, or a row cannot be read; names the line.
            Lengths are decimal and at least 0; times are of ISO 8601, all with a time zone or none.
    """
    rows: list[TraceRow] = []
    for index, (line, fields) in enumerate(records(file, content, COLUMNS, hint)):
        if limit is not None and index >= offset + limit:
            break
        if index < offset:
            continue
        row = _row(f"{file}, line {line}", fields)
        if rows and (row.at.tzinfo is None) != (rows[0].at.tzinfo is None):
            zone = "no time zone" if row.at.tzinfo is None else "a time zone"
            raise ValueError(
                f"{file}, line {line}: TIMESTAMP {fields[0]!r} has {zone}, unlike those before it; "
                "write all times alike"
            )
        rows.append(row)
    return sorted(rows, key=lambda row: row.at)


def records(
    file: str, content: str, columns: Sequence[str], hint: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, the fields of some columns) of each record of a CSV file with a header. The last
    field is that of the column USER; "" without it.

    Raises ValueError like `trace_rows`.
    """
    reader = csv.reader(io.StringIO(content.removeprefix(BYTE_ORDER_MARK), newline=""))
    try:
        names = next(reader, [])
        form = f"a trace is CSV with the columns {','.join(columns)}"
        if hint:
            form += f". {hint}"
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"{file} has no column {', '.join(missing)}; {form}")
        repeated = [name for name in (*columns, USER) if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{file} has more than one column {', '.join(repeated)}; {form}")
        positions = [names.index(name) for name in columns]
        for record in reader:
            if not record:  # a blank line
                continue
            if len(record) != len(names):
                raise ValueError(
                    f"{file}, line {reader.line_num}: {len(record)} fields, and the file has "
                    f"{len(names)} columns"
                )
            user = record[names.index(USER)] if USER in names else ""
            yield reader.line_num, [*(record[position] for position in positions), user]
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: {error}") from None


def _row(place: str, fields: list[str]) -> TraceRow:
    """The row of these fields; `place` is its file and line, for errors."""
    time, *lengths, user = fields
    try:
        if not re.match(r"\d{4}-\d\d-\d\d", time, re.ASCII):  # 20231116 may be any number
            raise ValueError(time)
        at = datetime.fromisoformat(time)
    except ValueError:
        raise ValueError(
            f"{place}: TIMESTAMP is {time!r:.80}; write a time of ISO 8601, such as "
            "2023-11-16 18:17:03.9799600"
        ) from None
    for name, text in zip(COLUMNS[1:], lengths, strict=True):
        if not re.fullmatch(r"[0-9]{1,12}", text.strip(" ")):
            raise ValueError(
                f"{place}: {name} is {text!r:.80}; it must be a number of tokens, such as 374"
            )
    prompt, output = (int(text) for text in lengths)
    return TraceRow(at, prompt, output, user)


def lines(content: str) -> list[str]:
    """The lines of a text, without white space around them and without blank ones.

    Only line feeds and carriage returns end a line: a prompt may have U+2028 or a form feed in it.
    """
    text = with_line_feeds(content)
    return [line.strip() for line in text.split("\n") if line.strip()]


def paragraphs(content: str) -> list[str]:
    """Texts with blank lines between them."""
    return [part.strip() for part in with_line_feeds(content).split("\n\n") if part.strip()]


def with_line_feeds(content: str) -> str:
    """The text without a byte order mark, with line feeds at the ends of lines."""
    return content.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n").replace("\r", "\n")
