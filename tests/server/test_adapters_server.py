"""Adapters of a server: as models, at the start, and by vLLM's two routes while requests run;
against the library.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedjax import LLM, LoRARequest, PoolingParams, SamplingParams
from pagedjax.commands import cli
from pagedjax.server import adapters
from pagedjax.server.worker import EngineStopped
from tests.engine.runs import answers, greedy
from tests.server.support import (
    SIZES,
    command,
    complete,
    error_of,
    idle,
    served_to,
    server_llm,
    serving,
    serving_without_leaks,
    slow_steps,
    wait_until,
)
from tests.weights.tiny_adapters import tiny_adapter

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
LORA |= {"token_buckets": (64,)}  # one program
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PARAMS = greedy(8)
PROMPT = "the cat and"
MESSAGES = [{"role": "user", "content": "the cat"}]
RANKS = {"one": 4, "two": 8, "three": 3}


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return {
        name: tiny_adapter(parent / name, tiny_folder, rank, seed=i)
        for i, (name, rank) in enumerate(RANKS.items())
    }


@pytest.fixture(scope="module")
def library(tiny) -> LLM:
    """The library, whose answers the server must repeat."""
    return server_llm(tiny, **LORA)


@pytest.fixture(scope="module")
def open_server(tiny) -> Iterator[SimpleNamespace]:
    """A server whose clients may load adapters."""
    llm = server_llm(tiny, **LORA)
    with serving_without_leaks(llm, allow_runtime_lora_updating=True) as server:
        yield server


@pytest.fixture
def http(open_server) -> Iterator[httpx.Client]:
    """A client of a server that has no adapter yet."""
    with httpx.Client(base_url=open_server.url, timeout=60) as client:
        yield client
        for name in list(open_server.worker.llm.engine.adapters):
            assert unload(client, name).status_code == 200


@pytest.fixture(scope="module")
def expected(library, folders) -> Callable[..., str]:
    """(name of an adapter or None, number of tokens) -> what the library says after PROMPT."""

    def text(name: str | None, max_tokens: int = 8) -> str:
        request = name and LoRARequest(name, 1, folders[name])
        (answer,) = answers(library, PROMPT, greedy(max_tokens), lora_request=request)
        return answer.text

    return text


def text_of(http: httpx.Client, model: str | None) -> str:
    """What a model of the server says after PROMPT."""
    reply = complete(http, **GREEDY, model=model, prompt=PROMPT)
    assert reply["model"] == (model or "tiny")
    return reply["choices"][0]["text"]


def assert_refused(answer: httpx.Response, status: int, message: str, param=None) -> None:
    assert answer.status_code == status, answer.text
    assert message in error_of(answer)["message"]
    assert error_of(answer)["param"] == param


@pytest.fixture
def slow(open_server) -> Iterator[threading.Event]:
    """Until this event is set, a test sees requests that run."""
    with slow_steps(open_server.worker) as ended:
        yield ended


def load(http: httpx.Client, name: str, folder: Path, **fields: Any) -> httpx.Response:
    return http.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder), **fields}
    )


def must_load(http: httpx.Client, name: str, folder: Path, **fields: Any) -> None:
    answer = load(http, name, folder, **fields)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' is loaded.")


def unload(http: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})


# --- requests -------------------------------------------------------------------------------------


def test_every_route_serves_an_adapter_as_a_model(http, library, folders, expected):
    must_load(http, "one", folders["one"])
    assert text_of(http, "one") == expected("one") != expected(None)
    for base in ("tiny", "", None):
        assert text_of(http, base) == expected(None)

    request = LoRARequest("one", 1, folders["one"])
    (chat,) = library.chat(MESSAGES, PARAMS, lora_request=request)
    body = {**GREEDY, "model": "one", "messages": MESSAGES}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["model"] == "one"
    assert reply["choices"][0]["message"]["content"] == chat.outputs[0].text
    body = {"model": "one", "input": "the cat", "temperature": 0, "max_output_tokens": 8}
    reply = http.post("/v1/responses", json=body).json()
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (chat,) = library.chat(MESSAGES, params, lora_request=request)
    assert reply["model"] == "one"
    assert reply["output"][0]["content"][0]["text"] == chat.outputs[0].text
    assert http.post("/tokenize", json={"model": "one", "prompt": "a"}).json()["count"] == 1


@pytest.mark.filterwarnings("ignore:this model was not made for embeddings")
def test_embeddings_have_the_adapter_too(http, library, folders):
    must_load(http, "two", folders["two"])
    body = {"model": "two", "input": PROMPT, "encoding_format": "float"}
    reply = http.post("/v1/embeddings", json=body).json()
    adapted, plain = (
        library.embed(PROMPT, PoolingParams(), lora_request=request)[0].outputs.embedding
        for request in (LoRARequest("two", 1, folders["two"]), None)
    )
    assert reply["model"] == "two"
    vector = reply["data"][0]["embedding"]
    np.testing.assert_allclose(vector, adapted, rtol=0, atol=1e-5)
    assert np.abs(np.subtract(vector, plain)).max() > 0.01


def test_the_list_of_models_has_the_adapters(http, folders):
    def card(name: str, root: Any, parent: str | None) -> dict[str, Any]:
        fields = {"root": str(root), "parent": parent, "max_model_len": 512}
        return {"id": name, "object": "model", "created": 0, "owned_by": "pagedjax", **fields}

    tiny = card("tiny", "tiny", None)
    assert http.get("/v1/models").json() == {"object": "list", "data": [tiny]}
    must_load(http, "team/poems", folders["two"])
    must_load(http, "mail", folders["one"])
    cards = [tiny, card("mail", folders["one"], "tiny"), card("team/poems", folders["two"], "tiny")]
    assert http.get("/v1/models").json()["data"] == cards
    assert [http.get(f"/v1/models/{model['id']}").json() for model in cards] == cards
    message = (
        "the model 'other' is not served here; 'tiny' is, and its adapters 'mail', 'team/poems'"
    )
    answer = http.get("/v1/models/other")
    assert_refused(answer, 404, message, "model")
    assert error_of(answer)["type"] == "not_found_error"
    assert unload(http, "mail", lora_int_id=7).text == "Success: LoRA adapter 'mail' is unloaded."
    answer = http.post("/v1/completions", json={"model": "mail", "prompt": "a"})
    assert error_of(answer)["code"] == "model_not_found"


# --- while requests run ---------------------------------------------------------------------------


def test_many_clients_load_and_unload_under_load_and_no_answer_is_wrong(http, expected, folders):
    """A request is answered by the adapter of its name, or refused because the adapter has gone."""
    must_load(http, "stays", folders["one"])
    texts = {"stays": expected("one"), "comes": expected("two")}

    def ask(name: str) -> int:
        answer = http.post("/v1/completions", json={**GREEDY, "model": name, "prompt": PROMPT})
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == texts[name]
        else:
            assert answer.status_code in (400, 404)
            assert "'comes' is not" in error_of(answer)["message"]
            assert name == "comes"
        return answer.status_code

    with ThreadPoolExecutor(62) as pool:
        codes = [pool.submit(ask, name) for name in ["stays", "comes"] * 30]
        for _ in range(15):
            loads = [pool.submit(load, http, "comes", folders["two"]) for _ in range(2)]
            assert sorted(answer.result().status_code for answer in loads) == [200, 400], (
                "one of two loads finds the other's adapter"
            )
            assert unload(http, "comes").status_code == 200
    assert [code.result() for code in codes[::2]] == [200] * 30
    assert all(code.result() for code in codes)


def test_a_request_whose_adapter_goes_before_it_is_queued_is_refused(
    open_server, http, folders, monkeypatch
):
    must_load(http, "one", folders["one"])
    # it was there when this ran
    monkeypatch.setattr(adapters, "check_model", lambda llm, model, base: None)
    assert unload(http, "one").status_code == 200
    answer = http.post("/v1/completions", json={"model": "one", "prompt": ["a", "b"]})
    message = "adapter 'one' is not loaded; loaded are none; load it first (load_adapter)"
    assert_refused(answer, 400, message)
    assert idle(open_server.worker)


def test_a_change_that_fails_changes_nothing_and_one_behind_the_end_is_refused(tiny_llm):
    runs = threading.Event()
    goes_on = threading.Event()
    outcomes = []

    def fails(engine: Any) -> None:
        raise KeyError("here")

    def waits(engine: Any) -> None:
        runs.set()
        outcomes.append(goes_on.wait(30))

    with serving(tiny_llm) as server:

        def begun(function: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(
                server.worker.change(function), server.worker._loop
            )

        with pytest.raises(KeyError, match="here"):
            begun(fails).result(30)
        assert server.worker.healthy
        first = begun(waits)
        assert runs.wait(30)
        server.worker.halt()
        queued = begun(outcomes.append)
        wait_until(lambda: server.worker._inbox.qsize() == 2)  # the end, and the change behind it
        goes_on.set()
        assert first.result(30) is None
        for change in (queued, begun(outcomes.append)):
            with pytest.raises(EngineStopped, match="the server is stopping"):
                change.result(30)
    assert outcomes == [True]


# --- errors of the routes -------------------------------------------------------------------------


def test_the_routes_are_off_by_default_and_have_the_key(library, folders):
    before = set(library.engine.adapters)
    message = "this server loads and unloads no adapters for clients; have the operator start it "
    message += "with --allow-runtime-lora-updating"
    with served_to(library, api_key="sesame") as (_, http):
        for answer in (load(http, "one", folders["one"]), unload(http, "one")):
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        http.headers["Authorization"] = "Bearer sesame"
        for answer in (load(http, "one", folders["one"]), unload(http, "one")):
            assert_refused(answer, 404, message)
    assert set(library.engine.adapters) == before


def test_an_adapter_that_is_loaded_is_replaced_only_in_place(http, expected, folders, tmp_path):
    folder = shutil.copytree(folders["one"], tmp_path / "mine")
    must_load(http, "mine", folder)
    shutil.copytree(folders["two"], folder, dirs_exist_ok=True)
    message = "lora_name: adapter 'mine' has already been loaded; set load_inplace to true to "
    message += "replace it, or unload it first"
    for fields in ({}, {"load_inplace": False}, {"load_inplace": None}):
        assert_refused(load(http, "mine", folder, **fields), 400, message, "lora_name")
    assert text_of(http, "mine") == expected("one")
    must_load(http, "mine", folder, load_inplace=True)
    assert text_of(http, "mine") == expected("two")


def test_what_cannot_be_loaded_is_refused_with_the_librarys_text(
    open_server, http, tiny_folder, folders, tmp_path
):
    sound = folders["one"]
    broken = Path(shutil.copytree(sound, tmp_path / "broken"))
    (broken / "adapter_model.safetensors").write_bytes(b"abc")
    dora = tiny_adapter(tmp_path / "dora", tiny_folder, 4, use_dora=True)
    missing = "has no adapter_config.json; it must be the folder of a LoRA adapter"
    for folder in (tmp_path / "nowhere", Path("~no-such-user/a"), sound / "adapter_config.json"):
        assert_refused(load(http, "a", folder), 404, missing, "lora_path")
    for folder, message in (
        (Path("/" + "a" * 4000), "File name too long"),
        (broken, "truncated or not a safetensors file"),
        (dora, "use_dora is True, which is not supported"),
    ):
        assert_refused(load(http, "a", folder), 400, message)
    name_taken = "lora_name: 'tiny' is the name of the model, and an adapter needs its own; choose another name"
    for name, message in (("tiny", name_taken), ("", "lora_name: "), ("a" * 257, "lora_name: ")):
        assert_refused(load(http, name, sound), 400, message, "lora_name")
    for body, message, param in (
        ({"lora_path": "a", "load_inplace": 1}, "load_inplace: ", "load_inplace"),
        ({"lora_path": "a", "other": 1}, "unknown field 'other'", "other"),
        ({}, "lora_path: Field", "lora_path"),
    ):
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": "a", **body})
        assert_refused(answer, 400, message, param)
    answer = http.post("/v1/unload_lora_adapter", json={})
    assert_refused(answer, 400, "lora_name: Field required", "lora_name")
    not_loaded = "adapter 'a' is not loaded; loaded are none"
    assert_refused(unload(http, "a"), 404, not_loaded, "lora_name")
    for name in RANKS:
        must_load(http, name, folders[name])
    message = "adapter 'a' has no slot: max_loras is 3, and 3 adapters are loaded"
    assert_refused(load(http, "a", sound), 400, message)
    assert set(open_server.worker.llm.engine.adapters) == set(RANKS)


# --- the command and the metrics ------------------------------------------------------------------


def test_the_command_loads_adapters_at_its_start(tiny_folder, expected, folders):
    words = shlex.split("--enable-lora --max-loras 3 --max-lora-rank 8")
    words += ["--lora-modules", *(f"{name}={folders[name]}" for name in ("one", "two"))]
    with (
        command(str(tiny_folder), *SIZES, "--served-model-name", "tiny", *words) as (_, url),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for name in ("one", "two", None):
            assert text_of(http, name) == expected(name)
        assert load(http, "three", folders["three"]).status_code == 404


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--lora-modules a=b",
            "--lora-modules is given, and the engine has no adapters; add --enable-lora",
        ),
        (
            "--allow-runtime-lora-updating",
            "--allow-runtime-lora-updating is given, and the engine has no adapters",
        ),
        (
            "--enable-lora --lora-modules a=b a=c",
            "--lora-modules has the name 'a' twice; give each",
        ),
        (
            "--enable-lora --lora-modules a=b --lora-modules model=c",
            "--lora-modules: 'model' is the name of the model, and an adapter needs its own",
        ),
    ],
)
def test_wrong_flags_are_errors_before_the_model_is_loaded(capsys, words, message):
    assert cli.main(shlex.split(f"serve nowhere/model --port 0 {words}")) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_folder_of_the_command_is_an_error_before_it_serves(tiny_folder, tmp_path, capsys):
    command = ["serve", str(tiny_folder), *shlex.split("--port 0 --enable-lora --lora-modules")]
    assert cli.main([*command, f"a={tmp_path}"]) == 2
    printed = capsys.readouterr()
    assert f"{tmp_path} has no adapter_config.json" in printed.err
    assert "serving" not in printed.out
    with pytest.raises(SystemExit):
        cli.main([*command, "poems"])
    assert "'poems' is no NAME=FOLDER; write poems=adapters/poems" in capsys.readouterr().err


def test_the_metrics_name_the_adapters_of_requests(http, folders, slow):
    def labels() -> dict[str, str]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        (sample,) = next(
            family.samples for family in families if family.name == "pagedjax:lora_requests_info"
        )
        return sample.labels

    for name in ("one", "two"):
        must_load(http, name, folders[name])
    assert labels() == {"max_lora": "3", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    body = {**GREEDY, "max_tokens": 120, "prompt": ["a", "b", "c", "d", "e"]}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(complete, http, **body, model=name) for name in ("one", "two")]
        wait_until(
            lambda: (
                labels()["running_lora_adapters"] == "one,two" and labels()["waiting_lora_adapters"]
            )
        )
        slow.set()
        assert all(answer.result()["choices"] for answer in answers)
    assert labels()["running_lora_adapters"] == ""
