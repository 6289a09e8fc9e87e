"""The load client: what it plans, how it reads streams, what it makes of them, and a server that misbehaves on purpose.

The server here is a stub that streams at known times: the client's clock is what is tested. The real one is tested
elsewhere.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax import cli
from pagedjax.server.load import Events, Reading, Target, carries_output, message_of
from pagedjax.server.load_plan import FIRST_TOKEN, WORDS, Lengths, Load, arrivals, clip, plan, warm_up
from pagedjax.server.load_summary import Timed, spread, summarize, table

AT_ONCE = {"arrivals": "at-once"}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# what is asked and when ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("process", "burstiness", "cv"), [("poisson", 9, 1), ("gamma", 0.25, 2), ("gamma", 4, 0.5)])
@pytest.mark.parametrize("rate", [0.5, 40])
def test_random_arrivals_have_the_rate_and_the_burstiness_asked_for(process, burstiness, cv, rate):
    times = np.array(arrivals(process, rate, burstiness, 40_000, rng()))
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_uniform_arrivals_are_equally_far_apart_and_at_once_is_at_once():
    assert arrivals("uniform", 4, 1, 4, rng()) == [0, 0.25, 0.5, 0.75]
    assert arrivals("at-once", None, 1, 3, rng()) == [0, 0, 0]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 9))
def test_uniform_lengths_are_within_their_range(low, more, seed):
    drawn = Lengths.read("prompt_tokens", f"{low}:{low + more}").draw(50, rng(seed))
    assert all(low <= length <= low + more for length in drawn)


def test_both_ends_of_a_uniform_range_are_drawn_and_a_number_is_fixed():
    assert set(Lengths.read("x", "3:5").draw(200, rng())) == {3, 4, 5}
    assert Lengths.read("x", "7").draw(3, rng()) == [7, 7, 7]


def test_lognormal_lengths_have_the_median_asked_for():
    drawn = Lengths.read("x", "lognormal:6.63,0.99").draw(20_000, rng())
    assert np.median(drawn) == pytest.approx(np.exp(6.63), rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.99, rel=0.03)
    assert min(Lengths.read("x", "lognormal:-9,0").draw(5, rng())) == 1
    assert max(Lengths.read("x", "lognormal:700,500").draw(50, rng())) <= 2**31


@pytest.mark.parametrize(
    "text", ["", "0", "x", "5:4", "1:2:3", "-3", "lognormal:1", "lognormal:1,-1", "lognormal:inf,1"]
)
def test_lengths_that_cannot_be_read_are_told_with_the_forms_that_can(text):
    with pytest.raises(ValueError, match=r"prompt_tokens is .*; it must be like"):
        Load(prompt_tokens=text, **AT_ONCE)


def test_clipping_counts_what_it_moves():
    assert clip([0, 5, 9], 8) == ([1, 5, 8], 2)
    assert clip([5], None) == ([5], 0)


def test_the_same_seed_asks_the_same_at_the_same_times_and_more_requests_begin_with_the_fewer():
    load = {"rate": 3.0, "prompt_tokens": "5:20", "output_tokens": "lognormal:3,1", "vocab": 300}
    ten, five = plan(Load(**load, requests=10, seed=4)), plan(Load(**load, requests=5, seed=4))
    assert ten == plan(Load(**load, requests=10, seed=4))
    assert ten.items[:5] == five.items
    assert ten.items != plan(Load(**load, requests=10, seed=5)).items
    faster = plan(Load(**load | {"rate": 30.0}, requests=10, seed=4))
    assert [item.prompt for item in faster.items] == [item.prompt for item in ten.items]
    for item in ten.items:
        assert 5 <= len(item.prompt) <= 20
        assert all(FIRST_TOKEN <= token < 300 for token in item.prompt)


def test_a_chat_gets_as_many_ordinary_words_as_it_has_tokens():
    (item,) = plan(Load(endpoint="chat", requests=1, prompt_tokens="30", **AT_ONCE)).items
    assert isinstance(item.prompt, str)
    assert len(item.prompt.split()) == 30
    assert set(item.prompt.split()) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS) > 200


def test_limits_hold_for_drawn_lengths_and_what_they_moved_is_told():
    made = plan(
        Load(requests=9, prompt_tokens="50", output_tokens="7", max_prompt_tokens=20, max_output_tokens=7, rate=1)
    )
    assert {len(item.prompt) for item in made.items} == {20}
    assert (made.clipped_prompts, made.clipped_outputs) == (9, 0)


def test_a_warm_up_is_of_the_same_kind_with_other_prompts_and_all_at_once():
    load = Load(requests=4, prompt_tokens="20", output_tokens="3", rate=1)
    prompts = {item.prompt for item in plan(load).items}
    warm = warm_up(load, 6).items
    assert [(item.arrival, len(item.prompt), item.max_tokens) for item in warm] == [(0, 20, 3)] * 6
    assert not prompts & {item.prompt for item in warm}


# files ---------------------------------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACE = HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,20,109\n2023-11-16 18:15:48,5,0\n"


def test_a_trace_gives_arrivals_and_lengths_in_order_of_arrival():
    made = plan(Load(trace="a.csv", time_scale=0.5, max_prompt_tokens=100), TRACE)
    assert [item.arrival for item in made.items] == pytest.approx([0, 0.659705, 2.0])
    assert [len(item.prompt) for item in made.items] == [100, 5, 20]
    assert [item.max_tokens for item in made.items] == [44, 1, 109]
    assert (made.clipped_prompts, made.clipped_outputs) == (1, 1)
    assert len(plan(Load(trace="a.csv", requests=2), TRACE).items) == 2


@given(st.lists(st.tuples(st.datetimes(), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8))
@settings(deadline=None)
def test_any_trace_that_was_written_is_read(rows):
    text = io.StringIO()
    csv.writer(text).writerows([HEADER.strip().split(","), *((at.isoformat(" "), a, b) for at, a, b in rows)])
    items = plan(Load(trace="a.csv"), text.getvalue()).items
    rows = sorted(rows, key=lambda row: row[0])
    assert [item.arrival for item in items] == [(at - rows[0][0]).total_seconds() for at, _, _ in rows]
    assert [(len(item.prompt), item.max_tokens) for item in items] == [(max(1, a), max(1, b)) for _, a, b in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.csv has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\n", "has no column GeneratedTokens; a trace is CSV with the columns"),
        (HEADER, "a.csv has no requests"),
        (HEADER + "2023-11-16,5,6\nnever,5,6\n", "a.csv, line 3: Invalid isoformat string"),
        (HEADER + "2023-11-16,5\n", "a.csv, line 2"),
        (HEADER + "2023-11-16,5,many\n", "a.csv, line 2: invalid literal"),
        (HEADER + "2023-11-16,-5,6\n", "a.csv, line 2: a length is below 0"),
        (HEADER + "2023-11-16,5,6\n2023-11-16T00:00:00Z,5,6\n", "some times have a time zone"),
    ],
)
def test_a_trace_that_cannot_be_read_names_the_line(content, message):
    with pytest.raises(ValueError, match=message):
        plan(Load(trace="a.csv"), content)


def test_prompts_are_lines_over_and_over():
    made = plan(Load(prompts="a.txt", requests=3, output_tokens="9", **AT_ONCE), " one \n\ntwo\n")
    assert [(item.prompt, item.max_tokens) for item in made.items] == [("one", 9), ("two", 9), ("one", 9)]
    assert len(plan(Load(prompts="a.txt", **AT_ONCE), "one\ntwo\n").items) == 2
    with pytest.raises(ValueError, match=r"a\.txt holds no prompts"):
        plan(Load(prompts="a.txt", **AT_ONCE), "\n \n")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "arrivals poisson need a rate"),
        ({"rate": 0.0}, "rate is 0.0; it must be above 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": 1.0, "burstiness": 0.0}, "burstiness is 0.0"),
        ({"rate": 1.0, "requests": 0}, "requests is 0; it must be at least 1"),
        ({"rate": 1.0, "vocab": 17}, "vocab is 17"),
        ({"rate": 1.0, "seed": -1}, "seed is -1"),
        ({"trace": "a", "prompts": "b"}, "give one of them"),
        ({"trace": "a", "time_scale": -1.0}, "time_scale is -1.0"),
        ({"arrivals": "sometimes"}, "arrivals is 'sometimes'; it must be one of poisson"),
    ],
)
def test_what_cannot_be_asked_is_told(fields, message):
    with pytest.raises(ValueError, match=message):
        Load(**fields)


# streams -------------------------------------------------------------------------------------------------------------

STREAM = (
    '\ufeff: hello\r\nevent: x\nid: 7\ndata: {"a": "é€😀"}\r\n\r\n:\n\ndata:one\rdata: two\r\rdata\n\n'
    "data: [DONE]\n\ndata: unfinished"
).encode()
DATA = ['{"a": "é€😀"}', "one\ntwo", "", "[DONE]"]


def test_a_stream_may_be_cut_at_every_byte():
    for at in range(len(STREAM) + 1):
        events = Events()
        assert events.push(STREAM[:at]) + events.push(b"") + events.push(STREAM[at:]) == DATA, at
    events = Events()
    assert [data for i in range(len(STREAM)) for data in events.push(STREAM[i : i + 1])] == DATA


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=6), st.data())
def test_any_events_in_any_pieces_come_out_whole(texts, data):
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    raw = "".join(f": note{end}data: {text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    events = Events()
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [event for piece in pieces for event in events.push(piece)] == texts


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("pagedjax.server.load.MAX_LINE", 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        Events().push(b"x" * 11)


def reading(*events) -> Reading:
    one = Reading()
    for at, event in enumerate(events):
        one.take(event if isinstance(event, str) else json.dumps(event), float(at))
    return one


def text(content: str, reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}]}


def delta(reason: str | None = None, **content) -> dict:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": reason}]}


def test_chunks_count_when_they_carry_output_and_usage_counts_tokens():
    details = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    one = reading(text("a"), text("bc"), text(""), text("", "length"), {"choices": [], "usage": details}, "[DONE]")
    assert (one.chunks, one.closed, one.finish_reason) == ([0.0, 1.0, 2.0], 3.0, "length")
    assert (one.count("prompt_tokens"), one.count("completion_tokens"), one.cached) == (9, 4, 8)
    role = {"role": "assistant", "content": ""}
    two = reading(delta(**role), delta(content="a"), delta(content="", reason=None), delta("stop"), "[DONE]")
    assert (two.chunks, two.closed) == ([1.0, 2.0], 3.0)
    assert reading(delta(reasoning_content="hm")).chunks == [0.0]
    assert not carries_output({"delta": {}, "finish_reason": None})
    assert reading("[DONE]").closed == 0.0


def test_errors_in_a_stream_are_read_in_several_forms():
    assert reading({"error": {"message": "out of blocks", "type": "x"}}).error == "out of blocks"
    assert reading({"error": "out of blocks"}).error == "out of blocks"
    assert message_of({"detail": "no such model"}) == "no such model"
    assert message_of([1]) == "[1]"
    for wrong in ("no json", "[1]", '{"choices": [3]}', '{"choices": {"a": 1}}'):
        with pytest.raises(ValueError, match=r"."):
            reading(wrong)


@given(
    st.text()
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda x: (
            st.dictionaries(
                st.sampled_from(["choices", "usage", "error", "delta", "text", "finish_reason", "content", "message"]),
                x,
            )
            | st.lists(x)
        ),
    )
)
@example({"choices": [{"delta": None, "text": None, "finish_reason": 3}], "usage": {"completion_tokens": "5"}})
def test_nothing_that_a_server_sends_raises_anything_but_a_value_error(event):
    with suppress(ValueError):
        one = reading(event)
        assert one.cached is None or isinstance(one.cached, int)


# what it amounts to --------------------------------------------------------------------------------------------------


def timed(arrival: float, *chunks: float, **fields) -> Timed:
    return Timed(
        **{"arrival": arrival, "due": arrival, "sent": arrival, "chunks": chunks, "ended": chunks[-1], **fields}
    )


def test_latencies_are_those_of_the_definitions():
    one = timed(1.0, 1.5, 1.75, 2.5, output_tokens=5, ended=3.5)
    assert (one.ttft, one.gaps, one.tpot, one.e2e) == (0.5, (0.25, 0.75), 0.5, 2.5)
    assert timed(0.0, 1.0, 2.0).tokens == 2
    assert timed(0.0, 1.0, output_tokens=1).tpot is None
    silent = Timed(arrival=1, due=1, sent=1, chunks=(), ended=4, output_tokens=3)
    assert (silent.ttft, silent.tpot) == (3, 0)


def test_the_summary_folds_completed_requests_and_counts_failed_ones():
    seen = [
        timed(0.0, 0.5, 1.0, 1.5, output_tokens=3, prompt_tokens=10, cached_tokens=4, finish_reason="stop"),
        timed(1.0, 2.0, 4.0, output_tokens=2, prompt_tokens=20, due=1.25, sent=1.5, finish_reason="length"),
        timed(2.0, 2.5, ended=5.0, error="timeout", detail="not complete"),
        Timed(arrival=3, due=3, sent=None, chunks=(), ended=3, error="status 429", detail="full"),
        Timed(arrival=3, due=3, sent=3, chunks=(), ended=3, error="status 429", detail="full again"),
    ]
    s = summarize(seen, ttft=1.0, itl=0.5, lag=0.25)
    assert (s["requests"], s["completed"], s["failed"]) == (5, 2, {"status 429": 2, "timeout": 1})
    assert s["failed_because"] == {"status 429": "full", "timeout": "not complete"}
    assert s["finished"] == {"length": 1, "stop": 1}
    assert (s["duration_s"], s["requests_per_s"], s["output_tokens_per_s"], s["total_tokens_per_s"]) == (5, 0.4, 1, 7)
    assert (s["prompt_tokens"], s["cached_prompt_tokens"], s["output_tokens"], s["tokens_per_chunk"]) == (30, 4, 5, 1)
    assert (s["ttft_s"]["count"], s["ttft_s"]["p50"], s["ttft_s"]["max"]) == (2, 0.75, 1.0)
    assert (s["itl_s"]["count"], s["itl_s"]["mean"]) == (3, 1.0)
    assert s["tpot_s"]["max"] == 2.0
    assert s["goodput"] == {"ttft_s": 1.0, "itl_s": 0.5, "requests_per_s": 0.2, "share": 0.2}
    assert s["client"]["late_s"]["max"] == 0.25
    assert s["client"]["waited_s"]["max"] == 0.25
    assert json.loads(json.dumps(s)) == s
    shown = table(s)
    for part in ("2 of 5 completed in 5.00 s", "2 x status 429: full", "1 x timeout", "could not keep up", "1000.0"):
        assert part in shown
    assert "waited for a place" in shown


def test_without_targets_there_is_no_goodput_and_with_one_only_it_counts():
    seen = [timed(0.0, 1.0, 2.0), timed(0.0, 3.0, 3.5)]
    assert summarize(seen)["goodput"] is None
    assert summarize(seen, ttft=1.0)["goodput"]["share"] == 0.5
    assert summarize(seen, itl=0.5)["goodput"]["share"] == 0.5
    assert "goodput" not in table(summarize(seen))


def test_a_run_in_which_all_failed_has_a_summary_too():
    s = summarize([Timed(arrival=0, due=0, sent=None, chunks=(), ended=0, error="connection")])
    assert s["completed"] == 0
    assert s["ttft_s"] == spread([]) == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    assert "0 of 1 completed" in table(s)


# against a server ----------------------------------------------------------------------------------------------------


class Stub:
    """Streams each answer's tokens `gap` seconds apart after `first` seconds; what `max_tokens` says may change that.

    401: status 401 ... 429; 1000: hangs up in the middle; 1001: sends half and stalls; 1002: an error in the stream;
    1003: no usage, and both tokens in one chunk; 1004: [DONE] and nothing else; 1005: garbage.
    """

    def __init__(self) -> None:
        self.first, self.gap, self.serial = 0.0, 0.0, False
        self.models: object = {"data": [{"id": "stub"}, {"id": "other"}]}
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.under_way = self.most = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        if path == "/v1/models":
            status = 200 if isinstance(self.models, dict) else self.models
            return self._whole(writer, status, self.models if status == 200 else {"error": {"message": "go away"}})
        self.paths.append(path)
        self.keys.append(headers.get("authorization"))
        self.bodies.append(json.loads(body))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if not self.serial:
                return await self._answer(writer, self.bodies[-1])
            async with self.lock:
                return await self._answer(writer, self.bodies[-1])
        finally:
            self.under_way -= 1

    def _whole(self, writer, status, value) -> bool:
        text = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        return True

    async def _answer(self, writer: asyncio.StreamWriter, body: dict) -> bool:
        asked = body["max_tokens"]
        if 400 <= asked < 600:
            return self._whole(writer, asked, {"error": {"message": f"the stub says {asked}"}})
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")

        async def put(*events: object) -> None:
            for event in events:
                raw = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                for part in (raw[:5], raw[5:]):  # as networks do
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    await writer.drain()

        chat = "messages" in body
        more = (lambda word: delta(content=word)) if chat else text
        if chat:
            await put(delta(role="assistant", content=""))
        await asyncio.sleep(self.first)
        if asked >= 1000:
            if asked == 1002:
                await put(more("a"), {"error": {"message": "the engine stopped"}}, "[DONE]")
            elif asked == 1003:
                await put(more("ab"), delta("stop") if chat else text("", "stop"), "[DONE]")
            elif asked == 1004:
                await put("[DONE]")
            elif asked == 1005:
                await put("{")
            else:
                await put(more("a"))
                if asked == 1001:
                    await asyncio.sleep(30)
                return False
        else:
            for i in range(asked):
                await put(more(f"w{i} "))
                await asyncio.sleep(self.gap if i + 1 < asked else 0)
            await put(delta("length") if chat else text("", "length"))
            prompt = body.get("prompt") or body["messages"][0]["content"].split()
            usage = {"prompt_tokens": len(prompt), "completion_tokens": asked}
            await put({"choices": [], "usage": usage}, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return True


@contextmanager
def running() -> Iterator[tuple[Stub, str]]:
    """The stub on a free port, in a thread of its own."""
    stub, loop = Stub(), asyncio.new_event_loop()
    ready, address = threading.Event(), []

    async def body() -> None:
        stub.lock, stub.stop = asyncio.Lock(), asyncio.Event()
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        await stub.stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(body(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield stub, address[0]
    finally:
        loop.call_soon_threadsafe(stub.stop.set)
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def server():
    with running() as both:
        yield both


def bench(url: str, *words: str, tmp_path=None) -> tuple[int, dict]:
    """The exit status and what was written."""
    file = [] if tmp_path is None else ["--json", str(tmp_path / "out.json")]
    code = cli.main(["bench", "serve", "--url", url, "--timeout", "20", *words, *file])
    return code, json.loads((tmp_path / "out.json").read_text("utf-8")) if file else {}


def test_it_measures_the_delays_of_the_server(server, tmp_path, capsys):
    stub, url = server
    stub.first, stub.gap = 0.1, 0.03
    words = ["--rate", "20", "--requests", "8", "--prompt-tokens", "5:9", "--output-tokens", "4", "--vocab", "99"]
    code, out = bench(f"{url}/v1/", *words, "--ttft-target", "5", "--itl-target", "0.02", tmp_path=tmp_path)
    assert code == 0
    s = out["summary"]
    assert (s["completed"], s["output_tokens"], s["requests_without_usage"]) == (8, 32, 0)
    assert s["prompt_tokens"] == sum(len(body["prompt"]) for body in stub.bodies)
    assert 0.1 <= s["ttft_s"]["p50"] < 1.0  # above, only what a busy machine adds
    assert 0.025 <= s["tpot_s"]["p50"] < 0.5
    assert s["itl_s"]["count"] == 24
    assert 0.19 <= s["e2e_s"]["p50"] < 2.0
    assert s["goodput"]["share"] == 0
    assert s["finished"] == {"length": 8}
    assert stub.paths == ["/v1/completions"] * 8
    assert stub.keys == [None] * 8
    assert {key: stub.bodies[0][key] for key in ("model", "max_tokens", "temperature", "stream", "stream_options")} == {
        "model": "stub",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "ignore_eos" not in stub.bodies[0]
    assert [item["arrival"] for item in out["requests"]] == [
        item.arrival for item in plan(Load(rate=20, requests=8, prompt_tokens="5:9", output_tokens="4", vocab=99)).items
    ]
    shown = capsys.readouterr().out
    assert "8 of 8 completed" in shown
    assert "first token (TTFT)" in shown


def test_an_open_loop_does_not_wait_for_answers_and_cannot_hide_a_queue(server, tmp_path):
    stub, url = server
    stub.first, stub.serial = 0.1, True
    code, out = bench(url, "--arrivals", "at-once", "--requests", "6", "--output-tokens", "1", tmp_path=tmp_path)
    assert code == 0
    assert stub.most == 6
    assert out["summary"]["ttft_s"]["max"] >= 0.6
    stub.most, stub.serial = 0, False
    words = ["--arrivals", "at-once", "--requests", "6", "--output-tokens", "1", "--max-concurrency", "1"]
    code, out = bench(url, *words, tmp_path=tmp_path)
    assert stub.most == 1
    assert out["summary"]["ttft_s"]["max"] >= 0.6  # of waiting for a place as well
    assert out["summary"]["client"]["waited_s"]["max"] >= 0.5


def test_every_way_to_fail_is_counted_and_makes_the_status_1(server, tmp_path, capsys):
    _, url = server
    file = tmp_path / "trace.csv"
    kinds = [429, 500, 1000, 1001, 1002, 1005, 1003, 1004, 2, 3]
    file.write_text(HEADER + "".join(f"2024-01-01 00:00:00.{i:02d},3,{kind}\n" for i, kind in enumerate(kinds)))
    code, out = bench(url, "--trace", str(file), "--timeout", "1.5", tmp_path=tmp_path)
    s = out["summary"]
    assert code == 1
    assert s["failed"] == {"connection": 1, "status 429": 1, "status 500": 1, "stream": 2, "timeout": 1}
    assert s["failed_because"]["status 429"] == "the stub says 429"
    assert s["failed_because"]["stream"] == "the engine stopped"
    assert s["failed_because"]["timeout"] == "not complete 1.5 s after its arrival"
    assert s["completed"] == 4
    assert s["requests_without_usage"] == 2
    assert s["output_tokens"] == 2 + 3 + 1  # the last without usage: its one chunk
    assert s["finished"] == {"length": 2, "stop": 1, "unknown": 1}
    assert s["duration_s"] < 10
    shown = capsys.readouterr().out
    assert "1 x status 429: the stub says 429" in shown
    assert "2 answers came without usage" in shown


def test_a_chat_sends_messages_and_its_role_is_no_token(server, tmp_path):
    stub, url = server
    stub.first = 0.1
    texts = tmp_path / "texts.txt"
    texts.write_text("one two\nthree\n", "utf-8")
    words = ["--endpoint", "chat", "--prompts", str(texts), "--arrivals", "at-once", "--model", "other", "--ignore-eos"]
    code, out = bench(url, *words, "--output-tokens", "2", tmp_path=tmp_path)
    assert code == 0
    assert stub.paths == ["/v1/chat/completions"] * 2
    assert [body["messages"] for body in stub.bodies] == [
        [{"role": "user", "content": "one two"}],
        [{"role": "user", "content": "three"}],
    ]
    assert (stub.bodies[0]["model"], stub.bodies[0]["ignore_eos"]) == ("other", True)
    assert out["summary"]["ttft_s"]["p50"] >= 0.1
    assert out["summary"]["itl_s"]["count"] == 2


def test_the_key_of_a_file_is_sent_and_written_nowhere(server, tmp_path, capsys):
    stub, url = server
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    words = ["--arrivals", "at-once", "--requests", "1", "--api-key-file", str(file)]
    code, _ = bench(url, *words, tmp_path=tmp_path)
    assert code == 0
    assert stub.keys == ["Bearer s3cret"]
    assert "s3cret" not in (tmp_path / "out.json").read_text("utf-8") + "".join(capsys.readouterr())
    assert "s3cret" not in repr(Target("http://x", api_key="s3cret"))


def test_a_warm_up_is_not_measured_and_its_failure_ends_the_run(server, tmp_path, capsys):
    stub, url = server
    words = ["--arrivals", "at-once", "--requests", "2", "--warmup", "3"]
    code, out = bench(url, *words, "--output-tokens", "2", tmp_path=tmp_path)
    assert (code, out["summary"]["requests"], len(stub.bodies)) == (0, 2, 5)
    assert bench(url, *words, "--output-tokens", "429")[0] == 2
    assert "3 of 3 warm-up requests failed (status 429: the stub says 429)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "arrivals poisson need a rate"),
        (["--rate", "1", "--model", "nobody"], "the server has no model 'nobody'; it has stub, other"),
        (["--rate", "1", "--trace", "x.csv"], "--trace says what --rate would say"),
        (["--rate", "1", "--prompts", "x", "--vocab", "5"], "--prompts says what --vocab would say"),
        (["--rate", "1", "--time-scale", "2"], "--time-scale is of a --trace"),
        (["--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--rate", "1", "--ttft-target", "0"], "--ttft-target is 0.0; it must be above 0 seconds"),
        (["--rate", "1", "--max-concurrency", "0"], "max_concurrency is 0"),
        (["--rate", "1", "--warmup", "-1"], "--warmup is -1"),
        (["--rate", "1", "--timeout", "nan"], "timeout is nan"),
        (["--rate", "1", "--json", "no/such/folder/x.json"], "its folder does not exist"),
        (["--rate", "1", "--api-key-file", "nokey"], "nokey cannot be read"),
    ],
)
def test_bad_arguments_are_one_line_and_nothing_is_sent(server, capsys, words, message):
    stub, url = server
    assert bench(url, *words)[0] == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("pagedjax: ")
    assert len(err.strip().splitlines()) == 1
    assert (out, stub.bodies) == ("", [])


def test_a_server_that_is_not_there_or_lists_nothing_is_told(server, capsys):
    stub, url = server
    with running() as (_, gone):
        pass
    assert bench(gone, "--rate", "1")[0] == 2
    assert f"no server answers at {gone}" in capsys.readouterr().err
    assert bench("127.0.0.1:8000", "--rate", "1")[0] == 2
    assert "it must be like http://127.0.0.1:8000" in capsys.readouterr().err
    stub.models = 401
    assert bench(url, "--rate", "1")[0] == 2
    assert "answers 401: go away; give --api-key-file" in capsys.readouterr().err
    stub.models = 404
    assert bench(url, "--rate", "1")[0] == 2
    assert "lists no models (status 404); name one with --model" in capsys.readouterr().err
    assert bench(url, "--arrivals", "at-once", "--requests", "1", "--model", "mine")[0] == 0
    assert stub.bodies[0]["model"] == "mine"


def test_two_runs_of_a_seed_send_the_same_bodies(server):
    stub, url = server
    for _ in range(2):
        bench(
            url, "--rate", "200", "--requests", "9", "--prompt-tokens", "3:9", "--output-tokens", "1:3", "--seed", "3"
        )
    sent = [json.dumps(body, sort_keys=True) for body in stub.bodies]
    assert sorted(sent[:9]) == sorted(sent[9:])
