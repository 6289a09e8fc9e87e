"""A step compiled from shapes alone, for chips that need not be present, with as many cache blocks as fit beside it.

on_mesh(placement)   a model without values: shapes with their shardings
room(part, ...)      the memory of one device: what its part of the weights leaves
fitted(model, ...)   the compiled step of the largest bucket, and the number of blocks that fit
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import SingleDeviceSharding

from experiments.hardware import compilers, exchanges, hlo, launches
from experiments.hardware.compilers import Target
from experiments.hardware.exchanges import Found
from pagedjax.device import attention, cache, memory
from pagedjax.device.batch import Shapes, blank_sampling, joined
from pagedjax.device.models import Decoder, Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.placement import Placement
from pagedjax.device.step import StepOutput, make_step
from pagedjax.engine.geometry import block_shape
from pagedjax.engine.pack import pack
from pagedjax.engine.programs import compiler_options
from pagedjax.host.types import EMPTY_PLAN
from pagedjax.weights.tree import name_of
from pallas_kernels import aot

DTYPE = "bfloat16"  # of activations and of the cache
NO_MEMORY = re.compile("ran out of memory (on|in memory space) hbm", re.IGNORECASE)
FEW = 8  # blocks to measure a step with, if more leave it no room


class Plan(NamedTuple):
    """The sizes of an engine that determine its largest step and its memory."""

    tokens: int
    rows: int
    block_size: int
    length: int
    fraction: float  # share of the memory beside the weights


class Room(NamedTuple):
    """The memory of one device of an engine, with the weights of all layers.

    block: bytes of a block. useful: blocks that the longest sequences can use.
    """

    device: memory.DeviceMemory
    weights: int
    block: int
    useful: int
    fraction: float

    def blocks(self, activations: int) -> int:
        """Blocks that fit beside a step, whether they are of use or not. Raises ValueError for less than two."""
        try:
            return memory.blocks_that_fit(self.block, self.fraction, self.device, activations)
        except ValueError as error:
            raise no_room(str(error)) from None


def no_room(reason: str) -> ValueError:
    return ValueError(f"it does not fit: {reason}; smaller: --weights int8, or a larger --mesh")


class Step(NamedTuple):
    """A compiled step.

    activations: bytes that it needs beside its arguments. arguments: bytes as the compiler lays them out.
    code: bytes of the program. cache: bytes of the cache. aliased: bytes that are updated in place.
    copies: instructions that make an array of the size of a layer's keys, by kind.
    found: the exchanges. must: those that it must have. rings: how the compiler does them, if it says so.
    kinds: what the host launches, and graphs: the CUDA graphs of it, for a GPU.
    """

    activations: int
    arguments: int
    code: int
    cache: int
    aliased: int
    copies: Counter[str]
    found: Counter[Found]
    must: tuple[exchanges.Wanted, ...]
    rings: Counter[str]
    seconds: float
    kinds: tuple[launches.Kind, ...] = ()
    graphs: int | None = None


# --- the model and the arguments, as shapes --------------------------------------------------------------------------


def on_one_device(config: DecoderConfig) -> Model:
    """A model, or one device's part of it, without values."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, DTYPE)))
    return Model(config, graphdef, state, DTYPE)


def on_mesh(placement: Placement) -> Model:
    """A model on the devices of a mesh, without values: global shapes, with their shardings."""
    part, whole = on_one_device(placement.part), on_one_device(placement.model)
    leaves, tree = jax.tree_util.tree_flatten_with_path(part.params)

    def placed(keys: Any, one: Any, stored: Any) -> jax.ShapeDtypeStruct:
        shape, sharding = placement.layout(name_of(keys).split("."), stored.shape)
        assert sharding.shard_shape(shape) == one.shape, (
            f"{name_of(keys)}: {shape} is not split into {one.shape}"
        )
        return jax.ShapeDtypeStruct(shape, stored.dtype, sharding=sharding)

    each = [
        placed(keys, one, stored) for (keys, one), stored in zip(leaves, whole.leaves, strict=True)
    ]
    return Model(placement.model, part.graphdef, jax.tree.unflatten(tree, each), DTYPE, placement)


def blank_batch(model: Model, plan: Plan, decodes: bool = False) -> Any:
    """The largest step of an engine, which computes nothing; decodes: the one of decodes alone."""
    width = -(-plan.length // plan.block_size)
    fixed = Shapes(
        (plan.tokens,), plan.rows, plan.block_size, width, plan.length, model.config.vocab_size
    )
    fixed = fixed._replace(decode_buckets=(plan.tokens,) if decodes else ())
    return pack(EMPTY_PLAN, {}, fixed, {(r := fixed.rows(plan.tokens)): blank_sampling(r)})


def room(part: DecoderConfig, target: Target, plan: Plan, name: str) -> Room:
    """The memory of one device.

    Args:
        part: what the device has of the model.
        name: of the device, for the report.
    """
    one = on_one_device(part)
    weights = memory.nbytes(one.leaves)
    device = memory.DeviceMemory(name, target.memory, max(target.memory - weights, 0))
    block = cache.block_bytes(**block_shape(plan.block_size, one, DTYPE, target.impl))
    return Room(
        device, weights, block, plan.rows * -(-plan.length // plan.block_size), plan.fraction
    )


# --- compiling -------------------------------------------------------------------------------------------------------


def compile_step(model: Model, target: Target, plan: Plan, blocks: int, device: Any) -> Step | None:
    """The compiled step of the largest bucket; None if it does not fit into the memory.

    Args:
        device: to compile for, if the model has no mesh.
    """
    placement, here = model.placement, SingleDeviceSharding(device)
    where = placement.cache_sharding if placement else cache.CacheSharding(here, here)
    shape = block_shape(plan.block_size, model, model.dtype, target.impl)
    pages = cache.shapes(blocks=blocks, sharding=where, **shape)
    step = make_step(
        model, attention.attend(target.impl, model.config.attn_scale, drafts=False), seed=0
    )
    decodes = attention.find(target.impl).decodes_alone and plan.tokens <= plan.rows
    batch = _placed(joined(blank_batch(model, plan, decodes)), where.copies)
    leaves = model.leaves if placement else _placed(model.leaves, here)
    started, gpu = time.perf_counter(), target.platform == "cuda"
    try:
        with nullcontext() if placement else compilers.of_device(device):
            lowered = step.trace(leaves, pages, batch).lower(lowering_platforms=(target.platform,))  # pyright: ignore
            with aot.everything_printed() if gpu else nullcontext(str) as printed:
                compiled = lowered.compile(compiler_options("gpu" if gpu else target.platform))
    except jax.errors.JaxRuntimeError as error:
        if not NO_MEMORY.search(str(error)):
            raise
        return None
    found = _read(
        compiled, lowered.out_info[1], model, plan, pages, time.perf_counter() - started, decodes
    )
    if not gpu:
        return found
    kinds = launches.kinds(hlo.parse(compiled.as_text()))
    return found._replace(kinds=kinds, graphs=launches.graphs(printed()))


def _placed(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _read(
    compiled: Any,
    output: StepOutput,
    model: Model,
    plan: Plan,
    pages: cache.KVCache,
    seconds: float,
    decodes: bool,
) -> Step:
    program, stats = hlo.parse(compiled.as_text()), compiled.memory_analysis()
    n = model.placement.sizes.size if model.placement else 1
    samples = output.sampled.tokens.shape[0]
    columns = _columns(output.sampled, samples), _columns(output.prompt, plan.tokens)
    layer = pages.k[0]
    return Step(
        activations=memory.activations_peak(compiled),
        arguments=stats.argument_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        cache=memory.nbytes(pages),
        aliased=stats.alias_size_in_bytes,
        copies=whole_arrays(program, memory.nbytes(layer)),
        found=exchanges.found(program, n),
        must=exchanges.wanted(
            model.config, model.part, n, plan.tokens, samples, columns, decodes=decodes
        ),
        rings=exchanges.rings(program),
        seconds=seconds,
    )


def _columns(output: Any, rows: int) -> int:
    """Numbers of each row in arrays [rows, ...]."""
    return sum(prod(x.shape) for x in jax.tree.leaves(output)) // rows


def whole_arrays(program: hlo.Program, nbytes: int) -> Counter[str]:
    """Instructions whose result contains an array of so many bytes, in any shape, by kind.

    A fusion goes by the kind of what it returns, because one that ends in a scatter is in place.
    """
    found = Counter()
    for site in hlo.sites(program):
        one = site.instruction
        if not site.fused and any(array.nbytes == nbytes for array in one.results):
            found[
                hlo.root(program, hlo.called(one)[0]).opcode
                if one.opcode == "fusion"
                else one.opcode
            ] += 1
    return found


def fitted(
    model: Model, target: Target, plan: Plan, has: Room, device: Any, *, all_layers: bool
) -> tuple[Step, int]:
    """The step with as many blocks as fit and are of use, by the rules of an engine; and the blocks that fit.

    It is compiled again if its own memory is the limit, unless layers were left out: then it fits in any case.

    Raises:
        ValueError: fewer than two blocks fit, or the step does not fit.
    """
    blocks, step, tried = has.blocks(0), None, 0
    for tried in (min(blocks, has.useful), FEW):
        step = compile_step(model, target, plan, tried, device)
        if step is not None:
            break
    if step is None:
        raise no_room(
            f"the compiler finds no room for a step beside {memory.size(has.weights)} of weights"
        )
    blocks = has.blocks(step.activations)
    if all_layers and (last := min(blocks, has.useful)) != tried:
        step = compile_step(model, target, plan, last, device)
        if step is None:
            raise ValueError(f"the compiler finds no room for {last} blocks; lower --fraction")
    return step, blocks
