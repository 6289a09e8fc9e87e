"""The engine on SmolLM2 against tests/goldens/greedy.json, which transformers made on torch (see
make_greedy.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedjax import LLM, RequestOutput, SamplingParams
from tests.engine.runs import greedy, logprobs_of, sampled, steps, token_ids

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "greedy.json").read_text())["prompts"]
SHORT = [g for g in GOLDENS if len(g["prompt_token_ids"]) <= 100]
SLOW = pytest.mark.slow
GREEDY = greedy(64, logprobs=0)
# The sampled request of the issue, among and apart from others.
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16, ignore_eos=True)


def engine(model, **config) -> LLM:
    """Few buckets, because each costs seconds to compile: single tokens, and full steps."""
    budget = config["max_num_batched_tokens"]
    config.setdefault("token_buckets", tuple(sorted({min(32, budget), min(64, budget), budget})))
    return LLM(model, progress=False, max_model_len=512, **config)


def prompts_of(goldens) -> list[list[int]]:
    return [golden["prompt_token_ids"] for golden in goldens]


def differing(llm: LLM, goldens, tokens: int = 64) -> list[str]:
    """Names of the prompts whose continuation is another than transformers'."""
    outputs = token_ids(llm, prompts_of(goldens), greedy(tokens))
    pairs = zip(outputs, goldens, strict=True)
    return [g["name"] for output, g in pairs if list(output) != g["token_ids"][:tokens]]


def run(llm: LLM, prompts, params) -> tuple[int, dict[str, list[int]]]:
    """Run prompts on the engine itself -> (preemptions, tokens by prompt index)."""
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add(str(i), prompt, p)
    results = list(steps(llm.engine))
    return sum(len(result.plan.preempted) for result in results), sampled(results)


def prompt_log_probabilities(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_token_ids is not None
    places = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [place[token].logprob for token, place in places if place is not None]


# By default one program for all: chunks of at most 32 tokens cut the longest prompt into several.
NARROW = {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 32, "token_buckets": (32,)}
WIDE = {"block_size": 16, "max_num_batched_tokens": 2048, "token_buckets": (32, 2048)}
WITH_PROMPTS = [golden for golden in GOLDENS if "prompt_logprobs" in golden]
SOME = [*WITH_PROMPTS, *(golden for golden in SHORT[::3] if golden not in WITH_PROMPTS)]


@pytest.mark.parametrize(
    ("options", "goldens", "tokens"),
    [
        (NARROW, SOME, 8),
        pytest.param(NARROW, SHORT, 12, marks=SLOW),
        pytest.param(WIDE, GOLDENS, 64, marks=SLOW),
    ],
    ids=["some", "short", "all"],
)
def test_tokens_and_log_probabilities_equal_transformers(smollm2, options, goldens, tokens):
    llm = engine(smollm2, **options)
    params = [
        replace(GREEDY, max_tokens=tokens, prompt_logprobs=0 if golden in WITH_PROMPTS else None)
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
        if golden in WITH_PROMPTS:
            values = golden["prompt_logprobs"][1:]
            assert prompt_log_probabilities(output) == pytest.approx(values, abs=1e-3)


@pytest.mark.slow
def test_a_seeded_request_is_independent_of_its_batch(smollm2):
    prompt = GOLDENS[0]["prompt_token_ids"]
    others = prompts_of(SHORT[1:16])
    wide = engine(smollm2, block_size=16, max_num_batched_tokens=64, token_buckets=(16, 64))
    (alone,) = token_ids(wide, [prompt], SAMPLED)
    mates = [SamplingParams(temperature=1.0, seed=i, max_tokens=4 + i) for i in range(len(others))]
    for place in (9, len(others)):
        prompts = [*others[:place], prompt, *others[place:]]
        params = [*mates[:place], SAMPLED, *mates[place:]]
        assert token_ids(wide, prompts, params)[place] == alone

    narrow = engine(
        smollm2,
        block_size=8,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        num_blocks=10,
        token_buckets=(16,),
    )
    assert token_ids(narrow, [prompt], SAMPLED) == [alone]
    count, tokens = run(narrow, [*others[:3], prompt], [greedy(24)] * 3 + [SAMPLED])
    assert count > 0, "the pool was meant to be too small"
    assert tokens["3"] == list(alone)


# The smallest and the largest. The rest of the grid takes minutes more and is for changes of
# kernels.
SAMPLE_OF_GRID = {(1, 16), (64, 2048)}


@pytest.mark.parametrize(
    ("block_size", "budget"),
    [
        pytest.param(
            size,
            budget,
            marks=pytest.mark.slow if (size, budget) in SAMPLE_OF_GRID else pytest.mark.exhaustive,
        )
        for size in (1, 8, 16, 64)
        for budget in (16, 64, 2048)
    ],
)
def test_block_size_and_budget_change_no_golden_token(smollm2, block_size, budget):
    llm = engine(
        smollm2, block_size=block_size, max_num_batched_tokens=budget, num_blocks=2048 // block_size
    )
    goldens = GOLDENS if budget > 16 else SHORT
    assert differing(llm, goldens) == []
    one_by_one = [name for g in SHORT[:6] for name in differing(llm, [g], tokens=24)]
    assert one_by_one == []
