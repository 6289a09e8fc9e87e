"""The plan of a load: its requests and their times."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.server.load_client.plan import (
    FIRST_TOKEN,
    WORDS,
    Lengths,
    Load,
    arrivals,
    clip,
    make_plan,
    warm_up,
)
from tests.refusals import refused

AT_ONCE = {"arrivals": "at-once"}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("process", "burstiness", "cv"), [("poisson", 9, 1), ("gamma", 0.25, 2), ("gamma", 4, 0.5)]
)
@pytest.mark.parametrize("rate", [0.5, 40])
def test_random_arrivals_have_the_rate_and_the_burstiness_asked_for(process, burstiness, cv, rate):
    times = np.array(arrivals(process, rate, burstiness, 40_000, rng()))
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_uniform_arrivals_are_equally_far_apart_and_at_once_is_at_once():
    assert arrivals("uniform", 4, 1, 4, rng()) == [0, 0.25, 0.5, 0.75]
    assert arrivals("at-once", None, 1, 3, rng()) == [0, 0, 0]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 9))
def test_uniform_lengths_are_within_their_range(low, width, seed):
    drawn = Lengths.read("prompt_tokens", f"{low}:{low + width}").draw(50, rng(seed))
    assert all(low <= length <= low + width for length in drawn)


def test_both_ends_of_a_uniform_range_are_drawn_and_a_number_is_fixed():
    assert set(Lengths.read("x", "3:5").draw(200, rng())) == {3, 4, 5}
    assert Lengths.read("x", "7").draw(3, rng()) == [7, 7, 7]


def test_lognormal_lengths_have_the_median_asked_for():
    drawn = Lengths.read("x", "lognormal:6.63,0.99").draw(20_000, rng())
    assert np.median(drawn) == pytest.approx(np.exp(6.63), rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.99, rel=0.03)
    assert min(Lengths.read("x", "lognormal:-9,0").draw(5, rng())) == 1
    assert max(Lengths.read("x", "lognormal:700,500").draw(50, rng())) <= 2**31


@pytest.mark.parametrize(
    "text", ["", *shlex.split("0 x 5:4 1:2:3 -3 lognormal:1 lognormal:1,-1 lognormal:inf,1")]
)
def test_an_invalid_length_gives_an_error_with_the_valid_formats(text):
    with refused(r"prompt_tokens is .*; it must be like"):
        Load(prompt_tokens=text, **AT_ONCE)


def test_clipping_counts_the_clipped_lengths():
    assert clip([0, 5, 9], 8) == ([1, 5, 8], 2)
    assert clip([5], None) == ([5], 0)


def test_the_same_seed_gives_the_same_plan_and_more_requests_begin_with_the_same_ones():
    load = {"rate": 3.0, "prompt_tokens": "5:20", "output_tokens": "lognormal:3,1", "vocab": 300}
    ten = make_plan(Load(**load, requests=10, seed=4))
    five = make_plan(Load(**load, requests=5, seed=4))
    assert ten == make_plan(Load(**load, requests=10, seed=4))
    assert ten.items[:5] == five.items
    assert ten.items != make_plan(Load(**load, requests=10, seed=5)).items
    faster = make_plan(Load(**load | {"rate": 30.0}, requests=10, seed=4))
    assert [item.prompt for item in faster.items] == [item.prompt for item in ten.items]
    for item in ten.items:
        assert 5 <= len(item.prompt) <= 20
        assert all(FIRST_TOKEN <= token < 300 for token in item.prompt)


def test_a_chat_prompt_has_one_word_for_each_token():
    (item,) = make_plan(Load(endpoint="chat", requests=1, prompt_tokens="30", **AT_ONCE)).items
    assert isinstance(item.prompt, str)
    assert len(item.prompt.split()) == 30
    assert set(item.prompt.split()) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS) > 200


def test_limits_clip_drawn_lengths_and_the_plan_counts_them():
    plan = make_plan(
        Load(
            requests=9,
            prompt_tokens="50",
            output_tokens="7",
            max_prompt_tokens=20,
            max_output_tokens=7,
            rate=1,
        )
    )
    assert {len(item.prompt) for item in plan.items} == {20}
    assert (plan.clipped_prompts, plan.clipped_outputs) == (9, 0)


def test_a_warm_up_has_other_prompts_of_the_same_lengths_all_at_once():
    load = Load(requests=4, prompt_tokens="20", output_tokens="3", rate=1)
    prompts = {item.prompt for item in make_plan(load).items}
    warm = warm_up(load, 6).items
    assert [(item.arrival, len(item.prompt), item.max_tokens) for item in warm] == [(0, 20, 3)] * 6
    assert not prompts & {item.prompt for item in warm}


# files --------------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACE = (
    HEADER
    + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,20,109\n2023-11-16 18:15:48,5,0\n"
)


def test_a_trace_gives_arrivals_and_lengths_in_order_of_arrival():
    plan = make_plan(Load(trace="a.csv", time_scale=0.5, max_prompt_tokens=100), TRACE)
    assert [item.arrival for item in plan.items] == pytest.approx([0, 0.659705, 2.0])
    assert [len(item.prompt) for item in plan.items] == [100, 5, 20]
    assert [item.max_tokens for item in plan.items] == [44, 1, 109]
    assert (plan.clipped_prompts, plan.clipped_outputs) == (1, 1)
    assert len(make_plan(Load(trace="a.csv", requests=2), TRACE).items) == 2


def test_prompts_are_lines_that_repeat():
    plan = make_plan(
        Load(prompts="a.txt", requests=3, output_tokens="9", **AT_ONCE), " one \n\ntwo\n"
    )
    assert [(item.prompt, item.max_tokens) for item in plan.items] == [
        ("one", 9),
        ("two", 9),
        ("one", 9),
    ]
    assert len(make_plan(Load(prompts="a.txt", **AT_ONCE), "one\ntwo\n").items) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "arrivals poisson need a rate"),
        ({"rate": 0.0}, "rate is 0.0; it must be above 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": 1.0, "burstiness": 0.0}, "burstiness is 0.0"),
        ({"rate": 1.0, "requests": 0}, "requests is 0; it must be at least 1"),
        ({"rate": 1.0, "vocab": 17}, "vocab is 17"),
        ({"rate": 1.0, "seed": -1}, "seed is -1"),
        ({"trace": "a", "prompts": "b"}, "give one of them"),
        ({"trace": "a", "time_scale": -1.0}, "time_scale is -1.0"),
        ({"arrivals": "sometimes"}, "arrivals is 'sometimes'; it must be one of poisson"),
    ],
)
def test_an_invalid_load_is_an_error(fields, message):
    with refused(message):
        Load(**fields)
