"""The replay of a trace by the states that are kept: exact numbers of a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench import prefix_checkpoints as bench

SYSTEM = [0, 1, 2]  # blocks of 512 tokens that all requests begin with


def line(tokens: int, *hashes: int) -> str:
    return json.dumps(
        {"timestamp": 0, "input_length": tokens, "output_length": 2, "hash_ids": hashes}
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four questions about one system prompt, and the last of them again."""
    path = tmp_path / "trace.jsonl"
    lines = [line(4 * 512 + 100, *SYSTEM, question, 90 + question) for question in (10, 11, 12)]
    path.write_text("\n".join([*lines, lines[-1]]) + "\n")
    return path


def test_each_policy_finds_what_it_keeps(trace: Path, tmp_path: Path, capsys):
    report = tmp_path / "report.json"
    words = [str(trace), "--blocks", "30", "--states", "3", "--seqs", "1", "--json", str(report)]
    assert bench.main(words) == 0
    results = {row["policy"]: row for row in json.loads(report.read_text())["results"]}
    prompts = 4 * (4 * 512 + 100)
    found = {name: row["found"] * prompts / 512 for name, row in results.items()}
    assert found == pytest.approx(
        {
            "every": 3 + 3 + 4,
            "interval 2048": 4,
            "interval 8192": 0,
            "prompts": 4,
            "junctions": 3 + 3,  # the second question comes to the end of the system prompt
            "prompts, junctions": 3 + 4,
            "interval 8192, prompts, junctions": 3 + 4,
        }
    )
    assert all(row["attention"] == 6 for row in results.values())
    states = {name: row["states"] for name, row in results.items()}
    assert states["every"] == 6
    assert states["prompts"] == 3
    assert states["junctions"] == 2  # at the system prompt, and at the question that came again
    assert "found" in capsys.readouterr().out


def test_a_line_that_is_no_request_is_named(trace: Path, capsys):
    trace.write_text(line(10) + '\n{"input_length": 3}\n')
    with pytest.raises(SystemExit):
        bench.main([str(trace)])
    assert "line 2 of" in capsys.readouterr().err
