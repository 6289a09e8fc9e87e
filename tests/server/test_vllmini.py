"""The endpoints of vllmini: ids that cannot be guessed, and results that are bounded in time and
number.
"""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from pagedjax import SamplingParams
from pagedjax.engine import state
from pagedjax.server import vllmini
from tests.server.support import complete, error_of, idle, served_to, server_llm, wait_until


def generate(http, **options) -> str:
    answer = http.post("/generate", json={"prompt": "abc", **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["sequence_id"]


@pytest.fixture
def slow(monkeypatch):
    """Steps of at least 20 ms: 480 tokens take at least 9.6 s."""
    send = state.send
    monkeypatch.setattr(
        state, "send", lambda *args, **options: time.sleep(0.02) or send(*args, **options)
    )


def status(http, name) -> str:
    return http.get(f"/result/{name}").json()["status"]


def test_a_generation_is_started_and_its_text_is_read_later(http, reference):
    (expected,) = reference.generate("abc", SamplingParams(temperature=0.0, max_tokens=60))
    text = expected.outputs[0].text
    results = []
    name = generate(http, max_length=len(expected.prompt_token_ids) + 60)
    while not results or results[-1]["status"] == "in progress":
        results.append(http.get(f"/result/{name}").json())
    assert results[-1] == {"status": "completed", "generated": text}
    for partial in results:
        assert text.startswith(partial["generated"])
    answer = http.post("/generate", json={"prompt": "abc the cat", "max_length": 1})
    assert "at least" in error_of(answer)["message"]


def test_ids_cannot_be_guessed(http):
    names = [generate(http, max_length=8) for _ in range(3)]
    for name in names:
        wait_until(lambda name=name: status(http, name) == "completed")
    for guess in (*range(8), names[0][:-1], names[0] + "A"):
        assert http.get(f"/result/{guess}").json() == {"status": "not found", "generated": None}
    assert len(set(names)) == 3
    assert min(map(len, names)) >= 22  # 128 bits in base64


@pytest.mark.slow
def test_a_result_is_forgotten_when_no_client_asks_for_it(tiny):
    with served_to(server_llm(tiny), result_seconds=1.0) as (_, http):
        name = generate(http, max_length=8)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:  # each GET keeps it for one more second
            assert status(http, name) in ("in progress", "completed")
            time.sleep(0.2)
        time.sleep(1.5)
        assert status(http, name) == "not found"


def test_a_generation_is_cancelled_when_no_client_asks_for_its_result(tiny, slow):
    with served_to(server_llm(tiny), result_seconds=0.3) as (server, http):
        complete(http, max_tokens=1)  # compiles, which may take longer than a result is kept
        name = generate(http, max_length=480)
        wait_until(lambda: server.worker.llm.engine.scheduler_state.running.seqs)
        wait_until(lambda: idle(server.worker), seconds=5)
        assert status(http, name) == "not found"


def test_a_generation_is_cancelled_when_the_client_leaves_before_the_answer(
    tiny, slow, monkeypatch
):
    """The engine's thread is blocked in a step, so that the answer to the POST has to wait."""
    send = state.send
    blocked = threading.Event()
    resume = threading.Event()

    def blocking(*args, **options):
        blocked.set()
        assert resume.wait(30)
        return send(*args, **options)

    with served_to(server_llm(tiny)) as (server, http):
        monkeypatch.setattr(state, "send", blocking)
        thread = threading.Thread(target=complete, args=(http,), kwargs={"max_tokens": 3})
        thread.start()
        assert blocked.wait(30)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/generate", json={"prompt": "abc", "max_length": 480}, timeout=0.5
            )
        time.sleep(0.2)
        resume.set()
        thread.join(30)
        wait_until(lambda: idle(server.worker), seconds=5)


def test_the_oldest_completed_result_makes_room(tiny, monkeypatch):
    monkeypatch.setattr(vllmini, "MAX_RESULTS", 3)
    with served_to(server_llm(tiny)) as (_, http):
        names = []
        for _ in range(6):
            names.append(generate(http, max_length=8))
            wait_until(lambda: status(http, names[-1]) == "completed")
        assert [status(http, name) for name in names] == ["not found"] * 3 + ["completed"] * 3


def test_a_generation_above_the_limit_is_refused_while_all_are_in_progress(tiny, slow, monkeypatch):
    monkeypatch.setattr(vllmini, "MAX_RESULTS", 2)
    with served_to(server_llm(tiny)) as (server, http):
        names = [generate(http, max_length=400) for _ in range(2)]
        answer = http.post("/generate", json={"prompt": "abc", "max_length": 400})
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert "limit of /generate" in error_of(answer)["message"]
        assert [status(http, name) for name in names] == ["in progress"] * 2
        wait_until(lambda: server.worker.llm.engine._state.unfinished == 2, seconds=5)


def test_the_endpoints_can_be_switched_off(tiny):
    with served_to(server_llm(tiny), lecture_endpoints=False) as (_, http):
        assert http.post("/generate", json={"prompt": "abc"}).status_code == 404
        assert http.get("/result/1").status_code == 404
        paths = http.get("/openapi.json").json()["paths"]
        assert {"/generate", "/result/{sequence_id}"}.isdisjoint(paths)
        assert complete(http, max_tokens=1)["choices"]
