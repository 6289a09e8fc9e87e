"""Log-probabilities of given sequences by the layers that serve: whole sequences at once, and
differentiable.

In batch-invariant mode they have the bits of a batch-invariant engine
(docs/design/trainer-parity.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from pagedjax.device import adapters, attention, formats, linear, windows
from pagedjax.device.invariance import check_batch_invariant
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.device.row_reductions import log_softmax

TILE = 512  # tokens whose logits exist at the same time


def score(
    module: Decoder,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    batch_invariant: bool = False,
    adapter: adapters.Parts | None = None,
) -> jax.Array:
    """The log-probability of each token after the tokens before it, under the model's own
    distribution.

    It is what `SamplingParams(logprobs=0, prompt_logprobs=0)` gives: before temperature and other
    options.

    Args:
        module: a decoder of pagedjax.device.models, e.g. `nnx.merge(graphdef, params)` of a
            trainer. Its matrices are as a trainer stores them (`linear_impl="xla"`). Those of an
            engine on a CPU are packed; they have no gradient.
        tokens: [B, L] integers. A shorter sequence is filled up with any ids of the vocabulary.
        lengths: [B] the number of tokens of each sequence; None: each has L tokens.
        batch_invariant: compute the bits of `LLM(batch_invariant=True)`, in the dtype of the
            module.
        adapter: of low rank, for all tokens: the `parts` of an `Adapter`, or arrays that are
            trained. The result can be differentiated with respect to them.

    Returns:
        [B, L] float32. The first place is 0, because no token is before it. The places behind a
        sequence are 0, too.

    Raises:
        ValueError: tokens, lengths or factors have other shapes, L is above the model's longest
            context, the module is a part of a model on a mesh, its products add none of low rank,
            or nothing computes it batch-invariantly; the message names the values.
    """
    _check(module.config, tokens, lengths)
    if adapter is not None:
        _check_adapter(module.config, adapter)
    if batch_invariant:
        module = _batch_invariant(module)
    graphdef, state = nnx.split(module)
    tokens = jnp.asarray(tokens, jnp.int32)
    lengths = jnp.full(len(tokens), tokens.shape[1]) if lengths is None else jnp.asarray(lengths)
    return _score(graphdef, batch_invariant, state, tokens, lengths, adapter and dict(adapter))


def _check(c: DecoderConfig, tokens: Any, lengths: Any) -> None:
    shape = np.shape(tokens)
    dtype = getattr(tokens, "dtype", None) or np.asarray(tokens).dtype
    if len(shape) != 2 or not np.issubdtype(dtype, np.integer) or 0 in shape:
        raise ValueError(
            f"tokens is {dtype} {list(shape)}; it must be integers [B, L], shorter sequences "
            "padded to L"
        )
    if shape[1] > c.max_len:
        raise ValueError(
            f"tokens is {list(shape)}; the model's longest context is {c.max_len}: cut the "
            "sequences"
        )
    if lengths is not None and np.shape(lengths) != shape[:1]:
        raise ValueError(
            f"lengths is {list(np.shape(lengths))}; tokens {list(shape)} need one for each sequence"
        )
    # Arrays of a function that is traced have no values yet.
    if (
        not isinstance(tokens, jax.core.Tracer)
        and not 0 <= np.min(tokens) <= np.max(tokens) < c.vocab_size
    ):
        ids = f"{np.min(tokens)} to {np.max(tokens)}"
        raise ValueError(
            f"tokens are {ids}; this vocabulary has 0 to {c.vocab_size - 1}, also behind a sequence"
        )
    if lengths is not None and not isinstance(lengths, jax.core.Tracer):
        lengths = np.asarray(lengths)
        if (
            not np.issubdtype(lengths.dtype, np.integer)
            or lengths.min() < 0
            or lengths.max() > shape[1]
        ):
            raise ValueError(
                f"lengths is {lengths.dtype} {lengths.tolist()!r:.80}; each must be an integer "
                f"from 0 to {shape[1]}, the width of tokens"
            )
    if c.axes:
        raise ValueError(
            f"the module is a part of a model on a mesh with axes {c.axes}; give a whole module"
        )


def _check_adapter(c: DecoderConfig, parts: adapters.Parts) -> None:
    if not linear.find(c.linear).low_rank:
        raise ValueError(
            f"adapter is given, and linear_impl {c.linear!r} adds no products of low rank; use "
            "'xla'"
        )
    if not parts:
        raise ValueError("adapter has no factors; give those of one matrix at least, or None")
    layers = adapters.adapted(c)
    for place, (a, b) in parts.items():
        matrices = layers[place.layer] if 0 <= place.layer < c.layers else {}
        ends = c.parts_of(place.layer)[place.matrix] if place.matrix in matrices else ()
        if not 0 <= place.part < len(ends):
            raise ValueError(
                f"adapter has factors at {place}, and none belong there in this model; layers 0 to "
                f"{c.layers - 1} have {', '.join(layers[0])}"
            )
        inputs, outputs = adapters.sizes_of(c, place)
        if np.ndim(a) != 2 or a.shape[1] != inputs or b.shape != (outputs, len(a)):
            shapes = f"a {list(a.shape)} and b {list(b.shape)}"
            raise ValueError(
                f"adapter has {shapes} at {place}; [r, {inputs}] and [{outputs}, r] fit"
            )


def _batch_invariant(module: Decoder) -> Decoder:
    """The module with products whose bits do not depend on the batch. They have gradients if the
    module is a trainer's.

    Raises:
        ValueError: its layers cannot have it (invariance.py), or there are no such products for its
            sizes and dtype on this device.
    """
    c = module.config
    dtype = module.dtype
    device = jax.devices()[0]
    check_batch_invariant(c)
    attention.choose(
        None,
        device,
        invariant=True,
        sinks=c.sinks,
        dtype=dtype,
        query_dtype=dtype,
        heads_of_layers=c.heads_of_layers,
        block_size=c.max_len,
    )
    impl = linear.DIFFERENTIABLE if c.linear == "xla" else c.linear
    linear.choose(
        impl,
        device,
        dtype=dtype,
        mesh=False,
        weight_dtypes=formats.dtypes_of(c.stored, dtype),
        activation=c.activation if c.gated else None,
    )
    if not linear.find(impl).invariant:
        raise ValueError(
            f"batch_invariant is True, and linear_impl {impl!r} is not; use a module of 'xla'"
        )
    graphdef, blank = _parts(replace(c, linear=impl), dtype)
    state = jax.tree.unflatten(jax.tree.structure(blank), jax.tree.leaves(nnx.state(module)))
    return nnx.merge(graphdef, state)


@cache
def _parts(config: DecoderConfig, dtype: str) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))  # type: ignore[return-value]


# without jit each operation would be rounded by itself, which no engine does
@partial(jax.jit, static_argnums=(0, 1))
def _score(
    graphdef: nnx.GraphDef,
    batch_invariant: bool,
    state: nnx.State,
    tokens: jax.Array,
    lengths: jax.Array,
    parts: Any,
) -> jax.Array:
    """`score` of tokens [B, L] and lengths [B]. parts: of the adapter, or None."""
    module: Decoder = nnx.merge(graphdef, state)
    factors = parts and adapters.factors_of_one(module.config, parts, module.dtype)
    hidden, _ = windows.hidden(module, tokens, batch_invariant=batch_invariant, adapter=factors)
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    padding = -len(hidden) % TILE if len(hidden) > TILE else 0
    tile = min(TILE, len(hidden))
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, tile, hidden.shape[1])
    following = jnp.pad(following, (0, padding)).reshape(-1, tile)

    @jax.checkpoint
    def logprobs_of_tile(arrays: tuple[jax.Array, jax.Array]) -> jax.Array:
        tile_hidden, tile_following = arrays  # [tile, H], [tile]
        logprobs = log_softmax(module.logits(tile_hidden))
        return jnp.take_along_axis(logprobs, tile_following[:, None], axis=-1)[:, 0]

    logprobs = jax.lax.map(logprobs_of_tile, (hidden, following)).reshape(-1)[: tokens.size]
    logprobs = jnp.pad(logprobs.reshape(tokens.shape)[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], logprobs, 0)
