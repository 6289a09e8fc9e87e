"""Workloads: lengths, arrivals, files, reproducible choices."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.core.distributions import (
    AtOnce,
    Exponential,
    Fixed,
    Gamma,
    Lognormal,
    Poisson,
    Uniform,
    draw_arrivals,
    draw_lengths,
)
from experiments.core.workloads import (
    FIRST_ORDINARY_TOKEN,
    Prompts,
    Synthetic,
    Tokens,
    Trace,
    WorkItem,
    Workload,
    build,
    lazy_prompts,
    random_prompts,
)

PROMPTS = Path(__file__).parents[3] / "configs" / "prompts" / "english.txt"
CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,9000,0
2023-11-16 18:15:52.0000000,10,5
"""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def make(spec, content: str = "", seed: int = 0, vocab: int = 100) -> Workload:
    return build(spec, content, seed, vocab, encode=lambda text: [ord(c) % vocab for c in text])


BOUNDS = {"min": st.just(2), "max": st.just(30)}
lengths = st.one_of(
    st.builds(Fixed, st.just("fixed"), st.integers(1, 50), **BOUNDS),
    st.builds(Uniform, st.just("uniform"), st.integers(1, 20), st.integers(20, 50), **BOUNDS),
    st.builds(Exponential, st.just("exponential"), st.floats(0.1, 100), **BOUNDS),
    st.builds(Lognormal, st.just("lognormal"), st.floats(0, 5), st.floats(0, 9), **BOUNDS),
)
arrivals = st.one_of(
    st.just(AtOnce()),
    st.builds(Poisson, st.just("poisson"), st.floats(0.1, 100)),
    st.builds(Gamma, st.just("gamma"), st.floats(0.1, 100), st.floats(0.05, 10)),
)


@given(lengths, lengths, arrivals, st.integers(1, 8), st.integers(0, 2**32))
def test_synthetic_workload_respects_limits_and_prefix(
    prompt, output, arrival, count: int, seed: int
):
    spec = Synthetic("synthetic", count, prompt, output, arrival)
    short = make(spec, seed=seed)
    long = make(replace(spec, count=count + 5), seed=seed)
    assert long.items[:count] == short.items  # more requests change none of the earlier ones
    assert short == make(spec, seed=seed)
    times = [item.arrival for item in long.items]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len({item.request_id for item in long.items}) == len(long.items)
    for item in long.items:
        assert 2 <= len(item.prompt_token_ids) <= 30
        assert 2 <= item.max_tokens <= 30
        assert all(FIRST_ORDINARY_TOKEN <= t < 100 for t in item.prompt_token_ids)


def test_each_prompt_begins_with_one_of_the_prefixes():
    plain = Synthetic("synthetic", 40, Uniform("uniform", 3, 9), Fixed("fixed", 4))
    single_prefix = replace(plain, shared_prefix=30)
    without_prefix = make(plain, seed=1, vocab=1000).items
    with_one = make(single_prefix, seed=1, vocab=1000).items
    with_four = make(replace(single_prefix, prefixes=4), seed=1, vocab=1000).items
    (prefix,) = {item.prompt_token_ids[:30] for item in with_one}
    assert len(set(prefix)) > 20
    prefixes = [item.prompt_token_ids[:30] for item in with_four]
    assert len(set(prefixes)) == 4
    assert prefix in prefixes, "the first prefix is the one that was alone"
    for with_prefix in (with_one, with_four):
        assert [item.prompt_token_ids[30:] for item in with_prefix] == [
            item.prompt_token_ids for item in without_prefix
        ]
    longer = make(replace(single_prefix, prefixes=4, count=60), seed=1, vocab=1000).items
    assert [item.prompt_token_ids for item in longer[:40]] == [
        item.prompt_token_ids for item in with_four
    ]


def test_random_streams_are_independent():
    shape = (Uniform("uniform", 1, 99), Uniform("uniform", 1, 99))
    plain = make(Synthetic("synthetic", 20, *shape))
    poisson = make(Synthetic("synthetic", 20, *shape, arrivals=Poisson("poisson", 2.0)))
    short = make(Synthetic("synthetic", 20, shape[0], Fixed("fixed", 5)))
    assert [i.prompt_token_ids for i in plain.items] == [i.prompt_token_ids for i in poisson.items]
    assert [i.prompt_token_ids for i in plain.items] == [i.prompt_token_ids for i in short.items]
    assert [i.max_tokens for i in plain.items] == [i.max_tokens for i in poisson.items]
    assert plain.items != make(Synthetic("synthetic", 20, *shape), seed=1).items


def test_distributions_have_expected_moments():
    n = 40_000
    uniform, _ = draw_lengths(Uniform("uniform", 16, 256), n, rng())
    assert (min(uniform), max(uniform)) == (16, 256)
    exponential, cut = draw_lengths(Exponential("exponential", 200.0), n, rng())
    assert np.mean(exponential) == pytest.approx(200, rel=0.03)
    assert cut == sum(round(float(x)) < 1 for x in rng().exponential(200.0, n))
    lognormal, _ = draw_lengths(Lognormal("lognormal", 6.63, 0.99), n, rng())
    assert np.median(lognormal) == pytest.approx(np.exp(6.63), rel=0.03)
    assert np.std(np.log(lognormal)) == pytest.approx(0.99, rel=0.03)
    for spec, variation in (
        (Poisson("poisson", 5.0), 1.0),
        (Gamma("gamma", 5.0, 0.25), 2.0),
        (Gamma("gamma", 5.0, 4.0), 0.5),
    ):
        gaps = np.diff(draw_arrivals(spec, n, rng()))
        assert np.mean(gaps) == pytest.approx(0.2, rel=0.05)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(variation, rel=0.05)
    assert draw_arrivals(Gamma("gamma", 5.0, 1.0), 9, rng()) == draw_arrivals(
        Poisson("poisson", 5.0), 9, rng()
    )


def test_clipped_lengths_are_counted():
    drawn, cut = draw_lengths(Uniform("uniform", 1, 10, min=3, max=8), 1000, rng())
    raw = rng().integers(1, 10, size=1000, endpoint=True)
    assert cut == int(np.sum((raw < 3) | (raw > 8)))
    assert drawn == [min(max(int(n), 3), 8) for n in raw]


def test_shipped_prompts_are_english_of_mixed_length():
    content = PROMPTS.read_text(encoding="utf-8")
    texts = content.splitlines()
    assert len(make(Prompts("prompts", "english.txt"), content).items) == len(set(texts)) == 48
    words = sorted(len(text.split()) for text in texts)
    assert words[0] <= 4
    assert 100 <= words[-1] <= 160


def test_prompts_cycle_or_too_few_is_an_error():
    work = make(Prompts("prompts", "p", count=5, max_tokens=7), "ab\n\ncde\n")
    assert [len(i.prompt_token_ids) for i in work.items] == [2, 3, 2, 3, 2]
    assert {i.max_tokens for i in work.items} == {7}
    split = make(Prompts("prompts", "p", split="paragraph"), "a\nb\n\nc\n")
    assert [len(i.prompt_token_ids) for i in split.items] == [3, 1]
    with pytest.raises(ValueError, match=r"count is 3, but p has 2 prompts; set workload\.cycle"):
        make(Prompts("prompts", "p", count=3, cycle=False), "a\nb")


def test_trace_keeps_gaps_and_lengths():
    work = make(Trace("trace", "t.csv", time_scale=0.5, max_prompt_tokens=500), CSV)
    assert [len(i.prompt_token_ids) for i in work.items] == [374, 396, 500, 10]
    assert [i.max_tokens for i in work.items] == [44, 109, 1, 5]
    assert (work.clipped_prompts, work.clipped_outputs) == (1, 1)
    assert work.items[1].arrival == pytest.approx(4.314579 / 2, abs=1e-5)
    part = make(Trace("trace", "t.csv", offset=1, limit=2), CSV)
    assert [len(i.prompt_token_ids) for i in part.items] == [396, 9000]
    assert part.items[0].arrival == 0.0
    assert part.describe() == {
        "requests": 2,
        "prompt_tokens": 9396,
        "max_output_tokens": 110,
        "clipped_prompts": 0,
        "clipped_outputs": 1,
        "last_arrival_s": pytest.approx(0.227298),
    }


def test_bad_trace_errors():
    for spec, content, message in (
        (
            Trace("trace", "t.csv"),
            "a,b\n1,2\n",
            "no column TIMESTAMP, ContextTokens, GeneratedTokens.*CC-BY 4.0",
        ),
        (Trace("trace", "t.csv", offset=9), CSV, r"no requests after workload\.offset 9"),
    ):
        with pytest.raises(ValueError, match=message):
            make(spec, content)
    for values, message in (
        ({"offset": -1}, "offset is -1"),
        ({"limit": 0}, "limit is 0"),
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"time_scale": -1}, "time_scale is -1"),
        (
            {"max_prompt_tokens": 0},
            "max_prompt_tokens is 0; it must be at least 1, or null for lengths as they are",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Trace("trace", "t.csv", **values)


def test_token_list_is_used_unchanged():
    content = json.dumps([{"prompt": [3, 4], "n": 5}, {"prompt": [6], "max_tokens": 2, "n": 9}])
    work = make(Tokens("tokens", "w.json"), content)
    assert [(i.prompt_token_ids, i.max_tokens) for i in work.items] == [((3, 4), 5), ((6,), 2)]
    assert len(make(Tokens("tokens", "w.json", limit=1), content).items) == 1
    for bad, message in (
        ("{", "w.json is not JSON"),
        ("[]", "must hold a list"),
        ('[{"prompt": [], "n": 1}]', "entry 0: needs"),
        ('[{"prompt": [1, 100], "n": 1}]', r"entry 0: token id 100 is outside \[0, 100\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make(Tokens("tokens", "w.json"), bad)


def test_vocabulary_of_special_tokens_only_is_refused():
    with pytest.raises(
        ValueError, match="vocabulary has 17 tokens; random prompts need more than 17"
    ):
        make(Synthetic("synthetic", 1, Fixed("fixed", 1), Fixed("fixed", 1)), vocab=17)


def test_parameters_out_of_range_are_refused():
    bounded = (
        partial(Fixed, "fixed", 3),
        partial(Uniform, "uniform", 1, 2),
        partial(Exponential, "exponential", 2.0),
        partial(Lognormal, "lognormal", 1.0, 1.0),
    )
    for make_bad, message in (
        (lambda: Uniform("uniform", 3, 2), "high is 2; it must be at least low"),
        (lambda: Exponential("exponential", 0.0), "mean is 0.0"),
        (lambda: Lognormal("lognormal", 1.0, -1.0), "sigma is -1.0"),
        (
            lambda: Lognormal("lognormal", 663.0, 1.0, max=9),
            r"mu is 663\.0, a median of exp\(mu\) tokens; .* such as 6\.63",
        ),
        (
            lambda: Poisson("poisson", float("nan")),
            "rate is nan; it must be above 0 requests a second, and finite",
        ),
        (lambda: Gamma("gamma", 1.0, 0.0), "burstiness is 0.0"),
        (
            lambda: Synthetic("synthetic", 0, Fixed("fixed", 1), Fixed("fixed", 1)),
            "count is 0; it must be at least 1",
        ),
        (
            lambda: Synthetic(
                "synthetic", 1, Fixed("fixed", 1), Fixed("fixed", 1), shared_prefix=-1
            ),
            "shared_prefix is -1; it must be at least 0 tokens",
        ),
        (lambda: Prompts("prompts", "p", max_tokens=0), "max_tokens is 0; it must be at least 1"),
        (
            lambda: Prompts("prompts", "p", count=0),
            "count is 0; it must be at least 1, or null for each prompt once",
        ),
        (
            lambda: draw_lengths(Fixed("fixed", 10**12), 1, rng()),
            r"value=1000000000000.* beyond 16,777,216; give it a `max`",
        ),
        *(
            (
                lambda kind=kind: kind(min=9, max=3),
                "min is 9 and max 3; they must be 1 <= min <= max",
            )
            for kind in bounded
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_bad()


def test_rounds_repeat_the_arrivals_and_lengths_of_a_trace_with_other_prompts():
    content = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:00:0{second}.0,{3 + second},{1 + second}\n" for second in (0, 1, 4)
    )
    spec = Trace(kind="trace", file="t.csv", rounds=3, time_scale=2.0)
    items = make(spec, content).items
    assert [item.arrival for item in items] == [0.0, 2.0, 8.0, 12.0, 14.0, 20.0, 24.0, 26.0, 32.0]
    assert [(len(item.prompt_token_ids), item.max_tokens) for item in items] == [
        (3, 1),
        (4, 2),
        (7, 5),
    ] * 3
    assert len({tuple(item.prompt_token_ids) for item in items}) == 9
    assert make(replace(spec, rounds=1), content).items == items[:3]
    with pytest.raises(
        ValueError, match=r"rounds is 3, and the kept requests of t.csv all arrive at one time"
    ):
        make(replace(spec, limit=1), content)


def test_lazy_prompts_have_the_ids_of_prompts_that_are_drawn_at_once():
    sizes = [5, 1, 8, 3]
    source = rng(3)
    later = lazy_prompts(sizes, 1000, rng(3))
    at_once = [source.integers(17, 1000, size=size) for size in sizes]
    chex.assert_trees_all_equal([np.asarray(ids) for ids in later], at_once)
    assert [tuple(ids) for ids in later] == random_prompts(sizes, 1000, rng(3))
    ids = later[2]
    assert len(ids) == 8
    assert (ids[0], list(ids[2:4])) == (at_once[2][0], at_once[2][2:4].tolist())
    assert ids == tuple(at_once[2])
    assert ids != later[0]
    assert hash(ids) == hash(tuple(ids))
    chex.assert_type(np.asarray(ids, np.int32), np.int32)
    workload = Workload((WorkItem("a", 0.0, ids, 1),)).in_memory()
    assert type(workload.items[0].prompt_token_ids) is tuple
    assert workload.items[0].prompt_token_ids == tuple(ids)
