"""Recordings of a simulated engine: times, prompts, prefix cache and drafts, as an engine has
them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.laboratory.past import Past
from experiments.simulation.cost import Simulate, Work
from experiments.simulation.simulate import SimulatedEngine
from pagedjax.host.event_log import Submit
from pagedjax.options.config import EngineConfig, Speculative
from pagedjax.options.params import SamplingParams


def step_time(work: Work) -> float:
    return 0.01 + 0.001 * work.tokens + 0.00001 * work.context


def engine(
    *, drafting: bool = False, seconds: Any = step_time, guesses: Any = None, **options: Any
) -> SimulatedEngine:
    """A simulated engine that pads nothing."""
    speculative = Speculative(num_tokens=3) if drafting else None
    settings: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 40,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_model_len": 64,
    }
    config = EngineConfig(
        **{"token_buckets": (1, 2, 4, 8, 16), **settings, **options}, speculative=speculative
    )
    acceptance = 0.6 if drafting and guesses is None else None
    simulate = Simulate(step_s=1.0, padded=False, acceptance=acceptance)
    return SimulatedEngine(config, seconds, vocab_size=1000, simulate=simulate, guesses=guesses)


def prompt(draw: random.Random, length: int) -> list[int]:
    """A prompt that begins like others.

    Ids fall along its beginning, and the ids that a simulated engine samples rise. So an answer
    never goes on as the prompt of another request does. If it did, it would share blocks in one
    run and not in another, because the sampled ids depend on the number of the request in its
    engine, and a fleet numbers requests otherwise.
    """
    family = draw.randrange(3)
    beginning = [100 + 10 * family - i for i in range(length - length // 3)]
    return beginning + draw.choices(range(900), k=length // 3)


def requests(draw: random.Random, count: int) -> list[tuple[float, dict[str, Any]]]:
    """Requests with their times."""
    at = 0.0
    arrivals = []
    for i in range(count):
        at += draw.choice([0.0, 0.02, 0.5])
        keywords = {
            "request_id": f"r{i}",
            "prompt_token_ids": prompt(draw, draw.randint(1, 30)),
            "params": SamplingParams(max_tokens=draw.randint(1, 20), ignore_eos=True),
            "user": draw.choice(["ann", "bob"]),
        }
        arrivals.append((at, keywords))
    return arrivals


def record(
    path: Path,
    engine: SimulatedEngine,
    arrivals: Sequence[tuple[float, Mapping[str, Any]]],
    *,
    times: bool = True,
) -> None:
    """Records a run of requests that come at their times."""
    engine.reset()
    engine.record(path, times=times, prompts=True)
    queue = list(arrivals)
    while queue or engine.has_work:
        while queue and queue[0][0] <= engine.now:
            engine.add(**queue.pop(0)[1])
        if engine.step() is None and queue:
            engine.now = queue[0][0]
    engine.record(None)


def as_submitted(
    past: Past, arrivals: Sequence[tuple[float, Mapping[str, Any]]]
) -> list[tuple[float, Mapping[str, Any]]]:
    """The requests at the times at which the recorded engine took them."""
    times = [recorded.at for recorded in past.entries if isinstance(recorded.entry, Submit)]
    return [(at, keywords) for at, (_, keywords) in zip(times, arrivals, strict=True)]
