"""vLLM's mappings in place of a prompt, and prompts of which only the last tokens are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TEXT = "prompt"
TOKENS = "prompt_token_ids"


def text_and_prompt(prompt: Mapping[str, Any]) -> tuple[str | None, Any]:
    """(the text or None, the prompt) of a mapping; the prompt is its token ids, or else its text.

    Args:
        prompt: a mapping with "prompt", "prompt_token_ids" or both.

    Raises:
        ValueError: a mapping with neither, or with something else.
    """
    for key, value in prompt.items():
        if key not in (TEXT, TOKENS) and value is not None:
            remedy = "models here take text alone"
            if key == "cache_salt":
                remedy = "use SamplingParams(cache_salt=...)"
            raise ValueError(f"a prompt has {key!r}; {remedy}")
    text = prompt.get(TEXT)
    tokens = prompt.get(TOKENS)
    if text is None and tokens is None:
        raise ValueError(f"a prompt is {prompt!r:.80}; a mapping has {TEXT!r} or {TOKENS!r}")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the {TEXT!r} of a prompt is {text!r:.80}; it must be a string")
    return text, text if tokens is None else tokens


def last_tokens(tokens: Sequence[int], truncate: int | None, max_model_len: int) -> Sequence[int]:
    """The last `truncate` tokens. None: all. -1: as many as leave room for one token of output."""
    if truncate is None:
        return tokens
    count = max_model_len - 1 if truncate == -1 else truncate
    return tokens[-count:]
