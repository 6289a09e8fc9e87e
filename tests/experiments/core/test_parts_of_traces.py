"""A part of recorded requests, at another rate, and their users."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.core import workloads
from experiments.core.config import expand
from experiments.core.drive import seed_of
from experiments.core.workloads import BurstGPT, Mooncake, Recorded, Trace, build
from tests import drawn
from tests.experiments.core.summaries import BASE

TIMES = [0.0, 0.5, 2.0, 2.25, 7.0, 8.0, 8.5, 11.0, 15.0, 16.0]
MOONCAKE = "\n".join(
    json.dumps(
        {
            "timestamp": 1000 * time,
            "input_length": 3,
            "output_length": 1 + i,
            "hash_ids": [i],
            "user": f"u{i % 3}",
        }
    )
    for i, time in enumerate(TIMES)
)


def items_of(spec: Recorded, seed: int = 0, content: str = MOONCAKE):
    return build(spec, content, seed, 1000, lambda text: ()).items


def arrivals(spec: Recorded, seed: int = 0) -> list[float]:
    return [item.arrival for item in items_of(spec, seed)]


def spec_of(**fields) -> Mooncake:
    return Mooncake("mooncake", "m.jsonl", **fields)


@drawn.given(10, 100, rate=st.floats(0.01, 100.0), limit=st.integers(2, len(TIMES)))
def test_a_rate_scales_the_gaps_and_keeps_their_proportions(rate, limit):
    scaled = arrivals(spec_of(rate=rate, limit=limit))
    assert (limit - 1) / scaled[-1] == pytest.approx(rate)
    assert np.array(scaled) * TIMES[limit - 1] == pytest.approx(
        scaled[-1] * np.array(TIMES[:limit])
    )


@drawn.given(10, 100, seed=st.integers(0, 2**32), window=st.floats(5.0, 16.0))
def test_a_window_has_the_requests_of_some_seconds(seed, window):
    items = items_of(spec_of(window=window), seed)
    first = items[0].max_tokens - 1  # its place in the file
    recorded = TIMES[first : first + len(items)]
    assert [item.arrival for item in items] == [time - recorded[0] for time in recorded]
    assert recorded[-1] - recorded[0] <= window
    if first and first + len(items) < len(TIMES):
        assert TIMES[first + len(items)] - TIMES[first - 1] > window, "none is missing"


def test_the_part_is_drawn_by_the_seed_and_each_start_is_possible():
    starts = [items_of(spec_of(num_requests=4), seed)[0].max_tokens for seed in range(60)]
    assert set(starts) == {1, 2, 3, 4, 5, 6, 7}
    assert starts[0] == items_of(spec_of(num_requests=4), 0)[0].max_tokens
    of_ten = dataclasses.replace(spec_of(num_requests=4), offset=2, limit=5)
    assert {items_of(of_ten, seed)[0].max_tokens for seed in range(30)} == {3, 4}
    reseeded = {"repeats": 3, "reseed": True, "seed": 5}
    (point,) = expand({**BASE, **reseeded}, folder=Path())
    assert [seed_of(point.experiment, repeat) for repeat in range(3)] == [5, 6, 7]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 0.0}, r"rate is 0\.0; it must be above 0 requests a second, and finite"),
        ({"rate": 2.0, "time_scale": 0.5}, r"rate is 2\.0 and time_scale 0\.5, and both scale"),
        ({"window": 3.0, "num_requests": 2}, r"window is 3\.0 and num_requests 2, and both"),
        ({"window": 17.0}, r"window is 17\.0 s, and the requests of m\.jsonl arrive in 16 s; low"),
        ({"num_requests": 11}, r"num_requests is 11, and 10 requests of m\.jsonl are there"),
        ({"rate": 2.0, "limit": 1}, r"rate is 2\.0, and the 1 requests .* have no rate"),
        ({"users": 0}, "users is 0; it must be at least 1, or null"),
    ],
)
def test_a_part_or_a_rate_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        items_of(spec_of(**fields))


def test_a_window_without_requests_is_refused():
    rows = [
        {"timestamp": t, "input_length": 3, "output_length": 1, "hash_ids": [0]} for t in (0, 9e6)
    ]
    content = "\n".join(map(json.dumps, rows))
    with pytest.raises(ValueError, match=r"no request of m\.jsonl arrives in the workload\.window"):
        items_of(spec_of(window=1.0), content=content)


def test_users_are_those_of_the_file_or_drawn():
    assert [item.user for item in items_of(spec_of())] == [f"u{i % 3}" for i in range(10)]
    trace = (
        "TIMESTAMP,ContextTokens,GeneratedTokens,User\n"
        "2023-11-16 18:00:00,5,9,ann\n2023-11-16 18:00:01,5,9,bob\n"
    )
    assert [item.user for item in items_of(Trace("trace", "t.csv"), 0, trace)] == ["ann", "bob"]
    burst = "Timestamp,Model,Request tokens,Response tokens,Log Type,User\n5,GPT-4,3,4,API log,cy\n"
    assert [item.user for item in items_of(BurstGPT("burstgpt", "b.csv"), 0, burst)] == ["cy"]
    users_of_rounds = [item.user for item in items_of(spec_of(users=2, rounds=50))]
    assert set(users_of_rounds) == {"u0", "u1"}
    assert 200 < users_of_rounds.count("u0") < 300


def test_the_file_of_a_sweep_is_read_and_parsed_once(tmp_path, monkeypatch):
    (tmp_path / "m.jsonl").write_text(MOONCAKE, encoding="utf-8")
    reads = []
    read_text = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **options: reads.append(path.name) or read_text(path, **options),
    )
    workloads._parsed_rows.cache_clear()
    workload = {"kind": "mooncake", "file": "m.jsonl"}
    sweep = {"grid": {"workload.rate": [0.5, 1.0, 2.0]}}
    points = expand({**BASE, "workload": workload, "sweep": sweep}, folder=tmp_path)
    for point in points:
        items_of(point.experiment.workload, content=point.content)
    assert reads == ["m.jsonl"]
    assert workloads._parsed_rows.cache_info().misses == 1
