"""What a server has to survive: keys, limits, clients that leave, a full queue, a broken engine, a signal to stop."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import IO

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedjax import LLM, SamplingParams, cli
from pagedjax.server import lecture
from pagedjax.server.metrics import Metrics
from tests.server.conftest import ENGINE, serving

GREEDY = {"model": "tiny", "temperature": 0.0}


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def body(error: httpx.Response) -> dict:
    """The error, which has OpenAI's shape."""
    found = error.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def wait_until(what, seconds=30.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def idle(worker) -> bool:
    """Nothing is under way, and no block has an owner."""
    state = worker.llm.engine.state
    return not worker.llm.engine.has_work and not worker.waiting and state.pool.num_free == state.config.num_blocks


@contextmanager
def served_to(llm: LLM, **options):
    """A server of its own and a client."""
    with serving(llm, **options) as found, httpx.Client(base_url=found.url, timeout=60) as client:
        yield found, client


def completed(client: httpx.Client, **options) -> dict:
    answer = client.post("/v1/completions", json={**GREEDY, "prompt": "abc", **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- small endpoints --------------------------------------------------------------------------------------------------


def test_health_and_version(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"].count(".") == 2


def test_tokens_of_a_text_and_of_a_conversation(http, reference):
    tokenizer = reference.tokenizer
    found = http.post("/tokenize", json={"prompt": "abc the", "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode("abc the")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert "".join(found["token_strs"]) == "abc the"
    messages = [{"role": "user", "content": "abc"}]
    found = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert found["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert http.post("/detokenize", json={"tokens": tokenizer.encode("abc the")}).json() == {"prompt": "abc the"}
    assert "vocabulary" in body(http.post("/detokenize", json={"tokens": [320]}))["message"]
    assert "give one of them" in body(http.post("/tokenize", json={}))["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b'{"seed": %s}' % (b"9" * 5000), 400),  # more digits than Python reads
        (b"\xff", 400),
        (b"[]", 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": 1e999}', 400),
    ],
)
def test_a_body_that_is_no_request_is_a_400(http, content, status):
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert body(answer)["type"] == "invalid_request_error"


def test_mistakes_are_told_by_name_and_place(http):
    answer = http.post("/v1/completions", content=b'{"prompt": "a",}', headers={"Content-Type": "application/json"})
    assert body(answer)["message"].startswith("the body is no JSON: ")
    assert body(answer)["message"].endswith(" at character 15")
    assert body(answer)["param"] is None
    error = body(http.get("/viewer/steps", params={"since": -1}))
    assert (error["param"], error["message"].split()[0]) == ("since", "since:")
    error = body(http.get("/result/abc"))
    assert (error["param"], error["message"].split()[0]) == ("seq_id", "seq_id:")
    error = body(http.post("/generate", json={"prompt": "a", "max_length": 10**400}))
    assert "less than 2147483648" in error["message"]


def test_what_is_not_there_is_a_404_and_a_wrong_method_a_405(http):
    assert body(http.get("/v1/nothing"))["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405
    assert body(http.get("/v1/completions"))["message"]


# --- the lecture's endpoints ------------------------------------------------------------------------------------------


def test_a_sequence_is_asked_for_and_come_back_for(http, reference):
    (wanted,) = reference.generate("abc", SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
    length = len(wanted.prompt_token_ids) + 60
    number = http.post("/generate", json={"prompt": "abc", "max_length": length}).json()["sequence_id"]
    seen = []
    wait_until(lambda: seen.append(http.get(f"/result/{number}").json()) or seen[-1]["status"] != "in progress")
    assert seen[-1] == {"status": "completed", "generated": wanted.outputs[0].text}
    for one in seen:
        assert wanted.outputs[0].text.startswith(one["generated"])
    assert http.get("/result/999999").json() == {"status": "not found", "generated": None}
    assert "at least" in body(http.post("/generate", json={"prompt": "abc the cat", "max_length": 1}))["message"]


def test_old_results_are_forgotten(tiny, monkeypatch):
    monkeypatch.setattr(lecture, "KEPT", 3)
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (_, http):
        for i in range(1, 7):
            assert http.post("/generate", json={"prompt": "abc", "max_length": 8}).json() == {"sequence_id": i}
            wait_until(lambda i=i: http.get(f"/result/{i}").json()["status"] == "completed")
        statuses = [http.get(f"/result/{i}").json()["status"] for i in range(1, 7)]
        assert statuses[:3].count("not found") >= 2
        assert statuses[3:] == ["completed"] * 3


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE), api_key="sesame") as (_, http):
        for path in ("/v1/models", "/v1/nothing", "/result/1", "/viewer/steps"):
            answer = http.get(path)
            assert (answer.status_code, body(answer)["code"]) == (401, "invalid_api_key")
        for wrong in ("Bearer no", "sesame", "Basic sesame", "Bearer sésame"):
            headers = {"Authorization": wrong.encode()}
            assert http.get("/v1/models", headers=headers).status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        for path in ("/health", "/metrics", "/version", "/viewer"):
            assert http.get(path).status_code == 200
    with pytest.raises(ValueError, match="the API key is empty"):
        serving(LLM(tiny, progress=False, **ENGINE), api_key=" ").__enter__()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE), max_body_bytes=1000) as (_, http):
        large = json.dumps({"model": "tiny", "prompt": "a" * 2000}).encode()
        answer = http.post("/v1/completions", content=large, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert "more than 1000 bytes" in body(answer)["message"]
        in_pieces = (large[i : i + 100] for i in range(0, len(large), 100))  # without a Content-Length
        answer = http.post("/v1/completions", content=in_pieces, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert completed(http, max_tokens=1)["choices"]


def test_a_full_queue_is_a_429_that_says_when_to_come_back(tiny):
    llm = LLM(tiny, progress=False, **{**ENGINE, "max_num_seqs": 1})
    with served_to(llm, max_queue=2) as (found, http):
        answers = []

        def ask():
            options = {**GREEDY, "prompt": "abc", "max_tokens": 300, "ignore_eos": True}
            answers.append(httpx.post(f"{found.url}/v1/completions", json=options, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        threads[0].start()
        wait_until(lambda: llm.engine.state.running.seqs)  # it has left the queue
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: found.worker.waiting == 2)
        refused = http.post("/v1/completions", json={**GREEDY, "prompt": "abc", "max_tokens": 1})
        assert refused.status_code == 429
        assert body(refused)["code"] == "queue_full"
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert http.get("/health").status_code == 200
        many = http.post("/v1/completions", json={**GREEDY, "prompt": ["a", "b", "c"]})
        assert (many.status_code, "send fewer at once" in body(many)["message"]) == (400, True)
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert completed(http, max_tokens=1)["choices"]
        assert idle(found.worker)


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_gets_its_blocks_freed(served, stream):
    options = {**GREEDY, "prompt": "abc", "max_tokens": 480, "ignore_eos": True, "stream": stream, "n": 2}

    async def leave():
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            task = asyncio.create_task(client.post("/v1/completions", json=options))
            for _ in range(2000):
                if served.worker.llm.engine.state.running.seqs:
                    break
                await asyncio.sleep(0.005)
            assert served.worker.llm.engine.state.running.seqs
            task.cancel()

    before = served.worker.llm.engine.state.arrivals
    asyncio.run(leave())
    wait_until(lambda: idle(served.worker))
    assert served.worker.llm.engine.state.arrivals > before


def test_two_hundred_clients_of_whom_a_third_leave(served, reference):
    """Every other answer is complete and right, and no block is left behind."""
    draw = random.Random(0)
    prompts = [[20 + i % 250, 30, 40 + i // 250, *(draw.randint(20, 300) for _ in range(i % 30))] for i in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    wanted = [output.outputs[0].text for output in reference.generate(prompts, params, use_tqdm=False)]
    leaving = {i for i in range(200) if draw.random() < 1 / 3}

    async def one(client, i):
        options = {**GREEDY, "prompt": prompts[i], "max_tokens": 24, "ignore_eos": True, "stream": bool(i % 2)}
        async with asyncio.timeout(0.002 + 0.8 * draw.random() if i in leaving else 120):
            if not i % 2:
                return (await client.post("/v1/completions", json=options)).json()["choices"][0]["text"]
            text = ""
            async with client.stream("POST", "/v1/completions", json=options) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            return text

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)), return_exceptions=True)

    found = asyncio.run(all_of_them())
    left = [i for i, text in enumerate(found) if isinstance(text, TimeoutError)]
    assert set(left) <= leaving
    assert len(left) > 20
    for i, text in enumerate(found):
        if i not in left:
            assert text == wanted[i]
    wait_until(lambda: idle(served.worker))


# --- when things go wrong ---------------------------------------------------------------------------------------------


def test_a_broken_engine_is_told_to_everybody(tiny, monkeypatch):
    llm = LLM(tiny, progress=False, **ENGINE)
    with served_to(llm) as (_, http):
        assert completed(http, max_tokens=1)["choices"]
        monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
        answer = http.post("/v1/completions", json={**GREEDY, "prompt": "abc"})
        assert (answer.status_code, body(answer)["code"]) == (503, "engine_stopped")
        assert "division by zero" in body(answer)["message"]
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={**GREEDY, "prompt": "abc"}).status_code == 503
        number = http.post("/generate", json={"prompt": "abc"})
        assert number.status_code == 503


def test_an_engine_that_breaks_on_a_request_answers_it(tiny, monkeypatch):
    llm = LLM(tiny, progress=False, **ENGINE)
    with served_to(llm) as (found, http):
        monkeypatch.setattr(llm.engine, "add", lambda *args, **options: 1 / 0)
        answer = http.post("/v1/completions", json={**GREEDY, "prompt": "abc"}, timeout=10)
        assert (answer.status_code, body(answer)["code"]) == (503, "engine_stopped")
        assert body(answer)["message"] == "the engine failed: division by zero"
        wait_until(lambda: not found.worker.healthy)
        assert http.get("/health").status_code == 503


def test_an_observer_that_fails_stops_nothing_and_is_logged_once(tiny, monkeypatch, caplog):
    monkeypatch.setattr(Metrics, "added", lambda *args: 1 / 0)
    monkeypatch.setattr(Metrics, "stepped", lambda *args: 1 / 0)
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (found, http):
        for _ in range(2):
            assert completed(http, max_tokens=3)["choices"]
        assert found.worker.healthy
    assert [record.message.split(";")[1] for record in caplog.records if "as an observer" in record.message] == [
        " further errors of it are not logged"
    ]


def test_a_stream_that_breaks_ends_with_an_error(tiny, monkeypatch):
    llm = LLM(tiny, progress=False, **ENGINE)
    step, steps = llm.engine.step, []
    monkeypatch.setattr(llm.engine, "step", lambda: steps.append(1) or (step() if len(steps) < 4 else 1 / 0))
    with serving(llm) as found:
        options = {**GREEDY, "prompt": "abc", "max_tokens": 30, "ignore_eos": True, "stream": True}
        answer = httpx.post(f"{found.url}/v1/completions", json=options, timeout=60)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"


def test_metrics_add_up(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (_, http):
        prompts = ["abc the cat and the other cat are in the house " * 3] * 3 + ["b"]
        counts = [completed(http, prompt=prompt, max_tokens=6, ignore_eos=True)["usage"] for prompt in prompts]
        completed(http, prompt="abc", max_tokens=9, ignore_eos=True, n=2)
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
        }

    def value(name, **labels):
        return samples[(f"pagedjax:{name}", *sorted({"model_name": "tiny", **labels}.items()))]

    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in counts)
    assert cached > 0
    assert value("prefix_cache_hits_total") >= cached
    prompt = sum(usage["prompt_tokens"] for usage in counts) - cached
    assert prompt <= value("prompt_tokens_total") <= prompt + 8
    assert value("generation_tokens_total") == 4 * 6 + 2 * 9
    assert value("request_success_total", finished_reason="length") == 6
    assert value("time_to_first_token_seconds_count") == 6
    assert value("inter_token_latency_seconds_count") == 4 * 5 + 2 * 8
    assert value("request_generation_tokens_sum") == 42
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0
    inference, queue = value("request_inference_time_seconds_sum"), value("request_queue_time_seconds_sum")
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(inference + queue, rel=0.2)


def test_the_viewer_follows_the_engine(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (found, http):
        page = http.get("/viewer")
        assert page.headers["content-type"].startswith("text/html")
        assert "viewer/steps" in page.text
        first = http.get("/viewer/steps").json()
        assert first["about"]["config"]["num_blocks"] == 256
        completed(http, max_tokens=5, ignore_eos=True)
        news = http.get("/viewer/steps", params={"since": first["next"]}).json()
        assert len(news["frames"]) >= 5
        assert news["next"] == first["next"] + len(news["frames"])
        completed(http, max_tokens=3, ignore_eos=True)
        again = http.get("/viewer/steps", params={"since": news["next"]}).json()
        assert 3 <= len(again["frames"]) < 8
        assert http.get("/viewer/steps", params={"since": -1}).status_code == 400
        assert found.worker.healthy


def started(*words: str, errors: IO[str] | None = None) -> tuple[subprocess.Popen[str], str]:
    """`pagedjax serve` as a process of its own -> it and its url. `errors`: where what it logs goes."""
    command = [sys.executable, "-m", "pagedjax", "serve", *words, "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), line
    return process, line.split(" at ")[1].strip().removesuffix("/v1")


SIZES = ("--max-num-seqs", "4", "--num-blocks", "128", "--max-num-batched-tokens", "64", "--token-buckets", "8,64")


def test_a_signal_lets_what_is_under_way_end(tiny_folder, tmp_path):
    process, url = started(
        str(tiny_folder), *SIZES, "--served-model-name", "tiny", "--record", str(tmp_path / "r.jsonl")
    )
    try:
        options = {**GREEDY, "prompt": "abc", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=options, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert (tmp_path / "r.jsonl").stat().st_size > 1000
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("drain", "signals"), [(1, [signal.SIGTERM]), (60, [signal.SIGINT] * 2)], ids=["the time is over", "two SIGINTs"]
)
def test_what_does_not_end_in_time_is_answered_and_nothing_is_logged(tiny_folder, tmp_path, drain, signals):
    options = {"model": "", "prompt": "abc", "max_tokens": 480, "ignore_eos": True, "n": 4}
    with (tmp_path / "errors").open("w") as errors:
        process, url = started(str(tiny_folder), *SIZES, "--drain-seconds", str(drain), errors=errors)
        half = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        try:
            with ThreadPoolExecutor(24) as pool, httpx.Client(base_url=url, timeout=60) as client:
                ask = partial(client.post, "/v1/completions", json=options)
                answers = [pool.submit(ask) for _ in range(23)]
                stream = pool.submit(partial(client.post, "/v1/completions", json=options | {"stream": True}))
                wait_until(lambda: value_of(client, "num_requests_waiting") > 5)
                for one in signals:
                    process.send_signal(one)
                    wait_until(lambda: refuses(url))  # it has taken notice: two at once would be one
                codes = [answer.result().status_code for answer in answers]
                assert set(codes) <= {200, 503}
                assert codes.count(503) > 5
                errors_told = [body(answer.result()) for answer in answers if answer.result().status_code == 503]
                assert {error["message"] for error in errors_told} == {"the server is stopping"}
                assert stream.result().text.rstrip().endswith("data: [DONE]") or stream.result().status_code == 503
            # 0: who started the tests ignores SIGINT, as a shell does for what it runs in the background
            assert process.wait(15) in (0, 130, -signal.SIGTERM)
        finally:
            half.close()
            process.kill()
            process.wait()
    said = (tmp_path / "errors").read_text()
    assert "Traceback" not in said, said
    assert "ERROR" not in said, said


def refuses(url: str) -> bool:
    """Whether nobody can connect any more."""
    try:
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=1).close()
    except OSError:
        return True
    return False


def value_of(client: httpx.Client, name: str) -> float:
    """Of a gauge that one server has."""
    page = client.get("/metrics").text
    return float(next(line.split()[-1] for line in page.splitlines() if line.startswith(f"pagedjax:{name}{{")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "{taken}"], "cannot listen at '127.0.0.1', port {taken}: .*; choose others"),
        (["--port", "70000"], "port is 70000; it must be from 0"),
        (["--host", "192.0.2.1"], "cannot listen at '192.0.2.1'"),
        (["--max-queue", "0"], "max_queue is 0; it must be at least 1"),
        (["--api-key-file", "{empty}"], "the API key is empty"),
        (["--api-key-file", "nowhere"], "nowhere"),
        (["--api-key-file", "{folder}"], "Is a directory: '{folder}'"),
        (["--port", "0", "--block-size", "0"], "block_size is 0"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_a_line(tiny_folder, tmp_path, capsys, words, message):
    (tmp_path / "empty").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        known = {"taken": other.getsockname()[1], "empty": tmp_path / "empty", "folder": tmp_path}
        words = [word.format(**known) for word in words]
        assert cli.main(["serve", str(tiny_folder), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert re.search(message.format(**known), line), line
