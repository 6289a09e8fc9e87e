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

from experiments.core import processes, store
from experiments.core.config import Point
from experiments.core.engines import Engines, Run
from experiments.core.environment import code, environment
from experiments.core.execution import Result, head_of, one_run
from experiments.simulation.cost import SIMULATED

Begins = Callable[[Run], None]  # it is told each run when that begins
Measure = Callable[[Iterable[Run], dict[str, Any], Begins], Generator[Result, None, None]]
REMEDY = "--no-resume measures them again"
NAMED = 6  # run folders that a note names


def finished_runs(
    plan: Sequence[Run], folder: Path, remedy: str = REMEDY
) -> dict[tuple[str, int], dict[str, Any]]:
    """Summaries of the plan's finished runs; a failed run counts as missing.

    Runs made by other code (see environment.code) are named on stderr. They are kept if all repeats
    of their point are finished. Otherwise they are left out and measured again, because repeats of
    a point must differ by noise alone.
    """
    found = {}
    for run in plan:
        summary = store.read_summary(store.run_folder(folder, run.point.key, run.repeat))
        if summary is not None and not summary["failed"]:
            # its place may be another one now
            found[run.point.key, run.repeat] = {**summary, **head_of(run)}
    missing = {run.point.key for run in plan if (run.point.key, run.repeat) not in found}
    other = {key: summary for key, summary in found.items() if made_by(summary) != code()}
    again = {key: summary for key, summary in other.items() if key[0] in missing}
    note_runs(
        again,
        folder,
        "by other code",
        "They are measured again, because other repeats of their points are missing",
    )
    kept = {key: summary for key, summary in other.items() if key not in again}
    note_runs(kept, folder, "by other code", remedy)
    return {key: summary for key, summary in found.items() if key not in again}


def made_by(summary: dict[str, Any]) -> dict[str, str | None]:
    """The value of `environment.code` at the time of the run; None for a key that older runs lack."""
    return {name: summary.get(name) for name in code()}


def note_runs(runs: dict[Any, dict[str, Any]], folder: Path, how: str, then: str) -> None:
    """Print a note on finished runs that were made in another way (`how`) than new ones, and the
    remedy (`then`).
    """
    if not runs:
        return
    names = [str(folder / summary["run"]) for summary in runs.values()]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    what = f"{len(names)} finished runs were made {how} than this: {', '.join(names[:NAMED])}{more}"
    print(f"NOTE: {what}. {then}.", file=sys.stderr)


def write_sweep(folder: Path, points: Sequence[Point], command: str) -> None:
    """Write sweep.json, the facts of the sweep as a whole that the report shows."""
    first = points[0].experiment
    about = {
        "name": first.name,
        "question": first.question,
        "command": command,
        "swept": list(dict.fromkeys(path for point in points for path in point.swept)),
    }
    store.write_file(folder / "sweep.json", store.json_text(about))


def make_engines(alive: int, *, quiet: bool) -> Engines:
    from pagedjax import LLM, load_model

    return Engines(alive, partial(load_model, progress=not quiet), partial(LLM, progress=not quiet))


def in_turn(
    runs: Iterable[Run], where: dict[str, Any], begins: Begins, engines: Engines
) -> Generator[Result, None, None]:
    """`one_run` of each of `runs`, in order, in this process."""
    for run in runs:
        begins(run)
        with processes.followed(run):
            result = one_run(run, engines, where)
        yield result


def measure_missing(
    plan: Sequence[Run],
    folder: Path,
    done: dict[tuple[str, int], dict[str, Any]],
    measure_all: Measure,
    *,
    quiet: bool,
    remedy: str = REMEDY,
    here: bool = True,
) -> list[dict[str, Any]]:
    """Measure the missing runs of `plan`.

    Returns the summaries of all its runs, in the order of the sweep.

    here: whether this process measures; workers on other machines know their own devices.
    """
    missing = [run for run in plan if (run.point.key, run.repeat) not in done]
    write_index(folder, plan, done)  # now, so that an interrupted sweep can be read
    if missing:
        # if this sweep is interrupted, the next one must not take an old run for a new one
        store.set_aside([store.run_folder(folder, run.point.key, run.repeat) for run in missing])
        where = environment(device=here and not all(run.point.experiment.simulate for run in plan))
        device = where["device"]["kind"]
        measured = {
            key: s
            for key, s in done.items()
            if not (s["device"] or SIMULATED).startswith(SIMULATED)
        }
        if here:
            other = {key: s for key, s in measured.items() if s["device"] != device}
            note_runs(other, folder, f"on another device ({device})", remedy)
        with (
            tqdm(
                total=len(plan), initial=len(plan) - len(missing), disable=quiet, unit="run"
            ) as bar,
            closing(measure_all(missing, where, partial(show, bar))) as results,
        ):
            for files, summary in results:
                key = summary["point"], summary["repeat"]
                store.write_run(store.run_folder(folder, *key), files)
                done[key] = summary
                write_index(folder, plan, done)
                bar.update()
    return write_index(folder, plan, done)


def show(bar: Any, run: Run) -> None:
    """The progress bar shows the name of a run that begins."""
    bar.set_description(f"{run.point.label}, repeat {run.repeat}")


def write_index(
    folder: Path, plan: Sequence[Run], done: dict[tuple[str, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite runs.jsonl: the summaries of the sweep's finished runs, in the order of the sweep."""
    runs = sorted(plan, key=lambda run: (run.order, run.repeat))
    summaries = [
        done[run.point.key, run.repeat] for run in runs if (run.point.key, run.repeat) in done
    ]
    store.write_file(folder / "runs.jsonl", store.json_lines(summaries))
    return summaries
