"""005: a decode step without a cache, with a contiguous one and with a paged one, on the device that JAX has.

No config: nothing is served. Plans come from the scheduler and batches from `pack`, so steps and kernels are timed at
contexts that nobody has to compute first; what keys and values hold is no matter to how long they take to read.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import floors
from experiments.bench_kernels import BEYOND_L2
from experiments.cost import CHIPS, SHAPES, Chip, Roofline, Shape, Work, shape_of
from experiments.studies import draw
from experiments.studies.findings import Claim, Findings, exactly, interval, markdown, told
from pagedjax import attention, cache, load_model, monitor, scheduler
from pagedjax.batch import Source, blank_sampling, pack
from pagedjax.config import EngineConfig
from pagedjax.loaded import DEFAULT_MODEL
from pagedjax.models import Model
from pagedjax.params import SamplingParams
from pagedjax.policies import FCFS
from pagedjax.resolve import block_shape, resolve, shapes
from pagedjax.sampling import device_tile
from pagedjax.scheduler import SchedulerConfig
from pagedjax.step import make_step
from pagedjax.types import Plan, Request
from pagedjax.weights.checkpoint import open_checkpoint
from pallas_kernels.paged_attention import IMPLS

QUESTION = "What does a decode step cost without a KV cache, with a contiguous and with a paged one, and what binds it?"
PAPER = "PagedAttention, Fig. 18a"
FIG_18A = ((8, 64), (8, 128), (8, 256), (32, 64), (32, 128), (32, 256))  # batch and context
LECTURE = "gpt2-xl, a lecture's example"
SIZES = (16, 128)  # tokens a block
TOGETHER = 10  # layers in a program of attention alone: what calling it costs is divided by them
WIDE = 256  # columns of the products that tell the rate of arithmetic
AGAIN, CACHED = "no cache", "paged cache"
BEST, ONE_BLOCK = "contiguous, XLA", "contiguous, the paged kernel"

Cell = tuple[int, int]  # batch, context
Times = Mapping[Cell, Mapping[str, Sequence[float]]]  # seconds, one a repeat


class Grid(NamedTuple):
    """What is measured. Without a cache a step has batch x context tokens: at most `most` are run, and `few` times."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    most: int
    repeats: int
    few: int

    @property
    def cells(self) -> list[Cell]:
        return [(batch, context) for batch in self.batches for context in self.contexts]

    def computes(self, cell: Cell) -> bool:
        return cell[0] * cell[1] <= self.most


FULL = Grid((64, 128, 256, 512, 1024, 2048), (1, 8, 32), 2048, 7, 3)
QUICK = Grid((64, 256, 1024), (1, 8), 512, 3, 2)


class Demand(NamedTuple):
    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations for every byte that is read."""
        return self.operations / self.bytes


def decode(batch: int, context: int) -> Work:
    """A step that computes one token of each sequence, the last of `context`."""
    return Work(batch, batch, batch, batch * context, batch * context)


def again(batch: int, context: int) -> Work:
    """The same step without a cache: it computes all tokens of every sequence."""
    return Work(batch * context, batch, batch, batch * context, batch * context * (context + 1) // 2)


def demand(shape: Shape, work: Work) -> Demand:
    """What a roofline counts of a step (cost.Roofline)."""
    products = 2 * (shape.layers * shape.layer_numbers * work.tokens + shape.head_numbers * work.sampled)
    scores = 4 * shape.layers * shape.heads * shape.head_dim * work.pairs
    return Demand(products + scores, shape.weight_bytes * shape.numbers + shape.token_bytes * work.context)


class Device:
    """What this device can do, measured in turn with all that is compared with it, because machines drift."""

    def __init__(self, model: Model) -> None:
        matrices = [w for w in jax.tree.leaves(model.params) if w.ndim == 2]
        columns = {n: jnp.ones((n, WIDE), matrices[0].dtype) for n in {w.shape[1] for w in matrices}}
        # summed, as in `read_weights`: else the time would be that of fresh memory for all the results
        multiply = jax.jit(lambda ws, xs: [(w @ xs[w.shape[1]]).sum() for w in ws])
        self._read, self._multiply = floors.read_weights(model), partial(multiply, matrices, columns)
        self._bytes, self._numbers = sum(w.nbytes for w in matrices), sum(w.size for w in matrices)
        self._seconds: list[tuple[float, float]] = []
        jax.block_until_ready(self._multiply())

    def measure(self) -> None:
        began = time.perf_counter()
        self._read()
        read = time.perf_counter()
        jax.block_until_ready(self._multiply())
        self._seconds.append((read - began, time.perf_counter() - read))

    def chip(self) -> Chip:
        """Bytes/s of reading all weights once, operations/s of products with them: the best since the last call, for
        a roof is what can be reached."""
        read, products = (min(column) for column in zip(*self._seconds, strict=True))
        self._seconds.clear()
        return Chip(self._bytes / read, 2 * WIDE * self._numbers / products, 0.0, launch=0.0)


# --- attention alone --------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A way to compute decode attention. attend: (q [B, N, D], keys, values, *rest) -> [B, N, D]."""

    attend: Callable[..., jax.Array]
    shape: tuple[int, ...]  # of a layer's keys, and of its values
    rest: tuple[jax.Array, ...] = ()


def tokens_minor(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """q [B, N, D] over k, v [B, K, C, D] -> [B, N, D], by two products for each group of heads."""
    b, n, d = q.shape
    grouped = q.reshape(b, k.shape[1], n // k.shape[1], d)
    scores = jnp.einsum("bkgd,bkcd->bkgc", grouped, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgc,bkcd->bkgd", weights, v).reshape(b, n, d)


def heads_minor(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """q [B, N, D] over k, v [B, C, K, D] -> [B, N, D], JAX's own."""
    return jax.nn.dot_product_attention(q[:, None], k, v, scale=scale)[:, 0]


def served(model: Model, block_size: int) -> list[str]:
    """Implementations that can read the engine's cache on this device; the engine's own choice is the first."""
    c, device = model.config, jax.devices()[0]
    kind = {"dtype": model.dtype, "query_dtype": model.dtype, "head_dim": c.head_dim, "block_size": block_size}
    choose = partial(attention.choose, device=device, kv_heads=c.kv_heads, heads=c.heads, **kind)
    found = [choose(None)]
    for name in IMPLS:
        try:
            found += [choose(name)] if name not in (found[0], "reference") else []
        except ValueError:
            continue  # it says why it does not serve here
    return found


def contenders(model: Model, batch: int, context: int, longest: int) -> list[dict[str, Contender]]:
    """By name; of those that stand together the fastest is measured. Block tables have room for `longest` tokens."""
    c = model.config
    minor = Contender(partial(tokens_minor, scale=c.attn_scale), (batch, c.kv_heads, context, c.head_dim))
    major = Contender(partial(heads_minor, scale=c.attn_scale), (batch, context, c.kv_heads, c.head_dim))
    found = [{"einsum": minor, "dot_product_attention": major}]
    own, *others = served(model, SIZES[0])
    if own in served(model, context):  # one block that holds all of a sequence: the same code, and no table to follow
        found.append({ONE_BLOCK: paged(model, own, batch, context, context, context)})
    ways = [(own, size) for size in SIZES] + [(impl, SIZES[0]) for impl in others]
    return found + [{paged_name(impl, size): paged(model, impl, batch, context, size, longest)} for impl, size in ways]


def paged_name(impl: str, size: int) -> str:
    return f"paged ({impl}), blocks of {size}"


def paged(model: Model, impl: str, batch: int, context: int, size: int, longest: int) -> Contender:
    """Every sequence with blocks of its own, in random order; block 0 is nobody's."""
    c, width = model.config, -(-context // size)
    tables = np.zeros((batch, -(-longest // size)), np.int32)
    tables[:, :width] = np.random.default_rng(0).permutation(batch * width).reshape(batch, width) + 1
    rest = jnp.asarray(tables), jnp.full(batch, context, jnp.int32), jnp.arange(batch + 1, dtype=jnp.int32)
    return Contender(attention.attend(impl, c.attn_scale), (batch * width + 1, c.kv_heads, size, c.head_dim), rest)


class Program(NamedTuple):
    """Attention of some layers, one after the other, and keys and values for many such programs."""

    compiled: Callable[..., jax.Array]
    q: jax.Array
    sets: list[list[jax.Array]]  # of each, keys and values by turns
    scale: float  # seconds of all sets -> of all layers of the model

    def seconds(self) -> float:
        began = time.perf_counter()
        jax.block_until_ready([self.compiled(self.q, numbers) for numbers in self.sets])
        return self.scale * (time.perf_counter() - began)


def program(model: Model, batch: int, contender: Contender) -> Program:
    """Layers follow each other as in a model, each with keys and values of its own, so many that no cache of the
    processor holds them all: between two layers of a real step the weights pass through it."""
    c, (attend, shape, rest) = model.config, contender
    layer_bytes = 2 * math.prod(shape) * jnp.dtype(model.dtype).itemsize
    layers = min(TOGETHER, c.layers, -(-BEYOND_L2 // layer_bytes))
    count = -(-BEYOND_L2 // (layers * layer_bytes))
    sets = [[jnp.full(shape, 0.01 * i, model.dtype) for i in range(2 * layers)] for _ in range(count)]
    q = jnp.full((batch, c.heads, c.head_dim), 0.1, model.dtype)

    def chained(q: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
        for k, v in zip(numbers[::2], numbers[1::2], strict=True):
            q = attend(q, k, v, *rest)
        return q

    made = Program(jax.jit(chained).lower(q, sets[0]).compile(), q, sets, c.layers / (count * layers))
    jax.block_until_ready(made.compiled(q, sets[0]))
    return made


def attention_times(model: Model, cell: Cell, grid: Grid) -> dict[str, list[float]]:
    """Seconds that the attention of all layers of a decode step takes."""
    programs = {}
    for together in contenders(model, *cell, max(grid.contexts)):
        made = [program(model, cell[0], contender) for contender in together.values()]
        name = next(iter(together)) if len(together) == 1 else BEST
        programs[name] = made[0] if len(made) == 1 else min(made, key=Program.seconds)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(grid.repeats):
        for name in turned(list(programs), repeat):
            times[name].append(programs[name].seconds())
    return times


def turned(names: list[str], repeat: int) -> list[str]:
    """Another one begins in every repeat, so that none always follows the same one."""
    at = repeat % len(names)
    return names[at:] + names[:at]


def slower(times: Times, cells: Sequence[Cell], name: str, than: str) -> list[float]:
    """By repeat, how many times as long `name` takes as `than`: the geometric mean over cells."""
    pairs = [[math.log(a / b) for a, b in zip(times[at][name], times[at][than], strict=True)] for at in cells]
    return [math.exp(statistics.fmean(column)) for column in zip(*pairs, strict=True)]


# --- whole steps ------------------------------------------------------------------------------------------------------


def planned(batch: int, prompt: int, block_size: int, *, prefilled: bool) -> Plan:
    """The plan that computes `batch` prompts, or the one after it, which decodes."""
    blocks = batch * -(-(prompt + 2) // block_size)
    state = scheduler.init(SchedulerConfig(block_size, blocks, max(batch * prompt, batch), batch, prompt + 2))
    for name in names(batch):
        state = scheduler.submit(state, Request(name, prompt, 2))
    state, plan = scheduler.schedule(state, FCFS)
    if prefilled:
        state, _ = scheduler.commit(state, plan, [1] * batch)
        _, plan = scheduler.schedule(state, FCFS)
    return plan


def names(batch: int) -> list[str]:
    return [f"r{i}" for i in range(batch)]


def sources(batch: int, length: int) -> dict[str, Source]:
    """Requests that know `length` tokens each."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    return {name: Source(params, 0, length, np.ones(length + 1, np.int32), length) for name in names(batch)}


def step_times(model: Model, grid: Grid, device: Device) -> tuple[Times, list[float]]:
    """Seconds of the engine's own steps by cell, and the shares of a decode step that packing its batch would take.

    The shares are of the largest cell, one a repeat. `pack` makes block tables and everything else a step is told.
    """
    tokens = {batch for batch in grid.batches} | {b * c for b, c in grid.cells if grid.computes((b, c))}
    longest, seqs, size = max(grid.contexts), max(grid.batches), SIZES[0]
    config = resolve(
        EngineConfig(
            block_size=size,
            max_num_batched_tokens=max(tokens),
            max_num_seqs=seqs,
            max_model_len=longest + 2,
            num_blocks=seqs * -(-(longest + 2) // size),
            token_buckets=tuple(sorted(tokens)),
        ),
        model,
    )
    fixed, attend = shapes(config, model), attention.attend(config.attention_impl, model.config.attn_scale)
    step = make_step(model, attend, config.seed, device_tile())
    blanks = {t: jax.device_put(blank_sampling(fixed, t)) for t in fixed.tokens}
    pages = cache.init(blocks=config.num_blocks, **block_shape(size, model, config.kv_cache_dtype))

    def packed(cell: Cell, *, cached: bool) -> tuple[Callable[[], Any], Any]:
        batch, context = cell
        plan = planned(batch, context - cached, size, prefilled=cached)
        make = partial(pack, plan, sources(batch, context), fixed, blanks)
        return make, make()

    ways = [(cell, CACHED, *packed(cell, cached=True)) for cell in grid.cells]
    ways += [(cell, AGAIN, *packed(cell, cached=False)) for cell in grid.cells if grid.computes(cell)]
    times: dict[Cell, dict[str, list[float]]] = {cell: {} for cell in grid.cells}
    shares = []
    for repeat in range(-1, grid.repeats):  # the first time compiles, and is not kept
        device.measure()
        for cell, name, make, batch in ways if repeat < grid.few else ways[: len(grid.cells)]:
            began = time.perf_counter()
            pages, output = step(model.leaves, pages, batch)
            jax.block_until_ready(output)
            seconds = time.perf_counter() - began
            if repeat >= 0:
                times[cell].setdefault(name, []).append(seconds)
            if repeat >= 0 and cell == grid.cells[-1] and name == CACHED:
                began = time.perf_counter()
                make()
                shares.append(100 * (time.perf_counter() - began) / seconds)
    return times, shares


# --- what it amounts to -----------------------------------------------------------------------------------------------


def lecture() -> list[Claim]:
    """gpt2-xl on an A100, by arithmetic: what a step asks for, over what the chip can do for every byte it reads."""
    shape, chip = SHAPES["gpt2-xl"], CHIPS["a100-80g"]
    ridge, whole = chip.rate / chip.bandwidth, shape.longest
    position = exactly(shape.token_bytes / 1e3)
    claims = [Claim(LECTURE, "keys and values of a position, 16 bit", 306.0, position, 1.01, "kB")]
    kinds = [("no cache", 1, again, (1.0, 1e3)), ("cache", 1, decode, (0.0, 1.0)), ("cache", 64, decode, (0.0, 1.0))]
    for name, batch, work, published in kinds:
        share = exactly(demand(shape, work(batch, whole)).intensity / ridge)
        bound = "compute-bound" if published[0] else "memory-bound"
        what = f"{name}, batch of {batch}, {whole:,} tokens: {bound}, operations a byte over an A100's {ridge:.0f}"
        claims.append(Claim(LECTURE, what, published, share, 1.0, "x"))
    return claims


def crossing(shape: Shape, chip: Chip) -> int:
    """The context from which on a step without a cache, of one sequence, is bound by arithmetic."""
    ridge = chip.rate / chip.bandwidth
    return next(n for n in range(1, shape.longest + 1) if demand(shape, again(1, n)).intensity > ridge)


def timed(seconds: Sequence[float]) -> str:
    """Milliseconds: the median, and from the shortest to the longest."""
    middle, low, high = (1e3 * f(seconds) for f in (statistics.median, min, max))
    return f"{told(middle)} ({told(low, 2)} to {told(high, 2)})"


def middles(times: Times, batch: int, name: str) -> list[tuple[float, float]]:
    """(context, milliseconds) of one batch size, as far as it was measured."""
    return [(c, 1e3 * statistics.median(by[name])) for (b, c), by in times.items() if b == batch and name in by]


def run(folder: Path, quick: bool) -> Findings:
    monitor.keep_compilations()
    grid = QUICK if quick else FULL
    model = load_model(DEFAULT_MODEL, progress=False).model
    number = jnp.dtype(model.dtype).itemsize
    shape = shape_of(open_checkpoint(DEFAULT_MODEL).config, number, number)
    device, alone = Device(model), {}
    for cell in grid.cells:
        alone[cell] = attention_times(model, cell, grid)
        device.measure()
    then = device.chip()
    steps, packing = step_times(model, grid, device)
    chip = device.chip()
    roof = Roofline(shape, chip)

    kernel = paged_name(served(model, SIZES[0])[0], SIZES[0])
    cells = [cell for cell in FIG_18A if cell in alone]
    kernels = kernel_claims(alone, cells, kernel, shape, then)
    claims = [*kernels, packing_claim(packing, steps, grid), *lecture()]
    figures = {
        "attention.svg": attention_figure(alone, grid, shape, then),
        "steps.svg": steps_figure(steps, grid, roof),
        "roofline.svg": roofline_figure(steps, shape, chip),
    }
    columns = list(next(iter(alone.values())))
    head = ("batch", "context", *(f"{name}, ms" for name in columns))
    tables = [markdown(head, [(*cell, *map(timed, by.values())) for cell, by in alone.items()])]
    rows = [
        (*cell, timed(by[AGAIN]) if AGAIN in by else "", timed(by[CACHED]), 1e3 * roof(decode(*cell)))
        for cell, by in steps.items()
    ]
    head = ("batch", "context", "whole step, no cache, ms", "with the paged cache, ms", "its roofline, ms")
    tables.append(markdown(head, rows))
    return Findings(claims, answers(steps, grid, shape, chip, kernels), figures, tables)


def kernel_claims(alone: Times, cells: Sequence[Cell], kernel: str, shape: Shape, chip: Chip) -> list[Claim]:
    def reached(name: str) -> float:
        """Per cent of the bandwidth of reading weights, the mean over cells."""
        kv = [shape.token_bytes * b * c / statistics.median(alone[b, c][name]) for b, c in cells]
        return 100 * statistics.fmean(kv) / chip.bandwidth

    whys = {
        BEST: "the published pair are kernels of a GPU, each written for it, and ours are what JAX has on this device: "
        "this contiguous one reads at {:.0f} % of the bandwidth, the paged one at {:.0f} %",
        ONE_BLOCK: "the published pair are two kernels of a GPU, and this is one: it reads at {:.0f} % of the "
        "bandwidth where a block holds all of a sequence, and at {:.0f} % where a table has to be followed",
    }
    claims = []
    for name, why in whys.items():
        if all(name in alone[cell] for cell in cells):
            what = f"{kernel}, over {name}: batches {spell(c[0] for c in cells)}, contexts {spell(c[1] for c in cells)}"
            ours = interval(slower(alone, cells, kernel, name))
            claims.append(Claim(PAPER, what, (1.20, 1.26), ours, 1.1, "x", why.format(reached(name), reached(kernel))))
    return claims


def spell(numbers: Any) -> str:
    return ", ".join(map(str, sorted(set(numbers))))


def packing_claim(shares: Sequence[float], steps: Times, grid: Grid) -> Claim:
    batch, context = grid.cells[-1]
    seconds = statistics.median(steps[grid.cells[-1]][CACHED])
    what = f"block tables, with all else a step is told, of a decode step: batch of {batch}, context {context:,}"
    why = (
        f"the published share is of a step on an A100, and this one takes {1e3 * seconds:.0f} ms; a row of a table is "
        "made when it grows, not in each step"
    )
    return Claim("vAttention, block tables", what, (10.0, 30.0), interval(shares), 1.1, "%", why)


def answers(steps: Times, grid: Grid, shape: Shape, chip: Chip, kernels: Sequence[Claim]) -> list[str]:
    (batch, context) = last = [cell for cell in grid.cells if cell[0] == grid.batches[0] and grid.computes(cell)][-1]
    without, cached = (statistics.median(steps[last][name]) for name in (AGAIN, CACHED))
    ridge = chip.rate / chip.bandwidth
    asked = [demand(shape, work(*last)) for work in (again, decode)]
    rate, bandwidth = asked[0].operations / without / chip.rate, asked[1].bytes / cached / chip.bandwidth
    xl, a100 = SHAPES["gpt2-xl"], CHIPS["a100-80g"]
    ratios = [f"{claim.ours.middle:.2f} times {claim.what.split('over ')[1].split(':')[0]}" for claim in kernels]

    def binds(one: Demand) -> str:
        return "arithmetic" if one.intensity > ridge else "memory"

    return [
        f"A token that sees {context:,} takes {1e3 * without:,.0f} ms without a cache and {1e3 * cached:,.0f} ms with "
        f"one, batch of {batch}.",
        f"Without it a step asks for {asked[0].intensity:,.0f} operations a byte, which is bound by {binds(asked[0])}, "
        f"with it for {asked[1].intensity:.2g}, which is bound by {binds(asked[1])}: this device can do {ridge:.0f} "
        f"({chip.bandwidth / 1e9:,.1f} GB/s, {chip.rate / 1e9:,.0f} Gop/s). The one reaches {100 * rate:.0f} % of the "
        f"rate of plain products, the other reads at {100 * bandwidth:.0f} % of the bandwidth of reading weights.",
        f"Attention alone over blocks of {SIZES[0]} takes {' and '.join(ratios)}.",
        f"gpt2-xl on an A100 is bound by arithmetic without a cache from {crossing(xl, a100)} tokens on; shorter, even "
        "that waits for the weights.",
    ]


def attention_figure(alone: Times, grid: Grid, shape: Shape, chip: Chip) -> str:
    roof, panels = "the bandwidth", {}
    for batch in grid.batches:
        lines = {name: middles(alone, batch, name) for name in next(iter(alone.values()))}
        lines[roof] = [(c, 1e3 * shape.token_bytes * batch * c / chip.bandwidth) for c in grid.contexts]
        panels[f"attention of all layers, batch of {batch}"] = lines
    return draw.curves(panels, "tokens of context", "ms", log_x=2, log_y=10, dashed=(roof,))


def steps_figure(steps: Times, grid: Grid, roof: Roofline) -> str:
    dashed, panels = (f"{AGAIN}, roofline", f"{CACHED}, roofline"), {}
    for batch in grid.batches:
        lines = {name: middles(steps, batch, name) for name in (AGAIN, CACHED)}
        for name, work in zip(dashed, (again, decode), strict=True):
            lines[name] = [(c, 1e3 * roof(work(batch, c))) for c in grid.contexts]
        panels[f"whole step, batch of {batch}"] = {name: line for name, line in lines.items() if line}
    return draw.curves(panels, "tokens of context", "ms", log_x=2, log_y=10, dashed=dashed)


def roofline_figure(steps: Times, shape: Shape, chip: Chip) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for (batch, context), by in steps.items():
        for name, seconds in by.items():
            asked = demand(shape, (again if name == AGAIN else decode)(batch, context))
            line = AGAIN if name == AGAIN else f"{CACHED}, batch of {batch}"
            lines.setdefault(line, []).append((asked.intensity, asked.operations / statistics.median(seconds) / 1e9))
    lines = {name: sorted(points) for name, points in lines.items()}
    every = [x for points in lines.values() for x, _ in points]
    at = [min(every), chip.rate / chip.bandwidth, max(*every, chip.rate / chip.bandwidth)]
    lines["roofline"] = [(x, min(x * chip.bandwidth, chip.rate) / 1e9) for x in at]
    title = {"whole steps under the roofline": lines}
    return draw.curves(title, "operations a byte", "Gop/s", log_x=10, log_y=10, dashed=("roofline",))
