"""The measurement of products of floats: its products, and its rehearsal."""

from __future__ import annotations

import json

import jax
import pytest

from experiments.bench.random_llama import SHAPES
from experiments.hardware import gpu_products
from pallas_kernels.interpreted import interpreted
from pallas_kernels.shared.hopper import old_jax

PRODUCTS = gpu_products.products_of(SHAPES["tinyllama-1.1b"])
on_newer_jax = pytest.mark.skipif(bool(old_jax()), reason="GPU interpret mode needs JAX 0.11")


def test_products_are_those_of_a_layer_and_of_the_head():
    weights = sum(
        product.matrix.outputs * product.matrix.inputs
        for name, product in PRODUCTS.items()
        if name != "head"
    )
    assert 22 * weights == 968_884_224
    down = PRODUCTS["mlp.down"]
    assert down.flops(256) == 2 * 256 * 2048 * 5632
    assert down.nbytes(256) == 2 * (2048 * 5632 + 256 * 5632 + 2 * 256 * 2048)
    assert PRODUCTS["head"].nbytes(1) == 2 * (32000 + 1) * 2048 + 4 * 32000
    up = PRODUCTS["mlp.up"]
    assert jax.eval_shape(up.call("xla"), *up.arrays(3, 0)).shape == (3, 5632)


def test_candidates_begin_with_the_choice_of_the_kernel():
    for tokens in (8, 256):
        candidates = PRODUCTS["attn.out"].candidates(tokens, 4)
        assert len(set(candidates)) == 4
        assert candidates[0].parts == 4
        assert candidates[0].shares == 4


def test_another_device_is_an_error(capsys):
    assert gpu_products.main([]) == 2
    assert "runs on platform 'gpu' and not on 'cpu'; --rehearse" in capsys.readouterr().err


@on_newer_jax
@pytest.mark.slow
def test_a_rehearsal_compares_the_kernel_and_times_others(tmp_path, capsys, monkeypatch):
    file = tmp_path / "products.json"
    assert gpu_products.main(["--rehearse", "--json", str(file), "--matrices", "attn.out"]) == 0
    figures = json.loads(file.read_text(encoding="utf-8"))
    (case,) = figures["errors"]
    assert 0 < case["error"] <= gpu_products.TOLERANCE
    (times,) = figures["times"]
    assert set(times["contenders"]) == {"reference", "xla"}
    assert times["contenders"]["xla"]["ratio"] == 1.0
    monkeypatch.setattr(gpu_products, "TOLERANCE", 0.0)
    assert gpu_products.main(["--rehearse", "--json", str(file), "--matrices", "attn.out"]) == 1
    assert "error: wrong products, which are not timed" in capsys.readouterr().err
    assert json.loads(file.read_text(encoding="utf-8"))["times"] == []


@on_newer_jax
@pytest.mark.slow
def test_a_candidate_is_the_same_product():
    product = gpu_products.products_of(SHAPES["small"])["attn.out"]
    sizes = product.candidates(9, 2)[1]
    arrays = product.arrays(9, 0)
    with interpreted():
        results = [product.call("pallas_gpu")(*arrays), product.with_sizes(sizes)(*arrays)]
    assert (results[0] == results[1]).all()
