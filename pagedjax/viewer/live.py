"""The last steps of a running engine, for a page that shows them live.

    live = Live(engine.scheduler_state, engine.config.policy)
    ...
    before, result = engine.scheduler_state, engine.step()                # the engine's thread
    live.stepped(before, result, result.events, engine.scheduler_state)
    before, events = engine.scheduler_state, engine.cancel("a")
    live.stepped(before, None, events, engine.scheduler_state)            # the page can then show why "a" ended
    ...
    json.dumps(live.since(k))                                   # any thread

States are immutable. So the engine's thread only stores them, and the thread that calls `since`
makes the frames. A `Live` is an `Observer` of the server's worker.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

from pagedjax import __version__
from pagedjax.host import scheduler
from pagedjax.host.policies import Policy, find
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Event, Plan, StepResult
from pagedjax.host.waiting import why_waiting
from pagedjax.viewer import frames, picture
from pagedjax.viewer.document import facts
from pagedjax.viewer.drafts import offered
from pagedjax.viewer.picture import Frame, Picture

REPLY = 500  # frames in one reply at most


class Record(NamedTuple):
    """A record that the engine's thread stores for `since`: a step, or another change of the
    state."""

    serial: int  # consecutive; a gap means that records were dropped
    before: SchedulerState
    after: SchedulerState
    events: tuple[Event, ...]
    plan: Plan | None  # None: no step
    times: tuple[float, float]  # when the step began and ended, by time.perf_counter


class Live:
    """The frames of the last `keep` steps, and the picture before them. Memory stays bounded.

    Args:
        state: the present state of the scheduler; unfinished requests count as new.
        policy: the policy of the engine, or its name as in `EngineConfig.policy`.
        keep: steps at most.

    Raises:
        ValueError: the policy is unknown, or keep is below 1.
    """

    def __init__(
        self, state: SchedulerState, policy: str | Policy = "fcfs", *, keep: int = 1_000
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; a page shows at least 1 step")
        self._policy = find(policy) if isinstance(policy, str) else policy
        self._about = facts(state.config.record(), self._policy.name, __version__)
        self._run = uuid4().hex[:12]
        self._keep = keep
        self._records: deque[Record] = deque(maxlen=keep)
        self._serial = 0  # of the next record; only the engine's thread changes it
        self._lock = threading.Lock()  # guards all fields below
        self._expected = 0  # the serial of the next record to fold
        self._began: float | None = None  # when the first recorded step began
        self._frames: deque[Frame] = deque()
        self._next = 0  # number of the next frame
        self._begin(state)

    # the engine's thread

    def stepped(
        self,
        before: SchedulerState,
        result: StepResult | None,
        events: tuple[Event, ...],
        after: SchedulerState,
    ) -> None:
        """Records a step, or without a result another change of the state.

        Args:
            before, after: `engine.scheduler_state` before and after the change.
            result: the result of `engine.step()`.
            events: the events of the result, and of cancels that follow from it.
        """
        plan = None
        times = (0.0, 0.0)
        if result is not None:
            plan = result.plan
            times = (result.started, result.finished)
        self._records.append(Record(self._serial, before, after, tuple(events), plan, times))
        self._serial += 1

    def added(self, names: Any, ask: Any, at: float, after: SchedulerState) -> None:
        """A new request needs no record: the state before the next step contains it."""

    # any thread

    def since(self, k: int) -> dict[str, Any]:
        """Returns the frames from number k on, for a page that has the frames before: JSON-able and
        bounded.

        Returns:
            run: an id of this buffer; first: the number of the first of `frames`; next: the `k` of
                the next call; more: whether more frames exist already. If frame k is not in the
                buffer, also `base`, the frame that makes the picture before `first`, and `about`,
                the facts about the configuration: the page starts again.

        Raises:
            ValueError: k is not a whole number from 0.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise ValueError(f"since is {k!r}; it must be a whole number from 0")
        with self._lock:
            self._fold_all()
            oldest = self._next - len(self._frames)
            restarts = not 0 < oldest <= k <= self._next
            first = oldest if restarts else k
            frames = list(islice(self._frames, first - oldest, first - oldest + REPLY))
            base = picture.whole(self._base) if restarts else None
            newest = self._next
        end = first + len(frames)
        reply: dict[str, Any] = {"run": self._run, "first": first, "frames": frames, "next": end}
        reply["more"] = end < newest
        return reply if base is None else reply | {"about": self._about, "base": base}

    def _fold_all(self) -> None:
        while self._records:
            record = self._records.popleft()
            if record.serial != self._expected:
                self._begin(record.before)
            self._expected = record.serial + 1
            self._fold_one(record)

    def _begin(self, state: SchedulerState) -> None:
        """Starts from a state whose past is unknown. One frame number is skipped, so that every
        page notices."""
        self._frames.clear()
        self._next += 1
        self._base = Picture()
        self._fold, frame = frames.rested(frames.start_from(state))
        self._append(frame)

    def _fold_one(self, record: Record) -> None:
        fold = frames.passed(self._fold, record.before)
        if record.plan is None:
            fold = frames.passed(fold, record.after, record.events)
        else:
            self._began = record.times[0] if self._began is None else self._began
            started, finished = (round(max(0.0, at - self._began), 6) for at in record.times)
            # the scheduler is pure: planning again from `before` gives the cache as it was while
            # the step ran
            policy_time = record.plan.now
            running = record.before
            if not running.in_flight:  # with a plan in flight, it is the state of that plan
                running, _ = scheduler.schedule(
                    record.before, self._policy, offered(record.plan), policy_time
                )
            reasons = why_waiting(record.before, self._policy, policy_time)
            memory = frames.memory_text(running, self._policy)
            fold = frames.scheduled(fold, running, record.plan, reasons, started, memory)
            fold, frame = frames.committed(fold, record.after, record.events, finished)
            self._append(frame)
        if not fold.numbers and (fold.log or not fold.picture.at_rest):  # no request is left
            fold, frame = frames.rested(fold)
            self._append(frame)
        self._fold = fold

    def _append(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._next += 1
        if len(self._frames) > self._keep:
            self._base = picture.apply(self._base, self._frames.popleft())
