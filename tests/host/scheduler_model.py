"""The reference model: a naive scheduler written from the rules alone. Mutable, slow, first come first served.

The model stores the cache slot by slot: `slots[block, offset]` is the token that the device wrote there last, with all
tokens before it. So a sequence reads a wrong token if a shared block has other content or a write goes past a block.
Prompts of one family begin with the same tokens. `ModelSequence.key` spells the tokens of a sequence; the hash of a
block is the spelling of its tokens and of all tokens before it.

The pool chooses the ids of new blocks. The model uses a negative number for each, takes the ids from the real plan, and
checks that no other sequence owns them. The model itself decides which published blocks a sequence shares. It checks
that the ids of a reserved piece are contiguous and aligned, and decides by halving whether a piece is free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagedjax.host import blocks
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState, running
from pagedjax.host.types import (
    Admitted,
    Beamed,
    Choice,
    Event,
    Finished,
    FinishReason,
    Forked,
    Plan,
    Preempted,
    Request,
    Resumed,
    Sampled,
    Seq,
)


@dataclass(eq=False)  # compared by identity: an id may be used again after its request ended
class ModelSequence:
    request: Request
    arrival: int
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)  # its blocks; negative until the real scheduler has chosen the id
    hashed: int = 0  # blocks whose hash the scheduler has
    group: int | None = None  # arrival of the first branch, if there are several
    away: list[int] = field(default_factory=list)  # its blocks in host memory while it waits

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def width(self) -> int:
        return 1 + len(self.request.forks)

    @property
    def known(self) -> int:
        return self.request.prompt_len + len(self.outputs)

    def awaits_siblings(self) -> bool:
        """Whether it is a beam that has computed all its tokens and waits for its siblings."""
        return self.request.beams and self.computed == self.known

    def shares(self) -> bool:
        return not self.name.startswith("private")

    def key(self, stop: int) -> str:
        """Its first `stop` tokens, spelled out. Its name says the family: r17.2 is of family 2."""
        whole = ["f" + self.name.partition(".")[2]] * self.request.prompt_len + [str(token) for token in self.outputs]
        return " ".join(whole[:stop])


def power(number: int) -> int:
    """The least power of two that is not below a number."""
    found = 1
    while found < number:
        found *= 2
    return found


def free_pieces(free: set[int], start: int, size: int) -> list[int]:
    """Sizes of the free pieces of a buddy allocator among `size` ids from `start` on, found by halving."""
    if free.issuperset(range(start, start + size)):
        return [size]
    half = size // 2
    return free_pieces(free, start, half) + free_pieces(free, start + half, half) if half else []


@dataclass
class Step:
    """One step as the rules require it."""

    rows: list[tuple[ModelSequence, int, int]]  # sequence, first token to compute, how many
    admitted: list[ModelSequence]
    preempted: list[str]
    cached: list[int] = field(default_factory=list)  # tokens of each admitted one that need not be computed
    entered: list[int] = field(default_factory=list)  # its known tokens when it was admitted
    copies: list[tuple[int, int]] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    out: list[tuple[int, int]] = field(default_factory=list)  # device block, host block
    back: list[tuple[int, int]] = field(default_factory=list)  # host block, device block


class Model:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: list[ModelSequence] = []  # in any order: the earliest arrival is next
        self.running: list[ModelSequence] = []  # decodes first, else in order of admission
        self.slots: dict[tuple[int, int], str] = {}
        self.host_slots: dict[tuple[int, int], str] = {}
        self.published: dict[str, int] = {}  # content -> the block
        self.idle: list[int] = []  # published blocks without an owner; the first is evicted next
        self.flight: Step | None = None
        self.cached: dict[int, int] = {}  # arrival -> cached tokens of a waiting sequence when admission began
        self.arrivals = self.steps = self.unseen = 0
        self.pieces: list[int] = []  # sizes of the free pieces, if caches are reserved
        self.uncut = self.fragmented = 0  # how often a whole prompt did not fit, or free blocks made no piece

    def alive(self) -> list[ModelSequence]:
        return self.waiting + self.running

    def limit(self, request: Request) -> int:
        return min(request.prompt_len + request.max_tokens, self.config.max_model_len)

    def accepts(self, request: Request) -> bool:
        beams = 1 + len(request.forks) if request.beams else 1
        fits = beams * math.ceil(self.limit(request) / self.config.block_size) <= self.config.num_blocks
        sane = request.prompt_len > 0 and request.max_tokens > 0 and request.prompt_len < self.config.max_model_len
        names = [request.request_id, *request.forks, *self.names()]
        few = 1 + len(request.forks) <= min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        whole = self.config.chunked_prefill or beams * self.limit(request) <= self.config.max_num_batched_tokens
        return fits and sane and few and whole and self.reservable(request) and len(set(names)) == len(names)

    def reservable(self, request: Request) -> bool:
        if self.config.reservation == "none":
            return True
        alone = not (request.forks or request.beams or request.hashes)
        return alone and self.reserved(request) <= max(free_pieces(self.ids(), 1, power(self.config.num_blocks)))

    def reserved(self, request: Request) -> int:
        """Blocks of the piece that a request owns for its whole life."""
        c, prompt, limit = self.config, request.prompt_len, self.limit(request)
        slots = {"oracle": limit, "pow2": prompt + power(limit - prompt), "max": c.max_model_len}[c.reservation]
        return power(math.ceil(min(slots, c.max_model_len) / c.block_size))

    def ids(self) -> set[int]:
        return set(range(1, self.config.num_blocks + 1))

    def names(self) -> list[str]:
        return [name for life in self.alive() for name in (life.name, *life.request.forks)]

    def hashes(self, name: str, prompt_len: int) -> tuple[str, ...]:
        """The hashes of the full blocks of a prompt."""
        life, size = ModelSequence(Request(name, prompt_len, 1), 0), self.config.block_size
        return tuple(life.key(j * size) for j in range(1, prompt_len // size + 1)) if life.shares() else ()

    def submit(self, request: Request) -> None:
        group = self.arrivals if request.forks or request.beams else None
        self.waiting.append(ModelSequence(request, self.arrivals, hashed=len(request.hashes), group=group))
        self.arrivals += 1 + len(request.forks)

    def owned(self) -> set[int]:
        return {block for life in self.running for block in life.table}

    def free(self) -> int:
        return self.config.num_blocks - len(self.owned())

    def publishes(self, life: ModelSequence) -> bool:
        """Whether the engine gives hashes for blocks that a sequence fills."""
        return self.config.reservation == "none" and life.shares()

    def take(self, life: ModelSequence, number: int) -> None:
        """Gives a sequence new blocks. If no block is empty, an idle block loses its content."""
        for _ in range(number):
            if self.free() == len(self.idle):
                lost = self.idle.pop(0)
                self.published = {key: block for key, block in self.published.items() if block != lost}
            self.unseen -= 1
            life.table.append(self.unseen)

    def release(self, life: ModelSequence) -> None:
        """Takes the blocks of a sequence that no longer runs, the last one first."""
        cached = set(self.published.values()) - self.owned()
        self.idle += [block for block in reversed(life.table) if block in cached]
        life.table = []

    def stop(self, step: Step, lives: list[ModelSequence]) -> None:
        """Preempts sequences: their content moves to host memory if all of it fits there; else it is lost."""
        step.preempted += [life.name for life in lives]
        for life in lives:
            life.computed = min(life.computed, life.known - 1)
        tables = [life.table[: math.ceil(life.computed / self.config.block_size)] for life in lives]
        distinct = list(dict.fromkeys(block for table in tables for block in table))
        taken = {block for life in self.waiting for block in life.away}
        fits = all(tables) and len(distinct) <= self.config.host_blocks - len(taken)
        place = {block: self.unseen - i for i, block in enumerate(distinct, 1)}
        self.unseen -= len(distinct)
        for life, table in zip(lives, tables, strict=True):
            self.running.remove(life)
            self.waiting.append(life)
            self.release(life)
            life.away = [place[block] for block in table] if fits else []
            life.computed = life.computed if fits else 0
        step.swapped += [life.name for life in lives] if fits else []
        step.out += place.items() if fits else []

    def schedule(self) -> Step:
        c, step = self.config, Step([], [], [])

        def starving() -> list[ModelSequence]:  # the next token lies past the last block
            edge = [life for life in self.running if life.computed >= len(life.table) * c.block_size]
            return [life for life in edge if not life.awaits_siblings()]

        while len(starving()) + len(self.copying()) > self.free():
            victim = max(self.running, key=lambda life: life.arrival)
            group = [life for life in self.running if life.group is not None and life.group == victim.group]
            together = 0 < len(group) < len(self.running)
            self.stop(step, sorted(group, key=lambda life: life.arrival) if together else [victim])
        full, copying = starving(), self.copying()
        for life in full + copying:
            self.take(life, 1)
        for life in copying:
            new, at = life.table.pop(), life.computed // c.block_size
            step.copies.append((life.table[at], new))
            life.table[at] = new
        for old, _ in step.copies:
            if old not in self.owned() and old not in self.idle:
                assert old in self.published.values(), "a block was copied although no other sequence needs it"
                self.idle.append(old)

        ready = [life for life in self.running if life.awaits_siblings()]
        decodes = [life for life in self.running if life.known - life.computed == 1]
        prompts = [life for life in self.running if life not in decodes and life not in ready]
        if c.mixed_steps:
            self.compose(step, decodes + prompts, ready, decodes, admits=not step.preempted)
        elif c.chunked_prefill and self.steps % 2 and decodes:  # alternating steps
            self.compose(step, decodes, prompts + ready, decodes, admits=False)
        else:
            self.compose(step, prompts, decodes + ready, decodes, admits=not step.preempted)
            if not step.rows:
                self.compose(step, decodes, prompts + ready, decodes, admits=False)
        self.flight = step
        return step

    def compose(
        self,
        step: Step,
        turn: list[ModelSequence],
        others: list[ModelSequence],
        decodes: list[ModelSequence],
        *,
        admits: bool,
    ) -> None:
        """Gives tokens to the sequences of this kind of step, then admits. The others keep their blocks and rows."""
        c = self.config
        places = min(c.max_num_seqs, c.max_num_batched_tokens) - sum(life.width for life in self.running)
        self.budget = c.max_num_batched_tokens
        for life in turn:
            count = min(life.known - life.computed, self.budget)
            self.budget -= count
            if count > 0:
                step.rows.append((life, life.computed, count))
        self.running = turn + others
        self.moved: dict[int, int] = {}
        if c.reservation != "none":
            self.pieces = free_pieces(self.ids() - self.owned(), 1, power(c.num_blocks))
        self.cached = {life.arrival: life.computed if life.away else self.cached_tokens(life) for life in self.waiting}
        while self.waiting and self.budget > 0 and admits:
            first = min(self.waiting, key=lambda life: life.arrival)
            unit = [first]
            if first.request.beams and not first.request.forks:
                unit = sorted(
                    (life for life in self.waiting if life.group == first.group), key=lambda life: life.arrival
                )
            if sum(life.width for life in unit) > places or not self.all_enter(step, unit, decodes):
                break
            places -= sum(life.width for life in unit)
        self.running = [life for life in self.running if life not in others] + others

    def all_enter(self, step: Step, unit: list[ModelSequence], decodes: list[ModelSequence]) -> bool:
        """Admits all sequences of a group, or none if one of them does not fit."""
        before = [(life, list(life.table), list(life.away), life.computed) for life in unit]
        mine = [list(self.waiting), list(self.running), list(self.idle), dict(self.published), dict(self.moved)]
        numbers, lists = (self.budget, self.unseen), {name: list(value) for name, value in vars(step).items()}
        if all([self.enters(step, life, decodes) for life in unit]):
            return True
        for life, table, away, computed in before:
            life.table, life.away, life.computed = table, away, computed
        self.waiting, self.running, self.idle, self.published, self.moved = mine
        self.budget, self.unseen = numbers
        vars(step).update(lists)
        return False

    def enters(self, step: Step, life: ModelSequence, decodes: list[ModelSequence]) -> bool:
        size = self.config.block_size
        whole = life.computed // size
        known = [self.moved[block] for block in life.away[:whole] if block in self.moved]
        found = known if life.away else self.found(life, [row for row in step.rows if row[0] not in decodes])
        reserves = self.config.reservation != "none"
        need = self.reserved(life.request) if reserves else math.ceil(life.known / size) - len(found)
        if need > self.free() - len(set(found) & set(self.idle)):
            return False
        done = life.computed if life.away else len(found) * size
        if not self.config.chunked_prefill and life.known - done > self.budget:
            self.uncut += 1
            return False
        if reserves and not self.split(need):
            self.fragmented += 1
            return False
        self.waiting.remove(life)
        self.running.append(life)
        self.idle = [block for block in self.idle if block not in found]
        life.table, away = [*found], life.away
        self.take(life, need)
        if away:
            fresh = iter(life.table[len(found) :])
            life.table = [self.moved[b] if i < whole and b in self.moved else next(fresh) for i, b in enumerate(away)]
            step.back += [(b, t) for b, t in zip(away, life.table, strict=True) if t not in found]
            self.moved |= dict(zip(away[:whole], life.table, strict=False))
            life.table += fresh
            life.away = []
            step.resumed.append(life.name)
        else:
            life.computed = len(found) * size
        count = min(life.known - life.computed, self.budget)
        self.budget -= count
        if count > 0:  # beams enter together, with or without a token for each
            step.rows.append((life, life.computed, count))
        step.admitted.append(life)
        step.cached.append(life.computed)
        step.entered.append(life.known)
        return True

    def split(self, need: int) -> bool:
        """Takes a piece out of the smallest sufficient one, if there is one."""
        enough = [size for size in self.pieces if size >= need]
        if not enough:
            return False
        size = min(enough)
        self.pieces.remove(size)
        while size > need:
            size //= 2
            self.pieces.append(size)  # the other half
        return True

    def copying(self) -> list[ModelSequence]:
        """Branches whose next token goes to a block that others own or can find."""
        size, found = self.config.block_size, []
        owners = Counter(block for life in self.running for block in life.table)
        for life in self.running:
            if life.group is None or life.computed // size >= len(life.table) or life.awaits_siblings():
                continue
            block = life.table[life.computed // size]
            if owners[block] > 1 or block in self.published.values():
                found.append(life)
                owners[block] -= 1
        return found

    def cached_tokens(self, life: ModelSequence) -> int:
        """Tokens at the beginning of a sequence, without its last one, whose blocks are published."""
        size, number = self.config.block_size, 0
        while number < min(life.hashed, (life.known - 1) // size) and life.key((number + 1) * size) in self.published:
            number += 1
        return number * size

    def found(self, life: ModelSequence, chunks: list[tuple[ModelSequence, int, int]]) -> list[int]:
        """Blocks that contain the beginning of a sequence without its last token, now or after this step's writes."""
        size, found = self.config.block_size, []
        for j in range(min(life.hashed, (life.known - 1) // size)):
            key = life.key((j + 1) * size)
            coming = [
                other.table[j]
                for other, start, count in chunks
                if start <= j * size and (j + 1) * size <= start + count and j < other.hashed
                if other.key((j + 1) * size) == key
            ]
            # a chunk may begin within the block and complete it in this step
            coming += [
                other.table[j]
                for other, start, count in chunks
                if j * size < start < (j + 1) * size <= start + count and j < other.hashed
                if other.key((j + 1) * size) == key
            ]
            if key in self.published:
                found.append(self.published[key])
            elif coming:
                found.append(coming[0])
            else:
                break
        return found

    def filled(self) -> dict[str, tuple[str, ...]]:
        """The hashes that the engine gives for blocks of generated tokens when the step is done."""
        assert self.flight is not None
        size, hashes = self.config.block_size, {}
        for life, start, count in self.flight.rows:
            full = (start + count) // size
            if self.publishes(life) and full > start // size and full > life.hashed:
                hashes[life.name] = tuple(life.key((j + 1) * size) for j in range(life.hashed, full))
        return hashes

    def execute(self, plan: Plan, real: Sequence[Seq]) -> None:
        """Takes the block ids of the real sequences, then writes and reads the cache as the device does."""
        assert self.flight is not None
        size = self.config.block_size
        seen: dict[int, int] = {}
        for life, seq in zip(self.running, real, strict=True):
            assert len(seq.blocks) == len(life.table), f"{life.name}: {len(seq.blocks)} blocks, not {len(life.table)}"
            for mine, theirs in zip(life.table, seq.blocks, strict=True):
                assert seen.setdefault(mine, theirs) == theirs, f"{life.name}: blocks that it owned or shares changed"
                assert mine < 0 or mine == theirs, f"{life.name}: blocks that it owned or shares were lost or changed"
        for (life, start, count), seq in zip(self.flight.rows, plan.seqs, strict=True):
            assert start + count <= len(life.table) * size, f"{life.name}: writes past its blocks"
            assert [seen[block] for block in life.table] == list(seq.blocks), f"{life.name}: the plan has other blocks"
        for life in self.running:
            life.table = [seen.get(block, block) for block in life.table]
        for life in self.flight.admitted if self.config.reservation != "none" else ():
            first, number = life.table[0], len(life.table)
            assert life.table == list(range(first, first + number)), f"{life.name}: its blocks are not in a row"
            assert (first - 1) % number == 0, f"{life.name}: its piece is not aligned"
        self.move(plan, seen)
        copies = [(old, seen[new]) for old, new in self.flight.copies]
        assert copies == list(plan.copies), "other blocks are copied"
        for old, new in copies:
            for offset in range(size):
                self.slots[new, offset] = self.slots.get((old, offset), "nothing")
        ids = set(seen.values()) | self.owned()
        assert len(set(seen.values())) == len(seen), "a block was handed out twice"
        assert all(1 <= block <= self.config.num_blocks for block in ids), "a block id is out of range"
        assert not ids & set(self.idle), "an idle block has an owner"

        written: set[tuple[int, int]] = set()
        for life, start, count in self.flight.rows:
            for at in range(start, start + count):
                slot = (life.table[at // size], at % size)
                assert slot not in written, "two sequences write to one slot"
                written.add(slot)
                for other in self.running:
                    read = other.computed > at and other.table[at // size] == slot[0] and other is not life
                    assert not read or other in self.flight.admitted, (
                        f"{life.name} writes to a block that {other.name} reads"
                    )
                self.slots[slot] = life.key(at + 1)
        for life, start, count in self.flight.rows:
            for at in range(start + count):
                assert self.slots[life.table[at // size], at % size] == life.key(at + 1), "reads a wrong token"

    def move(self, plan: Plan, seen: dict[int, int]) -> None:
        """Moves blocks to host memory, then other blocks back."""
        assert self.flight is not None
        flight, size = self.flight, self.config.block_size
        assert [old for old, _ in plan.swap_out] == [old for old, _ in flight.out], "other blocks move out"
        place = dict(zip([mine for _, mine in flight.out], [real for _, real in plan.swap_out], strict=True))
        assert len(set(place.values())) == len(place), "two blocks move to one place"
        assert all(1 <= block <= self.config.host_blocks for block in place.values()), "a host block is out of range"
        taken = {block for life in self.waiting for block in life.away if block > 0}
        assert not taken & set(place.values()), "a host block is overwritten"
        for life in self.waiting:
            life.away = [place.get(block, block) for block in life.away]
        for device, host in plan.swap_out:
            for offset in range(size):
                self.host_slots[host, offset] = self.slots.get((device, offset), "nothing")
        assert list(plan.swap_in) == [(host, seen[device]) for host, device in flight.back], "other blocks come back"
        for host, device in plan.swap_in:
            for offset in range(size):
                self.slots[device, offset] = self.host_slots[host, offset]

    def ready(self) -> tuple[list[list[ModelSequence]], list[ModelSequence]]:
        """Groups of beams that all have computed their tokens after this step, and the first beams of those at their
        limit."""
        assert self.flight is not None
        ends = {id(life): start + count for life, start, count in self.flight.rows}
        done = [life for life in self.running if life.request.beams]
        done = [life for life in done if ends.get(id(life), life.computed) == life.known]
        groups = [[life for life in done if life.group == group] for group in sorted({life.group for life in done})]
        whole = [g for g in groups if len(g) == sum(life.group == g[0].group for life in self.alive())]
        whole = [sorted(group, key=lambda life: life.arrival) for group in whole]
        full = [group for group in whole if group[0].known + 1 >= self.limit(group[0].request)]
        return [group for group in whole if group not in full], [group[0] for group in full]

    def advance(self, choices: Mapping[str, Choice]) -> list[Event]:
        events: list[Event] = []
        for name, (parents, tokens) in choices.items():
            first = next(life for life in self.running if life.name == name)
            old = sorted((life for life in self.running if life.group == first.group), key=lambda life: life.arrival)
            by_name = {life.name: life for life in old}
            names = [*by_name, *first.request.forks]
            request = first.request._replace(forks=())
            self.running = [life for life in self.running if life not in old]
            new = []
            for k, (mine, parent, token) in enumerate(zip(names, parents, tokens, strict=True)):
                source = by_name[parent]
                life = ModelSequence(request._replace(request_id=mine), first.arrival + k, [*source.outputs, token])
                life.computed, life.hashed, life.group = source.computed, source.hashed, first.group
                life.table = list(source.table)
                new.append(life)
            self.running += new
            for life in old:
                if life.name not in parents:
                    cached = set(self.published.values()) - self.owned()
                    others = {b for o in old[old.index(life) + 1 :] if o.name not in parents for b in o.table}
                    self.idle += [block for block in reversed(life.table) if block in cached - others]
            events.append(Beamed(self.steps, tuple(names), parents, tokens))
        return events

    def commit(self, sampled: list[int], choices: Mapping[str, Choice]) -> list[Event]:
        assert self.flight is not None
        flight = self.flight
        events: list[Event] = [Preempted(self.steps, name, name in flight.swapped) for name in flight.preempted]
        events += [Resumed(self.steps, name) for name in flight.resumed]
        entered = zip(self.flight.admitted, self.flight.entered, self.flight.cached, strict=True)
        events += [
            Admitted(self.steps, life.name, known, cached)
            for life, known, cached in entered
            if life.name not in flight.resumed
        ]
        new: list[tuple[str, int]] = []
        ends: list[Event] = []
        forked: list[Event] = []
        gone: list[ModelSequence] = []
        for (life, start, count), token in zip(self.flight.rows, sampled, strict=True):
            if life not in self.running:
                continue  # cancelled meanwhile
            life.computed = start + count
            self.publish(life, start)
            if life.computed < life.known or life.request.beams:
                continue
            if life.request.forks:
                forked.append(Forked(self.steps, tuple(self.fork(life))))
            life.outputs.append(token)
            new.append((life.name, token))
            reason = self.why_ended(life)
            if reason is not None:
                gone.append(life)
                ends.append(Finished(self.steps, life.name, reason, len(life.outputs)))
        for life in gone:
            self.running.remove(life)
            self.release(life)
        beamed = self.advance(choices)
        events += forked
        if new:
            names, tokens = zip(*new, strict=True)
            events.append(Sampled(self.steps, names, tokens))
        events += beamed
        self.steps += 1
        self.flight = None
        return events + ends

    def fork(self, life: ModelSequence) -> list[str]:
        """Starts the branches of a sequence whose prompt is computed: they have all of it but the last token."""
        forks, request = life.request.forks, life.request._replace(forks=())
        life.request, computed = request, request.prompt_len - 1
        for number, name in enumerate(forks, 1):
            fork = ModelSequence(request._replace(request_id=name), life.arrival + number, group=life.group)
            fork.computed, fork.hashed = computed, life.hashed
            fork.table = life.table[: math.ceil(computed / self.config.block_size)]
            self.running.append(fork)
        return list(forks)

    def publish(self, life: ModelSequence, start: int) -> None:
        """Makes the blocks that a sequence filled in this step findable, unless others have the same content."""
        size = self.config.block_size
        full = life.computed // size
        if self.publishes(life) and full > start // size:
            life.hashed = max(life.hashed, full)
        for j in range(start // size, min(full, life.hashed)):
            self.published.setdefault(life.key((j + 1) * size), life.table[j])

    def forget(self) -> None:
        self.published, self.idle = {}, []

    def restart(self) -> None:
        """Running sequences are computed again, and the cache is reset."""
        for life in list(self.running):
            self.running.remove(life)
            self.waiting.append(life)
            life.table, life.computed = [], 0
        self.forget()

    def why_ended(self, life: ModelSequence) -> FinishReason | None:
        request = life.request
        if life.outputs[-1] in request.stop_token_ids and len(life.outputs) >= request.min_tokens:
            return "stop"
        if len(life.outputs) == request.max_tokens or life.known == self.config.max_model_len:
            return "length"
        return None

    def cancel(self, name: str, reason: FinishReason) -> list[Event]:
        lives = sorted(self.waiting, key=lambda life: life.arrival) + self.running
        for life in lives:
            if name in life.request.forks and not life.request.beams:
                left = tuple(fork for fork in life.request.forks if fork != name)
                life.request = life.request._replace(forks=left)
                return [Finished(self.steps, name, reason, 0)]
            if name in (life.name, *life.request.forks):
                group = [other for other in lives if other.group == life.group] if life.request.beams else [life]
                for other in group:
                    (self.waiting if other in self.waiting else self.running).remove(other)
                    self.release(other)
                return [
                    Finished(self.steps, each, reason, len(other.outputs))
                    for other in group
                    for each in (other.name, *other.request.forks)
                ]
        return []

    def compare(self, state: SchedulerState) -> None:
        """Compares the real state with the model, block by block."""
        by_arrival = sorted(self.waiting, key=lambda life: life.arrival)
        assert [seq.arrival for seq in state.waiting] == [life.arrival for life in by_arrival], "queue out of order"
        away = [(seq.length, seq.computed, list(seq.blocks)) for seq in state.waiting]
        assert away == [(life.known, life.computed, life.away) for life in by_arrival]
        real = [(seq.arrival, seq.length, seq.computed, list(seq.blocks)) for seq in running(state)]
        assert real == [(life.arrival, life.known, life.computed, life.table) for life in self.running]
        assert [seq.limit for seq in running(state)] == [self.limit(life.request) for life in self.running]
        owners = Counter(block for life in self.running for block in life.table)
        assert dict(state.pool.owners) == dict(owners), "owner counts differ from the tables"
        assert dict(state.pool.contents) == self.published, "something else is published"
        assert list(blocks.idle_ids(state.pool)) == self.idle, "idle blocks in another order"
        assert sorted(blocks.free_ids(state.pool)) == sorted(set(range(1, self.config.num_blocks + 1)) - set(owners))
        assert (state.step, state.arrivals) == (self.steps, self.arrivals)
