"""A drafter that knows every output and errs with a known probability, independently at each
position.

study.py copies this file beside a known.json: {"acceptance": a, "outputs": {sequence id: [number of
prompt tokens, [output tokens]]}}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.simulation.simulate import num_accepted
from pagedjax.engine.drafters import Drafter


def read_outputs() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))


def propose(memory: dict[str, Any], sequence_id: str, tokens: np.ndarray, k: int) -> list[int]:
    """The next tokens of the output; where a draw says so, another token in its place.

    The draws are the same as in a simulation with this acceptance.
    """
    prompt, output = memory["outputs"][sequence_id]
    length = len(tokens)
    next_tokens = output[length - prompt : length - prompt + k]
    drafts = []
    for position, token in enumerate(next_tokens, start=length):
        is_right = num_accepted(int(sequence_id), position, k=1, probability=memory["acceptance"])
        wrong_token = token - 1 if token else 1  # any other one
        drafts.append(token if is_right else wrong_token)
    return drafts


ORACLE = Drafter("oracle", propose, read_outputs)
