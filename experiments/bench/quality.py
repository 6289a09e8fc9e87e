"""What do smaller weights and a smaller cache cost in perplexity, agreement and time, and how many
bytes do they save?

    python -m experiments.bench.quality [--model smollm2-135m] [--dtype float32] [--windows 16] [--json out.json]

The text is Python's documentation, which every Python ships (pydoc_data), cut into windows. The
other rows are compared with the first one:

    perplexity   exp of the mean negative log-likelihood of every token of a window after its first
    |difference| mean distance of those log-likelihoods, in nats
    same best    share of positions where the most likely next token is the same
    same greedy  share of the greedy tokens after each window that come before the first different token
    step         median decode step, as a multiple of the first row's; all engines take turns

If a row has another dtype than the first one, the rounding of its dtype makes differences, too. In
the row "quest", prompts read everything, so its perplexity is that of the first row, and greedy
tokens differ; in "quest, prompts too" all queries select. `--kv-policy JSON` adds a row with a KV
policy of your own, such as '{"name": "quest", "tokens": 128}'. `--quantized FOLDER` adds a row with
another checkpoint of the same model, in its own bits, such as `pagedjax convert --weights` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import bench_parser, computes_prompts, markdown, write_report
from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.device.cache import TOKEN_BYTES

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"weight_dtype": "int8"},
    # of a GGUF file, or of a folder in 4 or 8 bits
    "stored weights": {"weight_dtype": "stored"},
    "stored weights, tokens of 8 bits": {"weight_dtype": "stored", "linear_impl": "cpu_int8"},
    "8-bit cache": {"kv_cache_dtype": "float8_e4m3fn"},
    # both of the two before
    "both": {"weight_dtype": "int8", "kv_cache_dtype": "float8_e4m3fn"},
    "streaming": {"kv_policy": {"name": "streaming", "sinks": 4, "window": 252}},
    "quest": {"kv_policy": {"name": "quest", "tokens": 256}},
    "quest, prompts too": {"kv_policy": {"name": "quest", "tokens": 256, "dense_prompts": False}},
}
DEFAULT_VARIANTS = tuple(name for name in VARIANTS if "stored" not in name)
GREEDY_TOKENS = 32
BATCH = 16  # sequences that run at the same time, also in the timed steps
SPARE_STEPS = 8  # so that no request ends while steps are timed


class Reading(NamedTuple):
    """The outputs of a model for the windows."""

    logprobs: np.ndarray  # [windows, length - 1] log-probabilities of the tokens of the text
    best: np.ndarray  # [windows, length - 1] ids of the most likely next tokens
    greedy: list[tuple[int, ...]]  # the greedy tokens after each window


class Row(NamedTuple):
    name: str
    perplexity: float
    difference: float
    same_best: float
    same_greedy: float
    weights: int  # bytes
    cache: int  # bytes a token
    step: float  # seconds


def windows_of(llm: LLM, count: int, length: int) -> list[list[int]]:
    """The first `count` windows of the text, one after the other.

    Raises:
        ValueError: the text is too short.
    """
    text = "\n\n".join(topic for _, topic in sorted(topics.items()))
    # an English token has about four letters
    tokens = llm.tokenizer.encode(text[: 8 * count * length])
    if len(tokens) < count * length:
        raise ValueError(
            f"{count} windows of {length} tokens are more than the text has, {len(tokens)}; take "
            "fewer"
        )
    return [list(tokens[i * length : (i + 1) * length]) for i in range(count)]


def continue_windows(llm: LLM, windows: Sequence[list[int]]) -> Reading:
    """Give the windows to a model as prompts, and let it continue them greedily."""
    params = SamplingParams(
        temperature=0,
        max_tokens=GREEDY_TOKENS,
        ignore_eos=True,
        prompt_logprobs=1,
        detokenize=False,
    )
    logprobs = []
    best = []
    greedy = []
    for output, window in zip(llm.generate(list(windows), params), windows, strict=True):
        assert output.prompt_logprobs is not None, "SamplingParams asks for them"
        rows = [row for row in output.prompt_logprobs[1:] if row is not None]
        following = window[1:]
        logprobs.append([row[token].logprob for row, token in zip(rows, following, strict=True)])
        best.append([_best_token(row) for row in rows])
        greedy.append(output.outputs[0].token_ids)
    return Reading(np.array(logprobs), np.array(best), greedy)


def _best_token(row: Mapping[int, Any]) -> int:
    return next(token for token, entry in row.items() if entry.rank == 1)


def equal_prefix(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """The number of tokens before the first different token."""
    pairs = zip(tokens, expected, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))


def decode_seconds(engines: Sequence[LLM], windows: Sequence[list[int]], steps: int) -> list[float]:
    """Time the decode steps of all engines, in turn. Returns the median of each."""
    params = SamplingParams(temperature=0, max_tokens=steps + SPARE_STEPS, ignore_eos=True)
    for llm in engines:
        llm.engine.reset()
        for i, window in enumerate(windows[:BATCH]):
            llm.engine.add(str(i), window, params)
        while computes_prompts(llm):
            llm.engine.step()
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(steps):
        for llm, engine_times in zip(engines, times, strict=True):
            result = llm.engine.step()
            assert result is not None, "the requests are long enough"
            engine_times.append(result.device_seconds)
    return [statistics.median(engine_times) for engine_times in times]


def compare(
    model: str,
    dtype: str | None,
    count: int,
    length: int,
    steps: int,
    names: Sequence[str],
    variants: Mapping[str, Mapping[str, Any]] = VARIANTS,
) -> list[Row]:
    """Measure the variants of these names. The others are compared with the first one.

    Args:
        count, length: the number of windows, and their length in tokens.
        steps: decode steps to time.
    """
    longest = length + max(GREEDY_TOKENS, steps + SPARE_STEPS)
    options: dict[str, Any] = {
        "compilation": "eager",
        "dtype": dtype,
        "max_num_seqs": BATCH,
        "max_model_len": longest,
        "max_num_batched_tokens": 512,
        "token_buckets": (BATCH, 512),
        "num_blocks": BATCH * -(-longest // 16),
    }
    options["model"] = model
    engines = [LLM(**(options | dict(variants[name]))) for name in names]
    windows = windows_of(engines[0], count, length)
    readings = [continue_windows(llm, windows) for llm in engines]
    times = decode_seconds(engines, windows, steps)
    return [
        row_of(name, llm, reading, readings[0], seconds)
        for name, llm, reading, seconds in zip(names, engines, readings, times, strict=True)
    ]


def row_of(name: str, llm: LLM, reading: Reading, first: Reading, seconds: float) -> Row:
    """The row of a variant. first: the reading that it is compared with."""
    pairs = zip(reading.greedy, first.greedy, strict=True)
    agreed = sum(equal_prefix(tokens, expected) for tokens, expected in pairs)
    memory = llm.engine.memory
    return Row(
        name,
        perplexity=math.exp(-reading.logprobs.mean()),
        difference=float(np.abs(reading.logprobs - first.logprobs).mean()),
        same_best=float((reading.best == first.best).mean()),
        same_greedy=agreed / (GREEDY_TOKENS * len(reading.greedy)),
        weights=memory.weights,
        cache=memory.block_bytes // memory.block_size - TOKEN_BYTES,  # of keys and values
        step=seconds,
    )


def table(rows: Sequence[Row]) -> str:
    columns = (
        "",
        "perplexity",
        "difference, nats",
        "same best",
        "same greedy",
        "weights, MiB",
        "cache, B a token",
        "step",
    )
    cells = (
        (
            row.name,
            f"{row.perplexity:.3f}",
            f"{row.difference:.4f}",
            f"{100 * row.same_best:.1f} %",
            f"{100 * row.same_greedy:.0f} %",
            f"{row.weights / 2**20:.0f}",
            f"{row.cache:,}",
            f"{row.step / rows[0].step:.2f}",
        )
        for row in rows
    )
    return markdown(columns, cells)


def kv_policy(text: str) -> Any:
    """The KV policy of --kv-policy.

    Raises:
        argparse.ArgumentTypeError: it is no JSON, or no KV policy.
    """
    try:
        policy = json.loads(text)
        EngineConfig(kv_policy=policy)
    except ValueError as error:
        example = '{"name": "quest", "tokens": 128}'
        raise argparse.ArgumentTypeError(
            f"{text!r} is no KV policy ({error}); write JSON such as {example}"
        ) from None
    return policy


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="the default is the device's"
    )
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--steps", type=int, default=15, help="decode steps to time")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=DEFAULT_VARIANTS)
    parser.add_argument(
        "--kv-policy",
        type=kv_policy,
        action="append",
        default=[],
        metavar="JSON",
        help="one more row, by its KV policy",
    )
    parser.add_argument(
        "--quantized",
        action="append",
        default=[],
        metavar="FOLDER",
        help="one more row: a quantized checkpoint of the model",
    )
    args = parser.parse_args(argv)
    if args.windows < 1 or args.steps < 1 or args.length < 2:
        parser.error("--windows and --steps must be at least 1, and --length at least 2")
    try:
        policies = {json.dumps(policy): {"kv_policy": policy} for policy in args.kv_policy}
        folders = {name: {"model": name, "weight_dtype": "stored"} for name in args.quantized}
        names = [*args.variants, *policies, *folders]
        variants = VARIANTS | policies | folders
        rows = compare(
            args.model, args.dtype, args.windows, args.length, args.steps, names, variants
        )
    except (OSError, ValueError) as error:
        # the model is missing, or a length is beyond the model or the text
        parser.error(str(error))
    print(table(rows))
    options = {name: getattr(args, name) for name in ("windows", "length", "steps", "model")}
    write_report(args.json, {**options, "rows": [row._asdict() for row in rows]})


if __name__ == "__main__":
    main()
