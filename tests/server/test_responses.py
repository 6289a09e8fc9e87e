"""The JSON of answers, from outputs that models rarely produce."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagedjax.server import responses
from pagedjax.server.responses import LOWEST, Style, finite, legacy_logprobs
from pagedjax.text.outputs import Logprob
from tests.refusals import refused


def style(logprobs: int) -> Style:
    tokenizer = SimpleNamespace(decode_token=lambda token: f"<{token}>")
    return Style("m", chat=False, tokenizer=cast(Any, tokenizer), logprobs=logprobs)


def test_infinite_and_nan_log_probabilities_become_the_lowest():
    assert [finite(x) for x in (math.nan, -math.inf, -1e5, -2.5)] == [LOWEST, LOWEST, LOWEST, -2.5]
    with refused("JSON"):
        responses.event({"logprob": math.nan})


def test_of_tokens_with_the_same_text_the_most_likely_is_listed():
    position = {
        7: Logprob(-0.1, 1, "\ufffd"),
        8: Logprob(-2.0, 2, "\ufffd"),
        9: Logprob(-3.0, 3, "a"),
    }
    (top,) = legacy_logprobs(style(3), (7,), (position,), (0,))["top_logprobs"]
    assert list(top.items()) == [("\ufffd", -0.1), ("a", -3.0)]


@pytest.mark.parametrize(("count", "texts"), [(0, ["z"]), (1, ["a", "z"]), (2, ["a", "b", "z"])])
def test_the_sampled_token_is_listed_beside_the_most_likely(count, texts):
    ranked = {7: Logprob(-0.1, 1, "a"), 8: Logprob(-2.0, 2, "b")}
    position = {90: Logprob(-9.0, 40, "z")} | dict(list(ranked.items())[:count])
    logprobs = legacy_logprobs(style(count), (90,), (position,), (0,))
    assert [list(top) for top in logprobs["top_logprobs"]] == [texts]
    assert logprobs["token_logprobs"] == [-9.0] == [logprobs["top_logprobs"][0]["z"]]


def test_a_sampled_token_among_the_most_likely_is_listed_once():
    position = {7: Logprob(-0.1, 1, "a"), 8: Logprob(-2.0, 2, "b")}
    assert legacy_logprobs(style(1), (7,), (position,), (0,))["top_logprobs"] == [{"a": -0.1}]
    assert json.loads(responses.event({"a": 1}).removeprefix("data: ")) == {"a": 1}


@pytest.mark.parametrize("kind", [None, "response.output_text.delta"])
def test_an_event_is_one_line_of_data_for_every_client(kind):
    text = "".join(map(chr, range(0x2100))) + "\U0001f600"
    written = responses.event({"text": text, "\u2028": 1}, kind)
    *head, data, last = written.splitlines()
    assert head == ([] if kind is None else [f"event: {kind}"])
    assert last == ""
    assert json.loads(data.removeprefix("data: ")) == {"text": text, "\u2028": 1}
