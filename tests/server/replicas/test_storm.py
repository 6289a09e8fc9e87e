"""Three replicas under load, of which one is killed or stopped every ten seconds: no request fails,
and every answer is that of an undisturbed engine.

STORM_SECONDS=300 python -m pytest -n 0 -s -m slow tests/server/replicas/test_storm.py
makes it as long as that, and prints the pauses that clients saw.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.server.replicas.clients import OPTIONS, ask_during, report, undisturbed_answers
from tests.server.replicas.support import Cluster, cluster, idle, processes_of_replicas
from tests.server.support import wait_until
from tests.weights.tiny_adapters import tiny_adapter

pytestmark = [pytest.mark.slow, pytest.mark.optimised]  # bits are compared
SECONDS = float(os.environ.get("STORM_SECONDS", "60"))
SEED = 43


class Storm:
    """Kills and stops replicas, one every ten seconds, until it is over."""

    def __init__(self, ray_cluster: Cluster, draw: random.Random) -> None:
        self._cluster = ray_cluster
        self._draw = draw
        self.kills = 0
        self.stopped: list[int] = []  # pids

    async def rage(self) -> None:
        until = time.monotonic() + SECONDS
        while time.monotonic() + 10 < until:
            await asyncio.sleep(10)
            pids = await asyncio.to_thread(processes_of_replicas, self._cluster)
            if not pids:
                continue
            pid = self._draw.choice(sorted(pids))
            kills = self._draw.random() < 0.7
            if kills:
                self.kills += 1
            else:
                self.stopped.append(pid)
            try:
                os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
            except ProcessLookupError:
                continue


def test_no_request_fails_in_a_storm(tiny_folder: Path, tmp_path: Path):
    adapter = tiny_adapter(tmp_path / "poems", tiny_folder, 4, seed=1)
    expected = undisturbed_answers(tiny_folder, adapter)
    options = f"{OPTIONS} --replicas 3 --replica-resources num_cpus=0.3"
    options += f" --lora-modules poems={adapter}"
    with cluster(str(tiny_folder), tmp_path, options) as ray_cluster:
        storm = Storm(ray_cluster, random.Random(SEED))
        pauses = asyncio.run(ask_during(storm.rage(), ray_cluster, expected, SEED))
        continued = report(ray_cluster, pauses)
        print(f"{storm.kills} kills, {len(storm.stopped)} stops")
        assert len(pauses) > 20
        assert storm.kills + len(storm.stopped) >= (SECONDS - 10) // 10 - 1
        assert continued, "no request was under way when a replica was lost"
        for pid in storm.stopped:  # else Serve waits for them at the end
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: all(ray_cluster.replicas().values()), 240)
        wait_until(lambda: idle(ray_cluster), 60)
