"""Text to tokens and back: whole texts, token by token while they are generated, and stop strings. Imports no jax.

tokenizer = load_tokenizer(checkpoint)
text = Detokenizer(tokenizer, prompt_ids)        # one for each request
stop = StopChecker(params.stop)                  # the same
piece, stopped = stop.push(text.push(token_id))  # for each token
"""

from __future__ import annotations

import codecs
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.tokenizer_files import byte_alphabet, from_directory, from_gguf

if TYPE_CHECKING:
    import tokenizers

TOKEN_IDS = "give token ids, or name a tokenizer in from_params(..., tokenizer=folder)"
REPLACEMENT = "\ufffd"  # what bytes that are not (yet) a character decode to


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer. `special_tokens` are the texts a chat template may use, by name ("bos_token" ...)."""

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None = None
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def vocab_size(self) -> int:
        """Tokens including added ones. A model's own vocabulary may be padded to more; such ids decode to nothing."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text are recognised; BOS is added only if the model does so.

        Raises:
            ValueError: not a string, or one that UTF-8 cannot express (a lone surrogate).
        """
        if not isinstance(text, str):
            raise ValueError(f"the text is a {type(text).__name__}; encode takes a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text has half of a surrogate pair at character {error.start}; remove it") from error
        # of a batch, because alone it would keep every other thread of Python waiting: 1 MiB takes half a second
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens, character for character (no clean-up of spaces)."""
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]  # as in encode

    def decode_token(self, token_id: int) -> str:
        """The text one token stands for in the middle of a text; U+FFFD where it is only part of a character."""
        if self.coding is None:
            return self.decode([token_id], skip_special_tokens=False)
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The tokens of a conversation, e.g. [{"role": "user", "content": "Hi"}].

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template (it is no chat model); encode a plain prompt instead")
        if not messages:
            raise ValueError("a conversation has at least one message, e.g. {'role': 'user', 'content': 'Hi'}")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise ValueError(f"the message {message!r} must be a mapping with 'role' and 'content'")
        return self.encode(self._render(list(messages), add_generation_prompt), add_special_tokens=False)

    def _render(self, messages: list[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        renderer = _template_renderer()(**self.special_tokens)
        # the others come of messages that are not as the template takes them to be, e.g. a number where it has a loop
        refusals = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
        try:
            text = renderer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except refusals as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
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
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; only where `coding` is known. Empty for an id beyond the vocabulary."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._piece_bytes(self.backend.id_to_token(token_id) or "")
        return self._bytes[token_id]

    def _piece_bytes(self, piece: str) -> bytes:
        if self.coding == "byte-level":
            table = byte_alphabet()
            # an added token may use other characters; the decoder then takes it as it is
            return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


_ONE_AT_A_TIME = threading.Lock()  # transformers loads its modules lazily, and not for two threads at once


def _template_renderer() -> Callable[..., Any]:
    """transformers' tokenizer without a vocabulary: it defines, and guards, what a chat template may do."""
    from tokenizers import Tokenizer, models

    logger = logging.getLogger("transformers")
    quiet = logging.Filter("nothing")  # its advice on import that torch is missing; nothing here uses torch
    logger.addFilter(quiet)
    with _ONE_AT_A_TIME:
        try:
            from transformers import PreTrainedTokenizerFast
        finally:
            logger.removeFilter(quiet)
    return partial(PreTrainedTokenizerFast, tokenizer_object=Tokenizer(models.BPE()))


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """The kinds of the decoder's steps, in order."""
    decoder = backend.decoder
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}  # type: ignore
    return [step["type"] for step in state.get("decoders", [state])]


class NoTokenizer(Tokenizer):
    """Of a model that came without one: every token's text is empty."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE

        super().__init__(Backend(BPE()), (), {})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise ValueError(f"this model has no tokenizer for the text {text!r:.40}; {TOKEN_IDS}")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        raise ValueError(f"this model has no tokenizer for a conversation; {TOKEN_IDS}")


# --- loading ----------------------------------------------------------------------------------------------------------


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer, from its tokenizer.json or its GGUF metadata; needs no network and no torch.

    Its `eos_token_ids` are the checkpoint's and the tokenizer's own.

    Raises:
        FileNotFoundError: a directory without tokenizer.json.
        ValueError: a damaged or unsupported tokenizer; names the file and what is supported.
    """
    parts = from_gguf(checkpoint) if checkpoint.format == "gguf" else from_directory(checkpoint.path)
    eos = parts.backend.token_to_id(parts.special_tokens.get("eos_token", ""))
    ends = {*checkpoint.eos_token_ids, *(() if eos is None else (eos,))}
    return Tokenizer(parts.backend, tuple(sorted(ends)), parts.special_tokens, parts.chat_template)


# --- while generating -------------------------------------------------------------------------------------------------


class Detokenizer:
    """The text of one request, token by token: the pushes and the flush, joined, are the text of the whole output.

    Never gives out part of a character: bytes that do not make one yet wait for the next token. Each token costs the
    same, however long the text. A character that the prompt's last bytes begin comes out once the output completes it;
    if it never does, its U+FFFD is not shown, since it is the prompt's.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        prompt = [i for i in prompt_token_ids if i not in self._skipped]
        self._stream = (_Window if tokenizer.coding is None else _Bytes)(tokenizer, prompt)

    def push(self, token_id: int) -> str:
        """The text that is final with this token and was not before; often none."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def flush(self) -> str:
        """What is left at the end of the output: U+FFFD where it ends inside a character."""
        return self._stream.flush()


class _Bytes:
    """Where every token has its own bytes: an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._at_start = tokenizer.strips_first_space and not prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b"".join(map(self._token_bytes, prompt[-64:]))[-3:]  # an unfinished character has 3 bytes at most
        self._decoder.decode(tail)
        self._from_prompt = bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        return self._clean(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        return self._clean(self._decoder.decode(b"", final=True))

    def _clean(self, text: str) -> str:
        if text and self._from_prompt:
            self._from_prompt = False
            return text.removeprefix(REPLACEMENT)
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class _Window:
    """For decoders that look at neighbouring tokens: decode the last few with and without the new ones, and compare."""

    CONTEXT = 6  # prompt tokens that can decide how the first one of the output is spaced
    HELD = 16  # tokens held back at most: more than any character has bytes

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self._known = list(prompt[-self.CONTEXT :])
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        self._new.append(token_id)
        before, after = self._decode(self._known), self._decode(self._known + self._new)
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and len(self._new) < self.HELD):
            return ""
        self._known, self._new = self._new, []
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._decode(self._known), self._decode(self._known + self._new)
        self._known, self._new = self._new, []
        return after[len(before) :]


class StopChecker:
    """Cuts one request's text at the first stop string, wherever the borders between tokens are.

    The first is the one that is complete first; of several complete at the same character, the longest. One whose last
    character comes from the first `min_tokens` tokens does not count. Text that may turn out to belong to a stop string
    is held back: less than the longest of them.
    """

    def __init__(self, stop: Sequence[str], *, min_tokens: int = 0, include_stop_str_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include = include_stop_str_in_output
        self._held = ""
        self._tokens = 0
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """(text to give out now, whether to stop) for the text of one more token; "" for a token without text."""
        self._tokens += 1
        return self._next(text, searched=self._tokens > self._min_tokens)

    def finish(self, text: str = "") -> tuple[str, bool]:
        """The same at the end of the output, for what `Detokenizer.flush` gave; nothing is held back any more."""
        out, stopped = self._next(text, searched=self._tokens > self._min_tokens)
        held, self._held = self._held, ""
        return out + held, stopped

    def _next(self, text: str, *, searched: bool) -> tuple[str, bool]:
        text, new = self._held + text, len(self._held)
        if searched and (match := first_stop(text, self._stop, new)):
            start, end = match
            self.matched, self._held = text[start:end], ""
            return text[: end if self._include else start], True
        keep = max((held_length(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def first_stop(text: str, stop: Sequence[str], new: int) -> tuple[int, int] | None:
    """(start, end) of the stop string that ends first, after position `new`; of equals, the one that starts first."""
    found = ((s, text.find(s, max(0, new + 1 - len(s)))) for s in stop)
    return min(((at, at + len(s)) for s, at in found if at >= 0), key=lambda m: (m[1], m[0]), default=None)


def held_length(text: str, stop: str) -> int:
    """How many characters at the end of `text` may begin `stop`. Looks only where its first character is."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return 0 if at < 0 else len(text) - at
