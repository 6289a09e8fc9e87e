"""The TPU kernels over latents, interpreted on a CPU: one row of 576 numbers a token is the key of
all query heads, and its first 512 are the value. The oracle is attention in float64. Slots outside
all contexts are NaN, and so is the padding of their rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.device import attention
from pallas_kernels.paged_attention import IMPLS, latent_attention
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.paged_attention.rows import SHORT, slot_queries, slots_of, with_results
from pallas_kernels.races import MODES, without_races
from pallas_kernels.tiles import TPUS, TpuTiles
from tests.pallas_kernels.test_paged_attention import Case, make, oracle, scatter, slow
from tests.pallas_kernels.test_paged_attention_gpu import decodes, short_rows
from tests.pallas_kernels.test_paged_attention_tpu import SMALL, Device, chunks, fitting
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

RANK, NUMBERS = pallas_tpu.LATENT
ROW = 640  # five registers
SIZES = {"query_dtype": "bfloat16", "head_dim": NUMBERS, "block_size": 16, "kv_heads": 1}


def case_of(
    rows: list[tuple[int, int]], heads: int, s: int, dtype: str, row: int = ROW, **options: Any
) -> Case:
    """Rows of (query tokens, context tokens). Queries have random numbers also where rows of pages
    have zeros.
    """
    t = max(1, sum(count for count, _ in rows)) + 3  # three of padding
    case = make(rows, t=t, b=len(rows), s=s, k=1, g=heads, d=row, seed=s, dtype=jnp.dtype(dtype))
    case.k[..., NUMBERS:] = 0
    return scatter(case._replace(v=case.k, **options), garbage=np.nan)


def expected_of(case: Case) -> np.ndarray:
    return oracle(case)[..., :RANK]


def kernel_output(case: Case, interpret: Any, tiles: TpuTiles) -> jax.Array:
    """Of one kernel: that of decodes if all rows are, [B, N, V]; that of short rows if they are,
    or that of chunks, [T, N, V].
    """
    _, heads, row = case.q.shape
    s = case.k_pages.shape[2]
    itemsize = case.k_pages.itemsize
    shape = pallas_tpu.Shape(1, heads, row, s, itemsize, itemsize, values=RANK)
    scores = pallas_tpu.Scores(case.scale, case.window, case.soft_cap)
    counts = np.diff(case.cu_q_lens)
    longest = int(counts.max())

    @jax.jit  # in one program: each operation around the kernel would be one
    def kernel(q, pages, tables, lengths, first):
        call = pallas_tpu.Call(pages, None, tables, shape, scores, tiles, interpret)
        if longest <= 1:
            return pallas_tpu.decode(call, q[: len(counts)], lengths)
        if longest > shape.longest_short:
            return pallas_tpu.chunks(call, q, lengths, first, jnp.diff(first) > 0)
        size = next(size for size in SHORT if longest <= size)
        row, begin, number = slots_of(jnp.diff(first) > 1, first, len(counts))
        results = pallas_tpu.short(call, slot_queries(q, begin, size), lengths, row, number)
        return with_results(jnp.zeros((*q.shape[:2], RANK), q.dtype), results, begin, number)

    q, pages, _, *tables = map(jnp.asarray, case.arguments)
    return kernel(q, pages, *tables)


def check(case: Case, mode: Any, tiles: TpuTiles | None = None) -> None:
    tiles = tiles or fitting(case.k_pages.shape[2])
    output = without_races(lambda interpret: kernel_output(case, interpret, tiles), mode)
    expected = expected_of(case)
    # in 16 bits weights and results are rounded to 8 bits; in 32 a score is a sum of 576 products
    atol = {"bfloat16": 4 * 2.0**-8, "float32": 1e-5}[output.dtype.name]
    chex.assert_trees_all_close(
        np.asarray(output, np.float32), expected[: len(output)], atol=atol, rtol=0
    )


# --- what they compute ----------------------------------------------------------------------------

SHAPES = [
    (heads, s, dtype) for heads in (16, 128) for s in (8, 16, 32) for dtype in pallas_tpu.DTYPES
]


Shape = tuple[int, int, str, str]  # heads, block size, dtype, mode


def shapes(often: Shape, *slow_ones: Shape) -> pytest.MarkDecorator:
    """The case of the default run; in slow runs every second shape, each in one mode: all pairs of
    heads, blocks and dtypes. `slow_ones` are more of them.
    """
    cases = [pytest.param(*often), *(slow(*shape) for shape in slow_ones)]
    for i, shape in enumerate(SHAPES):
        heads, s, dtype = shape
        is_slow = (heads == 16) ^ (s == 16) ^ (dtype == "float32")
        for j, mode in enumerate(MODES):
            mark = pytest.mark.slow if is_slow and (i + j) % 2 == 0 else pytest.mark.exhaustive
            if (*shape, mode) not in (often, *slow_ones):
                cases.append(pytest.param(*shape, mode, marks=mark))
    return pytest.mark.parametrize(("heads", "s", "dtype", "mode"), cases)


@shapes((16, 16, "bfloat16", "eager"))
def test_decodes_of_contexts_around_a_block_border(heads, s, dtype, mode):
    check(case_of(decodes(s, 70), heads, s, dtype), mode)


@shapes((16, 8, "bfloat16", "on_wait"), (128, 8, "bfloat16", "on_wait"))
def test_chunks_of_contexts_around_a_block_border(heads, s, dtype, mode):
    check(case_of(chunks(s, (19, s + 30)), heads, s, dtype), mode)


@shapes((16, 32, "float32", "on_wait"))
def test_short_rows_of_contexts_around_a_block_border(heads, s, dtype, mode):
    longest = 4 if heads == 128 else 8
    check(case_of(short_rows(s, longest, 50), heads, s, dtype), mode)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"window": 20}, {"soft_cap": 1.5}])
@pytest.mark.parametrize("rows", [decodes(16, 90), [(9, 60), (2, 40)]], ids=["decodes", "chunks"])
def test_windows_and_caps(rows, options):
    check(case_of(rows, 16, 16, "float32", **options), "on_wait")


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_rings_with_more_stages(stages):
    tiles = SMALL._replace(decode_stages=stages, chunk_stages=stages)
    check(case_of(decodes(16, 200), 16, 16, "bfloat16"), "eager", tiles)


# --- all lengths of rows together -----------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch):
    impl = IMPLS["pallas_tpu"]
    assert impl.latents
    attend = partial(pallas_tpu.latent_attention, interpret=True, tiles=SMALL)
    changed = impl._replace(latents=impl.latents._replace(attend=attend))
    monkeypatch.setitem(IMPLS, "pallas_tpu", changed)


MIXED = [(1, 33), (11, 40), (1, 1), (0, 0), (2, 100), (7, 70), (4, 17), (9, 9), (3, 3)]


@pytest.mark.parametrize(
    ("impl", "row"),
    [("pallas_tpu", ROW), slow("reference", NUMBERS), slow("xla", NUMBERS), slow("cpu", NUMBERS)],
)
@pytest.mark.parametrize("heads", [16, slow(128)])
def test_a_mixed_batch_keeps_the_contract_of_latents(impl, row, heads, interpreted):
    case = case_of(MIXED, heads, 16, "float32", row)
    q, pages, _, *tables = map(jnp.asarray, case.arguments)
    y = latent_attention(q, pages, *tables, rank=RANK, scale=case.scale, impl=impl)
    chex.assert_shape(y, (*q.shape[:2], RANK))
    chex.assert_trees_all_close(np.asarray(y), expected_of(case), atol=2e-5, rtol=0)


def test_a_batch_of_decodes_needs_no_offsets(interpreted):
    case = case_of([(1, 20), (1, 3)], 2, 8, "float32")
    q, pages, _, tables, lengths, _ = map(jnp.asarray, case.arguments)
    y = latent_attention(
        q[:2], pages, tables, lengths, None, rank=RANK, scale=case.scale, impl="pallas_tpu"
    )
    chex.assert_trees_all_close(np.asarray(y), expected_of(case)[:2], atol=2e-5, rtol=0)


# --- sizes and limits -----------------------------------------------------------------------------


def test_tiles_of_latents_fit_the_memory_of_every_tpu():
    for name in TPUS:
        tiles = TpuTiles.read(name)
        for heads in (1, 2, 3, 16, 20, 64, 128):
            for itemsize in (2, 4):
                shape = pallas_tpu.Shape(1, heads, ROW, 16, itemsize, itemsize, values=RANK)
                rows = [
                    pallas_tpu.decode_sizes(shape, tiles, queries)
                    for queries in (1, *SHORT)
                    if queries <= shape.longest_short
                ]
                chunk = pallas_tpu.chunk_sizes(shape, tiles)
                assert heads * chunk.tokens % 16 == 0
                for sizes in (*rows, chunk):
                    assert pallas_tpu.vmem(shape, sizes) <= tiles.vmem_limit
                    assert sizes.span % 128 == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float8_e4m3fn"}, "reads pages of bfloat16 or float32 and not of float8_e4m3fn"),
        ({"rank": 256}, "reads latents of 512 numbers in rows of 576, and they have 256 in rows"),
        ({"head_dim": 512}, "reads latents .* in rows of 576, and they have 512 in rows of 512"),
        ({"block_size": 4}, "needs blocks of 8, 16, 32, 64, 128 tokens, and they have 4"),
        ({"heads": 192}, "takes at most 128 query heads over latents, and there are 192"),
    ],
)
def test_what_the_kernel_does_not_read_is_refused(change, message):
    sizes = SIZES | {"dtype": "bfloat16", "rank": RANK, "heads": 16} | change
    heads = {name: sizes.pop(name) for name in ("rank", "heads", "head_dim", "kv_heads")}
    with refused(f"attention_impl 'pallas_tpu' {message}.*; 'xla' has no such limit"):
        attention.choose(
            "pallas_tpu", Device("tpu", "TPU v5 lite"), heads_of_layers=[heads], **sizes
        )


def test_an_engine_takes_latents_by_name_and_not_by_default():
    heads = {"heads": 128, "rank": RANK, "kv_heads": 1, "head_dim": NUMBERS}
    kind: dict[str, Any] = {
        "device": Device("tpu", "TPU v6 lite"),
        "dtype": "bfloat16",
        "query_dtype": "bfloat16",
        "block_size": 16,
    }
    assert attention.choose("pallas_tpu", heads_of_layers=[heads], **kind) == "pallas_tpu"
    assert attention.choose(None, heads_of_layers=[heads], **kind) == "xla"
    heads.pop("rank")
    with refused("needs a head size of 64, 128, 256, and it is 576"):
        attention.choose("pallas_tpu", heads_of_layers=[heads], **kind)


def test_arrays_that_do_not_fit_raise_with_their_shapes():
    q = jnp.zeros((3, 2, ROW))
    pages = jnp.zeros((4, 1, 8, ROW))
    tables = jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    call = partial(latent_attention, scale=1.0, impl="pallas_tpu")
    with refused("rank is 700; q .* has rows whose first 1 to 640 numbers can be values"):
        call(q, pages, *tables, rank=700)
    with refused(r"\[P, 1, S, R\] with q's R; got q \(3, 2, 600\), pages \(4, 1, 8, 640\)"):
        call(q[..., :600], pages, *tables, rank=RANK)
    with refused(
        "impl 'pallas_tpu' reads latents of 512 numbers in rows of 576, and they have 500 in rows"
    ):
        call(q, pages, *tables, rank=500)
