"""Adapters of a server: as models, at the start, and by vLLM's two routes while requests run;
against the library.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
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
from tests.engine.runs import greedy
from tests.server.support import (
    ENGINE,
    command,
    complete,
    error_of,
    idle,
    served_to,
    serving,
    wait_until,
)
from tests.weights.tiny_adapters import tiny_adapter

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PARAMS = greedy(8)
PROMPT = "the cat and"
MESSAGES = [{"role": "user", "content": "the cat"}]
RANKS = {"one": 4, "two": 8, "three": 3}


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    ranks = enumerate(RANKS.items())
    return {
        name: tiny_adapter(parent / name, tiny_folder, rank, seed=i) for i, (name, rank) in ranks
    }


@pytest.fixture(scope="module")
def library(tiny) -> LLM:
    """The library, whose answers the server must repeat."""
    return LLM(tiny, progress=False, **ENGINE, **LORA)


@pytest.fixture(scope="module")
def open_server(tiny) -> Iterator[SimpleNamespace]:
    """A server whose clients may load adapters."""
    with serving(
        LLM(tiny, progress=False, **ENGINE, **LORA), allow_runtime_lora_updating=True
    ) as server:
        yield server
        wait_until(lambda: idle(server.worker))
        assert server.worker.healthy


@pytest.fixture
def http(open_server) -> Iterator[httpx.Client]:
    """A client of a server that has no adapter yet."""
    with httpx.Client(base_url=open_server.url, timeout=60) as client:
        yield client
        for name in list(open_server.worker.llm.engine.adapters):
            assert (
                client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
            )


@pytest.fixture
def slow(open_server, monkeypatch) -> Iterator[threading.Event]:
    """Steps of the server wait for 50 ms each until this event is set, so that a test sees requests
    that run.
    """
    session = open_server.worker.llm.session
    ended = threading.Event()
    step = session.step

    def waiting() -> Any:
        ended.wait(0.05)
        return step()

    monkeypatch.setattr(session, "step", waiting)
    yield ended
    ended.set()


def load(http: httpx.Client, name: str, folder: Path, **fields: Any) -> httpx.Response:
    return http.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder), **fields}
    )


def must_load(http: httpx.Client, name: str, folder: Path, **fields: Any) -> None:
    answer = load(http, name, folder, **fields)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' is loaded.")


def unload(http: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})


def texts(
    library: LLM,
    folders: dict[str, Path],
    name: str | None,
    params: Any = PARAMS,
    prompt: Any = PROMPT,
) -> str:
    request = name and LoRARequest(name, 1, folders[name])
    (output,) = library.generate(prompt, params, lora_request=request)
    return output.outputs[0].text


def texts_of_events(lines: Iterator[str]) -> Iterator[str]:
    """The texts of a completion's events."""
    for line in lines:
        if line.startswith("data: {"):
            yield "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


# --- requests -------------------------------------------------------------------------------------


def test_every_route_serves_an_adapter_as_a_model(http, library, folders):
    must_load(http, "one", folders["one"])
    expected = texts(library, folders, "one")
    assert expected != texts(library, folders, None)
    reply = complete(http, **GREEDY, model="one", prompt=PROMPT)
    assert (reply["model"], reply["choices"][0]["text"]) == ("one", expected)
    for base in ("tiny", "", None):
        reply = complete(http, **GREEDY, model=base, prompt=PROMPT)
        assert (reply["model"], reply["choices"][0]["text"]) == (
            "tiny",
            texts(library, folders, None),
        )

    request = LoRARequest("one", 1, folders["one"])
    (chat,) = library.chat(MESSAGES, PARAMS, lora_request=request)
    reply = http.post(
        "/v1/chat/completions", json={**GREEDY, "model": "one", "messages": MESSAGES}
    ).json()
    assert (reply["model"], reply["choices"][0]["message"]["content"]) == (
        "one",
        chat.outputs[0].text,
    )
    body = {"model": "one", "input": "the cat", "temperature": 0, "max_output_tokens": 8}
    reply = http.post("/v1/responses", json=body).json()
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (answer,) = library.chat(MESSAGES, params, lora_request=request)
    assert (reply["model"], reply["output"][0]["content"][0]["text"]) == (
        "one",
        answer.outputs[0].text,
    )
    assert http.post("/tokenize", json={"model": "one", "prompt": "a"}).json()["count"] == 1


@pytest.mark.filterwarnings("ignore:this model was not made for embeddings")
def test_embeddings_have_the_adapter_too(http, library, folders):
    must_load(http, "two", folders["two"])
    reply = http.post(
        "/v1/embeddings", json={"model": "two", "input": PROMPT, "encoding_format": "float"}
    ).json()
    request = LoRARequest("two", 1, folders["two"])
    with_it, without = (
        library.embed(PROMPT, PoolingParams(), lora_request=r) for r in (request, None)
    )
    assert reply["model"] == "two"
    vector = reply["data"][0]["embedding"]
    np.testing.assert_allclose(vector, with_it[0].outputs.embedding, rtol=0, atol=1e-5)
    assert np.abs(np.subtract(vector, without[0].outputs.embedding)).max() > 0.01


def test_requests_of_several_adapters_run_together(open_server, http, library, folders):
    for name in RANKS:
        must_load(http, name, folders[name])
    names = [*RANKS, None] * 6

    async def one(client: httpx.AsyncClient, i: int, name: str | None) -> str:
        body = {**GREEDY, "max_tokens": 12, "model": name or "tiny", "prompt": [20 + i, 30, 40]}
        return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

    async def every() -> list[str]:
        async with httpx.AsyncClient(base_url=open_server.url, timeout=60) as client:
            return await asyncio.gather(*(one(client, i, name) for i, name in enumerate(names)))

    generated = asyncio.run(every())
    params = greedy(12)
    requests = [name and LoRARequest(name, 1, folders[name]) for name in names]
    prompts = [[20 + i, 30, 40] for i in range(len(names))]
    outputs = library.generate(prompts, params, lora_request=requests)
    assert generated == [output.outputs[0].text for output in outputs]


def test_the_list_of_models_has_the_adapters(http, folders):
    def card(name: str, root: Any, parent: str | None) -> dict[str, Any]:
        fields = {"root": str(root), "parent": parent, "max_model_len": 512}
        return {"id": name, "object": "model", "created": 0, "owned_by": "pagedjax", **fields}

    assert http.get("/v1/models").json() == {"object": "list", "data": [card("tiny", "tiny", None)]}
    must_load(http, "team/poems", folders["two"])
    must_load(http, "mail", folders["one"])
    cards = [
        card("tiny", "tiny", None),
        card("mail", folders["one"], "tiny"),
        card("team/poems", folders["two"], "tiny"),
    ]
    assert http.get("/v1/models").json()["data"] == cards
    assert [http.get(f"/v1/models/{model['id']}").json() for model in cards] == cards
    answer = http.get("/v1/models/other")
    assert answer.status_code == 404
    message = (
        "the model 'other' is not served here; 'tiny' is, and its adapters 'mail', 'team/poems'"
    )
    assert error_of(answer) == {"message": message, "type": "not_found_error", "param": "model"} | {
        "code": "model_not_found"
    }
    assert unload(http, "mail", lora_int_id=7).text == "Success: LoRA adapter 'mail' is unloaded."
    assert (
        error_of(http.post("/v1/completions", json={"model": "mail", "prompt": "a"}))["code"]
        == "model_not_found"
    )


# --- while requests run ---------------------------------------------------------------------------


def test_a_stream_keeps_its_adapter_while_others_are_loaded_and_it_is_replaced_and_unloaded(
    open_server, http, library, folders, slow
):
    params = greedy(200)
    must_load(http, "mine", folders["one"])
    body = {**GREEDY, "max_tokens": 200, "model": "mine", "prompt": PROMPT, "stream": True}
    with httpx.stream("POST", f"{open_server.url}/v1/completions", json=body, timeout=60) as answer:
        pieces = texts_of_events(answer.iter_lines())
        text = next(pieces)
        must_load(http, "other", folders["three"])
        must_load(http, "mine", folders["two"], load_inplace=True)
        later = complete(http, **GREEDY, model="mine", prompt=PROMPT)["choices"][0]["text"]
        of_other = complete(http, **GREEDY, model="other", prompt=PROMPT)["choices"][0]["text"]
        assert unload(http, "mine").status_code == 200
        plain = complete(http, **GREEDY, prompt=PROMPT)["choices"][0]["text"]
        assert open_server.worker.llm.engine.scheduler_state.running.seqs, (
            "the stream ended too early for this test"
        )
        slow.set()
        text += "".join(pieces)
    assert text == texts(library, folders, "one", params)
    assert [later, of_other, plain] == [
        texts(library, folders, name) for name in ("two", "three", None)
    ]


def test_many_clients_load_and_unload_under_load_and_no_answer_is_wrong(
    open_server, http, library, folders
):
    """A request is answered by the adapter of its name, or refused because the adapter has gone."""
    must_load(http, "stays", folders["one"])
    expected = {"stays": texts(library, folders, "one"), "comes": texts(library, folders, "two")}

    async def ask(client: httpx.AsyncClient, name: str) -> int:
        answer = await client.post(
            "/v1/completions", json={**GREEDY, "model": name, "prompt": PROMPT}
        )
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected[name]
        else:
            assert answer.status_code in (400, 404)
            assert "'comes' is not" in error_of(answer)["message"]
            assert name == "comes"
        return answer.status_code

    async def change(client: httpx.AsyncClient) -> None:
        for _ in range(15):
            body = {"lora_name": "comes", "lora_path": str(folders["two"])}
            codes = [
                response.status_code
                for response in await asyncio.gather(*(twice(client, body) for _ in range(2)))
            ]
            assert sorted(codes) == [200, 400], "one of two loads finds the other's adapter"
            await asyncio.sleep(0.01)
            assert (
                await client.post("/v1/unload_lora_adapter", json={"lora_name": "comes"})
            ).status_code == 200

    def twice(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        return client.post("/v1/load_lora_adapter", json=body)

    async def every() -> list[int]:
        async with httpx.AsyncClient(base_url=open_server.url, timeout=60) as client:
            asks = [ask(client, name) for name in ["stays", "comes"] * 30]
            return (await asyncio.gather(change(client), *asks))[1:]

    codes = asyncio.run(every())
    assert codes[::2] == [200] * 30


def test_a_request_whose_adapter_goes_before_it_is_queued_is_refused(
    open_server, http, folders, monkeypatch
):
    must_load(http, "one", folders["one"])
    # it was there when this ran
    monkeypatch.setattr(adapters, "check_model", lambda llm, model, base: None)
    assert unload(http, "one").status_code == 200
    answer = http.post("/v1/completions", json={"model": "one", "prompt": ["a", "b"]})
    assert answer.status_code == 400
    assert (
        error_of(answer)["message"]
        == "adapter 'one' is not loaded; loaded are none; load it first (load_adapter)"
    )
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
    with served_to(library, api_key="sesame") as (_, http):
        for answer in (load(http, "one", folders["one"]), unload(http, "one")):
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        http.headers["Authorization"] = "Bearer sesame"
        for answer in (load(http, "one", folders["one"]), unload(http, "one")):
            assert answer.status_code == 404
            message = "this server loads and unloads no adapters for clients; have the operator start it with"
            assert error_of(answer)["message"] == f"{message} --allow-runtime-lora-updating"
    assert set(library.engine.adapters) == before


def test_an_adapter_that_is_loaded_is_replaced_only_in_place(http, library, folders, tmp_path):
    shutil.copytree(folders["one"], tmp_path / "mine")
    must_load(http, "mine", tmp_path / "mine")
    shutil.copytree(folders["two"], tmp_path / "mine", dirs_exist_ok=True)
    for fields in ({}, {"load_inplace": False}, {"load_inplace": None}):
        answer = load(http, "mine", tmp_path / "mine", **fields)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "lora_name")
        message = "lora_name: adapter 'mine' has already been loaded"
        assert (
            error_of(answer)["message"]
            == f"{message}; set load_inplace to true to replace it, or unload it first"
        )
    text = complete(http, **GREEDY, model="mine", prompt=PROMPT)["choices"][0]["text"]
    assert text == texts(library, folders, "one")
    must_load(http, "mine", tmp_path / "mine", load_inplace=True)
    text = complete(http, **GREEDY, model="mine", prompt=PROMPT)["choices"][0]["text"]
    assert text == texts(library, folders, "two")


def test_what_cannot_be_loaded_is_refused_with_the_librarys_text(
    open_server, http, tiny_folder, folders, tmp_path
):
    def refused(
        answer: httpx.Response, status: int, message: str, param: str | None = None
    ) -> None:
        assert answer.status_code == status, answer.text
        assert message in error_of(answer)["message"]
        assert error_of(answer)["param"] == param

    broken = Path(shutil.copytree(folders["one"], tmp_path / "broken"))
    (broken / "adapter_model.safetensors").write_bytes(b"abc")
    large = tiny_adapter(tmp_path / "large", tiny_folder, 9)
    dora = tiny_adapter(tmp_path / "dora", tiny_folder, 4, use_dora=True)
    patterns = tiny_adapter(tmp_path / "patterns", tiny_folder, 4, alpha_pattern=[1])
    missing = "has no adapter_config.json; it must be the folder of a LoRA adapter"
    for wrong in (
        tmp_path / "nowhere",
        tmp_path,
        Path("~no-such-user/a"),
        folders["one"] / "adapter_config.json",
    ):
        refused(load(http, "a", wrong), 404, missing, "lora_path")
    refused(load(http, "a", Path("/" + "a" * 4000)), 400, "File name too long")
    refused(load(http, "a", broken), 400, "truncated or not a safetensors file")
    refused(
        load(http, "a", large),
        400,
        "adapter 'a' has rank 9, and max_lora_rank is 8; set max_lora_rank=9",
    )
    refused(load(http, "a", dora), 400, "use_dora is True, which is not supported")
    refused(load(http, "a", patterns), 400, "alpha_pattern is [1]; it must be an object")
    name_taken = "lora_name: 'tiny' is the name of the model, and an adapter needs its own; choose another name"
    refused(load(http, "tiny", folders["one"]), 400, name_taken, "lora_name")
    refused(load(http, "", folders["one"]), 400, "lora_name: ", "lora_name")
    refused(load(http, "a" * 257, folders["one"]), 400, "lora_name: ", "lora_name")
    refused(load(http, "a", folders["one"], load_inplace=1), 400, "load_inplace: ", "load_inplace")
    refused(load(http, "a", folders["one"], other=1), 400, "unknown field 'other'", "other")
    refused(
        http.post("/v1/load_lora_adapter", json={"lora_name": "a"}),
        400,
        "lora_path: Field",
        "lora_path",
    )
    refused(
        http.post("/v1/unload_lora_adapter", json={}), 400, "lora_name: Field required", "lora_name"
    )
    refused(unload(http, "a"), 404, "adapter 'a' is not loaded; loaded are none", "lora_name")
    for name in RANKS:
        must_load(http, name, folders[name])
    refused(
        load(http, "a", folders["one"]),
        400,
        "adapter 'a' has no slot: max_loras is 3, and 3 adapters are loaded",
    )
    assert set(open_server.worker.llm.engine.adapters) == set(RANKS)


def test_an_engine_without_adapters_refuses_them(tiny_llm, folders):
    with served_to(tiny_llm, allow_runtime_lora_updating=True) as (_, http):
        message = "adapter 'one' is wanted, and this engine has none; set enable_lora=True"
        answer = load(http, "one", folders["one"])
        assert (answer.status_code, error_of(answer)["message"]) == (400, message)
        answer = unload(http, "one")
        assert (answer.status_code, error_of(answer)["message"]) == (404, message)


# --- the command and the metrics ------------------------------------------------------------------


def test_the_command_loads_adapters_at_its_start(tiny_folder, library, folders):
    sizes = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in ENGINE.items()
        if name != "token_buckets"
    ]
    pairs = [f"{name}={folders[name]}" for name in ("one", "two")]
    words = [
        *sizes,
        "--served-model-name",
        "tiny",
        "--enable-lora",
        "--max-loras",
        "3",
        "--max-lora-rank",
        "8",
    ]
    words += ["--lora-modules", *pairs, "--token-buckets", "8,64"]
    with (
        command(str(tiny_folder), *words) as (_, url),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for name in ("one", "two", None):
            completion = complete(http, **GREEDY, model=name or "tiny", prompt=PROMPT)
            assert completion["choices"][0]["text"] == texts(library, folders, name)
        assert load(http, "three", folders["three"]).status_code == 404


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--lora-modules", "a=b"],
            "--lora-modules is given, and the engine has no adapters; add --enable-lora",
        ),
        (
            ["--allow-runtime-lora-updating"],
            "--allow-runtime-lora-updating is given, and the engine has no adapters",
        ),
        (
            ["--enable-lora", "--lora-modules", "a=b", "a=c"],
            "--lora-modules has the name 'a' twice; give each",
        ),
        (
            ["--enable-lora", "--lora-modules", "a=b", "--lora-modules", "model=c"],
            "--lora-modules: 'model' is the name of the model, and an adapter needs its own",
        ),
    ],
)
def test_wrong_flags_are_errors_before_the_model_is_loaded(capsys, words, message):
    assert cli.main(["serve", "nowhere/model", "--port", "0", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_folder_of_the_command_is_an_error_before_it_serves(tiny_folder, tmp_path, capsys):
    words = [
        "--port",
        "0",
        "--enable-lora",
        "--compilation",
        "lazy",
        "--lora-modules",
        f"a={tmp_path}",
    ]
    assert cli.main(["serve", str(tiny_folder), *words]) == 2
    printed = capsys.readouterr()
    assert f"{tmp_path} has no adapter_config.json" in printed.err
    assert "serving" not in printed.out
    with pytest.raises(SystemExit):
        cli.main(["serve", str(tiny_folder), "--lora-modules", "poems"])
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
