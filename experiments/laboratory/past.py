"""What a recorded run got from outside: `read(path)`.

These are its requests, cancellations and other inputs with their times, and the tokens of each
sequence. What each step decided, and how long it took, is there too.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedjax.host import replay
from pagedjax.host.event_log import (
    Adopt,
    Cancel,
    Commit,
    Entry,
    Release,
    Schedule,
    Submit,
)
from pagedjax.host.policies import POLICIES, Policy
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import (
    Choice,
    Event,
    Finished,
    FinishReason,
    Plan,
    Request,
    Sampled,
    Verified,
)

Decision = tuple[object, ...]


def decision(plan: Plan) -> Decision:
    """What a step decides, without the names of blocks: which sequences compute which tokens, with
    how many drafts, and who enters and leaves the running ones.
    """
    return (
        tuple([seq.request.request_id for seq in plan.seqs]),
        plan.starts,
        plan.counts,
        plan.drafts,
        plan.admitted,
        plan.cached,
        plan.preempted,
        plan.swapped,
        plan.rejected,
    )


class Recorded(NamedTuple):
    """A transition of the recorded run.

    at: seconds since the recording began; of a schedule, when the step began. Without times, the
        number of steps before it; of a commit, with its own.
    arrival: of a submit or adopt, that of its first sequence. Of a cancel, that of the sequence
        that had the id last; None: none had.
    """

    entry: Entry
    at: float
    arrival: int | None = None


class PastStep(NamedTuple):
    """A step of the recorded run, with the times when it began and ended.

    since: when the engine was ready for it: the end of the step before, if a sequence was
        unfinished then; else `started`.
    """

    plan: Plan
    started: float
    finished: float
    since: float

    @property
    def seconds(self) -> float:
        """What the step took, with the host's work since the step before."""
        return self.finished - self.since


@dataclass
class Output:
    """What a sequence generated in the recorded run, as far as it went.

    first: arrival of the first sequence of its request; its own, unless it is a further branch.
    tokens: without the prompt. Those of beams are in `Past.choices`.
    hashes: of its full blocks by their index, as far as they were recorded.
    drafts: by its length before a step, (drafts that it got, how many were accepted).
    before: output tokens that it had when it came from another engine; their values are unknown.
    ended: "stop", "length", "abort" or "rejected"; None: it was unfinished.
    num_output: tokens of output when it ended; None: it was unfinished.
    cancelled: whether it was ended from outside of the scheduler, for example by a stop string.
    """

    first: int
    tokens: array = field(default_factory=lambda: array("i"))
    hashes: dict[int, str] = field(default_factory=dict)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    before: int = 0
    ended: FinishReason | None = None
    num_output: int | None = None
    cancelled: bool = False


class Past(NamedTuple):
    """A recorded run.

    entries: all transitions, in the order of the recording.
    requests: by the arrival of the first sequence: the number of sequences before.
    outputs: of each sequence, by its arrival.
    choices: how the beams of a request went on, step by step, by the arrival of the first beam.
    prompts: token ids by the arrival of the first sequence, where they were recorded.
    timed: whether the recording has times. Without them, a step takes 1.
    version: the pagedjax that recorded.
    own_policy: how a policy in a user's file was named.
    """

    config: SchedulerConfig
    policy: Policy
    entries: tuple[Recorded, ...]
    requests: Mapping[int, Request]
    outputs: Mapping[int, Output]
    choices: Mapping[int, Sequence[Choice]]
    prompts: Mapping[int, Sequence[int]]
    timed: bool
    version: str
    own_policy: str | None = None

    @property
    def steps(self) -> Iterator[PastStep]:
        """The steps that did not fail."""
        schedule: Recorded | None = None
        unfinished = 0
        ready_since: float | None = None  # None: nothing was to do after the step before
        for recorded in self.entries:
            entry = recorded.entry
            if isinstance(entry, Schedule):
                schedule = recorded
                unfinished -= len(entry.plan.rejected)
            elif isinstance(entry, Submit):
                unfinished += len(entry.request.names)
            elif isinstance(entry, Adopt):
                unfinished += 1
            elif isinstance(entry, Release):
                unfinished -= 1
            elif isinstance(entry, Cancel):
                unfinished -= len(entry.events)
            elif isinstance(entry, Commit) and schedule is not None:
                since = schedule.at if ready_since is None else ready_since
                yield PastStep(entry.plan, schedule.at, recorded.at, since)
                ended = [event for event in entry.events if isinstance(event, Finished)]
                unfinished -= sum([event.reason != "rejected" for event in ended])
                ready_since = recorded.at if unfinished else None

    @property
    def shares(self) -> bool:
        """Whether the recorded engine shared prefixes, as far as the recording shows."""
        return any(output.hashes for output in self.outputs.values())


def check_other_file(path: str, recordings: Sequence[str]) -> None:
    """Raises ValueError if a file that is to be written is one of the recordings that are read."""
    for recording in recordings:
        if os.path.exists(path) and os.path.exists(recording) and os.path.samefile(path, recording):
            raise ValueError(
                f"{path} is the recording that is read, and would be overwritten; name another file"
            )


def read(path: str | os.PathLike[str], policies: Mapping[str, Policy] = POLICIES) -> Past:
    """Reads and verifies a recording.

    Raises:
        FileNotFoundError: there is no such file.
        ReplayError: it is no recording, or it does not replay; names the line. Or it was recorded
            with `late_stops`.
    """
    header = replay.header(path)
    policies = replay.with_recorded(policies, header)
    reader = Reader()
    config: SchedulerConfig | None = None
    for line in replay.lines(path, policies):
        if line.recorded != line.recomputed:
            raise replay.ReplayError(
                f"line {line.number} does not replay, so nothing can be said of other runs; "
                f"`pagedjax replay {os.fspath(path)}` shows the difference"
            )
        if line.entry is None:
            config = line.transition.state.config
            if config.late_stops:
                raise replay.ReplayError(
                    f"{os.fspath(path)} was recorded with late_stops, and a run that is done again "
                    "plans each step when the one before has ended; record without late_stops"
                )
        else:
            reader.add(line.entry, line.transition.at, line.transition.prompt)
    assert config is not None, "the first line is the header"
    return Past(
        config,
        policies[header["policy"]],
        entries=tuple(reader.entries),
        requests=reader.requests,
        outputs=reader.outputs,
        choices=reader.choices,
        prompts=reader.prompts,
        timed=reader.timed,
        version=header["pagedjax"],
        own_policy=header.get("own_policy"),
    )


def in_steps(past: Past) -> Past:
    """The past with numbers of steps as times."""
    entries: list[Recorded] = []
    steps = 0
    for recorded in past.entries:
        steps += isinstance(recorded.entry, Commit)
        entries.append(recorded._replace(at=float(steps)))
    return past._replace(entries=tuple(entries), timed=False)


class Reader:
    """Collects what the lines of a recording say."""

    def __init__(self) -> None:
        self.entries: list[Recorded] = []
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, Output] = {}
        self.choices: dict[int, list[Choice]] = {}
        self.prompts: dict[int, Sequence[int]] = {}
        self.timed = False
        self._steps = 0
        self._arrivals: dict[str, int] = {}  # by id, of the sequence that had it last

    def add(self, entry: Entry, at: float | None, prompt: Sequence[int] | None = None) -> None:
        """Adds a transition.

        Args:
            at: seconds; None: the recording has no times.
            prompt: of a submit, where it was recorded.
        """
        self._steps += isinstance(entry, Commit)
        self.timed = self.timed or at is not None
        time = float(self._steps) if at is None else at
        arrival = None
        if isinstance(entry, Submit):
            arrival = self._begin(entry.request)
            if prompt is not None:
                entry = entry._replace(prompt=array("i", prompt))
                self.prompts[arrival] = entry.prompt
        elif isinstance(entry, Adopt):
            released = entry.released
            arrival = self._begin(released.request)
            output = self.outputs[arrival]
            output.before = released.length - released.request.prompt_len
            output.hashes.update(enumerate(released.hashes))
        elif isinstance(entry, Cancel):
            arrival = self._arrivals.get(entry.request_id)
            self._add_ends(entry.events, cancelled=True)
        elif isinstance(entry, Commit):
            self._add_hashes(entry)
            for name, choice in entry.choices.items():
                self.choices.setdefault(self._arrivals[name], []).append(choice)
            self._add_tokens(entry.events)
            self._add_drafts(entry)
            self._add_ends(entry.events)
        self.entries.append(Recorded(entry, time, arrival))

    def _begin(self, request: Request) -> int:
        """Adds the sequences of a request -> the arrival of the first one."""
        first = len(self.outputs)
        self.requests[first] = request
        for arrival, name in enumerate(request.names, first):
            self._arrivals[name] = arrival
            self.outputs[arrival] = Output(first, hashes=dict(enumerate(request.hashes)))
        return first

    def _add_hashes(self, commit: Commit) -> None:
        if not commit.hashes:
            return
        for seq in commit.plan.seqs:
            hashes = commit.hashes.get(seq.request.request_id, ())
            self.outputs[seq.arrival].hashes.update(enumerate(hashes, len(seq.hashes)))

    def _add_tokens(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    self.outputs[self._arrivals[name]].tokens.append(token)

    def _add_drafts(self, commit: Commit) -> None:
        if not commit.plan.drafts:
            return
        lengths = {
            seq.request.request_id: length
            for seq, length in zip(commit.plan.seqs, commit.plan.lengths, strict=True)
        }
        for event in commit.events:
            if isinstance(event, Verified):
                for name, drafts, accepted in zip(
                    event.request_ids, event.drafts, event.accepted, strict=True
                ):
                    output = self.outputs[self._arrivals[name]]
                    output.drafts[lengths[name]] = (drafts, accepted)

    def _add_ends(self, events: Sequence[Event], *, cancelled: bool = False) -> None:
        for event in events:
            if isinstance(event, Finished):
                output = self.outputs[self._arrivals[event.request_id]]
                output.ended = event.reason
                output.num_output = event.num_output
                output.cancelled = cancelled
