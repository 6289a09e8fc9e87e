"""The arrays of one step as NamedTuples and, for its program, as one array; and the sizes that fix
their shapes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.extras import AttentionRows, Extra, GroupTables, Selection, TokenAdapters
from pagedjax.device.layer_groups import LayerGroups
from pagedjax.device.linear import LowRank
from pagedjax.device.row_features.chain import DEFAULT, FeatureRows, RowChain

Kind = TypeVar("Kind", bound=Extra)
MAX_TOP = 20  # most top log-probabilities of a request
PROMPT_SPACING = 3  # buckets: of powers of two, a step is padded to 8 times its tokens at most
DECODE_SPACING = 32  # tokens between sizes of steps of decodes alone, on a GPU


class SamplingBatch(NamedTuple):
    """How the R samples of a step are drawn: one for each row, and one for each draft."""

    temperature: Any  # [R] f32; 0 is greedy
    # [R] i32: top log-probabilities wanted; -1 is none at all, not even the chosen token's. None: no
    # sample wants any, and the program has none
    num_top: Any
    seed: Any  # [R] u32
    position: Any  # [R] i32: index of the sampled token among the row's outputs
    prompt_len: Any  # [R] i32
    # by name: the sampling options of a `RowChain`; None: no sample uses one, and the program has none
    features: dict[str, FeatureRows] | None

    @property
    def is_plain(self) -> bool:
        """Whether the program of these arrays draws by temperature alone."""
        return self.features is None

    def plain(self) -> SamplingBatch:
        """The arrays for such a program."""
        return self._replace(features=None)

    def without_logprobs(self) -> SamplingBatch:
        """The arrays for a program without log-probabilities of samples."""
        return self._replace(num_top=None)


class Batch(NamedTuple):
    """One step's arguments beside parameters and cache: all integers are int32."""

    tokens: Any  # [T]
    positions: Any  # [T]
    slots: Any  # [T] block * S + offset
    block_tables: Any  # [B, M]
    seq_lens: Any  # [B] context including this step's tokens
    cu_q_lens: Any  # [B + 1]; None in a step of decodes alone, in which row b has the token b
    last: Any  # [R] index into T of the token that each sample follows
    sampled_row: Any  # [R] the row of that token
    # [T] the prompt token after this one if its log-probability is wanted, else -1; None: none is
    targets: Any
    sampling: SamplingBatch
    extras: tuple[Extra, ...] = ()  # in an order that is the same in each step of an engine

    def extra(self, kind: type[Kind]) -> Kind | None:
        """The arrays of a kind; None in an engine that has none."""
        return next((extra for extra in self.extras if isinstance(extra, kind)), None)

    def having(self, extra: Extra, kind: type[Extra] | None = None) -> Batch:
        """The batch with other arrays in the place of those of a kind; None: the same kind."""
        kind = kind or type(extra)
        extras = [extra if type(present) is kind else present for present in self.extras]
        return self._replace(extras=tuple(extras))

    def without(self, kind: type[Extra]) -> Batch:
        """The batch without the arrays of a kind."""
        extras = [extra for extra in self.extras if not isinstance(extra, kind)]
        return self._replace(extras=tuple(extras))

    @property
    def adapters(self) -> TokenAdapters | None:
        """The adapters of the tokens; None in an engine without adapters."""
        return self.extra(TokenAdapters)

    @property
    def row_cu_q_lens(self) -> Any:
        """[B + 1] where the tokens of each row begin, of decodes alone too."""
        if self.cu_q_lens is None:
            return jnp.cumsum(jnp.pad(self.seq_lens > 0, (1, 0)), dtype=jnp.int32)
        return self.cu_q_lens

    @property
    def used_tokens(self) -> Any:
        """[1] how many of the T tokens are not padding."""
        return self.row_cu_q_lens[-1:]

    @property
    def attention(self) -> tuple[Any, Any, Any]:
        """(block tables, context lengths, cu_q_lens or None) of the rows of attention."""
        rows = self.extra(AttentionRows) or self
        return rows.block_tables, rows.seq_lens, rows.cu_q_lens

    def page_of(self, layer: int) -> int:
        """Which of the cache's page arrays a layer uses."""
        groups = self.extra(GroupTables)
        return groups.layout.places[layer][1] if groups else layer

    def of_layer(self, layer: int) -> Batch:
        """The batch as a layer sees it."""
        batch = self
        for extra in self.extras:
            batch = extra.of_layer(batch, layer)
        return batch

    def low(self, name: str, parts: tuple[int, ...]) -> LowRank | None:
        """What adapters add to a layer's product (`TokenAdapters.low`); the batch is that of the
        layer.
        """
        return None if self.adapters is None else self.adapters.low(name, parts)

    @property
    def used_samples(self) -> Any:
        """[1] how many of the R samples are used. Unused samples have 0 in `last`. The first sample
        is always used, and may have 0 there too.
        """
        return 1 + (self.last[1:] > 0).sum(dtype=np.int32, keepdims=True)


class DraftBatch(NamedTuple):
    """What a drafter on the device continues: the arguments of `make_draft`'s program beside
    parameters and cache.
    """

    tokens: Any  # [B] i32: the last known token of each row
    positions: Any  # [B] i32: its position
    counts: Any  # [B] i32: drafts of the row; 0 in padding
    block_tables: Any  # [B, M] i32
    sampling: SamplingBatch  # [B]: of the first draft
    # [R] i32: for each sample of the step that verifies the drafts, i * B + b if its draft is the
    # draft i of row b; R is 0 if the probabilities of drafts are not wanted
    samples: Any
    # [B, M] i32 of each group behind the first, if the drafter has groups of layers
    group_tables: tuple[Any, ...] = ()


class StepShape(NamedTuple):
    """What fixes the shapes of one step; each has a compiled program."""

    tokens: int  # T
    samples: int  # R
    # every row has one token, and no log-probability of a prompt's token is wanted
    decodes_alone: bool = False
    span: int = 1  # the program computes so many steps, all of decodes (span.py)
    prompt_logprobs: bool = False  # log-probabilities of prompt tokens are wanted
    plain: bool = False  # see `SamplingBatch.is_plain`
    logprobs: bool = True  # those of samples are in the program; a plain one may have none


@dataclass(frozen=True)
# no NamedTuple: one would equal a `StepShape` of the same numbers, and both are keys of programs
class DraftShape:
    """What fixes the shapes of a drafter's program."""

    rows: int  # B of a `DraftBatch`
    samples: int  # R of the step that verifies, whose drafts' probabilities it returns; 0: none
    plain: bool = False  # no row uses a sampling option


class Shapes(NamedTuple):
    """Everything that fixes the compiled shapes of an engine."""

    tokens: tuple[int, ...]  # T of each bucket, ascending
    max_seqs: int
    block_size: int
    table_width: int  # M
    max_model_len: int
    vocab_size: int
    drafts: int = 0  # most draft tokens of a row
    keeps_probs: bool = False  # whether steps take the probabilities that drafts were drawn from
    # of a KV policy: a `host.kv_policies.View` with a window
    view: tuple[int, tuple[int, ...]] | None = None
    layout: LayerGroups | None = None  # of several groups of layers
    draft_layout: LayerGroups | None = None  # of a draft model with layers of several groups
    selection: Selection | None = None  # of a KV policy
    # T of the steps that have a program of their own for decodes alone, ascending
    decode_buckets: tuple[int, ...] = ()
    span: int = 1  # the steps of a span; 1: there are no spans
    span_buckets: tuple[int, ...] = ()  # T of the steps that have a program for a span
    # T of the steps that give log-probabilities of prompt tokens, ascending, some of `tokens` with
    # the largest; (): all of them
    prompt_buckets: tuple[int, ...] = ()
    # whether steps have programs of their own if no row has an option, without log-probabilities if no
    # row wants any; so have the drafts of such rows
    plain: bool = False

    def bucket(self, num_tokens: int) -> int:
        """The smallest T that holds `num_tokens`."""
        return self.tokens[bisect_left(self.tokens, num_tokens)]

    def decode_bucket(self, num_tokens: int) -> int:
        """The smallest T that holds `num_tokens` decodes alone."""
        sizes = self.decode_buckets[bisect_left(self.decode_buckets, num_tokens) :][:1]
        return min(*sizes, self.bucket(num_tokens)) if sizes else self.bucket(num_tokens)

    @property
    def of_prompt_logprobs(self) -> Shapes:
        """The same for steps that give log-probabilities of prompt tokens."""
        return self._replace(tokens=self.prompt_buckets or self.tokens, decode_buckets=())

    @property
    def are_of_prompt_logprobs(self) -> bool:
        return self.tokens == (self.prompt_buckets or self.tokens) and not self.decode_buckets

    def rows(self, t: int) -> int:
        """B: the rows of a step of T tokens."""
        return min(t, self.max_seqs)

    def samples(self, t: int, drafts: bool) -> int:
        """R: the samples of a step of T tokens, with or without drafts."""
        return min(t, self.max_seqs * (1 + self.drafts if drafts else 1))

    def attention_rows(self, t: int) -> int:
        """A: the most rows of attention of a step of T tokens under a KV policy, which cuts a chunk
        where a block begins.
        """
        return min(t, 2 * self.rows(t) + t // self.block_size)

    @property
    def steps(self) -> tuple[StepShape, ...]:
        """The shapes of all steps but those with `prompt_logprobs` and plain ones, the largest last.
        Their programs can do all steps but those with `prompt_logprobs`.
        """
        kinds = (False, True) if self.drafts else (False,)
        alone = [StepShape(t, self.samples(t, False), True) for t in self.decode_buckets]
        spans = [self.span_shape(t) for t in self.span_buckets]
        mixed = [StepShape(t, self.samples(t, drafts)) for t in self.tokens for drafts in kinds]
        return tuple(dict.fromkeys((*alone, *spans, *mixed)))

    @property
    def prompt_steps(self) -> tuple[StepShape, ...]:
        """The shapes of all steps with `prompt_logprobs`."""
        mixed = self.of_prompt_logprobs._replace(span_buckets=()).steps
        return tuple([shape._replace(prompt_logprobs=True) for shape in mixed])

    def span_shape(self, t: int) -> StepShape:
        """The shape of a span of steps of T tokens."""
        return StepShape(t, self.samples(t, False), t in self.decode_buckets, self.span)

    def draft_shape(self, rows: int, t: int) -> DraftShape:
        """The shape of the program that drafts for `rows` rows of a step of T tokens.

        Where the probabilities of drafts go into the step, the program depends on the step's shape.
        A row with drafts has one known token and at least one draft, so at most half of the step's
        tokens are the known tokens of such rows.
        """
        if self.keeps_probs:
            drafting_rows = max(t // 2, self.tokens[0])
            return DraftShape(min(drafting_rows, self.max_seqs), self.samples(t, True))
        return DraftShape(min(self.bucket(rows), self.max_seqs), 0)

    @property
    def draft_shapes(self) -> tuple[DraftShape, ...]:
        """The shapes of all programs of a drafter on the device."""
        shapes = [self.draft_shape(min(t, self.max_seqs), t) for t in self.tokens]
        return tuple(dict.fromkeys(shapes))


def token_buckets(max_tokens: int, *, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two from `smallest`, and max_tokens itself at the end."""
    sizes = []
    size = smallest
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return (*sizes, max(max_tokens, smallest))


def prompt_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Sizes of steps with log-probabilities of prompt tokens: every third one of the others, with
    the largest. Few requests want them, so few programs are worth their compilation.
    """
    return tuple(buckets[::-1][::PROMPT_SPACING][::-1])


def gpu_decode_buckets(most: int) -> tuple[int, ...]:
    """Sizes of steps of decodes alone on a GPU: powers of two up to DECODE_SPACING, its multiples,
    and `most` at the end.
    """
    small = token_buckets(min(most, DECODE_SPACING))
    large = range(2 * DECODE_SPACING, most, DECODE_SPACING)
    return tuple(dict.fromkeys((*small, *large, most)))


def blank_sampling(samples: int, chain: RowChain = DEFAULT) -> SamplingBatch:
    """R greedy samples without options."""
    return SamplingBatch(
        temperature=np.zeros(samples, np.float32),
        num_top=np.full(samples, -1, np.int32),
        seed=np.zeros(samples, np.uint32),
        position=np.zeros(samples, np.int32),
        prompt_len=np.zeros(samples, np.int32),
        features=chain.blank(samples),
    )


# A transfer to a device costs the host time of its own, and a step of decodes has some fifteen
# small arrays. They go as one array. What is mostly on the device already stays outside: the arrays
# of sampling options, the tokens of the step before, drafts, the factors of adapters.
CORE = Batch._fields.index("sampling")  # the fields before it are arrays that every step sends


@partial(
    jax.tree_util.register_dataclass, data_fields=["words", "rest"], meta_fields=["tree", "layout"]
)
@dataclass(frozen=True)
class OneTransfer:
    """A `Batch` as a step's program takes it.

    Attributes:
        words: [N] i32: the bits of its arrays of 32-bit numbers, one behind the other.
        rest: its other arrays.
        tree: how the arrays of `words` form a tree (`joined`).
        layout: the shape and the dtype of each array of `words`.
    """

    words: Any
    rest: Any
    tree: Any
    layout: tuple[tuple[tuple[int, ...], np.dtype], ...]


def joined(batch: Batch) -> OneTransfer:
    """The batch for a step's program. Its arrays of 32-bit numbers are copied."""
    *sampling_arrays, features = batch.sampling
    words_of_extras = [[getattr(extra, name) for name in extra.words] for extra in batch.extras]
    leaves, tree = jax.tree.flatten((batch[:CORE], tuple(sampling_arrays), words_of_extras))
    arrays = [np.asarray(leaf) for leaf in leaves]
    words = np.concatenate([array.reshape(-1).view(np.int32) for array in arrays])
    layout = tuple([(array.shape, array.dtype) for array in arrays])
    # the fields of `words` are None in the rest
    extras = [replace(extra, **dict.fromkeys(extra.words)) for extra in batch.extras]
    return OneTransfer(words, (features, extras), tree, layout)


def places(transfer: OneTransfer) -> tuple[tuple[Any, ...], tuple[Any, ...], list[list[Any]]]:
    """Where each array is in `words`, as a slice of it -> (of the first `CORE` fields of `Batch`, of
    the fields of `SamplingBatch` but the features, of the `words` of each extra).
    """
    slices = []
    start = 0
    for shape, _ in transfer.layout:
        slices.append(slice(start, start + math.prod(shape)))
        start = slices[-1].stop
    return jax.tree.unflatten(transfer.tree, slices)


def parted(transfer: OneTransfer) -> Batch:
    """The batch again, inside of a program."""
    arrays = []
    start = 0
    for shape, dtype in transfer.layout:
        end = start + math.prod(shape)
        words = jax.lax.slice(transfer.words, (start,), (end,))
        arrays.append(jax.lax.bitcast_convert_type(words.reshape(shape), dtype))
        start = end
    core, sampling_arrays, words_of_extras = jax.tree.unflatten(transfer.tree, arrays)
    features, extras = transfer.rest
    whole_extras = [
        replace(extra, **dict(zip(extra.words, values, strict=True)))
        for extra, values in zip(extras, words_of_extras, strict=True)
    ]
    sampling = SamplingBatch._make((*sampling_arrays, features))
    return Batch(*core, sampling=sampling, extras=tuple(whole_extras))
