"""The benchmark of quantized weights and caches, with a tiny model."""

from __future__ import annotations

import json

import pytest

from experiments.bench import quality

# the tiny model has two layers, all dense
NAMES = [name for name in quality.VARIANTS if not name.startswith("quest")]


@pytest.mark.exhaustive
def test_quantized_variants_differ_slightly_from_baseline(tiny_folder, tmp_path):
    out = tmp_path / "quality.json"
    sizes = ["--windows", "3", "--length", "40", "--steps", "2", "--dtype", "float32"]
    quest = '{"name": "quest", "tokens": 16, "dense_layers": 1}'
    policies = ["--kv-policy", quest, "--variants", *NAMES]
    quality.main(["--model", str(tiny_folder), *sizes, "--json", str(out), *policies])
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows[quest]["difference"] < 1e-4, "prompts read everything"
    assert rows[quest]["same_greedy"] < 1
    first, weights, cache, all_8_bit = (
        rows[name] for name in ("as it is", "int8 weights", "8-bit cache", "both")
    )
    assert (first["difference"], first["same_best"], first["same_greedy"]) == (0, 1, 1)
    for row in (weights, cache, all_8_bit):
        assert 0 < row["difference"] < 0.2
        assert 0.5 < row["same_best"] <= 1
        assert row["perplexity"] == pytest.approx(first["perplexity"], rel=0.05)
        assert row["step"] > 0
    assert weights["weights"] == all_8_bit["weights"] < first["weights"] / 3
    assert cache["cache"] == all_8_bit["cache"] == first["cache"] / 4


def test_agreement_counts_tokens_before_first_difference():
    assert quality.equal_prefix((1, 2, 3, 4), (1, 2, 9, 4)) == 2
    assert quality.equal_prefix((1, 2), (1, 2)) == 2
    assert quality.equal_prefix((5,), (6,)) == 0


def test_too_short_text_is_an_error(tiny_llm):
    with pytest.raises(ValueError, match="windows of 4000 tokens are more than the text has"):
        quality.windows_of(tiny_llm, 2000, 4000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-policy", '{"name": "quets"}'], "kv_policy is 'quets'; it must be one of"),
        (["--kv-policy", "quest"], "write JSON such as"),
        (["--model", "/nope"], "there is no model '/nope'"),
    ],
)
def test_bad_arguments_are_refused(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        quality.main(words)
    assert message in capsys.readouterr().err
