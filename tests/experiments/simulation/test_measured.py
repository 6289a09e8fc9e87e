"""Published times at points as the time of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.simulation.cost import Work
from experiments.simulation.measured import BLOOM, MEAN_CONTEXT, MIXED, SEQUENCES, at
from experiments.simulation.profiles import find

A100 = "splitwise/bloom-176b/a100"
H100 = "splitwise/bloom-176b/h100"


def prompts(tokens: int) -> Work:
    return Work(
        tokens=tokens, sequences=1, sampled=1, context=tokens, pairs=tokens * (tokens + 1) // 2
    )


def decodes(sequences: int, context: int = MEAN_CONTEXT) -> Work:
    pairs = sequences * context
    return Work(
        tokens=sequences,
        sequences=sequences,
        sampled=sequences,
        context=pairs,
        pairs=pairs,
        moved_blocks=0,
        single=sequences,
        single_context=pairs,
    )


@pytest.mark.parametrize("kind", BLOOM)
@given(x=st.floats(128, 32768))
def test_a_curve_is_numpy_s_between_its_ends(kind, x):
    curve = BLOOM[kind].prompts
    assert at(curve, x) == pytest.approx(np.interp(x, *zip(*curve, strict=True)))


@pytest.mark.parametrize(("x", "expected"), [(0, 8.0), (3, 11.0), (5, 13.0), (7, 17.0), (9, 21.0)])
def test_beyond_its_ends_a_curve_goes_on_as_its_last_parts(x, expected):
    assert at(((2, 10.0), (5, 13.0), (6, 15.0)), x) == pytest.approx(expected)


def test_steps_at_measured_points_take_the_measured_times():
    assert find(A100)(prompts(2048)) == pytest.approx(0.53606)
    assert find(H100)(prompts(512)) == pytest.approx(0.076142)
    assert [1e3 * find(A100)(decodes(n)) for n in SEQUENCES] == pytest.approx(
        [ms for _, ms in BLOOM["a100"].decodes]
    )


@pytest.mark.parametrize(
    ("kind", "published"), [("a100", (48.797, 51.297)), ("h100", (35.482, 37.438))]
)
def test_a_longer_context_takes_what_it_took_one_sequence(kind, published):
    """Measured with prompts of 1,024 and 8,192 tokens and 128 of output; the line fits all prompts,
    not these alone.
    """
    step = find(f"splitwise/bloom-176b/{kind}")
    assert [1e3 * step(decodes(1, n + 64)) for n in (1024, 8192)] == pytest.approx(
        published, rel=0.03
    )


def test_a_step_with_both_takes_the_time_of_prompts_of_all_its_tokens():
    mixed = Work(
        tokens=1024,
        sequences=25,
        sampled=25,
        context=1000 + 24 * 700,
        pairs=1000 * 1001 // 2 + 24 * 700,
        moved_blocks=0,
        single=24,
        single_context=24 * 700,
    )
    assert find(A100)(mixed) == pytest.approx(MIXED * find(A100)(prompts(1024)))


def test_its_simulator_takes_many_decodes_as_one():
    theirs = find("splitwise-sim/bloom-176b/a100")
    assert theirs(prompts(3000)) == find(A100)(prompts(3000))
    assert theirs(decodes(64)) / theirs(decodes(1)) == pytest.approx(1.0, abs=0.01)
    assert theirs(decodes(64, 4000)) == theirs(decodes(64))
    assert find(A100)(decodes(64)) / find(A100)(decodes(1)) == pytest.approx(96.583 / 48.764)
