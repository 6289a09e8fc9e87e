"""Three replicas under load, of which one is killed or stopped every ten seconds: no request fails,
and every answer is that of an undisturbed engine.

STORM_SECONDS=300 python -m pytest -n 0 -s -m slow tests/server/replicas/test_storm.py
makes it as long as that, and prints the pauses that clients saw.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from pagedjax import LLM
from tests.server.replicas.support import Cluster, cluster, idle, processes_of_replicas
from tests.server.support import served_to, wait_until
from tests.weights.tiny_adapters import tiny_adapter

pytestmark = [pytest.mark.slow, pytest.mark.optimised]  # bits are compared
SECONDS = float(os.environ.get("STORM_SECONDS", "60"))
SEED = 43
CLIENTS = 6
ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (8, 64),
    "num_blocks": 256,
    "batch_invariant": True,
    "enable_lora": True,
    "max_loras": 1,
}
OPTIONS = (
    "--replicas 3 --served-model-name tiny --replica-resources num_cpus=0.3 --max-num-seqs 8 "
    "--max-num-batched-tokens 64 --token-buckets 8,64 --num-blocks 256 --batch-invariant "
    "--enable-lora --max-loras 1 --drain-seconds 10"
)
DRAWN = {"temperature": 1.0, "ignore_eos": True}


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests of every kind, each with a seed."""
    completions = "/v1/completions"
    chats = "/v1/chat/completions"
    prompts = ["once upon a time", "abcabc", "the cat sat on the mat"]
    shapes: list[tuple[str, dict[str, Any]]] = [
        (completions, {"max_tokens": 100}),
        (completions, {"max_tokens": 60, "n": 2, "logprobs": 2}),
        (completions, {"max_tokens": 80, "frequency_penalty": 1.2, "stop": ["\x01\x02"]}),
        (
            completions,
            {"max_tokens": 90, "ignore_eos": False}
            | {"structured_outputs": {"regex": "([a-z]{4} ){12}"}},
        ),
        (chats, {"max_tokens": 90, "logprobs": True, "top_logprobs": 1}),
        (completions, {"max_tokens": 70, "model": "poems"}),
    ]
    requests = []
    for number, (path, fields) in enumerate(shapes * 2):
        body = {"model": "tiny", **DRAWN, "seed": number, "stream": number % 2 == 0, **fields}
        text = prompts[number % len(prompts)]
        if path == chats:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        requests.append((path, body))
    return requests


class Answer(NamedTuple):
    """What a client got: `data` by choice, without ids and times. pause: the longest time between
    two events, in seconds.
    """

    data: list[tuple[int, str]]
    pause: float


async def answer_to(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Raises AssertionError for anything but a complete answer."""
    events = []
    times = [time.perf_counter()]
    async with client.stream("POST", path, json=body) as response:
        if body["stream"]:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])
                    times.append(time.perf_counter())
            assert events[-1] == "[DONE]", events[-2:]
            events.pop()
        else:
            events.append((await response.aread()).decode())
        assert response.status_code == 200, events
    pauses = [after - before for before, after in itertools.pairwise(times[1:])]
    return Answer(
        sorted(map(comparable, events), key=lambda event: event[0]), max(pauses, default=0.0)
    )


def comparable(event: str) -> tuple[int, str]:
    """(the choice of an event, its content without ids, times and cached tokens)."""
    content = json.loads(event)
    assert "error" not in content, content
    del content["id"]
    del content["created"]
    if content.get("usage"):
        del content["usage"]["prompt_tokens_details"]
    index = content["choices"][0]["index"] if content["choices"] else 1 << 30
    # tokens of one choice keep their order: their content has no positions
    return index, json.dumps(content, sort_keys=True)


class Storm:
    """Kills and stops replicas, one every ten seconds, until it is over."""

    def __init__(self, ray_cluster: Cluster, draw: random.Random) -> None:
        self._cluster = ray_cluster
        self._draw = draw
        self.kills = 0
        self.stopped: list[int] = []  # pids

    async def rage(self, until: float) -> None:
        while time.monotonic() + 10 < until:
            await asyncio.sleep(10)
            pids = await asyncio.to_thread(processes_of_replicas, self._cluster)
            if not pids:
                continue
            pid = self._draw.choice(sorted(pids))
            kills = self._draw.random() < 0.7
            if kills:
                self.kills += 1
            else:
                self.stopped.append(pid)
            try:
                os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
            except ProcessLookupError:
                continue


async def storm(
    ray_cluster: Cluster, requests: Sequence[tuple[str, dict[str, Any]]], expected: Sequence[Any]
) -> tuple[int, list[float], Storm]:
    """Ask until the storm is over -> the number of answers, the pauses of streams, the storm."""
    draw = random.Random(SEED)
    weather = Storm(ray_cluster, draw)
    end = time.monotonic() + SECONDS
    pauses: list[float] = []
    answers = 0

    async def live(client: httpx.AsyncClient, draw: random.Random) -> None:
        nonlocal answers
        while time.monotonic() < end:
            number = draw.randrange(len(requests))
            answer = await answer_to(client, *requests[number])
            assert answer.data == expected[number], requests[number]
            answers += 1
            pauses.append(answer.pause)

    async with httpx.AsyncClient(base_url=ray_cluster.url, timeout=240) as client:
        lives = [live(client, random.Random(draw.random())) for _ in range(CLIENTS)]
        await asyncio.gather(weather.rage(end), *lives)
    return answers, sorted(pauses), weather


def test_no_request_fails_in_a_storm(tiny_folder: Path, tmp_path: Path):
    adapter = tiny_adapter(tmp_path / "poems", tiny_folder, 4, seed=1)
    requests = bodies()
    llm = LLM(str(tiny_folder), progress=False, **ENGINE)
    llm.load_adapter("poems", adapter)

    async def undisturbed(url: str) -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            return [(await answer_to(client, *request)).data for request in requests]

    with served_to(llm) as (server, _):
        expected = asyncio.run(undisturbed(server.url))
    options = f"{OPTIONS} --lora-modules poems={adapter}"
    with cluster(str(tiny_folder), tmp_path, options) as ray_cluster:
        answers, pauses, weather = asyncio.run(storm(ray_cluster, requests, expected))
        page = ray_cluster.get("/metrics").text
        continued = [line for line in page.splitlines() if "requests_continued_total{" in line]
        print(
            f"\n{answers} answers, {weather.kills} kills, {len(weather.stopped)} stops; longest pause of a "
            f"stream: median {pauses[len(pauses) // 2]:.2f} s, worst {pauses[-1]:.1f} s",
            *continued,
            sep="\n",
        )
        assert answers > 20
        assert weather.kills + len(weather.stopped) >= (SECONDS - 10) // 10 - 1
        assert continued, "no request was under way when a replica was lost"
        for pid in weather.stopped:  # else Serve waits for them at the end
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: all(ray_cluster.replicas().values()), 240)
        wait_until(lambda: idle(ray_cluster), 60)
