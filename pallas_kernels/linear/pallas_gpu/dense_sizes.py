"""How a product with a weight of 16 bits is cut into tiles, by its shape: numbers only.

Two things are chosen. The parts of the inputs depend on the weight alone, because they are the order
in which a sum is made. The rest depends on the tokens too, and changes no bit: the sizes of a tile,
and whether a cluster computes its parts at the same time. It is the choice with the smallest
estimated time, in cycles of a multiprocessor. No GPU has measured the estimates yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.tiles import Tiles

LANES = 64  # tokens of a consumer: rows of a WGMMA
SLAB = 64  # inputs that are copied and multiplied at a time: rows of 128 bytes
STORES = 2  # pieces of a consumer's result in shared memory
WIDTHS = range(64, 257, 32)  # outputs of a tile; WGMMA has up to 256
SEVERAL_PARTS = 128  # outputs of a tile, at most, whose parts one block adds in registers
PIECES = 64, 48, 32, 16  # columns of a result that are stored at a time
FEWEST_SLABS = 4  # of a part
FEWEST_STAGES = 3
MOST_STAGES = 8
# bytes of shared memory of a block of threads, less 2 KiB for barriers and for the compiler
SHARED = 232448 - 2048
CLUSTERED = 16  # multiprocessors are used in multiples of it by clusters: those of the smallest GPC

# Cycles and bytes a cycle, for one multiprocessor of 132 at 1.755 GHz. Its tensor cores do 4,096
# operations a cycle (NVIDIA H100 Tensor Core GPU Architecture, 2022); the others are guesses.
OPERATIONS = 4096
FROM_CACHE = 40  # bytes
FROM_MEMORY = 20  # bytes of weights
TO_PEERS = 32  # bytes
BEGINNING = 1500  # until the first slab is there, and behind the last store
ENDING = 500  # of a tile


class Sizes(NamedTuple):
    """The sizes of a product.

    rows: tokens of a tile. outputs: of the weight in a tile. gated: half of these are gates.
    parts: of the inputs. is_shared: a cluster of so many blocks computes a tile, a part each.
    stages: slabs in shared memory. blocks: of threads, at most, if a tile has one block.
    """

    rows: int
    outputs: int
    gated: bool
    parts: int
    is_shared: bool
    stages: int
    blocks: int

    @property
    def groups(self) -> int:
        """Consumers."""
        return self.rows // LANES

    @property
    def columns(self) -> int:
        """Of a tile's result."""
        return self.outputs // 2 if self.gated else self.outputs

    @property
    def shares(self) -> int:
        """Blocks that compute a tile, and finish some of its columns each."""
        return self.parts if self.is_shared else 1

    @property
    def block_columns(self) -> int:
        """Columns that a block finishes."""
        return self.columns // self.shares

    @property
    def piece(self) -> int:
        """Columns that are stored at a time."""
        return next(size for size in PIECES if self.block_columns % size == 0)


class Product(NamedTuple):
    """What sizes depend on.

    tokens: T. inputs: K. width: outputs of the result. gated: the weight has twice as many.
    parts: of the inputs. residual: whether one is added. itemsize: bytes of a result's number.
    """

    tokens: int
    inputs: int
    width: int
    gated: bool
    parts: int
    residual: bool
    itemsize: int


def parts_of(outputs: int, inputs: int, tiles: Tiles) -> int:
    """Returns the parts of the inputs of a weight without gates: a power of two.

    Few outputs are few tiles, which would leave multiprocessors without work.
    """
    parts = next((parts for most, parts in tiles.product_parts if outputs <= most), 1)
    while parts > 1 and inputs < parts * FEWEST_SLABS * SLAB:
        parts //= 2
    return parts


def sizes_of(product: Product, multiprocessors: int) -> Sizes:
    """Returns the sizes with the smallest estimate; of equal ones, those of the widest tile."""
    return ranked(product, multiprocessors)[0]


def ranked(product: Product, multiprocessors: int) -> list[Sizes]:
    """Returns all possible sizes, those with the smallest estimates first."""

    def key(sizes: Sizes) -> tuple[float, int]:
        return cycles(sizes, product, multiprocessors), -sizes.outputs

    return sorted(_possible(product, multiprocessors), key=key)


def _possible(product: Product, multiprocessors: int) -> Iterator[Sizes]:
    rows = LANES if product.tokens <= LANES else 2 * LANES
    for outputs in WIDTHS:
        for is_shared in {False, product.parts > 1}:
            sizes = Sizes(
                rows, outputs, product.gated, product.parts, is_shared, 0, multiprocessors
            )
            if sizes.block_columns % PIECES[-1] or (
                product.parts > sizes.shares and outputs > SEVERAL_PARTS
            ):
                continue
            room = SHARED - shared_bytes(sizes, product)
            stages = min(MOST_STAGES, room // stage_bytes(sizes))
            if stages >= FEWEST_STAGES:
                yield sizes._replace(stages=stages)


def stage_bytes(sizes: Sizes) -> int:
    """Returns the bytes of a slab in shared memory."""
    return 2 * SLAB * (sizes.rows + sizes.outputs)


def shared_bytes(sizes: Sizes, product: Product) -> int:
    """Returns the bytes of shared memory of one block of threads.

    Barriers and the compiler's scratch memory are not counted.
    """
    results = STORES * sizes.rows * sizes.piece * product.itemsize
    residual = 2 * sizes.rows * sizes.block_columns * product.residual
    parts = 4 * sizes.rows * sizes.columns * sizes.is_shared
    return sizes.stages * stage_bytes(sizes) + results + residual + parts


def tile_counts(sizes: Sizes, product: Product) -> tuple[int, int]:
    """Returns the tiles of tokens, and those of outputs."""
    return -(-product.tokens // sizes.rows), -(-product.width // sizes.columns)


def cycles(sizes: Sizes, product: Product, multiprocessors: int) -> float:
    """Returns an estimate of the time."""
    of_tokens, of_outputs = tile_counts(sizes, product)
    at_once = multiprocessors
    if sizes.shares > 1:
        at_once = multiprocessors // CLUSTERED * CLUSTERED // sizes.shares
    turns = -(-of_tokens * of_outputs // at_once)
    slabs = -(-product.inputs // SLAB // sizes.shares)
    of_slab = max(
        2 * sizes.rows * sizes.outputs * SLAB / OPERATIONS,
        stage_bytes(sizes) / FROM_CACHE,
        2 * sizes.outputs * SLAB / of_tokens / FROM_MEMORY,
    )
    exchanged = 0.0
    if sizes.shares > 1:
        exchanged = 4 * sizes.rows * (sizes.columns - sizes.block_columns) / TO_PEERS + ENDING
    return BEGINNING + turns * (slabs * of_slab + ENDING + exchanged)
