"""Commands and frames of experiments work from any folder, outside of the checkout."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest

import experiments
from pagedjax.commands import experiments as commands
from pagedjax.commands.cli import main
from tests.docs.guide_blocks import blocks, write
from tests.docs.guide_blocks import commands as guide_commands

CONFIG = """name: small
simulate: {chip: h100, model: llama-3-8b}
engine: {max_model_len: 128}
workload:
  kind: synthetic
  count: 6
  prompt: {dist: fixed, value: 20}
  output: {dist: fixed, value: 9}
  arrivals: {process: poisson, rate: 50}
sampling: {ignore_eos: true, n: 2}
sweep: {grid: {engine.block_size: [8, 16]}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "small.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "small.yaml", "--quiet", "--no-report"]) == 0
    return folder


def test_a_process_in_an_empty_folder_finds_the_commands(tmp_path):
    """Without the checkout on the path, as after the README's installation."""
    root = Path(__file__).parents[2]
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from pagedjax.commands.cli import main\n"
        "sys.exit(main(['run', 'no.yaml']))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 2
    assert "no.yaml" in child.stderr


def test_experiments_are_installed_with_the_library():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'include = ["pagedjax*", "pallas_kernels*", "experiments*"]' in text


@pytest.mark.slow
def test_commands_are_those_of_the_modules(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["report", "runs/small"]) == 0
    assert main(["compare", "runs/small", "runs/small"]) == 0
    assert "block_size=8" in capsys.readouterr().out
    for name in commands.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"experiments.{name}" in capsys.readouterr().out


@pytest.mark.slow
def test_comparisons_and_capacities_of_the_guide_run_elsewhere(tmp_path, monkeypatch, capsys):
    """The guide's commands in an empty folder, on fewer requests and a coarser search."""
    page = (Path(__file__).parents[2] / "docs/guides/run_an_ablation.md").read_text("utf-8")
    config, commands_of_guide, *_ = blocks(page)
    monkeypatch.chdir(tmp_path)
    write(config, tmp_path)
    text = (tmp_path / "budget.yaml").read_text()
    fewer = text.replace("count: 100", "count: 12").replace("repeats: 3", "repeats: 2")
    sooner = fewer.replace("rate: 12.0", "rate: 100.0").replace("ttft: 0.5", "ttft: 0.03")
    (tmp_path / "budget.yaml").write_text(sooner)
    ran = []
    for command in guide_commands(commands_of_guide.source):
        words = shlex.split(command.replace("--jobs 2", "--jobs 1").replace("0.2", "1.0"))
        assert words[0] == "pagedjax"
        assert main(words[1:] + ["--quiet"] * (words[1] in ("run", "capacity"))) == 0, command
        ran.append(words[1])
    printed = capsys.readouterr().out
    assert ran.count("compare") == 3
    assert "engine.max_num_batched_tokens=2048 against 256" in printed
    assert "Holm's method: 2 of cells. shown" in printed
    assert {row["value"] for row in json.loads(Path("by.json").read_text())["comparisons"]} == {
        2048
    }
    assert len(json.loads(Path("runs/budget-capacity/capacity.json").read_text())["cells"]) == 2
    assert Path("runs/budget-capacity/capacity.html").is_file()


def test_without_experiments_the_command_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "experiments.run", None)
    assert main(["run", "small.yaml"]) == 2
    assert capsys.readouterr().err.endswith(
        "; install them from a clone: pip install -e '.[experiments]'\n"
    )


def test_requests_are_a_row_each_with_their_times(folder):
    frame = experiments.load_requests(folder / "runs" / "small")
    assert frame.groupby("block_size").size().to_dict() == {8: 6, 16: 6}
    assert set(frame["output_tokens"]) == {18}
    assert set(frame["branches"]) == {2}
    assert set(frame["finish_reason"]) == {"length"}
    assert not frame.isna().any().any()
    runs = experiments.load_runs(folder / "runs" / "small").set_index("block_size")
    for size, rows in frame.groupby("block_size"):
        chex.assert_trees_all_close(
            np.quantile(rows["ttft_s"], 0.5), runs.loc[size, "ttft_s.p50"], atol=2e-6
        )
        chex.assert_trees_all_close(
            np.quantile(rows["e2e_s"], 0.5), runs.loc[size, "e2e_s.p50"], atol=2e-6
        )
    assert (frame["tpot_s"] > 0).all()
    assert (frame["queue_s"] <= frame["ttft_s"]).all()


def test_rows_are_chosen_by_values(folder):
    runs = folder / "runs" / "small"
    assert set(experiments.load_requests(runs, {"block_size": 8})["block_size"]) == {8}
    assert set(experiments.load_steps(runs, {"engine.block_size": 16})["block_size"]) == {16}
    assert len(experiments.load_runs(runs, {"block_size": 16, "repeat": 0})) == 1
    with pytest.raises(
        ValueError, match=r"engine\.block_size has 8, 16 \(the nearest: .*size=16\)"
    ):
        experiments.load_runs(runs, {"block_size": 32})


def test_steps_are_a_row_each(folder):
    frame = experiments.load_steps(folder / "runs" / "small")
    runs = experiments.load_runs(folder / "runs" / "small").set_index("block_size")
    assert frame.groupby("block_size").size().to_dict() == runs["steps"].to_dict()
    first = json.loads((Path(frame["run"].iloc[0]) / "steps.jsonl").read_text().splitlines()[0])
    assert {key: frame.iloc[0][key] for key in first} == first
