"""The contract of the kernels for recurrent states with decay, and the list of them.

Each of N heads has a state [E, D], of keys of E and values of D numbers:

    state of t = exp(decay of t) * (state of t - 1) + key of t (x) update of t
    output of t = (state of t)^T query of t

The update of the gated delta rule (Yang et al. 2024, arXiv 2412.06464) is
rate * (value - exp(decay of t) * (state of t - 1)^T key). Without rates it is the value, as in
Mamba 2 (Dao & Gu 2024, arXiv 2405.21060).

A block of S tokens has the state before its first token, and of each token the key, the update and
the decay. They are 32-bit floats in pages, which are plain memory: each implementation has its own
order of them. A state is written when its block is entered, and never changed; a token's numbers
are written when it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.states.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.states.pallas_tpu import tokens as tokens_of_tpu
from pallas_kernels.states.records import Inputs, Memory, Part, Spans, StateShape


class Implementation(NamedTuple):
    """A kernel for states.

    name: its name in error messages and in `IMPLS`.
    run: (memory, inputs, spans, *, shape, decodes_alone) -> (the page arrays, outputs [T, N, D]
        float32). Computes the tokens of a step: row b (a sequence) has the tokens
        starts[b] : starts[b] + counts[b], the first of them at positions[b]. The page arrays are
        donated. No row may use a block that another row of the step fills. Outputs of padding
        tokens are zeros. decodes_alone: no row has several tokens.
    exchange: (memory, words, slots, spans, *, count) -> (the page arrays, words
        [pages, B, count, W]). Writes the words [pages, T, W] of the step's tokens, of which each
        page has W, into the `tokens` of the memory, at slots [pages, T] (page * S + offset).
        Returns those of the last tokens before each row, the last one first; they mean nothing
        before the sequence's first token. The page arrays are donated.
    obstacle: (device, *, shape, length, inputs, page, dtype, block_size, rows, tokens) -> why it
        cannot serve such states on the device, as the rest of a sentence; empty if it can. The
        convolution before the state has `length` tokens, and its inputs are of the dtype `inputs`.
        `page` is [K, rows, L] of a page array and `dtype` that of its words; a step has at most so
        many rows and tokens.
    """

    name: str
    run: Callable[..., tuple[tuple[jax.Array, ...], jax.Array]]
    exchange: Callable[..., tuple[tuple[jax.Array, ...], jax.Array]]
    obstacle: Callable[..., str]


IMPLS: dict[str, Implementation] = {
    "pallas_tpu": Implementation(
        "pallas_tpu", pallas_tpu.run, tokens_of_tpu.exchange, pallas_tpu.obstacle
    )
}

__all__ = ["IMPLS", "Implementation", "Inputs", "Memory", "Part", "Spans", "StateShape"]
