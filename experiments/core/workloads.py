"""Workloads: the requests of a run and their arrival times.

Pure functions of (spec, file content, seed, vocabulary).

Kinds: `prompts` and `sharegpt` (real text), `synthetic` (lengths drawn from distributions),
`sessions` (conversations, turn by turn), `trace`, `burstgpt` and `mooncake` (lengths and arrivals
of a recorded service), `recorded` (a recording of an engine, with its prompts and outputs),
`tokens` (a JSON list of token ids), and a function of your own (`mine.py:NAME`). Only kinds with
text need a tokenizer. Random token ids suit speed measurements, because a dense model's work does
not depend on token values. They do NOT suit speculative decoding (they distort its acceptance), or
prefix caching (only `shared_prefix`, the turns of a session and blocks of `mooncake` are shared).

Every random choice has its own stream: a change of the arrivals changes no prompt, and the first k
requests of `count: n` are the same for every n >= k.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.core import field_files
from experiments.core.distributions import (
    AT_ONCE,
    Arrivals,
    ClosedLoop,
    Lengths,
    Limits,
    Predicted,
    ServiceClass,
    Users,
    Waits,
    clip,
    draw_arrivals,
    draw_choices,
    draw_lengths,
    draw_limits,
    draw_users,
    draw_waits,
    predicted_lengths,
)
from experiments.core.drawn_ids import DrawnIds
from experiments.core.field_files import (
    BURSTGPT,
    MOONCAKE,
    SHAREGPT,
    BlockIds,
    TraceRequest,
    conversations,
)
from experiments.core.recorded_runs import REMEDY, RecordedRequest, recorded_requests
from pagedjax.options.config import check_above_zero
from pagedjax.options.own_errors import placed
from pagedjax.options.own_values import own_function
from pagedjax.server.load_client.text_files import lines, paragraphs, trace_rows

# lower ids are special in the embedded model (chat marks, padding, file names ...)
FIRST_ORDINARY_TOKEN = 17
PLANNED_VOCABULARY = 1000  # of `planned`: lengths do not depend on it
FEWEST_SHARED_BLOCKS = 2  # of Mooncake: requests of many sessions share a first block
MOST_REQUESTS = 10_000_000  # that a user's own function may return
# Numbers of random streams. `_synthetic` uses 0 to 5.
_PROMPT_LENGTHS = 0
_TOKEN_IDS = 1
_ARRIVALS = 2
_OUTPUT_LENGTHS = 3
_PREFIXES = 4
_LIMITS = 6
_PREDICTIONS = 7
_ORDER = 8  # of texts
_OWN_FUNCTION = 9
_PART = 10  # of a recorded load
_USERS = 11
_CLASSES = 12
_TURNS = 13
_THINKING = 14
_TOOLS = 15  # which turns come from a tool
_TOOL_SECONDS = 16
_TOOL_RESULTS = 17
_NUM_STREAMS = 18
AZURE = (
    "The public original is AzureLLMInferenceTrace_conv.csv (2023; the code trace is beside it) "
    "of the Azure Public Dataset, CC-BY 4.0, with columns "
    "TIMESTAMP,ContextTokens,GeneratedTokens; download it and give its path"
)


class WorkItem(NamedTuple):
    """One request: `arrival` in seconds after the start of the run, at most `max_tokens` output
    tokens a branch.

    prompt_token_ids: its prompt. A turn that follows another one has its new tokens alone: they
        stand behind the conversation so far.
    ends_at: output tokens after which each branch ends, as if the model had sampled its end token;
        None: a branch has `max_tokens`, or the model ends it.
    predicted: predicted output tokens, for a policy that reads them; None: nothing is predicted.
    user: who sends it, for the policy `fair` and routers; "": not known.
    priority: for the policy `priority`; a lower number is more urgent.
    service_class: the name of its class; "": it has none.
    deadline: seconds after its arrival by which it should have ended; None: there is no such time.
    session: the conversation of which it is a turn; "": it stands alone.
    turn: its number in the session, from 0.
    follows: the request of the turn before, for whose answer it waits; "": it waits for none, and
        arrives at `arrival`. Else `arrival` is the earliest time at which it may arrive.
    history: tokens of the conversation before its new tokens.
    think_s, tool_s: seconds between the answer and this turn, in which the user thinks, or a tool
        runs; one of them is 0.
    output_token_ids: the tokens of its output, which are given, and not sampled; (): they are
        sampled.
    """

    request_id: str
    arrival: float
    prompt_token_ids: Sequence[int]  # a tuple, or `RandomIds`
    max_tokens: int
    ends_at: int | None = None
    predicted: int | None = None
    user: str = ""
    priority: int = 0
    service_class: str = ""
    deadline: float | None = None
    session: str = ""
    turn: int = 0
    follows: str = ""
    history: int = 0
    think_s: float = 0.0
    tool_s: float = 0.0
    output_token_ids: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its whole prompt: the conversation so far, and the new ones."""
        return self.history + len(self.prompt_token_ids)

    @property
    def longest_output(self) -> int:
        """The most output tokens of a branch. The scheduler knows `max_tokens`, which may be more."""
        return self.max_tokens if self.ends_at is None else self.ends_at


def branch_ids(request_id: str, branches: int) -> tuple[str, ...]:
    """The ids of a request's branches; the first is the request's own: ("r00003", "r00003.1",
    "r00003.2").
    """
    return (request_id, *(f"{request_id}.{i}" for i in range(1, branches)))


class Workload(NamedTuple):
    """Requests in order of arrival, and how many drawn or recorded lengths were moved to their
    limits.

    clients: the number of clients of a closed loop, whose requests arrive when a client is free;
        None: an open loop.
    predicted_error: `Predicted.error`; None: there are no predictions.
    left_out: requests of a recording that got no token.
    """

    items: tuple[WorkItem, ...]
    clipped_prompts: int = 0
    clipped_outputs: int = 0
    clients: int | None = None
    predicted_error: float | None = None
    left_out: int = 0

    def in_memory(self) -> Workload:
        """The same workload with all token ids in memory."""
        items = [
            item._replace(prompt_token_ids=tuple(item.prompt_token_ids)) for item in self.items
        ]
        return self._replace(items=tuple(items))

    def describe(self) -> dict[str, Any]:
        """The counts that a run records: requests, tokens, clipped lengths, seconds until the last
        arrival.
        """
        counts: dict[str, Any] = {
            "requests": len(self.items),
            "prompt_tokens": sum(item.prompt_tokens for item in self.items),
            "max_output_tokens": sum(item.max_tokens for item in self.items),
        }
        if any(item.ends_at is not None for item in self.items):
            counts["drawn_output_tokens"] = sum(item.longest_output for item in self.items)
        counts["clipped_prompts"] = self.clipped_prompts
        counts["clipped_outputs"] = self.clipped_outputs
        counts["last_arrival_s"] = max(item.arrival for item in self.items)
        if self.predicted_error is not None:
            counts["predicted_error"] = self.predicted_error
        if self.num_sessions:
            counts["sessions"] = self.num_sessions
        if self.left_out:
            counts["left_out"] = self.left_out
        return counts

    @property
    def num_sessions(self) -> int:
        return len({item.session for item in self.items if item.session})


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What every kind may say of its requests.

    predicted: what a policy may know of the outputs' lengths; null: nothing.
    users: the number of users u0, u1, ..., drawn evenly, or {skew: zipf, count: 20}; each request
        gets a user, and each session one. The policy `fair` shares between users. null: the users
        that the file or the function gives, if any.
    classes: the classes of which requests are, with their shares, targets and priorities; each
        request gets a class, and each session one. A request whose class a function gives keeps
        it. null: no classes, or those of the function, without targets.
    """

    predicted: Predicted | None = None
    users: int | Users | None = None
    classes: tuple[ServiceClass, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.users, int):
            _at_least_one("users", self.users, "null for those of the file")
        if self.classes is None:
            return
        names = [service_class.name for service_class in self.classes]
        if not names:
            raise ValueError("classes is empty; give a class, such as {name: chat}, or null")
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"classes has two classes named {repeated!r}; rename one of them")


@dataclass(frozen=True, kw_only=True)
class LimitedRequests(Requests):
    """Requests whose limits may differ from the lengths of their outputs.

    max_tokens: the most tokens that a request asks for: a number, a distribution as of lengths, or
        {dist: multiple, times: 2} of the output's length. A scheduler knows this limit, and not the
        length of the output. A longer output is cut, and counted. null: equal to the length of the
        output.
    """

    max_tokens: Limits | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.max_tokens, int):
            _at_least_one("max_tokens", self.max_tokens, "null for the lengths of the outputs")


@dataclass(frozen=True, kw_only=True)
class CutRequests(LimitedRequests):
    """Requests with the lengths of a file.

    max_prompt_tokens, max_output_tokens: longer prompts or outputs are cut, and counted; null:
        nothing is cut.
    """

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_prompt_tokens", "max_output_tokens"):
            _at_least_one(name, getattr(self, name), "null for lengths as they are")


@dataclass(frozen=True)
class Prompts(Requests):
    """Texts of `file`, one a line (or a paragraph).

    With `cycle`, a `count` beyond the file repeats it.

    output: the lengths at which requests end, as if the model had sampled its end token; null:
        requests end at `max_tokens`, or where the model ends them. A length beyond `max_tokens` is
        cut.
    shuffle: take the texts in random order, by the seed; each repetition of the file has another
        order.
    """

    kind: Literal["prompts"]
    file: str
    count: int | None = None  # None: each prompt once
    cycle: bool = True
    split: Literal["line", "paragraph"] = "line"
    max_tokens: int = 32
    arrivals: Arrivals = AT_ONCE
    output: Lengths | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("count", self.count, "null for each prompt once")
        _at_least_one("max_tokens", self.max_tokens)


@dataclass(frozen=True)
class Synthetic(LimitedRequests):
    """Random token ids whose lengths follow distributions.

    shared_prefix: tokens at the start of all prompts, like a system prompt; the tokens of `prompt`
        follow.
    prefixes: how many different prefixes of that length there are; each request has one of these
        prefixes, drawn evenly.
    """

    kind: Literal["synthetic"]
    count: int
    prompt: Lengths
    output: Lengths
    arrivals: Arrivals = AT_ONCE
    shared_prefix: int = 0
    prefixes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("count", self.count)
        _check_shared_prefix(self.shared_prefix)
        _at_least_one("prefixes", self.prefixes)
        if self.prefixes > 1 and not self.shared_prefix:
            raise ValueError(
                f"prefixes is {self.prefixes} and shared_prefix is 0; set shared_prefix to their "
                "length"
            )


@dataclass(frozen=True)
class Tools:
    """Turns of a session that a tool sends, as those of agents: the result of a call.

    share: the share of the turns after the first that come from a tool. The others come from the
        user.
    seconds: how long a tool runs.
    result: tokens of its result, which are the new tokens of the turn.
    """

    share: float
    seconds: Waits
    result: Lengths

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share!r}; it must be from 0 to 1")


@dataclass(frozen=True)
class Sessions(LimitedRequests):
    """Conversations. The prompt of a turn is the prompt of the turn before it, its answer and new
    tokens, which are random ids. A turn arrives after the answer before it, when the user has
    thought or a tool has run.

    In a closed loop a client is free when its session has ended.

    count: how many sessions.
    turns: requests of a session.
    prompt: new tokens of a turn.
    output: tokens of an answer.
    think: seconds between an answer and the next turn; null: none.
    tools: turns that tools send; null: none.
    arrivals: of the first turns.
    shared_prefix: tokens at the start of all prompts, like a system prompt.
    """

    kind: Literal["sessions"]
    count: int
    turns: Lengths
    prompt: Lengths
    output: Lengths
    think: Waits | None = None
    tools: Tools | None = None
    arrivals: Arrivals = AT_ONCE
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("count", self.count)
        _check_shared_prefix(self.shared_prefix)


@dataclass(frozen=True)
class Recorded(CutRequests):
    """Arrivals and lengths of a recorded service. Prompts are random ids.

    offset, limit: how many requests at the beginning of the file are left out, and how many of the
        next ones are taken; null: all.
    window, num_requests: take a part of these requests: so many seconds of the recorded time, or so
        many requests, from a start that is drawn by the seed. With `reseed` each repeat has another
        part. null: all.
    time_scale: multiplies the recorded gaps: 0.5 doubles the rate, with 0 all requests arrive at
        once.
    rate: requests a second, in place of `time_scale`. The gaps are scaled so that so many requests
        arrive, on average over the part. null: as recorded.
    rounds: how often the requests come, one round after the other with the mean gap between them:
        24 makes a day of a recorded hour. Each round has other prompts. With a `time_scale` of 0
        all rounds arrive at once.
    """

    kind: str
    file: str
    offset: int = 0
    limit: int | None = None
    time_scale: float = 1.0
    rounds: int = 1
    rate: float | None = None
    window: float | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_time_scale(self.time_scale)
        if self.offset < 0:
            raise ValueError(f"offset is {self.offset!r}; it must be at least 0")
        _at_least_one("limit", self.limit, "null for the whole file")
        _at_least_one("rounds", self.rounds)
        _at_least_one("num_requests", self.num_requests, "null for all")
        if self.rate is not None:
            check_above_zero("rate", self.rate, "requests a second")
            if self.num_requests == 1:
                raise ValueError(
                    f"rate is {self.rate!r} and num_requests 1, and one request has no rate; set "
                    "num_requests to 2 or more, or leave rate out"
                )
            if self.time_scale != 1.0:
                raise ValueError(
                    f"rate is {self.rate!r} and time_scale {self.time_scale!r}, and both scale "
                    "the recorded gaps; leave one of them out"
                )
        if self.window is not None:
            check_above_zero("window", self.window, "seconds")
            if self.num_requests is not None:
                raise ValueError(
                    f"window is {self.window!r} and num_requests {self.num_requests!r}, and both "
                    "say how long the part is; leave one of them out"
                )


@dataclass(frozen=True)
class Trace(Recorded):
    """A CSV with TIMESTAMP, ContextTokens, GeneratedTokens, as Azure publishes it. A column User
    may say who sent a request.
    """

    kind: Literal["trace"]


@dataclass(frozen=True)
class BurstGPT(Recorded):
    """A CSV of BurstGPT, with Timestamp (seconds), Model, Request tokens, Response tokens and Log
    Type. A column User may say who sent a request.

    Requests without response tokens are left out, because they failed, and so are requests of other
    models and log types; `offset` and `limit` count the requests that are kept.

    model, log_type: the model and the log type of the requests that are kept, such as GPT-4 and
        Conversation log; null: any.
    """

    kind: Literal["burstgpt"]
    model: str | None = None
    log_type: str | None = None


@dataclass(frozen=True)
class Mooncake(Recorded):
    """JSON lines of Mooncake, with timestamp (milliseconds), input_length, output_length and
    hash_ids; user may say who sent a request.

    A hash id stands for 512 tokens of a prompt. Blocks with equal ids have equal random tokens, so
    that prefixes are shared as in the recorded service.

    sessions: whether a request continues an earlier one if its prompt begins with all whole blocks
        of the earlier prompt, at least two, and is longer than that prompt and its answer. It is
        then a turn of a session: its prompt is the earlier prompt, the answer that was generated,
        and the last of its own tokens. It arrives at its recorded time, or when the answer has
        ended, if that is later.
    think: with `sessions`, seconds between an answer and the next turn, in place of recorded times;
        null: recorded times.
    """

    kind: Literal["mooncake"]
    sessions: bool = False
    think: Waits | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.think is not None and not self.sessions:
            raise ValueError("think is given and sessions is false; set sessions: true")


@dataclass(frozen=True)
class ShareGPT(CutRequests):
    """The first question and answer of each conversation of a ShareGPT file: a JSON list of
    {"conversations": [{"from": "human", "value": text}, ...]}.

    Prompts are the questions; the length of an output is that of the answer, in tokens of the
    model.

    limit: how many conversations; null: all.
    shuffle: take the conversations in random order, by the seed.
    """

    kind: Literal["sharegpt"]
    file: str
    limit: int | None = None
    shuffle: bool = False
    arrivals: Arrivals = AT_ONCE

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("limit", self.limit, "null for the whole file")


@dataclass(frozen=True)
class Tokens(Requests):
    """A JSON list of {"prompt": [token ids], "max_tokens": count}; "n" is another name of
    "max_tokens", and "user" may say who sends it.
    """

    kind: Literal["tokens"]
    file: str
    limit: int | None = None
    arrivals: Arrivals = AT_ONCE

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("limit", self.limit, "null for the whole file")


@dataclass(frozen=True)
class RecordedRun(Requests):
    """A recording of an engine with times and prompts: each request with its prompt, its limit, its
    user, priority, class and prediction, at its time, and with the tokens that it got. Of a
    measured run each of these tokens takes its place in a decode step (`trace_decode_token_ids`),
    so the work is that of the recorded run, however it is scheduled.

    A request ends behind its recorded tokens, also if it was cancelled there or if the recording
    ends. A request without tokens is left out, and counted.

    limit: how many requests; null: all.
    time_scale: a factor of the seconds between arrivals; 0 is all at once.
    """

    kind: Literal["recorded"]
    file: str
    limit: int | None = None
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("limit", self.limit, "null for the whole file")
        _check_time_scale(self.time_scale)


@dataclass(frozen=True)
class Own(LimitedRequests):
    """Requests of a function of your own: `kind: mine.py:bursts`, or with parameters
    `kind: {name: mine.py:bursts, size: 20}`.

    The function is called as bursts(rng, **parameters), with a numpy.random.Generator that depends
    on the seed alone. It returns its requests: each is (prompt, output), (prompt, output, arrival),
    (prompt, output, arrival, user), an `Item`, or a mapping with the names of an `Item`. Equal
    generators must give equal requests.

    file: a text file; the function gets its text as the parameter `content`.
    arrivals: replace the arrivals that the function gives; null: the function's own, which are 0 if
        it gives none.
    """

    kind: str
    file: str | None = None
    arrivals: Arrivals | None = None


class Item(NamedTuple):
    """A request that a function of a user's own returns.

    prompt: its token ids, or the number of random ids.
    output: output tokens.
    arrival: seconds after the start of the run.
    user: who sends it; "": not known.
    priority: a lower number is more urgent.
    service_class: the name of its class; "": it is drawn, if the workload has `classes`.
    """

    prompt: int | Sequence[int]
    output: int
    arrival: float = 0.0
    user: str = ""
    priority: int = 0
    service_class: str = ""


Spec = (
    Prompts
    | Synthetic
    | Sessions
    | Trace
    | Tokens
    | ShareGPT
    | BurstGPT
    | Mooncake
    | RecordedRun
    | Own
)
HINTS = {
    Trace: AZURE,
    ShareGPT: SHAREGPT,
    BurstGPT: BURSTGPT,
    Mooncake: MOONCAKE,
    RecordedRun: f"To have one, {REMEDY}",
}
Encode = Callable[[str], Sequence[int]]


def has_text(spec: Spec) -> bool:
    """Whether a tokenizer makes the workload's tokens."""
    return isinstance(spec, Prompts | ShareGPT)


def has_sessions(spec: Spec) -> bool:
    """Whether requests are turns, which wait for answers."""
    return isinstance(spec, Sessions) or (isinstance(spec, Mooncake) and spec.sessions)


def limits_of(spec: Spec) -> Limits | None:
    """The limits that requests have apart from the lengths of their outputs; None: both are
    equal.
    """
    if isinstance(spec, Prompts):
        return None if spec.output is None else spec.max_tokens
    return None if isinstance(spec, Tokens | RecordedRun) else spec.max_tokens


def check(spec: Spec, content: str) -> None:
    """Check the workload's file, as far as no vocabulary is needed.

    Raises ValueError like `build`.
    """
    if isinstance(spec, Recorded):
        read_recorded(spec, content)
    elif isinstance(spec, Own):
        own_items(spec, content, 0, sys.maxsize)
    elif isinstance(spec, ShareGPT):
        conversations(spec.file, content)
    elif isinstance(spec, Prompts):
        read_prompts(spec, content)
    elif isinstance(spec, Tokens):
        read_tokens(spec, content, sys.maxsize)
    elif isinstance(spec, RecordedRun):
        _recorded_run(spec, content)


def build(spec: Spec, content: str, seed: int, vocab_size: int, encode: Encode) -> Workload:
    """The requests of `spec`.

    Args:
        content: the text of `spec.file`; "" for a synthetic workload, which has no file.
        seed: the seed of every random choice.
        vocab_size: random ids are drawn from [17, vocab_size); lower ids are special.
        encode: text to token ids, for `prompts` and `sharegpt`.

    Raises:
        ValueError: an empty workload, or a line of the file that cannot be read.
    """
    arrivals = getattr(spec, "arrivals", None)  # a trace has its own
    clients = arrivals.clients if isinstance(arrivals, ClosedLoop) else None
    streams = tuple(np.random.default_rng([seed, stream]) for stream in range(_NUM_STREAMS))
    if isinstance(spec, Own):
        workload = _own(spec, content, seed, vocab_size, streams)
    elif isinstance(spec, Recorded):
        workload = _recorded(spec, content, seed, vocab_size, streams)
    elif isinstance(spec, Sessions):
        workload = _sessions(spec, vocab_size, streams)
    elif isinstance(spec, RecordedRun):
        workload = _recorded_run(spec, content)
    else:
        workload = _with_equal_limits(spec, content, vocab_size, encode, streams)
    limits = limits_of(spec)
    if limits is not None:
        workload = _with_limits(workload, limits, streams[_LIMITS])
    if isinstance(spec, Mooncake) and spec.sessions:
        workload = _with_recorded_sessions(workload, spec, streams[_THINKING])
    if has_sessions(spec):
        workload = workload._replace(items=_with_history(workload.items))
    if spec.predicted is not None:
        workload = _with_predictions(workload, spec.predicted, streams[_PREDICTIONS])
    if spec.users is not None:
        workload = _with_users(workload, spec.users, streams[_USERS])
    if spec.classes is not None:
        workload = _with_classes(workload, spec.classes, streams[_CLASSES])
    return workload._replace(clients=clients)


def planned(spec: Spec, content: str, seed: int) -> Workload:
    """The requests of `spec`, as far as they are known without the model: texts have a token for
    each byte. Arguments and errors: see `build`.
    """
    # token ids of a file or of a user's function may be of any vocabulary
    vocab_size = sys.maxsize if isinstance(spec, Tokens | Own) else PLANNED_VOCABULARY
    return build(spec, content, seed, vocab_size, lambda text: text.encode())


def _with_users(workload: Workload, spec: Users | int, rng: np.random.Generator) -> Workload:
    """The workload with drawn users, one for each session."""
    sessions = _sessions_of(workload.items)
    users = draw_users(spec, sessions.count, rng)
    pairs = zip(workload.items, sessions.numbers, strict=True)
    items = tuple([item._replace(user=f"u{users[number]}") for item, number in pairs])
    return workload._replace(items=items)


def _with_classes(
    workload: Workload, classes: Sequence[ServiceClass], rng: np.random.Generator
) -> Workload:
    """The workload with drawn classes, one for each session, and what requests have of a class: the
    deadline and the priority.

    Raises:
        ValueError: a request has a class that is not among `classes`.
    """
    by_name = {service_class.name: service_class for service_class in classes}
    sessions = _sessions_of(workload.items)
    shares = [service_class.share for service_class in classes]
    choices = draw_choices(shares, sessions.count, rng)
    items = []
    for item, number in zip(workload.items, sessions.numbers, strict=True):
        name = item.service_class or classes[choices[number]].name
        if name not in by_name:
            raise ValueError(
                f"workload.classes has {', '.join(by_name)}, and {item.request_id} has the class "
                f"{name!r}; add it there"
            )
        items.append(_of_class(item, by_name[name]))
    return workload._replace(items=tuple(items))


def _of_class(item: WorkItem, service_class: ServiceClass) -> WorkItem:
    return item._replace(
        service_class=service_class.name,
        deadline=service_class.e2e,
        priority=item.priority or service_class.priority,
    )


class _SessionNumbers(NamedTuple):
    """numbers: the session of each item, from 0 in the order of first turns. An item that stands
    alone is a session of its own.
    """

    numbers: list[int]
    count: int


def _sessions_of(items: Sequence[WorkItem]) -> _SessionNumbers:
    """The sessions of the items, numbered in the order in which they begin."""
    names = [item.session or item.request_id for item in items]
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return _SessionNumbers([number_of[name] for name in names], len(number_of))


def _with_history(items: Sequence[WorkItem]) -> tuple[WorkItem, ...]:
    """The turns with the lengths of their conversations, which are known: an answer ends at its
    drawn length.
    """
    ends: dict[str, int] = {}  # request -> tokens of the conversation after its answer
    with_history = []
    for item in items:
        turn = item._replace(history=ends.get(item.follows, 0))
        ends[item.request_id] = turn.prompt_tokens + turn.longest_output
        with_history.append(turn)
    return tuple(with_history)


def _with_limits(workload: Workload, limits: Limits, rng: np.random.Generator) -> Workload:
    """The workload with these limits. An output ends at its length, or at its limit if that is
    less.
    """
    outputs = [item.max_tokens for item in workload.items]
    items = []
    num_cut = 0
    for item, limit in zip(workload.items, draw_limits(limits, outputs, rng), strict=True):
        ends_at = item.max_tokens if item.max_tokens < limit else None
        items.append(item._replace(max_tokens=limit, ends_at=ends_at))
        num_cut += item.max_tokens > limit
    clipped_outputs = workload.clipped_outputs + num_cut
    return workload._replace(items=tuple(items), clipped_outputs=clipped_outputs)


def _with_predictions(workload: Workload, spec: Predicted, rng: np.random.Generator) -> Workload:
    """The workload with a prediction of the length of each output."""
    outputs = [item.longest_output for item in workload.items]
    pairs = zip(workload.items, predicted_lengths(spec, outputs, rng), strict=True)
    items = [item._replace(predicted=tokens) for item, tokens in pairs]
    return workload._replace(items=tuple(items), predicted_error=spec.error)


def _own(
    spec: Own, content: str, seed: int, vocab_size: int, streams: Sequence[np.random.Generator]
) -> Workload:
    """The workload of a user's own function."""
    items = own_items(spec, content, seed, vocab_size)
    if spec.arrivals is not None:
        drawn_times = draw_arrivals(spec.arrivals, len(items), streams[_ARRIVALS])
        pairs = zip(items, drawn_times, strict=True)
        items = [item._replace(arrival=time) for item, time in pairs]
    # a prompt of given ids draws one id, which is not used
    lens = [item.prompt if isinstance(item.prompt, int) else 1 for item in items]
    random_ids = lazy_prompts(lens, vocab_size, streams[_TOKEN_IDS])
    prompts = [
        ids if isinstance(item.prompt, int) else tuple(item.prompt)
        for item, ids in zip(items, random_ids, strict=True)
    ]
    times = [item.arrival for item in items]
    outputs = [item.output for item in items]
    work_items = _items(times, prompts, outputs, [item.user for item in items])
    pairs = zip(work_items, items, strict=True)
    return Workload(
        tuple(
            [
                work_item._replace(priority=item.priority, service_class=item.service_class)
                for work_item, item in pairs
            ]
        )
    )


def own_items(spec: Own, content: str, seed: int, vocab_size: int) -> list[Item]:
    """What a user's own function returns, checked, in order of arrival.

    Raises:
        OwnError: the function raises an error.
        ValueError: there is no such function, it does not take the parameters, or it returns no
            requests. The message names the first request that is wrong.
    """
    place = f"workload.kind is {spec.kind!r}"
    options = {} if spec.file is None else {"content": content}
    function = own_function("workload.kind", spec.kind, 1, options)
    rng = np.random.default_rng([seed, _OWN_FUNCTION])
    with placed(f"{place}, which"):
        returned: Any = function(rng)
        if not isinstance(returned, Iterable):
            raise ValueError(
                f"{place}, which returned {returned!r:.80}; it must return its requests, each "
                "(prompt, output, arrival)"
            )
        entries = list(islice(returned, MOST_REQUESTS + 1))  # a generator runs now
    if len(entries) > MOST_REQUESTS:
        raise ValueError(
            f"{place}, which returned more than {MOST_REQUESTS:,} requests; let it end"
        )
    items = [
        _own_item(f"{place}, whose request {i}", entry, vocab_size)
        for i, entry in enumerate(entries)
    ]
    if not items:
        raise ValueError(f"{place}, which returned no requests; return one")
    return sorted(items, key=lambda item: item.arrival)


def _own_item(place: str, entry: Any, vocab_size: int) -> Item:
    """A request that a user's function returned. Raises ValueError, which begins with `place`."""
    try:
        item = Item(**entry) if isinstance(entry, Mapping) else Item(*entry)
    except TypeError:
        raise ValueError(
            f"{place} is {entry!r:.80}; write (prompt, output), (prompt, output, arrival) or "
            "(prompt, output, arrival, user), or a mapping with names of "
            f"{', '.join(Item._fields)}"
        ) from None
    prompt: Any = item.prompt
    tokens: tuple[int, ...] = ()
    if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str):
        tokens = tuple(np.asarray(prompt).tolist())
    length = int(prompt) if isinstance(prompt, Integral) else 0
    if not tokens and length < 1:
        raise ValueError(
            f"{place} has the prompt {prompt!r:.60}; it must be token ids, or their number, at "
            "least 1"
        )
    outside = [t for t in tokens if type(t) is not int or not 0 <= t < vocab_size]
    if outside:
        raise ValueError(f"{place} has token id {outside[0]!r}; it is outside [0, {vocab_size})")
    if not isinstance(item.output, Integral) or item.output < 1:
        raise ValueError(
            f"{place} has output {item.output!r:.60}; it must be an integer, at least 1"
        )
    if not isinstance(item.arrival, Real) or not 0 <= item.arrival < math.inf:
        raise ValueError(
            f"{place} has arrival {item.arrival!r:.60}; it must be seconds, at least 0, and finite"
        )
    if not isinstance(item.user, str):
        raise ValueError(f"{place} has user {item.user!r:.60}; it must be a text")
    if not isinstance(item.priority, Integral):
        raise ValueError(f"{place} has priority {item.priority!r:.60}; it must be an integer")
    if not isinstance(item.service_class, str):
        raise ValueError(f"{place} has service_class {item.service_class!r:.60}; it must be a text")
    return Item(
        tokens or length,
        int(item.output),
        float(item.arrival),
        item.user,
        int(item.priority),
        item.service_class,
    )


def _recorded(
    spec: Recorded,
    content: str,
    seed: int,
    vocab_size: int,
    streams: Sequence[np.random.Generator],
) -> Workload:
    """The workload of a recorded service."""
    recorded = read_recorded(spec, content, streams[_PART])
    prompt_lens, clipped_prompts = clip(recorded.prompt_lens, 1, spec.max_prompt_tokens)
    output_lens, clipped_outputs = clip(recorded.output_lens, 1, spec.max_output_tokens)
    prompts: Sequence[Sequence[int]]
    if isinstance(spec, Mooncake):
        _check_vocabulary(vocab_size)
        id_range = (FIRST_ORDINARY_TOKEN, vocab_size)
        count = len(prompt_lens) // spec.rounds  # requests of a round; i // count is the round
        prompts = [
            BlockIds(blocks, length, id_range, (seed, _TOKEN_IDS, i // count))
            for i, (blocks, length) in enumerate(zip(recorded.blocks, prompt_lens, strict=True))
        ]
    else:
        prompts = lazy_prompts(prompt_lens, vocab_size, streams[_TOKEN_IDS])
    items = _items(recorded.times, prompts, output_lens, recorded.users)
    return Workload(items, clipped_prompts, clipped_outputs)


class _Place(NamedTuple):
    """Which turn of which session a request is."""

    session: int
    turn: int
    is_tool: bool  # a tool sends it, not the user


def _sessions(spec: Sessions, vocab_size: int, streams: Sequence[np.random.Generator]) -> Workload:
    """The turns of conversations, session by session. Histories are not counted yet."""
    places = _places(spec, streams)
    prompt_lens, clipped_prompts = _new_tokens(spec, places, streams)
    output_lens, clipped_outputs = draw_lengths(spec.output, len(places), streams[_OUTPUT_LENGTHS])
    times = draw_arrivals(spec.arrivals, spec.count, streams[_ARRIVALS])
    prompts: list[Sequence[int]] = [*lazy_prompts(prompt_lens, vocab_size, streams[_TOKEN_IDS])]
    (prefix,) = random_prompts([spec.shared_prefix], vocab_size, streams[_PREFIXES])
    if prefix:
        pairs = zip(places, prompts, strict=True)
        prompts = [ids if place.turn else prefix + tuple(ids) for place, ids in pairs]
    items = _items([times[place.session] for place in places], prompts, output_lens)
    turns = _with_waits(_with_places(items, places), places, spec, streams)
    return Workload(turns, clipped_prompts, clipped_outputs)


def _new_tokens(
    spec: Sessions, places: Sequence[_Place], streams: Sequence[np.random.Generator]
) -> tuple[list[int], int]:
    """The number of new tokens of each turn, and how many of these numbers a limit has changed."""
    lens, num_clipped = draw_lengths(spec.prompt, len(places), streams[_PROMPT_LENGTHS])
    if spec.tools is None:
        return lens, num_clipped
    results, _ = draw_lengths(spec.tools.result, len(places), streams[_TOOL_RESULTS])
    triples = zip(places, lens, results, strict=True)
    return [result if place.is_tool else tokens for place, tokens, result in triples], num_clipped


def _places(spec: Sessions, streams: Sequence[np.random.Generator]) -> list[_Place]:
    lengths, _ = draw_lengths(spec.turns, spec.count, streams[_TURNS])
    draws = streams[_TOOLS].random(sum(lengths)).tolist()
    share = spec.tools.share if spec.tools else 0.0
    turns = [(session, turn) for session, length in enumerate(lengths) for turn in range(length)]
    return [
        _Place(session, turn, turn > 0 and draw < share)
        for (session, turn), draw in zip(turns, draws, strict=True)
    ]


def _with_places(items: Sequence[WorkItem], places: Sequence[_Place]) -> list[WorkItem]:
    """The items, which are in the order of turns, with their sessions."""
    turns = []
    for i, place in enumerate(places):
        follows = items[i - 1].request_id if place.turn else ""
        session = f"s{place.session:05d}"
        turns.append(items[i]._replace(session=session, turn=place.turn, follows=follows))
    return turns


def _with_waits(
    items: Sequence[WorkItem],
    places: Sequence[_Place],
    spec: Sessions,
    streams: Sequence[np.random.Generator],
) -> tuple[WorkItem, ...]:
    """The turns with the seconds before them, in which the user thinks or a tool runs."""
    think_s = draw_waits(spec.think, len(items), streams[_THINKING]) if spec.think else []
    tool_s = (
        draw_waits(spec.tools.seconds, len(items), streams[_TOOL_SECONDS]) if spec.tools else []
    )
    turns = []
    for i, (item, place) in enumerate(zip(items, places, strict=True)):
        if place.is_tool:
            turns.append(item._replace(tool_s=tool_s[i]))
        elif place.turn and think_s:
            turns.append(item._replace(think_s=think_s[i]))
        else:
            turns.append(item)
    return tuple(turns)


def _with_recorded_sessions(
    workload: Workload, spec: Mooncake, rng: np.random.Generator
) -> Workload:
    """The workload whose requests are turns where one continues another one; see `Mooncake`."""
    waits = draw_waits(spec.think, len(workload.items), rng) if spec.think else []
    items: list[WorkItem] = []
    num_sessions = 0
    for i, earlier_index in enumerate(_earlier_requests(workload.items)):
        item = workload.items[i]
        if earlier_index is None:
            items.append(item._replace(session=f"s{num_sessions:05d}"))
            num_sessions += 1
            continue
        earlier = items[earlier_index]
        history = _end_of_answer(workload.items[earlier_index])
        items.append(
            item._replace(
                prompt_token_ids=_blocks_of(item).after(history),
                arrival=earlier.arrival if waits else item.arrival,
                session=earlier.session,
                turn=earlier.turn + 1,
                follows=earlier.request_id,
                think_s=waits[i] if waits else 0.0,
            )
        )
    return workload._replace(items=tuple(items))


def _earlier_requests(items: Sequence[WorkItem]) -> list[int | None]:
    """The index of the request that each request of a Mooncake file continues; None: it begins a
    session. Each request is continued at most once.
    """
    nodes: dict[tuple[Any, int], int] = {}  # (node of the blocks before, block) -> node
    # node -> the last request whose whole blocks end there, and that is not continued yet
    last_request: dict[int, int] = {}
    earlier_indices: list[int | None] = []
    for i, item in enumerate(items):
        prompt = _blocks_of(item)
        node: Any = prompt.seed  # rounds have other tokens
        earlier_node: int | None = None
        for depth, block in enumerate(prompt.whole_blocks, 1):
            node = nodes.setdefault((node, block), len(nodes))
            if depth < FEWEST_SHARED_BLOCKS or node not in last_request:
                continue
            earlier = items[last_request[node]]
            if earlier.user == item.user and _end_of_answer(earlier) < len(prompt):
                earlier_node = node
        earlier_indices.append(None if earlier_node is None else last_request.pop(earlier_node))
        if len(prompt.whole_blocks) >= FEWEST_SHARED_BLOCKS:
            last_request[node] = i
    return earlier_indices


def _blocks_of(item: WorkItem) -> BlockIds:
    assert isinstance(item.prompt_token_ids, BlockIds), "prompts of Mooncake have blocks"
    return item.prompt_token_ids


def _end_of_answer(item: WorkItem) -> int:
    """Tokens of a recorded prompt and its answer."""
    return len(item.prompt_token_ids) + item.longest_output


def _with_equal_limits(
    spec: Prompts | Synthetic | Tokens | ShareGPT,
    content: str,
    vocab_size: int,
    encode: Encode,
    streams: Sequence[np.random.Generator],
) -> Workload:
    """The workload without clients, whose limits are the lengths of its outputs; see `build`."""
    if isinstance(spec, Synthetic):
        return _synthetic(spec, vocab_size, streams)
    clipped_prompts = 0
    clipped_outputs = 0
    users: Sequence[str] = ()
    if isinstance(spec, Prompts):
        texts = read_prompts(spec, content, streams[_ORDER])
        prompts = [tuple(encode(text)) for text in texts]
        output_lens = [spec.max_tokens] * len(prompts)
        if spec.output is not None:
            output_rng = streams[_OUTPUT_LENGTHS]
            output_lens, clipped_outputs = draw_lengths(spec.output, len(prompts), output_rng)
    elif isinstance(spec, ShareGPT):
        questions, answer_lens = _encoded_conversations(spec, content, encode, streams[_ORDER])
        prompt_lens, clipped_prompts = clip(list(map(len, questions)), 1, spec.max_prompt_tokens)
        prompts = [ids[:length] for ids, length in zip(questions, prompt_lens, strict=True)]
        output_lens, clipped_outputs = clip(answer_lens, 1, spec.max_output_tokens)
    else:
        prompts, output_lens, users = read_tokens(spec, content, vocab_size)
    times = draw_arrivals(spec.arrivals, len(prompts), streams[_ARRIVALS])
    items = _items(times, prompts, output_lens, users)
    return Workload(items, clipped_prompts, clipped_outputs)


def _encoded_conversations(
    spec: ShareGPT, content: str, encode: Encode, rng: np.random.Generator
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The questions' token ids, and the answers' numbers of tokens, of the conversations that are
    taken.
    """
    texts = conversations(spec.file, content)
    order = rng.permutation(len(texts)) if spec.shuffle else range(len(texts))
    chosen = [texts[i] for i in order[: spec.limit]]
    questions = [tuple(encode(question)) for question, _ in chosen]
    return questions, [len(encode(answer)) for _, answer in chosen]


def _synthetic(
    spec: Synthetic, vocab_size: int, streams: Sequence[np.random.Generator]
) -> Workload:
    length_rng, token_rng, arrival_rng, output_rng, prefix_rng, choice_rng, *_ = streams
    prompt_lens, clipped_prompts = draw_lengths(spec.prompt, spec.count, length_rng)
    output_lens, clipped_outputs = draw_lengths(spec.output, spec.count, output_rng)
    times = draw_arrivals(spec.arrivals, spec.count, arrival_rng)
    prefixes = random_prompts([spec.shared_prefix] * spec.prefixes, vocab_size, prefix_rng)
    drawn_prefixes = [prefixes[i] for i in choice_rng.integers(0, spec.prefixes, spec.count)]
    tails = random_prompts(prompt_lens, vocab_size, token_rng)
    prompts = list(map(operator.add, drawn_prefixes, tails))
    return Workload(_items(times, prompts, output_lens), clipped_prompts, clipped_outputs)


def random_prompts(
    lens: Sequence[int], vocab_size: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Prompts of these lengths, with random ids.

    Raises:
        ValueError: the vocabulary has no ordinary tokens.
    """
    return [tuple(prompt) for prompt in lazy_prompts(lens, vocab_size, rng)]


class RandomIds(DrawnIds):
    """Random token ids that are drawn when they are read: the ids of a day of requests would fill
    the memory.
    """

    __slots__ = ("_drawn_from", "_increment", "_vocab_size")

    def __init__(self, rng: np.random.Generator, length: int, vocab_size: int) -> None:
        """Keep the state of `rng`, which uses PCG64. The ids are those that it would draw next; it
        is not advanced.
        """
        state = rng.bit_generator.state
        self._drawn_from = state["state"]["state"], state["has_uint32"], state["uinteger"]
        self._increment = sys.intern(str(state["state"]["inc"]))
        self._length = length
        self._vocab_size = vocab_size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        bits: Any = np.random.PCG64()
        state, has_uint32, uinteger = self._drawn_from
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": int(self._increment)},
            "has_uint32": has_uint32,
            "uinteger": uinteger,
        }
        ids = np.random.Generator(bits).integers(
            FIRST_ORDINARY_TOKEN, self._vocab_size, size=self._length
        )
        return ids if dtype is None else ids.astype(dtype)


def lazy_prompts(lens: Sequence[int], vocab_size: int, rng: np.random.Generator) -> list[RandomIds]:
    """The prompts of `random_prompts`, whose ids are drawn when they are read."""
    _check_vocabulary(vocab_size)
    prompts = []
    for length in lens:
        prompts.append(RandomIds(rng, length, vocab_size))
        # advance the generator beyond these ids
        rng.integers(FIRST_ORDINARY_TOKEN, vocab_size, size=length)
    return prompts


def _check_vocabulary(vocab_size: int) -> None:
    if vocab_size <= FIRST_ORDINARY_TOKEN:
        raise ValueError(
            f"the vocabulary has {vocab_size} tokens; random prompts need more than "
            f"{FIRST_ORDINARY_TOKEN}, because lower ids are special"
        )


def read_prompts(spec: Prompts, content: str, rng: np.random.Generator | None = None) -> list[str]:
    """The texts of a prompts file; blank lines are skipped. rng: draws the order, with `shuffle`."""
    texts = paragraphs(content) if spec.split == "paragraph" else lines(content)
    if not texts:
        raise ValueError(f"{spec.file} holds no prompts; write one a {spec.split}")
    count = len(texts) if spec.count is None else spec.count
    if count > len(texts) and not spec.cycle:
        raise ValueError(
            f"workload.count is {count}, but {spec.file} has {len(texts)} prompts; set "
            "workload.cycle: true"
        )
    if not (spec.shuffle and rng):
        return [texts[i % len(texts)] for i in range(count)]
    orders = [rng.permutation(len(texts)) for _ in range(-(-count // len(texts)))]
    return [texts[i] for i in np.concatenate(orders)[:count]]


class RecordedLoad(NamedTuple):
    """The requests of a recorded service, in order of arrival.

    times: seconds after the first request that is taken.
    users: who sent each request; "": not known.
    blocks: the ids of the blocks of each prompt; see `TraceRequest`.
    """

    times: list[float]
    prompt_lens: list[int]
    output_lens: list[int]
    users: list[str]
    blocks: list[tuple[int, ...]]


def read_recorded(
    spec: Recorded, content: str, rng: np.random.Generator | None = None
) -> RecordedLoad:
    """The requests that a workload takes of a recorded service, in all of its rounds.

    Args:
        rng: draws the start of the part that is taken; None: all requests are taken, and the size
            of the part is checked.

    Raises:
        ValueError: a line cannot be read, no request is left, the part is longer than what is
            recorded, or there is no gap between rounds.
    """
    rows = _recorded_rows(spec, content)
    if not rows:
        raise ValueError(
            f"{spec.file} has no requests after workload.offset {spec.offset} (limit {spec.limit})"
        )
    rows = _drawn_part(spec, rows, rng)
    seconds = rows[-1].seconds - rows[0].seconds
    scale = spec.time_scale
    if spec.rate is not None:
        if not seconds:
            raise ValueError(
                f"workload.rate is {spec.rate}, and the {len(rows)} requests taken of {spec.file} "
                "arrive at one time, so they have no rate; take more of them, or leave it out"
            )
        scale = (len(rows) - 1) / seconds / spec.rate
    times = [(row.seconds - rows[0].seconds) * scale for row in rows]
    # the time until the first request of the next round
    period = times[-1] * len(times) / max(1, len(times) - 1)
    if spec.rounds > 1 and scale and not period:
        raise ValueError(
            f"workload.rounds is {spec.rounds}, and the kept requests of {spec.file} all arrive at "
            "one time, so no gap between two rounds is known; set rounds: 1, or raise "
            "workload.limit"
        )
    if spec.rounds > 1:
        times = [time + i * period for i in range(spec.rounds) for time in times]
    return RecordedLoad(
        times,
        [row.prompt_tokens for row in rows] * spec.rounds,
        [row.output_tokens for row in rows] * spec.rounds,
        [row.user for row in rows] * spec.rounds,
        [row.blocks for row in rows] * spec.rounds,
    )


def _drawn_part(
    spec: Recorded, rows: Sequence[TraceRequest], rng: np.random.Generator | None
) -> Sequence[TraceRequest]:
    """The requests of the part (`window` or `num_requests`), whose start is drawn evenly. Arguments
    and errors: see `read_recorded`.
    """
    count = spec.num_requests
    if count is not None and count > len(rows):
        raise ValueError(
            f"workload.num_requests is {count}, and {len(rows)} requests of {spec.file} are there "
            "to take; lower it, or leave it out"
        )
    if rng is not None and count is not None:
        first = int(rng.integers(0, len(rows) - count, endpoint=True))
        return rows[first : first + count]
    if spec.window is None:
        return rows
    start = rows[0].seconds
    longest = rows[-1].seconds - start
    if spec.window > longest:
        raise ValueError(
            f"workload.window is {spec.window} s, and the requests of {spec.file} arrive in "
            f"{longest:g} s; lower it, or leave it out"
        )
    if rng is None:
        return rows
    start += rng.uniform(0.0, longest - spec.window)
    part = [row for row in rows if start <= row.seconds <= start + spec.window]
    if not part:
        raise ValueError(
            f"no request of {spec.file} arrives in the workload.window of {spec.window} s that "
            f"begins {start - rows[0].seconds:g} s after the first; raise it, or set num_requests "
            "in its place"
        )
    return part


def _recorded_rows(spec: Recorded, content: str) -> tuple[TraceRequest, ...]:
    """The requests from `offset` on, at most `limit`, by time."""
    filters = (spec.model, spec.log_type) if isinstance(spec, BurstGPT) else ()
    return _parsed_rows(type(spec), spec.file, content, spec.offset, spec.limit, *filters)


@lru_cache(maxsize=1)  # all points and repeats of a sweep read the same file
def _parsed_rows(
    kind: type[Recorded], file: str, content: str, offset: int, limit: int | None, *filters: Any
) -> tuple[TraceRequest, ...]:
    """See `_recorded_rows`. filters: the model and the log type, for BurstGPT."""
    if kind is Trace:
        rows = trace_rows(file, content, offset, limit, AZURE)
        return tuple(
            TraceRequest(
                (row.at - rows[0].at).total_seconds(),
                row.prompt_tokens,
                row.output_tokens,
                user=row.user,
            )
            for row in rows
        )
    if kind is BurstGPT:
        arrived = field_files.burst_rows(file, content, *filters)
    else:
        arrived = field_files.mooncake_rows(file, content)
    end = None if limit is None else offset + limit
    return tuple(sorted(arrived[offset:end], key=lambda row: row.seconds))


def read_tokens(
    spec: Tokens, content: str, vocab_size: int
) -> tuple[list[tuple[int, ...]], list[int], list[str]]:
    """Prompts, output lengths and users of a JSON list of requests."""
    try:
        entries = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"{spec.file} is not JSON: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f'{spec.file} must hold a list of {{"prompt": [ids], "max_tokens": count}} with one '
            "entry or more"
        )
    prompts = []
    outputs = []
    users = []
    for index, entry in enumerate(entries[: spec.limit]):
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        output = entry.get("max_tokens", entry.get("n")) if isinstance(entry, dict) else None
        if not isinstance(prompt, list) or not prompt or type(output) is not int or output < 1:
            raise ValueError(
                f'{spec.file}, entry {index}: needs "prompt", a list of token ids, and '
                '"max_tokens" >= 1'
            )
        outside = [t for t in prompt if type(t) is not int or not 0 <= t < vocab_size]
        if outside:
            raise ValueError(
                f"{spec.file}, entry {index}: token id {outside[0]!r} is outside [0, {vocab_size})"
            )
        user = entry.get("user", "")
        if not isinstance(user, str):
            raise ValueError(f"{spec.file}, entry {index}: user is {user!r:.60}; it must be a text")
        prompts.append(tuple(prompt))
        outputs.append(output)
        users.append(user)
    return prompts, outputs, users


def _recorded_run(spec: RecordedRun, content: str) -> Workload:
    """The workload of a recording. The engine checks its tokens: a model may sample ids beyond the
    vocabulary of its tokenizer.

    Raises:
        ValueError: as `recorded_requests`, or no request is left.
    """
    recorded = recorded_requests(spec.file, content)[: spec.limit]
    requests = [request for request in recorded if request.output]
    if not requests:
        raise ValueError(f"{spec.file} has no request that got a token; {REMEDY}")
    first = requests[0].seconds
    items = _items(
        [(request.seconds - first) * spec.time_scale for request in requests],
        [request.prompt for request in requests],
        [request.request["max_tokens"] for request in requests],
        [request.request["user"] for request in requests],
    )
    pairs = zip(items, requests, strict=True)
    replayed = tuple([_with_recorded_output(item, request) for item, request in pairs])
    return Workload(replayed, left_out=len(recorded) - len(requests))


def _with_recorded_output(item: WorkItem, recorded: RecordedRequest) -> WorkItem:
    request = recorded.request
    length = len(recorded.output)
    return item._replace(
        ends_at=length if length < item.max_tokens else None,
        predicted=request.get("predicted"),
        priority=request["priority"],
        service_class=request.get("service_class", ""),
        deadline=request.get("deadline"),
        output_token_ids=recorded.output,
    )


def _items(
    times: Sequence[float],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[int],
    users: Sequence[str] = (),
) -> tuple[WorkItem, ...]:
    """The requests with these columns. users: who sends each request; (): not known."""
    rows = zip(times, prompts, outputs, users or [""] * len(times), strict=True)
    return tuple(
        WorkItem(f"r{i:05d}", time, prompt, count, user=user)
        for i, (time, prompt, count, user) in enumerate(rows)
    )


def _check_time_scale(factor: float) -> None:
    if not 0 <= factor < math.inf:
        raise ValueError(f"time_scale is {factor!r}; it must be at least 0, and finite")


def _check_shared_prefix(tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"shared_prefix is {tokens!r}; it must be at least 0 tokens")


def _at_least_one(name: str, value: int | None, none: str = "") -> None:
    if value is not None and value < 1:
        raise ValueError(
            f"{name} is {value!r}; it must be at least 1" + (f", or {none}" if none else "")
        )
