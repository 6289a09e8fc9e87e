"""What happens to unfinished requests when a cluster stops: they end in time, or are answered
503.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.server.replicas.support import OF_TINY, Cluster, cluster, process_of_one_replica
from tests.server.support import wait_until

pytestmark = pytest.mark.slow
OPTIONS = f"{OF_TINY} --replicas 2"
BODY = {"temperature": 0.0, "ignore_eos": True, "prompt": [20, 30, 40]}


async def whole(client: httpx.AsyncClient, tokens: int) -> tuple[int, dict]:
    answer = await client.post("/v1/completions", json={**BODY, "max_tokens": tokens})
    return answer.status_code, answer.json()


async def events_of(client: httpx.AsyncClient, tokens: int) -> list[str]:
    """The events of a streamed answer."""
    body = {**BODY, "max_tokens": tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        return [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]


@contextmanager
def freeze_one_replica(ray_cluster: Cluster) -> Iterator[None]:
    pid = process_of_one_replica(ray_cluster)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stop_cluster(ray_cluster: Cluster, tokens: int, count: int) -> tuple[list, list, float]:
    """Ask a cluster to stop while 2 * count requests are under way. Returns the answers, the
    streams, and the seconds until the last of them.
    """

    async def run() -> tuple[list, list]:
        async with httpx.AsyncClient(base_url=ray_cluster.url, timeout=120) as client:
            answers = [asyncio.ensure_future(whole(client, tokens)) for _ in range(count)]
            streams = [asyncio.ensure_future(events_of(client, tokens)) for _ in range(count)]
            for _ in range(600):  # until replicas have some of them
                running = await asyncio.to_thread(ray_cluster.gauges, "num_requests_running")
                if sum(running.values()) > 1:
                    break
                await asyncio.sleep(0.1)
            # on a busy machine some have ended before this process looks
            assert not all(task.done() for task in (*answers, *streams)), (
                "the requests were too short for this test"
            )
            ray_cluster.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*answers), await asyncio.gather(*streams)

    start = time.monotonic()
    return *asyncio.run(run()), time.monotonic() - start


def test_what_ends_in_time_is_answered(tiny_folder, tmp_path):
    with cluster(str(tiny_folder), tmp_path, f"{OPTIONS} --drain-seconds 100") as ray_cluster:
        with freeze_one_replica(
            ray_cluster
        ):  # a replica that does not answer is no reason to call the cluster dead
            assert ray_cluster.get("/health").status_code == 200
            assert sorted(ray_cluster.replicas().values()) == [False, True]
        wait_until(lambda: list(ray_cluster.replicas().values()) == [True, True], 60)
        answers, streams, _ = stop_cluster(ray_cluster, 400, 4)
        assert ray_cluster.process.wait(120) == 0
    assert [status for status, _ in answers] == [200] * 4
    assert {body["usage"]["completion_tokens"] for _, body in answers} == {400}
    assert [events[-1] for events in streams] == ["[DONE]"] * 4
    assert all(
        json.loads(events[-2])["choices"][0]["finish_reason"] == "length" for events in streams
    )


def test_what_does_not_is_answered_503(tiny_folder, tmp_path):
    with cluster(str(tiny_folder), tmp_path, f"{OPTIONS} --drain-seconds 1") as ray_cluster:
        answers, streams, seconds = stop_cluster(ray_cluster, 490, 30)
        assert ray_cluster.process.wait(120) == 0
    refused = [body["error"]["code"] for status, body in answers if status != 200]
    assert set(refused) == {"replica_ended"}
    assert {status for status, _ in answers} <= {200, 503}
    ends = [json.loads(events[-2]) for events in streams if "error" in json.loads(events[-2])]
    assert {end["error"]["code"] for end in ends} == {"replica_ended"}
    assert {events[-1] for events in streams} == {"[DONE]"}
    assert seconds < 60
