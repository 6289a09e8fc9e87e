"""Sweeps on a Ray cluster: places as pure functions, and a local cluster that measures."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import run
from experiments.core import cluster, config
from experiments.core.cluster import Place, parse_resources, places_of
from experiments.core.engines import Run, plan_runs
from experiments.core.environment import cpu_model, environment, source
from tests.experiments.core import summaries
from tests.weights.tiny import tiny_llama

ROOT = Path(__file__).parents[3]
MEASURED = {
    **summaries.MEASURED,
    "name": "spread",
    "repeats": 2,
    "sweep": {"grid": {"engine.block_size": [4, 16]}},
}
SIMULATED = {
    **MEASURED,
    "model": "llama-3-8b",
    "simulate": {"chip": "h200", "model": "llama-3-8b"},
}


def node(name: str, alive: bool = True, **totals: float) -> dict[str, Any]:
    usual = {"memory": 1e9, "object_store_memory": 1e9, f"node:{name}": 1.0}
    return {"NodeID": name, "Alive": alive, "Resources": {**usual, **totals}}


def test_a_measured_run_has_a_node_s_processors_alone():
    nodes = [
        node("a", CPU=8.0),
        node("b", CPU=16.0),
        node("dead", alive=False, CPU=4.0),
        node("head"),
    ]
    assert places_of(nodes, None, measured=True) == (
        Place({"num_cpus": 8}, "a"),
        Place({"num_cpus": 16}, "b"),
    )


def test_a_measured_run_has_a_gpu_where_the_cluster_has_some():
    nodes = [node("a", CPU=9.0, GPU=2.0), node("b", CPU=16.0), node("c", CPU=1.0, GPU=2.0)]
    part = {"num_gpus": 1.0, "num_cpus": 4.0}
    none = {"num_gpus": 1.0}
    assert places_of(nodes, None, measured=True) == (
        *[Place(part, "a")] * 2,
        *[Place(none, "c")] * 2,
    )


def test_a_simulated_run_has_one_processor():
    assert (
        places_of([node("a", CPU=2.0), node("b", CPU=1.0)], None, measured=False)
        == (Place({"num_cpus": 1.0}),) * 3
    )


def test_asked_resources_decide_how_many_workers_there_are():
    nodes = [node("a", CPU=8.0, GPU=2.0, TPU=4.0), node("b", CPU=3.0, GPU=1.0)]
    for text, count in (
        ("num_cpus=2", 5),
        ("num_cpus=2,num_gpus=1", 3),
        ("num_gpus=0.5", 6),
        ("TPU=4", 1),
    ):
        resources = parse_resources(text)
        assert places_of(nodes, resources, measured=True) == (Place(resources),) * count
    with pytest.raises(
        ValueError,
        match=r"--worker-resources is num_gpus=4, and no node .* has so much. Its nodes have "
        r"num_cpus=8,num_gpus=2,TPU=4; num_cpus=3,num_gpus=1. Ask for less",
    ):
        places_of(nodes, parse_resources("num_gpus=4"), measured=True)
    with pytest.raises(
        ValueError,
        match=r"a worker needs num_cpus=1, and no node .* have nothing: there is no node",
    ):
        places_of([], None, measured=True)


def test_parts_that_ray_reserves_are_taken():
    for text in ("num_gpus=0.5", "num_gpus=2", "num_cpus=0.0001", "mine=1.5"):
        name, number = text.split("=")
        assert parse_resources(text) == {name: float(number)}
    assert parse_resources("num_cpus=2, TPU=4") == {"num_cpus": 2.0, "TPU": 4.0}


FORM = "'; each name once, with a number above 0: write"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_cpus", f"'num_cpus{FORM}"),
        ("num_cpus=0", f"'num_cpus=0{FORM}"),
        ("a=1,a=2", FORM),
        ("a=inf", FORM),
        ("GPU=1", "'GPU'; its name is num_gpus"),
        ("bundle=1", "'bundle', which Ray reserves for no worker; leave it out"),
        ("num_cpus=0.00001", "'num_cpus=0.00001', and the least part that Ray reserves is 0.0001"),
        (
            "num_gpus=1.5",
            "'num_gpus=1.5'; above 1 Ray reserves only whole ones; write num_gpus=1 or num_gpus=2",
        ),
    ],
)
def test_wrong_resources_are_reported(tmp_path, capsys, text: str, message: str):
    pytest.importorskip("ray")
    options = ["--backend", "ray", "--worker-resources", text]
    path = write_config(tmp_path, SIMULATED)
    assert run.main([str(path), "--out", str(tmp_path / "runs"), *options]) == 2
    errors = capsys.readouterr().err
    assert "--worker-resources has '" in errors
    assert message in errors
    assert not (tmp_path / "runs").exists()


def test_resources_without_workers_are_reported(tmp_path, capsys):
    path = write_config(tmp_path, SIMULATED)
    out = ["--out", str(tmp_path / "runs"), "--worker-resources", "num_cpus=1"]
    assert run.main([str(path), *out]) == 2
    message = "--worker-resources is given, and --backend is not ray; add --backend"
    assert message in capsys.readouterr().err


def test_an_address_where_nothing_listens_is_reported_at_once(tmp_path, capsys, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whichever tests ran before
    with socket.socket() as bound:  # taken, and it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        start = time.monotonic()
        out = ["--out", str(tmp_path / "runs"), "--backend", "ray"]
        assert run.main([str(write_config(tmp_path, SIMULATED)), *out]) == 2
    assert time.monotonic() - start < 30
    assert (
        f"error: RAY_ADDRESS is {address!r}, and no cluster answers there ("
        in capsys.readouterr().err
    )


def test_only_an_address_of_a_host_and_a_port_is_tried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster.check_address(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("", "auto", "local", "ray://127.0.0.1:1", "127.0.0.1", "host:name"):
        cluster.check_address(address)
    for wrong in ("127.0.0.1:70000", "[::1]:1"):
        with pytest.raises(
            ValueError,
            match=r"RAY_ADDRESS is '.*', and no cluster answers there .*; unset RAY_ADDRESS",
        ):
            cluster.check_address(wrong)


def write_config(folder: Path, sections: dict[str, Any]) -> Path:
    path = folder / "spread.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=1, max_len=64))


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of this machine, with two processors and four chips to give away."""
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("r")  # short: a socket's path has at most 107 characters
    options: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "error",
    }
    ray.init("local", num_cpus=2, resources={"TPU": 4}, _temp_dir=str(folder), **options)
    yield ray
    ray.shutdown()


@pytest.fixture
def measured(tmp_path) -> Any:
    """Runs a config into a folder, without drawing a report."""

    def measure(sections: dict[str, Any], folder: str, *options: str) -> int:
        path = write_config(tmp_path, sections)
        command = [str(path), "--out", str(tmp_path / folder), "--quiet", "--no-report"]
        return run.main([*command, *options])

    return measure


def files(folder: Path, *apart: str) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_text() for path in paths if path.name not in apart
    }


def runs_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "spread/runs.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_simulated_runs_have_the_bytes_of_one_process(tmp_path, measured, local_ray):
    refused = {
        **SIMULATED,
        "sweep": {"grid": {"engine.block_size": [4, 16], "engine.max_model_len": [32, 9999]}},
    }
    assert measured(refused, "one") == 1, "one point is beyond the model's length"
    assert measured(refused, "two", "--backend", "ray") == 1
    alone, spread = (
        files(tmp_path / name, "env.json", "sweep.json", "error.txt") for name in ("one", "two")
    )
    assert alone == spread
    assert local_ray.is_initialized(), "the cluster is not ours to end"


@pytest.mark.slow
def test_measured_runs_have_the_requests_and_tokens_of_one_process(
    tmp_path, measured, local_ray, model
):
    sections = {**MEASURED, "model": model}
    assert measured(sections, "one") == 0
    assert measured(sections, "two", "--backend", "ray", "--worker-resources", "num_cpus=1") == 0
    alone = runs_of(tmp_path / "one")
    spread = runs_of(tmp_path / "two")
    for key in ("label", "point", "repeat", "order", "run", "failed", "source", "jax", "device"):
        assert [summary[key] for summary in alone] == [summary[key] for summary in spread]
    for counted in ("tokens_sha256", "requests", "output_tokens", "finished"):
        assert [summary["metrics"][counted] for summary in alone] == [
            summary["metrics"][counted] for summary in spread
        ]
    assert files(tmp_path / "one").keys() == files(tmp_path / "two").keys()
    seconds = []
    for summary in spread:
        folder = tmp_path / "two/spread" / summary["run"]
        resolved = tmp_path / "one/spread" / summary["run"] / "config.yaml"
        assert (folder / "config.yaml").read_text() == resolved.read_text()
        env = json.loads((folder / "env.json").read_text())
        assert (env["source"], env["cpu"]["model"]) == (source(), cpu_model())
        assert env["worker"] == {"num_cpus": 1.0}
        seconds.append(env["startup"]["total"])
    assert len(set(seconds)) == 2, "an engine is built once, and both repeats have it"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "two").rglob("summary.json")}
    assert measured(sections, "two", "--backend", "ray") == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing was missing"


DIES = """
import os, pathlib, signal
from pagedjax.policies import FCFS

def order(*arguments):
    mark = pathlib.Path(MARK)  # the process that asks for the runs checks the policy, and lives
    if mark.exists() and mark.read_text() != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return FCFS.order(*arguments)

KILLS = FCFS._replace(name="kills", order=order)
"""


@pytest.mark.slow
def test_a_worker_that_dies_is_a_failed_run_and_the_sweep_goes_on(tmp_path, measured, local_ray):
    mark = tmp_path / "mark"
    mark.write_text(str(os.getpid()))
    (tmp_path / "dies.py").write_text(DIES.replace("MARK", repr(str(mark))), encoding="utf-8")
    sweep = {"grid": {"engine.policy": ["fcfs", "dies.py:KILLS"], "engine.block_size": [4, 16]}}
    sections = {**SIMULATED, "sweep": sweep}
    assert measured(sections, "runs", "--backend", "ray") == 1
    runs = runs_of(tmp_path / "runs")
    assert [summary["failed"] is None for summary in runs] == [True] * 4 + [False] * 4
    for summary in runs[4:]:
        assert summary["failed"].startswith("the worker of this run is lost. ActorDiedError")
        folder = tmp_path / "runs/spread" / summary["run"]
        assert {"config.yaml", "env.json", "error.txt", "summary.json", "policy.py"} == {
            path.name for path in folder.iterdir()
        }
    folders = [tmp_path / "runs/spread" / summary["run"] for summary in runs[:4]]
    modified = [folder.stat().st_mtime_ns for folder in folders]
    mark.unlink()
    assert measured(sections, "runs", "--backend", "ray") == 0, (
        "failed runs are made again, and no others"
    )
    assert modified == [folder.stat().st_mtime_ns for folder in folders]


@pytest.mark.slow
def test_resources_that_ray_refuses_end_in_an_error(tmp_path, measured, local_ray, capsys):
    assert measured(SIMULATED, "runs", "--backend", "ray", "--worker-resources", "TPU=3") == 2
    errors = capsys.readouterr().err
    assert "error: --worker-resources is TPU=3, which Ray refuses: " in errors
    assert "(1, 2, 4, 8)" in errors
    assert not list((tmp_path / "runs").rglob("summary.json"))


@pytest.mark.slow
def test_a_cluster_of_this_process_ends_if_no_worker_can_be_asked_for(local_ray, monkeypatch):
    ended: list[bool] = []
    monkeypatch.setattr(local_ray, "shutdown", lambda: ended.append(True))
    workers = cluster.Workers((Place({"bundle": 1.0}),), alive=1, device=False, disconnects=True)
    with pytest.raises(ValueError, match="bundle"):
        list(cluster.results([], {}, print, workers))
    assert ended == [True]


@pytest.mark.slow
def test_workers_with_other_code_make_no_run(tmp_path, measured, local_ray, monkeypatch):
    monkeypatch.setattr(
        "experiments.core.cluster.code", lambda: {"source": "another", "jax": "0.0"}
    )
    assert measured(SIMULATED, "runs", "--backend", "ray") == 1
    runs = runs_of(tmp_path / "runs")
    assert len(runs) == 4
    assert all(
        "a node has other code" in summary["failed"] and "install the same" in summary["failed"]
        for summary in runs
    )


@pytest.mark.slow
def test_a_worker_with_other_code_is_noted(tmp_path, measured, local_ray, monkeypatch, capsys):
    # compared, and named in the note
    first = iter([{"source": "another", "jax": "0.0"}] * 2)
    this_code = cluster.code()
    monkeypatch.setattr("experiments.core.cluster.code", lambda: next(first, this_code))
    assert measured(SIMULATED, "runs", "--backend", "ray") == 0
    errors = capsys.readouterr().err
    assert (
        f"NOTE: a worker makes no run, on the node {platform.node()}: a node has other code"
        in errors
    )


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_noted(tmp_path, measured, local_ray, monkeypatch, capsys):
    mark = tmp_path / "mark"

    class Breaks(cluster.Worker):
        def __init__(self, *arguments: Any) -> None:
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                super().__init__(*arguments)
                time.sleep(10)  # or it makes all runs before Ray tells that the other one died
            else:
                raise RuntimeError("no device here")

    monkeypatch.setattr("experiments.core.cluster.Worker", Breaks)
    assert measured(SIMULATED, "runs", "--backend", "ray") == 0
    errors = capsys.readouterr().err
    assert "NOTE: a worker makes no run, on the node that Ray chose: ActorDiedError" in errors
    assert "no device here" in errors


@pytest.mark.slow
def test_a_run_is_announced_when_a_worker_gets_it(local_ray):
    plan: list[Run] = plan_runs(config.expand(SIMULATED, Path()), alive=4)
    events: list[tuple[str, int, int]] = []

    def begins(run: Run) -> None:
        events.append(("begins", run.place, run.repeat))

    workers = cluster.Workers((Place({"num_cpus": 1.0}),), alive=1, device=False, disconnects=False)
    for _, summary in cluster.results(plan, environment(device=False), begins, workers):
        events.append(("ends", summary["order"], summary["repeat"]))
    order = "begins begins ends begins ends begins ends ends"
    assert [kind for kind, *_ in events] == order.split()


def alive(folder: Path) -> list[str]:
    """The processes with a folder in their command."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended
    return [command for command in commands if str(folder) in command]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Paths of Ray's sockets have at most 107 bytes, and folders of pytest's workers are deep."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/cmdline").is_file(), reason="the list of processes is Linux's"
)
def test_ctrl_c_ends_the_workers_and_the_cluster_of_the_sweep(short_folder, model, interruptible):
    pytest.importorskip("ray")
    sections = {**MEASURED, "model": model, "repeats": 500}
    options = ["--out", str(short_folder / "runs"), "--backend", "ray", "--quiet"]
    variables = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(short_folder), "PYTHONPATH": str(ROOT)}
    path = write_config(short_folder, sections)
    child = subprocess.Popen(
        [sys.executable, "-m", "experiments.run", str(path), *options],
        env={**os.environ, **variables},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        limit = time.monotonic() + 120
        while not list((short_folder / "runs").rglob("summary.json")):
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            assert time.monotonic() < limit
            time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=180)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "stopped; the same command resumes the sweep" in errors
    limit = time.monotonic() + 20
    while alive(short_folder) and time.monotonic() < limit:
        time.sleep(0.2)
    assert alive(short_folder) == []
