"""Looking ahead: the next step is sent to the device before the tokens of the current step are
known.

The scheduler is pure, so the engine predicts the next plan with the scheduler's own transitions: it
commits tokens that stop no request, schedules again, and sends that plan. The plan takes the new
tokens on the device, where the step before it samples them. When the tokens arrive on the host, the
real transitions are made. A predicted step that has every row of the real plan, with the same
blocks, has computed the plan; rows of sequences that ended since are ignored. Any other predicted
step is dropped, and the real plan is sent after it. So plans, events and tokens are those of an
engine without lookahead. Only the time at which steps run differs.

A wrong prediction must not do harm. Its step writes keys and values of its own sequences, which the
real plan writes again, and writes into empty blocks. It is not sent if it would move blocks or
overwrite cached content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from pagedjax.device.cache import KVCache
from pagedjax.device.side_outputs import NOTHING, SideOutputs
from pagedjax.device.step import StepOutput
from pagedjax.engine.requests import SequenceData, sequences_of_rows
from pagedjax.host import scheduler
from pagedjax.host.policies import Policy
from pagedjax.host.prefix_sharing import rows_that_fill
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import Plan, SchedulerConfig, pick

NO_TOKEN = -1  # stands for an unknown token; it stops no sequence


class SentStep(NamedTuple):
    """A plan that was sent to the device, and its output there."""

    plan: Plan
    output: StepOutput
    sent_at: float  # seconds of time.perf_counter
    padded_tokens: int = 0  # the tokens of the program that computes it
    draft_seconds: float = 0.0  # the time of the drafter's program, which ran before
    draft_rows: int = 0  # rows with drafts in that program, rounded up to a bucket
    side_outputs: SideOutputs = NOTHING  # what its output has beside samples

    @property
    def cu_q_lens(self) -> np.ndarray:
        """[rows + 1] where the tokens of each row of the plan begin among those of the step."""
        return np.cumsum([0, *self.plan.counts])

    @property
    def ready(self) -> bool:
        tokens: Any = self.output.sampled.tokens
        return tokens.is_ready()


# (cache, plan, the step before it, arrivals of the sequences whose newest token is unknown) ->
# (cache, the sent step)
Send = Callable[[KVCache, Plan, SentStep, Set[int]], tuple[KVCache, SentStep]]


class Lookahead(NamedTuple):
    """The predicted steps on the device, and the state that the next prediction starts from."""

    sent: tuple[SentStep, ...] = ()
    # the state and the plan of the last of them; None: predict again when all of them are used
    last: tuple[SchedulerState, Plan] | None = None


def take_predicted(
    ahead: Lookahead, plan: Plan
) -> tuple[Lookahead, SentStep | None, tuple[int, ...]]:
    """The predicted step that has computed a plan, if there is one.

    Returns:
        (what is left ahead, the step, the rows of the step that are the plan's, in the plan's
        order). After a wrong prediction nothing is left.
    """
    if not ahead.sent:
        return Lookahead(), None, ()
    step, *later = ahead.sent
    rows = matching_rows(plan, step.plan)
    if rows is None:
        return Lookahead(), None, ()
    # A row of the step that is not the plan's is of a sequence that has ended. Later predicted steps
    # have such a row too, so no prediction starts from them.
    has_all_rows = len(rows) == len(step.plan.seqs)
    last = ahead.last if has_all_rows and later else None
    return Lookahead(tuple(later), last), step, rows


def matching_rows(plan: Plan, predicted: Plan) -> tuple[int, ...] | None:
    """The rows of a predicted plan that are the plan's, in its order; None if a row is missing or
    differs.
    """
    if plan.copies or plan.swap_in or plan.swap_out:
        return None
    # by arrival and id: when a branch is cancelled before its fork, the next one gets its arrival
    row_of = {(seq.arrival, seq.request.request_id): j for j, seq in enumerate(predicted.seqs)}
    rows = [row_of.get((seq.arrival, seq.request.request_id), -1) for seq in plan.seqs]
    if -1 in rows or rows != sorted(rows):
        return None
    seqs = predicted.seqs
    columns = (predicted.starts, predicted.counts, predicted.lengths)
    if len(rows) < len(seqs):
        seqs = pick(seqs, rows)
        columns = tuple([pick(column, rows) for column in columns])
    if columns != (plan.starts, plan.counts, plan.lengths):
        return None
    same_blocks = [seq.blocks for seq in seqs] == [seq.blocks for seq in plan.seqs]
    return tuple(rows) if same_blocks else None


def extend(
    ahead: Lookahead,
    current: SentStep,
    state: SchedulerState,
    plan: Plan,
    policy: Policy,
    sequences: Mapping[str, SequenceData],
    depth: int,
    cache: KVCache,
    send: Send,
    decided: Callable[[Plan], bool],
) -> tuple[KVCache, Lookahead]:
    """Send predicted steps until `depth` of them are on the device behind the current one.

    Args:
        current: the sent step that has the plan among its rows.
        state: the scheduler's state after `schedule` returned the plan.
        sequences: the records of all sequences that run or wait, by their ids.
        decided: whether the step after a plan depends on what the plan's step will give.
    """
    sent, last = ahead
    if sent and last is None:
        return cache, ahead  # the sent steps have rows of sequences that have ended
    last = last or (state, plan)
    unknown_arrivals = set(sampling(plan))
    for step in sent[:-1]:
        unknown_arrivals.update(sampling(step.plan))
    while len(sent) < depth:
        if sent:
            unknown_arrivals.update(sampling(sent[-1].plan))
        last_state, last_plan = last
        if decided(last_plan):
            break
        predicted = predict(
            last_state,
            last_plan,
            policy,
            sequences,
            unknown_arrivals,
            plan_is_real=not sent,
            is_last=depth == 1,
        )
        if predicted is None:
            break
        _, predicted_plan = predicted
        cache, step = send(cache, predicted_plan, sent[-1] if sent else current, unknown_arrivals)
        sent = (*sent, step)
        last = predicted
    return cache, Lookahead(sent, last if sent else None)


def sampling(plan: Plan) -> list[int]:
    """Arrivals of the sequences that a plan samples a token for."""
    rows = zip(plan.seqs, plan.lengths, plan.starts, plan.counts, strict=True)
    return [seq.arrival for seq, length, start, count in rows if start + count == length]


def predict(
    state: SchedulerState,
    plan: Plan,
    policy: Policy,
    sequences: Mapping[str, SequenceData],
    unknown_arrivals: Set[int],
    *,
    plan_is_real: bool,
    is_last: bool,
) -> tuple[SchedulerState, Plan] | None:
    """The state and plan after this one if no sequence stops; None if a prediction would do harm or
    be useless.

    Args:
        state: after `schedule` returned `plan`.
        unknown_arrivals: arrivals of the sequences whose newest token is not known on the host.
        plan_is_real: whether the plan is real; else it is a prediction itself.
        is_last: whether no other prediction starts from this one.
    """
    rows = sequences_of_rows(plan, sequences)
    if state.waiting and any([data.stop_ids or data.params.stop for data in rows]):
        return None  # a waiting request takes the place of a sequence that stops: another plan
    hashes = _placeholder_hashes(plan, rows, state.config, is_last)
    after, _ = scheduler.commit(state, plan, [NO_TOKEN] * len(plan.seqs), hashes)
    if not plan_is_real and after.pool.num_free > state.pool.num_free:
        # a plan sent in place of a wrong prediction would still read the blocks that are given back
        return None
    # a timed policy gets the time of the plan; a plan that depends on a later one is not sent
    predicted, next_plan = scheduler.schedule(after, policy, now=plan.now)
    if (
        not next_plan.seqs
        or next_plan.preempted
        or next_plan.copies
        or next_plan.swap_in
        or next_plan.swap_out
    ):
        return None
    if len(predicted.pool.contents) < len(after.pool.contents):
        return None  # cached content would be lost
    if not state.config.mixed_steps:
        unknown_rows = unknown_arrivals & {seq.arrival for seq in next_plan.seqs}
        if not unknown_rows <= set(sampling(plan)):
            # an unknown token must come from the step just before; here an earlier step sampled it
            return None
    return predicted, next_plan


def _placeholder_hashes(
    plan: Plan, rows: Sequence[SequenceData], config: SchedulerConfig, is_last: bool
) -> dict[str, tuple[str, ...]]:
    """Placeholders for the hashes of the blocks that a plan fills and whose tokens are unknown, by
    the id of the sequence.

    When a sequence has ended, or does not see a block any more, a block without a hash is empty. A
    later prediction could write to it. So in the last prediction only sequences that end need
    placeholders.
    """
    hashes = {}
    size = config.block_size
    for i in rows_that_fill(plan.starts, plan.counts, size):
        seq = plan.seqs[i]
        if is_last and plan.lengths[i] + 1 < seq.limit and config.sees_all:
            continue
        full = (plan.starts[i] + plan.counts[i]) // size
        hashed = len(seq.hashes)
        if full > hashed and rows[i].root is not None:
            blocks = range(hashed, full)
            hashes[seq.request_id] = tuple(f"? {seq.arrival} {block}" for block in blocks)
    return hashes


def fed_rows(plan: Plan, before: Plan, unknown_arrivals: Set[int], t: int) -> np.ndarray:
    """[t] int32: for each token of a predicted plan, the row of the step before that samples it; -1
    if it is known.

    Args:
        before: the plan of the step before.
        unknown_arrivals: arrivals of the sequences whose newest token is not known on the host.
    """
    rows = np.full(t, -1, np.int32)
    row_of = {seq.arrival: i for i, seq in enumerate(before.seqs)}
    last_tokens = np.cumsum(plan.counts) - 1
    rows[last_tokens] = [
        row_of[seq.arrival] if seq.arrival in unknown_arrivals else -1 for seq in plan.seqs
    ]
    return rows
