"""Odd traces and prompt files of both programs that read them: read rightly, or refused with the
line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from hypothesis import strategies as st

from experiments.core import workloads
from pagedjax.server.load_client import plan
from pagedjax.server.load_client.client import Target, body_of
from pagedjax.server.load_client.text_files import BYTE_ORDER_MARK, COLUMNS, trace_rows
from tests import drawn
from tests.refusals import refused

HEADER = ",".join(COLUMNS) + "\n"
FIRST_ROW = "2023-11-16 18:17:03,5,6\n"


def of_the_load_client(content: str) -> Any:
    return plan.read_trace("t.csv", content, None, 1.0)


def of_experiments(content: str) -> Any:
    return workloads.read_recorded(workloads.Trace("trace", "t.csv"), content)[:4]


READERS: list[Callable[[str], Any]] = [of_the_load_client, of_experiments]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "content",
    [
        HEADER + FIRST_ROW + "2023-11-16 18:17:05.5,0,1\n",
        BYTE_ORDER_MARK + HEADER + FIRST_ROW + "2023-11-16 18:17:05.5,0,1\n",
        HEADER.replace("\n", "\r\n")
        + (FIRST_ROW + "2023-11-16 18:17:05.5,0,1\n").replace("\n", "\r\n"),
        # a blank line; not in the order of time
        HEADER + "\n" + "2023-11-16T18:17:05.500000,0,1\n" + FIRST_ROW,
        HEADER + '"2023-11-16 18:17:03",5,006\n"2023-11-16 18:17:05.5", 0,1',
        "note," + HEADER + '"two\nlines",' + FIRST_ROW + ",2023-11-16 18:17:05.5,0,1\n",
        HEADER + "2023-11-16 18:17:03+01:00,5,6\n2023-11-16T17:17:05.5Z,0,1\n",
    ],
)
def test_traces_are_read(read, content):
    times, prompts, outputs, users = read(content)
    assert (times, prompts, outputs, users) == ([0.0, 2.5], [5, 0], [6, 1], ["", ""])


def test_users_of_a_trace_are_sent():
    content = HEADER.replace("\n", ",User\n") + FIRST_ROW.replace("\n", ",ann\n")
    content += "2023-11-16 18:17:05,5,6,\n"
    load = plan.Load(trace="t.csv")
    target = Target("http://127.0.0.1:1")
    items = plan.make_plan(load, content).items
    bodies = [json.loads(body_of(load, target, "m", item)) for item in items]
    assert [body.get("user") for body in bodies] == ["ann", None]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "t.csv has no column TIMESTAMP, ContextTokens, GeneratedTokens; a trace is CSV"),
        (HEADER.replace("GeneratedTokens", "ContextTokens"), "t.csv has no column GeneratedTokens"),
        (
            HEADER.replace("\n", ",ContextTokens\n") + FIRST_ROW,
            "t.csv has more than one column ContextTokens",
        ),
        (HEADER, "t.csv has no requests"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(read, content, error):
    with refused(error):
        read(content)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("2023-11-16,-3,6", "ContextTokens is '-3'; it must be a number of tokens"),
        ("2023-11-16,3,-1", "GeneratedTokens is '-1'; it must be a number"),
        ("2023-11-16,1_000,1", "ContextTokens is '1_000'; it must be a number"),
        ("2023-11-16,1.5,1", "ContextTokens is '1.5'"),
        ("2023-11-16,1e3,1", "ContextTokens is '1e3'"),
        ("2023-11-16,٣,1", "ContextTokens is '٣'"),
        ("2023-11-16,,1", "ContextTokens is ''"),
        (f"2023-11-16,{'9' * 5000},1", "ContextTokens is '999"),
        ("1700158623.5,3,1", "TIMESTAMP is '1700158623.5'; write a time of ISO 8601"),
        ("45246.76,3,1", "TIMESTAMP is '45246.76'; write a time"),
        ("20231116,3,1", "TIMESTAMP is '20231116'; write a time"),
        ("2023W01,3,1", "TIMESTAMP is '2023W01'; write a time"),
        ("2023-11-16T17:17:05Z,3,1", "TIMESTAMP .* has a time zone, unlike those before"),
        ("2023-11-16,3", "2 fields, and the file has 3 columns"),
        ("2023-11-16,3,1,1", "4 fields, and the file has 3 columns"),
        ('"' + "x" * 200_000 + '",3,1', "field larger than field limit"),
    ],
)
def test_odd_rows_are_refused_with_their_line(read, row, error):
    with refused(f"line 3: {error}"):
        read(f"{HEADER}{FIRST_ROW}{row}\n")


def prompts_of_the_load_client(content: str) -> list[str]:
    return plan.read_prompts("p.txt", content, None)


def prompts_of_experiments(content: str) -> list[str]:
    return workloads.read_prompts(workloads.Prompts("prompts", "p.txt"), content)


@pytest.mark.parametrize("read", [prompts_of_the_load_client, prompts_of_experiments])
def test_a_prompt_is_a_line_whatever_is_in_it(read):
    texts = ["one\u2028two", "three\x0cfour", "five\x85six", "seven\x0b\x1ceight\u2029"]
    for end in ("\n", "\r\n", "\r"):
        content = BYTE_ORDER_MARK + end.join(["", texts[0], "  ", *texts[1:], ""])
        assert read(content) == [*texts[:3], "seven\x0b\x1ceight"]
    with refused(r"p\.txt holds no prompts; write one a line"):
        read(BYTE_ORDER_MARK + " \r\n")


def test_paragraphs_of_any_system_are_prompts():
    spec = workloads.Prompts("prompts", "p.txt", split="paragraph")
    for end in ("\n", "\r\n", "\r"):
        assert workloads.read_prompts(spec, f"a{end}b{end}{end}c\u2028d{end}") == [
            "a\nb",
            "c\u2028d",
        ]


@drawn.given(
    100,
    4_000,
    st.lists(
        st.tuples(
            st.one_of(st.datetimes(timezones=st.none()).map(str), st.text(max_size=12)),
            st.one_of(st.integers(-5, 10**6).map(str), st.text(max_size=6)),
            st.one_of(st.integers(-5, 10**6).map(str), st.text(max_size=6)),
        ),
        max_size=4,
    ),
)
def test_any_trace_is_read_as_by_a_slow_reader_or_refused_with_its_line(rows):
    out = io.StringIO()
    csv.writer(out).writerows([COLUMNS, *rows])
    if not all(is_plain(*row) for row in rows):
        with refused(r"t\.csv, line \d+: "):
            trace_rows("t.csv", out.getvalue())
        return
    parsed = trace_rows("t.csv", out.getvalue())
    expected = [
        (datetime.fromisoformat(at), int(prompt), int(output), "") for at, prompt, output in rows
    ]
    assert [tuple(row) for row in parsed] == sorted(expected, key=lambda row: row[0])


def is_plain(at: str, prompt: str, output: str) -> bool:
    try:
        datetime.strptime(at[:10], "%Y-%m-%d")
        datetime.fromisoformat(at)
    except ValueError:
        return False
    digits = set("0123456789")
    return all(text.strip(" ") and set(text.strip(" ")) <= digits for text in (prompt, output))
