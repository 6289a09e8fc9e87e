"""The reference model: a naive scheduler written from the rules alone. Mutable, slow, first come
first served.

The model stores the cache slot by slot: `slots[block, offset]` is the token that the device wrote
there last, with all tokens before it. So a sequence reads a wrong token if a shared block has other
content or a write goes past a block. Prompts of one family begin with the same tokens.
`ModelSequence.key` spells the tokens of a sequence; the hash of a block is the spelling of its
tokens and of all tokens before it.

The pool chooses the ids of new blocks. The model uses a negative number for each, takes the ids
from the real plan, and checks that no other sequence owns them. The model itself decides which
published blocks a sequence shares. It checks that the ids of a reserved piece are contiguous and
aligned, and decides by halving whether a piece is free.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

from pagedjax.host import blocks
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState, running
from pagedjax.host.types import (
    Admitted,
    Adopted,
    Beamed,
    Choice,
    Event,
    Finished,
    FinishReason,
    Forked,
    Plan,
    Preempted,
    Released,
    Request,
    Resumed,
    Sampled,
    Seq,
    Verified,
)

Slots = dict[int, dict[int, str]]  # block -> offset -> the token there, with all before it


@dataclass(eq=False)  # compared by identity: an id may be used again after its request ended
class ModelSequence:
    request: Request
    arrival: int
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    # its blocks; negative until the real scheduler has chosen the id
    table: list[int] = field(default_factory=list)
    hashed: int = 0  # blocks whose hash the scheduler has
    group: int | None = None  # arrival of the first branch, if there are several
    away: list[int] = field(default_factory=list)  # its blocks in host memory while it waits
    mixed: bool = False  # it has content of older weights, so nobody shares what it computes

    def __lt__(self, sequence: ModelSequence) -> bool:
        return self.arrival < sequence.arrival

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
        return not self.name.startswith("private") and not self.mixed

    def key(self, stop: int, drafts: Sequence[int] = ()) -> str:
        """Its first `stop` tokens, spelled out, or those and drafts. Its name says the family:
        r17.2 is of family 2.
        """
        prompt = ["f" + self.name.partition(".")[2]] * self.request.prompt_len
        return " ".join([*prompt, *map(str, self.outputs), *map(str, drafts)][:stop])


def power(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def free_pieces(free: set[int], start: int, size: int) -> list[int]:
    """Sizes of the free pieces of a buddy allocator among `size` ids from `start` on, found by
    halving.
    """
    if free.issuperset(range(start, start + size)):
        return [size]
    half = size // 2
    return free_pieces(free, start, half) + free_pieces(free, start + half, half) if half else []


@dataclass
class Step:
    """One step as the rules require it."""

    # sequence, first token to compute, how many
    rows: list[tuple[ModelSequence, int, int]] = field(default_factory=list)
    admitted: list[ModelSequence] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    # tokens of each admitted one that need not be computed
    cached: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)  # its known tokens when it was admitted
    copies: list[tuple[int, int]] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    out: list[tuple[int, int]] = field(default_factory=list)  # device block, host block
    back: list[tuple[int, int]] = field(default_factory=list)  # host block, device block
    drafts: dict[str, list[int]] = field(default_factory=dict)  # by name, the draft tokens of a row


class Model:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.size = config.block_size
        self.waiting: list[ModelSequence] = []  # in any order: the earliest arrival is next
        self.running: list[ModelSequence] = []  # decodes first, else in order of admission
        self.slots: Slots = defaultdict(dict)
        self.host_slots: Slots = defaultdict(dict)
        self.published: dict[str, int] = {}  # content -> the block
        self.idle: list[int] = []  # published blocks without an owner; the first is evicted next
        self.flight = Step()
        self.decodes: list[ModelSequence] = []  # those of the step
        # arrival -> cached tokens of a waiting sequence when admission began
        self.cached: dict[int, int] = {}
        self.arrivals = self.steps = self.unseen = 0
        self.pieces: list[int] = []  # sizes of the free pieces, if caches are reserved
        # how often a whole prompt did not fit, or free blocks made no piece
        self.uncut = self.fragmented = 0

    def alive(self) -> list[ModelSequence]:
        return self.waiting + self.running

    def limit(self, request: Request) -> int:
        return min(request.prompt_len + request.max_tokens, self.config.max_model_len)

    def accepts(self, request: Request) -> bool:
        c = self.config
        width = 1 + len(request.forks)
        beams = width if request.beams else 1
        limit = self.limit(request)
        silent = request.max_tokens == 0 and not request.forks
        names = [request.request_id, *request.forks, *self.names()]
        return (
            request.prompt_len > 0
            and (request.max_tokens > 0 or silent)
            and request.prompt_len + (not silent) <= c.max_model_len
            and beams * math.ceil(limit / self.size) <= c.num_blocks
            and width <= min(c.max_num_seqs, c.max_num_batched_tokens)
            and (c.chunked_prefill or beams * limit <= c.max_num_batched_tokens)
            and self.reservable(request)
            and len(set(names)) == len(names)
        )

    def reservable(self, request: Request) -> bool:
        if self.config.reservation == "none":
            return True
        alone = not (request.forks or request.beams or request.hashes)
        return alone and self.reserved(request) <= max(
            free_pieces(self.ids(), 1, power(self.config.num_blocks))
        )

    def reserved(self, request: Request) -> int:
        """Blocks of the piece that a request owns for its whole sequence."""
        longest = self.config.max_model_len
        prompt = request.prompt_len
        limit = self.limit(request)
        slots = {"oracle": limit, "pow2": prompt + power(limit - prompt), "max": longest}
        return power(math.ceil(min(slots[self.config.reservation], longest) / self.size))

    def ids(self) -> set[int]:
        return set(range(1, self.config.num_blocks + 1))

    def names(self) -> list[str]:
        return [
            name for sequence in self.alive() for name in (sequence.name, *sequence.request.forks)
        ]

    def hashes(self, name: str, prompt_len: int) -> tuple[str, ...]:
        """The hashes of the full blocks of a prompt."""
        sequence = ModelSequence(Request(name, prompt_len, 1), 0)
        number = prompt_len // self.size if sequence.shares() else 0
        return tuple(sequence.key((j + 1) * self.size) for j in range(number))

    def submit(self, request: Request) -> None:
        group = self.arrivals if request.forks or request.beams else None
        self.waiting.append(
            ModelSequence(request, self.arrivals, hashed=len(request.hashes), group=group)
        )
        self.arrivals += 1 + len(request.forks)

    def owned(self) -> set[int]:
        return {block for sequence in self.running for block in sequence.table}

    def free(self) -> int:
        return self.config.num_blocks - len(self.owned())

    def computed_blocks(self, sequence: ModelSequence) -> list[int]:
        return sequence.table[: math.ceil(sequence.computed / self.size)]

    def publishes(self, sequence: ModelSequence) -> bool:
        """Whether the engine gives hashes for blocks that a sequence fills."""
        return self.config.reservation == "none" and sequence.shares()

    def take(self, sequence: ModelSequence, number: int) -> None:
        """Gives a sequence new blocks. If no block is empty, an idle block loses its content."""
        for _ in range(number):
            if self.empty() == 0:
                self.evict()
            self.unseen -= 1
            sequence.table.append(self.unseen)

    def empty(self) -> int:
        return self.free() - len(self.idle)

    def evict(self) -> None:
        """The block that has been idle for longest loses its content."""
        lost = self.idle.pop(0)
        self.published = {key: block for key, block in self.published.items() if block != lost}

    def release(self, sequence: ModelSequence) -> None:
        """Takes the blocks of a sequence that no longer runs, the last one first."""
        cached = set(self.published.values()) - self.owned()
        self.idle += [block for block in reversed(sequence.table) if block in cached]
        sequence.table = []

    def stop(self, step: Step, sequences: list[ModelSequence]) -> None:
        """Preempts sequences: their content moves to host memory if all of it fits there; else it
        is lost.
        """
        step.preempted += [sequence.name for sequence in sequences]
        for sequence in sequences:
            sequence.computed = min(sequence.computed, sequence.known - 1)
        tables = [self.computed_blocks(sequence) for sequence in sequences]
        distinct = list(dict.fromkeys(block for table in tables for block in table))
        occupied = {block for sequence in self.waiting for block in sequence.away}
        fits = all(tables) and len(distinct) <= self.config.host_blocks - len(occupied)
        place = {block: self.unseen - i for i, block in enumerate(distinct, 1)}
        self.unseen -= len(distinct)
        for sequence, table in zip(sequences, tables, strict=True):
            self.running.remove(sequence)
            self.waiting.append(sequence)
            self.release(sequence)
            sequence.away = [place[block] for block in table] if fits else []
            sequence.computed = sequence.computed if fits else 0
        step.swapped += [sequence.name for sequence in sequences] if fits else []
        step.out += place.items() if fits else []

    def schedule(self, offered: Mapping[str, list[int]]) -> Step:
        """offered: by name, draft tokens."""
        step = Step()

        def starving() -> list[ModelSequence]:  # the next token lies past the last block
            return [
                sequence
                for sequence in self.running
                if sequence.computed >= len(sequence.table) * self.size
                and not sequence.awaits_siblings()
            ]

        while len(starving()) + len(self.copying()) > self.free():
            victim = max(self.running)
            group = [
                sequence
                for sequence in self.running
                if sequence.group is not None and sequence.group == victim.group
            ]
            together = 0 < len(group) < len(self.running)
            self.stop(step, sorted(group) if together else [victim])
        copying = self.copying()
        for sequence in starving() + copying:
            self.take(sequence, 1)
        for sequence in copying:
            new = sequence.table.pop()
            at = sequence.computed // self.size
            step.copies.append((sequence.table[at], new))
            sequence.table[at] = new
        for old, _ in step.copies:
            if old not in self.owned() and old not in self.idle:
                assert old in self.published.values(), (
                    "a block was copied although no other sequence needs it"
                )
                self.idle.append(old)
        self.compose_by_kind(step)
        for sequence in [row[0] for row in step.rows if row[0] in self.decodes]:
            self.draft(step, sequence, offered.get(sequence.name, []))
        while self.idle and self.empty() < self.config.empty_blocks:
            self.evict()
        self.flight = step
        return step

    def compose_by_kind(self, step: Step) -> None:
        """Which sequences have their turn, by the mode of the scheduler."""
        ready = [sequence for sequence in self.running if sequence.awaits_siblings()]
        decodes = [sequence for sequence in self.running if sequence.known - sequence.computed == 1]
        decoding = [*decodes, *ready]
        prompts = [sequence for sequence in self.running if sequence not in decoding]
        self.decodes = decodes
        admits = not step.preempted
        if self.config.mixed_steps:
            self.compose(step, decodes + prompts, ready, admits=admits)
        elif self.config.chunked_prefill and self.steps % 2 and decodes:  # alternating steps
            self.compose(step, decodes, prompts + ready, admits=False)
        else:
            self.compose(step, prompts, decoding, admits=admits)
            if not step.rows:
                self.compose(step, decodes, prompts + ready, admits=False)

    def draft(self, step: Step, sequence: ModelSequence, drafts: list[int]) -> None:
        """Gives a decode as many drafts as fit, one after the other."""
        num_drafts = 0
        request = sequence.request
        tokens = sum(count for *_, count in step.rows)
        max_drafts = min(
            0 if request.beams or request.forks else len(drafts),
            self.limit(request) - sequence.known - 1,
            self.config.max_num_batched_tokens - tokens,
        )
        while num_drafts < max_drafts:
            if sequence.known + num_drafts + 1 > len(sequence.table) * self.size:
                if self.free() == 0:
                    break
                self.take(sequence, 1)
            num_drafts += 1
        if num_drafts:
            step.rows = [
                (s, start, count + num_drafts * (s is sequence)) for s, start, count in step.rows
            ]
            step.drafts[sequence.name] = drafts[:num_drafts]

    def compose(
        self,
        step: Step,
        turn: list[ModelSequence],
        resting: list[ModelSequence],
        *,
        admits: bool,
    ) -> None:
        """Gives tokens to the sequences of this kind of step, then admits. The resting ones keep
        their blocks and rows.
        """
        c = self.config
        places = min(c.max_num_seqs, c.max_num_batched_tokens) - sum(
            sequence.width for sequence in self.running
        )
        self.budget = c.max_num_batched_tokens
        for sequence in turn:
            count = min(sequence.known - sequence.computed, self.budget)
            self.budget -= count
            if count > 0:
                step.rows.append((sequence, sequence.computed, count))
        self.running = turn + resting
        self.moved: dict[int, int] = {}
        if c.reservation != "none":
            self.pieces = free_pieces(self.ids() - self.owned(), 1, power(c.num_blocks))
        self.cached = {
            sequence.arrival: sequence.computed if sequence.away else self.cached_tokens(sequence)
            for sequence in self.waiting
        }
        while self.waiting and self.budget > 0 and admits:
            first = min(self.waiting)
            unit = [first]
            if first.request.beams and not first.request.forks:
                unit = sorted(beam for beam in self.waiting if beam.group == first.group)
            width = sum(sequence.width for sequence in unit)
            if width > places or not self.all_enter(step, unit):
                break
            places -= width
        self.running = [sequence for sequence in self.running if sequence not in resting] + resting

    def all_enter(self, step: Step, unit: list[ModelSequence]) -> bool:
        """Admits all sequences of a group, or none if one of them does not fit."""
        if len(unit) > 1:
            trial, trial_step, trial_unit = deepcopy((self, step, unit))
            if not all(trial.enters(trial_step, sequence) for sequence in trial_unit):
                return False
        return all(self.enters(step, sequence) for sequence in unit)

    def enters(self, step: Step, sequence: ModelSequence) -> bool:
        size = self.size
        num_full = sequence.computed // size
        already_back = [
            self.moved[block] for block in sequence.away[:num_full] if block in self.moved
        ]
        shared = (
            already_back
            if sequence.away
            else self.shared_blocks(
                sequence, [row for row in step.rows if row[0] not in self.decodes]
            )
        )
        reserves = self.config.reservation != "none"
        need = (
            self.reserved(sequence.request)
            if reserves
            else math.ceil(sequence.known / size) - len(shared)
        )
        if need > self.free() - len(set(shared) & set(self.idle)):
            return False
        computed = sequence.computed if sequence.away else len(shared) * size
        if not self.config.chunked_prefill and sequence.known - computed > self.budget:
            self.uncut += 1
            return False
        if reserves and not self.split(need):
            self.fragmented += 1
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.idle = [block for block in self.idle if block not in shared]
        sequence.table = [*shared]
        away = sequence.away
        self.take(sequence, need)
        if away:
            fresh = iter(sequence.table[len(shared) :])
            sequence.table = [
                self.moved[b] if i < num_full and b in self.moved else next(fresh)
                for i, b in enumerate(away)
            ]
            step.back += [
                (b, t) for b, t in zip(away, sequence.table, strict=True) if t not in shared
            ]
            self.moved |= dict(zip(away[:num_full], sequence.table, strict=False))
            sequence.table += fresh
            sequence.away = []
            step.resumed.append(sequence.name)
        else:
            sequence.computed = len(shared) * size
        count = min(sequence.known - sequence.computed, self.budget)
        self.budget -= count
        if count > 0:  # beams enter together, with or without a token for each
            step.rows.append((sequence, sequence.computed, count))
        step.admitted.append(sequence)
        step.cached.append(sequence.computed)
        step.entered.append(sequence.known)
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
        size = self.size
        branches = []
        owners = Counter(block for sequence in self.running for block in sequence.table)
        for sequence in self.running:
            if (
                sequence.group is None
                or sequence.computed // size >= len(sequence.table)
                or sequence.awaits_siblings()
            ):
                continue
            block = sequence.table[sequence.computed // size]
            if owners[block] > 1 or block in self.published.values():
                branches.append(sequence)
                owners[block] -= 1
        return branches

    def cached_tokens(self, sequence: ModelSequence) -> int:
        """The number of tokens at the beginning of a sequence, without its last one, whose blocks
        are published.
        """
        return len(self.shared_blocks(sequence, [])) * self.size

    def shared_blocks(
        self, sequence: ModelSequence, chunks: list[tuple[ModelSequence, int, int]]
    ) -> list[int]:
        """Blocks that contain the beginning of a sequence without its last token, now or after this
        step's writes.
        """
        size = self.size
        prefix = []
        for j in range(min(sequence.hashed, (sequence.known - 1) // size)):
            key = sequence.key((j + 1) * size)
            # a chunk may begin within the block and complete it in this step
            coming = [
                writer.table[j]
                for writer, start, count in chunks
                if start < (j + 1) * size <= start + count and j < writer.hashed
                if writer.key((j + 1) * size) == key
            ]
            if key in self.published:
                prefix.append(self.published[key])
            elif coming:
                prefix.append(coming[0])
            else:
                break
        return prefix

    def filled_hashes(self, sampled: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """The hashes that the engine gives for blocks of generated tokens when the step is done."""
        size = self.size
        hashes = {}
        for (sequence, start, count), sample in zip(self.flight.rows, sampled, strict=True):
            drafts = self.flight.drafts.get(sequence.name, [])
            # drafts that were right
            accepted = self.until_the_end(sequence, sample)[:-1] if drafts else []
            full = (start + count - len(drafts) + len(accepted)) // size
            if self.publishes(sequence) and full > start // size and full > sequence.hashed:
                keys = tuple(
                    sequence.key((j + 1) * size, accepted) for j in range(sequence.hashed, full)
                )
                hashes[sequence.name] = keys
        return hashes

    def until_the_end(self, sequence: ModelSequence, sample: Any) -> list[int]:
        """The tokens of a sample up to the one that ends the sequence."""
        tokens = list(sample) if isinstance(sample, tuple) else [sample]
        before = list(sequence.outputs)
        for number, token in enumerate(tokens, 1):
            sequence.outputs.append(token)
            if self.why_ended(sequence) is not None:
                tokens = tokens[:number]
                break
        sequence.outputs = before
        return tokens

    def execute(self, plan: Plan, real: Sequence[Seq]) -> None:
        """Takes the block ids of the real sequences, then writes and reads the cache as the device
        does.
        """
        size = self.size
        flight = self.flight
        real_ids: dict[int, int] = {}
        for sequence, seq in zip(self.running, real, strict=True):
            for model_id, real_id in zip(sequence.table, seq.blocks, strict=True):
                assert real_ids.setdefault(model_id, real_id) == real_id, (
                    f"{sequence.name}: blocks that it owned or shares changed"
                )
                assert model_id < 0 or model_id == real_id, (
                    f"{sequence.name}: blocks that it owned or shares were lost or changed"
                )
            sequence.table = list(seq.blocks)
        for (sequence, start, count), seq in zip(flight.rows, plan.seqs, strict=True):
            assert start + count <= len(sequence.table) * size, (
                f"{sequence.name}: writes past its blocks"
            )
            assert sequence.table == list(seq.blocks), f"{sequence.name}: the plan has other blocks"
        for sequence in flight.admitted if self.config.reservation != "none" else ():
            first = sequence.table[0]
            number = len(sequence.table)
            assert sequence.table == list(range(first, first + number)), (
                f"{sequence.name}: its blocks are not in a row"
            )
            assert (first - 1) % number == 0, f"{sequence.name}: its piece is not aligned"
        self.move(plan, real_ids)
        copies = [(old, real_ids[new]) for old, new in flight.copies]
        assert copies == list(plan.copies), "other blocks are copied"
        for old, new in copies:
            self.slots[new] = dict(self.slots[old])
        ids = set(real_ids.values()) | self.owned()
        assert len(set(real_ids.values())) == len(real_ids), "a block was handed out twice"
        assert all(1 <= block <= self.config.num_blocks for block in ids), (
            "a block id is out of range"
        )
        assert not ids & set(self.idle), "an idle block has an owner"

        written: set[tuple[int, int]] = set()
        for sequence, start, count in flight.rows:
            drafts = flight.drafts.get(sequence.name, [])
            readers = set(self.running) - {sequence, *flight.admitted}
            for at in range(start, start + count):
                slot = (sequence.table[at // size], at % size)
                assert slot not in written, "two sequences write to one slot"
                written.add(slot)
                for reader in readers:
                    assert reader.computed <= at or reader.table[at // size] != slot[0], (
                        f"{sequence.name} writes to a block that {reader.name} reads"
                    )
                self.slots[slot[0]][slot[1]] = sequence.key(at + 1, drafts)
        for sequence, start, count in flight.rows:
            drafts = flight.drafts.get(sequence.name, [])
            for at in range(start + count):
                read = self.slots[sequence.table[at // size]].get(at % size)
                assert read == sequence.key(at + 1, drafts), "reads a wrong token"

    def move(self, plan: Plan, real_ids: dict[int, int]) -> None:
        """Moves blocks to host memory, then other blocks back."""
        flight = self.flight
        assert [old for old, _ in plan.swap_out] == [old for old, _ in flight.out], (
            "other blocks move out"
        )
        pairs = zip(flight.out, plan.swap_out, strict=True)
        place = {model_id: real_id for (_, model_id), (_, real_id) in pairs}
        assert len(set(place.values())) == len(place), "two blocks move to one place"
        assert all(1 <= block <= self.config.host_blocks for block in place.values()), (
            "a host block is out of range"
        )
        occupied = {block for sequence in self.waiting for block in sequence.away if block > 0}
        assert not occupied & set(place.values()), "a host block is overwritten"
        for sequence in self.waiting:
            sequence.away = [place.get(block, block) for block in sequence.away]
        for device, host in plan.swap_out:
            self.host_slots[host] = dict(self.slots[device])
        assert list(plan.swap_in) == [(host, real_ids[device]) for host, device in flight.back], (
            "other blocks come back"
        )
        for host, device in plan.swap_in:
            self.slots[device] = dict(self.host_slots[host])

    def ready(self) -> tuple[list[list[ModelSequence]], list[ModelSequence]]:
        """Groups of beams that all have computed their tokens after this step, and the first beams
        of those at their limit."""
        ends = {id(sequence): start + count for sequence, start, count in self.flight.rows}
        groups: dict[int | None, list[ModelSequence]] = {}
        for sequence in sorted(self.alive()):
            if sequence.request.beams:
                groups.setdefault(sequence.group, []).append(sequence)
        complete = [
            group
            for group in groups.values()
            if all(
                beam in self.running and ends.get(id(beam), beam.computed) == beam.known
                for beam in group
            )
        ]
        full = [group for group in complete if group[0].known + 1 >= self.limit(group[0].request)]
        return [group for group in complete if group not in full], [group[0] for group in full]

    def advance(self, choices: Mapping[str, Choice]) -> list[Event]:
        events: list[Event] = []
        for name, (parents, tokens) in choices.items():
            first = next(sequence for sequence in self.running if sequence.name == name)
            old = sorted(beam for beam in self.running if beam.group == first.group)
            by_name = {sequence.name: sequence for sequence in old}
            names = [*by_name, *first.request.forks]
            request = first.request._replace(forks=())
            self.running = [sequence for sequence in self.running if sequence not in old]
            new = []
            for k, (child, parent, token) in enumerate(zip(names, parents, tokens, strict=True)):
                source = by_name[parent]
                new.append(
                    ModelSequence(
                        request._replace(request_id=child),
                        first.arrival + k,
                        [*source.outputs, token],
                        source.computed,
                        list(source.table),
                        source.hashed,
                        first.group,
                    )
                )
            self.running += new
            dropped = [sequence for sequence in old if sequence.name not in parents]
            cached = set(self.published.values()) - self.owned()
            for number, sequence in enumerate(dropped):
                later = {block for beam in dropped[number + 1 :] for block in beam.table}
                free = cached - later
                self.idle += [block for block in reversed(sequence.table) if block in free]
            events.append(Beamed(self.steps, tuple(names), parents, tokens))
        return events

    def commit(self, sampled: Sequence[Any], choices: Mapping[str, Choice]) -> list[Event]:
        flight = self.flight
        events: list[Event] = [
            Preempted(self.steps, name, name in flight.swapped) for name in flight.preempted
        ]
        events += [Resumed(self.steps, name) for name in flight.resumed]
        entered = zip(flight.admitted, flight.entered, flight.cached, strict=True)
        events += [
            Admitted(self.steps, sequence.name, length, cached)
            for sequence, length, cached in entered
            if sequence.name not in flight.resumed
        ]
        new: list[tuple[str, int]] = []
        ends: list[Finished] = []
        forked: list[Event] = []
        verified: list[tuple[ModelSequence, int, int]] = []  # drafts, accepted ones
        for (sequence, start, count), token in zip(flight.rows, sampled, strict=True):
            if sequence not in self.running:
                continue  # cancelled meanwhile
            drafts = flight.drafts.get(sequence.name, [])
            if drafts:
                tokens = self.until_the_end(sequence, token)
                assert tokens[:-1] == drafts[: len(tokens) - 1], (
                    "the test samples other tokens than it drafted"
                )
                sequence.outputs += tokens[:-1]
                new += [(sequence.name, draft) for draft in tokens[:-1]]
                count = len(tokens)
                token = tokens[-1]
                verified.append((sequence, len(drafts), len(tokens) - 1))
            sequence.computed = start + count
            self.publish(sequence, start)
            if sequence.computed < sequence.known or sequence.request.beams:
                continue
            if sequence.request.forks:
                forked.append(Forked(self.steps, tuple(self.fork(sequence))))
            reason: FinishReason | None = "length"
            if sequence.request.max_tokens:  # else it samples nothing
                sequence.outputs.append(token)
                new.append((sequence.name, token))
                reason = self.why_ended(sequence)
            if reason is not None:
                ends.append(Finished(self.steps, sequence.name, reason, len(sequence.outputs)))
        ended = {end.request_id for end in ends}
        for sequence in [sequence for sequence in self.running if sequence.name in ended]:
            self.running.remove(sequence)
            self.release(sequence)
        for sequence, *_ in verified:
            if self.config.reservation == "none":
                sequence.table = self.computed_blocks(sequence)
        num_blocks = tuple(
            len(sequence.table) if sequence in self.running else 0 for sequence, *_ in verified
        )
        beamed = self.advance(choices)
        events += forked
        if new:
            names, tokens = zip(*new, strict=True)
            events.append(Sampled(self.steps, names, tokens))
        events += beamed
        if verified:
            names, drafted, right = zip(
                *((sequence.name, k, n) for sequence, k, n in verified), strict=True
            )
            events.append(Verified(self.steps, names, drafted, right, num_blocks))
        self.steps += 1
        return events + ends

    def fork(self, sequence: ModelSequence) -> list[str]:
        """Starts the branches of a sequence whose prompt is computed: they have all of it but the
        last token.
        """
        forks = sequence.request.forks
        request = sequence.request._replace(forks=())
        sequence.request = request
        computed = request.prompt_len - 1
        for number, name in enumerate(forks, 1):
            fork = ModelSequence(
                request._replace(request_id=name),
                sequence.arrival + number,
                computed=computed,
                hashed=sequence.hashed,
                group=sequence.group,
                mixed=sequence.mixed,
            )
            fork.table = sequence.table[: math.ceil(computed / self.size)]
            self.running.append(fork)
        return list(forks)

    def publish(self, sequence: ModelSequence, start: int) -> None:
        """Makes the blocks that a sequence filled in this step findable, unless others have the
        same content.
        """
        size = self.size
        full = sequence.computed // size
        if self.publishes(sequence) and full > start // size:
            sequence.hashed = max(sequence.hashed, full)
        for j in range(start // size, min(full, sequence.hashed)):
            self.published.setdefault(sequence.key((j + 1) * size), sequence.table[j])

    def forget(self) -> None:
        self.published = {}
        self.idle = []

    def restart(self) -> None:
        """Running sequences are computed again, and the cache is reset."""
        for sequence in list(self.running):
            self.running.remove(sequence)
            self.waiting.append(sequence)
            sequence.table = []
            sequence.computed = 0
        self.forget()

    def update(self, pending: str) -> None:
        """New weights: all content is of older ones."""
        if pending == "restart":
            self.restart()
            for sequence in self.waiting:
                sequence.computed = 0
                sequence.away = []
            return
        self.forget()
        for sequence in [*self.running, *self.waiting]:
            if sequence in self.running or sequence.away:
                sequence.hashed = 0
                sequence.mixed = True

    def why_ended(self, sequence: ModelSequence) -> FinishReason | None:
        request = sequence.request
        if (
            sequence.outputs[-1] in request.stop_token_ids
            and len(sequence.outputs) >= request.min_tokens
        ):
            return "stop"
        if (
            len(sequence.outputs) == request.max_tokens
            or sequence.known == self.config.max_model_len
        ):
            return "length"
        return None

    def cancel(self, name: str, reason: FinishReason) -> list[Event]:
        sequences = sorted(self.waiting) + self.running
        for sequence in sequences:
            if name in sequence.request.forks and not sequence.request.beams:
                remaining = tuple(fork for fork in sequence.request.forks if fork != name)
                sequence.request = sequence.request._replace(forks=remaining)
                return [Finished(self.steps, name, reason, 0)]
            if name in (sequence.name, *sequence.request.forks):
                group = (
                    [beam for beam in sequences if beam.group == sequence.group]
                    if sequence.request.beams
                    else [sequence]
                )
                for member in group:
                    (self.waiting if member in self.waiting else self.running).remove(member)
                    self.release(member)
                return [
                    Finished(self.steps, ended_name, reason, len(member.outputs))
                    for member in group
                    for ended_name in (member.name, *member.request.forks)
                ]
        return []

    def leave(self, name: str) -> ModelSequence | None:
        """Takes a sequence out, with its table; None if it cannot leave alone."""
        sequence = next((candidate for candidate in self.alive() if candidate.name == name), None)
        if (
            sequence is None
            or sequence.request.forks
            or sequence.request.beams
            or not sequence.request.max_tokens
        ):
            return None
        leaver = copy(sequence)
        leaver.table = self.computed_blocks(leaver)
        leaver.away = []
        leaver.computed = leaver.computed if sequence in self.running else 0
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.release(sequence)
        return leaver

    def enter(
        self,
        leaver: ModelSequence,
        released: Released,
        slots: Slots,
        adopted: Adopted,
    ) -> None:
        """Takes over a sequence that left another model, whose cache has `slots`."""
        size = self.size
        c = self.config
        sequence = ModelSequence(
            released.request, self.arrivals, list(leaver.outputs), 0, [], len(released.hashes)
        )
        sequence.mixed = leaver.mixed
        self.arrivals += 1
        keys = [
            sequence.key((j + 1) * size)
            for j in range(min(leaver.computed // size, sequence.hashed))
        ]
        shared = [self.published[key] for key in keys if key in self.published]
        new = math.ceil(sequence.known / size) - len(shared)
        rows = min(c.max_num_seqs, c.max_num_batched_tokens) - sum(
            active.width for active in self.running
        )
        free = self.free() - sum(block in self.idle for block in shared)
        if self.waiting or not rows or not leaver.computed or new > free or c.reservation != "none":
            assert adopted == Adopted(0, (), ()), "a sequence runs without room"
            self.waiting.append(sequence)
            return
        owned_before = self.owned()
        sequence.computed = leaver.computed
        sequence.table = list(shared)
        self.running.append(sequence)
        self.idle = [block for block in self.idle if block not in shared]
        self.take(sequence, new)
        assert adopted.computed == leaver.computed
        sequence.table = list(adopted.blocks)
        fresh = set(sequence.table) - set(shared)
        assert len(fresh) == new, "a block was handed out twice"
        assert not fresh & (owned_before | set(self.idle)), "a block was taken that others have"
        assert len(adopted.copies) == len(leaver.table) - len(shared), (
            "a block is copied whose content is here"
        )
        for source, target in adopted.copies:
            assert target in fresh, "a copy overwrites what others read"
            self.slots[target] = dict(slots[source])
        for at in range(sequence.computed):
            content = self.slots[sequence.table[at // size]].get(at % size)
            assert content == sequence.key(at + 1), "wrong content"
        for j, key in enumerate(keys):
            self.published.setdefault(key, sequence.table[j])

    def compare(self, state: SchedulerState) -> None:
        """Compares the real state with the model, block by block."""
        line = sorted(self.waiting)
        assert [
            (seq.arrival, seq.length, seq.computed, list(seq.blocks)) for seq in state.waiting
        ] == [
            (sequence.arrival, sequence.known, sequence.computed, sequence.away)
            for sequence in line
        ]
        assert [
            (seq.arrival, seq.length, seq.computed, list(seq.blocks), seq.limit)
            for seq in running(state)
        ] == [
            (
                sequence.arrival,
                sequence.known,
                sequence.computed,
                sequence.table,
                self.limit(sequence.request),
            )
            for sequence in self.running
        ]
        owners = Counter(block for sequence in self.running for block in sequence.table)
        assert dict(state.pool.owners) == dict(owners), "owner counts differ from the tables"
        assert dict(state.pool.contents) == self.published, "something else is published"
        assert list(blocks.idle_ids(state.pool)) == self.idle, "idle blocks in another order"
        assert sorted(blocks.free_ids(state.pool)) == sorted(self.ids() - set(owners))
        assert (state.step, state.arrivals) == (self.steps, self.arrivals)
