"""The event log: the scheduler's inputs and outcomes, one line of JSON for each transition.
`Recorder` writes it. An `Entry` is what a line says, as a record. This example wraps long lines:

    {"pagedjax_replay":2,"pagedjax":"0.2.0","policy":"fcfs","config":{"block_size":4,...}}
        (a policy in a user's file: "policy":"aged","own_policy":"mine.py:aged(worth=64)",...)
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
release and adopt, the drafts offered, the time of a timed policy, the sampled tokens, the hashes of filled blocks and the
choices determine every other byte. A reader needs no scheduler:

- `blocks` are the blocks that a sequence got in this step, behind those that it had. It has none
  after it was preempted or finished.
- In a header with `views` (kv_policies.py), a table has an entry for each block of tokens and each
  view, in this order. 0 is a block that the sequence does not have. `dropped` are the blocks that
  it gave back since its last row.
- `copies` are (from, to), `swap_out` (device, host) and `swap_in` (host, device).
- `tables` are whole block tables: of branches that write to a copy from now on, and of beams that
  continue another.
- `offered` (the number of drafts that there were, by sequence) and `drafts` (how many each row got)
  are in the line of a step that was offered drafts. A row with drafts has a list in `sampled`: the
  accepted ones and one more token. The event `Verified` says how many blocks are left of those that
  a sequence had; the others were given back.
- `rejected` are requests that the policy turned away in this step, and `now` is the time that it was
  given, in seconds: an input, in the lines of a timed policy alone.
- After an `update` the steps use new weights, of this version; `pending` says what becomes of the
  content of unfinished sequences (`scheduler.update`). Tokens of later commits are of this version.
- A `release` hands a sequence to another scheduler (handover.py), with these blocks; it has none
  here any more. An `adopt` takes one: `from` are its blocks where it was, `blocks` are those here,
  none if it has to be computed again, and `copies` are (from, to). The `blocks` of later steps are
  the blocks that it gets after these.
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
from typing import IO, Any, NamedTuple, get_args

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
NOTES = ("at", "prompt")  # keys that may stand beside a transition on its line, in this order
Record = dict[str, Any]  # the JSON of a value, as a dictionary
Written = dict[str, tuple[int, ...]]  # sequence id -> its blocks, as earlier lines gave them


# The transitions. `record` returns what the line of a transition says, and updates `written`.


class Submit(NamedTuple):
    """A request joins the queue.

    prompt: its token ids, for readers of the log.
    """

    request: Request
    prompt: Sequence[int] = ()

    def record(self, written: Written) -> Record:
        return request_record(self.request)


class Schedule(NamedTuple):
    """A step is planned.

    offered: the argument of `scheduler.schedule`.
    started: the recorder's clock when the step began; None: the clock is read for the line.
    """

    plan: Plan
    offered: Mapping[str, int] = NO_DRAFTS
    started: float | None = None

    def record(self, written: Written) -> Record:
        plan = self.plan
        new_blocks, dropped, tables = _table_records(plan, written)
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
        if plan.rejected:
            record["rejected"] = plan.rejected
        if plan.now is not None:
            record["now"] = plan.now
        if self.offered:
            record |= {"offered": dict(self.offered), "drafts": plan.drafts}
        return record


class Commit(NamedTuple):
    """The tokens of a step arrive.

    plan: of the step.
    sampled: by row of the plan.
    hashes: of the blocks that the step filled, by sequence id.
    choices: how the beams of each request continue, by the id of the first beam.
    """

    plan: Plan
    sampled: Sequence[Sample]
    hashes: Mapping[str, Sequence[str]]
    choices: Mapping[str, Choice]
    events: tuple[Event, ...]

    def record(self, written: Written) -> Record:
        sampled_ids = {
            name
            for event in self.events
            if isinstance(event, Sampled)
            for name in event.request_ids
        }
        rows = zip(self.plan.seqs, self.sampled, strict=True)
        return {
            "sampled": [
                token if seq.request.request_id in sampled_ids else None for seq, token in rows
            ],
            "hashes": self.hashes,
            "choices": self.choices,
            "events": _event_records(self.events, written),
        }


class Cancel(NamedTuple):
    """A request ends from outside of the scheduler."""

    request_id: str
    reason: FinishReason
    events: tuple[Event, ...]

    def record(self, written: Written) -> Record:
        return self._asdict() | {"events": _event_records(self.events, written)}


class Forget(NamedTuple):
    """The prefix cache is emptied."""

    def record(self, written: Written) -> Record:
        return {}


class Restart(NamedTuple):
    """All sequences return to the queue, after a step that failed."""

    def record(self, written: Written) -> Record:
        written.clear()  # no sequence runs any more
        return {}


class Update(NamedTuple):
    """New weights.

    version: the number of the engine's updates so far.
    """

    version: int
    pending: Pending

    def record(self, written: Written) -> Record:
        if self.pending == "restart":
            written.clear()
        return self._asdict()


class Release(NamedTuple):
    """A sequence leaves for another scheduler."""

    released: Released

    def record(self, written: Written) -> Record:
        released = self.released
        name = released.request.request_id
        written.pop(name, None)
        return {
            "request_id": name,
            "length": released.length,
            "computed": released.computed,
            "blocks": released.blocks,
            "hashes": released.hashes,
        }


class Adopt(NamedTuple):
    """A sequence comes from another scheduler."""

    released: Released
    adopted: Adopted

    def record(self, written: Written) -> Record:
        released = self.released
        adopted = self.adopted
        if adopted.blocks:
            written[released.request.request_id] = adopted.blocks
        return {
            "request": request_record(released.request),
            "length": released.length,
            "computed": released.computed,
            "from": released.blocks,
            "hashes": released.hashes,
            "blocks": adopted.blocks,
            "copies": adopted.copies,
        }


# A transition with its inputs and its outcome.
Entry = Submit | Schedule | Commit | Cancel | Forget | Restart | Update | Release | Adopt


def kind_of(entry: type[Entry]) -> str:
    """Returns the key of a transition on its line."""
    return entry.__name__.lower()


KINDS = tuple(map(kind_of, get_args(Entry)))


def line_of(entry: Entry, written: Written) -> str:
    """Returns the line of a transition. `written` gets the blocks that the line gives or takes."""
    return dump({kind_of(type(entry)): entry.record(written)})


def check_target(
    path: str | PathLike[str], kind: str = "recording", example: str = "run.jsonl"
) -> None:
    """Raises ValueError if no file of some kind can be written to a path, before anything runs."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise ValueError(
            f"the {kind} {path} is a folder; name a file, such as {os.path.join(path, example)}"
        )
    if not os.path.isdir(folder):
        raise ValueError(
            f"the {kind} {path} has no folder; make {folder}, or name a file elsewhere"
        )
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"the {kind} {path} may not be written by this process; name another file")


class Recorder:
    """Writes the log of one engine as it runs. A line has left the process when the call returns.

    An existing file is overwritten.

    Args:
        own_policy: of a policy in a user's file, how it was named: the file, the value in it and its
            parameters. The header has it, so that a reader knows what a replay needs.
        clock: seconds since any moment, for the times of lines; None leaves times out.
        prompts: write the token ids of prompts.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        config: SchedulerConfig,
        policy: str = "fcfs",
        *,
        own_policy: str | None = None,
        clock: Callable[[], float] | None = None,
        prompts: bool = False,
    ) -> None:
        check_target(path)
        self._file: IO[str] | None = open(  # noqa: SIM115
            path, "w", encoding="ascii", newline="\n", buffering=1
        )
        self._clock = clock
        self._began = clock() if clock else 0.0
        self._prompts = prompts
        self._written: Written = {}
        self._file.write(header_line(config, policy, __version__, own_policy) + "\n")

    def write(self, entry: Entry) -> None:
        """Write the line of a transition that has happened."""
        notes: Record = {}
        if self._clock:
            started = entry.started if isinstance(entry, Schedule) else None
            time = self._clock() if started is None else started
            notes["at"] = round(time - self._began, 6)
        if self._prompts and isinstance(entry, Submit):
            notes["prompt"] = list(entry.prompt)
        self._write(with_notes(line_of(entry, self._written), notes))

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
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


def request_record(request: Request) -> Record:
    fields = request._asdict() | {"stop_token_ids": sorted(request.stop_token_ids)}
    # so that a log without them is the same in every version
    for name in ("tags", "keeps_blocks", "service_class"):
        if not fields[name]:
            del fields[name]
    for name in ("predicted", "deadline"):
        if fields[name] is None:
            del fields[name]
    return fields


def _table_records(plan: Plan, written: Written) -> tuple[Written, dict[str, list[int]], Written]:
    """What a plan changes in block tables. `written` gets the new tables.

    Returns:
        (new blocks behind those that a sequence had, blocks that it gave back, whole tables), each
        by sequence id.
    """
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
            dropped_blocks = [old for old, new in pairs if old != HOLE and new == HOLE]
            if dropped_blocks:
                dropped[name] = dropped_blocks
                table = tuple([HOLE if block in dropped_blocks else block for block in table])
                written[name] = table
        if seq.group is not None and seq.blocks[: len(table)] != table:
            tables[name] = written[name] = seq.blocks
        elif len(seq.blocks) > len(table):
            new_blocks[name] = seq.blocks[len(table) :]
            written[name] = seq.blocks
    return new_blocks, dropped, tables


def _event_records(events: Sequence[Event], written: Written) -> list[Record]:
    """The records of events. `written` loses the blocks that these events gave back."""
    for event in events:
        if isinstance(event, Finished):
            written.pop(event.request_id, None)
        elif isinstance(event, Verified):
            for name, num_blocks in zip(event.request_ids, event.num_blocks, strict=True):
                written[name] = written[name][:num_blocks]
    return [{"event": type(event).__name__, **event._asdict()} for event in events]


def header_line(
    config: SchedulerConfig, policy: str, version: str, own_policy: str | None = None
) -> str:
    """Returns the first line. `own_policy` is the argument of `Recorder`."""
    defaults = config._field_defaults
    settings = {
        name: value
        for name, value in config.record().items()
        if name == "host_blocks" or value != defaults.get(name)
    }
    own_field = {} if own_policy is None else {"own_policy": own_policy}
    head = {"pagedjax_replay": FORMAT, "pagedjax": version, "policy": policy}
    return dump({**head, **own_field, "config": settings})


def dump(record: Record) -> str:
    """The JSON of a record: no spaces, ASCII, keys in the order written, array scalars as
    integers.
    """
    return json.dumps(record, separators=(",", ":"), default=int)


# `python -m pagedjax.host.event_log run.jsonl`, the older name of the replay command
if __name__ == "__main__":
    runpy.run_module("pagedjax.host.replay", run_name="__main__")
