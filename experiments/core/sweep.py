"""The runs of a sweep on disk: which of them are finished, which are measured now, and the index of
all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.core import processes, recordings, store, what_ran
from experiments.core.config import Point
from experiments.core.engines import Engines, Run
from experiments.core.environment import code, environment
from experiments.core.execution import Result, head_of, measure_run
from experiments.simulation.cost import SIMULATED

OnBegin = Callable[[Run], None]  # called with each run when the run begins
# (runs, environment of this process, on_begin) -> the results of the runs, as they finish
Measure = Callable[[Iterable[Run], dict[str, Any], OnBegin], Generator[Result, None, None]]
REMEDY = "--no-resume measures them again"
NAMED = 6  # run folders that a note names


def finished_runs(
    plan: Sequence[Run], folder: Path, remedy: str = REMEDY
) -> dict[tuple[str, int], dict[str, Any]]:
    """Summaries of the plan's finished runs; a failed run counts as missing, and so does a run
    without a recording if the plan has `record: true`.

    Runs made by other code (see environment.code) are named on stderr. They are kept if all repeats
    of their point are finished. Otherwise they are left out and measured again, because repeats of
    a point must differ by noise alone.
    """
    finished = {}
    unrecorded = {}
    for run in plan:
        run_folder = store.run_folder(folder, run.point.key, run.repeat)
        summary = store.read_summary(run_folder)
        if summary is None or summary["failed"]:
            continue
        lacks_recording = run.point.experiment.record and not recordings.paths(run_folder)
        # `head_of`: the run's place in the sweep may have changed
        summaries = unrecorded if lacks_recording else finished
        summaries[run.point.key, run.repeat] = {**summary, **head_of(run)}
    note_runs(
        unrecorded, folder, "without a recording", "They are made again, because record is true"
    )
    missing = {run.point.key for run in plan if (run.point.key, run.repeat) not in finished}
    other_code = {key: summary for key, summary in finished.items() if code_of(summary) != code()}
    repeated = {key: summary for key, summary in other_code.items() if key[0] in missing}
    note_runs(
        repeated,
        folder,
        "by other code than this",
        "They are measured again, because other repeats of their points are missing",
    )
    reused = {key: summary for key, summary in other_code.items() if key not in repeated}
    note_runs(reused, folder, "by other code than this", remedy)
    return {key: summary for key, summary in finished.items() if key not in repeated}


def code_of(summary: dict[str, Any]) -> dict[str, str | None]:
    """The result of `environment.code` at the time of the run.

    A key that an older run lacks has the value None.
    """
    return {name: summary.get(name) for name in code()}


def note_runs(runs: dict[Any, dict[str, Any]], folder: Path, difference: str, remedy: str) -> None:
    """Print a note on finished runs that were made in another way than new ones.

    Args:
        difference: how they were made, such as "by other code than this".
    """
    if not runs:
        return
    names = [str(folder / summary["run"]) for summary in runs.values()]
    more_text = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    print(
        f"NOTE: {len(names)} finished runs were made {difference}: "
        f"{', '.join(names[:NAMED])}{more_text}. {remedy}.",
        file=sys.stderr,
    )


def write_sweep(folder: Path, points: Sequence[Point], command: str) -> None:
    """Write sweep.json: what the report says about the whole sweep, and about what ran."""
    first = points[0].experiment
    about = {
        "name": first.name,
        "question": first.question,
        "command": command,
        "swept": list(dict.fromkeys(path for point in points for path in point.swept)),
        "simulated": what_ran.simulated_devices(points),
        "facts": what_ran.facts(points),
    }
    store.write_file(folder / "sweep.json", store.json_text(about))


def make_engines(alive: int, *, quiet: bool) -> Engines:
    from pagedjax import LLM, load_model

    return Engines(alive, partial(load_model, progress=not quiet), partial(LLM, progress=not quiet))


def run_in_turn(
    runs: Iterable[Run], env: dict[str, Any], on_begin: OnBegin, engines: Engines
) -> Generator[Result, None, None]:
    """`measure_run` of each of `runs`, in order, in this process."""
    for run in runs:
        on_begin(run)
        with processes.lead(run):
            result = measure_run(run, engines, env)
        yield result


def measure_missing(
    plan: Sequence[Run],
    folder: Path,
    finished: dict[tuple[str, int], dict[str, Any]],
    measure_all: Measure,
    *,
    quiet: bool,
    remedy: str = REMEDY,
    local: bool = True,
) -> list[dict[str, Any]]:
    """Measure the missing runs of `plan`. Returns the summaries of all its runs, in the order of
    the sweep.

    local: whether this process measures; workers on other machines know their own devices.
    """
    missing = [run for run in plan if (run.point.key, run.repeat) not in finished]
    write_index(folder, plan, finished)  # now, so that an interrupted sweep can be read
    if missing:
        # if this sweep is interrupted, the next one must not take an old run for a new one
        store.set_aside([store.run_folder(folder, run.point.key, run.repeat) for run in missing])
        has_device = local and not all(run.point.experiment.simulate for run in plan)
        env = environment(device=has_device)
        if local:
            _note_other_devices(finished, env["device"]["kind"], folder, remedy)
        policy_names = {
            (run.point.key, run.repeat): run.point.experiment.engine.policy for run in missing
        }
        bar = tqdm(total=len(plan), initial=len(plan) - len(missing), disable=quiet, unit="run")
        with bar, closing(measure_all(missing, env, partial(show, bar))) as results:
            for files, summary in results:
                key = summary["point"], summary["repeat"]
                run_folder = store.run_folder(folder, *key)
                store.write_run(run_folder, files)
                finished[key] = summary
                write_index(folder, plan, finished)
                if "recording" in summary:
                    recordings.write_pages(run_folder, policy_names[key])
                bar.update()
    return write_index(folder, plan, finished)


def _note_other_devices(
    finished: dict[tuple[str, int], dict[str, Any]], device: str | None, folder: Path, remedy: str
) -> None:
    """Print a note on measured runs of other devices than this one."""
    other_devices = {
        key: summary
        for key, summary in finished.items()
        if summary["device"] != device
        and not (summary["device"] or SIMULATED).startswith(SIMULATED)
    }
    note_runs(other_devices, folder, f"on another device than this ({device})", remedy)


def show(bar: Any, run: Run) -> None:
    """Show the name of a run that begins in the progress bar."""
    bar.set_description(f"{run.point.label}, repeat {run.repeat}")


def write_index(
    folder: Path, plan: Sequence[Run], finished: dict[tuple[str, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite runs.jsonl: the summaries of the sweep's finished runs, in the order of the sweep."""
    runs = sorted(plan, key=lambda run: (run.place, run.repeat))
    summaries = [
        finished[run.point.key, run.repeat]
        for run in runs
        if (run.point.key, run.repeat) in finished
    ]
    store.write_file(folder / "runs.jsonl", store.json_lines(summaries))
    return summaries
