"""`ProcessConfig`: which processes share one engine, and how long they wait for each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# A launcher that sets these starts every process of a job; `jax.distributed.initialize()` reads
# them.
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    # JobSet's examples, Ray Train
    "JAX_NUM_PROCESSES": ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"),
    # srun, and not salloc
    "SLURM_NTASKS": ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"),
    # mpirun of Open MPI
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK",),
}


@dataclass(frozen=True)
class ProcessConfig:
    """The processes of one engine.

    coordinator: HOST:PORT of process 0, that all processes can reach. None: a launcher's variables
        say it.
    processes: how many there are.
    process: which one this is, from 0. Process 0 takes the requests.
    timeout: seconds without progress after which a process counts as lost, and all processes end.
        It must be longer than the longest step, with its compilation if `compilation` is "lazy".

    Raises:
        ValueError: a value out of its range.
    """

    coordinator: str | None
    processes: int
    process: int
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if type(self.processes) is not int or self.processes < 1:
            raise ValueError(
                f"processes is {self.processes!r}; it must be an integer of at least 1"
            )
        if type(self.process) is not int or not 0 <= self.process < self.processes:
            last = self.processes - 1
            raise ValueError(
                f"process is {self.process!r}; it must be from 0 to {last}, another one in each "
                "process"
            )
        if not 0 < self.timeout < float("inf"):
            raise ValueError(
                f"the timeout of processes is {self.timeout!r}; it must be a number of seconds "
                "above 0"
            )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ValueError(
                    f"coordinator is {self.coordinator!r}; it must be HOST:PORT of process 0, as "
                    "in 10.0.0.1:6000"
                )

    @property
    def loopback(self) -> bool:
        """Whether all processes are on one machine."""
        return self.coordinator is not None and self.coordinator.startswith(
            ("127.", "localhost:", "[::1]:")
        )


def read(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    timeout: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ProcessConfig | None:
    """The processes that the arguments, or else a launcher's variables, describe; None: there is
    only one process.

    Args:
        processes: 1 starts one process, whatever the variables say.

    Raises:
        ValueError: some of `coordinator`, `processes` and `process` are missing and others are not,
            or a value is out of its range.
    """
    seconds = ProcessConfig.timeout if timeout is None else timeout
    options = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    if processes == 1 and not process:
        return None
    if any(value is not None for value in options.values()):
        missing = [name for name, value in options.items() if value is None]
        if missing or processes is None or process is None:
            raise ValueError(
                f"{' and '.join(missing)} missing; give all of {', '.join(options)}, in every "
                "process"
            )
        return ProcessConfig(coordinator, processes, process, seconds)
    for count, variables in LAUNCHERS.items():
        if all(name in environ for name in (count, *variables)) and int(environ[count]) > 1:
            rank = next(
                name for name in variables if name.endswith(("PROCESS_ID", "PROCID", "RANK"))
            )
            return ProcessConfig(
                environ.get("JAX_COORDINATOR_ADDRESS"),
                int(environ[count]),
                int(environ[rank]),
                seconds,
            )
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")  # JobSet on GKE, and Cloud TPU
    if len(hosts) > 1 and "TPU_WORKER_ID" in environ:
        return ProcessConfig(None, len(hosts), int(environ["TPU_WORKER_ID"]), seconds)
    return None
