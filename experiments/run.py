"""Measure an experiment: python -m experiments.run configs/quickstart.yaml [--set a.b=c ...] [--jobs 4]

Every point of the sweep times its repeats becomes a folder (see store.py). A sweep that was stopped, even by SIGKILL,
goes on where it was: the same command measures only what is missing or has failed. What was made by other code, which
need not be committed to be other, is named and kept, unless a repeat of the same point is missing: then all of the
point is measured again. --no-resume measures everything again. Simulated points can run in several processes (--jobs,
see parallel.py), with the same results.

Exit status: 0 all runs are good, 1 some run failed (the table says which and why), 2 the config is wrong or
--out cannot be written to.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.core import config, parallel, store
from experiments.core.config import Experiment, Point
from experiments.core.drive import Measured, measure
from experiments.core.engines import Engines, Run, engine_key, plan_runs
from experiments.core.environment import code, environment, load_average, processor_time, stolen_share
from experiments.core.libraries import require
from experiments.core.metrics import RequestRecord
from experiments.core.parallel import Result
from experiments.core.workloads import Prompts
from experiments.simulation.cost import SIMULATED
from pagedjax.config import EngineConfig
from pagedjax.weights.locate import HUB_ID, open_checkpoint

Measure = Callable[[Iterable[Run], dict[str, Any]], Generator[Result, None, None]]  # runs, and where they run
COPIED = 1 << 18  # characters of a workload's file that are copied beside each run
REMEDY = "--no-resume measures them again"
NAMED = 6  # run folders that a note names


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        points = config.load(Path(options.config), tuple(options.set))
        if options.engines < 1:
            raise ValueError(f"--engines is {options.engines}; it must be at least 1")
        parallel.check(points, options.jobs, options.backend)
        plan = plan_runs(points, options.engines)
        folder = Path(options.out) / points[0].experiment.name
        store.clean(folder)
        done = {} if options.no_resume else finished_runs(plan, folder)
        missing = [run.point.experiment for run in plan if (run.point.key, run.repeat) not in done]
        check_models(missing, download=not options.dry_run)
        if options.dry_run:
            print(describe(plan, done, folder))
            return 0
        for module in ("pandas", "matplotlib"):  # found out now, not after minutes of measuring
            require(module)
        command = ["python", "-m", "experiments.run", *(sys.argv[1:] if arguments is None else arguments)]
        write_sweep(folder, points, shlex.join(command))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write to --out {options.out}: {error}", file=sys.stderr)
        return 2
    try:
        if options.jobs > 1:
            measure_all: Measure = partial(parallel.results, one_run, jobs=options.jobs, backend=options.backend)
        else:
            measure_all = partial(in_turn, engines=make_engines(options.engines, quiet=options.quiet))
        summaries = sweep(plan, folder, done, measure_all, quiet=options.quiet)
    except KeyboardInterrupt:
        again = "the same command without --no-resume" if options.no_resume else "the same command"
        print(f"\nstopped; {again} goes on from here. Results so far: {folder}", file=sys.stderr)
        return 130
    from experiments import report
    from experiments.analysis import sweep_points

    path = report.write(folder)
    if others := store.points(folder) - {point.key[:12] for point in points}:
        what = f"{len(others)} points in {folder} are not of this sweep, and not in its report"
        print(f"note: {what}; --set name=... gives a sweep a folder of its own", file=sys.stderr)
    failed = [summary for summary in summaries if summary["failed"]]
    if not options.quiet:
        print(sweep_points.text_table(sweep_points.points(store.read_runs(folder))))
    for summary in failed:
        print(f"failed: {summary['label']}, repeat {summary['repeat']}: {summary['failed']}", file=sys.stderr)
    print(f"report: {path}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.run", description="Measure an experiment.")
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a key; c is YAML")
    parser.add_argument("--out", default="runs", help="folder of results (default: runs)")
    parser.add_argument("--engines", type=int, default=4, help="engines kept alive at a time (default: 4)")
    parser.add_argument("--jobs", type=int, default=1, help="simulated runs at a time (default: 1)")
    parser.add_argument("--backend", choices=parallel.BACKENDS, default="loky", help="of --jobs (default: loky)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and stop")
    parser.add_argument("--no-resume", action="store_true", help="measure everything again")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    return parser


def check_models(experiments: Iterable[Experiment], *, download: bool) -> None:
    """Open each model of which an engine or a workload will ask something, so that one that is not there is told now.

    Raises:
        ValueError: one that is missing, damaged or not supported.
    """
    for model in dict.fromkeys(one.model for one in experiments if _reads_model(one)):
        if HUB_ID.fullmatch(model) and not download:
            continue
        try:
            open_checkpoint(model)
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(f"model: {error}") from error


def _reads_model(experiment: Experiment) -> bool:
    simulate = experiment.simulate
    return simulate is None or simulate.model is None or isinstance(experiment.workload, Prompts)


def finished_runs(plan: Sequence[Run], folder: Path, remedy: str = REMEDY) -> dict[tuple[str, int], dict[str, Any]]:
    """Summaries of the plan's runs that are in place and good; a failed run counts as missing.

    Those that were made by other code (see environment.code) are named. They are kept where all repeats of their point
    are there; else they are left out, to be measured again: the repeats of a point differ by noise alone.
    """
    found = {}
    for run in plan:
        summary = store.read_summary(store.run_folder(folder, run.point.key, run.repeat))
        if summary is not None and not summary["failed"]:
            found[run.point.key, run.repeat] = {**summary, **head_of(run)}  # the sweep may have been reworded since
    missing = {run.point.key for run in plan if (run.point.key, run.repeat) not in found}
    other = {key: summary for key, summary in found.items() if made_by(summary) != code()}
    again = {key: summary for key, summary in other.items() if key[0] in missing}
    said(again, folder, "by other code", "They are measured again, because other repeats of their points are missing")
    kept = {key: summary for key, summary in other.items() if key not in again}
    said(kept, folder, "by other code", remedy)
    return {key: summary for key, summary in found.items() if key not in again}


def made_by(summary: dict[str, Any]) -> dict[str, str | None]:
    """What `environment.code` said when the run was made; None where it did not say so yet."""
    return {name: summary.get(name) for name in code()}


def said(runs: dict[Any, dict[str, Any]], folder: Path, how: str, then: str) -> None:
    """Name finished runs that were made in another way than those of now: a sweep should compare like with like."""
    if not runs:
        return
    names = [str(folder / summary["run"]) for summary in runs.values()]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    what = f"{len(names)} finished runs were made {how} than this: {', '.join(names[:NAMED])}{more}"
    print(f"NOTE: {what}. {then}.", file=sys.stderr)


def describe(plan: Sequence[Run], done: dict[tuple[str, int], dict[str, Any]], folder: Path) -> str:
    """The plan in words, one line a point, in the order of measuring."""
    lines = [f"{len(plan)} runs, {len(done)} of them done, in {folder}"]
    for point in dict.fromkeys((run.point.key, run.point.label) for run in plan):
        repeats = [run.repeat for run in plan if run.point.key == point[0]]
        ready = sum((point[0], repeat) in done for repeat in repeats)
        lines.append(f"  {point[0][:12]}  {ready}/{len(repeats)} done  {point[1]}")
    engines = dict.fromkeys(engine_key(run.point.experiment) for run in plan)
    return "\n".join([*lines, f"{len(engines)} engine{'s' * (len(engines) != 1)} to build, each compiled once"])


def head_of(run: Run) -> dict[str, Any]:
    """What a summary says of the run's place in its sweep. `run` is its folder, relative to the sweep's."""
    return {
        "name": run.point.experiment.name,
        "label": run.point.label,
        "swept": run.point.swept,
        "point": run.point.key,
        "repeat": run.repeat,
        "order": run.order,
        "run": store.run_folder(Path(), run.point.key, run.repeat).as_posix(),
    }


def write_sweep(folder: Path, points: Sequence[Point], command: str) -> None:
    """sweep.json: what the report says about the sweep as a whole."""
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


def in_turn(runs: Iterable[Run], where: dict[str, Any], engines: Engines) -> Generator[Result, None, None]:
    """Each run after the other, in this process."""
    for run in runs:
        yield one_run(run, engines, where)


def sweep(
    plan: Sequence[Run],
    folder: Path,
    done: dict[tuple[str, int], dict[str, Any]],
    measure_all: Measure,
    *,
    quiet: bool,
    remedy: str = REMEDY,
) -> list[dict[str, Any]]:
    """Measure what is missing of `plan`; the summaries of all its runs, in the order of the sweep."""
    missing = [run for run in plan if (run.point.key, run.repeat) not in done]
    write_index(folder, plan, done)  # now, so that a sweep that is stopped can be read
    if missing:
        # if this is stopped, what goes on from there must not take an old run for a new one
        store.set_aside([store.run_folder(folder, run.point.key, run.repeat) for run in missing])
        where = environment(device=not all(run.point.experiment.simulate for run in plan))
        device = where["device"]["kind"]
        other = {key: s for key, s in done.items() if s["device"] != device and not s["device"].startswith(SIMULATED)}
        said(other, folder, f"on another device ({device})", remedy)
        with (
            tqdm(total=len(plan), initial=len(plan) - len(missing), disable=quiet, unit="run") as bar,
            closing(measure_all(announced(missing, bar), where)) as results,
        ):
            for files, summary in results:
                key = summary["point"], summary["repeat"]
                store.write_run(store.run_folder(folder, *key), files)
                done[key] = summary
                write_index(folder, plan, done)
                bar.update()
    return write_index(folder, plan, done)


def announced(runs: Iterable[Run], bar: Any) -> Iterator[Run]:
    """The runs; the progress bar names each when it begins."""
    for run in runs:
        bar.set_description(f"{run.point.label}, repeat {run.repeat}")
        yield run


def write_index(folder: Path, plan: Sequence[Run], done: dict[tuple[str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """runs.jsonl, rebuilt whole: the summaries of the sweep's runs that are in place, in the order of the sweep."""
    runs = sorted(plan, key=lambda run: (run.order, run.repeat))
    summaries = [done[run.point.key, run.repeat] for run in runs if (run.point.key, run.repeat) in done]
    store.write_file(folder / "runs.jsonl", store.json_lines(summaries))
    return summaries


def noise(busy: float | None, since: tuple[int, int] | None) -> dict[str, float | None]:
    """What else the machine did, before a run and during it."""
    return {"load_average": busy, "stolen_share": stolen_share(since)}


def one_run(run: Run, engines: Engines, where: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Measure one run: the files of its folder and its summary. An error becomes a failed run."""
    simulate = run.point.experiment.simulate
    made = {"commit": where["commit"], "source": where["source"], "jax": where["versions"]["jax"]}
    place = {**made, "device": simulate.name if simulate else where["device"]["kind"]}
    head = {"schema": store.SCHEMA, **head_of(run), **place}
    before = load_average(), processor_time()
    try:
        llm = engines.get(run.point.experiment)
        measured = measure(llm, run.point, run.repeat)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        summary = {**head, "failed": reason, "workload": None, "metrics": None}
        files = {
            **config_files(run, run.point.experiment.engine_config),
            "env.json": store.json_text({**where, **noise(*before)}),
            "error.txt": traceback.format_exc(),
        }
    else:
        summary = {
            **head,
            "failed": measured.failed,
            "workload": measured.workload.describe(),
            "metrics": measured.summary,
        }
        files = run_files(run, llm, measured)
        startup = {**llm.startup, "total": engines.startup_seconds[engine_key(run.point.experiment)]}
        resolved = dataclasses.asdict(llm.engine.config)
        facts = {"attention_impl": resolved["attention_impl"], "engine": resolved, "startup": startup}
        if simulate:
            facts["simulate"] = dataclasses.asdict(simulate)
        files["env.json"] = store.json_text({**where, **facts, **noise(*before)})
    return {**files, "summary.json": store.json_text(summary)}, summary


def run_files(run: Run, llm: Any, measured: Measured) -> dict[str, str]:
    """config.yaml with its copies, requests.jsonl and steps.jsonl of a run. Times are rounded to microseconds."""

    def branches(request: RequestRecord) -> list[dict[str, Any]]:
        return [{**b._asdict(), "token_times": [round(time, 6) for time in b.token_times]} for b in request.branches]

    requests = [{**request._asdict(), "branches": branches(request)} for request in measured.requests]
    steps = [
        {key: round(value, 6) if isinstance(value, float) else value for key, value in step._asdict().items()}
        for step in measured.steps
    ]
    return {
        **config_files(run, llm.engine.config),
        "requests.jsonl": store.json_lines(requests),
        "steps.jsonl": store.json_lines(steps),
    }


def config_files(run: Run, engine: Any) -> dict[str, str]:
    """config.yaml, which runs this point again: the experiment without its sweep, the engine as it was resolved.

    Beside it lie copies of the workload's file, where it is small, and of a policy's; the paths that are left in it (a
    model, a large file, a fitted run) are absolute or the user's own, and have to be there still.
    """
    experiment = run.point.experiment
    values = dataclasses.asdict(experiment)
    values["engine"] = {field.name: getattr(engine, field.name) for field in dataclasses.fields(EngineConfig)}
    del values["cache_tokens"], values["sampling"]["max_tokens"]
    copies = {}
    if run.point.source:
        name = f"workload{Path(run.point.source).suffix}"
        copies = {name: run.point.content} if len(run.point.content) <= COPIED else {}
        values["workload"]["file"] = name if copies else run.point.source
    where, _, name = experiment.engine.policy.rpartition(":")
    if where.endswith(".py") and Path(where).is_file():
        copies["policy.py"] = Path(where).read_text(encoding="utf-8")
        values["engine"]["policy"] = f"policy.py:{name}"
    head = f"# Point {run.point.key}, repeat {run.repeat}.\n# python -m experiments.run THIS_FILE measures it again.\n"
    return {"config.yaml": head + store.yaml_text(values), **copies}


if __name__ == "__main__":
    sys.exit(main())
