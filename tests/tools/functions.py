"""Tools and calls in OpenAI's format."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    """Returns the definition of a tool."""
    return {"type": "function", "function": {"name": name, **fields}}


def added_tokens(*texts: str) -> list[AddedToken]:
    """Returns marks of calls as tokens that a vocabulary gets."""
    return [AddedToken(text, normalized=False) for text in texts]


def call(arguments: Any, name: str = "f", call_id: str = "c1") -> dict[str, Any]:
    """Returns a model's call of it."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
