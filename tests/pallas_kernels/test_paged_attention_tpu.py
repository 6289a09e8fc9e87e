"""The TPU attention kernels, interpreted on a CPU with their copies and semaphores: results and
races.

A copy runs when it is awaited or as soon as it is started (`dma_execution_mode`); a mistake may
show in one of the two alone. The race detector follows the semaphores. Interpretation does not show
what the compiler does: for this run `python -m pallas_kernels.aot --target v5e`. The shared
contract (test_paged_attention.py) runs on the same kernels as ordinary XLA. Here, slots outside all
contexts are NaN. The oracle is attention in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.device import attention
from pallas_kernels.paged_attention import IMPLS, paged_attention
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.paged_attention.pallas_tpu import kernel as tpu_kernel
from pallas_kernels.paged_attention.rows import (
    SHORT,
    sizes_of_short_rows,
    slot_queries,
    slots_of,
    with_results,
)
from pallas_kernels.races import MODES, without_races
from pallas_kernels.tiles import TPUS, TpuTiles
from tests.pallas_kernels.test_paged_attention_gpu import (
    MIXED,
    Case,
    assert_mixed,
    assert_near,
    decodes,
    short_rows,
    slow,
)
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

# Short steps, so that short contexts have several, and blocks of two rows of the batch.
SMALL = TpuTiles.read("v5e")._replace(
    shortest_span=32, longest_span=32, decode_units=2, chunk_rows=64, chunk_span=32
)
both_modes = pytest.mark.parametrize("mode", MODES)


def kernel_output(
    case: Case,
    interpret,
    *,
    tiles: TpuTiles = SMALL,
    order: int = 0,
    shorts: bool = False,
    **options,
) -> jax.Array:
    """Of one kernel: that of decodes if all rows are, [B, N, D]; else that of chunks or of short
    rows, [T, N, D].
    """
    q, k_pages, v_pages, *tables = case.batch(order).arguments
    row = pallas_tpu.row_size(case.d)
    itemsize = q.dtype.itemsize
    pages = [array.reshape(*array.shape[:2], -1, row) for array in (k_pages, v_pages)]
    shape = pallas_tpu.Shape(case.heads, case.group, case.d, case.s, itemsize, itemsize)
    scores = pallas_tpu.Scores(case.d**-0.5, options.get("window"), options.get("soft_cap"))

    @jax.jit  # in one program: each operation around the kernel would be one
    def kernel(q, pages, tables, lengths, first):
        call = pallas_tpu.Call(*pages, tables, shape, scores, tiles, interpret)
        counts = jnp.diff(first)
        longest = max(count for count, _ in case.rows)
        if longest <= 1:
            return pallas_tpu.decode(call, q[: len(case.rows)], lengths)
        if shorts:
            row_size = next(size for size in SHORT if longest <= size)
            row, begin, number = slots_of(counts > 1, first, len(case.rows))
            queries = slot_queries(q, begin, row_size)
            results = pallas_tpu.short(call, queries, lengths, row, number)
            return with_results(jnp.zeros_like(q), results, begin, number)
        return pallas_tpu.chunks(call, q, lengths, first, counts > 0)

    return kernel(q, pages, *tables)


def run(case: Case, mode: Any, **options) -> np.ndarray:
    output = without_races(lambda interpret: kernel_output(case, interpret, **options), mode)
    return np.asarray(output, np.float32)


def check(
    case: Case, mode: str, *, tiles: TpuTiles = SMALL, shorts: bool = False, **options
) -> None:
    output = run(case, mode, tiles=tiles, shorts=shorts, **options)
    expected = case.expected(**options)
    # in 16 bit weights and results are rounded to 8 bits; in 32 a score's error grows with the
    # numbers it sums
    atol = {"bfloat16": 4 * 2.0**-8, "float32": 2e-6 * max(1, case.d / 128)}[case.dtype]
    chex.assert_trees_all_close(output, expected[: len(output)], atol=atol, rtol=0)


def chunks(s: int, *longer: tuple[int, int]) -> list[tuple[int, int]]:
    """Contexts around a block's border, a row without tokens, and tiles with tokens of two rows."""
    return [(2, 2), (0, 0), (s - 1, s - 1), (5, s + 4), *longer]


# --- what they compute ----------------------------------------------------------------------------

GROUPS = {8: 3, 16: 1, 32: 8, 64: 16, 128: 4}
EVERY = [
    (d, s, group, dtype)
    for d in pallas_tpu.HEAD_SIZES
    for s, group in GROUPS.items()
    for dtype in pallas_tpu.DTYPES
]


def shapes(often: tuple) -> pytest.MarkDecorator:
    """The case of the default run, and all others: the slow run has each shape with both dtypes and
    both modes once, in pairs that take turns.
    """
    cases: list[Any] = [often]
    for number, shape in enumerate(EVERY):
        paired = MODES[(number + number // 2) % 2]
        for mode in MODES:
            mark = pytest.mark.slow if mode == paired else pytest.mark.exhaustive
            if (*shape, mode) != often:
                cases.append(pytest.param(*shape, mode, marks=mark))
    return pytest.mark.parametrize(("d", "s", "group", "dtype", "mode"), cases)


@shapes((128, 8, 3, "float32", "eager"))
def test_decodes_of_contexts_around_a_block_border(d, s, group, dtype, mode):
    check(Case(decodes(s, 100), d=d, s=s, group=group, dtype=dtype, seed=s), mode, tiles=fitting(s))


@shapes((64, 16, 1, "bfloat16", "on_wait"))
def test_chunks_of_contexts_around_a_block_border(d, s, group, dtype, mode):
    rows = chunks(s, (40, s + 60))
    check(Case(rows, d=d, s=s, group=group, dtype=dtype, seed=s), mode, tiles=fitting(s))


@pytest.mark.parametrize(
    ("d", "s", "group", "dtype", "mode", "longest"),
    [
        (64, 16, 3, "bfloat16", "on_wait", 8),
        slow(128, 8, 4, "float32", "eager", 4),
        *(
            slow(*shape, mode, longest)
            for shape in EVERY
            for mode, longest in zip(MODES, (8, 4), strict=True)
        ),
        *(
            slow(d, 16, group, "bfloat16", "eager", 8)
            for d in pallas_tpu.HEAD_SIZES
            for group in (1, 3, 4, 8)
        ),
    ],
)
def test_short_rows_of_contexts_around_a_block_border(d, s, group, dtype, mode, longest):
    rows = short_rows(s, longest, 100)
    check(
        Case(rows, d=d, s=s, group=group, dtype=dtype, seed=s), mode, tiles=fitting(s), shorts=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"window": 20}, {"soft_cap": 1.5}, {"window": 33, "soft_cap": 3.0}]
)
def test_windows_and_caps_of_short_rows(options):
    check(Case(short_rows(16, 8, 90, 200), group=2), "eager", shorts=True, **options)


def test_sizes_of_short_rows_are_those_that_a_call_can_have():
    assert [sizes_of_short_rows(t) for t in (1, 2, 3, 4)] == [[], [(2, 2)], [(2, 4)], [(2, 4)]]
    assert [sizes_of_short_rows(t) for t in (5, 8, 9, 512)] == [[(2, 4), (5, 8)]] * 4
    assert [sizes_of_short_rows(t, max_size=4) for t in (1, 8, 512)] == [[], [(2, 4)], [(2, 4)]]


def fitting(s: int) -> TpuTiles:
    return SMALL._replace(shortest_span=max(32, s), longest_span=max(32, s), chunk_span=max(32, s))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [decodes(16, 70), chunks(16, (20, 50))], ids=["decodes", "chunks"])
@pytest.mark.parametrize("mode", MODES)
def test_heads_of_smollm2(rows, mode):
    check(Case(rows, heads=3, group=3), mode)


@pytest.mark.slow  # those above have three for decodes and two for chunks
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    "rows", [decodes(16, 200), [(40, 200), (2, 90)]], ids=["decodes", "chunks"]
)
def test_rings_with_more_stages(rows, stages):
    check(Case(rows), "eager", tiles=SMALL._replace(decode_stages=stages, chunk_stages=stages))


@pytest.mark.parametrize(
    "rows", [slow(decodes(16, 200)), [(40, 200), (2, 90)]], ids=["decodes", "chunks"]
)
@pytest.mark.parametrize(
    "options", [slow({"window": 20}), slow({"soft_cap": 1.5}), {"window": 70, "soft_cap": 3.0}]
)
def test_windows_and_caps(rows, options):
    check(Case(rows, group=2), "on_wait", **options)


@pytest.mark.slow
def test_heads_in_more_than_one_body_of_the_loop():
    check(Case(decodes(16, 40), heads=12, group=1), "on_wait")
    check(Case(chunks(16), heads=10, group=1), "on_wait")


# --- decodes and chunks together ------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch):
    attend = partial(pallas_tpu.paged_attention, interpret=True, tiles=SMALL)
    monkeypatch.setitem(IMPLS, "pallas_tpu", IMPLS["pallas_tpu"]._replace(attend=attend))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, slow({"window": 20, "soft_cap": 2.0})], ids=["plain", "window and cap"]
)
def test_a_mixed_batch_keeps_the_contract(options, interpreted):
    arguments = MIXED.arguments()
    output = paged_attention(*arguments, scale=MIXED.d**-0.5, impl="pallas_tpu", **options)
    assert_mixed(output, options)
    # as an engine keeps them
    arguments[1:3] = (a.reshape(*a.shape[:2], -1, 128) for a in arguments[1:3])
    in_rows = paged_attention(*arguments, scale=MIXED.d**-0.5, impl="pallas_tpu", **options)
    chex.assert_trees_all_equal(np.asarray(in_rows, np.float32), np.asarray(output, np.float32))


@pytest.mark.parametrize("row", [(2, 40), slow((3, 3)), slow((4, 33)), slow((5, 70)), slow((8, 8))])
def test_a_call_of_one_short_row_and_padding_rows(row, interpreted):
    """A step of one sequence with drafts: as many rows of the batch as tokens, and all but one are
    padding.
    """
    count = row[0]
    case = Case([row, *[(0, 0)] * (row[0] - 1)], group=4)
    arguments = case.arguments()
    arguments[0] = arguments[0][:count]  # without padding tokens
    output = paged_attention(*arguments, scale=case.d**-0.5, impl="pallas_tpu")
    assert_near(output, case.expected()[:count])


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [(2048, 3001), (4096, 5000)])
def test_short_rows_of_long_contexts(contexts, interpreted):
    case = Case([(4, contexts[0]), (1, contexts[0]), (8, contexts[1])], s=64, group=4)
    arguments = case.arguments()
    output = paged_attention(*arguments, scale=case.d**-0.5, impl="pallas_tpu")
    assert_near(output, case.expected())


@pytest.mark.parametrize(("window", "owned"), [slow(None, {*range(7)}), (20, {5, 6})])
def test_exactly_the_pages_of_the_visible_context_are_read(window, owned):
    case = Case([(1, 100), (1, 33), (1, 1)], s=16)
    read = set()
    right = tpu_kernel.page_of

    def watched(*arguments):
        page = right(*arguments)
        jax.debug.callback(lambda page: read.add(int(page)), page)
        return page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_kernel, "page_of", watched)
        jax.block_until_ready(kernel_output(case, True, window=window))
        jax.effects_barrier()
    tables = case.batch().block_tables
    visible = [(0, i) for i in owned] + [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert read == {int(tables[place]) for place in visible}


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "reads pages of bfloat16 or float32 and not of float16"),
        ({"d": 96}, "needs a head size of 64, 128, 256, and it is 96"),
        ({"s": 24}, "needs blocks of 8, 16, 32, 64, 128 tokens, and they have 24"),
        ({"group": 33}, "takes at most 32 query heads for each key head, and there are 33"),
    ],
)
def test_unsupported_shapes_raise_with_the_reason(change, message):
    case = Case([(1, 5)])._replace(**change)
    with refused(rf"impl 'pallas_tpu' {message}; impl 'xla' has no such limit"):
        paged_attention(*case.arguments(), scale=1.0, impl="pallas_tpu")


def test_pages_of_partial_rows_or_of_8_bits_raise(interpreted):
    small, arguments = (Case([(1, 5)], d=16, s=s, poison=0.0).arguments() for s in (4, 8))
    with refused(r"needs pages of whole rows of 128, and they are \[4, 16\]"):
        paged_attention(*small, scale=1.0, impl="pallas_tpu")
    arguments[1:3] = (a.astype(jnp.uint8) for a in arguments[1:3])
    with refused("reads pages of bfloat16 or float32 and not of uint8"):
        paged_attention(*arguments, scale=1.0, impl="pallas_tpu")


def test_block_tables_beyond_scalar_memory_raise_with_the_setting_to_lower():
    assert pallas_tpu.scalar_memory_obstacle(64, 3584) == ""
    message = pallas_tpu.scalar_memory_obstacle(256, 8192)
    assert "256 rows of 8192 blocks take 8,388,608" in message
    assert "lower max_num_seqs or max_model_len, or raise block_size" in message


class Device(NamedTuple):
    platform: str
    device_kind: str


def test_devices_that_are_no_known_tpu_have_an_obstacle():
    assert "'cpu'" in pallas_tpu.wrong_device(jax.devices("cpu")[0])
    assert "no tile sizes for 'TPU v99'" in pallas_tpu.wrong_device(Device("tpu", "TPU v99"))
    assert pallas_tpu.wrong_device(Device("tpu", "TPU v5 lite")) == ""


def test_an_engine_takes_the_kernel_by_name_and_not_by_default():
    sizes = {"query_dtype": "bfloat16", "head_dim": 64, "block_size": 16, "kv_heads": 3, "heads": 9}
    device = Device("tpu", "TPU v6 lite")
    assert attention.choose(None, device, dtype="bfloat16", **sizes) == "xla"
    assert attention.choose("pallas_tpu", device, dtype="bfloat16", **sizes) == "pallas_tpu"
    with refused(
        "attention_impl 'pallas_tpu' reads pages of bfloat16 or float32 and not of float8"
    ):
        attention.choose("pallas_tpu", device, dtype="float8_e4m3fn", **sizes)
    with refused("attention_impl 'pallas_tpu' runs on platform 'tpu' and not on 'cpu'"):
        attention.choose("pallas_tpu", jax.devices("cpu")[0], dtype="bfloat16", **sizes)


def test_every_tpu_has_tiles_that_fit_its_memory():
    kinds = {
        "TPU v4": "v4",
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
        "TPU7x": "tpu7x",
    }
    assert {kind: TpuTiles.names(kind) for kind in kinds} == {
        kind: [name] for kind, name in kinds.items()
    }
    for name in TPUS:
        tiles = TpuTiles.read(name)
        assert tiles.vmem_limit < tiles.vmem
        for heads, group, d, itemsize in (
            (3, 3, 64, 2),
            (8, 4, 128, 4),
            (32, 1, 128, 4),
            (1, 8, 128, 2),
            (16, 2, 256, 4),
        ):
            shape = pallas_tpu.Shape(heads, group, d, 16, itemsize, itemsize)
            rows = [pallas_tpu.decode_sizes(shape, tiles, queries) for queries in (1, *SHORT)]
            for sizes in (*rows, pallas_tpu.chunk_sizes(shape, tiles)):
                assert pallas_tpu.vmem(shape, sizes) <= tiles.vmem_limit
                assert sizes.span % 128 == 0
