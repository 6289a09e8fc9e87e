"""Scheduling policies, under their public name: everything of `pagedjax.host.policies`."""

from pagedjax.host.policies import POLICIES, RATE, WINDOW, Policy, by_key, find

__all__ = ["POLICIES", "RATE", "WINDOW", "Policy", "by_key", "find"]
