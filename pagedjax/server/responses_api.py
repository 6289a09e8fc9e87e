"""`POST /v1/responses`, OpenAI's Responses API, as another form of a chat. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError

from pagedjax.engine.session import GenerationRequest
from pagedjax.server import continuation, forms, responses, schema
from pagedjax.server.errors import ApiError, in_thread, submit
from pagedjax.server.response_items import JSON, Answer
from pagedjax.server.responses import Style
from pagedjax.server.schema import ChatRequest, Positive, Strict, refused
from pagedjax.server.streaming import CLIENT_LEFT, EventStream, unless_client_leaves
from pagedjax.server.worker import EngineStopped, Submission, TurnedAway, Worker
from pagedjax.text.messages import content_text
from pagedjax.text.tools.definitions import MAX_LEVELS, too_deep
from pagedjax.text.tools.reader import CallReader, Piece

Prepare = Callable[[ChatRequest], tuple[list[GenerationRequest], Style]]

# Fields that a chat has under the same name.
SHARED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "cache_salt",
    "priority",
    "user",
    "parallel_tool_calls",
)
STATELESS = "this server stores no answers; send the whole conversation as input"
ROLES = ("user", "assistant", "system", "developer")


class TextFormat(Strict):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class ResponsesRequest(Strict):
    """`POST /v1/responses`."""

    input: (
        str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096, fail_fast=True)]
    )
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextFormat | None = None
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=schema.MAX_TOOLS, fail_fast=True)] | None
    ) = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    user: str | None = None
    truncation: Literal["disabled"] | None = None
    # fields of vLLM and of chats
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: schema.Strings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
    # accepted without effect
    store: Any = None
    metadata: dict[str, str] | None = None
    include: Any = None
    reasoning: Any = None
    max_tool_calls: Any = None  # of tools that a server calls, and this one calls none
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    stream_options: Any = None
    # refused with what to do instead
    previous_response_id: Annotated[None, refused(STATELESS)] = None
    conversation: Annotated[None, refused(STATELESS)] = None
    prompt: Annotated[
        None, refused("this server stores no prompts; send instructions and input")
    ] = None
    background: Annotated[Literal[False] | None, schema.BeforeValidator(schema.only_false)] = None
    top_logprobs: Annotated[
        None, refused("log-probabilities come with /v1/chat/completions; leave it out")
    ] = None


def add_routes(app: FastAPI, worker: Worker, prepare: Prepare) -> None:
    """Add the route.

    Args:
        prepare: gives the engine's requests of a chat, and the style of its answer. It runs in a
            thread.
    """

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the format of OpenAI's Responses API."""
        try:
            requests, style = await in_thread(lambda: prepare(as_chat(body)))
        except ApiError as error:
            raise _with_field_names(error) from error
        answer = Answer(_head(body, style))
        reader = CallReader(style.calls, continuation.ids()) if style.calls else None
        headers = forms.headers(style.ignored)
        submission = await submit(worker, requests, deltas=bool(body.stream))
        if body.stream:
            stream = _events(submission, answer, reader)
            return EventStream(stream, lambda: worker.cancel(submission), headers)
        try:
            outputs = await unless_client_leaves(request, submission.completed())
        finally:
            worker.cancel(submission)
        if outputs is None:
            return Response(status_code=CLIENT_LEFT)
        (branch,) = outputs[0].outputs
        for _ in answer.push(_pieces(reader, branch.text, last=True)):
            pass
        for _ in answer.end(branch.finish_reason, _usage(submission), int(time.time())):
            pass
        return JSONResponse(answer.response, headers=headers)


async def _events(
    submission: Submission, answer: Answer, reader: CallReader | None
) -> AsyncIterator[str]:
    """The server-sent events of an answer."""
    for event in answer.begin():
        yield _sse(event)
    reason = "stop"
    try:
        async for delta in submission:
            reason = delta.finish_reason or reason
            pieces = _pieces(reader, delta.text, last=delta.finish_reason is not None)
            for event in answer.push(pieces):
                yield _sse(event)
        for event in answer.end(reason, _usage(submission), int(time.time())):
            yield _sse(event)
    except (EngineStopped, TurnedAway) as error:
        yield _sse(answer.failure(str(error)))


def _sse(event: JSON) -> str:
    return responses.event(event, event["type"])


def _pieces(reader: CallReader | None, text: str, last: bool) -> list[Piece]:
    if reader is None:
        return [Piece(None, text)] if text else []
    return reader.push(text) + (reader.finish() if last else [])


def _usage(submission: Submission) -> JSON:
    (output,) = submission.outputs
    prompt_tokens = len(output.prompt_token_ids)
    output_tokens = sum(len(branch.token_ids) for branch in output.outputs)
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": output.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }


def _head(body: ResponsesRequest, style: Style) -> JSON:
    """The fields of the response that do not change: most repeat the request."""
    text = body.text.format if body.text and body.text.format else {"type": "text"}
    return {
        "id": f"resp_{continuation.new_id()}",
        "object": "response",
        "created_at": style.created,
        "model": style.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text},
        "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


# --- a response as a chat -------------------------------------------------------------------------


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat.

    Raises:
        ApiError: a field that no chat can have.
        ValueError: an item of another type than messages, calls and their outputs.
    """
    fields = {
        **schema.field_values(body, SHARED),
        "messages": messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else [_chat_function(tool) for tool in body.tools],
        "tool_choice": _chat_function(body.tool_choice),
        "response_format": _response_format(body.text.format if body.text else None),
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        errors = [dict(details) for details in error.errors()]
        raise ApiError(400, *schema.first_error(errors)) from error


def _with_field_names(error: ApiError) -> ApiError:
    """The error with this API's names of fields."""
    names = {
        "messages": "input",
        "response_format": "text",
        "max_completion_tokens": "max_output_tokens",
    }
    message = str(error)
    param = error.param
    if param is None:
        param = next((name for name in ("input", "text") if message.startswith(f"{name}.")), None)
    if param in names:
        message = message.replace(param, names[param], 1)
        param = names[param]
    return ApiError(error.status, message, param, code=error.code, retry_after=error.retry_after)


def messages(body: ResponsesRequest) -> list[JSON]:
    """The messages of a chat that the input's items mean.

    Raises:
        ValueError: an item of another type than messages, calls and their outputs.
    """
    conversation: list[JSON] = []
    if body.instructions is not None:
        conversation.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*conversation, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        place = f"input.{i}"
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") in ROLES:
            content = _content(f"{place}.content", item.get("content"))
            conversation.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not conversation or conversation[-1]["role"] != "assistant":
                conversation.append({"role": "assistant", "content": ""})
            conversation[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(f"{place}.output", item.get("output"))
            call_id = item.get("call_id")
            conversation.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind != "reasoning":  # this server makes no such item, and no template takes one
            role = f" and no role of {ROLES}" if kind == "message" else ""
            raise ValueError(
                f"{place} has the type {kind!r:.80}{role}; items here are messages, function_call "
                "and function_call_output"
            )
    return conversation


def _content(place: str, content: Any) -> str:
    """The text of an item."""
    if content is None:
        raise ValueError(f"{place} is None; send its text")
    return content_text(place, content)


def _chat_function(tool: Any) -> Any:
    """A tool or a choice as a chat has it: the fields of a function are in `function`."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    fields = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": fields}


def _response_format(form: dict[str, Any] | None) -> Any:
    """`text.format` as a chat has it: the schema's fields are in `json_schema`."""
    if form is None or form.get("type") != "json_schema":
        return form
    if too_deep(form):
        raise ValueError(f"text.format has more than {MAX_LEVELS} levels; make it flatter")
    fields = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": fields}
