"""The records of a run: a pure fold over its step results. Seconds count from the start of the run.

    StepResult*, WorkItem*  ->  RequestRecord*, StepRecord*  ->  summary (metrics.py)

The time of a token is the end of the step that sampled it (commit included): a user can see it from
then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from experiments.core import speculation
from experiments.core.workloads import WorkItem, branch_ids
from experiments.simulation.cost import work_of
from experiments.simulation.spans import DecodeSpan
from pagedjax.host.first_admissions import FirstAdmissions
from pagedjax.host.types import HOLE, Finished, Plan, Sampled, SchedulerConfig, StepResult

# columns of requests that are kept if a request has them
GROUPING = ("user", "priority", "service_class", "deadline", "session", "turn", "rejected_at")
REJECTED = "rejected"  # the reason of a request that a policy turned away, before any output


class BranchRecord(NamedTuple):
    """One branch of a request.

    The first branch has the request's id. `finish_reason` is None for a branch that did not end.

    counted: the number of the branch's output tokens, in a run that keeps sums (totals.py).
        `token_times` then has only the times of the first and the last token, and `token_ids` is
        empty. None: the times and ids of all tokens are there.
    """

    branch_id: str
    token_times: tuple[float, ...]
    token_ids: tuple[int, ...]
    preemptions: int
    finish_reason: str | None
    counted: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_times) if self.counted is None else self.counted

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between the branch's tokens.

        Raises:
            ValueError: the times of all tokens were not kept.
        """
        if self.counted is not None:
            raise ValueError(
                f"{self.branch_id} has the times of its first and last token alone; set records: "
                "full"
            )
        return tuple(b - a for a, b in pairwise(self.token_times))

    @property
    def tpot(self) -> float | None:
        if self.counted is None:
            return sum(self.gaps) / len(self.gaps) if self.gaps else None
        first, last = self.token_times or (0.0, 0.0)
        return (last - first) / (self.counted - 1) if self.counted > 1 else None


class Transfer(NamedTuple):
    """A sequence that one simulated engine handed to another (pools.py)."""

    branch_id: str
    replica: int  # the engine that adopted it
    bytes: float
    released: float  # when its prompt was computed and it had its first token
    arrived: float  # when its last page arrived
    adopted: float  # when the other engine had room for it


class RequestRecord(NamedTuple):
    """One request; None for events that did not happen."""

    request_id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int  # of each branch
    first_scheduled: float | None
    branches: tuple[BranchRecord, ...]
    replica: int = 0  # the engine that computed it; with pools, the engine that computed its prompt
    transfers: tuple[Transfer, ...] = ()  # of its branches, in the order of their adoption
    predicted: int | None = None  # predicted output tokens, which a policy may read
    user: str = ""  # who sent it; "": not known
    priority: int = 0  # a lower number is more urgent
    service_class: str = ""  # the name of its class; "": it has none
    deadline: float | None = None  # seconds after its arrival by which it should have ended
    session: str = ""  # the conversation of which it is a turn; "": it stands alone
    turn: int = 0  # its number in the session, from 0
    # when the policy turned it away, or an earlier turn of its session; None: it did not
    rejected_at: float | None = None

    @property
    def queue(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        first = min(
            (branch.token_times[0] for branch in self.branches if branch.token_times), default=None
        )
        return None if first is None else first - self.arrival

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end of the last branch; None if a branch did not end, or
        none has a token.
        """
        last = self._last_token
        return None if last is None else last - self.arrival

    @property
    def end(self) -> float | None:
        """When its last branch ended, or when it was rejected; None if a branch did not end."""
        return self.rejected_at if self._last_token is None else self._last_token

    @property
    def _last_token(self) -> float | None:
        """When the last token was made; None without one, or if a branch did not end."""
        if not self.done:
            return None
        return max(
            (branch.token_times[-1] for branch in self.branches if branch.token_times), default=None
        )

    @property
    def has_gaps(self) -> bool:
        """Whether the times of all its tokens were kept."""
        return all(branch.counted is None for branch in self.branches)

    @property
    def done(self) -> bool:
        return all(branch.finish_reason is not None for branch in self.branches)


class StepRecord(NamedTuple):
    """One step.

    `held_tokens` are the tokens in the cache's `blocks_used` blocks after the step. A block that
    several sequences share counts once in both, and once for each of them in `blocks_listed`:
    these are entries in the block tables of running sequences, their blocks without sharing.
    `context_tokens` are the keys and values that attention reads: each sequence's context after the
    step.
    """

    step: int
    started: float
    seconds: float
    device_seconds: float
    host_seconds: float
    sequences: int
    tokens: int
    prompt_tokens: int
    padded_tokens: int
    sampled: int
    admitted: int  # sequences, also those that come back after a preemption
    admitted_tokens: int  # tokens of the sequences that were admitted for the first time
    hit_tokens: int  # those of `admitted_tokens` that were found in the cache
    preempted: int
    finished: int
    waiting: int
    blocks_used: int
    blocks_listed: int
    num_blocks: int
    held_tokens: int
    compilations: int
    context_tokens: int = 0
    pairs: int = 0  # (query, key) pairs of causal attention
    drafts: int = 0  # drafts that were verified
    accepted: int = 0  # drafts that became output tokens
    decodes: int = 0  # decode rows
    replica: int = 0


class Counts(NamedTuple):
    """The numbers of a `StepRecord` that are summed over steps."""

    seconds: float
    tokens: int
    padded_tokens: int
    blocks_used: int
    blocks_listed: int
    held_tokens: int
    hit_tokens: int
    admitted_tokens: int
    preempted: int
    compilations: int
    drafts: int
    accepted: int
    decodes: int


class SpanColumns(NamedTuple):
    """Counts of consecutive steps, int64 [steps]; see `StepRecord`."""

    used: np.ndarray
    listed: np.ndarray
    held_tokens: np.ndarray
    context: np.ndarray


class TokenTimes:
    """The times and the ids of all tokens, by branch."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)
        self._tokens: dict[str, list[int]] = defaultdict(list)

    def add(self, names: Sequence[str], token_ids: Sequence[int], time: float) -> None:
        """Add the tokens of a step. names: the branch of each token."""
        for name, token in zip(names, token_ids, strict=True):
            self._times[name].append(time)
            self._tokens[name].append(token)

    def add_span(self, span: DecodeSpan, times: np.ndarray) -> None:
        """Add a token of each sequence at each of these times."""
        seconds = times.tolist()
        for seq, tokens in zip(span.seqs, span.tokens, strict=True):
            self._times[seq.request_id] += seconds
            self._tokens[seq.request_id] += tokens

    def forget(self, name: str) -> None:
        self._times.pop(name, None)
        self._tokens.pop(name, None)

    def fields(self, name: str) -> dict[str, Any]:
        """The fields of a branch's record that are about its tokens."""
        times = self._times.get(name, ())
        return {"token_times": tuple(times), "token_ids": tuple(self._tokens.get(name, ()))}


class RequestRecorder:
    """Collects the records of requests from results, so that the results and their plans need not
    be kept.
    """

    def __init__(
        self,
        items: Sequence[WorkItem],
        start: float,
        branches: int = 1,
        tokens: TokenTimes | None = None,
    ) -> None:
        """See `request_records`. tokens: keeps the tokens; None: all their times and ids are kept."""
        self._start = start
        self._requests = [(item, branch_ids(item.request_id, branches)) for item in items]
        self._tokens = TokenTimes() if tokens is None else tokens
        self._scheduled: dict[str, float] = {}
        self._preemptions = {name: 0 for _, names in self._requests for name in names}
        self._reasons: dict[str, str] = {}
        self._rejected: dict[str, float] = {}  # request -> when it was rejected

    def add(self, result: StepResult) -> None:
        """Add a step.

        Raises:
            ValueError: the step has a request that is not in the workload.
        """
        started = result.started - self._start
        finished = result.finished - self._start
        for seq in result.plan.seqs:
            if seq.request_id not in self._preemptions:
                raise ValueError(
                    f"step {result.plan.step} runs the request {seq.request_id!r}, not in the "
                    "workload"
                )
            self._scheduled.setdefault(seq.request_id, started)
        for request_id in result.plan.preempted:
            self._preemptions[request_id] += 1
        for event in result.events:
            if isinstance(event, Sampled):
                self._tokens.add(event.request_ids, event.token_ids, finished)
            elif isinstance(event, Finished):
                self._reasons[event.request_id] = event.reason
                if event.reason == REJECTED:
                    self._rejected[event.request_id] = finished

    def add_span(self, span: DecodeSpan) -> None:
        """Add several steps at once. Their sequences were scheduled before."""
        self._tokens.add_span(span, span.times.finished - self._start)

    def forget_request(self, request_id: str) -> None:
        """Forget what was computed of a request: its replica failed, so it is computed anew."""
        self._scheduled.pop(request_id, None)
        branches = next(names for item, names in self._requests if item.request_id == request_id)
        for name in branches:
            self._tokens.forget(name)
            self._preemptions[name] = 0
            self._reasons.pop(name, None)

    def _branch(self, name: str) -> BranchRecord:
        return BranchRecord(
            branch_id=name,
            preemptions=self._preemptions[name],
            finish_reason=self._reasons.get(name),
            **self._tokens.fields(name),
        )

    def records(
        self,
        replicas: Mapping[str, int] | None = None,
        transfers: Mapping[str, Sequence[Transfer]] | None = None,
    ) -> list[RequestRecord]:
        """See `request_records`.

        Args:
            replicas: the replica of each request, by the request's id.
            transfers: the transfers of each request's branches, by the request's id.
        """
        self._reject_turns()
        return [
            RequestRecord(
                request_id=item.request_id,
                arrival=item.arrival,
                prompt_tokens=item.prompt_tokens,
                max_tokens=item.max_tokens,
                first_scheduled=self._scheduled.get(item.request_id),
                branches=tuple(map(self._branch, names)),
                replica=replicas.get(item.request_id, 0) if replicas else 0,
                transfers=tuple(transfers.get(item.request_id, ())) if transfers else (),
                predicted=item.predicted,
                user=item.user,
                priority=item.priority,
                service_class=item.service_class,
                deadline=item.deadline,
                session=item.session,
                turn=item.turn,
                rejected_at=self._rejected.get(item.request_id),
            )
            for item, names in self._requests
        ]

    def _reject_turns(self) -> None:
        """Let the turns that follow a rejected request count as rejected: they are not sent."""
        for item, names in self._requests:
            if item.follows in self._rejected:
                self._rejected[item.request_id] = self._rejected[item.follows]
                self._reasons.update(dict.fromkeys(names, REJECTED))


def request_records(
    results: Iterable[StepResult], items: Sequence[WorkItem], start: float, branches: int = 1
) -> list[RequestRecord]:
    """One record for each item, in the order of `items`.

    Args:
        start: the run's beginning (time.perf_counter).
        branches: the number of branches of each request.

    Raises:
        ValueError: a step has a request that is not among `items`.
    """
    recorder = RequestRecorder(items, start, branches)
    for result in results:
        recorder.add(result)
    return recorder.records()


class StepRecorder:
    """Makes the records of one replica's steps, one by one.

    A plan has only the sequences that compute something in its step; others may stay in the cache
    without a share of the budget. So the cached tokens of each sequence are carried from step to
    step: rows set them, preemption and finish remove them.
    """

    def __init__(
        self, start: float, block_size: int, config: SchedulerConfig | None = None, replica: int = 0
    ) -> None:
        """See `step_records`."""
        self._start = start
        self._block_size = block_size
        self._config = config
        self._replica = replica
        self._groups = config.groups if config else 1
        self._cached: dict[str, tuple[Sequence[int], int]] = {}  # blocks and the tokens in them
        self._tables: dict[str, HeldBlocks] = {}
        self._admissions = FirstAdmissions()

    def drop_branch(self, request_id: str) -> None:
        """Note that the blocks of a sequence were given back between two steps, because another
        engine has adopted the sequence.
        """
        self._cached.pop(request_id, None)
        self._admissions.left(request_id)

    def record(self, result: StepResult) -> StepRecord:
        plan = result.plan
        work = work_of(plan, result.padded_tokens, config=self._config)
        self._cache_rows(plan)
        listed, held_tokens = self._cache_counts(plan.blocks_used)
        admissions = self._admissions.among(result.events)
        finished = [event for event in result.events if isinstance(event, Finished)]
        for event in finished:
            self._cached.pop(event.request_id, None)
        return StepRecord(
            step=plan.step,
            started=result.started - self._start,
            seconds=result.finished - result.started,
            device_seconds=result.device_seconds,
            host_seconds=result.host_seconds,
            sequences=len(plan.seqs),
            tokens=plan.num_tokens,
            prompt_tokens=_prompt_tokens(plan),
            padded_tokens=result.padded_tokens,
            sampled=sum(
                len(event.token_ids) for event in result.events if isinstance(event, Sampled)
            ),
            admitted=len(plan.admitted),
            admitted_tokens=sum(event.num_tokens for event in admissions),
            hit_tokens=sum(event.num_cached for event in admissions),
            preempted=len(plan.preempted),
            finished=len(finished),
            waiting=plan.num_waiting,
            blocks_used=plan.blocks_used,
            blocks_listed=listed,
            num_blocks=plan.num_blocks,
            held_tokens=held_tokens,
            compilations=result.compilations,
            context_tokens=work.context,
            pairs=work.pairs,
            **speculation.draft_counts(plan, result.events)._asdict(),
            replica=self._replica,
        )

    def _cache_rows(self, plan: Plan) -> None:
        """Carry the cached tokens of each sequence over a step."""
        for request_id in plan.preempted:
            self._cached.pop(request_id, None)
        for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
            self._cached[seq.request_id] = (seq.blocks, start + count)

    def _cache_counts(self, blocks_used: int) -> tuple[int, int]:
        """`blocks_listed` and `held_tokens` of a step with so many used blocks."""
        held = self._held_blocks()
        # without mixed steps, a waiting decode may own a block that no row shows yet
        num_entries = max(sum([table.num_held for table, _ in held]), blocks_used)
        has_holes = any([table.num_held < len(table.blocks) for table, _ in held])
        if num_entries != blocks_used or has_holes or self._groups > 1:
            distinct = _distinct_tokens(held, self._block_size)
            return num_entries, min(distinct, blocks_used * self._block_size)
        return num_entries, sum([tokens for _, tokens in held])

    def _held_blocks(self) -> list[tuple[HeldBlocks, int]]:
        """What the sequences have, and the tokens in it. A table with many groups of layers is long,
        mostly holes, and the same in most steps, so it is read when it changes.
        """
        size = self._block_size
        tables: dict[str, HeldBlocks] = {}
        for name, (blocks, tokens) in self._cached.items():
            table = self._tables.get(name)
            span = tokens // size, -(-tokens // size)
            if table is None or table.blocks is not blocks or table.span != span:
                table = _held_in(blocks, span, self._groups)
            tables[name] = table
        self._tables = tables
        return [(tables[name], tokens) for name, (_, tokens) in self._cached.items()]

    def count_span(self, span: DecodeSpan) -> SpanColumns:
        """Count several steps at once. Afterwards the recorder is as after `record` of each step."""
        steps = len(span.allocated)
        added = len(span.seqs) * np.arange(steps)  # tokens that the steps before each step added
        context = sum(span.lengths) + added
        cached_first = {  # after the first step
            seq.request_id: (seq.blocks, length)
            for seq, length in zip(span.seqs, span.lengths, strict=True)
        }
        self._cached = {
            name: (blocks, length + steps - 1) for name, (blocks, length) in cached_first.items()
        }
        blocks_used = span.blocks + np.cumsum(span.allocated)
        # entries of block tables whose block is also in an earlier entry
        shared = max(0, span.listed - span.blocks)
        held_tokens = context
        if shared:
            size = self._block_size
            held = [
                (_held_in(blocks, (tokens // size, -(-tokens // size)), self._groups), tokens)
                for blocks, tokens in cached_first.values()
            ]
            distinct = _distinct_tokens(held, size)
            held_tokens = np.minimum(distinct + added, blocks_used * self._block_size)
        return SpanColumns(blocks_used, blocks_used + shared, held_tokens, context)

    def record_span(self, span: DecodeSpan) -> list[StepRecord]:
        """The records of several steps at once."""
        rows = len(span.seqs)
        times = span.times
        started = times.started - self._start
        seconds = times.finished - times.started
        columns = (started, seconds, times.device, seconds - times.device, *self.count_span(span))
        values = zip(*[column.tolist() for column in columns], strict=True)
        return [
            StepRecord(
                step=span.step + i,
                started=start,
                seconds=duration,
                device_seconds=device,
                host_seconds=host,
                sequences=rows,
                tokens=rows,
                prompt_tokens=0,
                padded_tokens=span.padded,
                sampled=rows,
                admitted=0,
                admitted_tokens=0,
                hit_tokens=0,
                preempted=0,
                finished=0,
                waiting=span.waiting,
                blocks_used=used,
                blocks_listed=listed,
                num_blocks=span.num_blocks,
                held_tokens=held_tokens,
                compilations=0,
                context_tokens=context,
                pairs=context,
                decodes=rows,
                replica=self._replica,
            )
            for i, (start, duration, device, host, used, listed, held_tokens, context) in enumerate(
                values
            )
        ]


def step_records(
    results: Iterable[StepResult],
    start: float,
    block_size: int,
    config: SchedulerConfig | None = None,
) -> list[StepRecord]:
    """One record for each step of one replica.

    Args:
        config: of the scheduler, if queries do not see all blocks (pagedjax/host/views.py).
    """
    recorder = StepRecorder(start, block_size, config)
    return [recorder.record(result) for result in results]


def _prompt_tokens(plan: Plan) -> int:
    rows = zip(plan.seqs, plan.starts, plan.counts, strict=True)
    return sum([max(0, min(count, seq.request.prompt_len - start)) for seq, start, count in rows])


class HeldBlocks(NamedTuple):
    """What a sequence has of its block table.

    blocks: the table.
    span: how many blocks of tokens are full, and how many have a token.
    num_held: entries without holes.
    full, partial: its full blocks, and those of the block of tokens that is not full. Without
        holes.
    """

    blocks: Sequence[int]
    span: tuple[int, int]
    num_held: int
    full: tuple[int, ...]
    partial: tuple[int, ...]


def _held_in(blocks: Sequence[int], span: tuple[int, int], groups: int) -> HeldBlocks:
    """What a sequence has of its table, which has a block in each group for the same tokens."""
    num_full, num_used = [number * groups for number in span]
    return HeldBlocks(
        blocks,
        span,
        len(blocks) - blocks.count(HOLE),
        full=tuple([block for block in blocks[:num_full] if block != HOLE]),
        partial=tuple([block for block in blocks[num_full:num_used] if block != HOLE]),
    )


def _distinct_tokens(held: Sequence[tuple[HeldBlocks, int]], block_size: int) -> int:
    """The tokens in the cache. A token counts once in a shared block, and once for each group of
    layers.

    Args:
        held: what each sequence has, and the number of tokens in it.
    """
    full: set[int] = set()
    partial: dict[int, int] = {}  # tokens by block; branches share a last block that is not full
    for table, tokens in held:
        full.update(table.full)
        for block in table.partial:
            partial[block] = max(partial.get(block, 0), tokens % block_size)
    in_partial = sum([tokens for block, tokens in partial.items() if block not in full])
    return len(full) * block_size + in_partial
