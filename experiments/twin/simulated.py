"""The worlds in the simulator: the same requests, with the scheduler itself."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from experiments.core.drive import drive
from experiments.core.workloads import WorkItem
from experiments.simulation.cost import Simulate, StepTime
from experiments.simulation.simulate import SimulatedEngine
from experiments.twin.cost import MICROSECONDS
from experiments.twin.scheduler import Requests
from pagedjax.host.types import Finished, StepResult
from pagedjax.options.config import EngineConfig
from pagedjax.options.params import SamplingParams

VOCABULARY = 1000  # tokens have no meaning
SAMPLING = SamplingParams(temperature=0, ignore_eos=True)


class Run(NamedTuple):
    """Seconds from the start, float64 [N]: of each request's first token, and of its end.

    steps: how many steps had a row.
    """

    first_token: np.ndarray
    end: np.ndarray
    steps: int


class EngineSizes(Protocol):
    """The sizes of an engine, such as those in the setup of a training run."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...


def engine_config(sizes: EngineSizes, policy: Any) -> EngineConfig:
    """The configuration of an engine of these sizes, without what the worlds do not have."""
    longest = sizes.num_blocks * sizes.block_size
    return EngineConfig(
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=longest,
        token_buckets=(sizes.max_num_batched_tokens,),
        enable_prefix_caching=False,
        policy=policy,
    )


def items_of(requests: Requests) -> list[WorkItem]:
    """The requests of a world as the items of a driver. All of them exist."""
    columns = zip(*[column.tolist() for column in requests], strict=True)
    return [
        WorkItem(
            f"r{i}",
            arrival / MICROSECONDS,
            (1,) * prompt_len,
            limit - prompt_len,
            user=f"user {user}",
            priority=priority,
            predicted=predicted,
            ends_at=final_len - prompt_len,
        )
        for i, (arrival, prompt_len, final_len, limit, predicted, priority, user) in enumerate(
            columns
        )
    ]


def engine_of(config: EngineConfig, step_time: StepTime) -> SimulatedEngine:
    """A simulated engine with this step time."""
    simulate = Simulate(chip="h200", model="llama-3-8b", padded=False)
    return SimulatedEngine(config, step_time, vocab_size=VOCABULARY, simulate=simulate)


def run(requests: Requests, config: EngineConfig, step_time: StepTime) -> Run:
    """A run of a world in the simulator."""
    engine = engine_of(config, step_time)
    start, results = drive(engine, items_of(requests), SAMPLING, engine.clock, engine.sleep)
    return run_of(results, start, len(requests.arrival))


def mean_latency(run: Run, requests: Requests) -> float:
    """Mean seconds of the requests from arrival to end."""
    return float(np.mean(run.end - requests.arrival / MICROSECONDS))


def run_of(results: list[StepResult], start: float, count: int) -> Run:
    """The times of the requests "r0", "r1", ... from the results of all steps."""
    first_token = np.full(count, np.nan)
    end = np.full(count, np.nan)
    for result in results:
        plan = result.plan
        columns = zip(plan.seqs, plan.lengths, plan.starts, plan.counts, strict=True)
        for seq, length, start_token, count in columns:
            i = int(seq.request_id.removeprefix("r"))
            if start_token + count == length == seq.request.prompt_len:
                first_token[i] = result.finished - start
        for event in result.events:
            if isinstance(event, Finished):
                end[int(event.request_id.removeprefix("r"))] = result.finished - start
    return Run(first_token, end, sum([bool(result.plan.seqs) for result in results]))
