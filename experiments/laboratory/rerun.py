"""A scheduler on a recorded past: `run(past, Change(...))`.

The run follows the recording as long as it decides the same: the same inputs come between the same
steps, which take the recorded times. From the first other decision on, inputs come at their
recorded times, and the time of a step is that of a model. Without a change, the run is the
recording.

Tokens are those of the recording, whatever is decided: they depend on the request's seed and their
position alone. A request that the recording saw cut off (by a client, or by the end of the
recording) goes on with tokens of no meaning, up to its limit. `Run.inexact` counts them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from heapq import heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

from experiments.laboratory.contents import Contents, Refused, contents
from experiments.laboratory.past import Output, Past, Recorded, decision
from pagedjax.host import scheduler
from pagedjax.host.drafts import Sample, accepted_columns, cut_at_the_end
from pagedjax.host.event_log import (
    Adopt,
    Cancel,
    Commit,
    Entry,
    Forget,
    Recorder,
    Release,
    Restart,
    Schedule,
    Submit,
    Update,
    kind_of,
)
from pagedjax.host.policies import Policy
from pagedjax.host.prefix_sharing import rows_that_fill
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import NO_DRAFTS, Choice, Finished, FinishReason, Plan, Seq

__all__ = [
    "Change",
    "Predecessor",
    "Refused",
    "Run",
    "Transition",
    "record",
    "run",
    "unchanged",
]

NO_MEANING = -1  # the token of a sequence beyond its recorded ones; it is no stop token

# what is not exact in a run
CUT_OFF = "tokens of no meaning, of requests that the recording saw cut off"
UNKNOWN_DRAFTS = "drafts whose acceptance was not recorded"
UNKNOWN_BLOCKS = "blocks whose content was not recorded, which nobody can share"
NEVER_RUN = "requests that never run"

StepTime = Callable[[Plan], float]


def count(plan: Plan) -> float:
    """The time of a step where steps are counted."""
    return 1.0


class Predecessor(NamedTuple):
    """The request whose end a client waits for before it sends another one.

    arrival: of the first sequence of the request that ends, in the past.
    seconds: between that end and the other request.
    """

    arrival: int
    seconds: float


class Change(NamedTuple):
    """What differs from the recorded run.

    config, policy: those of the scheduler.
    seconds: of a step that the recording does not have, from its plan.
    without: arrivals of the requests that do not come. A request has the arrival of its first
        sequence.
    predecessors: of the requests that follow the end of another one, by their arrival. They come at
        their recorded times until the runs differ.
    caching: whether prefixes are shared; None: as in the recorded run.
    own_policy: how a policy in a user's file is named, for a recording of this run.
    follows: whether the run goes by the recorded times while it decides as the recording. False:
        every step takes `seconds`, so that several runs are compared without the recorded noise.
    """

    config: SchedulerConfig
    policy: Policy
    seconds: StepTime = count
    without: frozenset[int] = frozenset()
    predecessors: Mapping[int, Predecessor] = MappingProxyType({})
    caching: bool | None = None
    own_policy: str | None = None
    follows: bool = True


class Transition(NamedTuple):
    """A transition of the run.

    at: its time; of a schedule, when the step began, of its commit, when it ended.
    follows: whether the run had decided as the recording until then.
    """

    entry: Entry
    at: float
    follows: bool


def unchanged(past: Past) -> Change:
    """The change of nothing."""
    return Change(past.config, past.policy, own_policy=past.own_policy)


def run(past: Past, change: Change) -> Run:
    """A scheduler on a past: an iterable of its transitions, to go through once.

    Raises:
        Refused: the past cannot have this change. While it runs: after the runs differ, sequences
            come from another engine or go to one, or the weights change.
        Rejected: while it runs: a request could never run under the changed configuration.
    """
    return Run(past, change)


def record(path: str | os.PathLike[str], transitions: Run) -> None:
    """Goes through a run and writes its recording, with times and prompts if the past has them."""
    past = transitions.past
    change = transitions.change
    time = 0.0
    recorder = Recorder(
        path,
        change.config,
        change.policy.name,
        own_policy=change.own_policy,
        clock=(lambda: time) if past.timed else None,
        prompts=bool(past.prompts),
    )
    with closing(recorder):
        for transition in transitions:
            time = transition.at
            recorder.write(transition.entry)


class Run:
    """A scheduler on a past.

    state: of the scheduler.
    now: the time of the last transition, and how far time went while the scheduler was idle.
    follows: whether it decided as the recording until now.
    inexact: how often something that was not recorded had to be made up, by what it was.
    past_arrivals: the arrival in the past of each sequence, by its arrival in this run.
    """

    def __init__(self, past: Past, change: Change) -> None:
        self.past = past
        self.change = change
        self.state: SchedulerState = scheduler.init(change.config)
        self.now = 0.0
        self._beams = any(request.beams for request in past.requests.values())
        same_limits = change.config.max_model_len == past.config.max_model_len
        # a choice of beams depends on their limit
        self.follows = change.follows and (same_limits or not self._beams)
        self.inexact: Counter[str] = Counter()
        self.past_arrivals: list[int] = []
        self._contents: Contents = contents(past, change.config, caching=change.caching)
        self._same_blocks = (
            change.config.block_size == past.config.block_size
            and change.caching in (None, past.shares)
        )
        if not self._same_blocks:
            self._refuse_what_time_decides()
        self._plan: Plan | None = None  # of a step that follows the recording and has not ended
        self._arrivals: dict[str, int] = {}  # in the past, of unfinished sequences by their ids
        self._names: dict[int, str] = {}  # the inverse
        self._unfinished: Counter[int] = Counter()  # sequences of each request, by its arrival
        self._inputs: list[tuple[float, int, Recorded]] = []  # a heap: (time, place, input)
        # by the request whose end they await: requests with their seconds and cancellations
        self._followers: dict[int, list[_Group]] = {}
        self._ended_at: dict[int, float] = {}
        self._drafts = any(output.drafts for output in past.outputs.values())
        self._ends = {
            arrival: _End(output.num_output, output.ended)
            for arrival, output in past.outputs.items()
            if output.cancelled
            and output.num_output is not None
            and output.ended in ("stop", "length")
        }

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.state.waiting or self.state.running.seqs)

    def __iter__(self) -> Iterator[Transition]:
        place = 0
        while self.follows and place < len(self.past.entries):
            yield from self._follow(self.past.entries[place])
            place += 1
        if not self.follows:
            self._refuse_what_time_decides()
            yield from self._go_on(place)

    # while the run follows the recording

    def _follow(self, recorded: Recorded) -> Iterator[Transition]:
        entry = recorded.entry
        self.now = recorded.at
        if isinstance(entry, Schedule):
            yield from self._follow_schedule(entry)
        elif isinstance(entry, Commit):
            yield self._follow_commit(entry)
        else:
            yield from self._take(recorded)

    def _follow_schedule(self, entry: Schedule) -> Iterator[Transition]:
        """Schedules a step; if it is not the recorded one, makes it without the recording."""
        now = self.now if entry.plan.now is None else entry.plan.now
        state, plan = scheduler.schedule(self.state, self.change.policy, entry.offered, now)
        if decision(plan) == decision(entry.plan):
            self.state = state
            self._plan = plan
            self._end(plan.rejected)
            yield Transition(Schedule(plan, entry.offered), self.now, follows=True)
            return
        self.follows = False
        self._refuse_what_time_decides()
        if _does_something(plan):
            yield from self._make(state, plan, entry.offered)

    def _follow_commit(self, entry: Commit) -> Transition:
        plan = self._plan
        assert plan is not None, "a commit that replays has a schedule before it"
        hashes = entry.hashes if self._same_blocks else self._hashes(plan, entry.sampled)
        commit = self._commit(plan, entry.sampled, hashes, entry.choices)
        return Transition(commit, self.now, follows=True)

    def _refuse_what_time_decides(self) -> None:
        """Raises Refused for inputs whose tokens or blocks depend on what other steps decided."""
        for recorded in self.past.entries:
            if isinstance(recorded.entry, Release | Adopt | Update):
                kind = kind_of(type(recorded.entry))
                raise Refused(
                    f"the recording has a transition {kind!r} at {recorded.at:g}, and what it does "
                    "depends on the steps before it; choose a run of one engine, without updates "
                    "of the weights"
                )

    # inputs

    def _take(self, recorded: Recorded) -> Iterator[Transition]:
        """Takes an input, if it still has an effect."""
        entry = recorded.entry
        if isinstance(entry, Submit):
            if recorded.arrival in self.change.without:
                return
            entry = self._submit(entry, recorded.arrival)
        elif isinstance(entry, Cancel):
            cancel = self._recorded_cancel(entry, recorded.arrival)
            if cancel is None:
                return
            entry = cancel
        elif isinstance(entry, Forget):
            self.state = scheduler.forget(self.state)
        elif isinstance(entry, Restart):
            self.state = scheduler.restart(self.state)
        elif isinstance(entry, Update):
            self.state = scheduler.update(self.state, entry.pending)
        elif isinstance(entry, Release):
            name = entry.released.request.request_id
            self.state, released = scheduler.release(self.state, name)
            entry = Release(released)
            self._end([name])
        elif isinstance(entry, Adopt):
            released = entry.released
            self.state, adopted = scheduler.adopt(self.state, self.change.policy, released)
            entry = Adopt(released, adopted)
            self._begin([released.request.request_id], recorded.arrival)
        yield Transition(entry, self.now, self.follows)

    def _submit(self, entry: Submit, arrival: int | None) -> Submit:
        """Submits a request. An id that an unfinished sequence has gets a stroke."""
        assert arrival is not None, "`past.Reader` gives it"
        request = entry.request
        names = [self._unused(name) for name in request.names]
        hashes = request.hashes
        if not self._same_blocks:
            hashes = self._contents.of_prompt(arrival, request.prompt_len)
        request = request._replace(request_id=names[0], forks=tuple(names[1:]), hashes=hashes)
        self.state = scheduler.submit(self.state, request)
        self._begin(names, arrival)
        return Submit(request, entry.prompt)

    def _unused(self, name: str) -> str:
        while name in self.state.ids:
            name += "'"
        return name

    def _recorded_cancel(self, entry: Cancel, arrival: int | None) -> Cancel | None:
        """Cancels what the recording cancelled; None if there is nothing to cancel, or not yet."""
        if self.follows:
            if arrival is not None and self.past.outputs[arrival].first in self.change.without:
                return None
            return self._cancel(entry.request_id, entry.reason)
        name = self._names.get(-1 if arrival is None else arrival)
        if name is None:
            return None
        if entry.reason != "abort":
            if not entry.events:
                return None  # it had ended by itself
            seqs = (*self.state.waiting, *scheduler.running(self.state))
            seq = next(seq for seq in seqs if name in seq.request.names)
            end = self._ends.get(self._arrivals[name])
            if seq.request.beams or (end and seq.num_output < end.num_output):
                return None  # it ends when it has as many tokens
        return self._cancel(name, entry.reason)

    def _cancel(self, name: str, reason: FinishReason) -> Cancel:
        self.state, events = scheduler.cancel(self.state, name, reason)
        self._end([event.request_id for event in events if isinstance(event, Finished)])
        return Cancel(name, reason, events)

    def _begin(self, names: Sequence[str], arrival: int | None) -> None:
        """Notes the ids of new sequences, the first of which has this arrival in the past."""
        assert arrival is not None, "`past.Reader` gives it"
        for number, name in enumerate(names, arrival):
            self._arrivals[name] = number
            self._names[number] = name
            self.past_arrivals.append(number)
        self._unfinished[arrival] = len(names)

    def _end(self, names: Iterable[str]) -> None:
        """Notes the ends of sequences. The followers of a request come after its last one."""
        for name in names:
            arrival = self._arrivals.pop(name, None)
            if arrival is None:  # rejected by the policy, as the plan said
                continue
            del self._names[arrival]
            first = self.past.outputs[arrival].first
            self._unfinished[first] -= 1
            if not self._unfinished[first]:
                self._ended_at[first] = self.now
                for group in self._followers.pop(first, ()):
                    self._push_follower(group)

    # after the runs differ

    def _go_on(self, place: int) -> Iterator[Transition]:
        """Runs to the end, with the inputs of the recording from a place on."""
        self._queue(place)
        while True:
            while self._inputs and self._inputs[0][0] <= self.now:
                _, _, recorded = heappop(self._inputs)
                yield from self._take(recorded)
            transitions = self._step() if self.has_work else None
            if transitions is not None:
                yield from transitions
            elif self._inputs:
                self.now = self._inputs[0][0]
            else:
                self.inexact[NEVER_RUN] += len(self.state.waiting)
                self.inexact = +self.inexact  # without the counts of 0
                return

    def _queue(self, place: int) -> None:
        """Queues the inputs from a place of the recording on."""
        groups: dict[int, _Group] = {}
        for number, recorded in enumerate(self.past.entries[place:], place):
            if isinstance(recorded.entry, Schedule | Commit):
                continue
            arrival = -1 if recorded.arrival is None else recorded.arrival
            first = self.past.outputs[arrival].first if arrival >= 0 else -1
            predecessor = self.change.predecessors.get(arrival)
            if isinstance(recorded.entry, Submit) and predecessor:
                groups[first] = _Group(predecessor, [])
            if first in groups:
                groups[first].inputs.append((number, recorded))
            else:
                heappush(self._inputs, (recorded.at, number, recorded))
        for group in groups.values():
            leader = group.predecessor.arrival
            if leader in self._ended_at or leader in self.change.without:
                self._push_follower(group)
            else:
                self._followers.setdefault(leader, []).append(group)

    def _push_follower(self, group: _Group) -> None:
        """Queues a request whose predecessor has ended, or does not come. Its cancellations keep
        their recorded distances from it.
        """
        recorded_at = group.inputs[0][1].at
        ended_at = self._ended_at.get(group.predecessor.arrival)
        at = recorded_at if ended_at is None else ended_at + group.predecessor.seconds
        for number, recorded in group.inputs:
            heappush(self._inputs, (recorded.at - recorded_at + at, number, recorded))

    def _step(self) -> Iterator[Transition] | None:
        """The transitions of a step; None if no sequence can run."""
        offered = self._offered()
        state, plan = scheduler.schedule(self.state, self.change.policy, offered, self.now)
        if not _does_something(plan):
            return None
        return self._make(state, plan, offered)

    def _make(
        self, state: SchedulerState, plan: Plan, offered: Mapping[str, int]
    ) -> Iterator[Transition]:
        """Makes the step of a plan.

        Args:
            state: what `scheduler.schedule` returned with it.
        """
        self.state = state
        yield Transition(Schedule(plan, offered), self.now, follows=False)
        self._end(plan.rejected)
        sampled = self._sampled(plan)
        choices, ends = self._choices(plan)
        hashes = self._hashes(plan, sampled)
        self.now += self.change.seconds(plan)
        commit = self._commit(plan, sampled, hashes, choices)
        yield Transition(commit, self.now, follows=False)
        for name, reason in (*ends.items(), *self._recorded_ends()):
            yield Transition(self._cancel(name, reason), self.now, follows=False)

    def _commit(
        self,
        plan: Plan,
        sampled: Sequence[Sample],
        hashes: Mapping[str, Sequence[str]],
        choices: Mapping[str, Choice],
    ) -> Commit:
        chains = {name: tuple(chain) for name, chain in hashes.items()}
        self.state, events = scheduler.commit(self.state, plan, sampled, chains, choices)
        ended = [event for event in events if isinstance(event, Finished)]
        self._end([event.request_id for event in ended if event.reason != "rejected"])
        return Commit(plan, sampled, chains, choices, events)

    # what the past says of a step

    def _output(self, seq: Seq) -> Output:
        return self.past.outputs[self.past_arrivals[seq.arrival]]

    def _offered(self) -> Mapping[str, int]:
        """The recorded drafts of sequences that have the length at which they were recorded."""
        if not self._drafts:
            return NO_DRAFTS
        active = self.state.running
        offered: dict[str, int] = {}
        for seq, length in zip(active.seqs, active.lengths, strict=True):
            drafts, _ = self._output(seq).drafts.get(length, (0, 0))
            if drafts:
                offered[seq.request_id] = drafts
        return offered

    def _sampled(self, plan: Plan) -> list[Sample]:
        """The samples of each row of a plan."""
        samples: list[Sample] = []
        drafts = plan.drafts or (0,) * len(plan.seqs)
        for i, seq in enumerate(plan.seqs):
            length = plan.lengths[i]
            if plan.starts[i] + plan.counts[i] < length or seq.request.beams:
                samples.append(0)
            elif drafts[i]:
                num_accepted = self._accepted(seq, length, drafts[i])
                tokens = [self._token(seq, length + k) for k in range(num_accepted + 1)]
                samples.append(tuple(tokens))
            else:
                samples.append(self._token(seq, length))
        return samples

    def _accepted(self, seq: Seq, length: int, drafts: int) -> int:
        """How many drafts of a row are accepted."""
        recorded_drafts, num_accepted = self._output(seq).drafts.get(length, (0, 0))
        if drafts > recorded_drafts and num_accepted == recorded_drafts:
            self.inexact[UNKNOWN_DRAFTS] += drafts - recorded_drafts
        return min(drafts, num_accepted)

    def _token(self, seq: Seq, length: int) -> int:
        """The token of a sequence after `length` known ones."""
        output = self._output(seq)
        index = length - seq.request.prompt_len - output.before
        if 0 <= index < len(output.tokens):
            return output.tokens[index]
        if seq.request.max_tokens:
            self.inexact[CUT_OFF] += 1
        return NO_MEANING

    def _hashes(self, plan: Plan, sampled: Sequence[Sample]) -> dict[str, tuple[str, ...]]:
        """The hashes of the blocks that a plan fills with generated tokens."""
        hashes: dict[str, tuple[str, ...]] = {}
        counts: Sequence[int] = plan.counts
        if plan.drafts:
            counts = accepted_columns(plan, cut_at_the_end(plan, sampled)).counts
        size = self.change.config.block_size
        for i in rows_that_fill(plan.starts, counts, size):
            seq = plan.seqs[i]
            indices = range(len(seq.hashes), (plan.starts[i] + counts[i]) // size)
            arrival = self.past_arrivals[seq.arrival]
            if indices and self._contents.shares(arrival):
                chain = [self._hash(arrival, index) for index in indices]
                hashes[seq.request.request_id] = tuple(chain)
        return hashes

    def _hash(self, arrival: int, index: int) -> str:
        key = self._contents.of(arrival, index)
        if key is not None:
            return key
        self.inexact[UNKNOWN_BLOCKS] += 1
        return f"unknown-{arrival}-{index}"

    def _choices(self, plan: Plan) -> tuple[dict[str, Choice], dict[str, FinishReason]]:
        """How beams that have no token left to compute go on -> (choices, the first beams of
        requests that end, and why).
        """
        choices: dict[str, Choice] = {}
        ends: dict[str, FinishReason] = {}
        if not self._beams:
            return choices, ends
        for group in _complete_beams(self.state, plan):
            first = group[0]
            arrival = self.past_arrivals[first.arrival]
            recorded = self.past.choices.get(arrival, ())
            end = self._ends.get(arrival)
            at_limit = first.length + 1 >= first.limit
            names = (*(seq.request_id for seq in group), *first.request.forks)
            if first.num_output < len(recorded) and not at_limit:
                choice = recorded[first.num_output]
                ids = dict(zip(self.past.requests[arrival].names, names, strict=True))
                parents = tuple([ids[parent] for parent in choice.parents])
                choices[first.request_id] = choice._replace(parents=parents)
            elif at_limit or (end and end.num_output == first.num_output):
                ends[first.request_id] = end.reason if end else "length"
            else:
                parents = names if len(group) == len(names) else names[:1] * len(names)
                choices[first.request_id] = Choice(parents, (NO_MEANING,) * len(names))
                self.inexact[CUT_OFF] += len(names)
        return choices, ends

    def _recorded_ends(self) -> list[tuple[str, FinishReason]]:
        """The sequences that the recording ended from outside at the length that they have now."""
        ends: list[tuple[str, FinishReason]] = []
        if not self._ends:
            return ends
        active = self.state.running
        for seq, length in zip(active.seqs, active.lengths, strict=True):
            end = self._ends.get(self.past_arrivals[seq.arrival])
            if end is None or seq.request.beams:  # a search ends when its beams are complete
                continue
            if length - seq.request.prompt_len >= max(end.num_output, 1):
                ends.append((seq.request_id, end.reason))
        return ends


class _End(NamedTuple):
    """How a sequence was ended from outside for what it had generated."""

    num_output: int
    reason: FinishReason


class _Group(NamedTuple):
    """A request that follows another one, and its cancellations, with their places in the
    recording.
    """

    predecessor: Predecessor
    inputs: list[tuple[int, Recorded]]


def _does_something(plan: Plan) -> bool:
    """Whether a plan changes anything."""
    return bool(plan.seqs or plan.preempted or plan.rejected)


def _complete_beams(state: SchedulerState, plan: Plan) -> list[list[Seq]]:
    """The beams of the requests whose beams all have no token left to compute after a plan, by the
    order of their names. Their records are those before the step.

    Args:
        state: what `scheduler.schedule` returned with the plan.
    """
    ends = {
        seq.arrival: start + count
        for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True)
    }
    groups: dict[int | None, list[Seq]] = {}
    for seq in scheduler.running(state):
        if seq.request.beams:
            groups.setdefault(seq.group, []).append(seq)
    complete: list[list[Seq]] = []
    for group in groups.values():
        if all(ends.get(seq.arrival, seq.computed) == seq.length for seq in group):
            complete.append(sorted(group, key=lambda seq: seq.arrival))
    return complete
