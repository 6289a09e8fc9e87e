"""The comparison of smaller weights and caches, at a size where it is a test."""

from __future__ import annotations

import json

import pytest

from experiments.bench import quality


def test_what_is_smaller_differs_a_little_and_what_is_the_same_not_at_all(tiny_folder, tmp_path, capsys):
    out = tmp_path / "quality.json"
    sizes = ["--windows", "3", "--length", "40", "--steps", "2", "--dtype", "float32"]
    quality.main(["--model", str(tiny_folder), *sizes, "--json", str(out)])
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    first, weights, cache, both = (rows[name] for name in ("as it is", "int8 weights", "8-bit cache", "both"))
    assert (first["difference"], first["same_best"], first["same_greedy"]) == (0, 1, 1)
    for row in (weights, cache, both):
        assert 0 < row["difference"] < 0.2
        assert 0.5 < row["same_best"] <= 1
        assert row["perplexity"] == pytest.approx(first["perplexity"], rel=0.05)
        assert row["step"] > 0
    assert weights["weights"] == both["weights"] < first["weights"] / 3
    assert cache["cache"] == both["cache"] == first["cache"] / 4
    assert "| both |" in capsys.readouterr().out


def test_greedy_tokens_count_up_to_the_first_that_differs():
    assert quality.alike((1, 2, 3, 4), (1, 2, 9, 4)) == 2
    assert quality.alike((1, 2), (1, 2)) == 2
    assert quality.alike((5,), (6,)) == 0


def test_a_text_that_is_too_short_is_told(tiny_llm):
    with pytest.raises(ValueError, match="windows of 4000 tokens are more than the text has"):
        quality.windows_of(tiny_llm, 2000, 4000)


def test_a_model_that_is_not_there_is_told(capsys):
    with pytest.raises(SystemExit, match="2"):
        quality.main(["--model", "/nope"])
    assert "there is no model '/nope'" in capsys.readouterr().err
