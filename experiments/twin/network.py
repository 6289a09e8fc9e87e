"""The network of a learnt policy (learned.py) in Flax, and its keys on arrays.

Training changes floats. A compiled step rounds them to the integers of a `Network` and computes
with those, so that the policy that is trained is the one that is exported.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.twin.learned import (
    FEATURES,
    FRACTION,
    LARGEST_HIDDEN,
    LARGEST_WEIGHT,
    WEIGHT_FRACTION,
    Network,
)
from experiments.twin.policies import all_offered
from experiments.twin.scheduler import Ints, Order, Requests, State, arrivals

FLOAT_BITS = 24  # of a float32's number, the hidden first one included
FLOAT_BIAS = 127  # of its exponent


class Scorer(nnx.Module):
    """features [..., 6], log2 of counts, -> score [...], in arrivals."""

    def __init__(self, units: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(len(FEATURES), units, rngs=rngs)
        self.output = nnx.Linear(units, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(jax.nn.relu(self.hidden(x)))[..., 0]


class Integers(NamedTuple):
    """The weights of a `Network`, as int32 arrays: hidden [units, features], bias [units], output
    [units], output_bias [], patience [].
    """

    hidden: Ints
    bias: Ints
    output: Ints
    output_bias: Ints
    patience: Ints


def integers(scorer: Scorer, patience: jax.Array | int) -> Integers:
    """The weights of a scorer as the integers of a `Network`. Kernels of Flax are [in, out]."""

    def weights(values: jax.Array) -> Ints:
        scaled = jnp.round(values * 2**WEIGHT_FRACTION)
        return jnp.clip(scaled, -LARGEST_WEIGHT, LARGEST_WEIGHT).astype(jnp.int32)

    def biases(values: jax.Array) -> Ints:
        largest = LARGEST_WEIGHT << FRACTION
        scaled = jnp.round(values * 2 ** (WEIGHT_FRACTION + FRACTION))
        return jnp.clip(scaled, -largest, largest).astype(jnp.int32)

    hidden = scorer.hidden
    output = scorer.output
    assert hidden.bias is not None
    assert output.bias is not None
    return Integers(
        weights(hidden.kernel[...].T),
        biases(hidden.bias[...]),
        weights(output.kernel[...][:, 0]),
        biases(output.bias[...][0]),
        jnp.asarray(patience, jnp.int32),
    )


def network_of(weights: Integers) -> Network:
    """The weights as a value of plain integers, for `learned.policy`."""
    hidden, bias, output, output_bias, patience = jax.device_get(weights)
    rows = tuple([tuple(row) for row in hidden.tolist()])
    return Network(
        rows, tuple(bias.tolist()), tuple(output.tolist()), int(output_bias), int(patience)
    )


def weights_of(network: Network) -> Integers:
    """The other way: the value as arrays."""
    return Integers(*[np.asarray(part, np.int32) for part in network])


def log2(counts: Ints) -> Ints:
    """As `learned.log2`: the exponent and the first bits of the fraction are those of a float32, which
    has them side by side. Large numbers lose bits that matter to neither, so that no conversion
    rounds.
    """
    number = counts + 1
    exact = jnp.where(number < 2**FLOAT_BITS, number, number & -(2**8)).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(exact, jnp.int32)
    return (bits >> (FLOAT_BITS - 1 - FRACTION)) - (FLOAT_BIAS << FRACTION)


def features(state: State, requests: Requests) -> tuple[Ints, ...]:
    """int32 [N] each: as `learned.features`."""
    output = state.length - requests.prompt_len
    return (
        log2(requests.prompt_len),
        log2(output),
        log2(requests.limit - requests.prompt_len),
        log2(requests.predicted),
        log2(jnp.maximum(requests.predicted - output, 0)),
        jnp.clip(requests.priority, -8, 7) << FRACTION,
    )


def order(weights: Integers, state: State, requests: Requests) -> Order:
    """The order of a learnt policy: its keys are those of `learned.key`."""
    values = weights.bias
    for column, inputs in enumerate(features(state, requests)):
        values = values + inputs[:, None] * weights.hidden[:, column]
    hidden = jnp.clip(values >> WEIGHT_FRACTION, 0, LARGEST_HIDDEN)
    total = jnp.sum(hidden * weights.output, axis=-1) + weights.output_bias
    score = jnp.clip(total >> WEIGHT_FRACTION, 0, weights.patience << FRACTION)
    return all_offered((arrivals(state) << FRACTION) + score)
