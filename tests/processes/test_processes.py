"""Real processes that share one engine on virtual devices: recordings, the server, and what ends
them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedjax import LLM
from pagedjax.engine.processes.group import EXIT_STATUS
from pagedjax.host.replay import verify
from pagedjax.weights.convert import convert
from tests.engine.runs import greedy
from tests.engine.test_lookahead import CONFIG, play
from tests.weights.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
SWAPPED = {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001, "max_model_len": 64}
LIMIT = 240  # seconds for one job, on a machine that does other things too


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    sizes: dict[str, Any] = {
        "layers": 1,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 8,
        "intermediate": 90,
    }
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **sizes, tied=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


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
                streams: dict[str, Any] = {
                    "stdout": output,
                    "stderr": subprocess.STDOUT,
                    "text": True,
                }
                running.append(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))
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
        until = time.monotonic() + LIMIT
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
    mesh = {"mesh": {"tensor": processes * devices}}
    runs = [
        {"seed": 0, "log": str(tmp_path / f"{i}.jsonl"), "engine": mode}
        for i, mode in enumerate(modes)
    ]
    job = {"model": str(folder), "engine": {**CONFIG, **mesh}, "runs": runs}
    job |= {"timeout": LIMIT / 2}
    statuses, outputs = run(job, tmp_path, processes, devices)
    assert statuses == [0] * processes, "\n".join(outputs)
    for i, mode in enumerate(modes):
        first, *copies = (
            tmp_path / name
            for name in (f"{i}.jsonl", *(f"{i}.jsonl.{j}" for j in range(1, processes)))
        )
        for copy in copies:
            assert copy.read_bytes() == first.read_bytes(), (copy, mode)
        assert verify(first).identical
        # else the number of drafts follows times
        if not mode.get("speculative", {}).get("adaptive"):
            alone = play(
                LLM(folder, progress=False, **CONFIG | mode).engine,
                0,
                tmp_path / "alone.jsonl",
            )
            assert without_host_blocks(first) == without_host_blocks(tmp_path / "alone.jsonl"), mode
            assert alone.preempted or "num_blocks" not in mode


def without_host_blocks(log: Path) -> str:
    """A recording. The swap space of each process has its heads only, so it holds more blocks than
    one device's.
    """
    header, _, events = log.read_text().partition("\n")
    record = json.loads(header)
    del record["config"]["host_blocks"]
    return f"{json.dumps(record)}\n{events}"


def test_recordings_of_two_processes_are_those_of_one_device(one_layer_folder, tmp_path):
    """One device's program is that of test_replicated_engines."""
    compare_recordings(one_layer_folder, tmp_path, 2, 2, [SWAPPED])


@pytest.mark.exhaustive  # two processes do the same in slow runs, below
def test_recordings_of_four_processes_are_those_of_one_device(folder, tmp_path):
    drafts = {"method": "draft", "model": str(folder), "num_tokens": 2, "adaptive": True}
    compare_recordings(
        folder, tmp_path, 4, 1, [{"lookahead": 2, **SWAPPED}, {"speculative": drafts, **SWAPPED}]
    )


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


@pytest.mark.exhaustive  # the reader of parts has tests of its own
def test_an_orbax_checkpoint_is_read_by_each_process(folder, tmp_path):
    compare_recordings(convert(folder, tmp_path / "orbax", "orbax"), tmp_path, 2, 1, [{}])


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def failure_reason(
    folder: Path, tmp_path: Path, faults: dict[int, str], processes: int = 2, timeout: float = 12.0
) -> str:
    """Let processes have a fault after their 5th step -> the sentence that all others end with."""
    log = tmp_path / "run.jsonl"
    job = {
        "model": str(folder),
        "engine": {**CONFIG, "mesh": {"tensor": processes}},
        "runs": [{"seed": 0, "log": str(log)}],
        "faults": {str(i): fault for i, fault in faults.items()},
        "timeout": timeout,
    }
    start = time.monotonic()
    statuses, outputs = run(job, tmp_path, processes)
    assert time.monotonic() - start < LIMIT - 10, "it had to be killed"
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
        (
            {1: "stopped"},
            "process 1 has not been heard of for 12 s: it is stopped, or cannot be reached",
        ),
        exhaustive({1: "stalled"}, "process 1 did not begin step 6 for 12 s"),
        exhaustive({0: "killed"}, "process 0 ended: its connection is closed"),
        exhaustive({0: "stalled"}, "step 5 has not ended for 12 s in process 0"),
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
        assert 12 <= int(seconds[1]) < 60
        message = message.replace(seconds[0], "for 12 s")
    assert message == reason


@pytest.mark.slow  # test_group.py has both reasons
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--model", "/nowhere"],
            "process 1 does not follow: its program has ended, and its output says why",
        ),
        (
            ["--budget", "64"],
            "process 1 differs from process 0: engine.max_num_batched_tokens is 64 here and 32 in",
        ),
    ],
    ids=["no model", "other options"],
)
def test_a_process_that_cannot_start_ends_all(folder, tmp_path, words, reason):
    """Before any program waits for the devices of all."""
    start = [
        sys.executable,
        "-m",
        "pagedjax",
        "generate",
        "abc",
        "--model",
        str(folder),
        "--max-model-len",
        "64",
    ]
    group = [
        "--budget",
        "32",
        "--mesh",
        "tensor=2",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--processes",
        "2",
    ]
    commands = [[*start, *group, "--process", str(i), *(words if i else [])] for i in range(2)]
    with start_processes(commands, tmp_path) as job_processes:
        assert [process.wait(LIMIT) for process in job_processes] == [EXIT_STATUS] * 2
    assert reason in (tmp_path / "0").read_text()


def serve_commands(folder: Path, *words: str) -> list[list[str]]:
    port = free_port()
    shape = [
        "--mesh",
        "tensor=2",
        "--max-num-seqs",
        "4",
        "--num-blocks",
        "256",
        "--token-buckets",
        "8,64",
    ]
    shape += ["--max-num-batched-tokens", "64"]
    group = [
        "--coordinator",
        f"127.0.0.1:{port}",
        "--processes",
        "2",
        "--process-timeout",
        "5",
        *words,
    ]
    start = [
        sys.executable,
        "-m",
        "pagedjax",
        "serve",
        str(folder),
        "--port",
        "0",
        "--log-level",
        "warning",
    ]
    return [[*start, *shape, *group, "--process", str(i)] for i in range(2)]


def url_of(process: subprocess.Popen[str], output: Path) -> str:
    until = time.monotonic() + LIMIT
    while "serving " not in output.read_text():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < until, output.read_text()
        time.sleep(0.05)
    line = next(line for line in output.read_text().splitlines() if line.startswith("serving "))
    return line.split(" at ")[1].removesuffix("/v1")


@pytest.mark.slow
def test_two_processes_serve_until_one_is_asked_to_stop(folder, tmp_path):
    log = tmp_path / "run.jsonl"
    with start_processes(serve_commands(folder, "--record", str(log)), tmp_path) as servers:
        url = url_of(servers[0], tmp_path / "0")
        body = {
            "model": "tiny",
            "prompt": "abc",
            "temperature": 0,
            "max_tokens": 8,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        servers[1].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in servers] == [0, 0], (tmp_path / "0").read_text()
    params = greedy(8)
    (alone,) = LLM(folder, progress=False, num_blocks=256, max_num_seqs=4).generate("abc", params)
    assert answer.json()["choices"][0]["text"] == alone.outputs[0].text
    followers_log = log.with_suffix(".process-1.jsonl")
    assert verify(followers_log).steps == verify(log).steps == 8
    assert verify(followers_log).identical


@pytest.mark.slow
def test_clients_get_503_when_a_process_is_killed(folder, tmp_path):
    log = tmp_path / "run.jsonl"
    answers = []
    with start_processes(serve_commands(folder, "--record", str(log)), tmp_path) as servers:
        url = url_of(servers[0], tmp_path / "0")
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 500, "ignore_eos": True}

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

        clients = [threading.Thread(target=ask) for _ in range(6)]  # 4 run and 2 wait
        for client in clients:
            client.start()
        until = time.monotonic() + 60
        while log.read_text().count('{"commit"') < 20 and time.monotonic() < until:
            time.sleep(0.01)
        servers[1].kill()
        for client in clients:
            client.join(30)
        assert servers[0].wait(30) == EXIT_STATUS
    assert [answer.status_code for answer in answers] == [503] * 6
    assert all("process 1 ended" in answer.json()["error"]["message"] for answer in answers)
    assert verify(log).identical
    assert verify(log).steps >= 20


@pytest.mark.slow
def test_generate_in_two_processes_prints_what_one_prints(folder, tmp_path):
    words = [
        sys.executable,
        "-m",
        "pagedjax",
        "generate",
        "abc",
        "--model",
        str(folder),
        "--max-model-len",
        "64",
    ]
    words += ["--max-tokens", "8", "--budget", "32"]
    alone = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    group = [
        "--mesh",
        "tensor=2",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--processes",
        "2",
        "--process",
    ]
    with start_processes([[*words, *group, str(i)] for i in range(2)], tmp_path) as job_processes:
        assert [process.wait(LIMIT) for process in job_processes] == [0, 0]
    assert (tmp_path / "0").read_text().endswith(alone.stdout)
    assert "process 1 of 2 follows process 0" in (tmp_path / "1").read_text()
    assert alone.stdout.strip() not in (tmp_path / "1").read_text()


@pytest.mark.exhaustive  # a slow test generates in two processes, above
def test_a_sweep_in_two_processes_has_the_tokens_of_one(folder, tmp_path):
    """Two engines stay alive and take turns; a third cannot be built, in either process."""
    engine = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 32,
        "token_buckets": [16],
    }
    workload = {"kind": "synthetic", "count": 5, "arrivals": {"process": "poisson", "rate": 200.0}}
    workload |= {name: {"dist": "uniform", "low": 2, "high": 6} for name in ("prompt", "output")}
    config = {
        "name": "unit",
        "model": str(folder),
        "engine": engine,
        "cache_tokens": 256,
        "workload": workload,
    }
    config |= {
        "sampling": {"temperature": 0.0, "ignore_eos": True},
        "warmup": {"requests": 1, "max_tokens": 2},
    }
    config |= {
        "repeats": 2,
        "sweep": {"grid": {"engine.block_size": [4, 16], "engine.max_model_len": [32, 9999]}},
    }
    path = tmp_path / "unit.json"
    path.write_text(json.dumps(config))
    words = [sys.executable, "-m", "experiments.run", str(path), "--quiet", "--out"]
    subprocess.run([*words, str(tmp_path / "alone")], cwd=ROOT, timeout=LIMIT, check=False)
    group = [
        "--set",
        "engine.mesh={tensor: 2}",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--processes",
        "2",
    ]
    with start_processes(
        [[*words, str(tmp_path / "two"), *group, "--process", str(i)] for i in range(2)], tmp_path
    ) as job_processes:
        assert [process.wait(LIMIT) for process in job_processes] == [1, 0], (
            tmp_path / "1"
        ).read_text()
    runs = {}
    for name in ("alone", "two"):
        for file in (tmp_path / name).rglob("summary.json"):
            run = json.loads(file.read_text())
            facts = json.loads((file.parent / "env.json").read_text())
            key = (
                run["swept"]["engine.block_size"],
                run["swept"]["engine.max_model_len"],
                run["repeat"],
            )
            runs.setdefault(key, []).append(
                (run["failed"], run["metrics"] and run["metrics"]["tokens_sha256"])
            )
            assert facts["device"]["processes"] == (2 if name == "two" else 1)
    assert len(runs) == 8
    assert all(single == shared for single, shared in runs.values())
    assert sum(single[1] is not None for single, _ in runs.values()) == 4
