"""An answer of OpenAI's Responses API: its items, and the events of its stream.

`Answer` makes both from pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pagedjax.server import continuation
from pagedjax.text.tools.reader import Piece

JSON = dict[str, Any]
_ONLY_PART = {"content_index": 0}  # a message has one part


class Answer:
    """A response under construction: `response` is its JSON so far, events tell how it grows.

    Args:
        head: the fields of the response that do not change.
    """

    def __init__(self, head: JSON) -> None:
        self.response: JSON = {**head, "status": "in_progress", "output": []}
        self._number = 0  # of the next event
        self._open = False  # the last item is not complete

    def begin(self) -> Iterator[JSON]:
        """Yield the first events."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._snapshot())

    def push(self, pieces: Iterable[Piece]) -> Iterator[JSON]:
        """Add new text and calls; yield their events."""
        for piece in pieces:
            if piece.name is not None:
                yield from self._close("completed")
                call = {
                    "type": "function_call",
                    "call_id": piece.id,
                    "name": piece.name,
                    "arguments": "",
                }
                yield from self._add("fc", call)
            elif piece.call is None and not self._open:  # no text follows a call
                yield from self._add("msg", {"type": "message", "role": "assistant", "content": []})
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self._last_item["content"].append(part)
                yield self._item_event("response.content_part.added", part=dict(part), **_ONLY_PART)
            if not piece.text:
                continue
            if piece.call is None:
                self._last_item["content"][0]["text"] += piece.text
                yield self._item_event(
                    "response.output_text.delta", delta=piece.text, logprobs=[], **_ONLY_PART
                )
            else:
                self._last_item["arguments"] += piece.text
                yield self._item_event("response.function_call_arguments.delta", delta=piece.text)

    def end(self, reason: str, usage: JSON, time: int) -> Iterator[JSON]:
        """End the answer; yield the last events.

        Args:
            reason: a finish reason, such as "stop" or "length".
            time: when the answer ended, in seconds since 1970.
        """
        status = "completed" if reason == "stop" else "incomplete"
        yield from self._close(status)
        self.response |= {"status": status, "usage": usage}
        if reason == "stop":
            self.response["completed_at"] = time
        else:
            # OpenAI names only two reasons: whatever else cut the answer is the second one
            cut_by = "max_output_tokens" if reason == "length" else "content_filter"
            self.response["incomplete_details"] = {"reason": cut_by}
        yield self._event(f"response.{status}", response=self._snapshot())

    def failure(self, message: str) -> JSON:
        """The event of an error of the server."""
        return self._event("error", code="server_error", message=message, param=None)

    @property
    def _last_item(self) -> JSON:
        return self.response["output"][-1]

    @property
    def _last_index(self) -> int:
        return len(self.response["output"]) - 1

    def _add(self, prefix: str, item: JSON) -> Iterator[JSON]:
        """Add an item; yield its event."""
        self.response["output"].append(
            {"id": f"{prefix}_{continuation.new_id()}", "status": "in_progress", **item}
        )
        self._open = True
        copy = dict(self._last_item)
        if "content" in item:
            copy["content"] = []
        yield self._event("response.output_item.added", output_index=self._last_index, item=copy)

    def _close(self, status: str) -> Iterator[JSON]:
        """Complete the last item, if it is open; yield the events of its end."""
        if not self._open:
            return
        self._open = False
        item = self._last_item
        if item["type"] == "message":
            part = item["content"][0]
            yield self._item_event(
                "response.output_text.done", text=part["text"], logprobs=[], **_ONLY_PART
            )
            yield self._item_event("response.content_part.done", part=dict(part), **_ONLY_PART)
        else:
            yield self._item_event(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
            )
        item["status"] = status
        yield self._event(
            "response.output_item.done", output_index=self._last_index, item=dict(item)
        )

    def _item_event(self, kind: str, **fields: Any) -> JSON:
        """An event of the last item."""
        item_id = self._last_item["id"]
        return self._event(kind, item_id=item_id, output_index=self._last_index, **fields)

    def _event(self, kind: str, **fields: Any) -> JSON:
        """Make the next event."""
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _snapshot(self) -> JSON:
        return {**self.response, "output": list(self.response["output"])}
