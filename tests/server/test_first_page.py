"""What a stranger tries first: the address alone, a body without a type, the server's first lines."""

from __future__ import annotations

import json
import urllib.request

import httpx
import pytest

from pagedjax import __version__
from tests.server.support import served_to

PAGES = ("reference", "viewer", "metrics")


@pytest.fixture(scope="module")
def url(tiny_llm):
    with served_to(tiny_llm, api_key="secret") as (server, _):
        yield server.url


def test_the_address_alone_says_where_things_are_without_a_key_and_without_data(url):
    answer = httpx.get(url)
    assert answer.status_code == 200
    places = answer.json()
    assert places["server"] == f"PagedJAX {__version__}"
    assert places["api"] == "/v1"
    headers = {"Authorization": "Bearer secret"}
    for name in PAGES:
        assert httpx.get(f"{url}{places[name]}", headers=headers).status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401


@pytest.mark.parametrize(
    "kind", [None, "application/x-www-form-urlencoded", "text/plain; charset=utf-8"]
)
def test_a_body_is_json_whatever_type_its_client_names(url, kind):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, method="POST")
    request.add_header("Authorization", "Bearer secret")
    if kind is not None:  # else urllib names a form, as curl does
        request.add_header("Content-Type", kind)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert len(json.load(answer)["choices"]) == 1
