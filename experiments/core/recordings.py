"""The recordings of a run (`record: true`): one file of each engine, the viewer's page of each, and
what the summary says of them.

    recording.jsonl, recording.html         of a run with one engine
    recording.0.jsonl, recording.0.html     of the first one of several replicas
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.core.records import RequestRecord
from pagedjax import viewer
from pagedjax.host.policies import POLICIES, Policy
from pagedjax.host.replay import ReplayError

MOST_CHARACTERS = 1 << 25  # of a recording that gets a page: the page has all of its steps
LATENCIES = ("ttft_s", "e2e_s")  # of which the slowest request is named


def names(count: int) -> list[str]:
    """The file names of the recordings of so many engines."""
    if count == 1:
        return ["recording.jsonl"]
    return [f"recording.{number}.jsonl" for number in range(count)]


def paths(folder: Path) -> list[Path]:
    """The recordings in a run's folder."""
    return sorted(folder.glob("recording*.jsonl"))


def page_name(name: str) -> str:
    """The file of a recording's page, which `pagedjax view` writes too."""
    return Path(name).with_suffix(".html").name


def files(logs: Sequence[str], policy: Policy) -> dict[str, str]:
    """The files of a run (name -> text). A recording that is too long, or that cannot be replayed,
    has no page.

    Args:
        logs: the text of each engine's recording.
    """
    texts = {}
    for name, log in zip(names(len(logs)), logs, strict=True):
        texts[name] = log
        if len(log) > MOST_CHARACTERS:
            continue
        page = _page(name, log, {**POLICIES, policy.name: policy})
        if page is not None:
            texts[page_name(name)] = page
    return texts


def _page(name: str, log: str, policies: Mapping[str, Policy]) -> str | None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(log, encoding="ascii")
        try:
            return viewer.page(viewer.read(path, policies))
        except ReplayError:
            return None


def about(requests: Sequence[RequestRecord], num_engines: int, policy: str) -> dict[str, Any]:
    """What a summary says of recordings: the slowest request of each latency, with the file that
    has it, and the policy, as the run's config names it.
    """
    file_names = names(num_engines)
    slowest = {}
    for latency in LATENCIES:
        seconds = {
            request: value
            for request in requests
            if (value := getattr(request, latency.removesuffix("_s"))) is not None
        }
        if seconds:
            request = max(seconds, key=lambda request: seconds[request])
            slowest[latency] = {
                "request": request.request_id,
                "seconds": round(seconds[request], 6),
                "file": file_names[request.replica if num_engines > 1 else 0],
            }
    return {"policy": policy, "slowest": slowest}
