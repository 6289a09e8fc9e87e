"""The requests of a workload as an engine gets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from experiments.core.workloads import WorkItem, branch_ids
from pagedjax.host.types import StepResult
from pagedjax.params import SamplingParams

LONGEST_SLEEP = 0.05  # seconds; longer waits are split, so that an interrupt takes effect soon


class Engine(Protocol):
    """The methods of an engine that a run uses (pagedjax.engine.engine.Engine)."""

    @property
    def has_work(self) -> bool: ...

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, forks: Sequence[str] = ()
    ) -> None: ...

    def step(self) -> StepResult | None: ...

    def reset(self) -> None: ...


def in_order(items: Sequence[WorkItem], sampling: SamplingParams) -> Iterator[tuple[WorkItem, SamplingParams]]:
    """Each request with its own parameters.

    Raises:
        ValueError: items are not in order of arrival.
    """
    if any(a.arrival > b.arrival for a, b in pairwise(items)):
        raise ValueError("the workload's items must be in order of arrival")
    drawn = sampling.drawn()
    return ((item, dataclasses.replace(drawn, max_tokens=item.max_tokens)) for item in items)


def submit(engine: Engine, item: WorkItem, params: SamplingParams) -> None:
    """Raises ValueError, with the engine's reason, if it refuses the request."""
    try:
        _, *forks = branch_ids(item.request_id, params.n)
        engine.add(item.request_id, item.prompt_token_ids, params, forks=forks)
    except ValueError as error:
        raise ValueError(
            f"the engine refused {item.request_id} ({len(item.prompt_token_ids)} prompt tokens, at most "
            f"{item.max_tokens} output tokens): {error}. Bound the workload's lengths, or raise the engine's limit"
        ) from error
