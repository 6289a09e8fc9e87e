"""How many microseconds does the scheduler (schedule + commit) take in a step?

    python -m experiments.bench.scheduler
    python -m experiments.bench.scheduler --seqs 64 --blocks 4096 --steps runs/quickstart/.../steps.jsonl
    python -m experiments.bench.scheduler --loads decode tight+all

It runs on the host alone.

Each load keeps `--seqs` sequences running. The base loads:

    decode     decodes only
    arrivals   requests end and are replaced continuously
    chunks     long prompts, computed in chunks together with decodes
    tight      requests need more blocks than there are, so some are preempted repeatedly; only with features

Features that are added to them:

    +hashes    prefix caching, warm: recurring prompts, published outputs, a pool full of idle blocks that are evicted
    +branches  parallel sampling, four branches a request: forks and copies on write
    +swap      a swap space; only `tight` moves blocks there
    +all       all three

The loads take turns, ROUNDS times each, so a slow minute of the machine affects all of them. If the
clock is in doubt, compare a load with `decode` of the same run. `low` and `high` are the lowest and
highest median of a round; `p99` includes garbage collections. The limits at 256 sequences and
32,768 blocks of 16 are medians of 200 us for `decode` and 300 us for all other loads. `--steps` is
a file of a recorded run, whose device time is shown for comparison.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter
from typing import NamedTuple

from experiments.bench.harness import aligned, check_least
from experiments.core.workloads import branch_ids
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Finished, Plan, Request

TARGET_US = 200.0  # for `decode`
LIMIT_US = 300.0  # for all other loads
LONGEST = 1280  # tokens of the longest request of `arrivals` and `chunks`
MAX_PROMPT = 64  # tokens of a prompt of `decode` and `arrivals`
ROUNDS = 10
BRANCHES = 4
PROMPTS = 64  # different prompts, before they recur


class Load(NamedTuple):
    """A stream of requests that keeps the scheduler busy in one way.

    request: (number of the request, room) -> (prompt tokens, max_tokens). The room is how many
        tokens each sequence would have if all blocks were distributed evenly.
    """

    name: str
    budget: int  # tokens a step, for each running sequence
    warm_up: int  # steps until the load is steady
    request: Callable[[int, int], tuple[int, int]]
    hashes: bool = False
    branches: int = 1
    swap: bool = False

    @property
    def tight(self) -> bool:
        """Whether the requests need more blocks than there are."""
        return self.request in (_tight, _tight_branches)


def _decode(i: int, room: int) -> tuple[int, int]:
    # different lengths, so that block boundaries are crossed in different steps
    return 1 + i * 7 % MAX_PROMPT, 1 << 30


def _arrivals(i: int, room: int) -> tuple[int, int]:
    return 1 + i * 7 % MAX_PROMPT, 1 + i * 13 % 128


def _chunks(i: int, room: int) -> tuple[int, int]:
    # The budget is two tokens a sequence. A decode takes one of them, so a step computes about as
    # many tokens of prompts as sequences run.
    return 512, 257 + i * 13 % 512


def _tight(i: int, room: int) -> tuple[int, int]:
    """A running sequence has on average a third of `room` as output. With its prompt it needs
    slightly more than fits.
    """
    return room * 3 // 4, 1 + i * 397 % room


def _tight_branches(i: int, room: int) -> tuple[int, int]:
    """Like `_tight`, for four branches of one prompt. All requests share an eighth of the prompt."""
    return room * 3, 1 + i * 397 % room


LOADS = (
    Load("decode", 4, 50, _decode),
    Load("arrivals", 4, 300, _arrivals),
    Load("chunks", 2, 1500, _chunks),
    Load("decode+hashes", 4, 50, _decode, hashes=True),
    Load("decode+branches", 4, 50, _decode, branches=BRANCHES),
    Load("decode+all", 4, 50, _decode, hashes=True, branches=BRANCHES, swap=True),
    # 2500 steps: until the pool is full of computed blocks
    Load("arrivals+hashes", 4, 2500, _arrivals, hashes=True),
    Load("arrivals+branches", 4, 300, _arrivals, branches=BRANCHES),
    Load("arrivals+swap", 4, 300, _arrivals, swap=True),
    Load("arrivals+all", 4, 2500, _arrivals, hashes=True, branches=BRANCHES, swap=True),
    Load("tight+swap", 4, 3000, _tight, swap=True),
    Load("tight+all", 4, 3000, _tight_branches, hashes=True, branches=BRANCHES, swap=True),
)


class Stream(NamedTuple):
    """A running load: the scheduler's state, and the number of submitted requests."""

    load: Load
    state: SchedulerState
    requests: int


class Step(NamedTuple):
    """Seconds of the two halves of a step, and counts of its work."""

    schedule: float
    commit: float
    sequences: int
    tokens: int
    finished: int
    preempted: int
    swapped: int  # preempted sequences that moved to the swap space
    copies: int
    found: int  # tokens of admitted sequences from the cache or the swap space


class Timing(NamedTuple):
    """Microseconds of a step, and mean counts per step."""

    load: str
    median: float
    low: float  # lowest and highest median of a round
    high: float
    p99: float
    schedule: float  # medians of the two halves
    commit: float
    sequences: float
    tokens: float
    finished: float
    preempted: float
    swapped: float
    copies: float
    found: float


def start(load: Load, config: SchedulerConfig) -> Stream:
    """The load before its first step. `config.max_model_len` is the room of a sequence.

    Under `tight`, a request may be four times as long. The swap space is a quarter of the pool.
    """
    config = config._replace(
        max_num_batched_tokens=load.budget * config.max_num_seqs,
        max_model_len=config.max_model_len * (4 if load.tight else 1),
        host_blocks=max(1, config.num_blocks // 4) if load.swap else 0,
    )
    return Stream(load, scheduler.init(config), 0)


def advance(stream: Stream, steps: int) -> tuple[Stream, list[Step]]:
    """Make `steps` steps and time them.

    `submit` (once a request) and hashing (not the scheduler's work) are not timed.
    """
    timings = []
    for _ in range(steps):
        stream = refill(stream)
        hashes = {}
        schedule_began = perf_counter()
        state, plan = scheduler.schedule(stream.state, FCFS)
        schedule_ended = perf_counter()
        sampled = [0] * len(plan.seqs)
        if stream.load.hashes:
            hashes = hashes_of_filled(plan, state.config.block_size)
        commit_began = perf_counter()
        state, events = scheduler.commit(state, plan, sampled, hashes)
        commit_ended = perf_counter()
        stream = stream._replace(state=state)
        timings.append(
            Step(
                schedule=schedule_ended - schedule_began,
                commit=commit_ended - commit_began,
                sequences=len(plan.seqs),
                tokens=plan.num_tokens,
                finished=sum(isinstance(event, Finished) for event in events),
                preempted=len(plan.preempted),
                swapped=len(plan.swapped),
                copies=len(plan.copies),
                found=sum(plan.cached),
            )
        )
    return stream, timings


def refill(stream: Stream) -> Stream:
    """Submit until all sequences can run and a few requests wait."""
    load, state, number = stream
    width = load.branches
    places = sum([1 + len(seq.request.forks) for seq in (*state.running.seqs, *state.waiting)])
    room = state.config.num_blocks // state.config.max_num_seqs * state.config.block_size
    while places < state.config.max_num_seqs + 4 * width:
        prompt, output = load.request(number, room)
        # Under `tight` no prompt recurs: it would share blocks, and the pool would no longer be too
        # small.
        content = number if load.tight else number % PROMPTS
        hashes = prompt_hashes(content, prompt // state.config.block_size) if load.hashes else ()
        first, *forks = branch_ids(f"r{number}", width)
        state = scheduler.submit(
            state, Request(first, prompt, output, forks=tuple(forks), hashes=hashes)
        )
        places += width
        number += 1
    return Stream(load, state, number)


def prompt_hashes(prompt: int, blocks: int) -> tuple[str, ...]:
    """The hashes of a prompt by its number; all prompts begin with the same eighth."""
    shared = blocks // 8
    return tuple([block_hash("all" if j < shared else f"p{prompt}", j) for j in range(blocks)])


def hashes_of_filled(plan: Plan, size: int) -> dict[str, tuple[str, ...]]:
    """Id of a sequence -> the hashes of the blocks of generated tokens that a plan fills. Branches
    have different hashes.
    """
    hashes = {}
    for seq, begin, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
        full = (begin + count) // size
        hashed = len(seq.hashes)
        if full > begin // size and full > hashed:
            hashes[seq.request_id] = tuple(
                [block_hash(seq.request_id, j) for j in range(hashed, full)]
            )
    return hashes


@cache
def _root(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=12).digest()


def block_hash(name: str, block: int) -> str:
    """A hash for the block of a prompt or a sequence.

    It is as long as a real one (engine/block_hashes.py), because comparing hashes is part of the
    cost.
    """
    return (_root(name) + block.to_bytes(4, "big")).hex()


def measure(loads: Sequence[Load], config: SchedulerConfig, steps: int) -> list[Timing]:
    """Time about `steps` steps of each load, in ROUNDS turns after its warm-up."""
    turn_steps = max(2, steps // ROUNDS)
    streams = [advance(start(load, config), load.warm_up)[0] for load in loads]
    gc.collect()
    gc.freeze()  # else a full collection during one load would visit the states of all others
    rounds: list[list[list[Step]]] = [[] for _ in loads]
    for _ in range(ROUNDS):
        for i, stream in enumerate(streams):
            streams[i], timed = advance(stream, turn_steps)
            rounds[i].append(timed)
    gc.unfreeze()
    return [timing(load.name, load_rounds) for load, load_rounds in zip(loads, rounds, strict=True)]


def timing(name: str, rounds: Sequence[Sequence[Step]]) -> Timing:
    """The row of a load in the table. rounds: the load's steps, round by round."""
    steps = [step for part in rounds for step in part]
    totals = [step.schedule + step.commit for step in steps]
    medians = [median([step.schedule + step.commit for step in part]) for part in rounds]
    seconds = {
        "median": median(totals),
        "low": min(medians),
        "high": max(medians),
        "p99": quantiles(totals, n=100)[98],
        "schedule": median([step.schedule for step in steps]),
        "commit": median([step.commit for step in steps]),
    }
    microseconds = {field: round(1e6 * value, 1) for field, value in seconds.items()}
    count_fields = Step._fields[2:]  # all but the seconds of its two halves
    mean_counts = {
        field: round(float(mean([getattr(step, field) for step in steps])), 2)
        for field in count_fields
    }
    return Timing(name, **microseconds, **mean_counts)


def scheduler_config(seqs: int, blocks: int, block_size: int, steps: int) -> SchedulerConfig:
    """A pool with room for every sequence at its longest: only `tight` preempts.

    Raises:
        ValueError: the pool is too small; the message has a remedy.
    """
    # under `decode`, the first load, every sequence grows by a token a step
    length = max(LONGEST, MAX_PROMPT + LOADS[0].warm_up + steps + 1)
    needed_blocks = seqs * -(-length // block_size)
    if needed_blocks > blocks:
        raise ValueError(
            f"--blocks is {blocks}; {seqs} sequences of {length} tokens need {needed_blocks} blocks of "
            f"{block_size}: raise --blocks, or lower --seqs or --measure"
        )
    return SchedulerConfig(
        block_size=block_size,
        num_blocks=blocks,
        max_num_batched_tokens=seqs,  # `start` replaces it
        max_num_seqs=seqs,
        max_model_len=block_size * (blocks // seqs),
    )


def device_seconds(path: Path) -> float:
    """The median device time of a recorded run's steps.

    Raises:
        ValueError: the file is missing or is no steps.jsonl.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
        return median([float(json.loads(line)["device_seconds"]) for line in lines])
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"--steps is {path}, which cannot be read as steps.jsonl of a run "
            f"({type(error).__name__}: {error}); name the file of that name in a run's folder"
        ) from None


def limits_met(timings: Sequence[Timing]) -> dict[str, bool]:
    """Whether the median of each load is within its limit, by load."""
    return {t.load: t.median <= (TARGET_US if t.load == "decode" else LIMIT_US) for t in timings}


def table(timings: Sequence[Timing]) -> str:
    met = limits_met(timings)
    rows = [
        (*Timing._fields, ""),
        *((*map(str, t), "" if met[t.load] else "MISSED") for t in timings),
    ]
    return aligned(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Microseconds that the scheduler (schedule + commit) costs a step.",
        allow_abbrev=False,
    )
    parser.add_argument("--seqs", type=int, default=256, help="running sequences (256)")
    parser.add_argument("--blocks", type=int, default=32768, help="cache blocks (32768)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (16)")
    parser.add_argument(
        "--measure", type=int, default=1000, help="how many steps to measure (1000)"
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        choices=[load.name for load in LOADS],
        help="only these",
        metavar="LOAD",
    )
    parser.add_argument(
        "--steps",
        type=Path,
        metavar="FILE",
        help="a run's steps.jsonl (not a number): its device time is printed for comparison",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    args = parser.parse_args(arguments)
    if args.seqs < BRANCHES:
        parser.error(f"--seqs is {args.seqs}; a request of {BRANCHES} branches needs as many")
    check_least(parser, args, blocks=1, block_size=1, measure=1)
    try:
        config = scheduler_config(args.seqs, args.blocks, args.block_size, args.measure)
        device = device_seconds(args.steps) if args.steps else None
    except ValueError as error:
        parser.error(str(error))
    loads = [load for load in LOADS if args.loads is None or load.name in args.loads]
    timings = measure(loads, config, args.measure)
    met = limits_met(timings)
    if args.json:
        limits = {"target_us": TARGET_US, "limit_us": LIMIT_US, "met": met}
        print(
            json.dumps(
                {"loads_us": [t._asdict() for t in timings], **limits, "device_seconds": device}
            )
        )
        return 0
    print(f"{args.seqs} sequences, {args.blocks} blocks of {args.block_size}; microseconds a step")
    print(table(timings))
    print(f"limits of the median: {TARGET_US:.0f} us for decode, {LIMIT_US:.0f} us for all others")
    if device is not None:
        share = timings[0].median / 1e6 / device
        print(
            f"device: a median of {device * 1e6:.0f} us per step in {args.steps}; "
            f"{timings[0].load} is {share:.1%} of it"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
