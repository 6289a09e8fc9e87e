"""Searches that this file defines, against the sequences that requests of one token give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from pagedjax import LLM, BeamSearchParams
from pagedjax.host.searches import SEARCHES, Continuation, Offer, SearchKind
from pagedjax.host.types import Hypothesis
from tests.engine.runs import check_idle, greedy, small_llm

WIDTH = 8
LENGTH = 3


@dataclass(frozen=True)
class BottleneckParams(BeamSearchParams):
    """Searches the sequence whose least likely token is the most likely one."""


class Path(NamedTuple):
    worst: float  # log-probability of the least likely token
    total: float  # of all tokens: it decides between paths with the same worst token
    token_ids: tuple[int, ...]

    def continued(self, token: int, logprob: float) -> Path:
        worst = min(self.worst, logprob)
        return Path(worst, self.total + logprob, (*self.token_ids, token))


ROOT = Path(0.0, 0.0, ())


class Bottleneck(NamedTuple):
    params: BottleneckParams
    paths: tuple[Path, ...] = (ROOT,)
    finished: tuple[Hypothesis, ...] = ()

    def advance(self, offers: Sequence[Offer]) -> tuple[Bottleneck, Sequence[Continuation]]:
        pairs = [
            (path.continued(token, logprob), parent)
            for parent, (path, offer) in enumerate(zip(self.paths, offers, strict=True))
            for token, logprob in zip(*offer, strict=True)
        ]
        pairs = sorted(pairs, reverse=True)[: self.params.beam_width]
        paths = tuple(path for path, _ in pairs)
        if len(paths[0].token_ids) == self.params.max_tokens:
            hypotheses = tuple(Hypothesis(p.token_ids, p.total, p.worst, "length") for p in paths)
            return self._replace(finished=hypotheses), ()
        continuations = [Continuation(parent, path.token_ids[-1]) for path, parent in pairs]
        return self._replace(paths=paths), continuations


BOTTLENECK = SearchKind(
    candidates=lambda params, stops: params.beam_width,
    start=lambda params, stops: Bottleneck(params),
)


@dataclass(frozen=True)
class LookBackParams(BeamSearchParams):
    """Greedy, with a second path in reserve: the runner-up of the last token.

    The search looks back when the reserve, continued greedily, is likelier than the path. Then the
    reserve is the path. `beam_width` is 2.
    """


class LookBack(NamedTuple):
    params: LookBackParams
    paths: tuple[Path, ...] = (ROOT,)  # the path, and its reserve
    finished: tuple[Hypothesis, ...] = ()

    def advance(self, offers: Sequence[Offer]) -> tuple[LookBack, Sequence[Continuation]]:
        totals = [
            path.total + offer.logprobs[0] for path, offer in zip(self.paths, offers, strict=True)
        ]
        parent = totals.index(max(totals))
        offer = offers[parent]
        paths = tuple(
            self.paths[parent].continued(token, logprob)
            for token, logprob in zip(offer.token_ids[:2], offer.logprobs[:2], strict=True)
        )
        if len(paths[0].token_ids) == self.params.max_tokens:
            hypotheses = tuple(Hypothesis(p.token_ids, p.total, p.total, "length") for p in paths)
            return self._replace(finished=hypotheses), ()
        return self._replace(paths=paths), [Continuation(parent, p.token_ids[-1]) for p in paths]


LOOK_BACK = SearchKind(
    candidates=lambda params, stops: 2,
    start=lambda params, stops: LookBack(params),
)


def all_paths(llm: LLM, prompt: list[int]) -> list[Path]:
    """Every sequence of the `WIDTH` most likely tokens at each position. Each token is computed by
    a request of its own.
    """
    params = greedy(1, logprobs=WIDTH)
    paths = [ROOT]
    for _ in range(LENGTH):
        prompts = [[*prompt, *path.token_ids] for path in paths]
        outputs = llm.generate(prompts, params)
        tops = [output.outputs[0].logprobs[0] for output in outputs]
        paths = [
            path.continued(token, entry.logprob)
            for path, top in zip(paths, tops, strict=True)
            for token, entry in top.items()
        ]
    return paths


def likeliest_tokens(llm: LLM, tokens: list[int]) -> list[tuple[float, int]]:
    """The two likeliest next tokens, (log-probability, token), by a request of one token."""
    (output,) = llm.generate([tokens], greedy(1, logprobs=2))
    top = output.outputs[0].logprobs[0]
    return sorted(((entry.logprob, token) for token, entry in top.items()), reverse=True)[:2]


def looked_back(llm: LLM, prompt: list[int], length: int) -> tuple[list[int], int]:
    """The tokens of the search by requests of one token, and how often it looked back."""
    path: list[int] = []
    reserve: list[int] | None = None
    path_total = 0.0
    reserve_total = 0.0
    turns = 0
    for _ in range(length):
        (best, token), (second, runner_up) = likeliest_tokens(llm, prompt + path)
        if reserve is not None:
            after_reserve = likeliest_tokens(llm, prompt + reserve)
            if reserve_total + after_reserve[0][0] > path_total + best:
                turns += 1
                path = reserve
                path_total = reserve_total
                (best, token), (second, runner_up) = after_reserve
        reserve = [*path, runner_up]
        reserve_total = path_total + second
        path = [*path, token]
        path_total += best
    return path, turns


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    """It has the sizes, and so the program, of test_beam_search.py."""
    return small_llm(tiny, block_size=8, max_num_seqs=16)


def test_an_engine_runs_a_greedy_search_that_looks_back(llm, monkeypatch):
    monkeypatch.setitem(SEARCHES, LookBackParams, LOOK_BACK)
    prompts = [[5, 9, 200, 31, 7], [44, 3], [17], [301, 8, 8, 120]]
    params = LookBackParams(2, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    turns = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        path, times = looked_back(llm, prompt, params.max_tokens)
        assert list(output.outputs[0].token_ids) == path
        turns += times
    assert turns, "no search looked back"
    check_idle(llm.engine)


def test_an_engine_runs_a_search_that_this_file_defines(llm, monkeypatch):
    monkeypatch.setitem(SEARCHES, BottleneckParams, BOTTLENECK)
    params = BottleneckParams(WIDTH, max_tokens=LENGTH, ignore_eos=True)
    prompts = [[5, 9, 200, 31, 7], [44, 3]]
    outputs = llm.generate(prompts, params)
    bests = [max(all_paths(llm, prompt)) for prompt in prompts]
    likeliest = llm.generate(prompts, BeamSearchParams(WIDTH, max_tokens=LENGTH, ignore_eos=True))
    for output, best in zip(outputs, bests, strict=True):
        first = output.outputs[0]
        assert tuple(first.token_ids) == best.token_ids
        assert first.score == pytest.approx(best.worst, abs=1e-5)
        assert first.cumulative_logprob == pytest.approx(best.total, abs=1e-5)
        assert len(output.outputs) == WIDTH
    assert [output.outputs[0].token_ids for output in outputs] != [
        output.outputs[0].token_ids for output in likeliest
    ]
    check_idle(llm.engine)
