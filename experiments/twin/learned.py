"""A learnt policy: a small network of integers gives each sequence a score. Imports no JAX.

    features  log2 of counts of the sequence, in sixteenths
    hidden    relu(weights * features + bias)
    score     weights * hidden + bias, from 0 to `patience` arrivals
    key       arrival + score: the lowest is admitted first, the highest is preempted first

All of it is integer arithmetic, so a key is the same on each machine, here and in a compiled
program (network.py), and a recording replays byte for byte.

Why every request ends, and the bound: scores are limited, so at most `patience` later requests ever
have a lower key than a request. When these have ended, it is the first of the queue and the last
victim, as under the policy "shortest".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedjax.host.policies import Policy
from pagedjax.host.types import Running, Seq

FRACTION = 4  # bits of a number behind the point: of features, hidden values and keys
WEIGHT_FRACTION = 6  # the same of weights
LARGEST_WEIGHT = 2**11 - 1  # of either sign
LARGEST_HIDDEN = 2**12 - 1
MOST_UNITS = 256  # sums over units are int32 in a compiled program
LARGEST_PATIENCE = 2**20

FEATURES = ("prompt", "output", "max output", "predicted", "predicted left", "priority")


class Network(NamedTuple):
    """Weights and biases with WEIGHT_FRACTION bits behind the point; biases of both layers with
    WEIGHT_FRACTION + FRACTION bits.

    hidden: [units][features]; bias: [units]; output: [units].
    patience: in arrivals.
    """

    hidden: tuple[tuple[int, ...], ...]
    bias: tuple[int, ...]
    output: tuple[int, ...]
    output_bias: int
    patience: int


def log2(count: int) -> int:
    """The logarithm of 1 + count, in sixteenths; between powers of two it is a straight line.

    The arithmetic is that of network.py: counts are below 2^27.
    """
    number = count + 1
    exponent = number.bit_length() - 1
    return (exponent << FRACTION) + (((number << FRACTION) >> exponent) & ((1 << FRACTION) - 1))


def features(seq: Seq) -> tuple[int, ...]:
    """The features of a sequence, in the order of FEATURES."""
    request = seq.request
    return features_of(
        request.prompt_len,
        seq.num_output,
        seq.limit - request.prompt_len,
        request.predicted or 0,
        request.priority,
    )


def features_of(
    prompt: int, output: int, max_output: int, predicted: int, priority: int
) -> tuple[int, ...]:
    """The features of a sequence with these counts."""
    return (
        log2(prompt),
        log2(output),
        log2(max_output),
        log2(predicted),
        log2(max(predicted - output, 0)),
        min(max(priority, -8), 7) << FRACTION,
    )


def score(network: Network, inputs: Sequence[int]) -> int:
    """The score of features, in sixteenths of an arrival."""
    total = network.output_bias
    for weights, bias, output in zip(network.hidden, network.bias, network.output, strict=True):
        value = bias + sum([weight * x for weight, x in zip(weights, inputs, strict=True)])
        total += output * min(max(value >> WEIGHT_FRACTION, 0), LARGEST_HIDDEN)
    return min(max(total >> WEIGHT_FRACTION, 0), network.patience << FRACTION)


def key(network: Network, seq: Seq) -> int:
    """The key of a sequence, in sixteenths of an arrival."""
    return (seq.arrival << FRACTION) + score(network, features(seq))


def policy(name: str, network: Network) -> Policy:
    """The policy of a network.

    Raises:
        ValueError: the network has not one row of weights for each unit and one weight for each
            feature, or too many units, or a weight, bias or patience that is too large.
    """
    _check(name, network)

    def rank(seq: Seq) -> tuple[int, int]:
        return key(network, seq), seq.arrival

    def order(waiting: Sequence[Seq], running: Running, cached: object) -> list[Seq]:
        return sorted(waiting, key=rank)

    def preempt(running: Sequence[Seq]) -> Seq:
        return max(running, key=rank)

    return Policy(name, order, preempt=preempt, bound=network.patience)


def _check(name: str, network: Network) -> None:
    units = len(network.output)
    rows = [len(row) for row in network.hidden]
    if len(network.bias) != units or rows != [len(FEATURES)] * units:
        raise ValueError(
            f"the network of {name!r} has {units} units, {len(network.bias)} biases and rows of "
            f"{rows} weights; it needs a bias and {len(FEATURES)} weights for each unit "
            f"({', '.join(FEATURES)})"
        )
    if units > MOST_UNITS:
        raise ValueError(f"the network of {name!r} has {units} units; at most {MOST_UNITS} fit")
    if not 0 <= network.patience <= LARGEST_PATIENCE:
        raise ValueError(
            f"the network of {name!r} has the patience {network.patience}; it must be from 0 to "
            f"{LARGEST_PATIENCE} arrivals"
        )
    largest_bias = max(map(abs, (*network.bias, network.output_bias)))
    if largest_bias > LARGEST_WEIGHT << FRACTION:
        raise ValueError(
            f"the network of {name!r} has the bias {largest_bias}; the largest is "
            f"{LARGEST_WEIGHT << FRACTION}: scale its output down"
        )
    weights = [*network.output, *[weight for row in network.hidden for weight in row]]
    largest = max(map(abs, weights), default=0)
    if largest > LARGEST_WEIGHT:
        raise ValueError(
            f"the network of {name!r} has the weight {largest}; the largest is {LARGEST_WEIGHT}, "
            f"which is {LARGEST_WEIGHT / 2**WEIGHT_FRACTION:.1f}: scale its output down"
        )


def source(name: str, network: Network, origin: str) -> str:
    """The text of a Python file with the policy as POLICY: for `policy="FILE.py:POLICY"`.

    Args:
        origin: how it was made, for the reader of the file.
    """
    rows = "\n".join([f"        {row}," for row in network.hidden])
    return f'''"""{origin}"""

from experiments.twin.learned import Network, policy

NETWORK = Network(
    hidden=(
{rows}
    ),
    bias={network.bias},
    output={network.output},
    output_bias={network.output_bias},
    patience={network.patience},
)
POLICY = policy({name!r}, NETWORK)
'''
