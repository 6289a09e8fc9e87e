"""The event log: what went into the scheduler and what came out of it, one line of JSON a transition.

    {"pagedjax_replay":2,"pagedjax":"0.1.0","policy":"fcfs","config":{"block_size":4,...}}
    {"submit":{"request_id":"a","prompt_len":5,"max_tokens":8,...}}
    {"schedule":{"step":0,"ids":["a"],"starts":[0],"counts":[5],"blocks":{"a":[1,2]},"admitted":["a"],...}}
    {"cancel":{"request_id":"b","reason":"abort","events":[]}}
    {"commit":{"sampled":[17],"hashes":{},"choices":{},"events":[{"event":"Admitted",...},{"event":"Sampled",...}]}}

    {"forget":{}}
    {"restart":{}}

The scheduler is pure, so the header, the submits, the cancels, the sampled tokens, the hashes of the blocks that
they filled and the choices of beam searches determine every other byte.
`verify` runs it again from those and compares line by line. A reader needs no scheduler: `blocks` are the blocks that
a sequence got in this step, added to those it had, and it has none after it was preempted or finished; `copies` are
(from, to), `swap_out` (device, host) and `swap_in` (host, device), and `tables` the whole tables of branches that write
to a copy from now on, or of beams that went on from another. `sampled` is null for a row whose token nobody took: one
within a prompt, a beam's, or cancelled meanwhile.

A line may also say when: `{"commit":{...},"at":0.0312}`, seconds since the recording began (of a schedule and its
commit, when the step began and ended), and a submit what: `"prompt":[15496,11]`, its token ids. Both are notes for
readers (viewer/). The scheduler never sees them, and a replay writes them again as they were. Without them the same run
gives the same bytes on any machine, so they are left out unless a recorder is asked for them.

python -m pagedjax.host.event_log run.jsonl       exit code 1 if the run does not replay
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from os import PathLike
from typing import IO, Any, Literal, NamedTuple, get_args

from pagedjax import __version__
from pagedjax.host import scheduler
from pagedjax.host.policies import POLICIES, Policy, find
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Choice, Event, Finished, FinishReason, Plan, Preempted, Request, Sampled

FORMAT = 2
Kind = Literal["init", "submit", "schedule", "commit", "cancel", "forget", "restart"]
KINDS = get_args(Kind)
NOTES = ("at", "prompt")  # what may stand beside a transition on its line, in this order
Hashes = Mapping[str, Sequence[str]]  # request id -> hashes of the blocks that a step filled
Choices = Mapping[str, Choice]  # id of the first beam -> how its request's beams go on
Written = dict[str, tuple[int, ...]]  # request id -> its blocks, as earlier lines named them


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


class Recorder:
    """Writes the log of one engine as it runs; a line has left the process when the call returns.

    The engine calls it after each transition of its scheduler, with the same arguments and what came out.
    An existing file is overwritten.

    Args:
        clock: seconds from any beginning, so that lines say when; None leaves times out.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        config: SchedulerConfig,
        policy: str = "fcfs",
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._file: IO[str] | None = open(path, "w", encoding="ascii", newline="\n", buffering=1)  # noqa: SIM115
        self._clock = clock
        self._began = clock() if clock else 0.0
        self._plan: Plan | None = None
        self._written: Written = {}
        self._file.write(header_line(config, policy, __version__) + "\n")

    def _write(self, line: str, at: float | None = None, prompt: Sequence[int] | None = None) -> None:
        notes: dict[str, Any] = {}
        if self._clock:
            notes["at"] = round((self._clock() if at is None else at) - self._began, 6)
        if prompt is not None:
            notes["prompt"] = list(prompt)
        if self._file is None:
            return
        try:
            self._file.write(noted(line, notes) + "\n")
        except OSError as error:  # a full disk is no reason to stop what is recorded
            what = f"{self._file.name} is not written any further: {error}; what it holds replays"
            self.close()
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def submit(self, request: Request, prompt: Sequence[int] | None = None) -> None:
        """`prompt`: token ids to note for readers of the log; None leaves them out."""
        self._write(submit_line(request), prompt=prompt)

    def cancel(self, request_id: str, reason: FinishReason, events: Sequence[Event]) -> None:
        self._write(cancel_line(request_id, reason, events, self._written))

    def schedule(self, plan: Plan, at: float | None = None) -> None:
        """`at`: the clock's reading when the step began, if that was not now."""
        self._plan = plan
        self._write(schedule_line(plan, self._written), at)

    def commit(self, sampled: Sequence[int], hashes: Hashes, choices: Choices, events: Sequence[Event]) -> None:
        assert self._plan is not None, "a commit without a schedule before it"
        self._write(commit_line(self._plan, sampled, hashes, choices, events, self._written))
        self._plan = None

    def forget(self) -> None:
        self._write(forget_line())

    def restart(self) -> None:
        self._write(restart_line(self._written))

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what could not be written would be tried once more
                file.close()


def noted(line: str, notes: Mapping[str, Any]) -> str:
    """A line with what its reader may want to know beside it."""
    return f"{line[:-1]},{dump(dict(notes))[1:]}" if notes else line


def submit_line(request: Request) -> str:
    return dump({"submit": request._asdict() | {"stop_token_ids": sorted(request.stop_token_ids)}})


def cancel_line(request_id: str, reason: str, events: Sequence[Event], written: Written) -> str:
    body = {"request_id": request_id, "reason": reason, "events": _event_records(events, written)}
    return dump({"cancel": body})


def schedule_line(plan: Plan, written: Written) -> str:
    for name in plan.preempted:
        written.pop(name, None)
    ids = [seq.request.request_id for seq in plan.seqs]
    new, tables = {}, {}
    for name, seq in zip(ids, plan.seqs, strict=True):
        had = written.get(name, ())
        if seq.group is not None and seq.blocks[: len(had)] != had:
            tables[name] = written[name] = seq.blocks
        elif len(seq.blocks) > len(had):
            new[name] = seq.blocks[len(had) :]
            written[name] = seq.blocks
    rows = {"step": plan.step, "ids": ids, "starts": plan.starts, "counts": plan.counts, "blocks": new}
    rows |= {"copies": plan.copies, "tables": tables, "swap_out": plan.swap_out, "swap_in": plan.swap_in}
    queue = {
        "admitted": plan.admitted,
        "cached": plan.cached,
        "preempted": plan.preempted,
        "swapped": plan.swapped,
        "waiting": plan.num_waiting,
    }
    return dump({"schedule": rows | queue | {"blocks_used": plan.blocks_used}})


def commit_line(
    plan: Plan, sampled: Sequence[int], hashes: Hashes, choices: Choices, events: Sequence[Event], written: Written
) -> str:
    taken = {name for event in events if isinstance(event, Sampled) for name in event.request_ids}
    rows = zip(plan.seqs, sampled, strict=True)
    tokens = [token if seq.request.request_id in taken else None for seq, token in rows]
    told = {"sampled": tokens, "hashes": hashes, "choices": choices}
    return dump({"commit": told | {"events": _event_records(events, written)}})


def forget_line() -> str:
    return dump({"forget": {}})


def restart_line(written: Written) -> str:
    written.clear()  # nobody runs any more
    return dump({"restart": {}})


def _event_records(events: Sequence[Event], written: Written) -> list[dict[str, Any]]:
    for event in events:
        if isinstance(event, Finished):
            written.pop(event.request_id, None)
    return [{"event": type(event).__name__, **event._asdict()} for event in events]


def header_line(config: SchedulerConfig, policy: str, version: str) -> str:
    usual, values = config._field_defaults, config._asdict()
    said = {name: value for name, value in values.items() if name == "host_blocks" or value != usual.get(name)}
    return dump({"pagedjax_replay": FORMAT, "pagedjax": version, "policy": policy, "config": said})


def dump(record: dict[str, Any]) -> str:
    """The one spelling of a record: no spaces, ASCII, keys in the order written. Array scalars count as integers."""
    return json.dumps(record, separators=(",", ":"), default=int)


def replay(path: str | PathLike[str], policies: Mapping[str, Policy] = POLICIES) -> Iterator[Transition]:
    """Run the scheduler again from a log -> every transition, the initial state first.

    What the log says of outcomes is not looked at (see `verify`). A last line that is cut off is left out.

    Raises:
        ReplayError: an unknown format or policy, a malformed line, or a transition that the scheduler refuses.
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
        ReplayError: an unknown format or policy, or a malformed line.
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
            finished.update(event.reason for event in transition.events if isinstance(event, Finished))
    except Refused as refused:
        difference = refused.difference
    ends = dict(sorted(finished.items()))
    cut = truncated(path)
    return ReplayReport(version, lines, kinds["commit"], kinds["submit"], preemptions, ends, cut, difference)


def _rerun(path: str | PathLike[str], policies: Mapping[str, Policy]) -> Iterator[tuple[int, str, str, Transition]]:
    """Line number, the line as recorded, the line as it should be, and what it did."""
    rows = _rows(path)
    number, recorded, header = next(rows, (1, "", None))
    if header is None:
        raise ReplayError(f"{path} has no whole line: nothing was recorded")
    config, policy, version = _header(header, policies)
    state, plan, written = scheduler.init(config), None, {}
    yield number, recorded, header_line(config, policy.name, version), Transition("init", state, None, ())
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
            raise ReplayError(f"line {number} is no transition; one has a single key: {', '.join(KINDS[1:])}")
        state = transition.state
        plan = None if kind == "commit" else transition.plan or plan
        at, prompt = _checked(number, notes, transition)
        yield number, recorded, noted(line, notes), transition._replace(at=at, prompt=prompt)


def _checked(
    number: int, notes: Mapping[str, Any], transition: Transition
) -> tuple[float | None, tuple[int, ...] | None]:
    """The notes of a line, if they are what notes can be."""
    at, prompt = (notes.get(name) for name in NOTES)
    if "at" in notes and (isinstance(at, bool) or not isinstance(at, int | float) or not (isfinite(at) and at >= 0)):
        raise ReplayError(f"line {number} is at {at!r}; that must be seconds since the recording began, 0 or more")
    if "prompt" not in notes:
        return at, None
    expected = transition.state.waiting[-1].request.prompt_len if transition.kind == "submit" else 0
    ids = tuple(prompt) if isinstance(prompt, list) else ()
    if not expected or len(ids) != expected or not all(type(token) is int for token in ids):
        what = f"its request has {expected} prompt tokens" if expected else f"a {transition.kind} has none"
        raise ReplayError(f"line {number} notes the prompt {prompt!r:.60}; {what}, and a note lists their ids")
    return at, ids


def _advance(
    state: SchedulerState, plan: Plan | None, policy: Policy, written: Written, kind: str, body: Any
) -> tuple[str, Transition | None]:
    """Take the inputs of a line, ignore its outcomes -> the line that it should be and the transition."""
    if kind == "submit":
        request = Request(
            **body
            | {"stop_token_ids": frozenset(body["stop_token_ids"])}
            | {name: tuple(body[name]) for name in ("forks", "hashes")}
        )
        return submit_line(request), Transition(kind, scheduler.submit(state, request), None, ())
    if kind == "cancel":
        state, events = scheduler.cancel(state, body["request_id"], body["reason"])
        return cancel_line(body["request_id"], body["reason"], events, written), Transition(kind, state, None, events)
    if kind == "schedule":
        state, plan = scheduler.schedule(state, policy)
        return schedule_line(plan, written), Transition(kind, state, plan, ())
    if kind == "commit":
        if plan is None:
            raise ValueError("a commit without a schedule before it")
        sampled = [0 if token is None else token for token in body["sampled"]]
        hashes = {request_id: tuple(new) for request_id, new in body["hashes"].items()}
        choices = {request_id: Choice(*map(tuple, choice)) for request_id, choice in body["choices"].items()}
        state, events = scheduler.commit(state, plan, sampled, hashes, choices)
        return commit_line(plan, sampled, hashes, choices, events, written), Transition(kind, state, None, events)
    if kind == "forget":
        return forget_line(), Transition(kind, scheduler.forget(state), None, ())
    if kind == "restart":
        return restart_line(written), Transition(kind, scheduler.restart(state), None, ())
    return "", None


def _rows(path: str | PathLike[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The whole lines of a file, numbered, as text and as records."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line[:-1].decode("ascii")
                record = json.loads(text)
            except ValueError as error:
                raise ReplayError(f"line {number} is not JSON in ASCII: {error}") from None
            if not isinstance(record, dict):
                raise ReplayError(f"line {number} is not a JSON object")
            yield number, text, record


def truncated(path: str | PathLike[str]) -> bool:
    """Whether the last line is cut off, because the run was killed while it wrote."""
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _header(record: dict[str, Any], policies: Mapping[str, Policy]) -> tuple[SchedulerConfig, Policy, str]:
    if record.get("pagedjax_replay") != FORMAT:
        found = repr(record["pagedjax_replay"]) if "pagedjax_replay" in record else "no format number"
        raise ReplayError(f"line 1 has {found}; this version reads format {FORMAT}")
    if record.get("policy") not in policies:
        raise ReplayError(f"line 1 names the policy {record.get('policy')!r}; known are {', '.join(sorted(policies))}")
    try:
        config = SchedulerConfig(**record["config"])
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
        prog="python -m pagedjax.host.event_log", description="Run a recorded scheduler again and compare every line."
    )
    parser.add_argument("log", help="the file that a Recorder wrote")
    parser.add_argument("--policy", help="of your own, that the run had: module:NAME or folder/file.py:NAME")
    options = parser.parse_args(arguments)
    try:
        mine = [find(options.policy)] if options.policy else []
        report = verify(options.log, {**POLICIES, **{policy.name: policy for policy in mine}})
    except (ReplayError, OSError, ValueError) as error:
        print(f"cannot replay: {error}", file=sys.stderr)
        return 1
    print(summary(report))
    return 0 if report.identical else 1


if __name__ == "__main__":
    sys.exit(main())
