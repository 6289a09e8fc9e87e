"""`Tokenizer`: text to tokens and back, and conversations to tokens. `Detokenizer`: text while it
is generated, token by token. Imports no jax.

Why not `tokenizers.decoders.DecodeStream`: it loses the end of an output that ends inside a
character (97 of 500 random outputs), and its text includes text of the prompt. It is faster: 4.4
against 7.7 ms per 4,000 tokens.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from pagedjax.text.imports import imported
from pagedjax.text.messages import for_template

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"  # the character that incomplete bytes decode to
# last tokens of a prompt that are read; enough for 3 bytes of a character before many special
# tokens
LOOKBACK = 256
TOKENIZER_REMEDY = "give token ids, or name a tokenizer in from_params(..., tokenizer=folder)"


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer. `special_tokens` are the texts a chat template may use, by name
    ("bos_token" ...).
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None = None
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def vocab_size(self) -> int:
        """Tokens including added ones. A model's own vocabulary may be padded to more; such ids
        decode to nothing.
        """
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def content_hash(self) -> str:
        """A hash of all that decides on tokens and texts, the chat template included."""
        parts = (
            self.backend.to_str(),
            self.eos_token_ids,
            sorted(self.special_tokens.items()),
            self.chat_template,
        )
        return blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text are recognised; BOS is added only if
        the model does so.

        Raises:
            ValueError: not a string, or one that UTF-8 cannot express (a lone surrogate).
        """
        if not isinstance(text, str):
            raise ValueError(f"the text is a {type(text).__name__}; encode takes a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half of a surrogate pair at character {error.start}; remove it"
            ) from error
        # as a batch, because `encode` would keep every other thread of Python waiting: 1 MiB takes
        # half a second
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens, character for character (no clean-up of spaces)."""
        # as a batch, see `encode`
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def decode_token(self, token_id: int) -> str:
        """The text one token stands for in the middle of a text; U+FFFD where it is only part of a
        character.
        """
        if self.coding is None:
            return self.decode([token_id], skip_special_tokens=False)
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, e.g. [{"role": "user", "content": "Hi"}]. `tools`: as
        OpenAI defines them.

        A content is a text, None or a list of parts of text; the template gets its text.

        Raises:
            ValueError: the model has no chat template, a content is no text, or the template
                refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template (it is no chat model); encode a plain prompt "
                "instead"
            )
        if not messages:
            raise ValueError(
                "a conversation has at least one message, e.g. {'role': 'user', 'content': 'Hi'}"
            )
        text = self._render(for_template(messages), add_generation_prompt, tools)
        return self.encode(text, add_special_tokens=False)

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: Any
    ) -> str:
        render = _template_renderer()
        TemplateError = imported("jinja2").TemplateError
        # the errors beside TemplateError are of messages with other types than the template expects
        refusals = (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        )
        try:
            (text,), _ = render(
                [messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except refusals as error:
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return text

    @cached_property
    def coding(self) -> Literal["byte-level", "byte-fallback"] | None:
        """How a token's bytes are written in its piece; None when they depend on its neighbours."""
        steps = _decoder_steps(self.backend)
        if steps == ["ByteLevel"]:
            return "byte-level"
        return "byte-fallback" if steps[:3] == ["Replace", "ByteFallback", "Fuse"] else None

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the space that encoding puts before a text."""
        return _decoder_steps(self.backend)[-1:] == ["Strip"]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` skips."""
        return frozenset(
            i for i, token in self.backend.get_added_tokens_decoder().items() if token.special
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; only where `coding` is known. Empty for an id beyond
        the vocabulary.
        """
        if token_id not in self._bytes:
            self._bytes[token_id] = self._piece_bytes(self.backend.id_to_token(token_id) or "")
        return self._bytes[token_id]

    def _piece_bytes(self, piece: str) -> bytes:
        if self.coding == "byte-level":
            table = byte_alphabet()
            if all(c in table for c in piece):
                return bytes(table[c] for c in piece)
            return piece.encode()  # an added token with other characters, which are decoded as such
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


def _template_renderer() -> Callable[..., Any]:
    """transformers' renderer of chat templates. It defines what a template may do, and guards it (a
    sandbox).
    """
    logger = logging.getLogger("transformers")

    def is_no_advice(record: logging.LogRecord) -> bool:
        """False for all: on import it advises to install torch, which the renderer does not use."""
        return False

    logger.addFilter(is_no_advice)
    try:
        return imported("transformers.utils.chat_template_utils").render_jinja_template
    finally:
        logger.removeFilter(is_no_advice)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """The kinds of the decoder's steps, in order."""
    decoder = backend.decoder
    state: dict[str, Any] = (
        json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    )  # type: ignore
    return [step["type"] for step in state.get("decoders", [state])]


class NoTokenizer(Tokenizer):
    """The tokenizer of a model that came without one: every token's text is empty."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE

        super().__init__(Backend(BPE()), (), {})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise ValueError(
            f"this model has no tokenizer for the text {text!r:.40}; {TOKENIZER_REMEDY}"
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Any = None,
    ) -> list[int]:
        raise ValueError(f"this model has no tokenizer for a conversation; {TOKENIZER_REMEDY}")


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as visible characters: character -> byte."""
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    invisible = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(invisible)
    }


class Detokenizer:
    """The text of one request, token by token: the pushes and the flush, joined, are the text of
    the whole output.

    It never returns part of a character: incomplete bytes wait for the next token. The cost of a
    token does not depend on the length of the text. If the prompt ends inside a character, the
    character is returned when the output completes it. If the output does not complete it, its
    U+FFFD belongs to the prompt and is not returned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # only the end is read: a request with many branches makes many detokenizers of one long
        # prompt
        prompt = [i for i in prompt_token_ids[-LOOKBACK:] if i not in self._skipped]
        make_stream = _Window if tokenizer.coding is None else _Bytes
        self._stream = make_stream(tokenizer, prompt)

    def push(self, token_id: int) -> str:
        """The text that this token completes; often empty."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def flush(self) -> str:
        """The rest of the text at the end of the output: U+FFFD if the output ends inside a
        character.
        """
        return self._stream.flush()


class _Bytes:
    """For tokenizers where every token has its own bytes: an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._at_start = tokenizer.strips_first_space and not prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # An incomplete character has at most 3 bytes. They may be in more tokens than 3, because
        # some tokens have no bytes.
        tail = b"".join(map(self._token_bytes, prompt[-64:]))[-3:]
        self._decoder.decode(tail)
        incomplete_bytes, _ = self._decoder.getstate()
        self._in_character_of_prompt = bool(incomplete_bytes)

    def push(self, token_id: int) -> str:
        return self._clean(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        return self._clean(self._decoder.decode(b"", final=True))

    def _clean(self, text: str) -> str:
        if text and self._in_character_of_prompt:
            self._in_character_of_prompt = False
            return text.removeprefix(REPLACEMENT)
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class _Window:
    """For decoders where a token's text depends on its neighbours.

    Decodes the last tokens with and without the new ones, and compares.
    """

    CONTEXT = 6  # prompt tokens that can affect the space before the first token of the output
    # most tokens kept back until a character is complete; no character has as many bytes
    MAX_PENDING = 16

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        # tokens whose text was returned, or is the prompt's
        self._context = list(prompt[-self.CONTEXT :])
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._new_text()
        incomplete = text.endswith(REPLACEMENT) and len(self._new) < self.MAX_PENDING
        if not text or incomplete:
            return ""
        self._accept_new()
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._accept_new()
        return text

    def _new_text(self) -> str:
        text = self._decode(self._context + self._new)
        return text[len(self._decode(self._context)) :]

    def _accept_new(self) -> None:
        self._context = self._new
        self._new = []
