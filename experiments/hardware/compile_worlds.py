"""Does the scheduler on arrays compile for chips that are not here, and how much memory have its
worlds?

    python -m experiments.hardware.compile_worlds --target v5e [--worlds 1024] [--requests 64]
    python -m experiments.hardware.compile_worlds --target h200

The program plays an episode of each world under a learnt policy (`rollout.returns`), all worlds
together. It is compiled for one device. The compilers are those of compile_step. Nothing is
executed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
from flax import nnx
from jax.sharding import SingleDeviceSharding

from experiments.bench.harness import at_least_1
from experiments.hardware import compilers
from experiments.hardware.compilers import TARGETS
from experiments.twin import network
from experiments.twin.environment import Environment
from experiments.twin.rollout import returns
from pagedjax.device import memory

PATIENCE = 64
UNITS = 16


def episodes(requests: int, worlds: int) -> tuple[Any, tuple[Any, Any]]:
    """The program, keys and weights -> returns, and the shapes of its arguments."""
    world = Environment(requests)
    params = world.default_params

    def program(keys: jax.Array, weights: network.Integers) -> jax.Array:
        return returns(world, network.order, weights, params, keys)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), worlds))
    scorer = nnx.eval_shape(lambda: network.Scorer(UNITS, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(scorer)

    def weights_of(state: Any) -> network.Integers:
        return network.integers(nnx.merge(graphdef, state), PATIENCE)

    return program, (keys, jax.eval_shape(weights_of, state))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--worlds", type=at_least_1, default=1024)
    parser.add_argument("--requests", type=at_least_1, default=64)
    args = parser.parse_args(argv)
    target = compilers.target(args.target)
    missing = compilers.what_is_missing(target)
    if missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    compilers.prepare(target)
    device = compilers.devices(target, compilers.topology_of(target, 1))[0]
    program, shapes = episodes(args.requests, args.worlds)
    sharding = SingleDeviceSharding(device)
    started = time.perf_counter()
    jitted = jax.jit(program, in_shardings=sharding, out_shardings=sharding)
    compiled = jitted.lower(*shapes).compile()
    seconds = time.perf_counter() - started
    report: Any = compiled.memory_analysis()
    code = report.generated_code_size_in_bytes
    print(
        f"{args.worlds:,} worlds of {args.requests} requests: compiled for one {args.target} in "
        f"{seconds:.0f} s, JAX {jax.__version__}\n"
        f"{memory.size(report.temp_size_in_bytes)} of memory beside "
        f"{memory.size(report.argument_size_in_bytes)} of arguments, {memory.size(code)} of code"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
