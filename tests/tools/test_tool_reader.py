"""Calls are read from text, in any pieces."""

from __future__ import annotations

import json

import pytest

from pagedjax.text.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, MISTRAL_SPACED
from pagedjax.text.tools.reader import CallReader, calls_of, read

FORMATS = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral spaced": MISTRAL_SPACED,
    "mistral args": MISTRAL_ARGS,
}
CALLS = [
    ("f", '{"a": "}]\\" </tool_call> [ARGS]\\\\"}'),
    ("f-2", "{}"),
    ("long_name", '{"x": [{"y": {}}, "ü"]}'),
]


def pieces(text: str, form, size: int):
    reader = CallReader(form)
    parts = [
        piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])
    ]
    return [*parts, *reader.finish()], reader


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("lead", ["", "Let me see. <tool> [TOOL\n", " \n"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_text_and_calls_are_the_same_in_any_pieces(form, lead, count):
    if form is LLAMA and lead:
        pytest.skip("a call is the whole answer")
    text = lead + form.text_of(CALLS[:count])
    for size in (1, 2, 3, 7, 1000):
        parts, reader = pieces(text, form, size)
        plain_text = "".join(piece.text for piece in parts if piece.call is None)
        assert plain_text == (lead.rstrip() if count else lead)
        assert [(call.name, call.arguments) for call in calls_of(parts)] == CALLS[:count]
        assert (reader.num_calls, reader.complete) == (count, True)
        assert len({call.id for call in calls_of(parts)}) == count


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_cut_answer_gives_the_start_of_a_call(form):
    text = form.text_of(CALLS)
    for end in range(len(text)):
        plain_text, calls, complete = read(text[:end], form)
        assert form is LLAMA or plain_text in ("", text[:end])
        assert [call.name for call in calls] == [name for name, _ in CALLS[: len(calls)]]
        for call, (_, arguments) in zip(calls, CALLS, strict=False):
            assert arguments.startswith(call.arguments)
        if complete:
            assert all(json.loads(call.arguments) is not None for call in calls)
    assert read(text, form)[2]


def test_text_that_is_no_call_stays_as_it_is():
    for text in ("", "a <tool_call", "<", "{", '{"name"', "x {}"):
        assert read(text, HERMES) == (text, (), False)
        assert read(text, LLAMA) == (text, (), False)


def test_mistral_templates_want_ids_of_nine_characters():
    (call,) = read(MISTRAL.text_of(CALLS[:1]), MISTRAL)[1]
    assert len(call.id) == 9
    assert call.id.isalnum()
