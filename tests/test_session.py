"""Sessions: several on one engine serve their own requests, whichever of them runs the steps."""

from __future__ import annotations

import pytest

from pagedjax.engine.session import GenerationRequest, Session, output_of
from tests.engine.runs import greedy

GREEDY = greedy(8)
PROMPTS = ([5, 6, 7], [9, 10, 11, 12])


@pytest.fixture
def llm(tiny_llm):
    return tiny_llm


@pytest.fixture
def expected(llm) -> list[tuple[int, ...]]:
    outputs = llm.generate(list(PROMPTS), GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


def session(llm) -> Session:
    return Session(llm.engine, llm.tokenizer, llm.model.eos_token_ids)


def token_ids(request, branches) -> tuple[int, ...]:
    return output_of("0", request, branches).outputs[0].token_ids


def test_two_sessions_on_one_engine_get_their_own_tokens(llm, expected):
    first = session(llm)
    second = session(llm)
    requests = [GenerationRequest(prompt, GREEDY) for prompt in PROMPTS]
    (a,) = first.add(requests[:1])
    (b,) = second.add(requests[1:])
    assert not set(a) & set(b), "ids are unique on an engine"
    while first.branches:
        first.step()
    assert token_ids(requests[0], a) == expected[0]
    deltas = [delta.token_id for _ in range(8) for delta in second.step().deltas]
    assert tuple(deltas) == expected[1]
    assert token_ids(requests[1], b) == expected[1]
    assert not llm.engine.has_work


def test_a_session_without_requests_keeps_no_results(llm):
    idle = session(llm)
    llm.generate(list(PROMPTS), GREEDY)
    assert not idle._results
