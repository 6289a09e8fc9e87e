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
from pagedjax.host.policies import Policy

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
    until: float | None = None,
    clock: Clock = time.monotonic,
) -> Graph:
    """The graph of a world, or its part up to the first fault or the time limit.

    Args:
        until: a time of `clock` at which the search ends.
    """
    graph = Graph()
    search = _Search(world, graph)
    search.number_of(start(world), (0, 0), 0)
    expanded = 0
    while search.frontier:
        nodes = search.frontier
        search.frontier = []
        for node in nodes:
            if graph.fault is not None or (until is not None and clock() >= until):
                return graph
            search.expand(expanded, node)
            expanded += 1
    graph.exhausted = graph.fault is None
    return graph


class _Search:
    """What `explore` adds to: the graph, and the states that were not expanded yet."""

    def __init__(self, world: World, graph: Graph) -> None:
        self.world = world
        self.graph = graph
        self.frontier: list[Node] = []
        self.label_numbers: dict[tuple[Happening, Effect, int], int] = {}

    def number_of(self, node: Node, parent: tuple[int, int], depth: int) -> int:
        """The number of a state, which is added to the frontier if it is new."""
        graph = self.graph
        key = folding.key_of(self.world, node)
        number = graph.numbers.setdefault(key, len(graph))
        if number < len(graph):
            return number
        graph.parents.append(parent)
        graph.depths.append(depth)
        graph.letters.append("".join(map(shape_of, unfinished(node.state))))
        graph.timeless.append(not self.world.timed or node.now >= HORIZON)
        graph.edges.append([])
        self.frontier.append(node)
        problem = _broken_invariant(node)
        if problem:
            graph.fault = Fault("invariant", number, None, problem)
        return number

    def expand(self, number: int, node: Node) -> None:
        """Adds the edges of a state to the graph, and the states that they lead to."""
        graph = self.graph
        num_ranks = len(graph.letters[number])
        depth = graph.depths[number] + 1
        edges = graph.edges[number]
        try:
            for move in moves(self.world, node):
                label = self.label_number(move, num_ranks)
                target = self.number_of(move.node, (number, label), depth)
                edges.append((target, label))
                if graph.fault is None:
                    graph.fault = _fault_of(graph, move, number, target, self.world.policy)
                if graph.fault is not None:
                    return
        except Exception as error:  # of a function of the policy
            sentence = f"the policy raises {type(error).__name__}: {error}"
            graph.fault = Fault("error", number, None, sentence)

    def label_number(self, move: Move, num_ranks: int) -> int:
        """The number of the label of a move, which is added to the graph if it is new."""
        labels = self.graph.labels
        identity = (move.happening, move.effect, num_ranks)
        number = self.label_numbers.setdefault(identity, len(labels))
        if number == len(labels):
            ended = move.effect.ended
            ranks = [
                NOBODY if rank in ended else rank - sum(end < rank for end in ended)
                for rank in range(num_ranks)
            ]
            labels.append(Label(move.happening, move.effect, tuple(ranks)))
        return number


def _fault_of(graph: Graph, move: Move, number: int, target: int, policy: Policy) -> Fault | None:
    """The fault that an edge shows by itself."""
    effect = move.effect
    if policy.urgent_first and effect.inversion is not None:
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
