"""What the taps of a branch gave, put together part by part. Users get it as `TapArrays`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class TapPart(NamedTuple):
    """What one step gives one sequence.

    start: position of the first token of `hidden_states` and `experts`.
    hidden_states: by number, [n, H] float32.
    experts: by layer, ids [n, chosen] int32 and weights [n, chosen] float32.
    output: index, among the sequence's outputs, of the first token of `attention`.
    attention: by layer, an array [heads, context] float32 for each sampled token.
    """

    request_id: str
    start: int
    hidden_states: dict[int, np.ndarray]
    experts: dict[int, tuple[np.ndarray, np.ndarray]]
    output: int
    attention: dict[int, list[np.ndarray]]


@dataclass(frozen=True, eq=False)
class TapArrays:
    """What the taps of one branch gave.

    Attributes:
        hidden_states: by number, [tokens, H] float32: of every token that was computed, the
            prompt's and the output's but for the last one, which nothing follows.
        attention: by layer, for each output token an array [heads, context] float32: what the token
            before it weighs the values of all tokens up to itself with. The heads are in ascending
            order.
        experts: by layer, ids [tokens, chosen] int32, the one with the largest weight first, and
            weights [tokens, chosen] float32.
    """

    hidden_states: dict[int, np.ndarray]
    attention: dict[int, tuple[np.ndarray, ...]]
    experts: dict[int, tuple[np.ndarray, np.ndarray]]


class _Column:
    """Rows by position, which grows."""

    def __init__(self) -> None:
        self._rows = np.zeros(0)
        self.count = 0

    def put(self, start: int, rows: np.ndarray) -> None:
        end = start + len(rows)
        if end > len(self._rows):
            old = self._rows[: self.count]
            self._rows = np.empty((max(end, 2 * self.count), *rows.shape[1:]), rows.dtype)
            self._rows[: len(old)] = old if len(old) else 0
        self._rows[start:end] = rows
        self.count = max(self.count, end)

    def first(self, most: int | None = None) -> np.ndarray:
        return self._rows[: self.count][:most]


class Collected:
    """The parts of one branch so far. Branches share the parts of the prompt's tokens."""

    def __init__(self, prompt_len: int, prompt: dict[Any, _Column]) -> None:
        self.prompt_len = prompt_len
        self._prompt = prompt
        self._output: dict[Any, _Column] = {}
        self._attention: dict[int, dict[int, np.ndarray]] = {}

    def take(self, part: TapPart) -> None:
        for layer, states in part.hidden_states.items():
            self._put(("hidden", layer), part.start, states)
        for layer, arrays in part.experts.items():
            for kind, array in zip(("ids", "weights"), arrays, strict=True):
                self._put((kind, layer), part.start, array)
        for layer, samples in part.attention.items():
            weights = {part.output + j: sample for j, sample in enumerate(samples)}
            self._attention.setdefault(layer, {}).update(weights)

    def _put(self, key: Any, start: int, rows: np.ndarray) -> None:
        prompt_rows = max(self.prompt_len - start, 0)
        if prompt_rows:
            self._prompt.setdefault(key, _Column()).put(start, rows[:prompt_rows])
        if len(rows) > prompt_rows:
            first = max(start - self.prompt_len, 0)
            self._output.setdefault(key, _Column()).put(first, rows[prompt_rows:])

    def arrays(self, outputs: int) -> TapArrays:
        """The arrays of a branch with so many tokens of output; a step may have computed more."""

        def rows(key: Any) -> np.ndarray:
            pieces = [self._prompt[key].first()]
            if key in self._output:
                pieces.append(self._output[key].first(max(outputs - 1, 0)))
            return np.concatenate(pieces)

        def layers(kind: str) -> list[int]:
            return sorted(layer for kind_of, layer in self._prompt if kind_of == kind)

        attention = {}
        for layer in sorted(self._attention):
            samples = self._attention[layer]
            attention[layer] = tuple(samples[i] for i in range(outputs) if i in samples)
        return TapArrays(
            hidden_states={layer: rows(("hidden", layer)) for layer in layers("hidden")},
            attention=attention,
            experts={
                layer: (rows(("ids", layer)), rows(("weights", layer))) for layer in layers("ids")
            },
        )


def collect(names: Sequence[str], prompt_len: int) -> dict[str, Collected]:
    """What will be collected of the branches of a request, by their ids."""
    prompt: dict[Any, _Column] = {}
    return {name: Collected(prompt_len, prompt) for name in names}
