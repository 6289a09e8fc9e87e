"""Beam search as a pure fold: it chooses the continuations that run, those that are finished, and
the end.

It uses tokens and log-probabilities only. Sharing and copying blocks is the scheduler's task
(branches.py): the scheduler receives the choice of a step as one (parent, token) for each beam.

The rules are those of transformers' `generate(num_beams=W, do_sample=False)`, so that scores agree
sequence by sequence. Of the continuations of all beams, ranked by the sum of their
log-probabilities,

    finished    those of the best W that end, by a stop token or at max_tokens. A sequence of m tokens has the score
                sum / m ** length_penalty, and the W best finished sequences are kept.
    running     the best W of those that do not end.

W + (number of stop tokens) continuations of each beam are enough for both: of one beam's
continuations, at most one for each stop token ends, so its W best others are among them.
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
    names: tuple[str, ...]  # ids of the W beams: beam i runs as the sequence names[i]
    beams: tuple[Beam, ...]  # one before the first step, W after it
    offers: tuple[
        tuple[str, tuple[int, ...], tuple[float, ...]], ...
    ] = ()  # (name, tokens, logprobs) of the beams that have offered at this position
    finished: tuple[Hypothesis, ...] = ()  # at most W, the best first

    @property
    def complete(self) -> bool:
        """Whether every beam has offered its continuations."""
        return len(self.offers) == len(self.beams)


def candidates(params: BeamSearchParams, stops: int) -> int:
    """Returns the number of continuations that each beam must offer."""
    return params.beam_width + stops


def start(params: BeamSearchParams, stops: frozenset[int], names: tuple[str, ...]) -> Search:
    return Search(params, stops, names, (Beam((), 0.0),))


def offer(
    search: Search, name: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> Search:
    """Stores the best continuations of the beam `name`. A second offer replaces the first."""
    others = tuple(other for other in search.offers if other[0] != name)
    return search._replace(offers=(*others, (name, token_ids, logprobs)))


def advance(search: Search) -> tuple[Search, Choice | None]:
    """Decides the next position when every beam has made its offer -> (search, choice for the
    beams).

    The choice is None if the search ends; `search.finished` is its result.
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
        Hypothesis(
            (*search.beams[at].token_ids, token), total, total / length**p.length_penalty, why
        )
        for total, at, token in best[:width]
        if (why := reason(token))
    ]
    finished = search.finished
    if not (p.early_stopping is True and len(finished) == width):
        finished = tuple(sorted((*finished, *ended), key=lambda one: -one.score)[:width])
    running = [(total, at, token) for total, at, token in best if not reason(token)][:width]
    search = search._replace(finished=finished, offers=())
    if not running or _is_done(search, running[0][0], length):
        return search, None
    beams = tuple(Beam((*search.beams[at].token_ids, token), total) for total, at, token in running)
    choice = Choice(
        tuple(search.names[at] for _, at, _ in running), tuple(token for _, _, token in running)
    )
    return search._replace(beams=beams), choice


def _is_done(search: Search, best: float, length: int) -> bool:
    """Whether no beam can become better than the finished ones, by the rule of `early_stopping`."""
    p, finished = search.params, search.finished
    if len(finished) < p.beam_width:
        return False
    if p.early_stopping is True:
        return True
    if p.early_stopping == "never" and p.length_penalty > 0:
        length = p.max_tokens
    return not best / length**p.length_penalty > finished[-1].score
