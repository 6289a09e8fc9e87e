"""Long chunks over pages of latents, against keys and values in float64."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.expanded import TILE, Expansion, expanded

pytestmark = pytest.mark.few_optimisations

N = 2
Z = 8
J = 4
E = 6
U = 5
S = 16
SCALE = 0.4


class Case(NamedTuple):
    """A call. rows: (query tokens, context, whether the row is computed) of each row."""

    rows: list[tuple[int, int, bool]]
    q: np.ndarray
    pages: np.ndarray
    expansion: Expansion
    block_tables: np.ndarray


def case_of(rows: list[tuple[int, int, bool]], t: int) -> Case:
    """Random numbers; slots outside of all contexts have NaN."""
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    width = max(-(-context // S) for _, context, _ in rows)
    tables = rng.permutation(len(rows) * width).reshape(len(rows), width).astype(np.int32) + 1
    pages = np.full((len(rows) * width + 1, 1, S, Z + J), np.nan, np.float32)
    for row, (_, context, _) in enumerate(rows):
        place = np.arange(context)
        pages[tables[row, place // S], 0, place % S] = numbers(context, Z + J)
    keys = jnp.asarray(numbers(N, E, Z))
    values = jnp.asarray(numbers(N, U, Z))
    return Case(rows, numbers(t, N, E + J), pages, Expansion(keys, values), tables)


def defined(case: Case, window: int | None, soft_cap: float | None) -> np.ndarray:
    """[T, N, U] float64, zeros for rows that are left out."""
    out = np.zeros((len(case.q), N, U))
    start = 0
    for row, (queries, context, is_computed) in enumerate(case.rows):
        place = np.arange(context)
        tokens = case.pages[case.block_tables[row, place // S], 0, place % S].astype(np.float64)
        keys = np.einsum("cz,nez->nce", tokens[:, :Z], case.expansion.keys)
        keys = np.concatenate([keys, np.repeat(tokens[None, :, Z:], N, axis=0)], axis=-1)
        values = np.einsum("cz,nuz->ncu", tokens[:, :Z], case.expansion.values)
        for i in range(queries if is_computed else 0):
            scores = SCALE * np.einsum("nd,ncd->nc", case.q[start + i], keys)
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            distance = context - queries + i - place
            visible = (distance >= 0) & (distance < (window or context))
            weights = np.exp(scores - scores[:, visible].max(-1, keepdims=True)) * visible
            weights /= weights.sum(-1, keepdims=True)
            out[start + i] = np.einsum("nc,ncu->nu", weights, values)
        start += queries
    return out


@pytest.mark.parametrize(
    ("rows", "t", "options"),
    [
        pytest.param([(9, 40, True), (1, 30, False), (3, 3, True)], 16, {}, id="small"),
        pytest.param(
            [(9, 300, True), (8, 30, False), (20, 20, True)],
            40,
            {"window": 13, "soft_cap": 2.0},
            id="window and cap",
        ),
        pytest.param(
            [(TILE + 70, TILE + 130, True), (1, 600, False), (5, 290, True)],
            TILE + 80,
            {},
            id="several tiles and spans",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_chunk_is_that_of_its_definition(rows, t, options):
    case = case_of(rows, t)
    queries = np.array([count for count, _, _ in rows], np.int32)
    is_computed = np.array([is_computed for *_, is_computed in rows])
    y = jax.jit(partial(expanded, scale=SCALE, **options))(
        case.q,
        jnp.asarray(case.pages),
        case.expansion,
        case.block_tables,
        np.array([context for _, context, _ in rows], np.int32),
        np.cumsum([0, *queries]).astype(np.int32),
        np.where(is_computed, queries, 0),
    )
    right = defined(case, options.get("window"), options.get("soft_cap"))
    chex.assert_trees_all_close(np.asarray(y), right, atol=2e-5)
