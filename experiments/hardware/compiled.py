"""A step compiled from shapes alone, for chips that need not be present.

The step's cache has as many blocks as fit into the memory beside the step:

on_mesh(placement)   a model without values: shapes with their shardings
room(part, ...)      the memory of one device: what its part of the weights leaves
compile_fitting(model, ...)   the compiled step of the largest bucket, and the number of blocks that
                              fit
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from experiments.bench.random_llama import model_of_shapes
from experiments.hardware import compilers, exchanges, hlo, launches
from experiments.hardware.compilers import Target
from experiments.hardware.exchanges import Collective
from pagedjax.device import attention, cache, memory
from pagedjax.device.batch import Shapes, blank_sampling, joined
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.placement import Placement
from pagedjax.device.sampling import WAYS_WITHOUT_OPTIONS
from pagedjax.device.step import StepOutput, make_step
from pagedjax.engine.geometry import block_shape
from pagedjax.engine.pack import Sources, pack
from pagedjax.engine.programs import compiler_options
from pagedjax.host.types import EMPTY_PLAN
from pagedjax.weights.tree import name_of
from pallas_kernels import aot

DTYPE = "bfloat16"  # of activations and of the cache
FLOAT32 = 4  # bytes of a logit
# How a GPU may run the loop of a span, and the options that say so
LOOPS: dict[str, dict[str, str | bool]] = {
    "graph": {},  # as an engine: the loop is a part of the CUDA graph
    "host": {launches.BUFFERS: launches.GRAPHS["no loops"]},
    "unrolled": {"xla_gpu_command_buffer_unroll_loops": True},
}
NO_MEMORY = re.compile("ran out of memory (on|in memory space) hbm", re.IGNORECASE)
FALLBACK_BLOCKS = 8  # of the cache of a measured step, if more leave no room for the step


class Plan(NamedTuple):
    """The sizes of an engine that determine its largest step and its memory.

    span: the steps of the compiled program; with more than one, all are decodes.
    loops: how a GPU runs the loop of a span, a key of LOOPS.
    """

    tokens: int
    rows: int
    block_size: int
    length: int
    fraction: float  # share of the memory beside the weights
    span: int = 1
    loops: str = "graph"


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
        """The blocks that fit beside a step, whether sequences can use them or not.

        Raises:
            ValueError: less than two blocks fit.
        """
        try:
            return memory.blocks_that_fit(self.block, self.fraction, self.device, activations)
        except ValueError as error:
            raise no_room(str(error)) from None


def no_room(reason: str) -> ValueError:
    """The error of a model that does not fit, with what would make it smaller."""
    return ValueError(
        f"it does not fit: {reason}; smaller: --weights int8 or int4_128, or a larger --mesh"
    )


class Step(NamedTuple):
    """A compiled step.

    activations: bytes that the step needs beside its arguments.
    arguments: bytes of the arguments as the compiler lays them out.
    code: bytes of the program. cache: bytes of the cache. aliased: bytes that are updated in place.
    copies: instructions that make an array of the size of a layer's keys, by kind.
    logits_copies: copies of the logits in a step whose rows have no sampling options.
    collectives: the collectives of the program, each with the number of equal ones.
    required: the exchanges that the step must have.
    rings: how the compiler exchanges, if it says so.
    seconds: the time of compiling.
    kernels: how often it runs each Pallas kernel.
    large: copies of arrays as large as the logits or larger in one step, by their shape. Those in a
        branch may not run, and "in a branch" is behind their shape.
    kinds, graphs: for a GPU, the launches of the host, and the number of CUDA graphs.
    loop: for a GPU, the loop of a span; None: there is none.
    """

    activations: int
    arguments: int
    code: int
    cache: int
    aliased: int
    copies: Counter[str]
    logits_copies: int
    collectives: Counter[Collective]
    required: tuple[exchanges.RequiredExchange, ...]
    rings: Counter[str]
    seconds: float
    kernels: Counter[str]
    large: Counter[str]
    kinds: tuple[launches.Kind, ...] = ()
    graphs: int | None = None
    loop: launches.Loop | None = None


# --- the model and the arguments, as shapes -------------------------------------------------------


def on_one_device(config: DecoderConfig) -> Model:
    """A model, or one device's part of it, without values."""
    return model_of_shapes(config, DTYPE)


def on_mesh(placement: Placement) -> Model:
    """A model on the devices of a mesh, without values: global shapes, with their shardings."""
    part = on_one_device(placement.part)
    model = on_one_device(placement.model)
    parts, tree = jax.tree_util.tree_flatten_with_path(part.params)
    leaves = []
    for (keys, shard), stored in zip(parts, model.leaves, strict=True):
        name = name_of(keys)
        shape, sharding = placement.layout(name.split("."), stored.shape)
        assert sharding.shard_shape(shape) == shard.shape, (
            f"{name}: {shape} is not split into {shard.shape}"
        )
        leaves.append(jax.ShapeDtypeStruct(shape, stored.dtype, sharding=sharding))
    params = jax.tree.unflatten(tree, leaves)
    return Model(placement.model, part.graphdef, params, DTYPE, placement)


def blank_batch(model: Model, plan: Plan, decodes: bool = False) -> Any:
    """The arrays of an engine's largest step, without requests.

    decodes: the step is the largest one of decodes alone.
    """
    width = -(-plan.length // plan.block_size)
    fixed = Shapes(
        (plan.tokens,), plan.rows, plan.block_size, width, plan.length, model.config.vocab_size
    )
    fixed = fixed._replace(decode_buckets=(plan.tokens,) if decodes else (), span=plan.span)
    rows = fixed.rows(plan.tokens)
    sources = Sources(span=() if plan.span > 1 else None)
    return pack(EMPTY_PLAN, {}, fixed, {rows: blank_sampling(rows)}, sources=sources)


def room(part: DecoderConfig, target: Target, plan: Plan, name: str) -> Room:
    """The memory of one device.

    Args:
        part: the device's part of the model.
        name: the device's name in the report.
    """
    model = on_one_device(part)
    weights = memory.nbytes(model.leaves)
    device = memory.DeviceMemory(name, target.memory, max(target.memory - weights, 0))
    block = cache.block_bytes(**block_shape(plan.block_size, model, DTYPE, target.impl))
    useful = plan.rows * -(-plan.length // plan.block_size)
    return Room(device, weights, block, useful, plan.fraction)


# --- compiling ------------------------------------------------------------------------------------


def compile_step(model: Model, target: Target, plan: Plan, blocks: int, device: Any) -> Step | None:
    """The compiled step of the largest bucket; None if it does not fit into the memory.

    Args:
        device: the device to compile for, if the model has no mesh.
    """
    attend = attention.attend(target.impl, model.config.attn_scale, drafts=False)
    step = make_step(model, attend, seed=0)
    decodes = attention.find(target.impl).decodes_alone and plan.tokens <= plan.rows
    leaves, pages, batch = _step_arguments(model, target, plan, blocks, device, decodes)
    start = time.perf_counter()
    gpu = target.platform == "cuda"
    try:
        with nullcontext() if model.placement else compilers.of_device(device):
            traced = step.trace(leaves, pages, batch)
            lowered = traced.lower(lowering_platforms=(target.platform,))  # pyright: ignore
            with aot.everything_printed() if gpu else nullcontext(str) as printed:
                compiled = lowered.compile(options_of(target, plan))
    except jax.errors.JaxRuntimeError as error:
        if not NO_MEMORY.search(str(error)):
            raise
        return None
    seconds = time.perf_counter() - start
    result = _step_of(compiled, lowered.out_info[1], model, plan, pages, seconds)
    if not gpu:
        return result
    program = hlo.parse(compiled.as_text())
    return result._replace(
        kinds=launches.kinds(program),
        graphs=launches.graphs(printed()),
        loop=launches.loop(program, plan.span, printed()),
    )


def options_of(target: Target, plan: Plan) -> dict[str, str | bool]:
    """The compiler's options for a step."""
    if target.platform != "cuda":
        return compiler_options(target.platform)
    return compiler_options("gpu") | LOOPS[plan.loops]


def _step_arguments(
    model: Model, target: Target, plan: Plan, blocks: int, device: Any, decodes: bool
) -> tuple[Any, cache.KVCache, Any]:
    """The shapes of a step's arguments: parameters, cache and batch."""
    if model.placement:
        sharding = model.placement.cache_sharding
        leaves = model.leaves
    else:
        on_device = SingleDeviceSharding(device)
        sharding = cache.CacheSharding(on_device, on_device)
        leaves = _with_sharding(model.leaves, on_device)
    shape = block_shape(plan.block_size, model, model.dtype, target.impl)
    pages = cache.shapes(blocks=blocks, sharding=sharding, **shape)
    batch = joined(blank_batch(model, plan, decodes))
    return leaves, pages, _with_sharding(batch, sharding.copies)


def _with_sharding(tree: Any, sharding: Any) -> Any:
    """The shapes of a tree of arrays or shapes, all with one sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _step_of(
    compiled: Any,
    output: StepOutput,
    model: Model,
    plan: Plan,
    pages: cache.KVCache,
    seconds: float,
) -> Step:
    """The facts about a step that its compiled program has.

    Args:
        output: the shapes that the program returns.
    """
    program = hlo.parse(compiled.as_text())
    stats = compiled.memory_analysis()
    n = model.placement.sizes.size if model.placement else 1
    samples = output.sampled.tokens.shape[-1]
    columns = _columns(output.sampled, samples)
    layer = memory.nbytes(pages.k[0])
    return Step(
        activations=memory.activations_peak(compiled),
        arguments=stats.argument_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        cache=memory.nbytes(pages),
        aliased=stats.alias_size_in_bytes,
        copies=whole_arrays(program, layer),
        logits_copies=logits_copies(program, samples, model.config.vocab_size),
        collectives=exchanges.collectives_of(program, n),
        required=exchanges.required(model.config, model.part, n, plan.tokens, samples, columns),
        rings=exchanges.rings(program),
        seconds=seconds,
        kernels=launches.kernels(program),
        large=large_copies(
            hlo.loop_body(program, plan.span) or program,
            FLOAT32 * samples * model.config.vocab_size,
        ),
    )


def _columns(output: Any, rows: int) -> int:
    """The numbers of each row in all arrays [rows, ...] of `output`."""
    return sum(prod(x.shape) for x in jax.tree.leaves(output)) // rows


def whole_arrays(program: hlo.Program, nbytes: int) -> Counter[str]:
    """Count the instructions with a result of so many bytes, in any shape, by kind.

    The kind of a fusion is the kind of its last instruction, because a fusion that ends in a
    scatter is in place.
    """
    counts: Counter[str] = Counter()
    for site in hlo.sites(program):
        instruction = site.instruction
        if site.fused or all(array.nbytes != nbytes for array in instruction.results):
            continue
        if instruction.opcode == "fusion":
            instruction = hlo.root(program, hlo.called_computations(instruction)[0])
        counts[instruction.opcode] += 1
    return counts


def logits_copies(program: hlo.Program, samples: int, vocab_size: int) -> int:
    """How many copies of the logits [samples, vocab_size] a run may make without sampling options.

    The last of three branches is left out: it chooses tokens for rows with options (sampling.py).
    """
    dims = samples, vocab_size

    def copies_in(computation: str) -> int:
        count = 0
        for instruction in program.computations[computation]:
            if instruction.opcode.startswith("copy"):
                count += any(array.dims == dims for array in instruction.results)
            elif instruction.opcode in ("call", "while", "conditional"):
                called = hlo.called_computations(instruction)
                count += sum(copies_in(name) for name in called[:WAYS_WITHOUT_OPTIONS])
        return count

    return copies_in(program.entry)


def large_copies(program: hlo.Program, nbytes: int) -> Counter[str]:
    """Count the copies of arrays of so many bytes or more, by their shape and place."""
    counts: Counter[str] = Counter()
    for site in hlo.sites(program):
        instruction = site.instruction
        if site.fused or instruction.opcode not in ("copy", "copy-start"):
            continue
        array = instruction.results[0]
        if array.nbytes >= nbytes:
            counts[f"{array} in a branch" if site.branch else str(array)] += site.times
    return counts


def compile_fitting(
    model: Model, target: Target, plan: Plan, device_room: Room, device: Any, *, all_layers: bool
) -> tuple[Step, int]:
    """Compile the step with as many blocks as fit and are of use, by the rules of an engine.

    The step is compiled again if its own memory is the limit, unless layers were left out: then the
    step fits in any case.

    Args:
        all_layers: whether no layer was left out.

    Returns:
        The step, and the number of blocks that fit.

    Raises:
        ValueError: fewer than two blocks fit, or the step does not fit.
    """
    step = None
    compiled_blocks = 0
    for compiled_blocks in (min(device_room.blocks(0), device_room.useful), FALLBACK_BLOCKS):
        step = compile_step(model, target, plan, compiled_blocks, device)
        if step is not None:
            break
    if step is None:
        raise no_room(
            "the compiler finds no room for a step beside "
            f"{memory.size(device_room.weights)} of weights"
        )
    blocks = device_room.blocks(step.activations)
    usable = min(blocks, device_room.useful)
    if all_layers and usable != compiled_blocks:
        step = compile_step(model, target, plan, usable, device)
        if step is None:
            raise ValueError(f"the compiler finds no room for {usable} blocks; lower --fraction")
    return step, blocks
