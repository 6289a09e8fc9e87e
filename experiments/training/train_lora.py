"""Adapters of low rank (LoRA, Hu et al. 2021): two of one frozen model, trained in minutes and served in one batch.

    python -m experiments.training.train_tiny --out runs/tiny
    python -m experiments.training.train_lora --model runs/tiny/model --out runs/adapters    # the same command resumes

"upper" learns Python's documentation in capitals, "sort" to sort lists of digits (lora_tasks.py). A is random and B
zero, so step 0 is the base model. Gradients are those of A and B alone, by `score(adapter=...)`: the layers that serve.

At the end one engine serves both adapters and the base in one batch, on held-out examples. The command prints the
engine's loss and the share of right greedy answers of each, and how far the trainer's log-probabilities are from the
engine's.

    OUT/run.json            the options of the run; a command with other options is refused
    OUT/checkpoints/STEP/   factors, optimisers, the log. A stopped run resumes from the last one, bit for bit
    OUT/log.json            losses of every `--every` steps
    OUT/upper/, OUT/sort/   adapters as PEFT writes them, or with --to orbax: for `LoRARequest(lora_path=...)`
    OUT/report.json         the table at the end
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.core.optional_imports import require
from experiments.training.checkpoints import Loss, State, begin, opened, restore, save
from experiments.training.command import check_model, check_seed, exit_status
from experiments.training.data import texts
from experiments.training.lora_setup import LoraSetup
from experiments.training.lora_tasks import Examples, Task, tasks
from pagedjax import LLM, LoRARequest, SamplingParams, load_model
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.device.placement import fingerprint
from pagedjax.engine import compilations
from pagedjax.models import adapter_parts, initial_factors, score
from pagedjax.weights.adapter_files import write_adapter
from pagedjax.weights.architectures import ARCHITECTURES
from pagedjax.weights.convert import complete_folder
from pagedjax.weights.huggingface import read_json
from pagedjax.weights.pretrained import LoadedModel

optax = require("optax")

BASE = "base"
# A [r, in] and B [out, r] by the module's name in transformers
Factors = dict[str, tuple[Any, Any]]
Form = Literal["safetensors", "orbax"]

# --- factors --------------------------------------------------------------------------------------


def initial(config: DecoderConfig, setup: LoraSetup, stream: int) -> Factors:
    """What an adapter starts from; each stream has its own A.

    Raises:
        ValueError: the model has no matrices of a kind that `setup.modules` names.
    """
    kinds = None if setup.modules == "all" else [kind.strip() for kind in setup.modules.split(",")]
    return initial_factors(config, setup.rank, modules=kinds, seed=(setup.seed, stream))


# --- training -------------------------------------------------------------------------------------


class Trainer(NamedTuple):
    """State: the factors and the optimiser of each adapter, by its name.

    start: the initial state.
    update: (state, examples by adapter) -> (state, loss by adapter). The state is donated.
    chances: (factors or None for the base, examples) -> [N, L] log-probabilities of the tokens.
    """

    start: State
    update: Callable[[State, Mapping[str, Examples]], tuple[State, dict[str, jax.Array]]]
    chances: Callable[[Factors | None, Examples], jax.Array]


def optimiser(setup: LoraSetup) -> Any:
    """AdamW with clipped gradients.

    The rate rises over a tenth of the steps, then falls along a cosine.
    """
    warm_up = max(1, setup.steps // 10)
    rates = optax.warmup_cosine_decay_schedule(
        0.0, setup.rate, warm_up, max(setup.steps, warm_up + 1), setup.rate / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.99, weight_decay=0.01)
    )


def make_trainer(setup: LoraSetup, module: Decoder, names: Sequence[str]) -> Trainer:
    """The initial state and the compiled functions of a run.

    The module's own parameters are not trained.

    Raises:
        ValueError: the model has no such modules.
    """
    config, method = module.config, optimiser(setup)
    graphdef, base = nnx.split(module)

    def chances(factors: Factors | None, base: nnx.State, examples: Examples) -> jax.Array:
        parts = (
            None
            if factors is None
            else adapter_parts(factors, config, options(setup), "that is trained")
        )
        return score(nnx.merge(graphdef, base), examples.tokens, examples.lengths, adapter=parts)

    def loss(factors: Factors, base: nnx.State, examples: Examples) -> jax.Array:
        return -jnp.mean(chances(factors, base, examples), where=examples.counts)

    def update(one: State, base: nnx.State, examples: Examples) -> tuple[State, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(one.params, base, examples)
        changes, after = method.update(gradients, one.optimiser, one.params)
        return State(optax.apply_updates(one.params, changes), after), value

    factors = {name: initial(config, setup, stream) for stream, name in enumerate(names)}
    state = State(factors, {name: method.init(own) for name, own in factors.items()})
    state = jax.device_put(state, jax.devices()[0], may_alias=False)
    compiled, scored = jax.jit(update, donate_argnums=0), jax.jit(chances)

    def update_all(
        state: State, examples: Mapping[str, Examples]
    ) -> tuple[State, dict[str, jax.Array]]:
        own = {name: State(state.params[name], state.optimiser[name]) for name in names}
        found = {name: compiled(own[name], base, examples[name]) for name in names}
        after = {name: one for name, (one, _) in found.items()}
        params, optimisers = ({name: one[i] for name, one in after.items()} for i in (0, 1))
        return State(params, optimisers), {name: value for name, (_, value) in found.items()}

    return Trainer(state, update_all, lambda factors, examples: scored(factors, base, examples))


def mean_loss(chances: Any, examples: Examples) -> float:
    """Of the tokens that count, in nats. chances: [N, L] log-probabilities."""
    return -float(np.mean(np.asarray(chances, np.float64), where=examples.counts))


def options(setup: LoraSetup) -> dict[str, Any]:
    """Of PEFT's `LoraConfig`, beside what the factors say."""
    return {"lora_alpha": setup.alpha}


# --- the result -----------------------------------------------------------------------------------


class Served(NamedTuple):
    """What an engine gave for the held-out examples of a task.

    chances: [N, L] float32: log-probabilities of the tokens.
    right: the share of right greedy answers.
    """

    chances: Any
    right: float


def write(
    out: Path, model: Path, setup: LoraSetup, params: Mapping[str, Factors], to: Form
) -> dict[str, Path]:
    """Write the folder of each adapter. It is complete or absent: an older one is removed first."""
    prefix = ARCHITECTURES[read_json(model / "config.json")["model_type"]].prefix
    more = {**options(setup), "base_model_name_or_path": str(model)}
    for name, factors in params.items():
        arrays = {
            prefix + module: (np.asarray(a), np.asarray(b)) for module, (a, b) in factors.items()
        }
        with complete_folder((out / name).absolute()) as part:
            write_adapter(part, arrays, more, to)
            shutil.rmtree(out / name, ignore_errors=True)
    return {name: out / name for name in params}


def serve(
    model: LoadedModel, folders: Mapping[str, Path], several: Mapping[str, Task]
) -> dict[str, dict[str, Served]]:
    """The base and all adapters on the held-out examples of all tasks, in one batch of one engine.

    Returns:
        What was served, by adapter (or `BASE`) and task.
    """
    # one token follows an example
    width = max(task.held_out.tokens.shape[1] for task in several.values()) + 1
    rows = 32
    sizes: dict[str, Any] = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": 2 * rows,
        "token_buckets": (2 * rows,),
    }
    sizes |= {"max_model_len": width, "num_blocks": rows * (width // 16 + 1)}
    ranks = max(read_json(folder / "adapter_config.json")["r"] for folder in folders.values())
    lora = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": ranks}
    llm = LLM(model, progress=False, **sizes, **lora)
    whole = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    jobs: list[tuple[Any, SamplingParams, LoRARequest | None]] = []
    for name in (BASE, *folders):
        adapter = LoRARequest(name, lora_path=str(folders[name])) if name in folders else None
        for task in several.values():
            for i, length in enumerate(task.held_out.lengths.tolist()):
                said = SamplingParams(
                    temperature=0, max_tokens=len(task.held_out.answer(i)), ignore_eos=True
                )
                jobs.append((task.held_out.tokens[i, :length].tolist(), whole, adapter))
                jobs.append((task.held_out.prompt(i), said, adapter))
    prompts, params, adapters = (list(column) for column in zip(*jobs, strict=True))
    outs = iter(llm.generate(prompts, params, lora_request=adapters, use_tqdm=False))

    def of_task(task: Task) -> Served:
        found, right = np.zeros(task.held_out.tokens.shape, np.float32), []
        for i in range(len(found)):
            given, answered = next(outs), next(outs)
            entries: Any = given.prompt_logprobs
            pairs = zip(given.prompt_token_ids[1:], entries[1:], strict=True)
            found[i, 1 : len(entries)] = [entry[token].logprob for token, entry in pairs]
            right.append(
                task.right(llm.tokenizer.decode(task.held_out.answer(i)), answered.outputs[0].text)
            )
        return Served(found, float(np.mean(right)))

    return {
        name: {key: of_task(task) for key, task in several.items()} for name in (BASE, *folders)
    }


def report(
    trainer: Trainer,
    params: Mapping[str, Factors],
    several: Mapping[str, Task],
    served: dict[str, dict[str, Served]],
) -> dict[str, Any]:
    """Losses and shares of right answers as the engine gave them, and the largest difference of a
    log-probability from the trainer's."""
    table, largest = {}, 0.0
    for name, by_task in served.items():
        table[name] = {}
        for key, found in by_task.items():
            held_out = several[key].held_out
            ours = np.asarray(trainer.chances(params.get(name), held_out))
            largest = max(largest, float(np.abs(ours - found.chances).max()))
            table[name][key] = {"loss": mean_loss(found.chances, held_out), "right": found.right}
    return {"held_out": table, "largest_difference": largest}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The report as text."""
    table = found["held_out"]
    heading = "".join(f"  {key + ': loss':>12} {'right':>7}" for key in table[BASE])
    rows = [
        f"{name:8}"
        + "".join(f"  {one['loss']:12.3f} {100 * one['right']:5.1f} %" for one in by_task.values())
        for name, by_task in table.items()
    ]
    last = (
        f"the trainer's log-probabilities are the engine's within {found['largest_difference']:.1e}"
    )
    return [f"{'':8}{heading}", *rows, last]


# --- the run --------------------------------------------------------------------------------------


@compilations.disk_cache()  # for the process that continues after a kill
def train(
    model: Path,
    out: Path,
    setup: LoraSetup,
    every: int,
    *,
    to: Form = "safetensors",
    say: Callable[[str], None] = print,
) -> tuple[list[Loss], dict[str, Any]]:
    """Train, or resume the run in `out`, write the adapters, and serve them -> (losses, the
    report).

    Raises:
        ValueError: `out` belongs to another run, or is no run's folder; the options do not fit the
            model.
        FileNotFoundError: there is no model.
    """
    loaded = load_model(model, dtype="float32", linear_impl="xla")  # matrices as a trainer has them
    config = loaded.model.config
    if setup.context >= config.max_len:
        raise ValueError(
            f"--context is {setup.context}; this model has room for {config.max_len - 1} tokens: "
            "lower it"
        )
    several = tasks(loaded.tokenizer, setup)
    trainer = make_trainer(
        setup, nnx.merge(loaded.model.graphdef, loaded.model.params), list(several)
    )
    text = hashlib.sha256(json.dumps(texts()).encode()).hexdigest()[:16]
    begin(out, {**dataclasses.asdict(setup), "model": fingerprint(loaded.model), "text": text})
    with opened(out) as manager:
        done, state, losses = restore(manager, trainer.start)
        say(about(state.params) + (f"; {done} of {setup.steps} steps are done" if done else ""))
        say(
            f"{'step':>6}"
            + "".join(f"  {name + ': train':>12} {'held out':>8}" for name in several)
        )
        while done < setup.steps:
            values = []
            for _ in range(min(every - done % every, setup.steps - done)):
                state, value = trainer.update(
                    state, {name: task.batch(done) for name, task in several.items()}
                )
                values.append(value)
                done += 1
            means = {
                name: float(np.mean([value[name] for value in jax.device_get(values)]))
                for name in several
            }
            held_out = {
                name: mean_loss(trainer.chances(state.params[name], task.held_out), task.held_out)
                for name, task in several.items()
            }
            losses = [*losses, {"step": done, "train": means, "held_out": held_out}]
            save(manager, done, state, losses)
            say(
                f"{done:6}"
                + "".join(f"  {means[name]:12.3f} {held_out[name]:8.3f}" for name in several)
            )
    (out / "log.json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    trained = {name: state.params[name] for name in several}
    folders = write(out, model, setup, trained, to)
    served = serve(load_model(model, dtype="float32"), folders, several)
    found = report(trainer, trained, several, served)
    (out / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for line in lines(found):
        say(line)
    return losses, found


def about(params: Mapping[str, Factors]) -> str:
    sizes = [sum(x.size for x in jax.tree.leaves(own)) for own in params.values()]
    return (
        f"{sizes[0]:,} parameters of each adapter, for {len(next(iter(params.values())))} matrices"
    )


# --- command line ---------------------------------------------------------------------------------


def option(name: str) -> str:
    return name.replace("_", "-")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a model, as train_tiny writes one"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run; an existing run is resumed"
    )
    parser.add_argument(
        "--every", type=int, default=50, help="steps between checkpoints (default: %(default)s)"
    )
    forms = {"default": "safetensors", "choices": ["safetensors", "orbax"]}
    parser.add_argument(
        "--to", **forms, help="form of the adapters; PEFT reads safetensors (default: %(default)s)"
    )
    for field in dataclasses.fields(LoraSetup):
        kind = {
            "default": field.default,
            "type": type(field.default),
            "help": "default: %(default)s",
        }
        parser.add_argument(f"--{option(field.name)}", **kind)
    args = parser.parse_args(argv)
    setup = LoraSetup(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(LoraSetup)}
    )
    for name in ("every", "steps", "rank", "context", "batch", "lists", "held_out"):
        if (value := getattr(args, name)) < 1:
            parser.error(
                f"--{option(name)} is {value}; it must be at least 1; leave it out for the default"
            )
    for name in ("alpha", "rate"):
        if not 0 < (value := getattr(args, name)) < math.inf:
            parser.error(
                f"--{name} is {value}; it must be above 0 and finite; leave it out for the default"
            )
    check_seed(parser, setup.seed)
    check_model(parser, args.model)
    say = partial(print, flush=True)
    return exit_status(lambda: train(args.model, args.out, setup, args.every, to=args.to, say=say))


if __name__ == "__main__":
    sys.exit(main())
