"""Products of a float16 number and integers of 8 bits: the scales of a block that has parts."""

from __future__ import annotations

import numpy as np

# Magnitudes of the largest factor of a block, the most frequent ones first: of 6 bits without a sign,
# and of 8 with one
LARGEST_FACTORS = (63, 128, *(x for x in range(127, 0, -1) if x != 63))


def factored(products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns float16 scales [...], as float32, and factors [..., parts] int8 whose products are
    these float32 numbers [..., parts], to the bit.

    Raises:
        ValueError: there are none for some of the products.
    """
    shape = products.shape
    rows = products.reshape(-1, shape[-1])
    largest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[:, None], -1)[:, 0]
    zeros = rows == 0
    # a factor of 0 has the sign of the scale
    zero_signs = np.copysign(1, np.take_along_axis(rows, zeros.argmax(-1)[:, None], -1)[:, 0])
    scales = np.where(largest == 0, np.copysign(np.float32(0), zero_signs), np.float32(np.nan))
    factors = np.zeros(rows.shape, np.int8)
    missing = np.flatnonzero(largest)
    for magnitude in LARGEST_FACTORS:
        if not len(missing):
            break
        exact = rows[missing]
        signs = np.copysign(1, largest[missing]) * (-1 if magnitude == 128 else 1)
        signs = np.where(zeros[missing].any(-1), zero_signs[missing], signs)
        tried = signs * np.abs(largest[missing]) / magnitude
        tried = tried.astype(np.float16).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            numbers = np.rint(exact / tried[:, None])
        fits = np.isfinite(numbers) & (numbers >= -128) & (numbers <= 127)
        fits &= np.where(fits, numbers, 0) * tried[:, None] == exact
        is_exact = fits.all(-1)
        scales[missing[is_exact]] = tried[is_exact]
        factors[missing[is_exact]] = numbers[is_exact].astype(np.int8)
        missing = missing[~is_exact]
    if len(missing):
        raise ValueError(
            f"the scales {rows[missing[0]].tolist()} of the parts of a block are not a float16 number "
            "times integers of 8 bits; store the matrix in another format, or give its own rows"
        )
    return scales.reshape(shape[:-1]), factors.reshape(shape)
