"""A run that breaks a property: as events, as text, and as a recording.

The search counts states that differ only in names as one state (folding.py). Here the events run
again from the beginning, on whole states, and the property must break again.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import NamedTuple

from pagedjax.host.checker.folding import key_of
from pagedjax.host.checker.moves import (
    HORIZON,
    PASSER,
    Happening,
    Move,
    Node,
    apply,
    start,
    unfinished,
)
from pagedjax.host.checker.worlds import World
from pagedjax.host.event_log import Cancel, Commit, Entry, Recorder, Schedule, Submit
from pagedjax.host.types import Finished, Plan

ROUNDS = 2  # how often a recording has the events that repeat for ever
# How often a loop runs to confirm it. A policy may decide by how far apart two requests arrived,
# and the search tries distances up to `folding.FURTHEST`. This is more.
CONFIRMED_ROUNDS = 300


class Counterexample(NamedTuple):
    """A run that breaks a property.

    kind: the property.
    sentence: what the run shows.
    stem: events from the state without requests.
    loop: events that can repeat for ever after the stem; () if the stem breaks the property.
    rank: of the request that it is about. It is the rank after the stem if there is a loop, and the
        rank before the last event of the stem if there is none.
    """

    kind: str
    sentence: str
    world: World
    stem: tuple[Happening, ...]
    loop: tuple[Happening, ...]
    rank: int

    @property
    def events(self) -> tuple[Happening, ...]:
        """All events of the recording."""
        return self.stem + self.loop * ROUNDS


class NotConfirmed(ValueError):
    """A run of the search that real states do not repeat: the policy reads what is left out."""


def run(world: World, events: tuple[Happening, ...]) -> Iterator[Move]:
    """The moves of events, one after the other, from the state without requests.

    Raises:
        LookupError: an event cannot happen where it stands.
    """
    node = start(world)
    for event in events:
        move = apply(world, node, event)
        yield move
        node = move.node


def confirm(counterexample: Counterexample) -> None:
    """Runs the events again, and a loop many times.

    Raises:
        NotConfirmed: they do not happen, or the request of a loop does not stay unfinished.
    """
    world = counterexample.world
    node = start(world)
    try:
        for move in run(world, counterexample.stem):
            node = move.node
        if not counterexample.loop:
            return
        request_id = unfinished(node.state)[counterexample.rank].request_id
        first_key = key_of(world, node)
        for _ in range(CONFIRMED_ROUNDS):
            for event in counterexample.loop:
                node = apply(world, node, event).node
            if world.timed:  # the time of the search stood still
                node = node._replace(now=node.now + 1)
    except LookupError as error:
        raise _not_confirmed(world) from error
    repeats = world.timed or key_of(world, node) == first_key
    if request_id not in node.state.ids or not repeats:
        raise _not_confirmed(world)


def _not_confirmed(world: World) -> NotConfirmed:
    if world.timed:
        return NotConfirmed(
            f"the policy {world.policy.name!r} decides differently after {HORIZON} seconds, and no "
            "time is tried after them; check it with smaller times, as parameters of the policy"
        )
    remedy = "let it depend on none of these"
    if world.policy.init is not None:
        remedy += (
            ", let its memory name requests by their ids, and let `observe` make the same memory "
            "of events in one call and in several calls (an event at a time)"
        )
    return NotConfirmed(
        f"the policy {world.policy.name!r} decides differently in two states that are equal up to "
        f"the names of blocks, steps and requests; {remedy}"
    )


def record(
    counterexample: Counterexample, path: str | PathLike[str], own_policy: str | None = None
) -> None:
    """Writes the run as a recording, which `pagedjax replay` verifies and `pagedjax view` shows.

    Args:
        own_policy: how a policy of a user's own was named.

    Raises:
        ValueError: the file cannot be written.
    """
    world = counterexample.world
    recorder = Recorder(path, world.config, world.policy.name, own_policy=own_policy)
    try:
        for move in run(world, counterexample.events):
            for entry in move.entries:
                recorder.write(entry)
    finally:
        recorder.close()


def text(counterexample: Counterexample) -> str:
    """The run in lines: what happens, and what repeats."""
    world = counterexample.world
    config = world.config
    lines = [
        f"{counterexample.kind}: {counterexample.sentence}",
        f"  in the world {world.name}: {config.num_blocks} blocks of {config.block_size} tokens, "
        f"{config.max_num_batched_tokens} tokens a step, at most {config.max_num_seqs} run",
    ]
    events = counterexample.stem + counterexample.loop
    for number, move in enumerate(run(world, events), 1):
        if counterexample.loop and number == len(counterexample.stem) + 1:
            lines.append("  from here on, this repeats for ever:")
        sentences = list(_sentences(move.entries)) or ["time passes"]
        lines.append(f"  {number:>3}  {'; '.join(sentences)}")
    return "\n".join(lines)


def request_id_at(world: World, stem: tuple[Happening, ...], rank: int) -> str:
    """The id of the request that has this rank after a stem."""
    node: Node = start(world)
    for move in run(world, stem):
        node = move.node
    return unfinished(node.state)[rank].request_id


def _sentences(entries: tuple[Entry, ...]) -> Iterator[str]:
    submits = [entry for entry in entries if isinstance(entry, Submit)]
    passers = len(submits) - 1  # all but the last one, which stays
    if passers > 0:
        noun = "request arrives and is" if passers == 1 else "requests arrive and are"
        yield f"{passers} {noun} cancelled"
    for entry in entries:
        match entry:
            case Submit(request) if not request.request_id.startswith(PASSER):
                yield (
                    f"{request.request_id} arrives: prompt {request.prompt_len}, "
                    f"max_tokens {request.max_tokens}, priority {request.priority}, "
                    f"user {request.user}"
                )
            case Cancel(request_id) if not request_id.startswith(PASSER):
                yield f"{request_id} is cancelled"
            case Schedule(plan):
                yield f"step {plan.step}: {_plan(plan)}"
            case Commit():
                for event in entry.events:
                    if isinstance(event, Finished):
                        yield f"{event.request_id} ends ({event.reason})"


def _plan(plan: Plan) -> str:
    """What a step does, in words."""
    parts: list[str] = []
    for name in plan.preempted:
        content = "moves to the host" if name in plan.swapped else "is thrown away"
        parts.append(f"{name} is preempted, and its content {content}")
    if plan.admitted:
        parts.append(f"{', '.join(plan.admitted)} enters")
    for seq, count in zip(plan.seqs, plan.counts, strict=True):
        noun = "token" if count == 1 else "tokens"
        parts.append(f"{seq.request_id} computes {count} {noun}")
    if not plan.seqs:
        parts.append("nothing is computed")
    if plan.num_waiting:
        parts.append(f"{plan.num_waiting} wait" + ("s" if plan.num_waiting == 1 else ""))
    return ", ".join(parts)
