"""A job: all items of a call of the kernel, shared by the threads, as words in memory."""

from __future__ import annotations

from typing import Any

from pallas_kernels.linear.cpu.vectors import PANEL
from pallas_kernels.shared.cpu.memory import load_int, load_word
from pallas_kernels.shared.cpu.translate import Option, compiled
from pallas_kernels.shared.cpu.vectors import FULL

# Constants of a variant
X_SIZE: Any = Option("x_size")  # bytes of a number of x
WEIGHT_SIZE: Any = Option("kind")  # bytes of a number of the weight; of blocks: `Blocks.code`
STEP_INPUTS: Any = Option("step_inputs")  # of a block; 1 otherwise
STEP_BYTES: Any = Option("step_bytes")  # of 32 outputs
LOW: Any = Option("low_rank")  # whether it has products of low rank
# Words of a step of a packed token whose numbers are rounded to 8 bits (`rounded.py`); 0 if they
# are not
ROUNDED_WORDS: Any = Option("rounded_words")
# Whether panels of blocks that many tiles use are widened before they are multiplied
WIDENS: Any = Option("widens")

# Words of a job: counters that the threads share, each in a cache line of its own, then constants
# that the handler wrote.
NEXT_TILE = 64
TILES_DONE = 128
BEGUN = 192  # threads that began with items
ITEMS_DONE = 256
TILES = 320  # the number of tiles, each an item of the packing
ITEMS = 328  # the number of items of the product
X = 336
K = 352
NORM = 360  # 0, RMS or RMS_PLUS_ONE
NORM_WEIGHT = 368
EPS = 376  # float32
WEIGHT = 384
PANELS = 400  # of one matrix
PANEL_BYTES = 408
FIRST = 416  # the first output that is computed, of one matrix
END = 424  # the last output that is computed, + 1
# Addresses, or 0
SCALES = 432
BIAS = 440
ACTIVATION = 448  # 0, SILU or GELU_TANH
RESIDUAL = 456
OUTPUTS = 464  # the number of outputs of one matrix
OUT = 472  # address of the result
OUT_SIZE = 480  # bytes of a number of the result
WIDTH = 488  # numbers in a row of the result
PACKED = 496  # address of the packed tiles
TILE_BYTES = 504  # of a packed tile
STEPS = 512  # of a panel: an input each, or a pair of them, or a block
# An item is a chunk of tiles by a group of panels.
CHUNKS = 520
FIRST_PANEL = 528
COMPUTED_PANELS = 536
GROUP = 544  # panels of a group
TABLE = 552  # address of the tiles
CHUNK_TABLE = 560  # address of the chunks
# words that a packed token has for a step of a panel: 1, or 2 if a step is a pair of inputs and the
# CPU has no instruction for pairs, or the inputs of a block, or ROUNDED_WORDS
WORDS = 568
# Items are in segments of neighbours. A thread takes those of one segment, one after the other, and
# then helps with the next one.
SEGMENTS = 576
COUNTERS = 656  # address of the number of items that were taken, of each segment
COUNTER_BYTES = 64  # a cache line of its own
# Of products of low rank: addresses of factors, slots, ranks and the tokens' products with `a`; 0
# without them
LOW_A = 584
LOW_B = 592
SLOTS = 600
RANKS = 608
LOW_X = 616
LOW_ROWS = 624  # rows of `a`
LOW_K = 632  # numbers in a row of `a`
LOW_HALVES = 640  # halves of panels of a slot of `b`
ORDER = 648  # address of the tokens in the order of the tiles; 0: as they come
JOB_BYTES = 664
# Byte offsets in an entry of the table of tiles
TILE_PLACE = 0  # place of its first row
TILE_ROWS = 8
TILE_MATRIX = 16
TILE_WORDS = 3
# Byte offsets in an entry of the table of chunks
CHUNK_FIRST_TILE = 0
CHUNK_TILE_COUNT = 8
CHUNK_WORDS = 2

RMS = 1
RMS_PLUS_ONE = 2


@compiled
def rounded_up(size, multiple):
    return -(-size // multiple) * multiple


@compiled
def bytes_of_row(k):
    """Returns the bytes of a row of K float32 numbers in scratch memory, with two vectors more."""
    return 4 * (rounded_up(k, FULL) + 2 * FULL)


@compiled
def token_at(job, place):
    """Returns the row of x, and of the result, at a place of the tiles."""
    order = load_word(job + ORDER) if LOW else 0
    return place if order == 0 else load_int(order + 4 * place)


@compiled
def half_outputs(job, panel, half):
    """Returns (first, end) of the outputs of one matrix that a half of a panel computes.

    If the call does not ask for this half, first and end are equal.
    """
    if load_word(job + ACTIVATION) != 0:
        first = FULL * panel
        end = load_word(job + OUTPUTS) // 2
    else:
        first = PANEL * panel + FULL * half
        end = min(load_word(job + OUTPUTS), load_word(job + END))
        if first < load_word(job + FIRST):
            return first, first
    return first, max(first, min(first + FULL, end))
