"""A real server on 127.0.0.1, in a thread of this process, over the tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import uvicorn

from pagedjax import LLM
from pagedjax.server.app import Options, create_app

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "token_buckets": (8, 64), "num_blocks": 256}


@contextmanager
def serving(llm: LLM, **options) -> Iterator[SimpleNamespace]:
    """A server for the time of a test -> its url, app, worker and uvicorn's server."""
    options = Options(**{"name": "tiny"} | options)
    app = create_app(llm, options)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=10)
    server, socket = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    try:
        for _ in range(1000):
            if server.started:
                break
            thread.join(0.01)
        assert server.started
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        yield SimpleNamespace(url=url, app=app, worker=app.state.worker, server=server, thread=thread)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def served(tiny) -> Iterator[SimpleNamespace]:
    llm = LLM(tiny, progress=False, **ENGINE)
    with serving(llm) as found:
        yield found
        assert found.worker.healthy
        state = llm.engine.state
        assert state.pool.num_free == state.config.num_blocks, "a block leaked"


@pytest.fixture(scope="session")
def reference(tiny) -> LLM:
    """What the server has to say the same as."""
    return LLM(tiny, progress=False, **ENGINE)
