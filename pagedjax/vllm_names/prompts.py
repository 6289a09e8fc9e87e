"""vLLM's mappings in place of a prompt, and prompts of which only the last tokens are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TEXT, TOKENS = "prompt", "prompt_token_ids"


def text_and_prompt(prompt: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The text of a prompt, if it has one, and what its tokens come from: token ids, or the text.

    Args:
        prompt: a mapping with "prompt", "prompt_token_ids" or both.

    Raises:
        ValueError: a mapping with neither, or with something else.
    """
    others = [
        key for key, value in prompt.items() if key not in (TEXT, TOKENS) and value is not None
    ]
    if others:
        remedy = (
            "use SamplingParams(cache_salt=...)"
            if others[0] == "cache_salt"
            else "models here take text alone"
        )
        raise ValueError(f"a prompt has {others[0]!r}; {remedy}")
    text, tokens = prompt.get(TEXT), prompt.get(TOKENS)
    if text is None and tokens is None:
        raise ValueError(f"a prompt is {prompt!r:.80}; a mapping has {TEXT!r} or {TOKENS!r}")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the {TEXT!r} of a prompt is {text!r:.80}; it must be a string")
    return text, text if tokens is None else tokens


def kept(tokens: Sequence[int], truncate: int | None, max_model_len: int) -> Sequence[int]:
    """The last `truncate` tokens; of -1, as many as leave room for one token of output."""
    if truncate is None:
        return tokens
    return tokens[-(max_model_len - 1 if truncate == -1 else truncate) :]
