"""The kernel that rotates queries and keys and writes keys and values, interpreted on a CPU under
race detection, against the rotation of models and XLA's scatter.

A compiler may round a product and a sum once or twice, for a CPU and for a GPU. So a rotated number
may be the neighbour of what is expected; values, and slots that get no token, have the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.device.rope import Rope, rotate
from pallas_kernels import kv_write
from pallas_kernels.interpreted import interpreted_without_races
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from tests.pallas_kernels.test_paged_attention import slow
from tests.pallas_kernels.test_paged_attention_gpu import needs_interpreter
from tests.refusals import refused

FUSED = pallas_gpu.rotate_and_write
BLOCKS = 9  # of a cache, with block 0
POSITIONS = 64


class Case(NamedTuple):
    """Tokens in the slots `slots`; those of block 0 are padding.

    rotated: numbers of a head that are rotated; None: all.
    product: the dtype of the joined product.
    """

    slots: tuple[int, ...] = (17, 18, 140, 5, 0)
    queries: int = 8
    heads: int = 4
    d: int = 64
    s: int = 16
    dtype: str = "bfloat16"
    product: str = "bfloat16"
    rotated: int | None = None

    def arguments(self) -> tuple[jax.Array, ...]:
        """k_pages, v_pages, heads, angles, slots."""
        rng = np.random.default_rng(0)
        t = len(self.slots)
        shape = BLOCKS, self.heads, self.s, self.d
        pages = jnp.asarray(rng.standard_normal((2, *shape)), self.dtype)
        product = rng.standard_normal((t, self.queries + 2 * self.heads, self.d), np.float32)
        table = Rope(10_000.0, rotated=self.rotated).table(self.d, POSITIONS)
        angles = jnp.asarray(table[:, rng.integers(0, POSITIONS, t)])
        slots = jnp.asarray(self.slots, jnp.int32)
        return pages[0], pages[1], jnp.asarray(product, self.product), angles, slots

    def expected(self) -> tuple[jax.Array, ...]:
        """Queries, and the pages of real tokens."""
        k_pages, v_pages, heads, angles, slots = self.arguments()
        ends = self.queries, self.queries + self.heads
        q, k, v = jnp.split(heads.astype(self.dtype), ends, axis=1)
        new = rotate(k, angles), v, slots
        k_pages, v_pages = kv_write.write(k_pages, v_pages, *new, rows=len(slots), impl="xla")
        assert v_pages is not None
        return rotate(q, angles), k_pages[1:], v_pages[1:]


def check(case: Case) -> None:
    with interpreted_without_races():
        arguments = case.arguments()
        results = kv_write.rotate_and_write(*arguments, queries=case.queries, impl=FUSED)
        q, k_pages, v_pages = jax.block_until_ready(results)
    expected_q, expected_k, expected_v = case.expected()
    assert_neighbours(k_pages[1:], expected_k)
    chex.assert_trees_all_equal(v_pages[1:], expected_v, strict=True)
    untouched = np.setdiff1d(np.arange(BLOCKS * case.s), [x for x in case.slots if x >= case.s])
    slots = untouched // case.s, slice(None), untouched % case.s
    chex.assert_trees_all_equal(k_pages[slots], arguments[0][slots])
    assert (q is None) == (case.queries == 0)
    if q is not None:
        assert_neighbours(q, expected_q)


def assert_neighbours(x: jax.Array, expected: jax.Array) -> None:
    """Numbers differ by one rounding to their dtype at most, and by one of the float32 products."""
    assert (x.shape, x.dtype) == (expected.shape, expected.dtype)
    numbers = (np.asarray(array, np.float32) for array in (x, expected))
    chex.assert_trees_all_close(*numbers, rtol=float(jnp.finfo(x.dtype).eps), atol=1e-6)


@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [
        Case(product="float32", rotated=32),
        slow(Case()),
        slow(Case(queries=0)),
        slow(Case(slots=(130,), queries=9, heads=3)),  # warps repeat the work of others
        slow(Case(queries=2, heads=2, d=128, s=8, slots=(71, 8, 9), dtype="float16")),
        slow(Case(queries=32, heads=8, d=128, s=32)),
        slow(Case(queries=5, heads=1, d=256, dtype="float32", product="float32")),
    ],
)
def test_queries_and_pages_are_those_of_the_rotation_and_the_scatter(case):
    check(case)


@needs_interpreter
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    slots=st.lists(st.integers(16, 16 * BLOCKS - 1), max_size=12, unique=True),
    padding=st.lists(st.integers(0, 15), max_size=4),
)
def test_tokens_in_any_slots(slots, padding):
    if slots or padding:
        check(Case(slots=(*slots, *padding), queries=2, heads=2))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case(dtype="float8_e4m3fn"),
            "writes pages of bfloat16, float16, float32 and not of float8",
        ),
        (Case(d=96), "needs a head size that is a multiple of 64, and it is 96"),
        (Case(queries=128, heads=128, d=128), "128 key heads of 128 numbers would be 384"),
    ],
)
@needs_interpreter
def test_what_the_kernel_cannot_write_is_refused(case, message):
    with refused(message):
        kv_write.rotate_and_write(*case.arguments(), queries=case.queries, impl=FUSED)


def test_shapes_that_do_not_match_are_refused():
    k_pages, v_pages, heads, angles, slots = Case().arguments()
    with refused(r"heads \[T, 7 \+ 2 K, D\].*; got .*heads \(5, 16, 64\)"):
        kv_write.rotate_and_write(k_pages, v_pages, heads, angles, slots, queries=7, impl=FUSED)
