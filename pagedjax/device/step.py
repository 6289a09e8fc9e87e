"""The jits of the library and its donations of the cache: to the step, and to what moves whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.attention import Attend
from pagedjax.device.batch import Batch, Feed
from pagedjax.device.cache import KVCache, copy, read_blocks, write_blocks
from pagedjax.device.models import Model
from pagedjax.device.sampling import PromptLogprobs, SampledTokens, prompt_logprobs, sample

Step = Callable[[Any, KVCache, Batch], tuple[KVCache, "StepOutput"]]
Steps = Callable[[Any, KVCache, tuple[Batch, ...], Any], tuple[KVCache, tuple["StepOutput", ...]]]


# Whole blocks, a fixed number at a time; padding means the trash block.
copy_blocks = jax.jit(copy, donate_argnums=0)  # (cache, from, to) -> cache
out_of_cache = jax.jit(read_blocks)  # (cache, ids) -> pages
into_cache = jax.jit(write_blocks, donate_argnums=0)  # (cache, ids, pages) -> cache


class StepOutput(NamedTuple):
    sampled: SampledTokens
    prompt: PromptLogprobs
    fed: jax.Array | None = None  # [max_num_seqs] the sampled tokens, for a `Feed`


def make_step(model: Model, attend: Attend, seed: int, tile: int | None = None) -> Step:
    """step(leaves, cache, batch) -> (cache, StepOutput), jitted; the cache is donated and updated in place.

    Args:
        model: its parameters are not kept; every call takes a model's `leaves`.
        tile: rows that are sampled for at a time, see `sample`.
    """
    graphdef, tree = model.graphdef, jax.tree.structure(model.params)

    def step(leaves: Sequence[Any], cache: KVCache, batch: Batch) -> tuple[KVCache, StepOutput]:
        model, feed = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)), batch.feed
        if feed is not None:
            batch = batch._replace(tokens=jnp.where(feed.rows >= 0, feed.tokens[feed.rows], batch.tokens))
        cache, hidden = model.hidden(cache, batch, attend)
        sampled = sample(model.logits(hidden[:, batch.last]), batch.sampling, jnp.uint32(seed), tile)
        fed = None if feed is None else jnp.zeros_like(feed.tokens).at[: len(sampled.tokens)].set(sampled.tokens)
        return cache, StepOutput(sampled, prompt_logprobs(model.logits, hidden, batch.targets, tile), fed)

    return jax.jit(step, donate_argnums=1)


def make_steps(step: Step) -> Steps:
    """steps(leaves, cache, batches, count) -> (cache, outputs): the first `count` of some steps of one bucket, jitted.

    Each takes the tokens that its `feed` names from the step before it; the cache is donated as ever. `count` is an
    array, so that one program serves any number up to len(batches); outputs past it are zeros.
    """

    def steps(leaves: Sequence[Any], cache: KVCache, batches: tuple[Batch, ...], count: jax.Array):
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *batches)
        _, output = jax.eval_shape(step, leaves, cache, batches[0])
        blank = jax.tree.map(lambda a: jnp.zeros((len(batches), *a.shape), a.dtype), output)

        def one(i: jax.Array, carry: Any) -> Any:
            cache, tokens, outputs = carry
            batch: Any = jax.tree.map(lambda a: a[i], stacked)
            cache, output = step(leaves, cache, batch._replace(feed=Feed(batch.feed.rows, tokens)))
            return cache, output.fed, jax.tree.map(lambda a, new: a.at[i].set(new), outputs, output)

        begin: Any = batches[0].feed
        cache, _, outputs = jax.lax.fori_loop(0, count, one, (cache, jnp.asarray(begin.tokens), blank))
        return cache, tuple(jax.tree.map(lambda a, i=i: a[i], outputs) for i in range(len(batches)))

    return jax.jit(steps, donate_argnums=1)
