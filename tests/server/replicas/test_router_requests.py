"""What the ingress tells the router of a request is what the replica's engine will have."""

from __future__ import annotations

import json

import pytest

from pagedjax import LLM, load_model
from pagedjax.engine import block_hashes
from pagedjax.routing import RouterRequest
from pagedjax.server import app as server_app
from pagedjax.server import responses_api
from pagedjax.server.app import Options
from pagedjax.server.ray.prompts import Reader, router_request
from pagedjax.server.schema import ChatRequest, CompletionRequest
from tests.server.support import ENGINE
from tests.tools.functions import function
from tests.weights.tiny import tiny_llama

SERVER = Options(name="tiny", allow_user=True)
SIZE = 4
TOOL = function("look", parameters={"type": "object", "properties": {}})
TALK = [{"role": "user", "content": "What is a block table?"}]
COMPLETIONS = [
    {"prompt": "abcdefghij"},
    {"prompt": "abcdefghij", "max_tokens": 3, "n": 2, "temperature": 1.0},
    {"prompt": list(range(20, 50)), "max_tokens": 9},
    {"prompt": ["abcdefghij", "xyz"], "max_tokens": 5},
    {"prompt": [list(range(20, 50)), [30, 31]], "max_tokens": 5},
    {"prompt": "abcdefghij", "truncate_prompt_tokens": 6},
    {"prompt": "abcdefghij", "cache_salt": "mine"},
    {"prompt": "abcdefghij", "add_special_tokens": False},
    {"prompt": "abcdefghij", "prompt_logprobs": 1},
    {"prompt": "abcdefghij", "best_of": 3, "n": 1, "temperature": 1.0, "user": "ada"},
]
CHATS = [
    {"messages": TALK},
    {"messages": TALK, "max_tokens": 7},
    {"messages": TALK, "max_completion_tokens": 8, "add_generation_prompt": False},
    {"messages": TALK, "tools": [TOOL]},
    {"messages": TALK, "tools": [TOOL], "tool_choice": "none"},
]


def read(reader: Reader, path: str, body: dict) -> RouterRequest:
    return router_request(reader, "a", f"/v1/{path}", json.dumps(body).encode())


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tiny_llama(tmp_path_factory.mktemp("long") / "llama", tied=False, max_len=4096)
    return LLM(load_model(folder), progress=False, block_size=SIZE, compilation="lazy", **ENGINE)


@pytest.fixture(scope="module")
def reader(llm) -> Reader:
    return Reader(llm.tokenizer, SERVER, llm.engine.config.max_model_len, SIZE, hashes=True)


def of_engine(requests) -> RouterRequest:
    """Of the requests that the server makes of a body: its own lengths, and the engine's hashes."""
    first = requests[0]
    params = first.params
    _, hashes = block_hashes.of_prompt(first.prompt_token_ids, params, SIZE)
    tokens = sum(
        len(request.prompt_token_ids) + params.drawn().n * params.max_tokens for request in requests
    )
    return RouterRequest("a", tokens, hashes, first.user)


@pytest.mark.parametrize("body", COMPLETIONS, ids=lambda body: ",".join(body))
def test_completions(llm, reader, body):
    requests, _ = server_app._completion_requests(llm, CompletionRequest(**body), SERVER)
    assert read(reader, "completions", body) == of_engine(requests)


@pytest.mark.parametrize("body", CHATS, ids=lambda body: ",".join(body))
def test_chats(llm, reader, body):
    requests, _ = server_app._chat_requests(llm, ChatRequest.model_validate(body), SERVER)
    assert read(reader, "chat/completions", body) == of_engine(requests)


def test_responses_are_chats(llm, reader):
    body = {"input": "What is a block table?", "instructions": "Be short.", "max_output_tokens": 6}
    chat = responses_api.as_chat(responses_api.ResponsesRequest(**body))
    requests, _ = server_app._chat_requests(llm, chat, SERVER)
    assert read(reader, "responses", body) == of_engine(requests)


def test_adapters_share_no_prefix(reader):
    def hashes(model):
        return read(reader, "completions", {"model": model, "prompt": "abcdefghij"}).hashes

    assert hashes("tiny") == hashes("") != hashes("poems") != hashes("songs")


def test_without_prefixes_nothing_is_hashed(reader):
    body = {"prompt": "abcdefghij", "max_tokens": 5}
    request = read(reader._replace(hashes=False), "completions", body)
    tokens = len(reader.tokenizer.encode("abcdefghij", True))
    assert (request.hashes, request.tokens) == ((), tokens + 5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b"not json"),
        ("/v1/completions", b'{"prompt": []}'),
        ("/v1/completions", b'{"prompt": "a", "unknown": 1}'),
        ("/v1/chat/completions", b'{"messages": []}'),
        ("/v1/responses", b'{"input": [{"type": "image"}]}'),
        ("/v1/embeddings", b'{"input": "a"}'),
        ("/tokenize", b'{"prompt": "a"}'),
    ],
)
def test_what_the_ingress_cannot_read_goes_to_any_replica(reader, path, body):
    assert router_request(reader, "a", path, body) == RouterRequest("a", 0)
