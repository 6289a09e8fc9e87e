"""One engine in several processes: `LeaderEngine` in process 0, `FollowerEngine` in every other one.

Every process runs the same pure scheduler on the same inputs, and computes its part of every step on its own devices.
Process 0 puts the inputs in order: requests, cancels (also of stop strings, timeouts and Ctrl-C, which end a request
from outside of the scheduler), resets, steps. Only these cross the wire. Sampled tokens do not: a step leaves them on
all devices.

Before a step is sent to the devices, everyone compares a digest of all inputs and transitions so far, with the plan of
this step. The scheduler is pure, so equal digests mean equal states; and a state that differs is found at the first
plan that it changes, before that plan is computed. What differs is named by its transition.
"""

from __future__ import annotations

import dataclasses
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import jax

from pagedjax import __version__
from pagedjax.config import EngineConfig
from pagedjax.device.models import Model
from pagedjax.engine import interrupts
from pagedjax.engine.engine import Engine
from pagedjax.engine.requests import Sequences
from pagedjax.engine.state import EngineState
from pagedjax.engine.step import ScheduledStep, schedule
from pagedjax.host.event_log import Lines
from pagedjax.host.types import Event, FinishReason, StepResult
from pagedjax.params import BeamSearchParams, SamplingParams
from pagedjax.processes.connection import Message
from pagedjax.processes.group import Follower, Leader, ProcessFailed
from pagedjax.processes.join import joined

SHOWN = 200  # characters of a line in an error


class Digest(Lines):
    """A digest of all inputs and transitions of one engine, and the lines since the last step, to name a difference."""

    def __init__(self) -> None:
        super().__init__()
        self._hash = blake2b(digest_size=16)
        self.lines: list[str] = []

    def _write(self, line: str, at: float | None = None, prompt: Sequence[int] | None = None) -> None:
        self._hash.update(line.encode())
        self.lines.append(line)

    def input(self, message: Message) -> None:
        """An input, after the transitions that it made."""
        self._write(json.dumps(message, separators=(",", ":")))

    def transitions(self, state: EngineState) -> None:
        """The transitions that a state's log has; of a step, those after `scheduled`."""
        for name, arguments in state.log:
            if name != "schedule":
                getattr(self, name)(*arguments)

    def scheduled(self, step: ScheduledStep, sequences: Sequences) -> str:
        """The digest with the plan of a step, and the drafts that the host wrote for it."""
        self.schedule(step.plan, offered=step.offered)
        at = {seq.request.request_id: length for seq, length in zip(step.plan.seqs, step.plan.lengths, strict=True)}
        for name, k in step.offered.items():
            if name in at:
                self._hash.update(sequences[name].tokens[at[name] : at[name] + k].tobytes())
        return self._hash.hexdigest()


def facts(engine: Engine) -> dict[str, Any]:
    """What must be equal in all processes before the first input."""
    found = {f"engine.{name}": value for name, value in dataclasses.asdict(engine.config).items()}
    found |= {"pagedjax": __version__, "jax": jax.__version__, "model": repr(engine.model.config)}
    found |= {"eos_token_ids": list(engine.runtime.eos_token_ids), "policy": engine.runtime.policy.name}
    return json.loads(json.dumps(found, default=str))


def make_engine(model: Model, config: EngineConfig, **options: Any) -> Engine:
    """The engine of this process: a whole one, or its part of one that several processes share.

    Raises:
        ValueError: several processes that are not joined, or without a mesh.
    """
    group, processes = joined(), jax.process_count()
    if processes == 1:
        return Engine(model, config, **options)
    if group is None:
        what = f"JAX runs in {processes} processes, and they are not connected"
        raise ValueError(f"{what}; call pagedjax.processes.join.join() in each of them, before the first engine")
    if model.placement is None and config.mesh is None:
        mesh = f"mesh={{'tensor': {jax.device_count()}}}"
        raise ValueError(f"{processes} processes have {jax.device_count()} devices, and mesh is None; set {mesh}")
    if isinstance(group, Leader):
        return LeaderEngine(group, model, config, **options)
    return FollowerEngine(group, model, config, **options)


class LeaderEngine(Engine):
    """The engine of process 0. It sends every input to all processes, in its order.

    An exception in a step cannot be rolled back, because others may have computed it: it ends all processes.
    """

    def __init__(self, group: Leader, model: Model, config: EngineConfig, **options: Any) -> None:
        super().__init__(model, config, **options)
        self.group, self._digest, self._steps = group, Digest(), 0
        self._order("engine", facts=facts(self))
        group.flush()
        group.enter("waiting")

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        forks: Sequence[str] = (),
        priority: int = 0,
        user: str = "",
        tags: Sequence[str] = (),
    ) -> None:
        names = {"request_id": request_id, "forks": list(forks), "user": user, "tags": list(tags)}
        super().add(request_id, prompt_token_ids, params, forks=forks, priority=priority, user=user, tags=tags)
        prompt = [int(token) for token in prompt_token_ids]
        self._order("add", **names, priority=priority, prompt=prompt, params=encoded_params(params))

    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]:
        events = super().cancel(request_id, reason)
        self._order("cancel", request_id=request_id, reason=reason)
        return events

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._order("forget")

    def update_params(self, tree: Any) -> None:
        super().update_params(tree)
        self._order("update_params")
        self.group.flush()

    def reset(self) -> None:
        super().reset()
        self._order("reset")

    def record(self, path: Any, *, times: bool = False, prompts: bool = False) -> None:
        super().record(path, times=times, prompts=prompts)
        self._order("record", on=path is not None)

    @interrupts.deferred()
    def step(self) -> StepResult | None:
        """Run one step in all processes.

        Raises:
            ProcessFailed: it failed somewhere; all processes end.
        """
        if not self.has_work:
            return None
        self.group.check()
        try:
            return super().step()
        except ProcessFailed:
            raise
        except BaseException as error:
            traceback.print_exc()
            reason = f"process 0 failed in step {self._steps}: {named(error)}"
            self.group.fail_if_nobody_else(reason)
            raise ProcessFailed(self.group.failure or reason) from error
        finally:
            self.group.enter("waiting")

    def release(self) -> None:
        """Let the other processes return from `FollowerEngine.follow`."""
        self.group.order("release")
        self.group.flush()

    def _order(self, name: str, **body: Any) -> None:
        self._digest.input({"input": name, **body})
        self.group.order(name, **body)

    def _set(self, after: EngineState) -> None:
        self._digest.transitions(after)
        super()._set(after)

    def _schedule(self) -> ScheduledStep:
        self._steps += 1
        self.group.enter("scheduling", self._steps)
        self.group.explain = self._explain
        found = super()._schedule()
        digest = self._digest.scheduled(found, self._state.sequences)
        self._sent, self._digest.lines = self._digest.lines, []
        self.group.order("step", number=self._steps, drafts=found.drafts, digest=digest)
        self.group.flush()
        self.group.enter("running")
        return found

    def _explain(self, process: int, report: Message) -> str:
        """In which transition another process differs."""
        start = f"process {process} differs from process 0 in step {report['step']}: "
        if "missing" in report:
            return start + report["missing"]
        for mine, theirs in zip(self._sent, report["lines"], strict=False):
            if mine != theirs:
                return f"{start}process 0 has {_around(mine, theirs)}, and process {process} {_around(theirs, mine)}"
        more, fewer = sorted((self._sent, report["lines"]), key=len, reverse=True)
        if len(more) == len(fewer):
            return f"{start}its drafts, or what was before this step"
        where = f"process {process}" if fewer is report["lines"] else "process 0"
        return f"{start}{where} has no {more[len(fewer)][:SHOWN]}"


def _around(line: str, other: str) -> str:
    """The start of a line, which names the transition, and where it begins to differ from another one."""
    first = next((i for i, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), min(len(line), len(other)))
    start = first - SHOWN // 4
    shown = f"{line[: SHOWN // 4]}...{line[start : start + SHOWN]}" if start > SHOWN // 4 else line[:SHOWN]
    return shown if line.endswith(shown[-9:]) else f"{shown}..."


class FollowerEngine(Engine):
    """The engine of every other process: it gets its inputs from process 0."""

    def __init__(self, group: Follower, model: Model, config: EngineConfig, **options: Any) -> None:
        super().__init__(model, config, **options)
        self.group, self._digest, self._steps = group, Digest(), 0
        self._step_input: Message = {}

    def follow(
        self, *, new_params: Callable[[], Any] | None = None, record: str | os.PathLike[str] | None = None
    ) -> bool:
        """Apply the inputs of process 0 until it releases this engine (True) or ends (False).

        Args:
            new_params: returns what `update_params` gets in this process, when process 0 calls it.
            record: a file for this process's own recording, while process 0 records.

        Raises:
            ProcessFailed: a process has failed; all processes end.
        """
        with interrupts.ignored():  # a terminal sends Ctrl-C to process 0 too, which makes inputs of it
            while True:
                self.group.enter("waiting")
                message = self.group.receive()
                if message["input"] == "end":
                    return False
                try:
                    self._apply(message, new_params, record)
                except ProcessFailed:
                    raise
                except BaseException as error:
                    traceback.print_exc()
                    self.group.report(
                        "failed", f"process {self.group.process} failed {self._at(message)}: {named(error)}"
                    )
                if message["input"] == "release":
                    return True

    def add(self, request_id: str, *args: Any, **options: Any) -> None:
        raise ValueError(
            f"process {self.group.process} follows process 0, which takes the requests; call follow() here"
        )

    def _apply(self, message: Message, new_params: Callable[[], Any] | None, record: Any) -> None:
        match message["input"]:
            case "step":
                self._follow_step(message)
                return
            case "release":
                return
            case "engine":
                self._compare(message["facts"])
            case "add":
                self._follow_add(message)
            case "cancel":
                self.cancel(message["request_id"], message["reason"])
            case "forget":
                self.reset_prefix_cache()
            case "reset":
                self.reset()
            case "record":
                self.record(record if message["on"] else None)
                if message["on"] and record is None:
                    self._forget_arrivals()
            case "update_params":
                if new_params is None:
                    raise ValueError("process 0 has new parameters, and follow() got none here; give it new_params")
                self.update_params(new_params())
        self._digest.input(message)

    def _follow_add(self, message: Message) -> None:
        order = {"priority": message["priority"], "user": message["user"], "tags": message["tags"]}
        params = decoded_params(message["params"])
        try:
            super().add(message["request_id"], message["prompt"], params, forks=message["forks"], **order)
        except ValueError as error:  # process 0 took it, so the states differ; the next step says so
            self._digest.input({"refused": str(error)})

    def _follow_step(self, message: Message) -> None:
        self._steps += 1
        self.group.enter("scheduling", self._steps)
        if message["number"] != self._steps:
            self._differs(missing=f"it did not get the input of step {self._steps}")
        if not self.has_work:
            self._differs()
        self._step_input = message
        self.step()

    def _schedule(self) -> ScheduledStep:
        found = schedule(self.runtime, self._state, self._step_input["drafts"])
        if self._digest.scheduled(found, self._state.sequences) != self._step_input["digest"]:
            self._differs()
        self._digest.lines = []
        self.group.enter("running")
        return found

    def _differs(self, **why: str) -> None:
        self.group.report("differs", {"step": self._steps, "lines": self._digest.lines, **why})

    def _set(self, after: EngineState) -> None:
        self._digest.transitions(after)
        super()._set(after)

    def _at(self, message: Message) -> str:
        return f"in step {self._steps}" if message["input"] == "step" else f"at the input {message['input']!r}"

    def _compare(self, expected: Mapping[str, Any]) -> None:
        """Raises ValueError if this process was started with other options than process 0."""
        own = facts(self)
        for name, value in expected.items():
            if own.get(name) != value:
                what = f"{name} is {own.get(name)!r} here and {value!r} in process 0"
                raise ValueError(f"{what}; start all processes with the same options and versions")


def named(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def encoded_params(params: SamplingParams | BeamSearchParams) -> Message:
    """Parameters of a request as JSON: the fields that are not at their defaults."""
    found = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            found[field.name] = dict(value) if isinstance(value, Mapping) else value
    return {"beams": isinstance(params, BeamSearchParams), "fields": found}


def decoded_params(message: Message) -> SamplingParams | BeamSearchParams:
    """The inverse of `encoded_params`."""
    return (BeamSearchParams if message["beams"] else SamplingParams)(**message["fields"])
