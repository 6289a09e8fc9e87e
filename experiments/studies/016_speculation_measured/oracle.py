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

from experiments.simulation.simulate import accepted
from pagedjax.engine.drafters import Drafter


def known() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))


def propose(memory: dict[str, Any], sequence_id: str, tokens: np.ndarray, k: int) -> list[int]:
    """The next tokens of the output; where a draw says so, another token in its place.

    The draws are the same as in a simulation with this acceptance.
    """
    prompt, output = memory["outputs"][sequence_id]
    length = len(tokens)
    right = output[length - prompt : length - prompt + k]
    drafts = []
    for position, token in enumerate(right, start=length):
        keep = accepted(int(sequence_id), position, 1, memory["acceptance"])
        wrong = token - 1 if token else 1  # any other token
        drafts.append(token if keep else wrong)
    return drafts


ORACLE = Drafter("oracle", propose, known)
