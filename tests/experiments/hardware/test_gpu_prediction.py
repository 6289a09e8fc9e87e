"""What the study of predictions writes on a GPU."""

from __future__ import annotations

import importlib

import pytest

from experiments.hardware.gpu_prediction import STUDY, main, summary

study = importlib.import_module(STUDY)


def repeats(*rates):
    times = {"ttft_s": {"p50": 1.0}, "itl_s": {"p50": 1.0, "p99": 1.0}, "duration_s": 1.0}
    return [{"output_tokens_per_s": rate, **times} for rate in rates]


def test_errors_are_means_over_the_runs_that_were_not_fitted():
    compared = {
        study.FIT: study.Compared(repeats(100.0), repeats(90.0), repeats(1.0)),
        "another": study.Compared(repeats(100.0), repeats(110.0), repeats(200.0)),
    }
    report = summary(study, compared, 3.0)
    assert report["errors"]["output tokens/s"] == {
        "fitted to another run": pytest.approx(10.0),
        "the fitted run itself": pytest.approx(10.0),
        "roofline alone": pytest.approx(100.0),
        "a repeat of the run": None,
    }
    assert report["runs"]["another"]["output tokens/s"]["measured"] == [100.0]


def test_a_missing_model_is_an_error(capsys):
    assert main(["--model", "no/such.gguf"]) == 2
    assert "--model no/such.gguf" in capsys.readouterr().err
