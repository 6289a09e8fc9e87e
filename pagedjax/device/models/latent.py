"""Multi-head latent attention (MLA, DeepSeek-AI 2024, arXiv 2405.04434): a layer that keeps one row
of Z + J numbers of a token, for all heads together.

    latent = norm(down(x))                                          [Z]
    k_rope = rotated(down(x))                                       [J]
    k_nope, v = heads of kv_up(latent)                              [N, E] and [N, U]
    q_nope, q_rope = heads of q_up(norm(down(x))), or of down(x)    [N, E] and [N, J]
    y = softmax(scale (q_nope k_nope + rotated(q_rope) k_rope)) v   [N, U]

`down` is one product with other rows for each use. What is kept is (latent, k_rope). There are two
ways to the same result:

    absorbed    the keys' part of kv_up becomes a part of the query. So attention has one key head,
                whose keys are the rows, and whose values are their first Z numbers. The values'
                part of kv_up follows.
    expanded    keys and values of the context are made from its rows.

Chunks of at least `Latent.expands_from` tokens are expanded, if the implementation of attention can
do it (docs/design/latent-layers.md). All other queries are absorbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device import attention
from pagedjax.device.attention import Attend, Expansion
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, Pages, PageShapes
from pagedjax.device.layers import Linear, RMSNorm
from pagedjax.device.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedjax.device.models.decoder import DecoderConfig, LayerKind


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention.

    rank: numbers of a latent (Z, `kv_lora_rank`).
    rotated: numbers of a query head that are rotated, and of the key that all heads share (J).
    key: numbers of a head's queries and keys that are not rotated (E).
    value: numbers of a head's values (U).
    query_rank: numbers from which queries are made; None: they are made of the layer's input.
    eps: of the norms of latents and of these numbers.
    """

    rank: int
    rotated: int
    key: int
    value: int
    query_rank: int | None = None
    eps: float = 1e-6

    @property
    def row(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Numbers of a query head."""
        return self.key + self.rotated

    @property
    def up(self) -> int:
        """Rows of a head in the matrix that makes keys and values of latents."""
        return self.key + self.value

    @property
    def expands_from(self) -> int | None:
        """The fewest query tokens for which it is cheaper to make keys and values of a context
        token than to read its row; None: there is no such number.

        Multiplications of a head for each context token: n (2 Z + 2 J) for n absorbed queries, and
        n (E + J + U) + Z (E + U) for n expanded ones.
        """
        saved = 2 * self.row - self.query - self.value
        return self.rank * self.up // saved + 1 if saved > 0 else None


def latent_pages(sizes: BlockSizes) -> PageShapes:
    """One array, [1, S, R], for a row of each token. It is under the name of keys. R is Z + J, or
    more (`attention.latent_row`): then a row ends with zeros.
    """
    shape = (sizes.kv_heads, sizes.block_size, sizes.head_dim)
    return {"k": jax.ShapeDtypeStruct(shape, jnp.dtype(sizes.dtype))}


class Queries(NamedTuple):
    """The queries of T tokens."""

    key: jax.Array  # [T, N, E]
    rotated: jax.Array  # [T, N, J]


class LatentAttention(nnx.Module):
    """`kv_up` [N (E + U), Z] is always floats: heads use it one by one, and in two directions."""

    def __init__(self, c: DecoderConfig, kind: LayerKind, dtype: str):
        assert c.latent is not None
        m = c.latent
        options = {"dtype": dtype, "stored": c.stored, "impl": c.linear}
        self.down = Linear(c.hidden, c.parts["attn.down"][-1], **options)
        rank = m.query_rank
        self.q_norm = RMSNorm(rank, eps=m.eps, dtype=dtype) if rank else None
        self.q_up = Linear(rank, c.heads * m.query, **options) if rank else None
        self.kv_norm = RMSNorm(m.rank, eps=m.eps, dtype=dtype)
        self.kv_up = nnx.Param(jnp.zeros((c.heads * m.up, m.rank), dtype))
        self.out = Linear(c.heads * m.value, c.hidden, axes=c.axes, **options)
        self.config = c
        self.latent = m
        self.kind = kind

    def __call__(
        self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm, residual=None
    ):
        """norm(x) [T, H], angles [rotations, 2, T, J / 2] -> (y + residual [T, H], pages)."""
        query_rows, end = self.config.parts["attn.down"]
        product = self._down(x, norm, (0, end), batch)
        pages = self._written(product[:, query_rows:], pages, batch, angles, attend)
        queries = self._queries(product[:, :query_rows], batch, angles)
        return self._output(queries, pages, batch, attend, residual), pages

    def write(self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm) -> Pages:
        """The pages with the rows of x."""
        first, end = self.config.parts["attn.down"]
        product = self._down(x, norm, (first, end), batch)
        return self._written(product, pages, batch, angles, attend)

    def read(self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        """As `__call__`, for tokens whose rows are in the pages: y + residual [T, H]."""
        product = self._down(x, norm, (0, self.config.parts["attn.down"][0]), batch)
        queries = self._queries(product, batch, angles)
        return self._output(queries, pages, batch, attend, residual)

    def weights(
        self, x, k_pages, batch: Batch, angles, attend: Attend, heads: Sequence[int], *, norm
    ) -> jax.Array:
        """The weights that `read` gives to values, for rows of one token each: [R, len(heads), M S]
        float32, by position.
        """
        product = self._down(x, norm, (0, self.config.parts["attn.down"][0]), batch)
        q = self._absorbed(self._queries(product, batch, angles), k_pages)
        options = {"window": self.kind.window, "soft_cap": self.config.attn_cap}
        return attention.probabilities(attend, q, k_pages, batch, heads, **options)

    def _down(self, x, norm, rows: tuple[int, int], batch: Batch) -> jax.Array:
        """[T, rows] the product with some rows of the joined matrix: those of queries, and behind
        them those of latents and shared keys.
        """
        parts = self.config.parts["attn.down"]
        low = batch.low("attn.down", parts)
        some_rows = None if rows == (0, parts[-1]) else rows
        return self.down(x, norm=norm, rows=some_rows, sizes=batch.used_tokens, low=low)

    def _written(
        self, product: jax.Array, pages: Pages, batch: Batch, angles, attend: Attend
    ) -> Pages:
        """The pages with the rows of the tokens. product: [T, Z + J] of latents and shared keys."""
        m = self.latent
        latents = self.kv_norm(product[:, : m.rank])
        keys = self._rotated(product[:, None, m.rank :], angles)
        rows = _row_of(pages["k"], latents[:, None], keys)
        return Pages(pages, k=attention.write_latents(attend, pages["k"], rows, batch))

    def _queries(self, product: jax.Array, batch: Batch, angles) -> Queries:
        """The queries. product: [T, ...] what they are made of, or themselves."""
        q = product
        if self.q_up is not None:
            low = batch.low("attn.q_up", self.config.parts["attn.q_up"])
            q = self.q_up(q, norm=self.q_norm, sizes=batch.used_tokens, low=low)
        q = q.reshape(len(q), -1, self.latent.query)
        key, rotated = jnp.split(q, [self.latent.key], axis=-1)
        return Queries(key, self._rotated(rotated, angles))

    def _rotated(self, x: jax.Array, angles) -> jax.Array:
        return x if self.kind.rope is None else rotate(x, angles[self.kind.rope])

    def _expansion(self) -> Expansion:
        up = self.kv_up[...].reshape(-1, self.latent.up, self.latent.rank)
        return Expansion(up[:, : self.latent.key], up[:, self.latent.key :])

    def _absorbed(self, queries: Queries, pages: jax.Array) -> jax.Array:
        """[T, N, R] the queries over rows of pages."""
        key = _by_head("nte,nez->ntz", queries.key, self._expansion().keys)
        return _row_of(pages, key, queries.rotated)

    def _output(
        self, queries: Queries, pages: Pages, batch: Batch, attend: Attend, residual
    ) -> jax.Array:
        y = self._attended(queries, pages["k"], batch, attend)
        low = batch.low("attn.out", self.config.parts["attn.out"])
        return self.out(y.reshape(len(y), -1), residual=residual, sizes=batch.used_tokens, low=low)

    def _attended(
        self, queries: Queries, pages: jax.Array, batch: Batch, attend: Attend
    ) -> jax.Array:
        """[T, N, U] the result of attention."""
        rows = Rows(*batch.attention)
        expanded = attention.expanded(attend)
        fewest = self.latent.expands_from
        t = len(queries.key)
        if expanded is None or fewest is None or rows.cu_q_lens is None or t < fewest:
            return self._read_rows(queries, pages, rows, attend)
        q_lens = jnp.diff(rows.cu_q_lens)
        is_long = q_lens >= fewest
        of_long = expanded(
            jnp.concatenate(queries, axis=-1),
            pages,
            self._expansion(),
            *rows,
            jnp.where(is_long, q_lens, 0),
            **self._options,
        )
        is_absorbed = _tokens_of(~is_long, rows.cu_q_lens, t)
        order = jnp.argsort(~is_absorbed, stable=True)  # the absorbed tokens come first
        ends = jnp.cumsum(jnp.where(is_long, 0, q_lens), dtype=jnp.int32)
        absorbed_rows = rows._replace(
            seq_lens=jnp.where(is_long, 0, rows.seq_lens), cu_q_lens=jnp.pad(ends, (1, 0))
        )
        in_order = jax.tree.map(lambda x: x[order], queries)
        results = self._read_rows(in_order, pages, absorbed_rows, attend)
        of_absorbed = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
        return jnp.where(is_absorbed[:, None, None], of_absorbed, of_long)

    def _read_rows(
        self, queries: Queries, pages: jax.Array, rows: Rows, attend: Attend
    ) -> jax.Array:
        """[T, N, U] by absorbed queries."""
        q = self._absorbed(queries, pages)
        y = attention.over_latents(attend, q, pages, rows, self.latent.rank, **self._options)
        return _by_head("ntz,nuz->ntu", y, self._expansion().values)

    @property
    def _options(self) -> dict[str, Any]:
        return {"window": self.kind.window, "soft_cap": self.config.attn_cap}


class Rows(NamedTuple):
    """Rows of attention, as an `Attend` takes them."""

    block_tables: jax.Array  # [B, M]
    seq_lens: jax.Array  # [B]
    cu_q_lens: jax.Array | None  # [B + 1]


def _tokens_of(is_chosen: jax.Array, cu_q_lens: jax.Array, t: int) -> jax.Array:
    """Which of t tokens belong to the rows that are chosen, [T] bool.

    Args:
        is_chosen: [B] of the rows whose first tokens and end are cu_q_lens [B + 1].
    """
    token = jnp.arange(t, dtype=jnp.int32)
    row = jnp.minimum((token[:, None] >= cu_q_lens[1:]).sum(1), len(is_chosen) - 1)
    return is_chosen[row] & (token < cu_q_lens[-1])


def _row_of(pages: jax.Array, latents: jax.Array, keys: jax.Array) -> jax.Array:
    """[T, N, R] of latents [T, N, Z] and rotated keys [T, N, J], with the zeros of rows of pages
    [P, 1, S, R].
    """
    parts = [latents, keys]
    padding = pages.shape[3] - latents.shape[2] - keys.shape[2]
    if padding:
        parts.append(jnp.zeros((*keys.shape[:2], padding), keys.dtype))
    return jnp.concatenate(parts, axis=-1)


def _by_head(axes: str, x: jax.Array, matrices: jax.Array) -> jax.Array:
    """[T, N, A] times a matrix of each head -> [T, N, B]. Sums are in float32, and rounded to the
    dtype of x. Operands keep all of their bits: by default a TPU rounds float32 to bfloat16 first.

    Heads come first, because XLA for a CPU has no product of bfloat16 whose batch is in the middle.

    Args:
        axes: of the product, with heads (n) first and tokens (t) second.
        matrices: [N, A, B] or [N, B, A].
    """
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum(
        axes, x.swapaxes(0, 1), matrices, precision=exact, preferred_element_type=jnp.float32
    )
    return y.swapaxes(0, 1).astype(x.dtype)
