"""Which processes there are: as typed, or as a launcher says."""

from __future__ import annotations

import pytest

from pagedjax.engine.processes.config import ProcessConfig, read
from tests.refusals import refused

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (SLURM, ProcessConfig(None, 4, 3)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # salloc: no step
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, ProcessConfig(None, 2, 1)),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "a-0.a:6000",
                "JAX_NUM_PROCESSES": "8",
                "JAX_PROCESS_ID": "5",
            },
            ProcessConfig("a-0.a:6000", 8, 5),
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, ProcessConfig(None, 2, 1)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    ],
    ids=["none", "srun", "one task", "salloc", "mpirun", "JobSet", "TPU slice", "one TPU host"],
)
def test_a_launcher_needs_no_options(environ, expected):
    assert read(environ=environ) == expected
    assert read(processes=1, environ=environ) is None, "one process can be asked for"
    assert read("10.0.0.1:6000", 3, 2, 9.0, environ) == ProcessConfig("10.0.0.1:6000", 3, 2, 9.0)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ("a:1", None, None),
            "--processes and --process missing; give all of --coordinator, --processes, --process",
        ),
        ((None, 2, 0), "--coordinator missing"),
        (("a:1", 2, 2), "process is 2; it must be from 0 to 1, another one in each process"),
        (("a:1", 0, 0), "processes is 0; it must be an integer of at least 1"),
        (("a", 2, 0), "coordinator is 'a'; it must be HOST:PORT of process 0, as in 10.0.0.1:6000"),
        (("a:70000", 2, 0), "coordinator is 'a:70000'; it must be HOST:PORT"),
        (
            ("a:1", 2, 0, -1.0),
            "the timeout of processes is -1.0; it must be a number of seconds above 0",
        ),
    ],
)
def test_wrong_options_are_refused(typed, message):
    with refused(message.replace("(", r"\(")):
        read(*typed, environ={})


def test_all_processes_on_one_machine_are_known():
    assert ProcessConfig("127.0.0.1:6000", 2, 0).loopback
    assert not ProcessConfig("10.0.0.1:6000", 2, 0).loopback
