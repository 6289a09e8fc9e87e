"""Response bodies as JSON: whole answers, stream chunks, errors.

All are pure functions of outputs and deltas. Formats are those of OpenAI's API reference, with
vLLM's additions (`stop_reason`, `prompt_logprobs`, token ids).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedjax.engine.session import GenerationRequest
from pagedjax.server import continuation, tool_answers
from pagedjax.server.continuation import Delta
from pagedjax.text.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from pagedjax.text.tokenizer import Detokenizer, Tokenizer
from pagedjax.text.tools.formats import CallFormat

JSON = dict[str, Any]
LOWEST = -9999.0  # stands for the logarithm of 0, which JSON cannot express


@dataclass(frozen=True)
class Style:
    """The format of one answer.

    chat: the kind of endpoint.
    logprobs: the number of candidates, or None.
    calls: how the model writes calls of tools; None if it has none.
    ignored: keywords of JSON schemas that had no effect.
    """

    model: str
    chat: bool
    tokenizer: Tokenizer
    logprobs: int | None = None
    echo: bool = False
    only_echo: bool = False  # hide the one token that is generated
    token_ids: bool = False
    tokens_as_ids: bool = False
    skips_special_tokens: bool = True
    calls: CallFormat | None = None
    ignored: tuple[str, ...] = ()
    role: str = "assistant"
    id: str = field(default_factory=continuation.new_id)
    created: int = field(default_factory=continuation.created)

    def head(self, chunk: bool = False) -> JSON:
        prefix = "chatcmpl" if self.chat else "cmpl"
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{prefix}-{self.id}",
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model,
        }

    def spelling(self, token_id: int, text: str) -> str:
        """How a token is written in log-probabilities; `text` is its text."""
        return f"token_id:{token_id}" if self.tokens_as_ids else text


# --- whole answers --------------------------------------------------------------------------------


def answer(style: Style, outputs: Sequence[RequestOutput]) -> JSON:
    """The answer to one HTTP request. It has one output for each prompt."""
    choices = []
    width = max(len(output.outputs) for output in outputs)
    for i, output in enumerate(outputs):
        for branch in output.outputs:
            choices.append(choice(style, output, branch, i * width + branch.index))
    prompt_fields = fields_of_prompt(style, outputs[0]) if style.chat else {}
    return {
        **style.head(),
        "choices": choices,
        "usage": usage(outputs, style.only_echo),
        **prompt_fields,
    }


def choice(style: Style, output: RequestOutput, branch: CompletionOutput, index: int) -> JSON:
    """The choice of a whole answer, for one branch of an output."""
    fields: JSON = {
        "index": index,
        "finish_reason": branch.finish_reason,
        "stop_reason": branch.stop_reason,
    }
    if style.chat:
        message: JSON = {"content": branch.text}
        if style.calls is not None:
            message, fields["finish_reason"] = tool_answers.message(branch, style.calls)
        fields["message"] = {"role": style.role, **message, "refusal": None}
        fields["logprobs"] = None
        if has_logprobs(style):
            fields["logprobs"] = chat_logprobs(style, branch.token_ids, branch.logprobs or ())
    else:
        text = "" if style.only_echo else branch.text
        fields["text"] = prompt_text(style, output) + text if style.echo else text
        fields["logprobs"] = None
        if has_logprobs(style):
            fields["logprobs"] = completion_logprobs(style, output, branch)
        fields |= fields_of_prompt(style, output)
    if style.token_ids:
        fields["token_ids"] = [] if style.only_echo else list(branch.token_ids)
    return fields


def fields_of_prompt(style: Style, output: RequestOutput) -> JSON:
    """vLLM's fields about a prompt.

    In a chat they are in the answer, in a completion in each choice.
    """
    fields: JSON = {}
    if output.prompt_logprobs is not None and not (style.echo and has_logprobs(style)):
        fields["prompt_logprobs"] = [
            candidates(position) if position else position for position in output.prompt_logprobs
        ]
    if style.token_ids:
        fields["prompt_token_ids"] = list(output.prompt_token_ids)
    return fields


def has_logprobs(style: Style) -> bool:
    return style.logprobs is not None


def prompt_text(style: Style, output: RequestOutput | GenerationRequest) -> str:
    """The prompt, as text."""
    if output.prompt is not None:
        return output.prompt
    return style.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def usage(outputs: Sequence[RequestOutput], only_echo: bool) -> JSON:
    """The counts of all outputs together."""
    counts = [len(branch.token_ids) for output in outputs for branch in output.outputs]
    return usage_counts(
        sum(len(output.prompt_token_ids) for output in outputs),
        0 if only_echo else sum(counts),
        sum(output.num_cached_tokens for output in outputs),
    )


def usage_counts(prompt: int, generated: int, cached: int = 0) -> JSON:
    """The JSON of these numbers of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


# --- log-probabilities ----------------------------------------------------------------------------


def finite(logprob: float) -> float:
    """The value, or LOWEST if JSON cannot express it. A NaN gives LOWEST too."""
    return logprob if logprob > LOWEST else LOWEST


def candidates(position: PositionLogprobs) -> JSON:
    """The candidates of a position in vLLM's format: by token id."""
    return {
        str(token): {
            "logprob": finite(candidate.logprob),
            "rank": candidate.rank,
            "decoded_token": candidate.decoded_token,
        }
        for token, candidate in position.items()
    }


def best(style: Style, position: PositionLogprobs) -> list[tuple[int, Logprob]]:
    """The requested number of candidates of a position, the most likely first."""
    ranked = sorted(position.items(), key=lambda entry: entry[1].rank)
    return ranked[: style.logprobs]


def chat_logprobs(
    style: Style, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]
) -> JSON:
    """The log-probabilities in the format of chats: an entry for each token, with the most likely
    candidates of its position.
    """

    def entry(token: int, candidate: Logprob) -> JSON:
        text = candidate.decoded_token
        raw = text.encode()
        if style.tokenizer.coding is not None:
            raw = style.tokenizer.token_bytes(token)
        return {
            "token": style.spelling(token, text),
            "logprob": finite(candidate.logprob),
            "bytes": list(raw),
        }

    content = []
    for token, position in zip(token_ids, positions, strict=True):
        top = [entry(token_id, candidate) for token_id, candidate in best(style, position)]
        content.append({**entry(token, position[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(style: Style, output: RequestOutput, branch: CompletionOutput) -> JSON:
    """The log-probabilities of a whole answer, in the format of completions.

    With an echo, the tokens of the prompt come first. The first of them has no log-probability.
    """
    tokens = () if style.only_echo else branch.token_ids
    positions: list[PositionLogprobs | None] = list((branch.logprobs or ())[: len(tokens)])
    output_offsets = OutputOffsets(style, output)
    # tokens of a stop string may come behind the end of the text
    end = output_offsets.start + len(branch.text)
    offsets = [min(output_offsets.next(token), end) for token in tokens]
    if style.echo:
        tokens = (*output.prompt_token_ids, *tokens)
        positions = [*(output.prompt_logprobs or ()), *positions]
        offsets = [*prompt_offsets(style, output), *offsets]
    return legacy_logprobs(style, tokens, positions, offsets)


class OutputOffsets:
    """Where each token of an output begins in the text of a choice, in characters.

    A token that ends inside a character adds nothing to the text, and the token that completes the
    character adds it. A token that is not shown adds nothing.
    """

    def __init__(self, style: Style, prompt: RequestOutput | GenerationRequest) -> None:
        ids = prompt.prompt_token_ids
        skips = style.skips_special_tokens
        self._pieces = Detokenizer(style.tokenizer, ids, skip_special_tokens=skips)
        self.start = len(prompt_text(style, prompt)) if style.echo else 0
        self.next_offset = self.start

    def next(self, token: int) -> int:
        """Take the next token -> its offset."""
        offset = self.next_offset
        self.next_offset += len(self._pieces.push(token))
        return offset


def prompt_offsets(style: Style, output: RequestOutput) -> list[int]:
    """Where each token of a prompt begins in its text.

    Special tokens that were added before the text have the offset 0. If the tokenizer writes a
    character otherwise than the text does, the offsets after it are not exact.
    """
    text = prompt_text(style, output)
    tokenizer = style.tokenizer
    ids = output.prompt_token_ids
    added = 0
    while added < len(ids) and ids[added] in tokenizer.special_ids:
        if text.startswith(tokenizer.decode_token(ids[added])):
            break
        added += 1
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offset = 0
    offsets = [0] * added
    for token in ids[added:]:
        offsets.append(min(offset, len(text)))
        offset += len(detokenizer.push(token))
    return offsets


def legacy_logprobs(
    style: Style,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
) -> JSON:
    """The log-probabilities in columns, which is the format of completions.

    offsets: where each token begins in the text.
    """
    texts = []
    values = []
    tops = []
    for token, position in zip(token_ids, positions, strict=True):
        if position:
            text = position[token].decoded_token
            values.append(finite(position[token].logprob))
            tops.append(legacy_top(style, token, position))
        else:
            text = style.tokenizer.decode_token(token)
            values.append(None)
            tops.append(None)
        texts.append(style.spelling(token, text))
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def legacy_top(style: Style, token: int, position: PositionLogprobs) -> dict[str, float]:
    """The log-probabilities of the most likely tokens and of the token itself, by text.

    If several tokens have the same text, the text has the log-probability of the likeliest.
    """
    top: dict[str, float] = {}
    for token_id, candidate in (*best(style, position), (token, position[token])):
        text = style.spelling(token_id, candidate.decoded_token)
        top.setdefault(text, finite(candidate.logprob))
    return top


# --- streams --------------------------------------------------------------------------------------


# Characters at which Python's `splitlines` ends a line, with which clients read events. JSON may
# have them as they are.
LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def event(body: JSON | str, kind: str | None = None) -> str:
    """One server-sent event. `kind`: its name, if it has one."""
    if not isinstance(body, str):
        body = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = "" if kind is None else f"event: {kind}\n"
    return f"{head}data: {body.translate(LINE_ENDS)}\n\n"


def opening(style: Style, index: int, prompt: GenerationRequest) -> JSON | None:
    """The first chunk of a branch: the role in a chat, the prompt in a completion with echo.

    None if there is no such chunk.
    """
    fields: JSON = {"index": index, "logprobs": None, "finish_reason": None}
    ids = {"prompt_token_ids": list(prompt.prompt_token_ids)} if style.token_ids else {}
    if style.chat:
        first = chunk(style, {**fields, "delta": {"role": style.role, "content": ""}})
        return first | ids if index == 0 else first
    if not (style.echo or ids):
        return None
    text = prompt_text(style, prompt) if style.echo else ""
    return chunk(style, {**fields, "text": text, **ids})


def chunk(style: Style, choice: JSON | None, usage: JSON | None = None) -> JSON:
    """One chunk of a stream; without a choice it has the usage alone."""
    return {**style.head(chunk=True), "choices": [choice] if choice else [], "usage": usage}


def delta_choice(
    style: Style, delta: Delta, index: int, offset: int, message: JSON, reason: str | None
) -> JSON:
    """The choice of a stream chunk, for one new token.

    Args:
        offset: where the token begins in the text of the choice.
        message: the new content, as the delta of a chat.
        reason: why the branch ended.
    """
    position = delta.logprobs or {}
    fields: JSON = {"index": index, "finish_reason": reason, "logprobs": None}
    if reason is not None:
        fields["stop_reason"] = delta.stop_reason
    if style.chat:
        fields["delta"] = message
        if has_logprobs(style):
            fields["logprobs"] = chat_logprobs(style, (delta.token_id,), (position,))
    else:
        fields["text"] = message["content"]
        if has_logprobs(style):
            fields["logprobs"] = legacy_logprobs(style, (delta.token_id,), (position,), (offset,))
    if style.token_ids:
        fields["token_ids"] = [] if style.only_echo else [delta.token_id]
    return fields


# --- errors ---------------------------------------------------------------------------------------


def error(
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> JSON:
    """OpenAI's format of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
