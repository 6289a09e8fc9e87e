"""The compiled programs: the step, the drafter's program, and copies of whole blocks.

The cache is donated to the programs that change it; `out_of_cache` only reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device import rejection
from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch, DraftBatch, OneTransfer, SamplingBatch, parted
from pagedjax.device.cache import KVCache, copy, read_blocks, write_blocks, write_tokens
from pagedjax.device.checks import check_shape
from pagedjax.device.draft_model import DraftModel, features_before, fitted
from pagedjax.device.extras import Drafted, Feed, GroupTables, Span
from pagedjax.device.layer_groups import LayerGroups
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import samples_of
from pagedjax.device.placement import whole_rows
from pagedjax.device.row_features.chain import DEFAULT, RowChain
from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.sampling import (
    History,
    PromptLogprobs,
    SampledTokens,
    prompt_logprobs,
    sample,
)
from pagedjax.device.side_outputs import NOTHING, SideArrays, SideOutputs, inner_arrays
from pagedjax.device.span import decode_span

Step = Callable[[Any, KVCache, OneTransfer], tuple[KVCache, "StepOutput"]]
Draft = Callable[[Any, KVCache, DraftBatch], tuple[KVCache, "DraftOutput"]]


# Whole blocks, a fixed number at a time; padding means the trash block.
copy_blocks = jax.jit(copy, donate_argnums=0)  # (cache, from, to) -> cache
out_of_cache = jax.jit(read_blocks)  # (cache, ids) -> pages
into_cache = jax.jit(write_blocks, donate_argnums=0)  # (cache, ids, pages) -> cache


# (shape, dtype, sharding) -> zeros, made on their own devices. `jnp.zeros` makes each part of a
# mesh on the default device first, whose memory may be full.
zeros = jax.jit(
    lambda shape, dtype, device: jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), device),
    static_argnames=("shape", "dtype", "device"),
)


class StepOutput(NamedTuple):
    """What a step's program returns beside the cache. Of a span there are tokens [steps, B] in
    `sampled`, `fed`, and nothing else.
    """

    sampled: SampledTokens
    prompt: PromptLogprobs | None = None  # if the batch has targets
    fed: jax.Array | None = None  # [max_num_seqs] the sampled tokens, for a `Feed`
    # [R, H] after the final norm, of the token that each sample follows
    hidden: jax.Array | None = None
    taps: SideArrays | None = None  # the arrays of the step's side outputs


class DraftOutput(NamedTuple):
    tokens: jax.Array  # [k, B] int32: the drafts of each row, in their order
    # [R, V] the weights that the draft in each sample's place was drawn from; None if not wanted
    probs: jax.Array | None


class BoundDraftModel(NamedTuple):
    """A drafter on the device as the programs use it: the model, its attention, and its groups of
    layers; None: all of its layers have the first block table.
    """

    model: DraftModel
    attend: Attend
    layout: LayerGroups | None = None

    def batch(self, batch: Batch) -> Batch:
        """A step's batch as the drafter's layers see it."""
        groups = batch.extra(GroupTables)
        if groups is None:
            return batch
        if self.layout is None:
            return batch.without(GroupTables)
        return batch.having(replace(groups, layout=self.layout))


def _modules(
    model: Model, bound: BoundDraftModel | None
) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    """leaves -> the nnx modules of the model and of the drafter."""
    graphdef = model.graphdef
    structure = jax.tree.structure(model.params)
    draft_graphdef = None
    draft_structure = None
    if bound is not None:
        draft_graphdef = bound.model.graphdef
        draft_structure = jax.tree.structure(bound.model.params)

    def modules(leaves: Sequence[Any]) -> tuple[Any, Any]:
        drafter = None
        if draft_graphdef is not None:
            draft_leaves = leaves[structure.num_leaves :]
            drafter = nnx.merge(draft_graphdef, jax.tree.unflatten(draft_structure, draft_leaves))
        model_leaves = leaves[: structure.num_leaves]
        return nnx.merge(graphdef, jax.tree.unflatten(structure, model_leaves)), drafter

    return modules


def _mapped(
    program: Callable[..., Any], model: Model, bound: BoundDraftModel | None
) -> Callable[..., Any]:
    """The program on the devices of the model's mesh, if it has one."""
    leaves = (*model.leaves, *bound.model.leaves) if bound else model.leaves
    return model.placement.mapped(program, leaves) if model.placement else program


def make_step(
    model: Model,
    attend: Attend,
    seed: int,
    tile: int | None = None,
    chain: RowChain = DEFAULT,
    bound: BoundDraftModel | None = None,
    *,
    side_outputs: SideOutputs = NOTHING,
) -> Step:
    """step(leaves, cache, joined(batch)) -> (cache, StepOutput), jitted; the cache is donated and
    updated in place.

    Args:
        model: its parameters are not kept; every call takes a model's `leaves`, and behind them
            those of the drafter.
        tile, chain: see `sample`.
        bound: a drafter on the device, which observes the step's tokens.
        side_outputs: what to return beside samples. The samples have the same bits without them.

    Raises:
        ValueError: arrays of a batch do not fit together, when the step is traced.
    """
    modules = _modules(model, bound)
    by_rows = model.placement.by_rows if model.placement else whole_rows
    drafter_taps = bound.model.taps if bound else ()

    def step(
        leaves: Sequence[Any], cache: KVCache, joined_batch: OneTransfer
    ) -> tuple[KVCache, StepOutput]:
        batch = _arrive(parted(joined_batch))
        module, drafter = modules(leaves)
        if batch.extra(Span) is None:
            return computed(module, drafter, cache, batch)

        def sampled_tokens(cache: KVCache, batch: Batch) -> tuple[KVCache, jax.Array]:
            cache, output = computed(module, drafter, cache, batch)
            return cache, output.sampled.tokens

        cache, tokens = decode_span(sampled_tokens, cache, batch)
        return cache, _output_of_span(batch, tokens)

    def computed(
        module: Any, drafter: Any, cache: KVCache, batch: Batch
    ) -> tuple[KVCache, StepOutput]:
        cache = cache._replace(tokens=write_tokens(cache.tokens, batch.tokens, batch.slots))
        run = module.layers(
            cache,
            batch,
            attend,
            (*drafter_taps, *side_outputs.outputs(module.config.layers)),
            side_outputs.experts,
        )
        cache = run.cache
        side_arrays = None
        if side_outputs:
            side_arrays = inner_arrays(module, run, batch, attend, side_outputs)
        if bound is not None:
            cache = _observe(bound, drafter, module, cache, batch, run.outputs)
        rows = _rows_of_samples(batch)
        hidden, prompt = _hidden_of_samples(module, run.finish, batch, tile, by_rows)
        logits = module.logits(hidden, batch.used_samples)
        sampled, sample_outputs = by_rows(
            partial(_samples_of, cache.tokens, seed, tile, chain, side_outputs), logits, rows
        )
        if side_arrays is not None:
            side_arrays = side_arrays._replace(samples=sample_outputs)
        fed = _tokens_to_feed(batch, sampled.tokens)
        return cache, StepOutput(sampled, prompt, fed, hidden, side_arrays)

    return jax.jit(_mapped(step, model, bound), donate_argnums=1)


def _output_of_span(batch: Batch, tokens: jax.Array) -> StepOutput:
    """What a span returns: its tokens [steps, B], and those of the last step for the next
    program.
    """
    nothing: Any = None  # what no row of a span asks for
    sampled = SampledTokens(tokens, nothing, nothing, nothing, nothing)
    return StepOutput(sampled, fed=_tokens_to_feed(batch, tokens[-1]))


def _arrive(batch: Batch) -> Batch:
    """The batch after each of its extras has changed it (`Extra.arrive`). Raises ValueError for
    arrays that do not fit together.
    """
    _check(batch)
    for extra in batch.extras:
        batch = extra.arrive(batch)
    return batch


def _observe(
    bound: BoundDraftModel,
    drafter: Any,
    model: Any,
    cache: KVCache,
    batch: Batch,
    outputs: tuple[jax.Array, ...],
) -> KVCache:
    """The cache after the drafter has read the outputs of its layers, the first ones of
    `outputs`.
    """
    assert cache.draft is not None
    outputs = outputs[: len(bound.model.taps)]
    drafter_batch = bound.batch(batch)
    pages = bound.model.observe(drafter, model, cache.draft, drafter_batch, outputs, bound.attend)
    return cache._replace(draft=pages)


def _rows_of_samples(batch: Batch) -> tuple[SamplingBatch, jax.Array, jax.Array, Drafted | None]:
    """For each sample, (sampling options, block table, number of tokens, draft).

    A sample sees the tokens of its row up to the one that it follows.
    """
    tables = batch.block_tables[batch.sampled_row]
    return batch.sampling, tables, batch.positions[batch.last] + 1, batch.extra(Drafted)


def _samples_of(
    tokens: jax.Array,
    seed: int,
    tile: int | None,
    chain: RowChain,
    side_outputs: SideOutputs,
    logits: jax.Array,
    rows: Any,
) -> tuple[SampledTokens, dict[str, Any]]:
    """The samples of some rows of logits [R, V], and the side outputs of these rows.

    Args:
        tokens: [P, S] of the cache.
        rows: as in `_rows_of_samples`.
    """
    sampling, tables, lens, drafted = rows
    history = History(tokens, tables, lens)
    sampled = sample(logits, sampling, history, jnp.uint32(seed), tile, chain, drafted)
    return sampled, {
        output.name: output.compute(logits, sampled) for output in side_outputs.samples
    }


def _tokens_to_feed(batch: Batch, tokens: jax.Array) -> jax.Array | None:
    """[max_num_seqs] the sampled tokens, if an engine feeds them to its next step."""
    feed = batch.extra(Feed)
    if feed is None:
        return None
    return jnp.pad(tokens, (0, len(feed.tokens) - len(tokens)))


def _hidden_of_samples(
    model: Any, finish: Callable[..., Any], batch: Batch, tile: int | None, by_rows: Any
) -> tuple[jax.Array, PromptLogprobs | None]:
    """The last hidden states [R, H] of the tokens that samples follow, and the log-probabilities of
    prompt tokens, if the batch has targets.

    Tokens that no sample follows need the last layer only for log-probabilities.

    Args:
        finish: `Run.finish`, which runs the last layer for all tokens (None), or for some.
    """
    if batch.targets is None and len(batch.last) < len(batch.tokens):
        return finish(samples_of(batch)), None
    hidden = finish(None)
    logprobs = None
    if batch.targets is not None:
        logprobs = prompt_logprobs(model.logits, hidden, batch.targets, tile, by_rows)
    return hidden[batch.last], logprobs


def make_draft(
    model: Model,
    bound: BoundDraftModel,
    num_drafts: int,
    seed: int,
    tile: int | None = None,
    chain: RowChain = DEFAULT,
    *,
    probs: bool = False,
) -> Draft:
    """draft(leaves, cache, batch) -> (cache, DraftOutput), jitted: each row's next tokens by the
    drafter, one by one.

    A draft is drawn with the same uniform number as the model's own token at that position, so that
    the two agree often. If probs are wanted, it is drawn with another number, as rejection sampling
    needs, and `tile` is not used.

    Args:
        num_drafts: k, the most drafts of a row.
        probs: return the weights that drafts were drawn from.
        model, bound, tile, chain: as in `make_step`. The drafts are written behind the known tokens
            of the cache.
    """
    modules = _modules(model, bound)
    vocabulary = model.config.vocab_size  # of the whole model; a device of a mesh has a part

    def draft(
        leaves: Sequence[Any], cache: KVCache, batch: DraftBatch
    ) -> tuple[KVCache, DraftOutput]:
        module, drafter = modules(leaves)
        rows = len(batch.tokens)

        def next_logits(pages: Any, step: Batch, features: Any) -> tuple[Any, Any, jax.Array]:
            pages, features, logits = bound.model.next_logits(
                drafter, module, pages, step, features, bound.attend
            )
            return pages, features, fitted(logits, vocabulary)

        assert cache.draft is not None
        features = features_before(
            cache.draft, batch.block_tables, jnp.arange(rows), batch.positions
        )
        start = DraftState(
            pages=cache.draft,
            cached_tokens=cache.tokens,
            tokens=batch.tokens,
            features=features,
            drafts=jnp.zeros((num_drafts, rows), jnp.int32),
            probs=jnp.zeros((num_drafts, rows, vocabulary)) if probs else None,
        )
        draft_token = partial(
            _draft_token,
            batch=batch,
            layout=bound.layout,
            next_logits=next_logits,
            key=jnp.uint32(seed),
            tile=tile,
            chain=chain,
        )
        end = jax.lax.fori_loop(0, batch.counts.max(), draft_token, start)
        drafts_probs = end.probs
        if drafts_probs is not None:
            drafts_probs = drafts_probs.reshape(num_drafts * rows, -1)[batch.samples]
        cache = cache._replace(draft=end.pages, tokens=end.cached_tokens)
        return cache, DraftOutput(end.drafts, drafts_probs)

    return jax.jit(_mapped(draft, model, bound), donate_argnums=1)


class DraftState(NamedTuple):
    """What the drafter's program carries from draft to draft.

    pages: of the drafter.
    cached_tokens: [P, S] as in the cache.
    tokens: [B] the newest token of each row.
    features: [B, F] those of the token before each, or None.
    drafts, probs: [k, B] and [k, B, V], as far as they are drawn; `probs` is None if not wanted.
    """

    pages: Any
    cached_tokens: jax.Array
    tokens: jax.Array
    features: Any
    drafts: jax.Array
    probs: jax.Array | None


def _draft_token(
    i: jax.Array,
    state: DraftState,
    *,
    batch: DraftBatch,
    layout: LayerGroups | None,
    next_logits: Callable[[Any, Batch, Any], tuple[Any, Any, jax.Array]],
    key: jax.Array,
    tile: int | None,
    chain: RowChain,
) -> DraftState:
    """Draw draft i of each row.

    Args:
        layout: as in `BoundDraftModel`.
        next_logits: (pages, batch of one token a row, features) -> (pages, features, logits).
    """
    step = _one_token_each(i, state, batch, layout)
    cached_tokens = write_tokens(state.cached_tokens, state.tokens, step.slots)
    pages, features, logits = next_logits(state.pages, step, state.features)
    sampling = step.sampling
    probs = state.probs
    if probs is not None:
        context = RowContext(
            cached_tokens,
            batch.block_tables,
            step.positions + 1,
            sampling.prompt_len,
            sampling.position,
        )
        drafted, row_weights = rejection.draw_drafts(logits, sampling, context, key, chain)
        probs = jax.lax.dynamic_update_index_in_dim(probs, row_weights, i, 0)
    else:
        history = History(cached_tokens, batch.block_tables, step.positions + 1)
        drafted = sample(logits, sampling, history, key, tile, chain).tokens
    return DraftState(
        pages, cached_tokens, drafted, features, state.drafts.at[i].set(drafted), probs
    )


def _one_token_each(
    i: jax.Array, state: DraftState, batch: DraftBatch, layout: LayerGroups | None
) -> Batch:
    """The step of the drafter that computes the newest token of each row, for draft i.

    A row that has all of its drafts repeats its last position, and writes to the trash block.
    """
    size = state.cached_tokens.shape[1]
    needs_draft = i < batch.counts
    positions = batch.positions + jnp.minimum(i, jnp.maximum(batch.counts - 1, 0))
    entry = (positions // size)[:, None]

    def slots_in(tables: jax.Array) -> jax.Array:
        block = jnp.take_along_axis(tables, entry, axis=1)[:, 0]
        return jnp.where(needs_draft, block * size + positions % size, 0)

    slots = slots_in(batch.block_tables)
    extras: tuple[GroupTables, ...] = ()
    if layout is not None:
        slots_of_groups = tuple([slots_in(tables) for tables in batch.group_tables])
        extras = (GroupTables(layout, slots_of_groups, batch.group_tables),)
    row_starts = jnp.arange(len(batch.tokens) + 1, dtype=jnp.int32)
    sampling = batch.sampling._replace(position=batch.sampling.position + i)
    return Batch(
        tokens=state.tokens,
        positions=positions,
        slots=slots,
        block_tables=batch.block_tables,
        seq_lens=positions + 1,
        cu_q_lens=row_starts,
        last=row_starts[:-1],
        sampled_row=row_starts[:-1],
        targets=None,
        sampling=sampling,
        extras=extras,
    )


def _check(batch: Batch) -> None:
    """Raises ValueError for arrays that do not fit together."""
    (t,) = batch.tokens.shape
    (b,) = batch.seq_lens.shape
    check_shape("positions", batch.positions, (t,))
    check_shape("slots", batch.slots, (t,))
    if batch.targets is not None:
        check_shape("targets", batch.targets, (t,))
    check_shape("block_tables", batch.block_tables, (b, None))
    check_shape("cu_q_lens", batch.row_cu_q_lens, (b + 1,))
    check_shape("sampled_row", batch.sampled_row, batch.last.shape)
    for extra in batch.extras:
        extra.check(batch)
