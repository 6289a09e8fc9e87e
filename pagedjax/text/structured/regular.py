"""Whether a regular expression allows a text that another one does not.

llguidance's own compiler answers this.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import numpy as np

from pagedjax.text.imports import imported
from pagedjax.text.tokenizer import byte_alphabet

END = 256  # the end of a text; the tokens before it are bytes


def first_byte_beyond(pattern: str, other_pattern: str) -> str | None:
    """The first byte of a text that `pattern` matches as a whole and `other_pattern` does not.

    Returns:
        "" for the empty text; None if there is no such text.

    Raises:
        ValueError: an expression cannot be read.
    """
    library = imported("llguidance")
    # both begin with "=", because llguidance ignores an expression of the empty text alone
    grammar = f"start: TEXT\nTEXT: /=({_literal(pattern)})/ & ~/=({_literal(other_pattern)})/\n"
    text = library.LLMatcher.grammar_from_lark(grammar)
    matcher = library.LLMatcher(_bytes(), text, log_level=0)
    if matcher.is_error():
        raise ValueError(f"{pattern!r:.80} cannot be read: {matcher.get_error():.200}")
    if not matcher.consume_token(ord("=")):
        return None
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    tokens = np.flatnonzero(allowed[: END + 1]).tolist()
    if not tokens:
        return None
    return "" if END in tokens else bytes(tokens[:1]).decode("ascii", errors="backslashreplace")


def _literal(pattern: str) -> str:
    """The pattern between the slashes of a Lark grammar."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")


@cache
def _bytes() -> Any:
    """llguidance's tokenizer of single bytes."""
    pieces = byte_alphabet() | {"<end>": END}
    coding = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    end = {"id": END, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": coding,
        "post_processor": None,
        "decoder": coding,
        "model": {"type": "BPE", "vocab": pieces, "merges": []},
    }
    return imported("llguidance").LLTokenizer(json.dumps(described), n_vocab=END + 1, eos_token=END)
