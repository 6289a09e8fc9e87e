"""Adapters of low rank (LoRA, Hu et al. 2021): two of one frozen model, trained in minutes and
served in one batch.

    python -m experiments.training.train_tiny --out runs/tiny
    python -m experiments.training.train_lora --model runs/tiny/model --out runs/adapters

The same command resumes. "upper" learns Python's documentation in capitals, "sort" to sort lists of
digits (lora_tasks.py). A is random and B zero, so step 0 is the base model. A and B alone get
gradients. `score(adapter=...)` computes the loss by the layers that serve.

At the end one engine serves both adapters and the base in one batch, on held-out examples. The
command prints the engine's loss and the share of right greedy answers of each, and how far the
trainer's log-probabilities are from the engine's.

    OUT/run.json            the options of the run; a command with other options is refused
    OUT/checkpoints/STEP/   factors, optimisers, the log; a stopped run resumes from the last one,
                            bit for bit
    OUT/log.json            losses of every `--every` steps
    OUT/upper/, OUT/sort/   adapters as PEFT writes them, or with --to orbax: for
                            `LoRARequest(lora_path=...)`
    OUT/report.json         the table at the end
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.core.json_files import write_json
from experiments.training.checkpoints import Loss, State, begin, open_checkpoints, restore, save
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
from experiments.training.data import text_digest
from experiments.training.lora_setup import LoraSetup
from experiments.training.lora_tasks import Examples, Task, tasks
from experiments.training.updates import adamw, next_state
from pagedjax import LLM, LoRARequest, SamplingParams, load_model
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.device.placement import fingerprint
from pagedjax.engine import compilations
from pagedjax.models import adapter_parts, initial_factors, score
from pagedjax.weights.adapter_files import write_adapter
from pagedjax.weights.architectures import FAMILIES, text_part
from pagedjax.weights.convert import complete_folder
from pagedjax.weights.huggingface import read_json
from pagedjax.weights.pretrained import LoadedModel

BASE = "base"
# A [r, in] and B [out, r] by the module's name in transformers
Factors = dict[str, tuple[Any, Any]]
Form = Literal["safetensors", "orbax"]

# --- factors --------------------------------------------------------------------------------------


def initial(config: DecoderConfig, setup: LoraSetup, stream: int) -> Factors:
    """The initial factors of an adapter; each stream has its own A.

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
    logprobs: (factors or None for the base, examples) -> [N, L] log-probabilities of the tokens.
    """

    start: State
    update: Callable[[State, Mapping[str, Examples]], tuple[State, dict[str, jax.Array]]]
    logprobs: Callable[[Factors | None, Examples], jax.Array]


def make_trainer(setup: LoraSetup, module: Decoder, names: Sequence[str]) -> Trainer:
    """The initial state and the compiled functions of a run.

    The module's own parameters are not trained.

    Raises:
        ValueError: the model has no such modules.
    """
    method = adamw(setup, b2=0.99, weight_decay=0.01)
    graphdef, base = nnx.split(module)

    def logprobs(factors: Factors | None, base: nnx.State, examples: Examples) -> jax.Array:
        parts = None
        if factors is not None:
            parts = adapter_parts(factors, module.config, options(setup), "that is trained")
        return score(nnx.merge(graphdef, base), examples.tokens, examples.lengths, adapter=parts)

    def loss(factors: Factors, base: nnx.State, examples: Examples) -> jax.Array:
        return -jnp.mean(logprobs(factors, base, examples), where=examples.has_loss)

    def update(state: State, base: nnx.State, examples: Examples) -> tuple[State, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state.params, base, examples)
        return next_state(method, state, gradients), value

    factors = {name: initial(module.config, setup, stream) for stream, name in enumerate(names)}
    optimisers = {name: method.init(adapter) for name, adapter in factors.items()}
    start = jax.device_put(State(factors, optimisers), jax.devices()[0], may_alias=False)
    jit_update = jax.jit(update, donate_argnums=0)
    score_examples = jax.jit(logprobs)

    def update_all(
        state: State, examples: Mapping[str, Examples]
    ) -> tuple[State, dict[str, jax.Array]]:
        params = {}
        optimisers = {}
        losses = {}
        for name in names:
            adapter = State(state.params[name], state.optimiser[name])
            after, losses[name] = jit_update(adapter, base, examples[name])
            params[name] = after.params
            optimisers[name] = after.optimiser
        return State(params, optimisers), losses

    return Trainer(
        start, update_all, lambda factors, examples: score_examples(factors, base, examples)
    )


def mean_loss(logprobs: Any, examples: Examples) -> float:
    """The mean loss of the tokens that count, in nats. logprobs: [N, L] log-probabilities."""
    return -float(np.mean(np.asarray(logprobs, np.float64), where=examples.has_loss))


def options(setup: LoraSetup) -> dict[str, Any]:
    """The options of PEFT's `LoraConfig` that are not known from the factors."""
    return {"lora_alpha": setup.alpha}


# --- the result -----------------------------------------------------------------------------------


class TaskScores(NamedTuple):
    """What an engine gave for the held-out examples of a task.

    logprobs: [N, L] float32: log-probabilities of the tokens.
    right: the share of right greedy answers.
    """

    logprobs: Any
    right: float


def write(
    out: Path, model: Path, setup: LoraSetup, params: Mapping[str, Factors], to: Form
) -> dict[str, Path]:
    """Write the folder of each adapter. A folder is complete or absent: an older one is removed
    first.
    """
    config = text_part(read_json(model / "config.json"), model)
    family = FAMILIES[config["model_type"]]
    prefix = family.architecture.prefix
    lora_config = {**options(setup), "base_model_name_or_path": str(model)}
    for name, factors in params.items():
        arrays = {
            prefix + module: (np.asarray(a), np.asarray(b)) for module, (a, b) in factors.items()
        }
        with complete_folder((out / name).absolute()) as part:
            write_adapter(part, arrays, lora_config, to)
            shutil.rmtree(out / name, ignore_errors=True)
    return {name: out / name for name in params}


def serve(
    model: LoadedModel, folders: Mapping[str, Path], tasks_by_name: Mapping[str, Task]
) -> dict[str, dict[str, TaskScores]]:
    """The base and all adapters on the held-out examples of all tasks, in one batch of one engine.

    Returns:
        What was served, by adapter (or `BASE`) and task.
    """
    # one token follows an example
    width = max(task.held_out.tokens.shape[1] for task in tasks_by_name.values()) + 1
    rows = 32
    llm = LLM(
        model,
        max_num_seqs=rows,
        max_num_batched_tokens=2 * rows,
        token_buckets=(2 * rows,),
        max_model_len=width,
        num_blocks=rows * (width // 16 + 1),
        enable_lora=True,
        max_loras=len(folders),
        max_lora_rank=max(
            read_json(folder / "adapter_config.json")["r"] for folder in folders.values()
        ),
        progress=False,
    )
    jobs: list[tuple[Any, SamplingParams, LoRARequest | None]] = []
    for name in (BASE, *folders):
        adapter = LoRARequest(name, lora_path=str(folders[name])) if name in folders else None
        for task in tasks_by_name.values():
            jobs += [(*job, adapter) for job in _jobs(task.held_out)]
    prompts, params, adapters = map(list, zip(*jobs, strict=True))
    outs = iter(llm.generate(prompts, params, lora_request=adapters, use_tqdm=False))
    return {
        name: {
            key: _served(task, outs, llm.tokenizer.decode) for key, task in tasks_by_name.items()
        }
        for name in (BASE, *folders)
    }


def _jobs(held_out: Examples) -> list[tuple[list[int], SamplingParams]]:
    """Two requests for each example: one that scores it, and one that answers its prompt."""
    score_params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    jobs = []
    for i, length in enumerate(held_out.lengths.tolist()):
        max_tokens = len(held_out.answer(i))
        answer_params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        jobs.append((held_out.tokens[i, :length].tolist(), score_params))
        jobs.append((held_out.prompt(i), answer_params))
    return jobs


def _served(task: Task, outs: Iterator[Any], decode: Callable[[list[int]], str]) -> TaskScores:
    """The outputs of `_jobs` of a task."""
    logprobs = np.zeros(task.held_out.tokens.shape, np.float32)
    scores = []
    for i in range(len(logprobs)):
        scored = next(outs)
        answer = next(outs)
        entries: Any = scored.prompt_logprobs
        pairs = zip(scored.prompt_token_ids[1:], entries[1:], strict=True)
        logprobs[i, 1 : len(entries)] = [entry[token].logprob for token, entry in pairs]
        scores.append(task.right(decode(task.held_out.answer(i)), answer.outputs[0].text))
    return TaskScores(logprobs, float(np.mean(scores)))


def report(
    trainer: Trainer,
    params: Mapping[str, Factors],
    tasks_by_name: Mapping[str, Task],
    served: dict[str, dict[str, TaskScores]],
) -> dict[str, Any]:
    """Losses and shares of right answers as the engine gave them, and the largest difference of a
    log-probability from the trainer's.
    """
    table: dict[str, dict[str, Any]] = {}
    largest = 0.0
    for name, by_task in served.items():
        table[name] = {}
        for key, result in by_task.items():
            held_out = tasks_by_name[key].held_out
            logprobs = np.asarray(trainer.logprobs(params.get(name), held_out))
            largest = max(largest, float(np.abs(logprobs - result.logprobs).max()))
            loss = mean_loss(result.logprobs, held_out)
            table[name][key] = {"loss": loss, "right": result.right}
    return {"held_out": table, "largest_difference": largest}


def lines(result: Mapping[str, Any]) -> list[str]:
    """The report as text."""
    table = result["held_out"]
    heading = "".join(f"  {key + ': loss':>12} {'right':>7}" for key in table[BASE])
    rows = []
    for name, by_task in table.items():
        cells = [
            f"  {cell['loss']:12.3f} {100 * cell['right']:5.1f} %" for cell in by_task.values()
        ]
        rows.append(f"{name:8}{''.join(cells)}")
    difference = result["largest_difference"]
    last = f"the trainer's log-probabilities are the engine's within {difference:.1e}"
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
    """Train, or resume the run in `out`, write the adapters, and serve them.

    Returns:
        The losses, and the report.

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
    tasks_by_name = tasks(loaded.tokenizer, setup)
    trainer = make_trainer(
        setup, nnx.merge(loaded.model.graphdef, loaded.model.params), list(tasks_by_name)
    )
    facts = {"model": fingerprint(loaded.model), "text": text_digest()}
    begin(out, {**dataclasses.asdict(setup), **facts})
    params, losses = _run_steps(trainer, out, setup, every, tasks_by_name, say)
    write_json(out / "log.json", losses)
    folders = write(out, model, setup, params, to)
    served = serve(load_model(model, dtype="float32"), folders, tasks_by_name)
    result = report(trainer, params, tasks_by_name, served)
    write_json(out / "report.json", result)
    for line in lines(result):
        say(line)
    return losses, result


def _run_steps(
    trainer: Trainer,
    out: Path,
    setup: LoraSetup,
    every: int,
    tasks_by_name: Mapping[str, Task],
    say: Callable[[str], None],
) -> tuple[dict[str, Factors], list[Loss]]:
    """Train from the last checkpoint to the end. Returns the factors of each adapter, and losses."""
    with open_checkpoints(out) as manager:
        step, state, losses = restore(manager, trainer.start)
        say(
            sizes_text(state.params) + (f"; {step} of {setup.steps} steps are done" if step else "")
        )
        columns = "".join(f"  {name + ': train':>12} {'held out':>8}" for name in tasks_by_name)
        say(f"{'step':>6}{columns}")
        while step < setup.steps:
            values = []
            for _ in range(min(every - step % every, setup.steps - step)):
                batches = {name: task.batch(step) for name, task in tasks_by_name.items()}
                state, value = trainer.update(state, batches)
                values.append(value)
                step += 1
            means = {
                name: float(np.mean([value[name] for value in jax.device_get(values)]))
                for name in tasks_by_name
            }
            held_out = {
                name: mean_loss(trainer.logprobs(state.params[name], task.held_out), task.held_out)
                for name, task in tasks_by_name.items()
            }
            losses = [*losses, {"step": step, "train": means, "held_out": held_out}]
            save(manager, step, state, losses)
            columns = "".join(
                f"  {means[name]:12.3f} {held_out[name]:8.3f}" for name in tasks_by_name
            )
            say(f"{step:6}{columns}")
    return {name: state.params[name] for name in tasks_by_name}, losses


def sizes_text(params: Mapping[str, Factors]) -> str:
    """The size of an adapter, in words."""
    factors = next(iter(params.values()))
    size = sum(x.size for x in jax.tree.leaves(factors))
    return f"{size:,} parameters of each adapter, for {len(factors)} matrices"


# --- command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = run_parser(__doc__, every=50)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a model, as train_tiny writes one"
    )
    forms = {"default": "safetensors", "choices": ["safetensors", "orbax"]}
    parser.add_argument(
        "--to", **forms, help="form of the adapters; PEFT reads safetensors (default: %(default)s)"
    )
    add_setup(parser, LoraSetup)
    args = parser.parse_args(argv)
    setup = setup_of(args, LoraSetup)
    counts = ("every", "steps", "rank", "context", "batch", "lists", "held_out")
    check_least(parser, args, **dict.fromkeys(counts, 1))
    check_positive(parser, args, "alpha", "rate")
    check_seed(parser, setup.seed)
    check_model(parser, args.model)
    say = partial(print, flush=True)
    return exit_status(lambda: train(args.model, args.out, setup, args.every, to=args.to, say=say))


if __name__ == "__main__":
    sys.exit(main())
