"""`Matcher`: where one sequence is in its grammar, and the tokens that may follow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Tokens = Sequence[int] | np.ndarray


class Grammar(NamedTuple):
    """A compiled grammar. It never changes: every sequence gets a matcher of its own.

    start: llguidance's matcher before the first token.
    words: the number of 32-bit words of a mask over the vocabulary.
    ignored: keywords of a JSON schema that change nothing, each with its place; empty if all are
        supported.
    ends: the tokens that end a form.
    """

    start: Any
    words: int
    ignored: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()

    def matcher(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """The tokens that a grammar allows after a sequence's output.

    Its answers depend on the output alone, so nothing is to be done at a preemption, a roll-back or
    a predicted step. It keeps the parser's state after the output that it was last asked about. A
    longer output, which begins with that one, is parsed from there, and a shorter one from the
    beginning. A matcher that has failed stays failed.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._parser = grammar.start.deep_copy()
        self._consumed = 0
        # why no answer can be trusted: a limit of the parser, or a token that is not allowed
        self.error: str | None = None

    def after(self, output: Tokens) -> Any:
        """llguidance's matcher after the output; None, and `error` says why, if it has failed."""
        if self.error is not None:
            return None
        if len(output) < self._consumed:
            self._parser = self.grammar.start.deep_copy()
            self._consumed = 0
        new_tokens = [int(token) for token in output[self._consumed :]]
        if new_tokens:
            self._consumed += len(new_tokens)
            self._parser.consume_tokens(new_tokens)
        return self.usable_parser()

    def usable_parser(self) -> Any:
        """llguidance's matcher; None, and `error` says why, if it has failed."""
        if self.error is None and self._parser.is_error():
            self.error = first_line(self._parser.get_error()) or "the parser failed"
        return None if self.error is not None else self._parser

    def check_ends(self, drafts: Sequence[int], end_places: Sequence[int]) -> None:
        """Set `error` if a mask allows an end token where the form is not complete, which is an
        error of the library.

        Args:
            drafts: tokens that follow the output that `after` was last asked about.
            end_places: after how many of the drafts the mask allows an end token; ascending. Those
                after a draft that is not allowed are not checked, because no sample there counts.
        """
        # a copy, if drafts are consumed
        parser = self._parser if end_places[-1] == 0 else self._parser.deep_copy()
        for position in range(end_places[-1] + 1):
            if position > 0:
                draft = drafts[position - 1]
                if not parser.validate_tokens([draft]):
                    return
                parser.consume_token(draft)
            if position in end_places and not parser.is_accepting():
                self.error = "an end token is allowed before the form is complete"
                return

    def forced(self, output: Tokens, limit: int) -> list[int]:
        """The next tokens, at most `limit`, as long as the grammar leaves no choice."""
        parser = self.after(output)
        if parser is None or parser.is_stopped():
            return []
        return parser.compute_ff_tokens()[:limit]

    def allowed(self, output: Tokens, drafts: Tokens) -> int:
        """How many of the drafts, from the first, are allowed after the output."""
        parser = self.after(output)
        return 0 if parser is None else parser.validate_tokens([int(token) for token in drafts])


class MaskRow(NamedTuple):
    """A row of a step whose tokens are constrained.

    first: index of its first mask; one more follows for each draft.
    stops: the tokens that end the sequence.
    """

    matcher: Matcher
    output: Tokens
    drafts: Tokens
    first: int
    stops: Sequence[int]


def masks(rows: Sequence[MaskRow], count: int) -> np.ndarray:
    """[count, words] uint32: a bit for each token, which is set if the sample may have the token.

    The rows have one vocabulary. A sample that belongs to no row may have any token. A mask behind a
    draft that is not allowed is not computed, because no sample counts there. A row whose matcher has
    failed may have any token but its `stops`: the engine cancels its sequence after the step, and
    until then it must not end as if its form were complete.
    """
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    bit_masks = np.full((count, rows[0].matcher.grammar.words), -1, np.int32)
    work = [
        (row.matcher.after(row.output), row.first, [int(token) for token in row.drafts])
        for row in rows
    ]
    usable = [(parser, first, drafts) for parser, first, drafts in work if parser is not None]
    plain = [(parser, first) for parser, first, drafts in usable if not drafts]
    with_drafts = [(parser, first, drafts) for parser, first, drafts in usable if drafts]
    if plain:
        fill_next_token_bitmask_par(_executor(), plain, bit_masks)
    if with_drafts:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), with_drafts, bit_masks)
    bit_masks = bit_masks.view(np.uint32)
    has_end = _has_end(bit_masks, rows[0].matcher.grammar.ends)
    for row, (_, _, drafts) in zip(rows, work, strict=True):
        samples = slice(row.first, row.first + 1 + len(row.drafts))
        end_places = np.flatnonzero(has_end[samples]).tolist()
        if end_places and row.matcher.usable_parser() is not None:
            row.matcher.check_ends(drafts, end_places)
        if row.matcher.usable_parser() is None:
            allowed = bit_masks[samples]
            allowed[:] = 0xFFFFFFFF
            for token in row.stops:
                allowed[:, token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return bit_masks


def _has_end(bit_masks: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """bit_masks [count, words] uint32 -> [count] bool: whether one of the tokens `ends` is set."""
    words = [token // 32 for token in ends]
    bits = np.array([1 << token % 32 for token in ends], np.uint32)
    return np.asarray((bit_masks[:, words] & bits).any(axis=1))


@cache
def _executor() -> Any:
    """llguidance's threads: as many as there are CPUs, because the device waits for the masks."""
    from llguidance import LLExecutor

    return LLExecutor(os.cpu_count())


def first_line(message: str) -> str:
    """What is wrong, by a message of the library: its first line and the line with "error:", in
    one line.

    The parser's state is left out.
    """
    text = message.split("<state>")[0].replace("<non-verbose/>", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    error = next((line for line in lines[1:] if line.startswith("error:")), "")
    if lines[0].startswith("error:"):
        error = ""  # the first line has it
    return f"{lines[0]} {error}".strip()[:400]
