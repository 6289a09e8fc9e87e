"""The summary of a load run: a pure function of the times of its requests.

All times are seconds since the start of the run. Latencies count from a request's *planned*
arrival, so that a late server or client cannot hide its delay. The client sees chunks, and a chunk
may have several tokens or none. A request has chunks with output at c1 <= ... <= ck, its end e at
the chunk with the finish_reason, and n output tokens:

    ttft  c1 - arrival
    itl   the gaps c2 - c1, c3 - c2, ... of all requests together
    e2e   e - arrival
    tpot  (e - c1) / (n - 1), one value per request; none for n = 1

n is the server's count (`usage`). Without it, the chunks are counted, and the summary has the
number of such requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

PERCENTILES = (50, 90, 99)


class RequestTimes(NamedTuple):
    """The times of one request. None means: it did not happen, or the server did not report it.

    `due` is when the client noticed that the arrival had come, `sent` when max_concurrency allowed
    it too, and `ended` when the answer was complete or the request had failed. `error` is a short
    reason, for counting; `detail` is the whole message.
    """

    arrival: float
    due: float
    sent: float | None
    chunks: tuple[float, ...]
    ended: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""

    @property
    def tokens(self) -> int:
        return len(self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def first(self) -> float | None:
        """The time of the first output; the end for an answer without output."""
        if self.chunks:
            return self.chunks[0]
        return None if self.error else self.ended

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between each chunk with output and the next."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks))

    @property
    def tpot(self) -> float | None:
        if self.first is None or self.tokens < 2:
            return None
        return (self.ended - self.first) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended - self.arrival

    def meets(self, ttft: float | None, itl: float | None) -> bool:
        """Whether the request completed within the targets, which are in seconds.

        `itl` is the limit of its tpot. An answer of one token has no tpot and meets any `itl`.
        """
        if self.error is not None or self.ttft is None:
            return False
        if ttft is not None and self.ttft > ttft:
            return False
        return itl is None or self.tpot is None or self.tpot <= itl


def spread(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """Count, mean, percentiles (numpy's method "linear") and maximum of the values but None."""
    numbers = [value for value in values if value is not None]
    names = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    if not numbers:
        return {"count": 0, **dict.fromkeys(names)}
    percentiles = np.percentile(numbers, PERCENTILES, method="linear")
    statistics = map(float, (np.mean(numbers), *percentiles, max(numbers)))
    return {"count": len(numbers), **dict(zip(names, statistics, strict=True))}


def summarize(
    requests: Sequence[RequestTimes],
    *,
    ttft: float | None = None,
    itl: float | None = None,
    lag: float = 0.0,
) -> dict[str, Any]:
    """The summary of a run. Keys that end in `_s` are seconds, in `_per_s` per second.

    Rates and latencies are of completed requests, over the time from the first arrival to the last
    end of any. Goodput counts all requests: a failed one misses its target. It is None without a
    target. Shares are between 0 and 1.

    Args:
        ttft, itl: targets in seconds.
        lag: the longest time that the client itself could not run, see `client`.

    Raises:
        ValueError: there are no requests.
    """
    if not requests:
        raise ValueError("there are no requests; there is nothing to summarize")
    completed = [request for request in requests if request.error is None]
    details: dict[str, str] = {}  # of the first request with that error
    for request in requests:
        if request.error is not None:
            details.setdefault(request.error, request.detail)
    end = max(request.ended for request in requests)
    duration = max(end - min(request.arrival for request in requests), 1e-9)
    output_tokens = sum(request.tokens for request in completed)
    prompt_tokens = sum(request.prompt_tokens or 0 for request in completed)
    chunks = sum(len(request.chunks) for request in completed)
    goodput = None
    if ttft is not None or itl is not None:
        on_time = sum(request.meets(ttft, itl) for request in requests)
        goodput = {
            "ttft_s": ttft,
            "itl_s": itl,
            "requests_per_s": on_time / duration,
            "share": on_time / len(requests),
        }
    return {
        "requests": len(requests),
        "completed": len(completed),
        "failed": _counts(request.error for request in requests if request.error is not None),
        "failed_because": dict(sorted(details.items())),
        "finished": _counts(request.finish_reason or "unknown" for request in completed),
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "cached_prompt_tokens": sum(request.cached_tokens or 0 for request in completed),
        "output_tokens": output_tokens,
        "requests_without_usage": sum(request.output_tokens is None for request in completed),
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        "requests_per_s": len(completed) / duration,
        "output_tokens_per_s": output_tokens / duration,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / duration,
        "percentile_method": "linear",
        "ttft_s": spread(request.ttft for request in completed),
        "itl_s": spread(gap for request in completed for gap in request.gaps),
        "tpot_s": spread(request.tpot for request in completed),
        "e2e_s": spread(request.e2e for request in completed),
        "goodput": goodput,
        "client": {
            # how late the client noticed the arrival
            "late_s": spread(request.due - request.arrival for request in requests),
            # for max_concurrency
            "waited_s": spread(
                request.sent - request.due for request in requests if request.sent is not None
            ),
            "lag_s": lag,
        },
    }


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


# for people ---------------------------------------------------------------------------------------

ROWS = (
    ("first token (TTFT)", "ttft_s"),
    ("between chunks (ITL)", "itl_s"),
    ("per token (TPOT)", "tpot_s"),
    ("end to end", "e2e_s"),
)
COLUMNS = ("p50", "p90", "p99", "mean", "max")
BUSY = 0.1  # seconds that the client may be late before the table says so


def table(summary: dict[str, Any]) -> str:
    """The summary as a few aligned lines; latencies in milliseconds."""
    s = summary
    failed = sum(s["failed"].values())
    lines = [
        f"requests       {s['completed']} of {s['requests']} completed in {s['duration_s']:.2f} s "
        f"({s['requests_per_s']:.2f} a second), {failed} failed"
    ]
    for error, count in s["failed"].items():
        lines.append(f"  {count} x {error}: {s['failed_because'][error]}"[:200])
    lines.append(
        f"tokens         {s['prompt_tokens']} in ({s['cached_prompt_tokens']} cached), "
        f"{s['output_tokens']} out: {s['output_tokens_per_s']:.1f} out a second, "
        f"{s['total_tokens_per_s']:.1f} in all"
    )
    if s["requests_without_usage"]:
        lines.append(
            f"  {s['requests_without_usage']} answers came without usage: their chunks are counted "
            "as tokens"
        )
    if s["goodput"]:
        lines.append(_goodput_line(s["goodput"]))
    lines += ["", f"{'milliseconds':<22}" + "".join(f"{name:>10}" for name in COLUMNS)]
    for title, key in ROWS:
        cells = (_milliseconds(s[key][name]) for name in COLUMNS)
        lines.append(f"{title:<22}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join([*lines, "", *_client_lines(s["client"])])


def _goodput_line(goodput: dict[str, Any]) -> str:
    limits = {"first token": goodput["ttft_s"], "per token": goodput["itl_s"]}
    targets = ", ".join(
        f"{name} within {limit} s" for name, limit in limits.items() if limit is not None
    )
    return (
        f"goodput        {100 * goodput['share']:.1f} % of requests "
        f"({goodput['requests_per_s']:.2f} a second): {targets}"
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _client_lines(client: dict[str, Any]) -> list[str]:
    """Whether the client kept up, so that the latencies are the server's."""
    late = client["late_s"]["max"]
    waited = client["waited_s"]["max"] or 0.0
    lag = client["lag_s"]
    lines = [f"the client: at most {1000 * late:.1f} ms late, {1000 * lag:.1f} ms not running"]
    if waited > BUSY:
        lines.append(
            f"  requests waited for max_concurrency for {waited:.2f} s at most; the latencies "
            "include it"
        )
    if max(late, lag) > BUSY:
        lines.append(
            "  it could not keep up, so its delay is part of the latencies: give it more cores, or "
            "lower the rate"
        )
    return lines
