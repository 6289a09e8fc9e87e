"""The server as a whole: small endpoints, the key, limits, the full queue, metrics, the viewer,
signals to stop.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedjax import LLM
from pagedjax.commands import cli
from pagedjax.server.app import Options, create_app
from pagedjax.server.metrics import Metrics
from tests import mappings
from tests.server.support import (
    ENGINE,
    GREEDY,
    command,
    complete,
    error_of,
    gauge,
    idle,
    served_to,
    serving,
    start_server,
    wait_until,
)

# --- small endpoints ------------------------------------------------------------------------------


def test_health_and_version(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"].count(".") == 2


def test_tokenize_and_detokenize_match_the_tokenizer(http, reference):
    tokenizer = reference.tokenizer
    answer = http.post("/tokenize", json={"prompt": "abc the", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("abc the")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert "".join(answer["token_strs"]) == "abc the"
    messages = [{"role": "user", "content": "abc"}]
    answer = http.post(
        "/tokenize", json={"messages": messages, "add_generation_prompt": False}
    ).json()
    assert answer["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert http.post("/detokenize", json={"tokens": tokenizer.encode("abc the")}).json() == {
        "prompt": "abc the"
    }
    assert "vocabulary" in error_of(http.post("/detokenize", json={"tokens": [320]}))["message"]
    assert "give one of them" in error_of(http.post("/tokenize", json={}))["message"]


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
def test_an_invalid_body_is_a_400(http, content, status):
    answer = http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"


def test_errors_name_the_field_and_the_place(http):
    answer = http.post(
        "/v1/completions", content=b'{"prompt": "a",}', headers={"Content-Type": "application/json"}
    )
    assert error_of(answer)["message"].startswith("the body is not JSON: ")
    assert error_of(answer)["message"].endswith(" at character 15")
    assert error_of(answer)["param"] is None
    error = error_of(http.get("/viewer/steps", params={"since": -1}))
    assert (error["param"], error["message"].split()[0]) == ("since", "since:")
    error = error_of(http.post("/generate", json={"prompt": "a", "max_length": 10**400}))
    assert "less than 2147483648" in error["message"]


def test_an_unknown_path_is_a_404_and_a_wrong_method_a_405(http):
    assert error_of(http.get("/v1/nothing"))["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405
    assert error_of(http.get("/v1/completions"))["message"]


# --- the key and the limits -----------------------------------------------------------------------


def test_a_wrong_key_is_a_401_except_on_open_paths(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE), api_key="sesame") as (_, http):
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
        serving(LLM(tiny, progress=False, **ENGINE), api_key=" ").__enter__()


def test_a_body_above_the_limit_is_a_413(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE), max_body_bytes=1000) as (_, http):
        large = json.dumps({"model": "tiny", "prompt": "a" * 2000}).encode()
        answer = http.post(
            "/v1/completions", content=large, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        assert "more than 1000 bytes" in error_of(answer)["message"]
        # without a Content-Length
        in_pieces = (large[i : i + 100] for i in range(0, len(large), 100))
        answer = http.post(
            "/v1/completions", content=in_pieces, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        assert complete(http, max_tokens=1)["choices"]


def test_a_full_queue_is_a_429_with_retry_after(tiny):
    """The first request has a branch in each row."""
    llm = LLM(tiny, progress=False, **ENGINE)
    with served_to(llm, max_queue=2) as (server, http):
        answers = []

        def post(n: int):
            options = {
                **GREEDY,
                "prompt": "abc",
                "max_tokens": 300 if n > 1 else 3,
                "ignore_eos": True,
            }
            options |= {"n": n, "temperature": 1.0}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=options, timeout=60))

        threads = [threading.Thread(target=post, args=(n,)) for n in (ENGINE["max_num_seqs"], 1, 1)]
        threads[0].start()
        wait_until(lambda: llm.engine.scheduler_state.running.seqs)  # the first request is admitted
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: server.worker.waiting == 2)
        refused = http.post("/v1/completions", json={**GREEDY, "prompt": "abc", "max_tokens": 1})
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "queue_full"
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert http.get("/health").status_code == 200
        refusal = http.post("/v1/completions", json={**GREEDY, "prompt": ["a", "b", "c"]})
        assert (refusal.status_code, "send fewer at once" in error_of(refusal)["message"]) == (
            400,
            True,
        )
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert complete(http, max_tokens=1)["choices"]
        assert idle(server.worker)


# --- observers ------------------------------------------------------------------------------------


def test_a_failing_observer_is_logged_once_and_stops_nothing(tiny, monkeypatch, caplog):
    monkeypatch.setattr(Metrics, "added", lambda *args: 1 / 0)
    monkeypatch.setattr(Metrics, "stepped", lambda *args: 1 / 0)
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (server, http):
        for _ in range(2):
            assert complete(http, max_tokens=3)["choices"]
        assert server.worker.healthy
    assert [
        record.message.split(";")[1]
        for record in caplog.records
        if "as an observer" in record.message
    ] == [" further errors of it are not logged"]


def test_metrics_add_up(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (_, http):
        prompts = ["abc the cat and the other cat are in the house " * 3] * 3 + ["b"]
        counts = [
            complete(http, prompt=prompt, max_tokens=6, ignore_eos=True)["usage"]
            for prompt in prompts
        ]
        complete(http, prompt="abc", max_tokens=9, ignore_eos=True, n=2)
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
    inference = value("request_inference_time_seconds_sum")
    queue = value("request_queue_time_seconds_sum")
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(inference + queue, rel=0.2)


def test_tests_can_free_the_engine_of_a_server_that_is_gone(tiny):
    """Else the memory mappings of all of them end the process of the tests."""
    app = create_app(LLM(tiny, progress=False, **ENGINE), Options(name="tiny"))
    engine = weakref.ref(app.state.worker.llm.engine)
    del app
    mappings.forget_applications()
    assert engine() is None


def test_metrics_of_speculation_have_the_names_of_vllm(tiny):
    options = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    one_bucket = ENGINE | {"token_buckets": (64,)}
    with served_to(LLM(tiny, progress=False, speculative=options, **one_bucket)) as (_, http):
        plain = complete(http, prompt="abc", max_tokens=40, ignore_eos=True)
        repeats = "the cat and the other cat and the cat and the other " * 2
        complete(
            http, prompt=repeats, max_tokens=40, ignore_eos=True, logit_bias={"5": 100, "6": 100}
        )
        samples = {
            (
                sample.name.removeprefix("pagedjax:spec_decode_num_"),
                sample.labels.get("position"),
            ): sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
        }
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (_, http):
        assert (
            complete(http, prompt="abc", max_tokens=40, ignore_eos=True)["choices"]
            == plain["choices"]
        )
        assert "spec_decode" not in http.get("/metrics").text
    drafts, tried, accepted = (
        samples[f"{name}_total", None] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    by_position = [samples["accepted_tokens_per_pos_total", str(i)] for i in range(3)]
    assert 0 < accepted < tried <= 3 * drafts
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)


def test_the_viewer_follows_the_engine(tiny):
    with served_to(LLM(tiny, progress=False, **ENGINE)) as (server, http):
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
        assert http.get("/viewer/steps", params={"since": -1}).status_code == 400
        assert server.worker.healthy


# those of ENGINE
SIZES = (
    "--max-num-seqs",
    "8",
    "--num-blocks",
    "256",
    "--max-num-batched-tokens",
    "64",
    "--token-buckets",
    "8,64",
)


def test_a_signal_lets_unfinished_requests_end(tiny_folder, tmp_path):
    words = [
        str(tiny_folder),
        *SIZES,
        "--served-model-name",
        "tiny",
        "--record",
        str(tmp_path / "r.jsonl"),
    ]
    process, url = start_server(*words)
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
        assert (tmp_path / "r.jsonl").stat().st_size > 1000
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


@pytest.mark.slow
@DRAINS
def test_a_process_answers_unfinished_requests_with_503_and_ends(
    tiny_folder, tmp_path, drain, signals
):
    with (tmp_path / "errors").open("w") as errors:
        process, url = start_server(
            str(tiny_folder), *SIZES, "--drain-seconds", str(drain), errors=errors
        )
        try:
            end_with_503(url, signals, process.send_signal)
            # 0: the parent of the tests may ignore SIGINT, as a shell does for background processes
            assert process.wait(15) in ((0,) if signal.SIGTERM in signals else (0, 130))
        finally:
            process.kill()
            process.wait()
    log = (tmp_path / "errors").read_text()
    assert "Traceback" not in log, log
    assert "ERROR" not in log, log


def end_with_503(url: str, signals: list[signal.Signals], send: Callable[[int], None]) -> None:
    """Send signals to a server with many requests, of which one runs. The server ends after
    this.
    """
    options = {"model": "", "prompt": "abc", "max_tokens": 480, "ignore_eos": True, "n": 8}
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        with ThreadPoolExecutor(24) as pool, httpx.Client(base_url=url, timeout=60) as client:
            post = partial(client.post, "/v1/completions", json=options)
            answers = [pool.submit(post) for _ in range(23)]
            stream = pool.submit(
                partial(client.post, "/v1/completions", json=options | {"stream": True})
            )
            # all have come, but the one that runs: a server resets connections that it has not
            # accepted
            wait_until(lambda: gauge(client.get("/metrics").text, "num_requests_waiting") >= 23)
            for number in signals:
                send(number)
                wait_until(lambda: refuses(url))  # two signals at once count as one
            codes = [answer.result().status_code for answer in answers]
            assert set(codes) <= {200, 503}
            assert codes.count(503) > 5
            messages = [
                error_of(answer.result())
                for answer in answers
                if answer.result().status_code == 503
            ]
            assert {error["message"] for error in messages} == {"the server is stopping"}
            assert (
                stream.result().text.rstrip().endswith("data: [DONE]")
                or stream.result().status_code == 503
            )


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
        (["--port", "{taken}"], "cannot listen at '127.0.0.1', port {taken}: .*; choose others"),
        (["--port", "70000"], "port is 70000; it must be from 0"),
        (["--host", "192.0.2.1"], "cannot listen at '192.0.2.1'"),
        (["--max-queue", "0"], "max_queue is 0; it must be at least 1"),
        (
            ["--api-key-file", "{empty}"],
            "the API key in {empty} is empty; write the key into it, or leave it out",
        ),
        (
            ["--api-key-file", "nowhere"],
            "key file 'nowhere' cannot be read: No such file or directory; name a text file",
        ),
        (
            ["--api-key-file", "{folder}"],
            "the API key file '{folder}' cannot be read: Is a directory; name a text file",
        ),
        (
            ["--record", "nowhere/run.jsonl"],
            "recording nowhere/run.jsonl has no folder; make .*nowhere, or name a file",
        ),
        (
            ["--record", "{folder}"],
            "the recording {folder} is a folder; name a file, such as {folder}/run.jsonl",
        ),
        (["--port", "0", "--block-size", "0"], "block_size is 0"),
        (["--min-priority", "1"], "min_priority is 1; it must be from -2..31 to 0"),
        (["--max-priority", "-1"], "max_priority is -1; it must be from 0 to 2..31 - 1"),
        (["--result-seconds", "0"], "result_seconds is 0.0; it must be above 0"),
    ],
)
def test_a_server_that_cannot_start_prints_one_line(tiny_folder, tmp_path, capsys, words, message):
    (tmp_path / "empty").touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = {
            "taken": listener.getsockname()[1],
            "empty": tmp_path / "empty",
            "folder": tmp_path,
        }
        words = [word.format(**places) for word in words]
        assert cli.main(["serve", str(tiny_folder), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert re.search(message.format(**places), line), line
