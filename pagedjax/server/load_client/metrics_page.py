"""The page `/metrics` of a server under load, and how many programs it still compiles."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx

MISSING_PROGRAMS = re.compile(r"^pagedjax:missing_programs(?:\{[^}]*\})? (\S+)$", re.M)
PAUSE = 0.5  # seconds between two looks at the page


def fetch(base: str, api_key: str | None) -> str:
    """The page of the server at `base` (its address with /v1); "" if it has none.

    Metrics are a courtesy of the server: a load test must not fail without them.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(base.removesuffix("/v1") + "/metrics", headers=headers, timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL):
        return ""
    return response.text if response.status_code == 200 else ""


def missing_programs(page: str) -> int:
    """Programs that the server still compiles, of all its engines; 0 for another server."""
    return sum(int(float(value)) for value in MISSING_PROGRAMS.findall(page))


def wait_for_programs(
    base: str, api_key: str | None, seconds: float, say: Callable[[str], None]
) -> int:
    """Wait until the server has all its programs, for some seconds at most.

    Until then its steps are padded to larger ones and share the processor with the compiler.

    Args:
        say: is called once with a sentence, if there is something to wait for.

    Returns:
        the number of programs that are still missing.
    """
    deadline = time.monotonic() + seconds
    missing = missing_programs(fetch(base, api_key))
    if missing:
        say(
            f"the server still compiles {missing} programs; the measurement begins when it has all "
            "of them (--no-wait begins now)"
        )
    while missing and time.monotonic() < deadline:
        time.sleep(PAUSE)
        missing = missing_programs(fetch(base, api_key))
    return missing
