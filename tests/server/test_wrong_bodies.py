"""A wrong body is a 400 that says what is wrong and names the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.support import error_of, idle, wait_until

ROUTES = yaml.safe_load(Path(__file__).with_name("wrong_bodies.yaml").read_text("utf-8"))
CHAT = {"messages": [{"role": "user", "content": "the cat"}]}
RIGHT: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "abc def"},
    "chat/completions": CHAT,
    "chat/completions with tools": {
        **CHAT,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "responses": {"input": "the cat"},
    "embeddings": {},
}


@pytest.mark.parametrize(
    ("route", "case"),
    [
        pytest.param(route, case, id=f"{route}: {case['body']}"[:80])
        for route, cases in ROUTES.items()
        for case in cases
    ],
)
def test_a_wrong_body_is_a_400_that_names_its_field(tool_server, tool_http, route, case):
    wait_until(lambda: idle(tool_server.worker))
    before = tool_server.worker._submitted
    body = {"model": "tiny", **RIGHT[route], **case["body"]}
    answer = tool_http.post(f"/v1/{route.split()[0]}", json=body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert case["error"] in error["message"] or re.search(case["error"], error["message"]), error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == case["param"]
    if case["param"]:  # else the engine refuses it, when it is queued
        assert tool_server.worker._submitted == before
