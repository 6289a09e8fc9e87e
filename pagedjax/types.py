"""Plain immutable records that both towers speak of. Imports no jax and no numpy.

Glossary, used in signatures and comments everywhere:

    block        a fixed-size piece of the KV cache that holds `S` token slots; kernels call it a page
    block table  the block ids of one sequence, in token order
    length       tokens of a sequence whose values are known (prompt + generated so far)
    computed     tokens of a sequence whose keys and values are in the cache; `computed` chases `length`
    chunk        the tokens of one sequence that one step computes
    step         schedule -> pack -> step -> commit, once

    B sequences in a step   T packed tokens         P cache blocks    S tokens in a block   M blocks in a table row
    N query heads           K key/value heads       H head size       L layers              V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

FinishReason = Literal["stop", "length", "abort"]
Item = TypeVar("Item")


def _several(value: Any) -> tuple[Any, ...]:
    """A tuple from a list, tuple, set or single item; None is nothing, as in vLLM."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return () if value is None else (value,)
    return tuple(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = _several(value)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"{name} holds {item!r}; token ids are integers of at least 0")
    return tuple(sorted(items)) if isinstance(value, (set, frozenset)) else items


def _bias(value: Any) -> dict[int, float]:
    """Token ids to numbers; JSON clients spell the ids as strings."""
    try:
        bias = {int(token): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"logit_bias is {value!r}; it must map token ids to numbers") from None
    _ids("logit_bias", bias)
    return bias


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and defaults are vLLM's.

    Order of operations on the logits (vLLM's): allowed_token_ids, logit_bias, min_tokens, penalties, temperature,
    min_p, top_k, top_p. `temperature=0` is greedy. `top_k` of 0 or -1 is off. `best_of` branches are drawn and the n
    of the largest summed log-probability returned; None is n.

    Raises:
        ValueError: a value out of its range; the message names the value and the range.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    enable_prefix_caching: bool = True  # False: neither finds blocks in the cache nor leaves any there
    cache_salt: str | None = None  # shares blocks only with requests of the same salt

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:  # normalising the spelling of a value, never its meaning
            object.__setattr__(self, name, value)

        put("stop", _several(self.stop))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            put("logit_bias", _bias(self.logit_bias))

        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{field.name} is {value!r}; it must be an integer")
            if field.type == "float" and (
                isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
            ):
                raise ValueError(f"{field.name} is {value!r}; it must be a finite number")
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name} is {value!r}; it must be True or False")

        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

        check(self.n >= 1, "n", "at least 1")
        best = self.best_of
        rule = f"None, or an integer of at least n ({self.n})"
        check(best is None or (type(best) is int and best >= self.n), "best_of", rule)
        check(0.0 <= self.temperature <= 2.0, "temperature", "between 0 (greedy) and 2")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1 (1 is off)")
        check(self.top_k >= -1, "top_k", "at least 1, or 0 / -1 for off")
        check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 (off) and 1")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        check(0.0 < self.repetition_penalty <= 2.0, "repetition_penalty", "above 0 and at most 2 (1 is off)")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"between 0 and max_tokens ({self.max_tokens})")
        check(self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**32), "seed", "None or in [0, 2**32)")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or (type(value) is int and 0 <= value <= 20), name, "None or an integer from 0 to 20")
        check(all(isinstance(s, str) and s for s in self.stop), "stop", "a non-empty string or several of them")
        check(not (self.stop and not self.detokenize), "stop", "empty when detokenize is False: it matches text")
        salt = self.cache_salt
        check(salt is None or (isinstance(salt, str) and salt != ""), "cache_salt", "None or a non-empty string")
        check(self.allowed_token_ids != (), "allowed_token_ids", "None or non-empty")
        bias = self.logit_bias or {}
        check(all(-100.0 <= v <= 100.0 for v in bias.values()), "logit_bias", "between -100 and 100 for every token")

    def drawn(self) -> SamplingParams:
        """What to run: as many branches as are drawn, with the log-probabilities that choosing among them needs."""
        if self.best_of is None or self.best_of == self.n:
            return self
        return replace(self, n=self.best_of, best_of=None, logprobs=0 if self.logprobs is None else self.logprobs)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search: at every position the `beam_width` best continuations of all beams together go on (see beams.py).

    Scores, and when the search ends, are those of transformers' `generate(num_beams=beam_width)`: a sequence of m
    tokens scores (sum of its log-probabilities) / m ** length_penalty, and its stop token counts.

    Attributes:
        n: how many of the best sequences are returned; None is all, `beam_width`.
        early_stopping: False ends when the best beam, at its present length, cannot beat the worst of the finished
            ones; True as soon as `beam_width` sequences are finished; "never" when no beam could win at any length.

    Raises:
        ValueError: a value out of its range; the message names the value and the range.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    enable_prefix_caching: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        width, penalty, n = self.beam_width, self.length_penalty, self.n
        if type(width) is not int or width < 1:
            raise ValueError(f"beam_width is {width!r}; it must be an integer of at least 1")
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not math.isfinite(penalty):
            raise ValueError(f"length_penalty is {penalty!r}; it must be a finite number (0 is off)")
        if self.early_stopping not in (False, True, "never"):
            raise ValueError(f"early_stopping is {self.early_stopping!r}; it must be False, True or 'never'")
        if n is not None and (type(n) is not int or not 1 <= n <= width):
            raise ValueError(f"n is {n!r}; it must be None, or an integer from 1 to beam_width ({width})")
        self.row(1)  # it shares the other rules

    def row(self, top: int) -> SamplingParams:
        """How each beam's row samples: its `top` log-probabilities are what the search goes by."""
        return SamplingParams(
            temperature=0.0,
            logprobs=top,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            detokenize=self.detokenize,
            enable_prefix_caching=self.enable_prefix_caching,
            cache_salt=self.cache_salt,
        )


class Request(NamedTuple):
    """What the scheduler has to know of a request: counts and stop tokens, never text or token values."""

    request_id: str
    prompt_len: int
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    user: str = ""  # whose share the policy "fair" counts it to
    forks: tuple[str, ...] = ()  # ids of further branches, which begin when this one has computed the prompt
    hashes: tuple[str, ...] = ()  # of the prompt's full blocks (prefix.py); empty: shares no blocks with anyone
    beams: bool = False  # its branches advance together, as `commit` is told; the branches of others go their own ways


class Seq(NamedTuple):
    """A request on its way through the scheduler. `computed` chases `length`; `blocks` covers at least `computed`.

    Only a beam may catch up: it waits until its siblings have, and all of them get their next tokens.
    """

    request: Request
    arrival: int  # 0, 1, 2 ... in the order of submission: the tie-breaker of every policy
    limit: int  # tokens at its longest: the prompt and max_tokens, cut off at max_model_len
    length: int  # prompt + generated tokens
    computed: int = 0
    blocks: tuple[int, ...] = ()
    hashes: tuple[str, ...] = ()  # of its first full blocks, as far as they are known; it keeps them when preempted
    group: int | None = None  # arrival of the first of the branches that forked from one prompt; None: no others

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_output(self) -> int:
        return self.length - self.request.prompt_len


class Running(NamedTuple):
    """The running sequences. What every step changes lies in two columns beside the records.

    A record is rebuilt only when its blocks change; its own `length` and `computed` are those of that moment.
    Rebuilding 256 records a step cost 230 us, two columns of integers cost a third of it; `scheduler.running(state)`
    gives current records.
    """

    seqs: tuple[Seq, ...] = ()
    lengths: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()

    def joined(self, other: Running) -> Running:
        return Running(self.seqs + other.seqs, self.lengths + other.lengths, self.computed + other.computed)

    def pick(self, keep: Sequence[int]) -> Running:
        return Running(pick(self.seqs, keep), pick(self.lengths, keep), pick(self.computed, keep))


def pick(column: tuple[Item, ...], keep: Sequence[int]) -> tuple[Item, ...]:
    return tuple([column[i] for i in keep])


class Row(NamedTuple):
    """One sequence of a plan: compute `count` tokens from `seq.computed` on. Blocks for them are in `seq.blocks`."""

    seq: Seq
    count: int

    @property
    def samples(self) -> bool:
        """True when this chunk reaches the end of the known tokens, so that a new one is sampled."""
        return self.seq.computed + self.count == self.seq.length


class Plan(NamedTuple):
    """What one step computes. A fact, never carried state. Columns, because a step has hundreds of rows."""

    step: int
    seqs: tuple[Seq, ...]  # decodes (count 1 at the end of a sequence) first, then prompt chunks; see Row for a view
    lengths: tuple[int, ...]  # known tokens of each before the step
    starts: tuple[int, ...]  # tokens of each whose keys and values are in the cache before the step
    counts: tuple[int, ...]  # tokens to compute of each, at least 1
    admitted: tuple[str, ...]  # request ids that entered `running` in this step
    known: tuple[int, ...]  # tokens of each of those: the prompt, and what was generated before a preemption
    cached: tuple[int, ...]  # those of them whose keys and values were found in the cache
    copies: tuple[tuple[int, int], ...]  # (from, to): blocks to copy before anything is written
    preempted: tuple[str, ...]  # request ids that stopped running, in that order
    swapped: tuple[str, ...]  # those of them whose content went to host memory; the others compute it again
    resumed: tuple[str, ...]  # request ids whose content came back from there
    swap_out: tuple[tuple[int, int], ...]  # (device block, host block): moved before anything else happens
    swap_in: tuple[tuple[int, int], ...]  # (host block, device block): moved then, before `copies`
    num_waiting: int  # after admission
    blocks_used: int  # blocks with an owner while the step runs
    num_blocks: int  # blocks that can have an owner (block 0, the trash block, is not one of them)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The plan as records, for eyes and folds; the engine reads the columns."""
        return tuple(map(Row, current(self.seqs, self.lengths, self.starts), self.counts))

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


# Computes nothing: what shapes are taken from.
EMPTY_PLAN = Plan(0, (), (), (), (), (), (), (), (), (), (), (), (), (), 0, 0, 1)


def current(seqs: tuple[Seq, ...], lengths: tuple[int, ...], computed: tuple[int, ...]) -> tuple[Seq, ...]:
    """Records with the `length` and `computed` of their columns."""
    return tuple(
        Seq(seq.request, seq.arrival, seq.limit, length, done, seq.blocks, seq.hashes, seq.group)
        for seq, length, done in zip(seqs, lengths, computed, strict=True)
    )


class Admitted(NamedTuple):
    step: int
    request_id: str
    num_tokens: int  # known at that moment: the prompt, and what was generated before a preemption
    num_cached: int  # of them found in the cache


class Preempted(NamedTuple):
    step: int
    request_id: str
    swapped: bool  # its content is in host memory; else it goes back to the queue and is computed again


class Resumed(NamedTuple):
    """A swapped request runs again, where it stopped."""

    step: int
    request_id: str


class Forked(NamedTuple):
    """Branches that begin to run, on the blocks of the one that computed their prompt."""

    step: int
    request_ids: tuple[str, ...]


class Beamed(NamedTuple):
    """The beams of a request after a step: each goes on from a parent, itself or a sibling, with a new token."""

    step: int
    request_ids: tuple[str, ...]
    parents: tuple[str, ...]
    token_ids: tuple[int, ...]


class Sampled(NamedTuple):
    """The new tokens of a step, one for each row that sampled, in row order."""

    step: int
    request_ids: tuple[str, ...]
    token_ids: tuple[int, ...]


class Finished(NamedTuple):
    step: int
    request_id: str
    reason: FinishReason
    num_output: int


Event = Admitted | Preempted | Resumed | Sampled | Forked | Beamed | Finished


class Choice(NamedTuple):
    """How the beams of a request go on, in the order of their names: from which of them, and with which token."""

    parents: tuple[str, ...]
    token_ids: tuple[int, ...]


class Hypothesis(NamedTuple):
    """A sequence that a beam search has finished."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    reason: FinishReason


class BeamResult(NamedTuple):
    """The outcome of a beam search, the best sequence first."""

    request_id: str
    sequences: tuple[Hypothesis, ...]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, under the model's own distribution (before penalties and temperature)."""

    request_id: str
    prompt: bool  # of a prompt token, or of a generated one
    position: int  # index in the prompt, or in the output
    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: tuple[int, ...]  # as many as asked for, most likely first
    top_logprobs: tuple[float, ...]


class StepResult(NamedTuple):
    """What the engine yields for a step: the plan, what happened, and when (seconds of time.perf_counter)."""

    plan: Plan
    events: tuple[Event, ...]
    started: float  # before schedule
    finished: float  # after commit
    device_seconds: float  # from dispatch until the sampled tokens are on the host
    padded_tokens: int  # T of the compiled shape that ran; plan.num_tokens of them were real
    compilations: int  # XLA compilations during this step; 0 after warm-up
    logprobs: tuple[TokenLogprobs, ...] = ()  # what requests asked for
    beams: tuple[BeamResult, ...] = ()  # searches that ended

    @property
    def host_seconds(self) -> float:
        return self.finished - self.started - self.device_seconds
