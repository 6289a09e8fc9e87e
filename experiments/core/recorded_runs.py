"""The requests of a recording of an engine (`Engine.record` with times and prompts), with the tokens
that they got. Pure functions of the file's text; no scheduler runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from pagedjax.host.event_log import FORMAT

REMEDY = "record the run with llm.engine.record(PATH, times=True, prompts=True)"


class RecordedRequest(NamedTuple):
    """A request of a recording.

    seconds: since the recording began.
    request: the fields of its line (`event_log.request_record`).
    output: the tokens that it got before it ended, or before the recording did.
    """

    seconds: float
    request: Mapping[str, Any]
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@lru_cache(maxsize=1)  # all points and repeats of a sweep read the same file
def recorded_requests(file: str, content: str) -> tuple[RecordedRequest, ...]:
    """All requests of a recording, in its order. A last line that is cut off is left out.

    Raises:
        ValueError: the file is no recording of this version's format; a request has no time or no
            prompt, or has branches; a line has another form. The message names the line.
    """
    requests: list[RecordedRequest] = []
    outputs: list[list[int]] = []
    newest: dict[str, int] = {}  # sequence id -> its request: an id may come again after its end
    for number, text in enumerate(content.split("\n")[:-1], 1):
        place = f"{file}, line {number}"
        try:
            line: dict[str, Any] = dict(json.loads(text))
            if number == 1:
                _check_header(place, line)
            elif "adopt" in line:
                raise ValueError(
                    f"{place} takes a sequence over from another engine, without its prompt; "
                    f"{REMEDY} of one engine"
                )
            elif "submit" in line:
                request = _submitted(place, line)
                newest[request.request["request_id"]] = len(requests)
                requests.append(request)
                outputs.append([])
            elif "commit" in line:
                for name, token in _sampled(line["commit"]):
                    outputs[newest[name]].append(token)
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{place} is no line of a recording ({type(error).__name__}: {error}); {REMEDY}"
            ) from None
    pairs = zip(requests, outputs, strict=True)
    return tuple([request._replace(output=tuple(output)) for request, output in pairs])


def _check_header(place: str, line: Mapping[str, Any]) -> None:
    """Raises ValueError for the first line of another format."""
    if line.get("pagedjax_replay") != FORMAT:
        raise ValueError(
            f"{place} is no header of a recording of format {FORMAT}, which this version reads; "
            f"{REMEDY}"
        )


def _submitted(place: str, line: Mapping[str, Any]) -> RecordedRequest:
    """The request of a `submit`, without output. Errors: see `recorded_requests`."""
    request = line["submit"]
    name = request["request_id"]
    for note, option in (("at", "times"), ("prompt", "prompts")):
        if note not in line:
            raise ValueError(f"{place} submits {name!r} without {option}; {REMEDY}")
    if request["forks"] or request["beams"]:
        raise ValueError(
            f"{place} submits {name!r}, which has branches or beams, and the tokens of one output "
            "can be given alone; record a run of requests with n=1"
        )
    return RecordedRequest(float(line["at"]), request, tuple(line["prompt"]), ())


def _sampled(commit: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(sequence id, token) of each new token of a step."""
    return [
        pair
        for event in commit["events"]
        if event["event"] == "Sampled"
        for pair in zip(event["request_ids"], event["token_ids"], strict=True)
    ]
