"""Whether a run was long enough for the answer of `experiments.capacity`. Pure functions of the
requests of the run at the highest rate that was met.

A run is too short if one of these holds:

    few decide       fewer than 10 of its requests may miss the targets: so few outcomes decide
    queue grew       more requests were waiting or running over the last quarter of the arrivals than
                     over the quarter before. The growth is above `tolerance`, as a share of the
                     requests that arrive in a quarter. So the engine does not keep up with this
                     rate, or it had not reached its steady state.
    share not known  the 95 % interval of the share that misses reaches above twice the allowed
                     share. The interval is that of batch means: neighbours in a queue are alike, so
                     the requests are cut into 10 parts in order of arrival, and the means of the
                     parts count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from experiments.analysis.ratios import effect_of_pairs
from experiments.core.records import RequestRecord

FEWEST_MISSES = 10
PARTS = 10
CONFIDENCE = 0.95


def reasons(
    requests: Sequence[RequestRecord], in_time: Sequence[bool], share: float, tolerance: float
) -> list[str]:
    """Why the run is too short, one sentence each; empty if it is long enough.

    Args:
        in_time: whether each request met the targets.
        share: the share of the requests that must meet them.
        tolerance: the tolerance of the rate, as a share.
    """
    count = len(requests)
    # 1e-9: 1 - share has an error of rounding
    may_miss = math.floor(count * (1 - share) + 1e-9)
    sentences = []
    if may_miss < FEWEST_MISSES:
        advice = "Give a --share below 1"
        if share < 1:
            needed_requests = math.ceil(FEWEST_MISSES / (1 - share) - 1e-9)
            advice = f"Raise the number of requests to {needed_requests}"
        sentences.append(
            f"few decide: {may_miss} of {count} requests may miss the targets, and "
            f"{FEWEST_MISSES} are needed. {advice}."
        )
    growth = growth_at_end(requests)
    if growth is not None and growth > tolerance:
        sentences.append(
            f"the queue grew: over the last quarter of the arrivals, {100 * growth:.0f} % of the "
            f"requests that came stayed behind, more than the tolerance of {100 * tolerance:g} %. "
            "Raise the number of requests."
        )
    interval = interval_of_misses(in_time)
    if share < 1 and interval is not None and interval[1] > 2 * (1 - share):
        low, high = (100 * bound for bound in interval)
        sentences.append(
            f"the share is not known: {low:.0f} to {high:.0f} % miss the targets, which may be "
            f"more than twice the {100 * (1 - share):.3g} % that may. Raise the number of requests."
        )
    return sentences


def growth_at_end(requests: Sequence[RequestRecord]) -> float | None:
    """How many more requests are in the engine over the last quarter of the arrivals than over the
    quarter before, as a share of the requests of a quarter.

    None for fewer than 8 requests.
    """
    quarter = len(requests) // 4
    if quarter < 2:
        return None
    arrivals = np.sort([request.arrival for request in requests])
    ends = np.sort([math.inf if r.e2e is None else r.arrival + r.e2e for r in requests])
    # at each arrival: the requests in the engine, with the one that arrives
    inside = np.arange(1, len(arrivals) + 1) - np.searchsorted(ends, arrivals, side="right")
    third_quarter = inside[-2 * quarter : -quarter].mean()
    last_quarter = inside[-quarter:].mean()
    return float(last_quarter - third_quarter) / quarter


def interval_of_misses(in_time: Sequence[bool]) -> tuple[float, float] | None:
    """The interval of the share that misses, by batch means; None for fewer requests than parts."""
    if len(in_time) < PARTS:
        return None
    parts = np.array_split(1.0 - np.asarray(in_time, float), PARTS)
    effect = effect_of_pairs([float(part.mean()) for part in parts], "difference", CONFIDENCE)
    low, high = effect.bounds
    return max(0.0, low), min(1.0, high)
