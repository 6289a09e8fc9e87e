"""Contiguous reservations by example: their size, their place, and fragmentation."""

from __future__ import annotations

import pytest

from pagedjax import EngineConfig
from pagedjax.engine.resolve import resolve, shapes
from pagedjax.host import reservation, scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import Rejected
from pagedjax.host.types import Finished, Request
from tests.host.scheduler_steps import request, start, step, until_end

WAYS = ("oracle", "pow2", "max")


# --- how much -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "prompt_len", "max_tokens", "tokens", "blocks"),
    [
        ("oracle", 5, 9, 14, 4),
        ("pow2", 5, 9, 5 + 16, 8),  # six blocks, and a piece of six is one of eight
        ("max", 5, 9, 64, 16),
        ("pow2", 5, 8, 5 + 8, 4),
        ("oracle", 50, 99, 64, 16),  # max_model_len cuts the output off
        ("pow2", 50, 14, 64, 16),  # 50 + 16 is more than max_model_len
        ("max", 1, 1, 64, 16),
    ],
)
def test_reserved_tokens_and_blocks_of_each_mode(way, prompt_len, max_tokens, tokens, blocks):
    state = start(request("a", prompt_len, max_tokens), reservation=way)
    (seq,) = state.waiting
    assert reservation.tokens(state.config, seq) == tokens
    assert reservation.piece(state.config, seq) == blocks
    state, plan, _ = step(state)
    assert plan.blocks_used == len(plan.seqs[0].blocks) == blocks


# --- where ----------------------------------------------------------------------------------------


def test_policy_admit_receives_the_reserved_blocks():
    calls = []
    recording = FCFS._replace(
        admit=lambda seq, need, free: calls.append((seq.request_id, need, free)) or True
    )
    step(
        start(request("a", 5), request("b", 1, 1), num_blocks=9, reservation="oracle"),
        policy=recording,
    )
    assert calls == [("a", 4, 9), ("b", 1, 5)]


# --- refused requests -----------------------------------------------------------------------------


def test_a_reservation_larger_than_the_pool_is_refused_with_the_remedy():
    state = start(num_blocks=6, model_len=32, reservation="oracle")
    with pytest.raises(
        Rejected,
        match=r"^request 'a' reserves 8 blocks in a row \(reservation 'oracle'\), but the largest piece of the pool "
        r"has 4; raise num_blocks to 8, or lower max_model_len or max_tokens$",
    ):
        scheduler.submit(state, request("a", 10, 8))  # five blocks, which the pool has
    assert until_end(scheduler.submit(state, request("a", 8, 8)))[-1] == Finished(
        7, "a", "length", 8
    )
    with pytest.raises(Rejected, match=r"'a' reserves 8 blocks in a row \(reservation 'max'\)"):
        scheduler.submit(start(num_blocks=7, model_len=32, reservation="max"), request("a", 1, 1))
    assert scheduler.submit(
        start(num_blocks=8, model_len=32, reservation="max"), request("a", 1, 1)
    ).waiting


@pytest.mark.parametrize(
    "shared",
    [
        {"forks": ("b",)},
        {"beams": True},
        {"forks": ("b",), "beams": True},
        {"hashes": ("x",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
def test_requests_that_share_blocks_are_refused_with_the_remedy(way, shared):
    with pytest.raises(
        Rejected,
        match=rf"^request 'a' has branches or a shareable prefix, and a contiguous reservation \('{way}'\) shares "
        r"nothing; use reservation='none', or n=1 and enable_prefix_caching=False$",
    ):
        scheduler.submit(start(reservation=way), Request("a", 5, 2)._replace(**shared))


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "blocks"), [("none", 6), *((way, 8) for way in WAYS)])
def test_an_engine_has_blocks_for_the_reservations_of_all_running_sequences(tiny, way, blocks):
    """Two of 40 tokens: three blocks each, or four in a piece. With six blocks no request could
    have one of those.
    """
    sizes = {"max_num_seqs": 2, "max_model_len": 40, "max_num_batched_tokens": 8}
    config = resolve(
        EngineConfig(**sizes, reservation=way, enable_prefix_caching=way == "none"), tiny.model
    )
    assert config.num_blocks == blocks
    assert shapes(config, tiny.model).table_width == blocks // 2
