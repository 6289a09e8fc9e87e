"""Looking ahead: the next steps are sent to the device before the tokens of the current step are
known.

The scheduler is pure, so the engine predicts the next plan with the scheduler's own transitions: it
commits tokens that stop no request, schedules again, and sends that plan. The plan takes the new
tokens on the device, where the step before it samples them. When the tokens arrive on the host, the
real transitions are made. A predicted step that has every row of the real plan, with the same
blocks, has computed the plan; rows of sequences that ended since are ignored. Any other predicted
step is dropped, and the real plan is sent after it. So plans, events and tokens are those of an
engine without lookahead. Only the time at which steps run differs.

What the device gets at once is a run of plans. It is one plan, or a span: a plan of decodes alone
and the plans that are predicted after it, which one program computes (device/span.py). The first
plan of a run may be a real one.

A wrong prediction must not do harm. Its step writes keys and values of its own sequences, which the
real plan writes again, and writes into empty blocks. It is not sent if it would move blocks,
overwrite cached content, or write to blocks that a step in its place might read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from pagedjax.device.cache import KVCache
from pagedjax.device.side_outputs import NOTHING, SideOutputs
from pagedjax.device.step import StepOutput
from pagedjax.engine.requests import SequenceData
from pagedjax.host import decode_spans, scheduler
from pagedjax.host.blocks import BlockPool
from pagedjax.host.policies import Policy
from pagedjax.host.state import SchedulerState
from pagedjax.host.types import Plan, Seq, pick

NO_TOKEN = -1  # stands for an unknown token; it stops no sequence
NO_BLOCKS: frozenset[int] = frozenset()


class PlaceInSpan(NamedTuple):
    """Which part of a span's output is that of a plan.

    step: the index of the plan's step in the span.
    rows: of each row of the plan, its row in the span's program.
    """

    step: int
    rows: Sequence[int]


class SentStep(NamedTuple):
    """A plan that was sent to the device, and the output there of the program that computes it."""

    plan: Plan
    output: StepOutput
    sent_at: float  # seconds of time.perf_counter
    padded_tokens: int = 0  # the tokens of one step of the program
    draft_seconds: float = 0.0  # the time of the drafter's program, which ran before
    draft_rows: int = 0  # rows with drafts in that program, rounded up to a bucket
    side_outputs: SideOutputs = NOTHING  # what its output has beside samples
    place: PlaceInSpan | None = None  # None: the program computes this plan alone
    allocated: Sequence[int] = ()  # of a predicted plan, the blocks that it takes
    steps_left: int | None = None  # that of its `Prediction`
    packed: Any = None  # `repack.Packed` of the last step of decodes alone, up to this one

    @property
    def cu_q_lens(self) -> np.ndarray:
        """[rows + 1] where the tokens of each row of the plan begin among those of the step."""
        return np.cumsum([0, *self.plan.counts])

    @property
    def ready(self) -> bool:
        tokens: Any = self.output.sampled.tokens
        return tokens.is_ready()

    @property
    def tokens(self) -> np.ndarray:
        """[R] int32: the sampled tokens, those of the plan's rows first. Waits for the device."""
        tokens = np.asarray(self.output.sampled.tokens)
        return tokens if self.place is None else of_rows(tokens[self.place.step], self.place.rows)

    @property
    def program_rows(self) -> Sequence[int]:
        """Of each row of the plan, its row in the program."""
        return range(len(self.plan.seqs)) if self.place is None else self.place.rows

    @property
    def begins_program(self) -> bool:
        """Whether it is the first step of its program."""
        return self.place is None or self.place.step == 0

    @property
    def is_last_of_program(self) -> bool:
        """Whether its program computes no step behind it, so that `output.fed` has its tokens."""
        return self.place is None or self.place.step + 1 == len(self.output.sampled.tokens)


def of_rows(tokens: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """The tokens of some rows, which are mostly all of them in their order: a `range` from 0."""
    return tokens[: len(rows)] if isinstance(rows, range) else tokens[list(rows)]


class Prediction(NamedTuple):
    """A plan that follows if no sequence stops.

    state: the scheduler's state with the plan.
    allocated: the blocks that the plan takes.
    steps_left: that of `decode_spans.DecodeStep`; None: it may be no plan of decodes alone.
    """

    state: SchedulerState
    plan: Plan
    allocated: Sequence[int] = ()
    steps_left: int | None = None


Run = tuple[Prediction, ...]  # what one program computes: one plan, or all plans of a span
# (cache, the run, the step before it, arrivals of the sequences whose newest token is unknown) ->
# (cache, the sent steps)
Send = Callable[[KVCache, Run, SentStep | None, Set[int]], tuple[KVCache, tuple[SentStep, ...]]]


class Lookahead(NamedTuple):
    """The predicted steps on the device, and what the next prediction starts from."""

    sent: tuple[SentStep, ...] = ()
    # the last of them; None: predict again when all of them are used
    last: Prediction | None = None


class Foresight(NamedTuple):
    """What predictions need to know of the engine.

    sequences: the records of all sequences that run or wait, by their ids.
    depth: the programs that may be on the device behind that of the current step.
    span: the steps of a span; 1: there are no spans.
    decided: whether the step after a plan depends on what the plan's step will give.
    spans: whether the engine has a program for a span that begins with a plan.
    """

    policy: Policy
    sequences: Mapping[str, SequenceData]
    depth: int
    span: int
    decided: Callable[[Plan], bool]
    spans: Callable[[Plan], bool]


def take_predicted(
    ahead: Lookahead, plan: Plan, *, is_predicted: bool = False
) -> tuple[Lookahead, SentStep | None, Sequence[int]]:
    """The predicted step that has computed a plan, if there is one.

    Args:
        is_predicted: the plan is known to be that of the next predicted step.

    Returns:
        (what is left ahead, the step, the rows of the step that are the plan's, in the plan's
        order). After a wrong prediction nothing is left.
    """
    if not ahead.sent:
        return Lookahead(), None, ()
    step, *later = ahead.sent
    rows = range(len(plan.seqs)) if is_predicted else matching_rows(plan, step.plan)
    if rows is None:
        return Lookahead(), None, ()
    last = ahead.last if later else None
    if last is not None and len(rows) < len(step.plan.seqs):
        last = _without_ended(last, step.plan, rows)
    return Lookahead(tuple(later), last), step, rows


def _without_ended(last: Prediction, predicted: Plan, rows: Sequence[int]) -> Prediction:
    """The last prediction, where the sequences that were predicted to run, and have
    ended, run no more. Predicted steps that are sent already have rows for them.

    Args:
        predicted: the plan of a predicted step.
        rows: those of its rows that the real plan has.
    """
    state = last.state
    ended = [predicted.seqs[j] for j in set(range(len(predicted.seqs))).difference(rows)]
    for seq in sorted(ended, key=lambda seq: seq.arrival):
        state, _ = scheduler.cancel(state, seq.request.request_id, "stop")
    return Prediction(state, last.plan)


def matching_rows(plan: Plan, predicted: Plan) -> Sequence[int] | None:
    """The rows of a predicted plan that are the plan's, in its order; None if a row is missing or
    differs.
    """
    if plan.copies or plan.swap_in or plan.swap_out:
        return None
    columns = (predicted.starts, predicted.counts, predicted.lengths)
    expected = (plan.starts, plan.counts, plan.lengths)
    if columns == expected and _same_rows(plan.seqs, predicted.seqs):
        return range(len(plan.seqs))  # as in most steps
    # by arrival and id: when a branch is cancelled before its fork, the next one gets its arrival
    row_of = {(seq.arrival, seq.request.request_id): j for j, seq in enumerate(predicted.seqs)}
    rows = [row_of.get((seq.arrival, seq.request.request_id), -1) for seq in plan.seqs]
    if -1 in rows or rows != sorted(rows):
        return None
    seqs = predicted.seqs
    if len(rows) < len(seqs):
        seqs = pick(seqs, rows)
        columns = tuple([pick(column, rows) for column in columns])
    if columns != expected:
        return None
    same_blocks = [seq.blocks for seq in seqs] == [seq.blocks for seq in plan.seqs]
    return rows if same_blocks else None


def _same_rows(seqs: tuple[Seq, ...], others: tuple[Seq, ...]) -> bool:
    """Whether records are of the same sequences with the same blocks. Most of them are the same
    record, or have the same table.
    """
    differing = [(seq, other) for seq, other in zip(seqs, others, strict=True) if seq is not other]
    return all(
        [
            seq.request is other.request
            and seq.arrival == other.arrival
            and (seq.blocks is other.blocks or seq.blocks == other.blocks)
            for seq, other in differing
        ]
    )


def first_run(plan: Plan, state: SchedulerState, foresight: Foresight) -> Run:
    """The run that begins with a real plan.

    Args:
        state: after `schedule` returned the plan.
    """
    return _run_from(Prediction(state, plan), foresight, None, NO_BLOCKS)


def extend(
    ahead: Lookahead,
    current: SentStep,
    state: SchedulerState,
    plan: Plan,
    foresight: Foresight,
    cache: KVCache,
    send: Send,
) -> tuple[KVCache, Lookahead]:
    """Send predicted runs until `depth` programs are on the device behind that of the current step.

    Args:
        current: the sent step that has the plan among its rows.
        state: the scheduler's state after `schedule` returned the plan.
    """
    sent, last = ahead
    if sent and last is None:
        return cache, ahead  # the last predictions start from the state after them
    if _programs(sent) == foresight.depth:
        return cache, ahead
    last = last or Prediction(state, plan, steps_left=_steps_left(state, plan, current))
    unknown_arrivals = unknown_after(state, plan)
    for step in sent:
        if step.begins_program:  # the rows of a span are those of its first step
            unknown_arrivals.update(sampling(step.plan))
    while _programs(sent) < foresight.depth:
        if foresight.decided(last.plan):
            break
        real = state.pool if sent else None
        allocated = frozenset([block for step in sent for block in step.allocated])
        predicted = predict(
            last,
            foresight.policy,
            foresight.sequences,
            unknown_arrivals,
            real=real,
            allocated=allocated,
        )
        if predicted is None:
            break
        run = _run_from(predicted, foresight, state.pool, allocated)
        previous = sent[-1] if sent else current
        cache, steps = send(cache, run, previous, unknown_arrivals)
        sent = (*sent, *steps)
        last = run[-1]
        if _programs(sent) < foresight.depth:
            unknown_arrivals.update(sampling(predicted.plan))
    return cache, Lookahead(sent, last if sent else None)


def _steps_left(state: SchedulerState, plan: Plan, current: SentStep) -> int | None:
    """The `steps_left` of a real plan: that of the prediction if all its rows still run.

    Args:
        state: after `schedule` returned the plan.
        current: the sent step that has the plan among its rows.
    """
    count = len(plan.seqs)
    if len(current.plan.seqs) == count == len(state.running.seqs):
        return current.steps_left
    return None


def _programs(sent: Sequence[SentStep]) -> int:
    """The number of whole programs among the predicted steps."""
    return sum([step.begins_program for step in sent])


def unknown_after(state: SchedulerState, plan: Plan) -> set[int]:
    """Arrivals of the sequences whose newest token the host does not know.

    Args:
        state: after the plan was scheduled.
    """
    return {arrival for sent in state.in_flight or (plan,) for arrival in sampling(sent)}


def sampling(plan: Plan) -> list[int]:
    """Arrivals of the sequences that a plan samples a token for."""
    rows = zip(plan.seqs, plan.lengths, plan.starts, plan.counts, strict=True)
    return [seq.arrival for seq, length, start, count in rows if start + count == length]


def _run_from(
    first: Prediction, foresight: Foresight, real: BlockPool | None, allocated: Set[int]
) -> Run:
    """The span that begins with a plan, if the engine has a program for it and all its steps can be
    predicted; else the plan alone.

    Args:
        real, allocated: see `predict`.
    """
    span = foresight.span
    if span == 1 or not decode_spans.may_span(first.state, first.plan, span):
        return (first,)
    if not foresight.spans(first.plan):
        return (first,)
    arrivals = {seq.arrival for seq in first.plan.seqs}
    run = [first]
    run_blocks = set(allocated).union(first.allocated)
    while len(run) < span:
        if foresight.decided(run[-1].plan):
            return (first,)
        step = predict(
            run[-1],
            foresight.policy,
            foresight.sequences,
            arrivals,
            real=real,
            allocated=run_blocks,
        )
        if step is None or not arrivals.issuperset([seq.arrival for seq in step.plan.seqs]):
            return (first,)
        run_blocks.update(step.allocated)
        run.append(step)
        if real is None:
            real = first.state.pool  # the plans behind the second one follow predictions
    return tuple(run)


def places_in_span(plans: Sequence[Plan]) -> Sequence[PlaceInSpan | None]:
    """Which part of a span's output is that of each of its plans; (None,) for a single step. The
    rows of the program are those of the first plan, in its order; no later plan has other rows.
    """
    if len(plans) == 1:
        return (None,)
    row_of = {seq.arrival: i for i, seq in enumerate(plans[0].seqs)}
    everyone = range(len(row_of))
    return [
        PlaceInSpan(
            step,
            everyone
            if len(plan.seqs) == len(row_of)
            else [row_of[seq.arrival] for seq in plan.seqs],
        )
        for step, plan in enumerate(plans)
    ]


def merged_plans(plans: Sequence[Plan]) -> tuple[Plan, list[int]]:
    """(the first plan of a span with each row's last block table, in how many of the plans each row
    is). An entry that is given back within the span (host/views.py) keeps its block, which earlier
    steps of the span read.
    """
    first = plans[0]
    last = plans[-1]
    if len(last.seqs) == len(first.seqs):  # no row ends within the span, as in most spans
        rows = zip(first.seqs, last.seqs, strict=True)
        seqs = [seq if seq is grown else _with_given_back(grown, plans) for seq, grown in rows]
        return first._replace(seqs=tuple(seqs)), [len(plans)] * len(seqs)
    last_seqs: dict[int, Seq] = {}
    steps: dict[int, int] = {}
    for step in range(len(plans) - 1, -1, -1):
        for seq in plans[step].seqs:
            if seq.arrival not in last_seqs:
                last_seqs[seq.arrival] = seq
                steps[seq.arrival] = step + 1
        if len(last_seqs) == len(first.seqs):
            break
    seqs = []
    for seq in first.seqs:
        last = last_seqs[seq.arrival]
        seqs.append(seq if last is seq else _with_given_back(last, plans))
    return first._replace(seqs=tuple(seqs)), [steps[seq.arrival] for seq in first.seqs]


def _with_given_back(last: Seq, plans: Sequence[Plan]) -> Seq:
    """The record with the blocks that were in its table in any of the plans."""
    if 0 not in last.blocks:
        return last
    table = list(last.blocks)
    for plan in plans:
        for seq in plan.seqs:
            if seq.arrival == last.arrival:
                blocks = enumerate(seq.blocks)
                table[: len(seq.blocks)] = [table[entry] or block for entry, block in blocks]
    return last._replace(blocks=tuple(table))


def predict(
    before: Prediction,
    policy: Policy,
    sequences: Mapping[str, SequenceData],
    unknown_arrivals: Set[int],
    *,
    real: BlockPool | None,
    allocated: Set[int] = NO_BLOCKS,
) -> Prediction | None:
    """What follows a prediction, or a real plan, if no sequence stops; None if a prediction would do
    harm or be useless.

    Args:
        before: of a real plan, the scheduler's state after `schedule` returned it.
        unknown_arrivals: arrivals of the sequences whose newest token is not known on the host.
        real: the blocks of the state from which a step would come in the place of a wrong
            prediction; None: the plan is real.
        allocated: blocks that the predicted plans before this one take.
    """
    state, plan, _, steps_left = before
    oldest = state.in_flight[0] if state.in_flight else plan
    if state.waiting and _may_stop(oldest, sequences):
        return None  # a waiting request takes the place of a sequence that stops: another plan
    decodes = decode_spans.next_decodes(state, plan, steps_left)
    if decodes is not None:
        if _is_harmless(decodes.allocated, real or state.pool, allocated):
            return Prediction(*decodes)
        return None
    # The hashes of blocks of unknown tokens are unknown. Without them, a block is empty when its
    # sequence has ended. It is not handed out before other empty ones, and not below at all.
    after, _ = scheduler.commit(state, oldest, [NO_TOKEN] * len(oldest.seqs))
    # a timed policy gets the time of the plan; a plan that depends on a later one is not sent
    planned = scheduler.schedule_next(after, policy, now=plan.now)
    if planned is None:
        return None
    predicted, next_plan = planned
    if (
        not next_plan.seqs
        or next_plan.preempted
        or next_plan.copies
        or next_plan.swap_in
        or next_plan.swap_out
    ):
        return None
    blocks = _allocated(after, predicted)
    if not _is_harmless(blocks, real or after.pool, allocated):
        return None
    if not state.config.mixed_steps:
        unknown_rows = unknown_arrivals & {seq.arrival for seq in next_plan.seqs}
        if not unknown_rows <= set(sampling(plan)):
            # an unknown token must come from the step just before; here an earlier step sampled it
            return None
    if not _are_unfinished(next_plan, sequences):
        return None
    return Prediction(predicted, next_plan, blocks)


def _is_harmless(blocks: Sequence[int], pool: BlockPool, allocated: Set[int]) -> bool:
    """Whether a prediction may take blocks. Else it would overwrite cached content, or what a step in
    the place of a wrong prediction reads.

    Args:
        pool: that of the state from which such a step would come.
        allocated: blocks that earlier predictions take.
    """
    return not any(
        [block in pool.owners or block in pool.hashes or block in allocated for block in blocks]
    )


def _are_unfinished(plan: Plan, sequences: Mapping[str, SequenceData]) -> bool:
    """Whether all sequences of a predicted plan exist. One does not if the prediction forked a branch
    that was cancelled before its fork.
    """
    return all([seq.request.request_id in sequences for seq in plan.seqs])


def _may_stop(plan: Plan, sequences: Mapping[str, SequenceData]) -> bool:
    """Whether a sequence of a plan may end before its limit."""
    rows = [sequences.get(seq.request.request_id) for seq in plan.seqs]
    return any([row and (row.stop_ids or row.params.stop) for row in rows])


def _allocated(before: SchedulerState, after: SchedulerState) -> list[int]:
    """The blocks that `schedule` took for the running sequences, without those whose content it
    found in the cache.

    Args:
        before, after: the states before and after `schedule`.
    """
    same_records = set(map(id, before.running.seqs))
    changed = [seq for seq in after.running.seqs if id(seq) not in same_records]
    if not changed:
        return []
    tables = {seq.arrival: seq.blocks for seq in before.running.seqs}
    allocated: list[int] = []
    for seq in changed:
        allocated += seq.blocks[len(tables.get(seq.arrival, ())) :]
    owners = before.pool.owners
    hashes = after.pool.hashes
    return [block for block in allocated if block not in owners and block not in hashes]


def fed_rows(plan: Plan, before: SentStep, unknown_arrivals: Set[int], t: int) -> np.ndarray:
    """[t] int32: for each token of a predicted plan, the row of the program before that samples it;
    -1 if it is known.

    Args:
        before: the step before.
        unknown_arrivals: arrivals of the sequences whose newest token is not known on the host.
    """
    rows = np.full(t, -1, np.int32)
    pairs = zip(before.plan.seqs, before.program_rows, strict=True)
    row_of = {seq.arrival: row for seq, row in pairs}
    last_tokens = np.cumsum(plan.counts) - 1
    rows[last_tokens] = [
        row_of[seq.arrival] if seq.arrival in unknown_arrivals else -1 for seq in plan.seqs
    ]
    return rows
