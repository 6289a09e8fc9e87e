"""report.html of a sweep, one self-contained file.

python -m experiments.report FOLDER                                    draw it again
python -m experiments.report FOLDER --x rate --facet policy --y ttft_p99     choose its figures
python -m experiments.report FOLDER --format pdf         and write each figure as a file
python -m experiments.report FOLDER --y ttft_p99 --format pdf     write the chosen figures alone
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from experiments.analysis import fairness, headline, latencies, pages, sweep_points
from experiments.analysis.differences import lead
from experiments.analysis.sweep_points import (
    GOODPUT,
    ITL,
    JAIN,
    SERVICE_DIFFERENCE,
    SPECULATION,
    TABLE,
    THROUGHPUT,
    TTFT,
    Axes,
    Metric,
    PointRow,
    number,
)
from experiments.core import recordings, selection, store
from experiments.core.optional_imports import require
from experiments.core.overrides import short_names
from experiments.core.selection import value_text
from experiments.core.service import Service, groups_of, service_over_time
from experiments.simulation.cost import SIMULATED
from pagedjax.options.own_names import names_own_value, own_name

if TYPE_CHECKING:
    from experiments.analysis.report_figures import Section

FORMATS = ("svg", "pdf")
MOST_CURVES = 8  # points, and users, whose service is shown over time
FIGURES = "figures"  # the folder of exported figures, beside the page
SLOWEST = {"ttft_s": "first token", "e2e_s": "end to end"}


class Choice(NamedTuple):
    """The figures that a user chose. The report chooses what is None.

    x, facet: swept keys.
    y: numbers of the summaries, which get figures of their own.
    """

    x: str | None = None
    facet: str | None = None
    y: tuple[str, ...] = ()


class FigureData(NamedTuple):
    """What figures show: the points, their axes, and the numbers that were chosen."""

    rows: list[PointRow]
    axes: Axes
    chosen: tuple[Metric, ...] = ()


def write(folder: Path) -> Path:
    """Draw the report of the sweep in `folder`, and return its path.

    Raises:
        ValueError: the folder has no runs.
    """
    page_path, *_ = write_chosen(folder)
    return page_path


def write_chosen(
    folder: Path, choice: Choice | None = None, formats: Sequence[str] = ()
) -> list[Path]:
    """Draw the report of the sweep in `folder` with chosen figures.

    Args:
        formats: those of FORMATS in which each figure is written, into a folder beside the page.
            With chosen numbers, only their figures are written, and the page is left as it is.

    Returns:
        The paths that were written, the page first.

    Raises:
        ValueError: the folder has no runs, or there is no such key or number.
    """
    runs = fairness.with_fairness(store.read_runs(folder))
    try:
        about = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        about = {"name": folder.name, "question": "", "command": ""}
    data = prepare(runs, choice or Choice())
    is_simulated = bool(simulation(about, runs))
    paths = []
    if formats and data.chosen:
        sections = draw_chosen(data)
    else:
        sections = draw(about, runs, data)
        text = page(
            about,
            runs,
            [environment(run) for run in runs],
            data,
            sections,
            idle=policy_idle(runs),
            recorded=recording_rows(runs, folder),
        )
        paths.append(folder / "report.html")
        store.write_file(paths[0], text)
    for ending in formats:
        from experiments.analysis import report_figures

        paths += report_figures.export(sections, folder / FIGURES, ending, simulated=is_simulated)
    return paths


def prepare(runs: Sequence[dict[str, Any]], choice: Choice) -> FigureData:
    """The points, axes and chosen numbers of the figures.

    Raises:
        ValueError: the runs have no such key or number as the choice names.
    """
    names = short_names(selection.swept_keys(runs))

    def short_key(option: str, name: str | None) -> str | None:
        return names[selection.key_of(option, name, list(names))] if name else None

    x = short_key("--x", choice.x)
    facet = short_key("--facet", choice.facet)
    if facet is not None and facet == x:
        raise ValueError(
            f"--x and --facet are both {facet!r}; give two keys, or leave one of them out"
        )
    chosen = tuple(sweep_points.find_metric("--y", name, runs) for name in choice.y)
    rows = sweep_points.points(runs, tuple(dict.fromkeys((*TABLE, *chosen))))
    return FigureData(rows, sweep_points.choose_axes(rows, x, facet), chosen)


def draw(about: dict[str, Any], runs: Sequence[dict[str, Any]], data: FigureData) -> list[Section]:
    """The figures of a sweep, in sections. Reads requests and steps from the runs' folders."""
    if not data.rows:
        return []
    require("matplotlib")
    from experiments.analysis import report_figures

    groups = report_figures.distribution_points(data.rows, data.axes).values()
    keys = [row.key for group in groups for row in group]
    samples, left_out = latencies.read(runs, keys)
    return report_figures.sections(
        data.rows,
        data.axes,
        samples,
        fastest_steps(runs),
        left_out=left_out,
        slo=dict(about.get("facts", [])).get("Targets", ""),
        chosen=data.chosen,
        services=services(runs, data.rows),
    )


def draw_chosen(data: FigureData) -> list[Section]:
    """Only the figures of the numbers that a user chose."""
    require("matplotlib")
    from experiments.analysis import report_figures

    return report_figures.draw([report_figures.chosen_section(data.rows, data.axes, data.chosen)])


def services(
    runs: Sequence[dict[str, Any]], rows: Sequence[PointRow]
) -> dict[str, dict[str, Service]]:
    """By the label of a point, the service of each user in its first good run, if there are at most
    MOST_CURVES points and users. Reads requests from the runs' folders.
    """
    if len(rows) > MOST_CURVES:
        return {}
    curves = {}
    for row in rows:
        run = next(run for run in runs if run["point"] == row.key and not run["failed"])
        path = Path(run["run"])
        if not 1 < len(run["metrics"].get("users", ())) <= MOST_CURVES:
            continue
        if run["metrics"]["service_difference"] is None or not (path / "requests.jsonl").is_file():
            continue
        requests = store.read_requests(path)
        users = groups_of(requests, lambda request: request.user)
        curves[row.label] = {user: service_over_time(members) for user, members in users.items()}
    return curves


def environment(run: dict[str, Any]) -> dict[str, Any]:
    path = Path(run["run"]) / "env.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def fastest_steps(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of steps.jsonl of the first good run of the fastest point; empty if there is no
    such file.
    """
    row = sweep_points.highest(sweep_points.points(runs), THROUGHPUT)
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
    data: FigureData | None = None,
    sections: Sequence[Section] = (),
    *,
    idle: str = "",
    recorded: Sequence[dict[str, Any]] = (),
) -> str:
    """The report's HTML. Pure.

    Args:
        about: the content of sweep.json.
        runs: the summaries.
        environments: the content of env.json of each run, in the order of `runs`.
        data: what the figures show; None: what they show without a choice.
        sections: the figures.
        idle: the sentence of `policy_idle`.
        recorded: the rows of `recording_rows`.
    """
    data = data or prepare(runs, Choice())
    rows = data.rows
    # the sentences are about the lines of all plots, so the facet's key tells lines apart too
    line_keys = data.axes.lines
    if data.axes.facet:
        line_keys = (*line_keys, data.axes.facet)
    axes = data.axes._replace(lines=line_keys, facet=None)
    sentences = headline.result_sentences(runs, rows, axes)
    return render(
        "report.html.jinja",
        about,
        runs,
        environments,
        sections,
        reading=[
            mark_labels(text, rows)
            for text in (*sentences[:1], *filter(None, [idle]), *sentences[1:])
        ],
        tiles=tiles(runs, rows),
        table=table(rows),
        recorded=recorded,
        failed=[run for run in runs if run["failed"]],
        has_users=any(JAIN.column in row.values for row in rows),
        has_service=any(SERVICE_DIFFERENCE.column in row.values for row in rows),
        has_classes=bool(sweep_points.class_metrics([row.values for row in rows])),
        speculates=any(metric.column in row.values for row in rows for metric in SPECULATION),
    )


def render(
    template: str,
    about: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    environments: Sequence[dict[str, Any]],
    sections: Sequence[Section],
    **values: Any,
) -> str:
    """The HTML of a page about a sweep.

    Args:
        template: a file beside this one.
        about: the content of sweep.json.
        values: values that this template needs beside those that all templates need.
    """
    simulated = simulation(about, runs)
    return pages.filled(
        template,
        name=about["name"],
        question=about["question"],
        command=about["command"],
        simulated=simulated,
        what_ran=about.get("facts", []),
        oracle=dict(about.get("facts", [])).get("Oracle", ""),
        sections=[section_words(section, simulated=bool(simulated)) for section in sections],
        facts=facts(environments, simulated=bool(simulated)),
        **values,
    )


def section_words(section: Section, *, simulated: bool) -> dict[str, Any]:
    """A section as the page's template reads it."""
    legend = None
    if section.legend:
        legend = {"title": section.legend[0], "entries": section.legend[1]}
    figures = [
        {
            "title": figure.title,
            "about": figure.about(simulated=simulated),
            "svg": Markup(figure.plot.svg()),
            "wide": figure.wide,
            "legend": figure.legend,
        }
        for figure in section.figures
        if figure.plot is not None
    ]
    return {
        "title": section.title,
        "note": section.note,
        "legend": legend,
        "columns": section.columns,
        "figures": figures,
    }


def policy_idle(runs: Sequence[dict[str, Any]]) -> str:
    """The sentence that says where a swept policy decided nothing, because no request waited and
    none was preempted; "" if the policy decided something everywhere, or if that is not known.
    """
    swept = selection.swept_keys(runs)
    policy_keys = [path for path in swept if f"{path}.".startswith("engine.policy.")]
    if not policy_keys:
        return ""
    names = short_names(swept)
    idle: dict[str, bool] = {}
    for run in runs:
        place = ", ".join(
            f"{names[path]}={value_text(value)}"
            for path, value in run["swept"].items()
            if path not in policy_keys
        )
        if idle.get(place, True):
            is_idle = not run["failed"] and latencies.nobody_waited(Path(run["run"]))
            idle[place] = bool(is_idle)
    places = [place for place, is_idle in idle.items() if is_idle]
    if len(places) == len(idle):
        return "No request waited: the policy decided nothing."
    if not places:
        return ""
    return f"No request waited at {'; '.join(places)}: the policy decided nothing there."


def recording_rows(runs: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The recordings of the runs: their pages, the commands that show them, and the slowest
    requests. A page is a path relative to `folder`, where the report is.
    """
    rows = []
    for run in runs:
        run_folder = Path(run["run"])
        about = run.get("recording") or {}
        policy = about.get("policy", "")
        if own_name(policy).is_file:
            policy = str(run_folder / policy)
        option = f" --policy {shlex.quote(policy)}" if names_own_value(policy) else ""
        files = [
            {
                "name": path.name,
                "page": _page_beside(path, folder),
                "command": f"pagedjax view {shlex.quote(str(path))}{option}",
            }
            for path in recordings.paths(run_folder)
        ]
        by_name = {file["name"]: file for file in files}
        slowest = [
            {
                "what": SLOWEST[latency],
                "request": worst["request"],
                "seconds": number(worst["seconds"]),
                "page": by_name[worst["file"]]["page"],
                "address": f"#step={worst.get('step', 0)}&request={worst['request']}",
            }
            for latency, worst in about.get("slowest", {}).items()
            if worst["file"] in by_name
        ]
        if files:
            label = f"{run['label']}, repeat {run['repeat']}"
            rows.append({"label": label, "files": files, "slowest": slowest})
    return rows


def _page_beside(path: Path, folder: Path) -> str:
    """The page of a recording, as a link from a folder; "" if there is none."""
    page = path.with_name(recordings.page_name(path.name))
    return Path(os.path.relpath(page, folder)).as_posix() if page.is_file() else ""


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
    pattern = re.compile("|".join(map(re.escape, labels)) or "$^")  # without labels, no match
    return Markup(pattern.sub(lambda label: f"<b>{label[0]}</b>", str(escape(sentence))))


def tiles(runs: Sequence[dict[str, Any]], rows: Sequence[PointRow]) -> list[dict[str, str]]:
    """The main numbers, for the top of the page."""
    numbers = []
    for metric, title in (
        (GOODPUT, "highest goodput"),
        (THROUGHPUT, "highest throughput"),
        (TTFT, "lowest TTFT p50"),
        (ITL, "lowest ITL p50"),
    ):
        best = lead(rows, metric)
        if best is not None:
            note = best.row.label
            if best.rivals:
                plural = "s" if len(best.rivals) > 1 else ""
                note += f"; not shown against {len(best.rivals)} other point{plural}"
            numbers.append(
                {
                    "value": number(best.row.middle(metric)),
                    "unit": metric.unit,
                    "title": title,
                    "note": note,
                }
            )
    spread = sweep_points.widest_spread(rows, THROUGHPUT)
    if spread is not None:
        note = "widest range of one point, as a share of its median"
        numbers.append(
            {"value": f"{spread:.1%}", "unit": "", "title": "spread over repeats", "note": note}
        )
    num_good = sum(1 for run in runs if not run["failed"])
    note = f"{len(rows)} point{'s' if len(rows) != 1 else ''}"
    if num_good < len(runs):
        note += f", {len(runs) - num_good} failed"
    numbers.append({"value": str(num_good), "unit": "", "title": "good runs", "note": note})
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
    keys = sweep_points.short_keys(rows)
    metrics = sweep_points.shown_metrics(rows)
    best = lead(rows, THROUGHPUT)
    highest = best.row.middle(THROUGHPUT) if best else 1.0
    has_leader = best is not None and len(rows) > 1 and not best.rivals
    body = []
    for row in rows:
        cells = [
            {"text": value_text(row.swept.get(key, "")), "sort": row.swept.get(key, "")}
            for key in keys
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
        body.append({"cells": cells, "best": has_leader and row.middle(THROUGHPUT) == highest})
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
        simulated: this machine calculated the times of another machine.
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
        ("Blocks", values("layers")),
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
    parser.add_argument("--x", metavar="KEY", help="swept key of the x axis, such as rate")
    parser.add_argument(
        "--facet", metavar="KEY", help="swept key of which each value has a plot of its own"
    )
    parser.add_argument(
        "--y",
        nargs="+",
        default=[],
        metavar="NUMBER",
        help="numbers of summary.json that get figures of their own, such as ttft_p99; with "
        "--format, these figures alone are written",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        choices=FORMATS,
        default=[],
        help=f"also write each figure into FOLDER/{FIGURES}",
    )
    options = parser.parse_args(arguments)
    choice = Choice(options.x, options.facet, tuple(options.y))
    try:
        paths = write_chosen(options.folder, choice, options.format)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*paths, sep="\n")
    figures = options.folder / FIGURES
    other_figures = set(figures.iterdir()) - set(paths) if options.format else set()
    if other_figures:
        print(f"note: {len(other_figures)} other files in {figures} are of earlier commands")
    return 0


if __name__ == "__main__":
    sys.exit(main())
