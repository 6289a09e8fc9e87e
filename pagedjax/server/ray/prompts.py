"""What a router must know of a request: its length and the hashes of its prompt's blocks.

Both are read from the body of its HTTP request. The ingress tokenizes as the replica will. It
checks nothing: a body that it cannot read goes to any replica, whose answer says what is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagedjax.engine import block_hashes
from pagedjax.options.vllm_names.prompts import last_tokens
from pagedjax.routing import RouterRequest
from pagedjax.server import adapters, responses_api
from pagedjax.server.app import Options
from pagedjax.server.responses_api import ResponsesRequest
from pagedjax.server.schema import ChatRequest, CompletionRequest, GenerationBody, as_list
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.text.tools.use import tool_use

# Characters of a token at most, on average; a longer text is refused, and not worth tokenizing
CHARACTERS = 32
log = logging.getLogger("pagedjax.server")


class Reader(NamedTuple):
    """Reads requests as replicas do.

    hashes: whether the router reads prefixes, and the replicas keep them.
    """

    tokenizer: Tokenizer
    server: Options
    max_model_len: int
    block_size: int
    hashes: bool


def router_request(reader: Reader, request_id: str, path: str, body: bytes) -> RouterRequest:
    """The request as the router sees it.

    Several prompts of one body have one router request, with the hashes of the first one. Other
    endpoints have 0 tokens and no hashes.
    """
    try:
        if path == "/v1/completions":
            completion = CompletionRequest.model_validate_json(body)
            prompts = _prompts(reader, completion)
            max_tokens = 16 if completion.max_tokens is None else completion.max_tokens
            return _router_request(reader, request_id, completion, prompts, max_tokens)
        if path in ("/v1/chat/completions", "/v1/responses"):
            if path == "/v1/responses":
                chat = responses_api.as_chat(ResponsesRequest.model_validate_json(body))
            else:
                chat = ChatRequest.model_validate_json(body)
            ids = _conversation(reader, chat)
            room = reader.max_model_len - len(ids)
            max_tokens = chat.max_completion_tokens or chat.max_tokens or room
            return _router_request(reader, request_id, chat, [ids], max_tokens)
    except Exception as error:
        # A wrong body, whose error the replica answers, and any other error that it may cause
        log.debug("a body is not read: %r", error)
    return RouterRequest(request_id, 0)


def _router_request(
    reader: Reader,
    request_id: str,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> RouterRequest:
    prompts = [
        last_tokens(ids, body.truncate_prompt_tokens, reader.max_model_len) for ids in prompts
    ]
    if any(len(ids) >= reader.max_model_len for ids in prompts):
        raise ValueError("a prompt is too long")
    branches = max(body.n or 1, body.best_of or 1)
    tokens = sum(len(ids) + branches * max(max_tokens, 0) for ids in prompts)
    user = (body.user or "") if reader.server.allow_user else ""
    return RouterRequest(request_id, tokens, _hashes(reader, body, prompts[0]), user)


def _hashes(reader: Reader, body: GenerationBody, ids: Sequence[int]) -> tuple[str, ...]:
    """The hashes of the prompt's full blocks.

    They need to differ from each other where the engine's do, and no more: an adapter goes by its
    name, which stays the same for the life of a cluster.
    """
    if not reader.hashes or body.prompt_logprobs is not None:
        return ()
    adapter = adapters.adapter_of(body.model, reader.server.name) or ""
    root = block_hashes.root(body.cache_salt, reader.block_size, (), adapter)
    return block_hashes.chain(root, np.asarray(ids), reader.block_size)


def _prompts(reader: Reader, body: CompletionRequest) -> list[Sequence[int]]:
    """The tokens of each prompt."""
    prompts = as_list(body.prompt)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if any(len(text) > CHARACTERS * reader.max_model_len for text in texts):
        raise ValueError("a prompt is too long")
    special = body.add_special_tokens is not False
    return [
        reader.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def _conversation(reader: Reader, body: ChatRequest) -> list[int]:
    use = tool_use(
        reader.tokenizer,
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls,
        reader.server.tool_call_parser,
    )
    messages = [message.plain() for message in body.messages]
    if len(str(messages)) > CHARACTERS * reader.max_model_len:
        raise ValueError("a conversation is too long")
    return use.tokens(reader.tokenizer, messages, body.add_generation_prompt is not False)
