"""Does an engine's whole step compile for a TPU, without one, and how many cache blocks fit in its memory?

    python -m experiments.hardware.on_tpu --target v5e                                   # Llama 3.2 1B's shape
    python -m experiments.hardware.on_tpu --target v6e --model llama-3-8b --tokens 2048
    python -m experiments.hardware.on_tpu --target v5e --model llama-3-8b --weights int8

Needs libtpu, which contains the compiler. Model, attention through the TPU kernel, and sampling are one program, as in
an engine; parameters and cache are shapes and take no memory here. The command prints the memory report of such an
engine. It fails if the compiler refuses the step, if the cache is not updated in place, or if a cache array is copied
whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import jax
from flax import nnx

from experiments.bench.random_llama import SHAPES
from pagedjax.device import attention, cache, memory
from pagedjax.device.batch import Shapes, blank_sampling
from pagedjax.device.models import Decoder, Model, llama
from pagedjax.device.step import make_step
from pagedjax.engine.pack import pack
from pagedjax.engine.resolve import block_shape
from pagedjax.host.types import EMPTY_PLAN
from pallas_kernels import aot_tpu
from pallas_kernels.tiles import TPUS, TpuTiles

MODELS = SHAPES | {
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
}
IMPL = "pallas_tpu"
FEW = 8  # blocks to measure a step with, if more leave it no room
# instructions that may have a cache array as result; an in-place kernel has two results and does not match
HARMLESS = {"parameter", "get-tuple-element", "bitcast", "tuple", "custom-call"}


class Plan(NamedTuple):
    """The sizes of an engine that determine its largest step and its memory."""

    tokens: int
    rows: int
    block_size: int
    length: int
    fraction: float  # share of the memory beside the weights


class Compiled(NamedTuple):
    report: memory.MemoryReport
    aliased: int  # bytes of the cache that are updated in place
    copies: Counter[str]  # instructions with a whole cache array as result, by kind
    seconds: float


def abstract_model(shape: dict[str, Any], weights: str) -> Model:
    """A Llama without values, with activations in bfloat16."""
    config = dataclasses.replace(llama.from_hf(shape), int8=weights == "int8")
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, "bfloat16")))
    return Model(config, graphdef, state, "bfloat16")


def compile_step(model: Model, target: str, plan: Plan, blocks: int) -> tuple[Any, float]:
    """The compiled step of the largest bucket (None if it does not fit into HBM), and the seconds it took."""
    m = model.config
    shape = block_shape(plan.block_size, model, model.dtype, IMPL)
    pages = jax.eval_shape(lambda: cache.init(blocks=blocks, **shape))
    width = -(-plan.length // plan.block_size)
    fixed = Shapes((plan.tokens,), plan.rows, plan.block_size, width, plan.length, m.vocab_size)
    batch = pack(EMPTY_PLAN, {}, fixed, {(r := fixed.rows(plan.tokens)): blank_sampling(r)})
    step = make_step(model, attention.attend(IMPL, m.attn_scale), seed=0)
    started, compiled = time.perf_counter(), None
    try:
        compiled = aot_tpu.lower(step, (model.leaves, pages, batch), target).compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory on HBM" not in str(error):
            raise
    return compiled, time.perf_counter() - started


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def fitted(model: Model, target: str, plan: Plan) -> Compiled:
    """The step with as many blocks as fit, by the rules of an engine; compiled again if its own memory is the limit.

    Raises:
        ValueError: fewer than two blocks fit, or the step does not fit.
    """
    hbm, weights = TpuTiles.read(target).hbm, nbytes(model.leaves)
    device = memory.DeviceMemory(f"TPU {target}", hbm, max(hbm - weights, 0))
    block = cache.block_bytes(**block_shape(plan.block_size, model, model.dtype, IMPL))
    useful = plan.rows * -(-plan.length // plan.block_size)

    def fit(activations: int) -> int:
        return min(useful, memory.blocks_that_fit(block, plan.fraction, device, activations))

    blocks, compiled, seconds = fit(0), None, 0.0
    for tried in (blocks, FEW):
        compiled, seconds = compile_step(model, target, plan, min(blocks, tried))
        if compiled is not None:
            blocks = fit(memory.activations_peak(compiled))
            break
    if compiled is None:
        raise ValueError(f"the compiler finds no room for a step beside {memory.size(weights)} of weights")
    if blocks != tried:
        compiled, seconds = compile_step(model, target, plan, blocks)
        if compiled is None:
            raise ValueError(f"the compiler finds no room for {blocks} blocks; lower --fraction")
    report = memory.report(
        device,
        weights=weights,
        activations=memory.activations_peak(compiled),
        num_blocks=blocks,
        block_size=plan.block_size,
        block_bytes=block,
        max_model_len=plan.length,
        swap_space_gib=0,
    )
    return Compiled(report, compiled.memory_analysis().alias_size_in_bytes, whole_arrays(compiled, blocks), seconds)


def whole_arrays(compiled: Any, blocks: int) -> Counter[str]:
    """Instructions whose result is an array of all keys or values of a layer, by kind."""
    whole = re.compile(rf"= \w+\[{blocks + 1},\d+,\d+,\d+\]\S* ([\w-]+)\(")
    return Counter(match[1] for match in whole.finditer(compiled.as_text()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TPUS, required=True)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.2-1b")
    parser.add_argument("--weights", choices=("bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=512, help="of the largest step (default 512)")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a step (default 64)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence at most (default 8192)")
    parser.add_argument("--fraction", type=float, default=0.9, help="of the memory beside the weights (default 0.9)")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to compile faster")
    args = parser.parse_args(argv)
    if missing := aot_tpu.what_is_missing():
        print(f"error: {missing}", file=sys.stderr)
        return 2
    aot_tpu.prepare()
    shape = MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    model = abstract_model(shape, args.weights)
    plan = Plan(args.tokens, args.rows, args.block_size, args.length, args.fraction)
    name = f"{args.model} in {args.weights}, {args.tokens} tokens a step"
    try:
        made = fitted(model, args.target, plan)
    except ValueError as error:
        print(f"error: {name} does not fit a {args.target}: {error}; smaller: --weights int8", file=sys.stderr)
        return 1
    print(made.report)
    wrong = made.copies.keys() - HARMLESS
    if made.aliased < made.report.cache:
        wrong |= {f"only {made.aliased:,} of {made.report.cache:,} bytes of the cache updated in place"}
    print(f"{name}: compiled for {args.target} in {made.seconds:.0f} s, the cache is updated in place" * (not wrong))
    if wrong:
        print(f"error: {name}: whole cache arrays are made by: {', '.join(sorted(wrong))}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
