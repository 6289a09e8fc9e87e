"""The processes of one engine, as each of them sees the others: `Leader` in process 0, `Follower`
in every other process.

The leader orders inputs and sends them; followers receive them. Beside that, each process sends
signs of life, which say how far it has come. If a process ends, is stopped or makes no progress,
all processes end within the timeout, with the exit status EXIT_STATUS and a sentence that names it:
their devices wait for each other, so none of them can go on.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pagedjax.engine.processes.connection import Connection, Message, encode, message_bytes, text_of
from pagedjax.engine.processes.difference import difference
from pagedjax.engine.processes.watch import Progress, Stage, late

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h
ANSWER_SECONDS = 3.0  # for the answers to clients, before the process ends
CAUSE_SECONDS = 1.0  # an error of a device may come before the news of the process that caused it
BEATS = 10  # signs of life within the timeout
# process 0 keeps the lines of so many steps; a follower is behind by at most the lookahead's depth
KEPT_STEPS = 16


class ProcessFailed(SystemExit):
    """A process of the engine has failed. It is no `Exception`, because nobody can go on after
    it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_STATUS)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Group:
    """What both sides share: how far this process has come, and how all of them end.

    Attributes:
        failure: why the processes end; None while they run.
        on_failure: functions that are called with the reason, in any thread, before this process
            ends.
        steps, engines: how many were begun so far. Steps are counted over all engines.
    """

    def __init__(
        self, process: int, processes: int, timeout: float, exit: Callable[[int], Any] = os._exit
    ) -> None:
        """`exit`: ends the process, also while its main thread waits for a device."""
        self.process = process
        self.processes = processes
        self.timeout = timeout
        self.failure: str | None = None
        self.on_failure: list[Callable[[str], None]] = []
        self._exit = exit
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._closing = False
        self.steps = 0
        self.engines = 0
        self._stage = "starting"
        self._since = time.monotonic()

    def __str__(self) -> str:
        """What this process does, for people."""
        role = "takes the requests" if self.process == 0 else "follows process 0"
        return f"process {self.process} of {self.processes} {role}"

    # progress of this process ---------------------------------------------------------------------

    def begin_step(self) -> None:
        self.steps += 1
        self.enter("scheduling")

    def enter(self, stage: Stage) -> None:
        """Say how far this process has come."""
        self._stage = stage
        self._since = time.monotonic()

    @property
    def progress(self) -> Progress:
        stage: Any = self._stage
        return Progress(self.steps, stage, time.monotonic() - self._since)

    def _beat(self) -> bytes:
        step, stage, seconds, _ = self.progress
        return encode({"beat": [step, stage, seconds]})

    def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(
            target=function, args=args, name=f"pagedjax-{function.__name__}", daemon=True
        ).start()

    def _watch(self) -> None:
        while not (self._over.wait(self.timeout / BEATS) or self._closing):
            self._check()

    def _check(self) -> None:
        raise NotImplementedError

    # the end --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ProcessFailed if a process has failed."""
        if self.failure is not None:
            raise ProcessFailed(self.failure)

    def fail(self, reason: str, *, tell: Callable[[str], None] | None = None) -> None:
        """End this process, and tell others why. Only the first reason counts."""
        with self._lock:
            if self.failure is not None or self._closing:
                return
            self.failure = reason
        if tell:
            tell(reason)
        print(f"pagedjax: {reason}; process {self.process} ends", file=sys.stderr, flush=True)
        for function in self.on_failure:
            with suppress(Exception):
                function(reason)
        if self.on_failure:
            time.sleep(ANSWER_SECONDS)
        self._leave()

    def _leave(self) -> None:
        self._over.set()
        self._exit(EXIT_STATUS)

    def wait_for_the_end(self) -> None:
        """If a process has failed, wait until this one ends."""
        if self.failure is not None:
            self._over.wait(2 * ANSWER_SECONDS)
            self._exit(EXIT_STATUS)


class Leader(Group):
    """Process 0. It sends inputs to all others, and decides who is late."""

    def __init__(
        self, peers: Mapping[int, tuple[Connection, Connection]], *args: Any, **options: Any
    ) -> None:
        """
        Args:
            peers: by process, the connection of inputs and the connection of all else.
        """
        super().__init__(0, len(peers) + 1, *args, **options)
        self._inputs = {i: inputs for i, (inputs, _) in peers.items()}
        self._control = {i: control for i, (_, control) in peers.items()}
        self._last_beats = {i: (Progress(), time.monotonic()) for i in peers}
        self._gone: set[int] = set()  # processes that said that they end
        self._closed: set[int] = set()  # processes that closed their connection
        self._pending: list[str] = []
        self._lines: dict[int, list[str]] = {}
        self._opened: Counter[int] = Counter()
        # by process, the last engine that it could not build
        self._not_built: Counter[int] = Counter()
        for i in peers:
            self._in_thread(self._listen, i)
        self._in_thread(self._watch)

    def order(self, name: str, **body: Any) -> None:
        """The next input of every process; it is sent with the next `flush`."""
        self.order_text(text_of({"input": name, **body}))

    def order_text(self, text: str) -> None:
        """The same as `order`, for an input that is JSON already."""
        self._pending.append(text)

    def order_step(self, lines: list[str], **body: Any) -> None:
        """Send the next step, at once. Its lines are kept, to name a difference if there is one."""
        self._lines[self.steps] = lines
        self._lines.pop(self.steps - KEPT_STEPS, None)
        self.order("step", number=self.steps, **body)
        self.flush()

    def open(self, facts: dict[str, Any]) -> None:
        """Begin a new engine in all processes, and wait until each of them is ready to build it.
        There is no time limit, because loading takes long.

        Raises:
            ProcessFailed: a process has other options, or has failed.
        """
        self.engines += 1
        self.order("open", number=self.engines, facts=facts)
        self.flush()
        while any(self._opened[i] < self.engines for i in self._control):
            self._over.wait(0.005)
            self.check()

    def not_built(self, reason: str) -> None:
        """This process cannot build the engine. Wait until the others say the same of themselves;
        if one does not within the timeout, all processes end.
        """
        self._not_built[0] = self.engines
        self._wait_for_not_built(
            f"process 0 cannot build the engine: {reason}", list(self._control)
        )

    def _wait_for_not_built(self, reason: str, processes: Sequence[int]) -> None:
        deadline = time.monotonic() + self.timeout
        while any(self._not_built[i] < self.engines for i in processes) and self.failure is None:
            if time.monotonic() > deadline:
                self.fail(reason)
            self._over.wait(0.01)

    def flush(self) -> None:
        """Send the inputs so far.

        Raises:
            ProcessFailed: a process has failed.
        """
        self.check()
        data = b"".join(message_bytes(text) for text in self._pending)
        self._pending = []
        if data:
            for connection in self._inputs.values():
                connection.send(data)

    def close(self) -> None:
        """Let the other processes end, and wait for them. If one does not end, this process fails
        with a message that names it.
        """
        error = getattr(sys, "last_value", None)  # what nobody caught
        if error is not None:
            self.fail(f"process 0 ended: {type(error).__name__}: {error}")
        if not self.engines:
            self.fail("process 0 ended before it had an engine")
        if self.failure is not None:
            self.wait_for_the_end()
            return
        self.order("end")
        with suppress(ProcessFailed):
            self.flush()
        deadline = time.monotonic() + self.timeout
        while (
            len(self._gone) < len(self._control)
            and self.failure is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        missing = [i for i in self._control if i not in self._gone]
        if missing and self.failure is None:
            self.fail(f"process {missing[0]} did not end for {self.timeout:g} s", tell=self._tell)
        self.wait_for_the_end()
        self._closing = True
        for connection in (*self._inputs.values(), *self._control.values()):
            connection.close()

    def fail(self, reason: str, **options: Any) -> None:
        super().fail(reason, **({"tell": self._tell} | options))

    def fail_if_nobody_else(self, reason: str) -> None:
        """End all processes for this reason, after a pause: it may be the consequence of another
        process's end, whose reason comes first then.
        """
        self._over.wait(CAUSE_SECONDS)
        self.fail(reason)

    def _leave(self) -> None:
        """Wait until the others have read the reason, and end. If this process, JAX's coordinator,
        ended before, JAX would abort them.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        while len(self._closed) < len(self._control) and time.monotonic() < deadline:
            time.sleep(0.005)
        super()._leave()

    def _tell(self, reason: str) -> None:
        for connection in self._control.values():
            connection.send(encode({"failure": reason}))

    def _listen(self, i: int) -> None:
        for message in self._control[i].messages():
            if "beat" in message:
                self._last_beats[i] = Progress(*message["beat"]), time.monotonic()
            elif "differs" in message:
                report = message["differs"]
                leader_lines = self._lines.get(report["step"], [])
                reason = report.get("what") or difference(i, leader_lines, report["lines"])
                self._in_thread(
                    self.fail,
                    f"process {i} differs from process 0 in step {report['step']}: {reason}",
                )
            elif "not_built" in message:
                self._not_built[i] = self.engines
                reason = f"process {i} cannot build the engine: {message['not_built']}"
                self._in_thread(self._wait_for_not_built, reason, [0])
            elif "opened" in message:
                self._opened[i] = message["opened"]
            elif "failed" in message:
                self._in_thread(self.fail_if_nobody_else, message["failed"])
            elif "stop" in message:
                os.kill(os.getpid(), signal.SIGTERM)
            elif "bye" in message:
                self._gone.add(i)
        self._closed.add(i)
        if i not in self._gone and not self._closing:
            moment = "before the first step"
            if self.steps:
                moment = f"while process 0 was at step {self.steps}"
            self.fail(f"process {i} ended {moment}: its connection is closed")

    def _check(self) -> None:
        beat = self._beat()
        time_now = time.monotonic()
        for connection in self._control.values():
            connection.send(beat)
        progress = {0: self.progress}
        for i, (state, heard_at) in self._last_beats.items():
            if i not in self._gone:
                progress[i] = state._replace(silent=time_now - heard_at)
        reason = late(progress, self.timeout)
        if reason:
            self.fail(reason)


class Follower(Group):
    """Every other process. It receives inputs, and tells the leader what goes wrong."""

    def __init__(self, inputs: Connection, control: Connection, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._control = control
        self._heard_at = time.monotonic()
        self._inputs: queue.Queue[Message | None] = queue.Queue()
        self._ended = False
        self._in_thread(self._read, inputs)
        self._in_thread(self._listen)
        self._in_thread(self._watch)

    def receive(self) -> Message:
        """The next input. After "end" there is none.

        Raises:
            ProcessFailed: a process has failed.
        """
        message = None if self.failure is not None else self._inputs.get()
        if message is None:
            # this process ends, or this connection has ended, and the other one brings the reason
            self._over.wait(self.timeout)
            raise ProcessFailed(self.failure or "process 0 has ended")
        if message["input"] == "end":
            self._ended = True
        return message

    def open(self, unequal: Callable[[dict[str, Any]], str | None]) -> None:
        """Wait until process 0 begins a new engine, and say that this process is ready to build it.

        Args:
            unequal: what process 0 says of its engine -> how the engine here differs; None: it is
                the same.

        Raises:
            ProcessFailed: the engines differ, or a process has failed.
        """
        self.enter("starting")
        while (message := self.receive())["input"] != "open":
            if message["input"] in ("end", "step"):
                action = "ended" if message["input"] == "end" else "went on"
                self.report(
                    "failed",
                    f"process {self.process} builds an engine, and process 0 {action} without it",
                )
        if reason := unequal(message["facts"]):
            self.report("failed", f"process {self.process} differs from process 0: {reason}")
        self.engines = message["number"]
        self._control.send(encode({"opened": self.engines}))

    def not_built(self, reason: str) -> None:
        """This process cannot build the engine. If another process can, process 0 ends all."""
        self._control.send(encode({"not_built": reason}))

    def report(self, kind: str, body: Any) -> None:
        """Tell the leader what goes wrong, and wait until it ends all processes.

        Raises:
            ProcessFailed: always.
        """
        self._control.send(encode({kind: body}))
        if not self._over.wait(CAUSE_SECONDS + ANSWER_SECONDS):
            self.fail(str(body))
        raise ProcessFailed(self.failure or str(body))

    def ask_to_stop(self) -> None:
        """Ask process 0 to stop as on SIGTERM."""
        self._control.send(encode({"stop": True}))

    def close(self) -> None:
        """Wait, at the end of this process's program, for the end of the program of process 0.
        After an exception this process exits at once, which ends all.
        """
        if self.failure is None and getattr(sys, "last_value", None) is not None:
            self._exit(1)
        self.enter("waiting")
        while not (self._ended or self.failure):
            if self.receive()["input"] in ("open", "step"):
                self.report(
                    "failed",
                    f"process {self.process} does not follow: its program has ended, and its "
                    "output says why",
                )
        self.wait_for_the_end()
        self._control.send(encode({"bye": True}))
        self._closing = True

    def _leave(self) -> None:
        self._inputs.put(None)  # another thread may wait in `receive`
        super()._leave()

    def _read(self, inputs: Connection) -> None:
        for message in inputs.messages():
            self._inputs.put(message)
        self._inputs.put(None)

    def _listen(self) -> None:
        for message in self._control.messages():
            self._heard_at = time.monotonic()
            if "failure" in message:
                self.fail(message["failure"])
        if not (self._ended or self._closing):
            self.fail("process 0 ended: its connection is closed")

    def _check(self) -> None:
        self._control.send(self._beat())
        silent = time.monotonic() - self._heard_at
        if silent > self.timeout:
            self.fail(
                f"process 0 has not been heard of for {silent:.0f} s: it is stopped, or cannot be "
                "reached"
            )


# how the processes find each other ----------------------------------------------------------------


def accept(
    listener: socket.socket,
    processes: int,
    token: str,
    patience: float,
    timeout: float,
    **options: Any,
) -> Leader:
    """Accept the connections of all other processes.

    Args:
        token: what they must send; other connections are closed.
        patience: seconds until all must have connected.

    Raises:
        TimeoutError: a process has not connected; the message names it.
    """
    connections: dict[int, dict[str, Connection]] = {i: {} for i in range(1, processes)}
    deadline = time.monotonic() + patience
    while missing := [i for i, kinds in connections.items() if len(kinds) < 2]:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            stream, _ = listener.accept()
        except TimeoutError:
            raise TimeoutError(
                f"process {missing[0]} has not connected to process 0 for {patience:g} s"
            ) from None
        stream.settimeout(5)  # a stranger that says nothing must not delay the others
        connection = Connection(stream)
        hello = connection.receive()
        hello = hello if isinstance(hello, dict) else {}
        kind = hello.get("kind")
        i = hello.get("process")
        if hello.get("token") != token or i not in connections or kind not in ("inputs", "control"):
            connection.close()
            continue
        stream.settimeout(None)
        connections[i][kind] = connection
    return Leader(
        {i: (kinds["inputs"], kinds["control"]) for i, kinds in connections.items()},
        timeout,
        **options,
    )


def connect(
    address: tuple[str, int],
    process: int,
    processes: int,
    token: str,
    timeout: float,
    **options: Any,
) -> Follower:
    """Connect to the leader.

    Raises:
        OSError: the leader cannot be reached.
    """
    connections = []
    for kind in ("inputs", "control"):
        stream = socket.create_connection(address, timeout=timeout)
        stream.settimeout(None)
        connections.append(Connection(stream))
        connections[-1].send(encode({"kind": kind, "process": process, "token": token}))
    return Follower(*connections, process, processes, timeout, **options)
