"""A failed step: the worker continues, and only repeated failure ends the engine."""

from __future__ import annotations

import itertools
import json
import logging
import re

import httpx
import pytest

from pagedjax.engine import state
from pagedjax.text.outputs import OutputBuilder
from tests.engine.runs import answers, greedy
from tests.server.support import (
    complete,
    error_of,
    idle,
    post,
    served_to,
    server_llm,
    streamed_texts,
    text_of,
    wait_until,
)


@pytest.fixture
def failing(monkeypatch):
    """Make the device's part of a step raise when `fails(number of the call)`. Returns the numbers
    of the failed calls.
    """

    def patch(fails) -> list[int]:
        send = state.send
        calls = itertools.count(1)
        failed = []

        def faulty(*args, **options):
            call = next(calls)
            if fails(call):
                failed.append(call)
                raise RuntimeError("the device is out of memory")
            return send(*args, **options)

        monkeypatch.setattr(state, "send", faulty)
        return failed

    return patch


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_once_changes_no_token(tiny, reference, failing, caplog, stream):
    (expected,) = answers(reference, "abc", greedy(12))
    failed = failing(lambda call: call in (1, 5, 6, 9))
    options = {"max_tokens": 12, "ignore_eos": True}
    with (
        served_to(server_llm(tiny)) as (server, http),
        caplog.at_level(logging.ERROR, "pagedjax.server"),
    ):
        if stream:
            lines = post(http, stream=True, **options).text.splitlines()
            text = "".join(streamed_texts(lines))
        else:
            text = text_of(http, **options)
        assert text == expected.text
        assert http.get("/health").status_code == 200
        assert http.get("/viewer/steps").status_code == 200
        wait_until(lambda: idle(server.worker))
    assert failed == [1, 5, 6, 9]
    counts = re.findall(r"step failed.*?\((\d) of 3 in a row\)", caplog.text)
    assert counts == ["1", "1", "2", "1"]


def assert_stopped(answer: httpx.Response, message: str) -> None:
    assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_stopped")
    assert error_of(answer)["message"] == f"the engine failed: {message}"


def test_three_failed_steps_in_a_row_end_the_engine(tiny, failing):
    failed = failing(lambda call: call > 2)
    with served_to(server_llm(tiny)) as (_, http):
        assert complete(http, max_tokens=2)["choices"]
        assert_stopped(post(http), "the device is out of memory")
        assert failed == [3, 4, 5]
        assert http.get("/health").status_code == 503
        assert post(http).status_code == 503
        assert http.post("/generate", json={"prompt": "abc"}).status_code == 503


def test_an_error_after_a_step_ends_the_engine_because_its_tokens_are_lost(tiny, monkeypatch):
    push = OutputBuilder.push
    calls = itertools.count(1)

    def faulty(*args):
        if next(calls) == 3:
            raise RuntimeError("no text")
        return push(*args)

    with served_to(server_llm(tiny)) as (_, http):
        monkeypatch.setattr(OutputBuilder, "push", faulty)
        assert_stopped(post(http, max_tokens=8, ignore_eos=True), "no text")


def test_an_error_while_a_request_is_queued_is_answered(tiny, monkeypatch):
    llm = server_llm(tiny)
    with served_to(llm) as (server, http):
        monkeypatch.setattr(llm.engine, "_submit", lambda request: 1 / 0)
        assert_stopped(post(http), "division by zero")
        wait_until(lambda: not server.worker.healthy)
        assert http.get("/health").status_code == 503


def test_a_stream_ends_with_an_error_when_the_engine_ends(tiny, failing):
    failing(lambda call: call > 4)
    with served_to(server_llm(tiny)) as (_, http):
        answer = post(http, max_tokens=30, ignore_eos=True, stream=True)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"
