"""The event log: the scheduler's inputs and outcomes, one line of JSON for each transition.
`Recorder` writes it. Here long lines are wrapped.

    {"pagedjax_replay":2,"pagedjax":"0.2.0","policy":"fcfs","config":{"block_size":4,...}}
    {"submit":{"request_id":"a","prompt_len":5,"max_tokens":8,...}}
    {"schedule":{"step":0,"ids":["a"],"starts":[0],"counts":[5],"blocks":{"a":[1,2]},
        "admitted":["a"],...}}
    {"cancel":{"request_id":"b","reason":"abort","events":[]}}
    {"commit":{"sampled":[17],"hashes":{},"choices":{},
        "events":[{"event":"Admitted",...},{"event":"Sampled",...}]}}
    {"forget":{}} {"restart":{}} {"update":{"version":3,"pending":"keep"}}
    {"release":{"request_id":"c","length":6,"computed":5,"blocks":[1,2],"hashes":["..."]}}
    {"adopt":{"request":{"request_id":"d",...},"length":6,"computed":5,"from":[1,2],
        "hashes":["..."],"blocks":[4,3],...}}

The scheduler is pure (replay.py). The header, every submit, cancel, forget, restart, update,
release and adopt, the drafts offered, the sampled tokens, the hashes of filled blocks and the
choices determine every other byte. A reader needs no scheduler:

- `blocks` are the blocks that a sequence got in this step, behind those that it had. It has none
  after it was preempted or finished.
- In a header with `views` (kv_policies.py), a table has an entry for each block of tokens and each
  view, in this order. 0 is a block that the sequence does not have. `dropped` are the blocks that
  it gave back since its last row.
- `copies` are (from, to), `swap_out` (device, host) and `swap_in` (host, device).
- `tables` are whole block tables: of branches that write to a copy from now on, and of beams that
  continue another.
- `offered` (drafts that there were, by sequence) and `drafts` (those that the rows got) are in the
  line of a step that was offered drafts. Then `sampled` has a list for each row with drafts: the
  accepted ones and one more token. The event `Verified` says how many blocks are left of those that
  a sequence had; the others were given back.
- After an `update` the steps use new weights, of this version; `pending` says what becomes of the
  content of unfinished sequences (`scheduler.update`). Tokens of later commits are of this version.
- A `release` hands a sequence to another scheduler (handover.py), with these blocks; it has none
  here any more. An `adopt` takes one: `from` are its blocks where it was, `blocks` are those here,
  none if it has to be computed again, and `copies` are (from, to). The `blocks` of later steps are
  those that it gets after these.
- `sampled` is null for a row whose token is not used: a row inside a prompt, a beam's, or one that
  was cancelled.

A line may also have notes: `{"commit":{...},"at":0.0312}`, seconds since the recording began (of a
schedule and its commit, when the step began and ended), and for a submit `"prompt":[15496,11]`, its
token ids. They are for readers (viewer/). The scheduler never sees them, and a replay writes them
again unchanged. Without notes the same run gives the same bytes on any machine, so a recorder
writes them only when asked.
"""

from __future__ import annotations

import json
import os
import runpy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import IO, Any, Literal, get_args

from pagedjax import __version__
from pagedjax.host.drafts import Sample
from pagedjax.host.types import (
    HOLE,
    NO_DRAFTS,
    Adopted,
    Choice,
    Event,
    Finished,
    FinishReason,
    Pending,
    Plan,
    Released,
    Request,
    Sampled,
    SchedulerConfig,
    Verified,
)

FORMAT = 2
Kind = Literal[
    "init",
    "submit",
    "schedule",
    "commit",
    "cancel",
    "forget",
    "restart",
    "update",
    "release",
    "adopt",
]
KINDS = get_args(Kind)
NOTES = ("at", "prompt")  # keys that may stand beside a transition on its line, in this order
Hashes = Mapping[str, Sequence[str]]  # request id -> hashes of the blocks that a step filled
Choices = Mapping[str, Choice]  # id of the first beam -> how its request's beams continue
Written = dict[str, tuple[int, ...]]  # sequence id -> its blocks, as earlier lines gave them


class Lines:
    """The lines of one engine's transitions. After each transition, the engine calls the method of
    that name with the arguments and the outcome.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._written: Written = {}

    def _write(
        self, line: str, at: float | None = None, prompt: Sequence[int] | None = None
    ) -> None:
        """Takes the next line, and the notes that may stand beside it."""
        raise NotImplementedError

    def submit(self, request: Request, prompt: Sequence[int] | None = None) -> None:
        """`prompt`: token ids for readers of the log; None leaves them out."""
        self._write(submit_line(request), prompt=prompt)

    def cancel(self, request_id: str, reason: FinishReason, events: Sequence[Event]) -> None:
        self._write(cancel_line(request_id, reason, events, self._written))

    def schedule(
        self, plan: Plan, at: float | None = None, offered: Mapping[str, int] = NO_DRAFTS
    ) -> None:
        """`at`: the clock when the step began, if it began before this call. `offered`: as
        `scheduler.schedule` got.
        """
        self._plan = plan
        self._write(schedule_line(plan, self._written, offered), at)

    def commit(
        self, sampled: Sequence[Sample], hashes: Hashes, choices: Choices, events: Sequence[Event]
    ) -> None:
        assert self._plan is not None, "a commit without a schedule before it"
        self._write(commit_line(self._plan, sampled, hashes, choices, events, self._written))
        self._plan = None

    def forget(self) -> None:
        self._write(forget_line())

    def restart(self) -> None:
        self._write(restart_line(self._written))

    def update(self, version: int, pending: Pending) -> None:
        """New weights; `version` counts the updates of the engine."""
        self._write(update_line(version, pending, self._written))

    def release(self, released: Released) -> None:
        self._write(release_line(released, self._written))

    def adopt(self, released: Released, adopted: Adopted) -> None:
        self._write(adopt_line(released, adopted, self._written))


def check_target(path: str | PathLike[str]) -> None:
    """Raises ValueError if no recording can be written to a file, before anything runs."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise ValueError(
            f"the recording {path} is a folder; "
            f"name a file, such as {os.path.join(path, 'run.jsonl')}"
        )
    if not os.path.isdir(folder):
        raise ValueError(
            f"the recording {path} has no folder; make {folder}, or name a file elsewhere"
        )
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(
            f"the recording {path} may not be written by this process; name another file"
        )


class Recorder(Lines):
    """Writes the log of one engine as it runs. A line has left the process when the call returns.

    An existing file is overwritten.

    Args:
        clock: seconds since any moment, for the times of lines; None leaves times out.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        config: SchedulerConfig,
        policy: str = "fcfs",
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        check_target(path)
        self._file: IO[str] | None = open(  # noqa: SIM115
            path, "w", encoding="ascii", newline="\n", buffering=1
        )
        self._clock = clock
        self._began = clock() if clock else 0.0
        self._file.write(header_line(config, policy, __version__) + "\n")

    def _write(
        self, line: str, at: float | None = None, prompt: Sequence[int] | None = None
    ) -> None:
        notes: dict[str, Any] = {}
        if self._clock:
            notes["at"] = round((self._clock() if at is None else at) - self._began, 6)
        if prompt is not None:
            notes["prompt"] = list(prompt)
        if self._file is None:
            return
        try:
            self._file.write(with_notes(line, notes) + "\n")
        except OSError as error:  # a full disk must not stop the engine
            warning = (
                f"{self._file.name} is not written any further: {error}; "
                "the lines in it can be replayed"
            )
            self.close()
            warnings.warn(warning, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with suppress(OSError):  # closing writes the rest of the buffer again
                file.close()


def with_notes(line: str, notes: Mapping[str, Any]) -> str:
    """A line with its notes."""
    return f"{line[:-1]},{dump(dict(notes))[1:]}" if notes else line


def submit_line(request: Request) -> str:
    return dump({"submit": request_record(request)})


def request_record(request: Request) -> dict[str, Any]:
    fields = request._asdict() | {"stop_token_ids": sorted(request.stop_token_ids)}
    for name in ("tags", "keeps_blocks"):  # so that a log without them is the same in every version
        if not fields[name]:
            del fields[name]
    return fields


def cancel_line(request_id: str, reason: str, events: Sequence[Event], written: Written) -> str:
    record = {
        "request_id": request_id,
        "reason": reason,
        "events": _event_records(events, written),
    }
    return dump({"cancel": record})


def schedule_line(plan: Plan, written: Written, offered: Mapping[str, int] = NO_DRAFTS) -> str:
    for name in plan.preempted:
        written.pop(name, None)
    new_blocks: Written = {}
    tables: Written = {}
    dropped: dict[str, list[int]] = {}
    for seq in plan.seqs:
        name = seq.request.request_id
        table = written.get(name, ())
        if HOLE in seq.blocks and table:
            pairs = zip(table, seq.blocks, strict=False)
            dropped_blocks = [old for old, new in pairs if old != new == HOLE]
            if dropped_blocks:
                dropped[name] = dropped_blocks
                table = tuple([HOLE if block in dropped_blocks else block for block in table])
                written[name] = table
        if seq.group is not None and seq.blocks[: len(table)] != table:
            tables[name] = written[name] = seq.blocks
        elif len(seq.blocks) > len(table):
            new_blocks[name] = seq.blocks[len(table) :]
            written[name] = seq.blocks
    record = {
        "step": plan.step,
        "ids": [seq.request.request_id for seq in plan.seqs],
        "starts": plan.starts,
        "counts": plan.counts,
        "blocks": new_blocks,
    }
    if dropped:
        record["dropped"] = dropped
    record |= {
        "copies": plan.copies,
        "tables": tables,
        "swap_out": plan.swap_out,
        "swap_in": plan.swap_in,
        "admitted": plan.admitted,
        "cached": plan.cached,
        "preempted": plan.preempted,
        "swapped": plan.swapped,
        "waiting": plan.num_waiting,
        "blocks_used": plan.blocks_used,
    }
    if offered:
        record |= {"offered": dict(offered), "drafts": plan.drafts}
    return dump({"schedule": record})


def commit_line(
    plan: Plan,
    sampled: Sequence[Sample],
    hashes: Hashes,
    choices: Choices,
    events: Sequence[Event],
    written: Written,
) -> str:
    used = {name for event in events if isinstance(event, Sampled) for name in event.request_ids}
    rows = zip(plan.seqs, sampled, strict=True)
    record = {
        "sampled": [token if seq.request.request_id in used else None for seq, token in rows],
        "hashes": hashes,
        "choices": choices,
        "events": _event_records(events, written),
    }
    return dump({"commit": record})


def forget_line() -> str:
    return dump({"forget": {}})


def restart_line(written: Written) -> str:
    written.clear()  # no sequence runs any more
    return dump({"restart": {}})


def update_line(version: int, pending: Pending, written: Written) -> str:
    if pending == "restart":
        written.clear()
    return dump({"update": {"version": version, "pending": pending}})


def release_line(released: Released, written: Written) -> str:
    name = released.request.request_id
    written.pop(name, None)
    record = {
        "request_id": name,
        "length": released.length,
        "computed": released.computed,
        "blocks": released.blocks,
        "hashes": released.hashes,
    }
    return dump({"release": record})


def adopt_line(released: Released, adopted: Adopted, written: Written) -> str:
    if adopted.blocks:
        written[released.request.request_id] = adopted.blocks
    record = {
        "request": request_record(released.request),
        "length": released.length,
        "computed": released.computed,
        "from": released.blocks,
        "hashes": released.hashes,
        "blocks": adopted.blocks,
        "copies": adopted.copies,
    }
    return dump({"adopt": record})


def _event_records(events: Sequence[Event], written: Written) -> list[dict[str, Any]]:
    """The records of events. It forgets the blocks that these events gave back."""
    for event in events:
        if isinstance(event, Finished):
            written.pop(event.request_id, None)
        elif isinstance(event, Verified):
            for name, num_blocks in zip(event.request_ids, event.num_blocks, strict=True):
                written[name] = written[name][:num_blocks]
    return [{"event": type(event).__name__, **event._asdict()} for event in events]


def header_line(config: SchedulerConfig, policy: str, version: str) -> str:
    defaults = config._field_defaults
    settings = {
        name: value
        for name, value in config._asdict().items()
        if name == "host_blocks" or value != defaults.get(name)
    }
    return dump(
        {"pagedjax_replay": FORMAT, "pagedjax": version, "policy": policy, "config": settings}
    )


def dump(record: dict[str, Any]) -> str:
    """The JSON of a record: no spaces, ASCII, keys in the order written, array scalars as
    integers.
    """
    return json.dumps(record, separators=(",", ":"), default=int)


# `python -m pagedjax.host.event_log run.jsonl`, the older name of the replay command
if __name__ == "__main__":
    runpy.run_module("pagedjax.host.replay", run_name="__main__")
