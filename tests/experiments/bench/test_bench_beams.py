"""What the benchmark of beams refuses; its searches are those of study 008."""

from __future__ import annotations

import pytest

from experiments.bench import beams


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--model", "/nope"], "there is no model '/nope'"),
        (["--widths", "2", "49"], "--widths has 49; 48 beams have a place at a time"),
        (["--requests", "0"], "--requests is 0; it must be at least 1"),
    ],
)
def test_what_gives_no_number_is_refused(wrong, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        beams.main(wrong)
    assert message in capsys.readouterr().err
