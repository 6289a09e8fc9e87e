"""Taps of requests: what a step must return beside samples, and what each request gets of it.

A step gives parts (`read`), by positions; whoever keeps them (a session, a recording) puts them
together (`collect`). So a part that is computed again, after a preemption or a failed step,
overwrites the same positions. Rejected drafts and rows of predicted steps that were not needed are
in no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from immutables import Map

from pagedjax.device import attention
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.taps import Tapped, Wanted, union
from pagedjax.engine.outcome import NewRequest, Outcome, Reader, Reading
from pagedjax.engine.runtime import Runtime
from pagedjax.options.params import SamplingParams, Taps

NUMBER = 4  # bytes: arrays are float32 and int32


# --- a request ------------------------------------------------------------------------------------


def start(request: NewRequest) -> Mapping[str, Wanted]:
    """What a new request with taps wants of steps, by the id of its sequences.

    Raises:
        ValueError: see `wanted_by`.
    """
    params = request.params
    assert isinstance(params, SamplingParams)
    if not params.taps:
        return {}
    names = request.names
    prompt_len = request.prepared.request.prompt_len
    sizes = prompt_len, request.length, len(names)
    return dict.fromkeys(names, wanted_by(names[0], params.taps, request.runtime, *sizes))


def wanted_by(
    name: str, taps: Taps, runtime: Runtime, prompt_len: int, tokens: int, branches: int
) -> Wanted:
    """What a request wants of the steps that compute it.

    Args:
        name: of the request.
        tokens: of a branch at its longest, with the prompt.

    Raises:
        ValueError: layers or heads that the model does not have, experts of a dense layer,
            attention whose probabilities the engine does not have, or arrays of more than
            `max_tap_bytes`.
    """
    model = runtime.model
    config = runtime.config
    layers = model.config.layers
    wanted = Wanted(taps.hidden_states, taps.attention, taps.experts)
    subject = f"request {name!r}: taps"

    def check(field: str, values: Iterable[int], limit: int, kind: str) -> None:
        for value in values:
            if value >= limit:
                raise ValueError(f"{subject}.{field} has {value}; {kind} are 0 to {limit - 1}")

    attention_layers = [layer for layer, _ in wanted.attention]
    attention_heads = [head for _, heads in wanted.attention for head in heads]
    check("hidden_states", wanted.hidden, layers + 1, "hidden states of this model")
    check("attention", attention_layers, layers, "layers of this model")
    check("attention", attention_heads, model.config.heads, "heads of this model")
    check("experts", wanted.experts, layers, "layers of this model")
    sparse = [i for i, kind in enumerate(model.config.kinds) if kind.sparse]
    dense = [layer for layer in wanted.experts if layer not in sparse]
    if dense:
        choice = "this model has no experts"
        if sparse:
            choice = f"those with experts are {', '.join(map(str, sparse))}"
        raise ValueError(f"{subject}.experts has layer {dense[0]}, which is dense; {choice}")
    if wanted.attention and model.placement:
        raise ValueError(
            f"{subject}.attention needs a model on one device, which has all heads; leave mesh and "
            "devices out"
        )
    if wanted.attention and (runtime.shapes.view or runtime.shapes.selection):
        raise ValueError(
            f"{subject}.attention gives probabilities by position, and with kv_policy "
            f"{getattr(config.kv_policy, 'name', None)!r} a query sees a part of them; use "
            "kv_policy='full'"
        )
    if wanted.attention and attention.find(config.attention_impl).probabilities is None:
        raise ValueError(
            f"{subject}.attention: attention_impl {config.attention_impl!r} does not say what it "
            "weighs values with; give its Implementation the field `probabilities`, or use 'xla'"
        )
    size = nbytes(wanted, model.config, prompt_len, tokens, branches)
    if size > config.max_tap_bytes:
        in_branches = f" in {branches} branches" if branches > 1 else ""
        raise ValueError(
            f"{subject} would be {size} bytes, for {prompt_len} tokens of prompt and up to "
            f"{tokens - prompt_len} of output{in_branches}; max_tap_bytes is "
            f"{config.max_tap_bytes}; lower max_tokens, name fewer layers or heads, or raise "
            "LLM(max_tap_bytes=...)"
        )
    return wanted


def nbytes(
    wanted: Wanted, c: DecoderConfig, prompt_len: int, tokens: int, branches: int = 1
) -> int:
    """Bytes of a request's arrays at its longest. The last token of a branch is not computed."""
    position = NUMBER * c.hidden * len(wanted.hidden)
    if wanted.experts:
        assert c.experts is not None
        position += 2 * NUMBER * c.experts.chosen * len(wanted.experts)
    outputs = tokens - prompt_len
    heads = sum(len(heads_of_layer) for _, heads_of_layer in wanted.attention)
    # of the outputs: prompt_len, prompt_len + 1, ...
    contexts = outputs * prompt_len + outputs * (outputs - 1) // 2
    of_branch = position * (outputs - 1) + NUMBER * heads * contexts
    return position * prompt_len + branches * of_branch


# --- a step ---------------------------------------------------------------------------------------


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


class TapsBegin(NamedTuple):
    """A request with taps joins the queue.

    names: ids of its sequences.
    """

    names: Sequence[str]
    prompt_len: int


class StepTaps(NamedTuple):
    """The parts that a step gave."""

    parts: tuple[TapPart, ...]


def read(wants: Map[str, Wanted], outcome: Outcome) -> Reading:
    """The result is what a step gives the requests that asked for taps, a `TapPart` each."""
    seqs = outcome.plan.seqs
    rows = [i for i, seq in enumerate(seqs) if seq.request_id in wants]
    if not rows:
        return Reading(wants)
    assert outcome.sent.output.taps is not None, "`wanted` chose the program"
    wanted = union(wants[seqs[i].request_id] for i in rows)
    taps = _on_host(outcome.sent.output.taps, wanted)
    first_tokens = outcome.first_tokens
    first_samples = outcome.first_samples
    parts = tuple(
        _part_of(wants[seqs[i].request_id], outcome, i, taps, first_tokens[i], first_samples[i])
        for i in rows
    )
    return Reading(wants, parts)


TAPS = Reader(
    "taps",
    SamplingParams,
    read=read,
    options=("taps",),
    start=start,
    wanted=lambda wanted: wanted,
)


def _part_of(
    wanted: Wanted, outcome: Outcome, row: int, taps: Any, first_token: int, first_sample: int
) -> TapPart:
    """What a step gives the sequence of a row.

    Args:
        taps: a `Tapped` with numpy arrays.
        first_token, first_sample: of the row, among those of the sent step.
    """
    plan = outcome.plan
    sample = outcome.sampled[row]
    num_samples = len(sample) if isinstance(sample, tuple) else 1
    rejected = plan.drafts[row] + 1 - num_samples if plan.drafts else 0
    tokens = slice(first_token, first_token + plan.counts[row] - rejected)
    attention = {}
    if wanted.attention and outcome.reaches_end(row):
        samples = slice(first_sample, first_sample + num_samples)
        heads_of = dict(outcome.sent.wanted.attention)
        for layer, heads in wanted.attention:
            columns = [heads_of[layer].index(head) for head in heads]
            attention[layer] = [
                weights[columns, : plan.lengths[row] + j]
                for j, weights in enumerate(taps.attention[layer][samples])
            ]
    routes = {layer: taps.experts[layer] for layer in wanted.experts}
    return TapPart(
        request_id=plan.seqs[row].request_id,
        start=plan.starts[row],
        hidden_states={
            layer: taps.hidden[layer][tokens].astype(np.float32) for layer in wanted.hidden
        },
        experts={
            layer: (route.experts[tokens].copy(), route.weights[tokens].copy())
            for layer, route in routes.items()
        },
        output=plan.lengths[row] - outcome.data[row].prompt_len,
        attention=attention,
    )


def _on_host(taps: Tapped, asked: Wanted) -> Any:
    """`Tapped` with numpy arrays, of what is asked for."""
    chosen = Tapped(
        {i: taps.hidden[i] for i in asked.hidden},
        {layer: taps.attention[layer] for layer, _ in asked.attention},
        {layer: taps.experts[layer] for layer in asked.experts},
        {},
    )
    return jax.device_get(chosen)


# --- together -------------------------------------------------------------------------------------


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
