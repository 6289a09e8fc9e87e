"""Jobs in processes of their own: one that crashes or hangs leaves the others their results."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from experiments.hardware.processes import results


def job(name: str) -> str:
    if name == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hang":
        time.sleep(600)
    if name == "error":
        raise ValueError("no such device")
    return f"{name} {os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']}"


def test_a_crash_and_an_error_leave_the_other_jobs_their_results():
    before = dict(os.environ)
    outcomes = dict(results(job, ["crash", "one", "error", "two"], 1, 60))
    assert dict(os.environ) == before
    assert outcomes["one"] == "one false"
    assert outcomes["two"] == "two false"
    assert isinstance(outcomes["crash"], BrokenProcessPool)
    assert str(outcomes["error"]) == "no such device"


@pytest.mark.slow
def test_a_job_that_hangs_is_given_up_and_its_process_killed():
    start = time.monotonic()
    outcomes = []
    for name, result in results(job, ["hang", "one", "hang too"], 2, 8):
        outcomes.append((name, result if isinstance(result, str) else str(result)))
    assert outcomes == [
        ("one", "one false"),
        ("hang too", "hang too false"),
        ("hang", "not done after 8 s"),
    ]
    assert time.monotonic() - start < 30


def test_jobs_that_were_not_started_are_yielded_too():
    outcomes = dict(results(job, ["hang", "one"], 1, 3))
    assert [str(outcome) for outcome in outcomes.values()] == ["not done after 3 s"] * 2
