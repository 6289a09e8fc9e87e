"""The text of a training run: Python's documentation as tokens, and windows of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

from experiments.training.setup import Setup
from pagedjax.text.tokenizer import Tokenizer

END = "<|endoftext|>"  # token 0, the end of a topic
HELD_OUT = 5  # the index of the held-out topic among every ten topics: 9 % of the text


class Data(NamedTuple):
    tokenizer: Tokenizer
    train: np.ndarray  # [n] int32
    held_out: np.ndarray  # [m] int32


def texts() -> tuple[list[str], list[str]]:
    """Training topics and held-out topics.

    No paragraph appears twice (the topics repeat whole sections).
    """
    earlier: set[str] = set()
    train: list[str] = []
    held_out: list[str] = []
    for i, (_, topic) in enumerate(sorted(topics.items())):
        paragraphs = dict.fromkeys(topic.strip().split("\n\n"))
        new_paragraphs = [paragraph for paragraph in paragraphs if paragraph not in earlier]
        earlier.update(new_paragraphs)
        part = held_out if i % 10 == HELD_OUT else train
        part.append("\n\n".join(new_paragraphs))
    return train, held_out


def text_digest() -> str:
    """A hash of the text of a run: 16 digits."""
    return hashlib.sha256(json.dumps(texts()).encode()).hexdigest()[:16]


def prepare(vocab: int) -> Data:
    """A byte-level BPE of the training text, and both texts as its tokens. Deterministic."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    train, held_out = texts()
    backend = Backend(BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = words  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(train, trainer)

    def tokens(parts: Sequence[str]) -> np.ndarray:
        return np.array(backend.encode(END.join([*parts, ""])).ids, np.int32)

    return Data(Tokenizer(backend, (0,), {"eos_token": END}), tokens(train), tokens(held_out))


def windows(train: np.ndarray, setup: Setup, step: int) -> np.ndarray:
    """Tokens [batch, context + 1] from random places, which depend on seed and step only, so a run
    can resume at any step.
    """
    rng = np.random.default_rng((setup.seed, step))
    places = rng.integers(len(train) - setup.context, size=setup.batch)
    return train[places[:, None] + np.arange(setup.context + 1)]


def unigram(data: Data, vocab: int) -> float:
    """The held-out loss of the training text's token frequencies (each count plus one)."""
    counts = np.bincount(data.train, minlength=vocab) + 1
    return float(-np.log(counts / counts.sum())[data.held_out].mean())


def held_out_batches(tokens: np.ndarray, setup: Setup) -> list[np.ndarray]:
    """Consecutive windows, [batch, context + 1] at a time; an incomplete last batch is left out."""
    size = setup.batch * setup.context
    window_starts = setup.context * np.arange(setup.batch)
    places = window_starts[:, None] + np.arange(setup.context + 1)  # [batch, context + 1]
    return [tokens[start + places] for start in range(0, len(tokens) - size, size)]
