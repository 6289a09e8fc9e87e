"""Responses that are errors, all in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pagedjax.engine.session import GenerationRequest
from pagedjax.server import continuation, responses, schema
from pagedjax.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
)
from pagedjax.server.worker import EngineStopped, QueueFull, Submission, TurnedAway, Worker

Result = TypeVar("Result")


class ApiError(Exception):
    """An error that is answered with a response.

    retry_after: seconds after which a client may try again; None: the response does not say it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def response(self) -> JSONResponse:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        other_kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, other_kind)
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        body = responses.error(str(self), kind, self.param, self.code)
        return JSONResponse(body, self.status, headers)


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function in a thread, because a long prompt takes long to tokenize.

    Raises:
        ApiError: in place of the function's ValueError.
    """
    try:
        return await run_in_threadpool(function, *args)
    except ValueError as error:
        raise bad_request(error) from error


def bad_request(error: ValueError) -> ApiError:
    """A response of status 400. It names a field if the message begins with one."""
    # "temperature is -1; ..." names temperature, "messages.0.content: ..." names messages
    first_word = str(error).split(" ", 1)[0].rstrip(":")
    field = first_word.split(".")[0]
    bodies = (CompletionRequest, ChatRequest, DetokenizeRequest, EmbeddingRequest)
    is_field = any(field in body.model_fields for body in bodies)
    too_long = "max_model_len" in str(error)
    return ApiError(
        400,
        str(error),
        param=field if is_field else None,
        code="context_length_exceeded" if too_long else None,
    )


async def submit(
    worker: Worker,
    requests: Sequence[GenerationRequest],
    *,
    deltas: bool = True,
    field: str = "prompt",
) -> Submission:
    """Queue requests.

    Args:
        field: the field of the body that they came from, for errors.

    Raises:
        ApiError: they can never run, or the queue has no room.
    """
    if len(requests) > worker.max_queue:
        message = (
            f"{field} lists {len(requests)}, but the queue has room for {worker.max_queue}; send "
            "fewer at once"
        )
        raise ApiError(400, message, field)
    call = continuation.current()
    if call is not None:
        requests = call.prepared(requests)
    try:
        return await worker.submit(requests, deltas=deltas, call=call)
    except EngineStopped:
        if call is not None:
            call.lost()
        raise
    except ValueError as error:
        raise bad_request(error) from error
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", retry_after=error.seconds) from error


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers that give every error OpenAI's format."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        return ApiError(400, *schema.first_error(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail)).response()

    @app.exception_handler(EngineStopped)
    async def engine_stopped(request: Request, error: EngineStopped) -> Response:
        return ApiError(503, str(error), code="engine_stopped").response()

    @app.exception_handler(TurnedAway)
    async def turned_away(request: Request, error: TurnedAway) -> Response:
        """429 and not 503: the server works, and a balancer should keep sending to it."""
        return ApiError(429, str(error), code="rejected", retry_after=1).response()

    @app.exception_handler(Exception)
    async def other_error(request: Request, error: Exception) -> Response:
        return ApiError(500, f"internal error: {type(error).__name__}").response()
