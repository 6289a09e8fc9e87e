"""Replay: run the scheduler again from an event log, and verify that it decides the same, byte for
byte.

pagedjax replay run.jsonl                    exit code 1 if the run does not replay
python -m pagedjax.host.replay run.jsonl     the same
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from math import isfinite
from os import PathLike
from typing import Any, NamedTuple, get_args

from pagedjax.config import one_of
from pagedjax.host import scheduler
from pagedjax.host.event_log import (
    FORMAT,
    KINDS,
    NOTES,
    Kind,
    Written,
    adopt_line,
    cancel_line,
    commit_line,
    forget_line,
    header_line,
    noted,
    release_line,
    restart_line,
    schedule_line,
    submit_line,
    update_line,
)
from pagedjax.host.kv_policies import View
from pagedjax.host.policies import POLICIES, Policy, find
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Choice, Event, Finished, Pending, Plan, Preempted, Released, Request

REMEDY = (
    "name one that was recorded, by llm.engine.record('run.jsonl') before llm.generate(...), or by `pagedjax serve "
    "--record run.jsonl`"
)


class ReplayError(ValueError):
    """A file that is not a recorded run. The message names the line."""


class Transition(NamedTuple):
    kind: Kind
    state: SchedulerState  # after it
    plan: Plan | None  # of a schedule
    events: tuple[Event, ...]  # of a commit or cancel
    at: float | None = None  # seconds since the recording began, where it says so
    prompt: tuple[int, ...] | None = None  # token ids of a submit, where they were recorded


class Difference(NamedTuple):
    line: int
    recorded: str
    recomputed: str


class Refused(ReplayError):
    """A recorded transition that the scheduler refuses."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(f"line {difference.line} is {difference.recomputed}")
        self.difference = difference


class ReplayReport(NamedTuple):
    """What `verify` found. The counts are those up to the first difference."""

    version: str  # the pagedjax that recorded
    lines: int
    steps: int
    requests: int
    preemptions: int
    finished: dict[str, int]  # by reason
    truncated: bool  # the last line is cut off: the run was killed while it wrote; it is left out
    difference: Difference | None

    @property
    def identical(self) -> bool:
        return self.difference is None


def replay(
    path: str | PathLike[str], policies: Mapping[str, Policy] = POLICIES
) -> Iterator[Transition]:
    """Run the scheduler again from a log -> every transition, the initial state first.

    What the log says of outcomes is not looked at (see `verify`). A last line that is cut off is
    left out.

    Raises:
        ReplayError: an unknown format or policy, a malformed line, or a transition that the
        scheduler refuses.
    """
    return (transition for *_, transition in _rerun(path, policies))


def header(path: str | PathLike[str]) -> dict[str, Any]:
    """The first record of a log: its format, the version that recorded, policy and configuration.

    Raises:
        ReplayError: there is no whole line, or it is no record.
    """
    for _, _, record in _rows(path):
        return record
    raise ReplayError(f"{path} has no whole line: nothing was recorded")


def verify(path: str | PathLike[str], policies: Mapping[str, Policy] = POLICIES) -> ReplayReport:
    """Run the scheduler again and compare every line, byte for byte, up to the first difference.

    Raises:
        FileNotFoundError: there is no such file.
        ReplayError: a folder, an unknown format or policy, or a malformed line.
    """
    version, lines, difference = "", 0, None
    kinds: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    preemptions = 0
    try:
        for lines, recorded, recomputed, transition in _rerun(path, policies):
            version = version or json.loads(recorded)["pagedjax"]
            if recorded != recomputed:
                difference = Difference(lines, recorded, recomputed)
                break
            kinds[transition.kind] += 1
            preemptions += sum(isinstance(event, Preempted) for event in transition.events)
            finished.update(
                event.reason for event in transition.events if isinstance(event, Finished)
            )
    except Refused as refused:
        difference = refused.difference
    ends = dict(sorted(finished.items()))
    cut = truncated(path)
    return ReplayReport(
        version, lines, kinds["commit"], kinds["submit"], preemptions, ends, cut, difference
    )


def _rerun(
    path: str | PathLike[str], policies: Mapping[str, Policy]
) -> Iterator[tuple[int, str, str, Transition]]:
    """Line number, the line as recorded, the line as it should be, and what it did."""
    rows = _rows(path)
    number, recorded, header = next(rows, (1, "", None))
    if header is None:
        raise ReplayError(f"{path} has no whole line: nothing was recorded")
    config, policy, version = _header(header, policies)
    state, plan, written = scheduler.init(config), None, {}
    yield (
        number,
        recorded,
        header_line(config, policy.name, version),
        Transition("init", state, None, ()),
    )
    for number, recorded, record in rows:
        notes = {name: record.pop(name) for name in NOTES if name in record}
        kind, body = next(iter(record.items())) if len(record) == 1 else ("", None)
        try:
            line, transition = _advance(state, plan, policy, written, kind, body)
        except (AttributeError, KeyError, TypeError) as error:
            raise ReplayError(f"line {number} is a malformed {kind}: {error!r}") from error
        except ValueError as error:
            raise Refused(Difference(number, recorded, f"refused: {error}")) from error
        if transition is None:
            raise ReplayError(
                f"line {number} is no transition; one has a single key: {', '.join(KINDS[1:])}"
            )
        state = transition.state
        plan = None if kind == "commit" else transition.plan or plan
        at, prompt = _checked(number, notes, transition)
        yield number, recorded, noted(line, notes), transition._replace(at=at, prompt=prompt)


def _checked(
    number: int, notes: Mapping[str, Any], transition: Transition
) -> tuple[float | None, tuple[int, ...] | None]:
    """The notes of a line, if they are what notes can be."""
    at, prompt = (notes.get(name) for name in NOTES)
    if "at" in notes and (
        isinstance(at, bool) or not isinstance(at, int | float) or not (isfinite(at) and at >= 0)
    ):
        raise ReplayError(
            f"line {number} is at {at!r}; that must be seconds since the recording began, 0 or more"
        )
    if "prompt" not in notes:
        return at, None
    expected = transition.state.waiting[-1].request.prompt_len if transition.kind == "submit" else 0
    ids = tuple(prompt) if isinstance(prompt, list) else ()
    if not expected or len(ids) != expected or not all(type(token) is int for token in ids):
        what = (
            f"its request has {expected} prompt tokens"
            if expected
            else f"a {transition.kind} has none"
        )
        raise ReplayError(
            f"line {number} notes the prompt {prompt!r:.60}; {what}, and a note lists their ids"
        )
    return at, ids


def _advance(
    state: SchedulerState, plan: Plan | None, policy: Policy, written: Written, kind: str, body: Any
) -> tuple[str, Transition | None]:
    """Take the inputs of a line, ignore its outcomes -> the line that it should be and the
    transition.
    """
    if kind == "submit":
        request = _request(body)
        return submit_line(request), Transition(kind, scheduler.submit(state, request), None, ())
    if kind == "cancel":
        state, events = scheduler.cancel(state, body["request_id"], body["reason"])
        return cancel_line(body["request_id"], body["reason"], events, written), Transition(
            kind, state, None, events
        )
    if kind == "schedule":
        offered = body.get("offered", {})
        state, plan = scheduler.schedule(state, policy, offered)
        return schedule_line(plan, written, offered), Transition(kind, state, plan, ())
    if kind == "commit":
        if plan is None:
            raise ValueError("a commit without a schedule before it")
        sampled = [tuple(s) if isinstance(s, list) else s or 0 for s in body["sampled"]]
        hashes = {request_id: tuple(new) for request_id, new in body["hashes"].items()}
        choices = {
            request_id: Choice(*map(tuple, choice))
            for request_id, choice in body["choices"].items()
        }
        state, events = scheduler.commit(state, plan, sampled, hashes, choices)
        return commit_line(plan, sampled, hashes, choices, events, written), Transition(
            kind, state, None, events
        )
    if kind == "forget":
        return forget_line(), Transition(kind, scheduler.forget(state), None, ())
    if kind == "restart":
        return restart_line(written), Transition(kind, scheduler.restart(state), None, ())
    if kind == "update":
        version, pending = body["version"], body["pending"]
        one_of("pending", pending, get_args(Pending))
        if type(version) is not int:
            raise ValueError(f"version is {version!r}; it must be an integer")
        return update_line(version, pending, written), Transition(
            kind, scheduler.update(state, pending), None, ()
        )
    if kind == "release":
        state, released = scheduler.release(state, body["request_id"])
        return release_line(released, written), Transition(kind, state, None, ())
    if kind == "adopt":
        numbers = body["length"], body["computed"], tuple(body["from"]), tuple(body["hashes"])
        released = Released(_request(body["request"]), *numbers)
        state, adopted = scheduler.adopt(state, policy, released)
        return adopt_line(released, adopted, written), Transition(kind, state, None, ())
    return "", None


def _request(fields: Any) -> Request:
    return Request(
        **fields
        | {"stop_token_ids": frozenset(fields["stop_token_ids"])}
        | {name: tuple(fields.get(name, ())) for name in ("forks", "hashes", "tags")}
    )


def _rows(path: str | PathLike[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The whole lines of a file, numbered, as text and as records."""
    check_file(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line[:-1].decode("ascii")
                record = json.loads(text)
            except ValueError as error:
                wrong = "" if number > 1 else f"; {os.fspath(path)} is no recording; {REMEDY}"
                raise ReplayError(f"line {number} is not JSON in ASCII: {error}{wrong}") from None
            if not isinstance(record, dict):
                raise ReplayError(f"line {number} is not a JSON object")
            yield number, text, record


def check_file(path: str | PathLike[str]) -> None:
    """Raises FileNotFoundError or ReplayError if there is no file that may be a recording."""
    if os.path.isdir(path):
        raise ReplayError(
            f"{path} is a directory; name the file that was recorded, e.g. run.jsonl in it"
        )
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {os.fspath(path)}; {REMEDY}")


def truncated(path: str | PathLike[str]) -> bool:
    """Whether the last line is cut off, because the run was killed while it wrote."""
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _header(
    record: dict[str, Any], policies: Mapping[str, Policy]
) -> tuple[SchedulerConfig, Policy, str]:
    if record.get("pagedjax_replay") != FORMAT:
        found = (
            repr(record["pagedjax_replay"]) if "pagedjax_replay" in record else "no format number"
        )
        raise ReplayError(f"line 1 has {found}; this version reads format {FORMAT}; {REMEDY}")
    if record.get("policy") not in policies:
        raise ReplayError(
            f"line 1 names the policy {record.get('policy')!r}; known are {', '.join(sorted(policies))}"
        )
    try:
        found = record["config"]
        config = SchedulerConfig(
            **found | {"views": tuple([View(w, tuple(kept)) for w, kept in found.get("views", ())])}
        )
        scheduler.init(config)
        return config, policies[record["policy"]], str(record["pagedjax"])
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"line 1 is a malformed header: {error!r}") from error


def summary(report: ReplayReport) -> str:
    """A report in a few lines of text."""
    ends = ", ".join(f"{number} {reason}" for reason, number in report.finished.items()) or "none"
    lines = [
        f"recorded by pagedjax {report.version}",
        f"{report.steps} steps, {report.requests} requests, {report.preemptions} preemptions; finished: {ends}",
    ]
    if report.truncated:
        lines.append(
            "the last line is cut off, so the run was killed while it wrote; the lines before it were replayed"
        )
    if report.difference is None:
        return "\n".join([*lines, f"identical: all {report.lines} lines"])
    number, recorded, recomputed = report.difference
    at = next((i for i, (a, b) in enumerate(zip(recorded, recomputed, strict=False)) if a != b), 0)
    cut = slice(max(0, at - 40), at + 60)
    lines.append(f"DIFFERENT from line {number} on, at column {at + 1}")
    return "\n".join([*lines, f"  recorded    {recorded[cut]}", f"  recomputed  {recomputed[cut]}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pagedjax.host.replay",
        description="Run a recorded scheduler again and compare every line.",
        allow_abbrev=False,
    )
    parser.add_argument("log", help="the file that a Recorder wrote")
    parser.add_argument(
        "--policy", help="of your own, that the run had: module:NAME or folder/file.py:NAME"
    )
    options = parser.parse_args(arguments)
    try:
        mine = [find(options.policy)] if options.policy else []
        report = verify(options.log, {**POLICIES, **{policy.name: policy for policy in mine}})
    except (ReplayError, OSError, ValueError) as error:
        print(f"cannot replay {options.log}: {error}", file=sys.stderr)
        return 1
    print(summary(report))
    return 0 if report.identical else 1


if __name__ == "__main__":
    sys.exit(main())
