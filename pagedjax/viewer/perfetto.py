"""Export for Perfetto or chrome://tracing.

It is trace-event JSON with a track for each request, one for steps, and counters.

Without recorded times a step is a millisecond. A step with drafts has the numbers of drafts and of
accepted drafts in its arguments, and so has each decode with drafts. A counter shows the share of
drafts that was accepted so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedjax.viewer.drafts import drafts_of
from pagedjax.viewer.picture import Frame, Picture, apply
from pagedjax.viewer.read_recording import Run

# "Processes": groups of tracks
ENGINE = 1
REQUESTS = 2
STEP = 1_000.0  # microseconds of a step whose times are not known
MICROSECONDS = 1e6  # of a second

Slice = dict[str, Any]


def trace(run: Run) -> dict[str, Any]:
    """Returns trace events, JSON-able.

    Timestamps are microseconds and never decrease within a track, and slices nest.
    """
    tracks = Tracks(run.config.num_blocks)
    picture = Picture()
    for index, frame in enumerate(run.frames):
        picture = apply(picture, frame)
        tracks.take(picture, frame, *_times(frame, index, run.timed))
    unit = (
        "seconds as recorded"
        if run.timed
        else "no times were recorded: one step is one millisecond"
    )
    about = {"recorded by": f"pagedjax {run.version}", "policy": run.policy, "time": unit}
    return {"traceEvents": tracks.events(), "displayTimeUnit": "ms", "otherData": about}


def _times(frame: Frame, index: int, timed: bool) -> tuple[float, float]:
    if timed:
        begin, end = frame.get("at", (0.0, 0.0))
        return begin * MICROSECONDS, end * MICROSECONDS
    return index * STEP, (index + (0 if frame.get("rest") else 1)) * STEP


class Tracks:
    """Collects slices from frames in order."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = num_blocks
        self._now = 0.0
        self._open: dict[int, Slice] = {}  # number -> the slice of the request's present phase
        self._prompt_lens: dict[int, int] = {}
        self._events: list[Slice] = [
            _name(ENGINE, None, "engine"),
            _name(REQUESTS, None, "requests"),
        ]
        self._events.append(_name(ENGINE, 0, "steps"))

    def take(self, picture: Picture, frame: Frame, begin: float, end: float) -> None:
        begin = max(begin, self._now)  # two readings of a clock may be equal; time never decreases
        end = max(begin, end)
        for n, name, prompt_len, *_ in frame.get("came", ()):
            self._prompt_lens[n] = prompt_len
            self._events.append(_name(REQUESTS, n + 1, name))
        for entry in frame.get("before", ()):
            self._take_entry(entry, begin)
        if not picture.at_rest:
            rows = picture.rows
            facts = {
                "tokens": picture.counts[0],
                "sequences": len(rows),
                "blocks": picture.counts[1],
            }
            facts |= _verdict(sum(map(drafts_of, rows)), _total(frame.get("accepted")))
            self._events.append(_slice(ENGINE, 0, f"step {picture.step}", begin, end, facts))
        accepted_of_rows = frame.get("accepted", [None] * len(picture.rows))
        for row, accepted in zip(picture.rows, accepted_of_rows, strict=True):
            self._take_row(row, accepted, begin, end)
        self._count(picture, begin)
        if "verified" in frame:
            drafts, accepted = frame["verified"]
            self._counter("accepted share so far", {"share": round(accepted / drafts, 4)}, end)
        for entry in frame.get("after", ()):
            self._take_entry(entry, end)
        self._now = end

    def _take_entry(self, entry: list[Any], at: float) -> None:
        kind, n, *details = entry
        if kind == "submitted":
            arrived = details[0] * MICROSECONDS if details and details[0] is not None else at
            self._enter(n, "queued", min(arrived, at))
        elif kind == "preempted":
            self._enter(n, "swapped out" if details[0] else "preempted", at)
        elif kind == "forked":
            for branch in details[0]:
                self._leave(branch, at)
        elif kind == "ended":
            self._leave(n, at)
            self._events.append(
                {
                    "ph": "i",
                    "s": "t",
                    "name": f"finished: {details[0]}",
                    "pid": REQUESTS,
                    "tid": n + 1,
                    "ts": round(at, 3),
                }
            )

    def _take_row(self, row: Sequence[int], accepted: int | None, begin: float, end: float) -> None:
        n, start, count, length = row[:4]
        drafts = drafts_of(row)
        prompt_len = self._prompt_lens[n]
        lost_content = length > prompt_len and (count - drafts > 1 or start < prompt_len)
        if lost_content:
            phase = "recompute"
        elif start < prompt_len:
            phase = "prefill"
        else:
            phase = "decode"
        self._enter(n, phase, begin)
        arguments = self._open[n]["args"]
        arguments["tokens"] = arguments.get("tokens", 0) + count
        if drafts:
            verdict = _verdict(drafts, accepted)
            for name, value in verdict.items():
                arguments[name] = arguments.get(name, 0) + value
            name = (
                f"drafts: {drafts}"
                if accepted is None
                else f"drafts: {accepted} of {drafts} accepted"
            )
            self._events.append(
                _slice(REQUESTS, n + 1, name, begin, end, {**verdict, "of": length})
            )
        elif phase != "decode":
            name = f"tokens {start}-{start + count - 1}"
            self._events.append(_slice(REQUESTS, n + 1, name, begin, end, {"of": length}))

    def _enter(self, n: int, phase: str, at: float) -> None:
        """Starts a phase of a request, unless it is in that phase."""
        if n in self._open and self._open[n]["name"] == phase:
            return
        self._leave(n, at)
        self._open[n] = _slice(REQUESTS, n + 1, phase, at, at, {})

    def _leave(self, n: int, at: float) -> None:
        phase = self._open.pop(n, None)
        if phase is not None:
            phase["dur"] = round(max(0.0, round(at, 3) - phase["ts"]), 3)
            self._events.append(phase)

    def _count(self, picture: Picture, at: float) -> None:
        tokens, used, idle, _ = picture.counts
        blocks = {"used": used, "cached": idle, "empty": self._blocks - used - idle}
        away = len(picture.away)
        queue = {
            "waiting": len(picture.waiting) - away,
            "running": len(picture.tables),
            "swapped": away,
        }
        for name, values in (
            ("blocks", blocks),
            ("tokens in a step", {"tokens": tokens}),
            ("requests", queue),
        ):
            self._counter(name, values, at)

    def _counter(self, name: str, values: Mapping[str, float], at: float) -> None:
        self._events.append(
            {"ph": "C", "name": name, "pid": ENGINE, "ts": round(at, 3), "args": values}
        )

    def events(self) -> list[Slice]:
        """Returns all events so far in order of time.

        If slices begin together, the longer one is first.
        """
        for n in list(self._open):
            self._leave(n, self._now)

        def order(event: Slice) -> tuple[Any, ...]:
            is_detail = "of" in event.get("args", {})  # a slice inside that of a phase
            return event["ph"] != "M", event.get("ts", 0), -event.get("dur", 0), is_detail

        return sorted(self._events, key=order)


def _verdict(drafts: int, accepted: int | None) -> dict[str, int]:
    """The arguments of a slice with drafts. `accepted` is None if the number is not known."""
    if not drafts:
        return {}
    return {"drafts": drafts} if accepted is None else {"drafts": drafts, "accepted": accepted}


def _total(accepted: Sequence[int | None] | None) -> int | None:
    return None if accepted is None else sum(count or 0 for count in accepted)


def _name(pid: int, tid: int | None, name: str) -> Slice:
    return {
        "ph": "M",
        "name": "process_name" if tid is None else "thread_name",
        "pid": pid,
        **({} if tid is None else {"tid": tid}),
        "args": {"name": name},
    }


def _slice(pid: int, tid: int, name: str, begin: float, end: float, args: dict[str, Any]) -> Slice:
    begin = round(begin, 3)
    duration = round(max(0.0, round(end, 3) - begin), 3)
    return {
        "ph": "X",
        "name": name,
        "cat": "pagedjax",
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": duration,
        "args": args,
    }
