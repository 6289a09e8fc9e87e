"""The sums of a long simulated run (`records: sums`), in place of a record of each step and the
times of each token.

A day of requests on 16 replicas has a hundred million steps. Counts, means and largest values are
exact. Percentiles over tokens and steps are of numbers that were rounded down, by at most one part
in 1,024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from experiments.core.metrics import StepSums, TokenSums
from experiments.core.records import (
    BranchRecord,
    RequestRecord,
    StepRecord,
    StepRecorder,
    request_record,
)
from experiments.core.workloads import WorkItem, branch_ids
from experiments.simulation.spans import DecodeSpan
from pagedjax.host.types import Finished, Sampled, StepResult
from pagedjax.load_client.summary import PERCENTILES

METHOD = "linear, of numbers rounded down by at most one part in 1,024"
_FRACTION_BITS = 10  # bits of a float's fraction that a bin keeps
_MIN_EXPONENT = -40  # binary: 1e-12, below which a number counts as 0
_MAX_EXPONENT = 40  # binary: 1e12
_FIRST_LEADING = (
    1023 + _MIN_EXPONENT
) << _FRACTION_BITS  # the leading bits of the least number that has a bin
_BINS = ((_MAX_EXPONENT - _MIN_EXPONENT) << _FRACTION_BITS) + 1
_PARTS = 1 << 16  # of the time of a run
_MIN_PARTS = 100  # parts between two times of which a rate is made
_BUFFER = 1 << 19  # numbers that are counted at once


class _Counter:
    """Numbers that wait to be counted, many at a time."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._times: list[int] = []  # how often each array counts
        self._single: list[float] = []  # numbers that came one by one
        self._size = 0  # numbers that wait

    def add(self, values: np.ndarray, times: int = 1) -> None:
        """Count each of float64 [n] `times` times."""
        self._arrays.append(values.copy())  # a view would keep the whole array in memory
        self._times.append(times)
        self._grow(len(values))

    def add_one(self, value: float) -> None:
        """Count a number."""
        self._single.append(value)
        self._grow(1)

    def _grow(self, numbers: int) -> None:
        self._size += numbers
        if self._size >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        if not self._size:
            return
        arrays = [np.array(self._single), *self._arrays]
        values = np.concatenate(arrays)
        times = np.repeat([1, *self._times], [len(array) for array in arrays])
        self._arrays = []
        self._times = []
        self._single = []
        self._size = 0
        self._count(values, times)

    def _count(self, values: np.ndarray, times: np.ndarray) -> None:
        raise NotImplementedError


class Tally(_Counter):
    """The distribution of many numbers of at least 0, in constant memory."""

    def __init__(self) -> None:
        super().__init__()
        # bin 0: numbers below the least one, which count as 0
        self._bins = np.zeros(_BINS, np.int64)
        self._total = 0
        self._sum = 0.0
        self._largest = 0.0

    def _count(self, values: np.ndarray, times: np.ndarray) -> None:
        leading = (values.view(np.int64) >> (52 - _FRACTION_BITS)) - _FIRST_LEADING + 1
        self._bins += np.bincount(np.clip(leading, 0, _BINS - 1), times, _BINS).astype(np.int64)
        self._total += int(times.sum())
        self._sum += float(values @ times)
        self._largest = max(self._largest, float(values.max()))

    def numbers_at(self, ranks: Sequence[int]) -> list[float]:
        """The numbers of these ranks (0 is the least), rounded down."""
        self._flush()
        bins = np.searchsorted(np.cumsum(self._bins), np.asarray(ranks), side="right")
        values = ((np.maximum(bins - 1, 0) + _FIRST_LEADING) << (52 - _FRACTION_BITS)).view(
            np.float64
        )
        return np.where(bins == 0, 0.0, values).tolist()

    def spread(self) -> dict[str, float | int | None]:
        """As `pagedjax.load_client.summary.spread` of all numbers, but for the percentiles'
        rounding.
        """
        self._flush()
        names = [f"p{p}" for p in PERCENTILES]
        if not self._total:
            return {"count": 0, **dict.fromkeys(("mean", *names, "max"))}
        ranks = [(self._total - 1) * p / 100 for p in PERCENTILES]  # between two whole ones
        low = self.numbers_at([int(rank) for rank in ranks])
        high = self.numbers_at([min(int(rank) + 1, self._total - 1) for rank in ranks])
        percentiles = [
            a + (b - a) * (rank % 1) for a, b, rank in zip(low, high, ranks, strict=True)
        ]
        mean = self._sum / self._total
        return {
            "count": self._total,
            "mean": mean,
            **dict(zip(names, percentiles, strict=True)),
            "max": self._largest,
        }


class Timeline(_Counter):
    """How many tokens were made until when, in constant memory: counts in equal parts of the time
    since 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._width = 1e-6  # seconds of a part; doubled when the parts do not reach far enough
        self._parts = np.zeros(_PARTS, np.int64)

    def _count(self, values: np.ndarray, times: np.ndarray) -> None:
        while values.max() >= _PARTS * self._width:
            pairs = self._parts.reshape(-1, 2).sum(1)
            self._parts = np.concatenate((pairs, np.zeros_like(pairs)))
            self._width = 2 * self._width
        parts = (values / self._width).astype(np.int64)
        self._parts += np.bincount(parts, times, _PARTS).astype(np.int64)

    def steady_rate(self) -> float | None:
        """As `metrics.steady_rate`, within 2 %.

        None if its two times are too near to say so much.
        """
        self._flush()
        tokens = np.cumsum(self._parts)
        total = tokens[-1]
        if not total:
            return None
        first, last = (int(tokens.searchsorted(-(-total * tenths // 10))) for tenths in (1, 9))
        if last - first < _MIN_PARTS:
            return None
        return float(tokens[last] - tokens[first]) / ((last - first) * self._width)


@dataclass
class ReplicaSums:
    """Sums over the steps of one replica; see `StepRecord`.

    It has the attributes of a `StepLoad`.
    """

    replica: int
    count: int = 0
    end: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    padded: int = 0
    blocks_used: int = 0
    most_used: int = 0
    num_blocks: int = 0
    listed: int = 0
    held_tokens: int = 0
    hit: int = 0
    admitted: int = 0
    preempted: int = 0
    compilations: int = 0
    drafts: int = 0
    accepted: int = 0
    decodes: int = 0

    def add(self, step: StepRecord) -> None:
        self.count += 1
        self.end = step.started + step.seconds
        self.seconds += step.seconds
        self.tokens += step.tokens
        self.padded += step.padded_tokens
        self.blocks_used += step.blocks_used
        self.most_used = max(self.most_used, step.blocks_used)
        self.num_blocks = step.num_blocks
        self.listed += step.blocks_listed
        self.held_tokens += step.held_tokens
        self.hit += step.hit_tokens
        self.admitted += step.admitted_tokens
        self.preempted += step.preempted
        self.compilations += step.compilations
        self.drafts += step.drafts
        self.accepted += step.accepted
        self.decodes += step.decodes


class Totals:
    """What `drive_replicas` calls in place of a `drive.Recorder`."""

    def __init__(self, engines: Sequence[Any], items: Sequence[WorkItem], branches: int) -> None:
        self.replicas = [ReplicaSums(replica) for replica in range(len(engines))]
        self._recorders = [
            StepRecorder(0.0, engine.config.block_size, engine.scheduler_state.config, replica)
            for replica, engine in enumerate(engines)
        ]
        self._requests = [(item, branch_ids(item.request_id, branches)) for item in items]
        self._scheduled: dict[str, float] = {}
        # of each branch, the times of its first and last token
        self._ends: dict[str, list[float]] = {}
        self._counts: dict[str, int] = defaultdict(int)  # tokens of each branch
        self._preemptions: dict[str, int] = defaultdict(int)
        self._reasons: dict[str, str] = {}
        self._seconds = Tally()
        self._device = Tally()
        self._host = Tally()
        self._sequences = Tally()
        self._gaps = Tally()
        self._token_times = Timeline()

    def step(self, replica: int, result: StepResult) -> None:
        record = self._recorders[replica].record(result)
        self.replicas[replica].add(record)
        self._seconds.add_one(record.seconds)
        self._device.add_one(record.device_seconds)
        self._host.add_one(max(record.host_seconds, 0.0))
        self._sequences.add_one(float(record.sequences))
        for seq in result.plan.seqs:
            self._scheduled.setdefault(seq.request_id, result.started)
        for request_id in result.plan.preempted:
            self._preemptions[request_id] += 1
        for event in result.events:
            if isinstance(event, Sampled):
                self._add_tokens(event.request_ids, result.finished, result.finished, 1)
                self._token_times.add(np.array([result.finished]), len(event.request_ids))
            elif isinstance(event, Finished):
                self._reasons[event.request_id] = event.reason

    def span(self, replica: int, span: DecodeSpan) -> None:
        columns = self._recorders[replica].count_span(span)
        sums = self.replicas[replica]
        rows = len(span.seqs)
        steps = len(span.allocated)
        finished = span.times.finished
        seconds = finished - span.times.started
        sums.count += steps
        sums.end = float(finished[-1])
        sums.seconds += float(seconds.sum())
        sums.tokens += steps * rows
        sums.padded += steps * span.padded
        sums.blocks_used += int(columns.used.sum())
        sums.most_used = max(sums.most_used, int(columns.used[-1]))
        sums.num_blocks = span.num_blocks
        sums.listed += int(columns.listed.sum())
        sums.held_tokens += int(columns.held_tokens.sum())
        sums.decodes += steps * rows
        self._seconds.add(seconds)
        self._device.add(span.times.device)
        # without host_s, a difference of rounding
        self._host.add(np.maximum(seconds - span.times.device, 0.0))
        self._sequences.add(np.array([float(rows)]), steps)
        names = [seq.request_id for seq in span.seqs]
        self._add_tokens(names, float(finished[0]), float(finished[-1]), steps)
        self._gaps.add(np.diff(finished), rows)
        self._token_times.add(finished, rows)

    def _add_tokens(self, names: Sequence[str], first: float, last: float, tokens: int) -> None:
        """Count tokens that each of these branches got between two times.

        A name that is there twice got twice as many.
        """
        for name in names:
            self._counts[name] += tokens
            ends = self._ends.get(name)
            if ends is None:
                self._ends[name] = [first, last]
            else:
                self._gaps.add_one(first - ends[1])
                ends[1] = last

    def _branch(self, name: str) -> BranchRecord:
        return BranchRecord(
            branch_id=name,
            token_times=tuple(self._ends.get(name, ())),
            token_ids=(),
            preemptions=self._preemptions.get(name, 0),
            finish_reason=self._reasons.get(name),
            counted=self._counts.get(name, 0),
        )

    def records(self, replicas: Mapping[str, int]) -> list[RequestRecord]:
        """Of each request, with its replica."""
        return [
            request_record(
                item,
                self._scheduled.get(item.request_id),
                tuple(map(self._branch, names)),
                replicas,
            )
            for item, names in self._requests
        ]

    def step_sums(self) -> StepSums:
        """The sums over all replicas. Raises ValueError if there are no steps."""
        replicas = [sums for sums in self.replicas if sums.count]
        if not replicas:
            raise ValueError("the run has no steps; there is nothing to summarize")
        largest = ("end", "most_used", "num_blocks")
        values: dict[str, Any] = {}
        for field in fields(ReplicaSums):
            if field.name != "replica":
                total = max if field.name in largest else sum
                values[field.name] = total(getattr(sums, field.name) for sums in replicas)
        return StepSums(
            **values,
            step_s=self._seconds.spread(),
            device_s=self._device.spread(),
            host_s=self._host.spread(),
            per_step=self._sequences.spread(),
        )

    def token_sums(self) -> TokenSums:
        return TokenSums(
            count=sum(self._counts.values()),
            itl_s=self._gaps.spread(),
            steady_rate=self._token_times.steady_rate(),
            sha256=None,
            method=METHOD,
        )
