"""Are the GPU attention kernels right on this GPU?

    python -m experiments.hardware.gpu_numerics --json numerics.json
    python -m experiments.hardware.gpu_numerics --every 7      # a seventh of the shapes
    python -m experiments.hardware.gpu_numerics --impl pallas_gpu_overlapped
    python -m experiments.hardware.gpu_numerics --rehearse     # two shapes, interpreted on a CPU; needs JAX 0.11 too

Every head size and block size with 5 group sizes is one ragged batch of decodes, short rows and
chunks. The kernels' bfloat16 is compared with float64 on the host. Every fifth shape also has a
window, a soft cap and sinks. Slots outside all contexts are NaN.

Compilers are slow and cores are many, so the shapes are shared among processes. Each process has
its own context on the GPU; a kernel that hangs stops one process, and the others end. Results are
written as they come.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import at_least_1, bench_parser, write_report
from experiments.hardware.processes import results
from pallas_kernels.interpreted import interpreted
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.shared.device import device_kind
from pallas_kernels.tiles import Tiles

GROUPS = (1, 3, 4, 8, 16)
# the largest error, over the largest value: a bfloat16 has 8 bits, and weights are rounded too
TOLERANCE = 2.0**-6
# kind of decodes in a call of their own -> `min_split` of this call
ALONE = {"decodes alone": 1 << 30, "decodes alone, in parts": 64}
# kind of a row -> its fewest and its most queries
KINDS = {
    "decode": (1, 1),
    "rows of 2 to 4": (2, 4),
    "rows of 5 to 8": (5, 8),
    "chunks": (9, 1 << 30),
}


class Case(NamedTuple):
    """One call of the kernels: its shape and its options.

    d: head size. s: block size. group: query heads of a key/value head.
    """

    d: int
    s: int
    group: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def options(self, heads: int) -> dict[str, Any]:
        """The options of a call with so many query heads.

        Sinks are below most scores, among them and above all.
        """
        sinks = np.linspace(-2, 8, heads, dtype=np.float32) if self.sinks else None
        options = {"window": self.window, "soft_cap": self.soft_cap, "sinks": sinks}
        return {name: value for name, value in options.items() if value is not None}

    def rows(self) -> list[tuple[int, int]]:
        """(query tokens, context) of each row.

        Lengths are around a block's border. There is an absent row, and every kind of row.
        """
        s = self.s
        return [
            *((1, context) for context in (1, s - 1, s, s + 1, 700)),
            (0, 0),
            (2, s + 2),
            (130 // self.group + 3, 400),
            (s, s),
            (3, s + 1),
            (4, 700),
            (5, 5),
            (8, 2 * s + 3),
        ]


class Batch(NamedTuple):
    """The arrays of a case: random values, and NaN in slots outside all contexts.

    q [tokens, N, D] and the last five are arguments of the kernels. k and v [rows, context, K, D]
    are the contiguous keys and values of each row. first: the first query of each row.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    first: np.ndarray


REHEARSED = [Case(64, 16, 3, sinks=True), Case(128, 32, 4, soft_cap=5.0)]


def cases(every: int = 1) -> Iterator[Case]:
    """Yields one shape of `every`, and its variants with a window, a soft cap or sinks."""
    shapes = [
        Case(d, s, group)
        for d in pallas_gpu.HEAD_SIZES
        for s in pallas_gpu.BLOCK_SIZES
        for group in GROUPS
    ]
    for i, shape in enumerate(shapes):
        if i % every == 0:
            yield shape
            if i % 5 == i // 5 % 5:  # one of five shapes, with every group size in turn
                yield shape._replace(window=33)
                yield shape._replace(soft_cap=5.0)
                yield shape._replace(sinks=True)


def kernels(min_split: int | None) -> Any:
    """`paged_attention` by the kernels; min_split: instead of the number in the device's tiles."""
    implementation = pallas_gpu.IMPLEMENTATION
    if min_split is not None:
        tiles = Tiles.of(device_kind())._replace(min_split=min_split)
        implementation = implementation._replace(
            attend=partial(pallas_gpu.paged_attention, tiles=tiles)
        )
    return partial(paged_attention, impl=implementation)


def pages_of(
    values: np.ndarray, tables: np.ndarray, lengths: np.ndarray, block_size: int
) -> np.ndarray:
    """Contiguous keys or values [rows, context, K, D] in the pages of the rows; NaN elsewhere."""
    heads, d = values.shape[2:]
    pages = np.full((tables.size + 1, heads, block_size, d), np.nan, values.dtype)
    for row, length in enumerate(lengths):
        positions = np.arange(length)
        slots = tables[row, positions // block_size], slice(None), positions % block_size
        pages[slots] = values[row, :length]
    return pages


def batch_of(case: Case, heads: int) -> Batch:
    """The arrays of a case, always the same ones."""

    d, s, group = case[:3]
    rng = np.random.default_rng(hash(case[:3]) & 0xFFFF)
    counts, lengths = np.array(case.rows(), np.int32).T
    b = len(lengths)
    width = -(-int(lengths.max()) // s)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    def random_bf16(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.bfloat16)

    q = random_bf16(first[-1] + 5, heads * group, d)
    k = random_bf16(b, width * s, heads, d)
    v = random_bf16(b, width * s, heads, d)
    tables = rng.permutation(b * width).reshape(b, width).astype(np.int32) + 1
    k_pages = pages_of(k, tables, lengths, s)
    v_pages = pages_of(v, tables, lengths, s)
    return Batch(q, k, v, k_pages, v_pages, tables, lengths, first)


# `min_split` of a call, None for that of the device's tiles -> what computes the attention
Kernels = Callable[[int | None], Any]


def attend(case: Case, kernels_of: Kernels, min_split: int | None, *arrays: Any) -> np.ndarray:
    """Call the kernels with these arrays. Returns float64."""
    options = case.options(arrays[0].shape[1])
    function = partial(kernels_of(min_split), scale=case.d**-0.5, **options)
    on_device = (None if array is None else jnp.asarray(array) for array in arrays)
    return np.asarray(jax.jit(function)(*on_device), np.float64)


def kinds_of(queries: int) -> list[str]:
    """The kinds of a row with so many queries."""
    return [kind for kind, (fewest, most) in KINDS.items() if fewest <= queries <= most]


def outputs_by_row(case: Case, batch: Batch, kernels_of: Kernels) -> list[dict[str, np.ndarray]]:
    """The attention of each row, by its kind in KINDS and in ALONE; none for an absent row."""
    q, _, _, k_pages, v_pages, tables, lengths, first = batch
    together = attend(case, kernels_of, None, q, k_pages, v_pages, tables, lengths, first)
    outputs = []
    for start, end in pairwise(first):
        outputs.append({kind: together[start:end] for kind in kinds_of(end - start)})
    decodes = np.flatnonzero(np.diff(first) == 1)
    for kind, min_split in ALONE.items():
        alone = attend(
            case,
            kernels_of,
            min_split,
            q[first[decodes]],
            k_pages,
            v_pages,
            tables[decodes],
            lengths[decodes],
            None,
        )
        for row, output in zip(decodes, alone, strict=True):
            outputs[row][kind] = output
    return outputs


def errors(case: Case, heads: int = 2, impl: Any = None) -> dict[str, float]:
    """`errors_of_batch` of the kernels, or of `impl`."""
    kernels_of = kernels if impl is None else lambda min_split: impl
    return errors_of_batch(case, batch_of(case, heads), kernels_of)


def errors_of_overlapped(case: Case) -> dict[str, float]:
    """As `errors`, with the other kernel for prompts."""
    return errors(case, impl=partial(paged_attention, impl=pallas_gpu.OVERLAPPED))


def errors_of_batch(case: Case, batch: Batch, kernels_of: Kernels) -> dict[str, float]:
    """The largest error of each kind of row over the largest value; infinite if not finite."""
    outputs = outputs_by_row(case, batch, kernels_of)
    largest_errors = dict.fromkeys((*KINDS, *ALONE), 0.0)
    largest_value = 0.0
    for row, length in enumerate(batch.lengths):
        if not outputs[row]:
            continue
        queries = batch.q[batch.first[row] : batch.first[row + 1]]
        expected = exact(queries, batch.k[row, :length], batch.v[row, :length], case.group, case)
        for kind, output in outputs[row].items():
            error = float(np.abs(output - expected).max())
            if not np.isfinite(output).all():
                error = float("inf")
            largest_errors[kind] = max(largest_errors[kind], error)
        largest_value = max(largest_value, float(np.abs(expected).max()))
    return {kind: error / max(1.0, largest_value) for kind, error in largest_errors.items()}


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, group: int, case: Case) -> np.ndarray:
    """Causal attention in float64.

    q is [count, N, D], k and v are [length, K, D]. The queries are the last tokens of the context.
    """
    count = len(q)
    length = len(k)
    keys = k.astype(np.float64).repeat(group, 1)
    values = v.astype(np.float64).repeat(group, 1)
    scores = np.einsum("qnd,cnd->nqc", q.astype(np.float64), keys) * case.d**-0.5
    if case.soft_cap is not None:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    distance = np.arange(length - count, length)[:, None] - np.arange(length)
    visible = (distance >= 0) & (distance < (case.window or length))
    scores = np.where(visible, scores, -np.inf)
    if case.sinks:
        sinks = case.options(len(scores))["sinks"].astype(np.float64)
        of_queries = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, of_queries], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nqc,cnd->qnd", weights[..., :length], values)


def check_case(
    case: Case,
    anywhere: bool = False,
    errors_of: Callable[[Case], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """The case with its errors, or with the reason why it has none.

    anywhere: check also on a device that is no such GPU.
    errors_of: of a case; None is `errors`.
    """
    start = time.perf_counter()
    report: dict[str, Any] = {"case": str(case)[4:], **case._asdict()}
    try:
        wrong_device = pallas_gpu.wrong_device(jax.devices()[0])
        if wrong_device and not anywhere:
            raise ValueError(
                f"pallas_gpu {wrong_device}; --rehearse interprets the kernels on a CPU"
            )
        report["errors"] = (errors_of or errors)(case)
        report["right"] = all(error <= TOLERANCE for error in report["errors"].values())
    except Exception as error:
        report |= {"failed": f"{type(error).__name__}: {str(error)[:400]}", "right": False}
    return report | {"took_s": round(time.perf_counter() - start, 1)}


def interpret_case(
    case: Case, errors_of: Callable[[Case], dict[str, float]] | None = None
) -> dict[str, Any]:
    """Check a case on a CPU, with interpreted kernels. Returns the report of `check_case`."""
    with interpreted():
        return check_case(case, anywhere=True, errors_of=errors_of)


def check_all(
    chosen: Sequence[Case],
    processes: int,
    seconds: float,
    check: Callable[[Case], dict[str, Any]] = check_case,
) -> Iterator[dict[str, Any]]:
    """Yields the report of each case as it is checked.

    Cases that are not done after `seconds` are reported as failed.
    """
    for case, report in results(check, chosen, processes, seconds):
        if isinstance(report, BaseException):
            report = {"case": str(case)[4:], "failed": str(report) or repr(report), "right": False}
        yield report


def main(argv: list[str] | None = None) -> int:
    parser = checks_parser(__doc__)
    parser.add_argument(
        "--every", type=at_least_1, default=1, metavar="N", help="check one shape of N"
    )
    parser.add_argument(
        "--impl",
        choices=("pallas_gpu", "pallas_gpu_overlapped"),
        default="pallas_gpu",
        help="the implementation of attention; they differ in prompts",
    )
    args = parser.parse_args(argv)
    check = interpret_case if args.rehearse else check_case
    if args.impl == pallas_gpu.OVERLAPPED.name:
        check = partial(check, errors_of=errors_of_overlapped)
    return run_checks(args, REHEARSED if args.rehearse else list(cases(args.every)), check)


def checks_parser(text: str | None) -> argparse.ArgumentParser:
    """The options of a command that checks cases; text: what it does."""
    parser = bench_parser(text, model=False)
    parser.add_argument("--processes", type=at_least_1, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after this time")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: few shapes, interpreted")
    return parser


def run_checks(
    args: argparse.Namespace,
    chosen: Sequence[Case],
    check: Callable[[Case], dict[str, Any]],
) -> int:
    """Checks the cases as the options say, and prints and writes what it finds. Returns the exit
    status of the command.
    """
    if args.rehearse and jax.__version_info__ < pallas_gpu.JAX_NEEDED:
        remedy = "use Python 3.12 or newer, where pip installs it"
        print(
            f"error: --rehearse needs JAX 0.11 or newer, and this is {jax.__version__}; {remedy}",
            file=sys.stderr,
        )
        return 2
    if args.rehearse:
        # As many threads has JAX on a CPU, in the processes that check. A warpgroup that waits
        # keeps one, and with two the warpgroups of a kernel wait for each other.
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    reports = []
    for report in check_all(chosen, args.processes, args.seconds, check):
        reports.append(report)
        if not report["right"]:
            print(f"wrong: {report}", flush=True)
        write_report(args.json, {"cases": reports}, place="where", device=False)
    num_wrong = sum(not report["right"] for report in reports)
    for kind in (*KINDS, *ALONE):
        errors_of_kind = (report["errors"][kind] for report in reports if "errors" in report)
        worst = max(errors_of_kind, default=float("nan"))
        print(f"{kind}: worst error {worst:.1e} of the largest value")
    print(f"{len(reports)} cases, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
