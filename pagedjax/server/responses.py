"""Response bodies as JSON: whole answers, stream chunks, errors. Pure functions of outputs and
deltas.

Formats are those of OpenAI's API reference, with vLLM's additions (`stop_reason`,
`prompt_logprobs`, token ids).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedjax.server import tool_answers
from pagedjax.server.worker import Delta
from pagedjax.session import GenerationRequest
from pagedjax.text.detokenizer import Detokenizer
from pagedjax.text.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.tools.formats import CallFormat

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
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, chunk: bool = False) -> JSON:
        prefix, kind = ("chatcmpl", "chat.completion") if self.chat else ("cmpl", "text_completion")
        return {
            "id": f"{prefix}-{self.id}",
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model,
        }

    def spelled(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self.tokens_as_ids else text


# --- whole answers --------------------------------------------------------------------------------


def answer(style: Style, outputs: Sequence[RequestOutput]) -> JSON:
    """The answer to one HTTP request. It has one output for each prompt."""
    choices, width = [], max(len(output.outputs) for output in outputs)
    for i, output in enumerate(outputs):
        choices += [choice(style, output, one, i * width + one.index) for one in output.outputs]
    of_prompt = about_prompt(style, outputs[0]) if style.chat else {}
    return {
        **style.head(),
        "choices": choices,
        "usage": usage(outputs, style.only_echo),
        **of_prompt,
    }


def choice(style: Style, output: RequestOutput, one: CompletionOutput, index: int) -> JSON:
    ends: JSON = {
        "index": index,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
    if style.chat:
        said: JSON = {"content": one.text}
        if style.calls is not None:
            said, ends["finish_reason"] = tool_answers.message(one, style.calls)
        ends["message"] = {"role": style.role, **said, "refusal": None}
        ends["logprobs"] = (
            chat_logprobs(style, one.token_ids, one.logprobs or ()) if wanted(style) else None
        )
    else:
        text = "" if style.only_echo else one.text
        ends["text"] = echoed(style, output) + text if style.echo else text
        ends["logprobs"] = completion_logprobs(style, output, one) if wanted(style) else None
        ends |= about_prompt(style, output)
    if style.token_ids:
        ends["token_ids"] = [] if style.only_echo else list(one.token_ids)
    return ends


def about_prompt(style: Style, output: RequestOutput) -> JSON:
    """vLLM's fields about a prompt: in a chat they are in the answer, in a completion in each
    choice."""
    about: JSON = {}
    if output.prompt_logprobs is not None and not (style.echo and wanted(style)):
        about["prompt_logprobs"] = [
            position and candidates(position) for position in output.prompt_logprobs
        ]
    if style.token_ids:
        about["prompt_token_ids"] = list(output.prompt_token_ids)
    return about


def wanted(style: Style) -> bool:
    return style.logprobs is not None


def echoed(style: Style, output: RequestOutput | GenerationRequest) -> str:
    """The prompt, as text."""
    if output.prompt is not None:
        return output.prompt
    return style.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def usage(outputs: Sequence[RequestOutput], only_echo: bool = False) -> JSON:
    counts = [len(one.token_ids) for output in outputs for one in output.outputs]
    return used(
        sum(len(output.prompt_token_ids) for output in outputs),
        0 if only_echo else sum(counts),
        sum(output.num_cached_tokens for output in outputs),
    )


def used(prompt: int, generated: int, cached: int = 0) -> JSON:
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
    """vLLM's format: by token id."""
    return {
        str(token): {
            "logprob": finite(one.logprob),
            "rank": one.rank,
            "decoded_token": one.decoded_token,
        }
        for token, one in position.items()
    }


def best(style: Style, position: PositionLogprobs) -> list[tuple[int, Logprob]]:
    """The requested number of candidates of a position, the most likely first."""
    ranked = sorted(position.items(), key=lambda entry: entry[1].rank)
    return ranked[: style.logprobs]


def chat_logprobs(
    style: Style, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]
) -> JSON:
    def entry(token: int, one: Logprob) -> JSON:
        coded = style.tokenizer.coding is not None
        raw = style.tokenizer.token_bytes(token) if coded else one.decoded_token.encode()
        text = style.spelled(token, one.decoded_token)
        return {"token": text, "logprob": finite(one.logprob), "bytes": list(raw)}

    content = [
        entry(token, position[token])
        | {"top_logprobs": [entry(*candidate) for candidate in best(style, position)]}
        for token, position in zip(token_ids, positions, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(style: Style, output: RequestOutput, one: CompletionOutput) -> JSON:
    """Of a whole answer. With an echo, those of the prompt come first, and its first token has
    none."""
    tokens = () if style.only_echo else one.token_ids
    positions: list[PositionLogprobs | None] = list((one.logprobs or ())[: len(tokens)])
    offsets = OutputOffsets(style, output)
    end = offsets.at + len(one.text)  # tokens of a stop string may come behind it
    columns = [min(offsets.next(token), end) for token in tokens]
    if style.echo:
        tokens = (*output.prompt_token_ids, *tokens)
        positions = [*(output.prompt_logprobs or ()), *positions]
        columns = [*prompt_offsets(style, output), *columns]
    return legacy_logprobs(style, tokens, positions, columns)


class OutputOffsets:
    """Where each token of an output begins in the text of a choice, in characters.

    A token that ends inside a character adds nothing to the text, and the token that completes the
    character adds it. A token that is not shown adds nothing.
    """

    def __init__(self, style: Style, prompt: RequestOutput | GenerationRequest) -> None:
        ids = prompt.prompt_token_ids
        skips = style.skips_special_tokens
        self._pieces = Detokenizer(style.tokenizer, ids, skip_special_tokens=skips)
        self.start = self.at = len(echoed(style, prompt)) if style.echo else 0

    def next(self, token: int) -> int:
        offset = self.at
        self.at += len(self._pieces.push(token))
        return offset


def prompt_offsets(style: Style, output: RequestOutput) -> list[int]:
    """Where each token of a prompt begins in its text, in which special tokens that were added
    before it have no place.

    If the tokenizer writes a character otherwise, offsets behind it are near and not exact.
    """
    text, tokenizer, ids = echoed(style, output), style.tokenizer, output.prompt_token_ids
    added = 0
    while added < len(ids) and ids[added] in tokenizer.special_ids:
        if text.startswith(tokenizer.decode_token(ids[added])):
            break
        added += 1
    pieces, at = Detokenizer(tokenizer, skip_special_tokens=False), 0
    offsets = [0] * added
    for token in ids[added:]:
        offsets.append(min(at, len(text)))
        at += len(pieces.push(token))
    return offsets


def legacy_logprobs(
    style: Style,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
) -> JSON:
    """In columns, the format of completions. `offsets`: where each token begins in the text."""
    texts, values, tops = [], [], []
    for token, position in zip(token_ids, positions, strict=True):
        plain = position[token].decoded_token if position else style.tokenizer.decode_token(token)
        texts.append(style.spelled(token, plain))
        values.append(finite(position[token].logprob) if position else None)
        tops.append(legacy_top(style, token, position) if position else None)
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def legacy_top(style: Style, token: int, position: PositionLogprobs) -> dict[str, float]:
    """By text: the most likely tokens, and the token itself. Of tokens with the same text, the most
    likely one."""
    top: dict[str, float] = {}
    for other, one in (*best(style, position), (token, position[token])):
        top.setdefault(style.spelled(other, one.decoded_token), finite(one.logprob))
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
    """The first chunk of a branch: the role in a chat, the prompt in a completion with echo; None
    if there is none."""
    plain: JSON = {"index": index, "logprobs": None, "finish_reason": None}
    ids = {"prompt_token_ids": list(prompt.prompt_token_ids)} if style.token_ids else {}
    if style.chat:
        first = chunk(style, {**plain, "delta": {"role": style.role, "content": ""}})
        return {**first, **(ids if index == 0 else {})}
    if not (style.echo or ids):
        return None
    return chunk(style, {**plain, "text": echoed(style, prompt) if style.echo else "", **ids})


def chunk(style: Style, choice: JSON | None, usage: JSON | None = None) -> JSON:
    return {**style.head(chunk=True), "choices": [choice] if choice else [], "usage": usage}


def delta_choice(
    style: Style, delta: Delta, index: int, offset: int, said: JSON, reason: str | None
) -> JSON:
    """The choice of a stream chunk, for one new token.

    Args:
        offset: where the token begins in the text of the choice.
        said: what is new, as the delta of a chat.
        reason: why the branch ended.
    """
    position = delta.logprobs or {}
    fields: JSON = {"index": index, "finish_reason": reason, "logprobs": None}
    if reason is not None:
        fields["stop_reason"] = delta.stop_reason
    if style.chat:
        fields["delta"] = said
        if wanted(style):
            fields["logprobs"] = chat_logprobs(style, (delta.token_id,), (position,))
    else:
        fields["text"] = said["content"]
        if wanted(style):
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
