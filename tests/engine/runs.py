"""What tests of engines do most: make a small LLM, ask greedily, run all steps and read the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pagedjax import LLM, SamplingParams
from pagedjax.host import scheduler
from pagedjax.host.types import Sampled, StepResult

# the sizes of `tiny_llm`, whose programs such engines share
SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "num_blocks": 256,
    "progress": False,
}


def small_llm(model: Any, **config: Any) -> LLM:
    """Returns an LLM with the options SMALL, if nothing else is said. It has one bucket."""
    budget = config.get("max_num_batched_tokens", SMALL["max_num_batched_tokens"])
    options: dict[str, Any] = {**SMALL, "token_buckets": (budget,), **config}
    return LLM(model, **options)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Returns parameters of a greedy request that generates exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def answers(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[Any]:
    """Returns the first branch of each output."""
    return [output.outputs[0] for output in llm.generate(prompts, params, **options)]


def token_ids(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[tuple[int, ...]]:
    """Returns the tokens of the first branch of each output."""
    return [tuple(answer.token_ids) for answer in answers(llm, prompts, params, **options)]


def logprobs_of(answer: Any) -> np.ndarray:
    """Returns the log-probability of each token of an answer: [tokens] float64."""
    places = zip(answer.logprobs or (), answer.token_ids, strict=True)
    return np.array([place[token].logprob for place, token in places])


def check_idle(engine: Any) -> None:
    """All requests have ended, and no block has an owner."""
    state = engine.scheduler_state
    assert not engine.has_work
    assert state.pool.num_free == state.config.num_blocks, "blocks leaked"
    assert not state.host_pool or state.host_pool.num_free == state.config.host_blocks


def steps(engine: Any) -> Iterator[StepResult]:
    """Runs an engine until it has no work, checks its invariants, and yields the results."""
    while engine.has_work:
        result = engine.step()
        scheduler.check(engine.scheduler_state)
        yield result
    check_idle(engine)


def sampled(results: Iterable[StepResult]) -> dict[str, list[int]]:
    """Returns the tokens that steps sampled, by sequence."""
    tokens: dict[str, list[int]] = {}
    for event in [event for result in results for event in result.events]:
        if isinstance(event, Sampled):
            for name, token in zip(event.request_ids, event.token_ids, strict=True):
                tokens.setdefault(name, []).append(token)
    return tokens
