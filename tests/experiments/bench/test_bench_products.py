"""The benchmark of products, on a few tokens."""

from __future__ import annotations

import json

import pytest

from experiments.bench import products

pytest.importorskip("llvmlite")


def test_products_of_every_dtype_and_experts_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(products, "LAYERS", 1)
    monkeypatch.setattr(products, "MODEL", 64)
    monkeypatch.setattr(products, "EXPERT", 32)
    out = tmp_path / "products.json"
    products.main(["--tokens", "3", "--experts", "2", "--repeats", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    assert [(row["dtype"], row["tokens"], row["impl"]) for row in found["layers"]] == [
        (dtype, 3, impl) for dtype in ("float32", "bfloat16", "int8") for impl in ("cpu", "xla")
    ]
    assert all(row["ms"] > 0 and row["gflops"] > 0 for row in found["layers"])
    assert found["experts"][0]["tokens"] == 2
    assert "8 of 64 experts" in capsys.readouterr().out


def test_every_token_of_a_mixture_goes_through_eight_experts():
    run, (x, *weights) = products.mixture(16, 3, "reference")
    assert len(x) == 3 * products.CHOSEN
    assert run(x, *weights).shape == x.shape
