"""A recurrent state with decay, computed block by block: gated delta rule and Mamba 2.

Each head has a state [E, D] of keys of E and values of D numbers:

    state of t = exp(decay of t) * (state of t - 1) + key of t (x) update of t
    output of t = (state of t)^T query of t

The update of Mamba 2 is the value (Dao & Gu 2024, arXiv 2405.21060). That of the gated delta rule
(Yang et al. 2024, arXiv 2412.06464) is what the state does not yet give for the key, times a rate:

    update of t = rate of t * (value of t - exp(decay of t) * (state of t - 1)^T key of t)

A block has the state before its first token, and the key, the update and the decay of each token.
Within a block everything follows from these by products of matrices, as in the chunked form of both
papers: the chunk is the block. So a step reads states and writes none but those of blocks that it
enters. The result is the same for any cut of a prompt into chunks.

Whole sequences without a cache (windows.py) are computed by the same products, in blocks of
`SEQUENCE_BLOCK` tokens, and have gradients.

All numbers here are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device import states
from pagedjax.device.batch import Batch
from pagedjax.device.models.mixers.mixer import (
    CONV_INPUT,
    Kept,
    KeptNumbers,
    KeptPages,
    KeptSequences,
    Mixer,
    MixerCost,
    row_of_tokens,
    spans_of,
)

RECENT = "recent"  # key, update and decay of a token
STATE = "state"
SEQUENCE_BLOCK = 64  # tokens of a block of whole sequences, all multiplied with each other


class StateSizes(NamedTuple):
    """key_heads: each serves heads / key_heads heads, one behind the other."""

    heads: int
    key_heads: int
    key_dim: int  # E
    value_dim: int  # D

    def kept(self, inputs: jax.ShapeDtypeStruct) -> Kept:
        """What a layer keeps: the state, and the inputs of its convolution."""
        recent = self.key_heads * self.key_dim + self.heads * self.value_dim + self.heads
        state = self.heads, self.key_dim, self.value_dim
        return Kept(
            tokens={CONV_INPUT: inputs, RECENT: jax.ShapeDtypeStruct((recent,), jnp.float32)},
            blocks={STATE: jax.ShapeDtypeStruct(state, jnp.float32)},
        )


@dataclass(frozen=True)
class StateMixer(Mixer):
    """A mixer with a state, behind a convolution of queries, keys and values.

    length: of the convolution in tokens. Heads and dims as in `StateSizes`.
    readers: how many vectors of a token read the state: its query, and by the delta rule its key.
    """

    readers: ClassVar[int] = 1

    length: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int

    @property
    def sizes(self) -> StateSizes:
        return StateSizes(self.heads, self.key_heads, self.key_dim, self.value_dim)

    @property
    def shape(self) -> states.StateShape:
        """The states, as a kernel computes them."""
        return states.StateShape(*self.sizes, delta=self.readers > 1)

    @property
    def parts(self) -> tuple[int, ...]:
        """How many outputs of the layer's first product each of its vectors has."""
        raise NotImplementedError

    def split(self, product: jax.Array) -> list[jax.Array]:
        """The vectors in the first product [T, ...], by `parts`."""
        ends = [sum(self.parts[: i + 1]) for i in range(len(self.parts) - 1)]
        return jnp.split(product, ends, axis=1)

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.keys + self.values

    def kept(self, c: Any, dtype: str) -> Kept:
        return self.sizes.kept(jax.ShapeDtypeStruct((self.channels,), jnp.dtype(dtype)))

    def window(self, block_size: int) -> int:
        return max(self.length, block_size + 1)

    def cost(self, c: Any, dtype: str, block_size: int) -> MixerCost:
        """A row reads the state, the tokens of its block, and the inputs of the convolution. A
        token is read by products with state and block, and is added to the state.
        """
        kept = self.kept(c, dtype)
        token_bytes = {name: x.size * x.dtype.itemsize for name, x in kept.tokens.items()}
        state = kept.blocks[STATE]
        state_bytes = state.size * state.dtype.itemsize
        read = 2 * state.size + 2 * block_size * (self.keys + self.values)
        return MixerCost(
            row_bytes=state_bytes
            + block_size * token_bytes[RECENT]
            + self.length * token_bytes[CONV_INPUT],
            entry_bytes=state_bytes,
            operations=self.readers * read + 2 * state.size + 2 * self.length * self.channels,
        )


class Inputs(NamedTuple):
    """What the tokens of a step bring: [..., heads, numbers] float32, for T tokens or for the S
    tokens of blocks.

    rate: of the delta rule; None: the update is the value.
    """

    query: jax.Array  # [..., K, E]
    key: jax.Array  # [..., K, E]
    value: jax.Array  # [..., N, D]
    decay: jax.Array  # [..., N] at most 0
    rate: jax.Array | None  # [..., N]

    def at(self, tokens: jax.Array) -> Inputs:
        """The inputs of some tokens of the step."""
        return jax.tree.map(lambda x: x[tokens], self)


class Recent(NamedTuple):
    """What blocks have of their tokens; zeros where no token is known."""

    key: jax.Array  # [..., S, K, E]
    update: jax.Array  # [..., S, N, D]
    decay: jax.Array  # [..., S, N]

    def where(self, condition: jax.Array, other: Recent) -> Recent:
        """These tokens where the condition [..., S] holds, else the others."""
        return jax.tree.map(
            lambda x, y: jnp.where(
                condition.reshape(*condition.shape, *[1] * (x.ndim - condition.ndim)), x, y
            ),
            self,
            other,
        )


def run(
    kept: KeptNumbers,
    sizes: StateSizes,
    inputs: Inputs,
    batch: Batch,
    kernel: states.Implementation | None = None,
) -> tuple[KeptNumbers, jax.Array]:
    """Computes the tokens of a batch -> (what is kept, outputs [T, N, D]).

    kernel: computes steps with a cache, in whose order states and tokens are kept; None: here.
    """
    if isinstance(kept, KeptSequences):  # no later step reads their states
        return kept, _whole_sequences(sizes, inputs, kept.sizes.block_size)
    if kernel is not None:
        return _run_kernel(kernel, kept, sizes, inputs, batch)
    return _run_step(kept, sizes, inputs, batch)


def _run_kernel(
    kernel: states.Implementation,
    kept: KeptPages,
    sizes: StateSizes,
    inputs: Inputs,
    batch: Batch,
) -> tuple[KeptPages, jax.Array]:
    """`run` of a step with a cache, by a kernel that reads and writes the pages."""
    arrays, outputs = kernel.run(
        kept.memory(RECENT, STATE),
        states.Inputs(*inputs),
        spans_of(batch),
        shape=states.StateShape(*sizes, delta=inputs.rate is not None),
        decodes_alone=batch.cu_q_lens is None,
    )
    return kept.with_memory(arrays), outputs


def _run_step(
    kept: KeptPages, sizes: StateSizes, inputs: Inputs, batch: Batch
) -> tuple[KeptPages, jax.Array]:
    """`run` of a step with a cache.

    All states and recent tokens are read first, and all are written last: else XLA copies a page
    array, to read the old one while it writes the new one. So no row may use a block that another
    row of the step fills (`SchedulerConfig.shares_filling`).

    Rows of one token are computed together. The blocks of longer rows follow one at a time, because
    each state follows from the one before.
    """
    spans = spans_of(batch)
    size = kept.sizes.block_size
    rows = jnp.arange(len(spans.counts), dtype=jnp.int32)
    first_blocks = spans.positions // size
    enters = (spans.counts > 0) & (spans.positions % size == 0)
    known_blocks = jnp.maximum(first_blocks - enters, 0)
    known = Block(kept.blocks(STATE, rows, known_blocks), _recent(kept, sizes, rows, known_blocks))
    known = _at_first_tokens(known, sizes, spans, enters, size)
    tokens = len(batch.tokens)
    progress = Progress(
        outputs=jnp.zeros((tokens, sizes.heads, sizes.value_dim), jnp.float32),
        recent=Recent(
            inputs.key,
            jnp.zeros((tokens, sizes.heads, sizes.value_dim), jnp.float32),
            inputs.decay,
        ),
    )
    progress = _decodes(progress, sizes, inputs, spans, known, size)
    kept_states = [Entered(rows, first_blocks, enters & (spans.counts == 1), known.state)]
    if batch.cu_q_lens is not None:
        progress, of_chunks = _chunks(progress, sizes, inputs, spans, known, size)
        kept_states.append(of_chunks)
    kept = kept.with_tokens(RECENT, _joined(progress.recent))
    for entered in kept_states:
        kept = _with_states(kept, entered)
    return kept, progress.outputs


def read(kept: KeptNumbers, sizes: StateSizes, query: jax.Array, batch: Batch) -> jax.Array:
    """Outputs [T, N, D] of tokens that are in the pages.

    Args:
        query: [T, K, E].
    """
    assert isinstance(kept, KeptPages), "of whole sequences, `run` gives all outputs"
    rows = row_of_tokens(batch)
    size = kept.sizes.block_size
    blocks = batch.positions // size
    recent = _recent(kept, sizes, rows, blocks)
    state = kept.blocks(STATE, rows, blocks)
    offsets = batch.positions[:, None] % size
    # what is behind the query may be of an earlier owner, and 0 times NaN is NaN
    recent = recent.where(jnp.arange(size) <= offsets, jax.tree.map(jnp.zeros_like, recent))
    return _read(state, recent, query[:, None], offsets, sizes)[:, 0]


class Block(NamedTuple):
    """The state [..., N, E, D] before a block, and its tokens."""

    state: jax.Array
    recent: Recent


class Progress(NamedTuple):
    """What a step has computed of its tokens."""

    outputs: jax.Array  # [T, N, D]
    recent: Recent  # [T, ...]


class Entered(NamedTuple):
    """States that the pages get: those before number `blocks` of the sequences of `rows`."""

    rows: jax.Array  # [Q]
    blocks: jax.Array  # [Q]
    used: jax.Array  # [Q] bool; the others mean nothing
    states: jax.Array  # [Q, N, E, D]


def _at_first_tokens(
    known: Block, sizes: StateSizes, spans: states.Spans, enters: jax.Array, size: int
) -> Block:
    """The block [B, ...] of each row's first token, without that token and what follows.

    Args:
        known: the same block, or the one before if the row `enters` its block.
    """
    is_known = jnp.arange(size) < spans.positions[:, None] % size  # [B, S]
    recent = known.recent.where(is_known, jax.tree.map(jnp.zeros_like, known.recent))
    entering_rows = jnp.argsort(~enters, stable=True).astype(jnp.int32)  # those come first

    def enter_next(number: jax.Array, states: jax.Array) -> jax.Array:
        row = entering_rows[number]
        block = jax.tree.map(lambda x: x[row], Block(states, known.recent))
        state = jnp.where(spans.positions[row] == 0, 0, _state_after(block, sizes))
        return states.at[row].set(state)

    state = jax.lax.fori_loop(0, enters.sum(), enter_next, known.state)
    return Block(state, recent)


def _state_after(block: Block, sizes: StateSizes) -> jax.Array:
    """[N, E, D] the state after a full block."""
    sums = jnp.cumsum(block.recent.decay, axis=0)  # [S, heads]
    weights = jnp.exp(sums[-1] - sums)
    keys = _of_heads(block.recent.key, sizes)
    added = jnp.einsum("she,sh,shd->hed", keys, weights, block.recent.update, precision="highest")
    return jnp.exp(sums[-1])[:, None, None] * block.state + added


def _decodes(
    progress: Progress,
    sizes: StateSizes,
    inputs: Inputs,
    spans: states.Spans,
    known: Block,
    size: int,
) -> Progress:
    """Computes the rows of one token."""
    num_tokens = len(progress.outputs)
    token = jnp.minimum(spans.starts, num_tokens - 1)
    of_rows = inputs.at(token)
    offsets = spans.positions[:, None] % size
    is_own = jnp.arange(size) == offsets
    own = Recent(of_rows.key, jnp.zeros_like(of_rows.value), of_rows.decay)
    recent = jax.tree.map(lambda x: x[:, None], own).where(is_own, known.recent)
    update = of_rows.value
    if of_rows.rate is not None:
        given = _read(known.state, recent, of_rows.key[:, None], offsets, sizes)[:, 0]
        update = of_rows.rate[..., None] * (of_rows.value - given)
    updates = jnp.where(is_own[..., None, None], update[:, None], recent.update)
    recent = recent._replace(update=updates)
    results = _read(known.state, recent, of_rows.query[:, None], offsets, sizes)[:, 0]
    target = jnp.where(spans.counts == 1, token, num_tokens)
    return Progress(
        progress.outputs.at[target].set(results, mode="drop"),
        progress.recent._replace(update=progress.recent.update.at[target].set(update, mode="drop")),
    )


class Chunk(NamedTuple):
    """Where the loop over the blocks of longer rows is.

    number: of the next block.
    block: the block before, complete.
    states: [Q, N, E, D] before each of the blocks.
    """

    number: jax.Array
    block: Block
    progress: Progress
    states: jax.Array


def _chunks(
    progress: Progress,
    sizes: StateSizes,
    inputs: Inputs,
    spans: states.Spans,
    known: Block,
    size: int,
) -> tuple[Progress, Entered]:
    """Computes the rows of several tokens, block after block."""
    num_tokens = len(progress.outputs)
    num_rows = len(spans.counts)
    first_blocks = spans.positions // size
    last_blocks = (spans.positions + spans.counts - 1) // size
    blocks_of_rows = jnp.where(spans.counts > 1, last_blocks - first_blocks + 1, 0)
    ends = jnp.cumsum(blocks_of_rows)
    most = num_tokens // size + 2 * min(num_rows, max(num_tokens // 2, 1))
    numbers = jnp.arange(most, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), num_rows - 1)
    index = numbers - (ends[rows] - blocks_of_rows[rows])  # of the block among those of its row
    blocks = first_blocks[rows] + index
    enters = blocks * size >= spans.positions[rows]

    def run_next(chunk: Chunk) -> Chunk:
        number = chunk.number
        row = rows[number]
        is_first = index[number] == 0
        first = jax.tree.map(lambda x: x[row], known)
        state = jnp.where(is_first, first.state, _state_after(chunk.block, sizes))
        before = jax.tree.map(lambda x: jnp.where(is_first, x, 0), first.recent)
        places = blocks[number] * size + jnp.arange(size) - spans.positions[row]
        is_new = (places >= 0) & (places < spans.counts[row])
        token = jnp.where(is_new, spans.starts[row] + places, num_tokens)
        of_step = inputs.at(jnp.minimum(token, num_tokens - 1))
        recent, results = _run_block(before, is_new, of_step, state, sizes)
        progress = Progress(
            chunk.progress.outputs.at[token].set(results, mode="drop"),
            chunk.progress.recent._replace(
                update=chunk.progress.recent.update.at[token].set(recent.update, mode="drop")
            ),
        )
        states = chunk.states.at[number].set(state)
        return Chunk(number + 1, Block(state, recent), progress, states)

    blank = jax.tree.map(lambda x: jnp.zeros_like(x[0]), known)
    states = jnp.zeros((most, *known.state.shape[1:]), jnp.float32)
    start = Chunk(jnp.zeros((), jnp.int32), blank, progress, states)
    end = jax.lax.while_loop(lambda chunk: chunk.number < ends[-1], run_next, start)
    return end.progress, Entered(rows, blocks, enters & (numbers < ends[-1]), end.states)


def _run_block(
    known: Recent, is_new: jax.Array, of_step: Inputs, state: jax.Array, sizes: StateSizes
) -> tuple[Recent, jax.Array]:
    """(The tokens of a block with those of the step [S, ...] among them, outputs [S, N, D]).

    Args:
        state: [N, E, D] before the block.
    """
    recent = _with_new(known, is_new, of_step, state, sizes)
    alone = jax.tree.map(lambda x: x[None], Block(state, recent))
    offsets = jnp.arange(len(is_new))[None]
    return recent, _read(alone.state, alone.recent, of_step.query[None], offsets, sizes)[0]


def _whole_sequences(sizes: StateSizes, inputs: Inputs, length: int) -> jax.Array:
    """The outputs [B L, N, D] of B sequences of L tokens.

    The sequences are computed together, block after block. Gradients keep the states before blocks,
    and compute the rest again.
    """
    size = min(SEQUENCE_BLOCK, length)
    count = len(inputs.decay) // length

    def in_blocks(x: jax.Array) -> jax.Array:
        """[B L, ...] -> [blocks, B, S, ...], with zeros behind each sequence."""
        of_sequences = x.reshape(count, length, *x.shape[1:])
        padding = [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(of_sequences, padding)
        return jnp.swapaxes(padded.reshape(count, -1, size, *x.shape[1:]), 0, 1)

    def run_next(state: jax.Array, of_block: Inputs) -> tuple[jax.Array, jax.Array]:
        """Of one sequence: (the state after the block, outputs [S, N, D])."""
        blank = Recent(*[jnp.zeros_like(x) for x in (of_block.key, of_block.value, of_block.decay)])
        recent, outputs = _run_block(blank, jnp.ones(size, bool), of_block, state, sizes)
        return _state_after(Block(state, recent), sizes), outputs

    run_next_of_all = jax.checkpoint(jax.vmap(run_next), prevent_cse=False)
    start = jnp.zeros((count, sizes.heads, sizes.key_dim, sizes.value_dim), jnp.float32)
    _, outputs = jax.lax.scan(run_next_of_all, start, jax.tree.map(in_blocks, inputs))
    of_sequences = jnp.swapaxes(outputs, 0, 1).reshape(count, -1, sizes.heads, sizes.value_dim)
    return of_sequences[:, :length].reshape(-1, sizes.heads, sizes.value_dim)


def _with_states(kept: KeptPages, entered: Entered) -> KeptPages:
    """The pages with states, of which few are used: one after the other."""
    order = jnp.argsort(~entered.used, stable=True).astype(jnp.int32)

    def write_next(number: jax.Array, arrays: Any) -> Any:
        i = order[number][None]
        pages = kept._replace(arrays=arrays)
        return pages.with_blocks(
            STATE, entered.rows[i], entered.blocks[i], entered.states[i]
        ).arrays

    arrays = jax.lax.fori_loop(0, entered.used.sum(), write_next, kept.arrays)
    return kept._replace(arrays=arrays)


def _recent(kept: KeptPages, sizes: StateSizes, rows: jax.Array, blocks: jax.Array) -> Recent:
    """[N, S, ...] what the pages have of the tokens of blocks."""
    joined = kept.block_tokens(RECENT, rows, blocks)
    keys = sizes.key_heads * sizes.key_dim
    values = sizes.heads * sizes.value_dim
    key, update, decay = jnp.split(joined, [keys, keys + values], axis=-1)
    lead = joined.shape[:-1]
    return Recent(
        key.reshape(*lead, sizes.key_heads, sizes.key_dim),
        update.reshape(*lead, sizes.heads, sizes.value_dim),
        decay,
    )


def _joined(recent: Recent) -> jax.Array:
    """[..., numbers] as the pages have them."""
    lead = recent.decay.shape[:-1]
    return jnp.concatenate([x.reshape(*lead, -1) for x in recent], axis=-1)


def _with_new(
    known: Recent, is_new: jax.Array, of_step: Inputs, state: jax.Array, sizes: StateSizes
) -> Recent:
    """The tokens of a block with those of the step [S, ...] among them."""
    with_values = Recent(of_step.key, of_step.value, of_step.decay).where(is_new, known)
    if of_step.rate is None:
        return with_values
    sums = jnp.cumsum(with_values.decay, axis=0)  # [S, heads]
    keys = _of_heads(with_values.key, sizes)
    rate = jnp.where(is_new[:, None], of_step.rate, 0)
    given = jnp.exp(sums)[..., None] * jnp.einsum("she,hed->shd", keys, state, precision="highest")
    corrected = rate[..., None] * (of_step.value - given)
    target = jnp.where(is_new[:, None, None], corrected, known.update)
    # (1 + A) update = target, where A has what earlier tokens of the block give for a key
    products = jnp.einsum("she,the->hst", keys, keys, precision="highest")
    earlier = jnp.tril(jnp.ones(products.shape[-2:], bool), -1)
    rates = rate.T[..., None]
    system = jnp.where(earlier, rates * products * _decay_between(sums), 0)
    update = jax.lax.linalg.triangular_solve(
        system + jnp.eye(system.shape[-1]),
        jnp.swapaxes(target, 0, 1),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    return with_values._replace(update=jnp.swapaxes(update, 0, 1))


def _read(
    state: jax.Array, recent: Recent, query: jax.Array, offsets: jax.Array, sizes: StateSizes
) -> jax.Array:
    """[N, Q, heads, D] the outputs of queries [N, Q, K, E] at these offsets [N, Q] of blocks.

    Args:
        state: [N, heads, E, D] before the blocks.
    """
    sums = jnp.cumsum(recent.decay, axis=1)  # [N, S, heads]
    at_queries = jnp.take_along_axis(sums, offsets[..., None], axis=1)  # [N, Q, heads]
    queries = _of_heads(query, sizes)
    from_state = jnp.exp(at_queries)[..., None] * jnp.einsum(
        "nqhe,nhed->nqhd", queries, state, precision="highest"
    )
    keys = _of_heads(recent.key, sizes)
    products = jnp.einsum("nqhe,nshe->nqsh", queries, keys, precision="highest")
    is_seen = jnp.arange(sums.shape[1]) <= offsets[..., None]  # [N, Q, S]
    between = at_queries[:, :, None] - sums[:, None]  # [N, Q, S, heads]
    weights = jnp.exp(jnp.where(is_seen[..., None], between, -jnp.inf))
    within = jnp.einsum("nqsh,nshd->nqhd", products * weights, recent.update, precision="highest")
    return from_state + within


def _decay_between(sums: jax.Array) -> jax.Array:
    """[heads, S, S] the decay from a token t to a later one s, at [..., s, t]; 0 elsewhere."""
    of_heads = sums.T
    between = of_heads[..., :, None] - of_heads[..., None, :]
    later = jnp.tril(jnp.ones(between.shape[-2:], bool))
    return jnp.exp(jnp.where(later, between, -jnp.inf))


def _of_heads(x: jax.Array, sizes: StateSizes) -> jax.Array:
    """[..., K, E] -> [..., heads, E]: each key head serves several heads."""
    return jnp.repeat(x, sizes.heads // sizes.key_heads, axis=-2)
