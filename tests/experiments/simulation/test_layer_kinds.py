"""Costs of layers by their kind: counts of a step token by token, and what the layers declare."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from experiments.simulation.collectives import Network
from experiments.simulation.cost import (
    Chip,
    Roofline,
    Shape,
    Work,
    named_shape,
    of_mesh,
    part,
    shape_of_decoder,
    work_of,
)
from experiments.simulation.layer_kinds import (
    Kind,
    Seen,
    decoder_of,
    latent_numbers,
    layer_costs,
)
from pagedjax.device.models import split
from pagedjax.device.models.decoder import Decoder, DecoderConfig, LayerKind
from pagedjax.device.models.latent import Latent
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.mixers.mamba2 import Mamba2
from pagedjax.device.models.mixers.mixer import Kept, Mixer
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.device.rope import Rope
from pagedjax.host.kv_policies import View
from pagedjax.host.types import EMPTY_PLAN, Request, SchedulerConfig, Seq
from pagedjax.options.config import MeshConfig

LAYERS = 4
SMALL = Shape(LAYERS, 16, 4, 2, 8, 24, 100, 64)
CONV = ShortConv(3)
DELTA = GatedDelta(length=3, heads=4, key_heads=2, key_dim=8, value_dim=12)
MAMBA = Mamba2(length=4, heads=4, key_heads=2, key_dim=6, value_dim=8)
MIXED = SMALL._replace(
    kinds=(
        Kind((0,), window=5),
        Kind((1,)),
        Kind((2,), mixer=DELTA),
        Kind((3,), mixer=MAMBA),
    )
)
CHIP = Chip(bandwidth=1000.0, rate=1e5, memory=1e6, launch=0.5)

rows = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6)


def plan_of(rows) -> Any:
    """Of (tokens that are computed before, tokens of the step), each row ending its sequence."""
    seqs = tuple(Seq(Request(str(i), 1, 1), i, 100, 1) for i in range(len(rows)))
    starts, counts = zip(*rows, strict=True)
    lengths = tuple(start + count for start, count in rows)
    return EMPTY_PLAN._replace(seqs=seqs, starts=starts, counts=counts, lengths=lengths)


def work_with(shape: Shape, rows, block_size: int = 4, **options: Any) -> Work:
    config = SchedulerConfig(block_size, 64, 64, 8, max_model_len=64)
    plan = plan_of(rows)
    return work_of(plan, plan.num_tokens, config=config, shape=shape, **options)


@given(rows, st.integers(1, 30), st.integers(1, 5))
def test_work_through_windows_matches_token_by_token_count(rows, window, block_size):
    shape = SMALL._replace(
        kinds=(Kind((0, 1), window=window), Kind((2,), mixer=DELTA), Kind((3,), window=80))
    )
    work = work_with(shape, rows, block_size)
    visible = [
        [{t for t in range(at + 1) if t > at - window} for at in range(start, start + count)]
        for start, count in rows
    ]
    through_short, through_long = work.seen
    assert through_short.pairs == sum(len(tokens) for row in visible for tokens in row)
    assert through_short.context == sum(len(set.union(*row)) for row in visible)
    assert through_long == Seen(work.context, work.pairs), "longer than any sequence"
    positions = [at for start, count in rows for at in range(start, start + count)]
    assert work.entered == sum(at % block_size == 0 for at in positions)
    assert work[:6] == work_of(plan_of(rows), work.tokens)[:6], "of layers that see all tokens"


@given(rows, st.integers(1, 30))
def test_without_cache_a_window_is_computed_again(rows, window):
    shape = SMALL._replace(kinds=(Kind((0, 1, 2, 3), window=window),))
    recomputed = work_with(shape, [(0, start + count) for start, count in rows])
    assert work_with(shape, rows, cached=False).seen == recomputed.seen


@given(rows)
def test_layers_of_one_kind_cost_what_a_plain_model_costs(rows):
    """A window longer than any sequence, and kinds of full attention, change no second."""
    plain = Roofline(SMALL, CHIP)(work_with(SMALL, rows))
    for kinds in ((Kind((0, 1), window=64), Kind((2, 3))), (Kind((0, 1, 2, 3), window=500),)):
        shape = SMALL._replace(kinds=kinds)
        assert Roofline(shape, CHIP)(work_with(shape, rows)) == pytest.approx(plain, rel=1e-12)
        assert (shape.total_bytes, shape.token_bytes) == (SMALL.total_bytes, SMALL.token_bytes)


def test_a_window_is_counted_by_hand():
    """A decode behind 39 tokens reads 40 tokens in two layers, and 5 in the others."""
    shape = SMALL._replace(kinds=(Kind((0, 1), window=5), Kind((2, 3))))
    token = 2 * 2 * 2 * 8
    weights = shape.read_bytes(1) / 1000
    expected = 0.5 + weights + 2 * token * 5 / 1000 + 2 * token * 40 / 1000
    assert Roofline(shape, CHIP)(work_with(shape, [(39, 1)])) == pytest.approx(expected)


def test_a_step_without_counted_windows_is_refused():
    with pytest.raises(
        ValueError, match=r"counts 0 windows, and the model has 1; give its shape to work_of"
    ):
        Roofline(MIXED, CHIP)(work_of(plan_of([(3, 1)]), 1))


# --- mixers ---------------------------------------------------------------------------------------


def bytes_of_matrices(decoder: DecoderConfig) -> int:
    """In 16 bits, of the engine's module."""
    rotated = replace(decoder, ropes=(Rope(10000.0, None),))  # else positions are a matrix
    state = nnx.eval_shape(lambda: nnx.state(Decoder(rotated, "bfloat16"), nnx.Param))
    matrices = [array for array in jax.tree.leaves(state) if array.ndim > 1]
    return sum(2 * math.prod(array.shape) for array in matrices)


@pytest.mark.parametrize("kind", [CONV, DELTA, MAMBA], ids=lambda mixer: type(mixer).__name__)
def test_mixers_have_the_matrices_of_their_modules(kind):
    shape = SMALL._replace(kinds=(Kind((0, 1, 3), mixer=kind), Kind((2,))))
    decoder = decoder_of(shape)
    assert [layer.mixer for layer in decoder.kinds] == [kind, kind, None, kind]
    assert shape.total_bytes == bytes_of_matrices(decoder)
    assert shape_of_decoder(decoder) == shape._replace(kv_bytes=2)


def test_shape_of_a_decoder_has_its_kinds():
    shape = shape_of_decoder(decoder_of(MIXED))
    assert shape.kinds == MIXED.kinds
    assert shape.keeps_states
    assert shape.windows == (5,)
    assert shape_of_decoder(decoder_of(SMALL)).kinds == ()


def test_a_mixer_with_a_state_reads_and_computes_what_its_algorithm_does():
    """Counted from the arrays of `decayed_state.py`: a state, the tokens of a block, L inputs."""
    block_size = 4
    mixed = layer_costs(MIXED, block_size, activation_bytes=4)
    for cost, mixer, readers in ((mixed[2], DELTA, 2), (mixed[3], MAMBA, 1)):
        heads = mixer.heads
        state = np.zeros((heads, mixer.key_dim, mixer.value_dim), np.float32)
        keys = np.zeros((block_size, mixer.key_heads, mixer.key_dim), np.float32)
        updates = np.zeros((block_size, heads, mixer.value_dim), np.float32)
        decays = np.zeros((block_size, heads), np.float32)
        inputs = np.zeros((mixer.length, mixer.channels), np.float32)
        chex.assert_equal(
            cost.row_bytes, sum(a.nbytes for a in (state, keys, updates, decays, inputs))
        )
        assert cost.entry_bytes == state.nbytes
        # a product and a sum of each number: by each reader of the state and of the block, by the
        # update of the state, and by the convolution
        of_reader = state.size + keys.size + updates.size
        assert cost.token_operations == 2 * (readers * of_reader + state.size + inputs.size)
        assert cost.token_bytes == cost.pair_operations == 0


def test_a_mixer_of_ones_own_costs_what_it_sees():
    class Last(Mixer):
        """Keeps three numbers of each token, and one of each block."""

        def kept(self, c: Any, dtype: str) -> Kept:
            token = jax.ShapeDtypeStruct((3,), np.dtype("float16"))
            return Kept({"x": token}, {"y": jax.ShapeDtypeStruct((1,), np.dtype("float32"))})

        def window(self, block_size: int) -> int:
            return block_size + 2

    (cost,) = layer_costs(SMALL._replace(kinds=(Kind((0,), mixer=Last()),)), 8, 2)
    assert cost.row_bytes == 10 * 3 * 2 + 4
    assert cost.token_operations == 2 * (10 * 3 + 1)


def test_time_of_states_does_not_grow_with_the_context():
    shape = SMALL._replace(kinds=(Kind((0, 1, 2, 3), mixer=DELTA),))
    roofline = Roofline(shape, CHIP, block_size=4)
    early, late, entering = (roofline(work_with(shape, [(start, 1)])) for start in (1, 41, 40))
    assert early == late
    (cost,) = layer_costs(shape, 4, 2)
    assert entering - late == pytest.approx(4 * cost.entry_bytes / CHIP.bandwidth)


def test_mixers_are_whole_on_each_device_and_not_summed():
    mesh = MeshConfig(tensor=2)
    device = part(MIXED, mesh)
    assert device.total_bytes == bytes_of_matrices(split.device_config(decoder_of(MIXED), mesh))
    chip = CHIP._replace(network=Network(1e5, neighbours=False, devices=8))
    work = work_with(MIXED, [(3, 2)])
    one_sum = of_mesh(Roofline(MIXED, chip), mesh).exchange(work)
    attention = MIXED._replace(kinds=(Kind((0, 1, 2, 3), window=5),))
    all_sums = of_mesh(Roofline(attention, chip), mesh).exchange(work)
    sums_of_two_layers = 2 * (2 * 4 * 16 * 2 / 2) / 1e5
    assert all_sums - one_sum == pytest.approx(sums_of_two_layers)


# --- latents --------------------------------------------------------------------------------------

LATENT = Latent(rank=8, rotated=4, key=6, value=5, query_rank=10)
OF_LATENTS = SMALL._replace(
    kv_heads=1, head_dim=LATENT.row, kinds=(Kind((0, 1, 2, 3), latent=LATENT),)
)


def test_latents_are_counted_by_hand():
    """Queries by a latent of 10, one latent of 8 and a rotated key of 4 for 4 heads."""
    numbers = 16 * 10 + 10 * 4 * (6 + 4) + 16 * 12 + 8 * 4 * (6 + 5) + 4 * 5 * 16
    assert latent_numbers(LATENT, 16, 4) == numbers
    assert OF_LATENTS.token_bytes == 4 * 12 * 2, "no heads"
    mlps = 4 * 3 * 16 * 24
    assert OF_LATENTS.total_bytes == 2 * (4 * numbers + mlps + 2 * 16 * 100)
    direct = replace(LATENT, query_rank=None)
    assert latent_numbers(direct, 16, 4) == numbers - 16 * 10 - 10 * 40 + 16 * 40


@pytest.mark.parametrize("query_rank", [10, None])
def test_latents_have_the_matrices_of_their_modules_and_survive_the_decoder(query_rank):
    latent = replace(LATENT, query_rank=query_rank)
    shape = OF_LATENTS._replace(kinds=(Kind((0, 1, 2, 3), latent=latent),))
    decoder = decoder_of(shape)
    assert (decoder.latent, decoder.kv_heads, decoder.head_dim) == (latent, 1, latent.row)
    assert shape.total_bytes == bytes_of_matrices(decoder)
    assert shape_of_decoder(decoder) == shape


def test_short_rows_are_absorbed_and_long_ones_make_keys_and_values():
    fewest = LATENT.expands_from
    assert fewest == 8 * 11 // (2 * 12 - 10 - 5) + 1 == 10
    (cost,) = layer_costs(OF_LATENTS, 16, 2)
    short = work_with(OF_LATENTS, [(30, 1), (9, fewest - 1)])
    # scores of 12 numbers and sums of 8, for each head
    short_pairs = 31 + sum(range(10, 10 + fewest - 1))
    assert cost.operations(short, None) == 4 * 2 * 4 * (12 + 8) * short_pairs
    assert cost.traffic(short, None) == 4 * 12 * 2 * (31 + 9 + fewest - 1)
    long = work_with(OF_LATENTS, [(20, fewest)])
    pairs = sum(range(21, 21 + fewest))
    # scores of 10 numbers and sums of 5; keys and values of the 20 tokens before
    assert cost.operations(long, None) == 4 * (2 * 4 * (10 + 5) * pairs + 20 * 2 * 8 * 4 * 11)
    mixed = work_with(OF_LATENTS, [(30, 1), (9, fewest - 1), (20, fewest)])
    expected = cost.operations(short, None) + cost.operations(long, None)
    assert cost.operations(mixed, None) == expected


def test_of_blocks_out_of_sight_no_keys_and_values_are_made():
    """A query sees its own block of 4 tokens and the one before it."""
    config = SchedulerConfig(4, 64, 64, 8, max_model_len=64, views=(View(2),))
    plan = plan_of([(20, 12)])
    work = work_of(plan, 12, config=config, shape=OF_LATENTS)
    visible = [t + 1 - 4 * (t // 4 - 1) for t in range(20, 32)]
    assert (work.expanded_pairs, work.expanded_context) == (sum(visible), 4)


def test_without_cache_a_row_is_as_long_as_its_sequence():
    work = work_with(OF_LATENTS, [(20, 1)], cached=False)
    assert (work.expanded_pairs, work.expanded_context) == (21 * 22 // 2, 0)


def test_latents_on_a_mesh_are_refused():
    with pytest.raises(ValueError, match=r"latent attention, whose parts .* use simulate.chips"):
        part(named_shape("deepseek-v3"), MeshConfig(tensor=8))


def test_a_shared_mlp_is_read_by_each_token_and_divided_by_a_mesh():
    mixture = SMALL._replace(sparse=3, experts=8, chosen=2, expert=10)
    shared = mixture._replace(shared=20)
    per_layer = 3 * 16 * 20
    assert shared.total_bytes - mixture.total_bytes == 2 * 3 * per_layer
    assert shared.products(7, 0) - mixture.products(7, 0) == 2 * 7 * 3 * per_layer
    assert part(shared, MeshConfig(tensor=2, expert=2)).shared == 5


def test_kinds_survive_the_decoder_of_the_engine():
    assert list(decoder_of(MIXED).kinds) == [
        LayerKind(window=5),
        LayerKind(),
        LayerKind(mixer=DELTA),
        LayerKind(mixer=MAMBA),
    ]
