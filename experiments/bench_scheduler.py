"""What the scheduler costs a step: schedule + commit on the host, no device.

python -m experiments.bench_scheduler
python -m experiments.bench_scheduler --seqs 64 --blocks 4096 --steps runs/quickstart/.../steps.jsonl

Three loads, each with `--seqs` running sequences: pure decoding; requests that end and are replaced all the time; and
long prompts that are computed in chunks beside the decodes. The target is a median of 200 us in pure decoding at 256
sequences and 32,768 blocks of 16. With `--steps` the device time of a recorded run is set beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter
from typing import NamedTuple

from pagedjax import scheduler
from pagedjax.policies import FCFS
from pagedjax.scheduler import SchedulerConfig, SchedulerState
from pagedjax.types import Finished, Request

TARGET_US = 200.0
LONGEST = 1280  # tokens of the longest request below


class Load(NamedTuple):
    """A stream of requests that keeps the scheduler busy in one way."""

    name: str
    budget: int  # tokens a step, for each running sequence
    warm_up: int  # steps until the load is steady
    request: Callable[[int], tuple[int, int]]  # number of the request -> prompt tokens, max_tokens


LOADS = (
    # prompts of different lengths, so that not all cross a block boundary in the same step
    Load("decode", 4, 50, lambda i: (1 + i * 7 % 64, 1 << 30)),
    Load("arrivals", 4, 300, lambda i: (1 + i * 7 % 64, 1 + i * 13 % 128)),
    # as many prompt tokens come in a step as sequences run: 512 tokens for each that ends after 512 on average
    Load("chunks", 2, 1500, lambda i: (512, 257 + i * 13 % 512)),
)


class Timing(NamedTuple):
    """Microseconds of a step, and means per step of what it did."""

    load: str
    steps: int
    median: float
    p99: float
    schedule: float  # medians of the two halves
    commit: float
    sequences: float
    tokens: float
    finished: float


def measure(load: Load, config: SchedulerConfig, steps: int) -> Timing:
    """Time `steps` steps after the warm-up. `submit` is kept out: it happens once a request, not a step."""
    config = config._replace(max_num_batched_tokens=load.budget * config.max_num_seqs)
    state, number = scheduler.init(config), 0
    schedules, commits, sequences, tokens, finished = [], [], [], [], []
    for at in range(-load.warm_up, steps):
        state, number = refill(state, load, number)
        start = perf_counter()
        state, plan = scheduler.schedule(state, FCFS)
        scheduled = perf_counter()
        sampled = [0] * len(plan.seqs)
        dispatched = perf_counter()
        state, events = scheduler.commit(state, plan, sampled)
        end = perf_counter()
        if at >= 0:
            schedules.append(scheduled - start)
            commits.append(end - dispatched)
            sequences.append(len(plan.seqs))
            tokens.append(plan.num_tokens)
            finished.append(sum(isinstance(event, Finished) for event in events))
    totals = [a + b for a, b in zip(schedules, commits, strict=True)]
    times = (median(totals), quantiles(totals, n=100)[98], median(schedules), median(commits))
    means = (mean(sequences), mean(tokens), mean(finished))
    return Timing(load.name, steps, *(round(t * 1e6, 1) for t in times), *(round(m, 2) for m in means))


def refill(state: SchedulerState, load: Load, number: int) -> tuple[SchedulerState, int]:
    """Submit until all sequences can run and a few wait."""
    while len(state.running.seqs) + len(state.waiting) < state.config.max_num_seqs + 4:
        state = scheduler.submit(state, Request(f"r{number}", *load.request(number)))
        number += 1
    return state, number


def sizes(seqs: int, blocks: int, block_size: int, steps: int) -> SchedulerConfig:
    """A pool in which every sequence can grow to its longest: nothing is preempted.

    Raises:
        ValueError: the pool is too small for that; the message says what would do.
    """
    need = max(LONGEST, steps + LOADS[0].warm_up + 65)  # in pure decoding every sequence grows by a token a step
    if seqs * -(-need // block_size) > blocks:
        raise ValueError(
            f"--blocks is {blocks}; {seqs} sequences of {need} tokens need {seqs * -(-need // block_size)} blocks of "
            f"{block_size}: raise --blocks, or lower --seqs or --measure"
        )
    return SchedulerConfig(block_size, blocks, seqs, seqs, block_size * (blocks // seqs))


def device_seconds(path: Path) -> float:
    """The median device time of a recorded run's steps."""
    return median(json.loads(line)["device_seconds"] for line in path.read_text("utf-8").splitlines())


def table(timings: list[Timing]) -> str:
    rows = [Timing._fields, *([str(value) for value in timing] for timing in timings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Microseconds that the scheduler (schedule + commit) costs a step.")
    parser.add_argument("--seqs", type=int, default=256, help="running sequences (256)")
    parser.add_argument("--blocks", type=int, default=32768, help="cache blocks (32768)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (16)")
    parser.add_argument("--measure", type=int, default=1000, help="steps to measure (1000)")
    parser.add_argument("--steps", type=Path, help="steps.jsonl of a run, to set its device time beside")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    try:
        config = sizes(args.seqs, args.blocks, args.block_size, args.measure)
    except ValueError as error:
        parser.error(str(error))
    timings = [measure(load, config, args.measure) for load in LOADS]
    met = timings[0].median <= TARGET_US
    device = device_seconds(args.steps) if args.steps else None
    if args.json:
        loads = [timing._asdict() for timing in timings]
        print(json.dumps({"loads_us": loads, "target_us": TARGET_US, "met": met, "device_seconds": device}))
        return 0
    print(f"{args.seqs} sequences, {args.blocks} blocks of {args.block_size}; microseconds a step")
    print(table(timings))
    print(f"target: a median of {TARGET_US:.0f} us in pure decoding: {'met' if met else 'MISSED'}")
    if device is not None:
        share = timings[0].median / 1e6 / device
        print(f"device: a median of {device * 1e6:.0f} us per step in {args.steps}; the scheduler is {share:.1%} of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
