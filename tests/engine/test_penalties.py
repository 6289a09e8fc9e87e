"""Penalties in an engine: the tokens so far are read from cache blocks, wherever the blocks came
from.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from tests.engine.runs import answers, small_llm, token_ids

SHARED = np.random.default_rng(0).integers(3, 300, 20).tolist()
TAILS = [
    np.random.default_rng(i).integers(3, 300, n).tolist()
    for i, n in enumerate((1, 5, 21, 3, 17, 9))
]
PROMPTS = [SHARED + tail for tail in TAILS]
PENALTIES = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "max_tokens": 24,
    "ignore_eos": True,
}
MIXED = [
    SamplingParams(temperature=t, seed=i, repetition_penalty=1.3, **PENALTIES)
    for i, t in enumerate((0.0, 1.0, 0.0, 0.8, 1.2, 0.0))
]
ROOMY = {"num_blocks": 64}
FEW = {"num_blocks": 12}
SWAPPING = {**FEW, "preemption": "swap", "swap_space_gib": 0.01}


def make(tiny, **config) -> LLM:
    sizes = {"max_model_len": 128, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return small_llm(tiny, **sizes, **config)


@pytest.fixture(scope="module")
def roomy(tiny) -> LLM:
    return make(tiny, **ROOMY)


def test_greedy_tokens_are_the_best_after_a_plain_count_of_the_outputs(roomy):
    params = SamplingParams(temperature=0, logprobs=20, **PENALTIES)
    different = 0
    for answer in answers(roomy, PROMPTS, params):
        counts: Counter[int] = Counter()
        for token, place in zip(answer.token_ids, answer.logprobs, strict=True):
            raw = {token_id: entry.logprob for token_id, entry in place.items()}
            adjusted = {
                token_id: x - 0.4 * counts[token_id] - 0.7 * (counts[token_id] > 0)
                for token_id, x in raw.items()
            }
            assert adjusted[token] >= max(adjusted.values()) - 1e-4
            different += token != max(raw, key=raw.__getitem__)
            counts[token] += 1
    assert different > 0, "the penalties decided no token"


@pytest.mark.default_cases("swap")
@pytest.mark.parametrize(
    "config",
    [
        {**ROOMY, "enable_prefix_caching": False},
        {**ROOMY, "lookahead": 2},
        FEW,
        SWAPPING,
        {**SWAPPING, "lookahead": 1},
    ],
    ids=["no sharing", "lookahead", "recompute", "swap", "swap and lookahead"],
)
def test_penalties_are_the_same_however_blocks_are_filled(tiny, roomy, tmp_path, config):
    """Swapped blocks bring their token ids back."""
    llm = make(tiny, **config)
    llm.engine.record(tmp_path / "run.jsonl")
    assert token_ids(llm, PROMPTS, MIXED) == token_ids(roomy, PROMPTS, MIXED)
    llm.engine.record(None)
    text = (tmp_path / "run.jsonl").read_text()
    assert ('"Preempted"' in text) == (config["num_blocks"] == 12)
    assert ('"Resumed"' in text) == ("preemption" in config)
