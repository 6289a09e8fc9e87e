"""Matrices that are stored in blocks: a few neighbouring inputs of a row share a scale, and may share
an offset.

    weight = scale * (number - zero) + offset

It is computed in float32. A row is bytes, block after block. A block has its scale, then its offset
if it has one, then its numbers: a byte each, with a sign, or two in a byte, the first one in the
lower half. Numbers of 5 or 6 bits have their lower four bits so. Behind these are the n highest ones
(1 or 2), in words of 4 bytes for 32 / n inputs: those of input 8 g + d begin at bit 4 d + n g. So a
shift by n g bits brings those of 8 neighbouring inputs to the places that their digits have in a word.

A block may have parts, of equally many neighbouring inputs. Then it has a scale and an offset for all
of them, and each part has a factor for either, a signed integer of 8 bits. Behind the scale and the
offset are the factors of scales, then those of offsets, then the numbers of one part after the other.
A product of a float16 number and a factor is exact in float32.

Numbers are integers, or small floats: "e4m3" are float8_e4m3fn, and "e2m1" have a sign, two bits of
exponent and one of mantissa (OCP Microscaling Formats, 2023). A scale of "e8m0" is a power of two,
2 ** (byte - 127), of the same source.

The first names are those of the encodings of GGUF files whose numbers a format has. Those of
`Q4_K`, `Q5_K` and `Q6_K` with "super" are blocks with parts, as in the file; those without have the
products in float32, and "k_super" is of matrices in several of them that are joined. The others are
of checkpoints in other layouts, with the inputs of a block; their scales are float32, which holds
those of 16 bits too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.linear.factors import factored

SCALE_BYTES = {"e8m0": 1, "float16": 2, "float32": 4}
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
NUMBERS = ("integers", "e4m3", "e2m1")
DIGIT_BITS = 4  # of a number, or the lower ones of one that has a few more
DIGITS_OF_WORD = 8


class Blocks(NamedTuple):
    """How a row is stored.

    inputs: of a block.
    bits: of a number, 4, 5, 6 or 8.
    zero: what is subtracted from a number of less than 8 bits.
    scale: the dtype of scales and offsets.
    offset: whether a block has one.
    numbers: one of NUMBERS.
    parts: of a block, if it has any; else 1.
    """

    name: str
    inputs: int
    bits: int
    zero: int
    scale: str
    offset: bool
    numbers: str = NUMBERS[0]
    parts: int = 1

    @property
    def part(self) -> Blocks:
        """The format whose blocks are these parts, with a scale each."""
        if self.parts == 1:
            return self
        return self._replace(inputs=self.inputs // self.parts, scale="float32", parts=1)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of all parts."""
        return self.parts * (1 + self.offset) if self.parts > 1 else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, or of an offset."""
        return SCALE_BYTES[self.scale]

    @property
    def number_bytes(self) -> int:
        """Bytes of all numbers of a block."""
        return self.inputs * self.bits // 8

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return self.scale_bytes * (1 + self.offset) + self.factor_bytes + self.number_bytes

    @property
    def bits_apart(self) -> int:
        """The number of the highest bits of a number that are apart from the others."""
        return self.bits - DIGIT_BITS if self.bits < 8 else 0

    @property
    def digit_bits(self) -> int:
        """Bits of a number that are together."""
        return self.bits - self.bits_apart

    @property
    def digit_bytes(self) -> int:
        """Bytes of the numbers of a block without the bits that are apart."""
        return self.inputs * self.digit_bits // 8

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(bytes, bytes of a unit) of what a block has. A unit is a scale, an offset, a factor, a
        small float of 8 bits, 4 integers of 8 bits, 8 digits of 4, or a word of bits that are apart.
        """
        scale = self.scale_bytes
        header = [(scale, scale)] * (1 + self.offset)
        factors = [(self.factor_bytes, 1)] if self.parts > 1 else []
        part = self.part
        digits = part.digit_bytes, 1 if self.numbers == "e4m3" else 4
        highest = [(part.number_bytes - part.digit_bytes, 4)] if self.bits_apart else []
        return [*header, *factors, *[digits, *highest] * self.parts]

    @property
    def integers(self) -> bool:
        """Whether its numbers are integers."""
        return self.numbers == NUMBERS[0]

    @property
    def code(self) -> int:
        """All of it but the name, in one number."""
        code = self.inputs
        last = 8 * (self.zero >= 16) + 2 * NUMBERS.index(self.numbers) + self.offset
        for field in (self.bits, self.zero % 16, self.scale_bytes, last):
            code = 16 * code + field
        return code + (self.parts - 1 << 28)

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
        if self.parts > 1:
            same_scale = self.inputs == other.inputs and self.scale == other.scale
            return other.parts > 1 and same_scale and self.part.holds(other.part)
        other = other.part
        widens = self.numbers == NUMBERS[0] and self.bits == 8 and other.numbers != "e4m3"
        has_numbers = (
            self.numbers == other.numbers
            and self.zero >= other.zero
            and 2**self.bits - self.zero >= 2**other.bits - other.zero
        )
        return (
            other.inputs % self.inputs == 0
            and self.bits >= other.bits
            and (widens or has_numbers)
            and self.scale in (other.scale, "float32")
            and self.offset >= other.offset
        )


BLOCKS = {
    blocks.name: blocks
    for blocks in (
        Blocks("q4_0", 32, 4, 8, "float16", False),
        Blocks("q4_1", 32, 4, 0, "float16", True),
        Blocks("q5_0", 32, 5, 16, "float16", False),
        Blocks("q5_1", 32, 5, 0, "float16", True),
        Blocks("q8_0", 32, 8, 0, "float16", False),
        Blocks("q4_k", 32, 4, 0, "float32", True),
        Blocks("q5_k", 32, 5, 0, "float32", True),
        Blocks("q6_k", 16, 6, 32, "float32", False),
        Blocks("q4_k_super", 256, 4, 0, "float16", True, parts=8),
        Blocks("q5_k_super", 256, 5, 0, "float16", True, parts=8),
        Blocks("q6_k_super", 256, 6, 32, "float16", False, parts=16),
        Blocks("k_super", 256, 6, 32, "float16", True, parts=16),  # holds all of these three
        Blocks("any", 16, 8, 0, "float32", True),  # holds all but small floats of 8 bits
        *[Blocks(f"int4_{n}", n, 4, 8, "float32", False) for n in (128, 64, 32)],
        *[Blocks(f"uint4_{n}", n, 4, 0, "float32", True) for n in (128, 64)],
        *[Blocks(f"int8_{n}", n, 8, 0, "float32", False) for n in (128, 32, 16)],
        *[Blocks(f"uint8_{n}", n, 8, 0, "float32", True) for n in (128, 32)],
        *[Blocks(f"fp8_{n}", n, 8, 0, "float32", False, "e4m3") for n in (128, 32)],
        Blocks("mxfp4", 32, 4, 0, "e8m0", False, "e2m1"),
    )
}


class Parts(NamedTuple):
    """What rows of blocks store. Parts of a block count as blocks here, and a scale is the product
    with the factor.

    numbers: [..., blocks, inputs of a block] int8, after their zero is subtracted; float8_e4m3fn if
        they are "e4m3". Those of "e2m1" are doubled, so they are integers, and their scales are
        halved.
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
    scales = scales_of(cells[..., :size], blocks)
    offsets = scales_of(cells[..., size : 2 * size], blocks) if blocks.offset else None
    numbers = cells[..., blocks.bytes - blocks.number_bytes :]
    if blocks.parts > 1:
        count = blocks.parts
        start = size * (1 + blocks.offset)
        scales = _products(scales, cells[..., start : start + count])
        if offsets is not None:
            offsets = _products(offsets, cells[..., start + count : start + 2 * count])
        blocks = blocks.part
        numbers = numbers.reshape(*rows.shape[:-1], -1, blocks.number_bytes)
    if blocks.bits == 8:
        dtype = "int8" if blocks.numbers == NUMBERS[0] else FLOAT8
        return Parts(numbers.view(dtype), scales, offsets)
    if blocks.bits_apart:
        digits = _halves(numbers[..., : blocks.digit_bytes], xp)
        highest = _highest_bits(numbers[..., blocks.digit_bytes :], blocks.bits_apart, xp)
        digits = digits | highest << DIGIT_BITS
    else:
        digits = _halves(numbers, xp)
    numbers = digits.astype("int8")
    if blocks.numbers == "e2m1":
        return Parts(doubled_numbers(numbers, xp), scales, offsets)
    return Parts(numbers - xp.int8(blocks.zero), scales, offsets)


def _products(scales: Any, factors: Any) -> Any:
    """Scales [..., blocks] times factors [..., blocks, parts] in bytes: [..., blocks * parts]."""
    products = scales[..., None] * factors.view("int8").astype("float32")
    return products.reshape(*scales.shape[:-1], -1)


def _halves(packed: Any, xp: Any) -> Any:
    """The digits of 4 bits [..., 2 n] of bytes [..., n]."""
    pairs = xp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _in_halves(digits: Any) -> Any:
    """The inverse of `_halves`."""
    return digits[..., ::2] | digits[..., 1::2] << 4


def _highest_bits(packed: Any, count: int, xp: Any) -> Any:
    """The highest bits [..., inputs] of numbers, of the bytes of their words.

    count: of these bits of a number.
    """
    digits = _halves(packed, xp).reshape(*packed.shape[:-1], -1, 1, DIGITS_OF_WORD)
    bits = digits >> _shifts(count, xp) & (2**count - 1)
    return bits.reshape(*packed.shape[:-1], -1)


def _words_of_bits(bits: Any, count: int, xp: Any) -> Any:
    """The inverse of `_highest_bits`."""
    shifts = _shifts(count, xp)
    cells = bits.reshape(*bits.shape[:-1], -1, len(shifts), DIGITS_OF_WORD)
    digits = (cells << shifts).sum(-2, dtype="uint8")
    return _in_halves(digits.reshape(*bits.shape[:-1], -1))


def _shifts(count: int, xp: Any) -> Any:
    """The places in a digit of the highest bits of neighbouring words of digits, [words, 1]."""
    return xp.arange(0, DIGIT_BITS, count, dtype="uint8")[:, None]


def scales_of(cells: Any, blocks: Blocks) -> Any:
    """Returns the scales or offsets [..., blocks] of bytes [..., blocks, bytes of one], float32;
    "e8m0" are halved.
    """
    if blocks.scale == "e8m0":
        return (cells[..., 0].astype("int32") << 23).view("float32") * 0.5
    return cells.view(blocks.scale)[..., 0].astype("float32")


def doubled_numbers(digits: Any, xp: Any) -> Any:
    """Returns twice the "e2m1" numbers of digits of 4 bits, int8."""
    exponent = digits >> 1 & 3
    mantissa = digits & 1
    magnitude = xp.where(exponent == 0, mantissa, (mantissa + 2) << exponent >> 1)
    return xp.where(digits >> 3 == 0, magnitude, -magnitude)


DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the "e2m1" numbers without a sign, in their order


def digits_of_doubled(numbers: Any, xp: Any) -> Any:
    """Returns the digits of "e2m1" numbers that are doubled, uint8: the inverse of
    `doubled_numbers`.
    """
    magnitudes = xp.searchsorted(xp.asarray(DOUBLED, "int8"), abs(numbers))
    return (magnitudes + 8 * (numbers < 0)).astype("uint8")


def weights_of(parts: Parts) -> Any:
    """Returns the weights [..., inputs] of parts, float32."""
    weights = parts.scales[..., None] * parts.numbers.astype("float32")
    if parts.offsets is not None:
        weights = weights + parts.offsets[..., None]
    return weights.reshape(*weights.shape[:-2], -1)


def restored(rows: Any, blocks: Blocks, xp: Any) -> Any:
    """Returns the weights [..., inputs] of rows [..., bytes], as a float32 array of `xp`."""
    return weights_of(parts_of(rows, blocks, xp))


def rows_of_parts(parts: Parts, blocks: Blocks, xp: Any) -> Any:
    """Returns rows [..., bytes], the inverse of `parts_of`. Offsets that are None become -0, which
    changes no bit of a weight.
    """
    numbers, scales, offsets = parts
    if blocks.offset and offsets is None:
        offsets = xp.full_like(scales, -0.0)
    if blocks.parts > 1:
        return _rows_with_factors(Parts(numbers, scales, offsets), blocks, xp)
    cells = [bytes_of_scales(scales, blocks)]
    if blocks.offset:
        cells.append(bytes_of_scales(offsets, blocks))
    cells += _bytes_of_numbers(numbers, blocks, xp)
    rows = xp.concatenate(cells, axis=-1)
    return rows.reshape(*rows.shape[:-2], -1)


def _rows_with_factors(parts: Parts, blocks: Blocks, xp: Any) -> Any:
    """`rows_of_parts` for blocks that have parts, of numpy arrays alone."""
    outer = (*parts.scales.shape[:-1], -1)
    scales = []
    factors = []
    for products in (parts.scales, parts.offsets) if blocks.offset else (parts.scales,):
        block_scales, block_factors = factored(products.reshape(*outer, blocks.parts))
        scales.append(bytes_of_scales(block_scales, blocks))
        factors.append(block_factors.view("uint8"))
    numbers = xp.concatenate(_bytes_of_numbers(parts.numbers, blocks.part, xp), axis=-1)
    numbers = numbers.reshape(*outer, blocks.number_bytes)
    rows = xp.concatenate([*scales, *factors, numbers], axis=-1)
    return rows.reshape(*rows.shape[:-2], -1)


def _bytes_of_numbers(numbers: Any, blocks: Blocks, xp: Any) -> list[Any]:
    """The bytes of numbers [..., blocks, inputs], in arrays [..., blocks, bytes] that follow one
    another.
    """
    if blocks.bits == 8:
        dtype = "int8" if blocks.numbers == NUMBERS[0] else FLOAT8
        return [numbers.astype(dtype).view("uint8")]
    if blocks.numbers == "e2m1":
        digits = digits_of_doubled(numbers, xp)
    else:
        digits = (numbers + xp.int8(blocks.zero)).astype("uint8")
    if not blocks.bits_apart:
        return [_in_halves(digits)]
    highest = _words_of_bits(digits >> DIGIT_BITS, blocks.bits_apart, xp)
    return [_in_halves(digits & 15), highest]


def bytes_of_scales(scales: Any, blocks: Blocks) -> Any:
    """Returns the bytes [..., blocks, bytes of one] uint8, the inverse of `scales_of`."""
    if blocks.scale == "e8m0":
        return ((scales[..., None] * 2).view("int32") >> 23).astype("uint8")
    return scales[..., None].astype(blocks.scale).view("uint8")


def recoded(rows: Any, blocks: Blocks, to: Blocks, xp: Any) -> Any:
    """Returns rows in another format, which `holds` this one, with the same weights."""
    if to == blocks:
        return rows
    numbers, scales, offsets = parts_of(rows, blocks, xp)
    repeats = blocks.part.inputs // to.part.inputs
    numbers = numbers.reshape(*numbers.shape[:-2], -1, to.part.inputs)
    scales = xp.repeat(scales, repeats, axis=-1)
    offsets = None if offsets is None else xp.repeat(offsets, repeats, axis=-1)
    return rows_of_parts(Parts(numbers, scales, offsets), to, xp)
