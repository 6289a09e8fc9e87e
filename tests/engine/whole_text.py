"""A model over a whole text at once, with an attention of the test's: the oracle of what engines read
from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.device import cache
from pagedjax.device.batch import Batch

TEXT = 112  # no text is longer


def padded(tokens: Sequence[int]) -> np.ndarray:
    return np.pad(np.array(tokens, np.int32), (0, TEXT - len(tokens)))


def text_logits(
    graphdef: Any, params: Any, c: Any, tokens: jax.Array, attend: Callable[..., jax.Array]
) -> jax.Array:
    """Returns [TEXT, V], within a program. The attention of a layer is `attend(q, k, v)`: queries
    [TEXT, heads, D], keys and values [key heads, TEXT, D].
    """

    def attend_page(q, k_pages, v_pages, *_, window, soft_cap):
        return attend(q, k_pages[1], v_pages[1])

    sizes = {"kv_heads": c.kv_heads, "head_dim": c.head_dim, "dtype": "float32"}
    pages = cache.init(layers=c.layers, blocks=1, block_size=TEXT, **sizes)
    positions = jnp.arange(TEXT, dtype=jnp.int32)
    unused: Any = None
    batch = Batch(
        tokens,
        positions,
        slots=TEXT + positions,
        block_tables=jnp.ones((1, 1), jnp.int32),
        seq_lens=jnp.full(1, TEXT, jnp.int32),
        cu_q_lens=jnp.array([0, TEXT], jnp.int32),
        last=positions[-1:],
        sampled_row=positions[:1],
        targets=positions,
        sampling=unused,
    )
    module = nnx.merge(graphdef, params)
    with jax.disable_jit():  # so that `attend` is called for each layer
        _, hidden, _ = module.hidden(pages, batch, attend_page)
    return module.logits(hidden)


def chosen_logprobs(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Returns the log-probability of each token: [len(tokens)]."""
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
    return logprobs[np.arange(len(tokens)), list(tokens)]
