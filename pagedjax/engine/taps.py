"""Taps of requests: what a step must return beside samples, and what each request gets of it.

A step gives parts (`parts`), by positions; whoever keeps them (a session, a recording) puts them
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

from pagedjax.device import attention
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.taps import NOTHING, Tapped, Wanted, union
from pagedjax.engine.lookahead import SentStep
from pagedjax.engine.requests import SequenceData
from pagedjax.engine.results import first_samples
from pagedjax.engine.runtime import Runtime
from pagedjax.host.drafts import Sample
from pagedjax.host.types import Plan
from pagedjax.params import Taps

NUMBER = 4  # bytes: arrays are float32 and int32
Wants = Mapping[str, Wanted]  # by the id of a sequence, of those that want something


# --- a request ------------------------------------------------------------------------------------


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
    model, config = runtime.model, runtime.config
    c, impl, most = model.config, config.attention_impl, config.max_tap_bytes
    wanted = Wanted(taps.hidden_states, taps.attention, taps.experts)
    what = f"request {name!r}: taps"

    def check(field: str, values: Iterable[int], limit: int, of: str) -> None:
        for value in values:
            if value >= limit:
                raise ValueError(f"{what}.{field} has {value}; {of} are 0 to {limit - 1}")

    check("hidden_states", wanted.hidden, c.layers + 1, "hidden states of this model")
    check("attention", [layer for layer, _ in wanted.attention], c.layers, "layers of this model")
    check(
        "attention",
        [head for _, heads in wanted.attention for head in heads],
        c.heads,
        "heads of this model",
    )
    check("experts", wanted.experts, c.layers, "layers of this model")
    sparse = [i for i, kind in enumerate(c.kinds) if kind.sparse]
    if dense := [layer for layer in wanted.experts if layer not in sparse]:
        which = (
            f"those with experts are {', '.join(map(str, sparse))}"
            if sparse
            else "this model has no experts"
        )
        raise ValueError(f"{what}.experts has layer {dense[0]}, which is dense; {which}")
    if wanted.attention and model.placement:
        raise ValueError(
            f"{what}.attention needs a model on one device, which has all heads; leave mesh and devices out"
        )
    if wanted.attention and (runtime.shapes.view or runtime.shapes.selection):
        raise ValueError(
            f"{what}.attention gives probabilities by position, and with kv_policy "
            f"{getattr(config.kv_policy, 'name', None)!r} a query sees a part of them; use kv_policy='full'"
        )
    if wanted.attention and attention.find(impl).probabilities is None:
        remedy = "give its Implementation the field `probabilities`, or use 'xla'"
        raise ValueError(
            f"{what}.attention: attention_impl {impl!r} does not say what it weighs values with; {remedy}"
        )
    size = nbytes(wanted, c, prompt_len, tokens, branches)
    if size > most:
        raise ValueError(
            f"{what} would be {size} bytes, for {prompt_len} tokens of prompt and up to {tokens - prompt_len} of output"
            f"{f' in {branches} branches' if branches > 1 else ''}; max_tap_bytes is {most}; lower max_tokens, name "
            "fewer layers or heads, or raise LLM(max_tap_bytes=...)"
        )
    return wanted


def nbytes(
    wanted: Wanted, c: DecoderConfig, prompt_len: int, tokens: int, branches: int = 1
) -> int:
    """Bytes of the arrays of a request at its longest. The last token of a branch is not computed."""
    position = NUMBER * c.hidden * len(wanted.hidden)
    if wanted.experts:
        assert c.experts is not None
        position += 2 * NUMBER * c.experts.chosen * len(wanted.experts)
    outputs, heads = tokens - prompt_len, sum(len(some) for _, some in wanted.attention)
    # prompt_len, prompt_len + 1, ...
    contexts = outputs * prompt_len + outputs * (outputs - 1) // 2
    own = position * (outputs - 1) + NUMBER * heads * contexts
    return position * prompt_len + branches * own


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


def of_plan(plan: Plan, wants: Wants) -> Wanted:
    """What the rows of a plan want together."""
    mine = {wants[seq.request_id] for seq in plan.seqs if seq.request_id in wants}
    return union(mine) if mine else NOTHING


def parts(
    plan: Plan,
    wants: Wants,
    sequences: Mapping[str, SequenceData],
    sent: SentStep,
    rows: Sequence[int],
    sampled: Sequence[Sample],
) -> tuple[TapPart, ...]:
    """What a step gives the requests that asked.

    Args:
        rows: the rows of the sent step that are the plan's.
        sampled: as for `scheduler.commit`.
    """
    names = [(i, seq.request_id) for i, seq in enumerate(plan.seqs)]
    # the others are pooled
    mine = [(i, name) for i, name in names if name in wants and sequences[name].params.taps]
    if not mine:
        return ()
    assert sent.output.taps is not None, "`of_plan` chose the program"
    host = _on_host(sent.output.taps, union(wants[name] for _, name in mine))
    heads_of = dict(sent.wanted.attention)
    first, cu_q_lens = first_samples(plan) if plan.drafts else rows, sent.cu_q_lens
    found = []
    for i, name in mine:
        wanted, sample = wants[name], sampled[i]
        kept = len(sample) if isinstance(sample, tuple) else 1
        rejected = plan.drafts[i] + 1 - kept if plan.drafts else 0
        begin = int(cu_q_lens[rows[i]])
        at = slice(begin, begin + plan.counts[i] - rejected)
        states = {layer: host.hidden[layer][at].astype(np.float32) for layer in wanted.hidden}
        routes = {layer: host.experts[layer] for layer in wanted.experts}
        experts = {
            layer: (one.experts[at].copy(), one.weights[at].copy()) for layer, one in routes.items()
        }
        seen = {}
        if wanted.attention and plan.starts[i] + plan.counts[i] >= plan.lengths[i]:
            for layer, heads in wanted.attention:
                own = [heads_of[layer].index(head) for head in heads]
                samples = host.attention[layer][first[i] : first[i] + kept]
                seen[layer] = [one[own, : plan.lengths[i] + j] for j, one in enumerate(samples)]
        found.append(
            TapPart(
                name,
                plan.starts[i],
                states,
                experts,
                plan.lengths[i] - sequences[name].prompt_len,
                seen,
            )
        )
    return tuple(found)


def _on_host(taps: Tapped, asked: Wanted) -> Any:
    """`Tapped` with numpy arrays, of what is asked for."""
    some = Tapped(
        {i: taps.hidden[i] for i in asked.hidden},
        {layer: taps.attention[layer] for layer, _ in asked.attention},
        {layer: taps.experts[layer] for layer in asked.experts},
    )
    return jax.device_get(some)


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
        self._rows, self.count = np.zeros(0), 0

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
    """The parts of one branch so far. The branches of a request share those of the prompt's tokens."""

    def __init__(self, prompt_len: int, prompt: dict[Any, _Column]) -> None:
        self.prompt_len, self._prompt = prompt_len, prompt
        self._output: dict[Any, _Column] = {}
        self._attention: dict[int, dict[int, np.ndarray]] = {}

    def take(self, part: TapPart) -> None:
        for layer, states in part.hidden_states.items():
            self._put(("hidden", layer), part.start, states)
        for layer, arrays in part.experts.items():
            for kind, array in zip(("ids", "weights"), arrays, strict=True):
                self._put((kind, layer), part.start, array)
        for layer, seen in part.attention.items():
            self._attention.setdefault(layer, {}).update(
                {part.output + j: one for j, one in enumerate(seen)}
            )

    def _put(self, key: Any, start: int, rows: np.ndarray) -> None:
        own = max(self.prompt_len - start, 0)  # rows of the prompt
        if own:
            self._prompt.setdefault(key, _Column()).put(start, rows[:own])
        if len(rows) > own:
            self._output.setdefault(key, _Column()).put(max(start - self.prompt_len, 0), rows[own:])

    def arrays(self, outputs: int) -> TapArrays:
        """The arrays of a branch with so many tokens of output; a step may have computed more."""

        def rows(key: Any) -> np.ndarray:
            found = [self._prompt[key].first()]
            if key in self._output:
                found.append(self._output[key].first(max(outputs - 1, 0)))
            return np.concatenate(found)

        layers = {
            kind: sorted(layer for one, layer in self._prompt if one == kind)
            for kind in ("hidden", "ids")
        }
        seen = {
            layer: tuple(by[i] for i in range(outputs) if i in by)
            for layer, by in self._attention.items()
        }
        return TapArrays(
            {layer: rows(("hidden", layer)) for layer in layers["hidden"]},
            {layer: seen[layer] for layer in sorted(seen)},
            {layer: (rows(("ids", layer)), rows(("weights", layer))) for layer in layers["ids"]},
        )


def collect(names: Sequence[str], prompt_len: int) -> dict[str, Collected]:
    """What will be collected of the branches of a request, by their ids."""
    prompt: dict[Any, _Column] = {}
    return {name: Collected(prompt_len, prompt) for name in names}
