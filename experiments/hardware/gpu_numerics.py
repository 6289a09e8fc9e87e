"""Are the GPU attention kernels right on this GPU?

    python -m experiments.hardware.gpu_numerics --json numerics.json
    python -m experiments.hardware.gpu_numerics --every 7      # a seventh of the shapes
    python -m experiments.hardware.gpu_numerics --rehearse     # two shapes, interpreted on a CPU; needs JAX 0.11 too

Every head size, block size and 5 group sizes, each as one ragged batch of decodes, short rows and chunks, in bfloat16,
against float64 on the host. Every fifth shape also has a window and a soft cap. Slots outside all contexts are NaN.

Compilers are slow and cores are many, so the shapes are shared among processes. Each has its own context on the GPU; a
kernel that hangs stops one process, and the others end. Results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench.in_turn import at_least_1
from experiments.core.environment import environment
from experiments.hardware.processes import results
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.shared.device import device_kind
from pallas_kernels.tiles import Tiles

GROUPS = (1, 3, 4, 8, 16)
TOLERANCE = (
    2.0**-6
)  # of the largest value: an element of bfloat16 has 8 bits, and weights are rounded too
ALONE = {
    "decodes alone": 1 << 30,
    "decodes alone, in parts": 64,
}  # in a call of their own; with this `min_split`
KINDS = {
    "decode": (1, 1),
    "rows of 2 to 4": (2, 4),
    "rows of 5 to 8": (5, 8),
    "chunks": (9, 1 << 30),
}


class Case(NamedTuple):
    """One call of the kernels: its shape and its options."""

    d: int
    s: int
    group: int
    window: int | None = None
    soft_cap: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {
            name: value
            for name in ("window", "soft_cap")
            if (value := getattr(self, name)) is not None
        }

    def rows(self) -> list[tuple[int, int]]:
        """(query tokens, context) of each row: lengths around a block's border, an absent row, every kind of row."""
        s = self.s
        rows = [(1, n) for n in (1, s - 1, s, s + 1, 700)] + [
            (0, 0),
            (2, s + 2),
            (130 // self.group + 3, 400),
            (s, s),
        ]
        return [*rows, (3, s + 1), (4, 700), (5, 5), (8, 2 * s + 3)]


REHEARSED = [Case(64, 16, 3), Case(128, 32, 4, soft_cap=5.0)]


def cases(every: int = 1) -> Iterator[Case]:
    shapes = [
        Case(d, s, group)
        for d in pallas_gpu.HEAD_SIZES
        for s in pallas_gpu.BLOCK_SIZES
        for group in GROUPS
    ]
    for i, shape in enumerate(shapes):
        if i % every == 0:
            yield shape
            if i % 5 == i // 5 % 5:  # every group size in turn
                yield shape._replace(window=33)
                yield shape._replace(soft_cap=5.0)


def kernels(min_split: int | None) -> Any:
    """`paged_attention` by the kernels; min_split: instead of the number in the device's tiles."""
    implementation = pallas_gpu.IMPLEMENTATION
    if min_split is not None:
        tiles = Tiles.of(device_kind())._replace(min_split=min_split)
        implementation = implementation._replace(
            attend=partial(pallas_gpu.paged_attention, tiles=tiles)
        )
    return partial(paged_attention, impl=implementation)


def errors(case: Case, heads: int = 2, impl: Any = None) -> dict[str, float]:
    """The largest error of each kind of row over the largest value; infinite where a result is not finite."""
    import jax.numpy as jnp

    d, s, group = case[:3]
    rows, rng = case.rows(), np.random.default_rng(hash(case[:3]) & 0xFFFF)
    b, width = len(rows), -(-max(context for _, context in rows) // s)
    counts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    random_bf16 = lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)  # noqa: E731
    q, k, v = (
        random_bf16(first[-1] + 5, heads * group, d),
        *(random_bf16(b, width * s, heads, d) for _ in "kv"),
    )
    tables = rng.permutation(b * width).reshape(b, width).astype(np.int32) + 1
    k_pages, v_pages = (
        np.full((b * width + 1, heads, s, d), np.nan, jnp.bfloat16) for _ in range(2)
    )
    for row, length in enumerate(lengths):
        positions = np.arange(length)
        at = tables[row, positions // s], slice(None), positions % s
        k_pages[at], v_pages[at] = k[row, :length], v[row, :length]

    def call(*arrays: Any, min_split: int | None = None) -> np.ndarray:
        function = partial(impl or kernels(min_split), scale=d**-0.5, **case.options)
        return np.asarray(
            jax.jit(function)(*[None if a is None else jnp.asarray(a) for a in arrays]), np.float64
        )

    got = call(q, k_pages, v_pages, tables, lengths, first)
    singles = np.flatnonzero(counts == 1)
    decodes = q[first[singles]], k_pages, v_pages, tables[singles], lengths[singles], None
    alone = {
        kind: dict(zip(singles.tolist(), call(*decodes, min_split=n), strict=True))
        for kind, n in ALONE.items()
    }
    found = dict.fromkeys((*KINDS, *ALONE), 0.0)
    largest = 0.0
    for row, (count, length) in enumerate(rows):
        kind = next((name for name, (least, most) in KINDS.items() if least <= count <= most), None)
        if kind is None:
            continue
        mine = slice(first[row], first[row] + count)
        expected = exact(q[mine], k[row, :length], v[row, :length], group, case)
        error = float(np.abs(got[mine] - expected).max())
        found[kind] = max(found[kind], error if np.isfinite(got[mine]).all() else float("inf"))
        for kind, result in alone.items() if count == 1 else ():
            error = float(np.abs(result[row] - expected).max())
            found[kind] = max(
                found[kind], error if np.isfinite(result[row]).all() else float("inf")
            )
        largest = max(largest, float(np.abs(expected).max()))
    return {kind: error / max(1.0, largest) for kind, error in found.items()}


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, group: int, case: Case) -> np.ndarray:
    """Causal attention in float64. q [count, N, D], k and v [length, K, D]; the queries are the last of the context."""
    count, length = len(q), len(k)
    keys, values = (a.astype(np.float64).repeat(group, 1) for a in (k, v))
    x = np.einsum("qnd,cnd->nqc", q.astype(np.float64), keys) * case.d**-0.5
    if case.soft_cap is not None:
        x = case.soft_cap * np.tanh(x / case.soft_cap)
    distance = np.arange(length - count, length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (case.window or length))
    x = np.where(seen, x, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    return np.einsum("nqc,cnd->qnd", p / p.sum(-1, keepdims=True), values)


def checked(case: Case, anywhere: bool = False) -> dict[str, Any]:
    """The case with its errors, or with the reason why there are none. anywhere: also where there is no such GPU."""
    began, found = time.perf_counter(), {"case": str(case)[4:], **case._asdict()}
    try:
        if (wrong := pallas_gpu.wrong_device(jax.devices()[0])) and not anywhere:
            raise ValueError(f"pallas_gpu {wrong}; --rehearse interprets the kernels on a CPU")
        found["errors"] = errors(case)
        found["right"] = all(error <= TOLERANCE for error in found["errors"].values())
    except Exception as error:
        found |= {"failed": f"{type(error).__name__}: {str(error)[:400]}", "right": False}
    return found | {"took_s": round(time.perf_counter() - began, 1)}


def interpreted(case: Case) -> dict[str, Any]:
    """`checked` on a CPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    newer: Any = plgpu  # JAX 0.10 has no interpretation
    with newer.force_gpu_interpret_mode(newer.InterpretGPUParams()):
        return checked(case, anywhere=True)


def check_all(
    chosen: Sequence[Case],
    processes: int,
    seconds: float,
    check: Callable[[Case], dict[str, Any]] = checked,
) -> Iterator[dict[str, Any]]:
    """Yields each case as it is checked. Those that are not done after `seconds` are yielded as failed."""
    for case, found in results(check, chosen, processes, seconds):
        failed = isinstance(found, BaseException)
        yield (
            {"case": str(case)[4:], "failed": str(found) or repr(found), "right": False}
            if failed
            else found
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", type=Path, help="write results to this file as they come")
    parser.add_argument(
        "--every", type=at_least_1, default=1, metavar="N", help="check one shape of N"
    )
    parser.add_argument("--processes", type=at_least_1, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after this time")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: two shapes, interpreted")
    args = parser.parse_args(argv)
    if args.rehearse and jax.__version_info__ < pallas_gpu.JAX_NEEDED:
        remedy = "use Python 3.12 or newer, where pip installs it"
        print(
            f"error: --rehearse needs JAX 0.11 or newer, and this is {jax.__version__}; {remedy}",
            file=sys.stderr,
        )
        return 2
    chosen, check, found = (
        (REHEARSED, interpreted, []) if args.rehearse else (list(cases(args.every)), checked, [])
    )
    for result in check_all(chosen, args.processes, args.seconds, check):
        found.append(result)
        if not result["right"]:
            print(f"wrong: {result}", flush=True)
        if args.json:
            kept = {"where": environment(device=False), "cases": found}
            args.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    wrong = [one for one in found if not one["right"]]
    for kind in (*KINDS, *ALONE):
        worst = max((one["errors"][kind] for one in found if "errors" in one), default=float("nan"))
        print(f"{kind}: worst error {worst:.1e} of the largest value")
    print(f"{len(found)} cases, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
