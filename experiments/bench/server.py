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
from typing import Any

import numpy as np

from experiments.bench.harness import (
    bench_parser,
    cell,
    in_turn,
    markdown,
    ratios,
    seconds,
    write_report,
)
from experiments.core.optional_imports import require
from pagedjax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 512}


def requests(count: int, vocabulary: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Random prompts with numbers of output tokens."""
    rng = np.random.default_rng(seed)
    sizes = zip(rng.integers(16, 257, count), rng.integers(16, 129, count), strict=True)
    return [(rng.integers(17, vocabulary, n).tolist(), int(m)) for n, m in sizes]


def run_library(llm: LLM, work: Sequence[tuple[list[int], int]]) -> float:
    """Make a pass through `LLM.generate`. Returns its seconds."""
    params = [replace(GREEDY, max_tokens=count) for _, count in work]
    return seconds(llm, [prompt for prompt, _ in work], params)


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
                lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
            usage = json.loads(lines[-1].removeprefix("data: "))["usage"]
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
    options = []
    for name, value in ENGINE.items():
        options += [f"--{name.replace('_', '-')}", _option(value)]
    options += ["--compilation", "eager"]  # compile before it listens, as the library does
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
        for run in ways.values():  # a warm-up
            run(work[:4])
        tokens = sum(n for _, n in work)
        passes = in_turn({name: partial(run, work) for name, run in ways.items()}, rounds)
    return {name: [tokens / seconds for seconds in times] for name, times in passes.items()}


def _pass(url: str, stream: bool, work: Sequence[tuple[list[int], int]]) -> float:
    return asyncio.run(over_http(url, work, stream))


def table(rates: dict[str, list[float]]) -> str:
    rows = [
        (
            way,
            f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})",
            cell(ratios(values, rates["library"])),
        )
        for way, values in rates.items()
    ]
    columns = ("way", "output tokens/s (low to high)", "of the library's, round by round")
    return markdown(columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--replicas", action="store_true", help="one engine behind an ingress too; needs ray"
    )
    args = parser.parse_args(argv)
    if args.requests < 1 or args.rounds < 1:
        parser.error("--requests and --rounds must be at least 1")
    rates = measure(args.model, args.requests, args.rounds, args.replicas)
    print(table(rates))
    write_report(args.json, {"requests": args.requests, "output_tokens_per_s": rates})


if __name__ == "__main__":
    main()
