"""Decodes of a model with stored weights on a GPU: the products of `pallas_gpu` beside XLA's of the
same weights, and of floats.

    python -m experiments.hardware.gpu_stored --json stored.json
    python -m experiments.hardware.gpu_stored --rehearse     # on a CPU: tiny, interpreted

First the kernel's products of one layer are compared with float64 on the host; wrong ones are not
timed. Then engines of a Llama of random weights decode, and the program of a step of decodes is
called again and again, with arrays on the device. Programs of contenders take turns.

seconds   of a call, the median of the rounds
ratio     those of XLA with the same weights / those of a contender, round by round
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import arguments_of, at_least_1, bench_parser, compared
from experiments.bench.random_llama import (
    SHAPES,
    WEIGHTS,
    random_model,
    random_rows,
    random_stored_model,
)
from experiments.core.environment import environment
from experiments.core.json_files import write_json
from experiments.hardware.gpu_engine import TRACED, decode_all, last_call, requests_of
from pagedjax import Engine, EngineConfig
from pagedjax.device.linear import BLOCKS, Matrix, find, linear
from pagedjax.device.models import Model
from pallas_kernels.interpreted import interpreted
from pallas_kernels.linear.blocks import restored

DTYPE = "bfloat16"
BLOCK_SIZE = 16
IN_BLOCKS = [name for name in WEIGHTS if name in BLOCKS]
# the largest error, over the largest result: weights are rounded to bfloat16
TOLERANCE = 2.0**-6
REHEARSED: dict[str, Any] = {
    "shape": "small",
    "impls": ["reference", "xla"],
    "attention": "xla",
    "rows": [2],
    "context": 24,
    "rounds": 2,
    "calls": 2,
}


class Contender(NamedTuple):
    """A model's weights, and the implementation of its products."""

    weights: str
    linear: str

    def __str__(self) -> str:
        return f"{self.weights}, {self.linear}"

    def model(self, shape: dict[str, Any]) -> Model:
        if self.weights not in BLOCKS:
            return random_model(shape, DTYPE)
        return random_stored_model(shape, DTYPE, self.weights, self.linear)


# --- are products right? --------------------------------------------------------------------------


def matrices_of(shape: Mapping[str, Any], weights: str) -> dict[str, Matrix]:
    """The matrices of a layer of a Llama."""
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    heads = shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    rows = heads * hidden // shape["num_attention_heads"]
    blocks = BLOCKS[weights]
    return {
        "attn.qkv": Matrix(rows, hidden, blocks=blocks),
        "attn.out": Matrix(hidden, hidden, blocks=blocks),
        "mlp.up": Matrix(2 * inner, hidden, gated=True, blocks=blocks),
        "mlp.down": Matrix(hidden, inner, blocks=blocks),
    }


def error_of(matrix: Matrix, tokens: int, impl: str) -> float:
    """The largest error of a product of random numbers, over its largest result, beside float64."""
    assert matrix.blocks is not None
    rows = random_rows(matrix)
    random_numbers = np.random.default_rng(tokens).standard_normal((tokens, matrix.inputs))
    x = jnp.asarray(random_numbers, DTYPE)
    plain = matrix._replace(gated=False)  # gates follow the sums
    implementation = find(impl)
    packed = jax.device_put(implementation.pack(rows, plain))
    y = linear(x, packed, plain, impl=implementation, dtype="float32")
    weights = restored(rows, matrix.blocks, np).astype(np.float64)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ weights.T
    return float(np.abs(np.asarray(y, np.float64) - exact).max() / np.abs(exact).max())


def errors(matrices: Mapping[str, Matrix], rows: list[int], impl: str) -> list[dict[str, Any]]:
    """The error of each matrix's product with each number of tokens."""
    return [
        {"matrix": name, "tokens": tokens, "error": error_of(matrix, tokens, impl)}
        for name, matrix in matrices.items()
        for tokens in rows
    ]


# --- times ----------------------------------------------------------------------------------------


def decode_program(model: Model, rows: int, args: Any) -> Callable[[int], float]:
    """Starts an engine in which so many sequences decode. Returns a function that calls the program
    of a step so many times, and returns the seconds of a call.
    """
    length = args.context + TRACED
    budget = max(args.context, rows)
    config = EngineConfig(
        attention_impl=args.attention,
        linear_impl=model.config.linear,
        dtype=DTYPE,
        block_size=BLOCK_SIZE,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        token_buckets=tuple(sorted({rows, budget})),
        max_model_len=length,
        num_blocks=rows * (-(-length // BLOCK_SIZE) + 1),
    )
    engine = Engine(model, config)
    requests = requests_of(rows, args.context, args.context, model.config.vocab_size)
    decode_all(engine, requests, warm=2)
    program, (leaves, _, batch), _ = last_call(engine)
    batch = jax.device_put(batch)
    cache = engine._cache()  # the cache that this call returned

    def call(calls: int) -> float:
        nonlocal cache
        start = time.perf_counter()
        for _ in range(calls):
            cache, output = program(leaves, cache, batch)
        jax.block_until_ready((cache, output))
        return (time.perf_counter() - start) / calls

    call(1)
    return call


def add_timing(parser: argparse.ArgumentParser) -> None:
    """The options of programs of decodes that are timed in turn."""
    parser.add_argument("--context", type=at_least_1, default=512, help="tokens of a sequence")
    parser.add_argument("--rounds", type=at_least_1, default=5)
    parser.add_argument("--calls", type=at_least_1, default=30, help="of a program in a round")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, see above")


def times(contenders: list[Contender], rows: int, args: Any) -> dict[str, Any]:
    """The seconds of a step of `rows` decodes, by contender, and XLA's over them."""
    runs = {}
    for contender in contenders:
        program = decode_program(contender.model(SHAPES[args.shape]), rows, args)
        runs[str(contender)] = partial(program, args.calls)
    return compared(runs, args.rounds, base=str(Contender(args.weights, "xla")))


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--weights", choices=IN_BLOCKS, default="int4_128")
    parser.add_argument("--impls", nargs="+", default=["pallas_gpu", "xla"])
    parser.add_argument("--attention", default="pallas_gpu")
    parser.add_argument("--rows", type=at_least_1, nargs="+", default=[8, 64])
    add_timing(parser)
    args = arguments_of(parser, argv, **REHEARSED)
    figures: dict[str, Any] = {
        "where": environment(),
        **{name: str(value) for name, value in vars(args).items()},
    }
    keep = partial(write_json, args.json, figures, end="") if args.json else lambda: None
    with interpreted() if args.rehearse else nullcontext():
        shape = SHAPES[args.shape]
        figures["errors"] = errors(matrices_of(shape, args.weights), args.rows, "pallas_gpu")
    keep()
    wrong = [case for case in figures["errors"] if not case["error"] <= TOLERANCE]
    if wrong:
        print(f"error: wrong products, which are not timed: {json.dumps(wrong)}", file=sys.stderr)
        return 1
    print(f"{len(figures['errors'])} products are right", flush=True)
    contenders = [Contender(args.weights, impl) for impl in args.impls]
    contenders.append(Contender(DTYPE, "xla"))
    figures["decodes"] = {}
    for rows in args.rows:
        figures["decodes"][str(rows)] = times(contenders, rows, args)
        print(json.dumps({"rows": rows} | figures["decodes"][str(rows)]), flush=True)
        keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
