"""Replay: run the scheduler again from an event log, and verify that it decides the same, byte for
byte.

pagedjax replay run.jsonl                    exit code 1 if the run does not replay
python -m pagedjax.host.replay run.jsonl     the same
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from os import PathLike
from typing import Any, NamedTuple, get_args

from pagedjax.host import scheduler
from pagedjax.host.event_log import (
    FORMAT,
    KINDS,
    NOTES,
    Adopt,
    Cancel,
    Commit,
    Entry,
    Forget,
    Release,
    Restart,
    Schedule,
    Submit,
    Update,
    Written,
    header_line,
    kind_of,
    line_of,
    with_notes,
)
from pagedjax.host.kv_policies import View
from pagedjax.host.policies import POLICIES, Policy, find
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Choice, Event, Finished, Pending, Plan, Preempted, Released, Request
from pagedjax.options.config import PrefixCheckpoints, one_of

REMEDY = (
    "name one that was recorded, by llm.engine.record('run.jsonl') before llm.generate(...), "
    "or by `pagedjax serve --record run.jsonl`"
)


class ReplayError(ValueError):
    """A file that is not a recorded run. The message names the line."""


class Transition(NamedTuple):
    """A transition of a replayed run."""

    kind: str  # "init", or one of `event_log.KINDS`
    state: SchedulerState  # after the transition
    plan: Plan | None = None  # of a schedule
    events: tuple[Event, ...] = ()  # of a commit or cancel
    at: float | None = None  # seconds since the recording began, where it says so
    prompt: tuple[int, ...] | None = None  # token ids of a submit, where they were recorded


class Line(NamedTuple):
    """A line of a log, run again.

    recomputed: what the line should be.
    entry: its transition with inputs and outcome; None: it is the header.
    """

    number: int
    recorded: str
    recomputed: str
    transition: Transition
    entry: Entry | None = None


class Difference(NamedTuple):
    """A line that the replay would write differently."""

    line: int
    recorded: str
    recomputed: str


class Refused(ReplayError):
    """A recorded transition that the scheduler refuses."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(f"line {difference.line} is {difference.recomputed}")
        self.difference = difference


class ReplayReport(NamedTuple):
    """The result of `verify`. The counts are those up to the first difference."""

    version: str  # the pagedjax that recorded
    lines: int
    steps: int
    requests: int
    preemptions: int
    finished: dict[str, int]  # by reason
    # the last line is cut off, because the run was killed while it wrote; it was not replayed
    truncated: bool
    difference: Difference | None
    own_policy: str = ""  # of a user's file, as the recorded run named it

    @property
    def identical(self) -> bool:
        return self.difference is None


def replay(
    path: str | PathLike[str], policies: Mapping[str, Policy] = POLICIES
) -> Iterator[Transition]:
    """Runs the scheduler again from a log -> every transition, the initial state first.

    The outcomes in the log are not read (see `verify`). A last line that is cut off is left out.

    Raises:
        ReplayError: an unknown format or policy, a malformed line, or a transition that the
        scheduler refuses.
    """
    return (line.transition for line in lines(path, policies))


def header(path: str | PathLike[str]) -> dict[str, Any]:
    """The first record of a log: its format, the version that recorded, policy and configuration.

    Raises:
        ReplayError: there is no whole line, or it is no record.
    """
    record = next((record for _, _, record in _rows(path)), None)
    if record is None:
        raise ReplayError(f"{path} has no whole line: nothing was recorded")
    return record


def verify(path: str | PathLike[str], policies: Mapping[str, Policy] = POLICIES) -> ReplayReport:
    """Runs the scheduler again and compares every line, byte for byte, up to the first difference.

    Raises:
        FileNotFoundError: there is no such file.
        ReplayError: a folder, an unknown format or policy, or a malformed line.
    """
    version = ""
    own_policy = ""
    count = 0
    difference = None
    kinds: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    preemptions = 0
    try:
        for count, recorded, recomputed, transition, _ in lines(path, policies):
            if not version:
                first_record = json.loads(recorded)
                version = first_record["pagedjax"]
                own_policy = first_record.get("own_policy", "")
            if recorded != recomputed:
                difference = Difference(count, recorded, recomputed)
                break
            kinds[transition.kind] += 1
            preemptions += sum(isinstance(event, Preempted) for event in transition.events)
            finished.update(
                event.reason for event in transition.events if isinstance(event, Finished)
            )
    except Refused as refused:
        difference = refused.difference
    return ReplayReport(
        version,
        count,
        steps=kinds["commit"],
        requests=kinds["submit"],
        preemptions=preemptions,
        finished=dict(sorted(finished.items())),
        truncated=truncated(path),
        difference=difference,
        own_policy=own_policy,
    )


def lines(path: str | PathLike[str], policies: Mapping[str, Policy] = POLICIES) -> Iterator[Line]:
    """Runs the scheduler again -> each line, as it is and as it should be.

    Raises: see `replay`.
    """
    rows = _rows(path)
    number, recorded, first_record = next(rows, (1, "", None))
    if first_record is None:
        raise ReplayError(f"{path} has no whole line: nothing was recorded")
    config, policy, version = _header(first_record, policies)
    transition = Transition("init", scheduler.init(config))
    line = header_line(config, policy.name, version, first_record.get("own_policy"))
    yield Line(number, recorded, line, transition)
    plan: Plan | None = None
    written: Written = {}
    for number, recorded, record in rows:
        notes = {name: record.pop(name) for name in NOTES if name in record}
        kind, body = next(iter(record.items())) if len(record) == 1 else ("", None)
        try:
            state, entry = _advance(transition.state, plan, policy, kind, body)
            line = "" if entry is None else line_of(entry, written)
        except (AttributeError, KeyError, TypeError) as error:
            raise ReplayError(f"line {number} is a malformed {kind}: {error!r}") from error
        except ValueError as error:
            raise Refused(Difference(number, recorded, f"refused: {error}")) from error
        if entry is None:
            raise ReplayError(
                f"line {number} is no transition; one has a single key: {', '.join(KINDS)}"
            )
        if isinstance(entry, Schedule | Commit):
            plan = entry.plan if isinstance(entry, Schedule) else None
        transition = Transition(
            kind,
            state,
            plan=entry.plan if isinstance(entry, Schedule) else None,
            events=entry.events if isinstance(entry, Commit | Cancel) else (),
            at=_time(number, notes),
            prompt=_prompt(number, notes, entry),
        )
        yield Line(number, recorded, with_notes(line, notes), transition, entry)


def _time(number: int, notes: Mapping[str, Any]) -> float | None:
    """The time of a line; None without one. Raises ReplayError for what is no time."""
    time = notes.get("at")
    if "at" in notes and not _is_time(time):
        raise ReplayError(
            f"line {number} is at {time!r}; that must be seconds since the recording began, 0 or "
            "more"
        )
    return time


def _prompt(number: int, notes: Mapping[str, Any], entry: Entry) -> tuple[int, ...] | None:
    """The prompt of a line; None without one. Raises ReplayError for what is not its prompt."""
    if "prompt" not in notes:
        return None
    prompt = notes["prompt"]
    length = entry.request.prompt_len if isinstance(entry, Submit) else 0
    ids = tuple(prompt) if isinstance(prompt, list) else ()
    if not length or len(ids) != length or not all(type(token) is int for token in ids):
        reason = (
            f"its request has {length} prompt tokens"
            if length
            else f"a {kind_of(type(entry))} has none"
        )
        raise ReplayError(
            f"line {number} notes the prompt {prompt!r:.60}; {reason}, and a note lists their ids"
        )
    return ids


def _is_time(at: Any) -> bool:
    """Whether a value is a finite number of at least 0."""
    return isinstance(at, int | float) and not isinstance(at, bool) and isfinite(at) and at >= 0


def _advance(
    state: SchedulerState, plan: Plan | None, policy: Policy, kind: str, body: Any
) -> tuple[SchedulerState, Entry | None]:
    """Runs the transition of a line from its inputs, without its outcomes -> (the state after it,
    the transition). The transition is None if there is no such kind.

    Args:
        plan: what the schedule before a commit planned; None if there was no schedule.
    """
    match kind:
        case "submit":
            request = _request(body)
            return scheduler.submit(state, request), Submit(request)
        case "schedule":
            offered = body.get("offered", {})
            now = body.get("now")
            if now is not None and not _is_time(now):
                raise ValueError(f"now is {now!r}; it must be a number of seconds, 0 or more")
            planned = scheduler.schedule_next(state, policy, offered, now)
            if planned is None:
                raise ValueError("a second plan that depends on the tokens of the first one")
            state, plan = planned
            return state, Schedule(plan, offered)
        case "commit":
            return _commit(state, state.in_flight[0] if state.in_flight else plan, body)
        case "cancel":
            request_id = body["request_id"]
            reason = body["reason"]
            state, events = scheduler.cancel(state, request_id, reason)
            return state, Cancel(request_id, reason, events)
        case "forget":
            return scheduler.forget(state), Forget()
        case "restart":
            return scheduler.restart(state), Restart()
        case "update":
            version = body["version"]
            pending = body["pending"]
            one_of("pending", pending, get_args(Pending))
            if type(version) is not int:
                raise ValueError(f"version is {version!r}; it must be an integer")
            return scheduler.update(state, pending), Update(version, pending)
        case "release":
            state, released = scheduler.release(state, body["request_id"])
            return state, Release(released)
        case "adopt":
            released = Released(
                length=body["length"],
                computed=body["computed"],
                blocks=tuple(body["from"]),
                hashes=tuple(body["hashes"]),
                request=_request(body["request"]),
            )
            state, adopted = scheduler.adopt(state, policy, released)
            return state, Adopt(released, adopted)
    return state, None


def _commit(state: SchedulerState, plan: Plan | None, body: Any) -> tuple[SchedulerState, Commit]:
    """`_advance` of a commit."""
    if plan is None:
        raise ValueError("a commit without a schedule before it")
    sampled = [  # a token that is not used is recorded as null: any token will do
        tuple(sample) if isinstance(sample, list) else sample or 0 for sample in body["sampled"]
    ]
    hashes = {request_id: tuple(chain) for request_id, chain in body["hashes"].items()}
    choices = {
        request_id: Choice(*map(tuple, choice)) for request_id, choice in body["choices"].items()
    }
    state, events = scheduler.commit(state, plan, sampled, hashes, choices)
    return state, Commit(plan, sampled, hashes, choices, events)


def _request(fields: Any) -> Request:
    """The request of a record."""
    stop_token_ids = frozenset(fields["stop_token_ids"])
    tuples = {name: tuple(fields.get(name, ())) for name in ("forks", "hashes", "tags")}
    return Request(**fields | tuples | {"stop_token_ids": stop_token_ids})


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
                remedy = "" if number > 1 else f"; {os.fspath(path)} is no recording; {REMEDY}"
                raise ReplayError(f"line {number} is not JSON in ASCII: {error}{remedy}") from None
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
    """The configuration, the policy and the version of a recording's first record."""
    if record.get("pagedjax_replay") != FORMAT:
        file_format = "no format number"
        if "pagedjax_replay" in record:
            file_format = repr(record["pagedjax_replay"])
        raise ReplayError(f"line 1 has {file_format}; this version reads format {FORMAT}; {REMEDY}")
    own_policy = str(record.get("own_policy", ""))
    policies = with_recorded(policies, record)
    if record.get("policy") not in policies:
        remedy = f"known are {', '.join(sorted(policies))}"
        if own_policy:
            remedy = (
                f"a recording runs no file, so add --policy {shlex.quote(own_policy)}, or where "
                "that file is now"
            )
        raise ReplayError(f"line 1 names the policy {record.get('policy')!r}; {remedy}")
    try:
        fields = record["config"]
        views = [View(window, tuple(blocks)) for window, blocks in fields.get("views", ())]
        read = {
            "views": tuple(views),
            "prefix_checkpoints": PrefixCheckpoints.read(fields.get("prefix_checkpoints")),
        }
        config = SchedulerConfig(**fields | read)
        scheduler.init(config)
        return config, policies[record["policy"]], str(record["pagedjax"])
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"line 1 is a malformed header: {error!r}") from error


def with_recorded(
    policies: Mapping[str, Policy], record: Mapping[str, Any]
) -> Mapping[str, Policy]:
    """The policies, and that of a recording if it is a shipped one with parameters. No file of a
    user is run.

    Args:
        record: the first of the recording.

    Raises:
        ReplayError: it has no such parameters.
    """
    own_policy = str(record.get("own_policy", ""))
    if record.get("policy") in policies or not own_policy.startswith("pagedjax.policies:"):
        return policies
    try:
        return {**policies, record["policy"]: find(own_policy)}
    except (KeyError, ValueError) as error:
        raise ReplayError(f"line 1 names the policy {own_policy!r}: {error}") from error


def with_own(names: Sequence[str]) -> dict[str, Policy]:
    """The shipped policies, and those of a user's own, by their names.

    Args:
        names: each module:NAME or folder/file.py:NAME.

    Raises:
        ValueError: there is no such policy.
    """
    own_policies = [find(name) for name in names]
    return {**POLICIES, **{policy.name: policy for policy in own_policies}}


def summary(report: ReplayReport) -> str:
    """A report in a few lines of text."""
    ends = ", ".join(f"{number} {reason}" for reason, number in report.finished.items()) or "none"
    texts = [
        f"recorded by pagedjax {report.version}",
        f"{report.steps} steps, {report.requests} requests, "
        f"{report.preemptions} preemptions; finished: {ends}",
    ]
    if report.truncated:
        texts.append(
            "the last line is cut off, so the run was killed while it wrote; "
            "the lines before it were replayed"
        )
    if report.difference is None:
        return "\n".join([*texts, f"identical: all {report.lines} lines"])
    number, recorded, recomputed = report.difference
    pairs = enumerate(zip(recorded, recomputed, strict=False))
    column = next((i for i, (old, new) in pairs if old != new), 0)
    excerpt = slice(max(0, column - 40), column + 60)
    texts += [
        f"DIFFERENT from line {number} on, at column {column + 1}",
        f"  recorded    {recorded[excerpt]}",
        f"  recomputed  {recomputed[excerpt]}",
    ]
    if report.own_policy:
        texts.append(f"the recorded run had the policy {report.own_policy}")
    return "\n".join(texts)


def _replay_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagedjax.host.replay",
        description="Run a recorded scheduler again and compare every line.",
        allow_abbrev=False,
    )
    parser.add_argument("log", help="the file that a Recorder wrote")
    parser.add_argument(
        "--policy", help="of your own, that the run had: module:NAME or folder/file.py:NAME"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _replay_parser().parse_args(arguments)
    try:
        policies = with_own([options.policy] if options.policy else [])
        report = verify(options.log, policies)
    except (ReplayError, OSError, ValueError) as error:
        print(f"cannot replay {options.log}: {error}", file=sys.stderr)
        return 1
    print(summary(report))
    return 0 if report.identical else 1


if __name__ == "__main__":
    sys.exit(main())
