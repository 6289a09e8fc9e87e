"""How fast are the products of a model's layers, by each implementation in turn?

    python -m experiments.bench.products [--dtypes float32 bfloat16 int8] [--tokens 1 8 64 512] [--json out.json]

SmolLM2-135M's 30 layers without their attention: norm, queries, keys and values; the output; gates
and up; down. Random weights. Each implementation runs what it would run in a step, with norms,
gates and residuals. Then a mixture of experts (Qwen3-MoE's widths, one layer): 64 experts of which
each token uses 8, beside 8 experts which all tokens use. Both have the same operations.
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
from pallas_kernels.linear import IMPLS, Matrix, Norm, linear

HIDDEN = 576
WIDTH = 1536
HEADS = 960
LAYERS = 30
LAYER = (
    Matrix(HEADS, HIDDEN),
    Matrix(HIDDEN, HIDDEN),
    Matrix(2 * WIDTH, HIDDEN, gated=True),
    Matrix(HIDDEN, WIDTH),
)
# of a layer of Qwen3-MoE
EXPERTS = 64
CHOSEN = 8  # experts of each token
MODEL = 2048  # width of the model
EXPERT = 768  # width of an expert
SCALE = 1 / 2000  # of int8 weights


def random_weight(rng: np.random.Generator, matrix: Matrix, dtype: str, impl: str) -> jax.Array:
    """A matrix of random numbers, as the implementation stores it."""
    numbers = (rng.random((matrix.outputs, matrix.inputs), np.float32) - 0.5) / 24
    stored = (
        (numbers * 2000).astype(np.int8) if dtype == "int8" else numbers.astype(np_dtype(dtype))
    )
    return jax.device_put(IMPLS[impl].pack(stored, matrix))


def np_dtype(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32


def layers(impl: str, dtype: str) -> Callable[..., jax.Array]:
    """(x [T, H], weights of all layers, weight of the norms) -> x."""

    def scales(matrix: Matrix) -> jax.Array | None:
        return jnp.full(matrix.outputs, SCALE, jnp.float32) if dtype == "int8" else None

    def run(x: jax.Array, weights: Sequence[jax.Array], ones: jax.Array) -> jax.Array:
        qkv, out, up, down = LAYER
        norm = Norm(ones, 1e-5)
        for i in range(0, len(weights), len(LAYER)):
            a, b, c, d = weights[i : i + len(LAYER)]
            y = linear(x, a, qkv, norm=norm, scales=scales(qkv), impl=impl)[:, :HIDDEN]
            x = linear(y, b, out, residual=x, scales=scales(out), impl=impl)
            y = linear(x, c, up, norm=norm, activation="silu", scales=scales(up), impl=impl)
            x = linear(y, d, down, residual=x, scales=scales(down), impl=impl)
        return x

    return jax.jit(run)


def time_in_turn(
    contenders: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], repeats: int
) -> dict[str, float]:
    """Time the contenders in turn. Returns the median seconds of each."""

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
        impl: [random_weight(rng, m, dtype, impl) for _ in range(LAYERS) for m in LAYER]
        for impl in impls
    }
    rows = []
    for t in tokens:
        x = jnp.asarray(rng.random((t, HIDDEN), np.float32)).astype(ones.dtype)
        seconds = time_in_turn(
            {impl: (layers(impl, dtype), (x, weights[impl], ones)) for impl in impls}, repeats
        )
        numbers = LAYERS * sum(m.outputs * m.inputs for m in LAYER)
        size = sum(w.nbytes for w in weights[impls[0]])
        for impl, median in seconds.items():
            rows.append(
                {
                    "dtype": dtype,
                    "tokens": t,
                    "impl": impl,
                    "ms": 1e3 * median,
                    "gflops": 2e-9 * t * numbers / median,
                    "gbytes_s": 1e-9 * size / median,
                }
            )
    return rows


def mixture(count: int, tokens: int, impl: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer of `count` experts, each token of which goes through CHOSEN of them, evenly."""
    rng = np.random.default_rng(0)
    up = Matrix(count * 2 * EXPERT, MODEL, True, count)
    down = Matrix(count * MODEL, EXPERT, False, count)
    weights = [random_weight(rng, m, "float32", impl) for m in (up, down)]
    pairs = tokens * CHOSEN
    sizes = jnp.asarray(
        np.full(count, pairs // count) + (np.arange(count) < pairs % count), jnp.int32
    )

    def run(x: jax.Array, up_weight: jax.Array, down_weight: jax.Array) -> jax.Array:
        y = linear(x, up_weight, up, activation="silu", sizes=sizes, impl=impl)
        return linear(y, down_weight, down, sizes=sizes, impl=impl)

    return jax.jit(run), (jnp.asarray(rng.random((pairs, MODEL), np.float32)), *weights)


def measure_experts(tokens: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time layers of 8 experts and of 64 experts. Returns a row for each number of tokens."""
    rows = []
    for t in tokens:
        seconds = time_in_turn({str(n): mixture(n, t, "cpu") for n in (CHOSEN, EXPERTS)}, repeats)
        of_8 = seconds[str(CHOSEN)]
        of_64 = seconds[str(EXPERTS)]
        rows.append(
            {"tokens": t, "ms_of_8": 1e3 * of_8, "ms_of_64": 1e3 * of_64, "ratio": of_64 / of_8}
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__, model=False)
    dtypes = ("float32", "bfloat16", "int8")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
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
