"""Arguments that the benchmark of lower bounds refuses."""

from __future__ import annotations

import pytest

from experiments.bench import lower_bounds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--batches", "1", "0"], "--batches is 0; it must be at least 1"),
        (["--prompts", "0"], "--prompts is 0; it must be at least 1"),
        (["--context", "0"], "--context is 0; it must be at least 1"),
        (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["--model", "/nope"], "there is no model '/nope'"),
    ],
)
def test_arguments_without_a_result_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        lower_bounds.main(wrong)
    assert message in capsys.readouterr().err
