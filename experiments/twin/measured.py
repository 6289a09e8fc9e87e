"""The worlds in an engine that is measured: the same requests, at the same multiple of its capacity.

The capacity of an engine is the number of requests that it ends in a second while all of them wait
from the beginning. Arrivals are stretched by the ratio of the capacities, so that requests queue in
the engine as they do in the worlds, on whatever machine it runs.

The comparison is paired: the policies take turns at each episode, with the same requests and the
same arrivals, and each turn begins with another policy. It ends after a number of episodes, or
after the first one behind a number of seconds. Neither depends on what was measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments.core.drive import drive
from experiments.simulation.cost import StepTime, Work
from experiments.twin import recorded, simulated
from experiments.twin.cost import MICROSECONDS
from experiments.twin.policies import Decide
from experiments.twin.scheduler import Requests, Sizes
from experiments.twin.workloads import LATEST
from pagedjax.host import replay
from pagedjax.host.policies import Policy
from pagedjax.host.types import StepResult
from pagedjax.options.config import EngineConfig

POWER = 0.95  # the probability with which `episodes_needed` is enough
MOST_EPISODES = 10_000


# --- how fast the engine is -----------------------------------------------------------------------


class Speed(NamedTuple):
    """How fast an engine is.

    capacity: requests a second, of those that wait from the beginning.
    stretch: the capacity of the worlds over that of the engine.
    step_seconds: mean seconds from the end of a step to the end of the next one, by the tokens of
        the next one's compiled shape.
    """

    capacity: float
    stretch: float
    step_seconds: dict[int, float]

    def step_time(self, work: Work) -> float:
        """Seconds of a step, as a step time of the simulator."""
        shape = min([tokens for tokens in self.step_seconds if tokens >= work.tokens])
        return self.step_seconds[shape]


def speed_of(
    engine: Any, config: EngineConfig, step_time: StepTime, episodes: Sequence[Requests]
) -> Speed:
    """The speed of an engine, by episodes whose requests all arrive at once. The first episode is
    run twice, once to warm up.

    Args:
        config, step_time: of the worlds.
    """
    waiting = [requests._replace(arrival=np.zeros_like(requests.arrival)) for requests in episodes]
    run(engine, waiting[0])
    seconds = 0.0
    seconds_of_worlds = 0.0
    durations: dict[int, list[float]] = {}
    for requests in waiting:
        start, results = run(engine, requests)
        ends = [start, *[result.finished for result in results]]
        seconds += ends[-1] - start
        seconds_of_worlds += float(np.max(simulated.run(requests, config, step_time).end))
        for result, duration in zip(results, np.diff(ends).tolist(), strict=True):
            durations.setdefault(result.padded_tokens, []).append(duration)
    count = sum([len(requests.arrival) for requests in waiting])
    return Speed(
        capacity=count / seconds,
        stretch=seconds / seconds_of_worlds,
        step_seconds={tokens: float(np.mean(values)) for tokens, values in durations.items()},
    )


def run(
    engine: Any, requests: Requests, path: Path | None = None
) -> tuple[float, list[StepResult]]:
    """A run of a world in an engine -> (its start, the results of all steps).

    Args:
        path: of its recording; None: it is not recorded.
    """
    items = simulated.items_of(requests)
    engine.reset()
    engine.record(path)
    gc.collect()  # so that garbage of the run before costs this one no time
    start, results = drive(engine, items, simulated.SAMPLING)
    engine.record(None)
    return start, results


def stretched(requests: Requests, stretch: float) -> Requests:
    """The requests with their arrivals times `stretch`."""
    arrival = np.minimum(stretch * requests.arrival, LATEST).astype(np.int32)
    return requests._replace(arrival=arrival)


# --- the comparison -------------------------------------------------------------------------------


def episodes_needed(gains: np.ndarray) -> int | None:
    """How many paired episodes have a 95 % interval above no gain, with the probability POWER;
    None: MOST_EPISODES do not suffice.

    Args:
        gains: of episodes that were simulated. What a machine adds to their spread is not in them.
    """
    counts = np.arange(2, MOST_EPISODES + 1)
    reach = stats.t.ppf(0.975, counts - 1) + stats.t.ppf(POWER, counts - 1)
    mean = float(np.mean(gains))
    enough = counts[mean * np.sqrt(counts) > float(np.std(gains, ddof=1)) * reach]
    return int(enough[0]) if len(enough) else None


def mean_latencies(
    engines: Mapping[str, Any], episodes: Sequence[Requests], folder: Path, seconds: float
) -> dict[str, np.ndarray]:
    """Mean seconds from arrival to end of each episode, by policy. Each run is recorded, see
    `recording`.

    Args:
        engines: by the name of the policy.
        seconds: no episode begins after them.
    """
    means: dict[str, list[float]] = {name: [] for name in engines}
    turns = list(engines.items())
    start_time = time.perf_counter()
    for number, requests in enumerate(episodes):
        if time.perf_counter() - start_time > seconds:
            break
        first = number % len(turns)
        for name, engine in turns[first:] + turns[:first]:
            start, results = run(engine, requests, recording(folder, name, number))
            times = simulated.run_of(results, start, len(requests.arrival))
            means[name].append(simulated.mean_latency(times, requests))
    return {name: np.asarray(values) for name, values in means.items()}


def recording(folder: Path, name: str, number: int) -> Path:
    """The file of a run's recording."""
    return folder / f"{name}-{number}.jsonl"


def equal_steps(
    path: Path,
    policies: Mapping[str, Policy],
    requests: Requests,
    sizes: Sizes,
    decide: Decide,
    policy: Any,
) -> int:
    """The number of steps of a recorded run, if the recording replays byte for byte in the
    scheduler and its plans are those of the scheduler on arrays, given its arrivals; else 0.

    Args:
        policies: by the name that a recording has.
        policy: what `decide` gets first.
    """
    if not replay.verify(path, policies).identical:
        return 0
    decisions = recorded.of_recording(path, len(requests.arrival), policies)
    count = len(decisions.steps)
    on_arrays = recorded.on_arrays(requests, sizes, decide, policy, decisions.submitted, count)
    differs = recorded.first_difference(on_arrays, decisions.steps) is not None
    return 0 if differs else count


def load(requests: Sequence[Requests], capacity: float) -> float:
    """Requests a second over the capacity, from the first arrival of an episode to its last."""
    seconds = [float(np.ptp(episode.arrival)) / MICROSECONDS for episode in requests]
    gaps = sum([len(episode.arrival) - 1 for episode in requests])
    return gaps / sum(seconds) / capacity
