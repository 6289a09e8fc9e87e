"""What a draft head learns from: a model's own outputs, the outputs of its layers on them, and the
probabilities of its next tokens.

Prompts are pieces of Python's documentation (data.py). The model continues each prompt, half of
them greedily and half of them at temperature 1. Then it reads prompts and outputs again, and for
each token these are kept:

    features    the outputs of the layers `taps`, in 16 bits
    ids, shares the TOP likeliest next tokens, and the probability of each: its share of all tokens

Both are computed once and stored, because a training run reads every token several times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from experiments.training.data import texts
from experiments.training.draft_setup import DraftSetup
from pagedjax import LLM, SamplingParams
from pagedjax.device.models import Model
from pagedjax.device.windows import hidden
from pagedjax.weights.pretrained import LoadedModel

TOP = 8  # how many next tokens are kept for each position
TEMPERATURES = (0.0, 1.0)  # the outputs have these in turn


class Windows(NamedTuple):
    """Windows of S tokens: a prompt and the model's output.

    Arrays of numpy, or of JAX in a training step.
    """

    tokens: Any  # [n, S] int32
    features: Any  # [n, S, taps * H] float16
    ids: Any  # [n, S, TOP] int32: likely next tokens
    shares: Any  # [n, S, TOP] float32: the probability of each, its share of all tokens


def prompts(
    encode: Callable[[str], Sequence[int]], setup: DraftSetup
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, prompt] and [m, prompt] from random places of the training text and of the
    held-out text.
    """

    def from_places(topics: Sequence[str], count: int, stream: int) -> np.ndarray:
        tokens = np.array(encode("\n\n".join(topics)), np.int32)
        rng = np.random.default_rng((setup.seed, stream))
        places = rng.integers(len(tokens) - setup.prompt, size=count)
        return tokens[places[:, None] + np.arange(setup.prompt)]

    train, held_out = texts()
    return from_places(train, setup.windows, 0), from_places(held_out, setup.held_out, 1)


def outputs(model: LoadedModel, prompts: np.ndarray, setup: DraftSetup) -> np.ndarray:
    """The prompts and what the model says after each, [n, prompt + output]."""
    width = setup.prompt + setup.output
    llm = LLM(
        model,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        token_buckets=(64, 512),
        compilation="lazy",
        max_model_len=width,
        num_blocks=64 * -(-width // 16),
        progress=False,
        seed=setup.seed,
    )
    params = [
        SamplingParams(
            temperature=TEMPERATURES[i % 2], max_tokens=setup.output, ignore_eos=True, seed=i
        )
        for i in range(len(prompts))
    ]
    answers = llm.generate(
        [prompt.tolist() for prompt in prompts], params, use_tqdm=sys.stderr.isatty()
    )
    windows = [
        [*prompt, *answer.outputs[0].token_ids]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return np.array(windows, np.int32)


def read(
    model: Model,
    taps: Sequence[int],
    windows: np.ndarray,
    at_a_time: int = 8,
    dtype: str = "float16",
) -> Windows:
    """Have the model read windows [n, S].

    Args:
        taps: the layers whose outputs are features.
        at_a_time: windows in a call of the model.
        dtype: of the features.

    Raises:
        ValueError: a feature is too large for its dtype.
    """
    n, s = windows.shape

    @jax.jit
    def step(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        module = nnx.merge(model.graphdef, params)
        last, tapped = hidden(module, tokens, taps)
        shares, ids = jax.lax.top_k(
            jax.nn.softmax(module.logits(last), axis=-1), min(TOP, model.config.vocab_size)
        )
        return jnp.concatenate(tapped, axis=-1).astype(dtype), ids, shares

    parts = []
    for i in tqdm(range(0, n, at_a_time), desc="features", unit="batch", leave=False, disable=None):
        rows = windows[i : i + at_a_time]
        blank = np.zeros((at_a_time - len(rows), s), np.int32)
        arrays = step(model.params, np.concatenate([rows, blank]))
        parts.append([np.asarray(x).reshape(at_a_time, s, -1)[: len(rows)] for x in arrays])
    features, ids, shares = map(np.concatenate, zip(*parts, strict=True))
    if not np.isfinite(features).all():
        raise ValueError(
            f"features of the model are above {np.finfo(dtype).max}, the largest {dtype}; a head "
            "cannot be trained for it"
        )
    return Windows(windows, features, ids, shares)


def vocabulary(windows: Windows, size: int, vocab_size: int) -> np.ndarray:
    """The ids of the `size` likeliest next tokens over all windows, ascending, int32 [size].

    vocab_size: of the model.
    """
    total = np.bincount(windows.ids.reshape(-1), windows.shares.reshape(-1), minlength=vocab_size)
    likeliest = np.argsort(-total, kind="stable")[:size]
    return np.sort(likeliest).astype(np.int32)


def store(file: Path, windows: Windows) -> None:
    """Write windows, atomically."""
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez(stream, **windows._asdict())
    part.replace(file)


def load(file: Path) -> Windows:
    with np.load(file) as arrays:
        return Windows(*(arrays[name] for name in Windows._fields))


def batch(windows: Windows, setup: DraftSetup, step: int) -> Windows:
    """The windows of a training step, which depend on seed and step only: every epoch has another
    order.
    """
    n = len(windows.tokens)
    epoch, place = divmod(step, n // setup.batch)
    order = np.random.default_rng((setup.seed, 2, epoch)).permutation(n)
    start = place * setup.batch
    rows = np.sort(order[start : start + setup.batch])
    return Windows(*(column[rows] for column in windows))
