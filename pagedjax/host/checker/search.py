"""Breadth first through the states of a world. The graph that this leaves has what the properties
read: who is unfinished in each state, and what each event does to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from pagedjax.host import scheduler
from pagedjax.host.checker import folding
from pagedjax.host.checker.moves import (
    HORIZON,
    Effect,
    Happening,
    Move,
    Node,
    moves,
    shape_of,
    start,
    unfinished,
)
from pagedjax.host.checker.worlds import World

Clock = Callable[[], float]
NOBODY = -1  # in place of a rank: the request is unfinished no more


class Label(NamedTuple):
    """An event and its effect, which many edges have in common.

    ranks: of each rank before the event, the rank after it, or NOBODY. Arrivals come behind.
    """

    happening: Happening
    effect: Effect
    ranks: tuple[int, ...]


class Fault(NamedTuple):
    """Something that a single event shows: the property, the state before it, and the event; None:
    the state itself shows it.
    """

    kind: str
    node: int
    happening: Happening | None
    sentence: str


class Graph:
    """States by number, in the order in which they were reached; 0 has no request.

    numbers: of each state, by its key (folding.py).
    parents: of each state, the one from which it was first reached, and the label of the edge.
    depths: events on the shortest run from state 0.
    letters: the shapes of the unfinished requests by rank.
    timeless: of each state, whether no time can pass.
    edges: of each state, (state, label) of what can happen next. A state that was not expanded has
        none.
    """

    def __init__(self) -> None:
        self.numbers: dict[folding.Key, int] = {}
        self.parents: list[tuple[int, int]] = []
        self.depths: list[int] = []
        self.letters: list[str] = []
        self.timeless: list[bool] = []
        self.edges: list[list[tuple[int, int]]] = []
        self.labels: list[Label] = []
        self.exhausted = False
        self.fault: Fault | None = None

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_edges(self) -> int:
        return sum(map(len, self.edges))

    def stem(self, node: int) -> list[Happening]:
        """A shortest run from state 0 to a state."""
        events: list[Happening] = []
        while node:
            node, label = self.parents[node]
            events.append(self.labels[label].happening)
        return events[::-1]


def explore(
    world: World,
    *,
    urgent_first: bool = False,
    until: float | None = None,
    clock: Clock = time.monotonic,
) -> Graph:
    """The graph of a world, or its part up to the first fault or the time limit.

    Args:
        urgent_first: an inversion of priorities is a fault.
        until: a time of `clock` at which the search ends.
    """
    graph = Graph()
    numbers = graph.numbers
    label_numbers: dict[tuple[Happening, Effect, int], int] = {}
    frontier: list[Node] = []

    def number_of(node: Node, parent: tuple[int, int], depth: int) -> int:
        """The number of a state, which is added to the frontier if it is new."""
        key = folding.key_of(world, node)
        number = numbers.setdefault(key, len(numbers))
        if number == len(graph):
            graph.parents.append(parent)
            graph.depths.append(depth)
            graph.letters.append("".join(map(shape_of, unfinished(node.state))))
            graph.timeless.append(not world.timed or node.now >= HORIZON)
            graph.edges.append([])
            frontier.append(node)
            problem = _broken_invariant(node)
            if problem:
                graph.fault = Fault("invariant", number, None, problem)
        return number

    number_of(start(world), (0, 0), 0)
    expanded = 0
    while graph.fault is None and frontier:
        nodes = frontier
        frontier = []
        for node in nodes:
            if until is not None and clock() >= until:
                return graph
            _expand(world, graph, expanded, node, label_numbers, number_of, urgent_first)
            if graph.fault is not None:
                return graph
            expanded += 1
    graph.exhausted = graph.fault is None
    return graph


def _expand(world, graph, number, node, label_numbers, number_of, urgent_first) -> None:
    """Adds the edges of a state to the graph, and the states that they lead to."""
    num_ranks = len(graph.letters[number])
    depth = graph.depths[number] + 1
    edges = graph.edges[number]
    try:
        for move in moves(world, node):
            label = _label_number(graph, label_numbers, move, num_ranks)
            target = number_of(move.node, (number, label), depth)
            edges.append((target, label))
            if graph.fault is None:
                graph.fault = _fault_of(graph, move, number, target, urgent_first)
            if graph.fault is not None:
                return
    except Exception as error:  # of a function of the policy
        sentence = f"the policy raises {type(error).__name__}: {error}"
        graph.fault = Fault("error", number, None, sentence)


def _label_number(graph: Graph, label_numbers, move: Move, num_ranks: int) -> int:
    identity = (move.happening, move.effect, num_ranks)
    number = label_numbers.setdefault(identity, len(label_numbers))
    if number == len(graph.labels):
        ended = move.effect.ended
        ranks: list[int] = []
        for rank in range(num_ranks):
            ranks.append(NOBODY if rank in ended else rank - sum(end < rank for end in ended))
        graph.labels.append(Label(move.happening, move.effect, tuple(ranks)))
    return number


def _fault_of(
    graph: Graph, move: Move, number: int, target: int, urgent_first: bool
) -> Fault | None:
    """The fault that an edge shows by itself."""
    effect = move.effect
    if urgent_first and effect.inversion is not None:
        sentence = "a later and less urgent request is preferred to one that waits"
        return Fault("priority inversion", number, move.happening, sentence)
    endless = target == number and graph.timeless[number]
    if endless and graph.letters[number] and effect.num_rows == 0:
        sentence = "a step computes nothing and changes nothing, while requests are unfinished"
        return Fault("deadlock", number, move.happening, sentence)
    return None


def _broken_invariant(node: Node) -> str:
    """The sentence of an invariant of the scheduler that does not hold; "" if all hold."""
    try:
        scheduler.check(node.state)
    except AssertionError as error:
        return str(error)
    return ""
