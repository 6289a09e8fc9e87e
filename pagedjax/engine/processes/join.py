"""`join`: start JAX in all processes, and connect them. Call it before anything else uses JAX."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pagedjax.engine.processes import config, group
from pagedjax.engine.processes.config import ProcessConfig
from pagedjax.engine.processes.group import Follower, Leader

HELLO_BYTES = 512  # the size of the broadcast with the leader's address
_joined: list[Leader | Follower] = []


def joined() -> Leader | Follower | None:
    """The group of this process; None if it is alone."""
    return _joined[0] if _joined else None


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    timeout: float | None = None,
) -> Leader | Follower | None:
    """Start JAX in all processes of a job and connect them. Every process must call it, with the
    same `processes`.

    Without arguments it reads a launcher's variables (Slurm, Open MPI, JobSet, JAX_NUM_PROCESSES).
    If there are no such variables, there is one process, and nothing happens. If JAX was already
    started in several processes, they are only connected.

    Args:
        coordinator, processes, process, timeout: as in `ProcessConfig`.

    Returns:
        what this process is; None if it is alone.

    Raises:
        ValueError: arguments that do not fit each other.
        RuntimeError: JAX was used before.
        TimeoutError: a process has not connected.
    """
    if _joined:
        return _joined[0]
    job = config.read(coordinator, processes, process, timeout)
    if job is not None and not jax.distributed.is_initialized():
        _start_jax(job)
    if jax.process_count() == 1:
        return None
    job = job or ProcessConfig(
        None, jax.process_count(), jax.process_index(), timeout or ProcessConfig.timeout
    )
    if (job.processes, job.process) != (jax.process_count(), jax.process_index()):
        raise ValueError(
            f"this is process {job.process} of {job.processes}, but JAX runs as process "
            f"{jax.process_index()} of {jax.process_count()}; give both the same numbers"
        )
    _joined.append(_connect(job))
    atexit.register(leave)
    return _joined[0]


def leave() -> None:
    """Close the connections between the processes, and end JAX's part in the job.

    Process 0 may call it after its last input, another process after `follow`. Python calls it at
    its end. A process that a signal will end must call it itself.
    """
    if _joined:
        _joined.pop().close()
        jax.distributed.shutdown()  # waits for all processes


def _start_jax(job: ProcessConfig) -> None:
    address: dict[str, Any] = {}
    if job.coordinator is not None:
        address = {
            "coordinator_address": job.coordinator,
            "num_processes": job.processes,
            "process_id": job.process,
        }
    if job.loopback:
        address["coordinator_bind_address"] = job.coordinator
    # the collectives of CPUs; accelerators have their own
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    seconds = max(10, int(job.timeout))
    jax.distributed.initialize(
        **address,
        initialization_timeout=max(60, seconds),
        heartbeat_timeout_seconds=2 * seconds,  # the group notices earlier, and knows more
        shutdown_timeout_seconds=seconds,
    )


def _connect(job: ProcessConfig) -> Leader | Follower:
    """Connect this process to the others.

    Process 0 listens at a free port, and tells the others by one broadcast of JAX.
    """
    if job.process == 0:
        coordinator = job.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
        host = coordinator.rpartition(":")[0].strip("[]") or _own_address()
        # the name of this host may mean another address on this host than on other hosts
        bind = host if job.loopback else ""
        with socket.create_server(
            (bind, 0), family=_family(host), backlog=2 * job.processes
        ) as listener:
            token = secrets.token_hex(16)
            _broadcast({"host": host, "port": listener.getsockname()[1], "token": token})
            return group.accept(listener, job.processes, token, max(60, job.timeout), job.timeout)
    leader = _broadcast({})
    address = leader["host"], leader["port"]
    return group.connect(address, job.process, job.processes, leader["token"], job.timeout)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _own_address() -> str:
    """An address of this host that other hosts can reach: the address of the interface by which
    this host reaches them. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _broadcast(message: dict[str, Any]) -> dict[str, Any]:
    """The message that process 0 gave."""
    text = json.dumps(message).encode()
    if len(text) > HELLO_BYTES:
        raise ValueError(
            f"the address of process 0 has {len(text)} bytes; it may have {HELLO_BYTES}: "
            f"{text!r:.200}"
        )
    data = np.frombuffer(text.ljust(HELLO_BYTES), np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8).tobytes())
