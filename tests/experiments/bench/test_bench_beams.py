"""Arguments that the beam benchmark refuses. Study 008 tests its searches."""

from __future__ import annotations

import pytest

from experiments.bench import beams


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--model", "/nope"], "there is no model '/nope'"),
        (["--widths", "2", "49"], "--widths has 49; at most 48 beams run at the same time"),
        (["--requests", "0"], "--requests is 0; it must be at least 1"),
    ],
)
def test_arguments_without_a_result_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        beams.main(wrong)
    assert message in capsys.readouterr().err
