"""The engine on SmolLM2 against tests/goldens/greedy.json, which transformers made on torch (see
make_greedy.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedjax import LLM, RequestOutput
from tests.engine.runs import greedy, logprobs_of

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "greedy.json").read_text())["prompts"]
SHORT = [g for g in GOLDENS if len(g["prompt_token_ids"]) <= 100]
SLOW = pytest.mark.slow
GREEDY = greedy(64, logprobs=0)


def engine(model, **config) -> LLM:
    """Few buckets, because each costs seconds to compile: single tokens, and full steps."""
    budget = config["max_num_batched_tokens"]
    config.setdefault("token_buckets", tuple(sorted({min(32, budget), min(64, budget), budget})))
    return LLM(model, progress=False, max_model_len=512, **config)


def prompts_of(goldens) -> list[list[int]]:
    return [golden["prompt_token_ids"] for golden in goldens]


def prompt_log_probabilities(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_token_ids is not None
    places = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [place[token].logprob for token, place in places if place is not None]


# By default one program for all: chunks of at most 32 tokens cut the longest prompt into several.
# The default cache of 32 sequences would be 0.7 GB.
NARROW = {
    "block_size": 8,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 32,
    "num_blocks": 160,
    "token_buckets": (32,),
}
WIDE = {"block_size": 16, "max_num_batched_tokens": 2048, "token_buckets": (32, 2048)}
WITH_PROMPTS = [golden for golden in GOLDENS if "prompt_logprobs" in golden]
SUBSET = [*WITH_PROMPTS, *(golden for golden in SHORT[::6] if golden not in WITH_PROMPTS)]


@pytest.mark.parametrize(
    ("options", "goldens", "tokens", "with_prompts"),
    [
        (NARROW, SUBSET, 6, []),  # log-probabilities of prompts have a program of their own
        pytest.param(NARROW, SHORT, 12, WITH_PROMPTS, marks=pytest.mark.exhaustive),
        pytest.param(WIDE, GOLDENS, 64, WITH_PROMPTS, marks=SLOW),
    ],
    ids=["some", "short", "all"],
)
def test_tokens_and_log_probabilities_equal_transformers(
    smollm2, options, goldens, tokens, with_prompts
):
    llm = engine(smollm2, **options)
    params = [
        replace(GREEDY, max_tokens=tokens, prompt_logprobs=0 if golden in with_prompts else None)
        for golden in goldens
    ]
    outputs = llm.generate(prompts_of(goldens), params)
    for output, golden in zip(outputs, goldens, strict=True):
        expected = golden["token_ids"][:tokens]
        (completion,) = output.outputs
        assert list(completion.token_ids) == expected, golden["name"]
        assert completion.text == llm.tokenizer.decode(expected), golden["name"]
        values = golden["logprobs"][:tokens]
        assert logprobs_of(completion) == pytest.approx(values, abs=1e-3), golden["name"]
        if golden in with_prompts:
            values = golden["prompt_logprobs"][1:]
            assert prompt_log_probabilities(output) == pytest.approx(values, abs=1e-3)
