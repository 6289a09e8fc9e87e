"""What a search over the branches of a request is, and a search under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pagedjax.host.types import Choice, Hypothesis


class Offer(NamedTuple):
    """The most likely continuations of a branch, the best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Continuation(NamedTuple):
    """A branch after a position: the index of the branch that it continues, and its new token."""

    parent: int
    token_id: int


class Search(Protocol):
    """The state of a search: an immutable value. It knows tokens and log-probabilities, and no
    block and no id.

    Before the first position there is one branch. After it there are as many as the request has
    ids.
    """

    @property
    def finished(self) -> tuple[Hypothesis, ...]:
        """The sequences found so far, the best first; at the end, the result."""
        ...

    def advance(self, offers: Sequence[Offer]) -> tuple[Search, Sequence[Continuation]]:
        """Decides the next position -> (search, the branches after it; () if the search ends). It
        is not called again after the end.

        Args:
            offers: the offer of each branch.
        """
        ...


class SearchKind(NamedTuple):
    """How requests with one kind of parameters are searched.

    candidates: (params, number of stop tokens) -> how many continuations each branch must offer.
    start: (params, stop tokens) -> the search before the first position. `params.max_tokens` is not
        above the number of tokens for which the request has room.
    """

    candidates: Callable[[Any, int], int]
    start: Callable[[Any, frozenset[int]], Search]


class RunningSearch(NamedTuple):
    """A search, and what its branches have offered at this position.

    names: ids of the branches.
    candidates: how many continuations each branch must offer.
    branches: ids of the branches that run now: the first one before the first position, then all.
    offers: the offers so far, by the id of the branch.
    """

    search: Search
    names: tuple[str, ...]
    candidates: int
    branches: tuple[str, ...]
    offers: Mapping[str, Offer] = {}

    @property
    def complete(self) -> bool:
        """Whether every branch has offered its continuations."""
        return len(self.offers) == len(self.branches)

    def offer(self, name: str, offer: Offer) -> RunningSearch:
        """Stores the offer of a branch. A second offer replaces the first."""
        return self._replace(offers={**self.offers, name: offer})

    def without_offers(self) -> RunningSearch:
        """Returns the search whose branches will offer their continuations again."""
        return self._replace(offers={})

    def advance(self) -> tuple[RunningSearch, Choice | None]:
        """Decides the next position when every branch has made its offer -> (search, the choice for
        the branches; None if the search ends).
        """
        search, continuations = self.search.advance([self.offers[name] for name in self.branches])
        next_search = self._replace(search=search, branches=self.names, offers={})
        if not continuations:
            return next_search, None
        parents = tuple(self.branches[continuation.parent] for continuation in continuations)
        return next_search, Choice(parents, tuple(token for _, token in continuations))
