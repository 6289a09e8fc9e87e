"""Rotations against complex numbers, and each kind of scaling against transformers' own functions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import from_params
from pagedjax.device.models import for_context
from pagedjax.device.models.decoder import DecoderConfig, LayerKind, angle_tables
from pagedjax.device.rope import Rope, attention_factor, pair_order, rope_frequencies, rotate
from tests.device.test_linear_impl import random_params
from tests.refusals import refused
from tests.weights.tiny import llama3_scaling

pytestmark = pytest.mark.few_optimisations

ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
FACTORS = [1.0 + 0.5 * i for i in range(8)]
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    ORIGINAL: 64,
    "short_factor": FACTORS,
    "long_factor": FACTORS[::-1],
}


def frozen(scaling: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items()))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 12, 4])
def test_a_part_of_a_head_and_pairs_of_neighbours_are_rotations_of_complex_numbers(
    rotated, interleaved
):
    """What a file's rows mean: the first `rotated` numbers are `rotated` / 2 complex numbers, which
    are turned; the others stay. In our order of rows the result is the same numbers.
    """
    head_dim = 16
    heads = np.random.default_rng(0).standard_normal((5, 3, head_dim)).astype(np.float32)
    rope = Rope(1e4, rotated=rotated)
    turns = np.arange(5)[:, None] * 1e4 ** (-np.arange(0, rotated, 2) / rotated)  # [T, pairs]
    first = heads[..., 0:rotated:2] if interleaved else heads[..., : rotated // 2]
    second = heads[..., 1:rotated:2] if interleaved else heads[..., rotated // 2 : rotated]
    z = (first + 1j * second) * np.exp(1j * turns)[:, None]
    expected = heads.copy()
    if interleaved:
        expected[..., 0:rotated:2] = z.real
        expected[..., 1:rotated:2] = z.imag
    else:
        expected[..., : rotated // 2] = z.real
        expected[..., rotated // 2 : rotated] = z.imag
    order = pair_order(head_dim, rotated, interleaved)
    assert sorted(order) == list(range(head_dim))
    angles = jnp.asarray(rope.table(head_dim, 5))
    result = rotate(jnp.asarray(heads[..., order]), angles)
    chex.assert_trees_all_close(np.asarray(result), expected[..., order], atol=1e-5)


def test_numbers_that_are_not_rotated_stay_as_they_are_to_the_bit():
    rope = Rope(1e4, frozen(YARN), rotated=4)
    angles = rope.table(16, 50)
    chex.assert_trees_all_equal(angles[0, :, 2:], np.ones((50, 6), np.float32))
    chex.assert_trees_all_equal(angles[1, :, 2:], np.zeros((50, 6), np.float32))
    # the temperature of YaRN is on those that are rotated
    np.testing.assert_allclose(angles[0, 0, :2], 0.1 * math.log(4) + 1, rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain = rope_frequencies(64, 1e4)
    scaled = rope_frequencies(64, 1e4, YARN | {ORIGINAL: 2048})
    shares = [f / s for f, s in zip(plain, scaled, strict=True)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (1, 4)
    assert len(set(shares)) > 6, "blended ones between them"


def test_longrope_has_other_frequencies_for_long_texts():
    rope = Rope(1e4, frozen(LONG))
    plain = rope_frequencies(16, 1e4)
    for context, factors in ((64, FACTORS), (65, FACTORS[::-1]), (None, FACTORS[::-1])):
        expected = [f / divisor for f, divisor in zip(plain, factors, strict=True)]
        np.testing.assert_allclose(rope.frequencies(16, context), expected)
    assert attention_factor(LONG) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_an_engine_of_short_texts_has_the_short_frequencies():
    sizes = {"vocab_size": 8, "hidden": 16, "intermediate": 8, "heads": 1, "kv_heads": 1}
    kinds = (LayerKind(), LayerKind(rope=None))
    c = DecoderConfig(
        **sizes,
        head_dim=16,
        max_len=256,
        tied=True,
        eps=1e-6,
        kinds=kinds,
        ropes=(Rope(1e4, frozen(LONG)),),
    )
    model = from_params(random_params(c), c).model
    short, long = angle_tables(c, 64), angle_tables(c)
    assert np.abs(short - long).max() > 0.1
    chex.assert_trees_all_equal(np.asarray(model.params["angles"][...]), long)
    chex.assert_trees_all_equal(np.asarray(for_context(model, 64).params["angles"][...]), short)
    chex.assert_trees_all_equal(np.asarray(for_context(model, 65).params["angles"][...]), long)
    chex.assert_trees_all_equal(np.asarray(model.params["angles"][...]), long)
    plain = model._replace(config=replace(c, ropes=(Rope(1e4),)))
    assert for_context(plain, 64) is plain


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope scaling 'dynamic' is not supported; supported: default, linear, llama3, yarn, l",
        ),
        ({"rope_type": "linear"}, "rope scaling 'linear' has no factor; add it to rope_scaling"),
        ({"rope_type": "yarn", "factor": 2.0}, f"rope scaling 'yarn' has no {ORIGINAL}"),
        (
            YARN | {"llama_4_scaling_beta": 0.1},
            "'yarn' has llama_4_scaling_beta = 0.1, which is not supported; its entries are factor",
        ),
        (YARN | {"short_factor": [1.0]}, r"short_factor = \(1.0,\), .*; longrope has it"),
        (YARN | {"beta_fast": "32"}, "'yarn': beta_fast is '32'; it must be a number"),
        (YARN | {"factor": 0.5}, "'yarn': factor is 0.5; it is at least 1"),
        (LONG | {"long_factor": 3}, "'longrope': long_factor is 3; it must be a list of numbers"),
    ],
)
def test_a_scaling_that_would_change_the_result_is_refused(scaling, message):
    with refused(message):
        Rope(1e4, frozen(scaling))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (Rope(1e4, rotated=5), "5 of the 16 numbers of a head are rotated; both must be even"),
        (Rope(1e4, rotated=18), "18 of the 16 numbers of a head are rotated; .* at most 16"),
        (Rope(1e4, rotated=0), "0 of the 16 numbers of a head are rotated; .* at least 2"),
        (
            Rope(1e4, frozen(LONG), rotated=12),
            "has 8 values in long_factor; a head has 6 pairs that are rotated, and each needs one",
        ),
    ],
)
def test_a_rotation_that_does_not_fit_the_heads_is_refused(rope, message):
    with refused(message):
        rope.check(16)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        llama3_scaling(),
        YARN,
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
        YARN | {"factor": 1.0},
        LONG,
        LONG | {"attention_factor": 1.25},
        LONG | {"factor": 1.0},
    ],
)
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_frequencies_and_factors_are_those_of_transformers(scaling, part):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = int(16 / part)
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": 256}
    parameters = {**scaling, "rope_theta": 5e4, "partial_rotary_factor": part}
    config = LlamaConfig(**sizes, head_dim=head_dim, rope_parameters=parameters)
    rope = Rope(5e4, frozen(scaling), rotated=16)
    rope.check(head_dim)
    compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    for context in (32, 200):
        frequencies, factor = compute(config, seq_len=context)
        results = rope.frequencies(head_dim, context)
        np.testing.assert_allclose(results[:8], frequencies.numpy(), rtol=2e-6)
        assert results[8:] == [0.0] * (head_dim // 2 - 8)
        assert attention_factor(scaling) == pytest.approx(factor)
