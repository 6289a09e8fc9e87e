"""The benchmark of what several processes cost the host: two real processes, a few steps."""

from __future__ import annotations

import json

import pytest

from experiments.bench import processes


@pytest.mark.slow
def test_each_number_of_sequences_has_a_row_of_positive_costs(tmp_path):
    file = tmp_path / "report.json"
    processes.main(["--sequences", "1", "3", "--steps", "5", "--json", str(file)])
    report = json.loads(file.read_text())
    assert [row["sequences"] for row in report["rows"]] == [1, 3]
    assert all(
        row[name] > 0 for row in report["rows"] for name in ("schedule", "digest", "send", "arrive")
    )
