"""The engine's thread.

Only this thread uses the engine; requests, cancellations and changes reach it through a queue.

    # ValueError: a request can never run; QueueFull: try again later
    submission = await worker.submit(requests)
    async for delta in submission: ...  # new tokens, of all requests
    submission.outputs                  # when all requests have ended
    worker.cancel(submission)           # at any time; its blocks are free before the next step
    await worker.change(function)       # function(engine), between two steps

One call to the event loop delivers everything that a step produced, for all requests.

A failed step is rolled back: its requests return to the queue and the worker continues.
MAX_FAILED_STEPS failed steps in a row end the engine. So does an error after the step, while its
tokens become text, because tokens would be missing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from pagedjax.engine.engine import Engine
from pagedjax.engine.session import Branches, GenerationRequest, SessionStep, output_of
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Event, StepResult
from pagedjax.llm import LLM
from pagedjax.options.own_errors import OwnError
from pagedjax.server.continuation import SECONDS_TOGETHER, Call, Delta, can_go_on
from pagedjax.text.outputs import OutputBuilder, RequestOutput

MAX_FAILED_STEPS = 3  # in a row: the last of them ends the engine
log = logging.getLogger("pagedjax.server")


class Completed(NamedTuple):
    """The output of a request whose branches have all ended."""

    request: int
    output: RequestOutput


class Generated(NamedTuple):
    """New tokens of a whole answer, for its front."""

    deltas: tuple[Delta, ...]


class QueueFull(Exception):
    """The queue has no room. `seconds`: about how long until it has."""

    def __init__(self, waiting: int, limit: int, seconds: int) -> None:
        super().__init__(
            f"{waiting} requests are waiting, and the limit is {limit}; try again in about "
            f"{seconds} s"
        )
        self.seconds = seconds


class TurnedAway(Exception):
    """The policy rejected a request before it had any output."""

    def __init__(self) -> None:
        super().__init__(
            "the policy of this server rejected the request, because it would miss its targets "
            "under the present load; try again later"
        )


class EngineStopped(Exception):
    """The engine does not run any more. Its error, if there is one, is the cause."""


Update = Delta | Generated | Completed | Exception


class Submission:
    """Requests that one client sent together.

    Iterating yields deltas until all requests have ended.
    """

    def __init__(
        self, requests: Sequence[GenerationRequest], deltas: bool, call: Call | None = None
    ) -> None:
        """
        Args:
            deltas: False if only the outputs are needed. Then iterating yields nothing.
            call: gets the tokens. Those that it has already are yielded first.
        """
        self.requests = tuple(requests)
        self.deltas = deltas
        self.call = call
        # deltas that the call has already
        self._num_known = len(call.origin.tokens) if call and deltas else 0
        # of the engine's thread: tokens of a whole answer that are not on their way, and when the
        # last ones went
        self._generated: list[Delta] = []
        self._last_sent = time.monotonic()
        self.received_at = time.perf_counter()
        self._outputs: dict[int, RequestOutput] = {}
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

    @property
    def done(self) -> bool:
        return len(self._outputs) == len(self.requests)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The output of each request, in order. All requests must have ended."""
        return [self._outputs[i] for i in range(len(self.requests))]

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Raises EngineStopped if the engine ends, and TurnedAway if the policy rejects a request."""
        while not self.done:
            update = await self._updates.get()
            if isinstance(update, Exception):
                if self.call is not None and not isinstance(update, TurnedAway):
                    self.call.lost()
                raise update
            if isinstance(update, Completed):
                self._outputs[update.request] = update.output
                continue
            if isinstance(update, Generated):
                self._note(update.deltas)
                continue
            if self._num_known:
                self._num_known -= 1
            else:
                self._note((update,))
            yield update

    def _note(self, deltas: Sequence[Delta]) -> None:
        """Give new tokens to the front, if another engine could go on with them."""
        for delta in deltas:
            if self.call is not None and can_go_on(self.requests[delta.request]):
                self.call.note(delta)

    def updates_of(self, delta: Delta) -> Sequence[Update]:
        """What the event loop is told of a new token. Tokens of a whole answer travel together,
        because only a front needs them. The engine's thread calls it.
        """
        if self.deltas:
            return (delta,)
        self._generated.append(delta)
        now = time.monotonic()
        if now - self._last_sent < SECONDS_TOGETHER:
            return ()
        self._last_sent = now
        generated = Generated(tuple(self._generated))
        self._generated = []
        return (generated,)

    async def completed(self) -> list[RequestOutput]:
        """Wait for all requests -> their outputs. Raises what the iteration raises."""
        async for _ in self:
            pass
        return self.outputs

    def put(self, update: Update) -> None:
        self._updates.put_nowait(update)


class _Owner(NamedTuple):
    """The request that a sequence belongs to."""

    submission: Submission
    request: int
    branches: Branches  # of the request


class Observer(Protocol):
    """A reader of what happens. Its methods run in the engine's thread and change nothing."""

    def added(
        self, names: Sequence[str], request: GenerationRequest, at: float, after: SchedulerState, /
    ) -> None:
        """A request was queued.

        Args:
            names: its branches.
            at: time.perf_counter when the server received it.
        """

    def stepped(
        self,
        before: SchedulerState,
        result: StepResult | None,
        events: tuple[Event, ...],
        after: SchedulerState,
        /,
    ) -> None:
        """A step was made, and the stop strings in its text were found.

        `result` is None for cancellations and for a failed step.
        """


class Worker:
    """Runs an engine in a thread, from `start` to `stop`."""

    def __init__(
        self, llm: LLM, *, max_queue: int = 256, observers: Sequence[Observer] = ()
    ) -> None:
        """`max_queue`: requests that may wait; one more raises `QueueFull`."""
        self.llm = llm
        self.max_queue = max_queue
        self.error: BaseException | None = None  # that ended the engine
        self._session = llm.session
        self._observers = tuple(observers)
        self._logged: set[int] = set()  # ids of observers whose first error was logged
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._owners: dict[str, _Owner] = {}  # by the name of each unfinished sequence
        self._submitted = 0  # requests put into the inbox; only the event loop writes it
        self._received = 0  # requests taken from the inbox; only the thread writes it
        self._failures = 0  # failed steps in a row
        # of steps between two requests that end, as a moving average
        self._seconds_per_request = 0.1
        self._busy_seconds = 0.0  # of steps since a request ended
        self._step_began: float | None = None  # time.perf_counter; None between steps
        self._stopped = True  # before the start and after the end
        self._finishing = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Must be called in the event loop that submits requests."""
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._thread.start()

    def halt(self) -> None:
        """Stop after the present step; unfinished requests get EngineStopped.

        Any thread may call this, any number of times.
        """
        self._inbox.put(("stop", None, None))

    def stop(self) -> None:
        """Halt, and wait for the thread."""
        self.halt()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        return not self._stopped

    @property
    def step_seconds(self) -> float:
        """Seconds that the present step has taken; 0 between steps."""
        start = self._step_began
        return 0.0 if start is None else time.perf_counter() - start

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet, including those in the inbox."""
        return self._submitted - self._received + len(self.llm.engine.scheduler_state.waiting)

    async def submit(
        self,
        requests: Sequence[GenerationRequest],
        *,
        deltas: bool = True,
        call: Call | None = None,
    ) -> Submission:
        """Queue all requests, or none of them.

        Args:
            deltas: False if only the outputs are needed.
            call: of a front. If another engine had its requests, the queue has room for them.

        Raises:
            ValueError: a request that can never run.
            QueueFull: no room in the queue.
            EngineStopped: the engine has ended.
        """
        waiting = self.waiting
        is_new = call is None or not call.origin.taken
        if is_new and waiting + len(requests) > self.max_queue:
            seconds = max(1, min(60, round(self._seconds_per_request * waiting)))
            raise QueueFull(waiting, self.max_queue, seconds)
        submission = Submission(requests, deltas, call)
        self._submitted += len(requests)
        accepted = self._put("add", submission)
        try:
            await accepted
        except asyncio.CancelledError:  # the client left before the request was queued
            self.cancel(submission)
            raise
        return submission

    async def change(self, function: Callable[[Engine], None]) -> None:
        """Call a function with the engine between two steps.

        Raises:
            EngineStopped: the engine has ended.
            Exception: that of the function. Steps continue, so the function must leave the engine
                unchanged then.
        """
        await self._put("change", function)

    def _put(self, verb: str, content: Any) -> asyncio.Future[None]:
        """Send a message to the engine's thread -> its answer."""
        assert self._loop is not None, "call start first"
        answer: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put((verb, content, answer))
        if self._stopped:  # read after the put, so that an end in between is noticed
            answer.cancel()
            raise self._reason() from self.error
        return answer

    def cancel(self, submission: Submission) -> None:
        """End its unfinished requests."""
        if not submission.done:
            self._inbox.put(("cancel", submission, None))

    # in the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                if self._session.branches:
                    self._step()
        except BaseException as error:  # clients are answered in any case
            log.exception("the engine failed")
            self.error = error
        self._finish(self._reason())

    def _receive(self) -> bool:
        """Handle the messages of the inbox -> whether the thread goes on.

        Waits for a message if no request is unfinished.
        """
        wait = not self._session.branches
        while True:
            try:
                verb, content, answer = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if verb == "stop":
                return False
            if verb == "add":
                self._add(content, answer)
            elif verb == "change":
                self._change(content, answer)
            else:
                self._cancel(content)

    def _add(self, submission: Submission, accepted: asyncio.Future[None]) -> None:
        try:
            branches_of_requests = self._session.add(submission.requests)
            updates = self._restored(submission, branches_of_requests)
        except ValueError as error:
            self._call_in_loop(_refuse, accepted, error)
        except Exception as error:
            # It ends the engine. This client is not among the owners, so it is answered here
            self.error = error
            self._call_in_loop(_refuse, accepted, self._reason())
            raise
        else:
            state = self.llm.engine.scheduler_state
            received_at = submission.received_at
            for i, branches in enumerate(branches_of_requests):
                unfinished = _unfinished(branches)
                self._owners |= dict.fromkeys(unfinished, _Owner(submission, i, branches))
                request = submission.requests[i]
                if unfinished:
                    self._notify("added", unfinished, request, received_at, state)
                else:
                    output = output_of(next(iter(branches)), request, branches)
                    updates.append((submission, Completed(i, output)))
            self._call_in_loop(_accept, accepted)
            if updates:
                self._call_in_loop(_deliver, updates)
        self._received += len(submission.requests)

    def _restored(
        self, submission: Submission, branches_of_requests: Sequence[Branches]
    ) -> list[tuple[Submission, Update]]:
        """`_restored`; if it fails, the requests are abandoned. Raises ValueError."""
        try:
            return _restored(submission, branches_of_requests)
        except Exception as error:
            for branches in branches_of_requests:
                self._session.abandon(branches)
            raise ValueError(f"the tokens of another engine do not fit: {error!r}") from error

    def _change(self, function: Callable[[Engine], None], answer: asyncio.Future[None]) -> None:
        try:
            function(self.llm.engine)
        except Exception as error:
            self._call_in_loop(_refuse, answer, error)
        else:
            self._call_in_loop(_accept, answer)

    def _cancel(self, submission: Submission) -> None:
        """Abandon each unfinished request of the submission once."""
        old_state = self.llm.engine.scheduler_state
        events: tuple[Event, ...] = ()
        by_request: dict[int, Branches] = {}
        for name, owner in list(self._owners.items()):
            if owner.submission is submission:
                by_request[owner.request] = owner.branches
                del self._owners[name]
        for branches in by_request.values():
            events += self._session.abandon(branches)
        self._notify("stepped", old_state, None, events, self.llm.engine.scheduler_state)

    def _step(self) -> None:
        old_state = self.llm.engine.scheduler_state
        self._step_began = time.perf_counter()
        try:
            step = self._session.step()
        except Exception:
            self._failures += 1
            new_state = self.llm.engine.scheduler_state
            if self._failures == MAX_FAILED_STEPS or not _rolled_back(old_state, new_state):
                raise
            log.exception(
                "a step failed (%d of %d in a row); it runs again", self._failures, MAX_FAILED_STEPS
            )
            self._notify("stepped", old_state, None, (), new_state)
            return
        finally:
            self._step_began = None
        self._failures = 0
        self._notify(
            "stepped", old_state, step.result, step.events, self.llm.engine.scheduler_state
        )
        updates = self._deltas(step) + self._take_completed(step)
        if updates:
            self._call_in_loop(_deliver, updates)

    def _deltas(self, step: SessionStep) -> list[tuple[Submission, Update]]:
        """The new tokens of a step, for the submissions that want them."""
        updates: list[tuple[Submission, Update]] = []
        for name, token_id, text in step.deltas:
            submission, request, branches = self._owners[name]
            if not submission.deltas and submission.call is None:
                continue
            branch = branches[name]
            assert isinstance(branch, OutputBuilder), "a beam search has no deltas"
            entry = branch.logprobs.get(len(branch.token_ids) - 1)
            reason = branch.finish_reason
            stop_reason = branch.stop_reason
            cached = branch.num_cached or 0
            delta = Delta(request, branch.index, text, token_id, entry, reason, stop_reason, cached)
            updates += [(submission, update) for update in submission.updates_of(delta)]
        return updates

    def _take_completed(self, step: SessionStep) -> list[tuple[Submission, Update]]:
        """Forget the branches that ended -> the outputs of requests without unfinished branches."""
        updates: list[tuple[Submission, Update]] = []
        for name in step.ended:
            owner = self._owners.pop(name, None)
            if owner is None:
                continue  # another request of its submission was rejected
            submission, request, branches = owner
            if any(branch.finish_reason == "rejected" for branch in branches.values()):
                self._cancel(submission)
                updates.append((submission, TurnedAway()))
            elif all(branch.finish_reason is not None for branch in branches.values()):
                output = output_of(name, submission.requests[request], branches)
                updates.append((submission, Completed(request, output)))
        self._busy_seconds = self._busy_seconds + step.result.finished - step.result.started
        if updates:
            seconds = self._busy_seconds / len(updates)
            self._seconds_per_request += 0.2 * (seconds - self._seconds_per_request)
            self._busy_seconds = 0.0
        return updates

    def _notify(self, method: Literal["added", "stepped"], *args: Any) -> None:
        """Call the observers. An error of one is logged once, and does not stop the engine."""
        for observer in self._observers:
            try:
                getattr(observer, method)(*args)
            except Exception:
                if id(observer) not in self._logged:
                    self._logged.add(id(observer))
                    log.exception(
                        "%s failed as an observer; further errors of it are not logged",
                        type(observer),
                    )

    def fail(self, reason: str) -> None:
        """Answer every client with the reason.

        The engine's thread may wait meanwhile for a device that never answers.
        """
        self.error = RuntimeError(reason)
        self._finish(self._reason())

    def _finish(self, error: Exception) -> None:
        """Answer every client with the error. A working engine also cancels what is unfinished."""
        # `fail` may answer first; then the engine's thread answers only what it was just taking
        with self._finishing:
            self._answer(error)

    def _answer(self, error: Exception) -> None:
        self._stopped = True
        submissions = {
            id(owner.submission): owner.submission for owner in list(self._owners.values())
        }
        if self.error is None:
            for submission in submissions.values():
                self._cancel(submission)
        self._owners.clear()
        self._call_in_loop(_deliver, [(submission, error) for submission in submissions.values()])
        while not self._inbox.empty():
            _, _, answer = self._inbox.get()
            if answer is not None:
                self._call_in_loop(_refuse, answer, error)

    def _reason(self) -> EngineStopped:
        if self.error is None:
            return EngineStopped("the server is stopping")
        # clients read it, and an OwnError has the path of a file
        cause = self.error.__cause__ if isinstance(self.error, OwnError) else self.error
        return EngineStopped(f"the engine failed: {cause}")

    def _call_in_loop(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None, "call start first"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            log.debug("an update is dropped: the event loop is closed")


def _rolled_back(before: SchedulerState, after: SchedulerState) -> bool:
    """Whether a step left the state as after a roll-back.

    If not, the step was made, and its tokens are lost.
    """
    return not after.running.seqs and len(after.ids) == len(before.ids)


def _unfinished(branches: Branches) -> tuple[str, ...]:
    """The names of the branches that have not ended."""
    return tuple(name for name, branch in branches.items() if branch.finish_reason is None)


def _restored(
    submission: Submission, branches_of_requests: Sequence[Branches]
) -> list[tuple[Submission, Update]]:
    """Give branches the tokens that other engines made -> their deltas, as these engines had
    them.
    """
    if submission.call is None:
        return []
    deltas: list[tuple[Submission, Update]] = []
    for token in submission.call.origin.tokens:
        branch = list(branches_of_requests[token.request].values())[token.index]
        assert isinstance(branch, OutputBuilder), "tokens of a search are not known before its end"
        text = branch.restore(
            token.token_id, token.logprobs, token.finish_reason, token.stop_reason
        )
        if submission.deltas:
            deltas.append((submission, token._replace(text=text)))
    return deltas


def _accept(accepted: asyncio.Future[None]) -> None:
    if not accepted.done():
        accepted.set_result(None)


def _refuse(accepted: asyncio.Future[None], error: Exception) -> None:
    if not accepted.done():
        accepted.set_exception(error)


def _deliver(updates: Sequence[tuple[Submission, Update]]) -> None:
    for submission, update in updates:
        submission.put(update)
