"""Contiguous reservations by example: their size, their place, and fragmentation."""

from __future__ import annotations

import pytest

from pagedjax import EngineConfig
from pagedjax.engine.resolve import resolve, shapes
from pagedjax.host import reservation, scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import Rejected, SchedulerState
from pagedjax.host.types import Finished, Plan, Preempted, Request
from tests.host.scheduler_steps import names, request, start, step, until_end

WAYS = ("oracle", "pow2", "max")


def tables(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {seq.request_id: seq.blocks for seq in plan.seqs}


def holes(**ways) -> SchedulerState:
    """Eight blocks of 4 in pairs: a and c have ended, b has 3-4 for two more steps and d 7-8 for
    three.
    """
    lengths = {"a": (7, 1), "b": (5, 3), "c": (7, 1), "d": (4, 4)}
    state = start(*(request(name, *sizes) for name, sizes in lengths.items()), num_blocks=8, **ways)
    state, plan, _ = step(state)
    assert tables(plan) == {"a": (1, 2), "b": (3, 4), "c": (5, 6), "d": (7, 8) if ways else (7,)}
    return state


# --- how much -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "prompt_len", "max_tokens", "tokens", "blocks"),
    [
        ("oracle", 5, 9, 14, 4),
        ("pow2", 5, 9, 5 + 16, 8),  # six blocks, and a piece of six is one of eight
        ("max", 5, 9, 64, 16),
        ("oracle", 5, 8, 13, 4),
        ("pow2", 5, 8, 5 + 8, 4),
        ("oracle", 1, 3, 4, 1),
        ("pow2", 1, 3, 1 + 4, 2),
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


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_keeps_its_reserved_piece_for_its_whole_life(way):
    state = start(request("a", 5, 9), reservation=way, model_len=20)
    pieces = []
    while state.waiting or state.running.seqs:
        state, plan, _ = step(state)
        pieces.append((tables(plan)["a"], plan.blocks_used))
    number = {"oracle": 4, "pow2": 8, "max": 8}[way]
    assert pieces == [(tuple(range(1, number + 1)), number)] * 9
    assert state.pool.num_free == 64


@pytest.mark.parametrize(("way", "largest"), [("oracle", 8), ("pow2", 8), ("max", 8)])
def test_one_sequence_has_at_most_the_largest_piece_of_the_pool(way, largest):
    assert reservation.largest(start(num_blocks=14, reservation=way).config) == largest


# --- where ----------------------------------------------------------------------------------------


def test_a_reservation_cannot_use_free_blocks_that_are_not_contiguous():
    """e needs four, and four are free: 1-2 and 5-6. f would fit, but does not overtake e."""
    state = holes(reservation="oracle")
    for name, prompt_len in (("e", 9), ("f", 1)):
        state = scheduler.submit(state, request(name, prompt_len, 7))
    for _ in range(2):
        state, plan, _ = step(state)
        assert (names(plan.seqs), plan.blocks_used, plan.num_waiting) == (["b", "d"], 4, 2)
    state, plan, _ = step(state)
    assert tables(plan) == {"d": (7, 8), "e": (1, 2, 3, 4), "f": (5, 6)}
    assert until_end(state)[-1].request_id == "f"  # type: ignore[union-attr]


def test_paging_uses_free_blocks_that_are_not_contiguous():
    state = scheduler.submit(holes(), request("e", 9, 7))
    state, plan, _ = step(state)
    assert plan.admitted == ("e",)


def test_a_short_reservation_takes_the_smallest_free_piece():
    state = holes(reservation="oracle")
    state, *_ = step(scheduler.cancel(state, "d")[0])  # 1-2 and 5-8 are free
    for name in "xy":
        state = scheduler.submit(state, request(name, 1, 7))
    assert tables(step(state)[1]) == {"b": (3, 4), "x": (1, 2), "y": (5, 6)}


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


@pytest.mark.parametrize(("way", "together"), [("none", 3), ("oracle", 2), ("pow2", 2), ("max", 2)])
def test_reservations_never_preempt_where_paging_does(way, together):
    state = start(
        *(request(name, 4, 8) for name in "abc"), num_blocks=8, model_len=12, reservation=way
    )
    state, plan, _ = step(state)
    assert len(plan.admitted) == together
    events = until_end(state)
    assert any(isinstance(event, Preempted) for event in events) == (way == "none")


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
