"""Which fields of a request the shipped policies read.

If all requests of a workload have the same values in them, the policy decides nothing, and the run
would measure another policy. So such a workload is refused. A user's own policies are not checked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.core.workloads import Spec, planned
from pagedjax.options.own_names import own_name

if TYPE_CHECKING:
    from experiments.core.config import Experiment


class Reads(NamedTuple):
    """fields: those of a `WorkItem` that a policy reads; requests must differ in one of them.

    remedy: what makes requests differ.
    """

    fields: tuple[str, ...]
    remedy: str


CLASSES = "set workload.classes to two classes"
POLICIES = {
    "fair": Reads(("user",), "set workload.users, such as {skew: zipf, count: 3}"),
    "vtc": Reads(("user",), "set workload.users, such as {skew: zipf, count: 3}"),
    "priority": Reads(("priority",), f"{CLASSES} of different priority"),
    "srtf": Reads(
        ("predicted",), "set workload.predicted, such as {error: 0.5}, and outputs that differ"
    ),
    "deadline": Reads(("service_class", "deadline"), f"{CLASSES} of different e2e"),
}


def check(experiment: Experiment, content: str) -> None:
    """Check that requests differ in what the policy reads.

    Args:
        content: the text of the workload's file.

    Raises:
        ValueError: they do not.
    """
    policy = experiment.engine.policy
    reads = POLICIES.get(_name_of(policy))
    if reads is None:
        return
    only_values = _only_values(experiment.workload, content, experiment.seed, reads.fields)
    if only_values is None:
        return
    names = " and the ".join(reads.fields)
    values = " and ".join(map(repr, only_values))
    raise ValueError(
        f"engine.policy is {policy!r}, which reads the {names} of requests, and all requests of the "
        f"workload have {values} there, so that it decides nothing; {reads.remedy}, or name another "
        "policy"
    )


def _name_of(policy: Any) -> str:
    """The name of a shipped policy without its parameters; "" for another one."""
    if not isinstance(policy, str):
        return ""
    name = own_name(policy)
    return name.attribute if name.module in ("", "pagedjax.policies") else ""


@lru_cache(maxsize=8)  # all points of a sweep may have the same workload
def _only_values(
    spec: Spec, content: str, seed: int, fields: tuple[str, ...]
) -> tuple[Any, ...] | None:
    """The values of these fields if all requests have the same; None if requests differ."""
    items = planned(spec, content, seed).items
    values = {tuple([getattr(item, field) for field in fields]) for item in items}
    return values.pop() if len(values) == 1 else None
