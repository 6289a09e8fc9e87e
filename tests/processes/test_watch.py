"""Which process is late: the one that came less far, whatever the others seem to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.engine.processes.watch import Progress, late

CASES = {
    "all wait": ({0: Progress(3, "waiting", 900), 1: Progress(3, "waiting", 900)}, None),
    "one loads for long": (
        {0: Progress(0, "starting", 900), 1: Progress(0, "starting", 900)},
        None,
    ),
    "a step takes long": ({0: Progress(3, "running", 9), 1: Progress(3, "running", 9)}, None),
    "silence": (
        {
            0: Progress(3, "running", 11),
            1: Progress(3, "running", 1, 10.5),
            2: Progress(3, "running", 11),
        },
        "process 1 has not been heard of for 10 s: it is stopped, or cannot be reached",
    ),
    "the scheduler of one hangs": (
        {
            0: Progress(3, "running", 11),
            1: Progress(3, "scheduling", 11),
            2: Progress(3, "running", 11),
        },
        "process 1 has been scheduling step 3 for 11 s",
    ),
    "process 0 does not send the step": (
        {0: Progress(4, "scheduling", 11), 1: Progress(3, "waiting", 11)},
        "process 0 has been scheduling step 4 for 11 s",
    ),
    "one hangs after a step": (
        {
            0: Progress(4, "running", 11),
            1: Progress(4, "running", 11),
            2: Progress(3, "running", 12),
        },
        "process 2 did not begin step 4 for 11 s",
    ),
    "two hang before an input": (
        {
            0: Progress(4, "running", 11),
            1: Progress(3, "waiting", 11),
            2: Progress(3, "waiting", 12),
        },
        "processes 1, 2 did not begin step 4 for 11 s",
    ),
    "process 0 hangs after a step": (
        {0: Progress(4, "running", 11), 1: Progress(4, "waiting", 11)},
        "step 4 has not ended for 11 s in process 0",
    ),
    "a device hangs": (
        {0: Progress(4, "running", 11), 1: Progress(4, "running", 12)},
        "step 4 has not ended for 12 s in processes 0, 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_named(case):
    progress, expected = CASES[case]
    assert late(progress, 10) == expected


STAGES = st.sampled_from(["starting", "waiting", "scheduling", "running"])
PROGRESS = st.builds(Progress, st.integers(0, 3), STAGES, st.floats(0, 30), st.floats(0, 30))


@given(st.lists(PROGRESS, min_size=2, max_size=5))
def test_nobody_is_late_within_the_timeout_and_who_is_named_is_late(processes):
    progress = dict(enumerate(processes))
    reason = late(progress, 10)
    if all(process.seconds <= 10 and process.silent <= 10 for process in processes):
        assert reason is None
    if any(
        process.silent > 10 or (process.stage in ("scheduling", "running") and process.seconds > 10)
        for process in processes
    ):
        assert reason is not None
    if reason and reason.startswith("process ") and " did not begin " not in reason:
        named = progress[int(reason.split()[1])]
        assert named.silent > 10 or (named.stage == "scheduling" and named.seconds > 10)
