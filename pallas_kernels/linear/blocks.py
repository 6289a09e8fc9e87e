"""Matrices that are stored in blocks: a few neighbouring inputs of a row share a scale, and may share
an offset.

    weight = scale * (number - zero) + offset

It is computed in float32. A row is bytes, block after block. A block has its scale, then its offset
if it has one, then its numbers: a byte each, with a sign, or two in a byte, the first one in the
lower half.

Names are those of the encodings of GGUF files whose numbers a format has. The scales of a file's
`Q4_K`, `Q5_K` and `Q6_K` are products of two numbers, which float32 holds exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Blocks(NamedTuple):
    """How a row is stored.

    inputs: of a block.
    bits: of a number, 4 or 8.
    zero: what is subtracted from a number of 4 bits.
    scale: the dtype of scales and offsets.
    offset: whether a block has one.
    """

    name: str
    inputs: int
    bits: int
    zero: int
    scale: str
    offset: bool

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, or of an offset."""
        return 2 if self.scale == "float16" else 4

    @property
    def number_bytes(self) -> int:
        """Bytes of all numbers of a block."""
        return self.inputs * self.bits // 8

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return self.scale_bytes * (1 + self.offset) + self.number_bytes

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(bytes, bytes of a unit) of the parts of a block. A unit is a scale, an offset, a number
        of 8 bits or 8 numbers of 4.
        """
        scale = self.scale_bytes
        header = [(scale, scale)] * (1 + self.offset)
        return [*header, (self.number_bytes, 1 if self.bits == 8 else 4)]

    @property
    def code(self) -> int:
        """All of it but the name, in one number."""
        code = self.inputs
        for field in (self.bits, self.zero, self.scale_bytes, int(self.offset)):
            code = 16 * code + field
        return code

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row of so many inputs.

        Raises:
            ValueError: they are not whole blocks.
        """
        if inputs % self.inputs:
            raise ValueError(
                f"a row has {inputs} inputs; {self.name} needs a multiple of {self.inputs}, the "
                "inputs of a block"
            )
        return inputs // self.inputs * self.bytes

    def holds(self, other: Blocks) -> bool:
        """Whether it can store the weights of another format exactly, by `recoded`."""
        return (
            other.inputs % self.inputs == 0
            and self.bits >= other.bits
            and (self.bits == 8 or self.zero == other.zero)
            and self.scale_bytes >= other.scale_bytes
            and self.offset >= other.offset
        )


BLOCKS = {
    blocks.name: blocks
    for blocks in (
        Blocks("q4_0", 32, 4, 8, "float16", False),
        Blocks("q4_1", 32, 4, 0, "float16", True),
        Blocks("q8_0", 32, 8, 0, "float16", False),
        Blocks("q4_k", 32, 4, 0, "float32", True),
        Blocks("q5_k", 32, 8, 0, "float32", True),
        Blocks("q6_k", 16, 8, 0, "float32", False),
        Blocks("any", 16, 8, 0, "float32", True),  # holds each of the others
    )
}


class Parts(NamedTuple):
    """What rows of blocks store.

    numbers: [..., blocks, inputs of a block] int8, after their zero is subtracted.
    scales: [..., blocks] float32.
    offsets: [..., blocks] float32; None if blocks have none.
    """

    numbers: Any
    scales: Any
    offsets: Any


def parts_of(rows: Any, blocks: Blocks, xp: Any) -> Parts:
    """Returns the parts of rows [..., bytes], as arrays of `xp`, numpy or jax.numpy."""
    cells = rows.reshape(*rows.shape[:-1], -1, blocks.bytes)
    size = blocks.scale_bytes
    scales = cells[..., :size].view(blocks.scale)[..., 0].astype("float32")
    offsets = None
    if blocks.offset:
        offsets = cells[..., size : 2 * size].view(blocks.scale)[..., 0].astype("float32")
    numbers = cells[..., blocks.bytes - blocks.number_bytes :]
    if blocks.bits == 8:
        return Parts(numbers.view("int8"), scales, offsets)
    pairs = xp.stack([numbers & 15, numbers >> 4], axis=-1)
    numbers = pairs.reshape(*numbers.shape[:-1], -1).astype("int8")
    return Parts(numbers - xp.int8(blocks.zero), scales, offsets)


def restored(rows: Any, blocks: Blocks, xp: Any) -> Any:
    """Returns the weights [..., inputs] of rows [..., bytes], as a float32 array of `xp`."""
    numbers, scales, offsets = parts_of(rows, blocks, xp)
    weights = scales[..., None] * numbers.astype("float32")
    if offsets is not None:
        weights = weights + offsets[..., None]
    return weights.reshape(*rows.shape[:-1], -1)


def rows_of_parts(parts: Parts, blocks: Blocks, xp: Any) -> Any:
    """Returns rows [..., bytes], the inverse of `parts_of`. Offsets that are None become -0, which
    changes no bit of a weight.
    """
    numbers, scales, offsets = parts
    cells = [_bytes_of(scales, blocks)]
    if blocks.offset:
        negative_zeros = xp.full_like(scales, -0.0)
        cells.append(_bytes_of(negative_zeros if offsets is None else offsets, blocks))
    if blocks.bits == 8:
        cells.append(numbers.astype("int8").view("uint8"))
    else:
        digits = (numbers + xp.int8(blocks.zero)).astype("uint8")
        cells.append(digits[..., ::2] | digits[..., 1::2] << 4)
    rows = xp.concatenate(cells, axis=-1)
    return rows.reshape(*rows.shape[:-2], -1)


def _bytes_of(scales: Any, blocks: Blocks) -> Any:
    return scales[..., None].astype(blocks.scale).view("uint8")


def recoded(rows: Any, blocks: Blocks, to: Blocks, xp: Any) -> Any:
    """Returns rows in another format, which `holds` this one, with the same weights."""
    if to == blocks:
        return rows
    numbers, scales, offsets = parts_of(rows, blocks, xp)
    repeats = blocks.inputs // to.inputs
    numbers = numbers.reshape(*numbers.shape[:-2], -1, to.inputs)
    scales = xp.repeat(scales, repeats, axis=-1)
    offsets = None if offsets is None else xp.repeat(offsets, repeats, axis=-1)
    return rows_of_parts(Parts(numbers, scales, offsets), to, xp)
