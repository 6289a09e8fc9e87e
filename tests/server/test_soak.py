"""A server under load for minutes: answers stay right, the queue stays within its bound, and memory
stays constant.

Half a minute runs with -m slow, ten minutes with -m exhaustive.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import httpx
import pytest

from tests.engine.runs import answers, greedy
from tests.server.support import GREEDY, gauge, start_server, streamed_texts, wait_until

CLIENTS = 200
QUEUE = 150
TOKENS = 24
SIZES = (
    "--max-num-seqs=16",
    "--num-blocks=256",
    "--max-num-batched-tokens=64",
    "--token-buckets=16,64",
)


def resident(pid: int) -> float:
    """MiB of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def soak(reference, folder, seconds: float) -> dict:
    """Load a server with clients of which a third leave. Returns counts, and memory over time."""
    draw = random.Random(0)
    prompts = [[draw.randint(20, 300) for _ in range(draw.randint(1, 60))] for _ in range(100)]
    expected = [answer.text for answer in answers(reference, prompts, greedy(TOKENS))]
    words = [str(folder), *SIZES, "--served-model-name=tiny", f"--max-queue={QUEUE}"]
    process, url = start_server(*words, module="pagedjax")
    end = time.monotonic() + seconds
    counts = {"right": 0, "wrong": 0, "left": 0, "refused": 0}
    memory = []
    waiting = []

    async def request(client, i, stream) -> str | None:
        body = {**GREEDY, "prompt": prompts[i], "max_tokens": TOKENS, "ignore_eos": True}
        body["stream"] = stream
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                return None
            lines = [line async for line in answer.aiter_lines()]
        return "".join(streamed_texts(lines if stream else [f"data: {lines[0]}"]))

    async def live(client):
        while time.monotonic() < end:
            i = draw.randrange(100)
            leaves = draw.random() < 1 / 3
            try:
                async with asyncio.timeout(0.5 * draw.random() if leaves else 60):
                    text = await request(client, i, draw.random() < 0.5)
            except TimeoutError:
                assert leaves, "an answer took 60 s"
                counts["left"] += 1
                continue
            counts["refused" if text is None else "right" if text == expected[i] else "wrong"] += 1
            if text is None:
                await asyncio.sleep(draw.random())

    async def watch(client):
        while time.monotonic() < end:
            memory.append(resident(process.pid))
            waiting.append(gauge((await client.get("/metrics")).text, "num_requests_waiting"))
            await asyncio.sleep(seconds / 60)

    async def all_clients():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            await asyncio.gather(watch(client), *(live(client) for _ in range(CLIENTS)))

    try:
        asyncio.run(all_clients())
        with httpx.Client(base_url=url) as client:
            metrics = lambda: client.get("/metrics").text  # noqa: E731
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                wait_until(lambda name=name: gauge(metrics(), name) == 0, failure=name)
            assert client.get("/health").status_code == 200
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    return counts | {"memory": memory, "waiting": max(waiting)}


def check(report: dict) -> None:
    print(report)
    assert report["wrong"] == 0
    assert report["right"] > 300
    assert report["left"] > 50
    assert report["waiting"] <= QUEUE
    memory = report["memory"]
    early = sorted(memory[len(memory) // 4 : len(memory) // 2])
    late = sorted(memory[-len(memory) // 4 :])
    assert late[len(late) // 2] < 1.03 * early[len(early) // 2] + 8, memory


@pytest.mark.slow
def test_half_a_minute_of_load_while_clients_leave(reference, tiny_folder):
    check(soak(reference, tiny_folder, 30))


@pytest.mark.exhaustive
def test_ten_minutes_of_load_while_clients_leave(reference, tiny_folder):
    check(soak(reference, tiny_folder, 600))
