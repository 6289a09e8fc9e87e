"""Is a router pure? A router that keeps something between calls makes equal runs differ."""

from __future__ import annotations

from pagedjax.options.purity import Impure, called_twice
from pagedjax.routing.routers import Router, route
from pagedjax.routing.state import RouterRequest, finished, init, joined

REPLICAS = 3
REQUESTS = [
    RouterRequest(
        f"r{i}",
        tokens=8 + 5 * i % 7,
        hashes=(f"h{i % 4}", f"h{i % 4}.{i % 2}"),
        user=f"u{i % 2}",
    )
    for i in range(24)
]


def check(router: Router) -> None:
    """Routes some requests, and calls the router's `choose` twice for each.

    An exception of the router itself ends the check: it may need requests of another kind.

    Raises:
        Impure: `choose` is not pure.
    """
    choose = called_twice(router.choose, f"choose of the router {router.name!r}")
    try:
        _run(router._replace(choose=choose))
    except Impure:
        raise
    except Exception:  # a real run will raise it, too
        pass


def _run(router: Router) -> None:
    state = init()
    for replica in range(REPLICAS):
        state = joined(state, f"replica {replica}")
    for i, request in enumerate(REQUESTS):
        state, _ = route(state, router, request)
        if i % 3 == 2:
            state = finished(state, REQUESTS[i // 3].request_id)
