"""A client that leaves: its requests are cancelled, once, and their blocks are free."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests.engine.runs import answers, greedy
from tests.server.support import GREEDY, idle, server_llm, serving, streamed_texts, wait_until

CLIENTS = 60


class Left(Exception):
    """A client closed its connection in the middle of a stream."""


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
    llm = server_llm(tiny)
    cancel = llm.engine.cancel
    cancelled = []
    monkeypatch.setattr(
        llm.engine, "cancel", lambda name, *args: cancelled.append(name) or cancel(name, *args)
    )
    with serving(llm) as server:
        leave_while_running(server, n=8, prompt=["abc", "b"])
        wait_until(lambda: idle(server.worker))
    assert len(cancelled) == len(set(cancelled)) == 2 * 8


def test_answers_stay_right_while_a_third_of_the_clients_leave(served, reference):
    """Every other answer is complete, and no block leaks. Clients with a stream leave after some
    lines; those without one leave after a time, in which a fast machine may have answered.
    """
    draw = random.Random(0)
    prompts = [
        [20 + i % 250, 30, 40 + i // 250, *(draw.randint(20, 300) for _ in range(i % 30))]
        for i in range(CLIENTS)
    ]
    expected = [answer.text for answer in answers(reference, prompts, greedy(24))]
    leaving = {i for i in range(CLIENTS) if draw.random() < 1 / 3}
    streaming = set(range(1, CLIENTS, 2))
    lines_of_leaving = {i: draw.randint(1, 4) for i in leaving & streaming}

    async def ask(client, i):
        body = {**GREEDY, "prompt": prompts[i], "max_tokens": 24, "ignore_eos": True}
        if i not in streaming:
            async with asyncio.timeout(0.002 + 0.8 * draw.random() if i in leaving else 120):
                answer = await client.post("/v1/completions", json=body)
            return answer.json()["choices"][0]["text"]
        body["stream"] = True
        lines = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if len(lines) == lines_of_leaving.get(i):
                    raise Left
        return "".join(streamed_texts(lines))

    async def all_clients():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
            clients = [ask(client, i) for i in range(CLIENTS)]
            return await asyncio.gather(*clients, return_exceptions=True)

    texts = asyncio.run(all_clients())
    left = {i for i, text in enumerate(texts) if isinstance(text, TimeoutError | Left)}
    assert leaving & streaming <= left <= leaving
    assert all(texts[i] == expected[i] for i in range(CLIENTS) if i not in left)
    wait_until(lambda: idle(served.worker))
