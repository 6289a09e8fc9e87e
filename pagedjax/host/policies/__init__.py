"""Scheduling policies as values of pure functions. A new policy is a new value, not a flag.

policy.py has the type `Policy` and the policies without memory. Each other file has a policy with
memory: its paper, its bound, and why every request ends under it.
"""

from __future__ import annotations

from typing import Any

from pagedjax.host.policies.deadline import deadline
from pagedjax.host.policies.early_rejection import early_rejection
from pagedjax.host.policies.mlfq import mlfq
from pagedjax.host.policies.policy import (
    ARGUMENTS,
    FAIR,
    FCFS,
    LONGEST_PREFIX,
    PRIORITY,
    RATE,
    SHORTEST,
    STATIC,
    WINDOW,
    Cached,
    Policy,
    arguments_of,
    by_key,
    called,
    decision,
    with_memory,
)
from pagedjax.host.policies.srtf import srtf
from pagedjax.host.policies.vtc import vtc
from pagedjax.options.config import one_of
from pagedjax.options.own_values import check_call, named_value

__all__ = [
    "ARGUMENTS",
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
    "called",
    "deadline",
    "decision",
    "early_rejection",
    "find",
    "mlfq",
    "shipped",
    "srtf",
    "vtc",
    "with_memory",
]

POLICIES = {
    policy.name: policy
    for policy in (
        FCFS,
        PRIORITY,
        SHORTEST,
        FAIR,
        LONGEST_PREFIX,
        STATIC,
        vtc(),
        mlfq(),
        srtf(),
        deadline(),
        early_rejection(),
    )
}


def find(name: Any) -> Policy:
    """The policy of that name. "module:NAME" or "folder/file.py:NAME" is a policy of the user, in
    that module or file, with parameters as in a mapping {"name": "mine.py:aged", "worth": 64}; a
    `Policy` is itself.

    Raises:
        ValueError: no such policy, module, file or value; a value that is no policy; a function of
            it that takes other arguments, or that needs a memory where there is none.
    """
    policy = named_value("policy", name, Policy, POLICIES)
    if policy not in POLICIES.values():
        for function, (count, usage) in arguments_of(policy).items():
            start = f"policy {getattr(name, 'name', name)!r}: its {function}"
            check_call(start, getattr(policy, function), count, usage)
        _check_bound(policy.bound, f"policy {getattr(name, 'name', name)!r}: its bound")
    return policy


def _check_bound(bound: Any, start: str) -> None:
    """Raises ValueError, beginning with `start`, unless it is a number, a function or None."""
    if callable(bound):
        check_call(start, bound, 2, "bound(request, others)")
    elif bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
        raise ValueError(
            f"{start} is {bound!r}; give a whole number of at least 0, a function, or None"
        )


def shipped(policy: Policy | str) -> Policy:
    """The policy, which may be given by the name of a shipped one.

    Raises:
        ValueError: there is no such name. A policy of a user's own is found once, by `find`.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES and ":" in policy:
        raise ValueError(
            f"policy is {policy!r}; give the value that pagedjax.policies.find({policy!r}) returns"
        )
    one_of("policy", policy, tuple(POLICIES))
    return POLICIES[policy]
