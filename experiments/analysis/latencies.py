"""The latencies of the requests of a sweep: their distributions, and how they grow with the prompt.

All functions but `read` and `nobody_waited` are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.core import store
from experiments.core.records import RequestRecord

MOST_BYTES = 1 << 26  # of requests.jsonl that a report reads; JSON of 64 MiB takes seconds
MOST_BINS = 6
MIN_REQUESTS = 3  # a bin with fewer requests has no median
MOST_POINTS = 200  # of a curve
# in a line of steps.jsonl: a request waits, or is preempted
_WAITING = re.compile(r'"waiting":[1-9]|"preempted":[1-9]')


class Latencies(NamedTuple):
    """The latencies of the n requests of a point, all repeats together.

    prompts: int64 [n], tokens of each request's prompt.
    by_request: name of a latency -> float64 [n], its seconds for each request; NaN where a request
        has none. The names are `ttft_s`, `e2e_s`, and `tpot_s`, the mean gap of the first branch.
    gaps: float64 [gaps], seconds between tokens, of all requests; empty if they were not kept.
    """

    prompts: np.ndarray
    by_request: dict[str, np.ndarray]
    gaps: np.ndarray

    def values(self, name: str) -> np.ndarray:
        """The values of a latency, without NaN; for `itl_s`, the gaps."""
        values = self.gaps if name == "itl_s" else self.by_request[name]
        return values[~np.isnan(values)]


def latencies(requests: Iterable[RequestRecord]) -> Latencies:
    """The latencies of the requests of one or several runs."""
    prompts: list[int] = []
    rows: list[tuple[float | None, ...]] = []
    gaps: list[float] = []
    for request in requests:
        prompts.append(request.prompt_tokens)
        rows.append((request.ttft, request.e2e, request.branches[0].tpot))
        if request.has_gaps:
            gaps += [gap for branch in request.branches for gap in branch.gaps]
    columns = np.array(rows, float).reshape(-1, 3).T
    names = ("ttft_s", "e2e_s", "tpot_s")
    return Latencies(
        np.array(prompts, int), dict(zip(names, columns, strict=True)), np.array(gaps, float)
    )


def read(runs: Sequence[dict[str, Any]], keys: Iterable[str]) -> tuple[dict[str, Latencies], str]:
    """The latencies of points by their keys, and "". If their files have over MOST_BYTES: nothing,
    and a sentence that says why.

    A point without the files of its requests is left out: a folder may have the summaries only.
    """
    files: dict[str, list[Path]] = {}
    for key in keys:
        folders = [Path(run["run"]) for run in runs if run["point"] == key and not run["failed"]]
        if folders and all((folder / "requests.jsonl").is_file() for folder in folders):
            files[key] = folders
    paths = [folder / "requests.jsonl" for folders in files.values() for folder in folders]
    num_bytes = sum(path.stat().st_size for path in paths)
    if num_bytes > MOST_BYTES:
        return {}, (
            f"Left out: the files requests.jsonl of the points that are shown here have "
            f"{num_bytes / 2**20:.0f} MiB, and a report reads at most {MOST_BYTES / 2**20:.0f} MiB."
        )
    samples = {
        key: latencies(request for folder in folders for request in store.read_requests(folder))
        for key, folders in files.items()
    }
    return samples, ""


def nobody_waited(folder: Path) -> bool | None:
    """Whether no request waited in any step of a run and none was preempted; None: not known.

    A request that is admitted in the first step after its arrival did not wait.
    """
    path = folder / "steps.jsonl"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as lines:
        return not any(map(_WAITING.search, lines))


def cumulative(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The curve of a distribution: ascending values, and the share of all values up to each.

    At most MOST_POINTS points, the least and the largest value among them.
    """
    ascending = np.sort(values)
    count = len(ascending)
    places = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))
    return ascending[places], (places + 1) / count


class Bins(NamedTuple):
    """Ranges of prompt lengths: bin i has `edges[i]` to `edges[i + 1] - 1` tokens."""

    edges: tuple[int, ...]

    @property
    def labels(self) -> list[str]:
        pairs = zip(self.edges, self.edges[1:], strict=False)
        return [f"{low}" if high - low == 1 else f"{low}-{high - 1}" for low, high in pairs]


def length_bins(prompts: np.ndarray) -> Bins | None:
    """Bins of about equally many prompts; None if the lengths do not differ enough for two."""
    if len(prompts) < 2 * MIN_REQUESTS:
        return None
    shares = np.linspace(0, 1, min(MOST_BINS, len(prompts) // MIN_REQUESTS) + 1)
    edges = np.unique(np.quantile(prompts, shares, method="lower"))
    edges[-1] += 1  # so that the longest prompts are in the last bin
    return Bins(tuple(edges.tolist())) if len(edges) > 2 else None


def medians_by_length(
    point: Latencies, name: str, bins: Bins, scale: float = 1.0
) -> Mapping[int, float]:
    """The median of a latency, in seconds times `scale`, by the number of the bin. Bins with fewer
    than MIN_REQUESTS requests are left out.
    """
    values = point.by_request[name]
    places = np.searchsorted(bins.edges, point.prompts, side="right") - 1
    medians = {}
    for place in range(len(bins.edges) - 1):
        members = values[(places == place) & ~np.isnan(values)]
        if len(members) >= MIN_REQUESTS:
            medians[place] = scale * float(np.median(members))
    return medians
