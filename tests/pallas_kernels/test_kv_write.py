"""Writing keys and values into pages: the contract, by XLA's scatter and by the TPU kernel,
interpreted.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write
from pallas_kernels.races import without_races
from pallas_kernels.shared.tpu import row_size
from tests.pallas_kernels.test_paged_attention_tpu import SMALL
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations


class Case(NamedTuple):
    """Tokens (first position, number) of sequences, each with pages of its own, then padding
    tokens.
    """

    rows: tuple[tuple[int, int], ...] = ((5, 20), (17, 1), (3, 1), (0, 13), (15, 7))
    padding: int = 6
    heads: int = 2
    d: int = 64
    s: int = 16
    dtype: str = "bfloat16"

    def arrays(self) -> tuple[np.ndarray, ...]:
        """k_pages, v_pages [P, K, S, D], k, v [T, K, D], slots [T]."""
        rng = np.random.default_rng(0)
        slots = []
        page = 1
        for begin, count in self.rows:
            position = np.arange(begin, begin + count)
            slots += list((page + position // self.s) * self.s + position % self.s)
            page += -(-(begin + count) // self.s)
        t = len(slots) + self.padding
        new = rng.standard_normal((2, t, self.heads, self.d), np.float32)
        pages = rng.standard_normal((2, page, self.heads, self.s, self.d), np.float32).astype(
            jnp.dtype(self.dtype)
        )
        return *pages, *new, np.array([*slots, *[0] * self.padding], np.int32)


def expected(pages: np.ndarray, new: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Pages [P, K, S, D] with the new tokens in their slots, one after another."""
    pages = pages.copy()
    s = pages.shape[2]
    for slot, token in zip(slots, new.astype(pages.dtype), strict=True):
        pages[slot // s, :, slot % s] = token
    return pages


def assert_written(written: tuple[jax.Array, ...], case: Case) -> None:
    """Compares the pages in rows of any length. Page 0 has padding and may have anything."""
    k_pages, v_pages, k, v, slots = case.arrays()
    p, heads, s, d = k_pages.shape
    dims = chex.Dimensions(P=p, K=heads, S=s, D=d, T=len(slots))
    chex.assert_shape([k, v], dims["TKD"])
    chex.assert_shape(slots, dims["T"])
    for pages, old, new in zip(written, (k_pages, v_pages), (k, v), strict=True):
        pages = np.asarray(pages).reshape(dims["PKSD"])
        chex.assert_type(pages, old.dtype)
        chex.assert_trees_all_equal(pages[1:], expected(old, new, slots)[1:], strict=True)


def in_rows(pages: np.ndarray) -> np.ndarray:
    """The layout of a TPU: rows of 128 numbers or more."""
    return pages.reshape(*pages.shape[:2], -1, row_size(pages.shape[3]))


write = jax.jit(partial(kv_write.write, rows=6, impl="xla"))


def test_tokens_are_in_their_slots_and_other_slots_are_unchanged():
    for s in (1, 8, 16):
        for dtype in ("float32", "bfloat16"):
            case = Case(d=16, s=s, dtype=dtype)
            assert_written(write(*case.arrays()), case)


def test_rows_of_several_tokens_have_the_same_bytes():
    """The scatter into the layout of a TPU."""
    for d, s in ((64, 16), (64, 8), (16, 16), (128, 8)):
        case = Case(d=d, s=s, dtype="float32")
        k_pages, v_pages, *new = case.arrays()
        assert_written(write(in_rows(k_pages), in_rows(v_pages), *new), case)


def test_8_bits_saturate_and_keep_nan():
    pages = jnp.zeros((2, 1, 2, 4), jnp.uint8)
    values = jnp.array([[[1e6, -1e6, 3.3, np.nan]]], jnp.float32)
    for result in write(pages, pages, values, values, jnp.array([2], jnp.int32)):
        chex.assert_type(result, jnp.uint8)
        stored = jax.lax.bitcast_convert_type(result, jnp.float8_e4m3fn)[1, 0, 0].astype(
            jnp.float32
        )
        chex.assert_trees_all_equal(stored, jnp.array([448, -448, 3.25, np.nan]))


def test_bits_of_16_bit_floats_are_those_of_the_nearest_numbers():
    k_pages, v_pages, *new = Case(d=16, s=8, dtype="bfloat16").arrays()
    bits = write(k_pages.view(np.uint16), v_pages.view(np.uint16), *new)
    chex.assert_type(bits, jnp.uint16)
    floats = write(k_pages, v_pages, *new)
    chex.assert_trees_all_equal(jax.lax.bitcast_convert_type(bits[0], jnp.bfloat16), floats[0])
    chex.assert_trees_all_equal(jax.lax.bitcast_convert_type(bits[1], jnp.bfloat16), floats[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pages": (5, 2, 128)}, r"must both be \[P, K, S, D\].* got k_pages \(5, 2, 128\)"),
        ({"v_pages": (4, 2, 8, 16)}, r"must both be \[P, K, S, D\]"),
        ({"v": (8, 2, 8)}, r"k and v \[T, K, D\]"),
        ({"v": None}, r"v_pages and v None for latents, .* v_pages \(5, 2, 8, 16\), .* v None"),
        ({"slots": (8, 1)}, r"slots \[T\]; got .*slots \(8, 1\)"),
        ({"k": (8, 3, 16), "v": (8, 3, 16)}, "must have the same K, D and T"),
    ],
)
def test_wrong_shapes_raise_with_the_shapes(change, message):
    good = {
        "k_pages": (5, 2, 8, 16),
        "v_pages": (5, 2, 8, 16),
        "k": (8, 2, 16),
        "v": (8, 2, 16),
        "slots": (8,),
    }
    arguments = [
        None if shape is None else np.zeros(shape, np.int32 if name == "slots" else np.float32)
        for name, shape in (good | change).items()
    ]
    with refused(message):
        kv_write.write(*arguments, rows=1, impl="xla")


def test_unknown_implementations_and_slots_of_another_type_raise():
    arguments = Case().arrays()
    with refused("impl is 'triton'; it must be one of 'xla', 'pallas_tpu'"):
        kv_write.write(*arguments, rows=6, impl="triton")
    with refused("slots is int16; it must be int32"):
        kv_write.write(*arguments[:4], arguments[4].astype(np.int16), rows=6, impl="xla")


# --- the TPU kernel -------------------------------------------------------------------------------


def check(case: Case, mode: str) -> None:
    k_pages, v_pages, *new = case.arrays()
    pages = in_rows(k_pages), in_rows(v_pages)

    def compute(interpret):  # in one program: each operation around the kernel would be one
        write = partial(kv_write.IMPLS["pallas_tpu"], tiles=SMALL, interpret=interpret)
        return jax.jit(partial(kv_write.write, rows=len(case.rows) + 1, impl=write))(*pages, *new)

    assert_written(without_races(compute, mode), case)


TPU_SHAPES = [
    pytest.param(d, s, dtype, marks=pytest.mark.slow if s in (8, 128) else pytest.mark.exhaustive)
    for d in (64, 128, 256)
    for s in (8, 16, 32, 64, 128)
    for dtype in ("bfloat16", "float32")
]


# the test of rows that end in the next block is the quick one in the other mode
@pytest.mark.parametrize("mode", ["eager", pytest.param("on_wait", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("d", "s", "dtype"), [(64, 16, "bfloat16"), *TPU_SHAPES])
def test_tpu_kernel_writes_tokens_into_their_slots_and_nowhere_else(d, s, dtype, mode):
    check(Case(d=d, s=s, dtype=dtype), mode)


@pytest.mark.parametrize("mode", ["eager", pytest.param("on_wait", marks=pytest.mark.slow)])
def test_tpu_kernel_writes_rows_of_latents_into_one_array(mode):
    case = Case(heads=1, d=640)
    pages, _, rows, _, slots = case.arrays()

    def compute(interpret):
        write = partial(kv_write.IMPLS["pallas_tpu"], tiles=SMALL, interpret=interpret)
        call = jax.jit(partial(kv_write.write, rows=len(case.rows) + 1, impl=write))
        return call(pages, None, rows, None, slots)

    written, of_values = without_races(compute, mode)
    assert of_values is None
    chex.assert_trees_all_equal(np.asarray(written)[1:], expected(pages, rows, slots)[1:])


def test_rows_of_latents_are_written_by_a_scatter():
    for d, s in ((24, 4), (128, 8)):
        pages, _, rows, _, slots = Case(heads=1, d=d, s=s, dtype="float32").arrays()
        written, of_values = write(pages, None, rows, None, slots)
        assert of_values is None
        chex.assert_trees_all_equal(np.asarray(written)[1:], expected(pages, rows, slots)[1:])


def test_tpu_kernel_writes_rows_that_each_begin_in_one_block_and_end_in_the_next():
    """As many pieces of a block as tokens."""
    check(Case(rows=((15, 2),) * 6, padding=0), "on_wait")


@pytest.mark.slow
def test_tpu_kernel_writes_one_token_a_row_one_long_row_and_no_token():
    check(Case(rows=tuple((i % 16, 1) for i in range(40)), padding=0), "on_wait")
    check(Case(rows=((0, 64),), padding=0), "eager")
    check(Case(rows=((7, 1),), padding=0), "eager")
    check(Case(rows=(), padding=8), "eager")
