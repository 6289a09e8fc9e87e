"""Formats of published loads: ShareGPT's conversations, BurstGPT's CSV and Mooncake's JSON lines.

Pure functions of a file's text. The files are the user's own copies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from experiments.core.drawn_ids import DrawnIds
from pagedjax.server.load_client.text_files import lines, records

SHAREGPT = (
    "The usual file is ShareGPT_V3_unfiltered_cleaned_split.json, a JSON list of conversations; "
    "give the path of your copy"
)
BURSTGPT = (
    "The public original is BurstGPT_1.csv of the project BurstGPT; give the path of your copy"
)
MOONCAKE = (
    "The public originals are conversation_trace.jsonl and others of the project Mooncake; give "
    "the path of your copy"
)
BURST_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")
BLOCK = 512  # tokens that a hash id of Mooncake stands for
ASKING = ("human", "user")
ANSWERING = ("gpt", "chatgpt", "assistant", "bing", "bard")


class TraceRequest(NamedTuple):
    """A request of a recorded service. `seconds` count from any moment.

    blocks: ids of the blocks of its prompt; blocks with equal ids have equal tokens; (): not known.
    user: who sent the request; "": not known.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    user: str = ""


@lru_cache(maxsize=1)  # all points and repeats of a sweep read the same file
def conversations(file: str, content: str) -> list[tuple[str, str]]:
    """The first question and its answer of each conversation of a ShareGPT file.

    A conversation that does not begin with both is left out, and so is one where either is empty.

    Raises:
        ValueError: the file is no such list, or no conversation is left.
    """
    try:
        entries = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}. {SHAREGPT}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{file} holds no list of conversations. {SHAREGPT}")
    pairs = []
    for index, entry in enumerate(entries):
        messages = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(messages, list):
            raise ValueError(
                f'{file}, entry {index}: needs "conversations", a list of {{"from": "human" or '
                '"gpt", "value": text}'
            )
        texts = [_message(f"{file}, entry {index}", message) for message in messages[:3]]
        texts = [text for text in texts if text[0] != "system"][:2]
        roles = [role for role, _ in texts]
        if len(texts) == 2 and roles[0] in ASKING and roles[1] in ANSWERING:
            prompt, answer = (text.strip() for _, text in texts)
            if prompt and answer:
                pairs.append((prompt, answer))
    if not pairs:
        raise ValueError(
            f"{file} has no conversation that begins with a question and an answer. {SHAREGPT}"
        )
    return pairs


def _message(place: str, message: Any) -> tuple[str, str]:
    """The role of the message's author, and the message's text."""
    role = message.get("from") if isinstance(message, dict) else None
    text = message.get("value") if isinstance(message, dict) else None
    if not isinstance(role, str) or not isinstance(text, str):
        raise ValueError(
            f'{place}: a message is {message!r:.80}; it needs "from" and "value", both text'
        )
    return role, text


def burst_rows(
    file: str, content: str, model: str | None, log_type: str | None
) -> list[TraceRequest]:
    """The requests of a BurstGPT file, in its order.

    Requests without response tokens are left out: they failed.

    Args:
        model, log_type: keep only the requests with these values; None: any value.

    Raises:
        ValueError: a column is missing, a row cannot be read (names the line), or the file has no
            such model or log type.
    """
    rows = []
    values: dict[str, set[str]] = {"model": set(), "log_type": set()}
    for line, fields in records(file, content, BURST_COLUMNS, BURSTGPT):
        time, row_model, prompt, output, row_type, user = (field.strip() for field in fields)
        values["model"].add(row_model)
        values["log_type"].add(row_type)
        place = f"{file}, line {line}"
        request = TraceRequest(
            _seconds(place, time),
            _tokens(f"{place}: Request tokens", prompt),
            _tokens(f"{place}: Response tokens", output),
            user=user,
        )
        if model in (None, row_model) and log_type in (None, row_type) and request.output_tokens:
            rows.append(request)
    for name, chosen in (("model", model), ("log_type", log_type)):
        if chosen is not None and chosen not in values[name]:
            raise ValueError(
                f"workload.{name} is {chosen!r}; {file} has {sorted(values[name])}; name one of "
                "them, or null for all"
            )
    return rows


def _seconds(place: str, text: str) -> float:
    if not re.fullmatch(r"\d{1,12}(\.\d*)?", text, re.ASCII):
        raise ValueError(f"{place}: Timestamp is {text!r:.80}; it must be seconds, such as 5.0")
    return float(text)


def _tokens(place: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,12}(\.0*)?", text, re.ASCII):
        raise ValueError(f"{place} is {text!r:.80}; it must be a number of tokens, such as 472")
    return int(float(text))


def mooncake_rows(file: str, content: str) -> list[TraceRequest]:
    """The requests of a Mooncake file, in its order.

    Raises:
        ValueError: a line cannot be read, or its number of hash ids is wrong. The message has the
            line's number; blank lines are not counted.
    """
    return [_mooncake_row(f"{file}, line {i}", line) for i, line in enumerate(lines(content), 1)]


def _mooncake_row(place: str, line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}. {MOONCAKE}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place} is {row!r:.80}; it must be a mapping. {MOONCAKE}")
    time = _number(place, row, "timestamp", "milliseconds", 0)
    prompt = _count(place, row, "input_length", 1)
    output = _count(place, row, "output_length", 0)
    ids = row.get("hash_ids")
    num_blocks = -(-prompt // BLOCK)
    if not isinstance(ids, list) or len(ids) != num_blocks or any(type(i) is not int for i in ids):
        raise ValueError(
            f"{place}: hash_ids is {ids!r:.60}; a prompt of {prompt} tokens has {num_blocks} integers, "
            f"one for each {BLOCK} tokens"
        )
    user = row.get("user", "")
    if not isinstance(user, str):
        raise ValueError(f"{place}: user is {user!r:.60}; it must be a text")
    return TraceRequest(time / 1000, prompt, output, tuple(ids), user)


def _count(place: str, row: Mapping[str, Any], name: str, minimum: int) -> int:
    """A number of tokens of a row, of at least `minimum`."""
    number = _number(place, row, name, "tokens", minimum)
    if number != int(number):
        raise ValueError(f"{place}: {name} is {number!r}; it must be an integer, such as 472")
    return int(number)


def _number(place: str, row: Mapping[str, Any], name: str, unit: str, minimum: int) -> float:
    """A number of a row, of at least `minimum`."""
    number = row.get(name)
    if isinstance(number, bool) or not isinstance(number, int | float):
        number = math.nan
    if not minimum <= number < math.inf:
        raise ValueError(
            f"{place}: {name} is {row.get(name)!r:.80}; it must be a number of {unit}, at least "
            f"{minimum}"
        )
    return number


class BlockIds(DrawnIds):
    """The token ids of a prompt that is known by its blocks: random, and equal in equal blocks.

    The ids are drawn when they are read: the ids of a day of requests would fill the memory.
    """

    __slots__ = ("_blocks", "_ids", "_start", "seed")

    def __init__(
        self,
        blocks: Sequence[int],
        length: int,
        ids: tuple[int, int],
        seed: tuple[int, ...],
        start: int = 0,
    ) -> None:
        """Keep what the ids are drawn from.

        Args:
            blocks: the ids of the prompt's blocks.
            length: tokens of the prompt.
            ids: token ids are drawn from ids[0] <= id < ids[1].
            seed: integers of at least 0; the id of each block is added to them.
            start: tokens of the prompt that are left out at its start.
        """
        self._blocks = tuple(blocks)
        self._length = length - start
        self._ids = ids
        self._start = start
        self.seed = seed

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """The ids of the blocks of which the prompt has all tokens."""
        return self._blocks[: (self._start + self._length) // BLOCK]

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """(id of a block, from, to): which tokens of which blocks the ids are."""
        pieces: list[tuple[int, int, int]] = []
        for number in range(self._start // BLOCK, len(self._blocks)):
            first = max(self._start - number * BLOCK, 0)
            last = min(self._start + self._length - number * BLOCK, BLOCK)
            pieces.append((self._blocks[number], first, last))
        return pieces

    def after(self, start: int) -> BlockIds:
        """The prompt without its first `start` tokens."""
        return BlockIds(self._blocks, self._start + self._length, self._ids, self.seed, start)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        first_block = self._start // BLOCK
        parts = [
            np.random.default_rng([*self.seed, abs(block), int(block < 0)]).integers(
                *self._ids, size=BLOCK
            )
            for block in self._blocks[first_block:]
        ]
        start = self._start - first_block * BLOCK
        tokens = np.concatenate(parts)[start : start + self._length]
        return tokens if dtype is None else tokens.astype(dtype)
