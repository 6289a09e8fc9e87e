"""How fast are the GPU attention kernels on this GPU, compared with alternatives? `gpu_numerics`
checks that they are right.

    python -m experiments.hardware.gpu_attention --json results.json
    python -m experiments.hardware.gpu_attention --quick          # one or two shapes of each kernel
    python -m experiments.hardware.gpu_attention --prompts --contenders pallas_gpu pallas_gpu_overlapped "cudnn, contiguous"
    python -m experiments.hardware.gpu_attention --rehearse       # the same program on a CPU: plain XLA, tiny shapes

1. Limits of the card: bytes/s of a copy (read + written) and of reading, and FLOP/s of a bfloat16 product of 8192 x
   8192 matrices.
2. Decode: bytes of keys and values read over time, as a share of the copy's bytes/s. The same for rows of 2 to 8 query
   tokens, which are decodes with drafts to verify. Their time is divided by that of a decode with the same numbers of
   rows and context tokens.
3. Chunks: causal FLOPs over time, as a share of the product's FLOP/s.

The kernel "pallas_gpu_overlapped", which no GPU has run, is timed by name only: if it hangs, it takes
no other time with it.

The alternatives, if installed: plain XLA ("xla"), JAX's Triton kernel (deprecated), cuDNN through
`jax.nn.dot_product_attention` and JAX's Mosaic GPU attention on contiguous keys, and torch's
scaled_dot_product_attention. They are timed at the shapes of `COMPARED`. The table names those that
are missing or fail. All compute the same causal attention. Where there are fewer queries than
context tokens, an alternative is left out if it has no such causal mask.

Times are device times (CUPTI; CUDA events for torch), medians. Calls rotate over several caches
whose pages together exceed the L2 cache; no rows share pages.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.harness import bench_parser
from experiments.core.environment import environment
from experiments.core.json_files import write_json
from experiments.hardware.processes import gpu
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.rows import SHORT
from pallas_kernels.tiles import Tiles
from pallas_kernels.timing import Shape, Times, compiled, device_times, inputs

ROUNDS = 9
BEYOND_L2 = 128 << 20  # least bytes of the caches of a measurement


# Shape(rows, queries of a row, context tokens, key/value heads, queries of a key/value head, head
#       size, block size)
DECODES = [
    *(Shape(64, 1, 4096, 8, 4, 128, s) for s in pallas_gpu.BLOCK_SIZES),
    *(
        Shape(64, 1, 4096, heads, group, d, 16)
        for heads, group, d in ((8, 4, 64), (4, 8, 128), (4, 8, 64))
    ),
    *(Shape(1, 1, 32768, 8, 4, 128, s) for s in (16, 128)),
    Shape(8, 1, 8192, 8, 4, 128, 16),
    Shape(256, 1, 1024, 4, 8, 64, 16),
    Shape(64, 1, 1024, 3, 3, 64, 16),  # SmolLM2-135M
]
VERIFIED = [  # for each number of rows, first the decode that the others are compared with
    *(Shape(64, queries, 2048, 8, 4, 128, 16) for queries in (1, 4, 8)),
    *(Shape(1, queries, 2048, 8, 4, 128, 16) for queries in (1, 4, 8)),
]
CHUNKS = [
    Shape(8, 2048, 2048, 8, 4, 128, 16),
    Shape(8, 2048, 2048, 8, 4, 128, 128),
    Shape(4, 512, 8192, 8, 4, 128, 16),
    Shape(16, 128, 1024, 3, 3, 64, 16),
]
# Shapes at which alternatives are timed too. At other shapes only the kernels are timed:
# alternatives have no blocks, or take minutes.
COMPARED = [
    *(Shape(64, 1, 4096, 8, 4, d, 16) for d in (128, 64)),
    Shape(8, 1, 8192, 8, 4, 128, 16),
    Shape(8, 2048, 2048, 8, 4, 128, 16),
]
REHEARSED = [
    *(Shape(2, queries, 32, 2, 3, 64, 16) for queries in (1, 4)),
    Shape(2, 32, 32, 2, 3, 64, 16),
]


# --- the card -------------------------------------------------------------------------------------


def limits(numbers: int = 1 << 30, side: int = 8192) -> dict[str, float]:
    """Measure the card's limits: bytes/s of copies (read + written) and of reading, FLOP/s.

    FLOP/s are those of a bfloat16 product of two matrices of `side` rows and columns. The limit of
    a copy is the faster of a copy by the driver and of a kernel of XLA's that reads and writes.
    """

    def times_of(call: Callable[..., Any], *arrays: jax.Array) -> Times:
        return device_times(compiled(call, arrays, 1), [arrays])

    big = jnp.ones((numbers,), jnp.bfloat16)
    copies = {
        "copy_by_kernel_bytes_per_s": 2 * big.nbytes / times_of(lambda x: x * 2, big).seconds,
        "copy_by_driver_bytes_per_s": 2 * big.nbytes / times_of(jnp.copy, big).wall,
    }
    read = times_of(lambda x: x.reshape(-1, 1 << 12).max(1), big).seconds
    a = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    product = times_of(lambda a, b: a @ b, a, b).seconds
    rates = {"read_bytes_per_s": big.nbytes / read, "product_flops_per_s": 2 * side**3 / product}
    return {"copy_bytes_per_s": max(copies.values()), **copies, **rates}


# --- contenders: functions of `Inputs`, or on contiguous keys -------------------------------------
# contiguous keys are (q [B, T, N, D], k [B, C, K, D], v [B, C, K, D])


KERNELS = ("pallas_gpu",)
OVERLAPPED = pallas_gpu.OVERLAPPED.name
TORCH = "torch sdpa, contiguous"


class Contender(NamedTuple):
    """An implementation in JAX: how it is called, and how its arguments are made."""

    call: Callable[..., Any]
    make: Callable[[Shape, int], tuple[Any, ...]]


def paged(impl: str, shape: Shape) -> Contender:
    return Contender(partial(paged_attention, scale=shape.d**-0.5, impl=impl), inputs)


def triton(shape: Shape) -> Contender:
    from jax.experimental.pallas.ops.gpu.paged_attention import (
        paged_attention as jax_paged_attention,
    )

    def call(q, k_pages, v_pages, tables, lengths):
        return jax_paged_attention(
            q * jnp.bfloat16(shape.d**-0.5), k_pages, v_pages, tables, lengths
        )

    def make(shape: Shape, seed: int) -> tuple[Any, ...]:
        arrays = inputs(shape, seed)
        k_pages = arrays.k_pages.swapaxes(0, 1)  # its layout is [K, P, S, D]
        v_pages = arrays.v_pages.swapaxes(0, 1)
        return arrays.q, k_pages, v_pages, arrays.block_tables, arrays.seq_lens

    return Contender(call, make)


def causal_from_first_key(shape: Shape) -> bool:
    """Whether the usual causal mask is right, in which query i sees the keys 0 to i.

    It is right if there are as many queries as keys. The query of a decode sees all keys and needs
    no mask. Else the queries are the last tokens of the context, so query i sees the keys 0 to
    context - queries + i; `jax.nn.dot_product_attention` and torch's scaled_dot_product_attention
    have no such mask.
    """
    return shape.queries == shape.context


def cudnn(shape: Shape) -> Contender:
    call = partial(
        jax.nn.dot_product_attention, is_causal=shape.queries > 1, implementation="cudnn"
    )
    return Contender(call, contiguous)


def mosaic(shape: Shape, keys: int) -> Contender:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=keys, max_concurrent_steps=2, causal=True
    )
    # It takes float16 alone: its shared memory is float16 for any inputs (JAX 0.11.2). Products are
    # as fast.
    return Contender(
        partial(attention_mgpu.attention, config=config), partial(contiguous, dtype="float16")
    )


def contiguous(shape: Shape, seed: int, dtype: str = "bfloat16") -> tuple[jax.Array, ...]:
    """Random queries, keys and values: q [B, T, N, D], k [B, C, K, D], v [B, C, K, D]."""
    q_seed, k_seed, v_seed = jax.random.split(jax.random.key(seed), 3)
    q_shape = (shape.rows, shape.queries, shape.heads * shape.group, shape.d)
    kv_shape = (shape.rows, shape.context, shape.heads, shape.d)
    q = jax.random.normal(q_seed, q_shape, dtype)
    k = jax.random.normal(k_seed, kv_shape, dtype)
    v = jax.random.normal(v_seed, kv_shape, dtype)
    return q, k, v


def torch_times(shape: Shape, copies: int) -> Times:
    """The median device time of torch's scaled_dot_product_attention, by CUDA events.

    Its keys are contiguous.
    """
    import torch  # pyright: ignore[reportMissingImports]  (on the GPU machine)
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    def tensor(tokens: int, heads: int):
        return torch.randn(shape.rows, heads, tokens, shape.d, dtype=torch.bfloat16, device="cuda")

    def queries_keys_values() -> tuple[Any, Any, Any]:
        queries = tensor(shape.queries, shape.heads * shape.group)
        return queries, tensor(shape.context, shape.heads), tensor(shape.context, shape.heads)

    sets = [queries_keys_values() for _ in range(copies)]
    call: Any = partial(
        functional.scaled_dot_product_attention, enable_gqa=True, is_causal=shape.queries > 1
    )
    for arrays in sets:
        call(*arrays)
    times = []
    for _ in range(ROUNDS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for arrays in sets:
            call(*arrays)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(sets))
    return Times(None, statistics.median(times))


def contenders(shape: Shape) -> dict[str, Callable[[], Contender]]:
    """The contenders in JAX that compute the attention of a shape, by name."""
    decode = shape.queries == 1
    square = causal_from_first_key(shape)
    makers = {name: partial(paged, name, shape) for name in ("pallas_gpu", "xla")}
    if not is_decode(shape):  # whose kernels are those of "pallas_gpu"
        makers[OVERLAPPED] = partial(paged, OVERLAPPED, shape)
    if decode or square:
        makers["cudnn, contiguous"] = partial(cudnn, shape)
    if decode:
        makers["jax triton (deprecated)"] = partial(triton, shape)
    elif square:
        makers |= {
            f"jax mosaic 64 x {keys}, contiguous": partial(mosaic, shape, keys)
            for keys in (64, 128)
        }
    return makers


def is_decode(shape: Shape) -> bool:
    """Whether the time of a shape is that of reading keys and values: of a decode, or of a row with
    a few drafts.
    """
    return shape.queries <= SHORT[-1]


def draft_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The time of rows with drafts over that of a decode, for each contender.

    The decode has as many rows and context tokens.
    """

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        """The contender and the sizes of the shape, without the number of queries."""
        sizes = {name: size for name, size in row["shape"].items() if name != "queries"}
        return row["contender"], *sorted(sizes.items())

    timed = [row for row in rows if "seconds" in row]
    decodes = {key(row): row["seconds"] for row in timed if row["shape"]["queries"] == 1}
    drafts = [
        row for row in timed if 1 < row["shape"]["queries"] <= SHORT[-1] and key(row) in decodes
    ]
    return [
        {
            "shape": row["shape"],
            "contender": row["contender"],
            "over_a_decode": row["seconds"] / decodes[key(row)],
        }
        for row in drafts
    ]


class Row(NamedTuple):
    """A contender at a shape."""

    shape: Shape
    name: str
    contender: Contender | None  # None: torch's
    program: Any  # compiled, or the error


def compile_rows(
    shapes: Sequence[Shape], names: Sequence[str] | None, with_torch: bool
) -> list[Row]:
    """Compile the contenders at every shape, side by side in threads.

    Nothing is timed meanwhile, because XLA tries programs on the GPU.

    Args:
        names: the names of the contenders; None: the kernels, and at the shapes of COMPARED all but
            OVERLAPPED.
    """

    def compile_row(shape: Shape, name: str, make: Callable[[], Contender] | None) -> Row:
        if make is None:
            return Row(shape, name, None, None)
        try:
            contender = make()
            arguments = jax.eval_shape(lambda: contender.make(shape, 0))
            program = compiled(contender.call, arguments, copies_of(shape))
            return Row(shape, name, contender, program)
        except Exception as error:
            return Row(shape, name, None, error)

    futures = []
    with ThreadPoolExecutor() as pool:
        for shape in shapes:
            makers: dict[str, Any] = contenders(shape)
            if with_torch and (shape.queries == 1 or causal_from_first_key(shape)):
                makers[TORCH] = None
            chosen = names or (makers.keys() - {OVERLAPPED} if shape in COMPARED else KERNELS)
            for name, make in makers.items():
                if name in chosen:
                    futures.append(pool.submit(compile_row, shape, name, make))
    return [future.result() for future in futures]


def copies_of(shape: Shape) -> int:
    """The number of caches that the calls of a measurement rotate over."""
    return min(max(2, -(-BEYOND_L2 // shape.cache_bytes)), 16)


def measure(row: Row, card: dict[str, float]) -> dict[str, Any]:
    """Time a row. Returns it with its times and its share of a card's limit, or with its error."""
    shape = row.shape
    copies = copies_of(row.shape)
    result: dict[str, Any] = {"shape": shape._asdict(), "contender": row.name}
    try:
        if isinstance(row.program, Exception):
            raise row.program
        if row.contender is None:
            times = torch_times(shape, copies)
        else:
            times = device_times(
                row.program, [row.contender.make(shape, seed) for seed in range(copies)], ROUNDS
            )
    except Exception as error:
        first_line, *_ = str(error).strip().splitlines() or [""]
        result["error"] = f"{type(error).__name__}: {first_line}"
        print(f"  {row.name:30} {result['error'][:100]}", flush=True)
        return result
    if is_decode(shape):
        share = shape.cache_bytes / times.seconds / card["copy_bytes_per_s"]
    else:
        share = shape.flops / times.seconds / card["product_flops_per_s"]
    wall = "" if times.busy is None else f", {1e6 * times.wall:.1f} us with gaps"
    print(
        f"  {row.name:30} {1e6 * times.seconds:10.1f} us{wall}   {share:6.1%} of the card's limit",
        flush=True,
    )
    return result | {"seconds": times.seconds, **times._asdict(), "share": share}


def versions() -> dict[str, Any]:
    """The environment, the GPU with its driver, the versions of packages, and the date."""
    packages = {}
    for name in ("jax", "jaxlib", "torch"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**environment(), "gpu": gpu(), "packages": packages, "date": time.strftime("%Y-%m-%d")}


def gpu_attention_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--quick", action="store_true", help="one or two shapes of each kernel")
    parser.add_argument("--prompts", action="store_true", help="no decodes and no rows with drafts")
    parser.add_argument(
        "--contenders", nargs="+", help="only these, such as pallas_gpu", metavar="NAME"
    )
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's attention")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: plain XLA alone, tiny shapes, wall times"
    )
    return parser


def main() -> int:
    args = gpu_attention_parser().parse_args()
    device = jax.devices()[0]
    wrong_device = pallas_gpu.wrong_device(device)
    if wrong_device and not args.rehearse:
        sys.exit(
            f"error: pallas_gpu {wrong_device}; nothing to measure. Without a GPU, "
            "pallas_kernels.aot compiles the kernels"
        )

    results: dict[str, Any] = {"where": versions(), "tiles": Tiles.of(device.device_kind)._asdict()}

    def keep(**figures: Any) -> None:
        """Write the results so far, with these figures."""
        results.update(figures)
        write_json(args.json, results, end="")

    card = limits(1 << 20, 256) if args.rehearse else limits()
    keep(card=card)
    print(
        f"copy {card['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"product {card['product_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    if args.rehearse:
        shapes = REHEARSED
    elif args.quick:
        shapes = [*DECODES[:1], *VERIFIED[:2], *CHUNKS[:1]]
    else:
        shapes = [*DECODES, *VERIFIED, *CHUNKS]
    if args.prompts:
        shapes = [shape for shape in shapes if not is_decode(shape)]
    start = time.perf_counter()
    names = ["xla"] if args.rehearse else args.contenders
    programs = compile_rows(shapes, names, not args.no_torch)
    print(f"{len(programs)} programs compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rows = []
    printed = None
    for program in programs:
        if program.shape != printed:
            print(program.shape, flush=True)
        printed = program.shape
        rows.append(measure(program, card))
        keep(rows=rows, drafts=draft_ratios(rows))
    for row in draft_ratios(rows):
        print(
            f"{row['contender']:12} {Shape(**row['shape'])}: "
            f"{row['over_a_decode']:.2f} times a decode"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
