"""Text -> calls, piece by piece while an answer is made."""

from __future__ import annotations

import random
import secrets
import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagedjax.text.outputs import ToolCall, pending_length
from pagedjax.text.tools.formats import CallFormat

LETTERS = string.ascii_letters + string.digits
SYSTEM = secrets.SystemRandom()


class Piece(NamedTuple):
    """New text of an answer, or of a call.

    call: index of the call; None for the answer's own text.
    id, name: with the first piece of a call.
    text: of the answer, or of the call's arguments.
    """

    call: int | None
    text: str
    id: str | None = None
    name: str | None = None


class CallReader:
    """Reads one answer.

    A grammar constrained the answer, so it has exactly the format's form, but it may have been cut
    anywhere. White space before the first call is dropped, so white space at the end of a text
    waits for what follows.
    """

    def __init__(self, form: CallFormat, ids: random.Random = SYSTEM) -> None:
        """ids: the ids of calls are drawn from it."""
        self._form = form
        self._ids = ids
        self._left = ""
        # A method's name without its "_": first "text". Then "plain"; or, for each call, "head",
        # "arguments" and "after_call".
        self._state = "text"
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.num_calls = 0  # calls that have begun
        self.complete = True  # no call is under way

    def push(self, text: str) -> list[Piece]:
        """The pieces that are final with the next text of the answer."""
        self._left += text
        return list(self._pieces(last=False))

    def finish(self) -> list[Piece]:
        """The pieces that are left at the end of the answer."""
        return list(self._pieces(last=True))

    def _pieces(self, last: bool) -> Iterator[Piece]:
        state = None
        while state != (self._state, len(self._left)):  # until nothing changes
            state = self._state, len(self._left)
            yield from getattr(self, f"_{self._state}")(last)

    def _text(self, last: bool) -> Iterator[Piece]:
        """Text before the calls."""
        form = self._form
        text = self._left
        if not form.trigger:  # a call is the whole answer, or there is none
            if text.startswith(form.before):
                self._state = "head"
            elif last or not form.before.startswith(text):
                self._state = "plain"
            return
        trigger_start = text.find(form.trigger)
        if trigger_start >= 0:
            ready = text[:trigger_start].rstrip()
            unread = text[trigger_start:]
            self._state = "head"
        else:
            num_pending = 0 if last else pending_length(text, form.trigger)
            ready = text[: len(text) - num_pending]
            if not last:  # white space before a call is dropped, and a call may follow
                ready = ready.rstrip()
            unread = text[len(ready) :]
        if ready:
            yield Piece(None, ready)
        self._left = unread

    def _plain(self, last: bool) -> Iterator[Piece]:
        """Text that no call follows."""
        if self._left:
            yield Piece(None, self._left)
        self._left = ""

    def _head(self, last: bool) -> Iterator[Piece]:
        form = self._form
        lead = (form.between if self.num_calls else form.begin) + form.before
        end = self._left.find(form.after, len(lead))
        if end < 0:
            return
        name = self._left[len(lead) : end]
        self._left = self._left[end + len(form.after) :]
        yield Piece(self.num_calls, "", _new_id(form.id_length, self._ids), name)
        self.num_calls += 1
        self.complete = False
        self._state = "arguments"

    def _arguments(self, last: bool) -> Iterator[Piece]:
        """A JSON object, up to the brace that closes it."""
        end = None
        for i, character in enumerate(self._left, start=1):
            if self._take(character):
                end = i
                self._state = "after_call"
                break
        ready = self._left[:end]
        self._left = "" if end is None else self._left[end:]
        if ready:
            yield Piece(self.num_calls - 1, ready)

    def _take(self, character: str) -> bool:
        """Take the object's next character. Returns whether the object ends with it."""
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _after_call(self, last: bool) -> Iterator[Piece]:
        """The rest of a call. Another one may follow."""
        form = self._form
        self.complete = self.complete or self._left.startswith(form.close)
        if self._left.startswith(form.close + form.between):
            self._left = self._left[len(form.close) :]
            self._state = "head"
        yield from ()  # a generator, as the other states are


def read(
    text: str, form: CallFormat, ids: random.Random = SYSTEM
) -> tuple[str, tuple[ToolCall, ...], bool]:
    """Read a whole answer. The ids of its calls are drawn from `ids`.

    Returns:
        (its own text, its calls, whether there are calls and the last one is complete).
    """
    reader = CallReader(form, ids)
    pieces = [*reader.push(text), *reader.finish()]
    answer = "".join(piece.text for piece in pieces if piece.call is None)
    return answer, calls_of(pieces), reader.num_calls > 0 and reader.complete


def calls_of(pieces: Sequence[Piece]) -> tuple[ToolCall, ...]:
    """The calls that pieces make together."""
    calls = []
    for first in pieces:
        if first.name is not None:
            text = "".join(piece.text for piece in pieces if piece.call == first.call)
            calls.append(ToolCall(first.id or "", first.name, text))
    return tuple(calls)


def _new_id(length: int | None, ids: random.Random) -> str:
    if length:
        return "".join(ids.choice(LETTERS) for _ in range(length))
    return f"call_{ids.getrandbits(96):024x}"
