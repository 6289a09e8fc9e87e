"""`pagedjax bench serve`: an open-loop load client for any OpenAI-compatible server.

Requests are sent when their time has come, whether or not earlier ones were answered, because users do not wait for
each other either. load_plan.py says what is asked and when, load_summary.py what comes of it; here is what talks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

    from pagedjax.server.load_plan import Load, Planned
    from pagedjax.server.load_summary import Timed

MAX_LINE = 1 << 24  # bytes of one line of a stream; more is no stream of ours
TICK = 0.02  # seconds between looks at whether the client itself gets to run


# what a server streams -----------------------------------------------------------------------------------------------


class Events:
    """Server-sent events, from bytes however they are cut. Only their data matters here."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[str] = []
        self._after_cr = False

    def push(self, chunk: bytes) -> list[str]:
        """The data of the events that are complete with this chunk.

        Raises:
            ValueError: a line without end, or one that is not UTF-8.
        """
        if not chunk:
            return []
        if self._after_cr:  # it ended a line already; with this it is one end and not two
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._line = re.split(rb"\r\n|\r|\n", self._line + chunk)
        if len(self._line) > MAX_LINE:
            raise ValueError(f"a line of the stream has more than {MAX_LINE} bytes")
        return [data for line in lines if (data := self._take(line.decode())) is not None]

    def _take(self, line: str) -> str | None:
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.removeprefix("\ufeff").partition(":")  # a comment has no name
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None


@dataclass
class Reading:
    """What the events of one answer have told so far. Times are given, never taken."""

    chunks: list[float] = field(default_factory=list)  # of those that carry output
    closed: float | None = None  # when the reason for the end came, or the end itself
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def take(self, data: str, at: float) -> None:
        """Read the data of one event, received at `at`.

        Raises:
            ValueError: it is no JSON object of the expected form.
        """
        if data == "[DONE]":
            self.closed = at if self.closed is None else self.closed
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"an event is {data!r:.80}, no object")
        if chunk.get("error"):
            self.error = message_of(chunk)
            return
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        choices = chunk.get("choices") or []
        if not (isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)):
            raise ValueError(f"choices are {choices!r:.80}, no list of objects")
        if any(map(carries_output, choices)):
            self.chunks.append(at)
        for reason in (choice.get("finish_reason") for choice in choices):
            if reason:
                self.finish_reason, self.closed = str(reason), at

    def count(self, name: str) -> int | None:
        value = self.usage.get(name)
        return value if type(value) is int else None

    @property
    def cached(self) -> int | None:
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if type(value) is int else None


def carries_output(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice brings output: text, or a token without text, but not a role or the end alone."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text")) or ("text" in choice and choice.get("finish_reason") is None)
    if any(value for name, value in delta.items() if name != "role"):
        return True
    return "content" in delta and "role" not in delta and choice.get("finish_reason") is None


def message_of(body: Any) -> str:
    """What an error's JSON says: {"error": {"message": ...}} or near it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    return str(text)


# talking -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how. `timeout` is seconds from a request's intended arrival to its end; `api_key` is a secret.

    Raises:
        ValueError: an address or a number that cannot be used.
    """

    url: str
    model: str | None = None  # None: the first that the server lists
    timeout: float = 600.0
    max_concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", self.url):
            raise ValueError(f"url is {self.url!r}; it must be like http://127.0.0.1:8000")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout is {self.timeout}; it must be above 0 seconds")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency is {self.max_concurrency}; it must be at least 1")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature is {self.temperature}; it must be between 0 (greedy) and 2")

    @property
    def base(self) -> str:
        """With /v1 at its end, whether or not it was given."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """A client that opens as many connections as it needs, and whose own timeouts and proxies are off."""
    import httpx

    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False) as client:
        yield client


async def model_of(client: httpx.AsyncClient, target: Target) -> str:
    """The model to name in requests: the target's, if the server has it, or the first one listed.

    Raises:
        ValueError: no server answers, or it does not have the model; says which it has.
    """
    import httpx

    url = f"{target.base}/models"
    try:
        async with asyncio.timeout(min(30.0, target.timeout)):
            response = await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise ValueError(f"no server answers at {target.url}: {why}; start one, or give another --url") from None
    if response.status_code in (401, 403):
        raise ValueError(f"{url} answers {response.status_code}: {_said(response)}; give --api-key-file")
    try:
        entries = response.json()["data"] if response.status_code == 200 else []
        names = [str(entry["id"]) for entry in entries]
    except (ValueError, TypeError, KeyError):
        names = []
    if target.model is not None and (target.model in names or not names):
        return target.model  # a server that lists nothing may serve it
    if target.model is not None:
        raise ValueError(f"the server has no model {target.model!r}; it has {', '.join(names)}")
    if not names:
        raise ValueError(f"{url} lists no models (status {response.status_code}); name one with --model")
    return names[0]


def body_of(load: Load, target: Target, model: str, planned: Planned) -> bytes:
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
    }
    return json.dumps(body, separators=(",", ":")).encode()


async def ask(
    client: httpx.AsyncClient,
    url: str,
    body: bytes,
    arrival: float,
    *,
    now: Callable[[], float],
    gate: Any,
    timeout: float,
) -> Timed:
    """Send one request at its arrival and read its answer. Failures are in the result; none is raised.

    Args:
        now: seconds since the start of the run.
        gate: held while the request is under way.
        timeout: seconds after the arrival, waiting at the gate included.
    """
    import httpx

    from pagedjax.server.load_summary import Timed

    await asyncio.sleep(max(0.0, arrival - now()))
    due, sent, error, detail = now(), None, None, ""
    events, reading = Events(), Reading()
    try:
        async with asyncio.timeout(max(0.0, arrival + timeout - due)), gate:
            sent = now()
            async with client.stream("POST", url, content=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    error, detail = f"status {response.status_code}", _said(response)
                else:
                    async for chunk in response.aiter_bytes():
                        at = now()
                        for data in events.push(chunk):
                            reading.take(data, at)
    except TimeoutError:
        error, detail = "timeout", f"not complete {timeout} s after its arrival"
    except (httpx.HTTPError, OSError) as problem:
        error, detail = "connection", str(problem) or type(problem).__name__
    except (ValueError, RecursionError) as problem:  # JSON may be nested too deeply
        error, detail = "stream", f"not understood: {problem}"
    if reading.error is not None:
        error, detail = "stream", reading.error
    elif reading.closed is not None:
        error, detail = None, ""  # all was there before anything went wrong
    elif error is None:
        error, detail = "connection", "the stream ended without a finish_reason"
    return Timed(
        arrival=arrival,
        due=due,
        sent=sent,
        chunks=tuple(reading.chunks),
        ended=now() if error is not None or reading.closed is None else reading.closed,
        prompt_tokens=reading.count("prompt_tokens"),
        output_tokens=reading.count("completion_tokens"),
        cached_tokens=reading.cached,
        finish_reason=reading.finish_reason,
        error=error,
        detail=detail[:500],
    )


def _said(response: httpx.Response) -> str:
    try:
        return message_of(response.json())
    except ValueError:
        return response.text


async def send(
    client: httpx.AsyncClient, load: Load, target: Target, model: str, items: Sequence[Planned], ended: Callable = print
) -> tuple[list[Timed], float]:
    """Send requests at their arrivals -> what each lived through, and the client's worst lag in seconds.

    It takes until the last arrival + target.timeout at most. `ended` is called with each result.
    """
    url = f"{target.base}/{'chat/completions' if load.endpoint == 'chat' else 'completions'}"
    bodies = [body_of(load, target, model, item) for item in items]  # now, so that nothing is built while it measures
    gate = nullcontext() if target.max_concurrency is None else asyncio.Semaphore(target.max_concurrency)
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    async def one(body: bytes, arrival: float) -> Timed:
        timed = await ask(client, url, body, arrival, now=now, gate=gate, timeout=target.timeout)
        ended(timed)
        return timed

    worst = [0.0]
    watch = asyncio.create_task(_watch(worst))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(body, item.arrival)) for body, item in zip(bodies, items, strict=True)]
    finally:
        watch.cancel()
    return [task.result() for task in tasks], worst[0]


async def _watch(worst: list[float]) -> None:
    """Keep in worst[0] for how long a task of this process had to wait for its turn."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        worst[0] = max(worst[0], time.perf_counter() - before - TICK)


async def measure(
    load: Load, target: Target, content: str = "", *, warmup: int = 0, progress: bool = False
) -> tuple[str, Any, list[Timed], float]:
    """Run a load -> (the model's name, the plan, what each request lived through, the client's worst lag in seconds).

    Args:
        content: of the load's file.
        warmup: requests that are sent before, all at once, and not measured.

    Raises:
        ValueError: nothing could be measured: no server, no such model, or a warm-up request failed.
    """
    from tqdm import tqdm

    from pagedjax.server import load_plan

    planned = load_plan.plan(load, content)
    async with connected(target) as client:
        model = await model_of(client, target)
        if warmup:
            items = load_plan.warm_up(load, warmup).items
            seen, _ = await send(client, load, target, model, items, lambda timed: None)
            if failed := [timed for timed in seen if timed.error is not None]:
                what = f"{len(failed)} of {warmup} warm-up requests failed ({failed[0].error}: {failed[0].detail})"
                raise ValueError(f"{what}; nothing was measured")
        with tqdm(total=len(planned.items), desc="requests", disable=not progress, leave=False) as bar:
            seen, lag = await send(client, load, target, model, planned.items, lambda timed: bar.update())
    return model, planned, seen, lag


# the command line ----------------------------------------------------------------------------------------------------

GIVEN_BY_A_TRACE = ("arrivals", "rate", "burstiness", "prompt_tokens", "output_tokens")


def options(words: argparse.ArgumentParser) -> None:
    """Declare the options of `bench serve`."""
    add = words.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server's address, with or without /v1")
    add("--model", help="its name there; the default is the first that the server lists")
    add("--endpoint", choices=("completions", "chat"), help="completions (the default) sends token ids, chat words")
    add("--rate", type=float, help="requests a second")
    add("--arrivals", choices=("poisson", "gamma", "uniform", "at-once"), help="the default is poisson")
    add("--burstiness", type=float, help="of gamma arrivals: below 1 bursts, 1 is Poisson (the default)")
    add("--requests", "--limit", type=int, help="how many; the default is 100, or every line of the file")
    lengths = '"128", "16:256" or "lognormal:6.63,0.99"'
    add("--prompt-tokens", metavar="LENGTHS", help=f"{lengths}; the default is 128")
    add("--output-tokens", metavar="LENGTHS", help="at most, likewise; the default is 64. See --ignore-eos")
    add("--max-prompt-tokens", type=int, help="clip longer ones to this")
    add("--max-output-tokens", type=int, help="clip longer ones to this")
    add("--trace", metavar="CSV", help="arrivals and lengths: TIMESTAMP,ContextTokens,GeneratedTokens")
    add("--time-scale", type=float, help="multiplies a trace's gaps: 0.5 doubles its rate")
    add("--prompts", metavar="FILE", help="texts, one a line; from its top again if more are asked for")
    add("--vocab", type=int, help="random token ids are below this; the default, 32000, suits most models")
    add("--seed", type=int, help="the same seed sends the same requests at the same times; the default is 0")
    add("--ignore-eos", action="store_true", help="ask for all output tokens, for servers that know ignore_eos")
    add("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    add("--ttft-target", type=float, help="seconds until the first token, for goodput")
    add("--itl-target", type=float, help="seconds per later token (TPOT), for goodput")
    add("--max-concurrency", type=int, help="requests under way at most; others wait, and their latencies tell")
    add("--timeout", type=float, default=600.0, help="seconds from a request's arrival to its end; the default is 600")
    add("--warmup", type=int, default=0, help="requests to send before, unmeasured")
    add("--api-key-file", help="a file with nothing but the key")
    add("--json", metavar="FILE", help="write the summary and every request there")


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON. 0: all completed; 1: some failed; a ValueError: nothing was measured."""
    from pagedjax.server import load_plan, load_summary

    names = load_plan.Load.__dataclass_fields__
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    clash = {"trace": GIVEN_BY_A_TRACE, "prompts": ("prompt_tokens", "max_prompt_tokens", "vocab")}
    for file, others in clash.items():
        if file in given and (both := [name for name in others if name in given]):
            named = ", ".join(f"--{name.replace('_', '-')}" for name in both)
            raise ValueError(f"--{file} says what {named} would say; leave one of them out")
    if "time_scale" in given and "trace" not in given:
        raise ValueError("--time-scale is of a --trace, and there is none; use --rate")
    for name in ("ttft_target", "itl_target"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0 seconds")
    if args.warmup < 0:
        raise ValueError(f"--warmup is {args.warmup}; it must be at least 0")
    load = load_plan.Load(**given)
    target = Target(
        url=args.url,
        model=args.model,
        timeout=args.timeout,
        max_concurrency=args.max_concurrency,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        api_key=_key(args.api_key_file),
    )
    if args.json and not Path(args.json).absolute().parent.is_dir():  # told before minutes of measuring
        raise ValueError(f"--json is {args.json!r}, and its folder does not exist; make it first")
    file = load.trace or load.prompts
    content = _text(file) if file else ""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    running = measure(load, target, content, warmup=args.warmup, progress=sys.stderr.isatty())
    model, planned, seen, lag = asyncio.run(running)
    summary = load_summary.summarize(seen, ttft=args.ttft_target, itl=args.itl_target, lag=lag)
    if args.json:
        record = {
            "began": began,
            "load": asdict(load),
            "target": {name: value for name, value in asdict(target).items() if name != "api_key"} | {"model": model},
            "warmup": args.warmup,
            "clipped_prompts": planned.clipped_prompts,
            "clipped_outputs": planned.clipped_outputs,
            "summary": summary,
            "requests": [
                {**one._asdict(), "max_tokens": item.max_tokens} for one, item in zip(seen, planned.items, strict=True)
            ],
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"model {model} at {target.url}\n{load_summary.table(summary)}")
    return 1 if summary["failed"] else 0


def _text(file: str) -> str:
    try:
        return Path(file).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    key = _text(file).strip()
    if not key or not key.isascii() or len(key.split()) != 1:
        raise ValueError(f"{file} must hold the API key and nothing else; it holds {len(key.split())} words")
    return key
