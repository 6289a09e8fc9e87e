"""What a layer costs, by its kind: what it keeps of a token and of a sequence, what a step reads of
that, and its operations. The products with weights are those of cost.py.

| kind | keeps of each token | a query reads |
|---|---|---|
| attention | keys and values | those of all tokens |
| attention with a window | the same, of the last W tokens | those of the last W tokens |
| latent attention | one row for all heads | the rows of all tokens |
| a mixer | what it declares (device/models/mixers) | what it declares |

Layers with heads of their own (`LayerKind.heads`) are kinds of attention with other sizes.

A row of latent attention with few tokens multiplies its queries with the kept rows ("absorbed"). One
with at least `Latent.expands_from` tokens makes keys and values of all tokens that it sees
(docs/design/latent-layers.md).

Sinks and gates of attention keep nothing, and their operations are not counted. Experts and MLPs
keep nothing: their weights are in `Shape`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from experiments.simulation.cost import Shape, Work
    from pagedjax.device.models.decoder import DecoderConfig, LayerHeads
    from pagedjax.device.models.latent import Latent
    from pagedjax.device.models.mixers.mixer import Mixer


class Kind(NamedTuple):
    """Layers of a model that mix tokens in the same way.

    layers: their numbers in the model, ascending.
    window: their queries see the last `window` tokens; None: all.
    mixer: what they have in the place of attention.
    latent: their attention is one of latents, and these are its sizes.
    heads: their heads; None: those of the model.
    """

    layers: tuple[int, ...]
    window: int | None = None
    mixer: Mixer | None = None
    latent: Latent | None = None
    heads: LayerHeads | None = None


def kinds_of(decoder: DecoderConfig) -> tuple[Kind, ...]:
    """The kinds of a decoder's layers; () if all have attention that sees all tokens."""
    layers: dict[Any, list[int]] = {}
    for number, kind in enumerate(decoder.kinds):
        layers.setdefault((kind.window, kind.mixer, kind.heads), []).append(number)
    if list(layers) == [(None, None, None)] and decoder.latent is None:
        return ()
    return tuple(
        [
            Kind(tuple(numbers), window, mixer, decoder.latent, heads)
            for (window, mixer, heads), numbers in layers.items()
        ]
    )


class Seen(NamedTuple):
    """What the queries of a step see of their sequences through a window, in tokens; int64 [steps]
    for several steps that only decode.

    context: keys and values read.
    pairs: (query, key) pairs.
    """

    context: int
    pairs: int


def seen(starts: np.ndarray, counts: np.ndarray, window: int) -> Seen:
    """What rows see that compute `counts` tokens behind the first `starts` ones of their
    sequences.
    """
    ends = starts + counts
    context = ends - np.maximum(starts - window + 1, 0)
    pairs = _pairs_up_to(ends, window) - _pairs_up_to(starts, window)
    return Seen(int(context.sum()), int(pairs.sum()))


def _pairs_up_to(tokens: np.ndarray, window: int) -> np.ndarray:
    """Pairs of the first `tokens` queries of a sequence."""
    growing = np.minimum(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * window


def entered_blocks(starts: np.ndarray, counts: np.ndarray, block_size: int) -> int:
    """How many blocks get their first token from such rows."""
    return int((-(-(starts + counts) // block_size) + (-starts // block_size)).sum())


class LayerCost(NamedTuple):
    """What the mixing of tokens costs in one layer of a kind, without products with weights.
    Operations are sums and products.

    layers: how many layers the kind has.
    window: as in `Kind`.
    token_bytes: of each token that a row sees, read by the row; a layer keeps as much of it.
    pair_operations: of each pair of a query and a token that it sees.
    long_pair_operations: the same in rows that are expanded.
    expansion: operations of each token that an expanded row sees and does not compute.
    row_bytes: read by each row, however long its sequence is.
    entry_bytes: written when a sequence enters a block.
    token_operations: of each token.
    """

    layers: int
    window: int | None = None
    token_bytes: float = 0
    pair_operations: int = 0
    long_pair_operations: int = 0
    expansion: int = 0
    row_bytes: float = 0
    entry_bytes: float = 0
    token_operations: int = 0

    def traffic(self, work: Work, seen: Seen | None) -> Any:
        """Bytes that a step reads and writes in all layers of the kind. seen: through the window."""
        context = work.context if seen is None else seen.context
        of_rows = self.row_bytes * work.sequences + self.entry_bytes * work.entered
        return self.layers * (self.token_bytes * context + of_rows)

    def operations(self, work: Work, seen: Seen | None) -> Any:
        """Operations of a step in all layers of the kind."""
        pairs = work.pairs if seen is None else seen.pairs
        of_pairs: Any = self.pair_operations * pairs
        if self.expansion and seen is None:
            saved = self.pair_operations - self.long_pair_operations
            of_pairs += self.expansion * work.expanded_context - saved * work.expanded_pairs
        return self.layers * (of_pairs + self.token_operations * work.tokens)


@lru_cache(maxsize=64)
def layer_costs(shape: Shape, block_size: int, activation_bytes: float) -> tuple[LayerCost, ...]:
    """The costs of each kind of layers of a shape.

    Args:
        activation_bytes: of a number that a step computes, which a mixer may keep.
    """
    return tuple([_cost(shape, kind, block_size, activation_bytes) for kind in shape.kinds])


def _cost(shape: Shape, kind: Kind, block_size: int, activation_bytes: float) -> LayerCost:
    if kind.mixer is not None:
        cost = kind.mixer.cost(decoder_of(shape), dtype_of(activation_bytes), block_size)
        return LayerCost(
            len(kind.layers),
            row_bytes=cost.row_bytes,
            entry_bytes=cost.entry_bytes,
            token_operations=cost.operations,
        )
    if kind.latent is not None:
        latent = kind.latent
        return LayerCost(
            len(kind.layers),
            window=kind.window,
            token_bytes=shape.kv_bytes * latent.row,
            pair_operations=2 * shape.heads * (latent.row + latent.rank),
            long_pair_operations=2 * shape.heads * (latent.query + latent.value),
            expansion=2 * latent.rank * shape.heads * latent.up,
        )
    sizes = kind.heads or shape
    return LayerCost(
        len(kind.layers),
        window=kind.window,
        token_bytes=shape.kv_bytes * 2 * sizes.kv_heads * sizes.head_dim,
        pair_operations=4 * sizes.heads * sizes.head_dim,
    )


def dtype_of(activation_bytes: float) -> str:
    """A dtype of activations of this size."""
    return "float32" if activation_bytes == 4 else "bfloat16"


@lru_cache(maxsize=64)
def mixing_numbers(shape: Shape) -> int:
    """Numbers in the matrices of attention and mixers, all layers together. A gate of a query head
    is one more row for each of its numbers.
    """
    total = 0
    for kind in shape.kinds or (Kind(tuple(range(shape.layers))),):
        if kind.mixer is not None:
            total += len(kind.layers) * _mixer_numbers(kind.mixer, decoder_of(shape))
        elif kind.latent is not None:
            total += len(kind.layers) * latent_numbers(kind.latent, shape.hidden, shape.heads)
        else:
            total += len(kind.layers) * _attention_numbers(shape, kind)
    return total


def _attention_numbers(shape: Shape, kind: Kind) -> int:
    """Numbers in the matrices of a layer with keys and values."""
    sizes = kind.heads or shape
    products = 1 if kind.heads and kind.heads.shared_values else 2  # of keys, and of values
    heads = (2 + shape.gated_attention) * sizes.heads + products * sizes.kv_heads
    return shape.hidden * sizes.head_dim * heads


def latent_numbers(latent: Latent, hidden: int, heads: int) -> int:
    """Numbers in the matrices of a layer with latents."""
    queries = heads * latent.query
    rank = latent.query_rank
    of_queries = hidden * queries if rank is None else rank * (hidden + queries)
    return (
        of_queries + hidden * latent.row + heads * (latent.rank * latent.up + latent.value * hidden)
    )


def _mixer_numbers(mixer: Mixer, decoder: DecoderConfig) -> int:
    """Numbers in the matrices of a layer of the mixer, read from its module, without memory."""
    import jax
    from flax import nnx

    module = nnx.eval_shape(lambda: mixer.layer(decoder, "float32"))
    arrays = jax.tree.leaves(nnx.state(module))
    return sum([array.size for array in arrays if array.ndim > 1])


def decoder_of(shape: Shape) -> DecoderConfig:
    """The decoder of a shape, as far as a shape says it. Its layers with experts come first."""
    from pagedjax.device.models.decoder import DecoderConfig, LayerKind
    from pagedjax.device.models.mlp import Experts

    places: list[Kind | None] = [None] * shape.layers
    for kind in shape.kinds:
        for number in kind.layers:
            places[number] = kind
    kinds = [
        LayerKind(
            window=kind.window if kind else None,
            mixer=kind.mixer if kind else None,
            sparse=number < shape.sparse,
            heads=kind.heads if kind else None,
        )
        for number, kind in enumerate(places)
    ]
    experts = None
    if shape.experts:
        experts = Experts(
            shape.experts, shape.chosen, shape.expert, normalised=True, shared=shape.shared
        )
    return DecoderConfig(
        vocab_size=shape.vocabulary,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_len=shape.longest,
        tied=shape.tied,
        eps=0.0,
        kinds=tuple(kinds),
        ropes=(),
        latent=shape.latent,
        gated=shape.gated,
        attn_scale=1.0,  # no cost depends on it, and heads of several sizes need one
        attn_gate=shape.gated_attention,
        experts=experts,
    )
