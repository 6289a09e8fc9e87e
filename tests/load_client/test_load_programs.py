"""A load client waits until the server has compiled all its programs."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from pagedjax.commands import cli
from pagedjax.server.load_client import metrics_page

PAGE = """# TYPE pagedjax:missing_programs gauge
pagedjax:missing_programs{{model_name="a"}} {}.0
pagedjax:missing_programs{{model_name="b"}} 1.0
"""
ANSWER = {
    "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 1},
}


@contextmanager
def compiling_server(pages: list[str]) -> Iterator[tuple[str, list[str]]]:
    """An OpenAI server whose page of metrics is each of `pages` in turn, the last one for ever ->
    (its address, the paths that it was asked for).
    """
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, kind: str, text: str) -> None:
            paths.append(self.path)
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer("text/plain", pages.pop(0) if len(pages) > 1 else pages[0])
            else:
                self.answer("application/json", json.dumps({"data": [{"id": "tiny"}]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer("text/event-stream", f"data: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def run(url: str, *words: str) -> tuple[int, str, str]:
    """Exit status, what is printed, and what is said beside it."""
    load = ["--requests", "2", "--arrivals", "at-once", "--prompt-tokens", "4"]
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as errors:
        status = cli.main(["bench", "serve", "--url", url, *load, *words])
    return status, printed.getvalue(), errors.getvalue()


def test_programs_of_all_engines_count_and_other_servers_have_none():
    assert metrics_page.missing_programs(PAGE.format(3)) == 4
    assert metrics_page.missing_programs("vllm:num_requests_running 3.0\n") == 0
    assert metrics_page.fetch("http://127.0.0.1:9/v1", None) == ""


def test_nothing_is_sent_before_the_server_has_all_programs(monkeypatch, tmp_path):
    monkeypatch.setattr(metrics_page, "PAUSE", 0.01)
    pages = [PAGE.format(2), PAGE.format(1), PAGE.format(0), "pagedjax:missing_programs 0.0\n"]
    with compiling_server(pages) as (url, paths):
        status, printed, errors = run(url, "--json", str(tmp_path / "out.json"))
    assert status == 0
    assert errors.startswith("the server still compiles 3 programs; the measurement begins when")
    assert "still to compile" not in printed
    assert paths.index("/v1/completions") > max(
        i for i, path in enumerate(paths[:-1]) if path == "/metrics"
    )
    assert json.loads((tmp_path / "out.json").read_text())["missing_programs"] == 0


@pytest.mark.parametrize("words", [("--no-wait",), ("--timeout", "0.4")], ids=["asked", "late"])
def test_a_measurement_that_begins_too_early_says_so(monkeypatch, words):
    monkeypatch.setattr(metrics_page, "PAUSE", 0.01)
    with compiling_server([PAGE.format(1)]) as (url, _):
        _, printed, errors = run(url, *words)
    assert bool(errors) == (words != ("--no-wait",))
    assert "note: the server had still to compile 2 programs when the measurement began" in printed
