"""The application: its options, and the routes of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

from pagedjax import __version__, viewer
from pagedjax.engine.session import GenerationRequest
from pagedjax.llm import LLM
from pagedjax.options.params import BeamSearchParams, SamplingParams
from pagedjax.options.vllm_names.prompts import last_tokens
from pagedjax.server import adapters, embeddings, forms, responses, responses_api, schema, vllmini
from pagedjax.server.bodies import CheckedRoute
from pagedjax.server.errors import ApiError, add_error_handlers, in_thread, submit
from pagedjax.server.metrics import Metrics
from pagedjax.server.middleware import guard
from pagedjax.server.responses import JSON, Style
from pagedjax.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationBody,
    TokenizeRequest,
)
from pagedjax.server.streaming import CLIENT_LEFT, EventStream, events, unless_client_leaves
from pagedjax.server.worker import Observer, Submission, Worker
from pagedjax.text.structured.matcher import Grammar
from pagedjax.text.tools.formats import dialect
from pagedjax.text.tools.use import ToolUse, tool_use


@dataclass(frozen=True)
class Options:
    """The operator's choices.

    name: of the model, in requests and answers.
    api_key: that a client must send as `Authorization: Bearer ...`; None needs no key.
    max_queue: requests that may wait for the engine; one more is answered 429, with Retry-After.
    max_body_bytes: of a request; a larger one is answered 413.
    allow_origins: web pages of other origins that a browser may connect to this server ("*" is
        all).
    min_priority, max_priority: the priorities that a client may give; another one is answered 400.
        A lower number is more urgent. Both contain 0, the priority of a request that gives none.
    allow_user: whether the field `user` decides a request's share under the policy "fair". A client
        can give any name, so allow it only if you trust all clients. Without it the field is
        accepted and ignored.
    allow_service_fields: whether clients may give `predicted`, `service_class` and `deadline`, which
        policies read. Any of them is answered 400 otherwise, because a client could overtake others
        by it.
    lecture_endpoints: whether there are `POST /generate` and `GET /result/{id}`.
    result_seconds: how long a result of `POST /generate` is kept after it was last asked for.
    tool_call_parser: how the model writes calls of tools, one of `tools.formats.PARSERS`; None
        finds it in the model's chat template.
    allow_runtime_lora_updating: whether clients may load and unload adapters. They can name any
        folder that this process can read, so allow it only if you trust all clients.
    """

    name: str
    api_key: str | None = None
    max_queue: int = 256
    max_body_bytes: int = 8 * 2**20
    allow_origins: tuple[str, ...] = ()
    min_priority: int = 0
    max_priority: int = 0
    allow_user: bool = False
    allow_service_fields: bool = False
    lecture_endpoints: bool = True
    result_seconds: float = 300.0
    tool_call_parser: str | None = None
    allow_runtime_lora_updating: bool = False

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; leave it out to need no key")
        if not -(2**31) <= self.min_priority <= 0:
            raise ValueError(f"min_priority is {self.min_priority}; it must be from -2**31 to 0")
        if not 0 <= self.max_priority < 2**31:
            raise ValueError(f"max_priority is {self.max_priority}; it must be from 0 to 2**31 - 1")
        if not 0 < self.result_seconds < float("inf"):
            raise ValueError(f"result_seconds is {self.result_seconds}; it must be above 0")
        dialect(None, self.tool_call_parser)  # raises for an unknown parser


def identity(llm: LLM, options: Options) -> str:
    """A short text that is equal in servers that give equal answers to a request. It is made of the
    engine's identity, the tokenizer's, and the options that decide on an answer.
    """
    parts = (llm.engine.identity, llm.get_tokenizer().content_hash, options.tool_call_parser)
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def create_app(llm: LLM, options: Options, observers: Sequence[Observer] = ()) -> FastAPI:
    """An ASGI application that serves one model.

    Its engine runs between the application's start-up and shutdown.
    """
    metrics = Metrics(options.name, llm.engine.config)
    policy: Any = llm.engine.config.policy
    live = viewer.Live(llm.engine.scheduler_state, policy)
    worker = Worker(llm, max_queue=options.max_queue, observers=(metrics, live, *observers))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_in_threadpool(worker.stop)

    app = FastAPI(title="PagedJAX", version=__version__, lifespan=lifespan)
    app.state.worker = worker
    app.router.route_class = CheckedRoute
    add_error_handlers(app)
    add_routes(app, worker, options, metrics)
    adapters.add_routes(app, worker, options.name, options.allow_runtime_lora_updating)
    if options.lecture_endpoints:
        vllmini.add_routes(app, worker, options.result_seconds)
    add_viewer(app, live, options)
    guard(app, options.api_key, options.max_body_bytes, options.allow_origins)
    return app


def add_routes(app: FastAPI, worker: Worker, options: Options, metrics: Metrics) -> None:
    llm = worker.llm

    def check_model(name: str | None) -> None:
        adapters.check_model(llm, name, options.name)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        check_model(body.model)
        requests, style = await in_thread(_completion_requests, llm, body, options)
        return await _answer(worker, request, body, requests, style)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        check_model(body.model)
        requests, style = await in_thread(_chat_requests, llm, body, options)
        return await _answer(worker, request, body, requests, style)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        """The pooled hidden states of an input, or of several."""
        check_model(body.model)
        requests = await in_thread(_embedding_requests, llm, body, options)
        submission = await submit(worker, requests, deltas=False, field="input")
        outputs = await _wait_for_outputs(worker, request, submission)
        if outputs is None:
            return Response(status_code=CLIENT_LEFT)
        name = body.model or options.name
        in_base64 = body.encoding_format == "base64"
        return await run_in_threadpool(embeddings.answer, name, in_base64, outputs)

    def prepare(body: ChatRequest) -> tuple[list[GenerationRequest], Style]:
        check_model(body.model)
        return _chat_requests(llm, body, options)

    responses_api.add_routes(app, worker, prepare)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a prompt, or of a conversation in the model's template."""
        check_model(body.model)
        return await in_thread(_tokenize, llm, body, options)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens, special ones included."""
        check_model(body.model)
        return await in_thread(_detokenize, llm, body)

    @app.get("/v1/models")
    async def models() -> JSON:
        """The model that is served, and its adapters."""
        return {"object": "list", "data": list(adapters.cards(llm, options.name).values())}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSON:
        return adapters.card(llm, name, options.name)

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine runs, 503 after it has failed repeatedly."""
        if not worker.healthy:
            return JSONResponse({"status": "the engine failed"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/", include_in_schema=False)
    async def root() -> JSON:
        """Where things are."""
        return {
            "server": f"PagedJAX {__version__}",
            "api": "/v1",
            "reference": app.docs_url,
            "viewer": "/viewer",
            "metrics": "/metrics",
        }

    @app.get("/version")
    async def version() -> JSON:
        return {"version": __version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Counters, gauges and histograms in Prometheus's format."""
        text = metrics.text(worker.waiting, llm.engine.background)
        return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)


def add_viewer(app: FastAPI, live: viewer.Live, options: Options) -> None:
    @app.get("/viewer", include_in_schema=False)
    async def page() -> Response:
        """The running engine, step by step."""
        return HTMLResponse(viewer.live_page("viewer/steps", title=options.name))

    @app.get("/viewer/steps")
    async def steps(since: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The data for a page that has the steps before number `since`."""
        return JSONResponse(await run_in_threadpool(live.since, since))


# --- requests -------------------------------------------------------------------------------------


def _completion_requests(
    llm: LLM, body: CompletionRequest, options: Options
) -> tuple[list[GenerationRequest], Style]:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ValueError("max_tokens is 0, which generates nothing; it needs echo: true")
    if body.echo and body.stream and body.logprobs is not None:
        raise ValueError(
            "echo with logprobs does not go with stream: those of the prompt come in one piece"
        )
    if body.echo and body.use_beam_search:
        raise ValueError("echo does not go with use_beam_search")
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    params = schema.sampling(body, max_tokens, body.logprobs, forms.structured_outputs(body))
    grammar = forms.grammar(llm, params, None, body)
    requests = []
    for prompt in schema.as_list(body.prompt):
        text = None
        all_ids = prompt
        if isinstance(prompt, str):
            text = prompt
            all_ids = llm.tokenizer.encode(text, body.add_special_tokens is not False)
        ids = _last_tokens(llm, all_ids, body)
        if len(ids) < len(all_ids):
            text = None  # the prompt is only the end of it
        requests.append(_request(llm, ids, text, params, body, options, grammar))
    style = Style(
        body.model or options.name,
        chat=False,
        tokenizer=llm.tokenizer,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        only_echo=max_tokens == 0,
        skips_special_tokens=body.skip_special_tokens is not False,
        ignored=grammar.ignored if grammar else (),
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    return requests, style


def _chat_requests(
    llm: LLM, body: ChatRequest, options: Options
) -> tuple[list[GenerationRequest], Style]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError("top_logprobs goes with logprobs: true")
    use = tool_use(
        llm.tokenizer,
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls,
        options.tool_call_parser,
    )
    all_ids = _conversation(llm, body.messages, body.add_generation_prompt, use)
    ids = _last_tokens(llm, all_ids, body)
    room = llm.engine.config.max_model_len - len(ids)
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = schema.sampling(body, max_tokens, logprobs, forms.structured_outputs(body))
    params, ignored = forms.with_tools(llm, params, use, body)
    grammar = forms.grammar(llm, params, use, body)
    style = Style(
        body.model or options.name,
        chat=True,
        tokenizer=llm.tokenizer,
        logprobs=logprobs,
        calls=use.call_format,
        ignored=ignored or (grammar.ignored if grammar else ()),
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    return [_request(llm, ids, None, params, body, options, grammar)], style


def _last_tokens(llm: LLM, ids: Any, body: GenerationBody) -> Any:
    """The tokens of a prompt that `truncate_prompt_tokens` keeps."""
    return last_tokens(ids, body.truncate_prompt_tokens, llm.engine.config.max_model_len)


def _embedding_requests(
    llm: LLM, body: EmbeddingRequest, options: Options
) -> list[GenerationRequest]:
    user = (body.user or "") if options.allow_user else ""
    adapter = adapters.adapter_of(body.model, options.name)
    return embeddings.requests(llm, body, _priority(body, options), user, adapter)


def _request(
    llm: LLM,
    ids: Any,
    text: str | None,
    params: Any,
    body: GenerationBody,
    options: Options,
    grammar: Grammar | None,
) -> GenerationRequest:
    if not ids:
        raise ValueError("prompt is empty: it has no tokens; give it at least one")
    name = "messages" if isinstance(body, ChatRequest) else "prompt"
    limit = llm.engine.config.max_model_len
    if len(ids) >= limit:  # checked here, so that the engine's thread does not spend time on it
        raise ValueError(
            f"{name}: {len(ids)} tokens, but max_model_len is {limit} and one token must be left "
            f"for output; shorten it to {limit - 1} tokens"
        )
    user = (body.user or "") if options.allow_user else ""
    adapter = adapters.adapter_of(body.model, options.name)
    _check_service_fields(body, options)
    return GenerationRequest(
        ids,
        params,
        text,
        _priority(body, options),
        user,
        grammar,
        adapter,
        predicted=body.predicted,
        service_class=body.service_class or "",
        deadline=body.deadline,
    )


def _check_service_fields(body: GenerationBody, options: Options) -> None:
    """Raises ValueError for a field that the operator does not allow."""
    for name in ("predicted", "service_class", "deadline"):
        value = getattr(body, name)
        if value is not None and not options.allow_service_fields:
            raise ValueError(
                f"{name} is {value!r:.80}, and this server does not take it; leave it out, or have "
                "the operator start the server with --allow-service-fields"
            )


def _priority(body: GenerationBody | EmbeddingRequest, options: Options) -> int:
    """The request's priority. Raises ValueError if the operator does not allow it."""
    value = body.priority or 0
    low = options.min_priority
    high = options.max_priority
    if low <= value <= high:
        return value
    allowed = f"{low} to {high}" if low < high else "only 0"
    option = f"--min-priority {value}" if value < low else f"--max-priority {value}"
    raise ValueError(
        f"priority is {value}, but this server allows {allowed}; "
        f"change the field or leave it out, or have the operator start the server with {option}"
    )


def _conversation(
    llm: LLM, messages: Sequence[schema.Message], add_generation_prompt: bool | None, tools: ToolUse
) -> list[int]:
    """The tokens of a conversation in the model's template."""
    plain_messages = [message.plain() for message in messages]
    return tools.tokens(llm.tokenizer, plain_messages, add_generation_prompt is not False)


def _tokenize(llm: LLM, body: TokenizeRequest, options: Options) -> Response:
    """The whole response. Its JSON is made here, in a thread: that of a long text takes long."""
    ids = _token_ids(llm, body, options)
    answer: JSON = {
        "count": len(ids),
        "max_model_len": llm.engine.config.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [llm.tokenizer.decode_token(token) for token in ids]
    return JSONResponse(answer)


def _detokenize(llm: LLM, body: DetokenizeRequest) -> Response:
    size = llm.model.model.config.vocab_size
    for token in body.tokens:
        if token >= size:
            raise ValueError(
                f"tokens has the id {token}, which is not below the vocabulary's {size}"
            )
    return JSONResponse({"prompt": llm.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _token_ids(llm: LLM, body: TokenizeRequest, options: Options) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("prompt or messages: give one of them")
    if body.messages is not None:
        use = tool_use(llm.tokenizer, body.tools, parser=options.tool_call_parser)
        return _conversation(llm, body.messages, body.add_generation_prompt, use)
    assert body.prompt is not None
    return llm.tokenizer.encode(body.prompt, body.add_special_tokens is not False)


# --- answers --------------------------------------------------------------------------------------


async def _answer(
    worker: Worker,
    request: Request,
    body: GenerationBody,
    requests: Sequence[GenerationRequest],
    style: Style,
) -> Response:
    if body.stream and any(_selects_best(generation) for generation in requests):
        message = (
            "best_of above n does not go with stream: which branches are best is known at the end"
        )
        raise ApiError(400, message, "best_of")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs do not go with stream; ask for the answer in one piece"
        raise ApiError(400, message, "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options go with stream: true", "stream_options")
    submission = await submit(worker, requests, deltas=bool(body.stream))
    headers = forms.headers(style.ignored)
    if body.stream:
        stream = events(submission, body, style)
        return EventStream(stream, lambda: worker.cancel(submission), headers)
    outputs = await _wait_for_outputs(worker, request, submission)
    if outputs is None:
        return Response(status_code=CLIENT_LEFT)
    return JSONResponse(responses.answer(style, outputs), headers=headers)


async def _wait_for_outputs(
    worker: Worker, request: Request, submission: Submission
) -> list[Any] | None:
    """Wait for the outputs of a submission; None if the client leaves first."""
    try:
        return await unless_client_leaves(request, submission.completed())
    finally:
        worker.cancel(submission)


def _selects_best(request: GenerationRequest) -> bool:
    """Whether the branches of the answer are chosen at the end, from more branches."""
    params = request.params
    if isinstance(params, BeamSearchParams):
        return True
    return isinstance(params, SamplingParams) and params.drawn().n > params.n
