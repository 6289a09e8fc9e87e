"""No request gives a 5xx: requests are drawn from the server's OpenAPI document, valid and
invalid.
"""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from tests.server.support import server_llm, serving_without_leaks

EXAMPLES = 2  # of each operation


@pytest.fixture(scope="module")
def small(one_layer):
    """A server with short sequences, so that valid requests are answered soon."""
    llm = server_llm(one_layer, max_model_len=24, token_buckets=(64,))
    with serving_without_leaks(llm, allow_runtime_lora_updating=True) as server:
        yield server


def fuzz(url: str, examples: int) -> int:
    """Send random requests. Returns the number of valid ones."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    valid = []

    for operation in (result.ok() for result in schema.get_all_operations()):

        @settings(
            max_examples=examples,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(
            case=operation.as_strategy()
            | operation.as_strategy(schemathesis.GenerationMode.NEGATIVE)
        )
        def send(case):
            answer = case.call(base_url=url, timeout=60)
            valid.append(answer.status_code == 200)
            case.validate_response(answer, checks=[not_a_server_error])

        send()
    return sum(valid)


def test_no_request_is_a_server_error(small):
    assert fuzz(small.url, EXAMPLES) > EXAMPLES
    assert httpx.get(f"{small.url}/health").status_code == 200


@pytest.mark.slow
def test_no_request_of_hundreds_is_a_server_error(small):
    assert fuzz(small.url, 75) > 75
    assert httpx.get(f"{small.url}/health").status_code == 200
