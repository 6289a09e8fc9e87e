"""The calculated decode step of `experiments.bench.scale`: bytes and operations from the shape of a
Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedjax.device.cache import TOKEN_BYTES
from pagedjax.device.models import llama
from pagedjax.device.row_features.bad_words import MAX_TOKENS
from pagedjax.device.row_features.listed_tokens import MAX_LISTED

DTYPE = "float32"
NUMBER = 4  # bytes of a DTYPE; token ids and lengths have as many
BLOCK = 16
ROOM = 32  # tokens of a sequence beyond the measured context


class Shape(NamedTuple):
    """A decode step: sequences with one query token each.

    context: the mean of their lengths with this token.
    """

    sequences: int
    context: int
    layers: int
    vocabulary: int


class Paper(NamedTuple):
    """Bytes and floating point operations of one decode step, from the model's shape alone."""

    weights: int  # all weights in memory
    weights_read: int
    kv_read: int
    products: int  # operations with weights
    attention: int  # operations with keys and values
    cache: int  # all blocks, with the trash block
    inputs: int  # the arrays of a `Batch`
    activations: int  # the most that has to exist at a time


def paper(c: Any, sequences: int, context: int) -> Paper:
    """The calculated step of a Llama. c: its configuration, as `llama.from_hf` makes it."""
    queries = c.heads * c.head_dim
    keys = c.kv_heads * c.head_dim
    layer = c.hidden * (queries + 2 * keys) + queries * c.hidden + 3 * c.hidden * c.intermediate
    head = c.vocab_size * c.hidden
    embedding = 0 if c.tied else head  # of one that is not the head, a row a sequence is read
    norms = (2 * c.layers + 1) * c.hidden
    biases = c.layers * (c.qkv_bias * (queries + 2 * keys) + c.out_bias * c.hidden)
    angles = c.head_dim * c.max_len  # the rotary table, of which a row a sequence is read
    read = c.layers * layer + head + norms + biases
    longest = context + ROOM
    blocks = 1 + sequences * -(-longest // BLOCK)
    return Paper(
        weights=NUMBER * (read + embedding + angles),
        weights_read=NUMBER * (read + (embedding and sequences * c.hidden)),
        kv_read=NUMBER * 2 * c.layers * keys * context * sequences,
        products=2 * sequences * (c.layers * layer + head),
        attention=4 * c.layers * queries * context * sequences,
        cache=(NUMBER * 2 * c.layers * keys + TOKEN_BYTES) * blocks * BLOCK,
        inputs=batch_bytes(sequences, longest),
        # in a layer: its input, what gate and up make, and their product; after the last one: the
        # logits
        activations=NUMBER * sequences * max(c.hidden + 3 * c.intermediate, c.vocab_size),
    )


def batch_bytes(sequences: int, longest: int) -> int:
    """The bytes of the batch of a step with one token a sequence.

    See `batch.Batch`, `batch.SamplingBatch` and the built-in `row_features`.
    """
    # of each row: tokens to targets, of which cu_q_lens has one more; temperature to prompt_len
    numbers = 8 + 5
    numbers += 3 + 1 + 1 + 1  # penalties, min_p, top_k, top_p
    # block table; listed tokens, their biases, two counts
    row = numbers + -(-longest // BLOCK) + 2 * MAX_LISTED + 2
    row += 3 * MAX_TOKENS  # of bad words: their tokens, and where each is in its word
    # Two fields have bytes: only listed tokens, and which of six features are on.
    return sequences * (NUMBER * row + 1 + 6) + NUMBER


class Rates(NamedTuple):
    """The rates of the device."""

    read: float  # bytes a second
    multiply: float  # floating point operations a second


def roofline(p: Paper, rates: Rates) -> float:
    """The seconds of a step that loses nothing: products with weights, then attention.

    Source: Williams et al. 2009.
    """
    weights = max(p.weights_read / rates.read, p.products / rates.multiply)
    return weights + max(p.kv_read / rates.read, p.attention / rates.multiply)


def needed_bytes(shape: Shape, body: Mapping[str, Any]) -> int:
    """The bytes that a point needs."""
    c = llama.from_hf({**body, "num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary})
    p = paper(c, shape.sequences, shape.context)
    return p.weights + p.cache + p.inputs + p.activations
