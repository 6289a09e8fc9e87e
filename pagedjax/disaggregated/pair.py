"""`PrefillDecode`: two engines of one process as one `LLM`. A request changes engines when its
prompt is computed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pagedjax.engine import handover as handovers
from pagedjax.engine import interrupts
from pagedjax.engine.session import Branches, Calls, GenerationRequest, Session
from pagedjax.host import admission, scheduler
from pagedjax.host.types import Event
from pagedjax.llm import LLM
from pagedjax.options.params import SamplingParams

log = logging.getLogger("pagedjax.disaggregated")


class PrefillDecode:
    """Two LLMs of the same model: `prefill` computes prompts, `decode` the tokens after the first.

    A sequence is handed over when `decode` has a row and blocks for it; until then `prefill` goes
    on with it. A sequence that `decode` refuses, e.g. because `decode` sleeps or its weights were
    updated alone, ends in `prefill`, with a warning. The two may be on different devices, or
    meshes. The tokens are the same as with one engine.

    Args:
        prefill, decode: two LLMs with the same weights, which are not compared.

    Raises:
        ValueError: both are one engine, or a fact of their models or caches differs
            (`engine.handover.facts`).
    """

    def __init__(self, prefill: LLM, decode: LLM) -> None:
        self.session = PairSession(prefill.session, decode.session)
        self._llm = copy.copy(prefill)
        self._llm.session = self.session  # type: ignore[assignment]

    def generate(self, *args: Any, **options: Any) -> list[Any]:
        """As `LLM.generate`, for sampled sequences alone. It raises ValueError for beam searches
        and taps, too.
        """
        return self._llm.generate(*args, **options)

    def chat(self, *args: Any, **options: Any) -> list[Any]:
        """As `LLM.chat`."""
        return self._llm.chat(*args, **options)

    def stream(self, *args: Any, **options: Any) -> Iterator[str]:
        """As `LLM.stream`."""
        return self._llm.stream(*args, **options)


class PairStep(NamedTuple):
    """The results of a step of either engine, or of both.

    moved: ids of the sequences that changed engines.
    again: ids of the moved sequences that `decode` computes again.
    """

    ended: tuple[str, ...]
    tokens: int
    moved: tuple[str, ...]
    again: tuple[str, ...]


class PairSession(Calls):
    """The session of two engines: what `LLM` needs of a `Session`. Its ids are those of
    `prefill`.
    """

    def __init__(self, prefill: Session, decode: Session) -> None:
        if prefill.engine is decode.engine:
            raise ValueError(
                "prefill and decode are one engine; give two, e.g. LLM(...) twice with devices="
            )
        super().__init__()
        self.turns = interrupts.Turns()
        # these sessions have none of the calls to one of the engines alone
        self.prefill = prefill.another()
        self.decode = decode.another()
        self.grammars = prefill.grammars
        self.grammar_of = prefill.grammar_of
        self._ids: dict[str, str] = {}  # of sequences that moved: prefill's id -> decode's
        self._in_prefill: set[str] = set()  # ids of sequences that have not moved or ended
        self._refused: set[str] = set()  # ids of those among them that cannot move
        self._check()

    def _check(self) -> None:
        handovers.check_processes()
        handovers.check_equal(self.decode.engine.facts, self.prefill.engine.facts)

    def add(self, requests: Sequence[GenerationRequest]) -> list[Branches]:
        """As `Session.add`. The requests must be able to run in both engines, and to leave
        `prefill`.

        Raises:
            ValueError: a request has no sampled sequences, has taps, or can never run; or the facts
                of the engines differ.
        """
        self._check()
        for request in requests:
            params = request.params
            if not isinstance(params, SamplingParams) or params.taps:
                kind = "taps" if isinstance(params, SamplingParams) else type(params).__name__
                raise ValueError(
                    f"a request has {kind}, which one engine computes; use `prefill` or `decode` "
                    "alone"
                )
            if request.adapter is not None:
                adapter = self.prefill.engine.adapters[request.adapter]
                handovers.adapter_of(self.decode.engine.runtime, adapter.content_hash)
        with self.prefill.engine.turns:
            added = self.prefill.add(requests)
            names = {name for branches in added for name in branches}
            try:
                for seq in self.prefill.engine.scheduler_state.waiting:
                    if seq.request_id in names:
                        decode_request = seq.request._replace(
                            request_id=f"p{seq.request_id}", forks=()
                        )
                        admission.check_request(self.decode.engine.scheduler_state, decode_request)
            except BaseException:
                for branches in added:
                    self.prefill.abandon(branches)
                raise
        self._in_prefill |= names
        return added

    def step(self) -> PairStep:
        """A step of each engine that has work of this session, and between them the handovers."""
        prefill_step = self.prefill.step() if self._in_prefill else None
        ended = prefill_step.ended if prefill_step else ()
        tokens = prefill_step.tokens if prefill_step else 0
        self._in_prefill.difference_update(ended)
        with interrupts.of_both(self.prefill.engine.turns, self.decode.engine.turns):
            moved, recomputed = self._move_sequences()
        decode_step = self.decode.step() if self._ids else None
        if decode_step:
            names = {decode_id: name for name, decode_id in self._ids.items()}
            ended_names = [names[i] for i in decode_step.ended if i in names]
            for name in ended_names:
                del self._ids[name]
            ended = (*ended, *ended_names)
            tokens += decode_step.tokens
        self.end(ended)
        return PairStep(ended, tokens, moved, recomputed)

    @interrupts.deferred()  # a sequence is in one of the engines, and this session knows in which
    def _move_sequences(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Hand over every sequence whose prompt is computed, while `decode` has room.

        A sequence that cannot move ends where it is.

        Returns:
            the ids of all sequences that moved, and of those that `decode` computes again.
        """
        self._refused &= self._in_prefill
        source = self.prefill.engine
        target = self.decode.engine
        moved = []
        recomputed = []
        if self.prefill.behind:  # the text of a sequence must have all its tokens
            return (), ()
        for seq in scheduler.running(source.scheduler_state):
            name = seq.request_id
            prompt_computed = seq.computed and seq.length - seq.computed == 1
            may_move = name in self._in_prefill and name not in self._refused
            movable = may_move and not seq.request.forks
            if not (prompt_computed and movable):
                continue
            try:
                handover = source.handover(name)
                if not target.has_room(handover):
                    break
                (decode_id,) = target.new_ids(1)
                if not target.adopt(decode_id, handover, source.padded_pages):
                    recomputed.append(name)
            except ValueError as error:  # refused, and nothing has changed
                log.warning("sequence %r ends in the prefill engine: %s", name, error)
                self._refused.add(name)
                continue
            source.release(name)
            self.decode.branches[decode_id] = self.prefill.branches.pop(name)
            self._in_prefill.discard(name)
            self._ids[name] = decode_id
            moved.append(name)
        return tuple(moved), tuple(recomputed)

    def abandon(self, branches: Branches) -> tuple[Event, ...]:
        """Cancel the branches that are unfinished, in either engine."""
        self._in_prefill.difference_update(branches)
        in_prefill = {}
        in_decode = {}
        for name, branch in branches.items():
            if name in self._ids:
                in_decode[self._ids.pop(name)] = branch
            else:
                in_prefill[name] = branch
        return self.prefill.abandon(in_prefill) + self.decode.abandon(in_decode)
