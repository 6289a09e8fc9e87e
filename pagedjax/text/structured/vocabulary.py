"""llguidance's view of a tokenizer, in which no text spells a mark.

Forms are text, and text has no special tokens. A mark is an added token that is no text: a special
one, or one in angle brackets, as `<think>`. Where a form leaves no choice, llguidance makes tokens
of the form's own text by Hugging Face's tokenizer, which recognises marks that are written out. So
a form with the text `<|im_end|>` would end its answer, or fail. Here each mark has a name that no
text can have, because it is drawn at random. Grammars name a mark by its id.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pagedjax.text.tokenizer import Tokenizer

# A text, a regular expression or a comment of a Lark grammar, where `<name>` is no token; or,
# outside of these, a `<name>`.
LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|(?P<name><[^\s<>"\[\]]+>)'
)


def marks(tokenizer: Tokenizer) -> dict[str, int]:
    """The added tokens that llguidance takes for marks and not for text, by their texts."""
    added_tokens = tokenizer.backend.get_added_tokens_decoder().items()
    return {token.content: i for i, token in added_tokens if _is_mark(token.content, token.special)}


def _is_mark(text: str, special: bool) -> bool:
    return special or (text.startswith("<") and text.endswith(">"))


def library_tokenizer(
    library: Any, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> Any:
    """llguidance's tokenizer. It takes half a second for 49,152 tokens.

    Raises:
        ValueError: llguidance cannot use the tokenizer.
    """
    text = rename_marks(tokenizer.backend.to_str())
    return library.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def rename_marks(text: str) -> str:
    """The text of a tokenizer.json in which marks have names that no text has. Their ids, and all
    else, are as before.
    """
    tokenizer_json = json.loads(text)
    prefix = secrets.token_hex(16)
    names = {
        token["content"]: f"<{prefix}{token['id']}>"
        for token in tokenizer_json["added_tokens"]
        if _is_mark(token["content"], token["special"])
    }
    for token in tokenizer_json["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    _rename(tokenizer_json["model"], names)
    # the post-processor puts marks around whole texts, and a form has none
    tokenizer_json["post_processor"] = None
    return json.dumps(tokenizer_json)


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    unknown_piece = model.get("unk_token")
    if unknown_piece is not None:
        model["unk_token"] = names.get(unknown_piece, unknown_piece)
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not names.keys() & _pieces(merge)]


def _pieces(merge: str | Sequence[str]) -> set[str]:
    """Both parts of a merge, and what it makes of them."""
    parts = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {*parts, "".join(parts)}


def grammar_with_ids(grammar: str, marks: Mapping[str, int]) -> str:
    """A Lark grammar in which `<name>` of a mark is `<[id]>`. GBNF has no names of tokens."""
    if re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE):
        return grammar

    def numbered(match: re.Match[str]) -> str:
        token = marks.get(match["name"] or "")
        return match[0] if token is None else f"<[{token}]>"

    return LARK.sub(numbered, grammar)
