"""From a prompt and its parameters to a scheduler request and the data of its sequences
(`prepare`).

`apply_events` keeps those data up to date with the scheduler.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from immutables import Map

from pagedjax.device.batch import MAX_TOP
from pagedjax.device.row_features.chain import BUILT_IN, DEFAULT, RowChain, RowOptions
from pagedjax.device.row_features.token_mask import TOKEN_MASK
from pagedjax.engine import block_hashes
from pagedjax.host import scheduler, searches
from pagedjax.host.drafts import Sample, accepted_columns
from pagedjax.host.prefix_sharing import rows_that_fill
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.searches import RunningSearch
from pagedjax.host.types import (
    TOKEN_EVENTS,
    Beamed,
    Event,
    Finished,
    Plan,
    Request,
    Running,
    Sampled,
)
from pagedjax.options.params import BeamSearchParams, PoolingParams, SamplingParams
from pagedjax.text.structured.matcher import Grammar


# slots, because each step writes a token of each row, and most of that time is that of the memory
@dataclass(eq=False, slots=True)
class SequenceData:
    """One sequence (a branch of a request) as the engine knows it: its tokens and how it samples.

    A record is never changed; `appended` returns the record with one more token. How many of the
    `tokens` are known is the scheduler's knowledge (`Seq.length`). A token is written past the
    known ones, so an older engine state, which knows fewer tokens, still sees what it saw.
    """

    params: SamplingParams
    seed: int
    prompt_len: int
    # int32; branches of a request share the prompt's array until each has a token of its own
    tokens: np.ndarray
    stop_ids: tuple[int, ...] = ()
    # the hash before the first block's (block_hashes.py); None: it shares no blocks
    root: str | None = None
    adapter_slot: int = field(default=0, kw_only=True)  # 0: no adapter
    # of its output, in place of sampled ones; None: those of params, if it has some
    given_token_ids: Sequence[int] | None = field(default=None, kw_only=True)
    # what the engine's chain read from params; None: the default chain reads
    row_options: InitVar[RowOptions | None] = None
    options: RowOptions = field(init=False)
    # one `record_of_rows`, ready to be joined: a step packs hundreds of rows
    record: bytes = field(init=False)
    _blocks: tuple[int, ...] = field(init=False, default=(), repr=False)
    _block_ids: bytes = field(init=False, default=b"", repr=False)

    def __post_init__(self, row_options: RowOptions | None) -> None:
        params = self.params
        if self.given_token_ids is None:
            self.given_token_ids = params.trace_decode_token_ids
        self.options = row_options or DEFAULT.read(params, self.stop_ids)
        num_top = -1 if params.logprobs is None else params.logprobs
        prompt_logprobs = params.prompt_logprobs is not None
        core = (params.temperature, num_top, self.seed, self.prompt_len, prompt_logprobs)
        self.record = np.array(core, np.dtype(CORE)).tobytes() + self.options.record

    def block_ids(self, blocks: tuple[int, ...]) -> bytes:
        """int32 ids of a block table row. The result is kept: the tuple is the same one until the
        row grows.
        """
        if blocks is not self._blocks:
            self._blocks = blocks
            self._block_ids = array("i", blocks).tobytes()
        return self._block_ids


Sequences = Map[str, SequenceData]  # by the id of the sequence; of every unfinished one


def sequences_of_rows(plan: Plan, sequences: Mapping[str, SequenceData]) -> list[SequenceData]:
    """The data of a plan's rows."""
    return [sequences[seq.request.request_id] for seq in plan.seqs]


def appended(data: SequenceData, length: int, token: int, spare: int) -> SequenceData:
    """The record with `token` after its first `length` tokens.

    Args:
        spare: places to leave after the new token. A step that is sent ahead reads, and ignores,
            tokens that are not known yet; and drafts are written there.
    """
    # always so for the first token after a prompt, which branches share
    if length + 1 + spare > len(data.tokens):
        data = _longer(data, length, length + 1 + spare)
    data.tokens[length] = token
    return data


def extended(
    data: SequenceData, length: int, token_ids: Sequence[int] | np.ndarray, spare: int
) -> SequenceData:
    """The record with several tokens after its first `length` tokens, see `appended`."""
    end = length + len(token_ids)
    data = _longer(data, length, end + spare) if end + spare > len(data.tokens) else data
    data.tokens[length:end] = token_ids
    return data


def _longer(data: SequenceData, length: int, places: int) -> SequenceData:
    """The record with an array of its own of its first `length` tokens, and room for at least
    `places`.
    """
    tokens = np.zeros(places + max(64, length // 4), np.int32)
    tokens[:length] = data.tokens[:length]
    data = copy.copy(data)
    data.tokens = tokens
    return data


def without_hashes(data: SequenceData) -> SequenceData:
    """The record of a sequence whose blocks are not shared from now on."""
    data = copy.copy(data)
    data.root = None
    return data


CORE = [
    ("temperature", "f4"),
    ("num_top", "i4"),
    ("seed", "u4"),
    ("prompt_len", "i4"),
    ("prompt_logprobs", "?"),
]


@lru_cache
def record_of_rows(chain: RowChain) -> np.dtype:
    """The numpy dtype of `SequenceData.record`: the fields of `CORE` and, as "options", those of a
    chain.
    """
    return np.dtype([*CORE, ("options", chain.record)])


class Begun(NamedTuple):
    """A sequence that another engine began, as far as its tokens decide how it goes on.

    seed: that its samples are drawn with.
    tokens: those generated so far, at least one, without the prompt.
    """

    seed: int
    tokens: Sequence[int]


class EngineRequest(NamedTuple):
    """A request to an engine.

    names: ids of its sequences; the first one is the request's.
    priority, user: they matter to the policies of those names (host/policies/).
    predicted: output tokens, for a policy that reads it.
    service_class, deadline: the name of its class, and the seconds after its arrival by which it
        should have ended, for a policy that reads them.
    tags: opaque names; requests with other tags share no cached blocks.
    grammar: what `params.structured_outputs` was compiled to.
    adapter: the name of a loaded one; None: the model alone.
    begun: of a single sequence that this engine goes on with; None: it begins here.
    given: output tokens by the name of a sequence, in place of sampled ones, see `Engine.add`.
    """

    names: tuple[str, ...]
    prompt_token_ids: Sequence[int]
    params: SamplingParams | BeamSearchParams | PoolingParams
    priority: int = 0
    user: str = ""
    tags: tuple[str, ...] = ()
    grammar: Grammar | None = None
    adapter: str | None = None
    predicted: int | None = None
    begun: Begun | None = None
    service_class: str = ""
    deadline: float | None = None
    given: Mapping[str, Sequence[int]] = Map()


class RequestRules(NamedTuple):
    """What all requests of an engine have in common.

    caching: whether they share prefixes.
    spare: see `appended`.
    chain: the sampling options.
    """

    vocab_size: int
    caching: bool
    eos_token_ids: Sequence[int] = ()
    spare: int = 0
    chain: RowChain = DEFAULT


class LoadedAdapter(NamedTuple):
    """An adapter that requests can name.

    pinned: it stays until it is unloaded. Others are evicted for adapters of later requests.
    turn: the table's `turns` when it was last loaded or used.
    """

    slot: int
    content_hash: str
    rank: int
    source: str
    pinned: bool
    turn: int


class PreparedRequest(NamedTuple):
    request: Request
    sequences: dict[str, SequenceData]  # of every branch, by its id
    search: RunningSearch | None


def prepare(
    state: SchedulerState,
    request: EngineRequest,
    rules: RequestRules,
    *,
    adapter: LoadedAdapter | None = None,
    seed: int | None = None,
) -> PreparedRequest:
    """Check a request as far as the scheduler cannot, and prepare it.

    Args:
        state: what it will be submitted to.
        adapter: that of the request.
        seed: of a single sequence that another engine began; None: that of its parameters.

    Raises:
        ValueError: a token id outside the vocabulary, options that `RowChain.read` refuses, beams
            without ids, more candidates than MAX_TOP, structured outputs without a grammar, or
            given tokens beside a row feature of a user's own.
    """
    names = request.names
    prompt = checked_ids(names[0], request.prompt_token_ids, rules.vocab_size)
    row, stops = _row_and_stops(request, rules)
    _check_ids(names[0], row, rules.vocab_size)
    if (row.structured_outputs is None) != (request.grammar is None):
        raise ValueError(
            f"request {names[0]!r} has structured_outputs {row.structured_outputs!r:.80} and "
            f"grammar {request.grammar!r:.80}; give both to the engine (LLM and Session compile the "
            "grammar)"
        )
    with_masks = _with_given_tokens(request, row, rules.vocab_size)
    try:
        options = rules.chain.read(with_masks, stops)
    except ValueError as error:
        raise ValueError(f"request {names[0]!r}: {error}") from None
    if with_masks.trace_decode_token_ids is not None:
        _check_own_features(names[0], options)

    root = None
    hashes: tuple[str, ...] = ()
    if rules.caching:
        root, hashes = block_hashes.of_prompt(
            prompt,
            row,
            state.config.block_size,
            request.tags,
            adapter.content_hash if adapter else "",
        )
    scheduler_request = _scheduler_request(
        request,
        row,
        stops,
        prompt_len=len(prompt),
        hashes=hashes,
        keeps_blocks=_drops_tokens(state.config) and rules.chain.reads_tokens(options),
    )
    tokens = np.zeros(len(prompt) + rules.spare, np.int32)
    tokens[: len(prompt)] = prompt
    seeds = _seeds(row.seed, state.arrivals, len(names)) if seed is None else [seed]
    sequences = {
        name: SequenceData(
            params=row,
            seed=branch_seed,
            prompt_len=len(prompt),
            tokens=tokens,
            stop_ids=stops,
            root=root,
            row_options=options,
            adapter_slot=adapter.slot if adapter else 0,
            given_token_ids=request.given.get(name),
        )
        for name, branch_seed in zip(names, seeds, strict=True)
    }
    search = None
    if isinstance(request.params, BeamSearchParams):
        search = _search(request.params, scheduler_request, stops, state.config)
    return PreparedRequest(scheduler_request, sequences, search)


def _with_given_tokens(
    request: EngineRequest, row: SamplingParams, vocab_size: int
) -> SamplingParams:
    """How the sequences of a request sample, with the masks of given tokens.

    Raises:
        ValueError: the given tokens are of no sequence of the request, or of a request that does
            not sample; a token is not of the vocabulary, or an option may forbid one.
    """
    token_ids = {name: tokens for name, tokens in request.given.items() if len(tokens)}
    if not token_ids:
        return row
    name = request.names[0]
    strangers = [sequence for sequence in token_ids if sequence not in request.names]
    if strangers or not isinstance(request.params, SamplingParams):
        raise ValueError(
            f"request {name!r} is given tokens of {strangers or list(token_ids)}; give those of "
            f"its own sequences {list(request.names)}, with SamplingParams"
        )
    for sequence, tokens in token_ids.items():
        checked_ids(sequence, tokens, vocab_size)
    first = next(iter(token_ids.values()))
    try:  # the options that exclude given tokens do so here too
        return dataclasses.replace(row, n=1, trace_decode_token_ids=tuple(first))
    except ValueError as error:
        raise ValueError(f"request {name!r}: {error}") from None


def _check_own_features(request_id: str, options: RowOptions) -> None:
    """Raises ValueError if a request whose tokens are given uses an option of a user's own."""
    own_features = options.names - {TOKEN_MASK, *[feature.name for feature in BUILT_IN]}
    if own_features:
        raise ValueError(
            f"request {request_id!r}: trace_decode_token_ids is given and the row feature "
            f"{min(own_features)!r} is used, which may forbid one of the tokens; leave one of them "
            "out"
        )


def _drops_tokens(config: SchedulerConfig) -> bool:
    """Whether blocks with token ids, which are those of group 0, are given back."""
    return bool(config.views) and config.views[0].window is not None


def _scheduler_request(
    request: EngineRequest,
    row: SamplingParams,
    stops: Sequence[int],
    *,
    prompt_len: int,
    hashes: tuple[str, ...],
    keeps_blocks: bool,
) -> Request:
    """What the scheduler knows of a request.

    Args:
        row, stops: those of `_row_and_stops`.
    """
    is_searched = isinstance(request.params, BeamSearchParams)
    return Request(
        request_id=request.names[0],
        prompt_len=prompt_len,
        max_tokens=0 if isinstance(request.params, PoolingParams) else row.max_tokens,
        min_tokens=row.min_tokens,
        # branches are stopped by their search
        stop_token_ids=frozenset() if is_searched else frozenset(stops),
        priority=request.priority,
        user=request.user,
        forks=request.names[1:],
        hashes=hashes,
        beams=is_searched,
        tags=request.tags,
        keeps_blocks=keeps_blocks,
        predicted=request.predicted,
        service_class=request.service_class,
        deadline=request.deadline,
    )


def _search(
    params: BeamSearchParams, request: Request, stops: Sequence[int], config: SchedulerConfig
) -> RunningSearch:
    """The search of a new request, which ends where its sequences are as long as they may be."""
    room = scheduler.final_length(request, config) - request.prompt_len
    bounded = dataclasses.replace(params, max_tokens=max(1, room))
    return searches.start(bounded, frozenset(stops), request.names)


def _row_and_stops(
    request: EngineRequest, rules: RequestRules
) -> tuple[SamplingParams, tuple[int, ...]]:
    """How each sequence of a request samples, and the tokens that end it.

    Raises:
        ValueError: see `_beam_row`.
    """
    params = request.params
    sampling = params.row() if isinstance(params, PoolingParams) else params
    if isinstance(sampling, SamplingParams) and sampling.trace_decode_token_ids is not None:
        return sampling, ()  # a stop token among the given ones ends nothing
    eos = () if sampling.ignore_eos else rules.eos_token_ids
    stops = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
    if isinstance(sampling, BeamSearchParams):
        return _beam_row(request.names, sampling, len(stops), rules.vocab_size), stops
    return sampling, stops


def _seeds(seed: int | None, arrivals: int, branches: int) -> list[int]:
    """The seeds of a request's branches, of 32 bits.

    Args:
        seed: of the first one; None: seeds come from the order of arrival.
        arrivals: sequences that arrived before.
    """
    if seed is None:
        return [0x9E3779B9 * (arrivals + 1 + i) % 2**32 for i in range(branches)]
    return [(seed + i) % 2**32 for i in range(branches)]


def checked_ids(request_id: str, token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[length] int64. Raises ValueError for what is no token id of the vocabulary."""
    # numpy makes no integers of fractions and of numbers beyond 64 bits; these are refused below
    ids = np.asarray(token_ids).reshape(-1)
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size):
        for token in ids.tolist():
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ValueError(
                    f"request {request_id!r} has token id {token!r}; the vocabulary is 0 to "
                    f"{vocab_size - 1}, in integers"
                )
    return ids.astype(np.int64)


def apply_events(
    sequences: Sequences, events: Sequence[Event], before: Running, spare: int = 0
) -> Sequences:
    """Append new tokens to the sequences that got them, and drop the sequences that ended.

    Args:
        before: the running sequences before the commit that gave `events`.
        spare: see `appended`.
    """
    if len(events) == 1 and isinstance(events[0], Sampled):  # no row had drafts
        event = events[0]
        if len(event.request_ids) == len(before.seqs):  # each got a token, as in most steps
            return _with_samples(sequences, event, before.lengths, spare)
    names = tuple([seq.request.request_id for seq in before.seqs])
    lengths: dict[str, int] = {}
    if any(isinstance(event, TOKEN_EVENTS) for event in events):
        lengths = dict(zip(names, before.lengths, strict=True))
    changed = sequences.mutate()
    for event in events:
        if isinstance(event, Sampled):
            for name, token in zip(event.request_ids, event.token_ids, strict=True):
                data = changed[name]
                length = lengths[name]
                lengths[name] = length + 1  # a row with accepted drafts has several tokens
                # as `appended` does, without a call for each sequence
                if len(data.tokens) > length + spare:
                    data.tokens[length] = token
                else:
                    changed[name] = appended(data, length, token, spare)
        elif isinstance(event, Beamed):
            beams_of_event = zip(event.request_ids, event.parents, event.token_ids, strict=True)
            for name, parent, token in beams_of_event:
                length = lengths[parent]
                beam = copy.copy(sequences[name])
                beam.tokens = sequences[parent].tokens[:length]  # two beams may continue one parent
                changed[name] = appended(beam, length, token, spare)
        elif isinstance(event, Finished):
            del changed[event.request_id]
    return changed.finish()


def _with_samples(
    sequences: Sequences, event: Sampled, lengths: Sequence[int], spare: int
) -> Sequences:
    """The sequences with one more token each.

    Args:
        lengths: known tokens of each sequence of the event.
        spare: see `appended`.
    """
    longer: dict[str, SequenceData] = {}
    for name, token, length in zip(event.request_ids, event.token_ids, lengths, strict=True):
        data = sequences[name]
        tokens = data.tokens
        # as `appended` does, without a call for each sequence
        if len(tokens) > length + spare:
            tokens[length] = token
        else:
            longer[name] = appended(data, length, token, spare)
    return sequences.update(longer) if longer else sequences


def hashes_of_filled(
    plan: Plan,
    sequences: Mapping[str, SequenceData],
    size: int,
    sampled: Sequence[Sample] = (),
    dense_prompts: bool = False,
) -> dict[str, tuple[str, ...]]:
    """By sequence id, the hashes of the blocks that a plan fills with generated tokens.

    Args:
        sampled: of a plan with drafts, what `drafting.verified` returned. Accepted drafts are in
            the sequences' tokens, behind the known ones; no hash is made over a rejected one.
        dense_prompts: queries of generated tokens read some of the blocks that those of a prompt
            read.
    """
    hashes = {}
    counts = accepted_columns(plan, sampled).counts if plan.drafts else plan.counts
    for i in rows_that_fill(plan.starts, counts, size):
        seq = plan.seqs[i]
        num_full = (plan.starts[i] + counts[i]) // size
        num_hashed = len(seq.hashes)
        if num_full <= num_hashed:
            continue
        data = sequences[seq.request.request_id]
        if data.root is None:  # it shares no blocks
            continue
        parent = seq.hashes[-1] if num_hashed else data.root
        # the first block with generated tokens
        if dense_prompts and num_hashed == data.prompt_len // size:
            parent = block_hashes.selected(parent, data.prompt_len)
        tokens = data.tokens[num_hashed * size : num_full * size]
        hashes[seq.request.request_id] = block_hashes.chain(parent, tokens, size)
    return hashes


def _beam_row(
    names: Sequence[str], params: BeamSearchParams, stops: int, vocab_size: int
) -> SamplingParams:
    """How each beam of a search samples.

    Raises:
        ValueError: more candidates than a step ranks or the vocabulary has, or not an id for each
        beam.
    """
    candidates = searches.kind_of(params).candidates(params, stops)
    limit = min(MAX_TOP, vocab_size)
    if candidates > limit:
        raise ValueError(
            f"request {names[0]!r} has beam_width {params.beam_width} and {stops} stop tokens; a "
            f"beam ranks as many continuations as both together, at most {limit}; lower beam_width "
            f"to {limit - stops}"
        )
    if len(names) != params.beam_width:
        raise ValueError(
            f"request {names[0]!r} has beam_width {params.beam_width} and {len(names) - 1} forks; "
            "each beam beside the first needs an id"
        )
    return params.row(candidates)


def _check_ids(request_id: str, params: SamplingParams, vocab: int) -> None:
    """Raises ValueError for a token id in the parameters that is not of the vocabulary."""
    fields = {
        "logit_bias": params.logit_bias or {},
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "bad_words_token_ids": [token for word in params.bad_words_token_ids for token in word],
        "trace_decode_token_ids": params.trace_decode_token_ids or (),
    }
    for name, token_ids in fields.items():
        outside = [token for token in token_ids if not 0 <= token < vocab]
        if outside:
            raise ValueError(
                f"request {request_id!r}: {name} has token id {outside[0]}; the vocabulary is 0 to "
                f"{vocab - 1}"
            )
