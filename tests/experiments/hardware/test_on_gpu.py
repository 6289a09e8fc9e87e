"""The order of a session on a GPU, with parts that need none; and what the real one says where there is no GPU."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import pytest

from experiments.hardware import on_gpu
from experiments.hardware.on_gpu import PARTS, Part, main, parts, session

OK, BAD, SLOW = ("platform",), ("no.such.module",), ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(600)")


def test_a_part_that_fails_does_not_stop_the_next(tmp_path, capsys):
    assert not session([Part("one", BAD), Part("two", OK)], tmp_path, 5)
    said = capsys.readouterr().out
    assert "one: failed with exit code 1" in said
    assert "two: ok" in said
    assert "No module named" in (tmp_path / "one.log").read_text()


def test_nothing_is_built_on_wrong_kernels(tmp_path, capsys):
    assert not session([Part("one", BAD, must=True), Part("two", OK)], tmp_path, 5)
    assert "two" not in capsys.readouterr().out
    assert not (tmp_path / "two.log").exists()


def test_what_does_not_fit_is_named(tmp_path, capsys):
    assert not session([Part("one", OK), Part("two", OK)], tmp_path, 0.4)
    assert "not run for want of time: one, two" in capsys.readouterr().out


def test_a_part_is_stopped_when_the_time_is_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "LEAST", 0.0)
    assert not session([Part("one", SLOW)], tmp_path, 2 / 60)
    assert "one: stopped after" in capsys.readouterr().out


def test_without_a_gpu_the_session_ends_at_once_and_says_why(tmp_path, capsys):
    assert main(["--name", "h200", "--out", str(tmp_path)]) == 1
    assert "nothing to measure" in capsys.readouterr().out


def test_a_part_that_is_not_there_is_an_error_and_not_a_session_of_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--name", "h200", "--out", str(tmp_path), "--only", "foo"])
    assert "invalid choice: 'foo'" in capsys.readouterr().err
    assert tuple(part.name for part in parts("h200", Path())) == PARTS


class Parsed(Exception):
    """Raised in place of the run that would follow."""


@pytest.mark.parametrize("part", parts("h200", Path("out")), ids=lambda part: part.name)
def test_each_part_is_a_module_that_accepts_its_arguments(part: Part, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", list(part.arguments))
    monkeypatch.delitem(sys.modules, part.arguments[0], raising=False)
    with pytest.raises(Parsed):
        runpy.run_module(part.arguments[0], run_name="__main__")
