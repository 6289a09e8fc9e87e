"""A Llama of random weights in the engine on a GPU: output tokens/s, share of the roofline, and
what a step is made of.

    python -m experiments.hardware.gpu_engine --bandwidth 4.1e12 --rate 7.8e14 --json engine.json
    python -m experiments.hardware.gpu_engine --lookahead 1 --spans 8 --buckets 256 2048 --profile 8
    python -m experiments.hardware.gpu_engine --linear pallas_gpu --lookahead 1
    python -m experiments.hardware.gpu_engine --rehearse          # the same program on a CPU: plain XLA, a tiny model

The requests are those of nano-vllm's benchmark: 256, with prompts of 100 to 1,024 random tokens and
100 to 1,024 output tokens each, all at once. The same engine settings serve them for each attention
implementation, each `lookahead` and each number of decode steps in one program (--spans). The
buckets are an engine's own, so it may compile some dozens of programs, which takes minutes;
`--buckets 256 2048` has few, and pads a step of fewer rows.

roofline    for each step, the time in which the card could read the weights, keys and values, or compute the products,
            whichever is longer, at the measured rates (--bandwidth, --rate); summed over the steps
idle        1 - the time in which a kernel runs / wall time, over a few decode steps, in XLA's own trace of the device

Random weights make random tokens, so tokens are not checked here; `gpu_goldens` does that with a
real model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from experiments.bench.harness import arguments_of, at_least_1, bench_parser
from experiments.bench.random_llama import SHAPES, random_model
from experiments.core.environment import environment
from experiments.core.json_files import write_json
from experiments.hardware.launches import BUFFERS, GRAPHS
from experiments.simulation.cost import Chip, Roofline, shape_of, work_of
from pagedjax import Engine, EngineConfig, SamplingParams
from pagedjax.device.models import Model
from pagedjax.engine import programs

Request = tuple[list[int], int]  # prompt, output tokens
TRACED = 200  # output tokens of requests in a trace: all decode at once for some steps
REHEARSED: dict[str, Any] = {
    "shape": "small",
    "impls": ["xla"],
    "dtype": "float32",
    "lookahead": [1],
    "spans": [4, 1],
    "profile": 4,
    "requests": 4,
    "lengths": (8, 32),
    "budget": 64,
    "buckets": [4, 64],
    "bandwidth": 1e10,
    "rate": 1e11,
}


def requests_of(
    count: int, shortest: int, longest: int, vocabulary: int, seed: int = 0
) -> list[Request]:
    """Random prompts and numbers of output tokens, drawn as nano-vllm's bench.py draws them.

    Both lengths are from `shortest` to `longest`.
    """
    draw = random.Random(seed)
    prompts = [
        [draw.randint(0, vocabulary - 1) for _ in range(draw.randint(shortest, longest))]
        for _ in range(count)
    ]
    return [(prompt, draw.randint(shortest, longest)) for prompt in prompts]


def add_requests(engine: Engine, requests: Iterable[Request]) -> None:
    for i, (prompt, tokens) in enumerate(requests):
        params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True, seed=i)
        engine.add(str(i), prompt, params)


def serve(engine: Engine, requests: Sequence[Request], roofline: Roofline) -> dict[str, Any]:
    """Serve all requests at once. Returns the figures."""
    add_requests(engine, requests)
    start = time.perf_counter()
    roofline_seconds = 0.0
    steps = 0
    device_seconds = 0.0
    compilations = 0
    decode_seconds = []
    while engine.has_work:
        result = engine.step()
        if result is None:
            continue
        roofline_seconds += roofline(work_of(result.plan, result.plan.num_tokens))
        steps += 1
        device_seconds += result.device_seconds
        compilations += result.compilations
        if max(result.plan.counts, default=0) == 1:
            decode_seconds.append(result.finished - result.started)
    seconds = time.perf_counter() - start
    tokens = sum(tokens for _, tokens in requests)
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "total_tokens_per_s": (tokens + sum(len(prompt) for prompt, _ in requests)) / seconds,
        "roofline_s": roofline_seconds,
        "share_of_roofline": roofline_seconds / seconds,
        "steps": steps,
        "device_s": device_seconds,
        "decode_step_p50": statistics.median(decode_seconds),
        "compilations": compilations,
    }


def decode_all(engine: Engine, requests: Sequence[Request], warm: int = 12) -> None:
    """Make steps until all requests decode, and `warm` such steps."""
    add_requests(engine, [(prompt, TRACED) for prompt, _ in requests])
    while engine.has_work and warm > 0:
        result = engine.step()
        if result is not None and max(result.plan.counts, default=0) == 1:
            warm -= 1


def profile(engine: Engine, requests: Sequence[Request], steps: int) -> dict[str, Any]:
    """Trace some decode steps.

    Returns the share of time in which no kernel runs, and the time of each kernel in a step.
    """
    decode_all(engine, requests)
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 1
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                engine.step()
            jax.effects_barrier()
        (file,) = Path(folder).rglob("*.xplane.pb")
        kernels = sorted(kernels_of(ProfileData.from_file(os.fspath(file))))
    engine.reset()
    return {**busy(kernels), "steps": steps, "kernels": by_name(kernels, steps)}


def last_call(engine: Engine) -> tuple[Any, Any, int]:
    """Make steps until one calls a program. Returns the last program that it called, the program's
    arguments, and how many steps the program computes.

    The cache among the arguments is gone: the program has updated it in place.
    """
    compiled = engine.runtime.programs
    calls = []

    class RecordedPrograms(dict[Any, Any]):
        def __missing__(self, shape: Any) -> Any:
            def call(*arguments: Any) -> Any:
                calls.append((compiled[shape], arguments, shape.span))
                return compiled[shape](*arguments)

            return call

    object.__setattr__(engine.runtime, "programs", RecordedPrograms())
    while not calls:  # the steps of a span need no call
        engine.step()
    object.__setattr__(engine.runtime, "programs", compiled)
    return calls[-1]


def breakdown(engine: Engine, requests: Sequence[Request], calls: int = 30) -> dict[str, float]:
    """The parts of a decode step's time, in seconds: its program alone, and with arrays from the
    host.

    The program of one step is called again and again, and each call is queued behind the one
    before. The engine cannot be used afterwards.
    """
    decode_all(engine, requests)
    program, (leaves, _, batch), span = last_call(engine)
    cache = engine._cache()  # the cache that this call returned
    on_device = [jax.device_put(batch) for _ in range(2)]
    batches_of_cases = {
        "device arrays": on_device[:1],
        "two sets of them": on_device,
        "host arrays": [batch],
    }
    seconds = {}
    for name, batches in batches_of_cases.items():
        call_seconds = []
        for i in range(calls + 3):
            if i == 3:  # the first three calls warm up
                jax.block_until_ready(cache)
                start = time.perf_counter()
            call_start = time.perf_counter()
            cache, output = program(leaves, cache, batches[i % len(batches)])
            call_seconds.append(time.perf_counter() - call_start)
        jax.block_until_ready((cache, output))
        seconds[name] = (time.perf_counter() - start) / calls / span
        seconds[f"{name}, the call"] = statistics.median(call_seconds[3:]) / span
    return seconds


def kernels_of(trace: Any) -> Iterable[tuple[float, float, str]]:
    """Yields (begin, end, name) of each kernel and copy that ran on a GPU, in nanoseconds."""
    for plane in trace.planes:
        if not (plane.name or "").startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if "Stream" in (line.name or ""):
                yield from ((event.start_ns, event.end_ns, event.name) for event in line.events)


def busy(kernels: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """The time from the beginning of the first kernel to the end of the last, and the share of this
    time in which no kernel runs.

    Args:
        kernels: (begin, end, name) of each kernel, in nanoseconds, in the order of their begins.
    """
    if not kernels:
        return {}
    covered = 0.0
    covered_until = kernels[0][0]
    for begin, end, _ in kernels:
        covered += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    duration = covered_until - kernels[0][0]
    return {"traced_s": duration / 1e9, "idle": 1 - covered / duration, "launches": len(kernels)}


def by_name(
    kernels: Sequence[tuple[float, float, str]], steps: int, limit: int = 25
) -> list[dict[str, Any]]:
    """The `limit` kernels that take most of a step's time, each with its launches and microseconds
    in a step.
    """
    durations: dict[str, list[float]] = {}
    for begin, end, name in kernels:
        durations.setdefault(name, []).append(end - begin)
    longest = sorted(durations.items(), key=lambda item: -sum(item[1]))[:limit]
    return [
        {
            "name": name[:120],
            "launches": len(times) / steps,
            "us": round(sum(times) / 1e3 / steps, 1),
        }
        for name, times in longest
    ]


def gpu_engine_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument(
        "--impls", nargs="+", default=["pallas_gpu"], help="xla takes minutes on a GPU"
    )
    parser.add_argument(
        "--linear", help="the implementation of products, such as pallas_gpu (default an engine's)"
    )
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1, 0])
    parser.add_argument(
        "--spans",
        type=at_least_1,
        nargs="+",
        default=[8, 1],
        help="decode steps in one program (default 8 1)",
    )
    parser.add_argument("--requests", type=at_least_1, default=256)
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(100, 1024), metavar=("LEAST", "MOST")
    )
    parser.add_argument("--budget", type=at_least_1, default=2048)
    parser.add_argument(
        "--buckets",
        type=int,
        nargs="+",
        default=[],
        help="token buckets (default: the engine's own)",
    )
    parser.add_argument("--block-size", type=at_least_1, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--profile",
        type=int,
        default=10,
        metavar="STEPS",
        help="trace so many decode steps, rounded up to whole spans; 0: none",
    )
    parser.add_argument("--no-serve", action="store_true", help="only the trace")
    parser.add_argument(
        "--bandwidth", type=float, default=4e12, help="bytes/s of the card, see gpu_attention"
    )
    parser.add_argument(
        "--rate", type=float, default=7.5e14, help="operations/s of the card, see gpu_attention"
    )
    parser.add_argument(
        "--graphs", choices=sorted(GRAPHS), default="all", help="what XLA puts into CUDA graphs"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: few requests to a tiny model"
    )
    return parser


def settings(
    impls: Iterable[str], lookaheads: Iterable[int], spans: Iterable[int]
) -> list[tuple[str, int, int]]:
    """(attention implementation, lookahead, steps of a span) of each run, in the given orders, but
    spans without lookahead last: they say least.
    """
    return sorted(product(impls, lookaheads, spans), key=lambda one: one[1] == 0 and one[2] > 1)


def measure(
    run: dict[str, Any],
    model: Model,
    requests: Sequence[Request],
    roofline: Roofline,
    args: argparse.Namespace,
    keep: Callable[[], None],
) -> None:
    """Start the engine of a run, and write its figures into `run`.

    keep: writes the figures of all runs so far to the file.
    """
    longest = args.lengths[1]
    blocks = (longest + max(longest, TRACED)) // args.block_size
    start = time.perf_counter()
    config = EngineConfig(
        attention_impl=run["impl"],
        linear_impl=args.linear,
        dtype=args.dtype,
        lookahead=run["lookahead"],
        decode_span=run["span"],
        block_size=args.block_size,
        max_num_seqs=args.requests,
        max_num_batched_tokens=args.budget,
        max_model_len=min(4096, SHAPES[args.shape]["max_position_embeddings"]),
        token_buckets=tuple(args.buckets),
        compilation="eager",
        num_blocks=args.requests * (blocks + 2),
    )
    engine = Engine(model, config)
    run["startup_s"] = time.perf_counter() - start
    run["programs"] = len(engine.runtime.programs)
    run["buckets"] = engine.config.token_buckets
    keep()
    if not args.no_serve:
        serve(engine, requests[:8], roofline)
        run |= serve(engine, requests, roofline)
        keep()
    if args.profile:
        whole_spans = -(-args.profile // run["span"]) * run["span"]
        run["profile"] = profile(engine, requests, whole_spans)
        keep()
    run["breakdown"] = breakdown(engine, requests)


def main(argv: list[str] | None = None) -> int:
    args = arguments_of(gpu_engine_parser(), argv, **REHEARSED)
    programs.GPU_OPTIONS |= {
        BUFFERS: GRAPHS[args.graphs],
        "xla_enable_command_buffers_during_profiling": True,
    }
    model = random_model(SHAPES[args.shape], args.dtype)
    number_bytes = 4 if args.dtype == "float32" else 2
    hf_config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPES[args.shape]}
    shape = shape_of(hf_config, number_bytes, number_bytes)
    chip = Chip(args.bandwidth, args.rate, 0.0, launch=0.0)
    roofline = Roofline(shape, chip, block_size=args.block_size)
    shortest, longest = args.lengths
    requests = requests_of(args.requests, shortest, longest, model.config.vocab_size)
    figures: dict[str, Any] = {
        "where": environment(),
        **{k: str(v) for k, v in vars(args).items()},
        "runs": [],
    }

    keep = partial(write_json, args.json, figures, end="")
    for impl, lookahead, span in settings(args.impls, args.lookahead, args.spans):
        run: dict[str, Any] = {
            "impl": impl,
            "lookahead": lookahead,
            "span": span,
            "graphs": args.graphs,
        }
        figures["runs"].append(run)
        try:
            measure(run, model, requests, roofline, args, keep)
        except Exception as error:
            run["failed"] = f"{type(error).__name__}: {str(error)[:1000]}"
        print(json.dumps(run), flush=True)
        keep()
    return 1 if any("failed" in run for run in figures["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
