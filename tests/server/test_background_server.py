"""A server that compiles behind its steps: it answers, shows what is missing, and stops at once."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from pagedjax import llm as llm_module
from pagedjax.engine import background, runtime
from pagedjax.server import serve
from tests import quick_compiler
from tests.server.support import (
    ENGINE,
    gauge,
    post,
    served_to,
    server_llm,
    start_server,
    text_of,
)


@pytest.fixture
def event(monkeypatch):
    """Programs behind the steps wait for this event."""
    opened = threading.Event()
    compiler = runtime._compiler

    def around(*args, **options):
        build = compiler(*args, **options)
        largest = ENGINE["token_buckets"][-1]

        def compile_one(shape, config):
            assert shape.tokens == largest or opened.wait(60)
            return build(shape, config)

        return compile_one

    monkeypatch.setattr(runtime, "_compiler", around)
    monkeypatch.setattr(background, "PAUSE", 0.0)
    yield opened
    opened.set()


def test_a_server_answers_while_programs_are_missing_and_stops_without_them(tiny, tiny_llm, event):
    llm = server_llm(tiny, compilation="background")
    programs = llm.engine.background
    assert programs is not None
    with served_to(llm) as (server, http):
        assert gauge(http.get("/metrics").text, "missing_programs") == 1
        text = text_of(http, max_tokens=5, ignore_eos=True)
        start = time.perf_counter()
        server.worker.stop()
        assert time.perf_counter() - start < 10
    assert programs.compiling
    event.set()
    programs.join(60)
    with served_to(tiny_llm) as (_, http):
        assert gauge(http.get("/metrics").text, "missing_programs") == 0
        assert text_of(http, max_tokens=5, ignore_eos=True) == text


@pytest.mark.parametrize(
    ("engine", "group", "compilation"),
    [
        ({}, None, "background"),
        ({"speculative": {"method": "ngram"}}, None, "eager"),
        ({}, "joined", "eager"),
    ],
)
def test_an_llm_compiles_behind_its_steps_only_where_it_can(
    monkeypatch, engine, group, compilation
):
    monkeypatch.setattr(llm_module, "joined", lambda: group)
    assert quick_compiler.of_users("default_compilation")(engine) == compilation


@pytest.mark.parametrize("compiling", [True, False])
def test_the_process_ends_at_once_only_while_a_program_is_compiled(monkeypatch, compiling):
    exits = []
    stopped = []
    monkeypatch.setattr(serve.os, "_exit", exits.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    programs = SimpleNamespace(stop=lambda: stopped.append(True), compiling=compiling)
    llm = SimpleNamespace(engine=SimpleNamespace(background=programs))
    assert serve.finish(llm, 130) == 130  # type: ignore[arg-type]
    assert (exits, stopped) == ([130] if compiling else [], [True])
    assert serve.finish(SimpleNamespace(engine=SimpleNamespace(background=None)), 0) == 0  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "statuses"), [(signal.SIGINT, (0, 130)), (signal.SIGTERM, (0,))]
)
def test_a_signal_ends_a_server_whose_programs_are_missing(
    tiny_folder, tmp_path, monkeypatch, number, statuses
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))  # an empty one
    words = [str(tiny_folder), "--max-num-seqs=4", "--num-blocks=64", "--served-model-name=tiny"]
    words.append("--max-num-batched-tokens=64")
    with (tmp_path / "errors").open("w") as errors:
        process, url = start_server(*words, errors=errors, module="pagedjax")
        try:
            with httpx.Client(base_url=url, timeout=60) as http:
                assert gauge(http.get("/metrics").text, "missing_programs") > 0
                assert post(http).status_code == 200
            process.send_signal(number)
            # 0: the parent of the tests may ignore SIGINT, as a shell does for background processes
            assert process.wait(30) in statuses
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "errors").read_text() == ""
