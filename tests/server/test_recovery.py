"""A failed step: the worker continues, and only repeated failure ends the engine."""

from __future__ import annotations

import itertools
import json
import logging

import httpx
import pytest

from pagedjax import LLM
from pagedjax.engine import step
from pagedjax.text.outputs import OutputBuilder
from tests.engine.runs import greedy
from tests.server.support import (
    ENGINE,
    GREEDY,
    complete,
    error_of,
    idle,
    served_to,
    serving,
    wait_until,
)


@pytest.fixture
def failing(monkeypatch):
    """Make the device's part of a step raise when `fails(number of the call)`. Returns the numbers
    of the failed calls.
    """

    def patch(fails) -> list[int]:
        send = step.send
        calls = itertools.count(1)
        failed = []

        def faulty(*args, **options):
            call = next(calls)
            if fails(call):
                failed.append(call)
                raise RuntimeError("the device is out of memory")
            return send(*args, **options)

        monkeypatch.setattr(step, "send", faulty)
        return failed

    return patch


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_once_changes_no_token(tiny, reference, failing, caplog, stream):
    llm = LLM(tiny, progress=False, **ENGINE)
    params = greedy(12)
    (expected,) = reference.generate("abc", params)
    failed = failing(lambda call: call in (1, 5, 6, 9))
    options = {"max_tokens": 12, "ignore_eos": True}
    with served_to(llm) as (server, http), caplog.at_level(logging.ERROR, "pagedjax.server"):
        if stream:
            answer = http.post(
                "/v1/completions", json={**GREEDY, "prompt": "abc", "stream": True, **options}
            )
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(
                choice["text"] for event in events for choice in json.loads(event)["choices"]
            )
        else:
            text = complete(http, **options)["choices"][0]["text"]
        assert text == expected.outputs[0].text
        assert http.get("/health").status_code == 200
        assert http.get("/viewer/steps").status_code == 200
        wait_until(lambda: idle(server.worker))
    assert failed == [1, 5, 6, 9]
    logged = [
        record.getMessage() for record in caplog.records if "step failed" in record.getMessage()
    ]
    assert [text.split("(")[1].split(")")[0] for text in logged] == [
        f"{count} of 3 in a row" for count in (1, 1, 2, 1)
    ]


def test_three_failed_steps_in_a_row_end_the_engine(tiny, failing):
    failed = failing(lambda call: call > 2)
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (_, http):
        assert complete(http, max_tokens=2)["choices"]
        answer = http.post("/v1/completions", json={**GREEDY, "prompt": "abc"})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_stopped")
        assert error_of(answer)["message"] == "the engine failed: the device is out of memory"
        assert failed == [3, 4, 5]
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={**GREEDY, "prompt": "abc"}).status_code == 503
        assert http.post("/generate", json={"prompt": "abc"}).status_code == 503


def test_a_successful_step_resets_the_count_of_failed_steps(tiny, failing):
    failing(lambda call: call in (2, 3, 5, 6))
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (server, http):
        for _ in range(3):
            assert complete(http, max_tokens=3)["choices"]
        assert server.worker.healthy


def test_an_error_after_a_step_ends_the_engine_because_its_tokens_are_lost(tiny, monkeypatch):
    push = OutputBuilder.push
    calls = itertools.count(1)

    def faulty(*args):
        if next(calls) == 3:
            raise RuntimeError("no text")
        return push(*args)

    with served_to(LLM(tiny, progress=False, **ENGINE)) as (_, http):
        monkeypatch.setattr(OutputBuilder, "push", faulty)
        answer = http.post(
            "/v1/completions", json={**GREEDY, "prompt": "abc", "max_tokens": 8, "ignore_eos": True}
        )
        assert (answer.status_code, error_of(answer)["message"]) == (
            503,
            "the engine failed: no text",
        )


def test_an_error_while_a_request_is_queued_is_answered(tiny, monkeypatch):
    llm = LLM(tiny, progress=False, **ENGINE)
    with served_to(llm) as (server, http):
        monkeypatch.setattr(llm.engine, "_submit", lambda request: 1 / 0)
        answer = http.post("/v1/completions", json={**GREEDY, "prompt": "abc"}, timeout=10)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_stopped")
        assert error_of(answer)["message"] == "the engine failed: division by zero"
        wait_until(lambda: not server.worker.healthy)
        assert http.get("/health").status_code == 503


def test_a_stream_ends_with_an_error_when_the_engine_ends(tiny, failing):
    failing(lambda call: call > 4)
    with serving(LLM(tiny, progress=False, **ENGINE)) as server:
        options = {**GREEDY, "prompt": "abc", "max_tokens": 30, "ignore_eos": True, "stream": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=options, timeout=60)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"
