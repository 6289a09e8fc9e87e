"""One run of a point: measure it and produce the files of its folder.

An error becomes a failed run.
"""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import Any

from experiments.core import kept_blocks, recordings, speculation, store, what_ran
from experiments.core.config import Experiment
from experiments.core.drive import Measured, measure
from experiments.core.engines import Engines, Run, engine_key
from experiments.core.environment import load_average, processor_time, stolen_share
from experiments.core.pool_options import POOLS, pool_experiment
from experiments.core.records import GROUPING, BranchRecord, RequestRecord
from experiments.core.workloads import Own
from pagedjax.options.config import EngineConfig
from pagedjax.options.own_names import own_name
from pagedjax.text import yaml_words

Result = tuple[dict[str, str], dict[str, Any]]  # the files of a run (name -> text) and its summary
MAX_COPY = 1 << 18  # most characters of a workload file that is copied into the run's folder


def head_of(run: Run) -> dict[str, Any]:
    """The keys of a summary that name the run within its sweep.

    `run` is its folder, relative to the sweep's.
    """
    return {
        "name": run.point.experiment.name,
        "label": run.point.label,
        "swept": run.point.swept,
        "point": run.point.key,
        "repeat": run.repeat,
        "order": run.place,
        "run": store.run_folder(Path(), run.point.key, run.repeat).as_posix(),
    }


def noise(
    load_before: float | None, time_before: tuple[int, int] | None
) -> dict[str, float | None]:
    """The machine's other load: before the run (load average) and during it (stolen processor
    time).

    Args:
        time_before: the result of `processor_time` before the run.
    """
    return {"load_average": load_before, "stolen_share": stolen_share(time_before)}


def measure_run(run: Run, engines: Engines, env: dict[str, Any]) -> Result:
    """Measure a run: the files of its folder and its summary. An error becomes a failed run.

    Args:
        env: the environment of this process.
    """
    experiment = run.point.experiment
    load_before = load_average()
    time_before = processor_time()
    try:
        llm = engines.get(experiment)
        measured = measure(llm, run.point, run.repeat)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        env = {**env, **noise(load_before, time_before)}
        return failed_run(run, env, reason, traceback.format_exc())
    summary = {
        **_summary_head(run, env),
        "failed": measured.failed,
        "workload": measured.workload.describe(),
        "metrics": measured.summary,
    }
    files = run_files(run, llm, measured)
    if measured.logs:
        files |= recordings.files(measured.logs)
        # as this config names it: a copy of a user's policy file is beside the recording
        policy = yaml_words.load(files["config.yaml"])["engine"]["policy"]
        summary["recording"] = recordings.about(
            measured.requests, measured.steps, len(measured.logs), policy
        )
    startup = {**llm.startup, "total": engines.startup_seconds[engine_key(experiment)]}
    facts = _engine_facts(experiment, llm, startup)
    files["env.json"] = store.json_text({**env, **facts, **noise(load_before, time_before)})
    return {**files, "summary.json": store.json_text(summary)}, summary


def _engine_facts(experiment: Experiment, llm: Any, startup: dict[str, float]) -> dict[str, Any]:
    """What env.json says of the engine: kernels, options as they were resolved, and start-up."""
    resolved = dataclasses.asdict(llm.engine.config)
    facts: dict[str, Any] = {
        "attention_impl": resolved["attention_impl"],
        "linear_impl": resolved["linear_impl"],
        "engine": resolved,
        "startup": startup,
    }
    if sentence := kept_blocks.sentence(llm.engine.scheduler_state.config):
        facts["layers"] = sentence
    if experiment.pools:  # the engines of two pools differ
        facts["engine"] = {
            name: dataclasses.asdict(getattr(llm, name).engine.config) for name in POOLS
        }
        sections = {name: pool_experiment(experiment, name).simulate for name in POOLS}
        facts["simulate"] = {
            name: dataclasses.asdict(simulate) for name, simulate in sections.items() if simulate
        }
    elif experiment.simulate:
        facts["simulate"] = dataclasses.asdict(experiment.simulate)
    elif resolved["mesh"]:
        facts["placement"] = str(llm.engine.model.placement)
    return facts


def failed_run(run: Run, env: dict[str, Any], reason: str, trace: str) -> Result:
    """The files and the summary of a run that has no numbers.

    Args:
        env: the environment.
        trace: the text of error.txt.
    """
    summary = {**_summary_head(run, env), "failed": reason, "workload": None, "metrics": None}
    files = {
        **config_files(run, run.point.experiment.engine_config),
        "env.json": store.json_text(env),
        "error.txt": trace,
    }
    return {**files, "summary.json": store.json_text(summary)}, summary


def _summary_head(run: Run, env: dict[str, Any]) -> dict[str, Any]:
    """The keys of a summary that say which run it is, and which code and device made it."""
    simulate = run.point.experiment.simulate
    return {
        "schema": store.SCHEMA,
        **head_of(run),
        "commit": env["commit"],
        "source": env["source"],
        "jax": env["versions"]["jax"],
        "device": simulate.name if simulate else env["device"]["kind"],
        "model": what_ran.model(run.point.experiment),
    }


def run_files(run: Run, llm: Any, measured: Measured) -> dict[str, str]:
    """config.yaml with its copies, requests.jsonl and (unless it keeps sums) steps.jsonl of a run.

    Times are rounded to microseconds.

    Some columns are only in some runs: columns of drafts with speculation, `replica` with several
    engines, `transfers` with pools, `predicted` and those of GROUPING if requests have them.
    """
    experiment = run.point.experiment
    hidden: set[str] = set()  # columns that this run does not have
    if not (experiment.replicas or experiment.pools):
        hidden.add("replica")
    if not experiment.pools:
        hidden.add("transfers")
    if not llm.engine.config.speculative:
        hidden.update(speculation.COLUMNS)
    if experiment.workload.predicted is None:
        hidden.add("predicted")
    hidden.update(
        name
        for name in GROUPING
        if all(
            getattr(request, name) == RequestRecord._field_defaults[name]
            for request in measured.requests
        )
    )

    def request_row(request: RequestRecord) -> dict[str, Any]:
        row = {key: value for key, value in request._asdict().items() if key not in hidden}
        row["branches"] = [_branch_row(branch) for branch in request.branches]
        if experiment.pools:
            row["transfers"] = [_rounded(transfer._asdict()) for transfer in request.transfers]
        return row

    files = {
        **config_files(run, experiment.engine_config if experiment.pools else llm.engine.config),
        "requests.jsonl": store.json_lines(map(request_row, measured.requests)),
    }
    if experiment.records == "full":
        steps = [
            {key: value for key, value in step._asdict().items() if key not in hidden}
            for step in measured.steps
        ]
        files["steps.jsonl"] = store.json_lines(map(_rounded, steps))
    return files


def _branch_row(branch: BranchRecord) -> dict[str, Any]:
    """The row of a branch; only a run that keeps sums has `counted`."""
    row = branch._asdict() | {"token_times": [round(time, 6) for time in branch.token_times]}
    if branch.counted is None:
        del row["counted"]
    return row


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()
    }


def config_files(run: Run, engine: Any) -> dict[str, str]:
    """The text of config.yaml, which runs this point again, and the copies of files beside it.

    The config is the experiment without its sweep, with the engine as it was resolved. With pools,
    `engine` is what was given: each pool resolves it with its own values, to other lengths and
    blocks.

    A small workload file and the user's own files of Python are copied. Other paths in the config
    (a model, a large file, a fitted run) are absolute or the user's own, and must still exist.
    """
    experiment = run.point.experiment
    values = dataclasses.asdict(experiment)
    values["engine"] = {
        field.name: getattr(engine, field.name) for field in dataclasses.fields(EngineConfig)
    }
    del values["cache_tokens"], values["sampling"]["max_tokens"]
    copies = {}
    if run.point.source:
        values["workload"]["file"] = run.point.source
        if len(run.point.content) <= MAX_COPY:
            copy = f"workload{Path(run.point.source).suffix}"
            copies[copy] = run.point.content
            values["workload"]["file"] = copy
    # a section, its key that may name a user's own file, and the name of the copy
    with_files: list[tuple[Any, Any, str]] = [(values["engine"], "policy", "policy.py")]
    if isinstance(experiment.workload, Own):
        with_files.append((values["workload"], "kind", "own_workload.py"))
    values["metrics"] = list(values["metrics"])
    with_files += [(values["metrics"], i, f"metric{i}.py") for i in range(len(values["metrics"]))]
    sections = [values] + [values["pools"][name] for name in POOLS if experiment.pools]
    for i, section in enumerate(sections):
        if section["simulate"] and section["simulate"]["cost"]:
            with_files.append((section["simulate"], "cost", f"cost{i}.py"))
    if experiment.replicas:
        with_files.append((values["replicas"], "router", "router.py"))
    if experiment.pools:
        with_files += [(values["pools"][name], "router", f"{name}_router.py") for name in POOLS]
    for section, key, copy in with_files:
        name = own_name(section[key])
        if name.is_file and Path(name.module).is_file():
            copies[copy] = Path(name.module).read_text(encoding="utf-8")
            section[key] = name._replace(module=copy).text
    head = (
        f"# Point {run.point.key}, repeat {run.repeat}.\n"
        "# python -m experiments.run THIS_FILE measures it again.\n"
    )
    return {"config.yaml": head + store.yaml_text(values), **copies}
