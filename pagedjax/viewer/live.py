"""The last steps of a running engine, for a page that watches it.

    live = Live(engine.state, engine.config.policy)
    ...
    before, result = engine.state, engine.step()                # the engine's thread
    live.stepped(before, result, result.events, engine.state)
    before, events = engine.state, engine.cancel("a")
    live.stepped(before, None, events, engine.state)            # so that it is known why "a" ended
    ...
    json.dumps(live.since(k))                                   # any thread

States are immutable, so the engine's thread only keeps them, and who asks makes the frames of them. A `Live` is an
`Observer` of the server's worker.
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
from pagedjax.viewer import frames, picture
from pagedjax.viewer.document import facts
from pagedjax.viewer.picture import Frame, Picture

REPLY = 500  # frames in one reply at most


class Noted(NamedTuple):
    """What the engine's thread leaves for who asks: a step, or what else changed the state."""

    serial: int  # without a gap, or some were dropped
    before: SchedulerState
    after: SchedulerState
    events: tuple[Event, ...]
    plan: Plan | None  # None: no step
    times: tuple[float, float]  # when the step began and ended, by time.perf_counter


class Live:
    """The frames of the last `keep` steps and the picture that they begin from. Memory stays bounded.

    Args:
        state: the scheduler's, now; requests under way are taken as new.
        policy: what the engine schedules with, or its name as in `EngineConfig.policy`.
        keep: steps at most.

    Raises:
        ValueError: a policy that is not known, or keep below 1.
    """

    def __init__(self, state: SchedulerState, policy: str | Policy = "fcfs", *, keep: int = 1_000) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; a page shows at least 1 step")
        self._policy = find(policy) if isinstance(policy, str) else policy
        self._about = facts(state.config._asdict(), self._policy.name, __version__)
        self._run = uuid4().hex[:12]
        self._keep = keep
        self._noted: deque[Noted] = deque(maxlen=keep)
        self._serial = 0  # of the next; the engine's thread alone changes it
        self._lock = threading.Lock()  # of everything below
        self._expected = 0  # the serial of the next to fold
        self._began: float | None = None  # the first step that was noted
        self._frames: deque[Frame] = deque()
        self._next = 0  # number of the next frame
        self._begin(state)

    # the engine's thread

    def stepped(
        self, before: SchedulerState, result: StepResult | None, events: tuple[Event, ...], after: SchedulerState
    ) -> None:
        """Take in a step, or with no result what else changed the state.

        Args:
            before, after: `engine.state` before and after it.
            result: what `engine.step()` returned.
            events: those of the result, and of cancels behind it.
        """
        plan, times = (None, (0.0, 0.0)) if result is None else (result.plan, (result.started, result.finished))
        self._noted.append(Noted(self._serial, before, after, tuple(events), plan, times))
        self._serial += 1

    def added(self, names: Any, ask: Any, at: float, after: SchedulerState) -> None:
        """A request has come: the state before the next step tells of it."""

    # any thread

    def since(self, k: int) -> dict[str, Any]:
        """What a page needs that has the frames up to number k - 1: JSON-able, and bounded.

        Returns:
            run: an id of this buffer; first: the number of the first of `frames`; next: what to ask for then; more:
            whether there is more already. If frame k is not kept any more, or never was, also `base`, the frame that
            makes the picture before `first`, and `about`, what the page says of the configuration: it begins anew.

        Raises:
            ValueError: k is no number of a frame.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise ValueError(f"since is {k!r}; it must be a whole number from 0")
        with self._lock:
            self._fold_all()
            oldest = self._next - len(self._frames)
            anew = not 0 < oldest <= k <= self._next
            first = oldest if anew else k
            some = list(islice(self._frames, first - oldest, first - oldest + REPLY))
            base = picture.whole(self._base) if anew else None
            newest = self._next
        after = first + len(some)
        reply: dict[str, Any] = {"run": self._run, "first": first, "frames": some, "next": after}
        reply["more"] = after < newest
        return reply if base is None else reply | {"about": self._about, "base": base}

    def _fold_all(self) -> None:
        while self._noted:
            noted = self._noted.popleft()
            if noted.serial != self._expected:
                self._begin(noted.before)
            self._expected = noted.serial + 1
            self._fold_one(noted)

    def _begin(self, state: SchedulerState) -> None:
        """Start from a state whose past is not known. A number is left out, so that every page notices."""
        self._frames.clear()
        self._next += 1
        self._base = Picture()
        self._fold, frame = frames.rested(frames.start_from(state))
        self._append(frame)

    def _fold_one(self, noted: Noted) -> None:
        fold = frames.passed(self._fold, noted.before)
        if noted.plan is None:
            fold = frames.passed(fold, noted.after, noted.events)
        else:
            self._began = noted.times[0] if self._began is None else self._began
            started, finished = (round(max(0.0, at - self._began), 6) for at in noted.times)
            # the scheduler is pure: what the cache looked like while the step ran is what it decides from `before`
            running, _ = scheduler.schedule(noted.before, self._policy)
            fold = frames.scheduled(fold, running, noted.plan, started)
            fold, frame = frames.committed(fold, noted.after, noted.events, finished)
            self._append(frame)
        if not fold.numbers and (fold.log or not fold.shown.rest):  # nothing is left to do: the cache as it stays
            fold, frame = frames.rested(fold)
            self._append(frame)
        self._fold = fold

    def _append(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._next += 1
        if len(self._frames) > self._keep:
            self._base = picture.apply(self._base, self._frames.popleft())
