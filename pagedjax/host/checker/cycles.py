"""Runs of a graph that repeat for ever, and the longest runs of a graph without them.

A place is an unfinished request in a state: (state, rank). An edge of the graph moves the request
to another place, until it ends. So a cycle of places is a run in which one request stays unfinished
for ever. Since the tokens of a request only become more, it gets no token on the cycle.

Components are those of Tarjan (Depth-first search and linear graph algorithms, 1972), which come
out in reverse topological order: longest runs are then one pass over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pagedjax.host.checker.moves import Arrive, Effect, Happening
from pagedjax.host.checker.search import NOBODY, Graph

Weight = Callable[[Effect, int], int]  # of an edge, for a request by its rank before it
Sum = tuple[int, int, int]  # state, rank of a request (NOBODY until it arrives), its weights so far


class Run(NamedTuple):
    """Events from the state without requests, and then events that repeat for ever.

    rank: of the request that the property is about, at the end of the stem.
    """

    stem: tuple[Happening, ...]
    loop: tuple[Happening, ...]
    rank: int


class Places:
    """The places of a graph, and their components.

    width: place (state, rank) is number state * width + rank.
    order: all places, component by component; no edge leads to a later component.
    component: of each place, the number of its component.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.width = max([1, *map(len, graph.letters)])
        self.order: list[int] = []
        self.component = [-1] * (len(graph) * self.width)
        self._find_components()

    def of_state(self, state: int) -> range:
        """The places of the requests that are unfinished in a state."""
        first = state * self.width
        return range(first, first + len(self.graph.letters[state]))

    def edges(self, place: int) -> Iterator[tuple[int, int]]:
        """(place, label) of what can happen next to a request, as long as it is unfinished."""
        state, rank = divmod(place, self.width)
        labels = self.graph.labels
        for target, label in self.graph.edges[state]:
            next_rank = labels[label].ranks[rank]
            if next_rank != NOBODY:
                yield target * self.width + next_rank, label

    def _find_components(self) -> None:
        index = [-1] * len(self.component)  # in the order of discovery
        low = [0] * len(self.component)
        open_places: list[int] = []
        count = 0
        components = 0
        roots = (place for state in range(len(self.graph)) for place in self.of_state(state))
        for root in roots:
            if index[root] != -1:
                continue
            index[root] = low[root] = count
            count += 1
            open_places.append(root)
            path = [(root, self.edges(root))]
            while path:
                place, edges = path[-1]
                for target, _ in edges:
                    if index[target] == -1:
                        index[target] = low[target] = count
                        count += 1
                        open_places.append(target)
                        path.append((target, self.edges(target)))
                        break
                    if self.component[target] == -1:
                        low[place] = min(low[place], index[target])
                else:
                    path.pop()
                    if path:
                        parent = path[-1][0]
                        low[parent] = min(low[parent], low[place])
                    if low[place] == index[place]:
                        self._close(place, open_places, components)
                        components += 1

    def _close(self, root: int, open_places: list[int], number: int) -> None:
        """Gives a number to the component whose first place is `root`."""
        while True:
            place = open_places.pop()
            self.component[place] = number
            self.order.append(place)
            if place == root:
                return


def shortest_lasso(places: Places) -> Run | None:
    """The run with fewest events after which a request stays unfinished for ever while steps run;
    None if there is none.
    """
    graph = places.graph
    component = places.component
    endless = {
        component[place]
        for place in places.order
        if graph.timeless[place // places.width]
        for target, label in places.edges(place)
        if component[target] == component[place] and _is_step(graph, label)
    }
    best: Run | None = None
    fewest = 0
    for place in sorted(place for place in places.order if component[place] in endless):
        state, rank = divmod(place, places.width)
        depth = graph.depths[state]
        if best is not None and depth + 1 >= fewest:
            break
        longest = fewest - depth - 1 if best is not None else len(component) * 2
        loop = _shortest_loop(places, place, longest)
        if loop is not None:
            fewest = depth + len(loop)
            best = Run(tuple(graph.stem(state)), loop, rank)
    return best


def _is_step(graph: Graph, label: int) -> bool:
    return graph.labels[label].effect.num_rows is not None


def _shortest_loop(places: Places, start: int, longest: int) -> tuple[Happening, ...] | None:
    """The fewest events, at least one step among them, that lead a place to itself inside its
    component; None if they are more than `longest`.
    """
    graph = places.graph
    component = places.component[start]
    first = (start, False)
    came_from: dict[tuple[int, bool], tuple[tuple[int, bool], int]] = {}
    frontier = [first]
    for _ in range(longest):
        reached = []
        for node in frontier:
            place, stepped = node
            for target, label in places.edges(place):
                if places.component[target] != component:
                    continue
                next_node = (target, stepped or _is_step(graph, label))
                if next_node in came_from or next_node == first:
                    continue
                came_from[next_node] = (node, label)
                if next_node == (start, True):
                    return _events_back(graph, came_from, next_node, first)
                reached.append(next_node)
        if not reached:
            return None
        frontier = reached
    return None


def _events_back(
    graph: Graph, came_from: dict[Any, tuple[Any, int]], node: Any, first: Any
) -> tuple[Happening, ...]:
    """The events from `first` to `node`.

    Args:
        came_from: of each node, the node before it and the label of the edge.
    """
    events: list[Happening] = []
    while node != first:
        node, label = came_from[node]
        events.append(graph.labels[label].happening)
    return tuple(events[::-1])


def longest_runs(places: Places, weight: Weight) -> dict[str, int]:
    """The largest sum of weights over the life of a request, by the letter of its shape.

    There must be no cycle with a step (`shortest_lasso`); edges that are no steps weigh 0.
    """
    graph = places.graph
    weights = [
        [weight(label.effect, rank) for rank in range(len(label.ranks))] for label in graph.labels
    ]
    sums = [0] * (max(places.component, default=0) + 1)  # by component
    largest: dict[str, int] = dict.fromkeys("".join(graph.letters), 0)
    for place in places.order:
        state, rank = divmod(place, places.width)
        number = places.component[place]
        total = sums[number]
        # an edge that ends the request counts, too
        for target, label in graph.edges[state]:
            ranks = graph.labels[label].ranks
            later_sum = 0
            if ranks[rank] != NOBODY:
                later_sum = sums[places.component[target * places.width + ranks[rank]]]
            total = max(total, weights[label][rank] + later_sum)
        sums[number] = total
        letter = graph.letters[state][rank]
        largest[letter] = max(largest[letter], total)
    return largest


def shortest_run_above(graph: Graph, weight: Weight, limits: dict[str, int]) -> Run | None:
    """The run with fewest events in which the weights of a request sum up to more than the limit of
    its letter; None if there is none.
    """
    first: Sum = (0, NOBODY, 0)
    came_from: dict[Sum, tuple[Sum, int]] = {first: (first, 0)}
    queue: deque[Sum] = deque([first])
    while queue:
        node = queue.popleft()
        state, rank, total = node
        for target, label in graph.edges[state]:
            _, effect, ranks = graph.labels[label]
            successors: list[Sum] = []
            if rank == NOBODY:
                successors.append((target, NOBODY, 0))
                if effect.arrives:
                    successors.append((target, len(graph.letters[target]) - 1, 0))
            else:
                next_total = total + weight(effect, rank)
                if next_total > limits[graph.letters[state][rank]]:
                    came_from[(target, rank, next_total)] = (node, label)
                    events = _events_back(graph, came_from, (target, rank, next_total), first)
                    return Run(events, (), rank)
                if ranks[rank] != NOBODY:
                    successors.append((target, ranks[rank], next_total))
            for successor in successors:
                if successor not in came_from:
                    came_from[successor] = (node, label)
                    queue.append(successor)
    return None


def arrivals_in(events: Sequence[Happening]) -> int:
    return sum(isinstance(event, Arrive) for event in events)
