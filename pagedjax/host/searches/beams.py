"""Beam search as a pure fold: it chooses the continuations that run, those that are finished, and
the end.

The rules are those of transformers' `generate(num_beams=W, do_sample=False)`, so that scores agree
sequence by sequence. Of the continuations of all beams, ranked by the sum of their
log-probabilities,

    finished    those of the best W that end, by a stop token or at max_tokens. A sequence of m
                tokens has the score sum / m ** length_penalty, and the W best finished sequences
                are kept.
    running     the best W of those that do not end.

W + (number of stop tokens) continuations of each beam are enough for both: of one beam's
continuations, at most one for each stop token ends, so its W best others are among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedjax.host.searches.search import Continuation, Offer, SearchKind
from pagedjax.host.types import FinishReason, Hypothesis
from pagedjax.options.params import BeamSearchParams


class Beam(NamedTuple):
    token_ids: tuple[int, ...]
    total: float  # sum of log-probabilities


class BeamSearch(NamedTuple):
    params: BeamSearchParams
    stops: frozenset[int]
    beams: tuple[Beam, ...]  # one before the first step, W after it
    finished: tuple[Hypothesis, ...] = ()  # at most W, the best first

    def advance(self, offers: Sequence[Offer]) -> tuple[BeamSearch, Sequence[Continuation]]:
        """See `Search`."""
        params = self.params
        width = params.beam_width
        length = len(self.beams[0].token_ids) + 1
        ended: list[Hypothesis] = []
        running: list[tuple[float, int, int]] = []
        for rank, (total, beam, token) in enumerate(_ranked_continuations(self, offers)):
            reason = _end_reason(self, length, token)
            if reason is None:
                running.append((total, beam, token))
            elif rank < width:
                token_ids = (*self.beams[beam].token_ids, token)
                score = total / length**params.length_penalty
                ended.append(Hypothesis(token_ids, total, score, reason))
        by_score = sorted((*self.finished, *ended), key=lambda hypothesis: -hypothesis.score)
        search = self._replace(finished=tuple(by_score[:width]))
        if not running or _is_done(search, running[0][0], length):
            return search, ()
        running = running[:width]
        beams = tuple(
            Beam((*self.beams[beam].token_ids, token), total) for total, beam, token in running
        )
        continuations = tuple(Continuation(beam, token) for _, beam, token in running)
        return search._replace(beams=beams), continuations


def candidates(params: BeamSearchParams, num_stops: int) -> int:
    return params.beam_width + num_stops


def start(params: BeamSearchParams, stops: frozenset[int]) -> BeamSearch:
    return BeamSearch(params, stops, (Beam((), 0.0),))


KIND = SearchKind(candidates, start)


def _ranked_continuations(
    search: BeamSearch, offers: Sequence[Offer]
) -> list[tuple[float, int, int]]:
    """(sum of log-probabilities, index of the beam, token) of all continuations, the best first.
    Ties go to the earlier beam, then to the lower token.
    """
    continuations: list[tuple[float, int, int]] = []
    for beam, offer in enumerate(offers):
        total = search.beams[beam].total
        continuations += [
            (total + logprob, beam, token)
            for token, logprob in zip(offer.token_ids, offer.logprobs, strict=True)
        ]
    return sorted(continuations, key=lambda entry: (entry[0], -entry[1], -entry[2]), reverse=True)


def _end_reason(search: BeamSearch, length: int, token: int) -> FinishReason | None:
    """Why a sequence of `length` tokens ends with `token`; None if it does not end."""
    if token in search.stops:
        return "stop"
    return "length" if length == search.params.max_tokens else None


def _is_done(search: BeamSearch, best_total: float, length: int) -> bool:
    """Whether no beam can become better than the finished ones, by the rule of `early_stopping`.

    Args:
        best_total: the sum of log-probabilities of the best beam, which has `length` tokens.
    """
    params = search.params
    if len(search.finished) < params.beam_width:
        return False
    if params.early_stopping is True:
        return True
    grows_to_the_limit = params.early_stopping == "never" and params.length_penalty > 0
    final_length = params.max_tokens if grows_to_the_limit else length
    best_score = best_total / final_length**params.length_penalty
    can_improve = best_score > search.finished[-1].score
    return not can_improve
