"""The recordings of a run (`record: true`): one file of each engine, the viewer's page of each, and
what the summary says of them.

    recording.jsonl, recording.html         of a run with one engine
    recording.0.jsonl, recording.0.html     of the first one of several replicas
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.core import store
from experiments.core.records import RequestRecord, StepRecord
from pagedjax import viewer
from pagedjax.host import policies

# a larger recording gets no page after its run; a page takes about 2 s for each MiB
MOST_BYTES = 1 << 22
LATENCIES = ("ttft_s", "e2e_s")  # the summary names the slowest request by each of them


def names(count: int) -> list[str]:
    """The file names of the recordings of `count` engines."""
    if count == 1:
        return ["recording.jsonl"]
    return [f"recording.{number}.jsonl" for number in range(count)]


def paths(folder: Path) -> list[Path]:
    """The recordings in a run's folder."""
    return sorted(folder.glob("recording*.jsonl"))


def page_name(name: str) -> str:
    """The file of a recording's page, which `pagedjax view` writes too."""
    return Path(name).with_suffix(".html").name


def files(logs: Sequence[str]) -> dict[str, str]:
    """The files of a run (name -> text), from the text of each engine's recording."""
    return dict(zip(names(len(logs)), logs, strict=True))


def write_pages(folder: Path, policy_name: Any) -> None:
    """Write the page of each recording in a run's folder, which is already on disk: an error of the
    viewer is a note on stderr. A recording that is too long has no page.

    Args:
        policy_name: the name of the policy in the run's config.
    """
    for path in paths(folder):
        if path.stat().st_size > MOST_BYTES:
            continue
        try:
            policy = policies.find(policy_name)
            run = viewer.read(path, {**policies.POLICIES, policy.name: policy})
            store.write_file(path.with_name(page_name(path.name)), viewer.page(run))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"NOTE: {path} has no page, because of {reason}", file=sys.stderr)


def about(
    requests: Sequence[RequestRecord], steps: Sequence[StepRecord], num_engines: int, policy: str
) -> dict[str, Any]:
    """The `recording` section of a summary: the policy, as the run's config names it, and the
    slowest request by TTFT and by total time, with its file and the step in which its longest wait
    begins.
    """
    file_names = names(num_engines)
    slowest = {}
    for latency in LATENCIES:
        seconds_of = operator.attrgetter(latency.removesuffix("_s"))
        measured = [request for request in requests if seconds_of(request) is not None]
        if measured:
            request = max(measured, key=seconds_of)
            slowest[latency] = {
                "request": request.request_id,
                "seconds": round(seconds_of(request), 6),
                "file": file_names[request.replica if num_engines > 1 else 0],
                "step": _step_of_wait(request, steps, until_first=latency == "ttft_s"),
            }
    return {"policy": policy, "slowest": slowest}


def _step_of_wait(request: RequestRecord, steps: Sequence[StepRecord], *, until_first: bool) -> int:
    """The first step in the longest wait of a request: the wait until it was scheduled, or (unless
    `until_first`) a wait between two of its tokens.
    """
    times = () if until_first else request.branches[0].token_times
    waits = [(request.arrival, request.first_scheduled or request.arrival), *pairwise(times)]
    start, _ = max(waits, key=lambda wait: wait[1] - wait[0])
    steps_after_start = [
        step.step for step in steps if step.replica == request.replica and step.started >= start
    ]
    return min(steps_after_start, default=0)
