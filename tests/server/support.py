"""Helpers of the server's tests: a server in a thread, a server in a process, and small reads of
its answers.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import httpx
import pytest
import uvicorn

from pagedjax import LLM
from pagedjax.commands import cli
from pagedjax.server import serve
from pagedjax.server.app import Options, create_app

ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (8, 64),
    "num_blocks": 256,
}
SIZES = (  # the same, as words of a command
    "--max-num-seqs=8",
    "--max-num-batched-tokens=64",
    "--token-buckets=8,64",
    "--num-blocks=256",
)
ROOT = Path(__file__).parents[2]
GREEDY = {"model": "tiny", "temperature": 0.0}


def server_llm(model: Any, **config: Any) -> LLM:
    """The engine of most servers, which shares programs with `tiny_llm`."""
    return LLM(model, progress=False, **ENGINE | config)


@contextmanager
def serving(llm: LLM, **options) -> Iterator[SimpleNamespace]:
    """Run a server for the time of a test. Yields its url, app, worker and uvicorn's server."""
    options = Options(**{"name": "tiny"} | options)
    app = create_app(llm, options)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=10
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        for _ in range(1000):
            if server.started:
                break
            thread.join(0.01)
        assert server.started
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield SimpleNamespace(
            url=url, app=app, worker=app.state.worker, server=server, thread=thread
        )
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def serving_without_leaks(llm: LLM, **options) -> Iterator[SimpleNamespace]:
    """A server for many tests. At its end the engine must be healthy, and all blocks free.

    Some requests run on after their answer: those of the route /generate, and those whose client
    left.
    """
    with serving(llm, **options) as server:
        yield server
        assert server.worker.healthy
        wait_until(lambda: idle(server.worker), failure="a request never ended, or a block leaked")


@contextmanager
def served_to(llm: LLM, **options) -> Iterator[tuple[SimpleNamespace, httpx.Client]]:
    """A server for one test, and a client of it."""
    with serving(llm, **options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield server, client


@contextmanager
def slow_steps(worker: Any) -> Iterator[threading.Event]:
    """Steps of a server wait for 50 ms each until the event is set or the block ends, so that a
    test sees requests that run, however busy the machine is.
    """
    session = worker.llm.session
    ended = threading.Event()
    step = session.step

    def waiting() -> Any:
        ended.wait(0.05)
        return step()

    session.step = waiting
    try:
        yield ended
    finally:
        ended.set()
        session.step = step


def start_server(
    *words: str, errors: IO[str] | None = None, module: str = "tests.quickly"
) -> tuple[subprocess.Popen[str], str]:
    """Start `pagedjax serve` as a separate process. Returns the process and its url.

    Args:
        errors: the file for its log.
        module: "pagedjax" compiles as for users.
    """
    command = [sys.executable, "-m", module, "serve", *words, "--port=0", "--log-level=warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), line
    return process, line.split(" at ")[1].strip().removesuffix("/v1")


@contextmanager
def command(*words: str) -> Iterator[tuple[uvicorn.Server, str]]:
    """Run `pagedjax serve` in a thread of this process, which starts without imports. Yields
    uvicorn's server and the url.
    """
    servers: list[uvicorn.Server] = []

    class Noted(serve.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            servers.append(self)

    arguments = ["serve", *words, *shlex.split("--port 0 --log-level warning")]
    thread = threading.Thread(target=cli.main, args=[arguments], daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "Server", Noted)
        thread.start()
        wait_until(lambda: servers or not thread.is_alive())
    (server,) = servers
    try:
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def complete(client: httpx.Client, **options) -> dict:
    """The answer to a completion request, which must succeed."""
    answer = client.post("/v1/completions", json={**GREEDY, "prompt": "abc", **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(http: httpx.Client, **options: Any) -> httpx.Response:
    """The answer to a completion request, which may be refused."""
    return http.post("/v1/completions", json={**GREEDY, "prompt": "abc", **options})


def text_of(http: httpx.Client, **options: Any) -> str:
    return complete(http, **options)["choices"][0]["text"]


def streamed_texts(lines: Iterable[str]) -> Iterator[str]:
    """The texts of a completion's events."""
    for line in lines:
        if line.startswith("data: {"):
            yield "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


def error_of(answer: httpx.Response) -> dict:
    """The error, which has OpenAI's shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until(
    condition: Callable[[], object],
    seconds: float = 30.0,
    failure: str = "the condition did not become true in time",
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, failure
        time.sleep(0.01)


def idle(worker) -> bool:
    """Whether no request is under way and no block has an owner."""
    state = worker.llm.engine.scheduler_state
    return (
        not worker.llm.engine.has_work
        and not worker.waiting
        and state.pool.num_free == state.config.num_blocks
    )


def gauge(page: str, name: str) -> float:
    """The value of a gauge on the page of metrics of one server."""
    lines = [line for line in page.splitlines() if line.startswith(f"pagedjax:{name}{{")]
    return float(lines[0].split()[-1])
