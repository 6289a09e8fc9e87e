"""What a recorded run got from outside: `read(path)`.

These are its requests, cancellations and other inputs with their times, the tokens of each
sequence, and what each step decided and how long it took.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedjax.host import replay
from pagedjax.host.event_log import Adopt, Cancel, Commit, Entry, Release, Schedule, Submit
from pagedjax.host.policies import POLICIES, Policy
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Choice, Finished, Plan, Sampled

Decision = tuple[object, ...]


def decision(plan: Plan) -> Decision:
    """What a step decides, without the names of blocks: which sequences compute which tokens, with
    how many drafts, and who enters and leaves the running ones.
    """
    return (
        tuple([seq.request_id for seq in plan.seqs]),
        plan.starts,
        plan.counts,
        plan.drafts,
        plan.admitted,
        plan.cached,
        plan.preempted,
        plan.swapped,
        plan.rejected,
    )


class Input(NamedTuple):
    """Something that came from outside.

    entry: a submit, cancel, forget, restart, update, release or adopt.
    at: seconds since the recording began; without times, the number of steps before it.
    """

    entry: Entry
    at: float


class PastStep(NamedTuple):
    """A step of the recorded run.

    started, finished: seconds, see `Input.at`. `finished` is None if the step failed.
    commit: the tokens that arrived; None if the step failed.
    """

    schedule: Schedule
    started: float
    finished: float | None
    commit: Commit | None


@dataclass
class Output:
    """What a sequence generated in the recorded run, as far as it went.

    tokens: without the prompt.
    hashes: of its first full blocks, as far as they were recorded; the prompt's are among them.
    before: output tokens that it had when it came from another engine, whose values are not known.
    ended: "stop", "length", "abort" or "rejected"; None: it was unfinished.
    cancelled: whether it was ended from outside of the scheduler, for example by a stop string.
    """

    tokens: array = field(default_factory=lambda: array("i"))
    hashes: tuple[str, ...] = ()
    before: int = 0
    ended: str | None = None
    cancelled: bool = False


class Past(NamedTuple):
    """A recorded run.

    items: inputs and steps, in the order of the recording.
    outputs: of each sequence by its arrival: the number of sequences that were submitted or forked
        before.
    choices: how the beams of a request went on, step by step, by the arrival of the first beam.
    timed: whether the recording has times. Without them, a step takes 1.
    """

    config: SchedulerConfig
    policy: Policy
    items: tuple[Input | PastStep, ...]
    outputs: Mapping[int, Output]
    choices: Mapping[int, Sequence[Choice]]
    timed: bool


def read(path: str | os.PathLike[str], policies: Mapping[str, Policy] = POLICIES) -> Past:
    """Reads and verifies a recording.

    Raises:
        FileNotFoundError: there is no such file.
        ReplayError: it is no recording, or it does not replay; names the line.
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
        else:
            reader.add(line.entry, line.transition.at)
    assert config is not None, "the first line is the header"
    return Past(
        config,
        policies[header["policy"]],
        tuple(reader.items),
        reader.outputs,
        reader.choices,
        reader.timed,
    )


class Reader:
    """Collects what the lines of a recording say."""

    def __init__(self) -> None:
        self.items: list[Input | PastStep] = []
        self.outputs: dict[int, Output] = {}
        self.choices: dict[int, list[Choice]] = {}
        self.timed = False
        self._steps = 0
        self._arrivals: dict[str, int] = {}  # of unfinished sequences, by id
        self._schedule: tuple[Schedule, float] | None = None  # whose commit has not come

    def add(self, entry: Entry, at: float | None) -> None:
        """Add a transition. Args: at: seconds; None: the recording has no times."""
        self.timed = self.timed or at is not None
        time = float(self._steps) if at is None else at
        if isinstance(entry, Schedule):
            self._end_failed_step()
            self._schedule = (entry, time)
            for name in entry.plan.rejected:
                self._end(name, "rejected")
        elif isinstance(entry, Commit):
            assert self._schedule is not None, "a commit that replays has a schedule before it"
            schedule, started = self._schedule
            self._schedule = None
            self._steps += 1
            finished = float(self._steps) if at is None else at
            self.items.append(PastStep(schedule, started, finished, entry))
            self._add_tokens(entry)
        else:
            self._end_failed_step()
            self._add_input(entry)
            self.items.append(Input(entry, time))

    def _end_failed_step(self) -> None:
        if self._schedule is not None:
            self.items.append(PastStep(*self._schedule, None, None))
            self._schedule = None

    def _add_input(self, entry: Entry) -> None:
        if isinstance(entry, Submit):
            for name in entry.request.names:
                self._begin(name, entry.request.hashes)
        elif isinstance(entry, Adopt):
            released = entry.released
            self._begin(released.request.request_id, released.hashes)
            before = released.length - released.request.prompt_len
            self.outputs[len(self.outputs) - 1].before = before
        elif isinstance(entry, Release):
            self._arrivals.pop(entry.released.request.request_id)
        elif isinstance(entry, Cancel):
            for event in entry.events:
                if isinstance(event, Finished):
                    self._end(event.request_id, event.reason, cancelled=True)

    def _begin(self, name: str, hashes: tuple[str, ...]) -> None:
        arrival = len(self.outputs)
        self._arrivals[name] = arrival
        self.outputs[arrival] = Output(hashes=hashes)

    def _add_tokens(self, commit: Commit) -> None:
        for seq in commit.plan.seqs:
            hashes = commit.hashes.get(seq.request_id)
            if hashes:
                self.outputs[seq.arrival].hashes = (*seq.hashes, *hashes)
        for name, choice in commit.choices.items():
            self.choices.setdefault(self._arrivals[name], []).append(choice)
        for event in commit.events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    self.outputs[self._arrivals[name]].tokens.append(token)
            elif isinstance(event, Finished):
                self._end(event.request_id, event.reason)

    def _end(self, name: str, reason: str, *, cancelled: bool = False) -> None:
        output = self.outputs[self._arrivals.pop(name)]
        output.ended = reason
        output.cancelled = cancelled
