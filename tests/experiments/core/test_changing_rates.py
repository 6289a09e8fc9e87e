"""Arrivals whose rate changes, and prompts in random order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.capacity import rate_of
from experiments.core.config import expand
from experiments.core.distributions import Changing, Fixed, Gamma, draw_arrivals
from experiments.core.workloads import Prompts, Synthetic
from tests.drawn import given as given_sample
from tests.experiments.core.summaries import BASE, changed_workload, simulated_run
from tests.experiments.core.test_workloads import make, rng

MINUTES = Changing("changing", ((0, 2), (60, 8)))


def drawn(spec: Changing, count: int = 4000) -> np.ndarray:
    return np.array(draw_arrivals(spec, count, rng()))


@st.composite
def changing(draw: Any) -> Changing:
    gaps = draw(st.lists(st.floats(0.5, 20), min_size=0, max_size=4))
    times = [0.0, *accumulate(gaps)]
    rates = [draw(st.sampled_from([0.0, 0.5, 3.0, 40.0])) for _ in times]
    repeats = draw(st.booleans())
    rates[0 if repeats else -1] = 5.0
    return Changing(
        "changing",
        tuple(zip(times, rates, strict=True)),
        ramp=draw(st.booleans()),
        repeat_s=times[-1] + draw(st.floats(0.5, 9)) if repeats else None,
        burstiness=draw(st.sampled_from([0.3, 1.0])),
        scale=draw(st.sampled_from([0.5, 2.0])),
    )


@given_sample(40, 100, changing())
def test_the_integral_of_the_rate_between_arrivals_is_the_drawn_gap(spec: Changing):
    times = drawn(spec, 40)
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    gaps = rng().gamma(spec.burstiness, 1 / spec.burstiness, 40)
    end = times[-1] + 1e-9
    grid = np.linspace(0, end, 400_001)
    in_period = grid % spec.repeat_s if spec.repeat_s else grid
    starts, rates = (np.array(column) for column in zip(*spec.rates, strict=True))
    if spec.ramp:
        rate = np.interp(in_period, starts, rates)
    else:
        rate = rates[np.searchsorted(starts, in_period, side="right") - 1]
    integral = np.append(0, np.cumsum((rate[1:] + rate[:-1]) / 2)) * (end / 400_000) * spec.scale
    expected = np.cumsum(gaps)[1:] - gaps[0]
    jumps = len(spec.rates) * (1 + end / (spec.repeat_s or end))  # each inside a step of the grid
    atol = 1e-3 + jumps * spec.scale * 40 * end / 400_000
    chex.assert_trees_all_close(np.interp(times, grid, integral)[1:], expected, atol=atol)


def test_requests_come_at_the_rate_of_their_minute():
    times = drawn(MINUTES)
    assert (times < 60).sum() == pytest.approx(120, rel=0.3)
    assert ((times >= 60) & (times < 360)).sum() == pytest.approx(2400, rel=0.06)
    bursts = drawn(replace(MINUTES, rates=((0, 0), (50, 20)), repeat_s=60.0))
    assert (bursts[1:] % 60 >= 50).all()
    assert (np.bincount((bursts[1:] // 60).astype(int))[:10] > 140).all()


def test_a_constant_rate_is_that_of_the_gamma_process():
    constant = drawn(replace(MINUTES, rates=((0, 4),), burstiness=0.5))
    gamma = np.array(draw_arrivals(Gamma("gamma", 4.0, 0.5), 4000, rng()))
    chex.assert_trees_all_close(constant, gamma, rtol=1e-9)


def test_a_run_has_changing_rates_and_its_capacity_a_factor_of_them():
    arrivals = {"process": "changing", "rates": [[0, 20], [1, 200]], "ramp": True}
    raw = {**BASE, "workload": changed_workload(arrivals=arrivals)}
    (point,) = expand(raw, folder=Path())
    arrivals_of = [item.arrival for item in simulated_run(raw).workload.items]
    assert arrivals_of[-1] - arrivals_of[30] < arrivals_of[9] - arrivals_of[0]
    assert rate_of(point.experiment.workload)[::2] == (1.0, "workload.arrivals.scale")
    spec = Synthetic("synthetic", 9, Fixed("fixed", 2), Fixed("fixed", 2), MINUTES)
    twice = make(replace(spec, arrivals=replace(MINUTES, rates=((0, 2),), scale=2.0)))
    constant_rate = make(replace(spec, arrivals=replace(MINUTES, rates=((0, 2),))))
    assert [2 * item.arrival for item in twice.items] == pytest.approx(
        [item.arrival for item in constant_rate.items]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rates": []}, r"rates change at \[\] s; these must begin at 0 and ascend"),
        ({"rates": [[1, 2]]}, r"rates change at \[1\.0\] s; these must begin at 0"),
        ({"rates": [[0, 2], [0, 3]]}, r"rates change at \[0\.0, 0\.0\] s; .* ascend"),
        ({"rates": [[0, 2, 3]]}, r"rates\[0\] is \[0\.0, 2\.0, 3\.0\]; it must be \[seconds, req"),
        ({"rates": [[0, -2]]}, r"rates\[0\] is \[0\.0, -2\.0\]; .* both at least 0"),
        (
            {"rates": [[0, 2], [5, 0]]},
            r"rates end with 0 requests a second at 5 s, .* set repeat_s",
        ),
        ({"rates": [[0, 0]], "repeat_s": 9}, r"rates are all 0, so that no request arrives"),
        ({"rates": [[0, 2], [5, 1]], "repeat_s": 5}, r"repeat_s is 5\.0; it must be above 5 s"),
        ({"rates": [[0, 2]], "scale": 0}, r"scale is 0\.0; it must be above 0, and finite"),
        ({"rates": 3}, r"rates is 3; it must be a list"),
    ],
)
def test_rates_that_are_none_are_refused(fields, message):
    arrivals = {"process": "changing", **fields}
    with pytest.raises(ValueError, match=rf"^workload\.arrivals\.{message}"):
        expand({**BASE, "workload": changed_workload(arrivals=arrivals)}, folder=Path())


def test_prompts_are_shuffled_by_the_seed_and_each_repetition_has_all_of_them():
    content = "".join(f"{chr(97 + i)}\n" for i in range(8))
    spec = Prompts("prompts", "p.txt", 20, shuffle=True)

    def texts(spec: Prompts, seed: int) -> str:
        items = make(spec, content, seed, vocab=128).items
        return "".join(chr(item.prompt_token_ids[0]) for item in items)

    order = texts(spec, 1)
    assert Counter(order[:8]) == Counter(order[8:16]) == Counter("abcdefgh")
    assert order[:8] != order[8:16]
    assert texts(replace(spec, count=11), 1) == order[:11]
    assert order not in (texts(spec, 2), texts(replace(spec, shuffle=False), 1))
