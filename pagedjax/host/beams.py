"""Beam search as a pure fold: which continuations of which beams go on, which are finished, and when that is enough.

It knows tokens and log-probabilities. That beams share blocks, and copy the one they write to, is the scheduler's
affair (branches.py): a step's choice reaches it as one (parent, token) for each beam.

The rules are those of transformers' `generate(num_beams=W, do_sample=False)`, so that scores agree sequence by
sequence. Of the continuations of all beams, ranked by the sum of their log-probabilities,

    finished    those among the best W that end: by a stop token, or by reaching max_tokens. A sequence of m tokens
                scores sum / m ** length_penalty, and the W best finished ones are kept.
    running     the best W of those that do not end.

W + (number of stop tokens) continuations of each beam are enough to know both: at most so many of them are better than
the W best that do not end.
"""

from __future__ import annotations

from typing import NamedTuple

from pagedjax.host.types import Choice, FinishReason, Hypothesis
from pagedjax.params import BeamSearchParams


class Beam(NamedTuple):
    token_ids: tuple[int, ...]
    total: float  # sum of log-probabilities


class Search(NamedTuple):
    params: BeamSearchParams
    stops: frozenset[int]
    names: tuple[str, ...]  # of the W places; the beam at place i runs under names[i]
    beams: tuple[Beam, ...]  # one before the first step, W after it
    offers: tuple[tuple[str, tuple[int, ...], tuple[float, ...]], ...] = ()  # this position's, as far as they are in
    finished: tuple[Hypothesis, ...] = ()  # at most W, the best first

    @property
    def complete(self) -> bool:
        """Whether every beam has offered its continuations."""
        return len(self.offers) == len(self.beams)


def candidates(params: BeamSearchParams, stops: int) -> int:
    """Continuations that each beam has to offer."""
    return params.beam_width + stops


def start(params: BeamSearchParams, stops: frozenset[int], names: tuple[str, ...]) -> Search:
    return Search(params, stops, names, (Beam((), 0.0),))


def offer(search: Search, name: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Search:
    """Take in the best continuations of the beam called `name`, which may be offering them again."""
    others = tuple(other for other in search.offers if other[0] != name)
    return search._replace(offers=(*others, (name, token_ids, logprobs)))


def advance(search: Search) -> tuple[Search, Choice | None]:
    """Decide on the next position, once every beam has made its offer -> (search, how the beams go on).

    None ends the search; `search.finished` is its outcome.
    """
    p, width = search.params, search.params.beam_width
    place = {name: i for i, name in enumerate(search.names)}
    length = len(search.beams[0].token_ids) + 1
    ranked = sorted(
        (
            (search.beams[place[name]].total + logprob, -place[name], -token)
            for name, token_ids, logprobs in search.offers
            for token, logprob in zip(token_ids, logprobs, strict=True)
        ),
        reverse=True,
    )

    def reason(token: int) -> FinishReason | None:
        return "stop" if token in search.stops else "length" if length == p.max_tokens else None

    best = [(total, -at, -token) for total, at, token in ranked]
    ended = [
        Hypothesis((*search.beams[at].token_ids, token), total, total / length**p.length_penalty, why)
        for total, at, token in best[:width]
        if (why := reason(token))
    ]
    finished = search.finished
    if not (p.early_stopping is True and len(finished) == width):
        finished = tuple(sorted((*finished, *ended), key=lambda one: -one.score)[:width])
    going = [(total, at, token) for total, at, token in best if not reason(token)][:width]
    search = search._replace(finished=finished, offers=())
    if not going or _enough(search, going[0][0], length):
        return search, None
    beams = tuple(Beam((*search.beams[at].token_ids, token), total) for total, at, token in going)
    choice = Choice(tuple(search.names[at] for _, at, _ in going), tuple(token for _, _, token in going))
    return search._replace(beams=beams), choice


def _enough(search: Search, best: float, length: int) -> bool:
    """Whether no beam can improve on the finished ones, by the rule of `early_stopping`."""
    p, finished = search.params, search.finished
    if len(finished) < p.beam_width:
        return False
    if p.early_stopping is True:
        return True
    if p.early_stopping == "never" and p.length_penalty > 0:
        length = p.max_tokens
    return not best / length**p.length_penalty > finished[-1].score
