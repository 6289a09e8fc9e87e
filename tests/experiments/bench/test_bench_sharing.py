"""The benchmark of shared blocks: equal to a count by hand, and near the paper's values."""

from __future__ import annotations

import json

import pytest
from hypothesis import strategies as st

from experiments.bench import sharing
from experiments.bench.sharing import ALPACA, SHAREGPT, SampledRequest, draw, simulate
from tests import drawn


def by_hand(requests: list[SampledRequest], size: int) -> tuple[int, int]:
    """Table entries and distinct blocks, summed over steps: of one sequence after the other,
    without a scheduler.

    The first branch runs from its step 0 on, the others from step 1; in its k-th step a branch has
    ceil((prompt + k) / size) blocks. While several run, all but one do not pay for the prompt's
    blocks before the one that they write to.
    """
    listed = saved = 0
    for ask in requests:
        for output in ask.outputs:
            listed += sum(-(-(ask.prompt + k) // size) for k in range(output))
        ends = [ask.outputs[0] - 1, *ask.outputs[1:]]
        together = sum(
            max(0, sum(end >= step for end in ends) - 1) for step in range(1, max(ends) + 1)
        )
        saved += together * ((ask.prompt - 1) // size)
    return listed, listed - saved


asks_of_any_shape = st.lists(
    st.builds(
        SampledRequest,
        st.integers(1, 40),
        st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple),
        st.integers(0, 20).map(float),
    ),
    min_size=1,
    max_size=8,
).map(lambda requests: sorted(requests, key=lambda ask: ask.arrival))


@drawn.given(10, 60, asks_of_any_shape, st.sampled_from([1, 4, 16]))
def test_saved_share_matches_brute_force_count(requests: list[SampledRequest], size: int):
    counts = simulate(requests, size)
    assert (counts.listed, counts.used) == by_hand(requests, size)
    assert counts.preemptions == 0


@pytest.fixture(scope="module")
def shares() -> dict[tuple[str, int, str], float]:
    """Per cent saved, by data set, branches and kind of lengths."""
    rows = {}
    for data, requests in ((ALPACA, 600), (SHAREGPT, 100)):
        for lengths in ("same", "own"):
            for n in (2, 4, 6):
                listed, used = by_hand(draw(data, requests, n, lengths, seed=1), 16)
                rows[data.name, n, lengths] = 100 * (1 - used / listed)
    return rows


def test_paper_values_lie_between_both_kinds_of_lengths(shares: dict[tuple[str, int, str], float]):
    for n, paper in ALPACA.paper.items():
        assert paper is not None
        assert shares["alpaca", n, "own"] < paper < shares["alpaca", n, "same"]
        assert shares["alpaca", n, "same"] < 1.6 * paper
    low = SHAREGPT.paper[2]
    high = SHAREGPT.paper[6]
    assert low is not None
    assert high is not None
    assert shares["sharegpt", 2, "same"] == pytest.approx(low, rel=0.25)
    assert shares["sharegpt", 6, "same"] == pytest.approx(high, rel=0.25)
    assert shares["sharegpt", 4, "own"] > shares["alpaca", 4, "own"], "longer prompts share more"


def test_drawn_lengths_have_expected_means():
    same_lengths, own_lengths = (
        draw(SHAREGPT, 400, 4, lengths, seed=3) for lengths in ("same", "own")
    )
    assert all(len(set(ask.outputs)) == 1 and len(ask.outputs) == 4 for ask in same_lengths)
    assert [ask.prompt for ask in same_lengths] == [ask.prompt for ask in own_lengths]
    assert len({ask.outputs for ask in own_lengths}) == 400
    assert sum(len(set(ask.outputs)) == 4 for ask in own_lengths) > 380
    mean = sum(sum(ask.outputs) for ask in own_lengths) / 1600
    assert mean == pytest.approx(SHAREGPT.output, rel=0.1)


def test_command_prints_rows(capsys):
    assert sharing.main(["--requests", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    expected = [
        (name, n) for name in ("alpaca", "sharegpt") for _ in ("same", "own") for n in (2, 4, 6)
    ]
    assert [(row["dataset"], row["n"]) for row in rows] == expected
    assert all(0 <= row["saved"] < 100 and row["error"] >= 0 for row in rows)
