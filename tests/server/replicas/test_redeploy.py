"""A deployment of other options: what runs goes on, at replicas of the same weights, or ends where
it is.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
STREAMS = 6
TOKENS = 420
BODY: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "ignore_eos": True, "stream": True}


@pytest.fixture
def deployer(tiny_folder, one_layer_folder, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """It deploys a model; at a line of input, with other blocks; at the next one, other weights."""
    models = [str(folder) for folder in (tiny_folder, tiny_folder, one_layer_folder)]
    command = [sys.executable, "-m", "tests.server.replicas.deployer", *models]
    with (tmp_path / "log").open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=Path(__file__).parents[3],
        )
    try:
        yield process
        process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.wait()


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """The next line of its output with these words; Ray prints others."""
    assert process.stdout is not None
    return next(line for line in iter(process.stdout.readline, "") if words in line)


async def stream(client: httpx.AsyncClient, number: int, times: list[float]) -> list[str]:
    """The events of an answer, without their ids."""
    body = {**BODY, "prompt": [20, 30, 40 + number], "seed": number, "max_tokens": TOKENS}
    events = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(line[6:].partition('"choices"')[2] or line[6:])
                times.append(time.monotonic())
    assert events[-1] == "[DONE]", events[-2:]
    assert not any('"error"' in event for event in events)
    return events


async def streams_over_a_deployment(
    client: httpx.AsyncClient, process: subprocess.Popen[str]
) -> list[list[str]]:
    """Answers that have begun before a deployment, and end while it runs or after it."""
    times: list[float] = []
    answers = [asyncio.create_task(stream(client, number, times)) for number in range(STREAMS)]
    while len(times) < 5:
        await asyncio.sleep(0.01)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    events = await asyncio.gather(*answers)
    await asyncio.to_thread(line_with, process, "deployed")
    return list(events)


def test_streams_go_on_at_equal_weights_and_end_where_they_are_before_others(deployer, tmp_path):
    url = line_with(deployer, "serving ").split(" at ")[1].strip().removesuffix("/v1")

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=200) as client:
            undisturbed = [await stream(client, number, []) for number in range(STREAMS)]
            assert await streams_over_a_deployment(client, deployer) == undisturbed
            log = (tmp_path / "log").read_text("utf-8")
            assert "left; another engine is asked" in log, log[-3000:]
            assert await streams_over_a_deployment(client, deployer) == undisturbed
            assert await stream(client, 0, []) != undisturbed[0], "the weights are others"

    asyncio.run(run())
