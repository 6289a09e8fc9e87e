"""Side outputs of a step: what it can return beside samples. `inner_arrays` are those of the
model's layers; a `SampleOutput` is computed from the logits that a sample is drawn from.

`SideOutputs` are static: each choice of them has a program of its own. Samples are computed as
without side outputs, so that they have the same bits; whatever only side outputs need is computed
beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

if TYPE_CHECKING:
    from pagedjax.device.attention import Attend
    from pagedjax.device.batch import Batch
    from pagedjax.device.models.decoder import Decoder, Run
    from pagedjax.device.models.mlp import Routes
    from pagedjax.device.sampling import SampledTokens


@dataclass(frozen=True)
class SampleOutput:
    """An output of each sample.

    Attributes:
        name: its key in `SideArrays.samples`.
        compute: (logits [R, V] float32, samples) -> a tree of arrays [R, ...] of 32-bit numbers.
            On a mesh, R are the rows of one device.
    """

    name: str
    compute: Callable[[jax.Array, SampledTokens], Any]


class SideOutputs(NamedTuple):
    """Which arrays a step returns beside samples. It is false if there are none.

    hidden: hidden states, counted as transformers counts them. 0 is the input of the first layer. i
        is the output of layer i - 1. The number of layers is the output of the last layer after the
        final norm.
    attention: by layer, the query heads whose probabilities are returned.
    experts: layers whose chosen experts are returned.
    samples: outputs of each sample.
    """

    hidden: tuple[int, ...] = ()
    attention: tuple[tuple[int, tuple[int, ...]], ...] = ()
    experts: tuple[int, ...] = ()
    samples: tuple[SampleOutput, ...] = ()

    def __bool__(self) -> bool:
        return any(map(bool, self))

    def outputs(self, layers: int) -> tuple[int, ...]:
        """The layers whose outputs are needed. The last one of the `layers` is never among them,
        because `Run.finish` gives its output.
        """
        inputs = {i for i in self.hidden if i < layers} | {layer for layer, _ in self.attention}
        return tuple(sorted(i - 1 for i in inputs if i))


NOTHING = SideOutputs()


class SideArrays(NamedTuple):
    """The arrays of `SideOutputs`, by layer."""

    hidden: dict[int, jax.Array]  # [T, H]
    # [R, heads, M S] float32, by position, for the token that each sample follows
    attention: dict[int, jax.Array]
    experts: dict[int, Routes]  # [T, chosen]
    samples: dict[str, Any]  # by name, what each `SampleOutput.compute` gave


def union(parts: Iterable[SideOutputs]) -> SideOutputs:
    """All side outputs of all parts."""
    hidden: set[int] = set()
    heads: dict[int, set[int]] = {}
    experts: set[int] = set()
    samples: set[SampleOutput] = set()
    for part in parts:
        hidden.update(part.hidden)
        experts.update(part.experts)
        samples.update(part.samples)
        for layer, heads_of_layer in part.attention:
            heads.setdefault(layer, set()).update(heads_of_layer)
    return SideOutputs(
        hidden=tuple(sorted(hidden)),
        attention=tuple((layer, tuple(sorted(heads[layer]))) for layer in sorted(heads)),
        experts=tuple(sorted(experts)),
        samples=tuple(sorted(samples, key=lambda output: output.name)),
    )


def inner_arrays(
    model: Decoder, run: Run, batch: Batch, attend: Attend, side_outputs: SideOutputs
) -> SideArrays:
    """The side outputs of a batch that come from the model's layers. Those of samples are left
    empty, because no sample is drawn yet.

    Args:
        run: of the batch. Its last outputs are those of the layers `side_outputs.outputs`.
    """
    layers = model.config.layers
    needed = side_outputs.outputs(layers)
    outputs = run.outputs[len(run.outputs) - len(needed) :]  # behind those that a drafter observes
    states = {layer + 1: x for layer, x in zip(needed, outputs, strict=True)}
    states[0] = model.embedded(batch)
    routes = dict(run.routes)
    if layers - 1 in side_outputs.experts:
        states[layers], routes[layers - 1] = run.finish(None, routed=True)
    elif layers in side_outputs.hidden:
        states[layers] = run.finish(None)
    attention = {
        layer: model.attention_weights(
            layer, states[layer], run.cache.k[batch.page_of(layer)], batch, attend, heads
        )
        for layer, heads in side_outputs.attention
    }
    return SideArrays(
        {i: states[i] for i in side_outputs.hidden},
        attention,
        {layer: routes[layer] for layer in side_outputs.experts},
        {},
    )
