"""`priority`, `user` and the fields of service: a client gets only what the operator allows. A policy
may turn a request away.
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pagedjax.commands import cli
from pagedjax.host.policies import Policy
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


FIELDS = {"predicted": 7, "service_class": "chat", "deadline": 1.5}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_service_is_refused_unless_the_operator_allows_it(llm, field):
    with served_to(llm) as (_, http):
        body = {**GREEDY, "prompt": "abc", field: FIELDS[field]}
        answer = http.post("/v1/completions", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, field)
    message = error_of(answer)["message"]
    assert message.startswith(f"{field} is {FIELDS[field]!r}, and this server does not take it;")
    assert message.endswith("--allow-service-fields")


def test_the_fields_of_service_reach_the_policy(llm):
    fields = []

    def order(waiting, running, cached):
        fields.extend([seq.request[-3:] for seq in waiting])
        return waiting

    runtime = llm.engine.runtime
    llm.engine.runtime = replace(runtime, policy=Policy("mine", order))
    with served_to(llm, allow_service_fields=True) as (_, http):
        assert complete(http, max_tokens=1, **FIELDS)["choices"]
        wrong = http.post("/v1/completions", json={**GREEDY, "prompt": "a", "deadline": 0})
    assert fields == [(7, "chat", 1.5)]
    assert wrong.status_code == 400


def test_a_request_that_the_policy_rejects_is_answered_429_and_others_go_on(llm):
    def reject(memory, waiting):
        return [seq.request_id for seq in waiting if seq.request.service_class == "late"]

    policy = Policy("mine", lambda memory, waiting, *_: waiting, init=int, reject=reject)
    llm.engine.runtime = replace(llm.engine.runtime, policy=policy)
    late = {**GREEDY, "prompt": ["abc", "abd"], "service_class": "late"}
    with served_to(llm, allow_service_fields=True) as (_, http):
        answer = http.post("/v1/completions", json=late)
        stream = http.post("/v1/completions", json={**late, "stream": True})
        assert complete(http, max_tokens=1)["choices"]
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert error_of(answer)["code"] == "rejected"
    assert error_of(answer)["message"].startswith("the policy of this server rejected the request")
    assert '"code":"rejected"' in stream.text.replace(" ", "")
    assert not llm.engine.has_work


@pytest.mark.parametrize(("words", "warnings"), [("", 1), ("--allow-user", 0)])
def test_the_policy_fair_without_users_is_a_warning(monkeypatch, caplog, words, warnings):
    llm = SimpleNamespace(engine=SimpleNamespace(record=lambda path: None, background=None))
    monkeypatch.setattr(serve, "LLM", lambda *args, **options: llm)
    monkeypatch.setattr(serve, "serve", lambda *args, **options: None)
    with caplog.at_level(logging.WARNING, "pagedjax.server"):
        assert cli.main(shlex.split(f"serve x --port 0 --policy fair {words}")) == 0
    assert sum("--allow-user" in record.getMessage() for record in caplog.records) == warnings
