"""The requests of `gpu_engine` in torch on the same GPU: in a plain loop of fixed shape
(torch_loop.py), and in transformers' continuous batching.

    python -m experiments.hardware.gpu_peers --json peers.json

Model, dtype and requests are those of `gpu_engine`: a Llama of random weights, nano-vllm's lengths,
all requests at once, and every request ends at its own length. The figures are output tokens/s and
seconds, as in `gpu_engine`. The loop is one batch whose rows stay until the longest request ends,
so it computes more tokens than are asked for. transformers has its own choice of blocks and budget;
it fills the memory of the GPU with its cache.

vLLM is not measured here: what it needs is not on every machine. `experiments.bench.peers` has an
adapter for it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.bench.harness import arguments_of, at_least_1, bench_parser, write_report
from experiments.bench.random_llama import SHAPES
from experiments.hardware import torch_loop
from experiments.hardware.gpu_engine import Request, requests_of

NO_PREFIX = (5, 23)  # from this version on, transformers names its paged attention without "paged|"
WARM_REQUESTS = 8  # requests before the timed ones
TEMPERATURE = 0.6
# On a CPU transformers would take nine tenths of the machine's memory for its cache, whoever else
# needs it.
CPU_LIMITS: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 256}
REHEARSED: dict[str, Any] = {
    "shape": "small",
    "dtype": "float32",
    "requests": 4,
    "lengths": (5, 20),
}


def llama(shape: str, dtype: str) -> Any:
    """A Llama of random weights on torch, on its GPU if there is one."""
    import torch  # pyright: ignore[reportMissingImports]  (not a dependency)
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    attention = "sdpa" if version >= NO_PREFIX else "paged|sdpa"
    torch.manual_seed(0)
    options = {"attn_implementation": attention, "dtype": getattr(torch, dtype)}
    model: Any = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**SHAPES[shape]), **options
    )
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def serve(model: Any, requests: Sequence[Request], end: float) -> dict[str, Any]:
    """The figures of all requests, served at once, after some that warm the engine up.

    Args:
        end: when the command's time is over, by time.perf_counter.

    Raises:
        RuntimeError: a request got another number of tokens than it asked for, or the time is over.
    """
    import transformers

    settings = transformers.GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        max_new_tokens=max(tokens for _, tokens in requests),
        eos_token_id=-1,
        pad_token_id=0,
    )
    limits = CPU_LIMITS if model.device.type == "cpu" else {}
    with model.continuous_batching_context_manager(
        generation_config=settings,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**limits),
        timeout=5,
    ) as manager:
        warm = [(prompt, min(tokens, 16)) for prompt, tokens in requests[:WARM_REQUESTS]]
        run_requests(manager, warm, "warm", end)
        duration = run_requests(manager, requests, "timed", end)
    return figures_of(requests, duration)


def serve_in_loop(model: Any, requests: Sequence[Request], end: float) -> dict[str, Any]:
    """The figures of all requests as one batch of a plain loop, after one run that is not timed.

    Args, Raises: as `serve`.
    """
    run, cache_bytes = torch_loop.generate(model, requests, TEMPERATURE)
    run(end)
    start = time.perf_counter()
    run(end)
    duration = time.perf_counter() - start
    return figures_of(requests, duration) | {"cache_bytes": cache_bytes}


def figures_of(requests: Sequence[Request], duration: float) -> dict[str, Any]:
    """The rates of requests that took some seconds."""
    tokens = sum(count for _, count in requests)
    total = tokens + sum(len(prompt) for prompt, _ in requests)
    return {
        "seconds": duration,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / duration,
        "total_tokens_per_s": total / duration,
    }


def run_requests(manager: Any, requests: Sequence[Request], name: str, end: float) -> float:
    """Run all requests at once. Returns the seconds until the last one ends.

    Args:
        name: the first word of the requests' ids.
        end: when the command's time is over, by time.perf_counter.
    """
    start = time.perf_counter()
    waiting = {}  # id of a request that has not ended -> the output tokens that it asked for
    for i, (prompt, tokens) in enumerate(requests):
        request_id = f"{name} {i}"
        waiting[request_id] = tokens
        manager.add_request(prompt, request_id=request_id, max_new_tokens=tokens, eos_token_id=-1)
    while waiting:
        seconds_left = end - time.perf_counter()
        if seconds_left <= 0:
            raise RuntimeError(
                f"{len(waiting)} of {len(requests)} requests were not done after "
                f"{time.perf_counter() - start:.0f} s, and the time is over; raise --seconds"
            )
        output = manager.get_result(timeout=min(seconds_left, 5.0))
        if output is None or not output.is_finished():
            continue
        max_tokens = waiting.pop(output.request_id)
        if len(output.generated_tokens) != max_tokens:
            raise RuntimeError(
                f"{output.request_id} has {len(output.generated_tokens)} tokens "
                f"and asked for {max_tokens}"
            )
    return time.perf_counter() - start


def versions() -> dict[str, str]:
    """The versions of torch and transformers, and the name of the GPU."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "gpu": gpu}


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=at_least_1, default=256)
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(100, 1024), metavar=("LEAST", "MOST")
    )
    parser.add_argument("--seconds", type=float, default=110.0, help="stop after this time")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: few requests to a tiny model"
    )
    args = arguments_of(parser, argv, **REHEARSED)
    if importlib.util.find_spec("torch") is None:
        print(
            "error: the peers need torch, which is not installed; install the extra oracle",
            file=sys.stderr,
        )
        return 2
    shortest, longest = args.lengths
    requests = requests_of(args.requests, shortest, longest, SHAPES[args.shape]["vocab_size"])
    end = time.perf_counter() + args.seconds
    model = llama(args.shape, args.dtype)
    peers = {
        "a loop in torch": lambda: serve_in_loop(model, requests, end),
        "transformers, continuous batching": lambda: serve(model, requests, end),
    }
    runs: list[dict[str, Any]] = []
    for name, peer in peers.items():
        try:
            figures = peer()
        except RuntimeError as error:  # such as no memory, or no time; the next one may have both
            figures = {"error": str(error)}
        runs.append({"engine": name, **versions(), **figures})
        print(json.dumps(runs[-1]), flush=True)
        report = {"shape": args.shape, "dtype": args.dtype, "runs": runs}
        write_report(args.json, report, place="where", device=False)
    return int(any("error" in run for run in runs))


if __name__ == "__main__":
    sys.exit(main())
