"""A server on 127.0.0.1 in a thread of this process, over the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import openai
import pytest

from pagedjax import LLM
from tests.server.support import server_llm, serving_without_leaks


@pytest.fixture(scope="session")
def served(tiny) -> Iterator[SimpleNamespace]:
    llm = server_llm(tiny)
    with serving_without_leaks(llm) as server:
        yield server


@pytest.fixture(scope="session")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as api:
        yield api


@pytest.fixture(scope="session")
def http(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as plain:
        yield plain


@pytest.fixture(scope="session")
def reference(tiny) -> LLM:
    """The library, whose answers the server must repeat."""
    return server_llm(tiny)


@pytest.fixture(scope="session")
def tool_server(tiny_long) -> Iterator[SimpleNamespace]:
    """A server with room for long prompts and answers."""
    options = {"max_num_batched_tokens": 256, "token_buckets": (8, 256), "num_blocks": 512}
    llm = server_llm(tiny_long, **options)
    with serving_without_leaks(llm) as server:
        yield server


@pytest.fixture(scope="session")
def tool_http(tool_server) -> Iterator[httpx.Client]:
    """One for all tests: to make a client takes longer than to ask."""
    with httpx.Client(base_url=tool_server.url, timeout=60) as plain:
        yield plain


@pytest.fixture(scope="session")
def tool_client(tool_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as api:
        yield api
