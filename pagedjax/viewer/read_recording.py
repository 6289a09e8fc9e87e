"""Reads a recorded run as frames of the page: `read(path)`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from pagedjax.host import replay
from pagedjax.host.policies import POLICIES, Policy
from pagedjax.host.replay import ReplayError, Transition
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.waiting import why_waiting
from pagedjax.viewer import frames
from pagedjax.viewer.picture import Frame

REMEDY = "record a run with llm.engine.record('run.jsonl') before llm.generate(...)"


class Run(NamedTuple):
    """A recorded run, read and replayed: what the viewer shows."""

    config: SchedulerConfig
    policy: str
    version: str  # the pagedjax that recorded
    frames: tuple[Frame, ...]
    prompts: dict[int, tuple[int, ...]]  # token ids by the request's number, if they were recorded
    name: str = ""  # of the file
    truncated: bool = False  # its last line is cut off

    @property
    def timed(self) -> bool:
        """Whether the recording has times."""
        return any("at" in frame for frame in self.frames)


def read(path: str | os.PathLike[str], policies: Mapping[str, Policy] = POLICIES) -> Run:
    """Replays a recorded run into frames.

    Raises:
        ReplayError: the file is no recorded run, or this version cannot replay it; names the line
            and the remedy.
        FileNotFoundError: there is no such file.
    """
    path = os.fspath(path)
    replay.check_file(path)
    prompts: dict[int, tuple[int, ...]] = {}
    remedy = f"; {REMEDY}"
    try:
        header = replay.header(path)
        policies = replay.with_recorded(policies, header)
        own_policy = header.get("own_policy")
        if own_policy:
            remedy = (
                f"; the run had the policy {own_policy}, so give --policy "
                f"{shlex.quote(str(own_policy))}"
            )
            if header.get("policy") not in policies:
                remedy = ""  # the error of `replay` says so
        transitions = replay.replay(path, policies)
        first = next(transitions)
        policy = policies[header["policy"]]
        frames_of_run = tuple(fold(chain([first], transitions), prompts, policy))
    except ReplayError as error:
        raise ReplayError(f"{path} cannot be shown: {error}{remedy}") from None
    name = os.path.basename(path)
    config = first.state.config
    return Run(
        config,
        header["policy"],
        header["pagedjax"],
        frames_of_run,
        prompts,
        name,
        replay.truncated(path),
    )


def in_order_of_steps(transitions: Iterable[Transition]) -> Iterator[Transition]:
    """The transitions with each commit before the plan of the next step, which comes first with
    `late_stops` (host/late.py).
    """
    late_plan: Transition | None = None
    for transition in transitions:
        if transition.kind == "schedule" and len(transition.state.in_flight) > 1:
            late_plan = transition
            continue
        yield transition
        if late_plan is not None:
            yield late_plan._replace(state=transition.state)
            late_plan = None


def fold(
    transitions: Iterable[Transition],
    prompts: dict[int, tuple[int, ...]] | None = None,
    policy: Policy | None = None,
) -> Iterator[Frame]:
    """Yields the frames of a run.

    There is one for each step, one whenever no request is left, and one for the end.

    Args:
        prompts: filled with the recorded token ids of prompts, by number.
        policy: the policy of the run; with it, frames say why requests wait.
    """
    folded: Any = None  # the `frames.Fold` so far
    old_state: Any = None  # the scheduler's state before the transition
    for kind, state, plan, events, at, prompt in in_order_of_steps(transitions):
        if kind == "init":
            folded = frames.begin(state.config)
        elif kind == "schedule":
            assert plan is not None, "a schedule makes a plan"
            if folded.frame is not None:  # planned again, because the step did not run
                folded, frame = frames.committed(folded, folded.state, ())
                yield frame
            reasons = why_waiting(old_state, policy, plan.now) if policy else frames.NO_REASONS
            memory = frames.memory_text(state, policy) if policy else ""
            folded = frames.scheduled(folded, state, plan, reasons, at, memory)
        elif kind == "commit":
            folded, frame = frames.committed(folded, state, events, at)
            yield frame
        else:
            idle = not folded.numbers and folded.frame is None and not folded.picture.at_rest
            if kind == "submit" and idle:
                folded, frame = frames.rested(folded)
                yield frame
            if kind == "submit" and prompt is not None and prompts is not None:
                prompts[folded.count] = prompt
            folded = frames.passed(folded, state, events, at)
        old_state = state
    if folded.frame is not None:
        yield folded.frame
    elif not folded.picture.at_rest or folded.log:
        yield frames.rested(folded)[1]
