"""The calculated decode step of `experiments.bench.scale`: bytes and operations of a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedjax.device.cache import TOKEN_BYTES
from pagedjax.device.models import llama
from pagedjax.device.row_features.bad_words import MAX_TOKENS
from pagedjax.device.row_features.listed_tokens import MAX_LISTED

DTYPE = "float32"
NUMBER_BYTES = 4  # of a float32 number, a token id and a length
BLOCK = 16
EXTRA_TOKENS = 32  # how many tokens longer than the mean context a sequence may become


class Shape(NamedTuple):
    """A decode step: sequences with one query token each.

    context: the mean of their lengths with this token.
    """

    sequences: int
    context: int
    layers: int
    vocabulary: int


class CalculatedStep(NamedTuple):
    """Bytes and floating point operations of one decode step, from the model's shape alone."""

    weights: int  # all weights in memory
    weights_read: int
    kv_read: int
    products: int  # operations with weights
    attention: int  # operations with keys and values
    cache: int  # all blocks, with the trash block
    inputs: int  # the arrays of a `Batch`
    activations: int  # the most that has to exist at a time


def calculated_step(config: Any, sequences: int, context: int) -> CalculatedStep:
    """The calculated step of a Llama. config: its configuration, as `llama.from_hf` makes it."""
    queries = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    attention = config.hidden * (queries + 2 * keys) + queries * config.hidden
    layer = attention + 3 * config.hidden * config.intermediate
    head = config.vocab_size * config.hidden
    embedding = 0 if config.tied else head  # a tied embedding is the head
    embedding_read = 0 if config.tied else sequences * config.hidden  # one row for each sequence
    norms = (2 * config.layers + 1) * config.hidden
    biases = config.layers * (
        config.qkv_bias * (queries + 2 * keys) + config.out_bias * config.hidden
    )
    # the rotary table; a step reads one row of it for each sequence, which is not counted
    angles = config.head_dim * config.max_len
    read = config.layers * layer + head + norms + biases
    # the numbers of a sequence that exist at a time: a layer's input with the outputs of gate and
    # up and their product, or the logits
    widest = max(config.hidden + 3 * config.intermediate, config.vocab_size)
    longest = context + EXTRA_TOKENS
    blocks = 1 + sequences * -(-longest // BLOCK)
    return CalculatedStep(
        weights=NUMBER_BYTES * (read + embedding + angles),
        weights_read=NUMBER_BYTES * (read + embedding_read),
        kv_read=NUMBER_BYTES * 2 * config.layers * keys * context * sequences,
        products=2 * sequences * (config.layers * layer + head),
        attention=4 * config.layers * queries * context * sequences,
        cache=(NUMBER_BYTES * 2 * config.layers * keys + TOKEN_BYTES) * blocks * BLOCK,
        inputs=batch_bytes(sequences, longest),
        activations=NUMBER_BYTES * sequences * widest,
    )


def batch_bytes(sequences: int, longest: int) -> int:
    """The bytes of the batch of a step with one token a sequence.

    See `batch.Batch`, `batch.SamplingBatch` and the built-in `row_features`.
    """
    # numbers of each row
    batch_fields = 7  # of `Batch`, from tokens to sampled_row, without block_tables
    sampling_fields = 5  # of `SamplingBatch`, from temperature to prompt_len
    feature_fields = 3 + 1 + 1 + 1  # penalties, min_p, top_k, top_p
    block_table = -(-longest // BLOCK)
    listed_tokens = 2 * MAX_LISTED + 2  # the tokens and their biases; two counts
    bad_words = 3 * MAX_TOKENS  # their tokens, and where each is in its word
    fields = batch_fields + sampling_fields + feature_fields
    numbers = fields + block_table + listed_tokens + bad_words
    flags = 1 + 6  # a byte each: whether only listed tokens are allowed; which of 6 features are on
    return sequences * (NUMBER_BYTES * numbers + flags) + NUMBER_BYTES  # cu_q_lens has one more


class Rates(NamedTuple):
    """The rates of the device."""

    read: float  # bytes a second
    multiply: float  # floating point operations a second


def roofline(step: CalculatedStep, rates: Rates) -> float:
    """The seconds of a step that loses nothing: products with weights, then attention.

    Source: Williams et al. 2009.
    """
    weights = max(step.weights_read / rates.read, step.products / rates.multiply)
    return weights + max(step.kv_read / rates.read, step.attention / rates.multiply)


def needed_bytes(shape: Shape, body: Mapping[str, Any]) -> int:
    """The bytes that a point needs."""
    layers_and_vocabulary = {"num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary}
    config = llama.from_hf({**body, **layers_and_vocabulary})
    step = calculated_step(config, shape.sequences, shape.context)
    return step.weights + step.cache + step.inputs + step.activations
