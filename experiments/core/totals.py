"""The sums of a long simulated run (`records: sums`), in place of a record of each step and the
times of each token.

A day of requests on 16 replicas has a hundred million steps. Counts, means and largest values are
exact. Percentiles over tokens and steps are of numbers that were rounded down, by at most one part
in 1,024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.core.metrics import StepSums, TokenSums
from experiments.core.records import Counts, SpanColumns, StepRecord, TokenTimes
from experiments.simulation.spans import DecodeSpan
from pagedjax.server.load_client.summary import PERCENTILES

METHOD = "linear, of numbers rounded down by at most one part in 1,024"
_FRACTION_BITS = 10  # bits of a float's fraction that a bin keeps
_MIN_EXPONENT = -40  # numbers below 2**-40, about 1e-12, count as 0
_MAX_EXPONENT = 40  # numbers above 2**40, about 1e12, are in the last bin
# the leading bits (sign, exponent and _FRACTION_BITS) of the least number that has a bin; 1023 is
# what a float64 adds to its exponent
_FIRST_LEADING = (1023 + _MIN_EXPONENT) << _FRACTION_BITS
_DROPPED_BITS = 52 - _FRACTION_BITS  # a float64 has 52 bits of fraction
_BINS = ((_MAX_EXPONENT - _MIN_EXPONENT) << _FRACTION_BITS) + 1
_PARTS = 1 << 16  # equal parts of the time of a run
_MIN_PARTS = 100  # a rate needs two times that are at least so many parts apart
_BUFFER = 1 << 19  # numbers that are counted at once


class _Counter:
    """Numbers that wait to be counted, many at a time."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._times: list[int] = []  # how often each array counts
        self._single: list[float] = []  # numbers that came one by one
        self._size = 0  # numbers that wait

    def add(self, values: np.ndarray, times: int = 1) -> None:
        """Count each of these values `times` times. values: float64 [n]."""
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
        bins = (values.view(np.int64) >> _DROPPED_BITS) - _FIRST_LEADING + 1
        self._bins += np.bincount(np.clip(bins, 0, _BINS - 1), times, _BINS).astype(np.int64)
        self._total += int(times.sum())
        self._sum += float(values @ times)
        self._largest = max(self._largest, float(values.max()))

    def numbers_at(self, ranks: Sequence[int]) -> list[float]:
        """The numbers of these ranks (0 is the least), rounded down."""
        self._flush()
        bins = np.searchsorted(np.cumsum(self._bins), np.asarray(ranks), side="right")
        leading = np.maximum(bins - 1, 0) + _FIRST_LEADING
        values = (leading << _DROPPED_BITS).view(np.float64)
        return np.where(bins == 0, 0.0, values).tolist()

    def spread(self) -> dict[str, float | int | None]:
        """The result of `pagedjax.server.load_client.summary.spread` of all numbers, except that
        the percentiles are of rounded numbers.
        """
        self._flush()
        names = [f"p{p}" for p in PERCENTILES]
        if not self._total:
            return {"count": 0, **dict.fromkeys(("mean", *names, "max"))}
        ranks = [(self._total - 1) * p / 100 for p in PERCENTILES]  # each between two whole ranks
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
    """How many tokens were made in each of many equal parts of the time since 0, in constant
    memory.
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
        """The result of `metrics.steady_rate`, within 2 %.

        None if its two times are too close together for that.
        """
        self._flush()
        tokens = np.cumsum(self._parts)
        total = tokens[-1]
        if not total:
            return None
        # the parts in which a tenth and nine tenths of the tokens, rounded up, are reached
        first = int(tokens.searchsorted(-(-total // 10)))
        last = int(tokens.searchsorted(-(-9 * total // 10)))
        if last - first < _MIN_PARTS:
            return None
        return float(tokens[last] - tokens[first]) / ((last - first) * self._width)


class ReplicaTotals:
    """The sums over the steps of one replica. It has the attributes of a `StepLoad`."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.count = 0
        self.end = 0.0
        self.most_used = 0
        self.num_blocks = 0
        self.sums: dict[str, Any] = dict.fromkeys(Counts._fields, 0)

    @property
    def tokens(self) -> int:
        return self.sums["tokens"]

    @property
    def seconds(self) -> float:
        return self.sums["seconds"]

    def add(self, steps: int, end: float, used: int, num_blocks: int, **counts: float) -> None:
        """Add several steps.

        Args:
            steps: how many.
            end: when the last of them ends, in seconds.
            used: blocks in use after the last of them. No earlier one of them had more in use.
            counts: sums over these steps, by names of `Counts`.
        """
        self.count += steps
        self.end = end
        self.most_used = max(self.most_used, used)
        self.num_blocks = num_blocks
        for name, count in counts.items():
            self.sums[name] += count


class StepTotals:
    """The sums over the steps of several replicas, and the distributions over all steps."""

    def __init__(self, replicas: int) -> None:
        self.replicas = [ReplicaTotals(replica) for replica in range(replicas)]
        self._seconds = Tally()
        self._device = Tally()
        self._host = Tally()
        self._sequences = Tally()

    def add(self, record: StepRecord) -> None:
        self.replicas[record.replica].add(
            1,
            record.started + record.seconds,
            record.blocks_used,
            record.num_blocks,
            **{name: getattr(record, name) for name in Counts._fields},
        )
        self._seconds.add_one(record.seconds)
        self._device.add_one(record.device_seconds)
        self._host.add_one(max(record.host_seconds, 0.0))
        self._sequences.add_one(float(record.sequences))

    def add_span(self, replica: int, span: DecodeSpan, columns: SpanColumns) -> None:
        """Add several steps at once, with their counts."""
        rows = len(span.seqs)
        steps = len(span.allocated)
        finished = span.times.finished
        seconds = finished - span.times.started
        self.replicas[replica].add(
            steps,
            float(finished[-1]),
            int(columns.used[-1]),
            span.num_blocks,
            seconds=float(seconds.sum()),
            tokens=steps * rows,
            padded_tokens=steps * span.padded,
            blocks_used=int(columns.used.sum()),
            blocks_listed=int(columns.listed.sum()),
            held_tokens=int(columns.held_tokens.sum()),
            decodes=steps * rows,
        )
        self._seconds.add(seconds)
        self._device.add(span.times.device)
        # a simulation without host time has differences of rounding here, some of them below 0
        self._host.add(np.maximum(seconds - span.times.device, 0.0))
        self._sequences.add(np.array([float(rows)]), steps)

    def sums(self) -> StepSums:
        """The sums over all replicas. Raises ValueError if there are no steps."""
        replicas = [totals for totals in self.replicas if totals.count]
        if not replicas:
            raise ValueError("the run has no steps; there is nothing to summarize")
        return StepSums(
            count=sum(totals.count for totals in replicas),
            end=max(totals.end for totals in replicas),
            most_used=max(totals.most_used for totals in replicas),
            num_blocks=max(totals.num_blocks for totals in replicas),
            sums=Counts(
                *(sum(totals.sums[name] for totals in replicas) for name in Counts._fields)
            ),
            step_s=self._seconds.spread(),
            device_s=self._device.spread(),
            host_s=self._host.spread(),
            per_step=self._sequences.spread(),
        )


class TokenCounts(TokenTimes):
    """Keeps the number of each branch's tokens, the times of its first and last token, and the
    distributions over all tokens, in place of all times and ids.
    """

    def __init__(self) -> None:
        # branch -> the times of its first and last token
        self._ends: dict[str, list[float]] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._gaps = Tally()
        self._token_times = Timeline()

    def add(self, names: Sequence[str], token_ids: Sequence[int], time: float) -> None:
        self._add(names, time, time, 1)
        self._token_times.add(np.array([time]), len(names))

    def add_span(self, span: DecodeSpan, times: np.ndarray) -> None:
        names = [seq.request_id for seq in span.seqs]
        self._add(names, float(times[0]), float(times[-1]), len(times))
        self._gaps.add(np.diff(times), len(names))
        self._token_times.add(times, len(names))

    def _add(self, names: Sequence[str], first: float, last: float, tokens: int) -> None:
        """Count the tokens that each of these branches got from `first` to `last`, in seconds.

        A branch that is named twice got twice as many.
        """
        for name in names:
            self._counts[name] += tokens
            ends = self._ends.get(name)
            if ends is None:
                self._ends[name] = [first, last]
            else:
                self._gaps.add_one(first - ends[1])
                ends[1] = last

    def fields(self, name: str) -> dict[str, Any]:
        times = tuple(self._ends.get(name, ()))
        return {"token_times": times, "token_ids": (), "counted": self._counts.get(name, 0)}

    def sums(self) -> TokenSums:
        return TokenSums(
            count=sum(self._counts.values()),
            itl_s=self._gaps.spread(),
            steady_rate=self._token_times.steady_rate(),
            sha256=None,
            method=METHOD,
        )
