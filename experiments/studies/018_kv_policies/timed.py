"""The time of attention alone in study 018: one layer, single queries, full and with a selection of
blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import in_turn, timed
from pagedjax.device import attention
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BoundedKeys
from pagedjax.device.extras import Selecting, Selection
from pagedjax.device.models import Model
from pagedjax.device.selection import attend_selected

PAGE = 16


class Times(NamedTuple):
    """Seconds of one layer's attention, medians of the rounds, and the ratio of each round.

    impl: the implementation of attention.
    """

    impl: str
    full: float
    selected: float
    ratios: Sequence[float]

    @property
    def middle(self) -> float:
        return statistics.median(self.ratios)


def times(model: Model, size: Any) -> dict[int, Times]:
    """The times of each context. Full and selected attention take turns."""
    return {
        context: _measure(model, context, size.batch, size.read, size.rounds)
        for context in size.contexts
    }


def batch_of(batch: int, context: int, tokens: int) -> Batch:
    """Rows of one query each, whose blocks are anywhere in the cache."""
    width = context // PAGE
    order = np.random.default_rng(0).permutation(batch * width) + 1
    lens = jnp.full(batch, context, jnp.int32)
    offsets = jnp.arange(batch + 1, dtype=jnp.int32)
    selecting = Selecting(Selection(tokens // PAGE, 0, True), jnp.ones(batch, bool))
    absent: Any = None
    tables = jnp.asarray(order.reshape(batch, width), jnp.int32)
    rows = {"block_tables": tables, "seq_lens": lens, "cu_q_lens": offsets, "extras": (selecting,)}
    unused_fields = "tokens", "positions", "slots", "last", "sampled_row", "targets", "sampling"
    return Batch(**dict.fromkeys(unused_fields, absent), **rows)


def contenders(model: Model, impl: str, batch: int, context: int, tokens: int) -> dict[str, Any]:
    """Compiled calls, by name: the attention of one layer to random keys and values."""
    config = model.config
    rows = batch_of(batch, context, tokens)
    rng = np.random.default_rng(1)
    shape = batch * context // PAGE + 1, config.kv_heads, PAGE, config.head_dim
    k = jnp.asarray(rng.standard_normal(shape, np.float32))
    v = jnp.asarray(rng.standard_normal(shape, np.float32))
    keys = BoundedKeys(k, jnp.stack([k.min(2), k.max(2)], axis=2))
    q = jnp.asarray(rng.standard_normal((batch, config.heads, config.head_dim), np.float32))
    attend = attention.attend(impl, config.attn_scale)

    @jax.jit
    def full(q: jax.Array, keys: BoundedKeys, v: jax.Array, rows: Batch) -> jax.Array:
        return attend(q, keys.pages, v, *rows.attention, window=None, soft_cap=None)

    @jax.jit
    def selected(q: jax.Array, keys: BoundedKeys, v: jax.Array, rows: Batch) -> jax.Array:
        return attend_selected(attend, q, keys, v, rows, scale=config.attn_scale)

    return {
        "full": partial(full, q, keys, v, rows),
        "selected": partial(selected, q, keys, v, rows),
    }


def _measure(model: Model, context: int, batch: int, tokens: int, rounds: int) -> Times:
    config = model.config
    sizes: dict[str, Any] = {
        "head_dim": config.head_dim,
        "block_size": PAGE,
        "kv_heads": config.kv_heads,
        "heads": config.heads,
    }
    impl = attention.choose(None, jax.devices()[0], dtype="float32", query_dtype="float32", **sizes)
    calls = contenders(model, impl, batch, context, tokens)
    runs = {
        name: partial(timed, lambda call=call: jax.block_until_ready(call()))
        for name, call in calls.items()
    }
    times = in_turn(runs, rounds + 1)
    # the first round compiles
    full = times["full"][1:]
    selected = times["selected"][1:]
    ratios = [a / b for a, b in zip(full, selected, strict=True)]
    return Times(impl, statistics.median(full), statistics.median(selected), ratios)
