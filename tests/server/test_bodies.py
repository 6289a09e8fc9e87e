"""Bodies of any JSON, with any Unicode and numbers at every limit: refused with a sentence, or
answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from pagedjax import StructuredOutputsParams
from pagedjax.text.structured.grammars import grammar_text
from pagedjax.text.surrogates import places_of_halves
from tests import drawn
from tests.server.support import server_llm, serving_without_leaks

FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "a", "max_tokens": 2, "temperature": 0, "stop": ["x"], "logprobs": 1, "echo": False, "seed": 1,
        "stream": False, "user": "u", "n": 1, "logit_bias": {"5": 1}, "top_p": 1, "ignore_eos": False,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2, "user": "u",
        "response_format": FORM, "tools": [TOOL], "tool_choice": "none", "stream": False, "stop": "x",
        "logprobs": True, "top_logprobs": 1,
    },
    "/v1/responses": {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 2, "instructions": "b"},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float"},
    "/tokenize": {"prompt": "a", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6]},
}  # fmt: skip
LIMITS = [
    0,
    -1,
    1,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
    1e308,
    5e-324,
    -0.0,
    1.5,
]
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["\ud800", "a\udfffb", "\U0001f600", "\u2028", "\x00", "\x85", "<|im_end|>"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from(LIMITS) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a body."""
    yield path
    children = enumerate(value) if isinstance(value, list) else ()
    children = value.items() if isinstance(value, dict) else children
    for key, child in children:
        yield from places(child, (*path, key))


def post_raw(http: httpx.Client, route: str, content: bytes) -> httpx.Response:
    return http.post(route, content=content, headers={"content-type": "application/json"})


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return value
    key, *inner_path = path
    copy = list(body) if isinstance(body, list) else dict(body)
    copy[key] = changed(copy[key], tuple(inner_path), value)
    return copy


@st.composite
def bodies(draw: Any) -> tuple[str, Any]:
    route = draw(st.sampled_from([*BODIES]))
    body: Any = BODIES[route]
    for _ in range(draw(st.integers(1, 2))):
        body = changed(body, draw(st.sampled_from([*places(body)])), draw(VALUES))
    if isinstance(body, dict) and draw(st.booleans()):
        body = {**body, draw(TEXTS): draw(VALUES)}
    return route, body


@pytest.fixture(scope="module")
def small(tiny) -> Iterator[httpx.Client]:
    """A server with short sequences, so that what is right is answered soon."""
    llm = server_llm(tiny, max_model_len=64)
    with (
        serving_without_leaks(llm, allow_user=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client
        assert client.get("/viewer/steps").status_code < 500


@drawn.examples(30, 800)
def test_any_body_is_answered_or_refused_with_a_sentence(small, number):
    def holds(case: tuple[str, Any]) -> None:
        route, body = case
        answer = post_raw(small, route, json.dumps(body).encode())  # \ud800 is spelled in ASCII
        assert answer.status_code < 500, answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]" or route == "/v1/responses"
            for line in lines:
                assert line == "[DONE]" or json.loads(line)
            return
        reply = answer.json()
        if answer.status_code != 200:
            assert reply["error"]["message"], reply
        if any(places_of_halves(body)):
            assert answer.status_code == 400, reply

    drawn.check(number, holds, bodies())


def user(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


@pytest.mark.parametrize(
    ("route", "body", "place"),
    [
        ("/v1/completions", {"prompt": "a\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": "a", "user": "\udfff"}, "user"),
        ("/v1/completions", {"prompt": ["a", "\ud83d"], "stream": True}, "prompt.1"),
        ("/v1/completions", {"prompt": "a", "stop": ["\ud800"]}, "stop.0"),
        ("/v1/chat/completions", user("\ud800"), "messages.0.content"),
        ("/v1/chat/completions", user("a", **{"\ud800": 1}), "messages.0"),
        ("/v1/responses", {"input": "\ud800", "stream": True}, "input"),
        ("/v1/embeddings", {"input": "\ud800"}, "input"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ],
)
def test_half_of_a_surrogate_pair_is_a_400_that_names_its_place(small, route, body, place):
    answer = post_raw(small, route, json.dumps(body).encode())
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == place
    message = f"{place} has half of a surrogate pair; remove it, or send the whole character"
    assert error["message"] == message


def test_halves_as_bytes_and_in_other_encodings_are_refused(small):
    for raw in (
        b'{"prompt": "\xed\xa0\x80"}',
        '{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass"),
    ):
        answer = post_raw(small, "/tokenize", raw)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    arguments = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}],
    }
    answer = small.post("/v1/chat/completions", json={"messages": [arguments]})
    assert answer.status_code == 400
    assert "arguments at x has half of a surrogate pair" in answer.json()["error"]["message"]
    schema = StructuredOutputsParams(json='{"properties": {"\\ud800": {}}}')
    with pytest.raises(
        ValueError, match=r"structured_outputs\.json at properties has half of a surrogate pair"
    ):
        grammar_text(schema)


def test_whole_pairs_and_spelled_backslashes_are_texts(small):
    for text in ("\U0001f600", "\\ud800", "\\\\ud83d"):
        ids = small.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert small.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
