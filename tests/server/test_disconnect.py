"""A client that leaves: its requests are cancelled, once, and their blocks are free."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest

from pagedjax import LLM
from tests.engine.runs import greedy
from tests.server.support import ENGINE, GREEDY, idle, serving, wait_until

CLIENTS = 80


def leave_while_running(server, **options) -> None:
    """Send a request, and close the connection once it runs."""
    request = {**GREEDY, "prompt": "abc", "max_tokens": 480, "ignore_eos": True, **options}

    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            task = asyncio.create_task(client.post("/v1/completions", json=request))
            for _ in range(2000):
                if server.worker.llm.engine.scheduler_state.running.seqs:
                    break
                await asyncio.sleep(0.005)
            assert server.worker.llm.engine.scheduler_state.running.seqs
            task.cancel()

    asyncio.run(leave())


def test_each_branch_is_cancelled_once(tiny, monkeypatch):
    """Those that run, and those that wait."""
    llm = LLM(tiny, progress=False, **ENGINE)
    cancel = llm.engine.cancel
    cancelled = []
    monkeypatch.setattr(
        llm.engine, "cancel", lambda name, *args: cancelled.append(name) or cancel(name, *args)
    )
    with serving(llm) as server:
        leave_while_running(server, n=8, prompt=["abc", "b"])
        wait_until(lambda: idle(server.worker))
    assert len(cancelled) == 2 * 8
    assert max(Counter(cancelled).values()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_are_freed_when_the_client_leaves(served, stream):
    before = served.worker.llm.engine.scheduler_state.arrivals
    leave_while_running(served, n=2, stream=stream)
    wait_until(lambda: idle(served.worker))
    assert served.worker.llm.engine.scheduler_state.arrivals > before


def test_answers_stay_right_while_a_third_of_the_clients_leave(served, reference):
    """Every other answer is complete, and no block leaks."""
    draw = random.Random(0)
    prompts = [
        [20 + i % 250, 30, 40 + i // 250, *(draw.randint(20, 300) for _ in range(i % 30))]
        for i in range(CLIENTS)
    ]
    params = greedy(24)
    expected = [output.outputs[0].text for output in reference.generate(prompts, params)]
    leaving = {i for i in range(CLIENTS) if draw.random() < 1 / 3}

    async def one(client, i):
        options = {
            **GREEDY,
            "prompt": prompts[i],
            "max_tokens": 24,
            "ignore_eos": True,
            "stream": bool(i % 2),
        }
        async with asyncio.timeout(0.002 + 0.8 * draw.random() if i in leaving else 120):
            if not i % 2:
                return (await client.post("/v1/completions", json=options)).json()["choices"][0][
                    "text"
                ]
            text = ""
            async with client.stream("POST", "/v1/completions", json=options) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += "".join(
                            choice["text"] for choice in json.loads(line[6:])["choices"]
                        )
            return text

    async def all_clients():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(
                *(one(client, i) for i in range(CLIENTS)), return_exceptions=True
            )

    texts = asyncio.run(all_clients())
    timed_out = [i for i, text in enumerate(texts) if isinstance(text, TimeoutError)]
    assert set(timed_out) <= leaving
    assert len(timed_out) > CLIENTS // 10
    for i, text in enumerate(texts):
        if i not in timed_out:
            assert text == expected[i]
    wait_until(lambda: idle(served.worker))
