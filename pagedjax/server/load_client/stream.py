"""Reads streamed answers: events from bytes, and the content of one answer's events. Pure, without
a clock."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

MAX_LINE = 1 << 24  # bytes of one line of a stream


class EventParser:
    """The data of server-sent events, from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[str] = []
        self._after_cr = False

    def push(self, chunk: bytes) -> list[str]:
        """The data of the events that are complete with this chunk.

        Raises:
            ValueError: a line without end, or one that is not UTF-8.
        """
        if not chunk:
            return []
        if self._after_cr:  # \r ended a line already; \r\n is one end
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._line = re.split(rb"\r\n|\r|\n", self._line + chunk)
        if len(self._line) > MAX_LINE:
            raise ValueError(f"a line of the stream has more than {MAX_LINE} bytes")
        return [data for line in lines if (data := self._take(line.decode())) is not None]

    def _take(self, line: str) -> str | None:
        if not line:
            data = self._data
            self._data = []
            return "\n".join(data) if data else None
        name, _, value = line.removeprefix("\ufeff").partition(":")  # a comment has no name
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None


@dataclass
class AnswerReader:
    """The content of one answer so far. The caller gives the times."""

    chunks: list[float] = field(default_factory=list)  # times of chunks with output
    closed: float | None = None  # when the finish_reason arrived, or the end itself
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def take(self, data: str, at: float) -> None:
        """Read the data of one event, received at `at`.

        Raises:
            ValueError: the data is not a JSON object of the expected form.
        """
        if data == "[DONE]":
            self.closed = at if self.closed is None else self.closed
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"an event is {data!r:.80}, not an object")
        if chunk.get("error"):
            self.error = message_of(chunk)
            return
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        choices = chunk.get("choices") or []
        if not (isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)):
            raise ValueError(f"choices are {choices!r:.80}, not a list of objects")
        if any(map(carries_output, choices)):
            self.chunks.append(at)
        for choice in choices:
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
                self.closed = at

    def count(self, name: str) -> int | None:
        """The number of that name in `usage`; None if there is none."""
        value = self.usage.get(name)
        return value if type(value) is int else None

    @property
    def cached(self) -> int | None:
        """The number of cached prompt tokens; None if the server does not say."""
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if type(value) is int else None


def carries_output(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice has output: text, or a token without text.

    A role or the end alone is no output.
    """
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text")) or (
            "text" in choice and choice.get("finish_reason") is None
        )
    if any(value for name, value in delta.items() if name != "role"):
        return True
    return "content" in delta and "role" not in delta and choice.get("finish_reason") is None


def message_of(body: Any) -> str:
    """The message of an error's JSON: {"error": {"message": ...}} or similar."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)
