"""What does serving over HTTP cost, compared with the same requests through `LLM.generate`, in
turn?

    python -m experiments.bench.server [--requests 64] [--rounds 3] [--replicas] [--json out.json]

The server is `pagedjax serve` in a separate process; the library and the server never have work at
the same time. With `--replicas` there is a second one, `pagedjax serve --replicas 1`: one engine
behind an ingress on Ray Serve. Each request is a random prompt (16 to 256 tokens) with 16 to 128
output tokens, greedy, and all are sent at once. Over HTTP the answers come whole, and as a stream
of server-sent events. A round is one pass of each way; ratios are of output tokens/s, round by
round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.core.environment import environment
from experiments.core.optional_imports import require
from pagedjax import LLM, SamplingParams
from pagedjax.weights.pretrained import DEFAULT_MODEL

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 512}


def requests(count: int, vocabulary: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Random prompts with numbers of output tokens."""
    draw = np.random.default_rng(seed)
    sizes = zip(draw.integers(16, 257, count), draw.integers(16, 129, count), strict=True)
    return [(draw.integers(17, vocabulary, n).tolist(), int(m)) for n, m in sizes]


def run_library(llm: LLM, work: Sequence[tuple[list[int], int]]) -> float:
    """Make a pass through `LLM.generate`. Returns its seconds."""
    start = time.perf_counter()
    llm.reset_prefix_cache()
    params = [replace(GREEDY, max_tokens=count) for _, count in work]
    llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
    return time.perf_counter() - start


async def over_http(url: str, work: Sequence[tuple[list[int], int]], stream: bool) -> float:
    """Make a pass over HTTP. Returns its seconds.

    Raises:
        RuntimeError: an answer has a wrong number of tokens.
    """
    httpx = require("httpx")

    async def send(prompt: list[int], count: int) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": stream,
            # a new salt for each pass, so that it finds nothing in the prefix cache
            "cache_salt": f"{start}",
            "stream_options": {"include_usage": True} if stream else None,
        }
        if stream:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = [
                    line[6:] async for line in answer.aiter_lines() if line.startswith("data: {")
                ]
            usage = json.loads(lines[-1])["usage"]
        else:
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        if usage["completion_tokens"] != count:
            raise RuntimeError(
                f"an answer has {usage['completion_tokens']} tokens instead of {count}"
            )

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(send(*request) for request in work))
        return time.perf_counter() - start


def start_server(model: str, *further_options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `pagedjax serve` with the same engine and further options. Returns process and URL."""
    options = [
        word
        for name, value in ENGINE.items()
        for word in (f"--{name.replace('_', '-')}", _option(value))
    ]
    options += ["--compilation", "eager"]  # before it listens, as the library does
    words = [
        sys.executable,
        "-m",
        "pagedjax",
        "serve",
        model,
        "--port",
        "0",
        "--log-level",
        "warning",
        *options,
        *further_options,
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if " at http" not in line:
        raise RuntimeError(f"the server did not start: {line!r}")
    return process, line.split(" at ")[1].strip().removesuffix("/v1")


def _option(value: Any) -> str:
    """The value as the command line writes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def measure(model: str, count: int, rounds: int, replicas: bool) -> dict[str, list[float]]:
    """Run all ways in turn. Returns the output tokens/s of each pass, by way."""
    llm = LLM(model, progress=False, compilation="eager", **ENGINE)
    work = requests(count, llm.tokenizer.vocab_size)
    ways: dict[str, Callable[[Sequence[tuple[list[int], int]]], float]] = {
        "library": partial(run_library, llm)
    }
    servers: dict[str, tuple[str, ...]] = {"": ()}
    if replicas:
        servers[", ingress"] = ("--replicas", "1")
    with ExitStack() as stop:
        for name, options in servers.items():
            process, url = start_server(model, *options)
            stop.callback(process.wait, 120)
            stop.callback(process.terminate)
            ways[f"whole{name}"] = partial(_pass, url, False)
            ways[f"streamed{name}"] = partial(_pass, url, True)
        for run in ways.values():
            run(work[:4])
        tokens = sum(n for _, n in work)
        rates = {way: [] for way in ways}
        for i in range(rounds):
            for way in ways if i % 2 else reversed(ways):
                rates[way].append(tokens / ways[way](work))
    return rates


def _pass(url: str, stream: bool, work: Sequence[tuple[list[int], int]]) -> float:
    return asyncio.run(over_http(url, work, stream))


def table(rates: dict[str, list[float]]) -> str:
    lines = [
        "| way | output tokens/s (low to high) | of the library's, round by round |",
        "|---|---:|---:|",
    ]
    for way, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates["library"], strict=True)]
        rate = f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
        lines.append(
            f"| {way} | {rate} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f}) |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--replicas", action="store_true", help="one engine behind an ingress too; needs ray"
    )
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.requests < 1 or args.rounds < 1:
        parser.error("--requests and --rounds must be at least 1")
    rates = measure(args.model, args.requests, args.rounds, args.replicas)
    print(table(rates))
    if args.json:
        report: dict[str, Any] = {
            "environment": environment(),
            "requests": args.requests,
            "output_tokens_per_s": rates,
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
