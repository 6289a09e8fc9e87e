"""Is the kernel that rotates and writes right on this GPU, and is it faster than XLA's path?

    python -m experiments.hardware.gpu_writes --json writes.json
    python -m experiments.hardware.gpu_writes --rehearse     # on a CPU: tiny, interpreted

The kernel of `pallas_gpu_fused` gets random products, and its queries and pages are compared with
those of XLA's rotation and scatter. Values must have the same bits. A rotated number may be the
neighbour of XLA's, because a compiler rounds a product and a sum once or twice. If it is wrong,
nothing is timed. A rehearsal needs JAX 0.11 too.

Then both are timed: a program does it for the pages of some layers, and is called again and again.
Last, engines of a Llama of random weights decode with `pallas_gpu` and with `pallas_gpu_fused`.
Programs take turns.

seconds   of a layer, or of a step of the engine, the median of the rounds
ratio     those of XLA's path / those of the kernel, round by round
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import arguments_of, at_least_1, bench_parser, compared
from experiments.bench.random_llama import SHAPES, random_model
from experiments.core.environment import environment
from experiments.core.json_files import write_json
from experiments.hardware.gpu_stored import DTYPE, add_timing, decode_program
from pagedjax.device.rope import Rope, rotate
from pallas_kernels import kv_write
from pallas_kernels.interpreted import interpreted
from pallas_kernels.paged_attention.pallas_gpu.implementation import rotate_and_write

LAYERS = 22  # of a timed program
POSITIONS = 2048
# a rotated number over XLA's: one step of a bfloat16; and of the float32 products before it
RELATIVE = 2.0**-7
ABSOLUTE = 1e-6
REHEARSED: dict[str, Any] = {
    "shape": "small",
    "attentions": ["xla", "reference"],
    "rows": [2],
    "context": 24,
    "rounds": 2,
    "calls": 2,
}


class Case(NamedTuple):
    """Tokens of a step, and the heads of a model."""

    tokens: int
    queries: int
    heads: int
    d: int
    s: int = 16

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.queries} + {self.heads} heads x {self.d}, S {self.s}"

    def arrays(self, layers: int = 1) -> tuple[list[Any], tuple[jax.Array, ...]]:
        """The pages of each layer, and (heads, angles, slots). Some tokens are padding."""
        keys = jax.random.split(jax.random.key(self.tokens), 4)
        blocks = 2 * self.tokens + 1
        shape = blocks, self.heads, self.s, self.d
        pages = [tuple(jnp.zeros((2, *shape), DTYPE)) for _ in range(layers)]
        product = self.tokens, self.queries + 2 * self.heads, self.d
        heads = jax.random.normal(keys[0], product, DTYPE)
        table = jnp.asarray(Rope(10_000.0).table(self.d, POSITIONS))
        angles = table[:, jax.random.randint(keys[1], (self.tokens,), 0, POSITIONS)]
        slots = jax.random.permutation(keys[2], (blocks - 1) * self.s)[: self.tokens] + self.s
        used = jnp.arange(self.tokens) < max(1, self.tokens - 2)
        return pages, (heads, angles, jnp.where(used, slots, 0).astype(jnp.int32))


# decodes and prompts of TinyLlama, Llama 3 8B and SmolLM2
CASES = [
    *(Case(tokens, 32, 4, 64) for tokens in (1, 8, 256, 2048)),
    *(Case(tokens, 32, 8, 128) for tokens in (8, 256, 2048)),
    Case(256, 9, 3, 64),
    Case(256, 0, 4, 64),
    Case(3, 32, 4, 64, s=128),
]
TIMED = [case for case in CASES if case.queries and case.s == 16 and case.tokens > 1]
REHEARSED_CASES = [Case(3, 2, 1, 64)]


def by_xla(k_pages, v_pages, heads, angles, slots, *, queries: int):
    """The contract of `rotate_and_write`, as an engine does it with `pallas_gpu`."""
    ends = queries, queries + k_pages.shape[1]
    q, k, v = jnp.split(heads, ends, axis=1)
    new = rotate(k, angles), v, slots
    pages = kv_write.write(k_pages, v_pages, *new, rows=len(slots), impl="xla")
    return rotate(q, angles), *pages


WAYS = {"xla": by_xla, "kernel": rotate_and_write}


# --- is it right? ---------------------------------------------------------------------------------


def faults_of(case: Case, kernel: Callable[..., Any] = rotate_and_write) -> list[str]:
    """What differs from XLA's results; empty if the kernel is right."""
    (pages,), new = case.arrays()
    expected = jax.jit(partial(by_xla, queries=case.queries))(*pages, *new)
    results = jax.jit(partial(kernel, queries=case.queries))(*pages, *new)
    faults = []
    for name, result, exact in zip(("queries", "keys", "values"), results, expected, strict=True):
        if result is None:  # no queries
            continue
        first = 0 if name == "queries" else 1  # page 0 is for padding
        numbers = np.asarray(result, np.float32)[first:]
        exact_numbers = np.asarray(exact, np.float32)[first:]
        near = 0.0 if name == "values" else RELATIVE * np.abs(exact_numbers) + ABSOLUTE
        num_wrong = int((~(np.abs(numbers - exact_numbers) <= near)).sum())
        if num_wrong:
            faults.append(f"{num_wrong} of {numbers.size} numbers of {name}")
    return faults


# --- times ----------------------------------------------------------------------------------------


def layers_program(case: Case, way: str, layers: int) -> Callable[[int], float]:
    """Returns a function that calls a program of so many layers so many times, and returns the
    seconds of a layer.
    """
    pages, new = case.arrays(layers)

    def program(pages: list[Any], *new: jax.Array) -> tuple[list[Any], list[Any]]:
        results = [WAYS[way](*of_layer, *new, queries=case.queries) for of_layer in pages]
        written = [(k_pages, v_pages) for _, k_pages, v_pages in results]
        return written, [q for q, *_ in results]

    jitted = jax.jit(program, donate_argnums=0)

    def call(calls: int) -> float:
        nonlocal pages
        queries = None
        start = time.perf_counter()
        for _ in range(calls):
            pages, queries = jitted(pages, *new)
        jax.block_until_ready((pages, queries))
        return (time.perf_counter() - start) / calls / layers

    call(1)
    return call


def step_times(args: Namespace) -> dict[str, Any]:
    """The seconds of a step of decodes, by rows and attention, and those of the first attention
    over them.
    """
    steps = {}
    for rows in args.rows:
        runs = {}
        for attention in args.attentions:
            model = random_model(SHAPES[args.shape], DTYPE)
            options = Namespace(attention=attention, context=args.context)
            runs[attention] = partial(decode_program(model, rows, options), args.calls)
        steps[str(rows)] = compared(runs, args.rounds, base=args.attentions[0])
        print(json.dumps({"rows": rows} | steps[str(rows)]), flush=True)
    return steps


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--attentions", nargs="+", default=["pallas_gpu", "pallas_gpu_fused"])
    parser.add_argument("--rows", type=at_least_1, nargs="+", default=[8, 256])
    add_timing(parser)
    args = arguments_of(parser, argv, **REHEARSED)
    figures: dict[str, Any] = {
        "where": environment(),
        **{name: str(value) for name, value in vars(args).items()},
    }
    keep = partial(write_json, args.json, figures, end="") if args.json else lambda: None
    cases = REHEARSED_CASES if args.rehearse else CASES
    timed = REHEARSED_CASES if args.rehearse else TIMED
    layers = 2 if args.rehearse else LAYERS
    with interpreted() if args.rehearse else nullcontext():
        figures["faults"] = {str(case): faults_of(case) for case in cases}
        keep()
        wrong = {case: faults for case, faults in figures["faults"].items() if faults}
        if wrong:
            print(f"error: wrong writes, which are not timed: {json.dumps(wrong)}", file=sys.stderr)
            return 1
        print(f"{len(cases)} cases are right", flush=True)
        figures["layers"] = {}
        for case in timed:
            runs = {way: partial(layers_program(case, way, layers), args.calls) for way in WAYS}
            figures["layers"][str(case)] = compared(runs, args.rounds, base="xla")
            print(json.dumps({"case": str(case)} | figures["layers"][str(case)]), flush=True)
            keep()
    figures["steps"] = step_times(args)
    keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
