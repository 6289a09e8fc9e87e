"""The seconds that the devices of a mesh need for the exchanges of a step
(docs/design/simulation.md).

    Network      the links between chips, from data sheets
    exchanges    what a step exchanges: a layer's two sums, the embedding's, logits by rows, sampled tokens
    seconds      of one exchange: its bytes over the links that it uses, and its hops

The devices form one ring. On a torus of TPUs, a ring needs two links of each chip, and both send in
both directions at once; any slice of 2 x k chips has such a ring, without links around the torus.
Two chips have one link. An algorithm that uses the other axes of a torus too would be faster. On a
switch of GPUs, one port reaches every other chip; sums inside the switch (NVLink SHARP), which
halve the bytes of an all-reduce, are not counted. Nothing is hidden behind arithmetic, because a
step's program needs each sum at once. The last layer's sums are counted for all tokens, as if
prompt log-probabilities were wanted; without them, a step sums those of sampled tokens only.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pagedjax.device.batch import MAX_TOP

SUM_BYTES = 4  # partial sums are added in float32 and rounded afterwards
LOGIT_BYTES = 4
# token, log-probability and rank; the MAX_TOP likeliest tokens and their log-probabilities
SAMPLE_BYTES = 4 * (3 + 2 * MAX_TOP)

Kind = Literal["all-reduce", "all-to-all", "all-gather"]


class Network(NamedTuple):
    """The links between the chips of a mesh.

    bandwidth: bytes/s of one link in one direction.
    neighbours: links reach neighbours only, and a ring uses two links of a chip; False: a switch,
        one port reaches all chips.
    devices: the most chips that the links connect.
    hop: seconds that each hop takes in addition to its bytes. 0 where no source gives it: then
        times are lower bounds.
    """

    bandwidth: float
    neighbours: bool
    devices: int
    hop: float = 0.0

    def sending(self, n: int) -> float:
        """Bytes/s that each of n devices sends in their ring."""
        links = min(2, n - 1) if self.neighbours else 1
        return self.bandwidth * links


class Exchange(NamedTuple):
    """A collective of all devices.

    bytes: all-reduce: of the array that each device has and that is summed. all-to-all: of a
        device's array, of which each device gets an equal part. all-gather: of the gathered array,
        of which each device has an equal part.
    times: how often a step does it.
    """

    kind: Kind
    bytes: float
    times: int = 1


class Exchanged(NamedTuple):
    """The sizes of a model that decide what its devices exchange.

    vocabulary: rows of the head on one device.
    whole_mixers: layers whose mixer each device has whole, so that no sum follows it.
    """

    layers: int
    hidden: int
    vocabulary: int
    activation_bytes: float
    whole_mixers: int = 0


def exchanges(sizes: Exchanged, n: int, tokens: int, sampled: int) -> tuple[Exchange, ...]:
    """What n devices exchange in a step of T = `tokens` tokens with R = `sampled` rows of logits;
    () for one device.

    Two sums of [T, H] a layer, after attention and after the MLP; one of the embedding's [T, H];
    logits [R, V/n], of which each device gets the rows of R/n samples; and what was sampled [R, 3 +
    2 * MAX_TOP].
    """
    if n == 1:
        return ()
    numbers = sizes.hidden * tokens
    rows = -(-sampled // n) * n
    return (
        Exchange("all-reduce", SUM_BYTES * numbers, 2 * sizes.layers - sizes.whole_mixers),
        Exchange("all-reduce", sizes.activation_bytes * numbers),
        Exchange("all-to-all", LOGIT_BYTES * sizes.vocabulary * rows),
        Exchange("all-gather", SAMPLE_BYTES * rows),
    )


def sent(exchange: Exchange, n: int) -> float:
    """Bytes that each device sends in one exchange."""
    return _rounds(exchange) * (n - 1) / n * exchange.bytes


def _rounds(exchange: Exchange) -> int:
    """How often content goes around the ring: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if exchange.kind == "all-reduce" else 1


def hops(exchange: Exchange, n: int, network: Network) -> int:
    """Links that the exchange waits for, one after the other.

    In a ring that sends in both directions, content from the farthest device takes n / 2 hops. On a
    switch, a ring has one direction, and an all-to-all is direct.
    """
    if exchange.kind == "all-to-all":
        return n // 2 if network.neighbours else 1
    return _rounds(exchange) * (n // 2 if network.neighbours else n - 1)


def seconds(exchange: Exchange, n: int, network: Network) -> float:
    """The time of the exchange, all its repetitions in a step together."""
    if exchange.kind == "all-to-all" and network.neighbours:
        # each part crosses a link for each device that it passes
        distances = [min(apart, n - apart) for apart in range(1, n)]
        carried = exchange.bytes / n * sum(distances)
    else:
        carried = sent(exchange, n)
    sending = carried / network.sending(n)
    waiting = hops(exchange, n, network) * network.hop
    return exchange.times * (sending + waiting)
