"""How does a decode step grow with sequences, context, layers and vocabulary, calculated and
measured?

    python -m experiments.bench.scale [--json out.json]     # prints the section for results/README.md
    python -m experiments.bench.scale --show out.json       # the same section from kept figures
    python -m experiments.bench.scale --quick               # a tiny model, as a test of the program

One factor at a time varies around a base shape, a Llama of random weights in float32. The
calculation ("paper") uses the model's shape and two rates of the device, those of
`bench.lower_bounds`: reading the base model's weights, and multiplying with them. A step takes, on
paper, the longer of reading the weights and multiplying with them, plus the longer of reading keys
and values and multiplying with them. Rates are measured at every point; the calculation uses their
90th percentile.

The measurement is the engine's loop, schedule -> pack -> run -> commit, with the engine's functions
and compiled step. Prompts are scheduled and committed but not computed, because the content of the
cache does not change the time of attention. `step` is the device's part, by the clock. `host` is
all other work, in processor time. It includes the hashes of filled blocks. These requests use no
log-probabilities and no beams. The sequences have different lengths (the mean is the given
context), so in each step a few of them begin a block. A point that lost more than 5 % of the
processors to other machines is measured again, at most twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from immutables import Map

from experiments.bench.harness import bench_parser, timed
from experiments.bench.lower_bounds import Probe, probes
from experiments.bench.peers import STOLEN
from experiments.bench.random_llama import random_model
from experiments.bench.scale_calculated import (
    BLOCK,
    DTYPE,
    EXTRA_TOKENS,
    Shape,
    calculated_step,
    needed_bytes,
)
from experiments.bench.scale_report import report
from experiments.core.environment import environment, load_average, processor_time, stolen_share
from experiments.core.json_files import write_json
from pagedjax import SamplingParams
from pagedjax.device import attention, cache, memory
from pagedjax.device.batch import Batch, SamplingBatch, Shapes, blank_sampling, joined
from pagedjax.device.models import Model
from pagedjax.device.sampling import device_tile
from pagedjax.device.step import make_step
from pagedjax.engine.pack import pack
from pagedjax.engine.requests import (
    EngineRequest,
    RequestRules,
    Sequences,
    apply_events,
    hashes_of_filled,
    prepare,
)
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import EMPTY_PLAN

WARM_STEPS = 2  # before the timed ones
# The steps lie around the mean context, so a sequence grows beyond it by about half of them, which
# must be at most EXTRA_TOKENS
MAX_STEPS = 40
ATTEMPTS = 3  # at a point, if processor time is stolen
PROBE_TOKENS = 512  # rows of the products that measure the rate of multiplying

Compute = Callable[[Batch], np.ndarray]


class Setup(NamedTuple):
    """The measurement.

    body: the keys of the model's config.json that are no factors.
    base: the base shape.
    values: the values of each factor.
    """

    body: dict[str, Any]
    base: Shape
    values: dict[str, tuple[int, ...]]


# The base model's 80 MiB exceed a processor's caches, as the weights of a real model do.
FULL = Setup(
    {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    Shape(sequences=16, context=256, layers=4, vocabulary=16384),
    {
        "sequences": (1, 4, 16, 64, 256, 1024),
        "context": (64, 128, 256, 512, 1024, 2048, 4096),
        "layers": (1, 2, 4, 8, 16, 32),
        "vocabulary": (1024, 4096, 16384, 65536, 131072),
    },
)
QUICK = Setup(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    Shape(sequences=2, context=48, layers=1, vocabulary=256),
    {"sequences": (2, 3), "context": (48, 96), "layers": (1, 2), "vocabulary": (256, 512)},
)


# --- measured -------------------------------------------------------------------------------------


class Host(NamedTuple):
    """The host's state in the engine's loop: the scheduler's state, and the requests' tokens."""

    state: SchedulerState
    sequences: Sequences


class Seconds(NamedTuple):
    """The times of one step."""

    host: float  # processor time of the thread, without the time of other processes
    device: float  # by the clock


def shapes_of(shape: Shape) -> Shapes:
    longest = shape.context + EXTRA_TOKENS
    return Shapes(
        tokens=(shape.sequences,),
        max_seqs=shape.sequences,
        block_size=BLOCK,
        table_width=-(-longest // BLOCK),
        max_model_len=longest,
        vocab_size=shape.vocabulary,
    )


def state_after_prompts(shapes: Shapes, context: int, lead: int) -> Host:
    """The state after the step of all prompts.

    Prompts are so long that the mean context of the decode step number `lead` (the first is 0) is
    `context`.
    """
    rows = shapes.max_seqs
    longest = shapes.max_model_len
    config = SchedulerConfig(
        block_size=BLOCK,
        num_blocks=rows * shapes.table_width,
        max_num_batched_tokens=rows * longest,
        max_num_seqs=rows,
        max_model_len=longest,
    )
    params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True)
    rules = RequestRules(shapes.vocab_size, caching=True)
    rng = np.random.default_rng(0)
    state = scheduler.init(config)
    sequences = Map()
    for i in range(rows):
        offset = (i + BLOCK // 2) % BLOCK - BLOCK // 2  # -8 to 7, and 0 for the first
        prompt = rng.integers(0, shapes.vocab_size, context - lead - 1 + offset).tolist()
        prepared = prepare(state, EngineRequest((f"r{i}",), prompt, params), rules)
        state = scheduler.submit(state, prepared.request)
        sequences = sequences.update(prepared.sequences)
    scheduled, plan = scheduler.schedule(state, FCFS)
    state, events = scheduler.commit(scheduled, plan, [0] * rows)
    return Host(state, apply_events(sequences, events, scheduled.running))


def advance(
    host: Host, shapes: Shapes, blanks: Mapping[int, SamplingBatch], compute: Compute
) -> tuple[Host, Seconds, Batch]:
    """One step of the engine's loop: the new state, its times, and the batch."""
    start = time.thread_time()
    state, plan = scheduler.schedule(host.state, FCFS)
    batch = pack(plan, host.sequences, shapes, blanks)
    packed_at = time.thread_time()
    sent_at = time.perf_counter()
    tokens = compute(batch)
    arrived_at = time.perf_counter()
    resumed_at = time.thread_time()
    hashes = hashes_of_filled(plan, host.sequences, BLOCK)
    running = state.running
    state, events = scheduler.commit(state, plan, tokens[: len(plan.seqs)].tolist(), hashes)
    sequences = apply_events(host.sequences, events, running)
    end = time.thread_time()
    seconds = Seconds(packed_at - start + end - resumed_at, arrived_at - sent_at)
    return Host(state, sequences), seconds, batch


class Device:
    """The compiled step of a shape, with its weights and its cache."""

    def __init__(self, shape: Shape, body: Mapping[str, Any]) -> None:
        self.model = model_of(shape, body)
        self.shapes = shapes_of(shape)
        config = self.model.config
        kv_heads: dict[str, Any] = {"head_dim": config.head_dim, "kv_heads": config.kv_heads}
        self.impl = attention.choose(
            None,
            jax.devices()[0],
            dtype=DTYPE,
            query_dtype=DTYPE,
            block_size=BLOCK,
            heads=config.heads,
            **kv_heads,
        )
        make_cache = partial(
            cache.init,
            layers=config.layers,
            blocks=shape.sequences * self.shapes.table_width,
            block_size=BLOCK,
            dtype=DTYPE,
            **kv_heads,
        )
        self.blanks = {shape.sequences: jax.device_put(blank_sampling(shape.sequences))}
        batch = pack(EMPTY_PLAN, {}, self.shapes, self.blanks)
        attend = attention.attend(self.impl, config.head_dim**-0.5)
        step = make_step(self.model, attend, 0, device_tile())
        pages = jax.eval_shape(make_cache)
        lower = step.lower  # pyright: ignore[reportFunctionMemberAccess]  (a jit)
        self.program = lower(self.model.leaves, pages, joined(batch)).compile()
        self.pages = make_cache()

    def compute(self, batch: Batch) -> np.ndarray:
        """Run the step. Returns the sampled tokens."""
        self.pages, output = self.program(self.model.leaves, self.pages, joined(batch))
        return np.asarray(output.sampled.tokens)


def model_of(shape: Shape, body: Mapping[str, Any]) -> Model:
    return random_model(
        {**body, "num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary}, DTYPE
    )


def time_steps(device: Device, context: int, steps: int) -> list[Seconds]:
    """Make decode steps around a mean context. Returns the times of those after the warm-up."""
    host = state_after_prompts(device.shapes, context, WARM_STEPS + steps // 2)
    times = []
    for _ in range(WARM_STEPS + steps):
        host, seconds, _ = advance(host, device.shapes, device.blanks, device.compute)
        times.append(seconds)
    return times[WARM_STEPS:]


def warm_up(shape: Shape) -> None:
    """Run the host's code alone: Python is faster after a function has run a few times."""
    shapes = shapes_of(shape)
    blanks = {shape.sequences: blank_sampling(shape.sequences)}
    host = state_after_prompts(shapes, shape.context, WARM_STEPS + MAX_STEPS // 2)
    for _ in range(MAX_STEPS):
        host, *_ = advance(host, shapes, blanks, lambda batch: np.zeros_like(batch.tokens))


def measure(shape: Shape, body: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Measure a point. Returns all times of its steps, and the compiler's count of memory."""
    device = Device(shape, body)
    attempts: list[tuple[float, list[Seconds]]] = []
    for _ in range(ATTEMPTS):
        time_before = processor_time()
        times = time_steps(device, shape.context, steps)
        stolen = stolen_share(time_before) or 0.0
        attempts.append((stolen, times))
        if stolen <= STOLEN:
            break
    stolen, times = min(attempts, key=lambda attempt: attempt[0])
    stats = device.program.memory_analysis()
    return {
        **shape._asdict(),
        "attention_impl": device.impl,
        "stolen": stolen,
        "host_us": [round(1e6 * t.host, 1) for t in times],
        "step_ms": [round(1e3 * t.device, 4) for t in times],
        "paper": calculated_step(device.model.config, shape.sequences, shape.context)._asdict(),
        "compiled": {
            "arguments": stats.argument_size_in_bytes if stats else None,
            "activations": memory.activations_peak(device.program),
        },
    }


def run_probe(probe: Probe) -> list[float]:
    """Run a probe three times. Returns the amount per second of each run."""
    return [float(f"{probe.amount / timed(probe.run):.5g}") for _ in range(3)]


def run(setup: Setup, steps: int) -> dict[str, Any]:
    """Measure every point once, and the rates of the device at each of them.

    Returns the figures.
    """
    start = time.perf_counter()
    process_start = time.process_time()
    processors = processor_time()
    load = load_average()
    by_shape: dict[Shape, dict[str, Any]] = {}
    rate_probes = probes(model_of(setup.base, setup.body), PROBE_TOKENS)
    warm_up(setup.base)
    rates: dict[str, list[float]] = {name: [] for name in rate_probes}
    for shape in points(setup):
        by_shape[shape] = measure(shape, setup.body, steps)
        for name, probe in rate_probes.items():
            rates[name] += run_probe(probe)
        median = statistics.median(by_shape[shape]["step_ms"])
        print(f"  {shape}: {median:.2f} ms", file=sys.stderr, flush=True)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "where": environment(),
        "load_average": load,
        "stolen": stolen_share(processors),
        "elsewhere": share_of_others(processors, time.process_time() - process_start),
        "seconds": round(time.perf_counter() - start, 1),
        "body": setup.body,
        "base": setup.base._asdict(),
        "steps": steps,
        "rates": rates,
        "factors": {
            factor: [by_shape[shape] for shape in shapes] for factor, shapes in lines(setup).items()
        },
    }


def share_of_others(since: tuple[int, int] | None, process_seconds: float) -> float | None:
    """The share of other processes in the processor time that was used since `since`.

    process_seconds: the processor time that this process used.
    """
    end = processor_time()
    if since is None or end is None:
        return None
    used_before, _ = since
    used_now, _ = end
    cpu_seconds = (used_now - used_before) / os.sysconf("SC_CLK_TCK")
    return round(max(0.0, 1 - process_seconds / cpu_seconds), 3) if cpu_seconds else 0.0


def lines(setup: Setup) -> dict[str, list[Shape]]:
    """The points of each factor: the base shape with the factor's values."""
    result: dict[str, list[Shape]] = {}
    for factor, values in setup.values.items():
        shapes = ({**setup.base._asdict(), factor: value} for value in values)
        result[factor] = [Shape(**shape) for shape in shapes]
    return result


def points(setup: Setup) -> list[Shape]:
    """All points, each once; the base belongs to every factor."""
    return list(dict.fromkeys(chain.from_iterable(lines(setup).values())))


# --- the command ----------------------------------------------------------------------------------


def checked_setup(setup: Setup, steps: int, free: int | None) -> Setup:
    """The setup with a rotary table for the longest context, if every point has room.

    Args:
        free: free bytes of the device; None if not known.

    Raises:
        ValueError: there is no room for so many steps, or for a point; the message has the limit.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(
            f"--steps is {steps}; a sequence has room for {MAX_STEPS}: choose 1 to {MAX_STEPS}"
        )
    longest = max(shape.context for shape in points(setup)) + EXTRA_TOKENS
    setup = setup._replace(body={**setup.body, "max_position_embeddings": longest})
    need, largest = max((needed_bytes(shape, setup.body), shape) for shape in points(setup))
    if free is not None and need > free:
        raise ValueError(
            f"{largest} takes {memory.size(need)}, and {memory.size(free)} are free; free some "
            "memory"
        )
    return setup


def read_figures(path: Path) -> dict[str, Any]:
    """The figures in a file of `--json`.

    Raises:
        ValueError: the file cannot be read, or has another format.
    """
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--show is {path}, which cannot be read: {error}; give a file that --json wrote"
        ) from None
    if not isinstance(figures, dict) or set(figures.get("factors", ())) != set(Shape._fields):
        raise ValueError(
            f"--show is {path}, which has no factors {Shape._fields}; give a file that --json wrote"
        )
    return figures


def scale_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument(
        "--steps", type=int, help="decode steps timed at each point (15; 3 with --quick)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and few points")
    parser.add_argument(
        "--show",
        type=Path,
        help="measure nothing; print the section of this file, written by --json",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = scale_parser()
    args = parser.parse_args(argv)
    try:
        if args.show:
            figures = read_figures(args.show)
        else:
            if args.json and not args.json.absolute().parent.is_dir():
                raise ValueError(
                    f"--json is {args.json}, in a folder that does not exist; make it first"
                )
            steps = (3 if args.quick else 15) if args.steps is None else args.steps
            device_memory = memory.read(jax.devices()[0])
            free_bytes = device_memory.free if device_memory.total else None  # total 0: not known
            setup = checked_setup(QUICK if args.quick else FULL, steps, free_bytes)
            words = ["python -m experiments.bench.scale"]
            if args.quick:
                words.append("--quick")
            if args.steps:
                words += ["--steps", str(args.steps)]
            figures = {"command": " ".join(words), **run(setup, steps)}
    except ValueError as error:
        parser.error(str(error))
    write_json(args.json, figures)
    print(report(figures), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
