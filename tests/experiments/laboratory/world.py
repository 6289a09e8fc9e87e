"""An engine without a device that knows every token: what a rerun must decide, by other means.

A token is a number of (the sequence's arrival, its index), a prompt one of (family, index), and a
hash of a block is one of all tokens up to its end. So a run with any configuration has the same
tokens, and blocks of any size have comparable hashes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from pagedjax.host import scheduler
from pagedjax.host.event_log import Cancel, Commit, Recorder, Schedule, Submit
from pagedjax.host.policies import Policy
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import (
    Beamed,
    Choice,
    Event,
    FinishReason,
    Plan,
    Request,
    Sampled,
    Seq,
)

STOP = 12


def number(*parts: object, below: int = 13) -> int:
    """A number that looks random, of some values."""
    return crc32(repr(parts).encode()) % below


class Arrival(NamedTuple):
    """A request that comes.

    at: steps, or seconds.
    family: requests of one family have prompts that begin alike; None: it shares nothing.
    aborted_at: when its client leaves.
    stops_after: the number of output tokens after which a stop string ends each sequence.
    """

    at: int
    request: Request
    family: int | None = None
    aborted_at: int | None = None
    stops_after: int | None = None


@dataclass
class World:
    """A scheduler with the tokens of its sequences, on a clock whose steps take 1."""

    config: SchedulerConfig
    policy: Policy
    recorder: Recorder
    now: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of each sequence, its prompt first
    arrivals: dict[str, Arrival] = field(default_factory=dict)  # by the id of the sequence

    def __post_init__(self) -> None:
        self.state = scheduler.init(self.config)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        inputs = [(arrival.at, i, arrival) for i, arrival in enumerate(arrivals)]
        ends = [
            (arrival.aborted_at, len(arrivals) + i, arrival)
            for i, arrival in enumerate(arrivals)
            if arrival.aborted_at is not None
        ]
        inputs = sorted([*inputs, *ends])
        while inputs or self.state.ids:
            while inputs and inputs[0][0] <= self.now:
                _, place, arrival = inputs.pop(0)
                if place < len(arrivals):
                    self.submit(arrival)
                else:
                    self.cancel(arrival.request.request_id, "abort")
            state, plan = scheduler.schedule(self.state, self.policy, now=float(self.now))
            if plan.seqs or plan.preempted or plan.rejected:
                self.step(state, plan)
            elif inputs:
                self.now = inputs[0][0]
            else:
                return

    def submit(self, arrival: Arrival) -> None:
        request = arrival.request
        family = request.request_id if arrival.family is None else arrival.family
        prompt = [number(family, i) for i in range(request.prompt_len)]
        for name in request.names:
            self.tokens[name] = list(prompt)
            self.arrivals[name] = arrival
        full = range(request.prompt_len // self.config.block_size)
        if arrival.family is not None:
            hashes = tuple([self.hash(request.request_id, i) for i in full])
            request = request._replace(hashes=hashes)
        self.state = scheduler.submit(self.state, request)
        self.recorder.write(Submit(request))

    def hash(self, name: str, index: int) -> str:
        content = self.tokens[name][: (index + 1) * self.config.block_size]
        return f"{crc32(repr(content).encode()):08x}{len(content)}"

    def cancel(self, name: str, reason: FinishReason) -> None:
        self.state, events = scheduler.cancel(self.state, name, reason)
        self.recorder.write(Cancel(name, reason, events))

    def step(self, state: scheduler.SchedulerState, plan: Plan) -> None:
        self.recorder.write(Schedule(plan, started=float(self.now)))
        self.state = state
        sampled = []
        hashes = {}
        for row in plan.rows:
            seq = row.seq
            name = seq.request_id
            token = number(seq.arrival, seq.num_output)
            sampled.append(token)
            end = (seq.computed + row.count) // self.config.block_size
            if self.arrivals[name].family is not None and end > len(seq.hashes):
                hashes[name] = tuple([self.hash(name, i) for i in range(len(seq.hashes), end)])
        choices, ends = self.searches(plan)
        self.state, events = scheduler.commit(state, plan, sampled, hashes, choices)
        self.now += 1
        self.recorder.write(Commit(plan, sampled, hashes, choices, events))
        self.read(events, ends)

    def searches(self, plan: Plan) -> tuple[dict[str, Choice], dict[str, FinishReason]]:
        """The choices of beams, and the first beams of searches that end, with the reason."""
        ends = {row.seq.arrival: row.seq.computed + row.count for row in plan.rows}
        choices = {}
        ended: dict[str, FinishReason] = {}
        groups: dict[int | None, list[Seq]] = {}
        for seq in scheduler.running(self.state):
            if seq.request.beams:
                groups.setdefault(seq.group, []).append(seq)
        for group in groups.values():
            group.sort(key=lambda seq: seq.arrival)
            if any(ends.get(seq.arrival, seq.computed) < seq.length for seq in group):
                continue
            first = group[0]
            names = self.arrivals[first.request_id].request.names
            alive = [seq.request_id for seq in group]
            index = first.num_output
            stops_after = self.arrivals[first.request_id].stops_after
            if first.length + 1 >= first.limit or index == stops_after:
                ended[first.request_id] = "stop" if index == stops_after else "length"
                continue
            parents = [
                alive[number("p", names[0], index, i, below=len(alive))] for i in range(len(names))
            ]
            new = [number("t", names[0], index, i) for i in range(len(names))]
            choices[first.request_id] = Choice(tuple(parents), tuple(new))
        return choices, ended

    def read(self, events: Sequence[Event], searches: Mapping[str, FinishReason]) -> None:
        """Adds the tokens of a step, and ends what has to end after it."""
        stopped = []
        for event in events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    self.tokens[name].append(token)
                    request = self.arrivals[name].request
                    if (
                        len(self.tokens[name]) - request.prompt_len
                        == self.arrivals[name].stops_after
                    ):
                        stopped.append(name)
            elif isinstance(event, Beamed):
                new = [list(self.tokens[parent]) for parent in event.parents]
                for name, tokens, token in zip(
                    event.request_ids, new, event.token_ids, strict=True
                ):
                    self.tokens[name] = [*tokens, token]
        for name, reason in searches.items():
            self.cancel(name, reason)
        for name in stopped:
            if name in self.state.ids:
                self.cancel(name, "stop")


def drive(
    path: Path,
    config: SchedulerConfig,
    policy: Policy,
    arrivals: Sequence[Arrival],
    *,
    timed: bool = False,
) -> None:
    """Records a run."""
    world: World | None = None
    recorder = Recorder(
        path,
        config,
        policy.name,
        clock=(lambda: 0.0 if world is None else float(world.now)) if timed else None,
    )
    with closing(recorder):
        world = World(config, policy, recorder)
        world.run(arrivals)


def random_config(draw: random.Random, *, block_size: int | None = None) -> SchedulerConfig:
    """A small configuration in which every request of `random_arrivals` can run."""
    length = 32
    block_size = block_size or draw.choice([1, 2, 4])
    return SchedulerConfig(
        block_size,
        num_blocks=3 * length // block_size + draw.randrange(8),
        max_num_batched_tokens=draw.randint(4, 24),
        max_num_seqs=draw.randint(3, 8),
        max_model_len=length,
        host_blocks=draw.choice([0, 4, 40]),
    )


def random_arrivals(draw: random.Random, count: int, *, aborts: bool = True) -> list[Arrival]:
    """Requests with prefixes, branches, beams, priorities, stop tokens, stop strings and aborts, of
    at most 32 tokens.
    """
    arrivals = []
    at = 0
    for i in range(count):
        at += draw.choice([0, 0, 0, 1, 3, 20])
        name = f"r{i}"
        forks = tuple([f"{name}/{k}" for k in range(draw.choice([0, 0, 0, 1, 2]))])
        request = Request(
            name,
            prompt_len=draw.randint(1, 16),
            max_tokens=draw.randint(1, 16),
            min_tokens=draw.choice([0, 3]),
            stop_token_ids=draw.choice([frozenset(), frozenset({STOP})]),
            priority=draw.randrange(3),
            user=draw.choice("ab"),
            forks=forks,
            beams=draw.random() < 0.25,
            predicted=draw.randint(0, 20),
            service_class=draw.choice(["chat", "batch"]),
            deadline=draw.choice([None, 8.0, 30.0]),
        )
        aborted_at = at + draw.randint(1, 30) if aborts and draw.random() < 0.15 else None
        arrivals.append(
            Arrival(
                at,
                request,
                family=draw.choice([None, 0, 1, 2]),
                aborted_at=aborted_at,
                stops_after=draw.choice([None, None, draw.randint(1, 8)]),
            )
        )
    return arrivals
