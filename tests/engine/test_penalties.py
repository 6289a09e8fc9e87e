"""Penalties in an engine: the tokens so far are read from cache blocks, wherever the blocks came
from.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.host.types import Preempted, Resumed

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
    return LLM(tiny, progress=False, token_buckets=(16,), **sizes, **config)


def tokens_of(llm: LLM, params) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def roomy(tiny) -> LLM:
    return make(tiny, **ROOMY)


def test_greedy_tokens_are_the_best_after_a_plain_count_of_the_outputs(roomy):
    params = SamplingParams(temperature=0, logprobs=20, **PENALTIES)
    different = 0
    for out in roomy.generate(PROMPTS, params, use_tqdm=False):
        counts: Counter[int] = Counter()
        for token, logprobs in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True):
            raw = {other: entry.logprob for other, entry in logprobs.items()}
            adjusted = {
                other: x - 0.4 * counts[other] - 0.7 * (counts[other] > 0)
                for other, x in raw.items()
            }
            assert adjusted[token] >= max(adjusted.values()) - 1e-4
            different += token != max(raw, key=raw.__getitem__)
            counts[token] += 1
    assert different > 0, "the penalties decided no token"


@pytest.mark.default_cases("recompute")
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
def test_penalties_are_the_same_however_blocks_are_filled(tiny, roomy, config):
    assert tokens_of(make(tiny, **config), MIXED) == tokens_of(roomy, MIXED)


def test_swapped_blocks_bring_their_token_ids_back(tiny, roomy):
    llm, events = make(tiny, **SWAPPING), []
    for i, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
        llm.engine.add(str(i), prompt, params)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
    while llm.engine.has_work:
        for event in llm.engine.step().events:
            events.append(event)
            for name, token in zip(
                getattr(event, "request_ids", ()), getattr(event, "token_ids", ()), strict=False
            ):
                found[name].append(token)
    assert any(isinstance(event, Preempted) and event.swapped for event in events)
    assert any(isinstance(event, Resumed) for event in events)
    assert list(found.values()) == tokens_of(roomy, MIXED)
