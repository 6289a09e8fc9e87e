"""The prompts and the outputs that a real engine gets, to repeat a recorded run:
`engine_tokens(past, ...)`.

Only the number of a prompt's tokens and the contents that blocks share decide what a scheduler
does. So where prompts were not recorded, they are made up: blocks of equal hashes have equal
tokens, and blocks of different hashes have different tokens. If a prompt shares a block with the
output of another sequence, the block has the generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np

from experiments.laboratory.contents import Refused
from experiments.laboratory.past import Past
from pagedjax.engine import block_hashes
from pagedjax.host.event_log import (
    Adopt,
    Cancel,
    Commit,
    Release,
    Restart,
    Schedule,
    Submit,
    Update,
)

ATTEMPTS = 100  # to find a content of a block that no sibling has


class EngineTokens(NamedTuple):
    """The tokens of a recorded run, as an engine gets them.

    prompts: token ids by the arrival of the first sequence of a request.
    outputs: the generated token ids of each sequence, by its arrival.
    made_up: whether the prompts are not the recorded ones.
    stand_ins: tokens in the place of recorded ones that the model's vocabulary does not have.
    """

    prompts: Mapping[int, Sequence[int]]
    outputs: Mapping[int, Sequence[int]]
    made_up: bool
    stand_ins: Mapping[int, int]

    def stops(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Stop tokens, in ascending order."""
        return tuple(sorted([self.stand_ins.get(token, token) for token in token_ids]))


def engine_tokens(past: Past, vocab_size: int, *, recorded: Past | None = None) -> EngineTokens:
    """The tokens with which an engine repeats a recorded run.

    Args:
        recorded: of a predicted run, the run that was recorded. The hashes of its prompts are those
            of its own blocks; None: `past` was recorded.
        vocab_size: of the engine's model. Recorded tokens beyond it get stand-ins.

    Raises:
        Refused: an engine cannot repeat the run, or the vocabulary is too small for its tokens.
    """
    check(past)
    has_prompts = _has_prompts(past if recorded is None else recorded)
    stand_ins = _stand_ins(past, vocab_size)

    def translated(tokens: Sequence[int]) -> list[int]:
        return [stand_ins.get(token, token) for token in tokens]

    outputs = {arrival: translated(output.tokens) for arrival, output in past.outputs.items()}
    if has_prompts:
        prompts = {first: translated(prompt) for first, prompt in past.prompts.items()}
    else:
        prompts = Prompts(past, outputs, vocab_size).all()
    return EngineTokens(prompts, outputs, not has_prompts, stand_ins)


def check(past: Past, *, real_time: bool = False) -> None:
    """Raises Refused if an engine that is given the tokens cannot repeat a run.

    Args:
        real_time: whether requests come at their recorded times.
    """
    if real_time and not past.timed:
        raise Refused(
            "the recording has no times, so its requests have none in real time; record with "
            "times=True, or leave --real-time out"
        )
    running_step: int | None = None
    for recorded in past.entries:
        entry = recorded.entry
        place = f"at {recorded.at:g}"
        if isinstance(entry, Schedule):
            running_step = entry.plan.step
            if entry.offered:
                raise Refused(
                    f"step {running_step} was offered drafts, and a sequence whose tokens are given "
                    "has none; record without speculation"
                )
        elif isinstance(entry, Commit):
            running_step = None
        elif isinstance(entry, Release | Adopt):
            raise Refused(
                f"a sequence comes from another engine or goes to one {place}, and one engine is "
                "run; record one engine"
            )
        elif isinstance(entry, Restart):
            raise Refused(f"a step failed {place}, which is not repeated; record a run without")
        elif isinstance(entry, Update):
            raise Refused(f"the weights changed {place}, and these are not recorded")
        elif isinstance(entry, Submit | Cancel) and running_step is not None:
            raise Refused(
                f"an input came while step {running_step} ran, {place}, and an engine takes it "
                "between two steps; record an engine"
            )
    for request in past.requests.values():
        if request.beams:
            raise Refused(
                f"request {request.request_id!r} is a beam search, whose beams follow the "
                "log-probabilities of a model; record without beams"
            )
        if request.keeps_blocks:
            raise Refused(
                f"request {request.request_id!r} keeps blocks that its KV policy would give back, "
                "for an option of its sampling that is not recorded; record without penalties"
            )


def shares(past: Past, first: int) -> bool:
    """Whether a request shares blocks."""
    request = past.requests[first]
    sequences = range(first, first + len(request.names))
    return bool(request.hashes) or any(past.outputs[arrival].hashes for arrival in sequences)


def _has_prompts(past: Past) -> bool:
    """Whether all prompts were recorded, and have the recorded hashes. A request with a salt or an
    adapter has other hashes, because these are not recorded.
    """
    size = past.config.block_size
    for first, request in past.requests.items():
        if first not in past.prompts:
            return False
        tokens = np.array(past.prompts[first], np.int32)
        root = block_hashes.root(None, size, request.tags)
        if request.hashes and block_hashes.chain(root, tokens, size) != request.hashes:
            return False
    return True


def _stand_ins(past: Past, vocab_size: int) -> dict[int, int]:
    """By each recorded token beyond a vocabulary: a token of the vocabulary that the recording does
    not have.

    Raises:
        Refused: there are too few of them.
    """
    tokens: set[int] = set()
    for output in past.outputs.values():
        tokens.update(output.tokens)
    for prompt in past.prompts.values():
        tokens.update(prompt)
    for request in past.requests.values():
        tokens.update(request.stop_token_ids)
    unrepresented = sorted([token for token in tokens if token >= vocab_size])
    unused = [token for token in range(vocab_size) if token not in tokens] if unrepresented else []
    if len(unused) < len(unrepresented):
        raise Refused(
            f"the recording has {len(unrepresented)} tokens beyond the model's vocabulary of "
            f"{vocab_size}, such as {unrepresented[0]}, and {len(unused)} others are left to stand for "
            "them; take the recorded model, or one with a larger vocabulary"
        )
    return dict(zip(unrepresented, unused, strict=False))


class Prompts:
    """Makes prompts up whose blocks have equal contents where the recorded hashes are equal."""

    def __init__(self, past: Past, outputs: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self._past = past
        self._size = past.config.block_size
        self._vocab_size = vocab_size
        self._generated: dict[str, dict[int, int]] = {}  # by hash: places -> generated tokens
        self._owner: dict[
            str, str
        ] = {}  # by the hash of a block: the name that its made-up tokens depend on
        self._contents: dict[str, list[int]] = {}  # of the blocks of prompts, by their hashes
        self._siblings: dict[str, set[tuple[int, ...]]] = {}  # contents by the hash of the parent
        self._read_outputs(outputs)

    def all(self) -> dict[int, list[int]]:
        """The prompts by the arrival of the first sequence."""
        return {first: self._prompt(first) for first in self._past.requests}

    def _read_outputs(self, outputs: Mapping[int, Sequence[int]]) -> None:
        """Notes what sequences generated into blocks. The prompts of requests that share a block
        in which a prompt ends and an output begins have the same last tokens.
        """
        size = self._size
        for arrival, output in self._past.outputs.items():
            prompt_len = self._past.requests[output.first].prompt_len
            for index, name in output.hashes.items():
                start = index * size
                places = range(max(start, prompt_len), start + size)  # of generated tokens
                generated = self._generated.setdefault(name, {})
                for place in places:
                    generated[place - start] = outputs[arrival][place - prompt_len]
                if not places:
                    continue
                if start < prompt_len:  # the prompt ends in this block
                    self._join(name, f"request {output.first}")
                else:
                    siblings = self._siblings.setdefault(output.hashes.get(index - 1, ""), set())
                    siblings.add(tuple([generated[place] for place in range(size)]))

    def _join(self, block: str, request: str) -> None:
        """Gives a block and the end of a prompt one owner."""
        owners = {self._owner_of(block), self._owner_of(request)}
        first = min(owners)
        for owner in owners - {first}:
            self._owner[owner] = first

    def _owner_of(self, name: str) -> str:
        while name in self._owner:
            name = self._owner[name]
        return name

    def _prompt(self, first: int) -> list[int]:
        request = self._past.requests[first]
        num_full, tail = divmod(request.prompt_len, self._size)
        prompt: list[int] = []
        parent = ""
        for index in range(num_full):
            is_hashed = index < len(request.hashes)
            block = request.hashes[index] if is_hashed else f"request {first}, block {index}"
            prompt += self._content(block, parent)
            parent = block
        return prompt + self._tail(first, num_full)[:tail]

    def _content(self, block: str, parent: str) -> list[int]:
        if block not in self._contents:
            siblings = self._siblings.setdefault(parent, set())
            generated = self._generated.get(block, {})
            content = self._made_up(block, generated)
            attempt = 0
            while not generated and tuple(content) in siblings and attempt < ATTEMPTS:
                attempt += 1
                content = self._made_up(block, generated, attempt)
            siblings.add(tuple(content))
            self._contents[block] = content
        return self._contents[block]

    def _tail(self, first: int, index: int) -> list[int]:
        """The tokens of the block in which a prompt ends. Those behind the prompt mean nothing."""
        names = self._past.requests[first].names
        tokens: dict[int, int] = {}
        for arrival in range(first, first + len(names)):
            block = self._past.outputs[arrival].hashes.get(index)
            if block is not None:
                tokens |= self._generated.get(block, {})
        return self._made_up(f"request {first}", tokens)

    def _made_up(self, name: str, generated: Mapping[int, int], attempt: int = 0) -> list[int]:
        """A block's tokens: the generated ones, and in the other places hashes of its owner."""
        owner = self._owner_of(name)
        return [
            generated[place]
            if place in generated
            else crc32(f"{owner} {place} {attempt}".encode()) % self._vocab_size
            for place in range(self._size)
        ]
