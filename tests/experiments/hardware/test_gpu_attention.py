"""What the GPU attention benchmark can check without a GPU: all contenders compute causal attention
of one kind.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from experiments.hardware import gpu_attention
from experiments.hardware.gpu_attention import (
    CHUNKS,
    DECODES,
    VERIFIED,
    compile_rows,
    draft_ratios,
    measure,
)
from experiments.hardware.gpu_numerics import Case, exact
from pallas_kernels.timing import Shape

DECODE = Shape(2, 1, 9, 2, 3, 8, 4)
PROMPT = Shape(2, 8, 8, 2, 3, 8, 4)
CHUNK = Shape(2, 3, 9, 2, 3, 8, 4)


@pytest.mark.slow
def test_a_contender_that_does_not_compile_is_a_row_with_its_error(capsys):
    """cuDNN, which a CPU does not have."""
    names = ["xla", "cudnn, contiguous"]
    card = {"copy_bytes_per_s": 1e9, "product_flops_per_s": 1e9}
    rows = [measure(row, card) for row in compile_rows([DECODE], names, with_torch=True)]
    assert [row["contender"] for row in rows] == names
    assert rows[0]["seconds"] > 0
    assert rows[0]["share"] == pytest.approx(DECODE.cache_bytes / rows[0]["seconds"] / 1e9)
    assert "seconds" not in rows[1]
    assert rows[1]["error"] in capsys.readouterr().out


@pytest.mark.parametrize("shape", [DECODE, PROMPT, CHUNK, *DECODES[-1:], *CHUNKS[-1:]], ids=str)
def test_operations_are_those_of_the_pairs_that_are_seen(shape):
    pairs = np.tri(shape.queries, shape.context, shape.context - shape.queries, bool).sum()
    assert 4 * shape.rows * shape.heads * shape.group * shape.d * pairs == shape.flops


def test_rows_with_drafts_are_compared_with_the_decode_of_as_many_rows_and_tokens():
    seconds = {1: 2.0, 4: 3.0, 8: 5.0}
    rows = [
        {
            "shape": shape._asdict(),
            "contender": "xla",
            "seconds": seconds[shape.queries] * shape.rows,
        }
        for shape in VERIFIED
    ]
    rows.append({"shape": VERIFIED[1]._asdict(), "contender": "torch", "error": "missing"})
    ratios = [
        (entry["shape"]["rows"], entry["shape"]["queries"], entry["over_a_decode"])
        for entry in draft_ratios(rows)
    ]
    assert ratios == [(64, 4, 1.5), (64, 8, 2.5), (1, 4, 1.5), (1, 8, 2.5)]


@pytest.mark.parametrize("shape", [DECODE, pytest.param(PROMPT, marks=pytest.mark.slow)], ids=str)
def test_attention_on_contiguous_keys_equals_attention_in_float64(shape, monkeypatch):
    """With XLA in place of cuDNN, which takes the same arguments."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", with_xla(jax.nn.dot_product_attention))
    q, k, v = (a.astype("float32") for a in gpu_attention.contiguous(shape, 0))
    got = gpu_attention.cudnn(shape).call(q, k, v)
    case = Case(shape.d, shape.s, shape.group)
    expected = [
        exact(*map(np.asarray, row), shape.group, case) for row in zip(q, k, v, strict=True)
    ]
    np.testing.assert_allclose(np.reshape(got, np.shape(expected)), expected, atol=1e-5)


def with_xla(attention):
    return lambda *args, implementation, **options: attention(
        *args, implementation="xla", **options
    )
