"""The server as a whole: small endpoints, the key, limits, the full queue, metrics, the viewer,
signals to stop.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedjax import LLM
from pagedjax.commands import cli
from pagedjax.server.app import Options, create_app
from pagedjax.server.metrics import Metrics
from tests import mappings
from tests.engine.runs import small_llm
from tests.server.support import (
    ENGINE,
    GREEDY,
    SIZES,
    command,
    complete,
    error_of,
    gauge,
    idle,
    served_to,
    server_llm,
    serving,
    slow_steps,
    start_server,
    wait_until,
)

# --- small endpoints ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    """The engine of servers of one test each."""
    return server_llm(tiny)


JSON = {"Content-Type": "application/json"}


def test_health_and_version(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"].count(".") == 2


def test_tokenize_and_detokenize_match_the_tokenizer(http, reference):
    tokenizer = reference.tokenizer
    ids = tokenizer.encode("abc the")
    answer = http.post("/tokenize", json={"prompt": "abc the", "return_token_strs": True}).json()
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"]) == (len(ids), 512)
    assert "".join(answer["token_strs"]) == "abc the"
    messages = [{"role": "user", "content": "abc"}]
    body = {"messages": messages, "add_generation_prompt": False}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "abc the"}
    assert "vocabulary" in error_of(http.post("/detokenize", json={"tokens": [320]}))["message"]
    assert "give one of them" in error_of(http.post("/tokenize", json={}))["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"seed": %s}' % (b"9" * 5000),  # more digits than Python reads
        b"\xff",
        b"[]",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": 1e999}',
    ],
)
def test_an_invalid_body_is_a_400(http, content):
    answer = http.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


def test_errors_name_the_field_and_the_place(http):
    error = error_of(http.post("/v1/completions", content=b'{"prompt": "a",}', headers=JSON))
    assert error["message"].startswith("the body is not JSON: ")
    assert error["message"].endswith(" at character 15")
    assert error["param"] is None
    error = error_of(http.get("/viewer/steps", params={"since": -1}))
    assert (error["param"], error["message"].split()[0]) == ("since", "since:")
    error = error_of(http.post("/generate", json={"prompt": "a", "max_length": 10**400}))
    assert "less than 2147483648" in error["message"]


def test_an_unknown_path_is_a_404_and_a_wrong_method_a_405(http):
    assert error_of(http.get("/v1/nothing"))["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405
    assert error_of(http.get("/v1/completions"))["message"]


# --- the key and the limits -----------------------------------------------------------------------


def test_a_wrong_key_is_a_401_except_on_open_paths(llm):
    with served_to(llm, api_key="sesame") as (_, http):
        for path in ("/v1/models", "/v1/nothing", "/result/1", "/viewer/steps"):
            answer = http.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        for wrong in ("Bearer no", "sesame", "Basic sesame", "Bearer sésame"):
            headers = {"Authorization": wrong.encode()}
            assert http.get("/v1/models", headers=headers).status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        for path in ("/health", "/metrics", "/version", "/viewer"):
            assert http.get(path).status_code == 200
    with pytest.raises(ValueError, match="the API key is empty"):
        serving(llm, api_key=" ").__enter__()


def test_a_body_above_the_limit_is_a_413(llm):
    large = json.dumps({"model": "tiny", "prompt": "a" * 2000}).encode()
    with served_to(llm, max_body_bytes=1000) as (_, http):
        # the second one without a Content-Length
        for content in (large, (large[i : i + 100] for i in range(0, len(large), 100))):
            answer = http.post("/v1/completions", content=content, headers=JSON)
            assert answer.status_code == 413
            assert "more than 1000 bytes" in error_of(answer)["message"]
        assert complete(http, max_tokens=1)["choices"]


def test_a_full_queue_is_a_429_with_retry_after(llm):
    """The first request has a branch in each row."""
    body = {**GREEDY, "prompt": "abc"}
    with served_to(llm, max_queue=2) as (server, http), ThreadPoolExecutor(3) as pool:

        def begin(n: int, max_tokens: int):
            options = {"n": n, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0}
            return pool.submit(http.post, "/v1/completions", json=body | options)

        with slow_steps(server.worker):
            answers = [begin(ENGINE["max_num_seqs"], 300)]
            wait_until(lambda: llm.engine.scheduler_state.running.seqs)  # the first one is admitted
            answers += [begin(1, 3), begin(1, 3)]
            wait_until(lambda: server.worker.waiting == 2)
            refused = http.post("/v1/completions", json=body | {"max_tokens": 1})
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "queue_full"
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/completions", json=body | {"prompt": ["a", "b", "c"]})
        assert refused.status_code == 400
        assert "send fewer at once" in error_of(refused)["message"]
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert complete(http, max_tokens=1)["choices"]
        assert idle(server.worker)


# --- observers ------------------------------------------------------------------------------------


def test_a_failing_observer_is_logged_once_and_stops_nothing(llm, monkeypatch, caplog):
    monkeypatch.setattr(Metrics, "added", lambda *args: 1 / 0)
    monkeypatch.setattr(Metrics, "stepped", lambda *args: 1 / 0)
    with served_to(llm) as (server, http):
        for _ in range(2):
            assert complete(http, max_tokens=3)["choices"]
        assert server.worker.healthy
    messages = [record.message for record in caplog.records if "as an observer" in record.message]
    assert [message.split(";")[1] for message in messages] == [
        " further errors of it are not logged"
    ]


def samples_of(http: httpx.Client) -> dict[tuple, float]:
    """The metrics: by name and labels beside the model's name."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {
        (
            sample.name.removeprefix("pagedjax:"),
            *(value for name, value in sorted(sample.labels.items()) if name != "model_name"),
        ): sample.value
        for sample in samples
    }


def test_metrics_add_up(tiny):
    with served_to(server_llm(tiny)) as (_, http):
        prompts = ["abc the cat and the other cat are in the house " * 3] * 3 + ["b"]
        counts = [
            complete(http, prompt=prompt, max_tokens=6, ignore_eos=True)["usage"]
            for prompt in prompts
        ]
        complete(http, prompt="abc", max_tokens=9, ignore_eos=True, n=2)
        samples = samples_of(http)

    def value(*name):
        return samples[name]

    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in counts)
    assert cached > 0
    assert value("prefix_cache_hits_total") >= cached
    computed = sum(usage["prompt_tokens"] for usage in counts) - cached
    # the last request has a prompt of three letters
    assert computed <= value("prompt_tokens_total") <= computed + 8
    assert value("generation_tokens_total") == 4 * 6 + 2 * 9
    assert value("request_success_total", "length") == 6
    assert value("time_to_first_token_seconds_count") == 6
    assert value("inter_token_latency_seconds_count") == 4 * 5 + 2 * 8
    assert value("request_generation_tokens_sum") == 42
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0
    inference = value("request_inference_time_seconds_sum")
    queue = value("request_queue_time_seconds_sum")
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(inference + queue, rel=0.2)


def test_tests_can_free_the_engine_of_a_server_that_is_gone(tiny):
    """Else the memory mappings of all of them end the process of the tests."""
    app = create_app(server_llm(tiny), Options(name="tiny"))
    engine = weakref.ref(app.state.worker.llm.engine)
    del app
    mappings.forget_applications()
    assert engine() is None


@pytest.mark.slow
def test_metrics_of_speculation_have_the_names_of_vllm(tiny, llm):
    options = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    request = {"max_tokens": 40, "ignore_eos": True}
    repeats = "the cat and the other cat and the cat and the other " * 2
    with served_to(small_llm(tiny, speculative=options)) as (_, http):
        drafted = complete(http, prompt="abc", **request)
        complete(http, prompt=repeats, logit_bias={"5": 100, "6": 100}, **request)
        samples = samples_of(http)
    with served_to(llm) as (_, http):
        assert complete(http, prompt="abc", **request)["choices"] == drafted["choices"]
        assert "spec_decode" not in http.get("/metrics").text
    drafts, tried, accepted = (
        samples[(f"spec_decode_num_{name}_total",)]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    by_position = [
        samples["spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)
    ]
    assert 0 < accepted < tried <= 3 * drafts
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)


def test_the_viewer_follows_the_engine(llm):
    with served_to(llm) as (server, http):
        page = http.get("/viewer")
        assert page.headers["content-type"].startswith("text/html")
        assert "viewer/steps" in page.text
        first = http.get("/viewer/steps").json()
        assert first["about"]["config"]["num_blocks"] == 256
        complete(http, max_tokens=5, ignore_eos=True)
        later = http.get("/viewer/steps", params={"since": first["next"]}).json()
        assert len(later["frames"]) >= 5
        assert later["next"] == first["next"] + len(later["frames"])
        complete(http, max_tokens=3, ignore_eos=True)
        latest = http.get("/viewer/steps", params={"since": later["next"]}).json()
        assert 3 <= len(latest["frames"]) < 8
        assert server.worker.healthy


@pytest.mark.slow
def test_a_signal_lets_unfinished_requests_end(tiny_folder, tmp_path):
    log = tmp_path / "r.jsonl"
    process, url = start_server(
        str(tiny_folder), *SIZES, "--served-model-name=tiny", f"--record={log}"
    )
    try:
        options = {**GREEDY, "prompt": "abc", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=options, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert log.stat().st_size > 1000
    finally:
        process.kill()
        process.wait()


DRAINS = pytest.mark.parametrize(
    ("drain", "signals"),
    [(1, [signal.SIGTERM]), (60, [signal.SIGINT] * 2)],
    ids=["drain time", "two SIGINTs"],
)


@DRAINS
def test_unfinished_requests_get_a_503_after_the_drain_time_and_nothing_is_logged(
    tiny_folder, capfd, drain, signals
):
    """A signal is a call of the handler that the process would have."""
    with command(str(tiny_folder), *SIZES, "--drain-seconds", str(drain)) as (server, url):
        end_with_503(url, signals, lambda number: server.handle_exit(number, None))
    errors = capfd.readouterr().err
    assert "Traceback" not in errors, errors
    assert "ERROR" not in errors, errors


def end_with_503(url: str, signals: list[signal.Signals], send: Callable[[int], None]) -> None:
    """Send signals to a server with many requests, of which one runs. The server ends after
    this.
    """
    options = {"model": "", "prompt": "abc", "max_tokens": 480, "ignore_eos": True, "n": 8}
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as half_request:
        half_request.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        with ThreadPoolExecutor(24) as pool, httpx.Client(base_url=url, timeout=60) as client:

            def post(**changes) -> Future[httpx.Response]:
                return pool.submit(client.post, "/v1/completions", json=options | changes)

            calls = [post() for _ in range(23)]
            stream = post(stream=True)
            # 24 calls, of which one runs. The signal has to wait for all of them, because the server
            # resets connections that it has not accepted yet.
            wait_until(lambda: gauge(client.get("/metrics").text, "num_requests_waiting") >= 23)
            for number in signals:
                send(number)
                wait_until(lambda: refuses(url))  # two signals at once count as one
            answers = [call.result() for call in calls]
            refusals = [answer for answer in answers if answer.status_code == 503]
            assert {answer.status_code for answer in answers} <= {200, 503}
            assert len(refusals) > 5
            messages = {error_of(answer)["message"] for answer in refusals}
            assert messages == {"the server is stopping"}
            streamed = stream.result()
            assert streamed.text.rstrip().endswith("data: [DONE]") or streamed.status_code == 503


def refuses(url: str) -> bool:
    """Whether the port is closed."""
    try:
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=1).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port {taken}", "cannot listen at '127.0.0.1', port {taken}: .*; choose others"),
        ("--port 70000", "port is 70000; it must be from 0"),
        ("--host 192.0.2.1", "cannot listen at '192.0.2.1'"),
        ("--max-queue 0", "max_queue is 0; it must be at least 1"),
        (
            "--api-key-file {empty}",
            "the API key in {empty} is empty; write the key into it, or leave it out",
        ),
        (
            "--api-key-file nowhere",
            "key file 'nowhere' cannot be read: No such file or directory; name a text file",
        ),
        (
            "--api-key-file {folder}",
            "the API key file '{folder}' cannot be read: Is a directory; name a text file",
        ),
        (
            "--record nowhere/run.jsonl",
            "recording nowhere/run.jsonl has no folder; make .*nowhere, or name a file",
        ),
        (
            "--record {folder}",
            "the recording {folder} is a folder; name a file, such as {folder}/run.jsonl",
        ),
        ("--port 0 --block-size 0", "block_size is 0"),
        ("--min-priority 1", "min_priority is 1; it must be from -2..31 to 0"),
        ("--max-priority -1", "max_priority is -1; it must be from 0 to 2..31 - 1"),
        ("--result-seconds 0", "result_seconds is 0.0; it must be above 0"),
        (
            "--policy {folder}/mine.py:SHORTEST",
            "mine.py:SHORTEST', which reads seq.predicted, and requests to a server need not have",
        ),
    ],
)
def test_a_server_that_cannot_start_prints_one_line(tiny_folder, tmp_path, capsys, words, message):
    (tmp_path / "empty").touch()
    (tmp_path / "mine.py").write_text(
        "from pagedjax.policies import by_key\nSHORTEST = by_key('mine', lambda seq: seq.predicted)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = {
            "taken": listener.getsockname()[1],
            "empty": tmp_path / "empty",
            "folder": tmp_path,
        }
        words = shlex.split(words.format(**places))
        assert cli.main(["serve", str(tiny_folder), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert re.search(message.format(**places), line), line
