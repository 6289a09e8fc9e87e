"""The text of tokens, where somebody can tell it. The scheduler never saw any; a recording has token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagedjax.viewer.picture import Frame, Picture, apply

Decode = Callable[[Sequence[int]], str]  # token ids -> text, as a tokenizer's `decode`
REPLACEMENT = "\ufffd"  # what bytes that are not (yet) a character decode to
HELD = 16  # tokens held back at most: more than any character has bytes


def generated(frames: Iterable[Frame]) -> dict[int, list[int]]:
    """Token ids that each request sampled, by its number. Beams have none: their past changes."""
    tokens: dict[int, list[int]] = {}
    picture = Picture()
    for frame in frames:
        picture = apply(picture, frame)
        for row, token in zip(picture.rows, frame.get("sampled", ()), strict=False):
            if token is not None:
                tokens.setdefault(row[0], []).append(token)
    return tokens


def beamed(frames: Iterable[Frame]) -> set[int]:
    """Token ids that beams went on with."""
    return {entry[3] for frame in frames for entry in frame.get("after", ()) if entry[0] == "beamed"}


def texts(frames: Sequence[Frame], prompts: Mapping[int, Sequence[int]], decode: Decode) -> dict[str, Any]:
    """What the page has to know to show text.

    Returns:
        words: the text of each token id by itself; fixes: by request number and place in its output, the text of a
        token that is another there, because a character needs several tokens; labels: prompts by request number.
    """
    outputs = generated(frames)
    known = {token for ids in (*outputs.values(), *prompts.values()) for token in ids} | beamed(frames)
    words = {token: decode([token]) for token in sorted(known)}
    fixes: dict[int, dict[int, str]] = {}
    for n, ids in outputs.items():
        for i, piece in enumerate(pieces(decode, ids)):
            if piece != words[ids[i]]:
                fixes.setdefault(n, {})[i] = piece
    labels = {n: decode(ids) for n, ids in prompts.items()}
    return {"words": words, "fixes": fixes, "labels": labels}


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text that is final with each token and was not before; joined, the text of all of them."""
    found: list[str] = []
    begin = read = 0  # decode what follows `begin`, with and without what follows `read`
    for end in range(1, len(ids) + 1):
        before, after = decode(ids[begin:read]), decode(ids[begin:end])
        waits = after.endswith(REPLACEMENT) and end - read < HELD and end < len(ids)
        if waits or len(after) < len(before):
            found.append("")
            continue
        found.append(after[len(before) :])
        begin, read = read, end
    return found
