"""Searches over the branches of a request, as values.

search.py  what a search is: it gets offers, and decides how branches continue
beams.py   beam search

Sharing and copying blocks is the scheduler's task (branches.py). The scheduler gets the choice of a
step: a parent and a token for each branch. Another search is a file with a `Search`, and its
`SearchKind` in `SEARCHES`.
"""

from __future__ import annotations

from typing import Any

from pagedjax.host.searches import beams
from pagedjax.host.searches.search import Continuation, Offer, RunningSearch, Search, SearchKind
from pagedjax.options.params import BeamSearchParams

__all__ = ["SEARCHES", "Continuation", "Offer", "RunningSearch", "Search", "SearchKind"]

SEARCHES: dict[type, SearchKind] = {BeamSearchParams: beams.KIND}  # by the type of the parameters


def kind_of(params: Any) -> SearchKind:
    """Returns how a request with these parameters is searched."""
    return next(SEARCHES[parent] for parent in type(params).__mro__ if parent in SEARCHES)


def start(params: Any, stops: frozenset[int], names: tuple[str, ...]) -> RunningSearch:
    """Returns the search of a request.

    Args:
        names: ids of its branches.
    """
    kind = kind_of(params)
    search = kind.start(params, stops)
    return RunningSearch(search, names, kind.candidates(params, len(stops)), branches=names[:1])
