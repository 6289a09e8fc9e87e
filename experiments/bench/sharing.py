"""Which share of cache blocks does parallel sampling save? Runs the scheduler alone, without a
device.

    python -m experiments.bench.sharing
    python -m experiments.bench.sharing --requests 200 --rate 0.2 --json

    saved = 1 - sum over steps of distinct blocks / sum over steps of block table entries, of the running sequences

This is the quantity of Fig. 15 of the PagedAttention paper (Kwon et al., SOSP 2023), whose values
are printed too. Prompt and output lengths are exponential with the means of the paper's two data
sets (its Fig. 11), rounded and at least 1. Blocks have 16 tokens, prefix caching is off, nothing is
preempted. There are two kinds of lengths:

    same   all branches of a request have one output length, as if the end of text is ignored
    own    each branch draws its own length, so the last branch runs alone for a while

Expectation: only full blocks of a prompt stay shared. A partial last block is copied at the first
token of each further branch (and so is a full last block, because a branch computes the prompt's
last token again). Branches of one length share blocks for their whole life, so saved = (n - 1) / n
* c, where c is the share of a single sequence's blocks that have prompt tokens only. Arrival times
(`--rate`) have no influence without preemption.

Result (800 requests a row). Alpaca: 7.5, 11.3, 12.6 % for n of 2, 4, 6 with one length, and 3.9,
7.5, 9.3 % with own lengths; the paper's 6.09, 8.53, 9.79 % are between them. ShareGPT: 15.6 to 26.1
% with one length, 7.9 to 18.7 % with own lengths; the paper has 16.2 to 30.5 %. So the formula
agrees and the constant does not: c is 15 % here and 11.4 to 12.2 % in the paper for Alpaca, 31 %
here and 32 to 37 % for ShareGPT. The means do not determine c. With the same means it is 22 %
(Alpaca) and 45 % (ShareGPT) for equally long outputs, 14 and 30 % for exponential ones, 11 and 24 %
for lognormal ones with sigma 1, because long outputs occupy many blocks for many steps. Exponential
lengths are not those of the data sets, and no number is tuned. The paper does not describe its
average over time; ours is a ratio of sums.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from experiments.bench.harness import aligned, check_least
from experiments.core.distributions import (
    AT_ONCE,
    Arrivals,
    Exponential,
    Poisson,
    draw_arrivals,
    draw_lengths,
)
from experiments.core.workloads import branch_ids
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Plan, Request

Lengths = Literal["same", "own"]
STOP = 0  # the token that ends a sequence; all others are drawn above it
MAX_SEQS = 256
BATCHES = 4  # independent batches of requests, whose spread gives the error
BUDGET = 1 << 16  # tokens a step: no prompt is cut, so a request forks one step after its admission


class Dataset(NamedTuple):
    """Mean lengths in tokens, and the paper's values by number of branches.

    Values are per cent; None is a value that the paper does not print.
    """

    name: str
    prompt: float
    output: float
    paper: dict[int, float | None]
    beams: dict[int, float | None]  # the paper's values by beam width (experiments.bench.beams)


# for ShareGPT, the paper gives ranges
ALPACA = Dataset(
    "alpaca", 19.31, 58.45, {2: 6.09, 4: 8.53, 6: 9.79}, {2: 37.56, 4: 53.13, 6: 55.16}
)
SHAREGPT = Dataset(
    "sharegpt", 161.31, 337.99, {2: 16.2, 4: None, 6: 30.5}, {2: 44.3, 4: None, 6: 66.3}
)


class SampledRequest(NamedTuple):
    """One request: prompt tokens, output tokens of each branch, and the step of its arrival."""

    prompt: int
    outputs: tuple[int, ...]
    arrival: float

    @property
    def ends(self) -> list[int]:
        """The length of each branch at its end, in tokens."""
        return [self.prompt + output for output in self.outputs]


class BlockCounts(NamedTuple):
    """The blocks of the running sequences, summed over steps.

    listed: entries of block tables. used: distinct blocks of them.
    """

    listed: int
    used: int
    steps: int
    preemptions: int

    @property
    def share(self) -> float:
        return 1.0 - self.used / self.listed if self.listed else 0.0


def draw(
    data: Dataset,
    count: int,
    branches: int,
    lengths: Lengths,
    seed: int,
    arrivals: Arrivals = AT_ONCE,
) -> list[SampledRequest]:
    """Draw `count` requests. Prompts are the same for every number of branches.

    arrivals: in steps, not seconds.
    """
    prompt_rng, output_rng, arrival_rng = (np.random.default_rng([seed, i]) for i in range(3))
    prompts, _ = draw_lengths(Exponential("exponential", data.prompt), count, prompt_rng)
    lengths_per_request = branches if lengths == "own" else 1
    num_lengths = count * lengths_per_request
    outputs, _ = draw_lengths(Exponential("exponential", data.output), num_lengths, output_rng)
    times = draw_arrivals(arrivals, count, arrival_rng)
    requests = []
    for i, (prompt, time) in enumerate(zip(prompts, times, strict=True)):
        branch_outputs = tuple(outputs[i * lengths_per_request : (i + 1) * lengths_per_request])
        if lengths == "same":
            branch_outputs = branches * branch_outputs
        requests.append(SampledRequest(prompt, branch_outputs, time))
    return requests


def to_scheduler(request: SampledRequest, names: Sequence[str]) -> Request:
    """The request as the scheduler takes it, with these ids of branches."""
    longest = max(request.outputs)
    stops = frozenset({STOP})
    return Request(names[0], request.prompt, longest, stop_token_ids=stops, forks=tuple(names[1:]))


def sample(plan: Plan, ends: Mapping[str, int], rng: np.random.Generator) -> list[int]:
    """Random tokens of the rows. ends: by branch, the length in tokens at which it stops."""
    sampled = rng.integers(STOP + 1, 1000, size=len(plan.seqs)).tolist()
    for i, (seq, length) in enumerate(zip(plan.seqs, plan.lengths, strict=True)):
        if length + 1 == ends[seq.request.request_id]:
            sampled[i] = STOP
    return sampled


def simulate(requests: Sequence[SampledRequest], block_size: int, seed: int = 0) -> BlockCounts:
    """Run requests to their end. Tokens are random; a branch stops at its own length.

    The pool has room for MAX_SEQS of the longest request, so nothing is preempted; `preemptions`
    checks this.
    """
    longest = max(request.prompt + max(request.outputs) for request in requests)
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=MAX_SEQS * -(-longest // block_size),
        max_num_batched_tokens=BUDGET,
        max_num_seqs=MAX_SEQS,
        max_model_len=longest,
    )
    state = scheduler.init(config)
    rng = np.random.default_rng([seed, 99])
    ends: dict[str, int] = {}
    listed = 0
    used = 0
    preemptions = 0
    step = 0
    num_sent = 0
    while num_sent < len(requests) or ends:
        while num_sent < len(requests) and requests[num_sent].arrival <= step:
            request = requests[num_sent]
            names = branch_ids(f"r{num_sent}", len(request.outputs))
            ends |= dict(zip(names, request.ends, strict=True))
            state = scheduler.submit(state, to_scheduler(request, names))
            num_sent += 1
        step += 1
        state, plan = scheduler.schedule(state, FCFS)
        listed += sum([len(seq.blocks) for seq in state.running.seqs])
        used += plan.blocks_used
        preemptions += len(plan.preempted)
        state, events = scheduler.commit(state, plan, sample(plan, ends, rng))
        for event in events:
            if isinstance(event, scheduler.Finished):
                del ends[event.request_id]
    return BlockCounts(listed, used, step, preemptions)


class Row(NamedTuple):
    """A row of the table. Shares are per cent.

    error: the standard error of `saved`, from independent batches of requests.
    """

    dataset: str
    n: int
    lengths: str
    saved: float
    error: float
    paper: float | None
    steps: int


def measure(
    data: Dataset,
    branches: int,
    lengths: Lengths,
    requests: int,
    block_size: int,
    seed: int,
    arrivals: Arrivals,
) -> Row:
    """Measure one row of the table. requests: the number in all, at least BATCHES."""
    sizes = [len(part) for part in np.array_split(np.arange(requests), BATCHES)]
    batches = [
        draw(data, size, branches, lengths, seed + i, arrivals) for i, size in enumerate(sizes)
    ]
    runs = [simulate(batch, block_size, seed + i) for i, batch in enumerate(batches)]
    assert not any(run.preemptions for run in runs), "the pool is large enough for all requests"
    shares = [100 * run.share for run in runs]
    error = float(np.std(shares, ddof=1)) / math.sqrt(BATCHES)
    saved = 100 * (1 - sum(run.used for run in runs) / sum(run.listed for run in runs))
    steps = sum(run.steps for run in runs)
    return Row(data.name, branches, lengths, saved, error, data.paper.get(branches), steps)


def table(rows: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [
        ("data set", "n", "lengths", "saved %", "+-", "paper %", "steps")
    ]
    for row in rows:
        paper = "-" if row.paper is None else f"{row.paper:.4g}"
        numbers = (f"{row.saved:.2f}", f"{row.error:.2f}", paper, str(row.steps))
        lines.append((row.dataset, str(row.n), row.lengths, *numbers))
    return aligned(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Share of cache blocks that parallel sampling saves, beside Fig. 15.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=800,
        help=f"requests of each row, in {BATCHES} batches (800)",
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (16)")
    parser.add_argument(
        "--rate", type=float, help="Poisson arrivals a step; default: all requests arrive at once"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    args = parser.parse_args(arguments)
    check_least(parser, args, requests=BATCHES, block_size=1)
    try:
        arrivals = AT_ONCE if args.rate is None else Poisson("poisson", args.rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    rows = [
        measure(data, n, lengths, args.requests, args.block_size, args.seed, arrivals)
        for data in (ALPACA, SHAREGPT)
        for lengths in get_args(Lengths)
        for n in data.paper
    ]
    if args.json:
        print(json.dumps({"block_size": args.block_size, "rows": [row._asdict() for row in rows]}))
        return 0
    print(
        f"blocks of {args.block_size}, {args.requests} requests a row, parallel sampling without "
        "prefix caching"
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
