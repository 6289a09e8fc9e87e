"""Branches of one prompt: they share its blocks, copy what they write to, and draw what they would
draw alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.host.types import Forked
from tests.engine.runs import greedy, sampled, small_llm, steps, token_ids
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
        for seed in range(5, 11)
    }


def results(llm, requests):
    """Requests {id: (prompt, forks)} to their end -> (tokens by id, step results)."""
    for name, (prompt, forks) in requests.items():
        llm.engine.add(name, prompt, drawn(), forks=forks)
    results = list(steps(llm.engine))
    return {name: tuple(tokens) for name, tokens in sampled(results).items()}, results


@pytest.mark.default_cases("True-9", "False-16")
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("caching", [True, False])
def test_branch_i_samples_like_a_request_with_seed_plus_i(tiny, alone, length, caching):
    llm = make(tiny, enable_prefix_caching=caching)
    (out,) = llm.generate([PROMPTS[length]], drawn(n=4))
    assert [branch.token_ids for branch in out.outputs] == [alone[length, 5 + i] for i in range(4)]
    assert [branch.index for branch in out.outputs] == [0, 1, 2, 3]
    assert len({branch.token_ids for branch in out.outputs}) == 4


def test_branches_share_prompt_blocks_and_copy_the_last_on_write(llm):
    llm.engine.reset()
    prompt = PROMPTS[21]  # two full blocks of 8 and one with 5 tokens
    _, (first, second, *_) = results(llm, {"a": (prompt, ("b", "c"))})
    assert first.plan.counts == (21,)
    assert Forked(0, ("b", "c")) in first.events
    tables = [seq.blocks for seq in second.plan.seqs]
    last = {table[2] for table in tables}
    assert len({table[:2] for table in tables}) == 1, "the full blocks are shared"
    assert len(last) == 3, "each branch writes to its own last block"
    (source,) = {old for old, _ in second.plan.copies}
    assert len(second.plan.copies) == 2, "the last branch keeps the block"
    assert source in last
    assert second.plan.blocks_used == 2 + 3
    assert second.plan.counts == (1, 1, 1), "the prompt is computed once, but for its last token"


def test_branches_run_beside_other_requests(tiny, alone):
    single = token_ids(make(tiny), [PROMPTS[9]], greedy(10))
    branches, one_branch, other_seed = make(tiny).generate(
        [PROMPTS[n] for n in (40, 9, 16)], [drawn(n=3), greedy(10), drawn(seed=7)]
    )
    assert [branch.token_ids for branch in branches.outputs] == [alone[40, 5 + i] for i in range(3)]
    assert [one_branch.outputs[0].token_ids] == single
    assert other_seed.outputs[0].token_ids == alone[16, 7]


@pytest.mark.parametrize("caching", [True, False])
def test_branches_are_preempted_together_and_sample_the_same(tiny, alone, caching):
    llm = make(tiny, num_blocks=10, enable_prefix_caching=caching)
    requests = {str(n): (PROMPTS[n], (f"{n}b", f"{n}c")) for n in (21, 40)}
    tokens, steps = results(llm, requests)
    assert any(len(step.plan.preempted) > 1 for step in steps)
    for n in (21, 40):
        names = str(n), f"{n}b", f"{n}c"
        assert [tokens[name] for name in names] == [alone[n, 5 + i] for i in range(3)]


def test_one_branch_can_be_cancelled_before_and_after_the_fork(tiny, alone):
    engine = make(tiny).engine
    for number in (0, 3):
        engine.add("a", PROMPTS[21], drawn(), forks=("b", "c"))
        before = [engine.step() for _ in range(number)]
        (event,) = engine.cancel("b")
        assert event.request_id == "b"
        after = list(steps(engine))
        assert "b" not in sampled(after)
        tokens = sampled([*before, *after])
        assert tuple(tokens["a"]) == alone[21, 5]
        assert tuple(tokens["c"]) == alone[21, 7]
    engine.add("a", PROMPTS[21], drawn(), forks=("b", "c"))
    assert [event.request_id for event in engine.cancel("a")] == ["a", "b", "c"]
    assert not engine.has_work


def test_branches_end_independently(llm):
    params = SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=1)
    (out,) = llm.generate([PROMPTS[16]], params)
    assert [len(branch.token_ids) for branch in out.outputs] == [1, 1, 1]


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
