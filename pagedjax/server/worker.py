"""The engine's own thread: asks go in, deltas come out, and nobody else touches the engine.

    ticket = await worker.submit(asks)      # ValueError: one can never run; Full: come back later
    async for delta in ticket: ...          # as tokens are made, of all asks
    ticket.outputs                          # once they have ended
    worker.cancel(ticket)                   # at any time; its blocks are free at once

What a step brought goes to the event loop in one call, however many requests it served.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Event, FinishReason, StepResult
from pagedjax.llm import LLM
from pagedjax.session import Branches, GenerationRequest, output_of
from pagedjax.text.outputs import OutputBuilder, PositionLogprobs, RequestOutput

log = logging.getLogger("pagedjax.server")


class Delta(NamedTuple):
    """What a step brought to one branch. `text` may lag behind the token: it is what can no longer change."""

    ask: int  # which of the ticket's
    index: int  # of the branch
    text: str
    token_id: int
    logprobs: PositionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class Full(Exception):
    """The queue has no room. `seconds`: about how long until it has."""

    def __init__(self, waiting: int, limit: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting, and {limit} may; try again in about {seconds} s")
        self.seconds = seconds


class Stopped(Exception):
    """The engine runs no more; its error is the cause."""


class Ended(NamedTuple):
    ask: int
    output: RequestOutput


News = Delta | Ended | Exception


class Ticket:
    """What the event loop holds of asks that came together. It yields deltas until all of them have ended."""

    def __init__(self, asks: Sequence[GenerationRequest], deltas: bool) -> None:
        """`deltas`: False for who only wants the outputs."""
        self.asks, self.deltas = tuple(asks), deltas
        self.at = time.perf_counter()
        self._outputs: dict[int, RequestOutput] = {}
        self._news: asyncio.Queue[News] = asyncio.Queue()

    @property
    def done(self) -> bool:
        return len(self._outputs) == len(self.asks)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of each ask, in order, once it is done."""
        return [self._outputs[i] for i in range(len(self.asks))]

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Raises Stopped if the engine fails."""
        while not self.done:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, Ended):
                self._outputs[news.ask] = news.output
            else:
                yield news

    async def whole(self) -> list[RequestOutput]:
        """The outputs, once all asks have ended. Raises Stopped if the engine fails."""
        async for _ in self:
            pass
        return self.outputs

    def put(self, news: News) -> None:
        self._news.put_nowait(news)


class _Mine(NamedTuple):
    """Where the news of a branch go."""

    ticket: Ticket
    ask: int
    branches: Branches  # of the ask


class Observer(Protocol):
    """Somebody who is told what happens, in the engine's thread, and changes nothing."""

    def added(self, names: Sequence[str], ask: GenerationRequest, at: float, after: SchedulerState) -> None:
        """A request has come, with these branches. `at`: seconds of time.perf_counter when the server got it."""

    def stepped(
        self, before: SchedulerState, result: StepResult | None, events: tuple[Event, ...], after: SchedulerState
    ) -> None:
        """A step, with what stop strings ended behind it; no result: requests were cancelled."""


class Worker:
    """Runs an engine in a thread of its own, between `start` and `stop`."""

    def __init__(self, llm: LLM, *, max_queue: int = 256, observers: Sequence[Observer] = ()) -> None:
        """`max_queue`: requests that may wait; one more is refused with `Full`."""
        self.llm, self.max_queue = llm, max_queue
        self.failed: BaseException | None = None
        self._session = llm.session
        self._observers = tuple(observers)
        self._failing: set[int] = set()  # ids of observers whose error was logged
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._mine: dict[str, _Mine] = {}  # by the names of branches under way
        self._asked = 0  # requests on their way to the engine; written by the event loop alone
        self._taken = 0  # of them, those that arrived there; written by the thread alone
        self._pace, self._busy = 0.1, 0.0  # seconds of steps between two ends, lately; and since the last one
        self._over = True  # before the start and after the end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)

    def start(self) -> None:
        """Called in the event loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._thread.start()

    def halt(self) -> None:
        """Let what is under way end with `Stopped` after the present step. From any thread, any number of times."""
        self._inbox.put(("stop", None, None))

    def stop(self) -> None:
        """Halt, and wait for the thread."""
        self.halt()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        return not self._over

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet, those on their way included."""
        return self._asked - self._taken + len(self.llm.engine.state.waiting)

    async def submit(self, asks: Sequence[GenerationRequest], *, deltas: bool = True) -> Ticket:
        """Queue all of them, or none.

        Raises:
            ValueError: one that can never run.
            Full: no room in the queue.
            Stopped: the engine has failed.
        """
        assert self._loop is not None, "start comes first"
        waiting = self.waiting
        if waiting + len(asks) > self.max_queue:
            raise Full(waiting, self.max_queue, max(1, min(60, round(self._pace * waiting))))
        ticket = Ticket(asks, deltas)
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._asked += len(asks)
        self._inbox.put(("add", ticket, accepted))
        if self._over:  # looked at after the put, so that an end meanwhile is not missed
            accepted.cancel()
            raise self._stopped() from self.failed
        try:
            await accepted
        except asyncio.CancelledError:  # the client left before it was answered
            self.cancel(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End what has not ended of it."""
        if not ticket.done:
            self._inbox.put(("cancel", ticket, None))

    # in the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                if self._session.branches:
                    self._step()
        except BaseException as error:
            log.exception("the engine failed")
            self.failed = error
        self._end(self._stopped())

    def _take_in(self) -> bool:
        """Do what was asked meanwhile; wait for something if there is nothing else to do. False is the end."""
        wait = not self._session.branches
        while True:
            try:
                verb, subject, accepted = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if verb == "stop":
                return False
            if verb == "add":
                self._add(subject, accepted)
            else:
                self._cancel(subject)

    def _add(self, ticket: Ticket, accepted: asyncio.Future[None]) -> None:
        try:
            requests = self._session.add(ticket.asks)
        except ValueError as error:
            self._tell(_refuse, accepted, error)
        except Exception as error:  # it ends the engine, and nobody else would answer this client
            self.failed = error
            self._tell(_refuse, accepted, self._stopped())
            raise
        else:
            state = self.llm.engine.state
            for i, branches in enumerate(requests):
                self._mine |= dict.fromkeys(branches, _Mine(ticket, i, branches))
                self._observe("added", tuple(branches), ticket.asks[i], ticket.at, state)
            self._tell(_accept, accepted)
        self._taken += len(ticket.asks)

    def _cancel(self, ticket: Ticket) -> None:
        """What has ended meanwhile is no longer there."""
        before, events = self.llm.engine.state, ()
        for name in [name for name, mine in self._mine.items() if mine.ticket is ticket]:
            events += self._session.abandon(self._mine.pop(name).branches)
        self._observe("stepped", before, None, events, self.llm.engine.state)

    def _step(self) -> None:
        before = self.llm.engine.state
        stepped = self._session.step()
        self._observe("stepped", before, stepped.result, stepped.events, self.llm.engine.state)
        news: list[tuple[Ticket, News]] = []
        for name, token_id, text in stepped.deltas:
            ticket, ask, branches = self._mine[name]
            if not ticket.deltas:
                continue
            branch = branches[name]
            assert isinstance(branch, OutputBuilder), "beams come whole"
            entry = branch.logprobs.get(len(branch.token_ids) - 1)
            reason = branch.finish_reason
            news.append((ticket, Delta(ask, branch.index, text, token_id, entry, reason, branch.stop_reason)))
        ends, self._busy = 0, self._busy + stepped.result.finished - stepped.result.started
        for name in stepped.ended:
            ticket, ask, branches = self._mine.pop(name)
            if all(branch.finish_reason is not None for branch in branches.values()):
                news.append((ticket, Ended(ask, output_of(name, ticket.asks[ask], branches))))
                ends += 1
        if ends:
            self._pace += 0.2 * (self._busy / ends - self._pace)
            self._busy = 0.0
        if news:
            self._tell(_deliver, news)

    def _observe(self, what: Literal["added", "stepped"], *args: Any) -> None:
        """Tell the observers. One that fails must not stop the engine; its first error is logged."""
        for observer in self._observers:
            try:
                getattr(observer, what)(*args)
            except Exception:
                if id(observer) not in self._failing:
                    self._failing.add(id(observer))
                    log.exception("%s failed as an observer; further errors of it are not logged", type(observer))

    def _end(self, error: Exception) -> None:
        """Tell everybody, and let go of what is under way unless the engine is broken."""
        self._over = True
        if self.failed is None:
            for mine in self._mine.values():
                self._session.abandon(mine.branches)
        tickets = {id(mine.ticket): mine.ticket for mine in self._mine.values()}
        self._mine.clear()
        self._tell(_deliver, [(ticket, error) for ticket in tickets.values()])
        while not self._inbox.empty():
            verb, _, accepted = self._inbox.get()
            if verb == "add":
                self._tell(_refuse, accepted, error)

    def _stopped(self) -> Stopped:
        return Stopped("the server is stopping" if self.failed is None else f"the engine failed: {self.failed}")

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None, "start comes first"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, so nobody listens
            log.debug("nobody was told: the event loop is closed")


def _accept(accepted: asyncio.Future[None]) -> None:
    if not accepted.done():
        accepted.set_result(None)


def _refuse(accepted: asyncio.Future[None], error: Exception) -> None:
    if not accepted.done():
        accepted.set_exception(error)


def _deliver(news: Sequence[tuple[Ticket, News]]) -> None:
    for ticket, one in news:
        ticket.put(one)
