"""`pagedjax serve --restarts N`: the engine's process ends, and its answers go on in the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.server import supervisor
from pagedjax.server.app import Options
from pagedjax.server.supervisor import Supervisor
from tests.server import fake_engine
from tests.server.support import SIZES, start_server, wait_until

STREAM = {"model": "llama", "temperature": 1.0, "ignore_eos": True, "stream": True}


@contextmanager
def supervised(model: Path, restarts: int, *words: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server until the end of the block. Yields its process and its url."""
    process, url = start_server(str(model), *SIZES, f"--restarts={restarts}", *words)
    try:
        yield process, url
    finally:
        process.kill()
        process.wait()


def engine_of(process: subprocess.Popen) -> int | None:
    """The pid of the process of the engine, if there is one."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--multiprocessing-fork" in words:
            return int(pid)
    return None


def health(url: str) -> tuple[int, str]:
    answer = httpx.get(f"{url}/health", timeout=30)
    return answer.status_code, answer.json()["status"]


async def stream(url: str, number: int) -> str:
    """The text of a streamed answer, which must be complete."""
    body = {**STREAM, "prompt": [20, 30, 40 + number], "seed": number, "max_tokens": 300}
    text = ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            assert '"error"' not in line, line
            text += line + "\n"
    assert text.endswith("data: [DONE]\n\n"), text[-300:]
    return text.replace(text.split('"id":"')[1].split('"')[0], "ID")


async def streams_with_a_kill(process: subprocess.Popen, url: str) -> list[str]:
    """Three answers, and the engine's process is killed when each has begun."""
    answers = [asyncio.create_task(stream(url, number)) for number in range(3)]
    for _ in range(2000):
        page = await asyncio.to_thread(lambda: httpx.get(f"{url}/metrics", timeout=30).text)
        tokens = page.partition("pagedjax:generation_tokens_total{")[2].partition("\n")[0]
        if tokens and float(tokens.split()[-1]) > 20:
            break
    pid = engine_of(process)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return list(await asyncio.gather(*answers))


def without_times(text: str) -> list[str]:
    return [line.partition('"created":')[2].partition(",")[2] for line in text.splitlines()]


@pytest.mark.slow
def test_streams_go_on_in_the_next_process(tiny_folder):
    with supervised(tiny_folder, 1) as (process, url):
        answers = asyncio.run(streams_with_a_kill(process, url))
        assert health(url) == (200, "ok")
        page = httpx.get(f"{url}/metrics", timeout=30).text
        assert 'requests_continued_total{model_name="llama",reason="ended"} 3.0' in page
        for number, answer in enumerate(answers):
            undisturbed = asyncio.run(stream(url, number))
            assert without_times(answer) == without_times(undisturbed)
        pid = engine_of(process)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # one time more than it may be started again
        assert process.wait(60) == 1


@pytest.mark.slow
def test_a_stop_ends_both_processes(tiny_folder):
    with supervised(tiny_folder, 1) as (process, url):
        pid = engine_of(process)
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
        assert health(url) == (200, "ok")
        process.terminate()
        assert process.wait(60) == 0
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)


@pytest.mark.slow
def test_the_engine_ends_with_the_process_that_started_it(tiny_folder):
    with supervised(tiny_folder, 1) as (process, _):
        pid = engine_of(process)
        process.kill()
        process.wait()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)


@pytest.fixture
def front(monkeypatch) -> Callable[..., Supervisor]:
    """A supervisor of fake processes, whose behaviours are given."""
    monkeypatch.setattr(supervisor, "run_engine", fake_engine.run)
    return lambda *behaviours, restarts=1: Supervisor(fake_engine.Plan(behaviours), restarts)


@pytest.mark.parametrize(
    ("behaviour", "answerers", "reason"),
    [
        ("is silent", {b"process 0", b"process 1"}, "answered nothing for 0.5 s"),
        ("has a long step", {b"process 0", b"process 1"}, "has a step of more than 600 s"),
        ("has failed", {b"process 0", b"process 1"}, "has an engine that failed"),
        ("ends while it answers", {b"process 1"}, "ended with status 9"),
    ],
)
def test_a_process_that_is_lost_is_started_again(
    front, monkeypatch, caplog, behaviour, answerers, reason
):
    """The next one answers the request that it had, and later ones."""
    if behaviour == "is silent":
        monkeypatch.setattr(supervisor, "SILENT_SECONDS", 0.5)
        monkeypatch.setattr(supervisor, "PULSE_SECONDS", 0.5)

    async def ask(processes: Supervisor) -> list[bytes]:
        transport = httpx.ASGITransport(supervisor.create_front(processes, Options("tiny")))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            watching = asyncio.create_task(processes.watch())
            answers = []
            while b"process 1" not in answers:
                answers.append((await client.post("/v1/completions", timeout=60)).content)
            await watching
            assert (await client.get("/health")).status_code == 503
        return answers

    processes = front(behaviour, "fails after an answer")
    try:
        assert asyncio.run(processes.start())
        answers = asyncio.run(ask(processes))
    finally:
        processes.close()
    assert set(answers) <= answerers
    assert f"the engine's process {reason}; it is started again (1 of 1" in caplog.text
    assert "an engine that failed; the engine ended 2 times in a row and is not" in caplog.text
    assert processes.exit_status == 1


def test_a_process_that_does_not_load_at_first_is_not_started_again(front):
    processes = front("does not load")
    assert not asyncio.run(processes.start())
    assert processes.exit_status == 3
    processes.close()


def test_a_stop_while_the_engine_loads_ends_it(front):
    processes = front("loads for ever")

    async def stop_soon() -> bool:
        starting = asyncio.create_task(processes.start())
        await asyncio.sleep(0.2)
        processes.stop()
        return await starting

    assert not asyncio.run(stop_soon())
    assert processes.exit_status == 0
    processes.close()


@given(
    batches=st.lists(st.lists(st.binary(max_size=20), max_size=3), max_size=4),
    size=st.integers(1, 50),
)
def test_frames_come_in_pieces_of_any_size(batches, size):
    messages = [[{"type": "a", "body": body} for body in batch] for batch in batches]
    data = b"".join(map(supervisor._frame, messages))

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    async def read() -> list:
        return [batch async for batch in supervisor._frames(chunks())]

    assert asyncio.run(read()) == messages
