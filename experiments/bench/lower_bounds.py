"""How close is a decode step to its lower bounds, the time of its memory traffic and of its matrix products?

    python -m experiments.bench.lower_bounds [--batches 1 8 64] [--context 253] [--json out.json]

Timed in turn with the step: reading every weight once (the bound at batch 1), and the step's matrix products alone,
without and with the products of attention over contiguous keys and values.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax import LLM, SamplingParams
from pagedjax.config import DType
from pagedjax.device import linear
from pagedjax.device.layers import Weight
from pagedjax.device.linear import Matrix
from pagedjax.device.models import Model
from pagedjax.weights.pretrained import DEFAULT_MODEL

MOST = 2048  # numbers of a row that `read_weights` reads
Run = Callable[[], Any]  # runs to the end, without timing


def _ready(function: Callable[..., Any], *args: Any) -> Run:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))
    return lambda: jax.block_until_ready(compiled(*args))


def weights_of(model: Model) -> list[tuple[jax.Array, Matrix]]:
    """The matrices of all products of a step, and their shapes."""
    leaves = [leaf for _, leaf in nnx.to_flat_state(model.params) if isinstance(leaf, Weight)]
    return [(leaf.get_value(), leaf.matrix) for leaf in leaves]


def read_weights(model: Model) -> Run:
    """Read every weight once, as 32-bit numbers: one matrix-vector product for each matrix, whatever its layout is."""

    def read(weights: Sequence[jax.Array]) -> list[jax.Array]:
        found = [w.reshape(-1, 4 // w.dtype.itemsize) if w.dtype.itemsize < 4 else w for w in weights]
        found = [jax.lax.bitcast_convert_type(w, jnp.float32) for w in found]
        rows = [w.reshape(-1, math.gcd(w.size, MOST)) for w in found]
        return [(w @ jnp.ones(w.shape[1])).sum() for w in rows]

    return _ready(read, [w for w, _ in weights_of(model)])


def weight_products(model: Model, batch: int) -> Run:
    """The step's products of [batch, in] with weights, by the model's own implementation, independent of each other."""
    weights, impl = [w for w, _ in weights_of(model)], linear.find(model.config.linear)
    shapes = [matrix._replace(gated=False) for _, matrix in weights_of(model)]
    rows = {m.inputs: jnp.ones((batch, m.inputs), model.dtype) for m in shapes}

    def multiply(weights: Sequence[jax.Array], rows: dict[int, jax.Array]) -> list[jax.Array]:
        pairs = zip(weights, shapes, strict=True)
        found = [linear.linear(rows[m.inputs], w, m, impl=impl, dtype=jnp.float32) for w, m in pairs]
        # one number of each: to allocate whole results would take most of the time
        return [y[0, 0] for y in jax.lax.optimization_barrier(found)]

    return _ready(multiply, weights, rows)


def attention_products(model: Model, batch: int, context: int) -> Run:
    """q k^T and p v of every layer over contiguous keys [.., D, context] and values [.., context, D]."""
    c = model.config
    group = c.heads // c.kv_heads
    dtype = model.dtype
    q = jnp.ones((batch, c.kv_heads, group, c.head_dim), dtype)
    p = jnp.ones((batch, c.kv_heads, group, context), dtype)
    keys = [jnp.ones((batch, c.kv_heads, c.head_dim, context), dtype) + i for i in range(c.layers)]
    values = [jnp.ones((batch, c.kv_heads, context, c.head_dim), dtype) + i for i in range(c.layers)]

    def products(q, p, keys, values):
        scores = [jnp.einsum("bkgd,bkdc->bkgc", q, k) for k in keys]
        return scores, [jnp.einsum("bkgc,bkcd->bkgd", p, v) for v in values]

    return _ready(products, q, p, keys, values)


def beside_lower_bounds(
    batches: Sequence[int], context: int, repeats: int, name: str, dtype: DType = "float32", weights: str | None = None
) -> list[dict[str, Any]]:
    """The median decode step of each batch size and its lower bounds, in milliseconds."""
    length = context + repeats + 2
    buckets = sorted({*batches, 2048})
    sizes: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": max(batches), "max_model_len": length}
    llm = LLM(name, **sizes, token_buckets=buckets, dtype=dtype, weight_dtype=weights)
    model, rows = llm.engine.model, []
    for batch in batches:
        parts = {
            "read weights": read_weights(model),
            "weight products": weight_products(model, batch),
            "attention products": attention_products(model, batch, context),
        }
        llm.engine.reset()
        params = SamplingParams(temperature=0, max_tokens=length - context, ignore_eos=True)
        for i in range(batch):
            prompt = np.random.default_rng(i).integers(1, model.config.vocab_size, context)
            llm.engine.add(str(i), prompt.tolist(), params)
        while _prefilling(llm):
            llm.engine.step()
        times: dict[str, list[float]] = {"step": [], "host": [], **{name: [] for name in parts}}
        for _ in range(repeats):
            result = llm.engine.step()
            assert result is not None
            times["step"].append(result.device_seconds)
            times["host"].append(result.host_seconds)
            for name, run in parts.items():
                started = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - started)
        ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        rows.append({"batch": batch, "context": context, **ms})
    return rows


def _prefilling(llm: LLM) -> bool:
    state = llm.engine.scheduler_state
    return bool(state.waiting) or any(n - c > 1 for n, c in zip(*state.running[1:], strict=True))


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("median milliseconds; context", rows[0]["context"])
    print("batch    step   host   read weights (step/it)   weight products (step/them)   with attention's (step/them)")
    for r in rows:
        step, read, weights = r["step"], r["read weights"], r["weight products"]
        both = weights + r["attention products"]
        print(f"{r['batch']:5} {step:7.1f} {r['host']:6.2f} {read:9.1f} ({step / read:5.2f})", end="")
        print(f" {weights:14.1f} ({step / weights:5.2f}) {both:20.1f} ({step / both:5.2f})")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=253)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weight-dtype")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(argv)
    for name, value in (("batches", min(args.batches)), ("context", args.context), ("repeats", args.repeats)):
        if value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    try:
        rows = beside_lower_bounds(args.batches, args.context, args.repeats, args.model, args.dtype, args.weight_dtype)
    except (OSError, ValueError) as error:  # the model is missing, or a length is beyond it
        parser.error(str(error))
    show(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
