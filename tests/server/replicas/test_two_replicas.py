"""Two replicas of SmolLM2 on Ray Serve under load, as a user starts them: `pagedjax serve
--replicas 2`.

Real processes, OpenAI's client, 200 requests of which a third leave, and a replica that is killed
half-way.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
from collections import Counter, defaultdict
from typing import NamedTuple

import httpx
import openai
import pytest

from pagedjax import LLM
from pagedjax.routing import recording
from tests.engine.runs import answers, greedy
from tests.server.replicas.support import cluster, idle, kill_one_replica
from tests.server.support import wait_until

pytestmark = pytest.mark.slow
GROUPS = 6
TOKENS = 12
REQUESTS = 200
CLIENTS = 12
WORDS = shlex.split("the cat sat on a mat and then it saw an old dog who ran to town")
ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "num_blocks": 512, "max_model_len": 256}
OPTIONS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in ENGINE.items())


class Sent(NamedTuple):
    """What became of one request: `text` if it has an answer, and by which replica; `error` if it
    has none.
    """

    number: int
    text: str | None = None
    replica: str | None = None
    error: str | None = None


def prompts() -> list[str]:
    """Prompt i belongs to group i % GROUPS, whose prompts begin with the same 60 words."""
    draw = random.Random(0)
    begins = [" ".join(draw.choice(WORDS) for _ in range(60)) for _ in range(GROUPS)]
    ends = [" ".join(draw.choice(WORDS) for _ in range(5)) for _ in range(60)]
    return [f"{begins[i % GROUPS]} {ends[i]}" for i in range(60)]


@pytest.fixture(scope="module")
def expected_texts(smollm2) -> list[str]:
    """The library's answers, one prompt after the other."""
    llm = LLM(smollm2, progress=False, **ENGINE)
    return [answer.text for answer in answers(llm, prompts(), greedy(TOKENS))]


async def send(client: openai.AsyncOpenAI, number: int, prompt: str, stream: bool) -> Sent:
    options = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
    try:
        if not stream:
            response = await client.completions.with_raw_response.create(
                **options, extra_body={"ignore_eos": True}
            )
            return Sent(number, response.parse().choices[0].text, response.headers["x-replica"])
        text = ""
        replica = None
        call = client.completions.with_streaming_response.create(
            **options, extra_body={"ignore_eos": True, "stream": True}
        )
        async with call as answer:
            replica = answer.headers["x-replica"]
            async for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return Sent(number, error=f"within a stream: {chunk['error']['code']}")
                    text += "".join(choice["text"] for choice in chunk["choices"])
        return Sent(number, text, replica)
    except openai.InternalServerError as error:
        return Sent(number, error=f"{error.status_code} {error.code}")


async def load(url: str, kill, draw: random.Random) -> tuple[list[Sent], int, int]:
    """Send 200 requests, CLIENTS at a time. Returns what became of those that stayed, how many
    left, and how many ended before the kill.

    kill: called once, when half of them have been sent.
    """
    answers = []
    leavers = 0
    numbers = iter(range(REQUESTS))
    before = 0
    texts = prompts()

    async def live(client: openai.AsyncOpenAI) -> None:
        nonlocal leavers, before
        for number in numbers:
            if number == REQUESTS // 2:
                before = len(answers)
                await asyncio.to_thread(kill)
            leaves = draw.random() < 1 / 3
            try:
                async with asyncio.timeout(draw.uniform(0.05, 1.0) if leaves else 200):
                    answers.append(
                        await send(client, number, texts[number % 60], draw.random() < 0.5)
                    )
            except TimeoutError:
                assert leaves, "an answer took 200 s"
                leavers += 1

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        await asyncio.gather(*(live(client) for _ in range(CLIENTS)))
    return answers, leavers, before


def kept_to_their_replica(answers: list[Sent]) -> float:
    """The share of answers that came from the replica with the most answers of their group."""
    groups: dict[int, Counter] = defaultdict(Counter)
    for answer in answers:
        if answer.replica is not None:
            groups[answer.number % GROUPS][answer.replica] += 1
    return sum(max(group.values()) for group in groups.values()) / sum(
        group.total() for group in groups.values()
    )


def test_200_requests_while_clients_leave_and_a_replica_is_killed(expected_texts, tmp_path):
    with cluster("smollm2-135m", tmp_path, f"--replicas 2 {OPTIONS}") as ray_cluster:
        first = ray_cluster.replicas()
        assert list(first.values()) == [True, True]
        sent_requests, leavers, before = asyncio.run(
            load(ray_cluster.url, lambda: kill_one_replica(ray_cluster), random.Random(1))
        )
        complete = [sent for sent in sent_requests if sent.text is not None]
        failed = [sent for sent in sent_requests if sent.text is None]
        assert all(sent.text == expected_texts[sent.number % 60] for sent in complete)
        assert not failed  # another replica went on with what was under way in the killed one
        assert leavers > 30
        assert {sent.replica for sent in complete[:before]} == set(first)
        assert kept_to_their_replica(complete[:before]) > 0.8

        wait_until(lambda: list(ray_cluster.replicas().values()) == [True, True], 240)
        assert len(first.keys() & ray_cluster.replicas().keys()) == 1, (
            "the killed replica has not been replaced"
        )
        wait_until(lambda: idle(ray_cluster), 60)
        with httpx.Client(base_url=ray_cluster.url, timeout=120) as client:
            for name in ray_cluster.replicas():  # the new one gives the same answers
                body = {"prompt": prompts()[0], "max_tokens": TOKENS, "ignore_eos": True}
                body["temperature"] = 0.0
                answer = client.post(f"/replicas/{name}/v1/completions", json=body)
                assert answer.headers["x-replica"] == name
                assert answer.json()["choices"][0]["text"] == expected_texts[0]
            assert (
                client.get("/replicas/nobody/health").json()["error"]["code"] == "replica_not_found"
            )
        wait_until(lambda: idle(ray_cluster), 60)
    lines = ray_cluster.routing.read_text("utf-8").splitlines()
    state, count = recording.replay(lines)  # the cluster's assignments are those of the pure router
    assert count >= REQUESTS - leavers
    assert not state.unfinished
    assert sum('"left"' in line for line in lines) >= 1
