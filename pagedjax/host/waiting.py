"""Why a request waits: the limit that kept it out of a step, or the request that is before it.

    reasons = why_waiting(state, policy)        # of the step that `schedule(state, policy)` plans
    print(reasons["r00003"])                    # it needs 5 blocks, and 3 are free

The reasons are the scheduler's own: its functions try the same sequences in the same order
(scheduler.py, admission.py), and say what does not suffice. Admission ends at the first sequence
that does not fit. Its reason is a limit. The reason of each later sequence is "behind".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pagedjax.host.admission import Admission, Refusal, chunk_size, enter, groups, ordered
from pagedjax.host.policies import STATIC, Policy
from pagedjax.host.policy_memory import composed
from pagedjax.host.scheduler import (
    NO_BEGINNING,
    Attempt,
    attempts,
    begin_admission,
    begin_step,
    make_room,
    rows_without_room,
    running_counts,
)
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import Running, SchedulerConfig, Seq

__all__ = ["Limit", "Reason", "why_waiting"]

# what keeps a request out of a step; see `Reason`
Limit = Literal[
    "tokens",
    "rows",
    "blocks",
    "piece",
    "policy",
    "behind",
    "left out",
    "preempted",
    "preemption",
    "evicted",
    "kind of step",
    "siblings",
]


class Reason(NamedTuple):
    """Why a request gets no token in a step. `str(reason)` is a sentence.

    The limits are:

    - tokens: the budget is used up, or does not hold a prompt that must not be cut.
    - rows: no row is free (`max_num_seqs`), or fewer than its branches need.
    - blocks: fewer blocks are free than it needs.
    - piece: enough blocks are free, but not in a row (`reservation`).
    - policy: the policy's `admit` refuses it, or its `compose` gives it no token.
    - behind: another request is before it in the policy's order, and does not fit.
    - left out: the policy's `order` does not offer it.
    - preempted: it was preempted in this step.
    - evicted: the policy evicted it in this step.
    - preemption: others were preempted, and nothing enters in a step that preempts.
    - kind of step: the step computes prompts alone or decodes alone, and this is the other kind.
    - siblings: it is a beam that waits for the other beams of its request.

    limit: one of these limits.
    sentence: the same in words.
    need, free: tokens of the budget, rows or blocks. If `need - free` more were free, the request
        would pass this limit. For "preempted" and "preemption": the blocks that running sequences
        needed, and the free ones.
    behind: the id of the request that is before it, for the limit "behind".
    """

    limit: Limit
    sentence: str
    need: int = 0
    free: int = 0
    behind: str | None = None

    def __str__(self) -> str:
        return self.sentence


def why_waiting(
    state: SchedulerState, policy: Policy, now: float | None = None
) -> dict[str, Reason]:
    """Why requests get no token in the next step -> the reason of each, by its id.

    The result has the requests that wait after `schedule(state, policy)`, and the running ones that
    are not in its plan. Drafts change no reason, because they take what other rows leave.

    Args:
        state: the state before the `schedule` of the step.
        policy: the policy that `schedule` gets.
        now: the time that it gets.

    Raises:
        ValueError: the policy's `order` returns something else than waiting sequences.
    """
    config = state.config
    beginning = NO_BEGINNING
    if policy.init is not None:
        state, policy, beginning = begin_step(state, policy, now)
    old_state = state
    evicted = beginning.evictions.preempted
    state, _, preemptions = make_room(state, policy, beginning.evictions)
    waiting: dict[str, Reason] | None = None
    if len(preemptions.preempted) > len(evicted):
        waiting = _preemption(old_state, state, preemptions.preempted)
    queue = tuple([seq for seq in state.waiting if seq.request_id not in evicted])
    for attempt in attempts(state):
        active, counts, admission = running_counts(state, attempt)
        if attempt.admits and queue and waiting is None:
            composes = policy.compose is not None
            admission = begin_admission(
                config, attempt.num_decodes, active, counts, admission, composes=composes
            )
            admission, waiting = _admission(admission, state, queue, policy, active)
        if counts or admission.admitted:
            break
    if waiting is None:
        reason = Reason("kind of step", "this step computes decodes alone (mixed_steps is off)")
        waiting = {seq.request_id: reason for seq in queue}
    sentence = f"the policy {policy.name} evicted it for others"
    waiting |= dict.fromkeys(evicted, Reason("evicted", sentence))
    waiting |= _without_tokens(config, attempt, active, counts, admission)
    if policy.compose is not None:
        waiting |= _held_back(state, policy, attempt, active, counts, admission)
    return waiting


def _preemption(
    before: SchedulerState, after: SchedulerState, preempted: Sequence[str]
) -> dict[str, Reason]:
    """The reasons in a step that preempts."""
    full, shared = rows_without_room(before)
    need = len(full) * before.config.groups + len(shared)
    num_free = before.pool.num_free
    numbers = f"running requests needed {_many(need, 'block')}, and {_free(num_free)}"
    for_preempted = Reason("preempted", f"it was preempted: {numbers}", need, num_free)
    for_waiting = Reason(
        "preemption", f"nothing enters in a step that preempts: {numbers}", need, num_free
    )
    names = [seq.request_id for seq in after.waiting]
    return {name: for_preempted if name in preempted else for_waiting for name in names}


def _admission(
    admission: Admission,
    state: SchedulerState,
    waiting: tuple[Seq, ...],
    policy: Policy,
    active: Running,
) -> tuple[Admission, dict[str, Reason]]:
    """Admits sequences as `admission.admit` does -> (admission, reasons of those that stay)."""
    config = state.config
    queue = ordered(admission.pool, policy, waiting, state.running, config)
    offered = list(groups(queue))
    reasons = _left_out(waiting, queue, policy)
    for place, group in enumerate(offered):
        trial = enter(admission, policy, group, config)
        if isinstance(trial, Refusal):
            reason = _shortage(admission, policy, group, config, trial, active)
            reasons |= {seq.request_id: reason for seq in group}
            head = group[0].request_id
            sentence = f"it is behind {head} in the order of the policy {policy.name}"
            reason = Reason("behind", sentence, behind=head)
            later = [seq for later_group in offered[place + 1 :] for seq in later_group]
            return admission, reasons | {seq.request_id: reason for seq in later}
        admission = trial
    return admission, reasons


def _left_out(waiting: Sequence[Seq], queue: Sequence[Seq], policy: Policy) -> dict[str, Reason]:
    """The reasons of the sequences that the policy does not offer."""
    sentence = f"the policy {policy.name} left it out of its order"
    if policy is STATIC:
        sentence = "the policy static admits it when all running requests have ended"
    reason = Reason("left out", sentence)
    arrivals = {seq.arrival for seq in queue}
    return {seq.request_id: reason for seq in waiting if seq.arrival not in arrivals}


def _shortage(
    admission: Admission,
    policy: Policy,
    group: Sequence[Seq],
    config: SchedulerConfig,
    refusal: Refusal,
    active: Running,
) -> Reason:
    """The reason of the first sequence, or beams of a request, that does not fit."""
    shortage = refusal.shortage
    num_free = refusal.free
    need = refusal.need
    if shortage in ("tokens", "rows", "blocks"):
        need = num_free + _missing(admission, policy, group, config, refusal)
    sentence = _sentence(refusal._replace(need=need), group[0], policy, config)
    if shortage == "tokens" and admission.budget <= 0:
        # further tokens would go to the rows before it first
        entered = [seq.length - seq.computed for seq in admission.admitted]
        need += max(0, _backlog(config, active, len(active.seqs)) + sum(entered))
    return Reason(shortage, sentence, need, num_free)


def _missing(
    admission: Admission,
    policy: Policy,
    group: Sequence[Seq],
    config: SchedulerConfig,
    refusal: Refusal,
) -> int:
    """The number of tokens, rows or blocks that the sequences lack for this limit. `enter` is tried
    again after each addition, because one beam may use what the next one needs.
    """
    shortage = refusal.shortage
    added = 0
    trial: Admission | Refusal = refusal
    while isinstance(trial, Refusal) and trial.shortage == shortage:
        added += trial.need - trial.free
        larger = admission
        if shortage == "tokens":
            larger = admission._replace(budget=admission.budget + added)
        elif shortage == "rows":
            larger = admission._replace(free_rows=admission.free_rows + added)
        else:
            pool = admission.pool
            pool = pool._replace(num_blocks=pool.num_blocks + added, num_free=pool.num_free + added)
            larger = admission._replace(pool=pool)
        trial = enter(larger, policy, group, config)
    return added


def _sentence(refusal: Refusal, seq: Seq, policy: Policy, config: SchedulerConfig) -> str:
    """What a sequence lacks, in words."""
    shortage, need, free = refusal
    budget = config.max_num_batched_tokens
    if shortage == "tokens":
        if free <= 0:
            return f"the token budget of {budget} is used up"
        return (
            f"its {need} tokens must fit into one step (chunked_prefill is off), "
            f"and {free} of the budget of {budget} are left"
        )
    if shortage == "rows":
        limit = "max_num_seqs" if config.max_num_seqs <= budget else "max_num_batched_tokens"
        if free <= 0:
            return f"no row is free: {limit} is {config.max_running}"
        return (
            f"its branches need {need} rows, and {free} of {config.max_running} are free ({limit})"
        )
    if shortage == "piece":
        return f"it needs {_many(need, 'block')} in a row, and no such piece is free"
    if shortage == "policy":
        size = _many(need, "block")
        return f"the policy {policy.name} holds it back: it needs {size}, and {_free(free)}"
    place = "it is swapped out and needs" if seq.blocks else "it needs"
    promised = "" if config.sees_all else " and not promised to running requests"
    return f"{place} {_many(need, 'block')}, and {_free(free)}{promised}"


def _without_tokens(
    config: SchedulerConfig,
    attempt: Attempt,
    active: Running,
    counts: Sequence[int],
    admission: Admission,
) -> dict[str, Reason]:
    """The reasons of the running sequences that the step leaves out."""
    reasons: dict[str, Reason] = {}
    sentence = f"the token budget of {config.max_num_batched_tokens} is used up by rows before it"
    for i in range(len(counts), len(active.seqs)):
        need = max(1, _backlog(config, active, i) + 1)
        reasons[active.seqs[i].request_id] = Reason("tokens", sentence, need)
    budget = config.max_num_batched_tokens - sum(counts)
    backlog = _backlog(config, active, len(active.seqs))
    for seq in admission.admitted:
        if not budget:  # beams enter together, even if tokens suffice only for the first of them
            reasons[seq.request_id] = Reason("tokens", sentence, max(1, backlog + 1))
        budget -= chunk_size(seq, budget, config)
        backlog += seq.length - seq.computed
    computed_kind = "prompts" if attempt.admits else "decodes"
    sentence = f"this step computes {computed_kind} alone (mixed_steps is off)"
    skipped = Reason("kind of step", sentence)
    siblings = Reason("siblings", "it waits for the other beams of its request")
    for seq, length, computed in zip(*attempt.idle, strict=True):
        reasons[seq.request_id] = siblings if computed == length else skipped
    return reasons


def _held_back(
    state: SchedulerState,
    policy: Policy,
    attempt: Attempt,
    active: Running,
    counts: Sequence[int],
    admission: Admission,
) -> dict[str, Reason]:
    """The reasons of the sequences to which the policy's `compose` gives no token."""
    budget = state.config.max_num_batched_tokens
    tokens = list(counts)
    for seq in admission.admitted:
        count = chunk_size(seq, budget - sum(tokens), state.config)
        if count:
            tokens.append(count)
    rows = active.concat(Running.of(admission.admitted))
    composition = composed(
        policy, state.memory, rows, attempt.num_decodes, tokens, Running(), state.config
    )
    arrivals = {seq.arrival for seq in composition.active.seqs}
    reason = Reason("policy", f"the policy {policy.name} gives it no token in this step")
    seqs = rows.seqs[: len(tokens)]
    return {seq.request_id: reason for seq in seqs if seq.arrival not in arrivals}


def _backlog(config: SchedulerConfig, active: Running, count: int) -> int:
    """Tokens that the first `count` running sequences have to compute, beyond the budget."""
    tokens = sum(active.lengths[:count]) - sum(active.computed[:count])
    return tokens - config.max_num_batched_tokens


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _free(number: int) -> str:
    if number <= 0:
        return "none is free"
    return f"{number} is free" if number == 1 else f"{number} are free"
