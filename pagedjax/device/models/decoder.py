"""The decoder; every architecture here is a configuration of it. Layers have attention and an MLP,
each after a norm.

    x = embed * scale (+ learned positions)
    x = x + post(attention(norm(x)))        `LayerKind` has the layer's window, rotation and experts
    x = x + post(mlp(norm(x)))              `post` is a norm, a factor, or nothing
    logits = cap(head(norm(x)) * scale)

A family's file (llama.py, gpt2.py, gemma.py) turns a config.json into a `DecoderConfig` and says
which tensors make which parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.device import cache as kv
from pagedjax.device import formats
from pagedjax.device.attention import Attend, pages_of_heads, probabilities, rotate_and_write
from pagedjax.device.batch import Batch
from pagedjax.device.cache import Pages
from pagedjax.device.extras import SampleRows, Selecting, WholeSequences
from pagedjax.device.layers import (
    Buffer,
    LayerNorm,
    Linear,
    RMSNorm,
    add_weight,
    product,
    rms_normed,
    store_matrices,
    stored_arrays,
    summed,
)
from pagedjax.device.linear import Matrix, rows_of
from pagedjax.device.models.latent import Latent, LatentAttention, latent_pages
from pagedjax.device.models.mixers.mixer import Mixer
from pagedjax.device.models.mlp import ACTIVATIONS, MLP, Activation, Experts, Routes, SparseMLP
from pagedjax.device.rope import Rope, rotate, rotate_first
from pagedjax.device.row_reductions import rounded
from pagedjax.device.selection import attend_selected, write
from pagedjax.options.config import one_of

# (batch or None, *, routed=False) -> hidden states, or (hidden states, `Routes`)
Finish = Callable[..., Any]


@dataclass(frozen=True)
class LayerHeads:
    """The heads of a layer, where they are not those of the model.

    heads, kv_heads, head_dim: as in `DecoderConfig`.
    shared_values: values are made of the product of keys, before its norm and its rotation. The
        layer has no product of values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    shared_values: bool = False


@dataclass(frozen=True)
class LayerKind:
    """Settings that may differ between the layers of one model.

    window: a query sees the last `window` tokens, including its own; None: all tokens.
    rope: index into the model's rotations; None: the layer does not rotate, and knows the order of
        tokens by the causal mask alone (Kazemnejad et al. 2023).
    sparse: the layer's MLP is a mixture of experts.
    mixer: what the layer has in the place of attention; None: attention.
    heads: the layer's heads; None: those of the model.
    """

    window: int | None = None
    rope: int | None = 0
    sparse: bool = False
    mixer: Mixer | None = None
    heads: LayerHeads | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a model. hidden = H, intermediate = F; other letters as in pagedjax/host/types.py.

    kinds: one for each layer.
    ropes: the rotations, of which `LayerKind.rope` is an index; () for learned positions.
    norm: "rms"; "rms_plus_one", which multiplies by 1 + weight (Gemma); or "layer", with a bias
        (GPT-2).
    gated: the MLP is activation(gate) * up, else activation(up).
    qk_norm: queries and keys have a norm, over each head ("head") or over all heads of a token
        ("width", OLMo 2).
    latent: all heads share a row of latents, which is kept in the place of keys and values. Then
        there is one key head, and `head_dim` is the size of a row (`Latent.row`).
    v_norm: values have a norm over each head, without a weight.
    shared_values: as in `LayerHeads`.
    attn_gate: each query head has a gate, whose sigmoid multiplies the result of attention (Qiu et
        al. 2025, arXiv 2505.06708). Gates are rows of the product of queries, behind all queries.
    pre_norms: attention and MLP have a norm before them.
    post_norms: their results have one, before they are added to x.
    parallel: attention and MLP read the same x, and both results are added to it (GPT-NeoX).
    layer_scales: each layer has a factor, a parameter, on its output.
    embed_scale, residual_scale, logit_scale: factors on the embeddings, on what attention and MLP
        add to x, and on the logits (Granite has all three).
    stored: the format of matrices, a name of `device.formats`, or the formats of matrices by name;
        None is floats.
    linear: the implementation of products, a name of `device.linear`. Matrices are stored in its
        layout.
    axes: of a mesh whose devices have a part of the model each (split.py). Partial sums are added
        over these axes. () for a whole model.
    qk_sizes: of a part: how many numbers of queries, and of keys, all devices have together. A norm
        over the width is their mean.
    family: the `model_type` of a built-in family, whose names of matrices adapters use; None: those
        of a Llama.
    block: the class of the layers, a `Block` of one's own; None is `Block`.
    sinks: each query head has a score that joins its softmax and has no value (GPT-OSS).
    attn_scale: factor on q k^T, in all layers; 0 becomes 1 / sqrt(D), of queries with D numbers.
    attn_cap, logit_cap: scores or logits x become cap * tanh(x / cap).
    """

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    max_len: int
    tied: bool
    eps: float
    kinds: tuple[LayerKind, ...]
    ropes: tuple[Rope, ...]
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    latent: Latent | None = None
    v_norm: bool = False
    shared_values: bool = False
    attn_gate: bool = False
    sinks: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    layer_scales: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attn_scale: float = 0.0
    attn_cap: float | None = None
    logit_cap: float | None = None
    experts: Experts | None = None
    stored: formats.Stored = None
    linear: str = "xla"
    axes: tuple[str, ...] = ()
    qk_sizes: tuple[int, int] = (0, 0)
    family: str | None = None
    block: type[Block] | None = None

    def __post_init__(self) -> None:
        if self.block is not None and not (
            isinstance(self.block, type) and issubclass(self.block, Block)
        ):
            raise ValueError(
                f"block is {self.block!r:.80}; it must be a class that inherits from Block, or None"
            )
        if self.has_layer_heads:
            self._check_layer_heads()
        if not self.attn_scale:
            query_size = self.latent.query if self.latent else self.head_dim
            object.__setattr__(self, "attn_scale", query_size**-0.5)
        one_of("norm", self.norm, ("rms", "rms_plus_one", "layer"))
        one_of("activation", self.activation, tuple(ACTIVATIONS))
        one_of("qk_norm", self.qk_norm, (None, "head", "width"))
        if self.qk_norm == "width" and self.norm == "layer":
            raise ValueError(
                "qk_norm is 'width' and norm is 'layer'; a norm over the width is an RMS norm: set "
                "norm to 'rms', or qk_norm to 'head'"
            )
        if self.post_norms and self.residual_scale != 1:
            raise ValueError(
                f"post_norms is true and residual_scale is {self.residual_scale}; a result passes "
                "one of them: leave one out, or give a block with a `post` of its own"
            )
        if self.latent:
            self._check_latent(self.latent)
        if not self.has_layer_heads:
            for rope in self.ropes:
                rope.check(self.rotated_size)
        for i, kind in enumerate(self.kinds):
            if self.ropes and kind.rope is not None and not 0 <= kind.rope < len(self.ropes):
                raise ValueError(
                    f"kinds[{i}] has rope {kind.rope}, and ropes has {len(self.ropes)}; give a "
                    f"number from 0 to {len(self.ropes) - 1}"
                )
            if kind.sparse and self.experts is None:
                raise ValueError(
                    f"kinds[{i}] is sparse, and experts is None; give the layer's experts"
                )

    def _check_latent(self, latent: Latent) -> None:
        """Raises ValueError for what latents exclude."""
        if (self.kv_heads, self.head_dim) != (1, latent.row):
            raise ValueError(
                f"latent has rows of {latent.row} numbers, and the model {self.kv_heads} key heads "
                f"of {self.head_dim}; latents need one key head of that size"
            )
        excluded = {
            "qkv_bias": self.qkv_bias,
            "out_bias": self.out_bias,
            "qk_norm": self.qk_norm,
            "attn_gate": self.attn_gate,
            "sinks": self.sinks,
            "kinds[...].mixer": any(kind.mixer for kind in self.kinds),
        }
        for name, value in excluded.items():
            if value:
                raise ValueError(
                    f"{name} is {value!r} in a model with latents, which has none of it here; "
                    "leave it out"
                )

    def _check_layer_heads(self) -> None:
        """Raises ValueError for what a model with heads by layer cannot have."""
        excluded = {
            "latent": self.latent is not None,
            "qk_norm = 'width'": self.qk_norm == "width",
            "block": self.block is not None and self.block.pages is not Block.pages,
            "kinds[...].mixer": any(kind.mixer for kind in self.kinds),
        }
        for name, is_set in excluded.items():
            if is_set:
                raise ValueError(
                    f"kinds have heads of their own, and the model has {name}, which does not go "
                    "with them yet; leave one of them out"
                )
        if not self.attn_scale:
            raise ValueError(
                "attn_scale is 0, and kinds have heads of their own; all layers have one factor of "
                "scores: give it"
            )
        for i, kind in enumerate(self.kinds):
            c = self.of_kind(kind)
            if kind.heads and not (c.head_dim > 0 and c.kv_heads > 0 and c.heads % c.kv_heads == 0):
                raise ValueError(
                    f"kinds[{i}] has {c.heads} query heads and {c.kv_heads} key heads of "
                    f"{c.head_dim} numbers; the first must be a multiple of the second, and all of "
                    "them above 0"
                )
            if not self.ropes or kind.rope is None or not 0 <= kind.rope < len(self.ropes):
                continue  # the second is refused for all models
            rope = self.ropes[kind.rope]
            if rope.rotated is None:
                raise ValueError(
                    f"ropes[{kind.rope}] has no `rotated`, and kinds have heads of their own; say "
                    "how many numbers of a head it turns"
                )
            rope.check(c.head_dim)

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def has_layer_heads(self) -> bool:
        """Whether layers have heads of their own. All layers then have parts of pages that are
        plain memory (`page_numbers`).
        """
        return any(kind.heads for kind in self.kinds)

    def of_kind(self, kind: LayerKind) -> DecoderConfig:
        """The configuration of a layer with heads of its own alone; itself if it has none."""
        if kind.heads is None:
            return self
        sizes = kind.heads
        first_rope = len(self.ropes) if kind.rope is None else kind.rope
        return replace(
            self,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            shared_values=sizes.shared_values,
            kinds=(replace(kind, heads=None, rope=None if kind.rope is None else 0),),
            ropes=self.ropes[first_rope : first_rope + 1],
        )

    @property
    def heads_of_layers(self) -> list[dict[str, int]]:
        """Each size of heads that a layer has, as `attention.choose` takes them."""
        names = "heads", "kv_heads", "head_dim"
        layers = [self.of_kind(kind) for kind in dict.fromkeys(self.kinds)]
        rank = {"rank": self.latent.rank} if self.latent else {}
        sizes = [{name: getattr(layer, name) for name in names} | rank for layer in layers]
        return [x for i, x in enumerate(sizes) if x not in sizes[:i]]

    @property
    def token_numbers(self) -> int:
        """Numbers of the keys of a token in a layer with the model's heads; as many of values."""
        return self.kv_heads * self.head_dim

    @property
    def page_numbers(self) -> int:
        """Numbers that a page has for each token, in keys: those of a layer. If layers have heads
        of their own, the least number that those of each layer divide.
        """
        return lcm(*[self.of_kind(kind).token_numbers for kind in dict.fromkeys(self.kinds)])

    @property
    def rotated_size(self) -> int:
        """Numbers of a head to which a rotation is applied."""
        return self.latent.rotated if self.latent else self.head_dim

    @property
    def turned_pairs(self) -> int:
        """Pairs of a head in the tables of rotations. Where layers have heads of their own, the
        pairs behind them are not turned.
        """
        if not self.has_layer_heads:
            return self.rotated_size // 2
        return max([rope.rotated or 0 for rope in self.ropes], default=0) // 2

    @property
    def attended(self) -> int:
        """Numbers of a token that attention gives to the last product of it, of all heads."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def query_heads(self) -> int:
        """Heads of the joined product before those of keys: queries, and their gates."""
        return self.heads * (1 + self.attn_gate)

    @property
    def product_heads(self) -> int:
        """Heads of the joined product: queries, their gates, keys, and values if they have some."""
        return self.query_heads + (1 if self.shared_values else 2) * self.kv_heads

    @property
    def qkv_rows(self) -> int:
        return self.product_heads * self.head_dim

    def parts_of(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The `parts` of a layer, which may have heads of its own."""
        return self.of_kind(self.kinds[layer]).parts

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Where the parts of each matrix of a layer end, by the matrix's name (for `LowRank`). An
        end is the part's last output + 1. A matrix that is not joined has one part.
        """
        up = (self.intermediate, 2 * self.intermediate) if self.gated else (self.intermediate,)
        hidden = (self.hidden,)
        return {**self._parts_of_inputs, "attn.out": hidden, "mlp.up": up, "mlp.down": hidden}

    @property
    def _parts_of_inputs(self) -> dict[str, tuple[int, ...]]:
        """The parts of the matrices of attention that come before it."""
        if self.latent is None:
            ends = [self.query_heads, self.query_heads + self.kv_heads, self.product_heads]
            if self.shared_values:
                del ends[-1]
            return {"attn.qkv": tuple([heads * self.head_dim for heads in ends])}
        queries = self.heads * self.latent.query
        rank = self.latent.query_rank
        if rank is None:
            return {"attn.down": (queries, queries + self.latent.row)}
        return {"attn.down": (rank, rank + self.latent.row), "attn.q_up": (queries,)}


def _norm(c: DecoderConfig, dtype: str, size: int | None = None) -> nnx.Module:
    size = c.hidden if size is None else size
    if c.norm == "layer":
        return LayerNorm(size, eps=c.eps, dtype=dtype)
    return RMSNorm(size, eps=c.eps, dtype=dtype, plus_one=c.norm == "rms_plus_one")


def _qk_norm(c: DecoderConfig, dtype: str, is_key: bool) -> nnx.Module | None:
    """The norm of queries or of keys."""
    if c.qk_norm != "width":
        return _norm(c, dtype, c.head_dim) if c.qk_norm else None
    return RMSNorm(
        (c.kv_heads if is_key else c.heads) * c.head_dim,
        eps=c.eps,
        dtype=dtype,
        plus_one=c.norm == "rms_plus_one",
        axes=c.axes,
        count=c.qk_sizes[is_key],
    )


def _over_width(norm: nnx.Module, x: jax.Array) -> jax.Array:
    """The norm over all heads of each token: x [T, N, D] -> [T, N, D]. N may be 0."""
    return norm(x.reshape(len(x), -1)).reshape(x.shape) if x.shape[1] else x  # type: ignore[operator]


class Scale(nnx.Module):
    """Multiplies the result of attention or MLP before it is added to x."""

    def __init__(self, factor: float):
        self.factor = factor

    def __call__(self, y: jax.Array) -> jax.Array:
        """[T, H] -> [T, H]."""
        return rounded(y.astype(jnp.float32) * self.factor).astype(y.dtype)


class Attention(nnx.Module):
    def __init__(self, c: DecoderConfig, kind: LayerKind, dtype: str):
        self.has_part_of_page = c.has_layer_heads
        # whether nothing but a rotation is between the product and the pages
        self.only_rotates = (
            c.ropes != ()
            and kind.rope is not None
            and not (c.has_layer_heads or c.qk_norm or c.v_norm or c.shared_values or c.attn_gate)
        )
        c = c.of_kind(kind)
        options = {"dtype": dtype, "stored": c.stored, "impl": c.linear}
        self.qkv = Linear(c.hidden, c.qkv_rows, bias=c.qkv_bias, **options)
        self.out = Linear(c.heads * c.head_dim, c.hidden, bias=c.out_bias, axes=c.axes, **options)
        self.q_norm = _qk_norm(c, dtype, is_key=False)
        self.k_norm = _qk_norm(c, dtype, is_key=True)
        self.sinks = nnx.Param(jnp.zeros((c.heads,), dtype)) if c.sinks else None
        self.config = c
        self.kind = kind

    def __call__(
        self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm, residual=None
    ):
        """norm(x) [T, H], angles [rotations, 2, T, D / 2] -> (y + residual [T, H], pages)."""
        heads = 0, self.config.product_heads
        q, gates, pages = self._stored(x, pages, batch, angles, attend, norm, heads)
        return self._output(q, gates, pages, batch, attend, residual), pages

    def write(self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm) -> Pages:
        """The pages with the keys and values of x."""
        heads = self.config.query_heads, self.config.product_heads
        return self._stored(x, pages, batch, angles, attend, norm, heads)[2]

    def read(self, x, pages: Pages, batch: Batch, angles, attend: Attend, *, norm, residual=None):
        """As `__call__`, for tokens whose keys and values are in the pages: y + residual [T, H]."""
        q, gates, _, _ = self._heads(x, angles, norm, (0, self.config.query_heads), batch)
        return self._output(q, gates, pages, batch, attend, residual)

    def weights(
        self, x, k_pages, batch: Batch, angles, attend: Attend, heads: Sequence[int], *, norm
    ) -> jax.Array:
        """The weights that `read` gives to values, for rows of one token each: [R, len(heads), M S]
        float32, by position.
        """
        q, _, _, _ = self._heads(x, angles, norm, (0, self.config.heads), batch)
        return probabilities(
            attend,
            q,
            self._of_heads(k_pages, batch, attend),
            batch,
            heads,
            window=self.kind.window,
            soft_cap=self.config.attn_cap,
            **self._sinks(),
        )

    def _stored(
        self, x, pages: Pages, batch: Batch, angles, attend: Attend, norm, heads: tuple[int, int]
    ) -> tuple[Any, Any, Pages]:
        """Queries and gates of some heads, as `_heads` returns them, and the pages with the keys
        and values.
        """
        at_once = rotate_and_write(attend) if self.only_rotates and "bounds" not in pages else None
        if at_once is None:
            q, gates, k, v = self._heads(x, angles, norm, heads, batch)
            return q, gates, self._written(pages, k, v, batch, attend)
        product = self._product(x, norm, heads, batch)
        arrays = pages["k"], pages["v"], product, angles[self.kind.rope], batch.slots
        q, k_pages, v_pages = at_once(*arrays, queries=max(self.config.heads - heads[0], 0))
        return q, None, Pages(pages, k=k_pages, v=v_pages)

    def _written(self, pages: Pages, k, v, batch: Batch, attend: Attend) -> Pages:
        """The pages with the keys and values of the tokens."""
        in_heads = Pages(
            (name, self._of_heads(array, batch, attend)) for name, array in pages.items()
        )
        written = write(attend, in_heads, k, v, batch)
        if not self._shares_memory(batch):
            return written
        return Pages((name, array.reshape(pages[name].shape)) for name, array in written.items())

    def _of_heads(self, pages: jax.Array, batch: Batch, attend: Attend) -> jax.Array:
        """A page array as the layer's heads read and write it."""
        if not self._shares_memory(batch):
            return pages
        return pages_of_heads(attend, pages, self.config.kv_heads, self.config.head_dim)

    def _shares_memory(self, batch: Batch) -> bool:
        """Whether pages are memory of which layers have parts, and not keys and values."""
        return self.has_part_of_page and batch.extra(WholeSequences) is None

    def _sinks(self) -> dict[str, jax.Array]:
        """The option of an `Attend`; none in a model without sinks."""
        return {} if self.sinks is None else {"sinks": self.sinks[...].astype(jnp.float32)}

    def _product(self, x, norm, heads: tuple[int, int], batch: Batch) -> jax.Array:
        """The joined product of some heads, [T, heads, D]."""
        c = self.config
        first, end = heads
        rows = None  # all of the product
        if end - first < c.product_heads:
            rows = first * c.head_dim, end * c.head_dim
        low = batch.low("attn.qkv", c.parts["attn.qkv"])
        qkv = self.qkv(x, norm=norm, rows=rows, sizes=batch.used_tokens, low=low)
        return qkv.reshape(len(x), end - first, c.head_dim)

    def _heads(self, x, angles, norm, heads: tuple[int, int], batch: Batch) -> list[Any]:
        """Queries and gates [T, N, D], keys and values [T, K, D] of some heads. N and K may be 0;
        gates are None in a model without them.

        Args:
            heads: (first, end) among the heads of queries, gates, keys and values.
        """
        c = self.config
        first, end = heads
        qkv = self._product(x, norm, heads, batch)
        # where queries, gates and keys end among the computed heads
        ends = c.heads, c.query_heads, c.query_heads + c.kv_heads
        places = [min(max(place - first, 0), end - first) for place in ends]
        if c.attn_gate:
            q, gates, k, v = jnp.split(qkv, places, axis=1)
        else:
            q, k, v = jnp.split(qkv, places[1:], axis=1)
            gates = None
        if c.shared_values:
            v = k
        if self.q_norm is not None and self.k_norm is not None:
            is_wide = c.qk_norm == "width"
            q = _over_width(self.q_norm, q) if is_wide else self.q_norm(q)
            k = _over_width(self.k_norm, k) if is_wide else self.k_norm(k)
        if c.v_norm:
            v = rms_normed(v, c.eps)
        if c.ropes and self.kind.rope is not None:
            turn = rotate_first if self.has_part_of_page else rotate
            q = turn(q, angles[self.kind.rope])
            k = turn(k, angles[self.kind.rope])
        return [q, gates, k, v]

    def _output(self, q, gates, pages: Pages, batch: Batch, attend: Attend, residual) -> jax.Array:
        c = self.config
        low = batch.low("attn.out", c.parts["attn.out"])
        if "bounds" in pages:
            keys = kv.BoundedKeys(pages["k"], pages["bounds"])
            y = attend_selected(
                attend, q, keys, pages["v"], batch, scale=c.attn_scale, soft_cap=c.attn_cap
            )
        else:
            y = attend(
                q,
                self._of_heads(pages["k"], batch, attend),
                self._of_heads(pages["v"], batch, attend),
                *batch.attention,
                window=self.kind.window,
                soft_cap=c.attn_cap,
                **self._sinks(),
            )
        if c.attn_gate:
            y = (y * jax.nn.sigmoid(gates.astype(jnp.float32))).astype(y.dtype)
        return self.out(y.reshape(len(q), -1), residual=residual, sizes=batch.used_tokens, low=low)


class Block(nnx.Module):
    """One layer. Another kind of layer is a class that inherits from it (`DecoderConfig.block`),
    with another `post` or `rest`. A layer whose cache is not keys and values has other `pages`, and
    another `attention`, which writes and reads them with the methods of `Attention`.
    """

    def __init__(self, c: DecoderConfig, kind: LayerKind, dtype: str):
        self.attn_norm = _norm(c, dtype) if c.pre_norms else None
        self.attn = self.attention(c, kind, dtype)
        self.attn_post = self.post(c, dtype)
        self.mlp_norm = _norm(c, dtype) if c.pre_norms else None
        self.mlp = SparseMLP(c, dtype) if kind.sparse else MLP(c, dtype)
        self.mlp_post = self.post(c, dtype)
        self.scale = nnx.Param(jnp.ones((1,), dtype)) if c.layer_scales else None
        self.parallel = c.parallel

    @staticmethod
    def pages(c: DecoderConfig, kind: LayerKind, sizes: kv.BlockSizes) -> kv.PageShapes:
        """What the layer keeps of one block of tokens: shapes by name, [heads, ...] each.

        Args:
            c: of one device's part of the model.
            sizes: of keys and values; their heads are those of all devices that share the array. If
                layers have heads of their own, of memory of which each layer has a part.
        """
        return latent_pages(sizes) if c.latent else kv.kv_pages(sizes)

    def attention(self, c: DecoderConfig, kind: LayerKind, dtype: str) -> Any:
        """The module that reads and writes the pages."""
        if kind.mixer:
            return kind.mixer.layer(c, dtype)
        return LatentAttention(c, kind, dtype) if c.latent else Attention(c, kind, dtype)

    def post(self, c: DecoderConfig, dtype: str) -> nnx.Module | None:
        """The module that changes the result [T, H] of the attention or of the MLP before it is
        added to x; None: it is added as it is.
        """
        if c.post_norms:
            return _norm(c, dtype)
        return None if c.residual_scale == 1 else Scale(c.residual_scale)

    def __call__(self, x, pages: Pages, batch: Batch, angles, attend: Attend):
        """x [T, H] -> (x [T, H], pages)."""
        return self.routed(x, pages, batch, angles, attend)[:2]

    def routed(self, x, pages: Pages, batch: Batch, angles, attend: Attend):
        """The same, and behind it the `Routes` of a sparse MLP."""
        residual = None if self.attn_post else x
        y, pages = self.attn(
            x, pages, batch, angles, attend, norm=self.attn_norm, residual=residual
        )
        x, routes = self.rest(x, y, batch)
        return x, pages, routes

    def write(self, x, pages: Pages, batch: Batch, angles, attend: Attend) -> Pages:
        """The pages with what the layer keeps of x."""
        return self.attn.write(x, pages, batch, angles, attend, norm=self.attn_norm)

    def read(self, x, pages: Pages, batch: Batch, angles, attend: Attend):
        """What follows `write`, for the tokens of the batch: x [T, H] -> [T, H]."""
        return self.routed_read(x, pages, batch, angles, attend)[0]

    def routed_read(self, x, pages: Pages, batch: Batch, angles, attend: Attend):
        """The same, and behind it the `Routes` of a sparse MLP."""
        residual = None if self.attn_post else x
        y = self.attn.read(x, pages, batch, angles, attend, norm=self.attn_norm, residual=residual)
        return self.rest(x, y, batch)

    def rest(self, x: jax.Array, y: jax.Array, batch: Batch) -> tuple[jax.Array, Routes | None]:
        """What follows the attention: (the layer's output [T, H], the `Routes` of a sparse MLP).

        Args:
            x: [T, H] the layer's input.
            y: [T, H] the attention's output, to which x was added unless `attn_post` comes first.
        """
        attended = x + self.attn_post(y) if self.attn_post else y
        mlp_input = x if self.parallel else attended
        options = {
            "norm": self.mlp_norm,
            "residual": None if self.mlp_post else attended,
            "used": batch.used_tokens,
        }
        if isinstance(self.mlp, SparseMLP):
            y, routes = self.mlp.routed(mlp_input, **options)
        else:
            y = self.mlp(mlp_input, **options, adapters=batch.adapters)
            routes = None
        y = attended + self.mlp_post(y) if self.mlp_post else y
        if self.scale is not None:
            factor = self.scale[...].astype(jnp.float32)
            y = rounded(y.astype(jnp.float32) * factor).astype(y.dtype)
        return y, routes


class Run(NamedTuple):
    """What `Decoder.layers` has computed.

    finish: (samples, *, routed=False) -> hidden states after the final norm. `samples` is what
        `samples_of` returns: the states are [R, H]. With None they are those of all tokens, [T, H].
        With routed=True, it returns (states, `Routes` of the last layer, or None if it is dense).
    outputs: [T, H] after each of the layers `taps`.
    routes: of the layers `experts`, by layer; those of the last layer come from `finish`.
    """

    cache: kv.KVCache
    finish: Finish
    outputs: tuple[jax.Array, ...]
    routes: dict[int, Routes]


@partial(jax.jit, static_argnums=(0, 2, 3))
def _run_block(graphdef: nnx.GraphDef, state, attend: Attend, method: str, *args):
    """Calls a method of a block, as a function of arrays. JAX traces and lowers only one block of
    each kind; XLA inlines all of them."""
    return getattr(nnx.merge(graphdef, state), method)(*args, attend)


class Decoder(nnx.Module):
    """hidden(batch) and logits(hidden) are two calls, because only rows that sample need logits."""

    def __init__(self, c: DecoderConfig, dtype: str):
        embed_format = formats.format_name(c.stored, "embed")
        add_weight(self, "embed", Matrix(c.vocab_size, c.hidden), dtype, embed_format, c.linear)
        self.embed_matrix = self.embed.matrix
        if not c.tied:  # a table of rows, and not a matrix of products
            self.embed = nnx.Param(self.embed[...])
        self.positions = None if c.ropes else nnx.Param(jnp.zeros((c.max_len, c.hidden), dtype))
        self.blocks = nnx.List([(c.block or Block)(c, kind, dtype) for kind in c.kinds])
        self.norm = _norm(c, dtype)
        # `angle_tables`
        self.angles = Buffer(jnp.zeros((len(c.ropes), 2, c.max_len, c.turned_pairs)))
        self.head = (
            None
            if c.tied
            else Linear(c.hidden, c.vocab_size, dtype=dtype, stored=c.stored, impl=c.linear)
        )
        self.config = c
        self.dtype = dtype
        store_matrices(self, c.stored, dtype)

    def embedded(self, batch: Batch) -> jax.Array:
        """[T, H] the input of the first layer."""
        tokens = batch.tokens
        axes = self.config.axes
        if axes:  # a device has some rows of the table; for other tokens it adds zeros
            tokens = tokens - jax.lax.axis_index(axes) * self.embed.shape[0]
        stored = formats.format_name(self.config.stored, "embed")
        arrays = stored_arrays(self, "embed", stored)
        table = arrays[0]
        numbers = (
            self.embed.implementation.gather(table, self.embed_matrix, tokens)
            if self.head is None
            else rows_of(table, self.embed_matrix, tokens)
        )
        x = formats.find(stored).rows(numbers, arrays, tokens, self.dtype)
        if axes:
            has_row = (tokens >= 0) & (tokens < self.embed.shape[0])
            x = summed(jnp.where(has_row[:, None], x, 0), axes)
        if self.config.embed_scale != 1:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions[...][batch.positions]
        return x

    def hidden(
        self, cache: kv.KVCache, batch: Batch, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[kv.KVCache, jax.Array, tuple[jax.Array, ...]]:
        """Runs `layers` to the end for all tokens of the batch: (cache, [T, H] after the final
        norm, outputs of the taps).
        """
        run = self.layers(cache, batch, attend, taps)
        return run.cache, run.finish(None), run.outputs

    def layers(
        self,
        cache: kv.KVCache,
        batch: Batch,
        attend: Attend,
        taps: Sequence[int] = (),
        experts: Sequence[int] = (),
    ) -> Run:
        """Run the T tokens of the batch through all layers but the last. Of the last layer it
        writes only the keys and values; `Run.finish` computes the rest.

        Args:
            taps: layers whose outputs are wanted too. If the last is one of them, it runs as the
                others do.
            experts: layers whose experts are wanted too.
        """
        x = self.embedded(batch)
        angles = angles_at(self.angles, batch.positions)
        pages = cache.layers
        outputs = []
        routes = {}
        last = self.config.layers - 1
        mixer = self.config.kinds[last].mixer
        # to read a state for each token would take as much memory as all of these states
        runs_last = last in taps or (
            mixer is not None and bool(mixer.kept(self.config, self.dtype).blocks)
        )
        for layer in range(self.config.layers if runs_last else last):
            layer_batch = batch.of_layer(layer)
            method = "routed" if layer in experts else "__call__"
            page = batch.page_of(layer)
            x, pages[page], *layer_routes = _run_block(
                *nnx.split(self.blocks[layer]), attend, method, x, pages[page], layer_batch, angles
            )
            if layer_routes:
                routes[layer] = layer_routes[0]
            outputs.append(x)
        last_block = nnx.split(self.blocks[last])
        last_page = batch.page_of(last)
        if not runs_last:
            pages[last_page] = _run_block(
                *last_block, attend, "write", x, pages[last_page], batch.of_layer(last), angles
            )

        def finish(samples: Batch | None, *, routed: bool = False) -> Any:
            y = x if samples is None else x[samples.last]
            last_routes = routes.get(last)
            if not runs_last:
                rows = batch if samples is None else samples
                row_angles = (
                    angles if samples is None else angles_at(self.angles, samples.positions)
                )
                method = "routed_read" if routed else "read"
                y = _run_block(
                    *last_block,
                    attend,
                    method,
                    y,
                    pages[last_page],
                    rows.of_layer(last),
                    row_angles,
                )
                y, last_routes = y if routed else (y, None)
            return (self.norm(y), last_routes) if routed else self.norm(y)

        return Run(
            cache.with_layers(pages), finish, tuple(outputs[layer] for layer in taps), routes
        )

    def attention_weights(
        self,
        layer: int,
        x: jax.Array,
        k_pages: jax.Array,
        batch: Batch,
        attend: Attend,
        heads: Sequence[int],
    ) -> jax.Array:
        """The weights that a layer gives to values, for the tokens that samples follow:
        [R, len(heads), M S] float32, by position.

        Args:
            x: [T, H] the layer's input.
            k_pages: of the layer, with the keys of this step.
        """
        samples = samples_of(batch).of_layer(layer)
        block = self.blocks[layer]
        angles = angles_at(self.angles, samples.positions)
        return block.attn.weights(
            x[samples.last], k_pages, samples, angles, attend, heads, norm=block.attn_norm
        )

    def logits(self, hidden: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """[R, H] -> [R, V] float32, of this device's part of the vocabulary. used: [1] how many
        rows are used.
        """
        multiply = partial(product, self, "embed") if self.head is None else self.head
        y = multiply(hidden, sizes=used, dtype=jnp.float32)
        cap = self.config.logit_cap
        if self.config.logit_scale != 1:
            y = rounded(y * self.config.logit_scale)
        return y if cap is None else rounded(cap * jnp.tanh(y / cap), cap)


def samples_of(batch: Batch) -> Batch:
    """The batch with only the tokens that samples follow, each in a row of its own, for the last
    layer. Its `last` is still their index among the T tokens of the step.

    Unused samples have rows without tokens (`Batch.used_samples`).
    """
    count = batch.used_samples
    row = jnp.arange(len(batch.last) + 1, dtype=jnp.int32)
    positions = batch.positions[batch.last]
    rows = SampleRows(row, count, row[:-1] < count)
    # These extras are computed first: programs on disk have the operations in this order.
    tables = {extra: extra.at_samples(batch, rows) for extra in batch.extras if extra.words}
    samples = batch._replace(
        tokens=batch.tokens[batch.last],
        positions=positions,
        slots=batch.slots[batch.last],
        block_tables=batch.block_tables[batch.sampled_row],
        seq_lens=jnp.where(rows.used, positions + 1, 0),
        cu_q_lens=None if batch.extra(Selecting) is None else jnp.minimum(row, count),
    )
    extras = [tables.get(extra) or extra.at_samples(batch, rows) for extra in batch.extras]
    return samples._replace(extras=tuple(extras))


def angles_at(table: Buffer, positions: jax.Array) -> jax.Array:
    """[rotations, 2, T, D / 2] the cosines and sines of the positions [T], from `angle_tables`."""
    return table[...].at[:, :, positions].get(mode="promise_in_bounds")


def angle_tables(c: DecoderConfig, context: int | None = None) -> np.ndarray:
    """[rotations, 2, max_len, D / 2] float32: the table of each rotation. context: as in
    `Rope.frequencies`; None: `max_len`.
    """
    context = context or c.max_len
    tables = [rope.table(2 * c.turned_pairs, c.max_len, context) for rope in c.ropes]
    if not tables:
        return np.zeros((0, 2, c.max_len, c.turned_pairs), np.float32)
    return np.stack(tables)
