"""report.html of a sweep, one self-contained file.

`python -m experiments.report FOLDER` draws it again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from experiments.analysis import sweep_points
from experiments.analysis.sweep_points import (
    ACCEPTANCE,
    FRAGMENTATION,
    ITL,
    ITL_P99,
    PADDING,
    PEAK_SLOTS,
    SPECULATION,
    THROUGHPUT,
    TOKENS_PER_DECODE,
    TTFT,
    TTFT_P99,
    Axes,
    PointRow,
    number,
)
from experiments.core import store
from experiments.core.optional_imports import require
from experiments.simulation.cost import SIMULATED


def write(folder: Path) -> Path:
    """Draw the report of the sweep in `folder` and return its path.

    Raises ValueError if the folder has no runs.
    """
    runs = store.read_runs(folder)
    try:
        about = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        about = {"name": folder.name, "question": "", "command": ""}
    path = folder / "report.html"
    store.write_file(
        path, page(about, runs, [environment(run) for run in runs], fastest_steps(runs))
    )
    return path


def environment(run: dict[str, Any]) -> dict[str, Any]:
    path = Path(run["run"]) / "env.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def fastest_steps(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of steps.jsonl of the first good run of the fastest point; empty without one."""
    row = sweep_points.best(sweep_points.points(runs), THROUGHPUT)
    run = next(
        (run for run in runs if row is not None and run["point"] == row.key and not run["failed"]),
        None,
    )
    path = Path(run["run"]) / "steps.jsonl" if run else None
    if path is None or not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def page(
    about: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    environments: Sequence[dict[str, Any]],
    steps: Sequence[dict[str, Any]] = (),
) -> str:
    """The report's HTML.

    Pure: summaries, env.json of each in the same order, and steps.jsonl of the fastest run.
    """
    rows = sweep_points.points(runs)
    axes = sweep_points.choose_axes(rows)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return template.get_template("report.html.jinja").render(
        name=about["name"],
        question=about["question"],
        command=about["command"],
        simulated=simulation(about, runs),
        what_ran=about.get("facts", []),
        oracle=dict(about.get("facts", [])).get("Oracle", ""),
        reading=[
            mark_labels(text, rows) for text in sweep_points.result_sentences(runs, rows, axes)
        ],
        tiles=tiles(runs, rows),
        sections=[*sections(rows, axes), *timeline(rows, steps)],
        table=table(rows),
        failed=[run for run in runs if run["failed"]],
        facts=facts(environments, simulated=bool(simulation(about, runs))),
        speculates=any(metric.column in row.values for row in rows for metric in SPECULATION),
    )


def simulation(about: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    """The sentence that says that no step ran; "" for a measured sweep."""
    devices = dict.fromkeys(run["device"] for run in runs if run.get("device"))
    names = [device for device in devices if device.startswith(SIMULATED)]
    device = about.get("simulated") or "; ".join(names)
    return f"{device.capitalize()}: no step ran, and every time is calculated." if device else ""


def mark_labels(sentence: str, rows: Sequence[PointRow]) -> Markup:
    """The sentence with the points' labels in bold."""
    # the longest match first
    labels = sorted({str(escape(row.label)) for row in rows}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, labels)) or "$^")
    return Markup(pattern.sub(lambda label: f"<b>{label[0]}</b>", str(escape(sentence))))


def axes_note(axes: Axes) -> str:
    """The axes of the plots, in words."""
    if axes.x is None:
        return "No numeric key is swept, so the points are side by side."
    per_line = f", one line for each {' and '.join(axes.lines)}" if axes.lines else ""
    return f"{axes.x} is the x axis{per_line}. Lines are medians over repeats; bands are the range."


def sections(rows: Sequence[PointRow], axes: Axes) -> list[dict[str, Any]]:
    """The plots in groups, without empty plots."""
    if not rows:
        return []
    require("matplotlib")
    from experiments.analysis import plots

    def figures(*metrics: sweep_points.Metric) -> list[dict[str, Any]]:
        drawn = ((metric, plots.metric_plot(rows, axes, metric)) for metric in metrics)
        return [
            {"title": m.title, "unit": m.unit, "svg": Markup(svg), "better": m.better}
            for m, svg in drawn
            if svg
        ]

    def wide(title: str, svg: str | None) -> list[dict[str, Any]]:
        return [{"title": title, "unit": "", "svg": Markup(svg), "wide": True}] if svg else []

    by_line = legend(rows, axes)
    groups: list[dict[str, Any]] = [
        {
            "title": "Throughput and latency",
            "note": axes_note(axes),
            "legend": by_line,
            "figures": figures(THROUGHPUT, TTFT, ITL),
        },
        {
            "title": "Throughput against latency",
            "note": "Up and to the left is better. The dashed line joins the points that no other "
            "point beats in both.",
            "legend": by_line,
            "figures": [
                figure
                for latency in (TTFT_P99, ITL_P99)
                for figure in wide(
                    f"Throughput against {latency.short}", plots.pareto_plot(rows, axes, latency)
                )
            ],
        },
        {
            "title": "Memory",
            "note": "Slots of used blocks without a token are internal fragmentation; padding is "
            "computed without use.",
            "legend": by_line,
            "figures": figures(FRAGMENTATION, PEAK_SLOTS, PADDING),
        },
        {
            "title": "Speculation",
            "note": "A decode row gives one token in a step, and one for each draft that is "
            "accepted.",
            "legend": by_line,
            "figures": figures(ACCEPTANCE, TOKENS_PER_DECODE),
        },
        {
            "title": "Time of a step",
            "note": "Device: from dispatch until the sampled tokens are on the host. Host: "
            "schedule, pack, commit.",
            "legend": {"title": "", "entries": ["device", "host"]},
            "figures": wide("Mean time of a step", plots.time_plot(rows)),
        },
    ]
    return [group for group in groups if group["figures"]]


def timeline(rows: Sequence[PointRow], steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run over time: sequences that run and wait, tokens, and the use of the cache; of
    replicas, the first one.
    """
    fastest = sweep_points.best(rows, THROUGHPUT)
    steps = [step for step in steps if not step.get("replica")]
    if len(steps) < 2 or fastest is None:
        return []
    from experiments.analysis import plots

    edges = [steps[0]["started"], *(step["started"] + step["seconds"] for step in steps)]
    used = [100 * step["blocks_used"] / step["num_blocks"] for step in steps]
    curves: dict[str, dict[str, list[float]]] = {
        "Sequences": {
            "in the step": [step["sequences"] for step in steps],
            "waiting": [step["waiting"] for step in steps],
        },
        "Tokens": {
            "padded": [step["padded_tokens"] for step in steps],
            "computed": [step["tokens"] for step in steps],
        },
        "Cache in use": {"% of blocks with an owner": used},
    }
    if any("drafts" in step for step in steps):
        curves["Drafts"] = {
            name: [step.get(name, 0) for step in steps] for name in ("drafts", "accepted")
        }
    figures = [
        {
            "title": title,
            "unit": "",
            "svg": Markup(plots.timeline_plot(edges, series, title)),
            "legend": list(series),
        }
        for title, series in curves.items()
    ]
    start = "Replica 0 in the first" if "replica" in steps[0] else "The first"
    note = f"{start} repeat of the fastest point, {fastest.label}."
    return [{"title": "One run over time", "note": note, "figures": figures}]


def legend(rows: Sequence[PointRow], axes: Axes) -> dict[str, Any] | None:
    """The legend of the colours in order; None if there is one colour.

    A single key is its title.
    """
    if axes.x is None or not axes.lines:
        return None
    entries = list(sweep_points.lines(rows, axes))
    key, *other_keys = axes.lines
    if other_keys:
        return {"title": "", "entries": entries}
    return {"title": key, "entries": [entry.removeprefix(f"{key}=") for entry in entries]}


def tiles(runs: Sequence[dict[str, Any]], rows: Sequence[PointRow]) -> list[dict[str, str]]:
    """The main numbers, for the top of the page."""
    numbers = []
    for metric, title in (
        (THROUGHPUT, "best throughput"),
        (TTFT, "lowest TTFT p50"),
        (ITL, "lowest ITL p50"),
    ):
        row = sweep_points.best(rows, metric)
        if row is not None:
            numbers.append(
                {
                    "value": number(row.middle(metric)),
                    "unit": metric.unit,
                    "title": title,
                    "note": row.label,
                }
            )
    spread = sweep_points.widest_spread(rows, THROUGHPUT)
    if spread is not None:
        note = "widest range of one point, as a share of its median"
        numbers.append(
            {"value": f"{spread:.1%}", "unit": "", "title": "spread over repeats", "note": note}
        )
    good = sum(1 for run in runs if not run["failed"])
    note = f"{len(rows)} point{'s' if len(rows) != 1 else ''}" + (
        f", {len(runs) - good} failed" if good < len(runs) else ""
    )
    numbers.append({"value": str(good), "unit": "", "title": "good runs", "note": note})
    clipped = max(map(clipped_lengths, runs), default=0)
    if clipped:
        note = "prompts and answers of a run whose length was moved to a limit of the workload"
        numbers.append(
            {"value": str(clipped), "unit": "", "title": "clipped lengths", "note": note}
        )
    return numbers


def clipped_lengths(run: dict[str, Any]) -> int:
    """How many drawn or recorded lengths of a run were moved to their limits."""
    workload = run.get("workload") or {}
    return workload.get("clipped_prompts", 0) + workload.get("clipped_outputs", 0)


def table(rows: Sequence[PointRow]) -> dict[str, Any]:
    """Head and body of the table of points: text, sort key and range over repeats of each cell."""
    keys = sweep_points.swept_keys(rows)
    metrics = sweep_points.shown_metrics(rows)
    highest = max((row.middle(THROUGHPUT) for row in rows), default=1.0)
    body = []
    for row in rows:
        cells = [
            {"text": str(row.swept.get(key, "")), "sort": row.swept.get(key, "")} for key in keys
        ]
        cells = cells or [{"text": row.label, "sort": row.label}]
        for metric in metrics:
            spread = row.values.get(metric.column)
            cell: dict[str, Any] = {"text": "", "sort": ""}
            if spread is not None:
                cell = {"text": number(spread.middle), "sort": spread.middle}
                if spread.low < spread.high:
                    cell["range"] = f"{number(spread.low)} to {number(spread.high)}"
            if metric is THROUGHPUT:
                cell["bar"] = round(100 * row.middle(metric) / highest, 1)
            cells.append(cell)
        body.append({"cells": cells, "best": row.middle(THROUGHPUT) == highest and len(rows) > 1})
    heads = [
        {"title": Markup("_<wbr>").join(key.split("_")), "unit": ""} for key in keys or ["point"]
    ]
    heads += [{"title": metric.short, "unit": metric.unit} for metric in metrics]
    return {"heads": heads, "body": body}


def facts(
    environments: Sequence[dict[str, Any]], *, simulated: bool = False
) -> list[tuple[str, str]]:
    """The environment as (name, value) pairs. If runs differ, all values are given.

    Args:
        simulated: the machine computed times of another one.
    """

    def values(*path: str) -> str:
        texts: list[str] = []
        for env in environments:
            value: Any = env
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                texts.append(str(value))
        return ", ".join(dict.fromkeys(texts))

    versions = [f"{name} {values('versions', name)}" for name in ("jax", "jaxlib", "flax", "numpy")]
    flags = dict.fromkeys(
        f"{k}={v}" for env in environments for k, v in env.get("flags", {}).items()
    )
    loads = [env["load_average"] for env in environments if env.get("load_average") is not None]
    stolen = [
        100 * env["stolen_share"] for env in environments if env.get("stolen_share") is not None
    ]
    device = (values("device", "platform"), values("device", "kind"))
    pairs = [
        ("Device", " ".join(dict.fromkeys(filter(None, device)))),
        (
            "Calculated on" if simulated else "Processor",
            f"{values('cpu', 'model')}, {values('cpu', 'usable_cores')} cores",
        ),
        ("System", values("platform")),
        ("Python", values("python")),
        ("Libraries", ", ".join(versions)),
        ("Attention", values("attention_impl")),
        ("Products", values("linear_impl")),
        ("Code", values("source")),
        (
            "Commit",
            values("commit") + (", with uncommitted changes" if "True" in values("dirty") else ""),
        ),
        ("Flags", ", ".join(flags) or "none"),
        ("Load before a run", f"{min(loads):g} to {max(loads):g} processes" if loads else ""),
        (
            "Processor time stolen by the host",
            f"{min(stolen):.0f} to {max(stolen):.0f} % a run" if stolen else "",
        ),
        *startup_facts(environments),
    ]
    return [(name, value) for name, value in pairs if value]


def startup_facts(environments: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Start-up seconds by stage, over the engines of the sweep."""
    engines = {
        json.dumps(env["engine"], sort_keys=True): env["startup"]
        for env in environments
        if "startup" in env
    }
    stages = dict.fromkeys(stage for startup in engines.values() for stage in startup)
    spans = []
    for stage in stages:
        seconds = [startup[stage] for startup in engines.values() if stage in startup]
        unit = "" if stage == "compilations" else " s"
        span = f"{min(seconds):.3g}"
        if min(seconds) < max(seconds):
            span += f" to {max(seconds):.3g}"
        spans.append(f"{stage} {span}{unit}")
    if not spans:
        return []
    title = f"Start-up of {len(engines)} engine{'s' if len(engines) != 1 else ''}"
    return [(title, ", ".join(spans))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report",
        description="Draw a sweep's report again.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="of a sweep, such as runs/quickstart")
    options = parser.parse_args(arguments)
    try:
        print(write(options.folder))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
