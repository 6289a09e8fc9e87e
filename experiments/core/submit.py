"""The requests of a workload as an engine gets them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Protocol

from experiments.core.records import RequestRecord
from experiments.core.workloads import WorkItem, branch_ids
from pagedjax.host.types import Event, Finished, FinishReason, Sampled, StepResult
from pagedjax.options.params import SamplingParams

LONGEST_SLEEP = 0.05  # seconds; longer waits are split, so that an interrupt takes effect soon


class Engine(Protocol):
    """The methods of an engine that a run uses (pagedjax.engine.engine.Engine)."""

    @property
    def has_work(self) -> bool: ...

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        forks: Sequence[str] = (),
    ) -> None: ...

    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]: ...

    def step(self) -> StepResult | None: ...

    def reset(self) -> None: ...


def in_order(
    items: Sequence[WorkItem], sampling: SamplingParams
) -> Iterator[tuple[WorkItem, SamplingParams]]:
    """Each request with its own parameters.

    Raises:
        ValueError: items are not in order of arrival, or a request ends before `min_tokens`.
    """
    if any(a.arrival > b.arrival for a, b in pairwise(items)):
        raise ValueError("the workload's items must be in order of arrival")
    params = sampling.drawn()
    early = next((item for item in items if item.longest_output < params.min_tokens), None)
    if early is not None and early.ends_at is not None:
        raise ValueError(
            f"sampling.min_tokens is {params.min_tokens}, and {early.request_id} ends after "
            f"{early.ends_at} tokens; lower it, or raise the min of the workload's output"
        )
    return ((item, dataclasses.replace(params, max_tokens=item.max_tokens)) for item in items)


class Unfinished:
    """Branches that have not ended, by their requests."""

    def __init__(self) -> None:
        self._requests: dict[str, str] = {}  # branch -> its request
        self._counts: Counter[str] = Counter()  # request -> how many branches have not ended

    def add(self, request_id: str, branches: Sequence[str]) -> None:
        self._requests.update(dict.fromkeys(branches, request_id))
        self._counts[request_id] = len(branches)

    def end_branch(self, branch: str) -> str | None:
        """Note that a branch has ended.

        Returns:
            Its request, if this was the request's last branch; else None.
        """
        request_id = self._requests.pop(branch)
        self._counts[request_id] -= 1
        if self._counts[request_id]:
            return None
        del self._counts[request_id]
        return request_id


class Sender:
    """The requests of a workload in the order and at the times at which they are sent.

    In an open loop a request is sent at its arrival. In a closed loop a client is free when its
    last request has ended, and the client that is free for the longest time sends the next one.
    """

    def __init__(
        self, items: Sequence[WorkItem], sampling: SamplingParams, clients: int | None = None
    ) -> None:
        """Begin with all requests unsent. Raises ValueError like `in_order`.

        clients: the number of clients of a closed loop; None: an open loop.
        """
        self._unsent = deque(in_order(items, sampling))
        # a heap: for each free client the time since when it is free, in seconds
        self._free = None if clients is None else [0.0] * clients
        self._unfinished = Unfinished()

    @property
    def has_unsent(self) -> bool:
        """Whether a request has not been sent."""
        return bool(self._unsent)

    def next(self) -> float:
        """Seconds: when the next request arrives.

        Infinity if there is none, or if it waits until a client is free.
        """
        if not self._unsent or (self._free is not None and not self._free):
            return math.inf
        arrival = self._unsent[0][0].arrival
        return arrival if self._free is None else max(arrival, self._free[0])

    def take_next(self) -> tuple[WorkItem, SamplingParams]:
        """Take the next request, which has arrived. The caller gives it to an engine."""
        item, params = self._unsent.popleft()
        if self._free is not None:
            heappop(self._free)
        self.begin_request(item, params)
        return item, params

    def begin_request(self, item: WorkItem, params: SamplingParams) -> None:
        """Note that a request is computed from its beginning, for the first time or anew."""
        self._unfinished.add(item.request_id, branch_ids(item.request_id, params.n))

    def end_branches(self, result: StepResult, time: float) -> list[str]:
        """Note the branches that ended in a step, which ended at `time`.

        Returns:
            The requests whose last branch ended. Their clients are free.
        """
        ended = []
        for event in result.events:
            if not isinstance(event, Finished):
                continue
            request_id = self._unfinished.end_branch(event.request_id)
            if request_id is not None:
                ended.append(request_id)
                if self._free is not None:
                    heappush(self._free, time)
        return ended


def with_arrivals(requests: Sequence[RequestRecord], clients: int | None) -> list[RequestRecord]:
    """The records with the arrivals of a closed loop: a request of each client at 0, then a request
    at each end of another one.

    The arrivals of `requests` are 0, so `e2e` is when a request ended. In an open loop nothing
    changes.
    """
    if clients is None:
        return list(requests)
    ends = sorted(request.e2e for request in requests if request.e2e is not None)
    arrivals = [0.0] * clients + ends
    return [
        request._replace(arrival=arrival)
        for request, arrival in zip(requests, arrivals, strict=False)
    ]


class DrawnEnds:
    """The branches that end at a drawn length, and the tokens that each still gets."""

    def __init__(self, items: Sequence[WorkItem], branches: int) -> None:
        self._tokens_left = {
            branch: item.ends_at
            for item in items
            if item.ends_at is not None
            for branch in branch_ids(item.request_id, branches)
        }

    def reached(self, result: StepResult) -> list[str]:
        """The branches that got their last token in a step."""
        if not self._tokens_left:
            return []
        ended = []
        for event in result.events:
            if not isinstance(event, Sampled):
                continue
            for branch in event.request_ids:
                if branch in self._tokens_left:
                    self._tokens_left[branch] -= 1
                    if not self._tokens_left[branch]:
                        ended.append(branch)
        return ended


def submit(engine: Engine, item: WorkItem, params: SamplingParams) -> None:
    """Add a request to an engine. Only a simulated engine ends it at its `ends_at`.

    Raises:
        ValueError: the engine refuses the request; the message has its reason.
    """
    try:
        _, *forks = branch_ids(item.request_id, params.n)
        values = {
            "ends_at": item.ends_at,
            "predicted": item.predicted,
            "user": item.user or None,
        }
        options = {name: value for name, value in values.items() if value is not None}
        engine.add(item.request_id, item.prompt_token_ids, params, forks=forks, **options)
    except ValueError as error:
        raise ValueError(
            f"the engine refused {item.request_id} ({len(item.prompt_token_ids)} prompt tokens, "
            f"at most {item.max_tokens} output tokens): {error}. Bound the workload's lengths, or "
            "raise the engine's limit"
        ) from error
