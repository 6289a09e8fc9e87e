"""How a decode step grows with sequences, context, layers and vocabulary: on paper, and on the device at hand.

    python -m experiments.scale [--json out.json]           # prints the section that experiments/results/README.md has
    python -m experiments.scale --show out.json             # the same from figures that were kept
    python -m experiments.scale --layers 1 2 4 --steps 5    # other values, fewer steps
    python -m experiments.scale --quick                     # a tiny model, only to see that all of it runs

One factor at a time varies around a base shape, a Llama of random weights in float32. The paper knows nothing but the
model's shape and two rates of the device, of what `experiments.floors` runs: reading the base model's weights, and
multiplying with them. A step takes, on paper, the longer of reading the weights and multiplying with them, then the
longer of reading keys and values and multiplying with those. Rates are taken beside every point, and the paper has what
the device did in its best tenth.

Measured is the loop of the engine, schedule -> pack -> step -> commit, with the engine's own functions and compiled
step. Only the prompts are left out: they are scheduled and committed and never computed, since attention takes the same
time whatever the cache holds. `step` is the device's part, by the clock. `host` is all else, in processor time: with
the hashes of filled blocks, without log-probabilities and beams, which nobody asks for here. The sequences are not
equally long (the mean is the context named), so that in each step a few of them begin a block. A point that lost more
than 5 % of the processors to others is measured again, twice at most.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench_peers import STOLEN
from experiments.bench_random_llama import random_model
from experiments.environment import environment, load_average, processor_time, stolen_share
from experiments.floors import read_weights, weight_products
from pagedjax import SamplingParams, attention, cache, memory, readout, scheduler
from pagedjax.batch import MAX_LISTED, Batch, SamplingBatch, Shapes, Source, blank_sampling, pack
from pagedjax.intake import intake
from pagedjax.models import Model, llama
from pagedjax.policies import FCFS
from pagedjax.sampling import device_tile
from pagedjax.scheduler import SchedulerConfig, SchedulerState
from pagedjax.step import make_step
from pagedjax.types import EMPTY_PLAN, Event, Sampled

DTYPE, NUMBER = "float32", 4  # and its bytes; token ids and lengths have as many
BLOCK = 16
ROOM = 32  # tokens that a sequence can have beyond the context it is measured at
WARM = 2  # steps before the timed ones
MOST_STEPS = 40  # more would not fit into ROOM
ATTEMPTS = 3  # at a point, when others take the processors
PROBE_TOKENS = 512  # columns of the products that give the rate of multiplying
UNITS = {  # of a factor's growth
    "sequences": (1, "per sequence"),
    "context": (1, "per token"),
    "layers": (1, "per layer"),
    "vocabulary": (1000, "per 1,000 tokens"),
}

Compute = Callable[[Batch], np.ndarray]


class Shape(NamedTuple):
    """A decode step: so many sequences, each with one query token, and the mean of their lengths with it."""

    sequences: int
    context: int
    layers: int
    vocabulary: int


class Setup(NamedTuple):
    """What is measured: the rest of the model, in the words of a Hugging Face config.json, and each factor's values."""

    body: dict[str, Any]
    base: Shape
    values: dict[str, tuple[int, ...]]


# The base model's 80 MiB are more than a processor's caches hold, as the weights of a real model are.
FULL = Setup(
    {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"tie_word_embeddings": True},
    Shape(sequences=16, context=256, layers=4, vocabulary=16384),
    {
        "sequences": (1, 4, 16, 64, 256, 1024),
        "context": (64, 128, 256, 512, 1024, 2048, 4096),
        "layers": (1, 2, 4, 8, 16, 32),
        "vocabulary": (1024, 4096, 16384, 65536, 131072),
    },
)
QUICK = Setup(
    {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"tie_word_embeddings": True},
    Shape(sequences=2, context=48, layers=1, vocabulary=256),
    {"sequences": (2, 3), "context": (48, 96), "layers": (1, 2), "vocabulary": (256, 512)},
)


# --- on paper ---------------------------------------------------------------------------------------------------------


class Paper(NamedTuple):
    """Bytes and floating point operations of one decode step, from the model's shape alone."""

    weights: int  # held
    weights_read: int
    kv_read: int
    products: int  # operations with weights
    attention: int  # operations with keys and values
    cache: int  # held, with the trash block
    inputs: int  # the arrays of a `Batch`
    activations: int  # the most that has to exist at a time


def paper(c: Any, sequences: int, context: int) -> Paper:
    """Of a Llama's configuration, as `llama.from_hf` makes it."""
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = c.hidden * (queries + 2 * keys) + queries * c.hidden + 3 * c.hidden * c.intermediate
    head = c.vocab_size * c.hidden
    embedding = 0 if c.tied else head  # of one that is not the head, a row a sequence is read
    norms = (2 * c.layers + 1) * c.hidden
    biases = c.layers * (c.qkv_bias * (queries + 2 * keys) + c.out_bias * c.hidden)
    angles = c.head_dim * c.max_len  # the rotary table, of which a column a sequence is read
    read = c.layers * layer + head + norms + biases
    longest = context + ROOM
    blocks = 1 + sequences * -(-longest // BLOCK)
    return Paper(
        weights=NUMBER * (read + embedding + angles),
        weights_read=NUMBER * (read + (embedding and sequences * c.hidden)),
        kv_read=NUMBER * 2 * c.layers * keys * context * sequences,
        products=2 * sequences * (c.layers * layer + head),
        attention=4 * c.layers * queries * context * sequences,
        cache=NUMBER * 2 * c.layers * keys * blocks * BLOCK,
        inputs=batch_bytes(sequences, longest),
        # in a layer: its input, what gate and up make, and their product; after the last one: the logits
        activations=NUMBER * sequences * max(c.hidden + 3 * c.intermediate, c.vocab_size),
    )


def batch_bytes(sequences: int, longest: int) -> int:
    """Of a step with one token a sequence: see `batch.Batch` and `batch.SamplingBatch`."""
    numbers = 7 + 11  # of each row: tokens to targets, of which cu_q_lens has one more; temperature to prompt_len
    row = numbers + -(-longest // BLOCK) + longest + 2 * MAX_LISTED  # block table; history, listed and bias
    return sequences * (NUMBER * row + 1) + NUMBER  # only_listed is a byte


class Rates(NamedTuple):
    """What the device can do."""

    read: float  # bytes a second
    multiply: float  # floating point operations a second


def roofline(p: Paper, rates: Rates) -> float:
    """Seconds of a step that loses nothing: products with weights, then attention (Williams et al. 2009)."""
    weights = max(p.weights_read / rates.read, p.products / rates.multiply)
    return weights + max(p.kv_read / rates.read, p.attention / rates.multiply)


# --- measured ---------------------------------------------------------------------------------------------------------


class Host(NamedTuple):
    """What the engine's loop carries beside the cache: the scheduler's state, and the tokens of the requests."""

    state: SchedulerState
    sources: dict[str, Source]


class Seconds(NamedTuple):
    """Of one step."""

    host: float  # of the processor, in the thread that does all of it: others' turns on a busy machine are not in it
    device: float  # of the clock


def shapes_of(shape: Shape) -> Shapes:
    longest = shape.context + ROOM
    return Shapes((shape.sequences,), shape.sequences, BLOCK, -(-longest // BLOCK), longest, shape.vocabulary)


def prompted(shapes: Shapes, context: int, lead: int) -> Host:
    """As after the step that computes all prompts. Decode step number `lead` (from 0) has the context, on average."""
    rows, longest = shapes.max_seqs, shapes.max_model_len
    config = SchedulerConfig(BLOCK, rows * shapes.table_width, rows * longest, rows, longest)
    params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True)
    rng, state, sources = np.random.default_rng(0), scheduler.init(config), {}
    for i in range(rows):
        apart = (i + BLOCK // 2) % BLOCK - BLOCK // 2  # -8 to 7, and 0 for the first
        prompt = rng.integers(0, shapes.vocab_size, context - lead - 1 + apart).tolist()
        limits = {"vocab_size": shapes.vocab_size, "caching": True, "priority": 0, "user": ""}
        taken = intake(state, (f"r{i}",), prompt, params, eos_token_ids=(), **limits)
        state = scheduler.submit(state, taken.request)
        sources |= taken.sources
    state, plan = scheduler.schedule(state, FCFS)
    state, events = scheduler.commit(state, plan, [0] * rows)
    take_in(sources, events)
    return Host(state, sources)


def advance(
    host: Host, shapes: Shapes, blanks: Mapping[int, SamplingBatch], compute: Compute
) -> tuple[Host, Seconds, Batch]:
    """One step of the engine's loop, and what the device was given."""
    began = time.thread_time()
    state, plan = scheduler.schedule(host.state, FCFS)
    batch = pack(plan, host.sources, shapes, blanks)
    packed, sent = time.thread_time(), time.perf_counter()
    tokens = compute(batch)
    arrived, resumed = time.perf_counter(), time.thread_time()
    hashes = readout.filled(plan, host.sources, BLOCK)
    state, events = scheduler.commit(state, plan, tokens[: len(plan.seqs)].tolist(), hashes)
    take_in(host.sources, events)
    ended = time.thread_time()
    return Host(state, host.sources), Seconds(packed - began + ended - resumed, arrived - sent), batch


def take_in(sources: Mapping[str, Source], events: Sequence[Event]) -> None:
    """Append new tokens to their requests, as the engine does."""
    for event in events:
        if isinstance(event, Sampled):
            for request_id, token in zip(event.request_ids, event.token_ids, strict=True):
                source = sources[request_id]
                source.tokens[source.length] = token
                source.length += 1


class Device:
    """The compiled step of a shape, its weights and its cache, which every step takes and gives back."""

    def __init__(self, shape: Shape, body: Mapping[str, Any]) -> None:
        self.model = model_of(shape, body)
        c, self.shapes = self.model.config, shapes_of(shape)
        heads = {"head_dim": c.head_dim, "kv_heads": c.kv_heads}
        sizes = {"block_size": BLOCK, "heads": c.heads, **heads}
        self.impl = attention.choose(None, jax.devices()[0], dtype=DTYPE, query_dtype=DTYPE, **sizes)
        size = {"layers": c.layers, "blocks": shape.sequences * self.shapes.table_width, "block_size": BLOCK}
        self.blanks = {shape.sequences: jax.device_put(blank_sampling(self.shapes, shape.sequences))}
        batch = pack(EMPTY_PLAN, {}, self.shapes, self.blanks)
        step = make_step(self.model, attention.attend(self.impl, c.head_dim**-0.5), 0, device_tile())
        pages = jax.eval_shape(lambda: cache.init(**size, **heads, dtype=DTYPE))
        self.program = step.lower(self.model.leaves, pages, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]  (a jit)
        self.pages = cache.init(**size, **heads, dtype=DTYPE)

    def compute(self, batch: Batch) -> np.ndarray:
        self.pages, output = self.program(self.model.leaves, self.pages, batch)
        return np.asarray(output.sampled.tokens)


def model_of(shape: Shape, body: Mapping[str, Any]) -> Model:
    return random_model({**body, "num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary}, DTYPE)


def timed_steps(device: Device, context: int, steps: int) -> list[Seconds]:
    host = prompted(device.shapes, context, WARM + steps // 2)
    times = []
    for _ in range(WARM + steps):
        host, seconds, _ = advance(host, device.shapes, device.blanks, device.compute)
        times.append(seconds)
    return times[WARM:]


def warm_up(shape: Shape) -> None:
    """The host's code alone: Python itself is faster once it has run a function a few times."""
    shapes = shapes_of(shape)
    blanks = {shape.sequences: blank_sampling(shapes, shape.sequences)}
    host = prompted(shapes, shape.context, WARM + MOST_STEPS // 2)
    for _ in range(MOST_STEPS):
        host, *_ = advance(host, shapes, blanks, lambda batch: np.zeros_like(batch.tokens))


def measure(shape: Shape, body: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The steps of a point: all their times, and the compiler's own count of memory."""
    device = Device(shape, body)
    attempts: list[tuple[float, list[Seconds]]] = []
    while not attempts or (attempts[-1][0] > STOLEN and len(attempts) < ATTEMPTS):
        processors = processor_time()
        times = timed_steps(device, shape.context, steps)
        attempts.append((stolen_share(processors) or 0.0, times))
    stolen, times = min(attempts, key=lambda attempt: attempt[0])
    stats = device.program.memory_analysis()
    return {
        **shape._asdict(),
        "attention_impl": device.impl,
        "stolen": stolen,
        "host_us": [round(1e6 * t.host, 1) for t in times],
        "step_ms": [round(1e3 * t.device, 4) for t in times],
        "paper": paper(device.model.config, shape.sequences, shape.context)._asdict(),
        "compiled": {
            "arguments": stats.argument_size_in_bytes if stats else None,
            "activations": memory.activations_peak(device.program),
        },
    }


class Probe(NamedTuple):
    """Something the device does, and how many bytes or operations that is."""

    run: Callable[[], Any]
    amount: int


def probes(model: Model) -> dict[str, Probe]:
    """By the fields of `Rates`."""
    matrices = [w for w in jax.tree.leaves(model.params) if w.ndim == 2]
    operations = sum(2 * PROBE_TOKENS * w.size for w in matrices)
    return {
        "read": Probe(read_weights(model), sum(w.nbytes for w in matrices)),
        "multiply": Probe(weight_products(model, PROBE_TOKENS), operations),
    }


def probed(probe: Probe, times: int = 3) -> list[float]:
    """Amounts a second."""
    rates = []
    for _ in range(times):
        began = time.perf_counter()
        probe.run()
        rates.append(float(f"{probe.amount / (time.perf_counter() - began):.5g}"))
    return rates


def run(setup: Setup, steps: int) -> dict[str, Any]:
    """Every point once, the rates of the device beside each of them."""
    began, own, processors, load = time.perf_counter(), time.process_time(), processor_time(), load_average()
    model, found = model_of(setup.base, setup.body), {}
    named = probes(model)
    warm_up(setup.base)
    rates: dict[str, list[float]] = {name: [] for name in named}
    for shape in points(setup):
        found[shape] = measure(shape, setup.body, steps)
        for name, probe in named.items():
            rates[name] += probed(probe)
        print(f"  {shape}: {statistics.median(found[shape]['step_ms']):.2f} ms", file=sys.stderr, flush=True)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "where": environment(),
        "load_average": load,
        "stolen": stolen_share(processors),
        "elsewhere": elsewhere(processors, time.process_time() - own),
        "seconds": round(time.perf_counter() - began, 1),
        "body": setup.body,
        "base": setup.base._asdict(),
        "steps": steps,
        "rates": rates,
        "factors": {f: [found[setup.base._replace(**{f: v})] for v in vs] for f, vs in setup.values.items()},
    }


def elsewhere(since: tuple[int, int] | None, own: float) -> float | None:
    """Of the processor time that this machine used since then, the share beyond the `own` seconds of a process."""
    now = processor_time()
    if since is None or now is None:
        return None
    used = (now[0] - since[0]) / os.sysconf("SC_CLK_TCK")
    return round(max(0.0, 1 - own / used), 3) if used else 0.0


def points(setup: Setup) -> list[Shape]:
    """Each once: the base belongs to every factor."""
    return list(dict.fromkeys(setup.base._replace(**{f: v}) for f, vs in setup.values.items() for v in vs))


# --- checks -----------------------------------------------------------------------------------------------------------


def chosen(setup: Setup, values: Mapping[str, Sequence[int] | None], steps: int, free: int | None) -> Setup:
    """A setup with other values of some factors, ascending, and a rotary table as long as the longest context.

    Args:
        free: bytes that the device has left; None where it does not tell.

    Raises:
        ValueError: a value that cannot be measured, or that shows no growth; with the limit and a remedy.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"--steps is {steps}; a sequence has room for {MOST_STEPS}: choose 1 to {MOST_STEPS}")
    taken = dict(setup.values)
    taken.update({f: tuple(sorted(set(vs))) for f, vs in values.items() if vs is not None})
    for name, several in taken.items():
        least, most = min(several), max(several)
        if least < 1:
            raise ValueError(f"--{name} has {least}; each value must be at least 1: leave it out")
        if least == most:
            raise ValueError(f"--{name} has {least} alone; growth takes at least 2 values: add one that differs")
    least = WARM + steps // 2 + BLOCK // 2 + 2
    if taken["context"][0] < least:
        raise ValueError(
            f"--context has {taken['context'][0]}; with {steps} steps it must be at least {least}: raise it, or lower "
            "--steps"
        )
    longest = max(taken["context"][-1], setup.base.context) + ROOM
    setup = Setup({**setup.body, "max_position_embeddings": longest}, setup.base, taken)
    need, largest = max((held(shape, setup.body), shape) for shape in points(setup))
    if free is not None and need > free:
        factor = next((f for f in Shape._fields if getattr(largest, f) != getattr(setup.base, f)), "context")
        raise ValueError(
            f"--{factor} has {getattr(largest, factor)}, which takes {memory.size(need)}, and {memory.size(free)} are "
            f"free; lower it, or free some memory"
        )
    return setup


def held(shape: Shape, body: Mapping[str, Any]) -> int:
    """Bytes of a point, on paper."""
    c = llama.from_hf({**body, "num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary})
    p = paper(c, shape.sequences, shape.context)
    return p.weights + p.cache + p.inputs + p.activations


# --- for people -------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """y = start + slope * x."""

    start: float
    slope: float
    miss: float  # the largest, as a share of y


def line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line with the least squares of relative errors: the small values count as much as the large ones."""
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    columns = np.stack([1 / y, x / y], axis=1)
    start, slope = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0].tolist()
    return Line(start, slope, float(np.abs((start + slope * x) / y - 1).max()))


def report(figures: Mapping[str, Any]) -> str:
    """A section for experiments/results/README.md: a table and what it says, for each factor."""
    rates = Rates(*(float(np.percentile(figures["rates"][name], 90)) for name in Rates._fields))
    factors = {name: [medians(point, rates) for point in several] for name, several in figures["factors"].items()}
    parts = [heading(figures), conditions(figures, rates)]
    for name, several in factors.items():
        others = ", ".join(f"{other} {value:,}" for other, value in figures["base"].items() if other != name)
        parts += [f"**{name.capitalize()}** ({others}):", table(name, several), growth(name, several)]
    return "\n\n".join(parts) + "\n"


def medians(point: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """A point with one time of each kind: of the step and the host, and on paper."""
    on_paper = 1e3 * roofline(Paper(**point["paper"]), rates)
    return {**point, **{name: statistics.median(point[name]) for name in ("step_ms", "host_us")}, "paper_ms": on_paper}


COLUMNS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "products, GFLOP": lambda p: p["paper"]["products"] / 1e9,
    "attention, GFLOP": lambda p: p["paper"]["attention"] / 1e9,
    "weights, MiB": lambda p: p["paper"]["weights"] / memory.MIB,
    "keys and values read, MiB": lambda p: p["paper"]["kv_read"] / memory.MIB,
    "paper, ms": lambda p: p["paper_ms"],
    "step, ms": lambda p: p["step_ms"],
    "step / paper": lambda p: p["step_ms"] / p["paper_ms"],
    "host, us": lambda p: p["host_us"],
    "cache, MiB": lambda p: p["paper"]["cache"] / memory.MIB,
    "activations, MiB": lambda p: p["paper"]["activations"] / memory.MIB,
    "as compiled, MiB": lambda p: p["compiled"]["activations"] / memory.MIB,
}


def table(factor: str, several: Sequence[Mapping[str, Any]]) -> str:
    rows = [[f"{p[factor]:,}", *(number(value(p)) for value in COLUMNS.values())] for p in several]
    lines = ["| " + " | ".join(cells) + " |" for cells in ([factor, *COLUMNS], *rows)]
    return "\n".join([lines[0], "|" + "---:|" * (1 + len(COLUMNS)), *lines[1:]])


def growth(factor: str, several: Sequence[Mapping[str, Any]]) -> str:
    """What a table says: each quantity as a line over the factor, and how far the line is from the points."""
    size, unit = UNITS[factor]
    xs = [p[factor] / size for p in several]

    def along(column: str, name: str, quantity: str) -> str:
        ys = [COLUMNS[column](p) for p in several]
        if max(ys) < 1.001 * min(ys):
            return f"{name} {number(ys[0])} {quantity} everywhere"
        start, slope, miss = line(xs, ys)
        sign, off = "-" if slope < 0 else "+", f" ({miss:.0%} off at most)" if miss >= 0.005 else ""
        return f"{name} {number(start)} {quantity} {sign} {number(abs(slope))} {unit}{off}"

    def between(values: Sequence[float], unit: str = "") -> str:
        return " to ".join(dict.fromkeys([number(min(values)), number(max(values))])) + unit

    ratios = [COLUMNS["step / paper"](p) for p in several]
    hosts = [COLUMNS["host, us"](p) for p in several]
    planned = [p["compiled"]["activations"] / p["paper"]["activations"] for p in several]
    times = [along("step, ms", "Step", "ms"), along("paper, ms", "on paper", "ms"), f"step / paper {between(ratios)}"]
    sizes = [along("weights, MiB", "Weights", "MiB"), along("cache, MiB", "cache", "MiB")]
    sizes += [along("as compiled, MiB", "activations as compiled", "MiB"), f"{between(planned)} times those on paper"]
    host = [along("host, us", "Host", "us"), between(hosts, " us in all")]
    return wrapped(*("; ".join(parts) + "." for parts in (times, host, sizes)))


def heading(figures: Mapping[str, Any]) -> str:
    where = figures["where"]
    commit = (where["commit"] or "unknown")[:7] + (" with changes" if where["dirty"] else "")
    return f"## cpu/scale: `{figures['command']}`, {figures['date']}, commit {commit}"


def conditions(figures: Mapping[str, Any], rates: Rates) -> str:
    """Where and how it was measured, and how quiet it was."""
    where, body = figures["where"], figures["body"]
    every = [p for several in figures["factors"].values() for p in several]
    spread = [spread_of(p["step_ms"]) for p in every]
    wrong = max(abs(difference(p)) for p in every)
    return wrapped(
        f"{where['cpu']['usable_cores']} cores ({where['cpu']['model']}), {DTYPE}, JAX {where['versions']['jax']},",
        f"Python {where['python']}, attention {every[0]['attention_impl']!r}; random weights, hidden",
        f"{body['hidden_size']}, intermediate {body['intermediate_size']}, {body['num_attention_heads']} heads of",
        f"queries and {body['num_key_value_heads']} of keys, tied embeddings; medians of {figures['steps']} steps.",
        f"In its best tenth the device read {rates.read / 1e9:.1f} GB/s ({spans(figures['rates']['read'])} in all) and",
        f"multiplied {rates.multiply / 1e9:.0f} GFLOP/s ({spans(figures['rates']['multiply'])}). The middle half of a",
        f"point's steps spans {statistics.median(spread):.0%} of their median, {max(spread):.0%} at the worst point;",
        f"other processes took {figures['elsewhere'] or 0:.0%} of the processor time, and the hypervisor",
        f"{figures['stolen'] or 0:.1%}, {max(p['stolen'] for p in every):.1%} at the worst point.",
        "The compiler's count of the step's arguments is the paper's weights, cache and inputs,",
        "to the byte." if wrong == 0 else f"but for {wrong:,} bytes at most.",
    )


def wrapped(*parts: str) -> str:
    return textwrap.fill(" ".join(parts), 120, break_on_hyphens=False)


def number(value: float) -> str:
    """Three digits, and all of a larger integer part."""
    if abs(value) < 5e-6:
        return "0"
    value = float(f"{value:.9g}")  # what two versions of numpy say of one line differs in its last bits
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 5)}f}"


def spread_of(times: Sequence[float]) -> float:
    """The middle half of them, as a share of the median."""
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    return (high - low) / middle


def spans(rates: Sequence[float]) -> str:
    return f"{min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f}"


def difference(point: Mapping[str, Any]) -> int:
    """Bytes of arguments that the compiler counts and the paper does not; 0 where a compiler does not tell."""
    counted, p = point["compiled"]["arguments"], Paper(**point["paper"])
    return 0 if counted is None else counted - p.weights - p.cache - p.inputs


def kept(path: Path) -> dict[str, Any]:
    """Figures that `--json` wrote.

    Raises:
        ValueError: the file cannot be read, or is something else.
    """
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--show is {path}, which cannot be read: {error}; give a file that --json wrote") from None
    if not isinstance(figures, dict) or set(figures.get("factors", ())) != set(Shape._fields):
        raise ValueError(f"--show is {path}, which has no factors {Shape._fields}; give a file that --json wrote")
    return figures


def command(args: argparse.Namespace) -> str:
    """What to type to have these figures again."""
    words = ["python -m experiments.scale", *["--quick"] * args.quick]
    for name in (*Shape._fields, "steps"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return " ".join(words)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for factor in Shape._fields:
        parser.add_argument(f"--{factor}", type=int, nargs="+", help="values to measure", metavar="N")
    parser.add_argument("--steps", type=int, help="decode steps timed at each point (15; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few points")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--show", type=Path, help="measure nothing; print what this file, written by --json, says")
    args = parser.parse_args(argv)
    try:
        if args.show:
            figures = kept(args.show)
        else:
            if args.json and not args.json.absolute().parent.is_dir():
                raise ValueError(f"--json is {args.json}, in a folder that does not exist; make it first")
            steps = (3 if args.quick else 15) if args.steps is None else args.steps
            values = {factor: getattr(args, factor) for factor in Shape._fields}
            device = memory.read(jax.devices()[0])
            free = device.free if device.total else None
            setup = chosen(QUICK if args.quick else FULL, values, steps, free)
            figures = {"command": command(args), **run(setup, steps)}
    except ValueError as error:
        parser.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(report(figures), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
