"""The benchmark of the host's part of a step: it runs, and its clock counts each second once."""

from __future__ import annotations

import gc
import json
import time

import pytest

from experiments.bench import host

SMALL = ["--rows", "1", "3", "--lookahead", "0", "1"]


@pytest.fixture(autouse=True)
def _small_vocabulary(monkeypatch):
    monkeypatch.setattr(host, "SHAPE", {**host.SHAPE, "vocab_size": 320})


def test_its_file_has_each_setting_and_the_parts_of_the_largest(tmp_path, capsys):
    file = tmp_path / "host.json"
    host.main([*SMALL, "--output", "60", "70", "--json", str(file)])
    figures = json.loads(file.read_text("utf-8"))
    times = [host.HostTimes(**row) for row in figures["times"]]
    assert [(row.rows, row.lookahead) for row in times] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert all(row.steps >= 20 and 0 < row.median <= row.p99 for row in times)
    parts = host.HostTimes(**figures["by_part"])
    assert set(parts.parts) == set(host.PARTS)
    assert 0 < sum(parts.parts.values()) < parts.mean
    assert capsys.readouterr().out.splitlines()[-1] == host.sentence(times[-1])


def test_a_span_is_one_program_and_its_line_says_so(capsys):
    host.main(["--rows", "3", "--lookahead", "1", "--span", "1", "4", "--output", "60", "70"])
    single, span = capsys.readouterr().out.splitlines()[-2:]
    assert single.startswith("3 rows, lookahead 1: median ")
    assert span.startswith("3 rows, lookahead 1, span 4: median ")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("20 30", "--output is 20 to 30: the first of 1 requests ends before all of them have"),
        ("30 20", "--output is 30 20; it must be the fewest and the most tokens"),
        ("30 5000", "no more than 4096"),
    ],
)
def test_outputs_that_give_no_times_are_refused(output, message, capsys):
    with pytest.raises(SystemExit):
        host.main(["--rows", "1", "--lookahead", "0", "--output", *output.split()])
    assert message in capsys.readouterr().err


def test_a_part_has_no_time_of_the_parts_inside_it():
    clock = host.Clock()
    inner = clock.timed("inner", lambda: time.sleep(0.02))

    def call_twice() -> None:
        inner()
        inner()

    began = time.perf_counter()
    clock.timed("outer", call_twice)()
    seconds = time.perf_counter() - began
    assert clock.seconds["inner"] >= 0.04
    assert sum(clock.seconds.values()) <= seconds


def test_collections_of_garbage_are_counted_within_the_block_alone():
    with host.Collections() as collections:
        gc.collect()
    gc.collect()
    assert len(collections.seconds) == 1
