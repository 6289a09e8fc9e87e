"""The benchmark of products, on a few tokens."""

from __future__ import annotations

import json

import pytest

from experiments.bench import products
from pallas_kernels.linear import Matrix

pytest.importorskip("llvmlite")

pytestmark = pytest.mark.few_optimisations


@pytest.fixture(autouse=True)
def _small_model(monkeypatch):
    layer = Matrix(80, 64), Matrix(64, 64), Matrix(2 * 96, 64, gated=True), Matrix(64, 96)
    small = {"HIDDEN": 64, "LAYER": layer, "LAYERS": 1, "MOE_HIDDEN": 64}
    small["EXPERT_WIDTH"] = 32
    for name, value in small.items():
        monkeypatch.setattr(products, name, value)


def test_products_of_every_dtype_and_experts_are_measured(tmp_path):
    out = tmp_path / "products.json"
    products.main(["--tokens", "3", "--experts", "2", "--repeats", "1", "--json", str(out)])
    report = json.loads(out.read_text())
    assert [(row["dtype"], row["tokens"], row["impl"]) for row in report["layers"]] == [
        (dtype, 3, impl)
        for dtype in ("float32", "bfloat16", "int8", "q4_1")
        for impl in ("cpu", "xla")
    ]
    assert all(row["ms"] > 0 and row["gflops"] > 0 for row in report["layers"])
    assert report["experts"][0]["tokens"] == 2


def test_every_token_of_a_mixture_goes_through_eight_experts():
    run, (x, *weights) = products.mixture(16, 3, "reference")
    assert len(x) == 3 * products.EXPERTS_PER_TOKEN
    assert run(x, *weights).shape == x.shape
