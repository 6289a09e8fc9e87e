"""Trains a draft head (pagedjax/device/models/eagle.py) for a model, on the model's own outputs, in minutes.

    python -m experiments.training.train_draft --out runs/draft                       # the same command resumes
    python -m experiments.training.train_draft --out runs/short --steps 60 --windows 64
    pagedjax serve smollm2-135m --speculative '{"method": "eagle", "model": "runs/draft/head"}'

The prompts are pieces of Python's documentation, so nothing is downloaded. Every `--every` steps the command prints
losses, and the share of held-out tokens of which the first, second and third draft is the model's best token. At the
end an engine drafts with the head for held-out prompts, and the command prints how many drafts it accepts.

    OUT/run.json            the options of the run; a command with other options is refused
    OUT/windows.npz, held_out.npz   prompts, the model's outputs, and its layers' outputs on both
    OUT/checkpoints/STEP/   parameters, optimiser, losses. A killed run resumes from the last one, bit for bit
    OUT/head/               a folder for speculative.model
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.core.speculation import acceptance_of
from experiments.training import draft_data
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
from experiments.training.data import text_digest
from experiments.training.draft_data import Windows
from experiments.training.draft_loss import loss
from experiments.training.draft_setup import DraftSetup
from experiments.training.updates import adamw, first_state, next_state, run_steps
from pagedjax import LLM, SamplingParams, load_model
from pagedjax.device import formats
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.eagle import Eagle, assemble_eagle, blank_eagle, eagle_config
from pagedjax.engine import compilations
from pagedjax.weights.draft_model import write_eagle
from pagedjax.weights.pretrained import LoadedModel
from pagedjax.weights.tree import named, nested

DRAFTS = 3  # drafts of a sequence in a step, in the measurement at the end


# --- the head -------------------------------------------------------------------------------------


def initial(model: Model, ids: np.ndarray, seed: int) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A head that begins near the model's own output: its feature is the output of the last layer,
    and its output matrix has the model's rows.

    Returns:
        (structure, parameters to train, other values)
    """
    config = eagle_config(model.config, len(ids))
    rng = np.random.default_rng((seed, 3))
    target = named(model.params)
    values = {
        name: _random(name, x.shape, rng)
        for name, x in named(blank_eagle(config, "float32")[1]).items()
    }
    hidden = model.config.hidden
    values["fuse.weight"][:, -hidden:] = np.eye(hidden)  # the last tap is the last layer
    values["join.weight"][:, hidden:] = np.eye(hidden)
    matrix = "embed" if model.config.tied else "head.weight"
    projection = formats.restored(model.config.stored, target, matrix)
    values["head.weight"] = projection[ids]
    # half of the model's norm, so that the head is less sure than the model
    values["norm.weight"] = np.asarray(target["norm.weight"], np.float32) / 2
    arrays = {name: jnp.asarray(x) for name, x in values.items()}
    head = nnx.merge(*assemble_eagle(config, ids, nested(arrays), "float32"))
    graphdef, params, constants = nnx.split(head, nnx.Param, ...)
    return graphdef, params, constants


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Matrices are normal, of deviation 1 / sqrt(columns), and small where they add to the feature;
    norms are ones.
    """
    if len(shape) == 1:
        return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
    adds_to_feature = name.endswith(("fuse.weight", "join.weight", "out.weight", "down.weight"))
    scale = 0.1 if adds_to_feature else 1.0
    return np.float32(scale * shape[-1] ** -0.5) * rng.standard_normal(shape, np.float32)


# --- training -------------------------------------------------------------------------------------


class Trainer(NamedTuple):
    start: State
    # (state, windows) -> (state, loss); the state is donated
    update: Callable[[State, Windows], tuple[State, jax.Array]]
    # (parameters, windows) -> loss, share of right drafts by pass
    measure: Callable[[nnx.State, Windows], tuple[float, list[float]]]


def make_trainer(setup: DraftSetup, model: Model, ids: np.ndarray) -> Trainer:
    """The initial state and the compiled functions of a run."""
    graphdef, params, constants = initial(model, ids, setup.seed)
    place = np.full(model.config.vocab_size, -1, np.int32)
    place[ids] = np.arange(len(ids))
    method = adamw(setup, 20, b2=0.95, weight_decay=0.1)

    def loss_of(
        params: nnx.State, model_params: Any, windows: Windows
    ) -> tuple[jax.Array, jax.Array]:
        head: Eagle = nnx.merge(graphdef, params, constants)
        return loss(
            head, nnx.merge(model.graphdef, model_params), jnp.asarray(place), windows, setup.passes
        )

    def update(state: State, model_params: Any, windows: Windows) -> tuple[State, jax.Array]:
        (value, _), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            state.params, model_params, windows
        )
        return next_state(method, state, gradients), value

    state = first_state(method, params)
    jit_update = jax.jit(update, donate_argnums=0)
    loss_of_batch = jax.jit(loss_of)
    return Trainer(
        state,
        lambda state, windows: jit_update(state, model.params, windows),
        lambda params, windows: mean_loss(
            lambda batch: loss_of_batch(params, model.params, batch), windows, setup.batch
        ),
    )


def mean_loss(
    loss_of_batch: Callable[[Windows], tuple[jax.Array, jax.Array]], windows: Windows, size: int
) -> tuple[float, list[float]]:
    """The means of (loss, share of right drafts by pass) over whole batches of `size` windows."""
    losses = []
    right_shares = []
    for i in range(0, len(windows.tokens) - size + 1, size):
        batch_loss, batch_right = loss_of_batch(Windows(*(x[i : i + size] for x in windows)))
        losses.append(float(batch_loss))
        right_shares.append(np.asarray(batch_right))
    return float(np.mean(losses)), np.mean(right_shares, axis=0).tolist()


# --- the run --------------------------------------------------------------------------------------


def options(setup: DraftSetup) -> dict[str, Any]:
    """What tells a run from other runs: its options and its text."""
    return {**dataclasses.asdict(setup), "text": text_digest()}


def prepare(
    out: Path, model: LoadedModel, setup: DraftSetup, say: Callable[[str], None]
) -> tuple[Windows, Windows]:
    """The training windows and the held-out windows, from the run's folder if they are there."""
    files = (out / "windows.npz", out / "held_out.npz")
    taps = eagle_config(model.model.config, 1).taps
    for file, prompts in zip(files, draft_data.prompts(model.tokenizer.encode, setup), strict=True):
        if not file.is_file():
            started = time.perf_counter()
            windows = draft_data.outputs(model, prompts, setup)
            middle = time.perf_counter()
            draft_data.store(file, draft_data.read(model.model, taps, windows))
            say(
                f"{file}: outputs {middle - started:.0f} s, features "
                f"{time.perf_counter() - middle:.0f} s"
            )
    return draft_data.load(files[0]), draft_data.load(files[1])


def check_model(setup: DraftSetup, config: DecoderConfig) -> None:
    """Raises ValueError for a model that cannot have a head, or has no room for the windows."""
    if any(kind.window for kind in config.kinds) or config.attn_cap:
        raise ValueError(
            f"{setup.model} has windows or a cap of scores; the training of a head does not "
            "support them"
        )
    eagle_config(config, setup.vocabulary)  # refuses a vocabulary that is too large
    if setup.prompt + setup.output > config.max_len:
        raise ValueError(
            f"windows of {setup.prompt} + {setup.output} tokens are too long: {setup.model} has "
            f"room for {config.max_len}; lower --prompt or --output"
        )


@compilations.disk_cache()  # for the process that continues after a kill
def train(
    out: Path, setup: DraftSetup, every: int, *, say: Callable[[str], None] = print
) -> list[Loss]:
    """Train, or resume the run in `out`, and write its head's folder.

    Returns:
        The losses of every `every` steps.

    Raises:
        ValueError: `out` belongs to another run, or is no run's folder; the model cannot have a
            head.
    """
    model = load_model(setup.model, dtype="float32")
    check_model(setup, model.model.config)
    begin(out, options(setup))
    windows, held_out = prepare(out, model, setup, say)
    ids = draft_data.vocabulary(windows, setup.vocabulary, model.model.config.vocab_size)
    trainer = make_trainer(setup, model.model, ids)
    with open_checkpoints(out) as manager:
        step, state, losses = restore(manager, trainer.start)
        say(
            about(model.model, state.params, windows, held_out, ids)
            + (f"; {step} steps are done" if step else "")
        )
        say(f"{'step':>6} {'train':>7} {'held out':>9}  right drafts by place {'s/step':>8}")
        while step < setup.steps:
            end = min(step + every - step % every, setup.steps)
            state, mean, seconds = run_steps(
                lambda state, i: trainer.update(state, draft_data.batch(windows, setup, i)),
                state,
                step,
                end,
            )
            step = end
            value, right = trainer.measure(state.params, held_out)
            losses = [*losses, {"step": step, "train": mean, "held_out": value, "right": right}]
            save(manager, step, state, losses)
            say(line(losses[-1], seconds))
    folder = out / "head"
    if not folder.exists():
        write_eagle(folder, model.model.config, ids.tolist(), state.params)
    acceptance = measure_acceptance(model, folder, held_out.tokens[:, : setup.prompt], setup.output)
    say(f"{folder}: {acceptance}")
    return losses


def line(loss: Loss, seconds: float) -> str:
    """A line of the table. seconds: the time of a step."""
    shares = " ".join(f"{100 * share:5.1f} %" for share in loss["right"])
    return (
        f"{loss['step']:6} {loss['train']:7.3f} {loss['held_out']:9.3f}  {shares:21} {seconds:8.2f}"
    )


def about(
    model: Model, params: nnx.State, windows: Windows, held_out: Windows, ids: np.ndarray
) -> str:
    size = sum(x.size for x in jax.tree.leaves(params))
    in_head = np.zeros(model.config.vocab_size, bool)
    in_head[ids] = True
    share = float((in_head[held_out.ids] * held_out.shares).sum() / held_out.shares.sum())
    return (
        f"{size:,} parameters, {windows.tokens.size:,} tokens to train on, "
        f"{held_out.tokens.size:,} held out; the {len(ids)} tokens of the head have "
        f"{100 * share:.1f} % of what the model says there"
    )


def measure_acceptance(model: LoadedModel, folder: Path, prompts: np.ndarray, output: int) -> str:
    """How many of a head's drafts an engine accepts when it continues prompts [n, length] greedily,
    in words.
    """
    width = prompts.shape[1] + output
    engine = LLM(
        model,
        speculative={
            "method": "eagle",
            "model": str(folder),
            "num_tokens": DRAFTS,
            "adaptive": False,
        },
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=width,
        num_blocks=8 * (width // 16 + 1),
        compilation="lazy",
        progress=False,
    ).engine
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt.tolist(), params)
    events = (event for result in iter(engine.step, None) for event in result.events)
    drafts, accepted, rows = acceptance_of(events)
    return (
        f"an engine accepts {100 * (accepted / drafts):.1f} % of {drafts} drafts for held-out "
        f"prompts, {1 + accepted / rows:.2f} tokens of a sequence a step"
    )


# --- command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = run_parser(__doc__, every=40)
    add_setup(parser, DraftSetup)
    args = parser.parse_args(argv)
    setup = setup_of(args, DraftSetup)
    counts = ("steps", "vocabulary", "windows", "held_out", "prompt", "output", "batch", "passes")
    check_least(parser, args, **dict.fromkeys(("every", *counts), 1))
    if setup.output < DRAFTS:
        parser.error(
            f"--output is {setup.output}; it must be at least {DRAFTS}, so that an engine can "
            "draft; raise it"
        )
    for name in ("windows", "held_out"):
        value = getattr(args, name)
        if value < setup.batch:
            option = name.replace("_", "-")
            parser.error(
                f"--{option} is {value}, below --batch {setup.batch}; raise it, or lower --batch"
            )
    check_seed(parser, setup.seed)
    check_positive(parser, args, "rate")
    say = partial(print, flush=True)
    return exit_status(lambda: train(args.out, setup, args.every, say=say))


if __name__ == "__main__":
    sys.exit(main())
