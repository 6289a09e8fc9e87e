"""What the benchmark of floors refuses; its numbers are the machine's."""

from __future__ import annotations

import pytest

from experiments.bench import floors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--batches", "1", "0"], "--batches is 0; it must be at least 1"),
        (["--context", "0"], "--context is 0; it must be at least 1"),
        (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["--model", "/nope"], "there is no model '/nope'"),
    ],
)
def test_what_gives_no_number_is_refused(wrong, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        floors.main(wrong)
    assert message in capsys.readouterr().err
