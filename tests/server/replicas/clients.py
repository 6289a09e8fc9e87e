"""Clients that ask for answers of every kind, while replicas are lost, and compare them with those
of an undisturbed engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from pagedjax import LLM
from tests.server.replicas.support import Cluster
from tests.server.support import served_to

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
    "--served-model-name tiny --max-num-seqs 8 --max-num-batched-tokens 64 --token-buckets 8,64 "
    "--num-blocks 256 --batch-invariant --enable-lora --max-loras 1 --drain-seconds 10"
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


def undisturbed_answers(folder: Path, adapter: Path) -> list[list[tuple[int, str]]]:
    """The data of the answers to `bodies()` of one engine. adapter: the folder of `poems`."""
    llm = LLM(str(folder), progress=False, **ENGINE)
    llm.load_adapter("poems", adapter)

    async def ask(url: str) -> list[list[tuple[int, str]]]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            return [(await answer_to(client, *request)).data for request in bodies()]

    with served_to(llm) as (server, _):
        return asyncio.run(ask(server.url))


async def ask_during(
    weather: Coroutine[Any, Any, None],
    ray_cluster: Cluster,
    expected: list[list[tuple[int, str]]],
    seed: int,
) -> list[float]:
    """Ask until the weather is over -> the longest pause of each answer, sorted. Every answer must
    be the expected one.
    """
    draw = random.Random(seed)
    pauses: list[float] = []
    requests = bodies()

    async def live(client: httpx.AsyncClient, draw: random.Random) -> None:
        while not change.done():
            number = draw.randrange(len(requests))
            answer = await answer_to(client, *requests[number])
            assert answer.data == expected[number], requests[number]
            pauses.append(answer.pause)

    async with httpx.AsyncClient(base_url=ray_cluster.url, timeout=240) as client:
        change = asyncio.create_task(weather)
        lives = [live(client, random.Random(draw.random())) for _ in range(CLIENTS)]
        await asyncio.gather(change, *lives)
    return sorted(pauses)


def report(ray_cluster: Cluster, pauses: list[float]) -> list[str]:
    """Print what the clients saw -> the lines of /metrics that count continuations."""
    page = ray_cluster.get("/metrics").text
    continued = [line for line in page.splitlines() if "requests_continued_total{" in line]
    print(
        f"\n{len(pauses)} answers; longest pause of a stream: median "
        f"{pauses[len(pauses) // 2]:.2f} s, worst {pauses[-1]:.1f} s",
        *continued,
        sep="\n",
    )
    return continued
