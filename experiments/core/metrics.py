"""The metrics of a run: a pure fold over its step results. Seconds count from the start of the run.

    StepResult*, WorkItem*  ->  RequestRecord*, StepRecord*  ->  summary (a JSON object)

Latencies are measured from a request's *intended* arrival, so a slow driver or engine cannot hide its delay. The time
of a token is the end of the step that sampled it (commit included): a user can see it from then on.

Definitions, for one request whose branches (one, or `sampling.n` or `best_of`) have token times t1 <= ... <= tk each:
    queue  start of the first step that computes any of the request's tokens - arrival
    ttft   the earliest t1 - arrival     itl   the gaps t2 - t1, t3 - t2, ... within branches, all branches pooled
    e2e    the latest tk - arrival       tpot  (tk - t1) / (k - 1), one value per branch

Output tokens are those of all branches, including those that `best_of` drops. A request is done when all its branches
are done.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from experiments.core import speculation
from experiments.core.config import Slo
from experiments.core.workloads import WorkItem, branch_ids
from experiments.simulation.cost import work_of
from experiments.simulation.decode_runs import DecodeRun
from pagedjax.host.types import HOLE, Admitted, Finished, Plan, Sampled, SchedulerConfig, StepResult
from pagedjax.load_client.summary import spread


class BranchRecord(NamedTuple):
    """One branch of a request. The first branch has the request's id. `finish_reason` is None for a branch that did
    not end."""

    branch_id: str
    token_times: tuple[float, ...]
    token_ids: tuple[int, ...]
    preemptions: int
    finish_reason: str | None

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in pairwise(self.token_times))

    @property
    def tpot(self) -> float | None:
        return sum(self.gaps) / len(self.gaps) if self.gaps else None


class Transfer(NamedTuple):
    """A sequence that one simulated engine handed to another (pools.py)."""

    branch_id: str
    replica: int  # that adopted it
    bytes: float
    released: float  # when its prompt was computed and it had its first token
    arrived: float  # its last page
    adopted: float


class RequestRecord(NamedTuple):
    """One request; None for events that did not happen."""

    request_id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int  # of each branch
    first_scheduled: float | None
    branches: tuple[BranchRecord, ...]
    replica: int = 0  # that computed it, or its prompt
    transfers: tuple[Transfer, ...] = ()  # of its branches, in the order of their adoption

    @property
    def queue(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        first = min((branch.token_times[0] for branch in self.branches if branch.token_times), default=None)
        return None if first is None else first - self.arrival

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end of the last branch; None if a branch did not end."""
        if not self.done:
            return None
        last = max((branch.token_times[-1] for branch in self.branches if branch.token_times), default=None)
        return None if last is None else last - self.arrival

    @property
    def done(self) -> bool:
        return all(branch.finish_reason is not None for branch in self.branches)


class StepRecord(NamedTuple):
    """One step. `held_tokens` are the tokens in the cache's `blocks_used` blocks after the step. A block that several
    sequences share counts once in both, and once for each of them in `blocks_listed`."""

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
    admitted: int
    admitted_tokens: int  # known tokens of the admitted sequences
    hit_tokens: int  # tokens of them that were found in the cache
    preempted: int
    finished: int
    waiting: int
    blocks_used: int
    blocks_listed: int  # entries in the block tables of running sequences: their blocks without sharing
    num_blocks: int
    held_tokens: int
    compilations: int
    context_tokens: int = 0  # keys and values that attention reads: each sequence's context after the step
    pairs: int = 0  # (query, key) pairs of causal attention
    drafts: int = 0  # that were verified
    accepted: int = 0  # drafts that became output tokens
    decodes: int = 0  # decode rows
    replica: int = 0


class RequestRecorder:
    """Collects the records of requests from results, so that nobody needs to keep those and their plans."""

    def __init__(self, items: Sequence[WorkItem], start: float, branches: int = 1) -> None:
        """See `request_records`."""
        self._start = start
        self._requests = [(item, branch_ids(item.request_id, branches)) for item in items]
        self._scheduled: dict[str, float] = {}
        self._times: dict[str, list[float]] = {name: [] for _, names in self._requests for name in names}
        self._tokens: dict[str, list[int]] = {name: [] for name in self._times}
        self._preemptions = dict.fromkeys(self._times, 0)
        self._reasons: dict[str, str] = {}

    def add(self, result: StepResult) -> None:
        """Raises ValueError for a step with a request that is not in the workload."""
        started, finished = result.started - self._start, result.finished - self._start
        for seq in result.plan.seqs:
            if seq.request_id not in self._times:
                raise ValueError(f"step {result.plan.step} runs the request {seq.request_id!r}, not in the workload")
            self._scheduled.setdefault(seq.request_id, started)
        for request_id in result.plan.preempted:
            self._preemptions[request_id] += 1
        for event in result.events:
            if isinstance(event, Sampled):
                for request_id, token in zip(event.request_ids, event.token_ids, strict=True):
                    self._times[request_id].append(finished)
                    self._tokens[request_id].append(token)
            elif isinstance(event, Finished):
                self._reasons[event.request_id] = event.reason

    def add_run(self, run: DecodeRun) -> None:
        """The same of several steps at once. Its sequences were scheduled before."""
        times = (run.times.finished - self._start).tolist()
        for seq, tokens in zip(run.seqs, run.tokens, strict=True):
            self._times[seq.request_id] += times
            self._tokens[seq.request_id] += tokens

    def anew(self, request_id: str) -> None:
        """The request is computed anew, because its replica failed: what was computed is forgotten."""
        self._scheduled.pop(request_id, None)
        for name in next(names for item, names in self._requests if item.request_id == request_id):
            self._times[name], self._tokens[name], self._preemptions[name] = [], [], 0
            self._reasons.pop(name, None)

    def _branch(self, name: str) -> BranchRecord:
        times, tokens = tuple(self._times[name]), tuple(self._tokens[name])
        return BranchRecord(name, times, tokens, self._preemptions[name], self._reasons.get(name))

    def records(
        self, replicas: Mapping[str, int] | None = None, transfers: Mapping[str, Sequence[Transfer]] | None = None
    ) -> list[RequestRecord]:
        """See `request_records`. Args: of each request, its replica and the transfers of its branches."""
        return [
            RequestRecord(
                request_id=item.request_id,
                arrival=item.arrival,
                prompt_tokens=len(item.prompt_token_ids),
                max_tokens=item.max_tokens,
                first_scheduled=self._scheduled.get(item.request_id),
                branches=tuple(map(self._branch, names)),
                replica=replicas.get(item.request_id, 0) if replicas else 0,
                transfers=tuple(transfers.get(item.request_id, ())) if transfers else (),
            )
            for item, names in self._requests
        ]


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

    A plan has only the sequences that compute something in its step; others may stay in the cache without a share of
    the budget. So the cached tokens of each sequence are carried from step to step: rows set them, preemption and
    finish remove them.
    """

    def __init__(self, start: float, block_size: int, config: SchedulerConfig | None = None, replica: int = 0) -> None:
        """See `step_records`."""
        self._start, self._block_size, self._config, self._replica = start, block_size, config, replica
        self._groups = config.groups if config else 1
        self._cached: dict[str, tuple[Sequence[int], int]] = {}  # blocks and the tokens in them

    def left(self, request_id: str) -> None:
        """The blocks of a sequence were given back between two steps, because another engine has it."""
        self._cached.pop(request_id, None)

    def record(self, result: StepResult) -> StepRecord:
        cached, groups, block_size = self._cached, self._groups, self._block_size
        plan, work = result.plan, work_of(result.plan, result.padded_tokens, config=self._config)
        for request_id in plan.preempted:
            cached.pop(request_id, None)
        for seq, before, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
            cached[seq.request_id] = (seq.blocks, before + count)
        # without mixed steps, a waiting decode may own a block that no row shows yet
        entries = sum([len(blocks) for blocks, _ in cached.values()])
        holes = sum([blocks.count(HOLE) for blocks, _ in cached.values()])
        listed = max(entries - holes, plan.blocks_used)
        if listed != plan.blocks_used or holes or groups > 1:
            held = min(_held(cached.values(), block_size, groups), plan.blocks_used * block_size)
        else:
            held = sum([tokens for _, tokens in cached.values()])
        entered = [event for event in result.events if isinstance(event, Admitted)]
        finished = [event for event in result.events if isinstance(event, Finished)]
        for event in finished:
            cached.pop(event.request_id, None)
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
            sampled=sum(len(event.token_ids) for event in result.events if isinstance(event, Sampled)),
            admitted=len(plan.admitted),
            admitted_tokens=sum(event.num_tokens for event in entered),
            hit_tokens=sum(event.num_cached for event in entered),
            preempted=len(plan.preempted),
            finished=len(finished),
            waiting=plan.num_waiting,
            blocks_used=plan.blocks_used,
            blocks_listed=listed,
            num_blocks=plan.num_blocks,
            held_tokens=held,
            compilations=result.compilations,
            context_tokens=work.context,
            pairs=work.pairs,
            **speculation.counted(plan, result.events)._asdict(),
            replica=self._replica,
        )


    def record_run(self, run: DecodeRun) -> list[StepRecord]:
        """The records of several steps at once."""
        steps, rows, size = len(run.allocated), len(run.seqs), self._block_size
        context = sum(run.lengths)  # tokens in the cache after the first step
        first = {seq.request_id: (seq.blocks, length) for seq, length in zip(run.seqs, run.lengths, strict=True)}
        shared = max(0, run.listed - run.blocks)  # entries that list a block which another one lists, too
        held = _held(first.values(), size, self._groups) if shared else context
        self._cached = {name: (blocks, length + steps - 1) for name, (blocks, length) in first.items()}
        used = list(itertools.accumulate(run.allocated, initial=run.blocks))[1:]
        started = (run.times.started - self._start).tolist()
        seconds, device = run.times.finished - run.times.started, run.times.device
        columns = zip(used, started, seconds.tolist(), device.tolist(), (seconds - device).tolist(), strict=True)
        return [
            StepRecord(
                *(run.step + i, *times, rows, rows, 0, run.padded, rows),
                *(0, 0, 0, 0, 0),  # nothing is admitted, preempted or finished
                *(run.waiting, blocks, blocks + shared, run.num_blocks),
                min(held + i * rows, blocks * size) if shared else held + i * rows,
                0,
                context_tokens=context + i * rows,
                pairs=context + i * rows,
                decodes=rows,
                replica=self._replica,
            )
            for i, (blocks, *times) in enumerate(columns)
        ]


def step_records(
    results: Iterable[StepResult], start: float, block_size: int, config: SchedulerConfig | None = None
) -> list[StepRecord]:
    """One record for each step of one replica.

    Args:
        config: of the scheduler, if queries do not see all blocks (pagedjax/host/views.py).
    """
    recorder = StepRecorder(start, block_size, config)
    return [recorder.record(result) for result in results]


def _prompt_tokens(plan: Plan) -> int:
    rows = zip(plan.seqs, plan.starts, plan.counts, strict=True)
    return sum([max(0, min(count, seq.request.prompt_len - before)) for seq, before, count in rows])


def _held(cached: Iterable[tuple[Sequence[int], int]], block_size: int, groups: int) -> int:
    """Tokens in the cache; those in shared blocks count once, and those of each group of layers."""
    full: set[int] = set()
    part: dict[int, int] = {}  # branches share a last block that is not full
    for blocks, tokens in cached:
        first = tokens // block_size * groups
        full.update(blocks[:first])
        for last in blocks[first : first + groups] if tokens % block_size else ():
            part[last] = max(part.get(last, 0), tokens % block_size)
    full.discard(HOLE)
    return len(full) * block_size + sum(tokens for block, tokens in part.items() if block not in full)


def summarize(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    block_size: int,
    slo: Slo | None = None,
    *,
    speculates: bool = False,
    replicas: int = 1,
) -> dict[str, Any]:
    """The summary of a run. Shares are between 0 and 1; keys that end in `_s` are seconds, in `_per_s` per second.

    Averages over steps count every step once. `padding_share` and `fragmentation_share` are ratios of sums: the share
    of computed tokens that were padding, and the share of slots in used blocks without a token. `prefix_hit_share` is
    the share of the tokens of admitted sequences that were found in the cache.

    `blocks_saved_share` is the saving by sharing (Fig. 15 of the PagedAttention paper): 1 - sum(distinct blocks) /
    sum(entries of block tables), over the running sequences of every step, for shared prompts of branches and for
    prefixes found in the cache. Sequences without a row in a step count with the blocks they own. A request whose
    branches have not forked yet is one sequence.

    With several replicas, or pools, `steps` are those of all in the order of their ends. Blocks and slots are those of
    one replica, and of pools None (`pools` has their blocks); `between_steps_s` is a sum over all of them.

    With `speculates` there is also `speculation`: drafts, accepted ones, their share, and the mean number of tokens
    that a decode row gives in a step.

    `requests`, `unfinished`, `requests_per_s` and `goodput` count requests; `branches`, `finished` (by reason) and
    `preemptions` count branches.
    """
    if not steps:
        raise ValueError("the run has no steps; there is nothing to summarize")
    duration = steps[-1].started + steps[-1].seconds
    done = [request for request in requests if request.done]
    branches = [branch for request in requests for branch in request.branches]
    output = sum(len(branch.token_ids) for branch in branches)
    prompt = sum(request.prompt_tokens for request in done)
    reasons = [branch.finish_reason for branch in branches if branch.finish_reason is not None]
    slots = sum(step.blocks_used for step in steps) * block_size
    peak = max(step.blocks_used for step in steps)
    drafts = {"speculation": speculation.summary(steps)} if speculates else {}
    return {
        "duration_s": duration,
        "requests": len(requests),
        "branches": len(branches),
        "unfinished": len(requests) - len(done),
        "finished": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(done) / duration,
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": (prompt + output) / duration,
        "steady_output_tokens_per_s": steady_rate(time for branch in branches for time in branch.token_times),
        "percentile_method": "linear",
        "ttft_s": spread(request.ttft for request in requests),
        "itl_s": spread(gap for branch in branches for gap in branch.gaps),
        "tpot_s": spread(branch.tpot for branch in branches),
        "e2e_s": spread(request.e2e for request in requests),
        "queue_s": spread(request.queue for request in requests),
        "steps": len(steps),
        "step_s": spread(step.seconds for step in steps),
        "device_s": spread(step.device_seconds for step in steps),
        "host_s": spread(step.host_seconds for step in steps),
        "between_steps_s": replicas * duration - sum(step.seconds for step in steps),
        "sequences_per_step": spread(float(step.sequences) for step in steps),
        "tokens_computed": sum(step.tokens for step in steps),
        "tokens_padded": sum(step.padded_tokens for step in steps),
        "padding_share": _share(sum(step.tokens for step in steps), sum(step.padded_tokens for step in steps)),
        "blocks_total": max(step.num_blocks for step in steps),
        "blocks_used": {"mean": slots / block_size / len(steps), "peak": peak},
        "slots_used": {"mean": slots / len(steps), "peak": peak * block_size},
        "fragmentation_share": _share(sum(step.held_tokens for step in steps), slots),
        "blocks_saved_share": _share(
            sum(step.blocks_used for step in steps), sum(step.blocks_listed for step in steps)
        ),
        "prefix_hit_share": _part(sum(step.hit_tokens for step in steps), sum(step.admitted_tokens for step in steps)),
        "preemptions": sum(step.preempted for step in steps),
        "compilations": sum(step.compilations for step in steps),
        **drafts,
        "goodput": goodput(requests, duration, slo or Slo()),
        "tokens_sha256": tokens_digest(requests),
    }


def steady_rate(times: Iterable[float]) -> float | None:
    """Output tokens/s between the ends of the steps after which a tenth and nine tenths of all output tokens exist.

    It leaves out the start and the end of a run, which matter in a short one. None if the two are one time.

    Args:
        times: seconds, of each output token. Those that a failed replica lost are not output.
    """
    made = np.sort(np.fromiter(times, float))
    if not made.size:
        return None
    first, last = (made[math.ceil(share * made.size) - 1] for share in (0.1, 0.9))
    tokens = np.searchsorted(made, last, side="right") - np.searchsorted(made, first, side="right")
    return float(tokens / (last - first)) if last > first else None


def _part(some: int, of: int) -> float:
    return some / of if of else 0.0


def _share(full: int, of: int) -> float:
    return 1.0 - full / of if of else 0.0


def goodput(requests: Sequence[RequestRecord], duration: float, slo: Slo) -> dict[str, float] | None:
    """Finished requests that met every target, per second and as a share of all requests; None without a target.

    Each branch of a request must meet `itl`; a branch of one output token has no gap and meets it.
    """
    if slo.ttft is None and slo.itl is None:
        return None
    good = 0
    for request in requests:
        if any(branch.finish_reason in (None, "abort") for branch in request.branches) or request.ttft is None:
            continue
        in_time = slo.ttft is None or request.ttft <= slo.ttft
        steady = slo.itl is None or all(b.tpot is None or b.tpot <= slo.itl for b in request.branches)
        good += in_time and steady
    return {"requests_per_s": good / duration, "share": good / len(requests)}


def tokens_digest(requests: Sequence[RequestRecord]) -> str:
    """sha256 over every branch's output tokens: equal digests mean equal tokens."""
    branches = [branch for request in requests for branch in request.branches]
    text = json.dumps([[branch.branch_id, list(branch.token_ids)] for branch in branches], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
