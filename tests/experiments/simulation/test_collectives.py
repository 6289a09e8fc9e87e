"""Exchanges of a mesh: bytes and times against arrays that are sent from device to device, and
counts by hand.
"""

from __future__ import annotations

from collections import Counter
from typing import get_args

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.simulation import collectives
from experiments.simulation.collectives import (
    Exchange,
    Exchanged,
    Kind,
    Network,
    exchanges,
    seconds,
    sent,
)

TORUS = Network(1e9, neighbours=True, devices=64, hop=1e-6)
SWITCH = Network(1e9, neighbours=False, devices=8, hop=1e-6)
SIZES = Exchanged(layers=3, hidden=8, vocabulary=25, activation_bytes=2)
devices = st.integers(2, 16)


def ring_all_reduce(arrays):
    """Sum arrays by a ring: reduce-scatter, then all-gather. Returns the arrays, how many numbers
    each device sent, and the steps.
    """
    n = len(arrays)
    pieces = np.reshape(arrays, (n, n, -1)).copy()
    device = np.arange(n)
    right = (device + 1) % n
    sent_numbers = 0
    steps = 0
    for added in (True, False):
        for step in range(n - 1):
            piece = (device - step + (not added)) % n  # each sends one piece to its right
            content = pieces[device, piece]
            pieces[right, piece] = content + added * pieces[right, piece]
            sent_numbers += content.shape[-1]
            steps += 1
    return pieces.reshape(n, -1), sent_numbers, steps


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_all_reduce_sends_the_bytes_of_a_ring(n):
    size = 5 * n
    arrays = list(np.random.default_rng(n).integers(0, 9, (n, size)).astype(np.float32))
    summed, numbers, steps = ring_all_reduce(arrays)
    chex.assert_trees_all_equal(summed, np.tile(sum(arrays), (n, 1)))
    reduce = Exchange("all-reduce", 4 * size)
    assert sent(reduce, n) == pytest.approx(4 * numbers)
    assert collectives.hops(reduce, n, SWITCH) == steps
    assert seconds(reduce, n, SWITCH) == pytest.approx(4 * numbers / 1e9 + steps * 1e-6)


def busiest_link(n, piece):
    """Bytes over the busiest directed link of a ring, when each device sends `piece` bytes to each
    other one.

    A piece takes the shorter way; at equal distance, half of it takes each.
    """
    load = Counter()
    for source in range(n):
        for apart in range(1, n):
            ways = [
                w for w, length in ((1, apart), (-1, n - apart)) if length == min(apart, n - apart)
            ]
            if n == 2:
                ways = [1]  # there is one link
            for way in ways:
                at = source
                while at != (source + apart) % n:
                    load[at, way] += piece / len(ways)
                    at = (at + way) % n
    return max(load.values())


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 16])
def test_all_to_all_takes_the_time_of_the_busiest_link(n):
    exchange = Exchange("all-to-all", 7.0 * n)
    bare = TORUS._replace(hop=0.0)
    assert seconds(exchange, n, bare) == pytest.approx(busiest_link(n, 7.0) / 1e9)
    assert sent(exchange, n) == pytest.approx(7.0 * (n - 1))
    assert seconds(exchange, n, SWITCH) == pytest.approx(7.0 * (n - 1) / 1e9 + 1e-6), "direct"


def test_two_directions_halve_the_time_and_the_hops_of_a_ring():
    """Against "How to Scale Your Model", part 3: a gather over 4 chips takes 2 hops."""
    gather = Exchange("all-gather", 8e6)
    assert collectives.hops(gather, 4, TORUS) == 2
    assert seconds(gather, 8, TORUS._replace(hop=0.0)) == pytest.approx(8e6 * 7 / 8 / 2e9)
    assert seconds(gather, 2, TORUS._replace(hop=0.0)) == pytest.approx(8e6 / 2 / 1e9), (
        "two chips have one link"
    )


def bytes_of_arrays(n, tokens, sampled):
    """Bytes of the arrays that are exchanged."""
    sums = np.zeros((SIZES.layers, 2, tokens, SIZES.hidden), np.float32)  # attention and MLP
    embedded = np.zeros((tokens, SIZES.hidden), np.float16)
    rows = -(-sampled // n) * n
    logits = np.zeros((rows, SIZES.vocabulary), np.float32)
    results = np.zeros((rows, 3 + 2 * 20), np.int32)  # token, log-probability, rank, the 20 best
    return Counter(
        {
            "all-reduce": sums.nbytes + embedded.nbytes,
            "all-to-all": logits.nbytes,
            "all-gather": results.nbytes,
        }
    )


@given(n=devices, tokens=st.integers(1, 20), sampled=st.integers(0, 20))
def test_exchanged_bytes_match_a_count_of_numbers(n, tokens, sampled):
    sent_bytes = Counter()
    for exchange in exchanges(SIZES, n, tokens, sampled):
        sent_bytes[exchange.kind] += exchange.times * exchange.bytes
    assert sent_bytes == bytes_of_arrays(n, tokens, sampled)


def test_one_device_exchanges_nothing():
    assert exchanges(SIZES, 1, 100, 100) == ()


@given(
    kind=st.sampled_from(get_args(Kind)),
    n=devices,
    size=st.floats(1.0, 1e9),
    factor=st.floats(1.0, 10.0),
    neighbours=st.booleans(),
)
def test_more_bytes_hops_or_slower_links_never_take_less_time(kind, n, size, factor, neighbours):
    network = Network(1e9, neighbours, devices=64, hop=1e-6)
    base = seconds(Exchange(kind, size), n, network)
    assert base <= seconds(Exchange(kind, size * factor), n, network)
    assert base <= seconds(Exchange(kind, size), n, network._replace(bandwidth=1e9 / factor))
    assert base <= seconds(Exchange(kind, size), n, network._replace(hop=1e-6 * factor))
    assert seconds(Exchange(kind, size, 3), n, network) == pytest.approx(3 * base)
    assert base >= sent(Exchange(kind, size), n) / network.sending(n), (
        "no exchange beats its own bytes"
    )


@given(kind=st.sampled_from(get_args(Kind)), n=st.integers(2, 15))
def test_a_device_sends_more_in_a_larger_ring(kind, n):
    exchange = Exchange(kind, 1e6)
    assert sent(exchange, n) < sent(exchange, n + 1) < 2e6
