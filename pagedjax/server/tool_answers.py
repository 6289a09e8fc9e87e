"""Calls of tools in answers, in OpenAI's format.

The functions are pure, except that a call gets an id (`continuation.ids`).
"""

from __future__ import annotations

from typing import Any

from pagedjax.server import continuation
from pagedjax.text.outputs import CompletionOutput
from pagedjax.text.tools.formats import CallFormat
from pagedjax.text.tools.reader import CallReader, read

JSON = dict[str, Any]


def message(output: CompletionOutput, form: CallFormat) -> tuple[JSON, str]:
    """(the content and the calls of a whole answer, why it ended)."""
    text, calls, complete = read(output.text, form, continuation.ids())
    if not calls:
        return {"content": text}, output.finish_reason
    tool_calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    reason = _reason(output.finish_reason, complete)
    return {"content": text or None, "tool_calls": tool_calls}, reason


def delta(reader: CallReader, text: str, reason: str | None) -> tuple[JSON, str | None]:
    """(the delta of a stream for the next text of an answer, why the answer ended).

    A call's id and name come once.
    """
    pieces = reader.push(text)
    if reason is not None:
        pieces += reader.finish()
    fields: JSON = {}
    content = "".join(piece.text for piece in pieces if piece.call is None)
    if content:
        fields["content"] = content
    calls: dict[int, JSON] = {}
    for piece in pieces:
        if piece.call is None:
            continue
        call = calls.setdefault(piece.call, {"index": piece.call, "function": {}})
        if piece.name is not None:
            call |= {"id": piece.id, "type": "function", "function": {"name": piece.name}}
        call["function"]["arguments"] = call["function"].get("arguments", "") + piece.text
    if calls:
        fields["tool_calls"] = list(calls.values())
    if reason is not None:
        reason = _reason(reason, reader.num_calls > 0 and reader.complete)
    return fields, reason


def _reason(reason: str, complete: bool) -> str:
    """Why the answer ended: one that stops by itself after a call waits for the call's result."""
    return "tool_calls" if reason == "stop" and complete else reason
