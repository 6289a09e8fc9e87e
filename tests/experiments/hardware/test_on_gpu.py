"""The session on a GPU: its order with parts that need no GPU, the arguments of its real parts, and
its rehearsal.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path

import jax
import pytest

from experiments.hardware import on_gpu
from experiments.hardware.on_gpu import LIMITS, PARTS, Part, main, parts, rates, session
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.tiles import Tiles

OK = ("platform",)
BAD = ("no.such.module",)
SLOW = ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(600)")
needs_jax = pytest.mark.skipif(
    jax.__version_info__ < pallas_gpu.JAX_NEEDED, reason="the kernels need JAX 0.11"
)
ROOT = Path(__file__).parents[3]


def plan_of(rehearse: bool = False) -> list[Part]:
    return parts("h200", Path("out"), "smollm2-135m", LIMITS, rehearse)


def read_session(out: Path) -> dict:
    return json.loads((out / "session.json").read_text(encoding="utf-8"))


def test_failed_part_does_not_stop_next_part(tmp_path):
    assert not session([Part("one", BAD), Part("two", OK)], tmp_path, 5, {"name": "a card"})
    assert "No module named" in (tmp_path / "one.log").read_text()
    report = read_session(tmp_path)
    assert report["name"] == "a card"
    assert [(part["part"], part["result"]) for part in report["parts"]] == [
        ("one", "failed with exit code 1"),
        ("two", "ok"),
    ]
    assert report["not_run"] == []


@pytest.mark.parametrize(("minutes", "not_run"), [(5, ["two"]), (0.1, ["one", "two"])])
def test_parts_after_a_failed_required_one_or_the_time_limit_are_listed(tmp_path, minutes, not_run):
    assert not session([Part("one", BAD, ends_session=True), Part("two", OK)], tmp_path, minutes)
    assert not (tmp_path / "two.log").exists()
    assert read_session(tmp_path)["not_run"] == not_run


def test_part_is_stopped_at_the_sessions_limit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "MIN_SECONDS", 0.0)
    assert not session([Part("one", SLOW)], tmp_path, 2 / 60)
    assert "one: stopped after 2 s" in capsys.readouterr().out


HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
if sys.argv[2] == "hang":
    time.sleep(600)
"""


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie, which waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize(
    ("ending", "result"),
    [pytest.param("hang", "stopped after 4 s", marks=pytest.mark.slow), ("end", "ok")],
)
def test_nothing_of_a_part_is_left_and_the_next_one_runs(tmp_path, monkeypatch, ending, result):
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "pid"
    start = time.monotonic()
    plan = [Part("one", ("hangs", str(file), ending), seconds=4), Part("two", OK)]
    assert session(plan, tmp_path, 5) is (ending == "end")
    assert [part["result"] for part in read_session(tmp_path)["parts"]] == [result, "ok"]
    assert time.monotonic() - start < 60
    pid = int(file.read_text())
    end = time.monotonic() + 5
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(pid)


def test_the_engine_gets_the_rates_that_were_measured(tmp_path):
    assert rates(tmp_path) == []
    (tmp_path / "kernels.json").write_text('{"where": {}}')
    assert rates(tmp_path) == []
    (tmp_path / "kernels.json").write_text(
        '{"card": {"copy_bytes_per_s": 3e12, "product_flops_per_s": 7e14}}'
    )
    assert rates(tmp_path) == ["--bandwidth", "3000000000000.0", "--rate", "700000000000000.0"]


@needs_jax
def test_session_without_gpu_ends_with_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "right", 100.0)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["--name", "h200", "--out", str(tmp_path)]) == 1
    assert "runs on platform 'gpu' and not on 'cpu'" in (tmp_path / "right.log").read_text()
    assert read_session(tmp_path)["not_run"] == list(PARTS[1:])


@pytest.mark.skipif(
    jax.__version_info__ >= pallas_gpu.JAX_NEEDED, reason="this JAX has the kernels"
)
def test_an_old_jax_is_an_error(tmp_path, capsys):
    assert main(["--name", "h200", "--out", str(tmp_path), "--rehearse"]) == 2
    message = f"the kernels need JAX 0.11 or newer, and this is {jax.__version__}; use Python 3.12 or newer, where pip"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "foo"], "invalid choice: 'foo'"),
        (["--limits", "tune=soon"], "'tune=soon' is no limit; write PART=SECONDS"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(["--name", "h200", "--out", str(tmp_path), *words])
    assert message in capsys.readouterr().err


def test_limits_are_those_of_the_parts():
    assert tuple(part.name for part in plan_of()) == PARTS
    changed = parts("h200", Path("out"), "model", LIMITS | dict([on_gpu.limit("right=60")]))
    assert [part.seconds for part in changed] == [60.0, *list(LIMITS.values())[1:]]
    assert changed[0].arguments[1:3] == ("--seconds", "50"), (
        "a part that hangs says itself what it has found"
    )
    assert [part.ends_session for part in changed] == [True] + [False] * (len(PARTS) - 1)


@pytest.mark.parametrize("rehearse", [False, True], ids=["real", "rehearsal"])
@pytest.mark.parametrize("part_name", PARTS)
def test_every_part_is_a_module_that_parses_its_arguments(part_name, rehearse, monkeypatch):
    class Parsed(Exception):
        pass

    def parse(parser, words=None, namespace=None):
        raise Parsed(original(parser, words, namespace))

    original = argparse.ArgumentParser.parse_args
    name, *words = next(part.arguments for part in plan_of(rehearse) if part.name == part_name)
    module = importlib.import_module(name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(Parsed) as raised:
        module.main()
    (parsed,) = raised.value.args
    assert str(parsed.json) == f"out/{part_name}.json"
    assert parsed.rehearse is rehearse


@needs_jax
@pytest.mark.slow
def test_a_whole_session_is_rehearsed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    tiles = Tiles.read("h200")
    torch = importlib.util.find_spec("torch") is not None
    limits = ["--minutes", "30", "--limits", *(f"{part}=600" for part in PARTS)]
    code = main(["--name", "h200", "--out", str(tmp_path), "--rehearse", *limits])
    assert code == (0 if torch else 1), capsys.readouterr().out
    assert [(part["part"], part["result"]) for part in read_session(tmp_path)["parts"]] == [
        (part, "ok" if part != "peers" or torch else "failed with exit code 2") for part in PARTS
    ]
    assert read_session(tmp_path)["rehearsal"]
    figures = {file.stem: json.loads(file.read_text("utf-8")) for file in tmp_path.glob("*.json")}
    assert all(case["right"] for case in figures["right"]["cases"])
    assert "rehearsal" in figures["tune"]["note"]
    assert Tiles.read("h200") == tiles, "a rehearsal writes no tiles"
    assert {row["contender"] for row in figures["kernels"]["rows"]} == {"xla"}
    assert all(row["seconds"] > 0 for row in figures["kernels"]["rows"])
    assert all(run["output_tokens_per_s"] > 0 for run in figures["engine"]["runs"])
    assert [run["wrong"] for run in figures["goldens"]["runs"]] == [[], []]
    assert set(figures["predict"]["runs"]) == {"all at once", "four fifths of the load"}
    assert not any(figures["writes"]["faults"].values())
    assert len(figures["stored"]["errors"]) == 4
    assert len(figures["stored"]["decodes"]["2"]) == 3
    assert [case["matrix"] for case in figures["products"]["times"]] == ["attn.out", "mlp.up"]
