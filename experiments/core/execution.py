"""One run of a point: measure it and produce the files of its folder.

An error becomes a failed run.
"""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import Any

from experiments.core import speculation, store
from experiments.core.drive import Measured, measure
from experiments.core.engines import Engines, Run, engine_key
from experiments.core.environment import load_average, processor_time, stolen_share
from experiments.core.pool_options import POOLS, of_pool
from experiments.core.records import BranchRecord, RequestRecord
from pagedjax.config import EngineConfig

Result = tuple[dict[str, str], dict[str, Any]]  # the files of a run (name -> text) and its summary
COPIED = 1 << 18  # a workload file of at most this many characters is copied into the run's folder


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
        "order": run.order,
        "run": store.run_folder(Path(), run.point.key, run.repeat).as_posix(),
    }


def noise(busy: float | None, since: tuple[int, int] | None) -> dict[str, float | None]:
    """The machine's other load: before the run (load average) and during it (stolen processor
    time).
    """
    return {"load_average": busy, "stolen_share": stolen_share(since)}


def one_run(run: Run, engines: Engines, where: dict[str, Any]) -> Result:
    """Measure one run: the files of its folder and its summary. An error becomes a failed run."""
    experiment = run.point.experiment
    before = load_average(), processor_time()
    try:
        llm = engines.get(experiment)
        measured = measure(llm, run.point, run.repeat)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return failed_run(run, {**where, **noise(*before)}, reason, traceback.format_exc())
    summary = {
        **_head(run, where),
        "failed": measured.failed,
        "workload": measured.workload.describe(),
        "metrics": measured.summary,
    }
    files = run_files(run, llm, measured)
    startup = {**llm.startup, "total": engines.startup_seconds[engine_key(experiment)]}
    resolved = dataclasses.asdict(llm.engine.config)
    impls = {name: resolved[name] for name in ("attention_impl", "linear_impl")}
    facts = {**impls, "engine": resolved, "startup": startup}
    if experiment.pools:  # their engines differ
        facts["engine"] = {
            name: dataclasses.asdict(getattr(llm, name).engine.config) for name in POOLS
        }
        simulated = {name: of_pool(experiment, name).simulate for name in POOLS}
        facts["simulate"] = {
            name: dataclasses.asdict(one) for name, one in simulated.items() if one
        }
    elif experiment.simulate:
        facts["simulate"] = dataclasses.asdict(experiment.simulate)
    elif resolved["mesh"]:
        facts["placement"] = str(llm.engine.model.placement)
    files["env.json"] = store.json_text({**where, **facts, **noise(*before)})
    return {**files, "summary.json": store.json_text(summary)}, summary


def failed_run(run: Run, where: dict[str, Any], reason: str, trace: str) -> Result:
    """The files and the summary of a run that has no numbers.

    `where`: the environment; `trace`: of error.txt.
    """
    summary = {**_head(run, where), "failed": reason, "workload": None, "metrics": None}
    files = {
        **config_files(run, run.point.experiment.engine_config),
        "env.json": store.json_text(where),
        "error.txt": trace,
    }
    return {**files, "summary.json": store.json_text(summary)}, summary


def _head(run: Run, where: dict[str, Any]) -> dict[str, Any]:
    """The keys of a summary that say which run it is, and by what it was made."""
    simulate = run.point.experiment.simulate
    made = {"commit": where["commit"], "source": where["source"], "jax": where["versions"]["jax"]}
    device = simulate.name if simulate else where["device"]["kind"]
    return {"schema": store.SCHEMA, **head_of(run), **made, "device": device}


def run_files(run: Run, llm: Any, measured: Measured) -> dict[str, str]:
    """config.yaml with its copies, requests.jsonl and (unless it keeps sums) steps.jsonl of a run.

    Times are rounded to microseconds.

    Only an engine with speculation has columns of drafts, only several engines have a column of
    theirs, and only pools have transfers.
    """
    experiment = run.point.experiment
    alone = () if experiment.replicas or experiment.pools else ("replica",)
    unmoved = () if experiment.pools else ("transfers",)
    left_out = alone if llm.engine.config.speculative else (*alone, *speculation.COLUMNS)

    def branches(request: RequestRecord) -> list[dict[str, Any]]:
        return [_branch(one) for one in request.branches]

    def columns(request: RequestRecord) -> dict[str, Any]:
        kept = {
            key: value for key, value in request._asdict().items() if key not in (*alone, *unmoved)
        }
        moved = (
            {} if unmoved else {"transfers": [_rounded(one._asdict()) for one in request.transfers]}
        )
        return kept | {"branches": branches(request)} | moved

    files = {
        **config_files(run, experiment.engine_config if experiment.pools else llm.engine.config),
        "requests.jsonl": store.json_lines(map(columns, measured.requests)),
    }
    if experiment.records == "full":
        steps = [
            {key: value for key, value in step._asdict().items() if key not in left_out}
            for step in measured.steps
        ]
        files["steps.jsonl"] = store.json_lines(map(_rounded, steps))
    return files


def _branch(branch: BranchRecord) -> dict[str, Any]:
    """Its row; `counted` is only there where it is needed."""
    row = branch._asdict() | {"token_times": [round(time, 6) for time in branch.token_times]}
    if branch.counted is None:
        del row["counted"]
    return row


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()
    }


def config_files(run: Run, engine: Any) -> dict[str, str]:
    """config.yaml, which runs this point again: the experiment without its sweep, the engine as it
    was resolved.

    With pools, `engine` is what was given: each pool resolves it with its own values, to other
    lengths and blocks.

    A small workload file, a policy's and a router's are copied beside it. Other paths in it (a
    model, a large file, a fitted run) are absolute or the user's own, and must still exist.
    """
    experiment = run.point.experiment
    values = dataclasses.asdict(experiment)
    values["engine"] = {
        field.name: getattr(engine, field.name) for field in dataclasses.fields(EngineConfig)
    }
    del values["cache_tokens"], values["sampling"]["max_tokens"]
    copies = {}
    if run.point.source:
        name = f"workload{Path(run.point.source).suffix}"
        copies = {name: run.point.content} if len(run.point.content) <= COPIED else {}
        values["workload"]["file"] = name if copies else run.point.source
    own = [(values["engine"], "policy", "policy.py")]
    own += [(values["replicas"], "router", "router.py")] if experiment.replicas else []
    own += [
        (values["pools"][name], "router", f"{name}_router.py") for name in POOLS if experiment.pools
    ]
    for section, key, copy in own:
        where, _, name = section[key].rpartition(":")
        if where.endswith(".py") and Path(where).is_file():
            copies[copy] = Path(where).read_text(encoding="utf-8")
            section[key] = f"{copy}:{name}"
    head = f"# Point {run.point.key}, repeat {run.repeat}.\n# python -m experiments.run THIS_FILE measures it again.\n"
    return {"config.yaml": head + store.yaml_text(values), **copies}
