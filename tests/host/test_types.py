"""Records: ranges of sampling parameters, and properties of sequences and plans."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pagedjax.host.types import EMPTY_PLAN, Request, Seq
from pagedjax.options.params import SamplingParams
from tests.refusals import refused

INTEGERS = ("n", "top_k", "max_tokens", "min_tokens")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
LOGPROBS = ("logprobs", "prompt_logprobs")
PENALTIES = ("presence_penalty", "frequency_penalty")
IDS = ("stop_token_ids", "allowed_token_ids")

GOOD = {
    "n": (1, 8),
    "temperature": (0, 1e-6, 2.0),
    "top_p": (1e-6, 1),
    "top_k": (-1, 0, 50_000),
    "min_p": (0, 1.0),
    **dict.fromkeys(PENALTIES, (-2.0, 0, 2.0)),
    "repetition_penalty": (0.01, 2.0),
    "seed": (None, 0, 2**32 - 1),
    "max_tokens": (1, 1 << 20),
    "min_tokens": (0, 16),
    **dict.fromkeys(LOGPROBS, (None, 0, 20)),
    "logit_bias": (None, {}, {5: -100.0, 6: 100}),
    "allowed_token_ids": (None, (3,)),
}

BAD = [
    ("n", "at least 1", (0,)),
    ("temperature", r"between 0 \(greedy\) and 2", (-0.1, 2.1)),
    ("top_p", "above 0 and at most 1", (0, 1.01)),
    ("min_p", r"between 0 \(off\) and 1", (-0.1, 1.1)),
    *((name, "between -2 and 2", (-2.1, 2.1)) for name in PENALTIES),
    ("repetition_penalty", "between 0.01 and 2", (0, 1e-40, 2.1)),
    ("top_k", r"from 1 to 2\*\*31 - 1, or 0 / -1 for off", (-2, 2**31, 2**32 + 1)),
    ("seed", r"None or in \[0, 2\*\*32\)", (-1, 2**32, 1.0, True)),
    ("max_tokens", "at least 1", (0,)),
    ("min_tokens", r"between 0 and max_tokens \(16\)", (-1, 17)),
    *((name, "None or an integer from 0 to 20", (-1, 21, 1.0, True)) for name in LOGPROBS),
    ("stop", "a non-empty string or several of them", ("", ["a", ""], (1,))),
    (
        "logit_bias",
        "between -100 and 100 for every token",
        ({1: 100.5}, {1: 0, 2: -101}, {1: math.nan}),
    ),
    ("logit_bias", "it must map token ids to numbers", ({"a": 1}, {1: "x"}, {1: None}, 3)),
    ("logit_bias", "token ids are integers of at least 0", ({-1: 1.0},)),
    ("allowed_token_ids", "None or non-empty", ((),)),
    *((name, "must be an integer", (1.0, True, "1")) for name in INTEGERS),
    ("n", "must be an integer", (None,)),
    *((name, "must be a finite number", (math.nan, math.inf, "1", None, True)) for name in NUMBERS),
    *((name, "must be True or False", (0, None, "yes")) for name in SWITCHES),
    *(
        (name, "token ids are integers of at least 0", ([-1], [True], [1.5], 1.5, "12"))
        for name in IDS
    ),
]


@pytest.mark.parametrize(("name", "values"), GOOD.items())
def test_a_value_in_range_is_accepted_unchanged(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "rule", "values"), BAD)
def test_a_value_out_of_range_is_refused_with_its_rule(name, rule, values):
    for value in values:
        with refused(rf"^{name} (is|holds) .*{rule}"):
            SamplingParams(**{name: value})


def test_the_message_quotes_the_value():
    with refused(r"^temperature is 3\.5; it must be between 0 \(greedy\) and 2$"):
        SamplingParams(temperature=3.5)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    defaults = (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens)
    assert defaults == (1, 1.0, 1.0, 0, 16)
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    ("name", "spelling", "expected"),
    [
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", 7, (7,)),
        ("stop_token_ids", [9, 7, 9], (9, 7, 9)),
        ("stop_token_ids", {9, 7}, (7, 9)),
        ("allowed_token_ids", frozenset({3, 1}), (1, 3)),
        ("logit_bias", {"5": 1}, {5: 1.0}),
    ],
)
def test_spellings_are_normalised(name, spelling, expected):
    value = getattr(SamplingParams(**{name: spelling}), name)
    assert value == expected
    assert type(value) is type(expected)


def test_lists_and_dicts_of_the_caller_are_copied():
    stop = ["a"]
    bias = {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)  # type: ignore[arg-type]
    stop.append("b")
    bias[3] = 4.0
    assert (params.stop, params.logit_bias) == (("a",), {1: 2.0})


def test_stop_strings_need_text():
    with refused(r"stop is \('a',\); it must be empty when detokenize is False"):
        SamplingParams(stop="a", detokenize=False)


def test_sampling_params_are_frozen_and_refuse_unknown_names():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_replacing_a_field_checks_it_again():
    with refused("top_p is 2"):
        dataclasses.replace(SamplingParams(), top_p=2.0)
    assert dataclasses.replace(SamplingParams(stop="a"), n=2).stop == ("a",)


def seq(name: str, prompt_len: int, length: int, computed: int = 0) -> Seq:
    return Seq(
        Request(name, prompt_len, 8),
        arrival=0,
        limit=prompt_len + 8,
        length=length,
        computed=computed,
    )


def test_rows_of_a_plan_use_the_lengths_of_its_columns():
    plan = EMPTY_PLAN._replace(
        seqs=(seq("a", 3, 4, 3), seq("b", 9, 9)),
        lengths=(6, 9),
        starts=(5, 2),
        counts=(1, 4),
    )
    rows = [(row.seq.request_id, row.seq.length, row.seq.computed, row.count) for row in plan.rows]
    assert rows == [("a", 6, 5, 1), ("b", 9, 2, 4)]
    assert [row.samples for row in plan.rows] == [True, False]
    assert plan.num_tokens == 5
