"""Trains a scheduling policy in a thousand worlds at once, and writes it as a file that engines run.

    python -m experiments.training.train_policy --out runs/policy          # the same command resumes
    pagedjax check runs/policy/learned.py:POLICY
    pagedjax generate "Hello" --policy runs/policy/learned.py:POLICY

The worlds are schedulers on arrays (experiments/twin). The policy is a small network
(experiments/twin/learned.py). It is trained by evolution strategies, or with `--method gradient` by
a policy gradient (policy_methods.py). Every `--every` steps the command compares the policy on
held-out episodes with "fcfs", "shortest" and an oracle that knows all lengths, and writes a
checkpoint.

    OUT/run.json            the options of the run; a command with other options is refused
    OUT/checkpoints/STEP/   parameters, optimiser, losses. A killed run resumes from the last one,
                            bit for bit
    OUT/learned.py          the policy, POLICY, for LLM(policy="OUT/learned.py:POLICY")

The requests are of three kinds: chats, summaries (long prompts, short answers) and essays (short
prompts, long answers). Their predicted lengths are wrong by a factor. So the shortest prompt is a
bad guess of the shortest request.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.flatten_util import ravel_pytree

from experiments.core.optional_imports import require
from experiments.simulation.cost import CHIPS, SHAPES, Roofline
from experiments.training.checkpoints import Loss, State, begin, open_checkpoints, restore, save
from experiments.training.command import (
    add_setup,
    check_least,
    check_positive,
    check_seed,
    exit_status,
    run_parser,
    setup_of,
)
from experiments.training.policy_methods import METHODS, Problem
from experiments.training.policy_setup import Setup
from experiments.training.updates import first_state, next_state
from experiments.twin import environment, learned, network, policies, simulated, workloads
from experiments.twin.cost import MICROSECONDS, Cost
from experiments.twin.environment import Environment, Params
from experiments.twin.learned import LARGEST_PATIENCE, MOST_UNITS
from experiments.twin.network import Integers, Scorer
from experiments.twin.policies import Decide
from experiments.twin.rollout import Difference, cached, difference, returns, shortest_left
from experiments.twin.scheduler import Requests, Sizes
from pagedjax.engine import compilations
from pagedjax.options.config import one_of
from pagedjax.options.own_names import names_own_value
from pagedjax.options.own_values import own_function

optax = require("optax")

HELD_OUT = 10**6  # the number of the held-out episodes; steps of training have lower ones
# seconds in which requests arrive on average; a time beyond LATEST would be cut off
LONGEST = workloads.LATEST / MICROSECONDS / 2


def reward_of(name: str) -> environment.Reward:
    """The reward of that name: one of `environment.REWARDS`, or your own as "file.py:NAME".

    Raises:
        ValueError: there is no such reward.
    """
    if names_own_value(name):
        return own_function("reward", name, 3)
    one_of("reward", name, tuple(environment.REWARDS))
    return environment.REWARDS[name]


def world_of(setup: Setup) -> tuple[Environment, Params]:
    """The environment of a run, and its parameters."""
    rows = min(setup.max_num_seqs, setup.max_num_batched_tokens)
    sizes = Sizes(setup.block_size, setup.num_blocks, setup.max_num_batched_tokens, rows)
    one_of("method", setup.method, tuple(METHODS))
    one_of("chip", setup.chip, tuple(CHIPS))
    one_of("model", setup.model, tuple(SHAPES))
    roofline = Roofline(SHAPES[setup.model], CHIPS[setup.chip])
    cost = Cost.of(roofline, sizes, f"{setup.model} on {setup.chip}")
    if setup.units > MOST_UNITS:
        raise ValueError(
            f"units is {setup.units}; at most {MOST_UNITS} fit into an int32: lower --units"
        )
    if setup.patience > LARGEST_PATIENCE:
        raise ValueError(
            f"patience is {setup.patience}; it must be at most {LARGEST_PATIENCE} arrivals: lower "
            "--patience"
        )
    if setup.steps >= HELD_OUT - 1:
        raise ValueError(
            f"steps is {setup.steps}; it must be below {HELD_OUT - 1}, the numbers from which on "
            "episodes are held out: lower --steps"
        )
    seconds = setup.requests / setup.rate
    if seconds > LONGEST:
        raise ValueError(
            f"{setup.requests} requests at {setup.rate:g} a second arrive within {seconds:.0f} "
            f"seconds; at most {LONGEST:.0f} fit: raise --rate or lower --requests"
        )
    largest = -(-1600 // setup.block_size)
    if setup.num_blocks < largest:
        raise ValueError(
            f"num_blocks is {setup.num_blocks}, and the longest request of 1600 tokens has "
            f"{largest} blocks of {setup.block_size}; raise --num-blocks"
        )
    world = Environment(setup.requests, reward=reward_of(setup.reward))
    return world, Params(sizes, cost, workloads.mixed(setup.rate, setup.spread))


# --- the trainer ----------------------------------------------------------------------------------


class Trainer(NamedTuple):
    """problem: what is trained, and the worlds in which it is."""

    problem: Problem
    start: State
    update: Callable[[State, int], tuple[State, jax.Array]]  # (state, step) -> (state, loss)
    weights: Callable[[Any], Integers]  # of the parameters
    held_out: Callable[[Any], dict[str, np.ndarray]]  # returns by policy, [episodes] each
    drawn: Callable[[int], list[Requests]]  # the first held-out episodes, as numpy arrays


def make_trainer(setup: Setup) -> Trainer:
    """The initial state and the compiled functions of a run."""
    world, params = world_of(setup)
    scorer = Scorer(setup.units, rngs=nnx.Rngs(setup.seed))
    assert scorer.output.bias is not None
    # scores begin within their limits, of which the lower one is 0
    scorer.output.bias[...] = jnp.full_like(scorer.output.bias[...], setup.patience / 4)
    graphdef, first = nnx.split(scorer)
    flat, unravel = ravel_pytree(first)
    method = optax.adam(setup.learning_rate)
    root = jax.random.key(setup.seed)

    def scorer_of(vector: jax.Array) -> Scorer:
        return nnx.merge(graphdef, unravel(vector))

    def weights(vector: jax.Array) -> Integers:
        return network.integers(scorer_of(vector), setup.patience)

    def episodes(number: jax.Array, count: int) -> jax.Array:
        return jax.random.split(jax.random.fold_in(root, number), count)

    def returns_of(decide: Decide, policy: Any, keys: jax.Array) -> jax.Array:
        return returns(world, decide, policy, params, keys, together=cached())

    problem = Problem(world, params, scorer_of, weights, episodes, setup.patience)
    estimate = METHODS[setup.method]

    @partial(jax.jit, donate_argnums=0)
    def update(state: State, step: jax.Array) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(root, HELD_OUT - 1), step)
        gradient, loss = estimate(problem, setup, state.params, step, key)
        return next_state(method, state, gradient), loss

    @jax.jit
    def held_out(vector: jax.Array) -> dict[str, jax.Array]:
        keys = episodes(jnp.int32(HELD_OUT), setup.held_out)
        results = {"learned": returns_of(network.order, weights(vector), keys)}
        for name in ("fcfs", "shortest"):
            decide = policies.without_parameters(policies.POLICIES[name])
            results[name] = returns_of(decide, None, keys)
        results["oracle"] = returns_of(shortest_left, None, keys)
        return results

    draw = jax.jit(world.draw)

    def drawn(count: int) -> list[Requests]:
        keys = episodes(jnp.int32(HELD_OUT), setup.held_out)[:count]
        return [jax.device_get(draw(key, params.workload)) for key in keys]

    return Trainer(
        problem,
        first_state(method, flat),
        lambda state, step: update(state, jnp.int32(step)),
        weights,
        lambda vector: jax.device_get(held_out(vector)),
        drawn,
    )


# --- the run --------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Of held-out episodes.

    means: mean return by policy.
    over_fcfs, over_shortest: how much more the policy returns.
    gap: which share of the oracle's advantage over "fcfs" it has; NaN if the oracle has none.
    """

    means: dict[str, float]
    over_fcfs: Difference
    over_shortest: Difference
    gap: float


def compared(results: dict[str, np.ndarray]) -> Comparison:
    """What the returns of held-out episodes say."""
    means = {name: float(np.mean(values)) for name, values in results.items()}
    advantage = means["oracle"] - means["fcfs"]
    return Comparison(
        means,
        difference(results["learned"], results["fcfs"]),
        difference(results["learned"], results["shortest"]),
        (means["learned"] - means["fcfs"]) / advantage if advantage else math.nan,
    )


def row(step: int, loss: float, comparison: Comparison) -> str:
    """A line of the table."""
    means = comparison.means
    return (
        f"{step:6} {loss:9.4f} {means['learned']:9.4f} {means['fcfs']:9.4f} "
        f"{means['shortest']:9.4f} {means['oracle']:9.4f} {comparison.gap:6.2f} "
        f"{_interval(comparison.over_shortest)}"
    )


@compilations.disk_cache()  # for the process that continues after a kill
def train(out: Path, setup: Setup, every: int, *, say: Callable[[str], None] = print) -> list[Loss]:
    """Train, or resume the run in `out`, and write its policy -> the losses of every `every`
    steps.

    Raises:
        ValueError: `out` belongs to another run, or is no run's folder; an option is wrong; or the
            reward is no finite number.
    """
    trainer = make_trainer(setup)
    begin(out, dataclasses.asdict(setup))
    with open_checkpoints(out) as manager:
        step, state, losses = restore(manager, trainer.start)
        say(
            f"{state.params.size} parameters; {2 * setup.pairs * setup.worlds} worlds of "
            f"{setup.requests} requests a step; returns are of the reward {setup.reward!r}\n"
            f"{'step':>6} {'loss':>9} {'learned':>9} {'fcfs':>9} {'shortest':>9} {'oracle':>9} "
            f"{'gap':>6} learned - shortest, 95 %"
        )
        while step < setup.steps:
            end = min(step + every - step % every, setup.steps)
            sums = []
            for i in range(step, end):
                state, loss = trainer.update(state, i)
                sums.append(loss)
            step = end
            mean = float(np.mean(jax.device_get(sums)))
            if not math.isfinite(mean):
                raise ValueError(
                    f"the loss is {mean} before step {end}: the reward {setup.reward!r} is no "
                    "finite number, or an episode takes more than 35 minutes; mend the reward, or "
                    "lower --requests"
                )
            comparison = compared(trainer.held_out(state.params))
            held_out = -comparison.means["learned"]
            gap = comparison.gap
            losses = [*losses, {"step": step, "train": mean, "held_out": held_out, "gap": gap}]
            save(manager, step, state, losses)
            say(row(step, mean, comparison))
    file = out / "learned.py"
    origin = f"A policy that was learnt by {setup.steps} steps of train_policy, for {setup.reward}."
    weights = network.network_of(trainer.weights(state.params))
    file.write_text(learned.source("learned", weights, origin), encoding="utf-8")
    say(f"{file}:POLICY is the policy")
    if setup.simulated:
        say(simulated_row(trainer, setup, f"{file}:POLICY"))
    return losses


def simulated_row(trainer: Trainer, setup: Setup, policy: str) -> str:
    """Mean latencies of the first held-out episodes in the simulator."""
    requests = trainer.drawn(setup.simulated)
    count = len(requests)
    roofline = Roofline(SHAPES[setup.model], CHIPS[setup.chip])
    seconds: dict[str, list[float]] = {}
    for name in (policy, "fcfs", "shortest"):
        config = simulated.engine_config(setup, name)
        seconds[name] = [
            simulated.mean_latency(simulated.run(episode, config, roofline), episode)
            for episode in requests
        ]
    means = {name: np.mean(values) for name, values in seconds.items()}
    over = [
        difference(np.asarray(seconds[name]), np.asarray(seconds[policy]))
        for name in ("fcfs", "shortest")
    ]
    return (
        f"mean latency in the simulator, {count} episodes: learned "
        f"{means[policy]:.4f} s, fcfs {means['fcfs']:.4f} ({_interval(over[0])}), shortest "
        f"{means['shortest']:.4f} ({_interval(over[1])})"
    )


def _interval(gain: Difference) -> str:
    return f"{gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"


def main(argv: list[str] | None = None) -> int:
    parser = run_parser(__doc__, every=20)
    add_setup(parser, Setup)
    args = parser.parse_args(argv)
    counts = ("steps", "every", "units", "pairs", "worlds")
    sizes = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
    limits = dict.fromkeys((*counts, *sizes), 1)
    check_least(parser, args, **limits, requests=3, held_out=2, patience=0, simulated=0)
    if args.simulated == 1:
        parser.error("--simulated is 1; one episode has no interval: give 0, or at least 2")
    check_positive(parser, args, "rate", "sigma", "temperature", "learning_rate")
    check_seed(parser, args.seed)
    return exit_status(lambda: train(args.out, setup_of(args, Setup), args.every))


if __name__ == "__main__":
    sys.exit(main())
