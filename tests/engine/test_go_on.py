"""An engine goes on with what another one began: the tokens, texts and reasons of one engine."""

from __future__ import annotations

from typing import Any

import chex
import numpy as np
import pytest
from hypothesis import strategies as st

from pagedjax import SamplingParams, StructuredOutputsParams
from pagedjax.engine.requests import Begun, EngineRequest
from pagedjax.engine.session import GenerationRequest, Progress
from pagedjax.host import replay, scheduler
from tests import drawn
from tests.engine.runs import check_idle, greedy, small_llm
from tests.refusals import refused

PROMPT = [20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 180]
PARAMS = {
    "greedy": greedy(12, logprobs=1, seed=0),
    "drawn": SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True),
    "branches": SamplingParams(temperature=1.0, seed=2**32 - 1, max_tokens=9, n=3),
    "penalties": SamplingParams(
        temperature=1.0, seed=1, max_tokens=12, frequency_penalty=1.5, repetition_penalty=1.4
    ),
    "a form": SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(regex="(ab|cd){4}e"),
    ),
    "a stop string": SamplingParams(temperature=0, seed=0, max_tokens=12, stop=["\x7f"]),
    "given tokens": SamplingParams(seed=0, trace_decode_token_ids=tuple(range(40, 60))),
}


def run(llm: Any, requests: list[GenerationRequest]) -> list[Any]:
    """The branches of the requests, after their last steps."""
    session = llm.session
    added = session.add(requests)
    for request, branches in zip(requests, added, strict=True):
        if request.progress:
            for branch, tokens in zip(branches.values(), request.progress.tokens, strict=True):
                for token in tokens:
                    branch.restore(token, None, None, None)
    while session.branches:
        session.step()
        scheduler.check(llm.engine.scheduler_state)
    check_idle(llm.engine)
    return [list(branches.values()) for branches in added]


def ends(branches: list[Any]) -> list[Any]:
    return [(branch.token_ids, branch.text, branch.finish_reason) for branch in branches]


@pytest.fixture(scope="module")
def undisturbed(tiny_llm) -> dict[str, list[Any]]:
    """By the name of the parameters, the branches of an engine that made all tokens itself."""
    requests = [GenerationRequest(PROMPT, params) for params in PARAMS.values()]
    return dict(zip(PARAMS, run(tiny_llm, requests), strict=True))


@drawn.examples(30, 300)
def test_it_gives_the_tokens_of_one_engine(tiny_llm, undisturbed, number):
    """Any requests together, each cut anywhere."""

    def holds(data: st.DataObject) -> None:
        check_cut_requests(tiny_llm, undisturbed, data)

    drawn.check(number, holds, data=st.data())


def check_cut_requests(llm: Any, undisturbed: dict[str, list[Any]], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(PARAMS)), min_size=1, max_size=3))
    requests = []
    for name in names:
        known_tokens = []
        for branch in undisturbed[name]:
            length = data.draw(st.integers(0, len(branch.token_ids) - 1))
            known_tokens.append(tuple(branch.token_ids[:length]))
        progress = Progress(tuple(known_tokens), (False,) * len(known_tokens), 0)
        requests.append(GenerationRequest(PROMPT, PARAMS[name], progress=progress))
    for name, branches in zip(names, run(llm, requests), strict=True):
        assert ends(branches) == ends(undisturbed[name])


def test_log_probabilities_go_on(tiny_llm, undisturbed):
    (expected,) = undisturbed["greedy"]
    progress = Progress((tuple(expected.token_ids[:5]),), (False,), 0)
    ((branch,),) = run(tiny_llm, [GenerationRequest(PROMPT, PARAMS["greedy"], progress=progress)])
    assert sorted(branch.logprobs) == list(range(5, 12))
    values = np.array([branch.chosen[i] for i in range(5, 12)])
    chex.assert_trees_all_close(
        values, np.array([expected.chosen[i] for i in range(5, 12)]), atol=1e-5
    )


def test_branches_that_have_ended_are_not_computed(tiny_llm, undisturbed):
    tokens = tuple(tuple(branch.token_ids) for branch in undisturbed["branches"])
    progress = Progress((tokens[0], tokens[1][:3], tokens[2]), (True, False, True), 0)
    (added,) = tiny_llm.session.add(
        [GenerationRequest(PROMPT, PARAMS["branches"], progress=progress)]
    )
    assert tiny_llm.engine.scheduler_state.waiting[0].length == len(PROMPT) + 3
    assert len(tiny_llm.engine.scheduler_state.ids) == 1
    tiny_llm.session.abandon(added)
    check_idle(tiny_llm.engine)


def test_a_recording_of_it_replays(tiny_llm, undisturbed, tmp_path):
    tiny_llm.engine.record(tmp_path / "run.jsonl")
    (branch,) = undisturbed["drawn"]
    progress = Progress((tuple(branch.token_ids[:4]),), (False,), 0)
    run(tiny_llm, [GenerationRequest(PROMPT, PARAMS["drawn"], progress=progress)])
    tiny_llm.engine.record(None)
    report = replay.verify(tmp_path / "run.jsonl")
    assert report.identical, report.difference
    assert '"adopt"' in (tmp_path / "run.jsonl").read_text("utf-8")


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (EngineRequest(("a",), PROMPT, greedy(9), begun=Begun(0, [5, 999])), "token id 999"),
        (EngineRequest(("a", "b"), PROMPT, greedy(9, n=2), begun=Begun(0, [5])), "has branches"),
        (EngineRequest(("a",), PROMPT, greedy(2), begun=Begun(0, [5, 6])), "may have 19"),
    ],
)
def test_what_cannot_go_on_is_refused(tiny_llm, request_, error):
    before = tiny_llm.engine.scheduler_state
    with refused(error):
        tiny_llm.engine._submit(request_)
    assert tiny_llm.engine.scheduler_state is before


def test_engines_of_equal_weights_and_options_have_one_identity(tiny, tiny_llm, one_layer):
    larger = small_llm(tiny, num_blocks=300, block_size=8)
    assert larger.engine.identity == tiny_llm.engine.identity
    assert small_llm(tiny, seed=1).engine.identity != larger.engine.identity
    assert small_llm(one_layer).engine.identity != larger.engine.identity
