"""What a draft head learns from: a model's own outputs, its layers' outputs on them, and its next
tokens' shares.

Prompts are pieces of Python's documentation (data.py). The model continues each, half of them
greedily and half of them at temperature 1. Then it reads prompts and outputs again, and keeps of
each token

    features    the outputs of the layers `taps`, in 16 bits
    ids, shares the TOP likeliest next tokens and their probabilities

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

TOP = 8  # next tokens that are kept of each position
TEMPERATURES = (0.0, 1.0)  # of outputs, in turn


class Windows(NamedTuple):
    """Windows of S tokens: a prompt and the model's output.

    Arrays of numpy, or of JAX in a training step.
    """

    tokens: Any  # [n, S] int32
    features: Any  # [n, S, taps * H] float16
    ids: Any  # [n, S, TOP] int32: likely next tokens
    shares: Any  # [n, S, TOP] float32: their probabilities


def prompts(
    encode: Callable[[str], Sequence[int]], setup: DraftSetup
) -> tuple[np.ndarray, np.ndarray]:
    """[n, prompt] and [m, prompt] tokens from random places of the training and of the held-out
    text.
    """
    windows = []
    for part, topics, count in zip((0, 1), texts(), (setup.windows, setup.held_out), strict=True):
        tokens = np.array(encode("\n\n".join(topics)), np.int32)
        places = np.random.default_rng((setup.seed, part)).integers(
            len(tokens) - setup.prompt, size=count
        )
        windows.append(tokens[places[:, None] + np.arange(setup.prompt)])
    return windows[0], windows[1]


def outputs(model: LoadedModel, prompts: np.ndarray, setup: DraftSetup) -> np.ndarray:
    """[n, prompt + output]: the prompts and what the model says after each."""
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
    answers = llm.generate([p.tolist() for p in prompts], params, use_tqdm=sys.stderr.isatty())
    return np.array(
        [[*p, *a.outputs[0].token_ids] for p, a in zip(prompts, answers, strict=True)], np.int32
    )


def read(
    model: Model,
    taps: Sequence[int],
    windows: np.ndarray,
    at_a_time: int = 8,
    dtype: str = "float16",
) -> Windows:
    """Have the model read windows [n, S]; dtype is that of the features."""
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
    features, ids, shares = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not np.isfinite(features).all():
        raise ValueError(
            f"features of the model are above {np.finfo(dtype).max}, the largest {dtype}; a head "
            "cannot be trained for it"
        )
    return Windows(windows, features, ids, shares)


def vocabulary(windows: Windows, size: int, vocab_size: int) -> np.ndarray:
    """[size] the ids of the likeliest next tokens over all windows, ascending, of `vocab_size`
    tokens.
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


def stored(file: Path) -> Windows:
    with np.load(file) as arrays:
        return Windows(*(arrays[name] for name in Windows._fields))


def batch(windows: Windows, setup: DraftSetup, step: int) -> Windows:
    """The windows of a training step, which depend on seed and step only: every epoch has another
    order.
    """
    n = len(windows.tokens)
    epoch, place = divmod(step, n // setup.batch)
    order = np.random.default_rng((setup.seed, 2, epoch)).permutation(n)
    rows = np.sort(order[place * setup.batch :][: setup.batch])
    return Windows(*(column[rows] for column in windows))
