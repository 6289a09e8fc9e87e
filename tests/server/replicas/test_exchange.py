"""An application that is called without a socket: all its messages, its errors, and a client that
leaves.
"""

from __future__ import annotations

import asyncio
import pickle

import httpx
import prometheus_client as prometheus
import pytest
from fastapi import FastAPI, Request
from prometheus_client.parser import text_string_to_metric_families

from pagedjax.server import exchange
from pagedjax.server.ray import pages
from pagedjax.server.streaming import EventStream, unless_client_leaves


def application(log: list) -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict:
        return {
            "body": (await request.body()).decode(),
            "query": request.url.query,
            "key": request.headers["x-key"],
        }

    @app.get("/wait")
    async def wait(request: Request) -> str:
        log.append("waits")
        await unless_client_leaves(request, asyncio.sleep(60))
        log.append("left")
        return "never read"

    @app.get("/stream")
    async def stream() -> EventStream:
        async def events():
            for i in range(1000):
                yield f"data: {i}\n\n"
                await asyncio.sleep(0.001)

        return EventStream(events(), lambda: log.append("ended"))

    @app.get("/fails")
    async def fails() -> None:
        raise KeyError("broken")

    return app


async def body_of(messages) -> bytes:
    return b"".join([message.get("body", b"") async for batch in messages for message in batch])


def scope_of(method: str, url: str, headers: dict[str, str]) -> dict:
    """What Starlette's transport would pass, with things in it that cannot be pickled."""
    request = httpx.Request(method, f"http://127.0.0.1{url}", headers=headers)
    return {
        **exchange.get(request.url.path),
        "method": method,
        "query_string": request.url.query,
        "headers": request.headers.raw,
        "app": lambda: None,
        "state": {},
    }


def test_a_request_and_its_answer_are_values():
    scope = exchange.plain(scope_of("POST", "/echo?a=b", {"x-key": "secret"}))
    assert pickle.loads(pickle.dumps(scope)) == scope
    body = asyncio.run(body_of(exchange.answer_messages(application([]), scope, b"words")))
    assert body == b'{"body":"words","query":"a=b","key":"secret"}'


@pytest.mark.parametrize(
    ("path", "entries"), [("/wait", ["waits", "left"]), ("/stream", ["ended"])]
)
def test_a_client_that_leaves_ends_the_work(path, entries):
    log: list[str] = []

    async def leaves() -> None:
        messages = exchange.answer_messages(application(log), exchange.get(path), b"")
        try:
            async with asyncio.timeout(0.2):
                await body_of(messages)
        finally:
            await messages.aclose()

    with pytest.raises(TimeoutError):
        asyncio.run(leaves())
    assert log == entries


def test_messages_that_are_ready_come_together():
    async def burst(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(10):
            await send({"type": "http.response.body", "body": b"%d" % i, "more_body": i < 9})

    async def lists() -> list[int]:
        return [
            len(batch) async for batch in exchange.answer_messages(burst, exchange.get("/"), b"")
        ]

    counts = asyncio.run(lists())
    assert sum(counts) == 11
    assert len(counts) < 11


def test_an_error_of_the_application_comes_after_its_messages():
    messages = []

    async def read() -> None:
        async for batch in exchange.answer_messages(application([]), exchange.get("/fails"), b""):
            messages.extend(batch)

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(read())
    assert messages[0]["status"] == 500


def test_metrics_of_all_replicas_are_one_page():
    def page(count: int) -> str:
        registry = prometheus.CollectorRegistry()
        prometheus.Counter("tokens", "Tokens", ("model",), registry=registry).labels("m").inc(count)
        prometheus.Gauge("running", "Requests", registry=registry).set(count)
        prometheus.Histogram("seconds", "Time", registry=registry, buckets=(1.0, 2.0)).observe(
            count
        )
        return prometheus.generate_latest(registry).decode()

    families = list(text_string_to_metric_families(pages.merged_page({"a": page(1), "b": page(2)})))
    samples = {
        (sample.name, sample.labels["replica"], sample.labels.get("le")): sample
        for family in families
        for sample in family.samples
    }
    for name, bucket, values in (
        ("tokens_total", None, [1, 2]),
        ("running", None, [1, 2]),
        ("seconds_bucket", "1.0", [1, 0]),
    ):
        assert [samples[name, replica, bucket].value for replica in "ab"] == values
    assert samples["tokens_total", "a", None].labels == {"model": "m", "replica": "a"}
    kinds = {family.name: family.type for family in families}
    assert kinds == kinds | {"tokens": "counter", "running": "gauge", "seconds": "histogram"}
    assert len(kinds) == len(families), "a family is twice on the page"
