"""The contract of every implementation of paged attention.

The oracle is numpy's float64 on contiguous keys; without a soft cap it is compared with JAX's own
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLS, Implementation, paged_attention, xla
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations
GARBAGE = 1e30  # finite: what a freed block can hold; times a weight of 0 it must vanish
# A program takes a second or two, so most cases have one of two sizes: FEW tokens, each of which is
# a decode for plain XLA, or MANY, for its loop over chunks.
FEW = 64
MANY = 160
BATCH_SIZES: dict[str, int] = {"b": 16, "m": 64}
# (query tokens, context tokens)
MIXED = [(1, 200), (17, 17), (1, 1), (9, 130), (1, 300), (5, 37), (1, 64)]


def slow(*values: Any):
    """A parameter of the slow run alone: it needs one more program, which takes a second or two to
    compile.
    """
    return pytest.param(*values, marks=pytest.mark.slow)


# The GPU kernels take other shapes and interpreting them is slow: test_paged_attention_gpu.py. The
# TPU kernel is interpreted here as ordinary XLA, which is fast, and with copies and semaphores in
# test_paged_attention_tpu.py.
HERE = sorted(name for name in IMPLS if not name.startswith(("pallas_gpu", "pallas_tpu")))
every_impl = pytest.mark.parametrize("impl", [*HERE, slow("pallas_tpu")])
# The reference has one program for decodes and chunks, so MANY tokens show nothing new of it.
sizes = [(impl, t) for impl in HERE for t in (FEW, MANY) if (impl, t) != ("reference", MANY)]
slow_sizes = [("reference", MANY), ("pallas_tpu", FEW), ("pallas_tpu", MANY)]
every_impl_and_size = pytest.mark.parametrize(
    ("impl", "t"), [*sizes, *(slow(*size) for size in slow_sizes)]
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    attend = partial(pallas_tpu.paged_attention, interpret=True)
    monkeypatch.setitem(IMPLS, "pallas_tpu", IMPLS["pallas_tpu"]._replace(attend=attend))


def skip_unless_it_reads(impl: str, *, s: int = 16, dtype: Any = np.float32) -> None:
    """Pages of pallas_tpu are rows of 128 numbers, and not of 8 bits."""
    if impl == "pallas_tpu" and (s < 8 or dtype == jnp.float8_e4m3fn):
        pytest.skip(
            f"pallas_tpu refuses pages of {s} tokens of {jnp.dtype(dtype).name}, tested on their own"
        )


class Case(NamedTuple):
    """A ragged batch: sequences contiguous for the oracle, and scattered over pages for the
    kernel.
    """

    q: np.ndarray  # [T, N, D]
    k: np.ndarray  # [B, M * S, K, D] contiguous
    v: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: np.ndarray | None = None  # [N]

    @property
    def dims(self) -> chex.Dimensions:
        """The letters of the contract."""
        (t, n, d) = self.q.shape
        (p, k, s, _) = self.k_pages.shape
        (b, m) = self.block_tables.shape
        return chex.Dimensions(T=t, N=n, D=d, P=p, K=k, S=s, B=b, M=m)

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k_pages, self.v_pages, self.block_tables, self.seq_lens, self.cu_q_lens


def make(
    rows: list[tuple[int, int]],
    *,
    t: int,
    b: int,
    s: int = 16,
    m: int | None = None,
    k: int = 2,
    g: int = 2,
    d: int = 16,
    seed: int = 0,
    dtype: Any = np.float32,
    garbage: float = GARBAGE,
) -> Case:
    """rows: (query tokens, context tokens) of each; padded to T tokens and B rows. Unowned slots
    hold garbage.
    """
    rng = np.random.default_rng(seed)
    m = m or max(1, max(-(-context // s) for _, context in rows))
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(dtype)  # noqa: E731
    q_lens = np.zeros(b, np.int32)
    seq_lens = np.zeros(b, np.int32)
    for i, (count, context) in enumerate(rows):
        q_lens[i] = count
        seq_lens[i] = context
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    assert cu_q_lens[-1] <= t
    q = normal(t, k * g, d)
    keys = normal(b, m * s, k, d)
    values = normal(b, m * s, k, d)
    pages = b * m + 1
    k_pages, v_pages = (np.zeros((pages, k, s, d), dtype) for _ in range(2))
    case = Case(
        q, keys, values, k_pages, v_pages, np.zeros((b, m), np.int32), seq_lens, cu_q_lens, d**-0.5
    )
    return scatter(case, rng.permutation(b * m) + 1, garbage)


def scatter(case: Case, pages: np.ndarray | None = None, garbage: float = GARBAGE) -> Case:
    """Puts row b's i-th block into page `pages[b * M + i]`, by default where it is. Slots without a
    token, and page 0, have garbage.
    """
    s = case.v_pages.shape[2]
    (b, width) = case.k.shape[:2]
    m = width // s
    tables = case.block_tables if pages is None else pages.reshape(b, m).astype(np.int32)
    k_pages = np.full_like(case.k_pages, garbage)
    v_pages = np.full_like(case.v_pages, -garbage)
    for row, length in enumerate(case.seq_lens):
        position = np.arange(length)
        place = (tables[row, position // s], slice(None), position % s)
        k_pages[place] = case.k[row, :length]
        v_pages[place] = case.v[row, :length]
    # entries past the context may be any valid page: garbage here, the trash page in an engine
    return case._replace(k_pages=k_pages, v_pages=v_pages, block_tables=tables)


def in_bits(case: Case) -> Case:
    """Pages of float8_e4m3fn as uint8 and of bfloat16 as uint16, as in the contract."""
    integers = f"uint{8 * case.k_pages.itemsize}"
    return case._replace(k_pages=case.k_pages.view(integers), v_pages=case.v_pages.view(integers))


def run(case: Case, impl: str | Implementation) -> np.ndarray:
    options = {"scale": case.scale, "window": case.window, "soft_cap": case.soft_cap}
    options["sinks"] = case.sinks
    return np.asarray(paged_attention(*case.arguments, impl=impl, **options))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def dense(q, k, v, mask, scale, soft_cap, weigh=softmax) -> np.ndarray:
    """Return attention [Q, N, D] in float64 of q [Q, N, D] over k and v [C, K, D] where mask [Q, C]
    is true. weigh: scores [N, Q, C] -> weights.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, axis=1).astype(np.float64) for a in (k, v))
    scores = np.einsum("qnd,cnd->nqc", q.astype(np.float64), k, optimize=True) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(mask, scores, -np.inf)
    return np.einsum("nqc,cnd->qnd", weigh(scores), v, optimize=True)


def with_sinks(sinks: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The weights of scores [N, Q, C] beside a sink for each head, [N]."""
    sinks = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*scores.shape[:2], 1))
    return softmax(np.concatenate([scores, sinks], -1))[..., :-1]


def oracle(case: Case, weigh=softmax) -> np.ndarray:
    """Each row's queries over its contiguous keys."""
    if case.sinks is not None:
        weigh = partial(with_sinks, case.sinks)
    q, k, v = (a.astype(np.float32) for a in (case.q, case.k, case.v))
    out = np.zeros_like(q)
    for row, (start, count) in enumerate(
        zip(case.cu_q_lens, np.diff(case.cu_q_lens), strict=False)
    ):
        length = case.seq_lens[row]
        place = np.arange(length)
        visible = length - count + np.arange(count)[:, None] + 1
        mask = (place < visible) & (place >= visible - (case.window or length))
        if count and length:  # a query without a context sees nothing: zeros
            queries = slice(start, start + count)
            keys, values = (x[row, :length] for x in (k, v))
            out[queries] = dense(q[queries], keys, values, mask, case.scale, case.soft_cap, weigh)
    return out


def test_the_oracle_is_jaxs_own_attention():
    options = {"is_causal": False, "implementation": "xla", "scale": 0.25}
    attend = jax.jit(partial(jax.nn.dot_product_attention, **options))
    visible = 24 + np.arange(17)[:, None]
    place = np.arange(40)
    for window in (None, 5):
        case = make([(17, 40)], t=17, b=1)._replace(window=window)
        mask = (place < visible) & (place >= visible - (window or 40))
        jaxs = attend(case.q[None], case.k[:, :40], case.v[:, :40], mask=mask[None, None])[0]
        chex.assert_trees_all_close(oracle(case), jaxs, atol=1e-5, rtol=0)


def assert_contract(case: Case, impl: str, atol: float = 2e-5) -> None:
    got = run(case, impl)
    expected = oracle(case)
    chex.assert_shape(got, case.dims["TND"])
    chex.assert_type(got, case.q.dtype)
    chex.assert_tree_all_finite(got)
    if got.dtype == jnp.bfloat16:  # 8 bits; q * scale, weights and the output are rounded
        atol = 2.0**-6 * max(1.0, np.abs(expected).max())
    chex.assert_trees_all_close(got.astype(np.float32), expected, atol=atol, rtol=0)
    assert_padding_is_zero(got, case)


def assert_padding_is_zero(got: Any, case: Case) -> None:
    padding = got[case.cu_q_lens[-1] :]
    chex.assert_trees_all_equal(padding, np.zeros_like(padding))


# --- which cases run by default -------------------------------------------------------------------


def choices(often: list[tuple], *, of_cpu: list[tuple], rare: list[tuple] | None = None):
    """(impl, ...) by the cost of one more program: little for the CPU kernel, a second or two for
    the others, whose `rare` parameters run by hand alone.

    The interpreted TPU kernel takes several seconds: slow runs have every second of its others.
    """
    usual = list(dict.fromkeys([*often, *of_cpu]))
    marks: dict[tuple, Any] = {("cpu", *values): pytest.mark.slow for values in rare or []}
    marks |= {("cpu", *values): () for values in usual}
    marks |= {("pallas_tpu", *values): pytest.mark.slow for values in usual[::2]}
    for impl in HERE:
        if impl != "cpu":
            marks |= {(impl, *values): pytest.mark.slow for values in usual}
            marks |= {(impl, *values): () for values in often}
    every = dict.fromkeys([*usual, *(rare or [])])
    cases = [(impl, *values) for impl in ("pallas_tpu", *HERE) for values in every]
    return [pytest.param(*case, marks=marks.get(case, pytest.mark.exhaustive)) for case in cases]


def singles(values) -> list[tuple]:
    return [(value,) for value in values]


# --- what it computes -----------------------------------------------------------------------------


NARROW = [(jnp.bfloat16, False), (jnp.bfloat16, True), (jnp.float8_e4m3fn, True)]
# without prompt chunks, and with them and decodes
kinds = choices(
    [(*NARROW[1], 8), (*NARROW[2], 96)],
    of_cpu=[(*NARROW[0], 8), (*NARROW[2], 8), (*NARROW[1], 96)],
    rare=[(*NARROW[0], 96)],
)


@pytest.mark.parametrize(("impl", "dtype", "bits", "t"), kinds, ids=str)
def test_narrow_pages_give_the_result_of_their_values_in_float32(impl, dtype, bits, t):
    """Queries and sums stay in float32."""
    skip_unless_it_reads(impl, dtype=dtype)
    if bits and impl == "pallas_tpu":
        pytest.skip("it reads no integers")
    rows = [(1, 200), (5, 37), (1, 1)] if t == 8 else MIXED
    case = make(rows, t=t, b=8)
    rounded = case._replace(
        **{x: getattr(case, x).astype(dtype).astype(np.float32) for x in ("k", "v")}
    )
    narrow = rounded._replace(**{x: getattr(case, x).astype(dtype) for x in ("k_pages", "v_pages")})
    if dtype == jnp.float8_e4m3fn:  # it has no number as large as the garbage
        narrow = scatter(narrow, garbage=448.0)
    narrow = in_bits(narrow) if bits else narrow
    expected = oracle(scatter(rounded))
    chex.assert_trees_all_close(run(narrow, impl), expected, atol=2e-5, rtol=1e-7)


@pytest.mark.parametrize(
    ("impl", "s"), choices(singles((16,)), of_cpu=singles((1, 8, 64, 128, 256)))
)
def test_decodes_of_contexts_around_a_block_border(impl, s):
    skip_unless_it_reads(impl, s=s)
    lengths = sorted({1, max(1, s - 1), s, s + 1, 2 * s, 2 * s + 1})
    assert_contract(make([(1, n) for n in lengths], t=FEW, b=16, s=s, m=1024 // s, seed=s), impl)


@pytest.mark.parametrize(
    ("impl", "s"), choices(singles((16,)), of_cpu=singles((1, 8, 64, 128, 256)))
)
def test_chunks_of_contexts_around_a_block_border(impl, s):
    skip_unless_it_reads(impl, s=s)
    rows = [
        (2, s + 1),
        (max(1, s - 1) % 90, max(1, s - 1)),
        (s % 80 or 80, s + 80),
        (3, 2 * s + 3),
        (1, s),
    ]
    assert_contract(make([r for r in rows if r[0]], t=MANY, b=16, s=s, m=1024 // s, seed=s), impl)


@every_impl_and_size
def test_decodes_over_many_spans(impl, t):
    lengths = [1, 127, 128, 129, 255, 256, 257, 511, 512, 513, 640, 900]
    assert_contract(make([(1, n) for n in lengths], t=t, **BATCH_SIZES), impl)


# the reference has no spans
@pytest.mark.parametrize(
    "impl",
    [*(impl for impl in HERE if impl != "reference"), *map(slow, ("reference", "pallas_tpu"))],
)
def test_chunks_over_many_spans(impl):
    many_rows = [
        [(63, 63), (64, 64), (2, 513)],
        [(65, 65), (40, 257)],
        [(130, 700), (2, 513)],
        [(MANY, MANY)],
    ]
    for rows in many_rows:
        assert_contract(make(rows, t=MANY, **BATCH_SIZES), impl)


HEADS = [
    *((k, g, 16, t) for k, g in ((3, 3), (1, 8), (4, 1), (2, 4)) for t in (24, 80)),
    (1, 3, 64, 24),
    (1, 3, 128, 80),
]


@pytest.mark.parametrize(("impl", "k", "g", "d", "t"), choices([(3, 3, 128, 80)], of_cpu=HEADS))
def test_query_heads_of_any_size_share_key_heads(impl, k, g, d, t):
    assert_contract(make([(1, 40), (9, 21), (7, 150)], t=t, b=4, k=k, g=g, d=d, seed=k * g), impl)


@pytest.mark.parametrize(("impl", "t"), choices([(80,)], of_cpu=[(24,)]))
def test_error_in_bfloat16_is_within_its_rounding(impl, t):
    # values near 1 averaged over n tokens; inputs are exact, so what rounds is q * scale, the
    # weights and the output
    case = make([(1, 300), (9, 21), (7, 150)], t=t, b=4, d=64, dtype=jnp.bfloat16)
    assert_contract(case, impl)
    assert np.sqrt(np.mean((run(case, impl).astype(np.float32) - oracle(case)) ** 2)) < 2.0**-9


@pytest.mark.parametrize(
    "impl", ["cpu", *(slow(impl) for impl in (*HERE, "pallas_tpu") if impl != "cpu")]
)
def test_scale_is_a_factor_of_the_scores(impl):
    """Other scales are those of other head sizes."""
    case = make([(1, 40), (9, 21)], t=FEW, **BATCH_SIZES)
    assert_contract(case._replace(scale=0.7), impl)
    assert np.abs(run(case._replace(scale=0.7), impl) - run(case, impl)).max() > 0.01


@every_impl
def test_extreme_scores_do_not_overflow(impl):
    case = make([(1, 300), (9, 21)], t=FEW, **BATCH_SIZES)
    # of scores up to 1e4
    assert_contract(case._replace(q=case.q * np.float32(1e4 / case.scale)), impl, atol=1e-3)


@every_impl_and_size
def test_random_ragged_batches(impl, t):
    for seed in range(12 if impl == "cpu" else 4):  # the others take a tenth of a second each
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(rng.integers(1, t + 1), rng.dirichlet(np.full(8, 0.3)))
        rows = [(int(n), int(n + rng.integers(0, 320 - n + 1))) for n in counts if n]
        assert_contract(make(rows, t=t, **BATCH_SIZES, seed=seed), impl)


@every_impl_and_size
def test_a_call_without_tokens_is_all_zeros(impl, t):
    case = make([(0, 0)], t=t, **BATCH_SIZES)
    assert_padding_is_zero(run(case, impl), case)


# tests below have windows and caps in one program; operations one after another are for debugging


# --- windows and soft caps ------------------------------------------------------------------------

# Both loops of the plain XLA version, and of the CPU kernel: spans of 128 and 256 tokens, steps of
# 64, tiles of 48.
LONG = [(1, 600), (50, 400), (1, 1), (1, 257), (3, 3), (20, 20), (1, 256), (2, 130)]
BORDERS = (1, 2, 16, 65, 255, 256, 257, 10_000)
MORE_BORDERS = (3, 15, 17, 47, 48, 49, 63, 64, 127, 128, 129, 511, 512, 513, 599, 600)


windows = choices(singles((17,)), of_cpu=singles(BORDERS), rare=singles(MORE_BORDERS))


@pytest.mark.parametrize(("impl", "window"), windows)
def test_windows(impl, window):
    assert_contract(make(LONG, t=96, b=9)._replace(window=window), impl)
    assert_contract(make(LONG[::-1], t=96, b=9, seed=1)._replace(window=window), impl)


SHAPES = [
    (1, 1, 5),
    (1, 2, 130),
    (16, 3, 5),
    (16, 4, 64),
    (128, 5, 5),
    (128, 6, 130),
    (16, 7, 130),
    (128, 8, 257),
]


@pytest.mark.parametrize(("impl", "s", "g", "window"), choices([], of_cpu=SHAPES))
def test_windows_of_all_block_sizes_and_numbers_of_query_heads(impl, s, g, window):
    skip_unless_it_reads(impl, s=s)
    rows = [(1, s + 1), (20, s + 150), (1, 2 * s + 150), (s % 60 + 2, 2 * s + 2)]
    assert_contract(
        make(rows, t=96, b=4, s=s, g=g, seed=s)._replace(window=window, soft_cap=2.0), impl
    )


caps = choices(
    [(2.0, 1), (2.0, 1e5)], of_cpu=[(1e-6, 1), (50.0, 10), (50.0, 1e5), (1e4, 1)], rare=[(0.1, 10)]
)


@pytest.mark.parametrize(("impl", "soft_cap", "size"), caps)
def test_soft_caps_of_scores_of_any_size(impl, soft_cap, size):
    case = make(LONG, t=96, b=9)
    window = 300 if (soft_cap, size) == (2.0, 1e5) or impl != "cpu" else None
    assert_contract(
        case._replace(q=case.q * np.float32(size), soft_cap=soft_cap, window=window), impl
    )


@pytest.mark.parametrize(("impl", "t"), choices([], of_cpu=[(48,), (96,)], rare=[(200,)]))
def test_random_ragged_batches_with_windows_and_soft_caps(impl, t):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(rng.integers(1, t + 1), rng.dirichlet(np.full(8, 0.3)))
        rows = [(int(n), int(n + rng.integers(0, 400 - n + 1))) for n in counts if n]
        case = make(rows, t=t, b=8, m=25, g=3, seed=seed)
        assert_contract(
            case._replace(window=(50, 300)[seed % 2] if impl == "cpu" else 50, soft_cap=3.0), impl
        )


def before_windows(case: Case, garbage: float) -> Case:
    """The case with garbage in the tokens before the windows of all of a row's queries."""
    assert case.window
    k_pages = case.k_pages.copy()
    v_pages = case.v_pages.copy()
    s = case.k_pages.shape[2]
    for row, count in enumerate(np.diff(case.cu_q_lens)):
        position = np.arange(case.seq_lens[row] - count + 1 - case.window)
        place = (case.block_tables[row, position // s], slice(None), position % s)
        k_pages[place] = garbage
        v_pages[place] = -garbage
    return case._replace(k_pages=k_pages, v_pages=v_pages)


@pytest.mark.parametrize(("impl", "window"), choices(singles((17,)), of_cpu=singles((1, 64, 257))))
def test_tokens_before_all_windows_change_no_bit(impl, window):
    case = make(LONG, t=96, b=9)._replace(window=window)
    before = run(case, impl)
    for garbage in (GARBAGE, -GARBAGE, np.nan):  # their blocks may be given back
        chex.assert_trees_all_equal(run(before_windows(case, garbage), impl), before)


@every_impl
def test_a_changed_token_changes_exactly_the_queries_whose_window_has_it(impl):
    case = make(LONG, t=96, b=9)._replace(window=17)
    before = run(case, impl)[1:51]
    row = 1
    position = np.arange(350, 400)
    for token in (0, 333, 334, 340, 350, 399):
        k = case.k.copy()
        v = case.v.copy()
        k[row, token] = 3
        v[row, token] = -3
        after = run(scatter(case._replace(k=k, v=v)), impl)[1:51]
        changed = (after != before).any(axis=(1, 2))
        chex.assert_trees_all_equal(changed, (position >= token) & (position < token + 17))


# --- what results must not depend on --------------------------------------------------------------


@every_impl_and_size
def test_moving_blocks_to_other_pages_changes_no_bit(impl, t):
    case = make(MIXED, t=t, **BATCH_SIZES)
    first = run(case, impl)
    for seed in range(3):
        pages = np.random.default_rng(seed).permutation(len(case.k_pages) - 1) + 1
        chex.assert_trees_all_equal(run(scatter(case, pages), impl), first)


@every_impl_and_size
def test_content_of_unowned_slots_changes_no_bit(impl, t):
    case = make(MIXED, t=t, **BATCH_SIZES)
    clean = run(scatter(case, garbage=0.0), impl)
    for garbage in (GARBAGE, -GARBAGE, 1.0):
        chex.assert_trees_all_equal(run(scatter(case, garbage=garbage), impl), clean)


@every_impl_and_size
def test_a_row_does_not_depend_on_other_rows(impl, t):
    case = make(MIXED, t=t, **BATCH_SIZES)
    changed = make(MIXED, t=t, **BATCH_SIZES, seed=1)
    before = run(case, impl)
    for row in range(len(MIXED)):
        k = changed.k.copy()
        v = changed.v.copy()
        q = changed.q.copy()
        tokens_of_row = slice(case.cu_q_lens[row], case.cu_q_lens[row + 1])
        k[row] = case.k[row]
        v[row] = case.v[row]
        q[tokens_of_row] = case.q[tokens_of_row]
        after = run(scatter(case._replace(k=k, v=v, q=q)), impl)
        chex.assert_trees_all_equal(after[tokens_of_row], before[tokens_of_row])
        other_tokens = np.delete(np.arange(case.cu_q_lens[-1]), np.r_[tokens_of_row])
        assert (after[other_tokens] != before[other_tokens]).any(axis=(1, 2)).all()


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [slow(64), 512])  # 512 has both loops
def test_xla_allocates_a_tile_and_not_whole_table_rows(t):
    page = ((4096, 3, 16, 64), jnp.float32)
    tables = (((64, 2048), jnp.int32), ((64,), jnp.int32), ((65,), jnp.int32))
    shapes = [
        jax.ShapeDtypeStruct(*shape) for shape in (((t, 9, 64), jnp.float32), page, page, *tables)
    ]
    compiled = paged_attention.lower(*shapes, scale=0.125, impl="xla").compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    gathered = 64 * 2048 * 16 * 3 * 64 * 4
    assert temporary < gathered / 50, f"{temporary / 2**20:.1f} MiB of {gathered / 2**20:.0f}"


def pages_read(cases: list[Case], monkeypatch) -> list[set[int]]:
    """The pages that plain XLA gathers. Tokens past a context are masked, so garbage would not show
    a read.
    """
    page_ids: set[int] = set()
    tile = xla.tile_of

    def watched(pages, ids, dtype):
        jax.debug.callback(lambda ids: page_ids.update(ids.ravel().tolist()), ids)
        return tile(pages, ids, dtype)

    monkeypatch.setattr(xla, "tile_of", watched)
    attend = jax.jit(lambda *arrays: xla.paged_attention(*arrays, scale=0.125))
    result = []
    for case in cases:
        jax.block_until_ready(attend(*case.arguments))
        jax.effects_barrier()
        result.append(set(page_ids))
        page_ids.clear()
    return result


@pytest.mark.parametrize("t", [slow(8), 96])  # 96 has both loops, 8 that over decodes
def test_xla_reads_no_page_past_the_spans_of_the_context(t, monkeypatch):
    """The table is several times as wide as the contexts; its other entries are one page that must
    not be read. With 32 spans of real context, which fill whole groups, one more iteration would
    read the padding row's page."""
    rows = [(1, 100), (1, 129), (3, 3), (2, 257)]
    case = make(rows, t=t, b=32, m=100)
    trap = len(case.k_pages) - 1
    tables = np.where(case.block_tables == trap, 0, case.block_tables)
    needed = set()
    for row, (_, context) in enumerate(rows):
        needed |= set(tables[row, : -(-context // 16)].tolist())
        tables[row, -(-context // 256) * 256 // 16 :] = trap
    cases = [case._replace(block_tables=tables)]
    if t > 32:
        groups = make([(1, 5)] * 30 + [(1, xla.SPAN + 1)], t=t, b=32, m=100)
        full = np.where(groups.block_tables == trap, 0, groups.block_tables)
        full[31] = trap
        cases.append(groups._replace(block_tables=full))
    read, *of_groups = pages_read(cases, monkeypatch)
    assert trap not in read
    assert needed <= read
    for pages in of_groups:
        assert trap not in pages


def test_layers_with_equal_shapes_trace_attention_once():
    case = make([(1, 5), (4, 9)], t=8, b=3, m=3)
    chex.clear_trace_counter()
    impl = Implementation("counted", chex.assert_max_traces(xla.paged_attention, n=1))
    layers = jax.jit(lambda *a: [paged_attention(*a, scale=0.25, impl=impl) for _ in range(3)])
    first, *later_layers = layers(*case.arguments)
    for later in later_layers:
        chex.assert_trees_all_equal(later, first)


# --- precision ------------------------------------------------------------------------------------


def products(jaxpr: Any) -> Iterator[Any]:
    """Every `dot_general` of a program, those of its loops and inner functions included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jax.tree.leaves(
            eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from products(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("kind", [np.float32, jnp.bfloat16, slow(jnp.float16)])
@pytest.mark.parametrize("t", [8, 96])  # without prompt chunks, and with them
def test_products_of_plain_jax_are_exact_on_every_device(impl, kind, t):
    """By default a TPU rounds float32 operands to bfloat16 and a GPU rounds them to TF32. Sums are
    in float32.
    """
    case = make(MIXED[:1] if t == 8 else MIXED, t=t, **BATCH_SIZES)
    arrays = [jax.ShapeDtypeStruct(a.shape, kind) for a in case.arguments[:3]]
    program = jax.make_jaxpr(partial(paged_attention, scale=case.scale, impl=impl))(
        *arrays, *case.arguments[3:]
    )
    equations = list(products(program.jaxpr))
    assert len(equations) >= (2 if impl == "reference" else 4)
    exact = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    for eqn in equations:
        chex.assert_type(eqn.outvars[0].aval, jnp.float32)
        if eqn.params["precision"] != exact:
            chex.assert_type([operand.aval for operand in eqn.invars], kind)
            assert jnp.dtype(kind).itemsize == 2


# --- errors ---------------------------------------------------------------------------------------

GOOD = {
    "q": ((8, 4, 16), "float32"),
    "k_pages": ((5, 2, 8, 16), "float32"),
    "v_pages": ((5, 2, 8, 16), "float32"),
    "block_tables": ((3, 2), "int32"),
    "seq_lens": ((3,), "int32"),
    "cu_q_lens": ((4,), "int32"),
}


@every_impl
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("q", (8, 64), "float32", r"expected ranks 3, 4, 4, 2, 1, 1; got q \(8, 64\)"),
        (
            "q",
            (8, 4, 32),
            "float32",
            r"must both be \[P, K, S, D\] with q's head size 32; got q \(8, 4, 32\)",
        ),
        ("k_pages", (5, 2, 16, 8), "float32", r"k_pages and v_pages must .* head size 16"),
        ("v_pages", (4, 2, 8, 16), "float32", r"must both be \[P, K, S, D\]"),
        ("q", (8, 3, 16), "float32", r"3 query heads cannot share 2 key heads evenly"),
        (
            "block_tables",
            (4, 2),
            "int32",
            r"block_tables must be \[B, M\] .* B = 3; got .*block_tables \(4, 2\)",
        ),
        (
            "cu_q_lens",
            (3,),
            "int32",
            r"cu_q_lens \[B \+ 1\] with seq_lens's B = 3; got .*cu_q_lens \(3,\)",
        ),
        ("block_tables", (3, 2), "uint32", r"block_tables is uint32; it must be int32"),
        ("cu_q_lens", (4,), "int16", r"cu_q_lens is int16; it must be int32"),
    ],
)
def test_wrong_shapes_and_types_raise_with_the_shapes(impl, name, shape, dtype, message):
    arguments = {key: np.zeros(*value) for key, value in (GOOD | {name: (shape, dtype)}).items()}
    with refused(message):
        paged_attention(*arguments.values(), scale=1.0, impl=impl)


def test_an_unknown_implementation_raises_with_the_known_names():
    arguments = [np.zeros(*value) for value in GOOD.values()]
    with refused(r"impl is 'triton'; it must be one of 'reference', 'xla'"):
        paged_attention(*arguments, scale=1.0, impl="triton")


@every_impl
@pytest.mark.parametrize("wrong", [{"window": 0}, {"soft_cap": 0.0}])
def test_a_window_or_a_soft_cap_that_is_not_above_0_raises(impl, wrong):
    arguments = [np.zeros(*value) for value in GOOD.values()]
    message = f"window is {wrong.get('window')} and soft_cap {wrong.get('soft_cap')}; each must be above 0, or None"
    with refused(message):
        paged_attention(*arguments, scale=1.0, impl=impl, **wrong)
