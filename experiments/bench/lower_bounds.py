"""How close is a step to its lower bounds, the time of its memory traffic and of its matrix
products?

    python -m experiments.bench.lower_bounds [--batches 1 8 64] [--prompts 512] [--context 253] [--json out.json]

A decode step is timed in turn with reading every weight once (the bound at batch 1), with the
step's products with weights, with the attention of all layers over pages, and with reading as many
bytes of keys and values once. A step that computes a prompt is timed in turn with its products with
weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.bench.harness import (
    bench_parser,
    check_least,
    computes_prompts,
    second_run,
    write_report,
)
from pagedjax import LLM, SamplingParams
from pagedjax.device import attention, cache, linear
from pagedjax.device.layers import Weight
from pagedjax.device.linear import Matrix
from pagedjax.device.models import Model
from pagedjax.engine.geometry import block_shape

TOKENS = 2048  # the most tokens of a step
MAX_ROW = 2048  # the most numbers of a row that `_read` reads
Run = Callable[[], Any]  # runs to the end, without timing


def _ready(function: Callable[..., Any], *args: Any) -> Run:
    """Compile and warm up a function. Returns a call of it that runs to the end."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*args))
    return lambda: jax.block_until_ready(compiled(*args))


def weights_of(model: Model) -> list[tuple[jax.Array, Matrix]]:
    """The matrices of all products of a step, and their shapes."""
    leaves = [leaf for _, leaf in nnx.to_flat_state(model.params) if isinstance(leaf, Weight)]
    return [(leaf.get_value(), leaf.matrix) for leaf in leaves]


def read_weights(model: Model) -> Run:
    """Read every weight once, as 32-bit numbers.

    There is one matrix-vector product for each matrix, whatever its layout is.
    """
    return _read([np.asarray(w).reshape(-1).view(np.float32) for w, _ in weights_of(model)])


def _read(arrays: Sequence[np.ndarray]) -> Run:
    """Read arrays of float32 once."""
    rows = [jnp.asarray(a.reshape(-1, math.gcd(a.size, MAX_ROW))) for a in arrays]
    return _ready(lambda rows: [(a @ jnp.ones(a.shape[1])).sum() for a in rows], rows)


def weight_products(model: Model, tokens: int, samples: int | None = None) -> Run:
    """The step's products of [tokens, in] with weights, by the model's own implementation, one
    after the other.

    samples: tokens that the head is multiplied with, if not all.
    """
    weights = [weight for weight, _ in weights_of(model)]
    matrices = [matrix for _, matrix in weights_of(model)]
    impl = linear.find(model.config.linear)
    head_rows = tokens if samples is None else samples
    counts = [  # rows that each matrix is multiplied with
        head_rows if matrix.outputs == model.config.vocab_size else tokens for matrix in matrices
    ]
    rows = {
        (count, matrix.inputs): jnp.ones((count, matrix.inputs), model.dtype)
        for count, matrix in zip(counts, matrices, strict=True)
    }

    def multiply(
        weights: Sequence[jax.Array], rows: dict[tuple[int, int], jax.Array], zero: jax.Array
    ) -> Any:
        results = []
        for count, weight, matrix in zip(counts, weights, matrices, strict=True):
            options: dict[str, Any] = {
                "impl": impl,
                "activation": model.config.activation if matrix.gated else None,
            }
            x = rows[count, matrix.inputs]
            y = jax.lax.optimization_barrier(
                linear.linear(x, weight, matrix, sizes=count + zero, **options)
            )
            results.append(y[0, 0].astype(jnp.float32))
            # This is 0, and the next product waits for it, unless its implementation ignores
            # `sizes`: to allocate memory for all results would take longer than the products.
            zero = -jnp.isnan(y[0, :1]).astype(jnp.int32)
        return results

    return _ready(multiply, weights, rows, jnp.zeros(1, jnp.int32))


class Probe(NamedTuple):
    """Work of the device, and its amount in bytes or operations."""

    run: Run
    amount: int


def probes(model: Model, tokens: int) -> dict[str, Probe]:
    """Probes of a device: reading all weights once, and products of `tokens` rows with weights."""
    weights = weights_of(model)
    operations = sum(2 * tokens * m.outputs * m.inputs for _, m in weights)
    return {
        "read": Probe(read_weights(model), sum(w.nbytes for w, _ in weights)),
        "multiply": Probe(weight_products(model, tokens), operations),
    }


def paged_attention(llm: LLM, batch: int, context: int) -> Run:
    """The attention of all layers for a decode of `batch` contexts, over shuffled pages of the
    engine's kind.
    """
    config = llm.engine.config
    model_config = llm.engine.model.config
    width = -(-context // config.block_size)
    block = block_shape(
        config.block_size, llm.engine.model, config.kv_cache_dtype, config.attention_impl
    )
    pages = cache.init(blocks=batch * width, **block)
    blocks = 1 + np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    tables = blocks.reshape(batch, width)
    lengths = np.full(batch, context, np.int32)
    offsets = np.arange(batch + 1, dtype=np.int32)
    attend = attention.attend(config.attention_impl, model_config.attn_scale)
    q_shape = (batch, model_config.heads, model_config.head_dim)
    q = jnp.ones(q_shape, llm.engine.model.dtype)

    def every_layer(q: jax.Array, k: Sequence[jax.Array], v: Sequence[jax.Array]) -> jax.Array:
        for keys, values in zip(k, v, strict=True):  # one after the other, as in a step
            q = attend(q, keys, values, tables, lengths, offsets)
        return q

    return _ready(every_layer, q, pages.k, pages.v)


def read_cache(llm: LLM, batch: int, context: int) -> Run:
    """Read the bytes of `batch` contexts' keys and values once, as `read_weights` does."""
    config = llm.engine.model.config
    number_bytes = jnp.dtype(llm.engine.config.kv_cache_dtype).itemsize
    layer_bytes = 2 * batch * context * config.kv_heads * config.head_dim * number_bytes
    numbers = layer_bytes // 4  # as float32
    return _read([np.full(numbers, 1 + i, np.float32) for i in range(config.layers)])


def make_llm(
    tokens: int, seqs: int, length: int, buckets: Sequence[int], model: dict[str, Any]
) -> LLM:
    """An engine for steps of `tokens` tokens and for `seqs` sequences of `length` tokens."""
    sizes: dict[str, Any] = {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": seqs,
        "max_model_len": length,
    }
    return LLM(**model, **sizes, token_buckets=sorted({*buckets, tokens}), compilation="eager")


def beside_lower_bounds(
    batches: Sequence[int], context: int, repeats: int, model: dict[str, Any]
) -> list[dict[str, Any]]:
    """The median decode step of each batch size and its lower bounds, in milliseconds.

    Args:
        model: the arguments of `LLM` that name the model.
    """
    # while the last prompts are computed, the first sequences decode already
    prompt_steps = -(-max(batches) * context // TOKENS) + 1
    length = context + prompt_steps + repeats + 2
    llm = make_llm(TOKENS, max(batches), length, batches, model)
    rows = []
    for batch in batches:
        parts = {
            "read weights": read_weights(llm.engine.model),
            "weight products": weight_products(llm.engine.model, batch),
            "attention": paged_attention(llm, batch, context),
            "read cache": read_cache(llm, batch, context),
        }
        llm.engine.reset()
        _add_requests(llm, batch, context, length - context)
        while computes_prompts(llm):
            llm.engine.step()
        rows.append({"batch": batch, "context": context, **_time_in_turn(llm, parts, repeats)})
        assert len(llm.engine.scheduler_state.running.seqs) == batch, (
            "a sequence ended: steps had fewer rows"
        )
    return rows


def prompts_beside_products(
    tokens: Sequence[int], repeats: int, model: dict[str, Any]
) -> list[dict[str, Any]]:
    """The median step that computes a whole prompt of so many tokens, and its products with
    weights, in ms.

    The products are those of all layers. A step computes less of the last layer: keys and values of
    all tokens, and the rest for the last token only. So the bound is too long by one layer at most.
    """
    rows = []
    for count in tokens:
        llm = make_llm(count, 1, count + 1, (), model | {"enable_prefix_caching": False})
        parts = {"weight products": weight_products(llm.engine.model, count, 1)}
        rows.append(
            {
                "prompt": count,
                **_time_in_turn(llm, parts, repeats, partial(_add_requests, llm, 1, count, 1)),
            }
        )
    return rows


def _add_requests(llm: LLM, batch: int, context: int, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(batch):
        prompt = np.random.default_rng(i).integers(1, llm.engine.model.config.vocab_size, context)
        llm.engine.add(str(i), prompt.tolist(), params)


def _time_in_turn(
    llm: LLM, parts: dict[str, Run], repeats: int, before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Time a step and each part, in turn. Returns the median milliseconds of each.

    A part runs twice, and the second time counts. before: called before each step.
    """
    times: dict[str, list[float]] = {"step": [], "host": [], **{name: [] for name in parts}}
    for _ in range(repeats):
        before()
        result = llm.engine.step()
        assert result is not None
        times["step"].append(result.device_seconds)
        times["host"].append(result.host_seconds)
        for name, run in parts.items():
            times[name].append(second_run(run))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("median milliseconds; context", rows[0]["context"])
    print(
        "batch    step   host   read weights (step/it)   products (step/them)   attention", end=""
    )
    print("   (step/products and it)   read cache (it/attention)")
    for r in rows:
        step_ms = r["step"]
        read_ms = r["read weights"]
        products_ms = r["weight products"]
        attention_ms = r["attention"]
        print(
            f"{r['batch']:5} {step_ms:7.1f} {r['host']:6.2f} {read_ms:14.1f}"
            f" ({step_ms / read_ms:6.2f}) {products_ms:13.1f} ({step_ms / products_ms:5.2f})"
            f" {attention_ms:11.1f} ({step_ms / (products_ms + attention_ms):22.2f})"
            f" {r['read cache']:12.1f} ({r['read cache'] / attention_ms:11.2f})"
        )


def show_prompts(rows: Sequence[dict[str, Any]]) -> None:
    print("prompt    step   host   weight products (step/them)")
    for r in rows:
        step = r["step"]
        weights = r["weight products"]
        print(
            f"{r['prompt']:6} {step:7.1f} {r['host']:6.2f} {weights:14.1f} ({step / weights:5.2f})"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[512], help="tokens of a prompt; none for none"
    )
    parser.add_argument("--context", type=int, default=253)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weight-dtype")
    parser.add_argument("--linear-impl", help="which multiplies weights, such as cpu_int8")
    args = parser.parse_args(argv)
    check_least(parser, args, batches=1, prompts=1, context=1, repeats=1)
    try:
        model = {
            "model": args.model,
            "dtype": args.dtype,
            "weight_dtype": args.weight_dtype,
            "linear_impl": args.linear_impl,
            "progress": False,
        }
        rows = beside_lower_bounds(args.batches, args.context, args.repeats, model)
        prompts = prompts_beside_products(args.prompts, args.repeats, model)
    except (OSError, ValueError) as error:  # the model is missing, or a length is beyond it
        parser.error(str(error))
    show(rows)
    show_prompts(prompts)
    write_report(args.json, {"decodes": rows, "prompts": prompts})


if __name__ == "__main__":
    main()
