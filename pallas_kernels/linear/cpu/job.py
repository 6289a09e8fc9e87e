"""A job: all items of a call of the kernel, shared by the threads, as words in memory."""

from __future__ import annotations

from typing import Any

from pallas_kernels.linear.cpu.vectors import PANEL
from pallas_kernels.shared.cpu.memory import load_int, load_word
from pallas_kernels.shared.cpu.translate import Option, compiled
from pallas_kernels.shared.cpu.vectors import FULL

# Constants of a variant: bytes of a number of x and of the weight, and whether it has products of low rank
X_SIZE: Any = Option("x_size")
KIND: Any = Option("kind")
LOW: Any = Option("low_rank")

# Words of a job: counters that the threads share, each in a cache line of its own, then constants that the handler
# wrote.
NEXT_TILE, TILES_DONE, NEXT, DONE = 64, 128, 192, 256
TILES, ITEMS = 320, 328  # numbers of items
X, K, NORM, NORM_WEIGHT, EPS = 336, 352, 360, 368, 376  # NORM: 0, RMS or RMS_PLUS_ONE; EPS: float32
WEIGHT, PANELS, PANEL_BYTES = 384, 400, 408  # panels of one matrix
FIRST, LAST = 416, 424  # the outputs that are wanted, of one matrix
SCALES, BIAS, ACTIVATION, RESIDUAL = (
    432,
    440,
    448,
    456,
)  # addresses, or 0; ACTIVATION: 0, SILU or GELU_TANH
OUTPUTS, OUT, OUT_SIZE, WIDTH = (
    464,
    472,
    480,
    488,
)  # outputs of one matrix; of the result: address, bytes, row length
PACKED, TILE_BYTES, STEPS = (
    496,
    504,
    512,
)  # of packed tiles; STEPS: of a panel, an input each or a pair of them
CHUNKS, FIRST_PANEL, WANTED, GROUP = (
    520,
    528,
    536,
    544,
)  # items: chunks of tiles by groups of panels
TABLE, CHUNK_TABLE = 552, 560
WORDS = 568  # of a packed token for a step: 2 if the CPU has no instruction for pairs
WORKERS = 576  # threads at most
# Of products of low rank: addresses of factors, slots, ranks and the tokens' products with `a`; 0 without them
LOW_A, LOW_B, SLOTS, RANKS, LOW_X = 584, 592, 600, 608, 616
LOW_ROWS, LOW_K, LOW_HALVES = (
    624,
    632,
    640,
)  # rows of `a`, the length of one, and halves of panels of a slot of `b`
ORDER = 648  # address of the tokens in the order of the tiles; 0: as they come
JOB_BYTES = 656
TILE_WORDS, CHUNK_WORDS = (
    3,
    2,
)  # a tile: place of its first row, rows, matrix; a chunk: first tile, tiles

RMS, RMS_PLUS_ONE = 1, 2


@compiled
def up(size, multiple):
    return -(-size // multiple) * multiple


@compiled
def bytes_of_row(k):
    return 4 * (up(k, FULL) + 2 * FULL)


@compiled
def token_at(job, place):
    """The row of x and of the result at a place of the tiles."""
    order = load_word(job + ORDER) if LOW else 0
    return place if order == 0 else load_int(order + 4 * place)


@compiled
def halves(job, panel, half):
    """Returns (first, last) outputs of one matrix in a half of a panel; none if they are not wanted."""
    if load_word(job + ACTIVATION) != 0:
        first, end = FULL * panel, load_word(job + OUTPUTS) // 2
    else:
        first, end = (
            PANEL * panel + FULL * half,
            min(load_word(job + OUTPUTS), load_word(job + LAST)),
        )
        if first < load_word(job + FIRST):
            return first, first
    return first, max(first, min(first + FULL, end))
