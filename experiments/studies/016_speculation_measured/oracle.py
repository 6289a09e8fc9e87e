"""A drafter that knows every output and errs with a known probability, independently at each
position.

study.py copies this file beside a known.json: {"acceptance": a, "outputs": {sequence id: [prompt
tokens, [tokens]]}}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.simulation.simulate import accepted
from pagedjax.engine.drafters import Drafter


def known() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))


def propose(memory: dict[str, Any], sequence_id: str, tokens: np.ndarray, k: int) -> list[int]:
    """The next tokens of the output; where a draw says so, another token.

    The draws are those of a simulation.
    """
    prompt, output = memory["outputs"][sequence_id]
    length = len(tokens)
    right = output[length - prompt : length - prompt + k]
    draws = (
        accepted(int(sequence_id), length + j, 1, memory["acceptance"]) for j in range(len(right))
    )
    return [
        token if keep else token - 1 if token else 1
        for token, keep in zip(right, draws, strict=True)
    ]


ORACLE = Drafter("oracle", propose, known)
