"""The load client against a stub server that streams at known times and can fail in many ways."""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from pagedjax.commands import cli
from pagedjax.server.load_client.client import Target, connected, find_model
from pagedjax.server.load_client.plan import Load, make_plan
from tests.load_client.test_load_plan import HEADER
from tests.load_client.test_load_stream import delta, text


class Stub:
    """Streams each answer's tokens `gap` seconds apart after `first` seconds. Some values of
    `max_tokens` mean a fault:

    400 to 599: that status; 1000: hangs up in the middle; 1001: sends half and stalls; 1002: an
    error in the stream;
    1003: no usage, and both tokens in one chunk; 1004: only [DONE]; 1005: not JSON.
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.gap = 0.0
        self.serial = False
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
        fields = [line.split(": ", 1) for line in head[1:] if line]
        headers = {name.lower(): value for name, value in fields}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        if path == "/v1/models":
            if isinstance(self.models, dict):
                return self._whole(writer, 200, self.models)
            return self._whole(writer, self.models, {"error": {"message": "go away"}})
        if path == "/metrics":
            return self._whole(writer, 404, {"error": {"message": "no metrics here"}})
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
        max_tokens = body["max_tokens"]
        if 400 <= max_tokens < 600:
            return self._whole(
                writer, max_tokens, {"error": {"message": f"the stub says {max_tokens}"}}
            )
        writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
        )

        async def put(*events: object) -> None:
            for event in events:
                raw = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                for part in (raw[:5], raw[5:]):  # as networks do
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    await writer.drain()

        chat = "messages" in body

        def piece(word: str, reason: str | None = None) -> dict:
            return delta(reason, content=word) if chat else text(word, reason)

        if chat:
            await put(delta(role="assistant", content=""))
        await asyncio.sleep(self.first)
        faults = {
            1000: [piece("a")],
            1001: [piece("a")],
            1002: [piece("a"), {"error": {"message": "the engine stopped"}}, "[DONE]"],
            1003: [piece("ab"), piece("", "stop"), "[DONE]"],
            1004: ["[DONE]"],
            1005: ["{"],
        }
        if max_tokens in faults:
            await put(*faults[max_tokens])
            if max_tokens == 1001:
                await asyncio.sleep(30)
            if max_tokens < 1002:
                return False
        else:
            for i in range(max_tokens):
                await put(piece(f"w{i} "))
                await asyncio.sleep(self.gap if i + 1 < max_tokens else 0)
            prompt = body.get("prompt") or body["messages"][0]["content"].split()
            usage = {"prompt_tokens": len(prompt), "completion_tokens": max_tokens}
            await put(piece("", "length"), {"choices": [], "usage": usage}, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return True


@contextmanager
def running() -> Iterator[tuple[Stub, str]]:
    """The stub on a free port, in a thread."""
    stub = Stub()
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    address = []

    async def body() -> None:
        stub.lock = asyncio.Lock()
        stub.stop = asyncio.Event()
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
    with running() as stub:
        yield stub


def bench(url: str, options: str, tmp_path=None) -> tuple[int, dict]:
    """The exit status and the JSON file."""
    file = "" if tmp_path is None else f"--json {tmp_path / 'out.json'}"
    code = cli.main(shlex.split(f"bench serve --url {url} --timeout 20 {options} {file}"))
    return code, json.loads((tmp_path / "out.json").read_text("utf-8")) if file else {}


def test_no_connection_is_kept_idle(server):
    """httpcore checks every connection for every idle one, which takes longer than the answers at
    1000 of them.
    """
    _, url = server

    async def idle() -> list:
        async with connected(Target(url)) as client:
            models = await asyncio.gather(*(find_model(client, Target(url)) for _ in range(5)))
            assert models == ["stub"] * 5
            return client._transport._pool.connections

    assert asyncio.run(idle()) == []


def test_latencies_are_the_delays_of_the_server(server, tmp_path, capsys):
    stub, url = server
    stub.first = 0.1
    stub.gap = 0.03
    load = Load(rate=20, requests=8, prompt_tokens="5:9", output_tokens="4", vocab=99)
    options = "--rate 20 --requests 8 --prompt-tokens 5:9 --output-tokens 4 --vocab 99"
    targets = "--ttft-target 5 --itl-target 0.001"
    code, out = bench(f"{url}/v1/", f"{options} {targets}", tmp_path)
    assert code == 0
    s = out["summary"]
    assert (s["completed"], s["output_tokens"], s["requests_without_usage"]) == (8, 32, 0)
    assert s["prompt_tokens"] == sum(len(body["prompt"]) for body in stub.bodies)
    assert 0.1 <= s["ttft_s"]["p50"] < 1.0  # the upper limit allows for a busy machine
    assert 0.025 <= s["tpot_s"]["p50"] < 0.5
    assert s["itl_s"]["count"] == 24
    assert 0.19 <= s["e2e_s"]["p50"] < 2.0
    assert s["goodput"]["share"] == 0
    assert s["finished"] == {"length": 8}
    assert stub.paths == ["/v1/completions"] * 8
    assert stub.keys == [None] * 8
    body = stub.bodies[0]
    body.pop("prompt")
    assert body == body | {
        "model": "stub",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "ignore_eos" not in body
    planned = [item.arrival for item in make_plan(load).items]
    assert [item["arrival"] for item in out["requests"]] == planned
    assert "8 of 8 completed" in capsys.readouterr().out


def test_requests_do_not_wait_for_answers_and_latencies_include_the_queue(server, tmp_path):
    stub, url = server
    stub.first = 0.1
    stub.serial = True
    options = "--arrivals at-once --requests 6 --output-tokens 1"
    code, out = bench(url, options, tmp_path)
    assert code == 0
    assert stub.most == 6
    assert out["summary"]["ttft_s"]["max"] >= 0.6
    stub.most = 0
    stub.serial = False
    code, out = bench(url, f"{options} --max-concurrency 1", tmp_path)
    assert stub.most == 1
    assert out["summary"]["ttft_s"]["max"] >= 0.6  # includes the wait for max_concurrency
    assert out["summary"]["client"]["waited_s"]["max"] >= 0.5


def test_every_kind_of_failure_is_counted_and_the_exit_status_is_1(server, tmp_path, capsys):
    _, url = server
    file = tmp_path / "trace.csv"
    kinds = [429, 500, 1000, 1001, 1002, 1005, 1003, 1004, 2, 3]
    rows = [f"2024-01-01 00:00:00.{i:02d},3,{kind}\n" for i, kind in enumerate(kinds)]
    file.write_text(HEADER + "".join(rows))
    code, out = bench(url, f"--trace {file} --timeout 1.5", tmp_path)
    s = out["summary"]
    assert code == 1
    assert s["failed"] == {
        "connection": 1,
        "status 429": 1,
        "status 500": 1,
        "stream": 2,
        "timeout": 1,
    }
    reasons = s["failed_because"]
    assert reasons["status 429"] == "the stub says 429"
    assert reasons["stream"] == "the engine stopped"
    assert reasons["timeout"] == "not complete 1.5 s after its arrival"
    assert s["completed"] == 4
    assert s["requests_without_usage"] == 2
    assert s["output_tokens"] == 2 + 3 + 1  # the last without usage: its one chunk
    assert s["finished"] == {"length": 2, "stop": 1, "unknown": 1}
    assert s["duration_s"] < 10
    assert "2 answers came without usage" in capsys.readouterr().out


def test_a_chat_sends_messages_and_its_role_chunk_is_not_output(server, tmp_path):
    stub, url = server
    stub.first = 0.1
    texts = tmp_path / "texts.txt"
    texts.write_text("one two\nthree\n", "utf-8")
    options = f"--endpoint chat --prompts {texts} --arrivals at-once --model other --ignore-eos"
    code, out = bench(url, f"{options} --output-tokens 2", tmp_path)
    assert code == 0
    assert stub.paths == ["/v1/chat/completions"] * 2
    # in any order: at once
    bodies = sorted(stub.bodies, key=lambda body: body["messages"][0]["content"])
    for body, content in zip(bodies, ("one two", "three"), strict=True):
        assert body["messages"] == [{"role": "user", "content": content}]
        assert (body["model"], body["ignore_eos"]) == ("other", True)
    assert out["summary"]["ttft_s"]["p50"] >= 0.1
    assert out["summary"]["itl_s"]["count"] == 2


def test_the_api_key_is_sent_and_not_written(server, tmp_path, capsys):
    stub, url = server
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    code, _ = bench(url, f"--arrivals at-once --requests 1 --api-key-file {file}", tmp_path)
    assert code == 0
    assert stub.keys == ["Bearer s3cret"]
    assert "s3cret" not in (tmp_path / "out.json").read_text("utf-8") + "".join(capsys.readouterr())
    assert "s3cret" not in repr(Target("http://x", api_key="s3cret"))


def test_a_warm_up_is_not_measured_and_a_failed_one_ends_the_run(server, tmp_path, capsys):
    stub, url = server
    options = "--arrivals at-once --requests 2 --warmup 3 --output-tokens"
    code, out = bench(url, f"{options} 2", tmp_path)
    assert (code, out["summary"]["requests"], len(stub.bodies)) == (0, 2, 5)
    assert bench(url, f"{options} 429")[0] == 2
    message = "3 of 3 warm-up requests failed (status 429: the stub says 429)"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "",
            "arrivals poisson need a rate, in requests a second; give --rate 4, or --arrivals at-once",
        ),
        (
            "--rate 1 --model unknown",
            "the server has no model 'unknown'; it has stub, other",
        ),
        ("--rate 1 --trace x.csv", "--trace already gives --rate"),
        ("--rate 1 --prompts x --vocab 5", "--prompts already gives --vocab"),
        ("--rate 1 --time-scale 2", "--time-scale needs a --trace"),
        (
            "--trace nowhere.csv",
            "--trace is 'nowhere.csv', which cannot be read: No such file or directory; name a CSV",
        ),
        (
            "--trace /",
            "--trace is '/', which cannot be read: Is a directory; name a CSV file, with TIMESTAMP",
        ),
        (
            "--rate 1 --prompts no.txt",
            "--prompts is 'no.txt', which cannot be read: No such file or directory;",
        ),
        (
            "--rate 1 --prompts /",
            "which cannot be read: Is a directory; name a text file with a prompt on each",
        ),
        ("--rate 1 --json /", "--json is '/', which is a folder; name a file in it"),
        (
            "--rate 1 --api-key-file /",
            "cannot be read: Is a directory; name a text file that has the key alone",
        ),
        ("--rate 1 --ttft-target 0", "--ttft-target is 0.0; it must be above 0 seconds"),
        ("--rate 1 --max-concurrency 0", "max_concurrency is 0"),
        ("--rate 1 --warmup -1", "--warmup is -1"),
        ("--rate 1 --timeout nan", "timeout is nan"),
        ("--rate 1 --json no/such/folder/x.json", "its folder does not exist"),
        (
            "--rate 1 --api-key-file nokey",
            "--api-key-file is 'nokey', which cannot be read: No such file or directory;",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_nothing_is_sent(server, capsys, words, message):
    stub, url = server
    assert bench(url, words)[0] == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("pagedjax: ")
    assert len(err.strip().splitlines()) == 1
    assert (out, stub.bodies) == ("", [])


def test_a_server_without_answer_or_without_models_is_an_error(server, capsys):
    stub, url = server
    with running() as (_, address):
        pass
    for models, place, message in (
        (None, address, f"no server answers at {address}"),
        (None, "127.0.0.1:8000", "it must be like http://127.0.0.1:8000"),
        (401, url, "answers 401: go away; give --api-key-file"),
        (404, url, "lists no models (status 404); name one with --model"),
    ):
        stub.models = models
        assert bench(place, "--rate 1")[0] == 2
        assert message in capsys.readouterr().err
    assert bench(url, "--arrivals at-once --requests 1 --model mine")[0] == 0
    assert stub.bodies[0]["model"] == "mine"
