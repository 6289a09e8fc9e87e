"""The benchmark of start-up stages, in separate processes on a tiny model."""

from __future__ import annotations

import json

import pytest

from experiments.bench import startup


@pytest.mark.slow
def test_stages_sum_to_total_and_warm_process_compiles_nothing(tiny_folder, tmp_path):
    out = tmp_path / "startup.json"
    options = ["--kinds", "LLM(lazy)", "--repeats", "1"]
    assert startup.main(["--model", str(tiny_folder), *options, "--json", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert set(runs) == {"LLM(lazy), cold", "LLM(lazy), warm"}
    (cold,), (warm,) = runs.values()
    for run in (cold, warm):
        assert all(run[stage] > 0 for stage in startup.STAGES if stage != "warmup")
        assert sum(run[stage] for stage in startup.STAGES) == pytest.approx(run["total"])
    assert cold["cached"] == 0
    assert warm["cached"] == warm["programs"] == cold["programs"] > 0


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
