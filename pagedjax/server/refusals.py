"""Answers that are errors, every one in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pagedjax.server import answers, schema
from pagedjax.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest
from pagedjax.server.worker import Full, Stopped, Ticket, Worker
from pagedjax.session import GenerationRequest

Result = TypeVar("Result")


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.seconds = status, param, code, seconds

    def response(self) -> JSONResponse:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        headers = {} if self.seconds is None else {"Retry-After": str(self.seconds)}
        return JSONResponse(answers.error(str(self), kind, self.param, self.code), self.status, headers)


async def prepared(function: Callable[..., Result], *args: Any) -> Result:
    """In a thread, because a long prompt takes its time to tokenize. Raises Refusal for what is wrong with it."""
    try:
        return await run_in_threadpool(function, *args)
    except ValueError as error:
        raise refusal_of(error) from error


def refusal_of(error: ValueError) -> Refusal:
    """A 400 that names the field, if the message begins with one."""
    first = str(error).split(" ", 1)[0].rstrip(":")
    known = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *DetokenizeRequest.model_fields}
    too_long = "max_model_len" in str(error)
    return Refusal(
        400, str(error), param=first if first in known else None, code="context_length_exceeded" if too_long else None
    )


async def submitted(worker: Worker, asks: Sequence[GenerationRequest], *, deltas: bool = True) -> Ticket:
    """Raises Refusal for what cannot run, or not now."""
    if len(asks) > worker.max_queue:
        message = f"prompt lists {len(asks)}, and {worker.max_queue} may wait here; send fewer at once"
        raise Refusal(400, message, "prompt")
    try:
        return await worker.submit(asks, deltas=deltas)
    except ValueError as error:
        raise refusal_of(error) from error
    except Full as error:
        raise Refusal(429, str(error), code="queue_full", seconds=error.seconds) from error


def add_errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return Refusal(400, *schema.told(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return Refusal(error.status_code, str(error.detail)).response()

    @app.exception_handler(Stopped)
    async def stopped(request: Request, error: Stopped) -> Response:
        return Refusal(503, str(error), code="engine_stopped").response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return Refusal(500, f"internal error: {type(error).__name__}").response()
