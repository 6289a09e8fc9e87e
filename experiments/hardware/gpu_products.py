"""Products with weights of 16 bits on a Hopper GPU, with what follows their sums: are those of
`pallas_gpu` right, and how fast are they beside XLA's?

    python -m experiments.hardware.gpu_products --json products.json
    python -m experiments.hardware.gpu_products --shape llama-3.2-1b --tokens 32 256
    python -m experiments.hardware.gpu_products --candidates 6    # other sizes of tiles too
    python -m experiments.hardware.gpu_products --rehearse        # on a CPU: tiny, interpreted

The products of a layer and of the head of a Llama, with random numbers. First each is compared with
float64 on the host, for some tokens; a wrong one is not timed, and the command fails. XLA's product
is cuBLAS's or Triton's, as XLA chooses, with the kernels that follow it. The sizes of a kernel's
tiles are chosen by an estimate (`dense_sizes.py`); the next best ones show how good it is.

seconds   of a call on the device, the median of the rounds; calls rotate over weights that together
          exceed the L2 cache
share     of the operations a second of a product of 8,192 x 8,192 matrices
bytes/s   of the weight, the tokens, the residual and the result
ratio     seconds of XLA's / those of a contender
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import arguments_of, at_least_1, bench_parser
from experiments.bench.random_llama import SHAPES
from experiments.core.environment import environment
from experiments.core.json_files import write_json
from experiments.hardware.gpu_attention import BEYOND_L2, limits
from pagedjax.device.linear import Matrix, linear
from pallas_kernels.interpreted import interpreted
from pallas_kernels.linear.pallas_gpu import dense_sizes
from pallas_kernels.linear.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.shared.device import device_kind
from pallas_kernels.tiles import Tiles
from pallas_kernels.timing import compiled, device_times

DTYPE = "bfloat16"
MOST_SETS = 16  # of weights
CHECKED = 16  # tokens that are compared with float64, spread over all of them
# the largest error, over the largest result: one rounding, and what the order of a sum changes
TOLERANCE = 2.0**-7
REHEARSED: dict[str, Any] = {  # what is interpreted is compared, and not timed
    "shape": "small",
    "matrices": ["attn.out", "mlp.up"],
    "impls": ["reference", "xla"],
    "tokens": [9],
    "candidates": 1,
    "rounds": 1,
}


class Product(NamedTuple):
    """A product of a model. activation: of its gates. result: its dtype."""

    matrix: Matrix
    activation: str | None = None
    has_residual: bool = False
    result: str = DTYPE

    def flops(self, tokens: int) -> float:
        return 2.0 * tokens * self.matrix.outputs * self.matrix.inputs

    def nbytes(self, tokens: int) -> int:
        """What must be read and written."""
        numbers = self.matrix.outputs * self.matrix.inputs + tokens * self.matrix.inputs
        numbers += tokens * self.matrix.width * self.has_residual
        return 2 * numbers + tokens * self.matrix.width * jnp.dtype(self.result).itemsize

    def arrays(self, tokens: int, seed: int) -> tuple[jax.Array, ...]:
        """Random tokens, a weight, and a residual if there is one."""
        shapes = [(tokens, self.matrix.inputs), (self.matrix.outputs, self.matrix.inputs)]
        shapes += [(tokens, self.matrix.width)] * self.has_residual
        keys = jax.random.split(jax.random.key(seed), 3)
        return tuple(
            jax.random.normal(key, shape, DTYPE) for key, shape in zip(keys, shapes, strict=False)
        )

    def call(self, impl: str) -> Callable[..., jax.Array]:
        """The product by an implementation, as a function of `arrays`."""

        def multiply(x: jax.Array, weight: jax.Array, residual: jax.Array | None = None) -> Any:
            options = {"activation": self.activation, "residual": residual, "dtype": self.result}
            return linear(x, weight, self.matrix, impl=impl, **options)

        return multiply

    def with_sizes(self, sizes: dense_sizes.Sizes) -> Callable[..., jax.Array]:
        """The product by the kernel, with other sizes of tiles."""

        def multiply(x: jax.Array, weight: jax.Array, residual: jax.Array | None = None) -> Any:
            options = {"activation": self.activation, "residual": residual, "dtype": self.result}
            return pallas_gpu.dense(x, weight, self.matrix, sizes=sizes, **options)

        return multiply

    def candidates(self, tokens: int, count: int) -> list[dense_sizes.Sizes]:
        """The sizes with the smallest estimates; the first of them is the kernel's choice."""
        tiles = Tiles.of(device_kind())
        shape = pallas_gpu.product_of(
            self.matrix,
            tokens,
            (0, self.matrix.width),
            is_gated=self.activation is not None,
            has_residual=self.has_residual,
            dtype=self.result,
            tiles=tiles,
        )
        return dense_sizes.ranked(shape, tiles.multiprocessors)[:count]


MATRICES = "attn.qkv", "attn.out", "mlp.up", "mlp.down", "head"


def products_of(shape: Mapping[str, Any]) -> dict[str, Product]:
    """The products of a layer of a Llama, and its head's, whose vocabulary is rounded up to whole
    rows.
    """
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    heads = shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    vocabulary = -(-shape["vocab_size"] // dense_sizes.LANES) * dense_sizes.LANES
    products = (
        Product(Matrix(heads * hidden // shape["num_attention_heads"], hidden)),
        Product(Matrix(hidden, hidden), has_residual=True),
        Product(Matrix(2 * inner, hidden, gated=True), activation="silu"),
        Product(Matrix(hidden, inner), has_residual=True),
        Product(Matrix(vocabulary, hidden), result="float32"),
    )
    return dict(zip(MATRICES, products, strict=True))


def error_of(product: Product, tokens: int) -> float:
    """The largest error of the kernel's result, over the largest result, beside float64."""
    arrays = product.arrays(tokens, 0)
    checked = np.unique(np.linspace(0, tokens - 1, CHECKED).astype(int))
    result = np.asarray(jax.jit(product.call("pallas_gpu"))(*arrays), np.float64)[checked]
    x, weight, *residual = (np.asarray(array.astype(jnp.float32), np.float64) for array in arrays)
    exact = x[checked] @ weight.T
    if product.activation:
        gates, ups = np.split(exact, 2, axis=1)
        exact = gates / (1 + np.exp(-gates)) * ups
    if residual:
        exact = exact + residual[0][checked]
    return float(np.abs(result - exact).max() / np.abs(exact).max())


def measured(product: Product, tokens: int, args: Any, peak: float) -> dict[str, Any]:
    """The times of the contenders of a product, by name; an error in the place of a time."""
    contenders = {impl: product.call(impl) for impl in args.impls}
    for sizes in product.candidates(tokens, args.candidates)[1:]:
        name = f"pallas_gpu, {sizes.rows} x {sizes.outputs}"
        name += f", a cluster of {sizes.shares}" if sizes.shares > 1 else ""
        contenders[name] = product.with_sizes(sizes)
    weight_bytes = 2 * product.matrix.outputs * product.matrix.inputs
    sets = 1 if args.rehearse else min(MOST_SETS, BEYOND_L2 // weight_bytes + 2)
    arrays = [product.arrays(tokens, seed) for seed in range(sets)]

    def program_of(call: Callable[..., Any]) -> Any:
        try:
            return compiled(call, arrays[0], sets)
        except Exception as error:
            return error

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(program_of, contenders.values()))
    figures: dict[str, Any] = {}
    for name, program in zip(contenders, programs, strict=True):
        try:
            if isinstance(program, Exception):
                raise program
            seconds = device_times(program, arrays, args.rounds).seconds
        except Exception as error:
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            continue
        flops = product.flops(tokens) / seconds
        figures[name] = {
            "seconds": seconds,
            "flops_per_s": flops,
            "share": flops / peak,
            "bytes_per_s": product.nbytes(tokens) / seconds,
        }
    baseline = figures.get("xla", {}).get("seconds")
    for result in figures.values():
        if baseline and "seconds" in result:
            result["ratio"] = baseline / result["seconds"]
    return figures


def line(name: str, figures: Mapping[str, Any]) -> str:
    """A contender's figures, to print."""
    if "error" in figures:
        return f"  {name:36} {figures['error'][:80]}"
    return (
        f"  {name:36} {1e6 * figures['seconds']:9.1f} us {figures['flops_per_s'] / 1e12:7.1f} "
        f"TFLOP/s {figures['share']:6.1%} {figures['bytes_per_s'] / 1e9:7.0f} GB/s"
    )


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--matrices", nargs="+", choices=MATRICES, default=MATRICES)
    parser.add_argument("--impls", nargs="+", default=["pallas_gpu", "xla"])
    parser.add_argument("--tokens", type=at_least_1, nargs="+", default=[256, 64, 2048, 8])
    parser.add_argument(
        "--candidates",
        type=at_least_1,
        default=4,
        help="sizes of tiles of each product (default 4)",
    )
    parser.add_argument("--rounds", type=at_least_1, default=9)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, see above")
    args = arguments_of(parser, argv, **REHEARSED)
    if not args.rehearse and (reason := pallas_gpu.wrong_device(jax.devices()[0])):
        print(f"error: pallas_gpu {reason}; --rehearse runs on a CPU", file=sys.stderr)
        return 2
    card = limits(1 << 20, 256) if args.rehearse else limits()
    figures: dict[str, Any] = {
        "where": environment(),
        **{name: str(value) for name, value in vars(args).items()},
        "card": card,
        "errors": [],
        "times": [],
    }
    keep = partial(write_json, args.json, figures, end="") if args.json else lambda: None
    wrong = []
    products = products_of(SHAPES[args.shape])
    for tokens in args.tokens:
        for name in args.matrices:
            product = products[name]
            place = {"matrix": name, "tokens": tokens}
            with interpreted() if args.rehearse else nullcontext():
                case = {**place, "error": error_of(product, tokens)}
                figures["errors"].append(case)
                keep()
                if not case["error"] <= TOLERANCE:
                    wrong.append(case)
                    continue
                times = measured(product, tokens, args, card["product_flops_per_s"])
            figures["times"].append({**place, "contenders": times})
            print(f"{name}, {tokens} tokens", flush=True)
            print("\n".join(line(*item) for item in times.items()), flush=True)
            keep()
    if wrong:
        print(f"error: wrong products, which are not timed: {json.dumps(wrong)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
