"""Taps of requests: what a step must return beside samples, and what each request gets of it.

A step gives parts (`read`), by positions. A session or a recording keeps the parts, and puts them
together (text/tap_arrays.py). So a part that is computed again, after a preemption or a failed
step, overwrites the same positions. Rejected drafts and rows of predicted steps that were not
needed are in no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from immutables import Map

from pagedjax.device import attention
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.side_outputs import SideArrays, SideOutputs, union
from pagedjax.engine.outcome import NewRequest, Outcome, Reader, Reading
from pagedjax.engine.runtime import Runtime
from pagedjax.host.admission import final_length
from pagedjax.options.params import SamplingParams, Taps
from pagedjax.text.tap_arrays import TapPart

NUMBER_BYTES = 4  # arrays are float32 and int32


# --- a request ------------------------------------------------------------------------------------


def start(request: NewRequest) -> Mapping[str, SideOutputs]:
    """The side outputs of steps with a new request that has taps, by the id of its sequences.

    Raises:
        ValueError: see `side_outputs_by`.
    """
    params = request.submitted.params
    assert isinstance(params, SamplingParams)
    if not params.taps:
        return {}
    names = request.submitted.names
    prepared = request.prepared.request
    side_outputs = side_outputs_by(
        names[0],
        params.taps,
        request.runtime,
        prompt_len=prepared.prompt_len,
        tokens=final_length(prepared, request.runtime.scheduler_config),
        branches=len(names),
    )
    return dict.fromkeys(names, side_outputs)


def side_outputs_by(
    name: str, taps: Taps, runtime: Runtime, prompt_len: int, tokens: int, branches: int
) -> SideOutputs:
    """The side outputs of the steps that compute a request.

    Args:
        name: the id of the request.
        tokens: the number of tokens of a branch at its longest, with the prompt.

    Raises:
        ValueError: layers or heads that the model does not have, experts of a dense layer,
            attention whose probabilities the engine does not have, or arrays of more than
            `max_tap_bytes`.
    """
    config = runtime.config
    side_outputs = SideOutputs(taps.hidden_states, taps.attention, taps.experts)
    subject = f"request {name!r}: taps"
    _check_layers(subject, side_outputs, runtime.model.config)
    if side_outputs.attention:
        _check_attention(subject, runtime)
    size = nbytes(side_outputs, runtime.model.config, prompt_len, tokens, branches)
    if size > config.max_tap_bytes:
        in_branches = f" in {branches} branches" if branches > 1 else ""
        raise ValueError(
            f"{subject} would be {size} bytes, for {prompt_len} tokens of prompt and up to "
            f"{tokens - prompt_len} of output{in_branches}; max_tap_bytes is "
            f"{config.max_tap_bytes}; lower max_tokens, name fewer layers or heads, or raise "
            "LLM(max_tap_bytes=...)"
        )
    return side_outputs


def _check_layers(subject: str, side_outputs: SideOutputs, c: DecoderConfig) -> None:
    """Raises ValueError for layers or heads that the model does not have, and for experts of a
    dense layer. The text begins with `subject`.
    """

    def check(field: str, values: Iterable[int], limit: int, kind: str) -> None:
        for value in values:
            if value >= limit:
                raise ValueError(f"{subject}.{field} has {value}; {kind} are 0 to {limit - 1}")

    attention_layers = [layer for layer, _ in side_outputs.attention]
    attention_heads = [head for _, heads in side_outputs.attention for head in heads]
    check("hidden_states", side_outputs.hidden, c.layers + 1, "hidden states of this model")
    check("attention", attention_layers, c.layers, "layers of this model")
    check("attention", attention_heads, c.heads, "heads of this model")
    check("experts", side_outputs.experts, c.layers, "layers of this model")
    with_mixers = [layer for layer in attention_layers if c.kinds[layer].mixer]
    if with_mixers:
        with_attention = [str(i) for i, kind in enumerate(c.kinds) if not kind.mixer]
        raise ValueError(
            f"{subject}.attention has layer {with_mixers[0]}, which has no attention; those with "
            f"attention are {', '.join(with_attention)}"
        )
    sparse = [i for i, kind in enumerate(c.kinds) if kind.sparse]
    dense = [layer for layer in side_outputs.experts if layer not in sparse]
    if dense:
        choice = "this model has no experts"
        if sparse:
            choice = f"those with experts are {', '.join(map(str, sparse))}"
        raise ValueError(f"{subject}.experts has layer {dense[0]}, which is dense; {choice}")


def _check_attention(subject: str, runtime: Runtime) -> None:
    """Raises ValueError if an engine cannot give probabilities of attention. The text begins with
    `subject`.
    """
    config = runtime.config
    if runtime.model.placement:
        raise ValueError(
            f"{subject}.attention needs a model on one device, which has all heads; leave mesh and "
            "devices out"
        )
    if runtime.shapes.view or runtime.shapes.selection:
        raise ValueError(
            f"{subject}.attention gives probabilities by position, and with kv_policy "
            f"{getattr(config.kv_policy, 'name', None)!r} a query sees a part of them; use "
            "kv_policy='full'"
        )
    if attention.find(config.attention_impl).probabilities is None:
        raise ValueError(
            f"{subject}.attention: attention_impl {config.attention_impl!r} does not say what it "
            "weighs values with; give its Implementation the field `probabilities`, or use 'xla'"
        )


def nbytes(
    side_outputs: SideOutputs, c: DecoderConfig, prompt_len: int, tokens: int, branches: int = 1
) -> int:
    """Bytes of a request's arrays at its longest. The last token of a branch is not computed."""
    position_bytes = NUMBER_BYTES * c.hidden * len(side_outputs.hidden)
    if side_outputs.experts:  # an id and a weight of each chosen expert
        assert c.experts is not None
        position_bytes += 2 * NUMBER_BYTES * c.experts.chosen * len(side_outputs.experts)
    outputs = tokens - prompt_len
    heads = sum(len(heads_of_layer) for _, heads_of_layer in side_outputs.attention)
    # the sum of the outputs' contexts, which have prompt_len, prompt_len + 1, ... tokens
    contexts = outputs * prompt_len + outputs * (outputs - 1) // 2
    branch_bytes = position_bytes * (outputs - 1) + NUMBER_BYTES * heads * contexts
    return position_bytes * prompt_len + branches * branch_bytes


# --- a step ---------------------------------------------------------------------------------------


class TapsBegin(NamedTuple):
    """A request with taps joins the queue.

    names: ids of its sequences.
    """

    names: Sequence[str]
    prompt_len: int


class StepTaps(NamedTuple):
    """The parts that a step gave."""

    parts: tuple[TapPart, ...]


def read(entries: Map[str, SideOutputs], outcome: Outcome) -> Reading:
    """The result is what a step gives the requests that asked for taps, a `TapPart` each."""
    seqs = outcome.plan.seqs
    rows = outcome.rows_of(entries)
    if not rows:
        return Reading(entries)
    assert outcome.sent.output.taps is not None, "`side_outputs` chose the program"
    side_outputs = union(entries[seqs[i].request_id] for i in rows)
    taps = _on_host(outcome.sent.output.taps, side_outputs)
    first_tokens = outcome.first_tokens
    first_samples = outcome.first_samples
    parts = tuple(
        _part_of(entries[seqs[i].request_id], outcome, i, taps, first_tokens[i], first_samples[i])
        for i in rows
    )
    return Reading(entries, parts)


TAPS = Reader(
    "taps",
    SamplingParams,
    read=read,
    options=("taps",),
    start=start,
    side_outputs=lambda entry: entry,
)


def _part_of(
    side_outputs: SideOutputs,
    outcome: Outcome,
    row: int,
    taps: Any,
    first_token: int,
    first_sample: int,
) -> TapPart:
    """What a step gives the sequence of a row.

    Args:
        taps: a `SideArrays` with numpy arrays.
        first_token, first_sample: where the row's tokens and samples begin in the sent step.
    """
    plan = outcome.plan
    num_samples = len(outcome.tokens_of(row))
    rejected = plan.drafts[row] + 1 - num_samples if plan.drafts else 0
    tokens = slice(first_token, first_token + plan.counts[row] - rejected)
    attention = {}
    if side_outputs.attention and outcome.reaches_end(row):
        samples = slice(first_sample, first_sample + num_samples)
        attention = _attention_of(side_outputs, outcome, row, taps, samples)
    routes = {layer: taps.experts[layer] for layer in side_outputs.experts}
    return TapPart(
        request_id=plan.seqs[row].request_id,
        start=plan.starts[row],
        hidden_states={
            layer: taps.hidden[layer][tokens].astype(np.float32) for layer in side_outputs.hidden
        },
        experts={
            layer: (route.experts[tokens].copy(), route.weights[tokens].copy())
            for layer, route in routes.items()
        },
        output=plan.lengths[row] - outcome.data[row].prompt_len,
        attention=attention,
    )


def _attention_of(
    side_outputs: SideOutputs, outcome: Outcome, row: int, taps: Any, samples: slice
) -> dict[int, list[np.ndarray]]:
    """By layer, the probabilities of attention of the tokens that the `samples` of a row follow,
    for each sample [heads, positions]. The other arguments are those of `_part_of`.
    """
    heads_of = dict(outcome.sent.side_outputs.attention)
    attention = {}
    for layer, heads in side_outputs.attention:
        columns = [heads_of[layer].index(head) for head in heads]
        attention[layer] = [
            weights[columns, : outcome.plan.lengths[row] + j]
            for j, weights in enumerate(taps.attention[layer][samples])
        ]
    return attention


def _on_host(taps: SideArrays, side_outputs: SideOutputs) -> Any:
    """`SideArrays` with numpy arrays, of these side outputs."""
    chosen = SideArrays(
        {i: taps.hidden[i] for i in side_outputs.hidden},
        {layer: taps.attention[layer] for layer, _ in side_outputs.attention},
        {layer: taps.experts[layer] for layer in side_outputs.experts},
        {},
    )
    return jax.device_get(chosen)
