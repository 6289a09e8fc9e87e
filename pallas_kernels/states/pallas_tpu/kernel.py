"""States of blocks in pages, read and written in place: Pallas, Mosaic TPU. Rows of one token and
longer rows run the same kernel in two sizes.

    grid      items one after another: (row of the batch, block of its sequence that gets tokens)
    ring      `stages` slots in VMEM, each with the pages of a state and of the tokens of a block.
              A row has a slot. While it is computed, the pages of the next row arrive, one DMA
              each, and those of the row before leave
    state     of a row's next block: it follows from the slot, and is written only where the row
              enters the block. So it stays in VMEM between the blocks of a row

An item in five phases:

    1. load      the state before the block and its tokens, or those of the block before
    2. advance   to the state after the block before, if the row enters its block
    3. merge     keys and decays of the new tokens with those of the block
    4. units     a unit is 128 values of a token: of one head, or of two heads of 64. The delta rule
                 solves (1 + A) update = target by substitution, one new token after another
    5. store     the tokens, in whole pieces of 8 rows, and the state

A page array [P, K, R, L] is memory in rows of 128 words of 32 bits. Words of 16 bits are the halves
of such words, in two rows, as a TPU's registers have them. Rows lie in *slabs*, those of one key
head and 128 lanes of a page. A unit's state has 128 rows of E = 128 numbers. A token's numbers are
rows of a *component* [S, 128] each: first the K key heads, then the units of updates, then the
decays of all heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shared.tpu import LANES, pinned
from pallas_kernels.states.records import Part, StateShape

PIECE = 8  # rows of 32 bits that a copy moves at least: those of a register
MOST_AT_ONCE = 4  # units in one body of the loop over them
HIDDEN = -1e30  # in the place of minus infinity: exp gives 0
# where the state before an item's block comes from
SAME = 0  # the block has it: the row began it in an earlier step
PREVIOUS = 1  # the block before has its state and its tokens in pages
NOTHING = 2  # the first block of a sequence
CONTINUES = 3  # the item before, which is the block before


class Work(NamedTuple):
    """The items, for scalar memory: I of them, and the first `total` are real. Items of a row are
    neighbours.
    """

    total: jax.Array  # [1]
    source: jax.Array  # [I] of the state before the block
    begin: jax.Array  # [I] tokens begin : end of the block are new; begin is 0 but for SAME
    end: jax.Array  # [I]
    enters: jax.Array  # [I] 1 if the state before the block is written
    slot: jax.Array  # [I] of the ring
    # [I] at the first item of a row: the first item of the next one, if that loads pages; else -1
    following: jax.Array
    loaded: jax.Array  # [I * pages] ids of the pages that an item loads, states first
    stored: jax.Array  # [I * pages] ids of the pages of its block


class Sizes(NamedTuple):
    """The sizes of a kernel.

    tokens: of an item's inputs: those of a block, or one.
    stages: slots of the ring, at least 2.
    page: [heads of keys, rows, lanes] of a page array.
    itemsize: bytes of its words.
    states, recent: where the pages of a layer have states and tokens.
    """

    shape: StateShape
    block_size: int
    tokens: int
    stages: int
    page: tuple[int, int, int]
    itemsize: int
    states: tuple[Part, ...]
    recent: tuple[Part, ...]

    @property
    def unit_heads(self) -> int:
        """Heads of a unit."""
        return LANES // self.shape.value_dim

    @property
    def units(self) -> int:
        """Units of all heads."""
        return self.shape.heads // self.unit_heads

    @property
    def groups(self) -> int:
        """Groups of 128 lanes of a page."""
        return self.page[2] // LANES

    @property
    def rows(self) -> int:
        """Rows of 32 bits of a slab."""
        return self.page[1] * self.itemsize // 4

    @property
    def slabs(self) -> int:
        """Slabs of a page."""
        return self.page[0] * self.groups

    @property
    def components(self) -> int:
        """Components that are kept of a token."""
        return self.shape.key_heads + self.units + 1

    @property
    def input_components(self) -> int:
        """Components that a token brings: keys, queries, values, decays, and rates."""
        return 2 * self.shape.key_heads + self.units + 1 + self.shape.delta

    @property
    def state_pages(self) -> int:
        """Pages of a state."""
        return sum(part.end - part.first for part in self.states)

    @property
    def recent_pages(self) -> int:
        """Pages of the tokens of a block."""
        return sum(part.end - part.first for part in self.recent)

    @property
    def pages(self) -> int:
        """Pages of a block, states first."""
        return self.state_pages + self.recent_pages

    @property
    def vmem(self) -> int:
        """Bytes of VMEM: the ring, the tokens of a block, and inputs and outputs, which are there
        twice. An array with one token has rows of registers, as with eight.
        """
        page_bytes = self.page[0] * self.page[1] * self.page[2] * self.itemsize
        tokens = max(self.tokens, PIECE)
        components = self.components * self.block_size
        components += 2 * (self.input_components + self.units) * tokens
        return self.stages * self.pages * page_bytes + components * LANES * 4


class Refs(NamedTuple):
    """A kernel's sizes, its arguments and its scratch memory."""

    sizes: Sizes
    work: Work
    x: Any  # [input components, 1, tokens, 128] f32
    arrays: tuple[Any, ...]  # page arrays, in HBM
    y: Any  # [units, 1, tokens, 128] f32
    states: Any  # [stages, pages, K, R, L] the ring
    recent: Any  # [stages, pages, K, R, L] the ring
    known: Any  # [components, S, 128] f32 the tokens of a block
    writer: Any  # [stages] the item whose copies out of a slot are not awaited; -1: none
    arrived: Any  # [stages] semaphores
    left: Any  # [stages] semaphores


def run_items(
    x: jax.Array,
    arrays: tuple[jax.Array, ...],
    work: Work,
    sizes: Sizes,
    *,
    name: str,
    vmem_limit: int,
    interpret: Any,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Computes the items of a step.

    Args:
        x: [input components, I, tokens, 128].
        arrays: donated page arrays.
        name: of the kernel, in profiles and in the compiler's reports.
        vmem_limit: bytes that the compiler may use.
        interpret: False compiles; True or pltpu.InterpretParams runs it on a CPU.

    Returns:
        (the page arrays, [units, I, tokens, 128]); what is no new token of a real item is
        undefined.
    """
    components, items, *numbers = x.shape

    def block(of_token: int) -> pl.BlockSpec:
        """Of an item's tokens, with so many components; the last real item stays."""
        return pl.BlockSpec(
            (of_token, 1, *numbers),
            lambda i, total, *_: (0, jnp.clip(i, 0, jnp.maximum(total[0] - 1, 0)), 0, 0),
        )

    in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM) for _ in arrays]
    shape_in_hbm = jax.ShapeDtypeStruct if interpret else pltpu.HBM
    outputs = jax.ShapeDtypeStruct((sizes.units, items, *numbers), jnp.float32)
    dtype = arrays[0].dtype
    first_array = len(work) + 1
    call = pl.pallas_call(
        partial(_kernel, sizes, len(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(items,),
            in_specs=[block(components), *in_hbm],
            out_specs=[*in_hbm, block(sizes.units)],
            scratch_shapes=[
                pltpu.VMEM((sizes.stages, sizes.state_pages, *sizes.page), dtype),
                pltpu.VMEM((sizes.stages, sizes.recent_pages, *sizes.page), dtype),
                pltpu.VMEM((sizes.components, sizes.block_size, LANES), jnp.float32),
                pltpu.SMEM((sizes.stages,), jnp.int32),
                pltpu.SemaphoreType.DMA((sizes.stages,)),
                pltpu.SemaphoreType.DMA((sizes.stages,)),
            ],
        ),
        out_shape=[*[shape_in_hbm(a.shape, a.dtype) for a in arrays], outputs],
        input_output_aliases={first_array + i: i for i in range(len(arrays))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
        name=name,
    )
    *changed, y = call(*work, x, *pinned(*arrays, interpret=interpret))
    return tuple(changed), y


def _kernel(sizes: Sizes, num_arrays: int, *refs) -> None:
    scalars = len(Work._fields)
    x = refs[scalars]
    arrays_and_scratch = refs[scalars + 1 + num_arrays :]  # inputs and outputs are one memory
    arrays = arrays_and_scratch[:num_arrays]
    r = Refs(sizes, Work(*refs[:scalars]), x, arrays, *arrays_and_scratch[num_arrays:])
    item = pl.program_id(0)

    @pl.when(item == 0)
    def begin():
        for slot in range(sizes.stages):
            r.writer[slot] = -1
        pl.when((r.work.total[0] > 0) & _loads(r, 0))(lambda: _start_load(r, 0))

    pl.when(item < r.work.total[0])(lambda: _run_item(r, item))


def _run_item(r: Refs, item) -> None:
    w = r.work
    slot = w.slot[item]
    source = w.source[item]
    following = w.following[item]

    @pl.when(following >= 0)
    def load_next_row():
        _finish_stores(r, w.slot[following])
        _start_load(r, following)

    @pl.when(_loads(r, item))
    def take_pages():
        _load_copies(r, item, wait)
        _unpack(r, slot)

    pl.when(~_loads(r, item))(lambda: _finish_stores(r, slot))
    pl.when((source == PREVIOUS) | (source == CONTINUES))(lambda: _advance(r, slot))
    pl.when(source == NOTHING)(lambda: _clear(r, slot))
    pl.when(w.enters[item] == 1)(lambda: _state_copies(r, item, start))
    sums = _merge(r, item)
    _over_units(r, lambda units: _compute_units(r, item, units, sums))
    _pack(r, item)
    _recent_copies(r, item, start)
    r.writer[slot] = item

    @pl.when(item == w.total[0] - 1)
    def finish():
        for each in range(r.sizes.stages):
            _finish_stores(r, each)


# --- copies ---------------------------------------------------------------------------------------


def start(copy: Any) -> None:
    """Starts a copy."""
    copy.start()


def wait(copy: Any) -> None:
    """Waits until a copy is done; a function, for a test that leaves it out."""
    copy.wait()


def _loads(r: Refs, item):
    """Whether an item needs pages."""
    return (r.work.source[item] == SAME) | (r.work.source[item] == PREVIOUS)


def _over_pages(parts: tuple[Part, ...], first, last, act) -> None:
    """Calls act(array, page) for the pages first : last of those in `parts`."""
    before = 0
    for part in parts:
        count = part.end - part.first
        begin = lax.clamp(before, jnp.int32(first), before + count)
        end = lax.clamp(before, jnp.int32(last), before + count)
        lax.fori_loop(begin, end, lambda page, _, part=part: act(part.array, page), None)
        before += count


def _load_copies(r: Refs, item, act) -> None:
    """Calls `act` for the copy of each page that an item loads."""
    slot = r.work.slot[item]
    first = item * r.sizes.pages

    def copy(array, page, ring, number):
        source = r.arrays[array].at[r.work.loaded[first + number]]
        act(pltpu.make_async_copy(source, ring.at[slot, page], r.arrived.at[slot]))

    _over_pages(
        r.sizes.states,
        0,
        r.sizes.state_pages,
        lambda array, page: copy(array, page, r.states, page),
    )
    _over_pages(
        r.sizes.recent,
        0,
        r.sizes.recent_pages,
        lambda array, page: copy(array, page, r.recent, r.sizes.state_pages + page),
    )


def _start_load(r: Refs, item) -> None:
    _load_copies(r, item, start)


def _state_copies(r: Refs, item, act) -> None:
    """Calls `act` for the copy of each page of the state before an item's block."""
    slot = r.work.slot[item]
    first = item * r.sizes.pages

    def copy(array, page):
        target = r.arrays[array].at[r.work.stored[first + page]]
        act(pltpu.make_async_copy(r.states.at[slot, page], target, r.left.at[slot]))

    _over_pages(r.sizes.states, 0, r.sizes.state_pages, copy)


def _pieces(r: Refs, item):
    """Returns (first, last + 1) of the pieces of 8 tokens that get new ones."""
    return r.work.begin[item] // PIECE, pl.cdiv(r.work.end[item], PIECE)


def _pages_of_part(sizes: Sizes, part):
    """Returns (first, last + 1) of the pages of tokens with part number `part` of a block: as many
    tokens as a slab has rows.
    """
    first = part * sizes.components
    return first // sizes.slabs, (first + sizes.components - 1) // sizes.slabs + 1


def _recent_copies(r: Refs, item, act) -> None:
    """Calls `act` for the copy of each piece with new tokens, of each page that has them."""
    s = r.sizes
    slot = r.work.slot[item]
    first = item * s.pages + s.state_pages
    pieces_of_part = s.rows // PIECE
    height = PIECE * 4 // s.itemsize

    def copy_piece(piece, _):
        rows = pl.ds(pl.multiple_of(lax.rem(piece, pieces_of_part) * height, height), height)

        def copy(array, page):
            target = r.arrays[array].at[r.work.stored[first + page], :, rows]
            source = r.recent.at[slot, page, :, rows]
            act(pltpu.make_async_copy(source, target, r.left.at[slot]))

        _over_pages(s.recent, *_pages_of_part(s, piece // pieces_of_part), copy)

    lax.fori_loop(*_pieces(r, item), copy_piece, None)


def _finish_stores(r: Refs, slot) -> None:
    """Waits until all that an item wrote from a slot is in HBM."""
    item = r.writer[slot]

    @pl.when(item >= 0)
    def finish():
        pl.when(r.work.enters[item] == 1)(lambda: _state_copies(r, item, wait))
        _recent_copies(r, item, wait)
        r.writer[slot] = -1


# --- pages as rows of 128 floats ------------------------------------------------------------------


def _floats(words: jax.Array) -> jax.Array:
    """Returns words [R, L] as floats [rows, L]."""
    return words if words.dtype == jnp.float32 else pltpu.bitcast(words, jnp.float32)


def _words(floats: jax.Array, dtype: Any) -> jax.Array:
    """The reverse of `_floats`."""
    return floats if dtype == jnp.float32 else pltpu.bitcast(floats, dtype)


def _unpack(r: Refs, slot) -> None:
    """Brings the tokens of a block from the ring to `known`."""

    def unpack_page(page, _):
        for head in range(r.sizes.page[0]):
            numbers = _floats(r.recent[slot, page, head])
            for group in range(r.sizes.groups):
                _store_slab(
                    r,
                    page * r.sizes.slabs + head * r.sizes.groups + group,
                    numbers[:, group * LANES : (group + 1) * LANES],
                )

    lax.fori_loop(0, r.sizes.recent_pages, unpack_page, None)


def _place(r: Refs, slab):
    """Returns (component, rows) of a slab of tokens in `known`."""
    rows = pl.multiple_of(slab // r.sizes.components * r.sizes.rows, PIECE)
    return lax.rem(slab, jnp.int32(r.sizes.components)), pl.ds(rows, r.sizes.rows)


def _num_slabs(s: Sizes) -> int:
    """Slabs that have tokens; what is left of the last page has none."""
    return s.block_size // s.rows * s.components


def _store_slab(r: Refs, slab, numbers) -> None:
    @pl.when(slab < _num_slabs(r.sizes))
    def store():
        r.known[_place(r, slab)] = numbers


def _pack(r: Refs, item) -> None:
    """Brings tokens from `known` to the pages of the ring that have new ones."""
    s = r.sizes
    slot = r.work.slot[item]
    last = _num_slabs(s) - 1
    first_piece, end_piece = _pieces(r, item)
    pieces_of_part = s.rows // PIECE

    def pack_page(page, _):
        for head in range(s.page[0]):
            slab = page * s.slabs + head * s.groups
            parts = [
                r.known[_place(r, jnp.minimum(slab + group, last))] for group in range(s.groups)
            ]
            joined = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
            r.recent[slot, page, head] = _words(joined, r.recent.dtype)

    first, _ = _pages_of_part(s, first_piece // pieces_of_part)
    _, end = _pages_of_part(s, (end_piece - 1) // pieces_of_part)
    lax.fori_loop(first, end, pack_page, None)


def _state_places(r: Refs, unit):
    """Returns (page, head) of each [rows, L] of a unit's state."""
    heads = r.sizes.page[0]
    count = LANES // (r.sizes.rows * r.sizes.groups)
    numbers = [unit * count + i for i in range(count)]
    return [(number // heads, lax.rem(number, jnp.int32(heads))) for number in numbers]


def _state(r: Refs, slot, unit) -> jax.Array:
    """Returns the state of a unit: [128 values, 128 numbers of a key]."""
    slabs = []
    for page, head in _state_places(r, unit):
        numbers = _floats(r.states[slot, page, head])
        slabs += [numbers[:, g * LANES : (g + 1) * LANES] for g in range(r.sizes.groups)]
    return jnp.concatenate(slabs, axis=0) if len(slabs) > 1 else slabs[0]


def _store_state(r: Refs, slot, unit, state: jax.Array) -> None:
    rows = r.sizes.rows
    for i, (page, head) in enumerate(_state_places(r, unit)):
        first = i * r.sizes.groups
        slabs = [state[(first + g) * rows : (first + g + 1) * rows] for g in range(r.sizes.groups)]
        joined = slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=1)
        r.states[slot, page, head] = _words(joined, r.states.dtype)


# --- computation ----------------------------------------------------------------------------------


def _over_units(r: Refs, body) -> None:
    """Calls body(units) for a few units at a time, whose operations then run beside each other."""
    count = r.sizes.units
    at_once = next(n for n in range(min(MOST_AT_ONCE, count), 0, -1) if count % n == 0)
    lax.fori_loop(
        0, count // at_once, lambda i, _: body([i * at_once + j for j in range(at_once)]), None
    )


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the product of two matrices over these axes, in float32."""
    numbers = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(
        x, y, numbers, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _index(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _key_head(r: Refs, unit):
    shape = r.sizes.shape
    return unit * r.sizes.unit_heads // (shape.heads // shape.key_heads)


def _column(x: jax.Array, head) -> jax.Array:
    """Returns the numbers [S, 1] of a head, of x [S, heads]."""
    return jnp.where(_index(x.shape, 1) == head, x, 0.0).sum(axis=1, keepdims=True)


def _heads_of(r: Refs, unit) -> list[Any]:
    return [unit * r.sizes.unit_heads + i for i in range(r.sizes.unit_heads)]


def _by_head(r: Refs, parts: list[jax.Array], axis: int) -> jax.Array:
    """Joins the parts of a unit's heads along an axis of its values: each where its head's are."""
    chosen = parts[0]
    if len(parts) > 1:
        shape = jnp.broadcast_shapes(chosen.shape, (1, LANES) if axis == 1 else (LANES, 1))
        head = _index(shape, axis) // r.sizes.shape.value_dim
        for i, part in enumerate(parts[1:], 1):
            chosen = jnp.where(head >= i, part, chosen)
    return chosen


def _sums(decay: jax.Array) -> jax.Array:
    """Returns the sums of decays [S, heads] up to each token."""
    shape = (len(decay), len(decay))
    ones = (_index(shape, 1) <= _index(shape, 0)).astype(jnp.float32)
    return _dot(ones, decay, (1, 0))


def _advance(r: Refs, slot) -> None:
    """Replaces the state before the block of the slot by that after it."""
    s = r.sizes
    sums = _sums(r.known[s.components - 1])
    total = sums[s.block_size - 1 :]
    weights = jnp.exp(total - sums)
    whole = jnp.exp(total)

    def advance(units):
        for unit in units:
            heads = _heads_of(r, unit)
            weight = _by_head(r, [_column(weights, head) for head in heads], 1)
            factor = _by_head(r, [_column(whole, head) for head in heads], 0)
            update = r.known[s.shape.key_heads + unit] * weight
            added = _dot(update, r.known[_key_head(r, unit)], (0, 0))
            _store_state(r, slot, unit, factor * _state(r, slot, unit) + added)

    _over_units(r, advance)


def _clear(r: Refs, slot) -> None:
    def clear(units):
        for unit in units:
            _store_state(r, slot, unit, jnp.zeros((LANES, LANES), jnp.float32))

    _over_units(r, clear)


def _of_block(r: Refs, component) -> jax.Array:
    """Returns a component of the inputs, [S, 128]."""
    x = r.x[component, 0]
    return x if r.sizes.tokens > 1 else jnp.broadcast_to(x, (r.sizes.block_size, LANES))


def _is_new(r: Refs, item) -> jax.Array:
    token = _index((r.sizes.block_size, LANES), 0)
    return (token >= r.work.begin[item]) & (token < r.work.end[item])


def _with_new(r: Refs, item, component, new: jax.Array) -> jax.Array:
    """Writes new tokens of a component into `known`. Other slots keep their bits, or are zeros if
    the row enters the block. Returns the component, with zeros for tokens that are not there.
    """
    keeps = r.work.source[item] == SAME
    token = _index(new.shape, 0)
    joined = jnp.where(_is_new(r, item), new, jnp.where(keeps, r.known[component], 0.0))
    r.known[component] = joined
    return jnp.where(token < r.work.end[item], joined, 0.0)


def _merge(r: Refs, item) -> jax.Array:
    """Writes the new keys and decays into `known`; returns the sums of all decays."""
    keys = r.sizes.shape.key_heads
    lax.fori_loop(
        0, keys, lambda key, _: (_with_new(r, item, key, _of_block(r, key)), None)[1], None
    )
    decay = _of_block(r, 2 * keys + r.sizes.units)
    return _sums(_with_new(r, item, r.sizes.components - 1, decay))


class Unit(NamedTuple):
    """What a unit's updates and outputs are made of."""

    number: Any
    from_state: jax.Array  # [S, 128] what the state gives for the queries
    weights: list[jax.Array]  # for each head, [S, S] of updates in outputs
    update: jax.Array  # [S, 128] zeros where there is no token
    system: list[jax.Array]  # for each head, A [S, S]; empty without the delta rule


def _compute_units(r: Refs, item, numbers: list[Any], sums: jax.Array) -> None:
    """Computes updates and outputs of a few units."""
    units = [_unit(r, item, number, sums) for number in numbers]
    updates = [unit.update for unit in units]
    if r.sizes.shape.delta and r.sizes.tokens > 1:
        begin = r.work.begin[item]
        end = r.work.end[item]

        def substitute(i, updates):
            return [
                _without(r, unit, update, i) for unit, update in zip(units, updates, strict=True)
            ]

        # what the last one gives is needed by none
        updates = lax.fori_loop(begin, end - 1, substitute, updates)
    for unit, update in zip(units, updates, strict=True):
        _with_new(r, item, r.sizes.shape.key_heads + unit.number, update)
        within = [_dot(weights, update, (1, 0)) for weights in unit.weights]
        y = unit.from_state + _by_head(r, within, 1)
        if r.sizes.tokens == 1:
            is_own = _index(y.shape, 0) == r.work.begin[item]
            y = jnp.where(is_own, y, 0.0).sum(axis=0, keepdims=True)
        r.y[unit.number, 0] = y


def _without(r: Refs, unit: Unit, update: jax.Array, i) -> jax.Array:
    """Subtracts what the update of token i gives for the keys of later tokens."""
    own = jnp.where(_index(update.shape, 0) == i, update, 0.0).sum(axis=0, keepdims=True)
    factors = _by_head(r, [_column(system, i) for system in unit.system], 1)
    return update - factors * own


def _unit(r: Refs, item, number, sums: jax.Array) -> Unit:
    s = r.sizes
    shape = s.shape
    size = s.block_size
    slot = r.work.slot[item]
    key_head = _key_head(r, number)
    token = _index((size, LANES), 0)
    key = jnp.where(token < r.work.end[item], r.known[key_head], 0.0)
    query = _of_block(r, shape.key_heads + key_head)
    value = _of_block(r, 2 * shape.key_heads + number)
    old = r.known[shape.key_heads + number]
    readers = jnp.concatenate([key, query], axis=0) if shape.delta else query
    given = _dot(readers, _state(r, slot, number), (1, 1))
    products = _dot(readers, key, (1, 1))
    heads = _heads_of(r, number)
    columns = [_column(sums, head) for head in heads]
    between = [_decay_between(column) for column in columns]
    decay = jnp.exp(_by_head(r, columns, 1))
    from_state = decay * given[-size:]
    weights = [products[-size:] * each for each in between]
    is_new = _is_new(r, item)
    known = jnp.where(token < r.work.begin[item], old, 0.0)
    if not shape.delta:
        update = jnp.where(is_new, value, known)
        return Unit(number, from_state, weights, update, [])
    all_rates = jnp.where(is_new, _of_block(r, 2 * shape.key_heads + s.units + 1), 0.0)
    rates = [_column(all_rates, head) for head in heads]
    square = (size, size)
    is_earlier = _index(square, 1) < _index(square, 0)
    system = [
        jnp.where(is_earlier, rate * products[:size] * each, 0.0)
        for rate, each in zip(rates, between, strict=True)
    ]
    target = _by_head(r, rates, 1) * (value - decay * given[:size])
    of_known = _by_head(r, [_dot(each, known, (1, 0)) for each in system], 1)
    return Unit(number, from_state, weights, jnp.where(is_new, target - of_known, known), system)


def _decay_between(sums: jax.Array) -> jax.Array:
    """Returns [S, S], of the sums [S, 1] of a head: the decay from a token to a later one, which is
    that of the row, and to itself. The others are 0.
    """
    size = len(sums)
    row = _index((size, size), 0)
    column = _index((size, size), 1)
    as_row = jnp.where(row == column, sums, 0.0).sum(axis=0, keepdims=True)
    return jnp.exp(jnp.where(column <= row, sums - as_row, HIDDEN))
