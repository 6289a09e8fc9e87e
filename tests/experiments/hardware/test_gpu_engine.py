"""What the engine's benchmark on a GPU computes from requests and from a trace."""

from __future__ import annotations

import pytest

from experiments.hardware.gpu_engine import busy, by_name, requests_of, settings

# ns; 12 to 20: none runs
KERNELS = [(0.0, 10.0, "a"), (5.0, 8.0, "b"), (9.0, 12.0, "a"), (20.0, 30.0, "c")]


def test_the_idle_share_counts_overlapping_kernels_once():
    assert busy(KERNELS) == {
        "traced_s": pytest.approx(30e-9),
        "idle": pytest.approx(8 / 30),
        "launches": 4,
    }
    assert busy(KERNELS[:1]) == {"traced_s": pytest.approx(10e-9), "idle": 0.0, "launches": 1}
    assert busy([]) == {}


def test_kernels_are_summed_by_name_and_step_with_the_longest_first():
    kernels = by_name([(0.0, 4e3, "short"), *[(0.0, 1e4, "long")] * 4], steps=2)
    assert kernels == [
        {"name": "long", "launches": 2.0, "us": 20.0},
        {"name": "short", "launches": 0.5, "us": 2.0},
    ]
    assert [kernel["name"] for kernel in by_name(KERNELS, steps=1, limit=2)] == ["a", "c"]
    assert by_name([], steps=1) == []


def test_requests_are_drawn_within_their_limits_and_the_same_each_time():
    drawn = requests_of(50, 3, 9, vocabulary=11)
    assert drawn == requests_of(50, 3, 9, vocabulary=11)
    assert drawn != requests_of(50, 3, 9, vocabulary=11, seed=1)
    assert (
        {len(prompt) for prompt, _ in drawn} == set(range(3, 10)) == {tokens for _, tokens in drawn}
    )
    assert {token for prompt, _ in drawn for token in prompt} == set(range(11))


def test_the_most_valuable_settings_are_first():
    runs = settings(["pallas_gpu"], [1, 0], [8, 1])
    assert [run[1:] for run in runs] == [(1, 8), (1, 1), (0, 1), (0, 8)]
