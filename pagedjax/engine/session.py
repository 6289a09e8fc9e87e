"""`Session`: requests on an engine, and the text of the tokens that its steps give them. `LLM` and
the server use one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pagedjax.engine import interrupts
from pagedjax.engine.engine import Engine
from pagedjax.engine.requests import Begun, EngineRequest
from pagedjax.host.types import Admitted, Event, Finished, FinishReason, Sampled, StepResult
from pagedjax.options.params import BeamSearchParams, PoolingParams, SamplingParams
from pagedjax.text.outputs import BeamOutputBuilder, CompletionOutput, OutputBuilder, RequestOutput
from pagedjax.text.pooling import PoolingBuilder, PoolingOutput, PoolingRequestOutput
from pagedjax.text.structured.grammars import Grammars
from pagedjax.text.structured.matcher import Grammar
from pagedjax.text.tap_arrays import collectors
from pagedjax.text.tokenizer import NoTokenizer, Tokenizer

Params = SamplingParams | BeamSearchParams
# the outputs of a request, by sequence id; of a beam search, by its first id
Branches = dict[str, OutputBuilder | BeamOutputBuilder | PoolingBuilder]


class Progress(NamedTuple):
    """What other engines generated of a request with a seed.

    tokens: of each branch, those generated so far.
    ended: of each branch, whether it has ended.
    cached: tokens of the prompt that the first engine found in its cache.
    """

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    cached: int


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete or to pool.

    prompt: its text; None if token ids were given.
    grammar: that of `params.structured_outputs`; None: `Session.add` compiles it.
    adapter: the name of an adapter that the engine has loaded; None: the model alone.
    progress: of sampled branches that another engine began; None: they begin here.
    predicted, service_class, deadline: for a policy that reads them, see `Engine.add`.
    """

    prompt_token_ids: Sequence[int]
    params: Params | PoolingParams
    prompt: str | None = None
    priority: int = 0
    user: str = ""
    grammar: Grammar | None = None
    adapter: str | None = None
    progress: Progress | None = None
    predicted: int | None = None
    service_class: str = ""
    deadline: float | None = None


class TextDelta(NamedTuple):
    """One new token of a sequence, and the text that is final with it (often none)."""

    sequence_id: str
    token_id: int
    text: str


class SessionStep(NamedTuple):
    """One step of the engine, as the session's requests see it."""

    result: StepResult
    deltas: tuple[TextDelta, ...]
    ended: tuple[str, ...]  # sequence ids; of a beam search, its first id
    # those of the step, and those of stop strings, which end a sequence after the step
    events: tuple[Event, ...]
    tokens: int  # new tokens of all sequences, and all tokens of beam searches that ended


class Calls:
    """Calls that wait for sequences, in any number of threads. The base of a session, and of a pair
    of sessions that prefill and decode.

    Attributes:
        turns: lets one thread at a time queue requests, run steps and abandon requests.
    """

    turns: interrupts.Turns
    add: Callable[[Sequence[GenerationRequest]], list[Branches]]
    grammar_of: Callable[[GenerationRequest], Grammar | None]
    step: Callable[[], Any]
    abandon: Callable[[Branches], Any]

    def __init__(self) -> None:
        self._calls: list[set[str]] = []  # the sequences that each call waits for

    def end(self, names: Iterable[str]) -> None:
        """Let no call wait for these sequences any more."""
        for unfinished in self._calls:
            unfinished.difference_update(names)

    @contextmanager
    def call(
        self, requests: Sequence[GenerationRequest]
    ) -> Iterator[tuple[list[Branches], set[str]]]:
        """Queue requests. Those that are unfinished at the end of the block are abandoned.

        Yields:
            (the branches of each request, the sequence ids of the unfinished branches). Steps
            remove ids from this set, in whatever thread they run.

        Raises:
            ValueError: as `add`.
        """
        outputs: list[Branches] = []
        unfinished: set[str] = set()
        # before the turn, because compiling takes long
        requests = [replace(request, grammar=self.grammar_of(request)) for request in requests]
        try:
            # Ctrl-C waits, so that each request in the engine is in `outputs` too
            with interrupts.deferred(), self.turns:
                outputs = self.add(requests)
                unfinished.update(name for branches in outputs for name in branches)
                self._calls.append(unfinished)
            yield outputs, unfinished
        finally:
            with interrupts.deferred(), self.turns:
                self._calls = [names for names in self._calls if names is not unfinished]
                for branches in outputs:
                    self.abandon(branches)

    def step_for(self, unfinished: set[str]) -> Any:
        """Run a step for a call that waits. Returns None, without a step, if steps of other threads
        have ended all its sequences.
        """
        with interrupts.deferred(), self.turns:
            return self.step() if unfinished else None


class Session(Calls):
    """Unfinished requests of an engine. Sessions of one engine are independent: each sees only its
    own requests.

    Any thread may call it. A step serves the requests of all threads.

    Attributes:
        branches: the outputs under construction, by sequence id.
        grammars: compiles structured outputs.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        super().__init__()
        self.engine = engine
        self.tokenizer = tokenizer
        self.turns = engine.turns
        self.branches: Branches = {}
        self._eos = frozenset(eos_token_ids)
        self.grammars = Grammars(tokenizer, engine.model.config.vocab_size, tuple(self._eos))
        self._results: deque[StepResult] = deque()  # of steps that other sessions ran
        with self.turns:
            engine.sessions.add(self)

    def another(self) -> Session:
        """Returns a session of the same engine, without requests."""
        return Session(self.engine, self.tokenizer, self._eos)

    def add(self, requests: Sequence[GenerationRequest]) -> list[Branches]:
        """Queue all requests, or none of them. Returns the branches of each.

        Those of a request with `progress` have no tokens yet: `OutputBuilder.restore` gives them
        theirs. Branches that have ended are not computed.

        Raises:
            ValueError: a request that can never run (see `Engine.add`), stop strings or bad words
                without a tokenizer, or structured outputs that cannot be compiled.
        """
        if isinstance(self.tokenizer, NoTokenizer):
            for request in requests:
                _check_without_text(request.params)
        grammars = [self.grammar_of(request) for request in requests]
        added: list[Branches] = []
        submitted: list[str] = []
        spelled: dict[Any, tuple[tuple[int, ...], ...]] = {}  # many requests have the same words
        try:
            # Ctrl-C waits, so that each request in the engine is in `submitted` too
            with interrupts.deferred(), self.engine.turns:
                for request, grammar in zip(requests, grammars, strict=True):
                    params = request.params
                    if isinstance(params, SamplingParams):
                        params = self._engine_params(params, spelled)
                    width = params.beam_width if isinstance(params, BeamSearchParams) else params.n
                    names = self.engine.new_ids(width)
                    engine_request = EngineRequest(
                        names,
                        request.prompt_token_ids,
                        params,
                        priority=request.priority,
                        user=request.user,
                        grammar=grammar,
                        adapter=request.adapter,
                        predicted=request.predicted,
                        service_class=request.service_class,
                        deadline=request.deadline,
                    )
                    for part in _unfinished_parts(engine_request, request.progress):
                        self.engine._submit(part)
                        submitted += part.names
                    branches = self._outputs(names, request.prompt_token_ids, params)
                    added.append(branches)
                    if request.progress:
                        for branch in branches.values():
                            branch.num_cached = request.progress.cached
                for branches in added:
                    self.branches |= {
                        name: branches[name] for name in submitted if name in branches
                    }
        except BaseException:
            self._withdraw(submitted)
            raise
        return added

    def _engine_params(
        self, params: SamplingParams, spelled: dict[Any, tuple[tuple[int, ...], ...]]
    ) -> SamplingParams:
        """Returns the parameters as the engine takes them: without `best_of`, with the number of
        given tokens as the limit, and with the token ids of bad words in place of their texts.

        Args:
            spelled: the token ids of bad words, by the words; new ones are added.
        """
        if params.best_of is not None or params.trace_decode_token_ids is not None:
            params = params.drawn()
        words = params.bad_words
        if not words:
            return params
        if words not in spelled:
            spelled[words] = spellings(words, self.tokenizer)
        ids = (*params.bad_words_token_ids, *spelled[words])
        return replace(params, bad_words=(), bad_words_token_ids=ids)

    def grammar_of(self, request: GenerationRequest) -> Grammar | None:
        """Returns the compiled grammar of a request's structured outputs; None if it has none. Any
        thread may call it.

        Raises:
            ValueError: they cannot be compiled.
        """
        if request.grammar or not isinstance(request.params, SamplingParams):
            return request.grammar
        form = request.params.structured_outputs
        return self.grammars.compiled(form) if form else None

    def _outputs(
        self, names: Sequence[str], prompt: Sequence[int], params: Params | PoolingParams
    ) -> Branches:
        if isinstance(params, PoolingParams):
            return {names[0]: PoolingBuilder()}
        if isinstance(params, BeamSearchParams):
            return {names[0]: BeamOutputBuilder(params, self.tokenizer, prompt, self._eos)}
        taps = collectors(names, len(prompt)) if params.taps else {}
        return {
            name: OutputBuilder(
                i, params, self.tokenizer, prompt, self._eos, collected=taps.get(name)
            )
            for i, name in enumerate(names)
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
            step = self._fold(self._results.popleft())
            self.end(step.ended)
            return step

    def receive(self, result: StepResult) -> None:
        """Remember the result of a step for the next call of `step`, if a request of this session
        is unfinished.
        """
        if self.branches:
            self._results.append(result)

    @property
    def behind(self) -> bool:
        """Whether other sessions ran steps whose results are not in the branches yet."""
        return bool(self._results)

    def _fold(self, result: StepResult) -> SessionStep:
        """Add the result of a step to the branches. Returns the step as this session's requests see
        it.
        """
        self._fold_details(result)
        deltas, ended, stops = self._fold_tokens(result)
        tokens = len(deltas)
        for name, sequences in result.beams:
            branch = self.branches.pop(name, None)
            if isinstance(branch, BeamOutputBuilder):
                branch.end(sequences)
                tokens += sum(len(sequence.token_ids) for sequence in sequences)
                ended.append(name)
        for name, data in result.pooled:
            branch = self.branches.pop(name, None)
            if isinstance(branch, PoolingBuilder):
                branch.end(data)
                ended.append(name)
        return SessionStep(result, tuple(deltas), tuple(ended), (*result.events, *stops), tokens)

    def _fold_details(self, result: StepResult) -> None:
        """Add log-probabilities, taps, and the numbers of cached tokens."""
        for entry in result.logprobs:
            branch = self.branches.get(entry.request_id)
            if isinstance(branch, OutputBuilder):
                branch.take(entry)
        for part in result.taps:
            branch = self.branches.get(part.request_id)
            if isinstance(branch, OutputBuilder) and branch.collected:
                branch.collected.take(part)
        for event in result.events:
            if isinstance(event, Admitted) and event.request_id in self.branches:
                branch = self.branches[event.request_id]
                if branch.num_cached is None:  # its first admission
                    branch.num_cached = event.num_cached

    def _fold_tokens(self, result: StepResult) -> tuple[list[TextDelta], list[str], list[Event]]:
        """Add the new tokens.

        Returns:
            (the tokens with their texts, the ids of sequences that ended, the events of stop
            strings)
        """
        reasons: dict[str, FinishReason] = {
            event.request_id: event.reason for event in result.events if isinstance(event, Finished)
        }
        deltas: list[TextDelta] = []
        ended: list[str] = []
        stops: list[Event] = []
        for name, reason in reasons.items():
            if reason == "rejected" and name in self.branches:
                self.branches.pop(name).finish_reason = reason
                ended.append(name)
        for event in result.events:
            if not isinstance(event, Sampled):
                continue
            # a row with drafts may have several tokens: the reason is that of its last one
            last_places = {name: i for i, name in enumerate(event.request_ids)}
            for i, (name, token) in enumerate(zip(event.request_ids, event.token_ids, strict=True)):
                branch = self.branches.get(name)
                if not isinstance(branch, OutputBuilder):
                    continue
                reason = reasons.get(name) if i == last_places[name] else None
                text = branch.push(token, reason, result.params_version)
                deltas.append(TextDelta(name, token, text))
                if branch.finish_reason is not None:
                    del self.branches[name]
                    ended.append(name)
                    if name not in reasons:  # a stop string, which the scheduler does not know
                        stops += self.engine.cancel(name, "stop")
        return deltas, ended, stops

    def abandon(self, branches: Branches) -> tuple[Event, ...]:
        """Cancel the branches that are unfinished. Returns the events."""
        return self._withdraw(
            [name for name, branch in branches.items() if branch.finish_reason is None]
        )

    @interrupts.deferred()
    def _withdraw(self, names: Iterable[str]) -> tuple[Event, ...]:
        """Cancel sequences, all of them even if Ctrl-C is pressed. Returns the events."""
        events: tuple[Event, ...] = ()
        with self.engine.turns:
            for name in names:
                self.branches.pop(name, None)
                events += self.engine.cancel(name)
        return events


def _unfinished_parts(request: EngineRequest, progress: Progress | None) -> list[EngineRequest]:
    """Returns what an engine has to compute of a request: all of it together, or, if another
    engine began it, each unfinished branch alone.
    """
    params = request.params
    if progress is None or not isinstance(params, SamplingParams):
        return [request]
    assert params.seed is not None, "its next tokens depend on it"
    parts = []
    for i, name in enumerate(request.names):
        if progress.ended[i]:
            continue
        seed = (params.seed + i) % 2**32
        begun = Begun(seed, progress.tokens[i]) if progress.tokens[i] else None
        branch_params = replace(params, n=1, seed=seed)
        parts.append(request._replace(names=(name,), params=branch_params, begun=begun))
    return parts


def _check_without_text(params: Params | PoolingParams) -> None:
    """Raise a ValueError for stop strings and bad words, which a model without a tokenizer cannot
    have.
    """
    if not isinstance(params, SamplingParams):
        return
    for name in ("stop", "bad_words"):
        texts = getattr(params, name)
        if texts:
            raise ValueError(
                f"{name} is {texts!r:.80}, but this model has no tokenizer and no text; "
                f"use {name}_token_ids"
            )


def spellings(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of words, each at the beginning of a text and behind a space, without
    repeats.
    """
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    spelled = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(ids for ids in spelled if ids))


def output_of(request_id: str, request: GenerationRequest, branches: Mapping[str, Any]) -> Any:
    """Returns the output of a request that has ended: a RequestOutput, or a PoolingRequestOutput of
    a prompt that was pooled.

    Raises:
        ValueError: the policy rejected a search, or a prompt to pool. A rejected completion is one
            without tokens, whose finish_reason says so.
    """
    builders = list(branches.values())
    leader = builders[0]
    ids = tuple(request.prompt_token_ids)
    if leader.finish_reason == "rejected" and not isinstance(leader, OutputBuilder):
        raise ValueError(
            f"the policy rejected request {request_id!r}; send it again later, or take a policy "
            "that rejects none"
        )
    if isinstance(leader, PoolingBuilder):
        assert leader.data is not None, "it has ended"
        return PoolingRequestOutput(
            request_id, PoolingOutput(leader.data), ids, leader.num_cached or 0
        )
    if isinstance(leader, BeamOutputBuilder):
        completions = leader.completions()
    else:
        completions = _completions(builders, request.params)
    return RequestOutput(
        request_id=request_id,
        prompt=request.prompt,
        prompt_token_ids=ids,
        outputs=completions,
        prompt_logprobs=leader.prompt_positions() if isinstance(leader, OutputBuilder) else None,
        num_cached_tokens=leader.num_cached or 0,
    )


def _completions(branches: Sequence[Any], params: Any) -> tuple[CompletionOutput, ...]:
    """Returns the completions of all branches; with `best_of`, of the n branches with the largest
    summed log-probability, the best first.
    """
    if params.best_of is not None and params.drawn().n > params.n:
        branches = sorted(branches, key=lambda branch: -branch.cumulative)[: params.n]
    outputs = (branch.completion() for branch in branches)
    with_logprobs = params.logprobs is not None  # `drawn` asks for them in any case
    return tuple(
        replace(output, index=i, logprobs=output.logprobs if with_logprobs else None)
        for i, output in enumerate(outputs)
    )
