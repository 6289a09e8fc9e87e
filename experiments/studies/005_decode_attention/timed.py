"""The timings of study 005: attention alone, in several implementations, and whole steps of the
engine.

Plans come from the scheduler and batches from `pack`, so contexts need not be computed first: the
time of a step does not depend on the content of keys and values.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import lower_bounds
from experiments.bench.harness import in_turn, timed
from experiments.simulation.cost import Chip
from pagedjax.device import attention, cache
from pagedjax.device.batch import Shapes, blank_sampling, joined
from pagedjax.device.models import Model
from pagedjax.device.sampling import device_tile
from pagedjax.device.step import make_step
from pagedjax.engine.geometry import block_shape
from pagedjax.engine.pack import pack
from pagedjax.engine.requests import SequenceData
from pagedjax.engine.resolve import resolve, shapes
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Plan, Request
from pagedjax.options.config import EngineConfig, Resolved
from pagedjax.options.params import SamplingParams
from pallas_kernels.paged_attention import IMPLS

BEYOND_L2 = 256 << 20  # least bytes of the caches of a measurement
SIZES = (16, 128)  # tokens a block
TOGETHER = 10  # layers in a program of attention alone; they share the cost of the call
WIDE = 256  # rows of the products that measure the rate of arithmetic
AGAIN = "no cache"
CACHED = "paged cache"
BEST = "contiguous, XLA"
ONE_BLOCK = "contiguous, the paged kernel"

Cell = tuple[int, int]  # batch, context
Times = Mapping[Cell, Mapping[str, Sequence[float]]]  # seconds, one a repeat


class Grid(NamedTuple):
    """The measurement.

    Without a cache a step has batch x context tokens. Such steps are measured up to `most_tokens`
    tokens, and repeated `again_repeats` times.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    most_tokens: int
    repeats: int
    again_repeats: int

    @property
    def cells(self) -> list[Cell]:
        return [(batch, context) for batch in self.batches for context in self.contexts]

    def computes(self, cell: Cell) -> bool:
        """Whether a cell is measured without a cache too."""
        return cell[0] * cell[1] <= self.most_tokens


class Device:
    """The rates of this device, measured in turn with the steps, because machines drift."""

    def __init__(self, model: Model) -> None:
        self._probes = lower_bounds.probes(model, WIDE).values()
        self._seconds: list[list[float]] = []

    def measure(self) -> None:
        self._seconds.append([timed(probe.run) for probe in self._probes])

    def chip(self) -> Chip:
        """The bytes/s of reading all weights once, and the operations/s of products with them.

        They are the best rates since the last call, because a roofline is an upper bound.
        """
        columns = zip(self._probes, zip(*self._seconds, strict=True), strict=True)
        read, multiply = [probe.amount / min(seconds) for probe, seconds in columns]
        self._seconds.clear()
        return Chip(bandwidth=read, rate=multiply, memory=0.0, launch=0.0)


# --- attention alone ------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A way to compute decode attention.

    attend: (q [B, N, D], keys, values, *arguments) -> [B, N, D].
    """

    attend: Callable[..., jax.Array]
    shape: tuple[int, ...]  # of a layer's keys, and of its values
    arguments: tuple[jax.Array, ...] = ()


def tokens_minor(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """q [B, N, D] over k, v [B, K, C, D] -> [B, N, D], by two products for each group of heads."""
    b, n, d = q.shape
    grouped = q.reshape(b, k.shape[1], n // k.shape[1], d)
    scores = jnp.einsum("bkgd,bkcd->bkgc", grouped, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgc,bkcd->bkgd", weights, v).reshape(b, n, d)


def heads_minor(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """q [B, N, D] over k, v [B, C, K, D] -> [B, N, D], JAX's implementation."""
    return jax.nn.dot_product_attention(q[:, None], k, v, scale=scale)[:, 0]


def serving_impls(model: Model, block_size: int) -> list[str]:
    """The implementations that can read the engine's cache here. The engine's choice is first."""
    config = model.config
    device = jax.devices()[0]
    kind = {
        "dtype": model.dtype,
        "query_dtype": model.dtype,
        "head_dim": config.head_dim,
        "block_size": block_size,
    }
    choose = partial(
        attention.choose, device=device, kv_heads=config.kv_heads, heads=config.heads, **kind
    )
    impls = [choose(None)]
    for name in IMPLS:
        try:
            if name not in (impls[0], "reference"):
                impls.append(choose(name))
        except ValueError:
            continue  # not supported on this device
    return impls


def contenders(model: Model, batch: int, context: int, longest: int) -> list[dict[str, Contender]]:
    """Groups of contenders by name. Only the fastest contender of a group is measured.

    Block tables have room for `longest` tokens.
    """
    config = model.config
    minor = Contender(
        partial(tokens_minor, scale=config.attn_scale),
        (batch, config.kv_heads, context, config.head_dim),
    )
    major = Contender(
        partial(heads_minor, scale=config.attn_scale),
        (batch, context, config.kv_heads, config.head_dim),
    )
    groups = [{"einsum": minor, "dot_product_attention": major}]
    engine_impl, *other_impls = serving_impls(model, SIZES[0])
    # one block for the whole sequence: the same code without following a table
    if engine_impl in serving_impls(model, context):
        groups.append(
            {ONE_BLOCK: paged_contender(model, engine_impl, batch, context, context, context)}
        )
    ways = [(engine_impl, size) for size in SIZES] + [(impl, SIZES[0]) for impl in other_impls]
    return groups + [
        {paged_name(impl, size): paged_contender(model, impl, batch, context, size, longest)}
        for impl, size in ways
    ]


def paged_name(impl: str, size: int) -> str:
    return f"paged ({impl}), blocks of {size}"


def paged_contender(
    model: Model, impl: str, batch: int, context: int, size: int, longest: int
) -> Contender:
    """Attention over pages. Sequences share no block, blocks are in random order, and block 0 is
    the trash block.
    """
    config = model.config
    width = -(-context // size)
    tables = np.zeros((batch, -(-longest // size)), np.int32)
    blocks = 1 + np.random.default_rng(0).permutation(batch * width)
    tables[:, :width] = blocks.reshape(batch, width)
    arguments = (
        jnp.asarray(tables),
        jnp.full(batch, context, jnp.int32),
        jnp.arange(batch + 1, dtype=jnp.int32),
    )
    return Contender(
        attention.attend(impl, config.attn_scale),
        (batch * width + 1, config.kv_heads, size, config.head_dim),
        arguments,
    )


class Program(NamedTuple):
    """The attention of some layers in sequence, and keys and values for many such programs."""

    compiled: Callable[..., jax.Array]
    q: jax.Array
    sets: list[list[jax.Array]]  # of each program, keys and values alternate
    scale: float  # factor from seconds of all sets to seconds of all layers of the model

    def seconds(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready([self.compiled(self.q, numbers) for numbers in self.sets])
        return self.scale * (time.perf_counter() - start)


def program(model: Model, batch: int, contender: Contender) -> Program:
    """The program of some layers. They run in sequence as in a model, each with its keys and
    values. Together these exceed the processor's cache, because in a real step the weights pass
    through the cache between two layers.
    """
    config = model.config
    attend, shape, arguments = contender
    layer_bytes = 2 * math.prod(shape) * jnp.dtype(model.dtype).itemsize
    layers = min(TOGETHER, config.layers, -(-BEYOND_L2 // layer_bytes))
    count = -(-BEYOND_L2 // (layers * layer_bytes))
    sets = [
        [jnp.full(shape, 0.01 * i, model.dtype) for i in range(2 * layers)] for _ in range(count)
    ]
    q = jnp.full((batch, config.heads, config.head_dim), 0.1, model.dtype)

    def chained(q: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
        for k, v in zip(numbers[::2], numbers[1::2], strict=True):
            q = attend(q, k, v, *arguments)
        return q

    result = Program(
        jax.jit(chained).lower(q, sets[0]).compile(), q, sets, config.layers / (count * layers)
    )
    jax.block_until_ready(result.compiled(q, sets[0]))
    return result


def attention_times(model: Model, cell: Cell, grid: Grid) -> dict[str, list[float]]:
    """Seconds of the attention of all layers of a decode step, by the name of the group."""
    batch, context = cell
    programs = {}
    for group in contenders(model, batch, context, max(grid.contexts)):
        candidates = {name: program(model, batch, contender) for name, contender in group.items()}
        if len(candidates) == 1:
            programs |= candidates
        else:
            programs[BEST] = min(candidates.values(), key=Program.seconds)
    calls = {name: compiled.seconds for name, compiled in programs.items()}
    return in_turn(calls, grid.repeats)


def slower(times: Times, cells: Sequence[Cell], name: str, than: str) -> list[float]:
    """How many times as long `name` takes as `than`, one number for each repeat: the geometric mean
    over cells.
    """
    logs = [
        [math.log(a / b) for a, b in zip(times[cell][name], times[cell][than], strict=True)]
        for cell in cells
    ]
    return [math.exp(statistics.fmean(of_repeat)) for of_repeat in zip(*logs, strict=True)]


# --- whole steps ----------------------------------------------------------------------------------


def make_plan(batch: int, prompt: int, block_size: int, *, prefilled: bool) -> Plan:
    """The plan that computes `batch` prompts, or with `prefilled` the next plan, which decodes."""
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=batch * -(-(prompt + 2) // block_size),
        max_num_batched_tokens=max(batch * prompt, batch),
        max_num_seqs=batch,
        max_model_len=prompt + 2,
    )
    state = scheduler.init(config)
    for name in names(batch):
        state = scheduler.submit(state, Request(name, prompt, 2))
    state, plan = scheduler.schedule(state, FCFS)
    if prefilled:
        state, _ = scheduler.commit(state, plan, [1] * batch)
        _, plan = scheduler.schedule(state, FCFS)
    return plan


def names(batch: int) -> list[str]:
    return [f"r{i}" for i in range(batch)]


def sources(batch: int, length: int) -> dict[str, SequenceData]:
    """Requests that know `length` tokens each."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    return {
        name: SequenceData(params, 0, length, np.ones(length + 1, np.int32))
        for name in names(batch)
    }


def planned_cell(cell: Cell, *, cached: bool) -> tuple[Plan, dict[str, SequenceData]]:
    """The plan of a step, and the sequences that it computes. With a cache it computes the last
    token of each.
    """
    batch, context = cell
    prompt = context - 1 if cached else context
    plan = make_plan(batch, prompt, SIZES[0], prefilled=cached)
    return plan, sources(batch, context)


def step_config(model: Model, grid: Grid) -> Resolved:
    """An engine with room for every cell."""
    tokens = {*grid.batches, *(b * c for b, c in grid.cells if grid.computes((b, c)))}
    longest = max(grid.contexts)
    seqs = max(grid.batches)
    return resolve(
        EngineConfig(
            block_size=SIZES[0],
            max_num_batched_tokens=max(tokens),
            max_num_seqs=seqs,
            max_model_len=longest + 2,
            num_blocks=seqs * -(-(longest + 2) // SIZES[0]),
            token_buckets=tuple(sorted(tokens)),
        ),
        model,
    )


def empty_cache(model: Model, config: Resolved) -> cache.KVCache:
    block = block_shape(SIZES[0], model, config.kv_cache_dtype, config.attention_impl)
    return cache.init(blocks=config.num_blocks, **block)


class PackedStep(NamedTuple):
    """A step of the engine.

    name: CACHED or AGAIN.
    make: packs the batch once more.
    """

    cell: Cell
    name: str
    make: Callable[[], Any]
    batch: Any


def step_times(model: Model, grid: Grid, device: Device) -> tuple[Times, list[float]]:
    """Seconds of the engine's steps by cell, and the time of packing a batch, in per cent of a
    decode step.

    The per cents are of the largest cell, one for each repeat. `pack` makes block tables and all
    other inputs of a step.
    """
    config = step_config(model, grid)
    fixed = shapes(config, model)
    step = make_step(
        model,
        attention.attend(config.attention_impl, model.config.attn_scale),
        config.seed,
        device_tile(),
    )
    blanks = {r: jax.device_put(blank_sampling(r)) for r in map(fixed.rows, fixed.tokens)}
    pages = empty_cache(model, config)

    cached_steps = [packed_step(cell, CACHED, fixed, blanks) for cell in grid.cells]
    again_steps = [
        packed_step(cell, AGAIN, fixed, blanks) for cell in grid.cells if grid.computes(cell)
    ]
    times: dict[Cell, dict[str, list[float]]] = {cell: {} for cell in grid.cells}
    shares = []
    for repeat in range(-1, grid.repeats):  # the first time compiles and is not counted
        device.measure()
        repeated_steps = cached_steps
        if repeat < grid.again_repeats:
            repeated_steps = cached_steps + again_steps
        for packed in repeated_steps:
            start = time.perf_counter()
            pages, output = step(model.leaves, pages, joined(packed.batch))
            jax.block_until_ready(output)
            seconds = time.perf_counter() - start
            if repeat < 0:
                continue
            times[packed.cell].setdefault(packed.name, []).append(seconds)
            if packed.cell == grid.cells[-1] and packed.name == CACHED:
                shares.append(100 * timed(packed.make) / seconds)
    return times, shares


def packed_step(cell: Cell, name: str, fixed: Shapes, blanks: Mapping[int, Any]) -> PackedStep:
    """A step with its batch. blanks: the arrays of rows without sampling options, by rows."""
    make = partial(pack, *planned_cell(cell, cached=name == CACHED), fixed, blanks)
    return PackedStep(cell, name, make, make())
