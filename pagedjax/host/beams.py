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
    # (name, tokens, logprobs) of the beams that have offered at this position
    offers: tuple[tuple[str, tuple[int, ...], tuple[float, ...]], ...] = ()
    finished: tuple[Hypothesis, ...] = ()  # at most W, the best first

    @property
    def complete(self) -> bool:
        """Whether every beam has offered its continuations."""
        return len(self.offers) == len(self.beams)


def candidates(params: BeamSearchParams, stops: int) -> int:
    """The number of continuations that each beam must offer.

    Args:
        stops: the number of stop tokens.
    """
    return params.beam_width + stops


def start(params: BeamSearchParams, stops: frozenset[int], names: tuple[str, ...]) -> Search:
    return Search(params, stops, names, (Beam((), 0.0),))


def offer(
    search: Search, name: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> Search:
    """Stores the best continuations of the beam `name`. A second offer replaces the first."""
    offers = tuple(offer for offer in search.offers if offer[0] != name)
    return search._replace(offers=(*offers, (name, token_ids, logprobs)))


def advance(search: Search) -> tuple[Search, Choice | None]:
    """Decides the next position when every beam has made its offer -> (search, choice for the
    beams).

    The choice is None if the search ends; `search.finished` is its result.
    """
    params = search.params
    width = params.beam_width
    length = len(search.beams[0].token_ids) + 1
    ended: list[Hypothesis] = []
    running: list[tuple[float, int, int]] = []
    for rank, (total, beam, token) in enumerate(_ranked_continuations(search)):
        reason = _end_reason(search, length, token)
        if reason is None:
            running.append((total, beam, token))
        elif rank < width:
            token_ids = (*search.beams[beam].token_ids, token)
            score = total / length**params.length_penalty
            ended.append(Hypothesis(token_ids, total, score, reason))
    finished = search.finished
    if not (params.early_stopping is True and len(finished) == width):
        by_score = sorted((*finished, *ended), key=lambda hypothesis: -hypothesis.score)
        finished = tuple(by_score[:width])
    search = search._replace(finished=finished, offers=())
    if not running or _is_done(search, running[0][0], length):
        return search, None
    running = running[:width]
    choice = Choice(
        parents=tuple(search.names[beam] for _, beam, _ in running),
        token_ids=tuple(token for _, _, token in running),
    )
    beams = tuple(
        Beam((*search.beams[beam].token_ids, token), total) for total, beam, token in running
    )
    return search._replace(beams=beams), choice


def _ranked_continuations(search: Search) -> list[tuple[float, int, int]]:
    """(sum of log-probabilities, index of the beam, token) of all continuations, the best first.
    Ties go to the earlier beam, then to the lower token.
    """
    index = {name: i for i, name in enumerate(search.names)}
    continuations: list[tuple[float, int, int]] = []
    for name, token_ids, logprobs in search.offers:
        beam = index[name]
        total = search.beams[beam].total
        continuations += [
            (total + logprob, beam, token)
            for token, logprob in zip(token_ids, logprobs, strict=True)
        ]
    return sorted(continuations, key=lambda entry: (entry[0], -entry[1], -entry[2]), reverse=True)


def _end_reason(search: Search, length: int, token: int) -> FinishReason | None:
    """Why a sequence of `length` tokens ends with `token`; None if it does not end."""
    if token in search.stops:
        return "stop"
    return "length" if length == search.params.max_tokens else None


def _is_done(search: Search, best_total: float, length: int) -> bool:
    """Whether no beam can become better than the finished ones, by the rule of `early_stopping`."""
    params = search.params
    if len(search.finished) < params.beam_width:
        return False
    if params.early_stopping is True:
        return True
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = params.max_tokens
    return not best_total / length**params.length_penalty > search.finished[-1].score
