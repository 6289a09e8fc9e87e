"""What a text says of the inputs of a model's matrices: some are larger, so errors of their weights
cost more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.device import input_squares, models
from pagedjax.llm import LLM
from pagedjax.options.params import SamplingParams
from pagedjax.weights.pretrained import load_model
from pagedjax.weights.tree import named

WINDOW = 512  # tokens that see each other, at most
SEQUENCES = 8  # in a step


def mean_squares(
    model: str | os.PathLike[str], file: Path, model_family: str | None = None
) -> dict[str, np.ndarray]:
    """The mean squares [in] of the inputs of each matrix of a model, by the name of its parameter,
    over the tokens of a text file. They are computed in float32.

    Raises:
        ValueError: the file cannot be read, or its text has no token.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"the text {str(file)!r} cannot be read: {reason}; name a text file of a few thousand "
            "words"
        ) from None
    loaded = load_model(
        model, dtype="float32", linear_impl=input_squares.NAME, model_family=model_family
    )
    length = min(WINDOW, loaded.model.config.max_len)
    options: dict[str, Any] = {
        "linear_impl": input_squares.NAME,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": WINDOW,
        "token_buckets": (WINDOW,),
        "max_model_len": length,
        "compilation": "lazy",
        "enable_prefix_caching": False,
        "progress": False,
    }
    with input_squares.recording():
        llm = LLM(loaded, **options)
        window = length - 1  # and the token that is sampled
        tokens = list(llm.tokenizer.encode(text))
        if not tokens:
            raise ValueError(f"{file} has no token; give a text of a few thousand words")
        windows = [tokens[start : start + window] for start in range(0, len(tokens), window)]
        llm.generate(windows, SamplingParams(temperature=0, max_tokens=1, detokenize=False))
        params = named(loaded.model.params)
        matrices = {name: params[name] for name in models.matrices(loaded.model.config)}
        return input_squares.mean_squares(matrices)
