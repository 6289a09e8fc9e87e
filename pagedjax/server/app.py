"""The routes: OpenAI's, vLLM's beside them, and the two of the lecture."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

import pagedjax
from pagedjax import viewer
from pagedjax.llm import LLM
from pagedjax.params import BeamSearchParams
from pagedjax.server import answers, lecture, schema
from pagedjax.server.answers import JSON, Style
from pagedjax.server.gate import Gate
from pagedjax.server.metrics import Metrics
from pagedjax.server.refusals import Refusal, add_errors, prepared, submitted
from pagedjax.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Generating, TokenizeRequest
from pagedjax.server.worker import Observer, Stopped, Ticket, Worker
from pagedjax.session import GenerationRequest

Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """How a server serves.

    name: of the model, in requests and answers.
    api_key: what a client must send as `Authorization: Bearer ...`; None lets everybody in.
    max_queue: requests that may wait for the engine; one more is answered 429, with Retry-After.
    max_body_bytes: of a request; a larger one is answered 413.
    allow_origins: pages of other origins that a browser lets talk to this server ("*" is all).
    """

    name: str
    api_key: str | None = None
    max_queue: int = 256
    max_body_bytes: int = 8 * 2**20
    allow_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; leave it out to let everybody in")


def create_app(llm: LLM, options: Options, observers: Sequence[Observer] = ()) -> FastAPI:
    """An ASGI application that serves one model. Its engine runs between the application's start-up and shutdown."""
    metrics = Metrics(options.name, llm.engine.config)
    live = viewer.Live(llm.engine.state, llm.engine.config.policy)
    worker = Worker(llm, max_queue=options.max_queue, observers=(metrics, live, *observers))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_in_threadpool(worker.stop)

    app = FastAPI(title="PagedJAX", version=pagedjax.__version__, lifespan=lifespan)
    app.state.worker = worker
    add_errors(app)
    add_routes(app, worker, options, metrics)
    lecture.add_routes(app, worker)
    add_viewer(app, live, options)
    app.add_middleware(Gate, api_key=options.api_key, max_body_bytes=options.max_body_bytes)
    if options.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def add_routes(app: FastAPI, worker: Worker, options: Options, metrics: Metrics) -> None:
    llm, limit = worker.llm, worker.llm.engine.config.max_model_len

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        _right_model(body.model, options)
        asks, style = await prepared(_completion_asks, llm, body, options.name)
        return await _answered(worker, request, body, asks, style)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        _right_model(body.model, options)
        asks, style = await prepared(_chat_asks, llm, body, options.name)
        return await _answered(worker, request, body, asks, style)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a prompt, or of a conversation in the model's template."""
        _right_model(body.model, options)
        return await prepared(_tokenized, llm, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens, special ones included."""
        _right_model(body.model, options)
        return await prepared(_detokenized, llm, body)

    @app.get("/v1/models")
    async def models() -> JSON:
        """The one model that is served."""
        return {"object": "list", "data": [_model(options.name, limit)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSON:
        _right_model(name, options)
        return _model(options.name, limit)

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine runs, 503 once it has failed."""
        return JSONResponse({"status": "ok"}) if worker.healthy else JSONResponse({"status": "the engine failed"}, 503)

    @app.get("/version")
    async def version() -> JSON:
        return {"version": pagedjax.__version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Counters, gauges and histograms, as Prometheus reads them."""
        return PlainTextResponse(metrics.text(worker.waiting), media_type=metrics.CONTENT_TYPE)


def add_viewer(app: FastAPI, live: viewer.Live, options: Options) -> None:
    @app.get("/viewer", include_in_schema=False)
    async def page() -> Response:
        """The running engine, step by step."""
        return HTMLResponse(viewer.live_page("viewer/steps", title=options.name))

    @app.get("/viewer/steps")
    async def steps(since: Annotated[int, Query(ge=0)] = 0) -> Response:
        """What the page needs that has the steps before number `since`."""
        return JSONResponse(await run_in_threadpool(live.since, since))


# --- requests ---------------------------------------------------------------------------------------------------------


def _right_model(name: str | None, options: Options) -> None:
    if name not in (None, "", options.name):
        message = f"the model {name!r:.200} is not served here; {options.name!r} is"
        raise Refusal(404, message, param="model", code="model_not_found")


def _completion_asks(llm: LLM, body: CompletionRequest, model: str) -> tuple[list[GenerationRequest], Style]:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ValueError("max_tokens is 0, which generates nothing; only echo: true makes sense of it")
    if body.echo and body.stream and body.logprobs is not None:
        raise ValueError("echo with logprobs does not go with stream: those of the prompt come whole")
    if body.echo and body.use_beam_search:
        raise ValueError("echo does not go with use_beam_search")
    prompts = body.prompt if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else [body.prompt]
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    params = schema.sampling(body, max_tokens, body.logprobs)
    asks = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else None
        ids = prompt if text is None else llm.tokenizer.encode(text, body.add_special_tokens is not False)
        asks.append(_ask(llm, ids, text, params, body))
    style = Style(
        model,
        chat=False,
        tokenizer=llm.tokenizer,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        only_echo=max_tokens == 0,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    return asks, style


def _chat_asks(llm: LLM, body: ChatRequest, model: str) -> tuple[list[GenerationRequest], Style]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError("top_logprobs goes with logprobs: true")
    ids = _conversation(llm, body.messages, body.add_generation_prompt)
    room = llm.engine.config.max_model_len - len(ids)
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    style = Style(
        model,
        chat=True,
        tokenizer=llm.tokenizer,
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    return [_ask(llm, ids, None, schema.sampling(body, max_tokens, logprobs), body)], style


def _ask(llm: LLM, ids: Any, text: str | None, params: Any, body: Generating) -> GenerationRequest:
    if not ids:
        raise ValueError("prompt is empty: it has no tokens; give it at least one")
    name = "messages" if isinstance(body, ChatRequest) else "prompt"
    limit = llm.engine.config.max_model_len
    if len(ids) >= limit:  # here, so that the engine does not spend a step's time on it
        what = f"{name}: {len(ids)} tokens, but max_model_len is {limit} and one token must be left for output"
        raise ValueError(f"{what}; shorten it to {limit - 1} tokens")
    return GenerationRequest(ids, params, text, body.priority or 0, body.user or "")


def _conversation(llm: LLM, messages: Sequence[schema.Message], generating: bool | None) -> list[int]:
    return llm.tokenizer.apply_chat_template([message.plain() for message in messages], generating is not False)


def _tokenized(llm: LLM, body: TokenizeRequest) -> Response:
    """With its JSON made here, outside of the event loop: of a long text it is long too."""
    ids = _token_ids(llm, body)
    told: JSON = {"count": len(ids), "max_model_len": llm.engine.config.max_model_len, "tokens": ids}
    if body.return_token_strs:
        told["token_strs"] = [llm.tokenizer.decode_token(token) for token in ids]
    return JSONResponse(told)


def _detokenized(llm: LLM, body: DetokenizeRequest) -> Response:
    size = llm.model.model.config.vocab_size
    if wrong := [token for token in body.tokens if token >= size]:
        raise ValueError(f"tokens has the id {wrong[0]}, which is not below the vocabulary's {size}")
    return JSONResponse({"prompt": llm.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _token_ids(llm: LLM, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("prompt or messages: give one of them")
    if body.messages is not None:
        return _conversation(llm, body.messages, body.add_generation_prompt)
    assert body.prompt is not None
    return llm.tokenizer.encode(body.prompt, body.add_special_tokens is not False)


# --- answers ----------------------------------------------------------------------------------------------------------


async def _answered(
    worker: Worker, request: Request, body: Generating, asks: Sequence[GenerationRequest], style: Style
) -> Response:
    if body.stream and any(_chooses(ask) for ask in asks):
        message = "best_of above n does not go with stream: which are best is known at the end"
        raise Refusal(400, message, "best_of")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs do not go with stream; ask for the answer in one piece"
        raise Refusal(400, message, "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options go with stream: true", "stream_options")
    ticket = await submitted(worker, asks, deltas=bool(body.stream))
    if body.stream:
        return _Stream(_events(ticket, body, style), lambda: worker.cancel(ticket))
    try:
        outputs = await unless_gone(request, ticket.whole())
    finally:
        worker.cancel(ticket)
    if outputs is None:
        return Response(status_code=499)  # nobody is there to read it
    return JSONResponse(answers.answer(style, outputs))


def _chooses(ask: GenerationRequest) -> bool:
    return isinstance(ask.params, BeamSearchParams) or ask.params.drawn().n > ask.params.n


async def unless_gone(request: Request, wanted: Awaitable[Result]) -> Result | None:
    """What is wanted; None if the client leaves before it is there."""
    work, gone = asyncio.ensure_future(wanted), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await gone


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Server-sent events. `gone` is called when they have ended, or nobody listens any more, or nobody ever did."""

    def __init__(self, events: AsyncIterator[str], gone: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._over = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


async def _events(ticket: Ticket, body: Generating, style: Style) -> AsyncIterator[str]:
    """The server-sent events of a ticket."""
    options = body.stream_options or schema.StreamOptions()
    always = bool(options.continuous_usage_stats)
    width = max(ask.params.n or 1 for ask in ticket.asks)
    offsets: Counter[int] = Counter()  # characters of each branch's tokens
    generated: Counter[int] = Counter()  # tokens of each branch

    def told(chunk: JSON, index: int) -> str:
        """With vLLM's usage so far, which is the branch's own."""
        if always:
            chunk["usage"] = answers.used(len(ticket.asks[index // width].prompt_token_ids), generated[index])
        return answers.event(chunk)

    try:
        for index in range(len(ticket.asks) * width):
            first = answers.opening(style, index, ticket.asks[index // width])
            if first is not None:
                yield told(first, index)
        async for delta in ticket:
            index = delta.ask * width + delta.index
            generated[index] += not style.only_echo
            text = "" if style.only_echo else delta.text
            if text or style.logprobs is not None or style.token_ids or delta.finish_reason is not None or always:
                choice = answers.delta_choice(style, delta, index, offsets[index], text)
                yield told(answers.chunk(style, choice), index)
            if style.logprobs is not None and delta.logprobs:
                offsets[index] += len(delta.logprobs[delta.token_id].decoded_token)
        if options.include_usage:
            yield answers.event(answers.chunk(style, None, answers.usage(ticket.outputs, style.only_echo)))
    except Stopped as error:
        yield answers.event(answers.error(str(error), "server_error"))
    yield answers.event("[DONE]")


def _model(name: str, limit: int) -> JSON:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pagedjax", "root": name, "max_model_len": limit}
