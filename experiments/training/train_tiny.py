"""Train a small Llama from nothing in minutes, and have one engine serve it while it learns.

    python -m experiments.training.train_tiny --out runs/tiny                        # the same command again goes on
    python -m experiments.training.train_tiny --out runs/short --steps 200 --every 50
    pagedjax generate "The function" --model runs/tiny/model --max-model-len 256

Flax has the model, optax the optimiser, Orbax the checkpoints, and the text is what Python ships of its own
documentation, so nothing is downloaded. Every `--every` steps: losses, a checkpoint, and a sample from the engine, to
which `update_params` gives the newest weights without compiling anything.

    OUT/run.json            what this run is; a command that asks for another is refused
    OUT/checkpoints/STEP/   parameters, optimiser, losses so far. A killed run goes on from the last, to the same bits
    OUT/model/              config.json, tokenizer.json, params/: what LLM(model=...) opens

The loss is in nats a token. Beside it stands that of a model which knows nothing but how frequent each token is: 5.97
with the defaults, which reach 3.94 on the held-out topics, in 4 minutes 20 on two shared, busy CPU cores (3,000 to
3,800 tokens/s, up to 6,700 while nobody else was there; Python 3.11, JAX 0.10.2).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from experiments.core.libraries import require
from pagedjax import LLM, SamplingParams
from pagedjax.device import cache, models
from pagedjax.device.batch import Batch
from pagedjax.device.models import llama
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.engine import compilations
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.weights.convert import check_free, complete_folder
from pagedjax.weights.orbax_checkpoint import PARAMS
from pagedjax.weights.tree import nested

optax = require("optax")

END = "<|endoftext|>"  # token 0, between two topics: what ends a text
HELD_OUT = 5  # of every ten topics the one with this index, 9 % of the text
PROMPT = "The function"
SAMPLE = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40, seed=0)
Loss = dict[str, Any]  # {"step", "train", "held_out"}
SEEDS = 2**32  # as an engine has


@dataclass(frozen=True)
class Setup:
    """What decides every bit of the result.

    steps: updates; the learning rate falls over them, so a longer run is another run.
    context: tokens of a window, and of a request to the trained model.
    batch: windows in a step.
    rate: the highest learning rate.
    """

    steps: int = 800
    seed: int = 0
    vocab: int = 1024
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    context: int = 256
    batch: int = 4
    rate: float = 3e-3


# --- text -------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    tokenizer: Tokenizer
    train: np.ndarray  # [n] int32
    held_out: np.ndarray  # [m] int32


def texts() -> tuple[list[str], list[str]]:
    """Topics to train on, and those held out; no paragraph is in two (the topics repeat whole sections)."""
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for i, (_, topic) in enumerate(sorted(topics.items())):
        paragraphs = [p for p in dict.fromkeys(topic.strip().split("\n\n")) if p not in seen]
        seen.update(paragraphs)
        parts[i % 10 == HELD_OUT].append("\n\n".join(paragraphs))
    return parts


def prepare(vocab: int) -> Data:
    """A byte-level BPE of the training text, and both texts in its tokens. The same text gives the same tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    train, held_out = texts()
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator(train, trainer)

    def tokens(parts: Sequence[str]) -> np.ndarray:
        return np.array(backend.encode(END.join([*parts, ""])).ids, np.int32)

    return Data(Tokenizer(backend, (0,), {"eos_token": END}), tokens(train), tokens(held_out))


def windows(train: np.ndarray, setup: Setup, step: int) -> np.ndarray:
    """[batch, context + 1] tokens from random places: of seed and step alone, so a checkpoint's step says where it was
    in the data."""
    places = np.random.default_rng((setup.seed, step)).integers(len(train) - setup.context, size=setup.batch)
    return train[places[:, None] + np.arange(setup.context + 1)]


def unigram(data: Data, vocab: int) -> float:
    """The held-out loss of the training text's frequencies (each count and one more)."""
    counts = np.bincount(data.train, minlength=vocab) + 1
    return float(-np.log(counts / counts.sum())[data.held_out].mean())


# --- model ------------------------------------------------------------------------------------------------------------


def hf_config(setup: Setup) -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": setup.vocab,
        "hidden_size": setup.hidden,
        "intermediate_size": 3 * setup.hidden,
        "num_hidden_layers": setup.layers,
        "num_attention_heads": setup.heads,
        "num_key_value_heads": setup.kv_heads,
        "head_dim": setup.hidden // setup.heads,
        "max_position_embeddings": setup.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }


def initial(config: DecoderConfig, seed: int) -> Decoder:
    """Norms are ones, matrices normal: 0.02 for the embedding, which is the head as well, else 1 / sqrt(columns)."""
    rng, values = np.random.default_rng(seed), {}
    for entry in llama.param_table(config):
        name, shape = ".".join(entry.path), entry.shape
        scale = 0.02 if name == "embed" else shape[-1] ** -0.5
        if name.endswith(("out.weight", "down.weight")):  # 2 a layer are added up
            scale /= (2 * config.layers) ** 0.5
        drawn = np.float32(scale) * rng.standard_normal(shape, np.float32)
        values[name] = jnp.asarray(drawn) if len(shape) > 1 else jnp.ones(shape)
    model = models.assemble(config, nested(values), "float32")
    return nnx.merge(model.graphdef, model.params)


def dense(q, k_pages, v_pages, *_, scale: float, window: int | None, soft_cap: float | None) -> jax.Array:
    """An `Attend` for `packed` windows: page b is all that window b has, so nothing is looked up."""
    assert (window, soft_cap) == (None, None), "no Llama has either"
    b, k, s, d = k_pages.shape
    scores = scale * jnp.einsum("bskgd,bktd->bkgst", q.reshape(b, s, k, -1, d), k_pages)
    weights = jax.nn.softmax(jnp.where(jnp.tri(s, dtype=bool), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgst,bktd->bskgd", weights, v_pages).reshape(q.shape)


def packed(tokens: jax.Array) -> Batch:
    """Windows [B, S] as the batch of a step: B prompts side by side, each in the one block of S slots it needs."""
    b, s = tokens.shape
    each, slots = jnp.arange(b), jnp.arange(b * s)
    return Batch(
        tokens=tokens.reshape(-1),
        positions=slots % s,
        slots=slots,
        block_tables=each[:, None],
        seq_lens=jnp.full(b, s),
        cu_q_lens=jnp.arange(b + 1) * s,
        last=each * s + s - 1,
        targets=None,
        sampling=None,  # type: ignore[arg-type]  # nobody samples here
    )


def logits(module: Decoder, tokens: jax.Array) -> jax.Array:
    """Windows [B, S] -> [B, S, V], by the layers that serve. The cache holds no more than the windows' own keys."""
    c, (b, s) = module.config, tokens.shape
    # no padding needs a trash block here, so all b blocks are used
    pages = cache.init(
        layers=c.layers, blocks=b - 1, block_size=s, kv_heads=c.kv_heads, head_dim=c.head_dim, dtype="float32"
    )
    _, hidden = module.hidden(pages, packed(tokens), partial(dense, scale=c.attn_scale))
    return module.logits(hidden).T.reshape(b, s, -1)


def loss(module: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean over windows [B, S + 1] of -log p(next token)."""
    found = logits(module, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(found, tokens[:, 1:]).mean()


# --- training ---------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    params: nnx.State
    optimiser: Any  # optax's state; it counts the steps as well


class Trainer(NamedTuple):
    start: State
    update: Callable[[State, np.ndarray], tuple[State, jax.Array]]  # windows -> (state, loss); the state is donated
    held_out: Callable[[nnx.State], float]


def optimiser(setup: Setup) -> Any:
    """AdamW, over a tenth of the steps up to the highest rate and down again along a cosine; gradients are clipped."""
    warm_up = max(1, setup.steps // 10)
    rates = optax.warmup_cosine_decay_schedule(0.0, setup.rate, warm_up, max(setup.steps, warm_up + 1), setup.rate / 10)
    matrices = partial(jax.tree.map, lambda x: x.ndim > 1)  # norms do not decay
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.99, weight_decay=0.1, mask=matrices))


def make_trainer(setup: Setup, config: DecoderConfig, data: Data) -> Trainer:
    """Compiles, so that no step is slower than another."""
    graphdef, params, rest = nnx.split(initial(config, setup.seed), nnx.Param, ...)
    method = optimiser(setup)

    def loss_of(params: nnx.State, tokens: jax.Array) -> jax.Array:
        return loss(nnx.merge(graphdef, params, rest), tokens)

    def update(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        value, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
        changes, after = method.update(gradients, state.optimiser, state.params)
        return State(optax.apply_updates(state.params, changes), after), value

    state = jax.device_put(State(params, method.init(params)), jax.devices()[0])
    blank = jax.ShapeDtypeStruct((setup.batch, setup.context + 1), np.int32)
    compiled = jax.jit(update, donate_argnums=0).lower(state, blank).compile()
    measure = jax.jit(loss_of).lower(params, blank).compile()
    parts = held_out_batches(data.held_out, setup)
    return Trainer(state, compiled, lambda params: float(np.mean([measure(params, part) for part in parts])))


def held_out_batches(tokens: np.ndarray, setup: Setup) -> list[np.ndarray]:
    """Windows one after the other, [batch, context + 1] at a time; what fills no batch is left out."""
    size = setup.batch * setup.context
    starts = range(0, len(tokens) - size, size)
    return [tokens[i + np.arange(size).reshape(setup.batch, -1)[:, :1] + np.arange(setup.context + 1)] for i in starts]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def begin(out: Path, setup: Setup, data: Data) -> None:
    """Make the run's folder, or see that the one which is there is of the same run.

    Raises:
        ValueError: it is of another run (all differences), or of something else.
    """
    digest = hashlib.sha256(data.train.tobytes() + data.held_out.tobytes()).hexdigest()
    wanted = {**dataclasses.asdict(setup), "text": digest[:16]}
    file = out / "run.json"
    if not file.is_file():
        check_free(out)
        with complete_folder(out) as folder:
            (folder / file.name).write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        return
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove {out}, or give another --out") from error
    both = {key: (wanted.get(key), found.get(key)) for key in wanted | found}
    different = [f"{key} is {ours}, there {theirs}" for key, (ours, theirs) in both.items() if ours != theirs]
    if different:
        raise ValueError(
            f"{out} holds another run: {'; '.join(different)}. Ask for what is there (the text is that of the Python "
            "version), give another --out, or remove it"
        )


def opened(out: Path) -> ocp.CheckpointManager:
    """A checkpoint is there when it is complete; the last two are kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager(out.absolute() / "checkpoints", options=options)


def save(manager: ocp.CheckpointManager, step: int, state: State, losses: Sequence[Loss]) -> None:
    parts = {"state": ocp.args.StandardSave(state), "losses": ocp.args.JsonSave(list(losses))}  # type: ignore[arg-type]
    manager.save(step, args=ocp.args.Composite(**parts))


def restore(manager: ocp.CheckpointManager, like: State) -> tuple[int, State, list[Loss]]:
    """The last checkpoint -> (steps done, state, losses); a run that has none begins."""
    step = manager.latest_step()
    if step is None:
        return 0, like, []
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    parts = {"state": ocp.args.StandardRestore(shapes), "losses": ocp.args.JsonRestore()}  # type: ignore[arg-type]
    found = manager.restore(step, args=ocp.args.Composite(**parts))
    return step, found["state"], found["losses"]


def write_model(folder: Path, setup: Setup, tokenizer: Tokenizer, params: nnx.State) -> None:
    """What LLM(model=folder) opens, complete or not at all."""
    with complete_folder(folder.absolute()) as part:
        (part / "config.json").write_text(json.dumps(hf_config(setup), indent=1) + "\n", encoding="utf-8")
        names = json.dumps({"eos_token": END}) + "\n"
        (part / "tokenizer_config.json").write_text(names, encoding="utf-8")
        tokenizer.backend.save(str(part / "tokenizer.json"))
        with ocp.StandardCheckpointer() as orbax:
            orbax.save(part / PARAMS, params)


# --- the run ----------------------------------------------------------------------------------------------------------


def train(out: Path, setup: Setup, every: int, *, say: Callable[[str], None] = print) -> list[Loss]:
    """Train, or go on with what `out` has, up to its model's folder -> the losses of every `every` steps.

    Raises:
        ValueError: `out` is of another run, or of something else.
    """
    compilations.keep_compilations()  # for the process that goes on after a kill
    data = prepare(setup.vocab)
    begin(out, setup, data)
    hf = hf_config(setup)
    trainer = make_trainer(setup, llama.from_hf(hf), data)
    with opened(out) as manager:
        done, state, losses = restore(manager, trainer.start)
        llm = LLM(params=state.params, config=hf, tokenizer=data.tokenizer, **serving())
        say(about(setup, data, state.params) + (f"; {done} of {setup.steps} steps are done" if done else ""))
        say(f"{'step':>6} {'train':>7} {'held out':>9} {'tokens/s':>9} {'compiled':>9}  {PROMPT!r} goes on")
        while done < setup.steps:
            count, began = min(every - done % every, setup.steps - done), time.perf_counter()
            values = []
            for step in range(done, done + count):
                state, value = trainer.update(state, windows(data.train, setup, step))
                values.append(value)
            mean = float(np.mean(jax.device_get(values)))
            rate = count * setup.batch * setup.context / (time.perf_counter() - began)
            done += count
            losses = [*losses, {"step": done, "train": mean, "held_out": trainer.held_out(state.params)}]
            save(manager, done, state, losses)
            text, compiled = updated(llm, state.params)
            say(f"{done:6} {mean:7.3f} {losses[-1]['held_out']:9.3f} {rate:9,.0f} {compiled:9}  {text!r}")
    folder = out / "model"
    if not folder.exists():
        write_model(folder, setup, data.tokenizer, state.params)
    say(f"{folder}: {PROMPT}{sample(LLM(model=folder, **serving()))}")
    return losses


def serving() -> dict[str, Any]:
    """An engine that is there at once: one program, and few blocks."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "token_buckets": (16,), "num_blocks": 64}
    return {**sizes, "dtype": "float32", "progress": False}


def about(setup: Setup, data: Data, params: nnx.State) -> str:
    size = sum(x.size for x in jax.tree.leaves(params))
    return (
        f"{size:,} parameters, {len(data.train):,} tokens to train on, {len(data.held_out):,} held out, whose loss by "
        f"frequencies alone is {unigram(data, setup.vocab):.3f}"
    )


def updated(llm: LLM, params: nnx.State) -> tuple[str, int]:
    """What the running engine says with these parameters, and how many programs it compiled for that: none."""
    before = compilations.counts()
    llm.update_params(params)
    return sample(llm), (compilations.counts() - before).compilations


def sample(llm: LLM) -> str:
    return llm.generate(PROMPT, SAMPLE, use_tqdm=False)[0].outputs[0].text


# --- command line -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; if it is there, the run goes on")
    parser.add_argument("--steps", type=int, default=Setup.steps, help="of training (default: %(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=Setup.seed, help="of weights and data (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("steps", "every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1: leave it out for a good value")
    if not 0 <= args.seed < SEEDS:
        parser.error(f"--seed is {args.seed}; it must be in [0, 2**32): choose another")
    try:
        train(args.out, Setup(steps=args.steps, seed=args.seed), args.every, say=partial(print, flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
