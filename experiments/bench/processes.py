"""What do several processes cost the host in a step?

    python -m experiments.bench.processes [--sequences 1 64 256]

Two processes of this machine run without a device: the scheduler decodes, process 0 adds the lines
of each step to its digest and sends the step's input, and process 1 receives it. The columns are
medians of microseconds a step: `schedule` is schedule + commit; `digest` is the lines of both and
their hash; `send` is what process 0 needs to send the input; `arrive` is the time from then until
process 1 has the input, over a socket on this machine.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from experiments.bench.harness import bench_parser, write_report
from pagedjax.engine.processes.connection import Connection, encode
from pagedjax.engine.processes.engines import Digest
from pagedjax.host import scheduler
from pagedjax.host.event_log import Commit, Schedule
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Request

PROMPT = 32  # tokens


class Costs(NamedTuple):
    """Microseconds a step."""

    sequences: int
    schedule: float
    digest: float
    send: float
    arrive: float


def state_with(sequences: int, steps: int) -> SchedulerState:
    """A scheduler with `sequences` requests that decode for `steps` steps."""
    blocks = sequences * (1 + (PROMPT + steps) // 16)
    config = SchedulerConfig(
        block_size=16,
        num_blocks=blocks,
        max_num_batched_tokens=sequences * PROMPT,
        max_num_seqs=sequences,
        max_model_len=PROMPT + steps + 2,
    )
    state = scheduler.init(config)
    for i in range(sequences):
        state = scheduler.submit(state, Request(f"r{i}", PROMPT, steps + 1))
    return state


def measure(sequences: int, steps: int, connection: Connection) -> Costs:
    """Decode `sequences` sequences for `steps` steps. Returns the costs of a step."""
    state = state_with(sequences, steps)
    digest = Digest()
    times = []
    for number in range(steps):
        state, step_times = timed_step(state, digest, number, connection)
        times.append(step_times)
        sleep(0.002)  # the device's part, in which the other process reads
    connection.send(encode({"input": "end"}))
    arrivals = (connection.receive() or {})["arrivals"]
    # without the first step, which computes the prompts
    columns = (*zip(*times[1:], strict=True), arrivals[1:])
    return Costs(sequences, *map(microseconds, columns))


def timed_step(
    state: SchedulerState, digest: Digest, number: int, connection: Connection
) -> tuple[SchedulerState, tuple[float, float, float]]:
    """Make a step of process 0. Returns the state after it, and the seconds of scheduling, of the
    digest and of sending.
    """
    start = perf_counter()
    state, plan = scheduler.schedule(state, FCFS)
    scheduled = perf_counter()
    digest.write(Schedule(plan))
    text = digest._hash.hexdigest()
    digest.lines = []
    counted = perf_counter()
    message = {"input": "step", "number": number, "drafts": 0, "digest": text}
    connection.send(encode({**message, "at": perf_counter()}))
    sent = perf_counter()
    sampled = [7] * len(plan.seqs)
    state, events = scheduler.commit(state, plan, sampled)
    committed = perf_counter()
    digest.write(Commit(plan, sampled, {}, {}, events))
    end = perf_counter()
    scheduling = (scheduled - start) + (committed - sent)
    digesting = (counted - scheduled) + (end - committed)
    return state, (scheduling, digesting, sent - counted)


def microseconds(seconds: Sequence[float]) -> float:
    """The median of some seconds, in microseconds."""
    return round(1e6 * median(seconds), 1)


def receive(address: tuple[str, int], runs: int) -> None:
    """Receive the messages as process 1, and send back how long each was on its way."""
    with socket.create_connection(address) as stream:
        connection = Connection(stream)
        for _ in range(runs):
            arrivals = []
            for message in connection.messages():
                if message["input"] == "end":
                    break
                # all processes of a machine have one clock
                arrivals.append(perf_counter() - message["at"])
            connection.send(encode({"arrivals": arrivals}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = multiprocessing.get_context("spawn")
        process_arguments = (listener.getsockname(), len(options.sequences))
        process = context.Process(target=receive, args=process_arguments, daemon=True)
        process.start()
        stream, _ = listener.accept()
        connection = Connection(stream)
        print("sequences  schedule  digest    send  arrive   (us a step)")
        for sequences in options.sequences:
            costs = measure(sequences, options.steps, connection)
            rows.append(costs._asdict())
            print(f"{costs.sequences:9}" + "".join(f"{value:9.1f}" for value in costs[1:]))
        connection.close()
        process.join(30)
    write_report(options.json, {"rows": rows}, device=False)


if __name__ == "__main__":
    main()
