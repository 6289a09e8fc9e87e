"""Which process of an engine is late: a pure function of what each process said last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# starting: loads or compiles, as long as it takes. waiting: for the next input. scheduling: a step,
# before its program is sent to the devices. running: from then on until the step's end.
Stage = Literal["starting", "waiting", "scheduling", "running"]


class Progress(NamedTuple):
    """What a process said last.

    step: the last step that it began; 0 before the first.
    seconds: how long it had been in this stage then.
    silent: seconds since then.
    """

    step: int = 0
    stage: Stage = "starting"
    seconds: float = 0.0
    silent: float = 0.0


def late(progress: Mapping[int, Progress], timeout: float) -> str | None:
    """What is wrong, as a sentence that names the processes; None if nothing is.

    A step ends on all devices together, so one late process holds up all others. They wait for it
    on their devices and look equally late. The cause is the process that has begun fewer steps.

    Args:
        progress: by process; 0 orders the inputs.
        timeout: seconds.
    """
    leader = progress[0]
    for i, state in sorted(progress.items()):
        if state.silent > timeout:
            return (
                f"process {i} has not been heard of for {state.silent:.0f} s: it is stopped, or "
                "cannot be reached"
            )
        if state.stage == "scheduling" and state.seconds > timeout:
            return f"process {i} has been scheduling step {state.step} for {state.seconds:.0f} s"
    leader_is_overdue = leader.stage == "running" and leader.seconds > timeout
    late_processes = [
        i for i, state in progress.items() if state.stage != "starting" and state.step < leader.step
    ]
    if leader_is_overdue and late_processes:
        return (
            f"{_processes(late_processes)} did not begin step {leader.step} for "
            f"{leader.seconds:.0f} s"
        )
    overdue = [
        i for i, state in progress.items() if state.stage == "running" and state.seconds > timeout
    ]
    if overdue:
        first = min(progress[i].step for i in overdue)
        first_processes = [i for i in overdue if progress[i].step == first]
        seconds = max(progress[i].seconds for i in first_processes)
        return f"step {first} has not ended for {seconds:.0f} s in {_processes(first_processes)}"
    return None


def _processes(numbers: list[int]) -> str:
    noun = "process" if len(numbers) == 1 else "processes"
    return f"{noun} {', '.join(map(str, sorted(numbers)))}"
