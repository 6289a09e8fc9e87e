"""How many steps a second do schedulers on arrays make, and how many does the simulator?

    python -m experiments.bench.worlds [--worlds 1 64 1024] [--requests 64] [--rounds 5] [--json out.json]

Both run the same requests under the policy "shortest" with the same step time: the worlds of
train_policy. The simulator runs one world after the other, in one process. Its `drive` loop makes
several steps at once where it can, and each of them counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench.harness import at_least_1, bench_parser, in_turn, markdown, write_report
from experiments.simulation.cost import CHIPS, SHAPES, Roofline
from experiments.training.train_policy import Setup, world_of
from experiments.twin import policies, simulated
from experiments.twin.environment import Environment, Params
from experiments.twin.rollout import played
from experiments.twin.scheduler import Requests


class Speed(NamedTuple):
    """Steps that had a row, and the seconds that they took."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


def on_arrays(world: Environment, params: Params, keys: jax.Array) -> Any:
    """A compiled run of a world from each key -> steps of all of them."""

    def run(keys: jax.Array) -> jax.Array:
        decide = policies.without_parameters(policies.shortest)
        states, _ = played(world, decide, None, params, keys)
        return states.scheduler.step.sum()

    return jax.jit(run).lower(keys).compile()


def in_the_simulator(setup: Setup, requests: Requests) -> Speed:
    """A run of one world."""
    roofline = Roofline(SHAPES[setup.model], CHIPS[setup.chip])
    start = time.perf_counter()
    run = simulated.run(requests, simulated.engine_config(setup, "shortest"), roofline)
    return Speed(run.steps, time.perf_counter() - start)


def measure(setup: Setup, counts: Sequence[int], rounds: int, worlds: int) -> list[dict[str, Any]]:
    """The rates by number of worlds, and that of the simulator over `worlds` worlds."""
    world, params = world_of(setup)
    all_keys = jax.random.split(jax.random.key(setup.seed), max(counts))
    runs: dict[str, Any] = {}
    for count in counts:
        keys = all_keys[:count]
        program = on_arrays(world, params, keys)

        def run(program: Any = program, keys: jax.Array = keys) -> Speed:
            start = time.perf_counter()
            steps = int(program(keys))
            return Speed(steps, time.perf_counter() - start)

        runs[f"{count} worlds on arrays"] = run
    drawn = [jax.device_get(world.draw(key, params.workload)) for key in all_keys[:worlds]]

    def simulate() -> Speed:
        speeds = [in_the_simulator(setup, requests) for requests in drawn]
        return Speed(sum([s.steps for s in speeds]), sum([s.seconds for s in speeds]))

    runs["the simulator"] = simulate
    results = in_turn(runs, rounds)
    simulator = float(np.median([speed.rate for speed in results["the simulator"]]))
    return [
        {
            "run": name,
            "steps_per_second": round(float(np.median([speed.rate for speed in speeds]))),
            "ratio": round(float(np.median([speed.rate for speed in speeds])) / simulator, 1),
        }
        for name, speeds in results.items()
    ]


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("--worlds", type=at_least_1, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--requests", type=at_least_1, default=64)
    parser.add_argument("--rounds", type=at_least_1, default=5)
    args = parser.parse_args(argv)
    setup = Setup(requests=args.requests)
    rows = measure(setup, args.worlds, args.rounds, worlds=min(8, max(args.worlds)))
    print(markdown(["run", "steps/s", "ratio"], [list(row.values()) for row in rows]))
    write_report(args.json, {"requests": args.requests, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
