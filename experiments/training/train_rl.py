"""Reinforcement learning: the model of train_tiny learns sums from rewards alone, in minutes.

    python -m experiments.training.train_tiny --out runs/tiny
    python -m experiments.training.train_rl --model runs/tiny/model --out runs/sums       # the same command resumes
    python -m experiments.training.train_rl --model runs/tiny/model --out runs/close --no-exact

Each step: the engine samples a group of answers to each prompt ("3+1="), a reward is computed of each, and one GRPO
update (Shao et al. 2024) makes answers likelier that are better than their group. `update_params` gives the engine the
new weights. The trainer computes log-probabilities by `score`. With `--exact` (the default) they have the engine's
bits, so the two policies are one and the divergence between them (KL) is exactly 0. With `--no-exact` it is measured.

    OUT/run.json            the options of the run; a command with other options is refused
    OUT/checkpoints/STEP/   parameters, optimiser, the log. A stopped run resumes from the last one, bit for bit
    OUT/log.json            of each step: reward, share of right answers, KL, largest difference of a log-probability
    OUT/reward.svg          reward and KL over the steps
    OUT/model/              a folder for LLM(model=...)
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from experiments.analysis.figures import curves
from experiments.core.json_files import write_json
from experiments.core.optional_imports import require
from experiments.training.checkpoints import State, begin, open_checkpoints, restore, save
from experiments.training.command import (
    add_setup,
    check_least,
    check_model,
    check_positive,
    check_seed,
    exit_status,
    run_parser,
    setup_of,
)
from experiments.training.rl_setup import RLSetup
from experiments.training.rl_task import Sum, reward, sums
from experiments.training.updates import first_state, next_state
from pagedjax import LLM, SamplingParams, load_model
from pagedjax.device.placement import fingerprint
from pagedjax.engine import compilations
from pagedjax.models import score
from pagedjax.weights.convert import complete_folder
from pagedjax.weights.orbax_checkpoint import PARAMS
from pagedjax.weights.pretrained import LoadedModel

optax = require("optax")

MAX_PROMPT = 12  # tokens


class Rollouts(NamedTuple):
    """What the engine said, N answers. Arrays of numpy."""

    tokens: Any  # [N, L] int32: prompt and answer, padded
    lengths: Any  # [N] int32
    answer: Any  # [N, L] bool: the tokens of the answer
    logprobs: Any  # [N, L] float32: log-probabilities that the engine sampled them with
    rewards: Any  # [N] float32


# --- rollouts -------------------------------------------------------------------------------------


def serving(setup: RLSetup) -> dict[str, Any]:
    """Options of the engine: one program, and a place for each answer."""
    n = setup.sums * setup.group
    return {
        "max_num_seqs": n,
        "max_num_batched_tokens": n,
        "token_buckets": (n,),
        "num_blocks": 2 * n,
        "max_model_len": MAX_PROMPT + setup.answer,
        "batch_invariant": setup.exact,
        "progress": False,
    }


def roll_out(llm: LLM, setup: RLSetup, step: int) -> Rollouts:
    """A group of answers to each sum of a step, drawn from the model's own distribution."""
    problems = sums(setup.seed, step, setup.sums, setup.largest)
    rng = np.random.default_rng((setup.seed, step, 1))
    params = [
        SamplingParams(
            n=setup.group, temperature=1.0, max_tokens=setup.answer, logprobs=0, seed=seed
        )
        for seed in rng.integers(2**31, size=setup.sums).tolist()
    ]
    outs = llm.generate([problem.prompt for problem in problems], params, use_tqdm=False)
    return rollouts_of(problems, outs, MAX_PROMPT + setup.answer)


def rollouts_of(problems: Sequence[Sum], outs: Sequence[Any], width: int) -> Rollouts:
    """Outputs of an engine, `n` to each prompt, as arrays of `width` tokens."""
    rows = [
        (problem, out.prompt_token_ids, branch)
        for problem, out in zip(problems, outs, strict=True)
        for branch in out.outputs
    ]
    tokens = np.zeros((len(rows), width), np.int32)
    lengths = np.zeros(len(rows), np.int32)
    answer = np.zeros(tokens.shape, bool)
    logprobs = np.zeros(tokens.shape, np.float32)
    rewards = np.zeros(len(rows), np.float32)
    for i, (problem, prompt, branch) in enumerate(rows):
        start = len(prompt)
        end = start + len(branch.token_ids)
        tokens[i, :end] = *prompt, *branch.token_ids
        lengths[i] = end
        answer[i, start:end] = True
        entries = zip(branch.token_ids, branch.logprobs, strict=True)
        logprobs[i, start:end] = [entry[token].logprob for token, entry in entries]
        rewards[i] = reward(problem, branch.text)
    return Rollouts(tokens, lengths, answer, logprobs, rewards)


# --- training -------------------------------------------------------------------------------------


class Trainer(NamedTuple):
    start: State
    update: Callable[[State, Rollouts], tuple[State, dict[str, jax.Array]]]  # the state is donated


def advantages(rewards: jax.Array, group: int) -> jax.Array:
    """GRPO's advantages [N]: the difference of each reward from the mean of its group, the answers
    to one prompt, in units of the group's deviation.
    """
    by_group = rewards.reshape(-1, group)
    return jax.nn.standardize(by_group, axis=1, epsilon=1e-4).reshape(-1)


def loss(logprobs: jax.Array, rollouts: Rollouts, setup: RLSetup) -> jax.Array:
    """PPO's clipped objective with GRPO's advantages, a mean over the tokens of the answers.

    Args:
        logprobs: [N, L] the trainer's log-probabilities.
    """
    ratio = jnp.exp(logprobs - rollouts.logprobs)
    gain = advantages(rollouts.rewards, setup.group)[:, None]
    clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - setup.clip, 1 + setup.clip) * gain)
    return -jnp.mean(clipped, where=rollouts.answer)


def divergence(logprobs: jax.Array, rollouts: Rollouts) -> dict[str, jax.Array]:
    """How far the trainer's policy is from the engine's: KL(engine | trainer) and the largest
    difference.

    KL is estimated from the engine's own tokens, without bias and without negative terms (k3 of
    Schulman 2020).
    """
    differences = jnp.where(rollouts.answer, logprobs - rollouts.logprobs, 0)
    kl = jnp.mean(jnp.expm1(differences) - differences, where=rollouts.answer)
    return {"kl": kl, "largest_difference": jnp.abs(differences).max()}


def make_trainer(setup: RLSetup, module: nnx.Module) -> Trainer:
    """The initial state and the compiled update of a run."""
    graphdef, params, constants = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]
    method = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(setup.rate))

    def loss_of(params: nnx.State, rollouts: Rollouts) -> tuple[jax.Array, dict[str, jax.Array]]:
        merged: Any = nnx.merge(graphdef, params, constants)
        logprobs = score(merged, rollouts.tokens, rollouts.lengths, batch_invariant=setup.exact)
        return loss(logprobs, rollouts, setup), divergence(logprobs, rollouts)

    def update(state: State, rollouts: Rollouts) -> tuple[State, dict[str, jax.Array]]:
        (_, facts), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params, rollouts)
        return next_state(method, state, gradients), facts

    state = first_state(method, params, may_alias=False)
    return Trainer(state, jax.jit(update, donate_argnums=0))


# --- the run --------------------------------------------------------------------------------------


@compilations.disk_cache()  # for the process that continues after a kill
def train(
    model: Path, out: Path, setup: RLSetup, every: int, *, say: Callable[[str], None] = print
) -> list[Any]:
    """Train, or resume the run in `out`. Returns the log, an entry for each step.

    Raises:
        ValueError: `out` belongs to another run, or is no run's folder.
        FileNotFoundError: there is no model.
    """
    loaded = load_model(model, dtype="float32", linear_impl="xla")  # matrices as a trainer has them
    begin(out, {**dataclasses.asdict(setup), "model": fingerprint(loaded.model)})
    trainer = make_trainer(setup, nnx.merge(loaded.model.graphdef, loaded.model.params))
    llm = LLM(load_model(model, dtype="float32"), **serving(setup))
    with open_checkpoints(out) as manager:
        step, state, log = restore(manager, trainer.start)
        say(f"{'step':>6} {'reward':>7} {'right':>7} {'KL':>9} {'largest difference':>19}")
        while step < setup.steps:
            llm.update_params(state.params)
            rollouts = roll_out(llm, setup, step)
            state, facts = trainer.update(state, rollouts)
            step += 1
            rewards = {
                "reward": float(rollouts.rewards.mean()),
                "right": float((rollouts.rewards == 1).mean()),
            }
            log = [*log, {"step": step, **rewards, **{name: float(x) for name, x in facts.items()}}]
            if step % every == 0 or step == setup.steps:
                save(manager, step, state, log)
                say(line(log[-every:]))
    write_json(out / "log.json", log)
    (out / "reward.svg").write_text(figure({out.name: log}), encoding="utf-8")
    if not (out / "model").exists():
        write_model(out / "model", model, loaded, state.params)
    return log


def line(log: Sequence[Any]) -> str:
    """The means of some steps, and their largest difference, as a line of the table."""
    reward = np.mean([entry["reward"] for entry in log])
    right = np.mean([entry["right"] for entry in log])
    kl = np.mean([entry["kl"] for entry in log])
    largest = max(entry["largest_difference"] for entry in log)
    return f"{log[-1]['step']:6} {reward:7.3f} {100 * right:5.1f} % {kl:9.2g} {largest:19.2g}"


def figure(logs: dict[str, Sequence[Any]], span: int = 10) -> str:
    """An SVG of runs by name: means over `span` steps of reward, right answers and KL."""

    def means(log: Sequence[Any], name: str) -> list[tuple[float, float]]:
        parts = [log[i : i + span] for i in range(0, len(log), span)]
        return [
            (part[-1]["step"], float(np.mean([entry[name] for entry in part]))) for part in parts
        ]

    titles = {"reward": "reward", "right": "right answers", "kl": "KL of engine and trainer"}
    panels = {
        title: {run: means(log, name) for run, log in logs.items()}
        for name, title in titles.items()
    }
    return curves(panels, "step", ["mean of a step", "share", "nats a token"])


def write_model(folder: Path, source: Path, loaded: LoadedModel, params: nnx.State) -> None:
    """Write a folder for LLM(model=folder), atomically: the source's, with other parameters."""
    with complete_folder(folder.absolute()) as part:
        for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
            shutil.copyfile(source / name, part / name)
        with ocp.StandardCheckpointer() as orbax:
            orbax.save(part / PARAMS, params)


# --- command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = run_parser(__doc__, every=20)
    parser.add_argument("--model", type=Path, required=True, help="folder that train_tiny wrote")
    add_setup(parser, RLSetup)
    args = parser.parse_args(argv)
    setup = setup_of(args, RLSetup)
    check_least(parser, args, every=1, steps=1, sums=1, group=2, largest=1, answer=1)
    if setup.largest > 999:
        parser.error(
            f"--largest is {setup.largest}; it must be at most 999, so that a prompt has "
            f"{MAX_PROMPT} "
            "tokens at most"
        )
    check_positive(parser, args, "rate", "clip", below=1)
    check_seed(parser, setup.seed)
    check_model(parser, args.model)
    say = partial(print, flush=True)
    return exit_status(lambda: train(args.model, args.out, setup, args.every, say=say))


if __name__ == "__main__":
    sys.exit(main())
