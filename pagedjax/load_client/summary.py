"""The summary of a load run: a pure fold over the times of its requests. Seconds count from the start of the run.

Latencies count from a request's *planned* arrival, so that a late server or client cannot hide its delay. The client
sees chunks; one chunk may have several tokens or none, so:

    chunks c1 <= ... <= ck with output, the end e at the chunk with the finish_reason, n output tokens
    ttft  c1 - arrival                    itl   the gaps c2 - c1, c3 - c2, ... of all requests together
    e2e   e - arrival                     tpot  (e - c1) / (n - 1), one value per request; none for n = 1

n is the server's count (`usage`). Without it, the chunks are counted, and the summary has the number of such requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

PERCENTILES = (50, 90, 99)


class RequestTimes(NamedTuple):
    """The times of one request. None: it did not happen, or the server did not report it.

    `due` is when the client noticed that the arrival had come, `sent` when max_concurrency allowed it too, and `ended`
    when the answer was complete or the request had failed. `error` is a short reason, for counting; `detail` is the
    whole message.
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
        return self.chunks[0] if self.chunks else None if self.error else self.ended

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in pairwise(self.chunks))

    @property
    def tpot(self) -> float | None:
        return (
            None
            if self.first is None or self.tokens < 2
            else (self.ended - self.first) / (self.tokens - 1)
        )

    @property
    def e2e(self) -> float:
        return self.ended - self.arrival

    def meets(self, ttft: float | None, itl: float | None) -> bool:
        """Whether it completed within the targets, in seconds. `itl` is the limit of its tpot; one token meets any."""
        if self.error is not None or self.ttft is None:
            return False
        return (ttft is None or self.ttft <= ttft) and (
            itl is None or self.tpot is None or self.tpot <= itl
        )


def spread(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """Count, mean, percentiles (numpy's method "linear") and maximum of the values that are not None."""
    kept = [value for value in values if value is not None]
    names = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    if not kept:
        return {"count": 0, **dict.fromkeys(names)}
    numbers = (np.mean(kept), *np.percentile(kept, PERCENTILES, method="linear"), max(kept))
    return {
        "count": len(kept),
        **{name: float(number) for name, number in zip(names, numbers, strict=True)},
    }


def summarize(
    seen: Sequence[RequestTimes],
    *,
    ttft: float | None = None,
    itl: float | None = None,
    lag: float = 0.0,
) -> dict[str, Any]:
    """The summary of a run. Keys that end in `_s` are seconds, in `_per_s` per second; shares are between 0 and 1.

    Rates and latencies are of completed requests, over the time from the first arrival to the last end of any. Goodput
    counts all requests: a failed one misses its target. It is None without a target.

    Args:
        ttft, itl: targets in seconds.
        lag: the longest time that the client itself could not run, see `client`.

    Raises:
        ValueError: there are no requests.
    """
    if not seen:
        raise ValueError("there are no requests; there is nothing to summarize")
    done = [one for one in seen if one.error is None]
    errors = [one.error for one in seen if one.error is not None]
    duration = max(max(one.ended for one in seen) - min(one.arrival for one in seen), 1e-9)
    output, prompt = sum(one.tokens for one in done), sum(one.prompt_tokens or 0 for one in done)
    chunks = sum(len(one.chunks) for one in done)
    good = sum(one.meets(ttft, itl) for one in seen)
    goodput = {"requests_per_s": good / duration, "share": good / len(seen)}
    return {
        "requests": len(seen),
        "completed": len(done),
        "failed": {error: errors.count(error) for error in sorted(set(errors))},
        "failed_because": {
            error: next(one.detail for one in seen if one.error == error)
            for error in sorted(set(errors))
        },
        "finished": _counts(one.finish_reason or "unknown" for one in done),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "cached_prompt_tokens": sum(one.cached_tokens or 0 for one in done),
        "output_tokens": output,
        "requests_without_usage": sum(one.output_tokens is None for one in done),
        "tokens_per_chunk": output / chunks if chunks else None,
        "requests_per_s": len(done) / duration,
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": (prompt + output) / duration,
        "percentile_method": "linear",
        "ttft_s": spread(one.ttft for one in done),
        "itl_s": spread(gap for one in done for gap in one.gaps),
        "tpot_s": spread(one.tpot for one in done),
        "e2e_s": spread(one.e2e for one in done),
        "goodput": None
        if ttft is None and itl is None
        else {"ttft_s": ttft, "itl_s": itl, **goodput},
        "client": {
            "late_s": spread(
                one.due - one.arrival for one in seen
            ),  # how late the client noticed the arrival
            "waited_s": spread(
                None if one.sent is None else one.sent - one.due for one in seen
            ),  # for max_concurrency
            "lag_s": lag,
        },
    }


def _counts(values: Iterable[str]) -> dict[str, int]:
    several = list(values)
    return {value: several.count(value) for value in sorted(set(several))}


# for people ----------------------------------------------------------------------------------------------------------

ROWS = (
    ("first token (TTFT)", "ttft_s"),
    ("between chunks (ITL)", "itl_s"),
    ("per token (TPOT)", "tpot_s"),
    ("end to end", "e2e_s"),
)
BUSY = 0.1  # seconds that the client may be late before the table says so


def table(summary: dict[str, Any]) -> str:
    """The summary as a few aligned lines; latencies in milliseconds."""
    s, client = summary, summary["client"]
    failed = sum(s["failed"].values())
    lines = [
        f"requests       {s['completed']} of {s['requests']} completed in {s['duration_s']:.2f} s "
        f"({s['requests_per_s']:.2f} a second), {failed} failed",
        *(
            f"  {count} x {error}: {s['failed_because'][error]}"[:200]
            for error, count in s["failed"].items()
        ),
        f"tokens         {s['prompt_tokens']} in ({s['cached_prompt_tokens']} cached), {s['output_tokens']} out: "
        f"{s['output_tokens_per_s']:.1f} out a second, {s['total_tokens_per_s']:.1f} in all",
    ]
    if s["requests_without_usage"]:
        lines.append(
            f"  {s['requests_without_usage']} answers came without usage: their chunks are counted as tokens"
        )
    if s["goodput"]:
        g = s["goodput"]
        wanted = (("first token", g["ttft_s"]), ("per token", g["itl_s"]))
        targets = ", ".join(
            f"{name} within {value} s" for name, value in wanted if value is not None
        )
        share, rate = 100 * g["share"], g["requests_per_s"]
        lines.append(f"goodput        {share:.1f} % of requests ({rate:.2f} a second): {targets}")
    lines += [
        "",
        f"{'milliseconds':<22}"
        + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "mean", "max")),
    ]
    for title, key in ROWS:
        values = (s[key][name] for name in ("p50", "p90", "p99", "mean", "max"))
        lines.append(
            f"{title:<22}"
            + "".join(f"{'-' if v is None else f'{1000 * v:.1f}':>10}" for v in values)
        )
    late, lag, waited = client["late_s"]["max"], client["lag_s"], client["waited_s"]["max"] or 0.0
    lines += ["", f"the client: at most {1000 * late:.1f} ms late, {1000 * lag:.1f} ms not running"]
    if waited > BUSY:
        lines.append(
            f"  requests waited for max_concurrency for {waited:.2f} s at most; the latencies include it"
        )
    if max(late, lag) > BUSY:
        lines.append(
            "  it could not keep up, so its delay is part of the latencies: give it more cores, or lower the rate"
        )
    return "\n".join(lines)
