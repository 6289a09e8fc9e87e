"""The benchmark of start-up stages, in separate processes on a tiny model."""

from __future__ import annotations

import json

import pytest

from experiments.bench import startup


@pytest.mark.slow
def test_stages_sum_to_total_and_warm_process_compiles_nothing(tiny_folder, tmp_path, capsys):
    out = tmp_path / "startup.json"
    words = [
        "--model",
        str(tiny_folder),
        "--kinds",
        "LLM(lazy)",
        "--repeats",
        "1",
        "--json",
        str(out),
    ]
    assert startup.main(words) == 0
    runs = json.loads(out.read_text())["runs"]
    assert set(runs) == {"LLM(lazy), cold", "LLM(lazy), warm"}
    (cold,), (warm,) = runs.values()
    for run in (cold, warm):
        assert all(run[stage] > 0 for stage in startup.STAGES if stage != "warmup")
        assert sum(run[stage] for stage in startup.STAGES) == pytest.approx(run["total"])
    assert cold["cached"] == 0
    assert warm["cached"] == warm["programs"] == cold["programs"] > 0
    assert "LLM(lazy), warm" in capsys.readouterr().out


@pytest.mark.exhaustive  # `serve` beside the two kinds above
def test_a_server_is_timed_until_its_answers(tiny_folder, tmp_path, capsys):
    out = tmp_path / "startup.json"
    words = ["--model", str(tiny_folder), "--kinds", "serve", "--repeats", "1", "--json", str(out)]
    assert startup.main(words) == 0
    runs = {name: run for name, (run,) in json.loads(out.read_text())["runs"].items()}
    assert {run["text"] for run in runs.values()} == {runs["serve, cold"]["text"]}
    for name in ("serve, cold", "serve, warm"):
        run = runs[name]
        assert 0 < run["listening"] < run["total"] < run["all programs"]
    assert "times the first" in capsys.readouterr().out


def test_ratios_are_of_the_same_round():
    runs = {"a, cold": [{"total": 1.0, "stolen": 0.0}, {"total": 4.0, "stolen": 0.0}]}
    runs["b, cold"] = [{"total": 2.0, "stolen": 0.0}, {"total": 4.0, "stolen": 0.0}]
    assert "1.50 (1.00-2.00)" in startup.answers_table(runs).splitlines()[-1]


@pytest.mark.slow
def test_failed_process_error_has_reason(tmp_path, capsys):
    assert startup.main(["--model", str(tmp_path), "--repeats", "1"]) == 1
    assert "config.json" in capsys.readouterr().err


def test_process_with_stolen_processors_is_not_counted():
    def run(total, stolen):
        return dict.fromkeys((*startup.STAGES, "total"), total) | {
            "stolen": stolen,
            "programs": 1,
            "cached": 0,
        }

    lucky = run(1.0, 0.01)
    unlucky = run(9.0, 0.5)
    assert startup.valid_runs([lucky, unlucky]) == [lucky]
    assert startup.valid_runs([unlucky]) == [unlucky]
    assert "9.00" not in startup.table({"LLM(), cold": [lucky, unlucky]})
