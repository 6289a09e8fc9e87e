"""The text of tokens for the page, if a tokenizer is given.

A recording has token ids, never text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagedjax.viewer.drafts import token_list
from pagedjax.viewer.picture import Frame, Picture, apply

Decode = Callable[[Sequence[int]], str]  # token ids -> text, as a tokenizer's `decode`
REPLACEMENT = "\ufffd"  # the result of decoding an incomplete character
# Tokens that may wait for the rest of a character: more than any character has bytes
MAX_PENDING = 16


def generated(frames: Iterable[Frame]) -> dict[int, list[int]]:
    """Returns the token ids that each request sampled, by its number.

    Beams have none, because their past changes.
    """
    tokens: dict[int, list[int]] = {}
    picture = Picture()
    for frame in frames:
        picture = apply(picture, frame)
        for row, sampled in zip(picture.rows, frame.get("sampled", ()), strict=False):
            if sampled is not None:
                tokens.setdefault(row[0], []).extend(token_list(sampled))
    return tokens


def beamed(frames: Iterable[Frame]) -> set[int]:
    """Returns the token ids with which beams continued."""
    return {
        entry[3] for frame in frames for entry in frame.get("after", ()) if entry[0] == "beamed"
    }


def texts(
    frames: Sequence[Frame], prompts: Mapping[int, Sequence[int]], decode: Decode
) -> dict[str, Any]:
    """Returns the data that the page needs to show text.

    Returns:
        words: the text of each single token id; fixes: by request number and position in its
            output, the text of a token that differs there, because a character needs several
            tokens; labels: prompts by request number.
    """
    outputs = generated(frames)
    sequences = (*outputs.values(), *prompts.values())
    token_ids = {token for ids in sequences for token in ids} | beamed(frames)
    words = {token: decode([token]) for token in sorted(token_ids)}
    fixes: dict[int, dict[int, str]] = {}
    for n, ids in outputs.items():
        for i, piece in enumerate(pieces(decode, ids)):
            if piece != words[ids[i]]:
                fixes.setdefault(n, {})[i] = piece
    labels = {n: decode(ids) for n, ids in prompts.items()}
    return {"words": words, "fixes": fixes, "labels": labels}


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Returns, for each token, the text that becomes final with it.

    The pieces join to the whole text.
    """
    texts: list[str] = []
    # decode what follows `begin`, with and without what follows `read`
    begin = 0
    read = 0
    for end in range(1, len(ids) + 1):
        text_before = decode(ids[begin:read])
        text_after = decode(ids[begin:end])
        waits = text_after.endswith(REPLACEMENT) and end - read < MAX_PENDING and end < len(ids)
        if waits or len(text_after) < len(text_before):
            texts.append("")
            continue
        texts.append(text_after[len(text_before) :])
        begin = read
        read = end
    return texts
