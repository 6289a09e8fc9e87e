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
    words: 32-bit words of a mask over the vocabulary.
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

    What it answers depends on the output alone, so it needs no part in preemption, roll-back or
    lookahead: what it keeps is the parser after the longest output that it was asked about. A
    failed one stays failed.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._parser = grammar.start.deep_copy()
        self._consumed = 0
        # why no answer can be trusted: a limit of the parser, or a token that is not allowed
        self.error: str | None = None

    def after(self, output: Tokens) -> Any:
        """llguidance's matcher after the output tokens; None if there is none, and `error` says
        why."""
        if self.error is not None:
            return None
        if len(output) < self._consumed:
            self._parser = self.grammar.start.deep_copy()
            self._consumed = 0
        if new := [int(token) for token in output[self._consumed :]]:
            self._consumed += len(new)
            self._parser.consume_tokens(new)
        return self.checked()

    def checked(self) -> Any:
        """llguidance's matcher; None if it has failed."""
        if self.error is None and self._parser.is_error():
            self.error = first_line(self._parser.get_error()) or "the parser failed"
        return None if self.error is not None else self._parser

    def check_ends(self, drafts: Sequence[int], ending: Sequence[int]) -> None:
        """Fail if the form is not complete where a mask allows its end. It would be an error of the
        library's.

        Args:
            drafts: tokens behind the output that `after` was last asked about.
            ending: numbers of drafts, ascending, behind which the mask allows an end token. Behind
                a draft that is not allowed no sample counts.
        """
        parser = self._parser if ending[-1] == 0 else self._parser.deep_copy()
        for position in range(ending[-1] + 1):
            if position and not parser.validate_tokens(drafts[position - 1 : position]):
                return
            if position:
                parser.consume_token(drafts[position - 1])
            if position in ending and not parser.is_accepting():
                self.error = "an end token is allowed before the form is complete"
                return

    def forced(self, output: Tokens, limit: int) -> list[int]:
        """The next tokens, if the grammar leaves no choice; at most `most`."""
        parser = self.after(output)
        return (
            parser.compute_ff_tokens()[:limit]
            if parser is not None and not parser.is_stopped()
            else []
        )

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
    """[count, words] uint32: the allowed tokens of each sample, a bit each, for rows of one
    vocabulary.

    Bits of samples that no row names are all set. Behind a draft that is not allowed no sample
    counts, so its mask is not computed. A row whose matcher has failed may have every token except
    its `stops`: its sequence must not end as if its form was complete, and the engine cancels it
    after the step.
    """
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    bit_masks = np.full((count, rows[0].matcher.grammar.words), -1, np.int32)
    parsers = [
        (row.matcher.after(row.output), row.first, [int(token) for token in row.drafts])
        for row in rows
    ]
    if plain := [
        (parser, first) for parser, first, drafts in parsers if parser is not None and not drafts
    ]:
        fill_next_token_bitmask_par(_executor(), plain, bit_masks)
    if drafted := [
        (parser, first, drafts)
        for parser, first, drafts in parsers
        if parser is not None and drafts
    ]:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), drafted, bit_masks)
    bit_masks = bit_masks.view(np.uint32)
    ending = _allow_an_end(bit_masks, rows[0].matcher.grammar.ends)
    for row, (_, _, drafts) in zip(rows, parsers, strict=True):
        samples = slice(row.first, row.first + 1 + len(row.drafts))
        ends = np.flatnonzero(ending[samples]).tolist()
        if ends and row.matcher.checked() is not None:
            row.matcher.check_ends(drafts, ends)
        if row.matcher.checked() is None:
            allowed = bit_masks[samples]
            allowed[:] = 0xFFFFFFFF
            for token in row.stops:
                allowed[:, token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return bit_masks


def _allow_an_end(allowed: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """allowed [count, words] uint32 -> [count] bool: some end token is allowed."""
    words = [token // 32 for token in ends]
    bits = np.array([1 << token % 32 for token in ends], np.uint32)
    return np.asarray((allowed[:, words] & bits).any(axis=1))


@cache
def _executor() -> Any:
    """llguidance's threads: as many as there are CPUs, because the device waits for the masks."""
    from llguidance import LLExecutor

    return LLExecutor(os.cpu_count())


def first_line(message: str) -> str:
    """The part of the library's message that says what is wrong: one line, without the parser's
    state."""
    lines = [
        line.strip()
        for line in message.split("<state>")[0].replace("<non-verbose/>", "").splitlines()
        if line.strip()
    ]
    last = next((line for line in lines if line.startswith("error:")), "")
    return f"{lines[0] if lines else ''} {last}".strip()[:400]
