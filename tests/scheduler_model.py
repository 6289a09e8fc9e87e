"""A naive scheduler to compare the real one with, written from its rules alone. Mutable, slow, first come first served.

The cache is modelled slot by slot: `slots[block, offset]` says whose token, at which position, the device wrote there
last. So a block given to two sequences, or written past, shows as a sequence that reads somebody else's token.

Which block ids a sequence gets is the pool's own affair: the model says how many, takes the ids from the real plan and
checks that nobody else has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagedjax import blocks
from pagedjax.scheduler import SchedulerConfig, SchedulerState, running
from pagedjax.types import Admitted, Event, Finished, FinishReason, Plan, Preempted, Request, Sampled


@dataclass(eq=False)  # compared by identity: an id may come back after its request ended
class Life:
    request: Request
    arrival: int
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    entitled: int = 0  # blocks it has, by the rules
    table: list[int] = field(default_factory=list)  # their ids, as the real scheduler chose them

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def known(self) -> int:
        return self.request.prompt_len + len(self.outputs)


@dataclass
class Step:
    """What the rules want of one step."""

    rows: list[tuple[Life, int, int]]  # sequence, first token to compute, how many
    admitted: list[str]
    preempted: list[str]


class Model:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: list[Life] = []  # in no order that matters: the earliest arrival is next
        self.running: list[Life] = []  # in order of admission
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.flight: Step | None = None
        self.arrivals = self.steps = 0

    def alive(self) -> list[Life]:
        return self.waiting + self.running

    def limit(self, request: Request) -> int:
        return min(request.prompt_len + request.max_tokens, self.config.max_model_len)

    def accepts(self, request: Request) -> bool:
        fits = math.ceil(self.limit(request) / self.config.block_size) <= self.config.num_blocks
        sane = request.prompt_len > 0 and request.max_tokens > 0 and request.prompt_len < self.config.max_model_len
        return fits and sane and all(life.name != request.request_id for life in self.alive())

    def submit(self, request: Request) -> None:
        self.waiting.append(Life(request, self.arrivals))
        self.arrivals += 1

    def free(self) -> int:
        return self.config.num_blocks - sum(life.entitled for life in self.running)

    def schedule(self) -> Step:
        c, preempted, admitted = self.config, [], []

        def starving() -> list[Life]:  # their next token lies past their last block
            return [life for life in self.running if life.computed >= life.entitled * c.block_size]

        while len(starving()) > self.free():
            victim = max(self.running, key=lambda life: life.arrival)
            self.running.remove(victim)
            self.waiting.append(victim)
            victim.computed, victim.entitled, victim.table = 0, 0, []
            preempted.append(victim.name)
        for life in starving():
            life.entitled += 1

        rows, budget = [], c.max_num_batched_tokens
        decodes = [life for life in self.running if life.known - life.computed == 1]
        for life in decodes + [life for life in self.running if life not in decodes]:
            count = min(life.known - life.computed, budget)
            budget -= count
            if count > 0:
                rows.append((life, life.computed, count))
        while self.waiting and budget > 0 and not preempted:
            life = min(self.waiting, key=lambda life: life.arrival)
            need = math.ceil(life.known / c.block_size)
            if need > self.free() or len(self.running) == min(c.max_num_seqs, c.max_num_batched_tokens):
                break
            self.waiting.remove(life)
            self.running.append(life)
            life.entitled = need
            count = min(life.known, budget)
            budget -= count
            rows.append((life, 0, count))
            admitted.append(life.name)
        self.flight = Step(rows, admitted, preempted)
        return self.flight

    def execute(self, plan: Plan) -> None:
        """Take the block ids of the real plan and let the device write and read the cache through them."""
        assert self.flight is not None
        size = self.config.block_size
        for (life, start, count), seq in zip(self.flight.rows, plan.seqs, strict=True):
            table = list(seq.blocks)
            assert table[: len(life.table)] == life.table, f"{life.name}: blocks it had were taken or moved"
            assert len(table) == life.entitled, f"{life.name}: has {len(table)} blocks, is entitled to {life.entitled}"
            assert start + count <= len(table) * size, f"{life.name}: writes past its blocks"
            life.table = table
        owned = [block for life in self.running for block in life.table]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert all(1 <= block <= self.config.num_blocks for block in owned), "a block id is out of range"
        for life, start, count in self.flight.rows:
            for at in range(start, start + count):
                self.slots[life.table[at // size], at % size] = (life.arrival, at)
        for life, start, count in self.flight.rows:
            for at in range(start + count):
                assert self.slots[life.table[at // size], at % size] == (life.arrival, at), "reads another's token"

    def commit(self, sampled: list[int]) -> list[Event]:
        assert self.flight is not None
        events: list[Event] = [Preempted(self.steps, name) for name in self.flight.preempted]
        events += [Admitted(self.steps, name) for name in self.flight.admitted]
        new: list[tuple[str, int]] = []
        ends: list[Event] = []
        for (life, start, count), token in zip(self.flight.rows, sampled, strict=True):
            if life not in self.running:
                continue  # cancelled meanwhile
            life.computed = start + count
            if life.computed < life.known:
                continue
            life.outputs.append(token)
            new.append((life.name, token))
            reason = self.why_ended(life)
            if reason is not None:
                self.running.remove(life)
                ends.append(Finished(self.steps, life.name, reason, len(life.outputs)))
        if new:
            names, tokens = zip(*new, strict=True)
            events.append(Sampled(self.steps, names, tokens))
        self.steps += 1
        self.flight = None
        return events + ends

    def why_ended(self, life: Life) -> FinishReason | None:
        request = life.request
        if life.outputs[-1] in request.stop_token_ids and len(life.outputs) >= request.min_tokens:
            return "stop"
        if len(life.outputs) == request.max_tokens or life.known == self.config.max_model_len:
            return "length"
        return None

    def cancel(self, name: str, reason: FinishReason) -> list[Event]:
        for life in self.alive():
            if life.name == name:
                (self.waiting if life in self.waiting else self.running).remove(life)
                return [Finished(self.steps, name, reason, len(life.outputs))]
        return []

    def compare(self, state: SchedulerState) -> None:
        """The real state says what the model says, block by block."""
        by_arrival = sorted(self.waiting, key=lambda life: life.arrival)
        assert [seq.arrival for seq in state.waiting] == [life.arrival for life in by_arrival], "queue out of order"
        assert [seq.length for seq in state.waiting] == [life.known for life in by_arrival]
        real = [(seq.arrival, seq.length, seq.computed, list(seq.blocks)) for seq in running(state)]
        assert real == [(life.arrival, life.known, life.computed, life.table) for life in self.running]
        assert [seq.limit for seq in running(state)] == [self.limit(life.request) for life in self.running]
        owners = {block: 1 for life in self.running for block in life.table}
        assert dict(state.pool.owners) == owners, "owner counts differ from the tables"
        assert sorted(blocks.free_ids(state.pool)) == sorted(set(range(1, self.config.num_blocks + 1)) - set(owners))
        assert (state.step, state.arrivals) == (self.steps, self.arrivals)
