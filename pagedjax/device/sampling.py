"""Sampling: from logits to tokens, for samples that each have their own options. Unused options
cost nothing.

The options that change logits or weights are `row_features`. The draw is in draws.py, or in
rejection.py for the rule "rejection" of speculative decoding. This file has the order of all these
parts, and the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device import rejection
from pagedjax.device.batch import MAX_TOP, SamplingBatch
from pagedjax.device.checks import check_shape
from pagedjax.device.draws import best_tokens, draw, temperature_weights, weights
from pagedjax.device.extras import Drafted
from pagedjax.device.placement import whole_rows
from pagedjax.device.row_features.chain import DEFAULT, RowChain
from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.row_reductions import log_softmax

PROMPT_TILE = 64  # prompt tokens whose logits exist at the same time
# Samples at a time on a CPU, so that arrays stay small: malloc returns blocks above 32 MiB to the
# system, and each new one is mapped again page by page.
CPU_TILE = 8
WAYS_WITHOUT_OPTIONS = 2  # of choosing tokens: the best ones, and draws by temperature alone


class SampledTokens(NamedTuple):
    """The sampled tokens of a step. Log-probability fields are zeros unless some sample wants
    them.
    """

    tokens: jax.Array  # [R] int32
    # [R] f32 of the chosen token, under the model's own distribution (before any adjustment)
    logprobs: jax.Array
    ranks: jax.Array  # [R] int32, 1 for the most likely token
    top_ids: jax.Array  # [R, MAX_TOP] int32, most likely first; -1 past a small vocabulary
    top_logprobs: jax.Array  # [R, MAX_TOP] f32


class History(NamedTuple):
    """Where the tokens before each sample are: in the cache, through the block table of its row."""

    tokens: jax.Array  # [P, S] int32, of a `KVCache`
    block_tables: jax.Array  # [R, M] int32
    seq_lens: jax.Array  # [R] int32


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the targets of the step's T tokens (`Batch.targets`). Where a target is
    -1, they mean nothing.
    """

    logprobs: jax.Array  # [T]
    ranks: jax.Array  # [T]
    top_ids: jax.Array  # [T, MAX_TOP]
    top_logprobs: jax.Array  # [T, MAX_TOP]


def device_tile() -> int | None:
    """The `tile` that suits the default device."""
    return CPU_TILE if jax.default_backend() == "cpu" else None


def sample(
    logits: jax.Array,
    s: SamplingBatch,
    history: History,
    seed: jax.Array,
    tile: int | None = None,
    chain: RowChain = DEFAULT,
    drafted: Drafted | None = None,
) -> SampledTokens:
    """One token for each sample.

    Args:
        logits: [R, V] float32.
        s: a program for samples without options is smaller, see `SamplingBatch.is_plain`.
        history: read only by options that some sample uses.
        seed: [] uint32, the engine's.
        tile: number of samples that are drawn, or have their log-probabilities computed, at a time;
            None: all are computed at once.
        chain: the options in `s.features`.
        drafted: the drafts, if they are accepted by rejection sampling. A sample is its draft if
            that is accepted.

    Raises:
        ValueError: an array has not one row for each sample, or `s.features` is of another chain.
    """
    _check(logits, s, history, chain)
    tokens = _tokens(logits, s, history, seed, tile, chain, drafted)
    without_logprobs = SampledTokens(tokens, *_no_logprobs(len(tokens)))
    if s.num_top is None:
        return without_logprobs

    def with_logprobs() -> SampledTokens:
        return SampledTokens(tokens, *_tiled(_logprobs, tile, logits, tokens))

    return jax.lax.cond(jnp.any(s.num_top >= 0), with_logprobs, lambda: without_logprobs)


def _tokens(
    logits: jax.Array,
    s: SamplingBatch,
    history: History,
    seed: jax.Array,
    tile: int | None,
    chain: RowChain,
    drafted: Drafted | None,
) -> jax.Array:
    """[R] a token for each sample. Arguments as in `sample`."""

    def choose(
        x: jax.Array, s: SamplingBatch, tables: jax.Array, lens: jax.Array, drafted: Drafted | None
    ) -> jax.Array:
        context = RowContext(history.tokens, tables, lens, s.prompt_len, s.position)
        return _choose(x, s, context, seed, chain, drafted)

    def choose_by_temperature(
        x: jax.Array, s: SamplingBatch, tables: jax.Array, lens: jax.Array, drafted: Drafted | None
    ) -> jax.Array:
        return _choose_by_temperature(x, s, seed, drafted)

    # Each branch goes from logits to tokens: XLA would copy logits that a branch returns unchanged.
    # Only the last branch has conditionals of options inside, which do return logits.
    ways = [lambda x, *_: best_tokens(x), partial(_tiled, choose_by_temperature, tile)]
    if s.features is not None:
        ways.append(partial(_tiled, choose, tile))
    return jax.lax.switch(
        _way_of_choosing(s, chain),
        ways,
        logits,
        s,
        history.block_tables,
        history.seq_lens,
        drafted,
    )


def _check(logits: jax.Array, s: SamplingBatch, history: History, chain: RowChain) -> None:
    r = len(s.temperature)
    check_shape("logits", logits, (r, None))
    check_shape("tokens", history.tokens, (None, None))
    check_shape("block_tables", history.block_tables, (r, None))
    check_shape("seq_lens", history.seq_lens, (r,))
    names = {feature.name for feature in chain.features}
    if s.features is not None and s.features.keys() != names:
        raise ValueError(
            f"the batch has the row features {sorted(s.features)}; the step has {sorted(names)}"
        )
    for path, array in jax.tree.leaves_with_path(s):
        check_shape(jax.tree_util.keystr(path), array, (r, *array.shape[1:]))


def _tiled(function: Callable[..., Any], tile: int | None, logits: jax.Array, *rows: Any) -> Any:
    """function(logits [R, V], arrays [R, ...]) -> arrays [R, ...], computed for `tile` samples at a
    time.
    """
    r = len(logits)
    if tile is None or r <= tile:
        return function(logits, *rows)

    def body(i: jax.Array, out: Any) -> Any:
        # the last tile is moved back to fit, so it computes some samples a second time
        start = jnp.minimum(i * tile, r - tile)

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, tile)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, start, 0)

        results = function(*jax.tree.map(cut, (logits, *rows)))
        return jax.tree.map(put, out, results)

    shapes = jax.eval_shape(function, logits, *rows)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, -(-r // tile), body, zeros)


def _way_of_choosing(s: SamplingBatch, chain: RowChain) -> jax.Array:
    """[] int32: 0 if each row takes its best token, 1 if a row draws by its temperature alone,
    WAYS_WITHOUT_OPTIONS if the options of a row change its logits or weights; none does so if the
    program has no options.
    """
    draws = s.temperature > 0
    if s.features is None:
        return draws.astype(jnp.int32).max()
    has_options = chain.uses("logits", s.features) | (draws & chain.uses("probs", s.features))
    return jnp.where(has_options, WAYS_WITHOUT_OPTIONS, draws.astype(jnp.int32)).max()


def _choose_by_temperature(
    logits: jax.Array, s: SamplingBatch, seed: jax.Array, drafted: Drafted | None
) -> jax.Array:
    """[R] a token drawn at the temperature of its row, or the best one; no row has an option."""
    drawn = _drawn(temperature_weights(logits, s), s, seed, drafted)
    return jnp.where(s.temperature > 0, drawn, best_tokens(logits))


def _choose(
    logits: jax.Array,
    s: SamplingBatch,
    context: RowContext,
    seed: jax.Array,
    chain: RowChain,
    drafted: Drafted | None,
) -> jax.Array:
    """[R] the best or a drawn token, after the samples' options have changed their logits."""
    logits = chain.apply("logits", logits, s.features, context)
    best = best_tokens(logits)

    def drawn(
        logits: jax.Array, s: SamplingBatch, context: RowContext, drafted: Drafted | None
    ) -> jax.Array:
        return _drawn(weights(logits, s, context, chain), s, seed, drafted)

    tokens = jax.lax.cond(
        jnp.any(s.temperature > 0), drawn, lambda *_: best, logits, s, context, drafted
    )
    return jnp.where(s.temperature > 0, tokens, best)


def _drawn(
    row_weights: jax.Array, s: SamplingBatch, seed: jax.Array, drafted: Drafted | None
) -> jax.Array:
    """[R] a token of each row of weights [R, V], or its draft."""
    if drafted is None:
        return draw(row_weights, s, seed)
    return rejection.draw_or_accept(row_weights, s, seed, drafted)


def prompt_logprobs_bytes(tokens: int, vocabulary: int) -> int:
    """Bytes of device memory that `prompt_logprobs` needs for a step of so many tokens, beside what
    the step needs: the logits of a tile in float32, and as many numbers twice while they are
    normalised and ranked.
    """
    float32_bytes = 4
    return 3 * float32_bytes * min(PROMPT_TILE, tokens) * vocabulary


def prompt_logprobs(
    project: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    tile: int | None = None,
    by_rows: Callable[..., Any] = whole_rows,
) -> PromptLogprobs:
    """Log-probabilities of `targets` [T] from hidden [T, H], PROMPT_TILE tokens at a time.

    Args:
        project: [R, H] -> logits [R, V], or those of a device's part of the vocabulary.
        tile: as in `sample`, of the logits that exist at the same time.
        by_rows: how a device gets whole rows of the logits (placement.py).
    """
    t = targets.shape[0]
    size = min(PROMPT_TILE, t)
    padded = jnp.pad(hidden, ((0, -t % size), (0, 0)))
    padded_targets = jnp.pad(targets, (0, -t % size), constant_values=-1)

    def body(i, out):
        logits = project(jax.lax.dynamic_slice_in_dim(padded, i * size, size))
        ids = jnp.maximum(jax.lax.dynamic_slice_in_dim(padded_targets, i * size, size), 0)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, i * size, 0)

        logprobs = by_rows(
            lambda x, ids: PromptLogprobs(*_tiled(_logprobs, tile, x, ids)), logits, ids
        )
        return jax.tree.map(put, out, logprobs)

    zeros = PromptLogprobs(*_no_logprobs(len(padded)))
    out = jax.lax.fori_loop(0, len(padded) // size, body, zeros)
    return jax.tree.map(lambda x: x[:t], out)


def _no_logprobs(rows: int) -> tuple[jax.Array, ...]:
    top = (rows, MAX_TOP)
    return jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros(top, jnp.int32), jnp.zeros(top)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
    """(logprobs, ranks, top_ids, top_logprobs) of tokens [R] under logits [R, V], as in
    `SampledTokens`.
    """
    logp = log_softmax(logits)
    chosen = jnp.take_along_axis(logp, tokens[:, None], axis=-1)
    width = min(MAX_TOP, logp.shape[-1])
    top, ids = jax.lax.platform_dependent(
        logp, cuda=partial(by_maxima, k=width), default=lambda x: tuple(jax.lax.top_k(x, width))
    )
    fill = ((0, 0), (0, MAX_TOP - width))
    ranks = (1 + (logp > chosen).sum(-1)).astype(jnp.int32)
    # a vocabulary of fewer than MAX_TOP tokens leaves entries without a token
    ids = jnp.pad(ids.astype(jnp.int32), fill, constant_values=-1)
    return chosen[:, 0], ranks, ids, jnp.pad(top, fill, constant_values=-jnp.inf)


def by_maxima(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` of finite x [R, V], found as k maxima: (numbers [R, k], indices [R, k]).
    Indices are int32. Of equal numbers the first ones are taken.

    For a k above 16 XLA sorts the whole row. On a GPU it does so with a library that cannot be in a
    CUDA graph.
    """
    column = jnp.arange(x.shape[-1], dtype=jnp.int32)
    top = []
    ids = []
    for _ in range(k):
        best = jnp.argmax(x, axis=-1).astype(jnp.int32)
        top.append(x.max(-1))
        ids.append(best)
        x = jnp.where(column == best[:, None], -jnp.inf, x)
    return jnp.stack(top, axis=-1), jnp.stack(ids, axis=-1)
