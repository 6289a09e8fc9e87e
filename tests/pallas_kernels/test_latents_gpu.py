"""The kernel for latents on Hopper GPUs, interpreted on a CPU: results, and races between threads.

It needs JAX 0.11 and so Python 3.12. `python -m pallas_kernels.aot --target h200` compiles it. The
oracle is attention in float64.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.device import attention
from pallas_kernels.interpreted import interpreted, interpreted_without_races
from pallas_kernels.paged_attention import latent_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from tests.device.test_attention import Device
from tests.pallas_kernels.test_kernel_tools import ROOT, needs_compiler
from tests.pallas_kernels.test_latents_tpu import MIXED, NUMBERS, RANK, case_of, expected_of
from tests.pallas_kernels.test_paged_attention import Case, assert_padding_is_zero, slow
from tests.pallas_kernels.test_paged_attention_gpu import (
    SMALL,
    decodes,
    needs_interpreter,
)
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations


def run(case: Case, **tiles: int) -> np.ndarray:
    """Of the batch's rows, which have one query token each, under race detection."""
    from pallas_kernels.paged_attention.pallas_gpu import latents

    options = {"scale": case.scale, "window": case.window, "soft_cap": case.soft_cap}
    q, pages, _, tables, lengths, _ = map(jnp.asarray, case.arguments)
    rows = jnp.arange(len(lengths), dtype=jnp.int32)
    with interpreted_without_races():
        out = latents.attend(
            q[: len(rows)],
            pages,
            tables,
            lengths,
            rows,
            rank=RANK,
            tiles=SMALL._replace(**tiles),
            **options,
        )
        return np.asarray(out, np.float32)


def check(case: Case, **tiles: int) -> None:
    output = run(case, **tiles)
    # weights and results are rounded to this number of bits
    bits = {"bfloat16": 8, "float16": 11}[case.q.dtype.name]
    expected = expected_of(case)[: len(output)]
    chex.assert_trees_all_close(output, expected, atol=4 * 2.0**-bits, rtol=0)


def of_gpu(rows: list[tuple[int, int]], heads: int, s: int, dtype: str, **options: Any) -> Case:
    return case_of(rows, heads, s, dtype, NUMBERS, **options)


@needs_interpreter
@pytest.mark.parametrize(
    ("heads", "s", "dtype"),
    [
        (16, 16, "bfloat16"),
        slow(3, 8, "float16"),
        slow(128, 64, "bfloat16"),
        slow(20, 128, "bfloat16"),
        slow(64, 32, "float16"),
    ],
)
def test_decodes_of_contexts_around_a_block_border(heads, s, dtype):
    check(of_gpu(decodes(s, 150), heads, s, dtype))


@needs_interpreter
@pytest.mark.parametrize("options", [{"window": 70, "soft_cap": 3.0}, slow({"window": 20})])
def test_windows_and_caps(options):
    check(of_gpu(decodes(16, 200), 8, 16, "bfloat16", **options))


@needs_interpreter
@pytest.mark.parametrize("options", [{}, slow({"window": 100})])
def test_a_long_context_in_parts(options):
    rows = [(1, 400), (1, 0), (1, 65), (1, 1)]
    check(of_gpu(rows, 16, 16, "bfloat16", **options), multiprocessors=16, min_split=64)


@needs_interpreter
@pytest.mark.parametrize("heads", [16, slow(128)])
def test_a_mixed_batch_keeps_the_contract_of_latents(heads):
    """Tokens of longer rows are computed one by one."""
    case = of_gpu(MIXED, heads, 16, "bfloat16")
    q, pages, _, *tables = map(jnp.asarray, case.arguments)
    with interpreted():
        y = latent_attention(q, pages, *tables, rank=RANK, scale=case.scale, impl="pallas_gpu")
    output = np.asarray(y, np.float32)
    chex.assert_trees_all_close(output, expected_of(case), atol=2.0**-6, rtol=0)
    assert_padding_is_zero(output, case)


# interpretation of a kernel on two devices does not end
MESH = """
from functools import partial
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from experiments.hardware import compilers
from pallas_kernels.paged_attention import latent_attention
h200 = compilers.target("h200")
compilers.prepare(h200)
mesh = Mesh(np.array(compilers.devices(h200, "1x1x2")), ("x",))
heads = P(None, "x")
attend = partial(latent_attention, rank=512, scale=0.07, impl="pallas_gpu")
mapped = jax.shard_map(
    attend, mesh=mesh, in_specs=(heads, *[P()] * 4), out_specs=heads, check_vma=False
)
def shape(*sizes, dtype=jnp.int32, spec=P()):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
q = shape(64, 128, 576, dtype=jnp.bfloat16, spec=heads)
pages = shape(1024, 1, 16, 576, dtype=jnp.bfloat16)
arguments = q, pages, shape(64, 512), shape(64), shape(65)
compiled = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
print(compiled.output_shardings.shard_shape((64, 128, 512)))
"""


@needs_compiler
@pytest.mark.slow
def test_it_compiles_for_the_heads_of_each_of_two_devices():
    child = subprocess.run(
        [sys.executable, "-c", MESH], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr
    assert "(64, 64, 512)" in child.stdout


@needs_interpreter
def test_a_batch_of_decodes_is_one_launch():
    case = of_gpu([(1, 20), (1, 3)], 2, 8, "bfloat16")
    q, pages, _, tables, lengths, _ = map(jnp.asarray, case.arguments)
    options = {"rank": RANK, "scale": case.scale, "impl": "pallas_gpu"}
    with interpreted():
        y = latent_attention(q[:2], pages, tables, lengths, None, **options)
    output = np.asarray(y, np.float32)
    chex.assert_trees_all_close(output, expected_of(case)[:2], atol=2.0**-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "reads pages of bfloat16 or float16 and not of float32"),
        ({"rank": 256}, "reads latents of 512 numbers in rows of 576, and they have 256 in rows"),
        ({"block_size": 4}, "needs blocks of 8, 16, 32, 64, 128 tokens, and they have 4"),
        (
            {"query_dtype": "float16"},
            "reads latents of the queries' dtype, and they are bfloat16 and float16",
        ),
    ],
)
def test_what_the_kernel_does_not_read_is_refused(change, message, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    heads = {"rank": RANK, "heads": 16, "head_dim": NUMBERS, "kv_heads": 1}
    heads |= {name: value for name, value in change.items() if name in heads}
    sizes: dict[str, Any] = {"dtype": "bfloat16", "query_dtype": "bfloat16", "block_size": 16}
    sizes |= {name: value for name, value in change.items() if name in sizes}
    device = Device("gpu", "an NVIDIA GPU", "9.0")
    with refused(f"attention_impl 'pallas_gpu' {message}.*; 'xla' has no such limit"):
        attention.choose("pallas_gpu", device, heads_of_layers=[heads], **sizes)


def test_an_engine_takes_latents_by_name_and_not_by_default(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    heads = {"rank": RANK, "heads": 128, "head_dim": NUMBERS, "kv_heads": 1}
    kind: dict[str, Any] = {
        "device": Device("gpu", "an NVIDIA GPU", "9.0"),
        "dtype": "bfloat16",
        "query_dtype": "bfloat16",
        "block_size": 16,
        "heads_of_layers": [heads],
    }
    assert attention.choose("pallas_gpu", **kind) == "pallas_gpu"
    assert attention.choose(None, **kind) == "xla"
    assert attention.latent_row("pallas_gpu", NUMBERS) == NUMBERS
    assert pallas_gpu.LATENT == (RANK, NUMBERS)
