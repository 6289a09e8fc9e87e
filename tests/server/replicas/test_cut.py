"""A replica that a cut of the network takes away, and gives back: no request fails, and every
answer is that of an undisturbed engine.

The replica is on a node of Ray's in a network namespace of its own, behind a bridge. A cut takes
the namespace's link out of the bridge: packets get lost, and nobody is told. This needs Linux and
the rights of root.

CUT_SECONDS=25,150 python -m pytest -n 0 -s -m slow tests/server/replicas/test_cut.py
has cuts as long as that, and prints the pauses that clients saw.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.server.replicas.clients import OPTIONS, ask_during, report, undisturbed_answers
from tests.server.replicas.support import Cluster, cluster, idle
from tests.server.support import free_port, wait_until
from tests.weights.tiny_adapters import tiny_adapter

pytestmark = [pytest.mark.slow, pytest.mark.optimised]  # bits are compared
CUTS = [float(word) for word in os.environ.get("CUT_SECONDS", "25").split(",")]
BETWEEN = 8.0  # seconds between two cuts
BRIDGE = "pjbridge"
NEAR_END = "pjnear"  # of the cable to the namespace
FAR_END = "pjfar"
NAMESPACE = "pagedjax"
HERE = "10.213.77.1"
THERE = "10.213.77.2"
START_RAY = (str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-gpus=0")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def remove_network() -> None:
    for words in (f"link del {BRIDGE}", f"link del {NEAR_END}", f"netns del {NAMESPACE}"):
        subprocess.run(["ip", *words.split()], check=False, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    """A namespace that is reached over a bridge; skips where that cannot be made."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("a network namespace needs the command `ip` and the rights of root")
    remove_network()
    try:
        try:
            ip(f"netns add {NAMESPACE}")
            ip(f"link add {BRIDGE} type bridge")
            ip(f"link add {NEAR_END} type veth peer name {FAR_END}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.decode()}")
        ip(f"link set {FAR_END} netns {NAMESPACE}")
        ip(f"addr add {HERE}/30 dev {BRIDGE}")
        ip(f"-n {NAMESPACE} addr add {THERE}/30 dev {FAR_END}")
        for link in (BRIDGE, NEAR_END):
            ip(f"link set {link} up")
        for link in ("lo", FAR_END):
            ip(f"-n {NAMESPACE} link set {link} up")
        mend()
        yield
    finally:
        remove_network()


def cut() -> None:
    ip(f"link set {NEAR_END} nomaster")


def mend() -> None:
    ip(f"link set {NEAR_END} master {BRIDGE}")


@contextmanager
def node(log: IO[str], *words: str, space: tuple[str, ...] = ()) -> Iterator[None]:
    """A node of Ray's until the end of the block."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [*space, *START_RAY, *words],
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def ingress_is_there() -> bool:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(b"ray::ServeReplica:pagedjax:Ingress"):
                return True
        except OSError:  # it has ended
            continue
    return False


@contextmanager
def far_node(address: str, log: IO[str]) -> Iterator[None]:
    """The node in the namespace. It comes after the ingress, so that it has a replica alone."""
    over = threading.Event()

    def run() -> None:
        wait_until(lambda: over.is_set() or ingress_is_there(), 120)
        words = (f"--address={address}", f"--node-ip-address={THERE}", "--num-cpus=1")
        with node(log, *words, space=("ip", "netns", "exec", NAMESPACE)):
            over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def cuts(ray_cluster: Cluster, present: list[dict[str, bool]]) -> None:
    """Cut and mend the network. present: gets the replicas at the end of each cut."""
    for seconds in CUTS:
        await asyncio.sleep(BETWEEN)
        cut()
        try:
            await asyncio.sleep(seconds)
            present.append(await asyncio.to_thread(ray_cluster.replicas))
        finally:
            mend()
    await asyncio.sleep(BETWEEN)


def test_no_request_fails_when_the_network_is_cut(
    network, tiny_folder: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    adapter = tiny_adapter(tmp_path / "poems", tiny_folder, 4, seed=1)
    expected = undisturbed_answers(tiny_folder, adapter)
    address = f"{HERE}:{free_port()}"
    options = f"{OPTIONS} --replicas 2 --replica-resources num_cpus=0.6 --ray-address {address}"
    options += f" --lora-modules poems={adapter}"
    near = (f"--port={address.split(':')[1]}", f"--node-ip-address={HERE}", "--num-cpus=1")
    present: list[dict[str, bool]] = []
    with (
        (tmp_path / "ray.log").open("w") as log,
        node(log, "--head", "--include-dashboard=false", *near),
        far_node(address, log),
        cluster(str(tiny_folder), tmp_path, options, port=free_port()) as ray_cluster,
    ):
        weather = cuts(ray_cluster, present)
        pauses = asyncio.run(ask_during(weather, ray_cluster, expected, seed=44))
        continued = report(ray_cluster, pauses)
        print(*present, sep="\n")
        assert any('reason="silent"' in line for line in continued), continued
        assert all(sorted(replicas.values())[-1] for replicas in present), "none was healthy"
        wait_until(lambda: all(ray_cluster.replicas().values()), 240)
        wait_until(lambda: idle(ray_cluster), 60)
