"""How near predictions come: the script runs, and its medians over rounds are medians."""

from __future__ import annotations

import json

import pytest

from experiments.laboratory import accuracy
from experiments.laboratory.measured import Cell


def round_of(again: float, measured: float, predicted: float) -> accuracy.Round:
    table = [
        Cell(accuracy.AGAIN, "end", 1.0, again, None, again - 1, None),
        Cell("budget 32", "end", 1.0, measured, predicted, measured - 1, predicted - 1),
    ]
    return accuracy.Round(table, measured / 10)


def test_a_table_has_the_medians_over_rounds():
    rounds = [round_of(1.1, 2.0, 1.8), round_of(1.3, 2.5, 2.2), round_of(0.9, 1.5, 2.7)]
    again, budget = accuracy.median_of(rounds).table
    assert (again.measured, again.predicted) == (1.1, None)
    assert (budget.measured, budget.predicted) == (2.0, 2.2)
    assert budget.error == pytest.approx(0.1)
    assert accuracy.median_of(rounds).fit_error == 0.2
    assert accuracy.spreads(rounds) == {"end": pytest.approx(0.4)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds: '0' is given; it must be an integer of at least 1"),
        (["--count", "-3"], "--count: '-3' is given; it must be an integer of at least 1"),
        (["--rate", "0"], "--rate is 0.0; it must be above 0 and finite"),
        (["--rate", "nan"], "--rate is nan; it must be above 0 and finite"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_read(words, message, capsys):
    with pytest.raises(SystemExit):
        accuracy.main(["no/such/model", *words])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_each_change_is_measured_and_predicted(tiny_folder, tmp_path, capsys):
    path = tmp_path / "accuracy.json"
    options = ["--count", "4", "--rate", "50", "--rounds", "2", "--json", str(path)]
    assert accuracy.main([str(tiny_folder), *options]) == 0
    assert "spread of equal runs, end: " in capsys.readouterr().out
    result = json.loads(path.read_text("utf-8"))
    changes = [accuracy.AGAIN, *accuracy.CHANGES]
    assert list(dict.fromkeys(cell["change"] for cell in result["cells"])) == changes
    predictions = [cell["predicted"] for cell in result["cells"][4:]]
    assert all(seconds > 0 for seconds in predictions)
    assert [len(errors) for errors in result["errors_of_rounds"]] == [20, 20]
