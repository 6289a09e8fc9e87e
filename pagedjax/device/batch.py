"""Where the towers meet: `pack` turns a plan into padded arrays. The only place where host lists become arrays.

    plan rows        |decode|decode|decode|chunk of 5 tokens|
    tokens [T]       |  a   |  b   |  c   | d  d  d  d  d   | 0 ... 0 |     T is a bucket: one compiled shape each
    cu_q_lens [B+1]  0      1      2      3                 8 8 ... 8       B = min(T, max_num_seqs)

Padding tokens write to block 0, the trash block; padding rows have no tokens and length 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pagedjax.host.types import Plan
from pagedjax.params import SamplingParams

MAX_TOP = 20  # log-probabilities of so many best tokens can be asked for
MAX_LISTED = 1024  # entries of logit_bias, allowed_token_ids and suppressed stop tokens a request can have


class SamplingBatch(NamedTuple):
    """How the B rows sample. Neutral values switch a feature off for a row, and off for the step if all rows agree."""

    temperature: Any  # [B] f32; 0 is greedy
    top_p: Any  # [B] f32; 1 is off
    min_p: Any  # [B] f32; 0 is off
    presence: Any  # [B] f32
    frequency: Any  # [B] f32
    repetition: Any  # [B] f32; 1 is off
    top_k: Any  # [B] i32; 0 is off
    num_top: Any  # [B] i32: top log-probabilities wanted; -1 is none at all, not even the chosen token's
    seed: Any  # [B] u32
    position: Any  # [B] i32: index of the sampled token among the request's outputs
    prompt_len: Any  # [B] i32
    history: Any  # [B, max_model_len] i32 known tokens, -1 padded; all -1 for rows without penalties
    listed: Any  # [B, MAX_LISTED] i32 token ids, -1 padded
    bias: Any  # [B, MAX_LISTED] f32 added to their logits
    only_listed: Any  # [B] bool: every other token is forbidden


class Feed(NamedTuple):
    """Tokens that the host does not know yet: those that the step before samples (see ahead.py)."""

    rows: Any  # [T] row of that step, -1 where `Batch.tokens` holds the token
    tokens: Any  # [max_num_seqs] what it sampled, on the device


class Batch(NamedTuple):
    """One step's arguments beside parameters and cache: all integers are int32."""

    tokens: Any  # [T]
    positions: Any  # [T]
    slots: Any  # [T] block * S + offset
    block_tables: Any  # [B, M]
    seq_lens: Any  # [B] context including this step's tokens
    cu_q_lens: Any  # [B + 1]
    last: Any  # [B] index into T of each row's last token
    targets: Any  # [T] the prompt token after this one where its log-probability is wanted, else -1
    sampling: SamplingBatch
    feed: Feed | None = None  # of an engine that looks ahead, in every step


class Shapes(NamedTuple):
    """Everything that fixes the compiled shapes of an engine."""

    tokens: tuple[int, ...]  # T of each bucket, ascending
    max_seqs: int
    block_size: int
    table_width: int  # M
    max_model_len: int
    vocab_size: int

    def bucket(self, num_tokens: int) -> int:
        """The smallest T that holds `num_tokens`."""
        return self.tokens[bisect_left(self.tokens, num_tokens)]

    def rows(self, t: int) -> int:
        return min(t, self.max_seqs)


def token_buckets(max_tokens: int, *, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two from `smallest`, and max_tokens itself at the end."""
    sizes, size = [], smallest
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return (*sizes, max(max_tokens, smallest))


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
    # what does not change from step to step, ready to be joined: hundreds of rows are packed in every step
    floats: bytes = field(init=False)  # 6 float32: the first six of a `SamplingBatch`
    ints: bytes = field(init=False)  # 4 int64: the next four but the seed's place
    penalised: bool = field(init=False)
    listed: dict[int, float] = field(init=False)
    plain: bool = field(init=False)  # it needs none of the arrays that most rows leave blank
    _blocks: tuple[int, ...] = field(init=False, default=(), repr=False)
    _block_ids: bytes = field(init=False, default=b"", repr=False)

    def __post_init__(self) -> None:
        p = self.params
        floats = (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
        ints = (max(p.top_k, 0), -1 if p.logprobs is None else p.logprobs, self.seed, self.prompt_len)
        self.floats, self.ints = np.array(floats, np.float32).tobytes(), np.array(ints, np.int64).tobytes()
        self.penalised = floats[3:] != (0.0, 0.0, 1.0)
        bias = dict(p.logit_bias or {})
        allowed = p.allowed_token_ids
        self.listed = bias if allowed is None else {token: bias.get(token, 0.0) for token in allowed}
        suppresses = bool(self.stop_ids) and p.min_tokens > 0
        self.plain = not (self.penalised or self.listed or suppresses or p.prompt_logprobs is not None)

    def block_ids(self, blocks: tuple[int, ...]) -> bytes:
        """int32 of a block table's row. It is the same tuple until the row grows, so most steps find it made."""
        if blocks is not self._blocks:
            self._blocks, self._block_ids = blocks, np.array(blocks, np.int32).tobytes()
        return self._block_ids

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Stop tokens that may not be sampled yet because of min_tokens."""
        return self.stop_ids if self.length - self.prompt_len < self.params.min_tokens else ()


def blank_sampling(shapes: Shapes, t: int) -> SamplingBatch:
    """Every feature off, for the B rows of bucket t."""
    b = shapes.rows(t)
    floats = [np.zeros(b, np.float32) for _ in range(6)]
    floats[1][:] = floats[5][:] = 1.0
    ints = [np.zeros(b, np.int32), np.full(b, -1, np.int32), np.zeros(b, np.uint32), *np.zeros((2, b), np.int32)]
    return SamplingBatch(
        *floats,
        *ints,
        history=np.full((b, shapes.max_model_len), -1, np.int32),
        listed=np.full((b, MAX_LISTED), -1, np.int32),
        bias=np.zeros((b, MAX_LISTED), np.float32),
        only_listed=np.zeros(b, bool),
    )


def blank_feed(shapes: Shapes, t: int) -> Feed:
    """The host knows every token of the step."""
    return Feed(np.full(t, -1, np.int32), np.zeros(shapes.max_seqs, np.int32))


def pack(plan: Plan, sources: Mapping[str, SequenceData], shapes: Shapes, blanks: Mapping[int, SamplingBatch]) -> Batch:
    """Lay a plan out as the arrays of its bucket.

    Args:
        sources: by request id, for every sequence of the plan.
        blanks: `blank_sampling` by T, ideally already on the device: the large arrays of features that no row of
            the step uses are taken from there and cost nothing.
    """
    rows, s = len(plan.seqs), shapes.block_size
    t = shapes.bucket(sum(plan.counts))
    b = shapes.rows(t)
    mine = [sources[seq.request_id] for seq in plan.seqs]
    starts, counts = np.asarray(plan.starts, np.int32), np.asarray(plan.counts, np.int32)

    cu_q_lens = np.zeros(b + 1, np.int32)
    cu_q_lens[1 : rows + 1] = np.cumsum(counts)
    cu_q_lens[rows + 1 :] = total = int(cu_q_lens[rows])
    row = np.repeat(np.arange(rows), counts)
    positions = np.zeros(t, np.int32)
    positions[:total] = np.arange(total) - cu_q_lens[row] + starts[row]
    tokens = np.zeros(t, np.int32)
    if total == rows:  # decodes alone
        tokens[:total] = [m.tokens[i] for m, i in zip(mine, plan.starts, strict=True)]
    else:
        tokens[:total] = np.concatenate(
            [m.tokens[i : i + k] for m, i, k in zip(mine, plan.starts, plan.counts, strict=True)]
        )

    tables = np.zeros((b, shapes.table_width), np.int32)
    widths = np.array([len(seq.blocks) for seq in plan.seqs], np.int32)
    ids = np.frombuffer(b"".join([m.block_ids(seq.blocks) for m, seq in zip(mine, plan.seqs, strict=True)]), np.int32)
    owner = np.repeat(np.arange(rows), widths)
    tables[owner, np.arange(len(ids)) - np.repeat(np.cumsum(widths) - widths, widths)] = ids
    slots = np.zeros(t, np.int32)
    slots[:total] = tables[row, positions[:total] // s] * s + positions[:total] % s

    seq_lens = np.zeros(b, np.int32)
    seq_lens[:rows] = starts + counts
    last = np.zeros(b, np.int32)
    last[:rows] = cu_q_lens[1 : rows + 1] - 1
    targets, sampling = np.full(t, -1, np.int32), _sampling(mine, blanks[t])
    if not all([m.plain for m in mine]):
        targets = _targets(plan, mine, t, cu_q_lens)
        sampling = sampling._replace(**_history(mine, blanks[t]), **_listed(mine, blanks[t]))
    return Batch(tokens, positions, slots, tables, seq_lens, cu_q_lens, last, targets, sampling)


def _targets(plan: Plan, mine: Sequence[SequenceData], t: int, cu_q_lens: np.ndarray) -> np.ndarray:
    """[T] the next prompt token for rows that want prompt log-probabilities."""
    targets = np.full(t, -1, np.int32)
    for i, source in enumerate(mine):
        start, stop = plan.starts[i], min(plan.starts[i] + plan.counts[i], source.prompt_len - 1)
        if source.params.prompt_logprobs is not None and start < stop:
            targets[cu_q_lens[i] : cu_q_lens[i] + stop - start] = source.tokens[start + 1 : stop + 1]
    return targets


def _sampling(mine: Sequence[SequenceData], blank: SamplingBatch) -> SamplingBatch:
    """How the rows sample, as far as a number or two say it."""
    rows, b = len(mine), len(blank.temperature)
    floats, ints = np.zeros((6, b), np.float32), np.zeros((5, b), np.int64)
    floats[1], floats[5], ints[1] = 1.0, 1.0, -1  # off, in the rows that are padding
    floats[:, :rows] = np.frombuffer(b"".join([m.floats for m in mine]), np.float32).reshape(rows, 6).T
    ints[:4, :rows] = np.frombuffer(b"".join([m.ints for m in mine]), np.int64).reshape(rows, 4).T
    ints[4, :rows] = [m.length - m.prompt_len for m in mine]
    top_k, num_top, seed, prompt_len, position = ints.astype(np.int32)
    return blank._replace(
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        presence=floats[3],
        frequency=floats[4],
        repetition=floats[5],
        top_k=top_k,
        num_top=num_top,
        seed=seed.view(np.uint32),
        position=position,
        prompt_len=prompt_len,
    )


def _history(mine: Sequence[SequenceData], blank: SamplingBatch) -> dict[str, np.ndarray]:
    if not any(m.penalised for m in mine):
        return {}
    history = np.full(blank.history.shape, -1, np.int32)
    for i, m in enumerate(mine):
        if m.penalised:
            history[i, : m.length] = m.tokens[: m.length]
    return {"history": history}


def _listed(mine: Sequence[SequenceData], blank: SamplingBatch) -> dict[str, np.ndarray]:
    if not any(m.listed or m.suppressed for m in mine):
        return {}
    listed, bias = np.full(blank.listed.shape, -1, np.int32), np.zeros(blank.bias.shape, np.float32)
    only = np.zeros(blank.only_listed.shape, bool)
    for i, m in enumerate(mine):
        only[i] = m.params.allowed_token_ids is not None
        entries = m.listed | dict.fromkeys(m.suppressed, -np.inf)
        listed[i, : len(entries)] = list(entries)
        bias[i, : len(entries)] = list(entries.values())
    return {"listed": listed, "bias": bias, "only_listed": only}
