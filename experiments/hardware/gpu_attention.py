"""Are the GPU attention kernels correct on this GPU, and how fast are they compared with alternatives?

    python -m experiments.hardware.gpu_attention --json results.json
    python -m experiments.hardware.gpu_attention --quick          # numerics and one or two shapes of each kernel

1. Limits of the card: bytes/s of a copy (read + written) and FLOP/s of a bfloat16 product of 8192 x 8192 matrices.
2. Numerics against float64 on the host, in bfloat16 and ragged batches: every head size (`HEAD_SIZES`) with every block
   size (`BLOCK_SIZES`) and 5 group sizes; every fifth of them also with a window and with a soft cap. A failure ends
   the run.
3. Decode: bytes of keys and values read over time, as a share of the copy's bytes/s. So are rows of 2 to 8 query
   tokens, decodes with drafts to verify, and the ratio of their time to that of a decode of as many rows and tokens.
4. Chunks: causal FLOPs over time, as a share of the product's FLOP/s.

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
import numpy as np

from experiments.core.environment import environment
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.rows import SHORT
from pallas_kernels.tiles import Tiles
from pallas_kernels.timing import Shape, device_seconds, inputs

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


# --- the card ---------------------------------------------------------------------------------------------------------


def limits() -> dict[str, float]:
    """The card's limits as measured: bytes/s of a copy (read + written), and FLOP/s of a bfloat16 product."""
    big = jnp.ones((1 << 30,), jnp.bfloat16)
    copy = device_seconds(lambda x: x * 2, [(big,)])
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in range(2))
    product = device_seconds(lambda a, b: a @ b, [(a, b)])
    return {"copy_bytes_per_s": 2 * big.nbytes / copy, "product_flops_per_s": 2 * 8192**3 / product}


# --- numerics ---------------------------------------------------------------------------------------------------------


def numerics(quick: bool) -> list[dict[str, Any]]:
    """Worst error of each shape against float64: rows with lengths around a block border, and chunks."""
    found = []
    shapes = [
        (d, s, group) for d in pallas_gpu.HEAD_SIZES for s in pallas_gpu.BLOCK_SIZES for group in (1, 3, 4, 8, 16)
    ]
    for i, (d, s, group) in enumerate(shapes[:: 7 if quick else 1]):
        rows = [(1, n) for n in (1, s - 1, s, s + 1, 700)] + [(0, 0), (2, s + 2), (130 // group + 3, 400), (s, s)]
        rows += [(3, s + 1), (4, 700), (5, 5), (8, 2 * s + 3)]
        for options in ({}, {"window": 33}, {"soft_cap": 5.0}) if i % 5 == 0 else ({},):
            error, worst = max_error_against_float64(rows, d, s, group, i, options)
            found.append({"d": d, "s": s, "group": group, **options, "error": error, "largest": worst})
    return found


def max_error_against_float64(rows, d: int, s: int, group: int, seed: int, options: dict[str, Any], heads: int = 2):
    """(largest error, largest value). Slots outside every context are NaN, and the result's memory is fresh."""
    rng = np.random.default_rng(seed)
    b, width = len(rows), -(-max(context for _, context in rows) // s)
    counts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    random_bf16 = lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)  # noqa: E731
    q, k, v = random_bf16(first[-1] + 5, heads * group, d), *(random_bf16(b, width * s, heads, d) for _ in "kv")
    tables = rng.permutation(b * width).reshape(b, width).astype(np.int32) + 1
    k_pages, v_pages = (np.full((b * width + 1, heads, s, d), np.nan, jnp.bfloat16) for _ in range(2))
    for row, length in enumerate(lengths):
        for position in range(length):
            at = tables[row, position // s], slice(None), position % s
            k_pages[at], v_pages[at] = k[row, position], v[row, position]
    call = jax.jit(partial(pallas_gpu.paged_attention, scale=d**-0.5, **options))
    got = np.asarray(call(*map(jnp.asarray, (q, k_pages, v_pages, tables, lengths, first))), np.float64)
    expected = np.zeros(got.shape)
    window, soft_cap = options.get("window"), options.get("soft_cap")
    for row, (count, length) in enumerate(rows):
        keys, values = (a[row, :length].astype(np.float64).repeat(group, 1) for a in (k, v))
        for i in range(count):
            stop = length - count + i + 1
            begin = 0 if window is None else max(0, stop - window)
            x = np.einsum("nd,cnd->nc", q[first[row] + i].astype(np.float64), keys[begin:stop]) * d**-0.5
            x = x if soft_cap is None else soft_cap * np.tanh(x / soft_cap)
            p = np.exp(x - x.max(-1, keepdims=True))
            expected[first[row] + i] = np.einsum("nc,cnd->nd", p / p.sum(-1, keepdims=True), values[begin:stop])
    error = float(np.abs(got - expected).max())
    return (error if np.isfinite(got).all() else float("inf")), float(np.abs(expected).max())


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


def torch_seconds(shape: Shape, name: str, copies: int) -> float:
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
    return statistics.median(times)


Sets = list[Any]  # the arguments of calls, one set for each cache


def contenders(shape: Shape, with_torch: bool) -> dict[str, Callable[[Sets, Sets], float]]:
    """Those that compute the attention of a shape: functions of (paged sets, contiguous sets), which return seconds."""
    decode, square = shape.queries == 1, causal_from_first_key(shape)
    found: dict[str, Callable[[Sets, Sets], float]] = {
        "pallas_gpu": lambda pages, dense: device_seconds(paged("pallas_gpu", shape), pages),
        "xla": lambda pages, dense: device_seconds(paged("xla", shape), pages),
    }
    if decode or square:
        found["cudnn, contiguous"] = lambda pages, dense: device_seconds(cudnn(shape), dense)
    if decode:
        found["jax triton (deprecated)"] = lambda pages, dense: device_seconds(triton(shape), pages)
    elif square:
        found["jax mosaic, contiguous"] = lambda pages, dense: device_seconds(mosaic(shape), dense)
    if with_torch and (decode or square):
        found["torch sdpa"] = lambda pages, dense: torch_seconds(shape, "torch sdpa", len(pages))
    if with_torch:
        found["torch flex"] = lambda pages, dense: torch_seconds(shape, "torch flex", len(pages))
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


def measure(shape: Shape, card: dict[str, float], with_torch: bool) -> list[dict[str, Any]]:
    """One row for each contender, with its time or its error."""
    decode = is_decode(shape)
    copies = min(max(2, -(-BEYOND_L2 // shape.cache_bytes)), 64)
    pages, dense = ([make(shape, seed) for seed in range(copies)] for make in (inputs, contiguous))
    rows = []
    for name, run in contenders(shape, with_torch).items():
        row: dict[str, Any] = {"shape": shape._asdict(), "contender": name}
        try:
            row["seconds"] = run(pages, dense)
            row["share"] = (
                shape.cache_bytes / row["seconds"] / card["copy_bytes_per_s"]
                if decode
                else shape.flops / row["seconds"] / card["product_flops_per_s"]
            )
            print(f"  {name:26} {1e6 * row['seconds']:10.1f} us   {row['share']:6.1%} of the card's limit", flush=True)
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
    parser.add_argument(
        "--quick", action="store_true", help="a seventh of the numerics, one or two shapes of each kernel"
    )
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's attention")
    args = parser.parse_args()
    device = jax.devices()[0]
    if wrong := pallas_gpu.wrong_device(device):
        sys.exit(
            f"error: pallas_gpu {wrong}; nothing to measure. Without a GPU, pallas_kernels.aot compiles the kernels"
        )

    results: dict[str, Any] = {"where": versions(), "tiles": Tiles.of(device.device_kind)._asdict()}

    def keep(**more: Any) -> None:
        results.update(more)
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")

    checked = numerics(args.quick)
    bad = [one for one in checked if not one["error"] <= 2.0**-6 * max(1.0, one["largest"])]
    keep(numerics=checked)
    print(f"numerics: {len(checked)} shapes, worst error {max(one['error'] for one in checked):.2e}, {len(bad)} wrong")
    if bad:
        sys.exit(f"error: nothing is timed, because the kernels are wrong at {bad[:3]}")
    card = limits()
    keep(card=card)
    print(f"copy {card['copy_bytes_per_s'] / 1e12:.2f} TB/s, product {card['product_flops_per_s'] / 1e12:.0f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    few, all_shapes = [*DECODES[:1], *VERIFIED[:2], *CHUNKS[:1]], [*DECODES, *VERIFIED, *CHUNKS]
    for shape in few if args.quick else all_shapes:
        print(shape)
        rows += measure(shape, card, not args.no_torch)
        keep(rows=rows, drafts=compared(rows))
    for row in compared(rows):
        print(f"{row['contender']:12} {Shape(**row['shape'])}: {row['over_a_decode']:.2f} times a decode")
    return 0


if __name__ == "__main__":
    sys.exit(main())
