"""A dry run says which points have requests that are too long for their engine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import run

CONFIG = """name: small
simulate: {{chip: h100, model: llama-3-8b}}
engine: {{max_model_len: 128}}
workload: {workload}
sampling: {{ignore_eos: true}}
sweep: {{grid: {{engine.max_model_len: [64, 128]}}}}
"""
SYNTHETIC = (
    "{kind: synthetic, count: 9, prompt: {dist: uniform, low: 8, high: 48}, "
    "output: {dist: fixed, value: 32}}"
)


def dry_run(tmp_path, workload: str) -> int:
    (tmp_path / "small.yaml").write_text(CONFIG.format(workload=workload))
    return run.main([str(tmp_path / "small.yaml"), "--out", str(tmp_path / "runs"), "--dry-run"])


def write_tokens(tmp_path, prompt: int) -> str:
    (tmp_path / "tokens.json").write_text(json.dumps([{"prompt": [5] * prompt, "max_tokens": 9}]))
    return "{kind: tokens, file: tokens.json}"


def write_own(tmp_path, prompt: int) -> str:
    (tmp_path / "mine.py").write_text(
        f"def mine(rng):\n    return [([30000] * {prompt}, 9), (5, 9)]\n"
    )
    return "{kind: mine.py:mine}"


def write_trace(tmp_path, prompt: int) -> str:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,{},9\n"
    (tmp_path / "trace.csv").write_text(rows.format(prompt))
    return "{kind: trace, file: trace.csv}"


def test_points_with_requests_that_would_be_cut_are_named(tmp_path, capsys):
    assert dry_run(tmp_path, SYNTHETIC) == 2
    printed = capsys.readouterr()
    assert "2 runs, 0 of them done" in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: max_model_len=64: ")
    assert "requests would be cut off at engine.max_model_len, 64 tokens: r0" in line


@pytest.mark.parametrize(
    "write", [write_tokens, write_own, write_trace], ids=["tokens", "own", "trace"]
)
def test_prompts_that_are_too_long_alone_are_named(tmp_path, capsys, write):
    assert dry_run(tmp_path, write(tmp_path, 70)) == 2
    assert capsys.readouterr().err == (
        "error: max_model_len=64: a prompt has 70 tokens, and engine.max_model_len is 64, one of "
        "them for output; raise the limit, or bound the workload's lengths\n"
    )
    assert dry_run(tmp_path, write(tmp_path, 40)) == 0
    assert capsys.readouterr().err == ""


def test_the_workload_of_every_repeat_is_looked_at(tmp_path, capsys):
    last = np.random.default_rng([2, 9]).integers(0, 10**6)  # of the seed of repeat 2
    (tmp_path / "mine.py").write_text(
        f"def mine(rng):\n    return [(95 if rng.integers(0, 10**6) == {last} else 5, 9)]\n"
    )
    assert dry_run(tmp_path, "{kind: mine.py:mine}\nrepeats: 3") == 0
    assert dry_run(tmp_path, "{kind: mine.py:mine}\nrepeats: 3\nreseed: true") == 2
    assert "max_model_len=64: a prompt has 95 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("simulate", "longest"),
    [("{chip: h100, model: llama-3-8b}", 8192), ("null", 8192)],
    ids=["simulated", "measured"],
)
def test_a_limit_beyond_the_models_is_said_once_for_all_points(tmp_path, capsys, simulate, longest):
    text = CONFIG.format(workload=SYNTHETIC).replace("{chip: h100, model: llama-3-8b}", simulate)
    text = text.replace("{max_model_len: 128}", "{max_model_len: 9000}")
    text = text.replace("engine.max_model_len: [64, 128]", "engine.block_size: [8, 16, 32]")
    (tmp_path / "small.yaml").write_text(text)
    assert run.main([str(tmp_path / "small.yaml"), "--out", str(tmp_path), "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        "error: 3 points, such as block_size=8: max_model_len is 9000, but the model was made for "
        f"{longest} tokens; lower it\n"
    )
