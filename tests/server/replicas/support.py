"""A cluster in a process of its own, and the clients of its tests."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.server.support import wait_until

# options of a cluster of the tiny model, of any number of replicas
OF_TINY = "--served-model-name tiny --replica-resources num_cpus=0.5 --max-num-seqs 4"
OF_TINY += " --num-blocks 256 --max-num-batched-tokens 64 --token-buckets 8,64"
STARTS = 240.0  # seconds, on a loaded machine


class Cluster(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    routing: Path  # the record of its router
    log: Path
    key: str

    def get(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.get(f"{self.url}{path}", timeout=60, headers=headers)

    def replicas(self) -> dict[str, bool]:
        """Return the replicas that are present, by name, and whether each is healthy."""
        answer = self.get("/replicas")
        data = answer.json()["data"] if answer.status_code == 200 else ()
        return {replica["name"]: replica["healthy"] for replica in data}

    def gauges(self, name: str) -> dict[str, float]:
        """A gauge of each replica."""
        page = self.get("/metrics").text
        lines = [line for line in page.splitlines() if line.startswith(f"pagedjax:{name}{{")]
        return {line.split('replica="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


@contextmanager
def cluster(
    model: str, folder: Path, options: str, key: str = "none", port: int = 0
) -> Iterator[Cluster]:
    """`pagedjax serve --replicas` until the end of the block; then it is asked to stop, and
    must. port: 0: any; a cluster that is there already needs one.
    """
    routing = folder / "routing.jsonl"
    log = folder / "log"
    command = f"-m pagedjax serve {model} {options} --port {port} --log-level warning"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(f"{command} --record-routing {routing}")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that whatever it leaves can be ended with it
        )
    try:
        assert process.stdout is not None
        # Ray also prints what other programs of this machine write into its folder of logs
        lines = iter(process.stdout.readline, "")
        line = next((line for line in lines if line.startswith("serving ")), "")
        assert line.startswith("serving "), log.read_text("utf-8")[-3000:]
        url = line.split(" at ")[1].strip().removesuffix("/v1")
        ray_cluster = Cluster(url, process, routing, log, key)
        wait_until(lambda: all(ray_cluster.replicas().values()), STARTS)
        yield ray_cluster
        process.terminate()
        assert process.wait(120) == 0, log.read_text("utf-8")[-3000:]
    finally:
        process.kill()
        process.wait()


def process_of_one_replica(cluster: Cluster) -> int:
    """The pid of a process of the cluster's that has an engine."""
    pids = processes_of_replicas(cluster)
    assert pids, "the cluster has no process with an engine"
    return pids[0]


def processes_of_replicas(cluster: Cluster) -> list[int]:
    """The pids of all processes of the cluster's that have an engine."""
    pids = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = line.read_bytes().split(b"\0")[0]
            pid = int(line.parts[2])
            if name.startswith(b"ray::ServeReplica:pagedjax:replicas") and _descends(pid, cluster):
                pids.append(pid)
        except OSError:  # it has ended
            continue
    return pids


def _descends(pid: int, cluster: Cluster) -> bool:
    """Whether a process was started by the cluster's, directly or not."""
    while pid > 1:
        if pid == cluster.process.pid:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[1])
    return False


def kill_one_replica(cluster: Cluster) -> None:
    """Kill a replica that has requests: while it is stopped, those that it is given wait."""
    pid = process_of_one_replica(cluster)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)


def idle(cluster: Cluster) -> bool:
    """Whether no replica has a request, and no block an owner."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(not any(cluster.gauges(name).values()) for name in names)
