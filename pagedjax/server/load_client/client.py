"""An open-loop load client for any OpenAI-compatible server.

Each request is sent at its planned time, whether or not earlier ones were answered, because users
do not wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedjax.server.load_client.stream import AnswerReader, EventParser, message_of

if TYPE_CHECKING:
    import httpx

    from pagedjax.server.load_client.plan import Load, PlannedRequest
    from pagedjax.server.load_client.summary import RequestTimes

TICK = 0.02  # seconds between two checks whether the client itself is late


@dataclass(frozen=True)
class Target:
    """The server, and options of all requests.

    `timeout` is seconds from a request's planned arrival to its end.

    Raises:
        ValueError: an address or a number that cannot be used.
    """

    url: str
    model: str | None = None  # None: the first that the server lists
    timeout: float = 600.0
    max_concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    api_key: str | None = field(default=None, repr=False)  # a secret

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", self.url):
            raise ValueError(f"url is {self.url!r}; it must be like http://127.0.0.1:8000")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout is {self.timeout}; it must be above 0 seconds")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency is {self.max_concurrency}; it must be at least 1")
        if not 0 <= self.temperature <= 2:
            raise ValueError(
                f"temperature is {self.temperature}; it must be between 0 (greedy) and 2"
            )

    @property
    def base(self) -> str:
        """The address with /v1 at its end, whether or not `url` has it."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """A client with any number of connections, and without timeouts and proxies."""
    import httpx

    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    # No connection is kept: at each answer httpcore checks all connections for each idle one, which
    # takes longer than the answers at 1000 of them
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        headers=headers, timeout=None, limits=limits, trust_env=False
    ) as client:
        yield client


async def find_model(client: httpx.AsyncClient, target: Target) -> str:
    """Ask the server for its models -> the name for requests: the target's, or the first listed.

    Raises:
        ValueError: no server answers, or it does not have the model; the message lists the models
            it has.
    """
    import httpx

    url = f"{target.base}/models"
    try:
        async with asyncio.timeout(min(30.0, target.timeout)):
            response = await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"no server answers at {target.url}: {reason}; start one, or give another --url"
        ) from None
    if response.status_code in (401, 403):
        raise ValueError(
            f"{url} answers {response.status_code}: {_message(response)}; give --api-key-file"
        )
    try:
        entries = response.json()["data"] if response.status_code == 200 else []
        names = [str(entry["id"]) for entry in entries]
    except (ValueError, TypeError, KeyError):
        names = []
    if target.model is not None and (target.model in names or not names):
        return target.model  # a server without a list may serve it
    if target.model is not None:
        raise ValueError(f"the server has no model {target.model!r}; it has {', '.join(names)}")
    if not names:
        raise ValueError(
            f"{url} lists no models (status {response.status_code}); name one with --model"
        )
    return names[0]


def body_of(load: Load, target: Target, model: str, planned: PlannedRequest) -> bytes:
    """The JSON of one request."""
    chat = load.endpoint == "chat"
    prompt: Any = [{"role": "user", "content": planned.prompt}] if chat else planned.prompt
    body = {
        "model": model,
        "messages" if chat else "prompt": prompt,
        "max_tokens": planned.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if target.ignore_eos else {}),
        **({"user": planned.user} if planned.user else {}),
    }
    return json.dumps(body, separators=(",", ":")).encode()


async def send_request(
    client: httpx.AsyncClient,
    url: str,
    body: bytes,
    arrival: float,
    *,
    clock: Callable[[], float],
    gate: Any,
    timeout: float,
) -> RequestTimes:
    """Send one request at its arrival and read its answer.

    A failure is a part of the result; nothing is raised.

    Args:
        clock: gives the seconds since the start of the run.
        gate: a context manager that is open during the request.
        timeout: seconds after the arrival, waiting at the gate included.
    """
    import httpx

    from pagedjax.server.load_client.summary import RequestTimes

    await asyncio.sleep(max(0.0, arrival - clock()))
    due = clock()
    sent = None
    failure: tuple[str, str] | None = None  # a short reason, and the whole message
    parser = EventParser()
    answer = AnswerReader()
    try:
        async with asyncio.timeout(max(0.0, arrival + timeout - due)), gate:
            sent = clock()
            async with client.stream("POST", url, content=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    failure = (f"status {response.status_code}", _message(response))
                else:
                    async for chunk in response.aiter_bytes():
                        received = clock()
                        for data in parser.push(chunk):
                            answer.take(data, received)
    except TimeoutError:
        failure = ("timeout", f"not complete {timeout} s after its arrival")
    except (httpx.HTTPError, OSError) as problem:
        failure = ("connection", str(problem) or type(problem).__name__)
    except (ValueError, RecursionError) as problem:  # JSON may be nested too deeply
        failure = ("stream", f"not understood: {problem}")
    if answer.error is not None:
        failure = ("stream", answer.error)
    elif answer.closed is not None:
        failure = None  # the answer was complete before the error
    elif failure is None:
        failure = ("connection", "the stream ended without a finish_reason")
    error, detail = failure or (None, "")
    return RequestTimes(
        arrival=arrival,
        due=due,
        sent=sent,
        chunks=tuple(answer.chunks),
        ended=clock() if error is not None or answer.closed is None else answer.closed,
        prompt_tokens=answer.count("prompt_tokens"),
        output_tokens=answer.count("completion_tokens"),
        cached_tokens=answer.cached,
        finish_reason=answer.finish_reason,
        error=error,
        detail=detail[:500],
    )


def _message(response: httpx.Response) -> str:
    try:
        return message_of(response.json())
    except ValueError:
        return response.text


async def send_requests(
    client: httpx.AsyncClient,
    load: Load,
    target: Target,
    model: str,
    items: Sequence[PlannedRequest],
    on_end: Callable,
) -> tuple[list[RequestTimes], float]:
    """Send requests at their arrivals -> the times of each, and the client's worst lag in seconds.

    Takes until the last arrival + target.timeout at most. `on_end` is called with each result.
    """
    path = "chat/completions" if load.endpoint == "chat" else "completions"
    url = f"{target.base}/{path}"
    bodies = [body_of(load, target, model, item) for item in items]  # before the measurement
    gate = (
        nullcontext()
        if target.max_concurrency is None
        else asyncio.Semaphore(target.max_concurrency)
    )
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    async def send(body: bytes, arrival: float) -> RequestTimes:
        times = await send_request(
            client, url, body, arrival, clock=clock, gate=gate, timeout=target.timeout
        )
        on_end(times)
        return times

    worst_lag = [0.0]
    watch = asyncio.create_task(_watch(worst_lag))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(send(body, item.arrival))
                for body, item in zip(bodies, items, strict=True)
            ]
    finally:
        watch.cancel()
    return [task.result() for task in tasks], worst_lag[0]


async def _watch(worst_lag: list[float]) -> None:
    """Keep in worst_lag[0] the longest time that a task of this process waited to run."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(TICK)
        worst_lag[0] = max(worst_lag[0], time.perf_counter() - start - TICK)


async def measure(
    load: Load, target: Target, content: str = "", *, warmup: int = 0, progress: bool = False
) -> tuple[str, Any, list[RequestTimes], float]:
    """Run a load -> (model, plan, times, lag).

    These are the model's name, the `LoadPlan`, the times of each of its requests, and the client's
    worst lag in seconds.

    Args:
        content: the text of the load's file.
        warmup: requests to send before the measurement, all at once.

    Raises:
        ValueError: nothing could be measured: no server, no such model, or a warm-up request
            failed.
    """
    from tqdm import tqdm

    from pagedjax.server.load_client import plan

    planned = plan.make_plan(load, content)
    async with connected(target) as client:
        model = await find_model(client, target)
        if warmup:
            items = plan.warm_up(load, warmup).items
            times, _ = await send_requests(client, load, target, model, items, lambda request: None)
            failed = [request for request in times if request.error is not None]
            if failed:
                raise ValueError(
                    f"{len(failed)} of {warmup} warm-up requests failed "
                    f"({failed[0].error}: {failed[0].detail}); nothing was measured"
                )
        with tqdm(
            total=len(planned.items), desc="requests", disable=not progress, leave=False
        ) as bar:
            times, lag = await send_requests(
                client, load, target, model, planned.items, lambda request: bar.update()
            )
    return model, planned, times, lag
