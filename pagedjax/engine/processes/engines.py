"""One engine in several processes: `LeaderEngine` in process 0, `FollowerEngine` in every other
one.

Every process runs the same pure scheduler on the same inputs, and computes its part of every step
on its own devices. Process 0 puts the inputs in order: requests, cancels (also of stop strings,
timeouts and Ctrl-C, which end a request from outside of the scheduler), resets, recordings, new
parameters, steps. Sampled tokens do not cross the wire: a step leaves them on all devices.

Before a step is sent to the devices, everyone compares a digest of all inputs and transitions so
far, with the plan of this step (digest.py). The scheduler is pure, so equal digests mean equal
states. What differs is named by its transition.
"""

from __future__ import annotations

import dataclasses
import json
import os
import traceback
from collections.abc import Callable, Mapping
from operator import index
from typing import Any

import jax

from pagedjax import __version__
from pagedjax.device.models import Model
from pagedjax.device.placement import fingerprint, fingerprint_of
from pagedjax.engine import interrupts
from pagedjax.engine.engine import Engine
from pagedjax.engine.processes.connection import Message, text_of
from pagedjax.engine.processes.digest import Digest
from pagedjax.engine.processes.group import Follower, Leader, ProcessFailed
from pagedjax.engine.processes.join import joined
from pagedjax.engine.requests import Begun, EngineRequest
from pagedjax.engine.state import EngineState, ScheduledStep, schedule
from pagedjax.host.types import Event, FinishReason, Pending, StepResult
from pagedjax.options.config import EngineConfig, as_dict
from pagedjax.options.params import BeamSearchParams, PoolingParams, SamplingParams


def given_facts(model: Model, config: EngineConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that must be equal in all processes before an engine is built.

    Otherwise processes would run different programs, which wait for each other.
    """
    facts: dict[str, Any] = {f"engine.{name}": value for name, value in as_dict(config).items()}
    facts |= {
        "pagedjax": __version__,
        "jax": jax.__version__,
        "model": repr(model.config),
        "dtype": model.dtype,
        "weights": fingerprint(model),
        "eos_token_ids": list(options.get("eos_token_ids", ())),
        "row_features": [feature.name for feature in options.get("row_features", ())],
    }
    if draft := options.get("draft_model"):
        facts |= {
            "draft model": repr(draft.layers),
            "weights of the draft model": fingerprint_of(draft.params),
        }
    return json.loads(json.dumps(facts, default=str))


def resolved_facts(engine: Engine) -> dict[str, Any]:
    """The facts of a built engine that must be equal before the first input."""
    options = as_dict(engine.config)
    facts: dict[str, Any] = {f"engine.{name}": value for name, value in options.items()}
    facts["policy"] = engine.runtime.policy.name
    return json.loads(json.dumps(facts, default=str))


def first_difference(facts: Mapping[str, Any], leader_facts: Mapping[str, Any]) -> str | None:
    """The first fact of process 0 that has another value here, as a sentence; None if there is
    none.
    """
    for name, value in leader_facts.items():
        if facts.get(name) != value:
            return (
                f"{name} is {facts.get(name)!r} here and {value!r} in process 0; start all "
                "processes with the same options, versions and files"
            )
    return None


def make_engine(model: Model, config: EngineConfig, **options: Any) -> Engine:
    """The engine of this process: a whole one, or its part of one that several processes share.

    Raises:
        ValueError: several processes that are not joined, or without a mesh; or as `Engine`.
        ProcessFailed: another process cannot build it, or was started with other options.
    """
    group = joined()
    processes = jax.process_count()
    if processes == 1:
        return Engine(model, config, **options)
    if config.compilation == "background":
        raise ValueError(
            "compilation is 'background', and all processes must run the same program for a step; "
            f"set compilation='eager' for {processes} processes"
        )
    if config.late_stops:
        raise ValueError(
            "late_stops is True, and several processes agree on one plan at a time; set "
            f"late_stops=False for {processes} processes"
        )
    if group is None:
        raise ValueError(
            f"JAX runs in {processes} processes, and they are not connected; call "
            "pagedjax.engine.processes.join.join() in each of them, before the first engine"
        )
    if model.placement is None and config.mesh is None:
        raise ValueError(
            f"{processes} processes have {jax.device_count()} devices, and mesh is None; set "
            f"mesh={{'tensor': {jax.device_count()}}}"
        )
    facts = given_facts(model, config, options)
    if isinstance(group, Leader):
        group.open(facts)
    else:
        group.open(lambda leader_facts: first_difference(facts, leader_facts))
    try:
        if isinstance(group, Leader):
            return LeaderEngine(group, model, config, **options)
        return FollowerEngine(group, model, config, **options)
    except Exception as error:  # of the configuration, so the others have it too
        group.not_built(one_line(error))
        raise


class LeaderEngine(Engine):
    """The engine of process 0. It sends every input to all processes, in its order.

    An exception in a step cannot be rolled back, because others may have computed it: it ends all
    processes.
    """

    def __init__(self, group: Leader, model: Model, config: EngineConfig, **options: Any) -> None:
        super().__init__(model, config, **options)
        self.group = group
        self.number = group.engines
        self._digest = Digest()
        self._order("engine", facts=resolved_facts(self))
        group.flush()
        group.enter("waiting")

    @interrupts.deferred()
    @interrupts.in_turn
    def _submit(self, request: EngineRequest) -> None:
        request_id = request.names[0]
        params = request.params
        if request.grammar is not None:
            raise ValueError(
                f"request {request_id!r}: structured_outputs run in one process, and this engine "
                "has several; leave them out, or start one process"
            )
        if isinstance(params, SamplingParams) and params.taps:
            raise ValueError(
                f"request {request_id!r}: taps run in one process, and this engine has several; "
                "leave them out, or start one process"
            )
        if (
            isinstance(params, PoolingParams)
            and params.kind != "LAST"
            and self.config.compilation != "lazy"
        ):
            raise ValueError(
                f"pooling of kind {params.kind!r} compiles a program at its first use, while "
                "several processes wait; use 'LAST', or compilation='lazy' with a timeout that is "
                "long enough"
            )
        request = request._replace(
            priority=index(request.priority),
            prompt_token_ids=[index(token) for token in request.prompt_token_ids],
        )
        # before the request is taken: what cannot be sent is refused
        text = text_of({"input": "add", **encoded_request(request)})
        super()._submit(request)
        self._send("add", text)

    @interrupts.deferred()
    @interrupts.in_turn
    def cancel(self, request_id: str, reason: FinishReason = "abort") -> tuple[Event, ...]:
        events = super().cancel(request_id, reason)
        self._order("cancel", request_id=request_id, reason=reason)
        return events

    @interrupts.deferred()
    @interrupts.in_turn
    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._order("forget")

    @interrupts.deferred()
    @interrupts.in_turn
    def update_params(self, tree: Any, pending: Pending | None = None) -> None:
        """Replace the parameters in all processes; each has them from itself
        (`FollowerEngine.follow`).
        """
        super().update_params(tree, pending)
        self._order("update_params", weights=fingerprint(self.model), pending=pending)
        self.group.flush()

    @interrupts.deferred()
    @interrupts.in_turn
    def reset(self) -> None:
        super().reset()
        self._order("reset")

    @interrupts.deferred()
    @interrupts.in_turn
    def record(self, path: Any, *, times: bool = False, prompts: bool = False) -> None:
        super().record(path, times=times, prompts=prompts)
        self._order("record", on=path is not None)

    @interrupts.deferred()
    @interrupts.in_turn
    def step(self, now: float | None = None) -> StepResult | None:
        """Run one step in all processes.

        Raises:
            ProcessFailed: it failed somewhere; all processes end.
        """
        if not self.has_work:
            return None
        self.group.check()
        try:
            return super().step(now)
        except ProcessFailed:
            raise
        except BaseException as error:
            traceback.print_exc()
            reason = f"process 0 failed in step {self.group.steps}: {one_line(error)}"
            self.group.fail_if_nobody_else(reason)
            raise ProcessFailed(self.group.failure or reason) from error
        finally:
            self.group.enter("waiting")

    def sleep(self, level: int = 1) -> None:
        """An engine of several processes does not sleep.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "an engine of several processes does not sleep; end the processes to free their devices"
        )

    @interrupts.in_turn
    def release_followers(self) -> None:
        """Let the other processes return from `FollowerEngine.follow`."""
        self.group.order("release")
        self.group.flush()

    def _order(self, name: str, **body: Any) -> None:
        self._send(name, text_of({"input": name, **body}))

    def _send(self, name: str, text: str) -> None:
        self._digest.input(name, text)
        self.group.order_text(text)

    def _set(self, after: EngineState) -> None:
        self._digest.transitions(after)
        super()._set(after)

    def _schedule(self, now: float | None = None) -> ScheduledStep:
        self.group.begin_step()
        step = super()._schedule(now)
        digest = self._digest.scheduled(step, self._state.sequences, self._state.ahead)
        lines = self._digest.lines
        self._digest.lines = []
        self.group.order_step(
            lines, engine=self.number, drafts=step.drafts, now=step.plan.now, digest=digest
        )
        self.group.enter("running")
        return step


class FollowerEngine(Engine):
    """The engine of every other process: it gets its inputs from process 0."""

    def __init__(self, group: Follower, model: Model, config: EngineConfig, **options: Any) -> None:
        super().__init__(model, config, **options)
        self.group = group
        self.number = group.engines
        self._digest = Digest()
        self._step_input: Message = {}

    sleep = LeaderEngine.sleep

    def follow(
        self,
        *,
        new_params: Callable[[], Any] | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> bool:
        """Apply the inputs of process 0 until it releases this engine (True) or ends (False).

        Args:
            new_params: returns what `update_params` gets in this process, when process 0 calls it.
                Its time counts against the timeout of processes if a step waits for it.
            record: a file for this process's own recording, while process 0 records.

        Raises:
            ProcessFailed: a process has failed; all processes end.
        """
        with interrupts.ignored():
            # a terminal sends Ctrl-C to process 0 too, which makes inputs of it
            while True:
                self.group.enter("waiting")
                message = self.group.receive()
                if message["input"] in ("end", "release"):
                    return message["input"] == "release"
                try:
                    self._apply(message, new_params, record)
                except ProcessFailed:
                    raise
                except BaseException as error:
                    traceback.print_exc()
                    place = f"at the input {message['input']!r}"
                    if message["input"] == "step":
                        place = f"in step {self.group.steps}"
                    self.group.report(
                        "failed",
                        f"process {self.group.process} failed {place}: {one_line(error)}",
                    )

    def _submit(self, request: EngineRequest) -> None:
        raise ValueError(
            f"process {self.group.process} follows process 0, which takes the requests; call "
            "follow() here"
        )

    def _apply(self, message: Message, new_params: Callable[[], Any] | None, record: Any) -> None:
        match message["input"]:
            case "step":
                self._follow_step(message)
                return
            case "open":
                raise ValueError(
                    "process 0 has another engine, and this process still follows one; release it "
                    "first"
                )
            case "engine":
                if reason := first_difference(resolved_facts(self), message["facts"]):
                    raise ValueError(reason)
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
                    self._restart_scheduler()
            case "update_params":
                if new_params is None:
                    raise ValueError(
                        "process 0 has new parameters, and follow() got none here; give it "
                        "new_params"
                    )
                self.update_params(new_params(), message["pending"])
                if fingerprint(self.model) != message["weights"]:
                    raise ValueError(
                        "the new parameters are others than in process 0; give all processes the "
                        "same"
                    )
        self._digest.input(message["input"], text_of(message))

    def _follow_add(self, message: Message) -> None:
        try:
            super()._submit(decoded_request(message))
        except ValueError as error:
            # process 0 took it, so the states differ; the next step says so
            self._digest.input("refused", text_of({"refused": str(error)}))

    def _follow_step(self, message: Message) -> None:
        self.group.begin_step()
        if message["number"] != self.group.steps:
            self._report_difference("it did not get the input of this step")
        if message["engine"] != self.number:
            self._report_difference(
                f"it follows engine {self.number}, and process 0 uses engine {message['engine']}"
            )
        if not self.has_work:
            self._report_difference()
        self._step_input = message
        self.step()

    def _schedule(self, now: float | None = None) -> ScheduledStep:
        inputs = self._step_input
        step = schedule(self.runtime, self._state, inputs["drafts"], inputs["now"])
        digest = self._digest.scheduled(step, self._state.sequences, self._state.ahead)
        if digest != inputs["digest"]:
            self._report_difference()
        self._digest.lines = []
        self.group.enter("running")
        return step

    def _report_difference(self, reason: str | None = None) -> None:
        self.group.report(
            "differs", {"step": self.group.steps, "lines": self._digest.lines, "what": reason}
        )

    def _set(self, after: EngineState) -> None:
        self._digest.transitions(after)
        super()._set(after)


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def encoded_request(request: EngineRequest) -> Message:
    """A request as JSON, without what stays in its process: the grammar and the adapter."""
    request_id, *forks = request.names
    return {
        "request_id": request_id,
        "prompt": request.prompt_token_ids,
        "params": encoded_params(request.params),
        "forks": forks,
        "priority": request.priority,
        "user": request.user,
        "tags": request.tags,
        "predicted": request.predicted,
        "begun": request.begun,
        "service_class": request.service_class,
        "deadline": request.deadline,
        "given": {name: list(tokens) for name, tokens in request.given.items()},
    }


def decoded_request(message: Message) -> EngineRequest:
    """The inverse of `encoded_request`."""
    return EngineRequest(
        names=(message["request_id"], *message["forks"]),
        prompt_token_ids=message["prompt"],
        params=decoded_params(message["params"]),
        priority=message["priority"],
        user=message["user"],
        tags=tuple(message["tags"]),
        predicted=message["predicted"],
        begun=Begun(*message["begun"]) if message["begun"] else None,
        service_class=message["service_class"],
        deadline=message["deadline"],
        given=message["given"],
    )


def encoded_params(params: SamplingParams | BeamSearchParams | PoolingParams) -> Message:
    """Parameters of a request as JSON: the fields that are not at their defaults."""
    fields = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            fields[field.name] = dict(value) if isinstance(value, Mapping) else value
    return {"kind": type(params).__name__, "fields": fields}


def decoded_params(message: Message) -> SamplingParams | BeamSearchParams | PoolingParams:
    """The inverse of `encoded_params`."""
    kinds = {kind.__name__: kind for kind in (SamplingParams, BeamSearchParams, PoolingParams)}
    return kinds[message["kind"]](**message["fields"])
