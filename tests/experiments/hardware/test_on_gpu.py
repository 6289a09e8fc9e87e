"""The session on a GPU: its order with parts that need no GPU, and the arguments of its real parts."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.hardware import on_gpu
from experiments.hardware.on_gpu import PARTS, Part, main, parts, session

OK, BAD, SLOW = ("platform",), ("no.such.module",), ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(600)")


def test_failed_part_does_not_stop_next_part(tmp_path, capsys):
    assert not session([Part("one", BAD), Part("two", OK)], tmp_path, 5)
    printed = capsys.readouterr().out
    assert "one: failed with exit code 1" in printed
    assert "two: ok" in printed
    assert "No module named" in (tmp_path / "one.log").read_text()


def test_required_part_failure_stops_session(tmp_path, capsys):
    assert not session([Part("one", BAD, must=True), Part("two", OK)], tmp_path, 5)
    assert "two" not in capsys.readouterr().out
    assert not (tmp_path / "two.log").exists()


def test_parts_beyond_time_limit_are_listed(tmp_path, capsys):
    assert not session([Part("one", OK), Part("two", OK)], tmp_path, 0.4)
    assert "not run, no time left: one, two" in capsys.readouterr().out


def test_part_is_stopped_at_time_limit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "LEAST", 0.0)
    assert not session([Part("one", SLOW)], tmp_path, 2 / 60)
    assert "one: stopped after" in capsys.readouterr().out


def test_session_without_gpu_ends_with_reason(tmp_path, capsys):
    assert main(["--name", "h200", "--out", str(tmp_path)]) == 1
    assert "nothing to measure" in capsys.readouterr().out


def test_unknown_part_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--name", "h200", "--out", str(tmp_path), "--only", "foo"])
    assert "invalid choice: 'foo'" in capsys.readouterr().err
    assert tuple(part.name for part in parts("h200", Path())) == PARTS


@pytest.mark.parametrize("part", parts("h200", Path("out")), ids=lambda part: part.name)
def test_every_part_is_a_module_that_parses_its_arguments(part, monkeypatch):
    class Parsed(Exception):
        pass

    def parse(parser, words=None, namespace=None):
        raise Parsed(original(parser, words, namespace))

    original = argparse.ArgumentParser.parse_args
    name, *words = part.arguments
    module = importlib.import_module(name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(Parsed):
        module.main()


@pytest.mark.parametrize("name", ["experiments.hardware.on_gpu", *sorted({p.arguments[0] for p in parts("x", Path())})])
def test_every_part_is_a_command(name):
    command = [sys.executable, "-m", name, "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ")
