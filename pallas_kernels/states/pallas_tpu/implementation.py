"""States on TPUs: one Pallas kernel (`kernel.py`), in two sizes.

    decode    a row with one token is one item
    chunks    the tokens of all other rows, in the blocks of their sequences

XLA makes the list of items and brings the tokens into blocks; the kernel reads and writes pages in
place. A step runs both sizes, because only the device knows the rows' lengths.

No TPU has run this yet. The compiler (`pallas_kernels.aot`) and interpretation on a CPU show what
the kernel computes, that it reads nothing before it has arrived, and that it compiles for TPUs from
v4 to 7x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.shared.device import device_kind
from pallas_kernels.shared.tpu import LANES, wrong_device
from pallas_kernels.states.pallas_tpu.kernel import (
    CONTINUES,
    NOTHING,
    PIECE,
    PREVIOUS,
    SAME,
    Sizes,
    Work,
    run_items,
)
from pallas_kernels.states.records import Inputs, Memory, Part, Spans, StateShape
from pallas_kernels.tiles import TpuTiles

DTYPES = ("bfloat16", "uint16", "float32")  # of the words of pages
KEY_DIM = LANES
VALUE_DIMS = (64, 128)
MAX_HEADS = LANES  # their decays are one row
MOST_STAGES = 3
# Bytes of scalar memory for the ids of pages; the compiler and the other scalars need the rest
SMEM = 2**20 - 2**18


def run(
    memory: Memory,
    inputs: Inputs,
    spans: Spans,
    *,
    shape: StateShape,
    decodes_alone: bool = False,
    tiles: TpuTiles | None = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """See `api.Implementation`. NaN in slots that have no token does not spread.

    Args:
        tiles: the device's file, for the bytes of VMEM that the compiler may use; None takes that
            of the device.
        interpret: False compiles; True or pltpu.InterpretParams runs it on a CPU.

    Raises:
        ValueError: `shape_obstacle` or `memory_obstacle` gives a reason.
    """
    tiles = tiles or TpuTiles.of(device_kind())
    tokens = len(inputs.decay)
    array = memory.arrays[0]
    _, heads, rows, lanes = array.shape
    page = heads, rows, lanes
    size = memory.block_size
    reason = shape_obstacle(
        shape, page, str(array.dtype), size, interpret=bool(interpret)
    ) or memory_obstacle(shape, page, array.dtype.itemsize, size, len(spans.counts), tokens, tiles)
    if reason:
        raise ValueError(f"state_impl 'pallas_tpu' {reason}; 'xla' has no such limit")
    sizes = Sizes(
        shape=shape,
        block_size=size,
        tokens=1,
        stages=2,
        page=page,
        itemsize=array.dtype.itemsize,
        states=memory.states,
        recent=memory.tokens,
    )
    x = jnp.swapaxes(_rows(inputs, shape), 0, 1)  # [components, T, 128]
    arrays = memory.arrays
    outputs = jnp.zeros((sizes.units, tokens, LANES), jnp.float32)
    for part in (_decode,) if decodes_alone or tokens == 1 else (_decode, _chunks):
        arrays, outputs = part(arrays, outputs, x, memory, spans, sizes, tiles, interpret)
    of_tokens = jnp.swapaxes(outputs, 0, 1)
    return arrays, of_tokens.reshape(tokens, shape.heads, shape.value_dim)


def _rows(inputs: Inputs, shape: StateShape) -> jax.Array:
    """Returns the tokens as rows of 128 numbers: [T, components, 128]."""
    tokens = len(inputs.decay)
    of_heads = [inputs.decay]
    if shape.delta:
        assert inputs.rate is not None, "the delta rule has rates"
        of_heads.append(inputs.rate)
    padding = ((0, 0), (0, LANES - shape.heads))
    rows = [
        inputs.key,
        inputs.query,
        inputs.value.reshape(tokens, -1, LANES),
        *[jnp.pad(x, padding)[:, None] for x in of_heads],
    ]
    return jnp.concatenate(rows, axis=1)


def _decode(arrays, outputs, x, memory: Memory, spans: Spans, sizes: Sizes, tiles, interpret):
    """Computes the rows of one token: (the page arrays, outputs with theirs)."""
    sizes = with_stages(sizes._replace(tokens=1), tiles)
    tokens = outputs.shape[1]
    is_single = spans.counts == 1
    rows = jnp.argsort(~is_single, stable=True).astype(jnp.int32)  # those come first
    size = memory.block_size
    positions = spans.positions[rows]
    token = jnp.minimum(spans.starts[rows], tokens - 1)
    total = is_single.sum(dtype=jnp.int32)
    begin = positions % size
    work = _work(
        memory,
        sizes.stages,
        total=total,
        rows=rows,
        blocks=positions // size,
        source=_source(positions, size),
        begin=begin,
        end=begin + 1,
        enters=begin == 0,
    )
    arrays, y = run_items(
        x[:, token][:, :, None],
        arrays,
        work,
        sizes,
        name="states_decode",
        vmem_limit=vmem_limit(tiles),
        interpret=interpret,
    )
    target = jnp.where(jnp.arange(len(rows)) < total, token, tokens)
    return arrays, outputs.at[:, target].set(y[:, :, 0], mode="drop")


def _chunks(arrays, outputs, x, memory: Memory, spans: Spans, sizes: Sizes, tiles, interpret):
    """As `_decode`, for rows of several tokens."""
    size = memory.block_size
    sizes = with_stages(sizes._replace(tokens=size), tiles)
    tokens = outputs.shape[1]
    num_rows = len(spans.counts)
    first_blocks = spans.positions // size
    last_blocks = (spans.positions + spans.counts - 1) // size
    blocks_of_rows = jnp.where(spans.counts > 1, last_blocks - first_blocks + 1, 0)
    ends = jnp.cumsum(blocks_of_rows, dtype=jnp.int32)
    item = jnp.arange(chunk_items(tokens, num_rows, size), dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, item, side="right"), num_rows - 1).astype(jnp.int32)
    index = item - (ends[rows] - blocks_of_rows[rows])  # of the block among those of its row
    blocks = first_blocks[rows] + index
    places = (blocks * size)[:, None] + jnp.arange(size) - spans.positions[rows][:, None]
    is_new = (places >= 0) & (places < spans.counts[rows][:, None])  # [I, S]
    token = spans.starts[rows][:, None] + places
    begin = jnp.maximum(spans.positions[rows] - blocks * size, 0)
    work = _work(
        memory,
        sizes.stages,
        total=ends[-1],
        rows=rows,
        blocks=blocks,
        source=jnp.where(index == 0, _source(spans.positions[rows], size), CONTINUES),
        begin=begin,
        end=begin + is_new.sum(axis=1, dtype=jnp.int32),
        enters=begin == 0,
    )
    arrays, y = run_items(
        x[:, jnp.clip(token, 0, tokens - 1)],  # [components, I, S, 128]
        arrays,
        work,
        sizes,
        name="states_chunks",
        vmem_limit=vmem_limit(tiles),
        interpret=interpret,
    )
    target = jnp.where(is_new & (item < ends[-1])[:, None], token, tokens)
    return arrays, outputs.at[:, target].set(y, mode="drop")


def _source(positions: jax.Array, size: int) -> jax.Array:
    """Returns where the state of a row's first block comes from."""
    at_border = jnp.where(positions == 0, NOTHING, PREVIOUS)
    return jnp.where(positions % size == 0, at_border, SAME).astype(jnp.int32)


def _work(memory: Memory, stages: int, *, total, rows, blocks, source, begin, end, enters) -> Work:
    """Returns the work of items, the real ones first. `rows` and what follows are [I]."""
    parts = (*memory.states, *memory.tokens)
    pages = jnp.concatenate([jnp.arange(part.first, part.end) for part in parts])
    width = memory.tables.shape[2]

    def ids(blocks: jax.Array) -> jax.Array:
        blocks = jnp.clip(blocks, 0, width - 1)
        return memory.tables[pages[None], rows[:, None], blocks[:, None]].reshape(-1)

    item = jnp.arange(len(rows), dtype=jnp.int32)
    is_first = source != CONTINUES
    number = jnp.cumsum(is_first, dtype=jnp.int32) - 1  # of the row
    # the first item of each row, by its number
    firsts = jnp.full(len(rows) + 1, len(rows), jnp.int32)
    firsts = firsts.at[jnp.where(is_first, number, len(rows))].min(item)
    following = firsts[jnp.minimum(number + 1, len(rows))]
    loads = (source == SAME) | (source == PREVIOUS)
    has_following = is_first & (following < total)
    has_following &= loads[jnp.minimum(following, len(rows) - 1)]
    return Work(
        total=jnp.reshape(total, 1),
        source=source,
        begin=begin,
        end=end,
        enters=enters.astype(jnp.int32),
        slot=number % stages,
        following=jnp.where(has_following, following, -1),
        loaded=ids(jnp.where(source == PREVIOUS, blocks - 1, blocks)),
        stored=ids(blocks),
    )


# --- sizes and limits -----------------------------------------------------------------------------


def chunk_items(tokens: int, rows: int, block_size: int) -> int:
    """Returns the most items of chunks of a step."""
    return tokens // block_size + 2 * min(rows, max(tokens // 2, 1))


def vmem_limit(tiles: TpuTiles) -> int:
    """Returns the bytes of VMEM that the kernel may use: more than others, where there are more."""
    return max(tiles.vmem_limit, tiles.vmem // 2)


def with_stages(sizes: Sizes, tiles: TpuTiles) -> Sizes:
    """Returns sizes with as many slots as fit, of 2 or 3. With 3, the pages of the row before leave
    while those of the next one arrive.
    """
    most = sizes._replace(stages=MOST_STAGES)
    return most if most.vmem <= _room(tiles) else sizes._replace(stages=2)


def _room(tiles: TpuTiles) -> int:
    """Bytes of VMEM for arrays; the compiler needs the rest."""
    return vmem_limit(tiles) - 2**20


def shape_obstacle(
    shape: StateShape,
    page: Sequence[int],
    dtype: str,
    block_size: int,
    *,
    interpret: bool = False,
) -> str:
    """Returns why the kernel cannot take a shape, as the rest of a sentence; empty if it can.

    Args:
        page: [heads of keys, rows, lanes] of a page array.
        dtype: of its words.
        interpret: check the limits of the kernel's logic alone, and not those of a TPU.
    """
    if dtype not in DTYPES:
        return f"reads pages of {', '.join(DTYPES)} and not of {dtype}"
    if shape.key_dim != KEY_DIM:
        return f"needs keys of {KEY_DIM} numbers, and they have {shape.key_dim}"
    if LANES % shape.value_dim or not (interpret or shape.value_dim in VALUE_DIMS):
        numbers = " or ".join(map(str, VALUE_DIMS))
        return f"needs values of {numbers} numbers a head, and they have {shape.value_dim}"
    unit_heads = LANES // shape.value_dim
    if shape.heads > MAX_HEADS or shape.heads // shape.key_heads % unit_heads:
        return (
            f"takes at most {MAX_HEADS} heads, and for each head of keys {unit_heads} or a "
            f"multiple; there are {shape.heads}, and {shape.key_heads} of keys"
        )
    heads, rows, lanes = page
    itemsize = 2 if dtype.endswith("16") else 4
    if lanes % LANES:
        return (
            f"needs pages of rows of {LANES} numbers, and they have {lanes}; "
            "attention_impl='pallas_tpu' has such pages"
        )
    words = rows * itemsize // 4  # rows of 32 bits
    groups = lanes // LANES
    if rows * itemsize % 32 or LANES % (words * groups):
        smallest = 8 * block_size // words if words and 8 * block_size % words == 0 else None
        remedy = f"; block_size={smallest} has 8" if smallest and words < 8 else ""
        return (
            f"needs pages of 8, 16, 32, 64 or 128 rows of 32 bits, at most {LANES // groups}, and "
            f"they have {rows * itemsize / 4:g}{remedy}"
        )
    if heads * rows * lanes * itemsize // block_size % (4 * LANES):
        return (
            f"needs {LANES} numbers of 32 bits, or a multiple, for each token in a page, and there "
            f"are {heads * rows * lanes * itemsize / block_size / 4:g}"
        )
    return ""


def convolution_obstacle(length: int, inputs: str, dtype: str) -> str:
    """As `shape_obstacle`, for the convolution before the state.

    Args:
        length: its tokens.
        inputs: the dtype of its inputs.
        dtype: of the words of pages.
    """
    if not 1 < length <= PIECE + 1:
        return f"takes convolutions of 2 to {PIECE + 1} tokens, and they have {length}"
    if inputs == "float32" and dtype != "float32":
        return (
            f"keeps inputs of convolutions in words of their size, and they are {inputs} in pages "
            f"of {dtype}; leave kv_cache_dtype out"
        )
    return ""


def memory_obstacle(
    shape: StateShape,
    page: Sequence[int],
    itemsize: int,
    block_size: int,
    rows: int,
    tokens: int,
    tiles: TpuTiles,
) -> str:
    """Returns what of the kernel's memory does not fit, as the rest of a sentence; empty if all
    does. Of a shape that `shape_obstacle` accepts.

    Args:
        rows, tokens: the most of a step.
    """
    sizes = sizes_of(shape, page, itemsize, block_size)
    if sizes.vmem > _room(tiles):
        return (
            f"needs {sizes.vmem:,} bytes of VMEM with blocks of {block_size} tokens, and "
            f"{_room(tiles):,} are there; lower block_size"
        )
    items = max(rows, chunk_items(tokens, rows, block_size))
    of_states = 2 * 4 * items * sizes.pages
    # the inputs of the convolution are written in pieces, of which each has three numbers
    heads, page_rows, lanes = page
    channels = 2 * shape.key_heads * shape.key_dim + shape.heads * shape.value_dim
    pages = -(-channels * block_size // (heads * page_rows * lanes))
    of_inputs = 3 * 4 * pages * (tokens // PIECE + 2 * rows)
    needed = max(of_states, of_inputs)
    if needed > SMEM:
        return (
            f"stores ids of pages in {SMEM:,} bytes of scalar memory, and those of a step take "
            f"{needed:,}; lower max_num_batched_tokens or max_num_seqs, or raise block_size"
        )
    return ""


def sizes_of(shape: StateShape, page: Sequence[int], itemsize: int, block_size: int) -> Sizes:
    """Returns the sizes of the kernel for chunks, with pages one behind the other."""
    heads, rows, lanes = page
    words_of_page = heads * rows * lanes * itemsize // 4
    state = shape.heads * shape.key_dim * shape.value_dim
    recent = shape.key_heads * shape.key_dim + shape.heads * shape.value_dim + shape.heads
    states = -(-state // words_of_page)
    tokens = -(-recent * block_size // words_of_page)
    return Sizes(
        shape=shape,
        block_size=block_size,
        tokens=block_size,
        stages=2,
        page=(heads, rows, lanes),
        itemsize=itemsize,
        states=(Part(0, tokens, tokens + states),),
        recent=(Part(0, 0, tokens),),
    )


def obstacle(
    device: Any,
    *,
    shape: StateShape,
    length: int,
    inputs: str,
    page: Sequence[int],
    dtype: str,
    block_size: int,
    rows: int,
    tokens: int,
) -> str:
    """See `api.Implementation`."""
    itemsize = 2 if dtype.endswith("16") else 4
    return (
        wrong_device(device)
        or shape_obstacle(shape, page, dtype, block_size)
        or convolution_obstacle(length, inputs, dtype)
        or memory_obstacle(
            shape, page, itemsize, block_size, rows, tokens, TpuTiles.of(device.device_kind)
        )
    )
