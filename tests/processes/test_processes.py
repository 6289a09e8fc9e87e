"""Real processes that share one engine on virtual devices: recordings, the server, and what ends
them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedjax import LLM
from pagedjax.engine.processes.group import EXIT_STATUS
from pagedjax.host.replay import verify
from tests.engine.runs import answers, greedy
from tests.engine.test_lookahead import CONFIG, WITH_GIVEN, play
from tests.server.support import free_port
from tests.weights.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
SWAPPED = {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001, "max_model_len": 64}
TIMEOUT = 240  # seconds for one job, on a machine that does other things too


PAGEDJAX = [sys.executable, "-m", "pagedjax"]


def of_two_processes(*words: str, mesh: str = "--mesh tensor=2") -> list[list[str]]:
    """The commands of two processes that share a mesh."""
    group = f"{mesh} --coordinator 127.0.0.1:{free_port()} --processes 2 --process"
    return [[*words, *shlex.split(group), str(i)] for i in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    sizes: dict[str, Any] = {"layers": 1, "heads": 8, "kv_heads": 4, "head_dim": 8}
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return tiny_llama(folder, intermediate=90, tied=False, **sizes)


@contextmanager
def start_processes(
    commands: list[list[str]], folder: Path, devices: int = 1
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with outputs in files `0`, `1`, ... of a folder. Whatever still runs is killed by
    its pid.
    """
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}
    running = []
    try:
        for i, command in enumerate(commands):
            with open(folder / str(i), "w") as output:
                running.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait(30)


def run(
    job: dict[str, Any], tmp_path: Path, processes: int, devices: int = 1
) -> tuple[list[int | None], list[str]]:
    """Exit statuses (None: it did not end) and outputs of the processes of a job (worker.py)."""
    port = free_port()
    words = [sys.executable, "-m", "tests.processes.worker", str(processes)]
    commands = [[*words, str(i), str(port), json.dumps(job)] for i in range(processes)]
    with start_processes(commands, tmp_path, devices) as job_processes:
        until = time.monotonic() + TIMEOUT
        waited = [i for i in range(processes) if job.get("faults", {}).get(str(i)) != "stopped"]
        while any(job_processes[i].poll() is None for i in waited) and time.monotonic() < until:
            time.sleep(0.05)
        statuses = [process.poll() for process in job_processes]
    return statuses, [(tmp_path / str(i)).read_text() for i in range(processes)]


def compare_recordings(
    folder: Path,
    tmp_path: Path,
    processes: int,
    devices: int,
    modes: list[dict[str, Any]],
) -> None:
    """Recordings of processes and of one device are equal, in several modes, with those of each
    process.
    """
    logs = [tmp_path / f"{i}.jsonl" for i in range(len(modes))]
    job = {
        "model": str(folder),
        "engine": {**CONFIG, "mesh": {"tensor": processes * devices}},
        "runs": [
            {"seed": 0, "log": str(log), "engine": mode}
            for log, mode in zip(logs, modes, strict=True)
        ],
        "timeout": TIMEOUT / 2,
    }
    statuses, outputs = run(job, tmp_path, processes, devices)
    assert statuses == [0] * processes, "\n".join(outputs)
    for log, mode in zip(logs, modes, strict=True):
        for j in range(1, processes):
            assert Path(f"{log}.{j}").read_bytes() == log.read_bytes(), (j, mode)
        assert verify(log).identical
        # else the number of drafts follows times
        if not mode.get("speculative", {}).get("adaptive"):
            engine = LLM(folder, progress=False, **CONFIG | mode).engine
            alone = play(engine, 0, tmp_path / "alone.jsonl", kinds=WITH_GIVEN)
            assert without_host_blocks(log) == without_host_blocks(tmp_path / "alone.jsonl"), mode
            assert alone.preempted or "num_blocks" not in mode


def without_host_blocks(log: Path) -> str:
    """A recording. The swap space of each process has its heads only, so it holds more blocks than
    one device's.
    """
    header, _, events = log.read_text().partition("\n")
    record = json.loads(header)
    del record["config"]["host_blocks"]
    return f"{json.dumps(record)}\n{events}"


@pytest.mark.slow
def test_recordings_of_two_processes_are_those_of_one_device(one_layer_folder, tmp_path):
    """One device's program is that of test_replicated_engines."""
    compare_recordings(one_layer_folder, tmp_path, 2, 2, [SWAPPED])


@pytest.mark.slow
def test_recordings_are_byte_identical_in_every_mode(folder, tmp_path):
    drafts = {
        "method": "draft",
        "model": str(folder),
        "num_tokens": 2,
        "rule": "rejection",
        "adaptive": False,
    }
    modes = [  # engines one after the other
        SWAPPED | {"weight_dtype": "int8", "kv_cache_dtype": "float8_e4m3fn"},
        {"speculative": drafts, "attention_impl": "xla", "compilation": "lazy"},
    ]
    compare_recordings(folder, tmp_path, 2, 2, modes)


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def failure_reason(folder: Path, tmp_path: Path, faults: dict[int, str], processes: int = 2) -> str:
    """Let processes have a fault after their 5th step -> the sentence that all others end with.

    A fault that ends its process is seen at once, so its timeout is long: a busy machine may be
    silent for 30 seconds, too. A process that lives and is silent is seen by the timeout alone.
    """
    silent = not {"stopped", "stalled"}.isdisjoint(faults.values())
    log = tmp_path / "run.jsonl"
    job = {
        "model": str(folder),
        "engine": {**CONFIG, "mesh": {"tensor": processes}},
        "runs": [{"seed": 0, "log": str(log)}],
        "faults": {str(i): fault for i, fault in faults.items()},
        "timeout": 30.0 if silent else TIMEOUT / 2,
    }
    start = time.monotonic()
    statuses, outputs = run(job, tmp_path, processes)
    assert time.monotonic() - start < TIMEOUT - 10, "it had to be killed"
    reasons = set()
    for i, (status, output) in enumerate(zip(statuses, outputs, strict=True)):
        if faults.get(i) == "stopped":
            assert status is None
        elif faults.get(i) == "killed":
            assert status == -signal.SIGKILL
        else:
            assert status == EXIT_STATUS, output
            reasons |= {
                line[10:].rpartition("; process ")[0]
                for line in output.splitlines()
                if "pagedjax: " in line
            }
    report = verify(log)
    assert report.identical
    assert report.steps in (4, 5), "the recording has all steps that ended"
    assert len(reasons) == 1, outputs
    return reasons.pop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (
            {1: "killed"},
            "process 1 ended while process 0 was at step 5: its connection is closed",
        ),
        # half a minute of waiting; test_group.py and test_watch.py have the sentence by default
        exhaustive(
            {1: "stopped"},
            "process 1 has not been heard of for 30 s: it is stopped, or cannot be reached",
        ),
        exhaustive({1: "stalled"}, "process 1 did not begin step 6 for 30 s"),
        exhaustive({0: "killed"}, "process 0 ended: its connection is closed"),
        exhaustive({0: "stalled"}, "step 5 has not ended for 30 s in process 0"),
        ({1: "raises"}, "process 1 failed in step 5: RuntimeError: no more memory"),
    ],
    ids=lambda value: (
        " ".join(f"{fault} {i}" for i, fault in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_a_process_that_fails_ends_all_with_a_sentence(folder, tmp_path, faults, reason):
    message = failure_reason(folder, tmp_path, faults)
    message = message.replace("step 6:", "step 5:")  # process 0 may have begun the next step
    seconds = re.search(r"for (\d+) s", message)
    if seconds:  # a busy machine looks later
        assert 30 <= int(seconds[1]) < 120
        message = message.replace(seconds[0], "for 30 s")
    assert message == reason


@contextmanager
def served(folder: Path, tmp_path: Path) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    """Two processes that serve, and their url; the recording is run.jsonl."""
    options = f"serve {folder} --port 0 --log-level warning --process-timeout 5"
    options += " --max-num-seqs 4 --num-blocks 256 --token-buckets 8,64"
    options += f" --max-num-batched-tokens 64 --record {tmp_path / 'run.jsonl'}"
    output = tmp_path / "0"
    commands = of_two_processes(*PAGEDJAX, *shlex.split(options))
    with start_processes(commands, tmp_path) as servers:
        until = time.monotonic() + TIMEOUT
        while not (url := re.search(r"serving .* at (\S+)/v1", output.read_text())):
            assert servers[0].poll() is None, output.read_text()
            assert time.monotonic() < until, output.read_text()
            time.sleep(0.05)
        yield servers, url[1]


@pytest.mark.slow
def test_two_processes_serve_until_one_is_asked_to_stop(folder, tmp_path):
    log = tmp_path / "run.jsonl"
    with served(folder, tmp_path) as (servers, url):
        body = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 8}
        body["ignore_eos"] = True
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        servers[1].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in servers] == [0, 0], (tmp_path / "0").read_text()
    (alone,) = answers(LLM(folder, progress=False, num_blocks=256), "abc", greedy(8))
    assert answer.json()["choices"][0]["text"] == alone.text
    followers_log = log.with_suffix(".process-1.jsonl")
    assert verify(followers_log).steps == verify(log).steps == 8
    assert verify(followers_log).identical


@pytest.mark.slow
def test_clients_get_503_when_a_process_is_killed(folder, tmp_path):
    log = tmp_path / "run.jsonl"
    with served(folder, tmp_path) as (servers, url), ThreadPoolExecutor(6) as pool:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 500, "ignore_eos": True}
        calls = [
            pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            for _ in range(6)  # 4 run and 2 wait
        ]
        until = time.monotonic() + 60
        while log.read_text().count('{"commit"') < 20 and time.monotonic() < until:
            time.sleep(0.01)
        servers[1].kill()
        replies = [call.result() for call in calls]
        assert servers[0].wait(30) == EXIT_STATUS
    assert [reply.status_code for reply in replies] == [503] * 6
    assert all("process 1 ended" in reply.json()["error"]["message"] for reply in replies)
    assert verify(log).identical
    assert verify(log).steps >= 20


@pytest.mark.slow
def test_generate_in_two_processes_prints_what_one_prints(folder, tmp_path):
    options = f"generate abc --model {folder} --max-model-len 64 --max-tokens 8 --budget 32"
    words = [*PAGEDJAX, *shlex.split(options)]
    alone = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    with start_processes(of_two_processes(*words), tmp_path) as job_processes:
        assert [process.wait(TIMEOUT) for process in job_processes] == [0, 0]
    assert (tmp_path / "0").read_text().endswith(alone.stdout)
    assert "process 1 of 2 follows process 0" in (tmp_path / "1").read_text()
    assert alone.stdout.strip() not in (tmp_path / "1").read_text()


@pytest.mark.exhaustive  # a slow test generates in two processes, above
def test_a_sweep_in_two_processes_has_the_tokens_of_one(folder, tmp_path):
    """Two engines stay alive and take turns; a third cannot be built, in either process."""
    lengths = {"dist": "uniform", "low": 2, "high": 6}
    config = {
        "name": "unit",
        "model": str(folder),
        "engine": {
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
            "max_model_len": 32,
            "token_buckets": [16],
        },
        "cache_tokens": 256,
        "workload": {
            "kind": "synthetic",
            "count": 5,
            "arrivals": {"process": "poisson", "rate": 200.0},
            "prompt": lengths,
            "output": lengths,
        },
        "sampling": {"temperature": 0.0, "ignore_eos": True},
        "warmup": {"requests": 1, "max_tokens": 2},
        "repeats": 2,
        "sweep": {"grid": {"engine.block_size": [4, 16], "engine.max_model_len": [32, 9999]}},
    }
    path = tmp_path / "unit.json"
    path.write_text(json.dumps(config))
    words = [sys.executable, "-m", "experiments.run", str(path), "--quiet", "--out"]
    subprocess.run([*words, str(tmp_path / "alone")], cwd=ROOT, timeout=TIMEOUT, check=False)
    mesh = "--set 'engine.mesh={tensor: 2}'"
    commands = of_two_processes(*words, str(tmp_path / "two"), mesh=mesh)
    with start_processes(commands, tmp_path) as job_processes:
        statuses = [process.wait(TIMEOUT) for process in job_processes]
        assert statuses == [1, 0], (tmp_path / "1").read_text()
    runs = {}
    for name in ("alone", "two"):
        for file in (tmp_path / name).rglob("summary.json"):
            summary = json.loads(file.read_text())
            facts = json.loads((file.parent / "env.json").read_text())
            tokens = summary["metrics"] and summary["metrics"]["tokens_sha256"]
            key = (*sorted(summary["swept"].items()), summary["repeat"])
            runs.setdefault(key, []).append((summary["failed"], tokens))
            assert facts["device"]["processes"] == (2 if name == "two" else 1)
    assert len(runs) == 8
    assert all(single == shared for single, shared in runs.values())
    assert sum(single[1] is not None for single, _ in runs.values()) == 4
