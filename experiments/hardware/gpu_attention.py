"""How fast are the GPU attention kernels on this GPU, compared with alternatives? `gpu_numerics` checks that they are
right.

    python -m experiments.hardware.gpu_attention --json results.json
    python -m experiments.hardware.gpu_attention --quick          # one or two shapes of each kernel
    python -m experiments.hardware.gpu_attention --rehearse       # the same program on a CPU: plain XLA, tiny shapes

1. Limits of the card: bytes/s of a copy (read + written) and FLOP/s of a bfloat16 product of 8192 x 8192 matrices.
2. Decode: bytes of keys and values read over time, as a share of the copy's bytes/s. So are rows of 2 to 8 query
   tokens, decodes with drafts to verify, and the ratio of their time to that of a decode of as many rows and tokens.
3. Chunks: causal FLOPs over time, as a share of the product's FLOP/s.

The alternatives, if installed: plain XLA ("xla"), JAX's Triton kernel (deprecated), cuDNN through
`jax.nn.dot_product_attention` and JAX's Mosaic GPU attention on contiguous keys, and torch's
scaled_dot_product_attention and FlexAttention. The table names those that are missing or fail. All compute the same
causal attention: an alternative that has no causal mask for fewer queries than context tokens is left out there.

Times are device times (CUPTI; CUDA events for torch), medians. Calls rotate over several caches whose pages together
exceed the L2 cache; no rows share pages.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.core.environment import environment
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.rows import SHORT
from pallas_kernels.tiles import Tiles
from pallas_kernels.timing import Shape, Times, device_seconds, device_times, inputs

ROUNDS = 9
BEYOND_L2 = 256 << 20  # least bytes of the caches of a measurement


DECODES = [
    *(Shape(64, 1, 4096, 8, 4, 128, s) for s in pallas_gpu.BLOCK_SIZES),
    *(Shape(1, 1, 32768, 8, 4, 128, s) for s in (16, 128)),
    Shape(8, 1, 8192, 8, 4, 128, 16),
    Shape(256, 1, 1024, 8, 4, 64, 16),
    Shape(64, 1, 1024, 3, 3, 64, 16),  # SmolLM2-135M
]
VERIFIED = [  # for each number of rows the decode first, with which the others are compared
    *(Shape(64, queries, 2048, 8, 4, 128, 16) for queries in (1, 4, 8)),
    *(Shape(1, queries, 2048, 8, 4, 128, 16) for queries in (1, 4, 8)),
]
CHUNKS = [
    Shape(8, 2048, 2048, 8, 4, 128, 16),
    Shape(8, 2048, 2048, 8, 4, 128, 128),
    Shape(4, 512, 8192, 8, 4, 128, 16),
    Shape(16, 128, 1024, 3, 3, 64, 16),
]
REHEARSED = [
    *(Shape(2, queries, 32, 2, 3, 64, 16) for queries in (1, 4)),
    Shape(2, 32, 32, 2, 3, 64, 16),
]


# --- the card ---------------------------------------------------------------------------------------------------------


def limits(numbers: int = 1 << 30, side: int = 8192) -> dict[str, float]:
    """The card's limits as measured: bytes/s of a copy (read + written), and FLOP/s of a bfloat16 product."""
    big = jnp.ones((numbers,), jnp.bfloat16)
    copy = device_seconds(lambda x: x * 2, [(big,)])
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    product = device_seconds(lambda a, b: a @ b, [(a, b)])
    return {"copy_bytes_per_s": 2 * big.nbytes / copy, "product_flops_per_s": 2 * side**3 / product}


# --- contenders: each is a function of `Inputs` or, on contiguous keys, of (q [B, T, N, D], k [B, C, K, D], v).


def paged(impl: str, shape: Shape) -> Callable[..., Any]:
    return partial(paged_attention, scale=shape.d**-0.5, impl=impl)


def triton(shape: Shape) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as theirs

    def call(q, k_pages, v_pages, tables, lengths, first):
        swapped = k_pages.swapaxes(0, 1), v_pages.swapaxes(0, 1)  # its layout is [K, P, S, D]
        return theirs(q * jnp.bfloat16(shape.d**-0.5), *swapped, tables, lengths)

    return call


def causal_from_first_key(shape: Shape) -> bool:
    """Whether the usual causal mask is right, in which query i sees the keys 0 to i: queries and keys are as many.

    One query of a decode sees all keys and needs no mask. Else the queries are the last tokens of the context, so query
    i sees the keys 0 to context - queries + i; `jax.nn.dot_product_attention` and torch's
    scaled_dot_product_attention have no such mask.
    """
    return shape.queries == shape.context


def sees(shape: Shape) -> Callable[..., Any]:
    """The mask of FlexAttention: the queries are the last tokens of the context."""
    offset = shape.context - shape.queries
    return lambda batch, head, query, key: key <= query + offset


def cudnn(shape: Shape) -> Callable[..., Any]:
    return partial(jax.nn.dot_product_attention, is_causal=shape.queries > 1, implementation="cudnn")


def mosaic(shape: Shape) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2, causal=True)
    return partial(attention_mgpu.attention, config=config)


def contiguous(shape: Shape, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (shape.rows, shape.queries, shape.heads * shape.group, shape.d), jnp.bfloat16)
    k, v = (jax.random.normal(k, (shape.rows, shape.context, shape.heads, shape.d), jnp.bfloat16) for k in keys[1:])
    return q, k, v


def torch_times(shape: Shape, name: str, copies: int) -> Times:
    """Median device time of torch's attention on contiguous keys, by CUDA events."""
    import torch  # pyright: ignore[reportMissingImports]  (on the GPU machine)
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    def tensor(tokens: int, heads: int):
        return torch.randn(shape.rows, heads, tokens, shape.d, dtype=torch.bfloat16, device="cuda")

    n = shape.heads * shape.group
    sets = [(tensor(shape.queries, n), *(tensor(shape.context, shape.heads) for _ in "kv")) for _ in range(copies)]
    if name == "torch flex":
        from torch.nn.attention import flex_attention as flex  # pyright: ignore[reportMissingImports]

        sizes = {"B": None, "H": None, "Q_LEN": shape.queries, "KV_LEN": shape.context}
        mask = flex.create_block_mask(sees(shape), **sizes, device="cuda") if shape.queries > 1 else None
        call: Any = partial(torch.compile(flex.flex_attention), enable_gqa=True, block_mask=mask)
    else:
        causal = shape.queries > 1
        call = partial(functional.scaled_dot_product_attention, enable_gqa=True, is_causal=causal)
    for one in sets:
        call(*one)
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for one in sets:
            call(*one)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(sets))
    return Times(None, statistics.median(times))


Sets = list[Any]  # the arguments of calls, one set for each cache


def contenders(shape: Shape, with_torch: bool) -> dict[str, Callable[[Sets, Sets], Times]]:
    """Those that compute the attention of a shape: functions of (paged sets, contiguous sets), which return times."""
    decode, square = shape.queries == 1, causal_from_first_key(shape)
    found: dict[str, Callable[[Sets, Sets], Times]] = {
        "pallas_gpu": lambda pages, dense: device_times(paged("pallas_gpu", shape), pages),
        "xla": lambda pages, dense: device_times(paged("xla", shape), pages),
    }
    if decode or square:
        found["cudnn, contiguous"] = lambda pages, dense: device_times(cudnn(shape), dense)
    if decode:
        found["jax triton (deprecated)"] = lambda pages, dense: device_times(triton(shape), pages)
    elif square:
        found["jax mosaic, contiguous"] = lambda pages, dense: device_times(mosaic(shape), dense)
    if with_torch and (decode or square):
        found["torch sdpa"] = lambda pages, dense: torch_times(shape, "torch sdpa", len(pages))
    if with_torch:
        found["torch flex"] = lambda pages, dense: torch_times(shape, "torch flex", len(pages))
    return found


def is_decode(shape: Shape) -> bool:
    """Whether the time of a shape is that of reading keys and values: a decode, or a row with a few drafts."""
    return shape.queries <= SHORT[-1]


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The time of rows with drafts over that of the decode of as many rows and tokens, for each contender."""
    key = lambda row: (row["contender"], *sorted((row["shape"] | {"queries": 0}).items()))  # noqa: E731
    timed = [row for row in rows if "seconds" in row]
    decodes = {key(row): row["seconds"] for row in timed if row["shape"]["queries"] == 1}
    drafts = [row for row in timed if 1 < row["shape"]["queries"] <= SHORT[-1] and key(row) in decodes]
    return [
        {"shape": row["shape"], "contender": row["contender"], "over_a_decode": row["seconds"] / decodes[key(row)]}
        for row in drafts
    ]


def measure(
    shape: Shape, card: dict[str, float], with_torch: bool, beyond: int = BEYOND_L2, only: str = ""
) -> list[dict[str, Any]]:
    """One row for each contender, or for one only, with its time or its error."""
    decode = is_decode(shape)
    copies = min(max(2, -(-beyond // shape.cache_bytes)), 64)
    pages, dense = ([make(shape, seed) for seed in range(copies)] for make in (inputs, contiguous))
    rows = []
    for name, run in contenders(shape, with_torch).items():
        if only not in ("", name):
            continue
        row: dict[str, Any] = {"shape": shape._asdict(), "contender": name}
        try:
            times = run(pages, dense)
            row |= {"seconds": times.seconds, **times._asdict()}
            row["share"] = (
                shape.cache_bytes / row["seconds"] / card["copy_bytes_per_s"]
                if decode
                else shape.flops / row["seconds"] / card["product_flops_per_s"]
            )
            wall = "" if times.busy is None else f", {1e6 * times.wall:.1f} us with gaps"
            facts = f"{1e6 * row['seconds']:10.1f} us{wall}   {row['share']:6.1%} of the card's limit"
            print(f"  {name:26} {facts}", flush=True)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            print(f"  {name:26} {row['error'][:100]}", flush=True)
        rows.append(row)
    return rows


def versions() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    packages = {}
    for name in ("jax", "jaxlib", "torch"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**environment(), "gpu": driver, "packages": packages, "date": time.strftime("%Y-%m-%d")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write results to this file as they are measured")
    parser.add_argument("--quick", action="store_true", help="one or two shapes of each kernel")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's attention")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: plain XLA alone, tiny shapes, wall times")
    args = parser.parse_args()
    device = jax.devices()[0]
    if (wrong := pallas_gpu.wrong_device(device)) and not args.rehearse:
        sys.exit(
            f"error: pallas_gpu {wrong}; nothing to measure. Without a GPU, pallas_kernels.aot compiles the kernels"
        )

    results: dict[str, Any] = {"where": versions(), "tiles": Tiles.of(device.device_kind)._asdict()}

    def keep(**more: Any) -> None:
        results.update(more)
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")

    card = limits(1 << 20, 256) if args.rehearse else limits()
    keep(card=card)
    print(f"copy {card['copy_bytes_per_s'] / 1e12:.2f} TB/s, product {card['product_flops_per_s'] / 1e12:.0f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    few, all_shapes = [*DECODES[:1], *VERIFIED[:2], *CHUNKS[:1]], [*DECODES, *VERIFIED, *CHUNKS]
    options: dict[str, Any] = {"beyond": 0, "only": "xla"} if args.rehearse else {}
    for shape in REHEARSED if args.rehearse else few if args.quick else all_shapes:
        print(shape)
        rows += measure(shape, card, not args.no_torch, **options)
        keep(rows=rows, drafts=compared(rows))
    for row in compared(rows):
        print(f"{row['contender']:12} {Shape(**row['shape'])}: {row['over_a_decode']:.2f} times a decode")
    return 0


if __name__ == "__main__":
    sys.exit(main())
