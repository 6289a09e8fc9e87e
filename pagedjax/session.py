"""`Session`: requests on an engine, and the text that its steps make of them. `LLM` and the server
use one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pagedjax.engine import interrupts
from pagedjax.engine.engine import Engine
from pagedjax.engine.taps import collect
from pagedjax.host.types import Admitted, Event, Finished, FinishReason, Sampled, StepResult
from pagedjax.params import BeamSearchParams, PoolingParams, SamplingParams
from pagedjax.structured.grammars import Grammars
from pagedjax.structured.matcher import Grammar
from pagedjax.text.outputs import BeamOutputBuilder, CompletionOutput, OutputBuilder, RequestOutput
from pagedjax.text.pooling import PoolingBuilder, PoolingOutput, PoolingRequestOutput
from pagedjax.text.tokenizer import NoTokenizer, Tokenizer

Params = SamplingParams | BeamSearchParams
# Of a request, by sequence id; of a beam search, the first id.
Branches = dict[str, OutputBuilder | BeamOutputBuilder | PoolingBuilder]


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete or to pool.

    prompt: its text, None if token ids were given.
    grammar: of `params.structured_outputs`; None: `Session.add` compiles it.
    adapter: the name of one that the engine has loaded; None: the model alone.
    """

    prompt_token_ids: Sequence[int]
    params: Params | PoolingParams
    prompt: str | None = None
    priority: int = 0
    user: str = ""
    grammar: Grammar | None = None
    adapter: str | None = None


class TextDelta(NamedTuple):
    """One new token of a sequence, and the text that is final with it (often none)."""

    sequence_id: str
    token_id: int
    text: str


class SessionStep(NamedTuple):
    """One step of the engine, as the session's requests see it."""

    result: StepResult
    deltas: tuple[TextDelta, ...]
    ended: tuple[str, ...]  # sequence ids; of a beam search, the first
    # of the step, and of stop strings, which end a sequence after the step
    events: tuple[Event, ...]
    tokens: int  # of all sequences, and of beam searches that ended


class Calls:
    """Calls that wait for sequences, in any number of threads. A session is one; so are two that go
    together.

    Attributes:
        turns: one thread at a time queues, steps and abandons.
    """

    turns: interrupts.Turns
    add: Callable[[Sequence[GenerationRequest]], list[Branches]]
    grammar_of: Callable[[GenerationRequest], Grammar | None]
    step: Callable[[], Any]
    abandon: Callable[[Branches], Any]

    def __init__(self) -> None:
        self._calls: list[set[str]] = []  # the sequences that each call waits for

    def end(self, names: Iterable[str]) -> None:
        """No call waits for these any more."""
        for unfinished in self._calls:
            unfinished.difference_update(names)

    @contextmanager
    def awaited(
        self, requests: Sequence[GenerationRequest]
    ) -> Iterator[tuple[list[Branches], set[str]]]:
        """Queue requests; what is unfinished at the end of the block is abandoned.

        Yields:
            The branches of each request, and the names of the unfinished ones: steps remove names
            from it, in whatever thread they run.

        Raises:
            ValueError: as `add`.
        """
        outputs: list[Branches] = []
        unfinished: set[str] = set()
        # before the turn, because compiling takes long
        requests = [replace(request, grammar=self.grammar_of(request)) for request in requests]
        try:
            with interrupts.deferred(), self.turns:  # no request without an owner
                outputs = self.add(requests)
                unfinished.update(name for branches in outputs for name in branches)
                self._calls.append(unfinished)
            yield outputs, unfinished
        finally:
            with interrupts.deferred(), self.turns:
                self._calls = [call for call in self._calls if call is not unfinished]
                for branches in outputs:
                    self.abandon(branches)

    def step_for(self, unfinished: set[str]) -> Any:
        """A step for a call that waits; None if a step of another thread has ended all that it
        waits for.
        """
        with interrupts.deferred(), self.turns:
            return self.step() if unfinished else None


class Session(Calls):
    """Unfinished requests of an engine. Sessions of one engine are independent: each sees its own
    requests.

    Any thread may call it; a step serves the requests of all threads.

    Attributes:
        branches: the outputs under construction, by sequence id.
        grammars: compiles structured outputs.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.turns = engine, tokenizer, engine.turns
        self.branches: Branches = {}
        self._eos = frozenset(eos_token_ids)
        self.grammars = Grammars(tokenizer, engine.model.config.vocab_size, tuple(self._eos))
        self._results: deque[StepResult] = deque()  # of steps that other sessions ran
        with self.turns:
            engine.sessions.add(self)

    def another(self) -> Session:
        """A session of the same engine, without requests."""
        return Session(self.engine, self.tokenizer, self._eos)

    def add(self, requests: Sequence[GenerationRequest]) -> list[Branches]:
        """Queue all requests, or none of them. Returns the branches of each.

        Raises:
            ValueError: a request that can never run (see `Engine.add`), stop strings or bad words
                without a tokenizer, or structured outputs that cannot be compiled.
        """
        for params in (request.params for request in requests):
            for name in ("stop", "bad_words") if isinstance(params, SamplingParams) else ():
                if isinstance(self.tokenizer, NoTokenizer) and (texts := getattr(params, name)):
                    what = f"{name} is {texts!r:.80}, but this model has no tokenizer and no text"
                    raise ValueError(f"{what}; use {name}_token_ids")
        compiled = [self.grammar_of(request) for request in requests]
        added: list[Branches] = []
        # the sequences of bad words, often of all requests
        spelled: dict[Any, tuple[tuple[int, ...], ...]] = {}
        try:
            # a request is in the engine and in `added`, or in none of them
            with interrupts.deferred(), self.engine.turns:
                for request, grammar in zip(requests, compiled, strict=True):
                    params = request.params
                    if isinstance(params, SamplingParams) and params.best_of is not None:
                        params = params.drawn()
                    if isinstance(params, SamplingParams) and (words := params.bad_words):
                        ids = spelled[words] = spelled.get(words) or spellings(
                            words, self.tokenizer
                        )
                        params = replace(
                            params,
                            bad_words=(),
                            bad_words_token_ids=(*params.bad_words_token_ids, *ids),
                        )
                    width = params.beam_width if isinstance(params, BeamSearchParams) else params.n
                    first, *forks = names = self.engine.new_ids(width)
                    order: dict[str, Any] = {
                        "priority": request.priority,
                        "user": request.user,
                        "grammar": grammar,
                    }
                    if request.adapter is not None:
                        order["adapter"] = request.adapter
                    self.engine.add(first, request.prompt_token_ids, params, forks=forks, **order)
                    added.append(self._outputs(names, request.prompt_token_ids, params))
                for branches in added:
                    self.branches |= branches
        except BaseException:
            for branches in added:
                self.abandon(branches)
            raise
        return added

    def grammar_of(self, request: GenerationRequest) -> Grammar | None:
        """The compiled grammar of a request's structured outputs; None without. Any thread may call
        it.

        Raises:
            ValueError: they cannot be compiled.
        """
        form = (
            request.params.structured_outputs
            if isinstance(request.params, SamplingParams)
            else None
        )
        return request.grammar or (self.grammars.compiled(form) if form else None)

    def _outputs(
        self, names: Sequence[str], prompt: Sequence[int], params: Params | PoolingParams
    ) -> Branches:
        if isinstance(params, PoolingParams):
            return {names[0]: PoolingBuilder()}
        parts = self.tokenizer, prompt, self._eos
        if isinstance(params, BeamSearchParams):
            return {names[0]: BeamOutputBuilder(params, *parts)}
        collected = collect(names, len(prompt)) if params.taps else {}
        each = enumerate(names)
        return {
            name: OutputBuilder(i, params, *parts, collected=collected.get(name))
            for i, name in each
        }

    @interrupts.deferred()
    def step(self) -> SessionStep:
        """Run one step, or take the result of a step that another session of the engine ran.

        The session must have an unfinished request. Ctrl-C waits for the end of the step; pressed
        twice, it does not.
        """
        with self.engine.turns:
            if not self._results:
                result = self.engine.step()
                assert result is not None, "a request is unfinished, so the engine has work"
                for session in self.engine.sessions:
                    session.receive(result)
            done = self._folded(self._results.popleft())
            self.end(done.ended)
            return done

    def receive(self, result: StepResult) -> None:
        """Keep the result of a step for the next call of `step`, if a request of this session is
        unfinished.
        """
        if self.branches:
            self._results.append(result)

    @property
    def behind(self) -> bool:
        """Whether other sessions ran steps whose results are not folded yet."""
        return bool(self._results)

    def _folded(self, result: StepResult) -> SessionStep:
        """The result, folded into the branches."""
        branches, events = self.branches, list(result.events)
        for entry in result.logprobs:
            if isinstance(branch := branches.get(entry.request_id), OutputBuilder):
                branch.take(entry)
        for part in result.taps:
            if (
                isinstance(branch := branches.get(part.request_id), OutputBuilder)
                and branch.collected
            ):
                branch.collected.take(part)
        reasons: dict[str, FinishReason] = {
            e.request_id: e.reason for e in result.events if isinstance(e, Finished)
        }
        deltas, ended, searched = [], [], 0
        for event in result.events:
            if isinstance(event, Admitted) and event.request_id in branches:
                branch = branches[event.request_id]
                branch.num_cached = (
                    event.num_cached if branch.num_cached is None else branch.num_cached
                )
            if not isinstance(event, Sampled):
                continue
            # a row with drafts may have several
            last = {name: i for i, name in enumerate(event.request_ids)}
            for i, (name, token) in enumerate(zip(event.request_ids, event.token_ids, strict=True)):
                branch = branches.get(name)
                if not isinstance(branch, OutputBuilder):
                    continue
                reason = reasons.get(name) if i == last[name] else None
                deltas.append(
                    TextDelta(name, token, branch.push(token, reason, result.params_version))
                )
                if branch.finish_reason is not None:
                    del branches[name]
                    ended.append(name)
                    if name not in reasons:  # a stop string, which the scheduler does not know
                        events += self.engine.cancel(name, "stop")
        for name, sequences in result.beams:
            branch = branches.pop(name, None)
            if isinstance(branch, BeamOutputBuilder):
                branch.end(sequences)
                searched += sum(len(one.token_ids) for one in sequences)
                ended.append(name)
        for name, data in result.pooled:
            branch = branches.pop(name, None)
            if isinstance(branch, PoolingBuilder):
                branch.end(data)
                ended.append(name)
        return SessionStep(
            result, tuple(deltas), tuple(ended), tuple(events), len(deltas) + searched
        )

    @interrupts.deferred()
    def abandon(self, branches: Branches) -> tuple[Event, ...]:
        """Cancel the branches that are unfinished."""
        events: tuple[Event, ...] = ()
        with self.engine.turns:
            for name, branch in branches.items():
                if branch.finish_reason is None:
                    self.branches.pop(name, None)
                    events += self.engine.cancel(name)
        return events


def spellings(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of words, each at the beginning of a text and behind a space, without repeats."""
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(ids for ids in found if ids))


def output_of(request_id: str, request: GenerationRequest, branches: Mapping[str, Any]) -> Any:
    """The output of a request that has ended: RequestOutput, or PoolingRequestOutput of a prompt
    that was pooled.
    """
    leader, *_ = several = list(branches.values())
    if isinstance(leader, PoolingBuilder):
        assert leader.data is not None, "it has ended"
        ids = tuple(request.prompt_token_ids)
        return PoolingRequestOutput(
            request_id, PoolingOutput(leader.data), ids, leader.num_cached or 0
        )
    return RequestOutput(
        request_id=request_id,
        prompt=request.prompt,
        prompt_token_ids=tuple(request.prompt_token_ids),
        outputs=leader.completions()
        if isinstance(leader, BeamOutputBuilder)
        else _best(several, request.params),
        prompt_logprobs=leader.prompt_positions() if isinstance(leader, OutputBuilder) else None,
        num_cached_tokens=leader.num_cached or 0,
    )


def _best(branches: Sequence[Any], params: Any) -> tuple[CompletionOutput, ...]:
    """All branches; of `best_of`, the n with the largest summed log-probability, the best first."""
    if params.best_of is not None and params.drawn().n > params.n:
        branches = sorted(branches, key=lambda branch: -branch.cumulative)[: params.n]
    outputs = (branch.completion() for branch in branches)
    shown = params.logprobs is not None
    return tuple(
        replace(output, index=i, logprobs=output.logprobs if shown else None)
        for i, output in enumerate(outputs)
    )
