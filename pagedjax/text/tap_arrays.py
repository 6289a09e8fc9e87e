"""What the taps of a branch gave, put together part by part. Users get it as `TapArrays`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class TapPart(NamedTuple):
    """What one step gives one sequence.

    start: position of the first token of `hidden_states` and `experts`.
    hidden_states: by number, as `Taps` counts them (0: the first layer's input), [n, H] float32.
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
        hidden_states: by number, as `Taps` counts them (0: the first layer's input), [tokens, H]
            float32, for the tokens of the prompt and of the output. The output's last token is
            missing, because nothing is sampled after it.
        attention: by layer, for each output token an array [heads, context] float32: the attention
            weights of the token before it, over all tokens up to that token. The heads are in
            ascending order.
        experts: by layer, ids [tokens, chosen] int32, in the order in which the router prefers
            them, and weights [tokens, chosen] float32.
    """

    hidden_states: dict[int, np.ndarray]
    attention: dict[int, tuple[np.ndarray, ...]]
    experts: dict[int, tuple[np.ndarray, np.ndarray]]


class _Column:
    """An array of rows by position. It grows."""

    def __init__(self) -> None:
        self._rows = np.zeros(0)
        self.count = 0

    def put(self, start: int, rows: np.ndarray) -> None:
        end = start + len(rows)
        if end > len(self._rows):
            old = self._rows[: self.count]
            self._rows = np.empty((max(end, 2 * self.count), *rows.shape[1:]), rows.dtype)
            if len(old):  # the first array has another shape and dtype
                self._rows[: len(old)] = old
        self._rows[start:end] = rows
        self.count = max(self.count, end)

    def first(self, limit: int | None = None) -> np.ndarray:
        return self._rows[: self.count][:limit]


class TapCollector:
    """The parts of one branch so far. Branches share the parts of the prompt's tokens."""

    def __init__(self, prompt_len: int, prompt: dict[Any, _Column]) -> None:
        self.prompt_len = prompt_len
        self._prompt = prompt
        self._output: dict[Any, _Column] = {}
        self._attention: dict[int, dict[int, np.ndarray]] = {}

    def take(self, part: TapPart) -> None:
        for number, states in part.hidden_states.items():
            self._put(("hidden", number), part.start, states)
        for layer, arrays in part.experts.items():
            for kind, array in zip(("ids", "weights"), arrays, strict=True):
                self._put((kind, layer), part.start, array)
        for layer, samples in part.attention.items():
            weights = {part.output + j: sample for j, sample in enumerate(samples)}
            self._attention.setdefault(layer, {}).update(weights)

    def _put(self, key: Any, start: int, rows: np.ndarray) -> None:
        prompt_left = max(self.prompt_len - start, 0)  # tokens of the prompt from `start` on
        if prompt_left:
            self._prompt.setdefault(key, _Column()).put(start, rows[:prompt_left])
        if len(rows) > prompt_left:
            first = max(start - self.prompt_len, 0)
            self._output.setdefault(key, _Column()).put(first, rows[prompt_left:])

    def arrays(self, outputs: int) -> TapArrays:
        """The arrays of a branch that has `outputs` tokens of output.

        Steps may have computed more, which are left out.
        """

        def rows(key: Any) -> np.ndarray:
            pieces = [self._prompt[key].first()]
            if key in self._output:
                pieces.append(self._output[key].first(max(outputs - 1, 0)))
            return np.concatenate(pieces)

        def numbers(kind: str) -> list[int]:
            return sorted(number for other_kind, number in self._prompt if other_kind == kind)

        attention = {}
        for layer in sorted(self._attention):
            samples = self._attention[layer]
            attention[layer] = tuple(samples[i] for i in range(outputs) if i in samples)
        return TapArrays(
            hidden_states={number: rows(("hidden", number)) for number in numbers("hidden")},
            attention=attention,
            experts={
                layer: (rows(("ids", layer)), rows(("weights", layer))) for layer in numbers("ids")
            },
        )


def collectors(names: Sequence[str], prompt_len: int) -> dict[str, TapCollector]:
    """An empty `TapCollector` for each branch of a request, by its id. All have the same prompt."""
    prompt: dict[Any, _Column] = {}
    return {name: TapCollector(prompt_len, prompt) for name in names}
