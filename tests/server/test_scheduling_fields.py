"""`priority` and `user`: a client gets only what the operator allows."""

from __future__ import annotations

import logging
import shlex
from types import SimpleNamespace

import pytest

from pagedjax.commands import cli
from pagedjax.server import serve
from tests.server.support import GREEDY, complete, error_of, served_to, server_llm


@pytest.fixture
def llm(tiny, monkeypatch):
    """It has `orders`: the priority and user that each request had in the engine."""
    built = server_llm(tiny)
    submit = built.engine._submit
    orders = []

    def recorded(request):
        orders.append((request.priority, request.user))
        return submit(request)

    monkeypatch.setattr(built.engine, "_submit", recorded)
    built.orders = orders
    return built


def refusal(http, **options) -> str:
    answer = http.post("/v1/completions", json={**GREEDY, "prompt": "abc", **options})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "priority")
    return error_of(answer)["message"]


def test_by_default_a_client_cannot_choose_a_priority(llm):
    with served_to(llm) as (_, http):
        message = refusal(http, priority=-100)
        assert message.startswith(
            "priority is -100, but this server allows only 0; change the field or leave it out"
        )
        assert message.endswith("--min-priority -100")
        assert "--max-priority 7" in refusal(http, priority=7)
        chat = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1,
            "priority": 1,
        }
        assert http.post("/v1/chat/completions", json=chat).status_code == 400
        for priority in (0, None):
            assert complete(http, max_tokens=1, priority=priority)["choices"]
    assert llm.orders == [(0, "")] * 2


def test_the_operator_bounds_the_priorities(llm):
    with served_to(llm, min_priority=-5, max_priority=10) as (_, http):
        for priority in (-5, 3, 10):
            assert complete(http, max_tokens=1, priority=priority)["choices"]
        assert "this server allows -5 to 10" in refusal(http, priority=-6)
        assert "this server allows -5 to 10" in refusal(http, priority=11)
    assert llm.orders == [(-5, ""), (3, ""), (10, "")]


@pytest.mark.parametrize(("allowed", "user"), [(False, ""), (True, "alice")])
def test_the_user_counts_only_if_the_operator_allows_it(llm, allowed, user):
    with served_to(llm, allow_user=allowed) as (_, http):
        assert complete(http, max_tokens=1, user="alice")["choices"]
    assert llm.orders == [(0, user)]


@pytest.mark.parametrize(("words", "warnings"), [("", 1), ("--allow-user", 0)])
def test_the_policy_fair_without_users_is_a_warning(monkeypatch, caplog, words, warnings):
    llm = SimpleNamespace(engine=SimpleNamespace(record=lambda path: None, background=None))
    monkeypatch.setattr(serve, "LLM", lambda *args, **options: llm)
    monkeypatch.setattr(serve, "serve", lambda *args, **options: None)
    with caplog.at_level(logging.WARNING, "pagedjax.server"):
        assert cli.main(shlex.split(f"serve x --port 0 --policy fair {words}")) == 0
    assert sum("--allow-user" in record.getMessage() for record in caplog.records) == warnings
