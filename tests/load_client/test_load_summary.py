"""The summary of a load run, from the times of its requests."""

from __future__ import annotations

import json

from pagedjax.server.load_client.summary import RequestTimes, spread, summarize, table


def timed(arrival: float, *chunks: float, **fields) -> RequestTimes:
    fields = {"due": arrival, "sent": arrival, "ended": chunks[-1], **fields}
    return RequestTimes(arrival=arrival, chunks=chunks, **fields)


def test_latencies_follow_their_definitions():
    request = timed(1.0, 1.5, 1.75, 2.5, output_tokens=5, ended=3.5)
    assert (request.ttft, request.gaps, request.tpot, request.e2e) == (0.5, (0.25, 0.75), 0.5, 2.5)
    assert timed(0.0, 1.0, 2.0).tokens == 2
    assert timed(0.0, 1.0, output_tokens=1).tpot is None
    silent = RequestTimes(arrival=1, due=1, sent=1, chunks=(), ended=4, output_tokens=3)
    assert (silent.ttft, silent.tpot) == (3, 0)


def test_the_summary_has_latencies_of_completed_requests_and_counts_of_failed_ones():
    completed = {"output_tokens": 3, "prompt_tokens": 10, "cached_tokens": 4}
    late = {"output_tokens": 2, "prompt_tokens": 20, "due": 1.25, "sent": 1.5}
    full = {"arrival": 3, "due": 3, "chunks": (), "ended": 3, "error": "status 429"}
    requests = [
        timed(0.0, 0.5, 1.0, 1.5, finish_reason="stop", **completed),
        timed(1.0, 2.0, 4.0, finish_reason="length", **late),
        timed(2.0, 2.5, ended=5.0, error="timeout", detail="not complete"),
        RequestTimes(sent=None, detail="full", **full),
        RequestTimes(sent=3, detail="full again", **full),
    ]
    s = summarize(requests, ttft=1.0, itl=0.5, lag=0.25)
    assert (
        s
        | {
            "requests": 5,
            "completed": 2,
            "failed": {"status 429": 2, "timeout": 1},
            "failed_because": {"status 429": "full", "timeout": "not complete"},
            "finished": {"length": 1, "stop": 1},
            "duration_s": 5,
            "requests_per_s": 0.4,
            "output_tokens_per_s": 1,
            "total_tokens_per_s": 7,
            "prompt_tokens": 30,
            "cached_prompt_tokens": 4,
            "output_tokens": 5,
            "tokens_per_chunk": 1,
            "goodput": {"ttft_s": 1.0, "itl_s": 0.5, "requests_per_s": 0.2, "share": 0.2},
        }
        == s
    )
    assert (s["ttft_s"]["count"], s["ttft_s"]["p50"], s["ttft_s"]["max"]) == (2, 0.75, 1.0)
    assert (s["itl_s"]["count"], s["itl_s"]["mean"]) == (3, 1.0)
    assert s["tpot_s"]["max"] == 2.0
    assert s["client"]["late_s"]["max"] == s["client"]["waited_s"]["max"] == 0.25
    assert json.loads(json.dumps(s)) == s
    assert "2 of 5 completed in 5.00 s" in table(s)


def test_goodput_needs_a_target_and_uses_the_given_ones():
    requests = [timed(0.0, 1.0, 2.0), timed(0.0, 3.0, 3.5)]
    assert summarize(requests)["goodput"] is None
    assert summarize(requests, ttft=1.0)["goodput"]["share"] == 0.5
    assert summarize(requests, itl=0.5)["goodput"]["share"] == 0.5
    assert "goodput" not in table(summarize(requests))


def test_a_run_without_completed_requests_has_a_summary():
    failed = RequestTimes(arrival=0, due=0, sent=None, chunks=(), ended=0, error="connection")
    s = summarize([failed])
    assert s["completed"] == 0
    empty = dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    assert s["ttft_s"] == spread([]) == {"count": 0, **empty}
    assert "0 of 1 completed" in table(s)
