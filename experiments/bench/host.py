"""How many microseconds of the host does an engine's decode step take?

    python -m experiments.bench.host [--rows 1 64 256] [--lookahead 0 1] [--span 1 8]
        [--output 600 1024] [--json out.json]

A stub takes the place of the device's programs: it gives back the same tokens at once. So nothing
is computed or compiled, and all time is the host's: schedule, pack, transfer, the call, commit. On
a device that is faster than this time, the host is the limit. With `--span` so many steps are one
program, which the host sends with the first of them; so compare means, which count all steps.

The prompts are those of nano-vllm's benchmark, 100 to 1,024 random tokens. Outputs have 600 to
1,024, so that all rows decode together for some hundred steps, and these steps count. Then the
largest setting runs again with a clock around each part. A part's time is without that of the parts
inside it; the clock costs each call a microsecond or less. Collections of garbage are part of the
times, and are counted; they are as rare as in a server (engine/garbage.py).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from experiments.bench.harness import (
    Workload,
    aligned,
    at_least_1,
    bench_parser,
    check_least,
    requests_of,
    write_report,
)
from experiments.bench.random_llama import random_model
from pagedjax import Engine, EngineConfig
from pagedjax.device.batch import StepShape
from pagedjax.device.models import Model
from pagedjax.device.sampling import SampledTokens
from pagedjax.device.step import StepOutput
from pagedjax.engine import lookahead as engine_lookahead
from pagedjax.engine import state as engine_state
from pagedjax.engine.garbage import collect_rarely
from pagedjax.host import decode_spans, scheduler

PROMPT = (100, 1024)  # tokens
OUTPUT = (600, 1024)
MAX_OUTPUT = 4096
BUDGET = 2048  # tokens of a step
BLOCK_SIZE = 16
WARM_UP = 32  # steps of decodes alone that do not count
# One layer of one head: an engine needs a model and a cache, and the stub reads neither
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 32000,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
# What is timed, by the name of the part: a module, and its function
PARTS: dict[str, tuple[ModuleType, str]] = {
    "schedule": (scheduler, "schedule"),
    "schedule as predicted": (decode_spans, "schedule_predicted"),
    "commit of the scheduler": (scheduler, "commit"),
    "commit as predicted": (decode_spans, "commit_predicted"),
    "commit of the engine": (engine_state, "commit"),
    "arrays of a batch": (engine_state, "packed_plans"),
    "matching a prediction": (engine_lookahead, "take_predicted"),
    "predictions": (engine_lookahead, "extend"),
}


class StubPrograms(dict[Any, Callable[..., Any]]):
    """Programs of every shape that give back the same tokens at once.

    sequences: the most of a step.
    """

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self._tokens = np.arange(sequences, dtype=np.int32) + 5

    def __missing__(self, shape: StepShape) -> Callable[..., Any]:
        fed = jax.device_put(self._tokens)
        tokens = fed if shape.span == 1 else jax.device_put(np.tile(self._tokens, (shape.span, 1)))
        unread: Any = None  # results that no request of this benchmark wants
        sampled = SampledTokens(
            tokens, logprobs=unread, ranks=unread, top_ids=unread, top_logprobs=unread
        )
        output = StepOutput(sampled, prompt=unread, fed=fed)
        self[shape] = lambda leaves, cache, words: (cache, output)
        return self[shape]


class Collections:
    """Counts collections of garbage and their seconds, within a `with` statement."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._began)

    def __enter__(self) -> Collections:
        gc.callbacks.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self)


class Clock:
    """Seconds of functions, each without those that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []  # seconds of parts inside each part that runs

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds = time.perf_counter() - began
                self.seconds[name] += seconds - self._inner.pop()
                if self._inner:
                    self._inner[-1] += seconds

        return run

    @contextmanager
    def around_parts(self) -> Iterator[None]:
        """Times PARTS within a `with` statement."""
        with ExitStack() as stack:
            for name, (module, function) in PARTS.items():
                timed = self.timed(name, getattr(module, function))
                stack.enter_context(mock.patch.object(module, function, timed))
            yield


class HostTimes(NamedTuple):
    """Microseconds of the steps in which all rows decode."""

    rows: int
    lookahead: int
    span: int
    steps: int
    median: float
    mean: float
    p99: float
    collections: int  # of garbage, in all steps of the run
    longest_collection: float
    parts: dict[str, float]  # microseconds of a step by part, means; empty if not timed


def measure(
    model: Model,
    rows: int,
    lookahead: int,
    span: int = 1,
    output: tuple[int, int] = OUTPUT,
    clock: Clock | None = None,
) -> HostTimes:
    """Run as many requests as there are rows.

    Args:
        span: decode steps in one program.
        output: the fewest and the most tokens of an output.
        clock: times the parts of steps.

    Raises:
        ValueError: too few steps have so many rows.
    """
    engine = engine_of(model, rows, lookahead, span, output[1])
    workload = Workload(rows, PROMPT, output)
    prompts, params = requests_of(workload, SHAPE["vocab_size"], seed=0)
    for number, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(number), prompt["prompt_token_ids"], options)
    with ExitStack() as stack:
        stack.callback(collect_rarely())
        collections = stack.enter_context(Collections())
        if clock is not None:
            stack.enter_context(clock.around_parts())
        seconds = decode_seconds(engine, rows, clock)
    if len(seconds) < 2:
        raise ValueError(
            f"--output is {output[0]} to {output[1]}: the first of {rows} requests ends before "
            f"all of them have decoded for {WARM_UP + 2} steps; give longer outputs, or fewer --rows"
        )
    totals = clock.seconds if clock is not None else {}
    parts = {name: round(1e6 * total / len(seconds), 1) for name, total in totals.items()}
    return HostTimes(
        rows=rows,
        lookahead=lookahead,
        span=span,
        steps=len(seconds),
        median=round(1e6 * statistics.median(seconds), 1),
        mean=round(1e6 * statistics.mean(seconds), 1),
        p99=round(1e6 * statistics.quantiles(seconds, n=100, method="inclusive")[98], 1),
        collections=len(collections.seconds),
        longest_collection=round(1e6 * max(collections.seconds, default=0.0), 1),
        parts=parts,
    )


def engine_of(model: Model, rows: int, lookahead: int, span: int, longest: int) -> Engine:
    """An engine whose programs are stubs. longest: the most tokens of an output."""
    config = EngineConfig(
        attention_impl="xla",
        dtype="float32",
        lookahead=lookahead,
        decode_span=span,
        block_size=BLOCK_SIZE,
        max_num_seqs=rows,
        max_num_batched_tokens=BUDGET,
        max_model_len=PROMPT[1] + longest,
        token_buckets=tuple(sorted({rows, BUDGET})),
        num_blocks=rows * ((PROMPT[1] + longest) // BLOCK_SIZE + 2),
        compilation="lazy",
    )
    engine = Engine(model, config)
    object.__setattr__(engine.runtime, "programs", StubPrograms(rows))
    # as an engine that serves, which has programs for all options alone
    shapes = engine.runtime.shapes._replace(plain=False)
    object.__setattr__(engine.runtime, "shapes", shapes)
    return engine


def decode_seconds(engine: Engine, rows: int, clock: Clock | None) -> list[float]:
    """Run an engine until it is idle. Returns the seconds of steps of `rows` decodes, without the
    first ones. Of all other steps the clock forgets its times.
    """
    seconds: list[float] = []
    warm_up = WARM_UP
    while engine.has_work:
        before = clock.seconds.copy() if clock is not None else None
        began = time.perf_counter()
        result = engine.step()
        ended = time.perf_counter()
        counts = result.plan.counts if result is not None else ()
        is_decode = len(counts) == rows and max(counts) == 1
        if is_decode and not warm_up:
            seconds.append(ended - began)
            continue
        warm_up -= is_decode
        if clock is not None and before is not None:
            clock.seconds = before
    return seconds


def sentence(times: HostTimes) -> str:
    """The times of a setting as a line."""
    span = f", span {times.span}" if times.span > 1 else ""
    return (
        f"{times.rows} rows, lookahead {times.lookahead}{span}: median {times.median:.0f} us, "
        f"mean {times.mean:.0f} us, p99 {times.p99:.0f} us"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--rows", type=at_least_1, nargs="+", default=[1, 64, 256])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--span", type=at_least_1, nargs="+", default=[1], help="decode steps in one program (1)"
    )
    parser.add_argument(
        "--output",
        type=at_least_1,
        nargs=2,
        default=OUTPUT,
        metavar=("LEAST", "MOST"),
        help="tokens of an output (600 1024)",
    )
    args = parser.parse_args(argv)
    check_least(parser, args, lookahead=0)
    shortest, longest = args.output
    if not shortest <= longest <= MAX_OUTPUT:
        parser.error(
            f"--output is {shortest} {longest}; it must be the fewest and the most tokens, and no "
            f"more than {MAX_OUTPUT}"
        )
    model = random_model(SHAPE, "float32")
    settings = list(product(sorted(args.rows), sorted(args.lookahead), sorted(args.span)))
    clock = Clock()
    try:
        measurements = [measure(model, *setting, (shortest, longest)) for setting in settings]
        by_part = measure(model, *settings[-1], (shortest, longest), clock)
    except ValueError as error:
        parser.error(str(error))
    parts = sorted(by_part.parts.items(), key=lambda part: -part[1])
    untimed = by_part.mean - sum(by_part.parts.values())
    setting, _, _ = sentence(by_part).partition(":")
    print(f"microseconds of a step by part, {setting}")
    print(aligned([(name, f"{value:.0f}") for name, value in [*parts, ("all else", untimed)]]))
    last = measurements[-1]
    print(
        f"{last.collections} collections of garbage in {last.rows} rows, the longest "
        f"{last.longest_collection / 1e3:.1f} ms"
    )
    for times in measurements:
        print(sentence(times))
    figures = {"output": [shortest, longest], "times": [times._asdict() for times in measurements]}
    write_report(args.json, {**figures, "by_part": by_part._asdict()})


if __name__ == "__main__":
    main()
