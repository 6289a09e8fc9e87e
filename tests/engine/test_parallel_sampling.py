"""Branches of one prompt: they share its blocks, copy what they write to, and draw what they would
draw alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from tests.engine.runs import small_llm, token_ids
from tests.refusals import refused

PROMPTS = {n: np.random.default_rng(n).integers(3, 320, n).tolist() for n in (1, 8, 9, 16, 21, 40)}


def make(tiny, **config) -> LLM:
    return small_llm(tiny, **{"block_size": 8, "num_blocks": 128} | config)


def drawn(**options) -> SamplingParams:
    return SamplingParams(
        **{"seed": 5} | options, temperature=0.9, top_p=0.95, max_tokens=10, ignore_eos=True
    )


@pytest.fixture(scope="module")
def llm(tiny):
    return make(tiny)


@pytest.fixture(scope="module")
def alone(tiny):
    """Tokens of a prompt drawn alone, by (length of the prompt, seed), without any sharing."""
    cold = make(tiny, enable_prefix_caching=False)
    return {
        (n, seed): token_ids(cold, [PROMPTS[n]], drawn(seed=seed))[0]
        for n in PROMPTS
        for seed in range(5, 9)
    }


@pytest.mark.default_cases("True-9", "False-16")
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("caching", [True, False])
def test_branch_i_samples_like_a_request_with_seed_plus_i(tiny, alone, length, caching):
    llm = make(tiny, enable_prefix_caching=caching)
    (out,) = llm.generate([PROMPTS[length]], drawn(n=4))
    assert [branch.token_ids for branch in out.outputs] == [alone[length, 5 + i] for i in range(4)]
    assert [branch.index for branch in out.outputs] == [0, 1, 2, 3]
    assert len({branch.token_ids for branch in out.outputs}) == 4


def test_best_of_returns_the_most_likely_branches_in_order(llm):
    (together,) = llm.generate([PROMPTS[21]], drawn(n=6, logprobs=0))
    (best,) = llm.generate([PROMPTS[21]], drawn(n=2, best_of=6))
    ranked = sorted(together.outputs, key=lambda branch: -branch.cumulative_logprob)
    for i, branch in enumerate(best.outputs):
        assert branch.token_ids == ranked[i].token_ids
        assert branch.index == i
        assert branch.logprobs is None
    assert len(best.outputs) == 2


@pytest.mark.parametrize("best_of", [1, 2.0, True])
def test_best_of_is_at_least_n(best_of):
    with refused(r"best_of is .*; it must be None, or an integer of at least n \(2\)"):
        SamplingParams(n=2, best_of=best_of)


def test_more_branches_than_can_run_are_refused(llm):
    with refused("has 9 branches, but at most 8 sequences run at a time; lower n or"):
        llm.generate([PROMPTS[9]], SamplingParams(n=9))
    assert not llm.engine.has_work
