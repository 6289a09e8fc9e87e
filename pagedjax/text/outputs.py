"""What a user gets back, under vLLM's names, and how it is put together token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pagedjax.host.types import FinishReason, Hypothesis, TokenLogprobs
from pagedjax.options.params import BeamSearchParams, SamplingParams
from pagedjax.text.tap_arrays import TapArrays, TapCollector
from pagedjax.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position. `rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


# token id -> candidate: the chosen token and the most likely ones
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class ToolCall:
    """A call that an answer asks for. `arguments`: the text of a JSON object, or its start if the
    answer was cut.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CompletionOutput:
    """One branch of a request. `token_ids` ends with the stop token, if one ended it; `text` does
    not show it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    # the stop string or stop token; None for EOS and for other reasons
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    score: float | None = None  # of a beam: cumulative_logprob / len(token_ids) ** length_penalty
    # of LLM.chat with tools; `text` has them too, as the model wrote them
    tool_calls: tuple[ToolCall, ...] = ()
    taps: TapArrays | None = None  # of SamplingParams.taps
    # of each token, the `params_version` that made it; of a beam, which has many: none
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one request: its prompt, and one output for each branch."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    # the first is None: nothing predicts it
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finished: bool = True
    # of the prompt, found in the cache when the request was first admitted
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class BeamSearchSequence:
    """One result of a beam search in vLLM's form: tokens and text begin with the prompt's, and they
    have no stop token unless `include_stop_str_in_output` asks for it."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The results of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchOutput:
    """The output of a beam search in vLLM's form."""
    sequences = []
    for beam in output.outputs:
        cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = [*output.prompt_token_ids, *(beam.token_ids[:-1] if cut else beam.token_ids)]
        text = tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        total = beam.cumulative_logprob or 0.0
        sequences.append(
            BeamSearchSequence(tokens, text, total, beam.finish_reason, beam.stop_reason)
        )
    return BeamSearchOutput(sequences)


@dataclass
class OutputBuilder:
    """One branch while it is being generated."""

    index: int
    params: SamplingParams
    tokenizer: Tokenizer
    prompt: Sequence[int]
    eos: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    # log-probabilities of the tokens, by position
    chosen: dict[int, float] = field(default_factory=dict)
    num_cached: int | None = None  # tokens found in the cache at its first admission
    collected: TapCollector | None = None  # what its taps gave so far
    versions: list[int] = field(default_factory=list)  # of the weights that made each token

    def __post_init__(self) -> None:
        p = self.params
        self._detokenizer = Detokenizer(
            self.tokenizer, self.prompt, skip_special_tokens=p.skip_special_tokens
        )
        self._stop = StopChecker(
            p.stop, min_tokens=p.min_tokens, include_stop_str_in_output=p.include_stop_str_in_output
        )

    def push(self, token_id: int, reason: FinishReason | None, version: int = 0) -> str:
        """Take the next token, and return the new text that is final.

        Sets `finish_reason` when the branch has ended; a stop string can end it before the
        scheduler does.

        Args:
            reason: why the scheduler ended the request with this token; None if it did not.
            version: of the weights that made the token.
        """
        self.token_ids.append(token_id)
        self.versions.append(version)
        is_stop_token = reason == "stop"
        if is_stop_token and (token_id not in self.eos or self.params.ignore_eos):
            self.stop_reason = token_id
        visible = not is_stop_token or self.params.include_stop_str_in_output
        if reason == "abort" and self.params.structured_outputs:
            visible = False  # the form failed, and did not allow this token
        piece = self._detokenizer.push(token_id) if visible and self.params.detokenize else ""
        new, matched = self._stop.push(piece)
        if reason is not None and not matched:
            tail, matched = self._stop.finish(self._detokenizer.flush())
            new += tail
        self.text += new
        if matched and not is_stop_token:
            reason = "stop"
            self.stop_reason = self._stop.matched
        self.finish_reason = reason
        return new

    def restore(
        self,
        token_id: int,
        logprobs: PositionLogprobs | None,
        reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> str:
        """Take the next token of another builder of this branch, and return the new text that is
        final: the same as there.

        Args:
            logprobs: those of the token.
            reason, stop_reason: why the branch ended with this token; None if it did not.
        """
        if logprobs is not None:
            position = len(self.token_ids)
            self.logprobs[position] = logprobs
            self.chosen[position] = logprobs[token_id].logprob
        # A stop string is found in the text again, also in the part that only an end gives out
        return self.push(token_id, "length" if isinstance(stop_reason, str) else reason)

    def take(self, entry: TokenLogprobs) -> None:
        if entry.prompt:
            self.prompt_logprobs[entry.position] = self._candidates(entry)
        else:
            self.logprobs[entry.position] = self._candidates(entry)
            self.chosen[entry.position] = entry.logprob

    @property
    def cumulative(self) -> float:
        """The sum of the tokens' log-probabilities. A step with drafts may give more tokens than
        the output has.
        """
        return sum([self.chosen[i] for i in range(len(self.token_ids))])

    def _candidates(self, entry: TokenLogprobs) -> PositionLogprobs:
        chosen = Logprob(entry.logprob, entry.rank, self.tokenizer.decode_token(entry.token_id))
        best = {
            token: Logprob(logprob, rank, self.tokenizer.decode_token(token))
            for rank, (token, logprob) in enumerate(
                zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
            )
        }
        return {entry.token_id: chosen} | best

    def completion(self) -> CompletionOutput:
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = tuple(self.logprobs[i] for i in range(len(self.token_ids)))
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            cumulative_logprob=None if logprobs is None else self.cumulative,
            logprobs=logprobs,
            taps=self.collected.arrays(len(self.token_ids)) if self.collected else None,
            versions=tuple(self.versions),
        )

    def prompt_positions(self) -> tuple[PositionLogprobs | None, ...] | None:
        if self.params.prompt_logprobs is None or self.finish_reason == "rejected":
            return None
        return (None, *(self.prompt_logprobs[i] for i in range(1, len(self.prompt))))


@dataclass
class BeamOutputBuilder:
    """A beam search under way. There is nothing to show before it has ended."""

    params: BeamSearchParams
    tokenizer: Tokenizer
    prompt: Sequence[int]
    eos: frozenset[int]
    finish_reason: FinishReason | None = None
    num_cached: int | None = None
    sequences: tuple[Hypothesis, ...] = ()

    def end(self, sequences: tuple[Hypothesis, ...]) -> None:
        self.sequences = sequences
        self.finish_reason = sequences[0].reason

    def completions(self) -> tuple[CompletionOutput, ...]:
        """The n best, the best first."""
        row = replace(self.params.row(0), logprobs=None)
        outputs = []
        for i, (token_ids, total, score, reason) in enumerate(self.sequences[: self.params.n]):
            branch = OutputBuilder(i, row, self.tokenizer, self.prompt, self.eos)
            for token in token_ids[:-1]:
                branch.push(token, None)
            branch.push(token_ids[-1], reason)
            outputs.append(
                replace(branch.completion(), cumulative_logprob=total, score=score, versions=())
            )
        return tuple(outputs)


class StopChecker:
    """Cuts one request's text at the first stop string. A stop string may span several tokens.

    The first is the one that ends first; of several that end at the same character, the longest. A
    stop string that ends in the first `min_tokens` tokens does not count. Text that may be the
    start of a stop string is kept back until more text decides it; it is always shorter than the
    longest stop string.
    """

    def __init__(
        self, stop: Sequence[str], *, min_tokens: int = 0, include_stop_str_in_output: bool = False
    ) -> None:
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include = include_stop_str_in_output
        self._pending = ""
        self._tokens = 0
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """(text to return now, whether to stop), for the text of one more token, which may be
        "".
        """
        self._tokens += 1
        return self._next(text, searched=self._tokens > self._min_tokens)

    def finish(self, text: str = "") -> tuple[str, bool]:
        """`push` for the text of `Detokenizer.flush`, at the end; keeps no text back."""
        text, stopped = self._next(text, searched=self._tokens > self._min_tokens)
        text += self._pending
        self._pending = ""
        return text, stopped

    def _next(self, text: str, *, searched: bool) -> tuple[str, bool]:
        num_pending = len(self._pending)
        text = self._pending + text
        match = first_stop(text, self._stop, num_pending) if searched else None
        if match is not None:
            start, end = match
            self.matched = text[start:end]
            self._pending = ""
            return text[: end if self._include else start], True
        num_pending = max((pending_length(text, stop) for stop in self._stop), default=0)
        final_length = len(text) - num_pending
        self._pending = text[final_length:]
        return text[:final_length], False


def first_stop(text: str, stop: Sequence[str], new: int) -> tuple[int, int] | None:
    """(start, end) of the stop string that ends first after position `new`, the longest of equals;
    None if there is none.
    """
    matches = []
    for string in stop:
        start = text.find(string, max(0, new + 1 - len(string)))
        if start >= 0:
            matches.append((start, start + len(string)))
    return min(matches, key=lambda match: (match[1], match[0]), default=None)


def pending_length(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the start of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start
