"""Is a policy pure? A policy that keeps something between calls makes equal runs differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedjax.host import scheduler
from pagedjax.host.policies import POLICIES, Policy, find
from pagedjax.host.policies.policy import arguments_of
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Request
from pagedjax.options.own_errors import OwnError
from pagedjax.options.own_names import name_in_one_line
from pagedjax.options.purity import called_twice, names_read

# The pool is too small for all requests at once, so that some wait and some are preempted.
CONFIG = SchedulerConfig(
    block_size=2, num_blocks=10, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=16
)
REQUESTS = [  # of different lengths, priorities, users and predictions
    Request(
        f"r{i}",
        prompt_len=1 + 3 * i % 7,
        max_tokens=5,
        priority=i % 3,
        user=f"u{i % 2}",
        predicted=1 + 2 * i % 5,
    )
    for i in range(10)
]
MAX_STEPS = 80
# the names that tell how long a request can become
LIMITS = {"limit", "max_tokens", "final_length"}


def find_pure(name: Any) -> Policy:
    """The policy of that name, as `policies.find` reads it. A user's own policy is checked.

    Raises:
        ValueError: see `policies.find` and `check`.
    """
    policy = find(name)
    if policy not in POLICIES.values():
        try:
            check(policy)
        except ValueError as error:
            text = policy.name if isinstance(name, Policy) else name_in_one_line("policy", name)
            raise ValueError(f"policy is {text!r}: {error}") from error
    return policy


def check(policy: Policy) -> None:
    """Runs a small scheduler with the policy, and calls each of its functions twice.

    An exception of the policy itself ends the check: it may need requests of another kind.

    Raises:
        Impure: a function is not pure.
        ValueError: a function returns what it must not.
    """
    functions = {
        name: called_twice(
            getattr(policy, name),
            f"{name} of the policy {policy.name!r}",
            as_tuple=name not in ("init", "observe"),
        )
        for name in arguments_of(policy)
    }
    for name in ("init", "observe"):
        if name in functions:
            functions[name] = _hashable(functions[name], f"{name} of the policy {policy.name!r}")
    try:
        _run(policy._replace(**functions), REQUESTS)
    except OwnError:  # a real run will raise it, too
        pass
    except ValueError:  # a function returned what it must not
        raise
    except Exception:
        pass


def _hashable(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, with the check that its result can be hashed. Raises ValueError."""

    def call(*arguments: Any) -> Any:
        memory = function(*arguments)
        try:
            hash(memory)
        except TypeError:
            raise ValueError(
                f"{name} returned {memory!r:.200}, which cannot be hashed; return an immutable "
                "value, such as a NamedTuple of numbers, texts, tuples and immutables.Map"
            ) from None
        return memory

    return call


def reads_limits(policy: Policy) -> bool:
    """Whether a user's policy reads how long a request can become. Where a request asks for no more
    tokens than it generates, such a policy knows the future.
    """
    return not LIMITS.isdisjoint(_names_read(policy))


def reads_predictions(policy: Policy) -> bool:
    """Whether a policy reads the predicted lengths of outputs, and cannot do without."""
    # `names_read` leaves the code of this package out, and srtf is of it
    is_srtf = policy.name == "srtf" or policy.name.startswith("srtf(")
    return is_srtf or "predicted" in _names_read(policy)


def needs_predictions(policy: Policy) -> bool:
    """Whether a user's policy raises for requests without predicted lengths, and not with them."""
    if not reads_predictions(policy):
        return False
    unpredicted = [request._replace(predicted=None) for request in REQUESTS]
    return _raises(policy, unpredicted) and not _raises(policy, REQUESTS)


def _raises(policy: Policy, requests: Sequence[Request]) -> bool:
    try:
        _run(policy, requests)
    except Exception:  # a user's file may raise anything
        return True
    return False


def _names_read(policy: Policy) -> set[str]:
    names: set[str] = set()
    for function_name in arguments_of(policy):
        names |= names_read(getattr(policy, function_name))
    return names


def _run(policy: Policy, requests: Sequence[Request]) -> None:
    state = scheduler.init(CONFIG._replace(host_blocks=4))
    for step in range(MAX_STEPS):
        if step < len(requests):
            state = scheduler.submit(state, requests[step])
        state, plan = scheduler.schedule(state, policy, now=0.25 * step)
        state, _ = scheduler.commit(state, plan, (0,) * len(plan.seqs))
