"""The Hopper kernels, interpreted on a CPU: results, and races between threads.

Interpretation does not check registers, layouts and alignment; `python -m pallas_kernels.aot`
compiles the kernels for that. It needs JAX 0.11 and so Python 3.12. The oracle is attention in
float64 over contiguous keys.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpreted import interpreted, interpreted_without_races
from pallas_kernels.paged_attention import IMPLS, paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.rows import SHORT, slot_queries, slots_of, with_results
from pallas_kernels.shared import hopper
from pallas_kernels.tiles import Tiles
from tests.pallas_kernels import test_paged_attention
from tests.pallas_kernels.test_paged_attention import (
    assert_padding_is_zero,
    make,
    oracle,
    scatter,
    slow,
)
from tests.refusals import refused

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < pallas_gpu.JAX_NEEDED, reason="GPU interpret mode needs JAX 0.11"
)
SMALL = Tiles.read("h200")._replace(multiprocessors=1)  # nothing is split
NAN = float("nan")


class Case(NamedTuple):
    """Rows of (query tokens, context tokens). Slots outside all contexts are NaN: page 0, free
    pages, ends of pages.
    """

    rows: list[tuple[int, int]]
    d: int = 64
    s: int = 16
    heads: int = 1
    group: int = 4
    dtype: str = "bfloat16"
    seed: int = 0
    poison: float = NAN
    mean: float = 0.0  # of values

    def batch(self, order: int = 0) -> test_paged_attention.Case:
        """`order` seeds the places of a row's pages in the cache alone."""
        t = max(1, sum(count for count, _ in self.rows)) + 3  # three of padding
        sizes = {"s": self.s, "k": self.heads, "g": self.group, "d": self.d}
        options = {"seed": self.seed, "dtype": jnp.dtype(self.dtype), "garbage": self.poison}
        batch = make(self.rows, t=t, b=len(self.rows), **sizes, **options)
        batch = batch._replace(v=batch.v + np.asarray(self.mean, options["dtype"]))
        pages = np.random.default_rng([order, 1]).permutation(len(batch.k_pages) - 1) + 1
        return scatter(batch, pages, self.poison)

    def arguments(self) -> list[jax.Array]:
        """The arguments of `paged_attention`, in its order."""
        return [jnp.asarray(array) for array in self.batch().arguments]

    def expected(self, **options: Any) -> np.ndarray:
        """options: window, soft_cap and sinks."""
        return oracle(self.batch()._replace(**options))


# decodes, short rows and chunks in one batch
MIXED = Case(
    [
        (1, 33),
        (20, 40),
        (1, 1),
        (0, 0),
        (2, 100),
        (1, 64),
        (8, 70),
        (4, 17),
        (9, 9),
        (5, 48),
        (3, 3),
    ],
    heads=2,
    group=3,
)


def assert_near(output: jax.Array, expected: np.ndarray) -> None:
    """Weights and results are rounded to 16 bits."""
    first = np.asarray(output, np.float32)[: len(expected)]
    chex.assert_trees_all_close(first, expected, atol=2.0**-6, rtol=0)


def assert_mixed(output: jax.Array, options: dict) -> None:
    """The attention of `MIXED` keeps the contract, and padding is zero."""
    chex.assert_type(output, jnp.bfloat16)
    chex.assert_shape(output, MIXED.batch().dims["TND"])
    assert_near(output, MIXED.expected(**options))
    assert_padding_is_zero(output, MIXED.batch())


def run(
    case: Case,
    *,
    tiles: Tiles = SMALL,
    order: int = 0,
    shorts: bool = False,
    overlapped: bool = False,
    **options,
) -> np.ndarray:
    """Runs one kernel under race detection: that of decodes if all rows are, [B, N, D]; else that
    of chunks, of overlapped chunks or of short rows, [T, N, D]."""
    from pallas_kernels.paged_attention.pallas_gpu import chunks, decode
    from pallas_kernels.paged_attention.pallas_gpu import overlapped as overlapped_kernel

    batch = case.batch(order)
    options = {"scale": case.d**-0.5, "window": None, "soft_cap": None, "tiles": tiles} | options
    if options["window"]:  # what no query of a row sees may be given back: page 0, which has NaN
        for row, (count, context) in enumerate(case.rows):
            past = max(context - count + 1 - options["window"], 0) // case.s
            batch.block_tables[row, :past] = 0
    q, *pages, first = map(jnp.asarray, batch.arguments)
    counts = jnp.diff(first)
    with interpreted_without_races():
        longest = max(count for count, _ in case.rows)
        if shorts and longest > 1:
            row_size = next(size for size in SHORT if longest <= size)
            row, begin, number = slots_of(counts > 1, first, len(case.rows))
            results = decode.decode_short(
                slot_queries(q, begin, row_size), *pages, row, number, **options
            )
            out = with_results(jnp.zeros_like(q), results, begin, number)
        elif overlapped:
            options.pop("tiles")  # it has its own
            out = overlapped_kernel.chunks(q, *pages, first[:-1], counts, **options)
        elif longest <= 1:
            out = decode.decode(q[: len(case.rows)], *pages, **options)
        else:
            out = chunks.chunks(q, *pages, first[:-1], counts, **options)
        return np.asarray(out, np.float32)


def check(
    case: Case,
    *,
    tiles: Tiles = SMALL,
    shorts: bool = False,
    overlapped: bool = False,
    **options,
) -> None:
    output = run(case, tiles=tiles, shorts=shorts, overlapped=overlapped, **options)
    expected = case.expected(**options)
    # weights and results are rounded to this number of bits
    bits = {"bfloat16": 8, "float16": 11}[case.dtype]
    chex.assert_tree_all_finite(output)
    chex.assert_trees_all_close(output, expected[: len(output)], atol=4 * 2.0**-bits, rtol=0)


def decodes(s: int, *contexts: int) -> list[tuple[int, int]]:
    """Lengths around a block's border. Each row has one query token, also the one without a
    context.
    """
    return [(1, length) for length in (0, 1, s - 1, s, s + 1, *contexts)]


@needs_interpreter
@pytest.mark.parametrize(
    ("heads", "group", "has_sinks"),
    [(2, 4, True), slow(16, 1, False), slow(4, 2, False), slow(2, 8, False), slow(2, 3, True)],
)
def test_decodes_that_read_their_queries_in_place_have_the_same_bits(heads, group, has_sinks):
    """Columns are then queries of several key heads. Three are no part of eight: they are padded."""
    case = Case(decodes(16), heads=heads, group=group)
    options = {"sinks": sinks_of(case)} if has_sinks else {}
    chex.assert_trees_all_equal(run(case, in_place=True, **options), run(case, **options))


def short_rows(s: int, longest: int, *contexts: int) -> list[tuple[int, int]]:
    """Rows of every length up to `longest`, around a block's border, with a row without tokens
    among them.
    """
    counts = range(2, 5) if longest == 4 else range(5, 9)
    around = [(count, max(count, s + i)) for i, count in enumerate(counts)]
    return [(longest, longest), (0, 0), *around, *((longest - 1, context) for context in contexts)]


EVERY = [
    (d, s, group)
    for d in pallas_gpu.HEAD_SIZES
    for s in pallas_gpu.BLOCK_SIZES
    for group in (1, 3, 8, 16)
]
OFTEN = [(64, 8, 3), (64, 128, 16), (128, 16, 4), (128, 128, 1)]


# --- what they compute ----------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize(
    ("d", "s", "group"), [*OFTEN, *(slow(*shape) for shape in EVERY if shape not in OFTEN)]
)
def test_decodes_of_contexts_around_a_block_border(d, s, group):
    check(Case(decodes(s, 300), d=d, s=s, group=group, seed=s))


@needs_interpreter
@pytest.mark.parametrize(
    ("d", "s", "group"), [*OFTEN, *(slow(*shape) for shape in EVERY if shape not in OFTEN)]
)
def test_chunks_of_contexts_around_a_block_border(d, s, group):
    rows = [(2, 2), (0, 0), (s - 1, s - 1), (5, s + 4), (130 // group + 2, s + 150)]
    check(Case(rows, d=d, s=s, group=group, seed=s))


OFTEN_SHORT = [(64, 8, 3, 8), (128, 16, 4, 4)]


@needs_interpreter
@pytest.mark.parametrize(
    ("d", "s", "group", "longest"),
    [
        *OFTEN_SHORT,
        *(
            slow(*shape, longest)
            for shape in EVERY
            for longest in SHORT
            if shape[2] * longest <= pallas_gpu.MAX_COLUMNS and (*shape, longest) not in OFTEN_SHORT
        ),
        *(
            slow(d, 16, 4, longest)
            for d in pallas_gpu.HEAD_SIZES
            for longest in SHORT
            if (d, longest) != (128, 4)
        ),
    ],
)
def test_short_rows_of_contexts_around_a_block_border(d, s, group, longest):
    check(Case(short_rows(s, longest, 200), d=d, s=s, group=group, seed=s), shorts=True)


@needs_interpreter
@pytest.mark.parametrize(
    "options", [slow({"window": 20}), slow({"soft_cap": 1.5}), {"window": 70, "soft_cap": 3.0}]
)
def test_windows_and_caps_of_short_rows(options):
    check(Case(short_rows(16, 8, 200), group=2), shorts=True, **options)


@needs_interpreter
@pytest.mark.parametrize("options", [slow({}), {"window": 100}])
def test_a_long_context_of_short_rows_in_parts(options):
    tiles = SMALL._replace(multiprocessors=8, min_split=64)
    case = Case([(4, 400), (0, 0), (3, 65), (2, 2)], d=128, group=4)
    check(case, tiles=tiles, shorts=True, **options)


@needs_interpreter
@pytest.mark.slow
def test_short_rows_of_thousands_of_tokens():
    check(Case([(8, 3001), (5, 2048)], d=128, s=64, group=4), shorts=True)


@needs_interpreter
@pytest.mark.parametrize(
    ("row", "group"), [((2, 40), 4), slow((3, 3), 4), slow((4, 33), 16), slow((7, 70), 16)]
)
def test_a_call_of_one_short_row_and_padding_rows(row, group):
    """A step of one sequence with drafts: as many rows of the batch as tokens, and all but one are
    padding.
    """
    case = Case([row, *[(0, 0)] * (row[0] - 1)], group=group)
    arguments = case.arguments()
    arguments[0] = arguments[0][: row[0]]  # without padding tokens
    with interpreted():
        output = paged_attention(*arguments, scale=case.d**-0.5, impl="pallas_gpu")
    assert_near(output, case.expected()[: row[0]])


@needs_interpreter
def test_results_have_the_type_of_the_queries():
    q, *pages = Case([(2, 5), (1, 3)]).arguments()
    for dtype in (jnp.float32, jnp.bfloat16):
        call = partial(pallas_gpu.paged_attention, scale=0.125, tiles=SMALL)
        chex.assert_type(jax.eval_shape(call, q.astype(dtype), *pages), dtype)


@needs_interpreter
@pytest.mark.parametrize("group", [1, 7, 16])
def test_a_batch_smaller_than_the_load_of_a_chunk(group):
    check(Case([(2, 20), (3, 3)], group=group))


@needs_interpreter
@pytest.mark.parametrize("rows", [decodes(16, 100), [(3, 40), (20, 20)]], ids=["decodes", "chunks"])
def test_several_key_heads_in_float16(rows):
    check(Case(rows, heads=3, group=3, dtype="float16"))


@needs_interpreter
@pytest.mark.parametrize(
    "rows", [decodes(16, 200), [(40, 200), (2, 90)]], ids=["decodes", "chunks"]
)
@pytest.mark.parametrize(
    "options", [{"window": 20}, {"soft_cap": 1.5}, {"window": 70, "soft_cap": 3.0}]
)
def test_windows_and_caps(rows, options):
    check(Case(rows, group=2), **options)


# below all scores, beside the sums of few and of many weights, and far above all of them
SINKS = np.array([-100.0, 1.0, 6.0, 500.0], np.float32)


def sinks_of(case: Case) -> np.ndarray:
    return np.resize(SINKS, case.heads * case.group)


@needs_interpreter
@pytest.mark.parametrize("options", [{}, slow({"window": 70, "soft_cap": 3.0})])
@pytest.mark.parametrize(
    "rows",
    [decodes(16, 200), [(40, 200), (2, 90)], short_rows(16, 8, 200)],
    ids=["decodes", "chunks", "short rows"],
)
def test_sinks(rows, options):
    """A sink moves the results, because the values have a mean."""
    case = Case(rows, heads=2, group=3, mean=1.0)
    check(case, shorts=max(rows) < (9, 0), sinks=sinks_of(case), **options)


@needs_interpreter
@pytest.mark.parametrize("options", [{}, slow({"window": 100})])
@pytest.mark.parametrize(
    "rows",
    [[(1, 700), (1, 0), (1, 65), (1, 1)], [(4, 400), (0, 0), (3, 65), (2, 2)]],
    ids=["decodes", "short rows"],
)
def test_sinks_count_once_in_a_context_in_parts(rows, options):
    tiles = SMALL._replace(multiprocessors=8, min_split=64)
    case = Case(rows, d=128, group=4, mean=1.0)
    sinks = sinks_of(case)
    check(case, tiles=tiles, shorts=True, sinks=sinks, **options)
    once, four_times = (case.expected(sinks=sinks + np.log(count), **options) for count in (1, 4))
    assert np.abs(four_times - once).max() > 0.1, "sinks in every part would not be detected"


@needs_interpreter
def test_a_program_without_sinks_has_no_operand_for_them():
    case = Case([(1, 5), (9, 9)], heads=2)
    call = partial(pallas_gpu.paged_attention, scale=0.125, tiles=SMALL)
    without, having = (
        str(jax.make_jaxpr(partial(call, sinks=sinks))(*case.arguments()))
        for sinks in (None, sinks_of(case))
    )
    for shape in ("f32[1,2,8]", "f32[2,64]"):  # of decodes and of chunks
        assert shape in having
        assert shape not in without


@needs_interpreter
@pytest.mark.parametrize("late", range(2))
def test_a_warpgroup_that_is_late_finds_every_phase_of_a_barrier(late, monkeypatch):
    """A warpgroup that is ahead must not complete a phase that another one has not seen."""
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    wait = shared_memory.Barrier.wait
    blocks = set()

    def wait_late(barrier, thread, *args, **kwargs):
        if thread.warpgroup_id == late and thread.block_id not in blocks:
            blocks.add(thread.block_id)
            time.sleep(2)
        return wait(barrier, thread, *args, **kwargs)

    monkeypatch.setattr(shared_memory.Barrier, "wait", wait_late)
    # with a window, the first tile and the last one of an item have keys that no query sees
    check(Case([(32, 200)], group=2), window=70)


@needs_interpreter
def test_a_long_context_in_parts():
    tiles = SMALL._replace(multiprocessors=8, min_split=64)
    case = Case([(1, 700), (1, 0), (1, 65), (1, 1)], d=128, group=4)
    from pallas_kernels.paged_attention.pallas_gpu.decode import parts_of

    assert parts_of(4, 1, 704, tiles) == 4
    check(case, tiles=tiles)
    check(case, tiles=tiles, window=100)


@needs_interpreter
def test_rows_are_sorted_by_their_lengths_the_longest_first():
    from pallas_kernels.paged_attention.pallas_gpu.decode import longest_first

    rows = longest_first(jnp.array([3, 9, 0, 9, 1], jnp.int32))
    chex.assert_trees_all_equal(rows, jnp.array([1, 3, 0, 4, 2], jnp.int32))


@needs_interpreter
@pytest.mark.parametrize("rows", [decodes(16, 150), [(30, 150), (9, 9)]], ids=["decodes", "chunks"])
def test_order_of_pages_changes_no_bit(rows):
    case = Case(rows)
    chex.assert_trees_all_equal(run(case, order=0), run(case, order=1))


@needs_interpreter
@pytest.mark.parametrize("rows", [decodes(16, 150), [(30, 150), (9, 9)]], ids=["decodes", "chunks"])
def test_content_of_unowned_slots_changes_no_bit(rows):
    chex.assert_trees_all_equal(run(Case(rows)), run(Case(rows, poison=0.0)))


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20, "soft_cap": 2.0, "sinks": np.resize(SINKS, 6)}],
    ids=["plain", "window, cap and sinks"],
)
def test_a_mixed_batch_keeps_the_contract(options):
    arguments = MIXED.arguments()
    with interpreted():
        output = paged_attention(*arguments, scale=MIXED.d**-0.5, impl="pallas_gpu", **options)
    assert_mixed(output, options)


@needs_interpreter
@pytest.mark.parametrize("family", ["llama", slow("gpt_oss")])
def test_an_engine_gives_the_same_tokens_through_them(family, tmp_path, monkeypatch):
    """A small random model: chunks of prompts beside decodes, three sequences. GPT-OSS has sinks,
    and windows in every other layer.
    """
    from pagedjax import load_model
    from tests.device.test_step_tpu import greedy
    from tests.engine.test_attention_sinks import GPT_OSS
    from tests.weights.tiny import tiny_llama
    from tests.weights.tiny_families import write_family

    folder = tmp_path / family
    if family == "llama":
        tiny_llama(folder, tied=False, head_dim=64)
    else:
        write_family(folder, GPT_OSS | {"head_dim": 64})
    model = load_model(folder, dtype="float16")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, n).tolist() for n in (1, 2, 6)]
    config = {
        "block_size": 8,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "token_buckets": (8,),
        "num_blocks": 32,
    }
    expected = greedy(model, prompts, 2, "xla", **config)
    accepts = IMPLS["pallas_gpu"]._replace(obstacle=lambda device, **sizes: "")
    monkeypatch.setitem(IMPLS, "pallas_gpu", accepts)
    with interpreted():
        assert greedy(model, prompts, 2, "pallas_gpu", **config) == expected


# --- the checks detect mistakes -------------------------------------------------------------------

SHORT_ROWS = short_rows(16, 8, 300, 700)


@needs_interpreter
@pytest.mark.parametrize(
    "rows",
    [decodes(16, 300), [(30, 300), (9, 9)], slow(SHORT_ROWS)],
    ids=["decodes", "chunks", "short rows"],
)
def test_the_checks_detect_a_missing_commit(rows, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(RuntimeError, match="without an order"):
        check(Case(rows), shorts=rows == SHORT_ROWS)


@needs_interpreter
@pytest.mark.parametrize(
    ("rows", "place"),
    [
        (decodes(16, 700), "attend"),
        ([(30, 300), (9, 9)], "attend"),
        ([(30, 300), (9, 9)], "consume"),
        slow(SHORT_ROWS, "attend"),
        slow(decodes(16, 700), "<lambda>"),
        slow([(30, 300), (9, 9)], "<lambda>"),
    ],
    ids=[
        "decodes, for pages",
        "chunks, for pages",
        "chunks, for queries",
        "short rows, for pages",
        "decodes, for room",
        "chunks, for room",
    ],
)
def test_the_checks_detect_a_missing_wait(rows, place, monkeypatch):
    """A wait for another warpgroup. The interpreter does not detect a decode that omits the wait
    for its own copy.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    wait = plgpu.barrier_wait

    def careless(barrier):
        return None if sys._getframe(1).f_code.co_name == place else wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", careless)
    with pytest.raises(Exception, match=r"without an order|[Bb]arrier"):
        check(Case(rows), shorts=rows == SHORT_ROWS)


# --- limits ---------------------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "reads pages of bfloat16 or float16 and not of float32"),
        ({"d": 96}, "needs a head size of 64 or 128, and it is 96"),
        ({"s": 24}, "needs blocks of 8, 16, 32, 64, 128 tokens, and they have 24"),
        ({"group": 17}, "takes at most 16 query heads for each key head, and there are 17"),
    ],
)
def test_unsupported_shapes_raise_with_the_reason(change, message):
    case = Case([(1, 5)])._replace(**change)
    with refused(rf"impl 'pallas_gpu' {message}; impl 'xla' has no such limit"):
        paged_attention(*case.arguments(), scale=1.0, impl="pallas_gpu")


@needs_interpreter
@pytest.mark.parametrize("min_split", [1 << 30, 16], ids=["whole", "in parts"])
def test_a_call_of_decodes_alone_is_right(min_split):
    """With padding rows behind the others, whose results are zeros."""
    case = Case([(1, 5), (1, 40), (1, 16), (0, 0)], group=3)
    q, *pages, _ = case.arguments()
    tiles = SMALL._replace(min_split=min_split, multiprocessors=8)
    with interpreted():
        output = pallas_gpu.paged_attention(q[:4], *pages, None, scale=case.d**-0.5, tiles=tiles)
    chex.assert_shape(output, (4, 3, 64))
    assert_near(output, case.expected()[:4])
    assert not output[3].any()


@needs_interpreter
def test_rows_of_a_few_tokens_can_be_chunks():
    case = Case([(1, 9), (3, 20), (6, 6), (12, 30)])
    with interpreted():
        output = pallas_gpu.paged_attention(
            *case.arguments(), scale=case.d**-0.5, tiles=SMALL, short_rows=False
        )
    assert_near(output, case.expected())


def test_an_old_jax_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs JAX 0.11 or newer" in pallas_gpu.shape_obstacle("bfloat16", 64, 16, 4)


class Device(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str = ""


def test_a_cache_of_another_dtype_than_the_queries_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(hopper, "JAX_NEEDED", (0, 0))
    sizes = {"head_dim": 64, "block_size": 16, "kv_heads": 2, "heads": 8}
    device = Device("gpu", "NVIDIA H200", "9.0")
    for dtype in ("bfloat16", "float16"):
        assert pallas_gpu.obstacle(device, dtype=dtype, query_dtype=dtype, **sizes) == ""
    obstacle = pallas_gpu.obstacle(device, dtype="bfloat16", query_dtype="float16", **sizes)
    assert obstacle.endswith("they are bfloat16 and float16")


def test_devices_that_are_no_hopper_have_an_obstacle():
    assert "'cpu'" in pallas_gpu.wrong_device(jax.devices("cpu")[0])
    assert "NVIDIA A100 has 8.0" in pallas_gpu.wrong_device(Device("gpu", "NVIDIA A100", "8.0"))
    assert pallas_gpu.wrong_device(Device("gpu", "NVIDIA H200", "9.0")) == ""


def test_tiles_are_found_by_the_name_of_the_device():
    assert Tiles.of("NVIDIA H200") == Tiles.read("h200")
    assert Tiles.of("NVIDIA GH100 of a later name") == Tiles.read("h100")
