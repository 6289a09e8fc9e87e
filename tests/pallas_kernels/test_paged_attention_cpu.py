"""The compiled CPU kernel: what it guarantees beyond the contract of all implementations
(test_paged_attention.py).
"""

from __future__ import annotations

import importlib.util
import re
import timeit
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cpu import implementation as cpu
from tests import fresh_python
from tests.pallas_kernels import older_cpus
from tests.pallas_kernels.test_paged_attention import (
    MIXED,
    assert_contract,
    assert_padding_is_zero,
    in_bits,
    make,
    oracle,
    run,
    scatter,
)

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llvmlite") is None, reason="the cpu extra is not installed"
    ),
    pytest.mark.few_optimisations,
]


def shapes(b: int, pages: int) -> list[jax.ShapeDtypeStruct]:
    """The arguments of a call of b decodes: SmolLM2-135M's heads, blocks of 16."""
    page = jax.ShapeDtypeStruct((pages, 3, 16, 64), jnp.float32)
    tables = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((b, 8), (b,), (b + 1,))]
    return [jax.ShapeDtypeStruct((b, 9, 64), jnp.float32), page, page, *tables]


def test_nan_within_a_context_stays_in_its_row():
    case = make([(1, 40), (1, 300), (1, 7)], t=8, b=3)
    before = run(case, "cpu")
    k = case.k.copy()
    k[1, 270] = np.nan
    after = run(scatter(case._replace(k=k)), "cpu")
    assert np.isnan(after[1]).all()
    chex.assert_trees_all_equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("d", [8, 24, 40])
def test_head_sizes_that_are_not_whole_vectors(d, dtype):
    case = make([(1, 40), (9, 21), (1, 300), (40, 150)], t=56, b=4, d=d, s=6, dtype=dtype)
    assert_contract(case, "cpu")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("s", [1, 6, 16, 256])
def test_chunks_that_cross_pages_and_steps(s, dtype):
    """Steps are 64 context tokens and tiles are 48 queries (24 tokens here): ends before, at and
    after those.
    """
    rows = [(2, 64), (23, 65), (24, 129), (25, 25), (64, 300), (1, 300), (48, 48)]
    case = make(rows, t=200, b=8, s=s, dtype=dtype)
    assert_contract(case, "cpu")


def assert_close_in_bfloat16(case):
    """Weights are rounded to 8 bits, which moves a result by less than 2^-8 here; then the result
    is.
    """
    got = run(in_bits(case), "cpu")
    expected = oracle(case)
    chex.assert_shape(got, case.dims["TND"])
    chex.assert_type(got, jnp.bfloat16)
    chex.assert_trees_all_close(got.astype(np.float32), expected, atol=2.0**-8, rtol=2.0**-8)
    assert_padding_is_zero(got, case)


# steps end after odd and even numbers of tokens
ODD_ROWS = [(9, 9), (17, 90), (49, 131), (70, 257), (1, 301), (16, 16)]


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50}, {"window": 1}, {"window": 101, "soft_cap": 3.0}, {"scale": 0.3}],
    ids=str,
)
@pytest.mark.parametrize(
    "d", [*(pytest.param(d, marks=pytest.mark.slow) for d in (8, 16, 128)), 64, 72]
)
def test_bfloat16_chunks_are_close_to_float32(d, options):
    assert_close_in_bfloat16(
        make(ODD_ROWS, t=176, b=8, d=d, g=3, s=6, dtype=jnp.bfloat16)._replace(**options)
    )


@pytest.mark.parametrize("g", [1, 2, 5, 48, 50])
@pytest.mark.parametrize("s", [1, 16])
def test_bfloat16_chunks_of_any_group(s, g):
    assert_close_in_bfloat16(
        make([(9, 9), (17, 90), (10, 131)], t=40, b=4, s=s, g=g, d=24, dtype=jnp.bfloat16)
    )


def test_bfloat16_queries_keep_their_bits_at_any_scale():
    """Scores of hundreds: if queries were rounded after the scale, 0.3, scores would be wrong by a
    tenth and more.
    """
    case = make(ODD_ROWS, t=176, b=8, d=72, g=3, dtype=jnp.bfloat16)
    assert_close_in_bfloat16(case._replace(q=(30 * case.q).astype(case.q.dtype), scale=0.3))


@pytest.mark.parametrize(
    ("rows", "t", "dtype"),
    [(MIXED, 48, np.float32), (MIXED, 256, np.float32), (ODD_ROWS, 176, jnp.bfloat16)],
)
def test_nan_outside_contexts_does_not_spread(rows, t, dtype):
    """The odd contexts in bfloat16: the last token is half of a pair."""
    case = make(rows, t=t, b=8, d=64, dtype=dtype)
    poisoned = scatter(case, garbage=float("nan"))
    if dtype == jnp.bfloat16:
        poisoned, case = (in_bits(pages) for pages in (poisoned, case))
    chex.assert_trees_all_equal(run(poisoned, "cpu"), run(case, "cpu"))


def test_a_bfloat16_chunk_has_the_same_bits_beside_other_rows():
    alone = make([(70, 257)], t=70, b=1, m=20, d=64, g=3, dtype=jnp.bfloat16)
    together = make(
        [(70, 257), (1, 300), (40, 99), (3, 9)], t=120, b=4, m=20, d=64, g=3, dtype=jnp.bfloat16
    )
    k = together.k.copy()
    v = together.v.copy()
    k[0] = alone.k[0]
    v[0] = alone.v[0]
    together = together._replace(q=np.concatenate([alone.q, together.q[70:]]), k=k, v=v)
    together = scatter(together)
    chex.assert_trees_all_equal(run(together, "cpu")[:70], run(alone, "cpu"))


@pytest.mark.slow
@older_cpus.by_name
def test_the_kernel_without_the_newest_instructions(name, tmp_path):
    program = (
        "from tests.pallas_kernels.test_paged_attention_cpu import *\n"
        "for dtype in (np.float32, jnp.bfloat16):\n"
        "    assert_contract(make(ODD_ROWS, t=176, b=8, d=72, g=3, s=6, dtype=dtype), 'cpu')\n"
        "print(__import__('pallas_kernels.paged_attention.cpu.tile_vectors', fromlist=['PAIRS']).PAIRS)"
    )
    assert older_cpus.printed(program, name, tmp_path)[-1] == "False"


@pytest.mark.parametrize("g", [1, 5, 7, 48, 50])
def test_tiles_of_any_number_of_query_heads(g):
    assert_contract(make([(17, 90), (1, 300), (2, 2), (49, 49)], t=72, b=4, k=2, g=g, d=8), "cpu")


def test_a_chunk_in_the_middle_of_a_long_context_beside_decodes():
    assert_contract(
        make([(1, 700), (150, 2500), (1, 1), (1, 2000)], t=160, b=8, m=160, k=2, g=3, d=64), "cpu"
    )


def test_every_number_of_8_bits_is_read_exactly():
    """The result of a context of one token is its value: all 254 numbers of float8_e4m3fn, with
    subnormal ones.
    """
    bits = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)  # the two others are NaN
    values = np.zeros(256, jnp.float8_e4m3fn)
    values[: len(bits)] = bits.view(jnp.float8_e4m3fn)
    for rows in ([(1, 1)], [(2, 2)]):
        case = make(rows, t=2, b=1, k=2, g=1, d=128)
        v = np.broadcast_to(values.reshape(2, 128), case.v.shape).astype(np.float32)
        case = case._replace(k=np.zeros_like(case.k), v=v)
        case = case._replace(
            **{x: getattr(case, x).astype(jnp.float8_e4m3fn) for x in ("k_pages", "v_pages")}
        )
        out = run(in_bits(scatter(case, garbage=448.0)), "cpu")
        chex.assert_trees_all_equal(out[0].reshape(-1), values.astype(np.float32))


def test_a_window_as_long_as_the_context_changes_no_bit():
    case = make([(1, 700), (1, 20), (150, 600), (1, 1)], t=160, b=4)
    chex.assert_trees_all_equal(run(case._replace(window=700), "cpu"), run(case, "cpu"))


def test_nan_within_a_window_is_not_hidden_by_a_soft_cap():
    case = make([(1, 300), (20, 90)], t=21, b=2)._replace(window=280, soft_cap=3.0)
    k = case.k.copy()
    k[:, 80] = np.nan
    poisoned = run(scatter(case._replace(k=k)), "cpu")
    assert np.isnan(poisoned[[0, *range(11, 21)]]).all()


def test_time_depends_on_the_window_and_not_on_the_context():
    """A window of 1/40 of the context, or of 1/20 with a tile, takes far less than a third of the
    time.
    """
    for rows, t in (([(1, 4000)] * 8, 8), ([(200, 4000)], 200)):
        case = make(rows, t=t, b=len(rows), k=3, g=3, d=64)
        arguments = jax.device_put(case.arguments)

        def best(window, arguments=arguments):
            call = partial(paged_attention, *arguments, scale=0.125, impl="cpu", window=window)
            jax.block_until_ready(call())
            return min(timeit.repeat(lambda: jax.block_until_ready(call()), number=1, repeat=7))

        assert best(100) < best(None) / 3


def test_padding_is_zero_whatever_the_buffer_had():
    for rows in ([(3, 9)], [(1, 9)], []):
        case = make(rows or [(0, 0)], t=4096, b=2, m=1)
        for _ in range(5):
            assert_padding_is_zero(run(case, "cpu"), case)


def test_a_long_context_beside_many_short_ones():
    assert_contract(make([(1, 4000)] + [(1, 1 + i % 20) for i in range(63)], t=64, b=64), "cpu")


def test_concurrent_calls_do_not_interfere():
    rows = [(1, 700), (1, 20), (30, 257), (1, 257)]
    cases = [make(rows, t=40, b=4, m=44, seed=seed) for seed in range(4)]
    cases[2:] = [case._replace(window=300, soft_cap=3.0) for case in cases[2:]]
    alone = [run(case, "cpu") for case in cases]

    def repeatedly(case):
        return [run(case, "cpu") for _ in range(50)]

    with ThreadPoolExecutor(4) as threads:
        for results, expected in zip(
            threads.map(repeatedly, cases, timeout=120), alone, strict=True
        ):
            for got in results:
                chex.assert_trees_all_equal(got, expected)


def test_memory_of_a_call_does_not_depend_on_the_number_of_pages():
    needed = []
    for pages in (64, 4096):
        compiled = paged_attention.lower(*shapes(8, pages), scale=0.125, impl="cpu").compile()
        copied = [
            line for line in compiled.as_text().splitlines() if re.search(rf"= f32\[{pages},", line)
        ]
        assert all("parameter(" in line for line in copied), copied
        needed.append(compiled.memory_analysis().temp_size_in_bytes)
    assert needed[0] == needed[1] < 2**16


def test_pages_are_written_in_place_before_they_are_read():
    @jax.jit
    def layer(k, v, q, new, tables, lens, cu):
        k = k.at[tables[:, 0], :, 3].set(new)
        v = v.at[tables[:, 0], :, 3].set(new)
        return k, v, paged_attention(q, k, v, tables, lens, cu, scale=0.125, impl="cpu")

    q, k, v, *arrays = shapes(8, 4096)
    new = jax.ShapeDtypeStruct((8, 3, 64), jnp.float32)
    compiled = jax.jit(layer, donate_argnums=(0, 1)).lower(k, v, q, new, *arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**18  # the pages are 2 x 48 MiB


def test_a_handler_serves_every_shape_of_its_dtype():
    for d, s, k, dtype in (
        (16, 4, 1, np.float32),
        (24, 16, 2, jnp.bfloat16),
        (64, 5, 3, np.float32),
    ):
        run(
            make([(1, 9)], t=1, b=1, d=d, s=s, k=k, dtype=dtype)._replace(window=k, soft_cap=5.0),
            "cpu",
        )
    registered = [
        cpu.handler_of(dtype, dtype, False).registered for dtype in ("float32", "bfloat16")
    ]
    assert registered == [True, True]


@pytest.mark.slow
def test_a_program_from_the_disk_cache_finds_the_kernel_in_a_new_process(tmp_path):
    program = (
        "from tests.pallas_kernels.test_paged_attention import *\n"
        "assert_contract(make([(1, 40), (1, 300)], t=2, b=2), 'cpu')\n"
        "print(len(list(__import__('pathlib').Path(jax.config.jax_compilation_cache_dir).glob('*paged_attention*'))))"
    )
    names: dict[str, Any] = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    entries = [fresh_python.output_of(program, **names).split()[-1] for _ in range(2)]
    assert entries[0] == entries[1] != "0"


def test_unsupported_arguments_raise_with_the_reason(monkeypatch):
    def refused(reason):
        return pytest.raises(
            ValueError, match=rf"^impl 'cpu' .*{reason}.*; impl 'xla' has no such limit"
        )

    half = make([(1, 9)], t=1, b=1, dtype=np.float16, garbage=1e4)
    with refused("float16"):
        run(half, "cpu")
    with refused(12):
        run(make([(1, 9)], t=1, b=1, d=12), "cpu")
    mixed = make([(1, 9)], t=1, b=1)
    with refused("float32 and bfloat16"):
        run(mixed._replace(v_pages=mixed.v_pages.astype(jnp.bfloat16)), "cpu")
    assert "'gpu'" in cpu.cache_obstacle("gpu", "float32", 64)
    assert cpu.cache_obstacle("cpu", "bfloat16", 64) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs llvmlite" in cpu.cache_obstacle("cpu", "bfloat16", 64)
    monkeypatch.setattr(cpu.sys, "platform", "win32")
    assert "POSIX" in cpu.cache_obstacle("cpu", "bfloat16", 64)


@pytest.mark.parametrize("options", [{}, {"window": 37}, {"window": 280, "soft_cap": 5.0}])
@pytest.mark.parametrize(("k", "g", "d"), [(3, 3, 64), (2, 4, 24), (1, 7, 8), (2, 1, 16)])
def test_short_rows_at_the_end_of_any_context(k, g, d, options):
    """A decode with drafts: up to 8 query tokens, whose visible tokens end before, at and after a
    span of 256.
    """
    rows = [
        (2, 2),
        (8, 8),
        (3, 255),
        (4, 256),
        (5, 257),
        (8, 263),
        (2, 512),
        (7, 700),
        (1, 300),
        (9, 300),
    ]
    case = make(rows, t=64, b=12, m=48, k=k, g=g, d=d)
    assert_contract(case._replace(**options), "cpu")


@pytest.mark.parametrize("window", [None, 100])
def test_a_query_of_a_short_row_has_the_bits_of_a_decode(window):
    """So drafts in a row do not change the result of its other tokens."""
    rows = [(6, 300), (1, 40), (8, 517), (3, 12)]
    case = make(rows, t=24, b=4, m=40, k=3, g=3, d=64)._replace(window=window)
    together = run(case, "cpu")
    first = 0
    for row, (count, length) in enumerate(rows):
        for token in range(count if window is None else 1):
            alone = case._replace(
                q=case.q[[first + token]],
                block_tables=case.block_tables[[row]],
                seq_lens=np.array([length - (count - 1 - token)], np.int32),
                cu_q_lens=np.array([0, 1], np.int32),
            )
            if window is None:
                chex.assert_trees_all_equal(run(alone, "cpu")[0], together[first + token])
            else:  # spans begin at the first visible token, so sums have another order
                chex.assert_trees_all_close(
                    run(alone, "cpu")[0], together[first + token], atol=1e-5
                )
        first += count


@pytest.mark.default_cases("None", "100")
@pytest.mark.parametrize("window", [None, 100, 300])
def test_the_invariant_form_has_the_bits_of_a_decode_in_any_chunk_and_block(window):
    """Contexts of several spans. Chunks of 1 token are decodes, of 2 to 8 short rows, and longer
    ones pieces.
    """
    length = 600
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, heads, 40), np.float32) for heads in (9, 3, 3))
    invariant = cpu.IMPLEMENTATION._replace(attend=cpu.IMPLEMENTATION.invariant)

    def attended(chunks: list[int], block: int, impl: Any = invariant) -> np.ndarray:
        m = -(-length // block)
        keys, values = (np.pad(x, ((0, m * block - length), (0, 0), (0, 0)))[None] for x in (k, v))
        outputs = []
        at = 0
        for count in chunks:
            case = make([(count, at + count)], t=count, b=1, s=block, m=m, k=3, g=3, d=40)
            case = case._replace(q=q[at : at + count], k=keys, v=values, window=window)
            outputs.append(run(scatter(case, garbage=np.nan), impl))
            at += count
        return np.concatenate(outputs)

    decoded = attended([length], 16)
    for chunks, block in (
        ([1] * 40 + [560], 16),
        ([3, 5, 8, 9, 250, 1, 24, 300], 7),
        ([300, 300], 64),
    ):
        chex.assert_trees_all_equal(attended(chunks, block), decoded)
    chex.assert_trees_all_equal(attended([599, 1], 128)[-1], decoded[-1])
    chex.assert_trees_all_close(decoded, attended([length], 16, "cpu"), atol=2e-6)
