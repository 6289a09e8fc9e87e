"""How fast are the products of a model's layers, by each implementation in turn?

    python -m experiments.bench.products [--dtypes float32 bfloat16 int8 q4_1] [--tokens 1 8 64 512]
                                         [--json out.json]

The model is SmolLM2-135M with random weights: 30 layers, without attention itself. A layer has four
products: (1) norm, then queries, keys and values; (2) the output of attention; (3) norm, then gates
and up; (4) down. Each implementation runs what it would run in a step, with norms, gates and
residuals. Weights in blocks are multiplied with float32.

Then a mixture of experts is timed (Qwen3-MoE's widths, one layer): 64 experts of which each token
uses 8, beside 8 experts which all tokens use. Both have the same operations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.bench.harness import (
    bench_parser,
    check_least,
    in_turn,
    second_run,
    write_report,
)
from pallas_kernels.linear import BLOCKS, IMPLS, Blocks, Matrix, Norm, linear
from pallas_kernels.linear.blocks import Parts, rows_of_parts

HIDDEN = 576
WIDTH = 1536
QKV = 64 * (9 + 2 * 3)  # outputs of queries, keys and values: head size x (9 + 2 x 3) heads
LAYERS = 30
LAYER = (
    Matrix(QKV, HIDDEN),
    Matrix(HIDDEN, HIDDEN),
    Matrix(2 * WIDTH, HIDDEN, gated=True),
    Matrix(HIDDEN, WIDTH),
)
# a layer of Qwen3-MoE
NUM_EXPERTS = 64
EXPERTS_PER_TOKEN = 8
MOE_HIDDEN = 2048
EXPERT_WIDTH = 768
INT8_ONE = 2000  # an int8 weight has this value for 1
SCALE = 1 / INT8_ONE


def random_weight(rng: np.random.Generator, matrix: Matrix, dtype: str, impl: str) -> jax.Array:
    """A matrix of random numbers, as the implementation stores it.

    dtype: also the name of blocks, which the matrix has then too.
    """
    if matrix.blocks is not None:
        rows = _random_blocks(rng, matrix.outputs, matrix.inputs, matrix.blocks)
        return jax.device_put(IMPLS[impl].pack(rows, matrix))
    # 24 is the root of HIDDEN
    numbers = (rng.random((matrix.outputs, matrix.inputs), np.float32) - 0.5) / 24
    if dtype == "int8":
        stored = (numbers * INT8_ONE).astype(np.int8)
    else:
        stored = numbers.astype(np_dtype(dtype))
    return jax.device_put(IMPLS[impl].pack(stored, matrix))


def _random_blocks(
    rng: np.random.Generator, outputs: int, inputs: int, blocks: Blocks
) -> np.ndarray:
    """Rows of random numbers in blocks: [outputs, bytes]."""
    cells = outputs, inputs // blocks.inputs
    numbers = rng.integers(-blocks.zero, 16 - blocks.zero, (*cells, blocks.inputs), np.int8)
    scales = np.full(cells, SCALE, np.float32)
    return rows_of_parts(Parts(numbers, scales, -8 * scales), blocks, np)


def matrices_of(dtype: str) -> list[Matrix]:
    """The matrices of a layer, with weights of a dtype or in blocks."""
    return [matrix._replace(blocks=BLOCKS.get(dtype)) for matrix in LAYER]


def np_dtype(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32


def layers(impl: str, dtype: str) -> Callable[..., jax.Array]:
    """The function (x [T, H], weights of all layers, weight of the norms [H]) -> x [T, H]."""

    def scales(matrix: Matrix) -> jax.Array | None:
        return jnp.full(matrix.outputs, SCALE, jnp.float32) if dtype == "int8" else None

    def run(x: jax.Array, weights: Sequence[jax.Array], ones: jax.Array) -> jax.Array:
        qkv, out, up, down = matrices_of(dtype)
        norm = Norm(ones, 1e-5)
        for i in range(0, len(weights), len(LAYER)):
            qkv_w, out_w, up_w, down_w = weights[i : i + len(LAYER)]
            y = linear(x, qkv_w, qkv, norm=norm, scales=scales(qkv), impl=impl)
            y = y[:, :HIDDEN]  # attention is left out: the queries take the place of its result
            x = linear(y, out_w, out, residual=x, scales=scales(out), impl=impl)
            y = linear(x, up_w, up, norm=norm, activation="silu", scales=scales(up), impl=impl)
            x = linear(y, down_w, down, residual=x, scales=scales(down), impl=impl)
        return x

    return jax.jit(run)


def time_in_turn(
    contenders: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], repeats: int
) -> dict[str, float]:
    """Time the contenders in turn. Returns the median seconds of each.

    Args:
        contenders: functions with their arguments, by name.
    """

    def timed(run: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
        return second_run(lambda: jax.block_until_ready(run(*arguments)))

    runs = {name: partial(timed, *contender) for name, contender in contenders.items()}
    return {name: statistics.median(times) for name, times in in_turn(runs, repeats).items()}


def measure_layers(
    dtype: str, tokens: Sequence[int], impls: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Time the products of all layers.

    Returns a row for each number of tokens and implementation.
    """
    rng = np.random.default_rng(0)
    ones = jnp.ones(HIDDEN, "bfloat16" if dtype == "bfloat16" else "float32")
    weights = {
        impl: [
            random_weight(rng, m, dtype, impl) for _ in range(LAYERS) for m in matrices_of(dtype)
        ]
        for impl in impls
    }
    rows = []
    for t in tokens:
        x = jnp.asarray(rng.random((t, HIDDEN), np.float32)).astype(ones.dtype)
        seconds = time_in_turn(
            {impl: (layers(impl, dtype), (x, weights[impl], ones)) for impl in impls}, repeats
        )
        numbers = LAYERS * sum(matrix.outputs * matrix.inputs for matrix in LAYER)
        weight_bytes = sum(weight.nbytes for weight in weights[impls[0]])
        for impl, median in seconds.items():
            rows.append(
                {
                    "dtype": dtype,
                    "tokens": t,
                    "impl": impl,
                    "ms": 1e3 * median,
                    "gflops": 2e-9 * t * numbers / median,
                    "gbytes_s": 1e-9 * weight_bytes / median,
                }
            )
    return rows


def mixture(count: int, tokens: int, impl: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer of `count` experts. Each token goes through EXPERTS_PER_TOKEN of them, evenly.

    Returns:
        The compiled function of the layer, and its arguments.
    """
    rng = np.random.default_rng(0)
    up = Matrix(count * 2 * EXPERT_WIDTH, MOE_HIDDEN, gated=True, count=count)
    down = Matrix(count * MOE_HIDDEN, EXPERT_WIDTH, gated=False, count=count)
    weights = [random_weight(rng, matrix, "float32", impl) for matrix in (up, down)]
    pairs = tokens * EXPERTS_PER_TOKEN  # (token, expert)
    has_one_more = np.arange(count) < pairs % count
    sizes = jnp.asarray(np.full(count, pairs // count) + has_one_more, jnp.int32)

    def run(x: jax.Array, up_weight: jax.Array, down_weight: jax.Array) -> jax.Array:
        y = linear(x, up_weight, up, activation="silu", sizes=sizes, impl=impl)
        return linear(y, down_weight, down, sizes=sizes, impl=impl)

    return jax.jit(run), (jnp.asarray(rng.random((pairs, MOE_HIDDEN), np.float32)), *weights)


def measure_experts(tokens: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time layers of 8 experts and of 64 experts. Returns a row for each number of tokens."""
    rows = []
    for t in tokens:
        layers_by_size = {"8": mixture(8, t, "cpu"), "64": mixture(NUM_EXPERTS, t, "cpu")}
        seconds = time_in_turn(layers_by_size, repeats)
        seconds_8 = seconds["8"]
        seconds_64 = seconds["64"]
        rows.append(
            {
                "tokens": t,
                "ms_of_8": 1e3 * seconds_8,
                "ms_of_64": 1e3 * seconds_64,
                "ratio": seconds_64 / seconds_8,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__, model=False)
    dtypes = ("float32", "bfloat16", "int8", "q4_1")
    parser.add_argument("--dtypes", nargs="+", choices=(*dtypes, *BLOCKS), default=dtypes)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--impls", nargs="+", choices=sorted(IMPLS), default=["cpu", "xla"])
    parser.add_argument(
        "--experts",
        type=int,
        nargs="*",
        default=[1, 512],
        help="tokens of a mixture; none for none",
    )
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    check_least(parser, args, tokens=1, experts=1, repeats=1)
    rows = []
    print("dtype     tokens  impl            ms    GFLOP/s   GB/s of weights")
    for dtype in args.dtypes:
        for row in measure_layers(dtype, args.tokens, args.impls, args.repeats):
            rows.append(row)
            rates = f"{row['ms']:8.1f} {row['gflops']:10.0f} {row['gbytes_s']:8.1f}"
            print(f"{dtype:9} {row['tokens']:6}  {row['impl']:9} {rates}")
    experts = measure_experts(args.experts, args.repeats)
    for row in experts:
        print(
            f"{row['tokens']} tokens, 8 of 64 experts {row['ms_of_64']:.1f} ms, "
            f"8 of 8 {row['ms_of_8']:.1f} ms: {row['ratio']:.2f}"
        )
    write_report(args.json, {"layers": rows, "experts": experts}, place="where")


if __name__ == "__main__":
    main()
