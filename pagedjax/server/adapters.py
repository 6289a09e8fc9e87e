"""Adapters of a server: the names that the field `model` may have, and two routes of vLLM.

    POST /v1/load_lora_adapter
        {"lora_name": "poems", "lora_path": "/adapters/poems", "load_inplace": false}
    POST /v1/unload_lora_adapter
        {"lora_name": "poems"}

The routes are off unless the operator allows them, because they let a client read folders of this
machine. A folder is read in a thread, and the engine takes the adapter between two steps, so
requests and streams go on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

from pagedjax.engine.engine import Engine
from pagedjax.llm import LLM
from pagedjax.options.params import LoRARequest
from pagedjax.server.errors import ApiError
from pagedjax.server.responses import JSON
from pagedjax.server.schema import LoadAdapterRequest, UnloadAdapterRequest
from pagedjax.server.worker import Worker
from pagedjax.weights.adapter_files import read_adapter

log = logging.getLogger("pagedjax.server")


def adapter_of(model: str | None, base: str) -> str | None:
    """The adapter that the field `model` of a request names.

    None is the model alone, whose name is `base`.
    """
    return None if model in ("", base) else model


def check_model(llm: LLM, model: str | None, base: str) -> None:
    """Check that the field `model` names the model or an adapter. Raises ApiError."""
    name = adapter_of(model, base)
    names = sorted(llm.engine.adapters)
    if name is not None and name not in names:
        raise _not_served(name, base, names)


def _not_served(name: str, base: str, adapters: Sequence[str]) -> ApiError:
    message = f"the model {name!r:.200} is not served here; {base!r} is"
    if adapters:
        message += f", and its adapters {', '.join(map(repr, adapters))}"
    return ApiError(404, message, param="model", code="model_not_found")


def cards(llm: LLM, base: str) -> dict[str, JSON]:
    """What `/v1/models` says of the model and of each adapter, by name.

    The `root` of an adapter is its folder.
    """
    model_card: JSON = {
        "id": base,
        "object": "model",
        "created": 0,
        "owned_by": "pagedjax",
        "root": base,
        "parent": None,
        "max_model_len": llm.engine.config.max_model_len,
    }
    by_name = {base: model_card}
    for name, adapter in sorted(llm.engine.adapters.items()):
        by_name[name] = {**model_card, "id": name, "root": adapter.source, "parent": base}
    return by_name


def card(llm: LLM, model: str, base: str) -> JSON:
    """What `/v1/models/{model}` says; "" is the model itself.

    Raises:
        ApiError: no model or adapter has this name.
    """
    by_name = cards(llm, base)  # read once: the engine's thread may unload an adapter at any time
    if (model or base) not in by_name:
        raise _not_served(model, base, sorted(by_name.keys() - {base}))
    return by_name[model or base]


def modules(
    pairs: Sequence[tuple[str, str]], base: str, engine: Mapping[str, Any], updating: bool
) -> dict[str, str]:
    """The folders of the adapters to load at the start, by name.

    The names are checked here, before the model is loaded.

    Args:
        pairs: names and folders, as `--lora-modules` has them.
        engine: fields of EngineConfig that the user set.
        updating: whether clients may load adapters.

    Raises:
        ValueError: a name that is given twice or that of the model, or an engine without adapters.
    """
    if (pairs or updating) and not engine.get("enable_lora"):
        flag = "--lora-modules" if pairs else "--allow-runtime-lora-updating"
        raise ValueError(f"{flag} is given, and the engine has no adapters; add --enable-lora")
    names = [name for name, _ in pairs]
    for name in names:
        if name == base:
            raise ValueError(f"--lora-modules: {_name_of_model(name)}")
        if names.count(name) > 1:
            raise ValueError(
                f"--lora-modules has the name {name!r} twice; give each adapter its own"
            )
    return dict(pairs)


def _name_of_model(name: str) -> str:
    """The error of an adapter with the model's name."""
    return f"{name!r} is the name of the model, and an adapter needs its own; choose another name"


def add_routes(app: FastAPI, worker: Worker, base: str, allowed: bool) -> None:
    """Add the two routes.

    Args:
        base: the name of the model.
        allowed: whether the operator allows the routes.
    """

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterRequest) -> Response:
        """Read the folder of an adapter, and serve it as a model of its name."""
        _check_allowed(allowed)
        if body.lora_name == base:
            raise ApiError(400, f"lora_name: {_name_of_model(base)}", "lora_name")
        replace = bool(body.load_inplace)
        engine = worker.llm.engine
        _check_new(engine, body.lora_name, replace)  # before the files are read
        try:
            request = LoRARequest(body.lora_name, lora_path=body.lora_path)
            adapter = await run_in_threadpool(
                read_adapter, request.lora_path, engine.model.config, body.lora_name
            )

            def take(engine: Engine) -> None:
                _check_new(engine, body.lora_name, replace)
                engine.load_adapter(adapter)

            await worker.change(take)
        except FileNotFoundError as error:
            raise ApiError(404, str(error), "lora_path") from error
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error)) from error
        log.info("adapter %r is loaded from %s", body.lora_name, adapter.source)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' is loaded.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterRequest) -> Response:
        """Forget an adapter. Its unfinished requests continue."""
        _check_allowed(allowed)
        try:
            await worker.change(lambda engine: engine.unload_adapter(body.lora_name))
        except ValueError as error:
            raise ApiError(404, str(error), "lora_name") from error
        log.info("adapter %r is unloaded", body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' is unloaded.")


def _check_allowed(allowed: bool) -> None:
    if not allowed:
        raise ApiError(
            404,
            "this server loads and unloads no adapters for clients; have the operator start it "
            "with --allow-runtime-lora-updating",
        )


def _check_new(engine: Engine, name: str, replace: bool) -> None:
    if name in engine.adapters and not replace:
        raise ApiError(
            400,
            f"lora_name: adapter {name!r} has already been loaded; set load_inplace to true to "
            "replace it, or unload it first",
            "lora_name",
        )
