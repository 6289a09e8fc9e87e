"""How many steps a second do schedulers on arrays make, and how many does the simulator?

    python -m experiments.bench.worlds [--worlds 1 64 1024] [--requests 64] [--rounds 5] [--json out.json]

All run the same requests under the policy "shortest" with the same step time: the worlds of
train_policy. Steps that compute nothing do not count. Worlds on arrays are shared by the cores, a
thread and an equal part for each. The simulator runs one world after the other, in one process: a
step at a time, and with the steps together that only decode (as `experiments.run` does).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import at_least_1, bench_parser, in_turn, markdown, write_report
from experiments.core.drive import drive
from experiments.core.environment import usable_cores
from experiments.core.replicas import drive_replicas
from experiments.simulation.cost import CHIPS, SHAPES, Roofline
from experiments.simulation.spans import DecodeSpan
from experiments.training.train_policy import Setup, world_of
from experiments.twin import policies, simulated
from experiments.twin.environment import Environment, Params
from experiments.twin.rollout import cached, played
from experiments.twin.scheduler import Requests
from pagedjax.host.types import StepResult
from pagedjax.routing.routers import ROUND_ROBIN


class Speed(NamedTuple):
    """Steps that had a row, and the seconds that they took."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


def on_arrays(
    world: Environment, params: Params, keys: jax.Array, pool: ThreadPoolExecutor, threads: int
) -> Callable[[], Speed]:
    """A run of a world from each key. It is compiled once, for the part of a thread."""

    def steps_of(keys: jax.Array) -> jax.Array:
        decide = policies.without_parameters(policies.shortest)
        states, _ = played(world, decide, None, params, keys, cached())
        return states.scheduler.step.sum()

    threads = min(threads, len(keys))
    parts = jnp.split(keys[: len(keys) // threads * threads], threads)
    program = jax.jit(steps_of).lower(parts[0]).compile()

    def run() -> Speed:
        start = time.perf_counter()
        counts = pool.map(lambda part: int(program(part)), parts)
        steps = sum(counts)
        return Speed(steps, time.perf_counter() - start)

    return run


class Count:
    """The steps that a driver of replicas notes."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, replica: int, result: StepResult) -> None:
        self.steps += bool(result.plan.seqs)

    def span(self, replica: int, span: DecodeSpan) -> None:
        self.steps += len(span.times.finished)


def in_the_simulator(setup: Setup, drawn: Sequence[Requests], *, spans: bool) -> Speed:
    """Runs of worlds. spans: make steps together that only decode."""
    roofline = Roofline(SHAPES[setup.model], CHIPS[setup.chip])
    config = simulated.engine_config(setup, "shortest")
    count = Count()
    start = time.perf_counter()
    for requests in drawn:
        engine = simulated.engine_of(config, roofline)
        items = simulated.items_of(requests)
        if spans:
            drive_replicas([engine], ROUND_ROBIN, 0, items, simulated.SAMPLING, count)
        else:
            _, results = drive(engine, items, simulated.SAMPLING, engine.clock, engine.sleep)
            count.steps += sum([bool(result.plan.seqs) for result in results])
    return Speed(count.steps, time.perf_counter() - start)


def measure(setup: Setup, counts: Sequence[int], rounds: int, worlds: int) -> list[dict[str, Any]]:
    """The rates by number of worlds, and those of the simulator over `worlds` worlds."""
    world, params = world_of(setup)
    all_keys = jax.random.split(jax.random.key(setup.seed), max(counts))
    drawn = [jax.device_get(world.draw(key, params.workload)) for key in all_keys[:worlds]]
    threads = usable_cores() or 1
    with ThreadPoolExecutor(threads) as pool:
        runs: dict[str, Callable[[], Speed]] = {
            f"{count} worlds on arrays": on_arrays(world, params, all_keys[:count], pool, threads)
            for count in counts
        }
        runs["the simulator"] = partial(in_the_simulator, setup, drawn, spans=False)
        runs["the simulator, decodes together"] = partial(
            in_the_simulator, setup, drawn, spans=True
        )
        results = in_turn(runs, rounds)
    rates = {name: [speed.rate for speed in speeds] for name, speeds in results.items()}
    simulator = float(np.median(rates["the simulator"]))
    return [
        {
            "run": name,
            "steps_per_second": round(float(np.median(values))),
            "lowest": round(min(values)),
            "highest": round(max(values)),
            "ratio": round(float(np.median(values)) / simulator, 1),
        }
        for name, values in rates.items()
    ]


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--worlds", type=at_least_1, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--requests", type=at_least_1, default=64)
    parser.add_argument("--rounds", type=at_least_1, default=5)
    args = parser.parse_args(argv)
    setup = Setup(requests=args.requests)
    rows = measure(setup, args.worlds, args.rounds, worlds=min(8, max(args.worlds)))
    cells = [[str(value) for value in row.values()] for row in rows]
    print(markdown(["run", "steps/s", "lowest", "highest", "ratio"], cells))
    write_report(args.json, {"requests": args.requests, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
