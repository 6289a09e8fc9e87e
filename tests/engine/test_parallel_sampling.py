"""Branches of one prompt: they share its blocks, copy what they write to, and draw what they would
draw alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.host import scheduler
from pagedjax.host.types import Forked, Preempted, Sampled

PROMPTS = {n: np.random.default_rng(n).integers(3, 320, n).tolist() for n in (1, 8, 9, 16, 21, 40)}
DRAWN = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 10, "ignore_eos": True}


def make(tiny, **config) -> LLM:
    sizes = {
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (64,),
    }
    return LLM(tiny, progress=False, **(sizes | {"num_blocks": 128} | config))


@pytest.fixture(scope="module")
def llm(tiny):
    return make(tiny)


@pytest.fixture(scope="module")
def alone(tiny):
    """Tokens of a prompt drawn alone, by (length of the prompt, seed), without any sharing."""
    cold = make(tiny, enable_prefix_caching=False)
    keys = [(n, seed) for n in PROMPTS for seed in range(5, 11)]
    return {
        (n, seed): cold.generate([PROMPTS[n]], SamplingParams(seed=seed, **DRAWN), use_tqdm=False)[
            0
        ]
        .outputs[0]
        .token_ids
        for n, seed in keys
    }


def results(llm, requests):
    """Requests {id: (prompt, params, forks)} to their end -> (tokens by id, step results)."""
    for name, (prompt, params, forks) in requests.items():
        llm.engine.add(name, prompt, params, forks=forks)
    tokens: dict[str, list[int]] = {}
    steps = []
    while llm.engine.has_work:
        steps.append(llm.engine.step())
        scheduler.check(llm.engine.scheduler_state)
        for event in steps[-1].events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    tokens.setdefault(name, []).append(token)
    assert llm.engine.scheduler_state.pool.num_free == llm.engine.config.num_blocks
    return {name: tuple(found) for name, found in tokens.items()}, steps


@pytest.mark.default_cases("True-9", "False-16")
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("caching", [True, False])
def test_branch_i_samples_like_a_request_with_seed_plus_i(tiny, alone, length, caching):
    llm = make(tiny, enable_prefix_caching=caching)
    (out,) = llm.generate([PROMPTS[length]], SamplingParams(n=4, seed=5, **DRAWN), use_tqdm=False)
    assert [branch.token_ids for branch in out.outputs] == [alone[length, 5 + i] for i in range(4)]
    assert [branch.index for branch in out.outputs] == [0, 1, 2, 3]
    assert len({branch.token_ids for branch in out.outputs}) == 4


def test_branches_share_prompt_blocks_and_copy_the_last_on_write(llm):
    llm.engine.reset()
    prompt = PROMPTS[21]  # two full blocks of 8 and one with 5 tokens
    params = SamplingParams(seed=5, **DRAWN)
    _, (first, second, *_) = results(llm, {"a": (prompt, params, ("b", "c"))})
    assert first.plan.counts == (21,)
    assert Forked(0, ("b", "c")) in first.events
    tables = {seq.request_id: seq.blocks for seq in second.plan.seqs}
    assert len({table[:2] for table in tables.values()}) == 1, "the full blocks are shared"
    assert len({table[2] for table in tables.values()}) == 3, (
        "each branch writes to its own last block"
    )
    (source,) = {old for old, _ in second.plan.copies}
    assert len(second.plan.copies) == 2, "the last branch keeps the block"
    assert source in {table[2] for table in tables.values()}
    assert second.plan.blocks_used == 2 + 3
    assert second.plan.counts == (1, 1, 1), "the prompt is computed once, but for its last token"


def test_branches_run_beside_other_requests(tiny, alone):
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    single = make(tiny).generate([PROMPTS[9]], greedy, use_tqdm=False)[0].outputs[0].token_ids
    mixed = make(tiny)
    params = [SamplingParams(n=3, seed=5, **DRAWN), greedy, SamplingParams(seed=7, **DRAWN)]
    three, one, other = mixed.generate(
        [PROMPTS[40], PROMPTS[9], PROMPTS[16]], params, use_tqdm=False
    )
    assert [branch.token_ids for branch in three.outputs] == [alone[40, 5 + i] for i in range(3)]
    assert one.outputs[0].token_ids == single
    assert other.outputs[0].token_ids == alone[16, 7]


@pytest.mark.parametrize("caching", [True, False])
def test_branches_are_preempted_together_and_sample_the_same(tiny, alone, caching):
    llm = make(tiny, num_blocks=10, enable_prefix_caching=caching)
    params = SamplingParams(seed=5, **DRAWN)
    requests = {str(n): (PROMPTS[n], params, (f"{n}b", f"{n}c")) for n in (21, 40)}
    tokens, steps = results(llm, requests)
    together = [step.plan.preempted for step in steps if len(step.plan.preempted) > 1]
    assert together
    assert sum(isinstance(event, Preempted) for step in steps for event in step.events) >= 2
    for n in (21, 40):
        assert [tokens[name] for name in (str(n), f"{n}b", f"{n}c")] == [
            alone[n, 5 + i] for i in range(3)
        ]


def test_one_branch_can_be_cancelled_before_and_after_the_fork(tiny, alone):
    llm = make(tiny)
    params = SamplingParams(seed=5, **DRAWN)
    for steps in (0, 3):
        llm.engine.add("a", PROMPTS[21], params, forks=("b", "c"))
        for _ in range(steps):
            llm.engine.step()
        (event,) = llm.engine.cancel("b")
        assert event.request_id == "b"
        tokens = results(llm, {})[0]
        assert tokens["a"][-3:] == alone[21, 5][-3:]
        assert tokens["c"][-3:] == alone[21, 7][-3:]
        assert "b" not in tokens
    llm.engine.add("a", PROMPTS[21], params, forks=("b", "c"))
    assert [event.request_id for event in llm.engine.cancel("a")] == ["a", "b", "c"]
    assert not llm.engine.has_work


def test_branches_end_independently(llm):
    params = SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=1)
    (out,) = llm.generate([PROMPTS[16]], params, use_tqdm=False)
    assert [len(branch.token_ids) for branch in out.outputs] == [1, 1, 1]


def test_best_of_returns_the_most_likely_branches_in_order(llm):
    params = {"seed": 5, **DRAWN}
    (every,) = llm.generate(
        [PROMPTS[21]], SamplingParams(n=6, logprobs=0, **params), use_tqdm=False
    )
    (best,) = llm.generate([PROMPTS[21]], SamplingParams(n=2, best_of=6, **params), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda branch: -branch.cumulative_logprob)
    assert [branch.token_ids for branch in best.outputs] == [
        branch.token_ids for branch in ranked[:2]
    ]
    assert [branch.index for branch in best.outputs] == [0, 1]
    assert all(branch.logprobs is None for branch in best.outputs)


@pytest.mark.parametrize("best_of", [1, 2.0, True])
def test_best_of_is_at_least_n(best_of):
    with pytest.raises(
        ValueError, match=r"best_of is .*; it must be None, or an integer of at least n \(2\)"
    ):
        SamplingParams(n=2, best_of=best_of)


def test_more_branches_than_can_run_are_refused(llm):
    with pytest.raises(
        ValueError, match="has 9 branches, but at most 8 sequences run at a time; lower n or"
    ):
        llm.generate([PROMPTS[9]], SamplingParams(n=9), use_tqdm=False)
    assert not llm.engine.has_work
