"""Which process of an engine is late: a pure function of what each has last said of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# starting: loads or compiles, as long as it takes. waiting: for the next input. scheduling: a step,
# before its program is sent to the devices. running: from then on until the step's end.
Stage = Literal["starting", "waiting", "scheduling", "running"]


class Progress(NamedTuple):
    """What a process said last.

    step: the last step that it began; 0 before the first.
    seconds: in this stage.
    silent: seconds since it said so.
    """

    step: int = 0
    stage: Stage = "starting"
    seconds: float = 0.0
    silent: float = 0.0


def late(progress: Mapping[int, Progress], timeout: float) -> str | None:
    """What is wrong, as a sentence that names the processes; None if nothing is.

    A step ends on all devices together, so one late process holds up all others. They wait for it
    on their devices and look equally late. The cause is the process that came less far.

    Args:
        progress: by process; 0 orders the inputs.
        timeout: seconds.
    """
    leader = progress[0]
    for i, one in sorted(progress.items()):
        if one.silent > timeout:
            return (
                f"process {i} has not been heard of for {one.silent:.0f} s: it is stopped, or "
                "cannot be reached"
            )
        if one.stage == "scheduling" and one.seconds > timeout:
            return f"process {i} has been scheduling step {one.step} for {one.seconds:.0f} s"
    running = leader.stage == "running" and leader.seconds > timeout
    behind = [
        i for i, one in progress.items() if one.stage != "starting" and one.step < leader.step
    ]
    if running and behind:
        return f"{_processes(behind)} did not begin step {leader.step} for {leader.seconds:.0f} s"
    over = [i for i, one in progress.items() if one.stage == "running" and one.seconds > timeout]
    if over:
        first = min(progress[i].step for i in over)
        held = [i for i in over if progress[i].step == first]
        seconds = max(progress[i].seconds for i in held)
        return f"step {first} has not ended for {seconds:.0f} s in {_processes(held)}"
    return None


def _processes(which: list[int]) -> str:
    plural = "es" * (len(which) > 1)
    return f"process{plural} {', '.join(map(str, sorted(which)))}"
