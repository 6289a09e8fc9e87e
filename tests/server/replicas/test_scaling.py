"""A cluster that grows with its queue and shrinks again, behind a key: no answer is lost when a
replica leaves.
"""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from pagedjax.routing import recording
from tests.engine.runs import answers as answers_of
from tests.engine.runs import greedy
from tests.server.replicas.support import OF_TINY, Cluster, cluster, idle
from tests.server.support import wait_until

pytestmark = pytest.mark.slow
SCALING = {
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
    "look_back_period_s": 11,  # Serve measures every 10 s
}
PROMPTS = [[20 + i, 30 + i, 40 + i] for i in range(12)]


async def ask(client: openai.AsyncOpenAI, prompt: list[int], tokens: int) -> str:
    answer = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text


async def while_it_grows(ray_cluster: Cluster, key: str) -> list[tuple[int, str]]:
    """Keep twelve requests under way until there are two replicas. Returns (number of the prompt,
    its answer) for each.
    """
    answers: list[tuple[int, str]] = []
    grown = asyncio.Event()

    async def live(client: openai.AsyncOpenAI, i: int) -> None:
        while not grown.is_set():
            answers.append((i, await ask(client, PROMPTS[i], 100)))

    async def watch() -> None:
        for _ in range(600):
            if len(await asyncio.to_thread(ray_cluster.replicas)) == 2:
                break
            await asyncio.sleep(0.5)
        grown.set()

    async with openai.AsyncOpenAI(
        base_url=f"{ray_cluster.url}/v1", api_key=key, max_retries=0, timeout=300
    ) as client:
        await asyncio.gather(watch(), *(live(client, i) for i in range(12)))
    return answers


def test_replicas_follow_the_queue_and_drain(tiny_folder, reference, tmp_path):
    expected = [answer.text for answer in answers_of(reference, PROMPTS, greedy(100))]
    (tmp_path / "key").write_text("secret\n", "utf-8")
    options = f"{OF_TINY} --replicas 1 --router least_loaded --api-key-file {tmp_path / 'key'}"
    options += f" --autoscaling '{json.dumps(SCALING)}'"
    with cluster(str(tiny_folder), tmp_path, options, key="secret") as ray_cluster:
        assert httpx.get(f"{ray_cluster.url}/v1/models").status_code == 401
        assert httpx.get(f"{ray_cluster.url}/replicas").status_code == 401
        assert len(ray_cluster.replicas()) == 1
        answers = asyncio.run(while_it_grows(ray_cluster, "secret"))
        assert len(ray_cluster.replicas()) == 2
        assert all(text == expected[i] for i, text in answers)
        wait_until(lambda: len(ray_cluster.replicas()) == 1, 120)  # it shrinks, with nothing to do
        wait_until(lambda: idle(ray_cluster), 60)
    state, count = recording.replay(ray_cluster.routing.read_text("utf-8").splitlines())
    assert count >= len(answers)
    assert not state.unfinished
