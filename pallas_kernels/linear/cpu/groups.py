"""The layout of a packed token whose numbers are rounded to 8 bits (`rounded.py`).

A group of at most GROUP inputs of a block is words of 32 bits, one after the other:

    signed bytes of four inputs, in the order in which words of the panel have them
    the factor, float32: an input is the factor times its byte
    minus the digit of zero times the sum of the bytes, int32; not if that digit is 0
    the factor times the sum of the bytes, float32; only if the blocks have offsets
"""

from __future__ import annotations

from pallas_kernels.linear.blocks import Blocks

GROUP = 32
WORD_BYTES = 4  # bytes of a word
MIDDLE_DIGIT = 128  # of 8 bits: a signed number is a digit when its highest bit is inverted


def group_inputs(blocks: Blocks) -> int:
    return min(GROUP, blocks.part.inputs)


def digit_zero(blocks: Blocks) -> int:
    """Returns the digit of a number that is 0."""
    return MIDDLE_DIGIT if blocks.bits == 8 else blocks.zero


def group_words(blocks: Blocks) -> int:
    return group_inputs(blocks) // WORD_BYTES + 1 + (digit_zero(blocks) != 0) + blocks.offset


def block_words(blocks: Blocks) -> int:
    return blocks.inputs // group_inputs(blocks) * group_words(blocks)
