"""The TPU kernels, interpreted on a CPU with their copies and semaphores: what they compute, and that nothing is read
before it has arrived.

Copies happen when they are waited for or as soon as they are started (`dma_execution_mode`); a mistake may show in one
of the two alone. The race detector follows the semaphores. What the compiler makes of them, which interpretation does
not know, is for `python -m pallas_kernels.aot --target v5e`. The shared contract (test_paged_attention.py) runs on the
same kernels as ordinary XLA. What no context reaches is NaN here. The oracle is attention in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pagedjax.device import attention, cache
from pallas_kernels.kv_write import pallas_tpu as kv_write_tpu
from pallas_kernels.paged_attention import IMPLS, paged_attention
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.paged_attention.pallas_tpu import kernel as tpu_kernel
from pallas_kernels.tiles import TPUS, TpuTiles
from tests.pallas_kernels.test_paged_attention_gpu import Case, decodes, slow

# Short steps, so that short contexts have several, and blocks of two rows of the batch.
SMALL = TpuTiles.read("v5e")._replace(shortest_span=32, longest_span=32, decode_units=2, chunk_rows=64, chunk_span=32)
MODES = ("on_wait", "eager")
both_modes = pytest.mark.parametrize("mode", MODES)


def without_races(call, mode: str) -> Any:
    """call(interpret) under race detection."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    try:
        result = jax.block_until_ready(call(pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)))
        races = interpret_pallas_call.races
        assert races is not None
        assert not races.races_found, "two accesses to the same memory without an order"
    finally:
        interpret_pallas_call.reset_tpu_interpret_mode_state()
    return result


def run(case: Case, mode: str, *, tiles: TpuTiles = SMALL, order: int = 0, **options) -> np.ndarray:
    """The kernel that the case's rows need, alone: [T, N, D] or, of decodes, [B, N, D]."""
    a = {name: jnp.asarray(value) for name, value in case.arrays(order).items()}
    row, itemsize = pallas_tpu.row_size(case.d), a["q"].dtype.itemsize
    k_pages, v_pages = (a[name].reshape(*a[name].shape[:2], -1, row) for name in ("k_pages", "v_pages"))
    shape = pallas_tpu.Shape(case.heads, case.group, case.d, case.s, itemsize, itemsize)
    scores = pallas_tpu.Scores(case.d**-0.5, options.get("window"), options.get("soft_cap"))

    def compute(interpret):
        call = pallas_tpu.Call(k_pages, v_pages, a["tables"], shape, scores, tiles, interpret)
        if all(count <= 1 for count, _ in case.rows):
            return pallas_tpu.decode(call, a["q"][: len(case.rows)], a["lengths"])
        return pallas_tpu.chunks(call, a["q"], a["lengths"], a["first"], a["counts"] > 0)

    return np.asarray(without_races(compute, mode), np.float32)


def check(case: Case, mode: str, *, tiles: TpuTiles = SMALL, **options) -> None:
    found, expected = run(case, mode, tiles=tiles, **options), case.expected(**options)
    # in 16 bit weights and results are rounded to 8 bits; in 32 a score's error grows with the numbers it sums
    atol = {"bfloat16": 4 * 2.0**-8, "float32": 2e-6 * max(1, case.d / 128)}[case.dtype]
    chex.assert_trees_all_close(found, expected[: len(found)], atol=atol, rtol=0)


def chunks(s: int, *more: tuple[int, int]) -> list[tuple[int, int]]:
    """Around a block's border, a row without tokens, and tiles that two rows share."""
    return [(2, 2), (0, 0), (s - 1, s - 1), (5, s + 4), *more]


# --- what they compute ------------------------------------------------------------------------------------------------

GROUPS = {8: 3, 16: 1, 32: 8, 64: 16, 128: 4}
EVERY = [
    (d, s, group, dtype) for d in pallas_tpu.HEAD_SIZES for s, group in GROUPS.items() for dtype in pallas_tpu.DTYPES
]
OFTEN = [(64, 16, 1, "bfloat16", "on_wait"), (128, 8, 3, "float32", "eager")]
shapes = pytest.mark.parametrize(
    ("d", "s", "group", "dtype", "mode"),
    [*OFTEN, *(slow(*one, mode) for one in EVERY for mode in MODES if (*one, mode) not in OFTEN)],
)


@shapes
def test_decodes_of_contexts_around_a_block_border(d, s, group, dtype, mode):
    check(Case(decodes(s, 100), d=d, s=s, group=group, dtype=dtype, seed=s), mode, tiles=fitting(s))


@shapes
def test_chunks_of_contexts_around_a_block_border(d, s, group, dtype, mode):
    rows = chunks(s, (40, s + 60))
    check(Case(rows, d=d, s=s, group=group, dtype=dtype, seed=s), mode, tiles=fitting(s))


def fitting(s: int) -> TpuTiles:
    return SMALL._replace(shortest_span=max(32, s), longest_span=max(32, s), chunk_span=max(32, s))


@pytest.mark.parametrize("rows", [slow(decodes(16, 70)), chunks(16, (20, 50))], ids=["decodes", "chunks"])
@pytest.mark.parametrize("mode", [slow(MODES[0]), MODES[1]])
def test_smollm2s_heads(rows, mode):
    check(Case(rows, heads=3, group=3), mode)


@pytest.mark.parametrize("stages", [2, slow(3), slow(4)])
@pytest.mark.parametrize("rows", [decodes(16, 200), slow([(40, 200), (2, 90)])], ids=["decodes", "chunks"])
def test_more_steps_under_way(rows, stages):
    check(Case(rows), "eager", tiles=SMALL._replace(decode_stages=stages, chunk_stages=stages))


@pytest.mark.parametrize("rows", [slow(decodes(16, 200)), [(40, 200), (2, 90)]], ids=["decodes", "chunks"])
@pytest.mark.parametrize("options", [slow({"window": 20}), slow({"soft_cap": 1.5}), {"window": 70, "soft_cap": 3.0}])
def test_windows_and_caps(rows, options):
    check(Case(rows, group=2), "on_wait", **options)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [decodes(16, 150), [(30, 150), (9, 9)]], ids=["decodes", "chunks"])
def test_where_pages_lie_and_what_nobody_owns_change_no_bit(rows):
    found = run(Case(rows), "eager")
    chex.assert_trees_all_equal(run(Case(rows), "eager", order=1), found)
    chex.assert_trees_all_equal(run(Case(rows, poison=0.0), "eager"), found)


@pytest.mark.slow
def test_heads_in_more_than_one_body_of_the_loop():
    check(Case(decodes(16, 40), heads=12, group=1), "on_wait")
    check(Case(chunks(16), heads=10, group=1), "on_wait")


# --- what the contract asks of both together --------------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setitem(IMPLS, "pallas_tpu", partial(pallas_tpu.paged_attention, interpret=True, tiles=SMALL))


@pytest.mark.parametrize("options", [{}, slow({"window": 20, "soft_cap": 2.0})], ids=["plain", "window and cap"])
def test_a_mixed_batch_keeps_the_contract(options, interpreted):
    case = Case([(1, 33), (20, 40), (1, 1), (0, 0), (2, 100), (1, 64)], heads=2, group=3)
    a = case.arrays()
    arguments = [jnp.asarray(a[name]) for name in ("q", "k_pages", "v_pages", "tables", "lengths", "first")]
    found = paged_attention(*arguments, scale=case.d**-0.5, impl="pallas_tpu", **options)
    assert found.dtype == jnp.bfloat16
    chex.assert_trees_all_close(np.asarray(found, np.float32), case.expected(**options), atol=2.0**-6, rtol=0)
    assert not np.asarray(found[a["first"][-1] :]).any(), "padding tokens are not zero"
    arguments[1:3] = (a.reshape(*a.shape[:2], -1, 128) for a in arguments[1:3])  # as an engine keeps them
    in_rows = paged_attention(*arguments, scale=case.d**-0.5, impl="pallas_tpu", **options)
    chex.assert_trees_all_equal(np.asarray(in_rows, np.float32), np.asarray(found, np.float32))


def test_pages_read_follow_the_context_and_not_the_table():
    """Every entry past a context, and every page before a window, is one that nobody may read."""
    case = Case([(1, 100), (1, 33), (1, 1)], s=16)
    read, right = set(), tpu_kernel.page_of

    def watched(*arguments):
        page = right(*arguments)
        jax.debug.callback(lambda page: read.add(int(page)), page)
        return page

    a = {name: jnp.asarray(value) for name, value in case.arrays().items()}
    pages = [a[name].reshape(*a[name].shape[:2], -1, 128) for name in ("k_pages", "v_pages")]
    tables = jnp.pad(a["tables"], ((0, 0), (0, 200)))
    shape = pallas_tpu.Shape(1, 4, 64, 16, 2, 2)
    for window, owned in ((None, {*range(7)}), (20, {5, 6})):
        read.clear()
        call = pallas_tpu.Call(*pages, tables, shape, pallas_tpu.Scores(0.125, window, None), SMALL, True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu_kernel, "page_of", watched)
            jax.block_until_ready(pallas_tpu.decode(call, a["q"][:3], a["lengths"]))
            jax.effects_barrier()
        second = {*range(3)} if window is None else {0, 1, 2} if 33 - 20 < 16 else {1, 2}
        expected = {int(a["tables"][0, i]) for i in owned} | {int(a["tables"][1, i]) for i in second}
        assert read == expected | {int(a["tables"][2, 0])}


# --- writing ----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """Tokens (first position, number) of sequences and what is in their pages, then padding."""

    rows: tuple[tuple[int, int], ...] = ((5, 20), (17, 1), (3, 1), (0, 13), (15, 7))
    padding: int = 6
    heads: int = 2
    d: int = 64
    s: int = 16
    dtype: str = "bfloat16"

    def arrays(self) -> tuple[np.ndarray, ...]:
        """k_pages, v_pages [P, K, S, D], k, v [T, K, D], slots [T]."""
        rng, slots, page = np.random.default_rng(0), [], 1
        for begin, count in self.rows:
            position = np.arange(begin, begin + count)
            slots += list((page + position // self.s) * self.s + position % self.s)
            page += -(-(begin + count) // self.s)
        t = len(slots) + self.padding
        new = rng.standard_normal((2, t, self.heads, self.d), np.float32)
        pages = rng.standard_normal((2, page, self.heads, self.s, self.d), np.float32).astype(jnp.dtype(self.dtype))
        return *pages, *new, np.array([*slots, *[0] * self.padding], np.int32)


def check_write(case: Written, mode: str) -> None:
    k_pages, v_pages, k, v, slots = map(jnp.asarray, case.arrays())
    row = pallas_tpu.row_size(case.d)
    in_rows = [a.reshape(*a.shape[:2], -1, row) for a in (k_pages, v_pages)]
    rows = len(case.rows) + 1

    def compute(interpret):
        return pallas_tpu.write(*in_rows, k, v, slots, rows=rows, tiles=SMALL, interpret=interpret)

    for pages, old, new in zip(without_races(compute, mode), (k_pages, v_pages), (k, v), strict=True):
        found, expected = np.asarray(pages.reshape(old.shape), np.float32), np.array(old, np.float32)
        for slot, token in zip(np.asarray(slots), np.asarray(new.astype(old.dtype), np.float32), strict=True):
            expected[slot // case.s, :, slot % case.s] = token
        chex.assert_trees_all_equal(found[1:], expected[1:])  # page 0 is nobody's


@both_modes
@pytest.mark.parametrize(
    ("d", "s", "dtype"),
    [
        (64, 16, "bfloat16"),
        *(slow(d, s, t) for d in pallas_tpu.HEAD_SIZES for s in pallas_tpu.BLOCK_SIZES for t in pallas_tpu.DTYPES),
    ],
)
def test_tokens_land_in_their_slots_and_nowhere_else(d, s, dtype, mode):
    check_write(Written(d=d, s=s, dtype=dtype), mode)


@pytest.mark.slow
def test_writing_when_every_row_takes_one_token():
    check_write(Written(rows=tuple((i % 16, 1) for i in range(40)), padding=0), "on_wait")
    check_write(Written(rows=((0, 64),), padding=0), "eager")
    check_write(Written(rows=((7, 1),), padding=0), "eager")
    check_write(Written(rows=(), padding=8), "eager")


@pytest.mark.parametrize(("d", "s"), [(64, 16), (64, 8), (16, 16), (128, 8)])
def test_rows_of_several_tokens_hold_the_same_bytes(d, s):
    """The scatter that everybody else writes with, into the cache of a TPU."""
    k_pages, v_pages, k, v, slots = map(jnp.asarray, Written(d=d, s=s, dtype="float32").arrays())
    row = pallas_tpu.row_size(d)
    in_rows = cache.write(*(a.reshape(*a.shape[:2], -1, row) for a in (k_pages, v_pages)), k, v, slots)
    for found, expected in zip(in_rows, cache.write(k_pages, v_pages, k, v, slots), strict=True):
        chex.assert_trees_all_equal(np.asarray(found).reshape(expected.shape)[1:], np.asarray(expected)[1:])


# --- the checks can fail ----------------------------------------------------------------------------------------------

TWO = [
    pytest.param(decodes(16, 100), id="decodes"),
    pytest.param([(30, 120), (9, 9)], id="chunks", marks=pytest.mark.slow),
]


def caught(case: Case, mode: str) -> None:
    with pytest.raises(Exception, match=r"without an order|Not equal to tolerance|[Ss]emaphore|Out-of-bounds"):
        check(case, mode)


@both_modes
@pytest.mark.parametrize("rows", TWO)
def test_a_missing_wait_is_seen(rows, mode, monkeypatch):
    monkeypatch.setattr(tpu_kernel, "wait", lambda *_: None)
    caught(Case(rows), mode)


@pytest.mark.parametrize("mode", [slow("on_wait"), "eager"])
@pytest.mark.parametrize("rows", TWO)
def test_a_buffer_used_again_too_early_is_seen(rows, mode, monkeypatch):
    monkeypatch.setattr(tpu_kernel, "slot_of", lambda r, number: number * 0)
    caught(Case(rows), mode)


@pytest.mark.parametrize("rows", TWO)
def test_a_wrong_page_is_seen(rows, monkeypatch):
    right = tpu_kernel.page_of
    monkeypatch.setattr(tpu_kernel, "page_of", lambda r, item, step, page: right(r, item, step, page + 1))
    caught(Case(rows), "eager")


@pytest.mark.parametrize("rows", TWO)
def test_a_page_too_few_is_seen(rows, monkeypatch):
    def short(r, step, seen, right=tpu_kernel.page_range):
        first, stop = right(r, step, seen)
        return first, jnp.maximum(stop - 1, first)

    monkeypatch.setattr(tpu_kernel, "page_range", short)
    caught(Case(rows), "eager")


@pytest.mark.parametrize(
    ("phase", "mode"),
    [("read", "on_wait"), ("finish", "eager"), slow("read", "eager"), slow("finish", "on_wait")],
)
def test_a_missing_wait_of_a_write_is_seen(phase, mode, monkeypatch):
    """Of the pieces that are read, and of what is written back."""
    monkeypatch.setattr(
        kv_write_tpu, "wait", lambda copies, which, right=kv_write_tpu.wait: which != phase and right(copies, which)
    )
    with pytest.raises(Exception, match=r"without an order|Arrays are not equal|[Ss]emaphore"):
        check_write(Written(), mode)


# --- who is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "reads pages of bfloat16 or float32 and not of float16"),
        ({"d": 96}, "needs a head size of 64, 128, 256, and it is 96"),
        ({"s": 24}, "needs blocks of 8, 16, 32, 64, 128 tokens, and they have 24"),
        ({"group": 33}, "takes at most 32 query heads for each key head, and there are 33"),
    ],
)
def test_a_shape_it_cannot_take_is_named_with_who_can(change, message):
    a = Case([(1, 5)])._replace(**change).arrays()
    names = ("q", "k_pages", "v_pages", "tables", "lengths", "first")
    with pytest.raises(ValueError, match=rf"impl 'pallas_tpu' {message}; impl 'xla' has no such limit"):
        paged_attention(*(jnp.asarray(a[name]) for name in names), scale=1.0, impl="pallas_tpu")


def test_pages_that_are_no_whole_rows_or_of_8_bits_are_refused(interpreted):
    a = Case([(1, 5)], d=16, s=4).arrays()
    names = ("q", "k_pages", "v_pages", "tables", "lengths", "first")
    arguments = [jnp.asarray(a[name]) for name in names]
    with pytest.raises(ValueError, match=r"needs pages of whole rows of 128, and they are \[4, 16\]"):
        paged_attention(*arguments, scale=1.0, impl="pallas_tpu")
    arguments[1:3] = (a.astype(jnp.uint8) for a in arguments[1:3])
    with pytest.raises(ValueError, match="reads pages of bfloat16 or float32 and not of uint8"):
        paged_attention(*arguments, scale=1.0, impl="pallas_tpu")


def test_block_tables_that_scalar_memory_does_not_hold_are_refused_with_what_to_lower():
    assert pallas_tpu.too_much(64, 3584) == ""
    message = pallas_tpu.too_much(256, 8192)
    assert "256 rows of 8192 blocks take 8,388,608" in message
    assert "lower max_num_seqs or max_model_len, or raise block_size" in message


class Device(NamedTuple):
    platform: str
    device_kind: str


def test_a_device_that_is_no_known_tpu_is_named():
    assert "'cpu'" in pallas_tpu.obstacle(jax.devices("cpu")[0])
    assert "no tile sizes for 'TPU v99'" in pallas_tpu.obstacle(Device("tpu", "TPU v99"))
    assert pallas_tpu.obstacle(Device("tpu", "TPU v5 lite")) == ""


def test_it_is_chosen_by_name_alone():
    sizes = {"query_dtype": "bfloat16", "head_dim": 64, "block_size": 16, "kv_heads": 3, "heads": 9}
    device = Device("tpu", "TPU v6 lite")
    assert attention.choose(None, device, dtype="bfloat16", **sizes) == "xla"
    assert attention.choose("pallas_tpu", device, dtype="bfloat16", **sizes) == "pallas_tpu"
    with pytest.raises(
        ValueError, match="attention_impl 'pallas_tpu' reads pages of bfloat16 or float32 and not of float8"
    ):
        attention.choose("pallas_tpu", device, dtype="float8_e4m3fn", **sizes)
    with pytest.raises(ValueError, match="attention_impl 'pallas_tpu' runs on platform 'tpu' and not on 'cpu'"):
        attention.choose("pallas_tpu", jax.devices("cpu")[0], dtype="bfloat16", **sizes)


def test_a_tpu_finds_its_tiles_and_they_fit_it():
    kinds = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
    assert {kind: TpuTiles.names(kind) for kind in kinds} == {kind: [name] for kind, name in kinds.items()}
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
            for sizes in (pallas_tpu.decode_sizes(shape, tiles), pallas_tpu.chunk_sizes(shape, tiles)):
                assert pallas_tpu.vmem(shape, sizes) <= tiles.vmem_limit
                assert sizes.span % 128 == 0
