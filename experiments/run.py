"""Measure an experiment.

    python -m experiments.run configs/quickstart.yaml [--set a.b=c ...] [--jobs 4]

Each repeat of each point of the sweep becomes a folder (see store.py). The same command resumes a
sweep that was stopped, even by SIGKILL: it measures only runs that are missing or failed. Runs made
by other code, committed or not, are named and kept; if a repeat of their point is missing, the
whole point is measured again. --no-resume measures everything again. Simulated points can run in
several processes (--jobs, see parallel.py), with the same results. With --backend ray, measured and
simulated points run on the nodes of a Ray cluster (core/cluster.py).

With --processes, start the same command in each process (core/processes.py); process 0 measures and
writes.

Exit status: 0 all runs are good, 1 a run failed (the table gives the reason), 2 the config is wrong
or --out is not writable.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from experiments import report
from experiments.analysis import sweep_points
from experiments.core import cluster, config, parallel, processes, store, sweep, what_ran
from experiments.core.config import Experiment, Point
from experiments.core.drive import check_planned
from experiments.core.engines import Run, engine_key, plan_runs, simulated_llm
from experiments.core.optional_imports import require
from experiments.core.pool_options import POOLS, pool_experiment
from experiments.core.workloads import has_text
from experiments.simulation.cost import shape_of
from pagedjax.commands import cli
from pagedjax.options.config import check_model_len
from pagedjax.text import yaml_words
from pagedjax.weights.families import own_family
from pagedjax.weights.locate import HUB_ID, open_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    options = _parser().parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        points = config.load(Path(options.config), tuple(options.set))
        if options.engines < 1:
            raise ValueError(f"--engines is {options.engines}; it must be at least 1")
        parallel.check(points, options.jobs, options.backend)
        resources = worker_resources(options)
        on_ray = options.backend == "ray"
        group = None if options.dry_run else cli.join(options)
        if group is not None and on_ray:
            raise ValueError(
                "--backend is ray, and this is one of several processes of an engine; leave one "
                "of them out"
            )
        if group is not None and group.process:
            engines = sweep.make_engines(options.engines, quiet=True)
            processes.follow(group, plan_runs(points, options.engines), engines)
            return 0
        prepared = prepare(
            points,
            options.out,
            options.engines,
            resume=not options.no_resume,
            download=not options.dry_run,
        )
        folder = prepared.folder
        if options.dry_run:
            print(describe(prepared.plan, prepared.summaries, folder))
            return _print_unfit(points)
        if not options.no_report:
            require_report()
        measure_all = _measure_function(options, prepared, resources)
        command = ["python", "-m", "experiments.run", *words]
        sweep.write_sweep(folder, points, shlex.join(command))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        why = f"{options.out} is a file; name a folder" if Path(options.out).is_file() else error
        print(f"error: cannot write to --out {options.out}: {why}", file=sys.stderr)
        return 2
    try:
        summaries = sweep.measure_missing(
            prepared.plan,
            folder,
            prepared.summaries,
            measure_all,
            quiet=options.quiet,
            local=not on_ray,
        )
    except KeyboardInterrupt:
        command = "the same command"
        if options.no_resume:
            command = "the same command without --no-resume"
        print(f"\nstopped; {command} resumes the sweep. Results so far: {folder}", file=sys.stderr)
        return 130
    page = None if options.no_report else report.write(folder)
    return _report(points, summaries, folder, page, quiet=options.quiet)


def _print_unfit(points: Sequence[Point]) -> int:
    """Print each reason why points cannot run, once. Returns the exit status."""
    labels_by_reason: dict[str, list[str]] = {}
    for point in points:
        try:
            limit = _longest_request(point.experiment)
            if limit is not None:
                check_planned(point, limit)
        except (ImportError, OSError, ValueError) as error:
            labels_by_reason.setdefault(str(error), []).append(point.label)
    for reason, labels in labels_by_reason.items():
        subject = f"{len(labels)} points, such as {labels[0]}" if len(labels) > 1 else labels[0]
        print(f"error: {subject}: {reason}", file=sys.stderr)
    return 2 if labels_by_reason else 0


def _longest_request(experiment: Experiment) -> int | None:
    """The max_model_len that the engine will have. For a model of a hub that is not downloaded,
    this is the config's own value.

    Raises:
        ValueError: the engine cannot be simulated, or its limit is beyond the model's.
    """
    if experiment.simulate:
        return simulated_llm(experiment).engine.config.max_model_len
    limit = experiment.engine.max_model_len
    if HUB_ID.fullmatch(experiment.model) and not Path(experiment.model).exists():
        return limit
    family = own_family(experiment.engine.model_family)
    checkpoint = open_checkpoint(experiment.model, family=family)
    longest = shape_of(checkpoint.config, family=family).longest
    check_model_len(limit or longest, longest)
    return limit or longest


def _measure_function(
    options: argparse.Namespace, prepared: Prepared, resources: dict[str, float] | None
) -> sweep.Measure:
    """The function that measures the missing runs: in workers of a cluster, in processes, or in
    this process.
    """
    if options.backend == "ray":
        if prepared.missing:
            workers = cluster.connect(prepared.missing, options.engines, resources, options.jobs)
            return partial(cluster.results, workers=workers)
    elif (options.jobs or 1) > 1:
        return partial(parallel.results, jobs=options.jobs)
    engines = sweep.make_engines(options.engines, quiet=options.quiet)
    return partial(sweep.run_in_turn, engines=engines)


def _report(
    points: Sequence[Point],
    summaries: Sequence[dict[str, Any]],
    folder: Path,
    page: Path | None,
    *,
    quiet: bool,
) -> int:
    """Print the table of a sweep, and where its report is. Returns the exit status.

    page: the report; None: there is none.
    """
    other_points = store.points(folder) - {point.key[:12] for point in points}
    if other_points:
        print(
            f"note: {len(other_points)} points in {folder} do not belong to this sweep and are not "
            "in its report; --set name=... gives this sweep another folder",
            file=sys.stderr,
        )
    failed = [summary for summary in summaries if summary["failed"]]
    if not quiet:
        if devices := what_ran.simulated_devices(points):
            print(f"{devices}: every time is calculated")
        experiments = [point.experiment for point in points]
        notes = (
            what_ran.equal_repeats(experiments),
            what_ran.predictions(experiments),
            what_ran.oracle(experiments),
        )
        for note in filter(None, notes):
            print(f"note: {note}")
        print(sweep_points.text_table(sweep_points.points(store.read_runs(folder))))
    runs_by_reason: dict[str, list[str]] = {}
    for summary in failed:
        run = f"{summary['label']}, repeat {summary['repeat']}"
        runs_by_reason.setdefault(summary["failed"], []).append(run)
    for reason, runs in runs_by_reason.items():
        subject = f"{len(runs)} runs, such as {runs[0]}" if len(runs) > 1 else runs[0]
        print(f"failed: {subject}: {reason}", file=sys.stderr)
    if page is None:
        command = shlex.join(["python", "-m", "experiments.report", str(folder)])
        print(f"results: {folder}; {command} draws their report")
    else:
        print(f"report: {page}")
    return 1 if failed else 0


class Prepared(NamedTuple):
    """A sweep before it is measured.

    summaries: of the runs that have finished already, by point and repeat.
    """

    plan: list[Run]
    folder: Path
    summaries: dict[tuple[str, int], dict[str, Any]]

    @property
    def missing(self) -> list[Run]:
        return [run for run in self.plan if (run.point.key, run.repeat) not in self.summaries]


def prepare(
    points: Sequence[Point],
    out: str | PathLike[str],
    engines: int,
    *,
    resume: bool = True,
    download: bool = True,
) -> Prepared:
    """Find the runs of a sweep that are left to measure, and check that their models are there.

    Args:
        out: the folder of results; the sweep has a folder of its name in it.
        engines: the number of engines that are kept alive at a time.
        resume: False: finished runs are measured again.
        download: whether models of a hub are fetched.

    Raises:
        ValueError: a model is missing or damaged.
    """
    plan = plan_runs(points, engines)
    folder = Path(out) / points[0].experiment.name
    store.clean(folder)
    prepared = Prepared(plan, folder, sweep.finished_runs(plan, folder) if resume else {})
    check_models([run.point.experiment for run in prepared.missing], download=download)
    return prepared


def require_report() -> None:
    """Raises ImportError if a package of the report is missing. This is called before anything is
    measured, so that the error does not come after minutes.
    """
    for module in ("pandas", "matplotlib"):
        require(module)


def measure(
    config_file: str | PathLike[str],
    settings: Mapping[str, Any] | None = None,
    out: str | PathLike[str] = "runs",
    *,
    jobs: int = 1,
    engines: int = 4,
    quiet: bool = True,
) -> Path:
    """Do what `experiments.measure` does, but return the folder of the sweep."""
    words = tuple(_setting(key, value) for key, value in (settings or {}).items())
    points = config.load(Path(config_file), words)
    for name, value in (("engines", engines), ("jobs", jobs)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    parallel.check(points, jobs, "loky")
    require_report()
    plan, folder, summaries = prepare(points, out, engines)
    measure_all: sweep.Measure = partial(parallel.results, jobs=jobs)
    if jobs == 1:
        measure_all = partial(sweep.run_in_turn, engines=sweep.make_engines(engines, quiet=quiet))
    set_options = [part for word in words for part in ("--set", word)]
    command = ["python", "-m", "experiments.run", str(config_file), *set_options, "--out", str(out)]
    sweep.write_sweep(folder, points, shlex.join(command))
    sweep.measure_missing(plan, folder, summaries, measure_all, quiet=quiet)
    report.write(folder)
    return folder


def _setting(key: str, value: Any) -> str:
    """A key and its Python value as the text that follows `--set`.

    Raises:
        ValueError: YAML has no such value.
    """
    original = value
    if isinstance(value, PathLike):
        value = os.fspath(value)
    elif hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    try:
        text = yaml_words.dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    except yaml.YAMLError:
        raise ValueError(
            f"settings has {key}: {original!r:.80}, which is no value of YAML; give a number, a "
            "text, None, a list or a mapping"
        ) from None
    # YAML writes a line "..." after a text or a number that stands alone
    return f"{key}={text.removesuffix('...' + chr(10)).strip()}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.run", description="Measure an experiment.", allow_abbrev=False
    )
    parser.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="override a key; c is YAML"
    )
    parser.add_argument("--out", default="runs", help="folder of results (default: runs)")
    parser.add_argument(
        "--engines", type=int, default=4, help="engines kept alive at a time (default: 4)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        help="runs at a time (default: 1; with ray all that the cluster has room for)",
    )
    parser.add_argument(
        "--backend", choices=parallel.BACKENDS, default="loky", help="of --jobs (default: loky)"
    )
    parser.add_argument(
        "--worker-resources",
        metavar="NAME=N,...",
        help="with ray, of each worker, such as num_cpus=2,num_gpus=1 (default: a GPU, or all "
        "processors of a node)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    parser.add_argument("--no-resume", action="store_true", help="measure everything again")
    parser.add_argument(
        "--no-report",
        action="store_true",
        help="draw no report; python -m experiments.report FOLDER draws it later",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    cli.process_options(parser)
    return parser


def worker_resources(options: argparse.Namespace) -> dict[str, float] | None:
    """The value of --worker-resources. Raises ValueError if it is wrong, or has no use."""
    if options.worker_resources is None:
        return None
    if options.backend != "ray":
        raise ValueError(
            "--worker-resources is given, and --backend is not ray; add --backend ray, or leave "
            "it out"
        )
    return cluster.parse_resources(options.worker_resources)


def check_models(experiments: Iterable[Experiment], *, download: bool) -> None:
    """Open each model that an engine or a workload needs, to report a missing one before anything
    runs.

    Raises:
        ValueError: a model is missing, damaged or not supported.
    """
    models = [
        (experiment.model, experiment.engine.model_family)
        for experiment in experiments
        if _reads_model(experiment)
    ]
    for model, family in dict.fromkeys(models):
        if HUB_ID.fullmatch(model) and not download:
            continue
        try:
            open_checkpoint(model, family=own_family(family))
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(f"model: {error}") from error


def _reads_model(experiment: Experiment) -> bool:
    """Whether the experiment's own model gives a shape, weights or a tokenizer.

    `simulate.model`, also that of each pool, gives a shape in place of the experiment's model.
    """
    engines = (
        [pool_experiment(experiment, name) for name in POOLS] if experiment.pools else [experiment]
    )
    sections = [engine.simulate for engine in engines]
    all_name_shapes = all(
        simulate is not None and simulate.model is not None for simulate in sections
    )
    return not all_name_shapes or has_text(experiment.workload)


def describe(
    plan: Sequence[Run], summaries: dict[tuple[str, int], dict[str, Any]], folder: Path
) -> str:
    """The plan as text, one line for each point, in the order of measuring."""
    lines = [f"{len(plan)} runs, {len(summaries)} of them done, in {folder}"]
    for key, label in dict.fromkeys((run.point.key, run.point.label) for run in plan):
        repeats = [run.repeat for run in plan if run.point.key == key]
        num_done = sum((key, repeat) in summaries for repeat in repeats)
        lines.append(f"  {key[:12]}  {num_done}/{len(repeats)} done  {label}")
    engines = dict.fromkeys(engine_key(run.point.experiment) for run in plan)
    noun = "engine" if len(engines) == 1 else "engines"
    lines.append(f"{len(engines)} {noun} to build, each compiled once")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
