"""Policies with memory: what one observes, and whom it rejects, evicts or lets wait in a step.

    submit, commit, cancel, ...: events -> state.news
    schedule: observed (news -> memory) -> rejected -> evicted -> the step as ever -> composed

The memory is part of the scheduler's state, so it is rolled back with it, and a replay has it
again. The other functions of the policy get it by `with_memory`; the mechanism sees a policy
without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pagedjax.host.policies import Policy, called
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import (
    Admitted,
    CurrentSeqs,
    PolicyEvent,
    Row,
    Running,
    SchedulerConfig,
    Seq,
    Submitted,
)
from pagedjax.options.own_errors import placed


def memory_of(state: SchedulerState, policy: Policy) -> Any:
    """The memory of a policy that has one, before it observes anything new."""
    return called(policy, "init") if state.news is None else state.memory


def observed(state: SchedulerState, policy: Policy, now: float | None) -> SchedulerState:
    """The state whose memory knows everything so far.

    Args:
        policy: one with memory. It may come to a state that another policy scheduled; then the
            sequences there are new to it.

    Raises:
        ValueError: the policy is timed, and there is no time.
    """
    if policy.timed and now is None:
        raise ValueError(
            f"the policy {policy.name!r} is timed; give schedule(..., now=SECONDS), seconds since "
            "the scheduler began"
        )
    memory = memory_of(state, policy)
    events = _arrivals(state) if state.news is None else state.news
    if policy.observe is not None:
        memory = called(policy, "observe", memory, events, now if policy.timed else None)
    return state._replace(memory=memory, news=())


def _arrivals(state: SchedulerState) -> tuple[PolicyEvent, ...]:
    """The sequences of a state, as events."""
    active = CurrentSeqs(state.running)
    seqs = sorted((*state.waiting, *active), key=lambda seq: seq.arrival)
    events: list[PolicyEvent] = [Submitted(state.step, seq) for seq in seqs]
    events += [Admitted(state.step, seq.request_id, seq.length, 0) for seq in active]
    return tuple(events)


def rejected(state: SchedulerState, policy: Policy) -> tuple[str, ...]:
    """The ids of the requests that the policy turns away.

    Raises:
        ValueError: the policy returns something else.
    """
    if policy.reject is None:
        return ()
    candidates = tuple([seq for seq in state.waiting if not (seq.num_output or _has_forked(seq))])
    if not candidates:
        return ()
    return _ids(
        policy,
        "reject",
        lambda: called(policy, "reject", state.memory, candidates),
        candidates,
        "does not wait without output; return ids of the waiting sequences that it gets",
    )


def _has_forked(seq: Seq) -> bool:
    """Whether it is one of several branches, which are sequences of their own already."""
    return seq.group is not None and not seq.request.forks


def evicted(state: SchedulerState, policy: Policy) -> tuple[str, ...]:
    """The ids of the running sequences that the policy sends back to the queue.

    Raises:
        ValueError: the policy returns something else.
    """
    if policy.evict is None or not state.running.seqs:
        return ()
    records: Any = CurrentSeqs(state.running)
    active = state.running._replace(seqs=records)
    return _ids(
        policy,
        "evict",
        lambda: called(policy, "evict", state.memory, state.waiting, active),
        records,
        "does not run; return ids of running sequences",
    )


def _ids(
    policy: Policy,
    function: str,
    result: Callable[[], Any],
    seqs: Sequence[Seq],
    mistake: str,
) -> tuple[str, ...]:
    """The ids that a function of the policy returns, each once.

    Args:
        seqs: of which it returns ids.
        mistake: what is wrong with any other id, and the remedy.
    """
    ids = result()
    if not isinstance(ids, Iterable) or isinstance(ids, str):
        raise ValueError(
            f"{function} of the policy {policy.name!r} returned {ids!r:.200}; "
            "return a list of the ids of sequences"
        )
    with placed(f"{function} of the policy {policy.name!r}"):
        ids = tuple(dict.fromkeys(ids))  # a generator runs now
    if not ids:
        return ()
    allowed = {seq.request_id for seq in seqs}
    for request_id in ids:
        if request_id not in allowed:
            raise ValueError(
                f"{function} of the policy {policy.name!r} returned {request_id!r:.200}, which "
                f"{mistake}"
            )
    return ids


class Composition(NamedTuple):
    """The rows of a step as a policy composed them.

    active: the running sequences with tokens, in their order.
    num_decodes: how many of them are decodes.
    counts: tokens to compute of each.
    idle: the running sequences that compute nothing in this step.
    config: sizes for the drafts of the step, which do not take what the policy withholds.
    """

    active: Running
    num_decodes: int
    counts: list[int]
    idle: Running
    config: SchedulerConfig


def composed(
    policy: Policy,
    memory: Any,
    active: Running,
    num_decodes: int,
    counts: list[int],
    idle: Running,
    config: SchedulerConfig,
) -> Composition:
    """The step with the tokens that the policy gives each row.

    Args:
        active: the running sequences, decodes first; those without a count compute nothing.
        counts: tokens that the mechanism gives the first of them.
        idle: running sequences that compute nothing.

    Raises:
        ValueError: the policy returns something else than a number of tokens for each row.
    """
    if policy.compose is None or not counts:
        return Composition(active, num_decodes, counts, idle, config)
    budget = config.max_num_batched_tokens
    seqs: Any = CurrentSeqs(active)
    rows = tuple([Row(seqs[i], count) for i, count in enumerate(counts)])
    chosen = called(policy, "compose", memory, rows, budget)
    remedy = "return a number of tokens for each row, from 0 to the row's count"
    if not isinstance(chosen, Iterable) or isinstance(chosen, str):
        raise ValueError(
            f"compose of the policy {policy.name!r} returned {chosen!r:.200}; {remedy}"
        )
    with placed(f"compose of the policy {policy.name!r}"):
        tokens = list(chosen)
    if len(tokens) != len(counts):
        raise ValueError(
            f"compose of the policy {policy.name!r} returned {len(tokens)} numbers for "
            f"{len(counts)} rows; {remedy}"
        )
    for row, count in zip(rows, tokens, strict=True):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= row.count:
            raise ValueError(
                f"compose of the policy {policy.name!r} returned {count!r:.200} for "
                f"{row.seq.request_id!r}, whose row has {row.count} tokens; {remedy}"
            )
    withheld = sum(counts) - sum(tokens)
    if not withheld:
        return Composition(active, num_decodes, counts, idle, config)
    chosen_rows = [i for i, count in enumerate(tokens) if count]
    skipped = [i for i in range(len(active.seqs)) if i >= len(tokens) or not tokens[i]]
    idle_rows = active.pick(skipped)
    return Composition(
        active.pick(chosen_rows),
        num_decodes=sum([i < num_decodes for i in chosen_rows]),
        counts=[tokens[i] for i in chosen_rows],
        idle=idle_rows.concat(idle) if idle.seqs else idle_rows,
        config=config._replace(max_num_batched_tokens=budget - withheld),
    )
