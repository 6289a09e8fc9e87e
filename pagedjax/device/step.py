"""The compiled programs: the step, and copies of whole blocks. All of them take the cache by donation or read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch
from pagedjax.device.cache import KVCache, copy, read_blocks, write_blocks, write_tokens
from pagedjax.device.checks import check_shape
from pagedjax.device.models import Model
from pagedjax.device.row_features.chain import DEFAULT, RowChain
from pagedjax.device.sampling import History, PromptLogprobs, SampledTokens, prompt_logprobs, sample

Step = Callable[[Any, KVCache, Batch], tuple[KVCache, "StepOutput"]]


# Whole blocks, a fixed number at a time; padding means the trash block.
copy_blocks = jax.jit(copy, donate_argnums=0)  # (cache, from, to) -> cache
out_of_cache = jax.jit(read_blocks)  # (cache, ids) -> pages
into_cache = jax.jit(write_blocks, donate_argnums=0)  # (cache, ids, pages) -> cache


class StepOutput(NamedTuple):
    sampled: SampledTokens
    prompt: PromptLogprobs
    fed: jax.Array | None = None  # [max_num_seqs] the sampled tokens, for a `Feed`


def make_step(model: Model, attend: Attend, seed: int, tile: int | None = None, chain: RowChain = DEFAULT) -> Step:
    """step(leaves, cache, batch) -> (cache, StepOutput), jitted; the cache is donated and updated in place.

    Args:
        model: its parameters are not kept; every call takes a model's `leaves`.
        tile, chain: see `sample`.

    Raises:
        ValueError: arrays of a batch do not fit together, when the step is traced.
    """
    graphdef, tree = model.graphdef, jax.tree.structure(model.params)

    def step(leaves: Sequence[Any], cache: KVCache, batch: Batch) -> tuple[KVCache, StepOutput]:
        _check(batch)
        model, feed = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)), batch.feed
        if feed is not None:
            batch = batch._replace(tokens=jnp.where(feed.rows >= 0, feed.tokens[feed.rows], batch.tokens))
        cache = cache._replace(tokens=write_tokens(cache.tokens, batch.tokens, batch.slots))
        cache, hidden = model.hidden(cache, batch, attend)
        # a sample sees the tokens of its row up to the one that it follows
        history = History(cache.tokens, batch.block_tables[batch.sampled_row], batch.positions[batch.last] + 1)
        logits = model.logits(hidden[:, batch.last])
        sampled = sample(logits, batch.sampling, history, jnp.uint32(seed), tile, chain)
        fed = None if feed is None else jnp.zeros_like(feed.tokens).at[: len(sampled.tokens)].set(sampled.tokens)
        return cache, StepOutput(sampled, prompt_logprobs(model.logits, hidden, batch.targets, tile), fed)

    return jax.jit(step, donate_argnums=1)


def _check(batch: Batch) -> None:
    (t,), (b,) = batch.tokens.shape, batch.seq_lens.shape
    for name in ("positions", "slots", "targets"):
        check_shape(name, getattr(batch, name), (t,))
    check_shape("block_tables", batch.block_tables, (b, None))
    check_shape("cu_q_lens", batch.cu_q_lens, (b + 1,))
    check_shape("sampled_row", batch.sampled_row, batch.last.shape)
    if batch.feed is not None:
        check_shape("feed.rows", batch.feed.rows, (t,))
