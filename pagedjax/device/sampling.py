"""Sampling: from logits to tokens, for rows that each have their own options. Unused options cost nothing.

The options that change logits or weights are `row_features`; here are temperature, the draw, and log-probabilities. One
uniform number decides a token, by inversion of the cumulative distribution. It depends only on (engine seed, request
seed, output position): a request gets the same tokens beside any other requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device.batch import MAX_TOP, SamplingBatch
from pagedjax.device.checks import check_shape
from pagedjax.device.row_features.chain import DEFAULT, RowChain
from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.row_features.truncation import row_sums

LANES = 128  # the cumulative sum runs over pieces of so many tokens, then over the pieces
PROMPT_TILE = 64  # prompt tokens whose logits exist at the same time
CPU_TILE = 8  # rows for `sample` on a CPU: malloc returns blocks above 32 MiB, which are mapped again page by page


class SampledTokens(NamedTuple):
    """The sampled tokens of a step. Log-probability fields are zeros unless some row wants them."""

    tokens: jax.Array  # [B] int32
    logprobs: jax.Array  # [B] f32 of the chosen token, under the model's own distribution (before any adjustment)
    ranks: jax.Array  # [B] int32, 1 for the most likely token
    top_ids: jax.Array  # [B, MAX_TOP] int32, most likely first; -1 past a small vocabulary
    top_logprobs: jax.Array  # [B, MAX_TOP] f32


class History(NamedTuple):
    """Where the tokens of the rows are: in the cache, through the block tables."""

    tokens: jax.Array  # [P, S] int32, of a `KVCache`
    block_tables: jax.Array  # [B, M] int32
    seq_lens: jax.Array  # [B] int32


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the T packed tokens' targets (`batch.targets`), where those are not -1."""

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
) -> SampledTokens:
    """One token for each row.

    Args:
        logits: [V, B] float32, in the layout that the model computes. Greedy rows are never transposed.
        history: read only by options that some row uses.
        seed: [] uint32, the engine's.
        tile: number of rows that are sampled, or have their log-probabilities computed, at a time; None is all.
        chain: the options in `s.features`.

    Raises:
        ValueError: an array has not one row (or column) for each row of the step, or `s.features` is of another chain.
    """
    _check(logits, s, history, chain)

    def choose(x: jax.Array, s: SamplingBatch, tables: jax.Array, lens: jax.Array) -> jax.Array:
        def choose_tile(x: jax.Array, rows: tuple[SamplingBatch, jax.Array, jax.Array]) -> jax.Array:
            s, tables, lens = rows
            return _choose(x, s, RowContext(history.tokens, tables, lens, s.prompt_len, s.position), seed, chain)

        return _tiled(choose_tile, tile, x, (s, tables, lens))

    # Two whole branches: XLA copies logits that a branch returns unchanged.
    plain = ~(jnp.any(s.temperature > 0) | chain.uses("logits", s.features))
    rows = s, history.block_tables, history.seq_lens
    tokens = jax.lax.cond(plain, lambda x, *_: _best(x), choose, logits, *rows)
    zeros = SampledTokens(tokens, *_no_logprobs(len(tokens)))
    with_logprobs = lambda: SampledTokens(tokens, *_tiled(_logprobs, tile, logits, tokens))  # noqa: E731
    return jax.lax.cond(jnp.any(s.num_top >= 0), with_logprobs, lambda: zeros)


def _check(logits: jax.Array, s: SamplingBatch, history: History, chain: RowChain) -> None:
    b = len(s.temperature)
    check_shape("logits", logits, (None, b))
    check_shape("tokens", history.tokens, (None, None))
    check_shape("block_tables", history.block_tables, (b, None))
    check_shape("seq_lens", history.seq_lens, (b,))
    if s.features.keys() != (names := {f.name for f in chain.features}):
        raise ValueError(f"the batch has the row features {sorted(s.features)}; the step has {sorted(names)}")
    for path, array in jax.tree.leaves_with_path(s):
        check_shape(jax.tree_util.keystr(path), array, (b, *array.shape[1:]))


def _tiled(function: Callable[[jax.Array, Any], Any], tile: int | None, logits: jax.Array, rows: Any) -> Any:
    """function([V, B], arrays [B, ...]) -> arrays [B, ...], computed for `tile` rows at a time."""
    b = logits.shape[1]
    if tile is None or b <= tile:
        return function(logits, rows)

    def body(i: jax.Array, out: Any) -> Any:
        start = jnp.minimum(i * tile, b - tile)  # the last tile computes rows of the one before again
        cut = lambda x, axis=0: jax.lax.dynamic_slice_in_dim(x, start, tile, axis)  # noqa: E731
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0)  # noqa: E731
        return jax.tree.map(put, out, function(cut(logits, 1), jax.tree.map(cut, rows)))

    like = jax.eval_shape(function, logits, rows)
    return jax.lax.fori_loop(0, -(-b // tile), body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))


def _choose(logits: jax.Array, s: SamplingBatch, context: RowContext, seed: jax.Array, chain: RowChain) -> jax.Array:
    """[B] the best or a drawn token, after the rows' options have changed their logits."""
    logits = chain.apply("logits", logits, s.features, context)
    best = _best(logits)
    draw = lambda x, s, context: _draw(x, s, context, seed, chain)  # noqa: E731
    drawn = jax.lax.cond(jnp.any(s.temperature > 0), draw, lambda *_: best, logits, s, context)
    return jnp.where(s.temperature > 0, drawn, best)


def prompt_logprobs(
    project: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array, tile: int | None = None
) -> PromptLogprobs:
    """Log-probabilities of `targets` [T] from hidden [H, T], some at a time, and only if some target is wanted.

    Args:
        project: [H, R] -> logits [V, R].
        tile: as in `sample`, of the logits that exist at the same time.
    """
    t = targets.shape[0]
    some = min(PROMPT_TILE, t)
    padded = jnp.pad(hidden, ((0, 0), (0, -t % some)))
    wanted = jnp.pad(targets, (0, -t % some), constant_values=-1)

    def body(i, out):
        logits = project(jax.lax.dynamic_slice_in_dim(padded, i * some, some, axis=1))
        ids = jnp.maximum(jax.lax.dynamic_slice_in_dim(wanted, i * some, some), 0)
        update = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, i * some, 0)  # noqa: E731
        return jax.tree.map(update, out, PromptLogprobs(*_tiled(_logprobs, tile, logits, ids)))

    # A loop of zero trips is not enough: XLA moves work (a transposed head, 113 MB) out of loops, not out of branches.
    zeros = PromptLogprobs(*_no_logprobs(len(wanted)))
    walk = lambda: jax.lax.fori_loop(0, len(wanted) // some, body, zeros)  # noqa: E731
    out = jax.lax.cond(jnp.any(targets >= 0), walk, lambda: zeros)
    return jax.tree.map(lambda x: x[:t], out)


def _best(logits: jax.Array) -> jax.Array:
    """[B] argmax of each column of [V, B], the first of equals: of pieces of the vocabulary, then within the best one.

    XLA's CPU argmax is a scalar loop (64 requests, 49,152 tokens: 27 ms). A maximum over pieces runs over neighbouring
    columns at once (2 ms).
    """
    v, rows = logits.shape
    pieces = jnp.pad(logits, ((0, -v % LANES), (0, 0)), constant_values=-jnp.inf).reshape(-1, LANES, rows)
    piece = jnp.argmax(pieces.max(1), axis=0)
    within = pieces[piece, :, jnp.arange(rows)]
    return (piece * LANES + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def _no_logprobs(rows: int) -> tuple[jax.Array, ...]:
    top = (rows, MAX_TOP)
    return jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros(top, jnp.int32), jnp.zeros(top)


def _rows(logits: jax.Array) -> jax.Array:
    """[V, B] -> [B, V]. Without the barrier XLA folds this into the product before it and packs the whole head."""
    return jax.lax.optimization_barrier(logits).T


def _logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
    logp = jax.nn.log_softmax(_rows(logits), axis=-1)
    chosen = jnp.take_along_axis(logp, tokens[:, None], axis=-1)
    width = min(MAX_TOP, logp.shape[-1])
    top, ids = jax.lax.top_k(logp, width)
    fill = ((0, 0), (0, MAX_TOP - width))
    ranks = (1 + (logp > chosen).sum(-1)).astype(jnp.int32)
    ids = jnp.pad(ids.astype(jnp.int32), fill, constant_values=-1)  # of a small vocabulary: no token
    return chosen[:, 0], ranks, ids, jnp.pad(top, fill, constant_values=-jnp.inf)


def _draw(logits: jax.Array, s: SamplingBatch, context: RowContext, seed: jax.Array, chain: RowChain) -> jax.Array:
    """[B] tokens by inversion of the cumulative distribution after temperature and the options of the weights."""
    logits = _rows(logits)
    v = logits.shape[-1]
    # The best logit is subtracted before the division. After it, a low temperature would multiply the rounding error.
    below = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(below / jnp.where(s.temperature > 0, s.temperature, 1.0)[:, None])
    weights = chain.apply("probs", weights, s.features, context)

    pieces = jnp.pad(weights, ((0, 0), (0, -v % LANES))).reshape(len(weights), -1, LANES)
    sums = row_sums(pieces)
    ends = jnp.cumsum(sums, axis=-1)
    target = _uniform(s, seed) * ends[:, -1]
    piece = _first_above(ends, target, sums)
    of = lambda x: jnp.take_along_axis(x, piece[:, None], axis=-1)[:, 0]  # noqa: E731
    within = jnp.take_along_axis(pieces, piece[:, None, None], axis=1)[:, 0]
    inner = jnp.cumsum(within, axis=-1)
    # The piece is searched by the share of its sum that is left, not by the difference. So a sum that is rounded in
    # another way than the running sum does not favour the tokens at the end of the piece.
    share = (target - of(ends - sums)) / of(sums)
    drawn = piece * LANES + _first_above(inner, share * inner[:, -1], within)
    return jnp.minimum(drawn, v - 1)  # NaN has no weights, and its token is within the vocabulary


def _uniform(s: SamplingBatch, seed: jax.Array) -> jax.Array:
    root = jax.random.key(seed)

    def one(request_seed, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(root, request_seed), position))

    return jax.vmap(one)(s.seed, s.position)


def _first_above(ends: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """[B] the first positive weight whose running sum passes the target, else the last; never, by rounding, a zero."""
    positive = weights > 0
    passed = positive & (ends > target[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    return jnp.where(passed.any(-1), jnp.argmax(passed, axis=-1), last).astype(jnp.int32)
