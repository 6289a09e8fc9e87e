"""Answers that survive their engine: the bytes of an undisturbed one, wherever engines are lost.

Engines in threads stand for replicas. A lost one is a `Lost` in the place of its next messages.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pagedjax.server import continuation, exchange, worker
from pagedjax.server.app import Options, create_app, identity
from pagedjax.server.continuation import TAKEN, Origin
from pagedjax.server.errors import ApiError
from pagedjax.server.relay import MAX_ENDED, Ask, Avoided, Keeper, Lost, Unanswered
from tests.engine.runs import check_idle
from tests.server.support import GREEDY, server_llm

pytestmark = pytest.mark.optimised  # bits are compared

ORIGIN = Origin("0123456789abcdef0123456789abcdef", 1_700_000_000, 77)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "now"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
DRAWN = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# name -> (path, body)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy stream": (COMPLETIONS, {**GREEDY, "prompt": "abc", "max_tokens": 8, **STREAM}),
    "drawn stream": (COMPLETIONS, {**DRAWN, "prompt": "abc", **STREAM}),
    "several prompts without a seed": (COMPLETIONS, {**DRAWN, "prompt": ["ab", "ab"], **STREAM}),
    "branches with log-probabilities": (
        COMPLETIONS,
        {**DRAWN, "prompt": "abc", "n": 3, "logprobs": 2, **STREAM},
    ),
    "penalties": (
        COMPLETIONS,
        {**DRAWN, "prompt": "abab", "frequency_penalty": 1.5, "repetition_penalty": 1.3, **STREAM},
    ),
    "given tokens": (
        COMPLETIONS,
        {"prompt": "abc", "trace_decode_token_ids": [70, 9, 250, 1, 2, 3], "logprobs": 1, **STREAM},
    ),
    "chat with token ids": (
        CHAT,
        {**DRAWN, "messages": HI, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        | STREAM,
    ),
    "continuous usage": (
        CHAT,
        {**DRAWN, "messages": HI, "stream": True}
        | {"stream_options": {"continuous_usage_stats": True}},
    ),
    "a form": (
        COMPLETIONS,
        {**DRAWN, "prompt": "a", "max_tokens": 20, "ignore_eos": False, **STREAM}
        | {"structured_outputs": {"regex": "(ab|cd){3}e"}},
    ),
    "a call of a tool": (
        CHAT,
        {**DRAWN, "messages": HI, "max_tokens": 200, "ignore_eos": False, **STREAM}
        | {"tools": [WEATHER], "tool_choice": "required"},
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 8, "temperature": 1.0, "stream": True},
    ),
    "whole answer": (CHAT, {**DRAWN, "messages": HI, "n": 2, "logprobs": True}),
    "long whole answer": (COMPLETIONS, {**DRAWN, "prompt": "abc", "max_tokens": 70}),
    "best of": (COMPLETIONS, {**DRAWN, "prompt": "abc", "n": 1, "best_of": 3}),
    "prompt log-probabilities": (
        COMPLETIONS,
        {**GREEDY, "prompt": "abcdef", "max_tokens": 4, "echo": True, "logprobs": 1},
    ),
    "prompt log-probabilities of a chat": (
        CHAT,
        {**DRAWN, "messages": HI, "prompt_logprobs": 1, "max_tokens": 4},
    ),
    "beams": (COMPLETIONS, {"prompt": "abc", "max_tokens": 4, "n": 2, "use_beam_search": True}),
    "embedding": ("/v1/embeddings", {"input": "abc"}),
}


class Answer(NamedTuple):
    """What a client got. attempts: engines that were asked."""

    status: int
    body: bytes
    attempts: int
    origins: list[Origin]


class Engines:
    """Applications of two engines, which are asked in turn."""

    def __init__(self, llms: Sequence[Any], **options: Any) -> None:
        self.apps = [create_app(llm, Options("tiny", **options)) for llm in llms]
        self.failed: list[Any] = []

    async def __aenter__(self) -> Engines:
        for app in self.apps:
            app.state.worker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for app in self.apps:
            await asyncio.to_thread(app.state.worker.stop)
            assert app in self.failed or app.state.worker.error is None

    async def ask(
        self, path: str, body: dict[str, Any], origin: Origin, engine: int, identity: str = "tiny"
    ) -> AsyncIterator[list[Any]]:
        scope = {**exchange.get(path), "method": "POST"}
        scope["headers"] = [(b"content-type", b"application/json")]
        app = self.apps[engine % len(self.apps)]
        yield [{"type": TAKEN, "engine": f"engine {engine}", "identity": identity}]
        answer = exchange.answer_messages(app, scope, json.dumps(body).encode(), origin)
        async with aclosing(answer):
            async for messages in answer:
                for message in messages:  # one at a time, so that each is a place to be lost
                    yield [message]

    async def answer(
        self,
        keeper: Keeper,
        case: tuple[str, dict[str, Any]],
        lost_after: Sequence[int] = (),
        reason: str = "ended",
        forget: bool = True,
        identities: Sequence[str] = (),
    ) -> Answer:
        """The answer to a case.

        Args:
            lost_after: messages of the first, the second ... engine, after which it is lost.
            forget: the engines forget cached blocks before.
            identities: of the first, the second ... engine; the others have the same.
        """
        for app in self.apps if forget else ():
            await app.state.worker.change(lambda engine: engine.reset_prefix_cache())
        origins: list[Origin] = []
        sent: list[Any] = []

        async def ask(origin: Origin, avoided: Avoided) -> AsyncIterator[list[Any]]:
            engine = len(origins)
            origins.append(origin)
            remaining = lost_after[engine] if engine < len(lost_after) else None
            identity = identities[engine] if engine < len(identities) else "tiny"
            async with aclosing(self.ask(*case, origin, engine, identity)) as answer:
                async for messages in answer:
                    if remaining == 0:
                        raise Lost(reason)
                    yield messages
                    remaining = None if remaining is None else remaining - 1

        async def send(message: Any) -> None:
            sent.append(message)

        await keeper.relay(ask, send, ORIGIN)
        start, *bodies = sent
        assert start["type"] == "http.response.start"
        assert [message.get("more_body", False) for message in bodies][-1] is False
        body = b"".join(message["body"] for message in bodies)
        return Answer(start["status"], body, len(origins), origins)


@pytest.fixture(scope="module")
def llms(tiny_long) -> list[Any]:
    options = {"max_num_batched_tokens": 32, "token_buckets": (32,), "num_blocks": 512}
    return [server_llm(tiny_long, batch_invariant=True, **options) for _ in range(2)]


def run(llms: Sequence[Any], test: Callable[[Engines], Awaitable[None]], **options: Any) -> None:
    async def body() -> None:
        async with Engines(llms, **options) as engines:
            await test(engines)

    asyncio.run(body())
    for llm in llms:
        check_idle(llm.engine)


def by_choice(answer: Answer) -> list[bytes]:
    """The events of a stream, those of each choice together: which of several choices has its next
    token first is a matter of steps.
    """

    def choice(event: bytes) -> int:
        if b'"choices":[{' not in event:
            return 1 << 30
        return json.loads(event.removeprefix(b"data: "))["choices"][0]["index"]

    return sorted(answer.body.split(b"\n\n"), key=choice)


# a stream loses its engine after each of its tokens, so a long one takes seconds; log-probabilities
# of prompts have a program of their own
LONG = (
    "a call of a tool",
    "greedy stream",
    "long whole answer",
    "prompt log-probabilities",
    "prompt log-probabilities of a chat",
)


@pytest.mark.default_cases(*[name for name in CASES if name not in LONG])
@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_the_bytes_of_an_undisturbed_one_wherever_its_engine_is_lost(
    name, llms, monkeypatch
):
    for module in (continuation, worker):  # each token is a place to be lost
        monkeypatch.setattr(module, "SECONDS_TOGETHER", 0.0)

    async def lose_everywhere(engines: Engines) -> None:
        keeper = Keeper("tiny")
        expected = await engines.answer(keeper, CASES[name])
        assert expected.status == 200, expected.body
        assert expected.attempts == 1
        lost_after = 1
        while True:
            answer = await engines.answer(keeper, CASES[name], [lost_after])
            assert by_choice(answer) == by_choice(expected), f"lost after {lost_after} messages"
            if answer.attempts == 1:  # the answer was complete before
                break
            lost_after += 1 + lost_after // 2
        assert lost_after > 1
        assert keeper.num_bytes == 0
        assert not keeper.relays

    run(llms, lose_everywhere)


def test_tokens_of_a_lost_engine_are_not_generated_again(llms):
    case = CASES["drawn stream"]

    async def lose_twice(engines: Engines) -> None:
        expected = await engines.answer(Keeper("tiny"), case)
        answer = await engines.answer(Keeper("tiny"), case, [9, 9])
        assert answer.body == expected.body
        known_tokens = [len(origin.tokens) for origin in answer.origins]
        assert 0 == known_tokens[0] < known_tokens[1] < known_tokens[2]

    run(llms, lose_twice)


def test_usage_has_the_cached_tokens_of_the_first_engine(llms):
    case = CASES["chat with token ids"]

    async def lose(engines: Engines) -> None:
        await engines.answer(Keeper("tiny"), case)
        expected = await engines.answer(Keeper("tiny"), case, forget=False)
        assert b'"cached_tokens":16' in expected.body
        answer = await engines.answer(Keeper("tiny"), case, [9], forget=False)
        assert answer.attempts == 2
        assert answer.body == expected.body

    run(llms, lose)


def test_a_request_that_ends_every_engine_is_stopped_after_two(llms, caplog):
    async def lose(engines: Engines) -> None:
        keeper = Keeper("tiny")
        with pytest.raises(ApiError, match="2 engines ended while they computed this request"):
            await engines.answer(keeper, CASES["drawn stream"], [1] * 9)
        # in a stream that has begun, an event says so
        answer = await engines.answer(keeper, CASES["drawn stream"], [9, 9, 1, 1, 1, 1])
        *_, error, end, _ = answer.body.decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_stopped"
        assert end == "data: [DONE]"
        assert 'code="request_stopped",model_name="tiny"} 2.0' in keeper.page()
        # a replica that is to stop is no suspicion
        answer = await engines.answer(keeper, CASES["greedy stream"], [1] * 5, "left")
        assert answer.attempts == 6
        assert 'reason="left"} 5.0' in keeper.page()

    run(llms, lose)
    assert "ended the engines engine 0, engine 1 without a new token; it is stopped" in caplog.text


@pytest.mark.parametrize("messages", [1, 9])
def test_a_lost_request_that_no_engine_takes_in_time_is_answered_503(llms, messages):
    path, body = CASES["drawn stream"]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def lose(engines: Engines) -> None:
        async def ask(origin: Origin, avoided: Avoided) -> AsyncIterator[list[Any]]:
            if origin.taken:
                raise Unanswered("no replica was ready within 5 s", "no_replica", 10)
            remaining = messages
            async with aclosing(engines.ask(path, body, origin, 0)) as answer:
                async for batch in answer:
                    if remaining == 0:
                        raise Lost("ended")
                    yield batch
                    remaining -= 1

        keeper = Keeper("tiny")
        if messages == 1:
            with pytest.raises(ApiError, match="no replica was ready within 5 s"):
                await keeper.relay(ask, send, ORIGIN)
            assert not sent
        else:
            await keeper.relay(ask, send, ORIGIN)
            *_, event, end, _ = b"".join(part["body"] for part in sent[1:]).split(b"\n\n")
            assert b'"code":"no_replica"' in event
            assert end == b"data: [DONE]"
        assert 'requests_not_continued_total{code="no_replica"' in keeper.page()

    run(llms, lose)


def test_an_engine_of_another_identity_goes_on_only_before_the_answer_has_begun(llms):
    case = CASES["drawn stream"]

    async def refuse(engines: Engines) -> None:
        keeper = Keeper("tiny")
        expected = await engines.answer(keeper, case)
        answer = await engines.answer(keeper, case, [9], identities=["tiny", "other", "other"])
        assert answer.body == expected.body
        assert answer.attempts == 4
        assert 'reason="ended"} 1.0' in keeper.page()  # those that refused did not go on
        answer = await engines.answer(keeper, case, [1], identities=["other"])
        assert (answer.body, answer.attempts) == (expected.body, 2)

    run(llms, refuse)


def test_the_template_the_tokenizer_and_the_parser_are_a_part_of_an_identity(llms):
    llm = llms[0]
    plain = identity(llm, Options("a"))
    assert plain == identity(llm, Options("b", api_key="secret", max_queue=3))
    assert plain != identity(llm, Options("a", tool_call_parser="hermes"))
    tokenizer = llm.get_tokenizer()
    for change in ({"chat_template": "{{ messages }}"}, {"eos_token_ids": (5,)}):
        changed = SimpleNamespace(
            engine=llm.engine, get_tokenizer=lambda change=change: replace(tokenizer, **change)
        )
        assert plain != identity(changed, Options("a"))


def test_tokens_travel_with_bytes_and_those_of_a_whole_answer_do_not_wait_long(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(continuation.time, "monotonic", lambda: clock[0])
    sent: list[int] = []
    call = continuation.Call(ORIGIN, lambda message: sent.append(len(message["tokens"])))
    token = continuation.Delta(0, 0, "a", 7, None, None, None, 0)
    for _ in range(continuation.TOKENS_TOGETHER + 1):
        call.note(token)
    assert sent == [256]
    clock[0] = 1.0
    call.note(token)
    assert sent == [256, 2]
    call.note(token)
    call.flush()
    call.flush()
    assert sent == [256, 2, 1]


def test_a_request_that_ends_engines_is_stopped_and_those_beside_it_are_answered(llms):
    case = CASES["drawn stream"]

    async def lose(engines: Engines) -> None:
        keeper = Keeper("tiny")
        expected = await engines.answer(keeper, case)
        lost: set[int] = set()
        engine = 0
        count = 0  # requests that this engine was asked for
        has_all = asyncio.Event()

        def ask_of(ends_it: bool) -> Ask:
            async def ask(origin: Origin, avoided: Avoided) -> AsyncIterator[list[Any]]:
                nonlocal engine, count, has_all
                asked_engine = engine
                count += 1
                together = has_all
                if count == 3:
                    together.set()
                async with aclosing(engines.ask(*case, origin, asked_engine)) as answer:
                    async for messages in answer:
                        if asked_engine in lost:
                            raise Lost("ended")
                        yield messages
                        if len(lost) < 2:  # at first, all have the same engine
                            await together.wait()
                        if ends_it:
                            lost.add(asked_engine)
                            engine = asked_engine + 1
                            count = 0
                            has_all = asyncio.Event()

            return ask

        async def body_of(ends_it: bool) -> bytes:
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            await keeper.relay(ask_of(ends_it), send, ORIGIN)
            return b"".join(message["body"] for message in sent[1:])

        poison, *answers = await asyncio.gather(
            body_of(True), body_of(False), body_of(False), return_exceptions=True
        )
        assert isinstance(poison, ApiError)
        assert poison.code == "request_stopped"
        assert answers == [expected.body, expected.body]
        assert len(lost) <= MAX_ENDED

    run(llms, lose)


def test_an_engine_that_fails_is_lost(llms, monkeypatch):
    """Its own error is for its log: the next engine answers."""

    async def fail(engines: Engines) -> None:
        keeper = Keeper("tiny")
        expected = await engines.answer(keeper, CASES["drawn stream"])
        engines.failed.append(engines.apps[0])
        engines.apps[0].state.worker.fail("a device is gone")
        answer = await engines.answer(keeper, CASES["drawn stream"], forget=False)
        assert answer.attempts == 2
        assert answer.body == expected.body

    run(llms, fail)


def test_tokens_beyond_the_limit_are_not_kept(llms):
    async def lose(engines: Engines) -> None:
        keeper = Keeper("tiny", max_bytes=200)
        expected = await engines.answer(keeper, CASES["drawn stream"])
        assert keeper.num_bytes == 0
        restarted = await engines.answer(keeper, CASES["long whole answer"], [2])
        assert restarted.status == 200  # nothing was sent, so it begins again
        answer = await engines.answer(keeper, CASES["drawn stream"], [14])
        assert answer.attempts == 1
        assert answer.body.startswith(expected.body[:200])
        assert b'"code":"replica_ended"' in answer.body

    run(llms, lose)


def test_a_full_queue_has_room_for_what_another_engine_began(llms):
    async def fill(engines: Engines) -> None:
        keeper = Keeper("tiny")
        expected = await engines.answer(keeper, CASES["drawn stream"])
        for app in engines.apps:
            app.state.worker.max_queue = 1
            app.state.worker._submitted += 1  # one that waits
        answer = await engines.answer(keeper, CASES["drawn stream"])
        assert answer.status == 429
        engines.apps[0].state.worker._submitted -= 1
        answer = await engines.answer(keeper, CASES["drawn stream"], [9])
        assert answer.body == expected.body
        engines.apps[1].state.worker._submitted -= 1

    run(llms, fill)
