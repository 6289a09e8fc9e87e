"""What comes of a prompt and its parameters: a request for the scheduler, tokens for `pack`, perhaps a search.

And what becomes of those tokens as the scheduler's events come in: `follow`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pagedjax.device.batch import MAX_TOP
from pagedjax.device.row_features.chain import DEFAULT, RowChain, RowOptions
from pagedjax.engine import block_hashes
from pagedjax.host import beams, scheduler
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Beamed, Event, Finished, Request, Sampled
from pagedjax.params import BeamSearchParams, SamplingParams


@dataclass
class SequenceData:
    """The host's record of one request: its tokens so far and how it samples. Tokens live here and nowhere else."""

    params: SamplingParams
    seed: int
    prompt_len: int
    tokens: np.ndarray  # [limit] int32, the first `length` are known
    length: int
    stop_ids: tuple[int, ...] = ()
    root: str | None = None  # what its first block's hash grows from (prefix.py); None: it shares no blocks
    read: InitVar[RowOptions | None] = None  # what the engine's chain read from params; None: the default chain reads
    options: RowOptions = field(init=False)
    record: bytes = field(init=False)  # one `record_of_rows`, ready to be joined: a step packs hundreds of rows
    _blocks: tuple[int, ...] = field(init=False, default=(), repr=False)
    _block_ids: bytes = field(init=False, default=b"", repr=False)

    def __post_init__(self, read: RowOptions | None) -> None:
        p = self.params
        self.options = read or DEFAULT.read(p, self.stop_ids)
        num_top, prompt_logprobs = -1 if p.logprobs is None else p.logprobs, p.prompt_logprobs is not None
        core = (p.temperature, num_top, self.seed, self.prompt_len, prompt_logprobs)
        self.record = np.array(core, np.dtype(CORE)).tobytes() + self.options.record

    def block_ids(self, blocks: tuple[int, ...]) -> bytes:
        """int32 of a block table's row. It is the same tuple until the row grows, so most steps find it made."""
        if blocks is not self._blocks:
            self._blocks, self._block_ids = blocks, np.array(blocks, np.int32).tobytes()
        return self._block_ids

    @property
    def penalised(self) -> bool:
        return "penalties" in self.options.names


CORE = [("temperature", "f4"), ("num_top", "i4"), ("seed", "u4"), ("prompt_len", "i4"), ("prompt_logprobs", "?")]


@lru_cache
def record_of_rows(chain: RowChain) -> np.dtype:
    """The numpy dtype of `SequenceData.record`: the fields of `CORE` and, as "options", those of a chain."""
    return np.dtype([*CORE, ("options", chain.record)])


class PreparedRequest(NamedTuple):
    request: Request
    sources: dict[str, SequenceData]  # of every branch, by its id
    search: beams.Search | None


def prepare(
    state: SchedulerState,
    names: Sequence[str],
    prompt_token_ids: Sequence[int],
    params: SamplingParams | BeamSearchParams,
    *,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    caching: bool,
    priority: int,
    user: str,
    chain: RowChain = DEFAULT,
) -> PreparedRequest:
    """Check a request as far as the scheduler cannot, and prepare it.

    Args:
        state: what it will be submitted to.
        names: ids of its branches; the first one is the request's.
        caching: whether the engine shares prefixes.
        chain: the sampling options of the engine.

    Raises:
        ValueError: a token id outside the vocabulary, options that `RowChain.read` refuses, beams without ids, or more
            candidates than MAX_TOP.
    """
    prompt = _checked(names[0], prompt_token_ids, vocab_size)
    stops = tuple(dict.fromkeys((*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)))
    searches = isinstance(params, BeamSearchParams)
    row = _beam_row(names, params, len(stops), vocab_size) if isinstance(params, BeamSearchParams) else params
    _check_ids(names[0], row, vocab_size)
    try:
        options = chain.read(row, stops)
    except ValueError as error:
        raise ValueError(f"request {names[0]!r}: {error}") from None

    root, hashes = _hashes(prompt, row, state.config.block_size) if caching else (None, ())
    request = Request(
        request_id=names[0],
        prompt_len=len(prompt),
        max_tokens=row.max_tokens,
        min_tokens=row.min_tokens,
        stop_token_ids=frozenset() if searches else frozenset(stops),  # beams are stopped by their search
        priority=priority,
        user=user,
        forks=tuple(names[1:]),
        hashes=hashes,
        beams=searches,
    )
    tokens = np.zeros(max(len(prompt), scheduler.final_length(request, state.config)), np.int32)
    tokens[: len(prompt)] = prompt
    sources = {}
    for i, name in enumerate(names):
        drawn = 0x9E3779B9 * (state.arrivals + 1 + i)
        seed = (drawn if row.seed is None else row.seed + i) % 2**32
        sources[name] = SequenceData(row, seed, len(prompt), tokens.copy(), len(prompt), stops, root, options)
    search = None
    if isinstance(params, BeamSearchParams):
        bounded = dataclasses.replace(params, max_tokens=max(1, len(tokens) - len(prompt)))
        search = beams.start(bounded, frozenset(stops), tuple(names))
    return PreparedRequest(request, sources, search)


def _checked(request_id: str, prompt_token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[length] int64. Raises ValueError for what is no token id of the vocabulary."""
    prompt = np.asarray(prompt_token_ids).reshape(-1)  # of fractions, or beyond 64 bits, it is no array of integers
    if prompt.size and (prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size):
        for token in prompt.tolist():
            if type(token) is not int or not 0 <= token < vocab_size:
                what = f"request {request_id!r} has token id {token!r}"
                raise ValueError(f"{what}; the vocabulary is 0 to {vocab_size - 1}, in integers")
    return prompt.astype(np.int64)


def _hashes(prompt: np.ndarray, params: SamplingParams, size: int) -> tuple[str | None, tuple[str, ...]]:
    """What the hashes of a request grow from, and those of its prompt's full blocks.

    Log-probabilities of a prompt need every one of its tokens computed, so such a request shares nothing.
    """
    if not params.enable_prefix_caching or params.prompt_logprobs is not None:
        return None, ()
    root = block_hashes.root(params.cache_salt, size)
    return root, block_hashes.chain(root, prompt, size)


def apply_events(sources: dict[str, SequenceData], events: Sequence[Event]) -> None:
    """Append new tokens to the requests they are of, and forget requests that ended. `sources` is changed in place."""
    for event in events:
        if isinstance(event, Sampled):
            for request_id, token in zip(event.request_ids, event.token_ids, strict=True):
                source = sources[request_id]
                source.tokens[source.length] = token
                source.length += 1
        elif isinstance(event, Beamed):
            grown = [sources[parent].tokens.copy() for parent in event.parents]
            for name, tokens, token in zip(event.request_ids, grown, event.token_ids, strict=True):
                source = sources[name]
                tokens[source.length] = token
                source.tokens = tokens
                source.length += 1
        elif isinstance(event, Finished):
            del sources[event.request_id]


def _beam_row(names: Sequence[str], params: BeamSearchParams, stops: int, vocab_size: int) -> SamplingParams:
    """How each beam of a search samples.

    Raises:
        ValueError: more candidates than a step ranks or the vocabulary has, or not an id for each beam.
    """
    top, most = beams.candidates(params, stops), min(MAX_TOP, vocab_size)
    if top > most:
        raise ValueError(
            f"request {names[0]!r} has beam_width {params.beam_width} and {stops} stop tokens; a beam ranks as many "
            f"continuations as both together, at most {most}; lower beam_width to {most - stops}"
        )
    if len(names) != params.beam_width:
        raise ValueError(
            f"request {names[0]!r} has beam_width {params.beam_width} and {len(names) - 1} forks; each beam beside the "
            "first needs an id"
        )
    return params.row(top)


def _check_ids(request_id: str, params: SamplingParams, vocab: int) -> None:
    named = {"logit_bias": params.logit_bias or {}, "allowed_token_ids": params.allowed_token_ids or ()}
    for name, ids in (*named.items(), ("stop_token_ids", params.stop_token_ids)):
        bad = [t for t in ids if not 0 <= t < vocab]
        if bad:
            last = vocab - 1
            raise ValueError(f"request {request_id!r}: {name} has token id {bad[0]}; the vocabulary is 0 to {last}")
