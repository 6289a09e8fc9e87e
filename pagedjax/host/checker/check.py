"""The check of a policy: every property in every world, or the first counterexample."""

from __future__ import annotations

import time
from typing import NamedTuple

from pagedjax.host.checker import folding
from pagedjax.host.checker.counterexample import Counterexample, confirm, request_id_at, run
from pagedjax.host.checker.cycles import (
    Places,
    Run,
    arrivals_in,
    longest_runs,
    shortest_lasso,
    shortest_run_above,
)
from pagedjax.host.checker.moves import Effect
from pagedjax.host.checker.search import Clock, Fault, Graph, explore
from pagedjax.host.checker.worlds import World, worlds
from pagedjax.host.policies import Policy, called
from pagedjax.host.types import Request

REQUESTS = 3
BLOCKS = 6
# how often computed tokens of a request may be thrown away; of a policy that evicts, more often
DISCARDS = 1
DISCARDS_OF_EVICTING = 8
EXACT_GAP = 4  # the largest distance of arrivals that every world counts exactly


class Coverage(NamedTuple):
    """What was covered of a world.

    states, events: how many were reached and tried. depth: the events of the longest of the
        shortest runs to a state.
    exhausted: whether these are all.
    overtaken: the most later requests that entered before one; None if the search ended at a
        counterexample.
    discarded: how often, at most, the computed tokens of one request were thrown away; or None.
    """

    world: World
    states: int
    events: int
    depth: int
    exhausted: bool
    overtaken: int | None
    discarded: int | None
    seconds: float


class Report(NamedTuple):
    """The result of `check`. Without a counterexample the properties hold for what was covered."""

    policy: Policy
    coverage: tuple[Coverage, ...]
    counterexample: Counterexample | None
    discards: int  # the limit that was checked
    seconds: float

    @property
    def exhausted(self) -> bool:
        """Whether all states of all worlds were covered."""
        return all(part.exhausted for part in self.coverage)


def check(
    policy: Policy,
    *,
    requests: int = REQUESTS,
    num_blocks: int = BLOCKS,
    discards: int | None = None,
    seconds: float | None = None,
    clock: Clock = time.monotonic,
) -> Report:
    """Searches the worlds of a policy for the shortest run that breaks a property, or what the
    policy promises.

    Args:
        requests: the most unfinished requests at one time.
        discards: how often the computed tokens of one request may be thrown away while a later
            request that is not more urgent runs on; None: DISCARDS, or DISCARDS_OF_EVICTING.
        seconds: a limit. What was covered until then is in the report.

    Raises:
        ValueError: a number is not allowed, or the policy reads what the search leaves out.
    """
    if discards is None:
        discards = DISCARDS if policy.evict is None else DISCARDS_OF_EVICTING
    started = clock()
    coverage: list[Coverage] = []
    todo = [scaled for world in worlds(policy, requests, num_blocks) for scaled in _scaled(world)]
    counterexample = None
    for number, world in enumerate(todo):
        deadline = None
        if seconds is not None:  # each world gets an equal part of what is left
            seconds_left = started + seconds - clock()
            deadline = clock() + seconds_left / (len(todo) - number)
        part, counterexample = _check_world(world, discards, deadline, clock)
        coverage.append(part)
        if counterexample is not None:
            break
    return Report(policy, tuple(coverage), counterexample, discards, clock() - started)


def _scaled(world: World) -> tuple[World, ...]:
    """The world with the distances of arrivals that its policy tells apart.

    If distances of more than EXACT_GAP matter, there would be too many states. Then others come and
    are cancelled between two requests, so that two distances are left: below the largest, and
    above. The world "queue" comes a second time, as "ageing": with all distances, two requests at a
    time, and no cancellation.
    """
    try:
        gap = folding.largest_gap(world)
    except Exception:  # the policy raises: the search will find where
        return (world,)
    if gap <= EXACT_GAP:
        return (world._replace(gap=gap),)
    scaled = world._replace(gap=gap, stride=-(-gap // 2))
    if world.name != "queue":
        return (scaled,)
    ageing = world._replace(name="ageing", requests=min(2, world.requests), gap=gap, cancels=False)
    return scaled, ageing


def _check_world(
    world: World, discards: int, until: float | None, clock: Clock
) -> tuple[Coverage, Counterexample | None]:
    started = clock()
    graph = explore(world, until=until, clock=clock)
    counterexample: Counterexample | None = None
    overtaken: int | None = None
    discarded: int | None = None
    if graph.fault is not None:
        counterexample = _fault_counterexample(world, graph, graph.fault)
    else:
        places = Places(graph)
        lasso = shortest_lasso(places)
        if lasso is not None:
            counterexample = _lasso_counterexample(world, lasso)
        else:
            most_overtaken = longest_runs(places, _overtaken)
            most_discarded = longest_runs(places, _discarded)
            overtaken = max(most_overtaken.values(), default=0)
            discarded = max(most_discarded.values(), default=0)
            counterexample = _limit_counterexample(
                world, graph, discards, most_overtaken, most_discarded
            )
    if counterexample is not None:
        confirm(counterexample)
    part = Coverage(
        world,
        states=len(graph),
        events=graph.num_edges,
        depth=max(graph.depths),
        exhausted=graph.exhausted,
        overtaken=overtaken,
        discarded=discarded,
        seconds=clock() - started,
    )
    return part, counterexample


def _overtaken(effect: Effect, rank: int) -> int:
    return effect.overtaken[rank] if effect.overtaken else 0


def _discarded(effect: Effect, rank: int) -> int:
    return int(rank in effect.discarded)


def _fault_counterexample(world: World, graph: Graph, fault: Fault) -> Counterexample:
    stem = graph.stem(fault.node)
    loop = ()
    if fault.kind == "deadlock" and fault.happening is not None:
        loop = (fault.happening,)
    elif fault.kind == "priority inversion" and fault.happening is not None:
        stem.append(fault.happening)
    return Counterexample(fault.kind, fault.sentence, world, tuple(stem), loop, rank=0)


def _lasso_counterexample(world: World, lasso: Run) -> Counterexample:
    name = request_id_at(world, lasso.stem, lasso.rank)
    moves = list(run(world, lasso.stem + lasso.loop))[len(lasso.stem) :]
    if arrivals_in(lasso.loop):
        kind = "starvation"
        sentence = f"{name} stays unfinished for ever, while later requests come and end"
    elif any(move.effect.num_rows for move in moves):
        kind = "livelock"
        sentence = f"{name} stays unfinished for ever, and steps compute the same again and again"
    else:
        kind = "deadlock"
        sentence = f"{name} stays unfinished for ever, and no step computes anything"
    return Counterexample(kind, sentence, world, lasso.stem, lasso.loop, lasso.rank)


def _limit_counterexample(
    world: World,
    graph: Graph,
    discards: int,
    overtaken: dict[str, int],
    discarded: dict[str, int],
) -> Counterexample | None:
    """The counterexample of a number that is above its limit; None if there is none."""
    if world.policy.bound is not None:
        bounds = {shape.request_id: _bound_of(shape, world) for shape in world.shapes}
        if any(overtaken[letter] > bounds[letter] for letter in overtaken):
            shortest = shortest_run_above(graph, _overtaken, bounds)
            assert shortest is not None, "the longest run is above the limit"
            name = request_id_at(world, shortest.stem[:-1], shortest.rank)
            limit = bounds[name[0]]
            sentence = (
                f"{limit + 1} later requests enter before {name}, and the policy states a bound of "
                f"{limit}"
            )
            return Counterexample("bound", sentence, world, shortest.stem, (), shortest.rank)
    if any(number > discards for number in discarded.values()):
        shortest = shortest_run_above(graph, _discarded, dict.fromkeys(discarded, discards))
        assert shortest is not None, "the longest run is above the limit"
        name = request_id_at(world, shortest.stem[:-1], shortest.rank)
        sentence = (
            f"the computed tokens of {name} are thrown away {discards + 1} times, while a later "
            "request that is not more urgent runs on"
        )
        return Counterexample("lost work", sentence, world, shortest.stem, (), shortest.rank)
    return None


def _bound_of(request: Request, world: World) -> int:
    """How many later requests the policy lets enter before a request.

    Raises:
        ValueError: its function returns something else than a whole number of at least 0.
    """
    bound = world.policy.bound
    if not callable(bound):
        assert bound is not None, "the policy states one"
        return bound
    number = called(world.policy, "bound", request, world.shapes)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(
            f"bound of the policy {world.policy.name!r} returned {number!r:.200} for a request; "
            "return a whole number of at least 0"
        )
    return number


def text(report: Report) -> str:
    """What was covered, and whether the properties hold, in lines."""
    rows = [["world", "states", "events", "depth", "overtaken", "discarded", "seconds"]]
    for part in report.coverage:
        cells = [part.world.name, f"{part.states:,}", f"{part.events:,}", str(part.depth)]
        numbers = (part.overtaken, part.discarded)
        cells += ["-" if number is None else str(number) for number in numbers]
        rows.append([*cells, f"{part.seconds:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            [
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
        )
        for row in rows
    ]
    world = report.coverage[0].world
    head = (
        f"{report.policy.name}: at most {world.requests} unfinished requests of {len(world.shapes)} "
        f"shapes, {world.config.num_blocks} blocks"
    )
    return "\n".join([head, *table, _verdict(report)])


def _verdict(report: Report) -> str:
    if report.counterexample is not None:
        return f"does not hold ({report.seconds:.1f} s)"
    properties = ["every request ends", "the invariants of the scheduler"]
    if report.policy.bound is not None:
        properties.append("the stated bound of later requests that enter before one")
    if report.policy.urgent_first:
        properties.append("no inversion of priorities")
    properties.append(f"work is lost at most {report.discards} times")
    sentence = f"holds: {'; '.join(properties)}"
    if report.exhausted:
        return f"{sentence}. All states were covered in {report.seconds:.1f} s"
    partly = [part.world.name for part in report.coverage if not part.exhausted]
    sentence += (
        f". Not exhausted: the time limit ended the search after {report.seconds:.1f} s, "
        f"in {', '.join(partly)}; it holds for what was covered"
    )
    init = report.policy.init
    if init is not None and not hasattr(init(), "folded"):
        sentence += (
            ". A memory with a number that grows for ever has no end of states: remember an order "
            "or a difference, or give the memory a method `folded()`"
        )
    return sentence
