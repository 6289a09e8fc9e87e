"""What the messages of a conversation say, as text: a chat template prints whatever it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TEXT_PARTS = ("text", "input_text", "output_text")


def content_text(place: str, content: Any) -> str:
    """The text of a message's content; "" for None.

    Args:
        place: its name in errors, as `messages.0.content`.
        content: a text, None, or a list of parts as OpenAI's clients send it.

    Raises:
        ValueError: anything else, or a part that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ValueError(
            f"{place} is {content!r:.80}; it must be a text, or a list of parts of text"
        )
    return "".join(_part_text(f"{place}.{i}", part) for i, part in enumerate(content))


def _part_text(place: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"{place} is {part!r:.80}; a part is {{'type': 'text', 'text': ...}}")
    if part.get("type") not in TEXT_PARTS:
        raise ValueError(
            f"{place} has the type {part.get('type')!r:.80}, and models here read text alone; send "
            "its text"
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{place}.text is {part.get('text')!r:.80}; it must be a text")
    return part["text"]


def for_template(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages with contents of text, and without fields that are None.

    Raises:
        ValueError: a message that is no mapping with a role and a content, or a content that is no
            text.
    """
    return [_for_template(f"messages.{i}", message) for i, message in enumerate(messages)]


def _for_template(place: str, message: Any) -> dict[str, Any]:
    if (
        not isinstance(message, Mapping)
        or "role" not in message
        or ("content" not in message and not message.get("tool_calls"))
    ):
        raise ValueError(f"the message {message!r} must be a mapping with 'role' and 'content'")
    if not isinstance(message["role"], str):
        raise ValueError(f"{place}.role is {message['role']!r:.80}; it must be a text, as 'user'")
    fields = {name: value for name, value in message.items() if value is not None}
    return {**fields, "content": content_text(f"{place}.content", message.get("content"))}
