"""Records: ranges of sampling parameters, and properties of sequences and plans."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pagedjax.host.types import Plan, Request, Row, Seq
from pagedjax.options.params import SamplingParams

INTEGERS = ("n", "top_k", "max_tokens", "min_tokens")
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")

GOOD = [
    *(("n", value) for value in (1, 8)),
    *(("temperature", value) for value in (0, 0.0, 1e-6, 2.0)),
    *(("top_p", value) for value in (1e-6, 1, 1.0)),
    *(("top_k", value) for value in (-1, 0, 1, 50_000)),
    *(("min_p", value) for value in (0, 0.0, 1.0)),
    *(
        (name, value)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.0, 0, 2.0)
    ),
    *(("repetition_penalty", value) for value in (0.01, 2.0)),
    *(("seed", value) for value in (None, 0, 2**32 - 1)),
    *(("max_tokens", value) for value in (1, 1 << 20)),
    *(("min_tokens", value) for value in (0, 16)),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (None, 0, 20)),
    *(("logit_bias", value) for value in (None, {}, {5: -100.0, 6: 100})),
    *(("allowed_token_ids", value) for value in (None, (3,))),
]

BAD = [
    *(("n", value, "at least 1") for value in (0, -1)),
    *(("temperature", value, r"between 0 \(greedy\) and 2") for value in (-0.1, 2.1)),
    *(("top_p", value, "above 0 and at most 1") for value in (0, 0.0, -0.5, 1.01)),
    *(("min_p", value, r"between 0 \(off\) and 1") for value in (-0.1, 1.1)),
    *(("presence_penalty", value, "between -2 and 2") for value in (-2.1, 2.1)),
    *(("frequency_penalty", value, "between -2 and 2") for value in (-2.1, 2.1)),
    *(("repetition_penalty", value, "between 0.01 and 2") for value in (0, -1.0, 1e-40, 2.1)),
    *(
        ("top_k", value, r"from 1 to 2\*\*31 - 1, or 0 / -1 for off")
        for value in (-2, 2**31, 2**32 + 1, 10**30)
    ),
    *(("seed", value, r"None or in \[0, 2\*\*32\)") for value in (-1, 2**32, 1.0, True, "1")),
    *(("max_tokens", value, "at least 1") for value in (0, -5)),
    *(("min_tokens", value, r"between 0 and max_tokens \(16\)") for value in (-1, 17)),
    *(
        (name, value, "None or an integer from 0 to 20")
        for name in ("logprobs", "prompt_logprobs")
        for value in (-1, 21)
    ),
    *(
        (name, value, "None or an integer from 0 to 20")
        for name in ("logprobs", "prompt_logprobs")
        for value in (1.0, True)
    ),
    *(("stop", value, "a non-empty string or several of them") for value in ("", ["a", ""], (1,))),
    *(
        ("logit_bias", value, "between -100 and 100 for every token")
        for value in ({1: 100.5}, {1: 0, 2: -101})
    ),
    ("logit_bias", {1: math.nan}, "between -100 and 100"),
    ("allowed_token_ids", (), "None or non-empty"),
    *((name, value, "must be an integer") for name in INTEGERS for value in (1.0, True, "1")),
    # None: up to max_model_len
    *((name, None, "must be an integer") for name in INTEGERS if name != "max_tokens"),
    *(
        (name, value, "must be a finite number")
        for name in NUMBERS
        for value in (math.nan, math.inf, "1", None, True)
    ),
    *((name, value, "must be True or False") for name in SWITCHES for value in (0, 1, None, "yes")),
    *(
        (name, [-1], "token ids are integers of at least 0")
        for name in ("stop_token_ids", "allowed_token_ids")
    ),
    *((name, [True], "token ids are integers") for name in ("stop_token_ids", "allowed_token_ids")),
    *((name, [1.5], "token ids are integers") for name in ("stop_token_ids", "allowed_token_ids")),
    *((name, 1.5, "token ids are integers") for name in ("stop_token_ids", "allowed_token_ids")),
    *(
        ("logit_bias", value, "it must map token ids to numbers")
        for value in ({"a": 1}, {1: "x"}, {1: None}, [1], 3)
    ),
    ("logit_bias", {-1: 1.0}, "token ids are integers of at least 0"),
    *((name, "12", "token ids are integers") for name in ("stop_token_ids", "allowed_token_ids")),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_in_range_is_accepted_unchanged(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "rule"), BAD)
def test_a_value_out_of_range_is_refused_with_its_rule(name, value, rule):
    with pytest.raises(ValueError, match=rf"^{name} (is|holds) .*{rule}"):
        SamplingParams(**{name: value})


def test_the_message_quotes_the_value():
    with pytest.raises(
        ValueError, match=r"^temperature is 3\.5; it must be between 0 \(greedy\) and 2$"
    ):
        SamplingParams(temperature=3.5)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
        16,
    )
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    ("name", "given", "kept"),
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
def test_spellings_are_normalised(name, given, kept):
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == kept
    assert type(value) is type(kept)


def test_lists_and_dicts_of_the_caller_are_copied():
    stop = ["a"]
    bias = {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)  # type: ignore[arg-type]
    stop.append("b")
    bias[3] = 4.0
    assert (params.stop, params.logit_bias) == (("a",), {1: 2.0})


def test_stop_strings_need_text():
    with pytest.raises(
        ValueError, match=r"stop is \('a',\); it must be empty when detokenize is False"
    ):
        SamplingParams(stop="a", detokenize=False)


def test_sampling_params_are_frozen_and_refuse_unknown_names():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_replacing_a_field_checks_it_again():
    with pytest.raises(ValueError, match="top_p is 2"):
        dataclasses.replace(SamplingParams(), top_p=2.0)
    assert dataclasses.replace(SamplingParams(stop="a"), n=2).stop == ("a",)


def test_params_with_equal_values_are_equal():
    assert SamplingParams(stop="a", temperature=0.5) == SamplingParams(stop=["a"], temperature=0.5)  # type: ignore[arg-type]
    assert SamplingParams(seed=1) != SamplingParams(seed=2)


def seq(name: str, prompt_len: int, length: int, computed: int = 0) -> Seq:
    return Seq(
        Request(name, prompt_len, 8),
        arrival=0,
        limit=prompt_len + 8,
        length=length,
        computed=computed,
    )


def test_a_sequence_counts_its_output():
    assert seq("a", 3, 5).num_output == 2
    assert seq("a", 3, 5).request_id == "a"


def test_rows_of_a_plan_use_the_lengths_of_its_columns():
    plan = Plan(
        step=4,
        seqs=(seq("a", 3, 4, 3), seq("b", 9, 9)),
        lengths=(6, 9),
        starts=(5, 2),
        counts=(1, 4),
        admitted=("b",),
        known=(9,),
        cached=(0,),
        copies=(),
        preempted=(),
        swapped=(),
        resumed=(),
        swap_out=(),
        swap_in=(),
        num_waiting=0,
        blocks_used=2,
        num_blocks=8,
    )
    assert [
        (row.seq.request_id, row.seq.length, row.seq.computed, row.count) for row in plan.rows
    ] == [
        ("a", 6, 5, 1),
        ("b", 9, 2, 4),
    ]
    assert [row.samples for row in plan.rows] == [True, False]
    assert plan.num_tokens == 5


@pytest.mark.parametrize(
    ("length", "computed", "count", "samples"),
    [
        (9, 0, 9, True),
        (9, 5, 4, True),
        (9, 8, 1, True),
        (9, 0, 8, False),
        (9, 7, 1, False),
        (1, 0, 1, True),
    ],
)
def test_a_row_samples_when_it_reaches_the_end_of_the_known_tokens(
    length, computed, count, samples
):
    assert Row(seq("a", 1, length, computed), count).samples is samples
