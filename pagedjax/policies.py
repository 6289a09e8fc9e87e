"""Scheduling policies, under their public name: everything of `pagedjax.host.policies`."""

from pagedjax.host.policies import (
    FAIR,
    FCFS,
    LONGEST_PREFIX,
    POLICIES,
    PRIORITY,
    RATE,
    SHORTEST,
    STATIC,
    WINDOW,
    Cached,
    Policy,
    by_key,
    find,
)

__all__ = [
    "FAIR",
    "FCFS",
    "LONGEST_PREFIX",
    "POLICIES",
    "PRIORITY",
    "RATE",
    "SHORTEST",
    "STATIC",
    "WINDOW",
    "Cached",
    "Policy",
    "by_key",
    "find",
]
