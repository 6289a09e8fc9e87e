"""Jobs in processes of their own: one that crashes or hangs leaves the others their results."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool

from experiments.hardware.processes import results


def job(which: str) -> str:
    if which == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if which == "hang":
        time.sleep(600)
    if which == "error":
        raise ValueError("no such device")
    return f"{which} {os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']}"


def test_a_crash_and_an_error_leave_the_other_jobs_their_results():
    before = dict(os.environ)
    found = dict(results(job, ["crash", "one", "error", "two"], 1, 60))
    assert dict(os.environ) == before
    assert found["one"] == "one false"
    assert found["two"] == "two false"
    assert isinstance(found["crash"], BrokenProcessPool)
    assert str(found["error"]) == "no such device"


def test_a_job_that_hangs_is_given_up_and_its_process_killed():
    began, found = time.monotonic(), []
    for one, result in results(job, ["hang", "one", "hang too"], 2, 8):
        found.append((one, result if isinstance(result, str) else str(result)))
    assert found == [
        ("one", "one false"),
        ("hang too", "hang too false"),
        ("hang", "not done after 8 s"),
    ]
    assert time.monotonic() - began < 30


def test_jobs_that_were_not_started_are_yielded_too():
    found = dict(results(job, ["hang", "one"], 1, 3))
    assert [str(one) for one in found.values()] == ["not done after 3 s"] * 2
