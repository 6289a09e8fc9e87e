"""Policies, under their public name: of the scheduler (host/policies/), and KV policies
(host/kv_policies.py).
"""

from pagedjax.host.kv_policies import KVPolicy, TopBlocks, View, quest, streaming
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
    deadline,
    early_rejection,
    find,
    mlfq,
    srtf,
    vtc,
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
    "KVPolicy",
    "Policy",
    "TopBlocks",
    "View",
    "by_key",
    "deadline",
    "early_rejection",
    "find",
    "mlfq",
    "quest",
    "srtf",
    "streaming",
    "vtc",
]
