"""The load client reads streams that are cut anywhere and have any content."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from pagedjax.server.load_client.stream import AnswerReader, EventParser, carries_output, message_of
from tests import drawn
from tests.refusals import refused

STREAM = (
    '\ufeff: hello\r\nevent: x\nid: 7\ndata: {"a": "é€😀"}\r\n\r\n:\n\ndata:one\rdata: two\r\rdata\n\n'
    "data: [DONE]\n\ndata: unfinished"
).encode()
DATA = ['{"a": "é€😀"}', "one\ntwo", "", "[DONE]"]


def test_a_stream_may_be_cut_at_every_byte():
    for at in range(len(STREAM) + 1):
        events = EventParser()
        assert events.push(STREAM[:at]) + events.push(b"") + events.push(STREAM[at:]) == DATA, at
    events = EventParser()
    assert [data for i in range(len(STREAM)) for data in events.push(STREAM[i : i + 1])] == DATA


@drawn.given(
    30,
    100,
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=6
    ),
    st.data(),
)
def test_any_events_in_any_pieces_are_read_completely(texts, data):
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    raw = "".join(f": note{end}data: {text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    events = EventParser()
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [event for piece in pieces for event in events.push(piece)] == texts


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("pagedjax.server.load_client.stream.MAX_LINE", 10)
    with refused("more than 10 bytes"):
        EventParser().push(b"x" * 11)


def reading(*events) -> AnswerReader:
    reader = AnswerReader()
    for at, event in enumerate(events):
        reader.take(event if isinstance(event, str) else json.dumps(event), float(at))
    return reader


def text(content: str, reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}]}


def delta(reason: str | None = None, **content) -> dict:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": reason}]}


def test_chunks_count_when_they_carry_output_and_usage_counts_tokens():
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    usage["prompt_tokens_details"] = {"cached_tokens": 8}
    completion = reading(
        text("a"),
        text("bc"),
        text(""),
        text("", "length"),
        {"choices": [], "usage": usage},
        "[DONE]",
    )
    assert completion.chunks == [0.0, 1.0, 2.0]
    assert (completion.closed, completion.finish_reason) == (3.0, "length")
    assert [completion.count(name) for name in ("prompt_tokens", "completion_tokens")] == [9, 4]
    assert completion.cached == 8
    role = {"role": "assistant", "content": ""}
    chat = reading(
        delta(**role), delta(content="a"), delta(content="", reason=None), delta("stop"), "[DONE]"
    )
    assert (chat.chunks, chat.closed) == ([1.0, 2.0], 3.0)
    assert reading(delta(reasoning_content="hm")).chunks == [0.0]
    assert not carries_output({"delta": {}, "finish_reason": None})
    assert reading("[DONE]").closed == 0.0


KEYS = shlex.split("choices usage error delta text finish_reason content message")


VALUES = st.none() | st.integers() | st.text()


def test_errors_in_a_stream_are_read_in_several_forms():
    assert reading({"error": {"message": "out of blocks", "type": "x"}}).error == "out of blocks"
    assert reading({"error": "out of blocks"}).error == "out of blocks"
    assert message_of({"detail": "no such model"}) == "no such model"
    assert message_of([1]) == "[1]"
    for wrong in ("no json", "[1]", '{"choices": [3]}', '{"choices": {"a": 1}}'):
        with refused(r"."):
            reading(wrong)


@given(
    st.text()
    | st.recursive(
        VALUES, lambda inner: st.dictionaries(st.sampled_from(KEYS), inner) | st.lists(inner)
    )
)
@example(
    {
        "choices": [{"delta": None, "text": None, "finish_reason": 3}],
        "usage": {"completion_tokens": "5"},
    }
)
def test_invalid_events_raise_only_value_errors(event):
    with suppress(ValueError):
        reader = reading(event)
        assert reader.cached is None or isinstance(reader.cached, int)
