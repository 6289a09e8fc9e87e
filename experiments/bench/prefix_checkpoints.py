"""How many tokens of prompts does the prefix cache of a hybrid find, by the states that it keeps?

    python -m experiments.bench.prefix_checkpoints conversation.jsonl
    python -m experiments.bench.prefix_checkpoints conversation.jsonl --blocks 400 1600 --requests 3000

It runs on the host alone: the scheduler's transitions, without a model and without time. The file
has JSON lines of Mooncake (input_length, output_length, hash_ids of blocks of 512 tokens; Qin et
al. 2024, arXiv 2407.00079). Requests come in its order, as soon as a row is free. Of generated
tokens no hash is known, so `texts` would find nothing, and is not among the policies.

`--states` is how many blocks of the pool the states of a block of tokens take, beside one of
attention: 51 of Qwen3.5-0.8B in blocks of 512 tokens. `--blocks` are blocks of all layers, as
`num_blocks` of an engine. Columns: the share of prompt tokens that were found; the states (blocks
of tokens) and the blocks of attention in the cache at the end; preemptions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.bench.harness import aligned, bench_parser, check_least, write_report
from pagedjax.host import scheduler
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Request
from pagedjax.options.config import PrefixCheckpoints

BLOCK_SIZE = 512  # of the trace's hashes
BUDGET = 8192  # tokens of a step
POLICIES: dict[str, PrefixCheckpoints | None] = {
    "every": None,
    "interval 2048": PrefixCheckpoints(interval=2048),
    "interval 8192": PrefixCheckpoints(interval=8192),
    "prompts": PrefixCheckpoints(prompts=True),
    "junctions": PrefixCheckpoints(junctions=True),
    "prompts, junctions": PrefixCheckpoints(prompts=True, junctions=True),
    "interval 8192, prompts, junctions": PrefixCheckpoints(8192, prompts=True, junctions=True),
}


class Result(NamedTuple):
    """A replay under one policy. See the module."""

    policy: str
    blocks: int
    found: float
    states: int
    attention: int
    preemptions: int


def requests_of(path: Path, count: int) -> list[Request]:
    """The first requests of a trace.

    Raises:
        ValueError: a line is no request of such a trace.
    """
    requests: list[Request] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number == count:
                break
            try:
                record = json.loads(line)
                prompt = int(record["input_length"])
                full = record["hash_ids"][: prompt // BLOCK_SIZE]
                output = max(1, int(record["output_length"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"line {number + 1} of {path} is {line[:60]!r}; it must have input_length, "
                    "output_length and hash_ids"
                ) from error
            requests.append(Request(f"r{number}", prompt, output, hashes=tuple(map(str, full))))
    return requests


def config_of(
    requests: Sequence[Request], policy: str, blocks: int, states: int, seqs: int
) -> SchedulerConfig:
    """A scheduler that can serve all requests. The arguments are those of `replay`."""
    groups = 1 + states
    return SchedulerConfig(
        BLOCK_SIZE,
        num_blocks=(blocks + 1) * groups - 1,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=seqs,
        max_model_len=max(request.prompt_len + request.max_tokens for request in requests),
        views=(ALL,) + (View(2),) * states,
        shares_filling=False,
        prefix_checkpoints=POLICIES[policy],
    )


def replay(requests: Sequence[Request], policy: str, blocks: int, states: int, seqs: int) -> Result:
    """Runs all requests under one policy.

    Args:
        policy: one of POLICIES.
        blocks: `num_blocks` of an engine.
        states: groups of layers that keep states, and so blocks of states for a block of tokens.
        seqs: running sequences.
    """
    state = scheduler.init(config_of(requests, policy, blocks, states, seqs))
    queue = list(reversed(requests))
    entered: set[str] = set()
    hit_tokens = 0
    preemptions = 0
    while queue or state.ids:
        while queue and len(state.ids) < seqs:
            state = scheduler.submit(state, queue.pop())
        state, plan = scheduler.schedule(state, FCFS)
        preemptions += len(plan.preempted)
        for name, cached in zip(plan.admitted, plan.cached, strict=True):
            hit_tokens += 0 if name in entered else cached
            entered.add(name)
        state, _ = scheduler.commit(state, plan, [0] * len(plan.seqs))
    keys = list(state.pool.contents)
    of_states = sum("." in key for key in keys)
    total = sum(request.prompt_len for request in requests)
    return Result(
        policy,
        blocks,
        found=hit_tokens / total,
        states=of_states // states,
        attention=len(keys) - of_states,
        preemptions=preemptions,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("trace", type=Path, help="JSON lines of Mooncake")
    parser.add_argument("--requests", type=int, default=1000, help="the first so many (1000)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[400], help="num_blocks (400)")
    parser.add_argument("--states", type=int, default=51, help="blocks of states (51)")
    parser.add_argument("--seqs", type=int, default=16, help="running sequences (16)")
    args = parser.parse_args(argv)
    check_least(parser, args, requests=1, blocks=1, states=1, seqs=1)
    try:
        requests = requests_of(args.trace, args.requests)
        results = [
            replay(requests, policy, blocks, args.states, args.seqs)
            for blocks in args.blocks
            for policy in POLICIES
        ]
    except (OSError, ValueError) as error:
        parser.error(f"cannot replay {args.trace}: {error}")
    print(aligned([Result._fields, *[_cells(result) for result in results]]))
    write_report(args.json, {"results": [result._asdict() for result in results]})
    return 0


def _cells(result: Result) -> list[str]:
    return [str(value) for value in result._replace(found=f"{result.found:.1%}")]


if __name__ == "__main__":
    sys.exit(main())
