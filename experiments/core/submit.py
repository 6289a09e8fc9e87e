"""The requests of a workload as an engine gets them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Protocol

from experiments.core.records import REJECTED, RequestRecord
from experiments.core.workloads import FIRST_ORDINARY_TOKEN, WorkItem, branch_ids
from experiments.simulation.spans import DecodeSpan
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
        ValueError: items are not in order of arrival (turns that follow others may be anywhere), or
            a request ends before `min_tokens`.
    """
    first_turns = [item for item in items if not item.follows]
    if any(a.arrival > b.arrival for a, b in pairwise(first_turns)):
        raise ValueError("the workload's items must be in order of arrival")
    params = sampling.drawn()
    short_item = next((item for item in items if item.longest_output < params.min_tokens), None)
    if short_item is not None and short_item.ends_at is not None:
        raise ValueError(
            f"sampling.min_tokens is {params.min_tokens}, and {short_item.request_id} ends after "
            f"{short_item.ends_at} tokens; lower it, or raise the min of the workload's output"
        )
    return (
        (
            item,
            dataclasses.replace(
                params,
                max_tokens=item.max_tokens,
                trace_decode_token_ids=item.output_token_ids or None,
            ),
        )
        for item in items
    )


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


class Answers:
    """The tokens of answers that other requests wait for: of each answer, the first branch's."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self._tokens: dict[str, list[int]] = {item.follows: [] for item in items if item.follows}

    def begin(self, request_id: str) -> None:
        """Note that a request is computed from its beginning, for the first time or anew."""
        if request_id in self._tokens:
            self._tokens[request_id] = []

    def add(self, result: StepResult) -> None:
        """Add the tokens of a step."""
        if not self._tokens:
            return
        for event in result.events:
            if isinstance(event, Sampled):
                for branch, token in zip(event.request_ids, event.token_ids, strict=True):
                    if branch in self._tokens:
                        self._tokens[branch].append(token)

    def add_span(self, span: DecodeSpan) -> None:
        """Add the tokens of several steps that only decode."""
        if not self._tokens:
            return
        for seq, tokens in zip(span.seqs, span.tokens, strict=True):
            if seq.request_id in self._tokens:
                self._tokens[seq.request_id] += tokens

    def take(self, item: WorkItem) -> tuple[int, ...]:
        """The answer of a request that has ended, which is forgotten. An end token is no part of a
        prompt, so another token is in its place.
        """
        tokens = self._tokens.pop(item.request_id)
        if item.ends_at is not None:
            tokens[-1] = FIRST_ORDINARY_TOKEN
        return tuple(tokens)


class Sender:
    """The requests of a workload in the order and at the times at which they are sent.

    In an open loop a request is sent at its arrival. In a closed loop a client is free when its
    last request has ended, and the client that is free for the longest time sends the next one.

    A turn that follows another request is sent when that has ended and the user has thought, or a
    tool has run. In a closed loop the client is busy until its session has ended. A request that
    the policy rejects ends its session.
    """

    def __init__(
        self, items: Sequence[WorkItem], sampling: SamplingParams, clients: int | None = None
    ) -> None:
        """Begin with all requests unsent. Raises ValueError like `in_order`.

        clients: the number of clients of a closed loop; None: an open loop.
        """
        requests = list(in_order(items, sampling))
        self._unsent = deque(request for request in requests if not request[0].follows)
        # request -> the turn that follows it
        self._turns = {item.follows: (item, params) for item, params in requests if item.follows}
        # a heap: when a turn arrives, its request, and that of the turn before
        self._arriving: list[tuple[float, str, str]] = []
        self._sent: dict[str, WorkItem] = {}  # requests that others follow, with whole prompts
        self.answers = Answers(items)
        # a heap: for each free client the time since when it is free, in seconds
        self._free = None if clients is None else [0.0] * clients
        self._unfinished = Unfinished()

    @property
    def has_unsent(self) -> bool:
        """Whether a request has not been sent."""
        return bool(self._unsent or self._turns)

    def next(self) -> float:
        """Seconds: when the next request arrives.

        Infinity if there is none, or if it waits until a client is free, or for an answer.
        """
        return min(self._next_first_turn(), self._next_turn())

    def _next_turn(self) -> float:
        return self._arriving[0][0] if self._arriving else math.inf

    def _next_first_turn(self) -> float:
        if not self._unsent or (self._free is not None and not self._free):
            return math.inf
        arrival = self._unsent[0][0].arrival
        return arrival if self._free is None else max(arrival, self._free[0])

    def take_next(self) -> tuple[WorkItem, SamplingParams]:
        """Take the next request, which has arrived, with its whole prompt. The caller gives it to
        an engine.
        """
        if self._next_turn() < self._next_first_turn():
            _, _, earlier = heappop(self._arriving)
            item, params = self._turns.pop(earlier)
            item = self._with_conversation(item, self._sent.pop(earlier))
        else:
            item, params = self._unsent.popleft()
            if self._free is not None:
                heappop(self._free)
        if item.request_id in self._turns:
            self._sent[item.request_id] = item
        self.begin_request(item, params)
        return item, params

    def _with_conversation(self, item: WorkItem, earlier: WorkItem) -> WorkItem:
        """The turn, whose prompt begins with the earlier prompt and its answer."""
        history = (*earlier.prompt_token_ids, *self.answers.take(earlier))
        assert len(history) == item.history, "an answer ends at its drawn length"
        return item._replace(prompt_token_ids=(*history, *item.prompt_token_ids), history=0)

    def begin_request(self, item: WorkItem, params: SamplingParams) -> None:
        """Note that a request is computed from its beginning, for the first time or anew."""
        self.answers.begin(item.request_id)
        self._unfinished.add(item.request_id, branch_ids(item.request_id, params.n))

    def end_branches(self, result: StepResult, time: float) -> list[str]:
        """Note the tokens and the ends of branches of a step, which ended at `time`.

        Returns:
            The requests whose last branch ended. Their clients are free, or their next turns
            arrive.
        """
        self.answers.add(result)
        ended = []
        for event in result.events:
            if not isinstance(event, Finished):
                continue
            request_id = self._unfinished.end_branch(event.request_id)
            if request_id is not None:
                ended.append(request_id)
                self._end_request(request_id, time, rejected=event.reason == REJECTED)
        return ended

    def _end_request(self, request_id: str, time: float, *, rejected: bool) -> None:
        if rejected:  # it ends its session
            last = request_id
            while last in self._turns:
                last = self._turns.pop(last)[0].request_id
        if request_id in self._turns:
            turn, _ = self._turns[request_id]
            heappush(self._arriving, (arrival_after(turn, time), turn.request_id, request_id))
        elif self._free is not None:
            heappush(self._free, time)


def arrival_after(turn: WorkItem, end: float) -> float:
    """When a turn arrives, in seconds, if the answer before it ends at `end`."""
    return max(turn.arrival, end + turn.think_s + turn.tool_s)


def with_arrivals(
    requests: Sequence[RequestRecord], items: Sequence[WorkItem], clients: int | None
) -> list[RequestRecord]:
    """The records with the arrivals of a closed loop, and of turns.

    In a closed loop, a request of each client arrives at 0, then a request at each end of another
    one that no turn follows. A turn arrives after the answer before it.

    `requests` are in the order of `items`, and have their arrivals.
    """
    ends = {request.request_id: request.end for request in requests}
    followed = {item.follows for item in items}
    last_ends = [end for name, end in ends.items() if end is not None and name not in followed]
    client_times = iter([0.0] * (clients or 0) + sorted(last_ends))
    records = []
    for request, item in zip(requests, items, strict=True):
        arrival = request.arrival
        end = ends.get(item.follows)
        if end is not None:
            arrival = arrival_after(item, end)
        elif clients is not None and not item.follows:
            arrival = next(client_times, arrival)
        records.append(request._replace(arrival=arrival))
    return records


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
            "priority": item.priority or None,
            "service_class": item.service_class or None,
            "deadline": item.deadline,
        }
        options = {name: value for name, value in values.items() if value is not None}
        engine.add(item.request_id, item.prompt_token_ids, params, forks=forks, **options)
    except ValueError as error:
        raise ValueError(
            f"the engine refused {item.request_id} ({len(item.prompt_token_ids)} prompt tokens, "
            f"at most {item.max_tokens} output tokens): {error}. Bound the workload's lengths, or "
            "raise the engine's limit"
        ) from error
