"""`POST /v1/embeddings` by OpenAI's client and by hand: the library's vectors, and errors in
OpenAI's format.
"""

from __future__ import annotations

import base64
import json
import re
from contextlib import suppress
from typing import Any

import chex
import httpx
import numpy as np
import pytest

from pagedjax import LLM, PoolingParams
from pagedjax.server import embeddings
from pagedjax.text.pooling import PoolingOutput, PoolingRequestOutput
from tests.server.support import error_of, idle, served_to, wait_until

TEXTS = ["abc def", "the cat and the other cat", "b"]
LONG = [7] * 200  # of more tokens than a step has
pytestmark = pytest.mark.filterwarnings("ignore:this model was not made for embeddings")


def assert_vectors(response: Any, reference: LLM, prompts: Any, **params: Any) -> None:
    outputs = reference.embed(prompts, PoolingParams(**params))
    values = [item.embedding for item in response.data]
    if isinstance(values[0], str):
        values = [np.frombuffer(base64.b64decode(value), "<f4").tolist() for value in values]
    chex.assert_trees_all_close(values, [output.outputs.embedding for output in outputs], atol=1e-6)


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json=body)


@pytest.mark.parametrize(
    "options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}], ids=str
)
def test_openais_client_gets_the_vectors_of_the_library(client, reference, options):
    """Without a format the client asks for base64, and decodes it; if base64 is asked for, it
    leaves it as it is.
    """
    response = client.embeddings.create(model="tiny", input=TEXTS, user="somebody", **options)
    assert (response.object, response.model) == ("list", "tiny")
    assert [item.index for item in response.data] == [0, 1, 2]
    assert {item.object for item in response.data} == {"embedding"}
    assert isinstance(response.data[0].embedding, str) == ("base64" in options.values())
    assert_vectors(response, reference, TEXTS)
    tokens = sum(len(reference.tokenizer.encode(text)) for text in TEXTS)
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (tokens, tokens)


@pytest.mark.parametrize(
    "value", ["abc", ["abc", "d"], [20, 30], [[20], LONG]], ids=["text", "texts", "ids", "lists"]
)
def test_an_input_has_four_forms(client, reference, value):
    prompts = [value] if value in ("abc", [20, 30]) else value
    assert_vectors(client.embeddings.create(model="tiny", input=value), reference, prompts)


@pytest.mark.parametrize(
    "params",
    [
        {"dimensions": 10},
        {"normalize": False},
        {"use_activation": False},
        {"pooling_type": "MEAN"},
        {"truncate_prompt_tokens": 2},
        {"cache_salt": "salt"},
    ],
    ids=str,
)
def test_parameters_reach_the_engine(client, reference, params):
    response = client.embeddings.create(model="tiny", input=TEXTS[1], extra_body=params)
    assert_vectors(response, reference, TEXTS[1], **params)


ERRORS = [
    (
        {"input": "a " * 600},
        r"input has \d+ tokens, but max_model_len is 512; shorten it, or set trunc",
    ),
    ({"input": [[5], [7] * 513]}, "input 1 has 513 tokens, but max_model_len is 512"),
    (
        {"input": ["a"] * 257},
        "input lists 257, but the queue has room for 256; send fewer at once",
    ),
    ({"input": ["a"] * 5000}, "input: List should have at most 4096 items"),
]


@pytest.mark.parametrize(("body", "message"), ERRORS)
def test_an_input_that_is_too_long_is_a_400(http, body, message):
    answer = post(http, **body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert re.search(message, error["message"]), error
    assert (error["type"], error["param"]) == ("invalid_request_error", "input")
    too_long = "max_model_len is" in error["message"]
    assert error["code"] == ("context_length_exceeded" if too_long else None)


def test_metrics_count_prompts_and_no_generated_token(tiny_llm):
    with served_to(tiny_llm) as (server, client):
        assert post(client, input=[LONG]).status_code == 200
        wait_until(lambda: idle(server.worker))
        page = client.get("/metrics").text
        assert 'generation_tokens_total{model_name="tiny"} 0.0' in page
        assert 'prompt_tokens_total{model_name="tiny"} 200.0' in page
        assert 'request_success_total{finished_reason="length",model_name="tiny"} 1.0' in page


def test_a_client_that_leaves_ends_its_embeddings(tiny_llm):
    with served_to(tiny_llm) as (server, client):
        with suppress(httpx.TimeoutException):
            client.post("/v1/embeddings", json={"input": [[7] * 500] * 200}, timeout=0.05)
        wait_until(lambda: idle(server.worker))
        assert server.worker.healthy


def test_the_json_is_that_of_the_whole_answer():
    rows = np.array([[0.5, -1.0], [1 / 3, 2.0]], np.float32)
    outputs = [
        PoolingRequestOutput(str(i), PoolingOutput(row), (5, 6, 7), 2) for i, row in enumerate(rows)
    ]
    body = json.loads(embeddings.answer('na"me', False, outputs).body)
    assert body == {
        "object": "list",
        "model": 'na"me',
        "data": [
            {"object": "embedding", "index": i, "embedding": row.tolist()}
            for i, row in enumerate(rows)
        ],
        "usage": {
            "prompt_tokens": 6,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    text = json.loads(embeddings.answer("a", True, outputs).body)["data"][1]["embedding"]
    chex.assert_trees_all_equal(np.frombuffer(base64.b64decode(text), np.float32), rows[1])
