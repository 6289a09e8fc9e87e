"""The report: axes from the data, sentences that match the numbers, a self-contained page."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import compare, report
from experiments.analysis import (
    fairness,
    headline,
    plots,
    report_figures,
    sweep_points,
)
from experiments.analysis.sweep_points import GOODPUT, THROUGHPUT, TTFT, Axes
from experiments.core import store
from experiments.core.overrides import short_names
from experiments.core.selection import value_text
from tests.experiments.core.summaries import BASE, changed_workload, run_files


def run(
    order: int,
    repeat: int,
    swept: dict[str, Any],
    rate: float,
    gap: float = 0.05,
    goodput: dict[str, float] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    label = (
        ", ".join(f"{name}={value_text(swept[path])}" for path, name in short_names(swept).items())
        or "one point"
    )
    spread = {"count": 9, "mean": gap, "p50": gap, "p90": gap, "p99": gap, "max": gap}
    metrics = {
        "output_tokens_per_s": rate,
        "ttft_s": {**spread, "p50": 10 * gap},
        "itl_s": spread,
        "e2e_s": spread,
        "steps": 40,
        "device_s": spread,
        "host_s": {**spread, "mean": gap / 9},
        "padding_share": 0.25,
        "fragmentation_share": 0.1,
        "blocks_saved_share": 0.0853,
        "prefix_hit_share": 0.3,
        "slots_used": {"mean": 90.0, "peak": 128},
        "preemptions": 0,
        "goodput": goodput,
        "tokens_sha256": "same",
    }
    return {
        "schema": 1,
        "name": "unit",
        "label": label,
        "swept": swept,
        "point": f"p{order}",
        "repeat": repeat,
        "order": order,
        "run": f"p{order}/{repeat}",
        "failed": None,
        "metrics": metrics,
        **fields,
    }


GRID = [
    run(
        order=2 * i + j,
        repeat=repeat,
        swept={"engine.block_size": size, "engine.max_num_batched_tokens": budget},
        rate=rate + repeat,
        gap=gap,
    )
    for i, size in enumerate((8, 16, 128))
    for j, (budget, rate, gap) in enumerate(
        ((64, 100.0 + i, 0.05), (256, 200.0 + 40 * i, 0.04 + 0.02 * i))
    )
    for repeat in range(3)
]
ABOUT = {
    "name": "unit <test>",
    "question": "How much?",
    "command": "python -m experiments.run configs/unit.yaml",
}
POLICIES = [
    run(
        order=4 * i + j,
        repeat=repeat,
        swept={"engine.policy": policy, "workload.arrivals.rate": rate},
        rate=100.0 * rate + faster + 10 * repeat,
        workload={"requests": repeat},
        goodput={"requests_per_s": rate, "share": 0.9},
    )
    for i, (policy, faster) in enumerate((("fcfs", 0.0), ("mine", 5.0)))
    for j, rate in enumerate((1.0, 2.0))
    for repeat in range(3)
]


def test_repeats_fold_into_points():
    rows = sweep_points.points(GRID)
    assert [row.repeats for row in rows] == [3] * 6
    assert rows[0].values["output_tokens_per_s"] == (101.0, 100.0, 102.0)
    assert rows[0].values["itl_s.p50"].middle == pytest.approx(50.0)  # milliseconds
    assert rows[0].swept == {"block_size": 8, "max_num_batched_tokens": 64}
    assert "goodput.requests_per_s" not in rows[0].values
    noisy = [run(0, repeat, {}, rate) for repeat, rate in enumerate((100.0, 98.0, 40.0))]
    # the median
    assert sweep_points.points(noisy)[0].values["output_tokens_per_s"] == (98.0, 40.0, 100.0)
    partly = [run(0, 0, {}, 100.0), run(0, 1, {}, 1.0, failed="it broke")]
    assert sweep_points.points(partly)[0].values["output_tokens_per_s"] == (100.0, 100.0, 100.0)


@pytest.mark.parametrize(
    ("swept", "axes"),
    [
        ([{"engine.block_size": b, "engine.max_num_batched_tokens": t} for b in (8, 16) for t in (1, 2)],
         Axes("block_size", ("max_num_batched_tokens",))),
        ([{"seed": s, "engine.dtype": d, "workload.rate": r} for s in (1, 2) for d in "ab" for r in (0.5, 2.0)],
         Axes("seed", ("dtype", "rate"))),
        ([{"engine.dtype": d} for d in "ab"], Axes(None, ("dtype",))),
        ([{"seed": 1}, {"engine.block_size": 8}], Axes(None, ("seed", "block_size"))),
        ([{}], Axes(None, ())),
    ],
)  # fmt: skip
def test_axes_follow_swept_keys(swept: list[dict[str, Any]], axes: Axes):
    rows = sweep_points.points([run(i, 0, values, 100.0) for i, values in enumerate(swept)])
    assert sweep_points.choose_axes(rows) == axes
    assert sum(map(len, sweep_points.lines(rows, axes).values())) == len(rows)


def sentences(runs: list[dict[str, Any]]) -> str:
    rows = sweep_points.points(runs)
    return " ".join(headline.result_sentences(runs, rows, sweep_points.choose_axes(rows)))


def test_sentences_match_numbers():
    text = sentences(GRID)
    best = "block_size=128, max_num_batched_tokens=256"
    assert f"Highest output throughput: {best}, 281 tokens/s (280 to 282 over 3 repeats)" in text
    assert "; the other end is block_size=8, max_num_batched_tokens=64 (101). The diff" in text
    assert "The difference from every other point is shown." in text
    assert "Repeats of one point differ by up to 2.0%" in text
    assert "medians of throughput differ by factors of 1.02 to 1.40" in text
    assert text.count("from every other point has no noise, so it is of this workload.") == 2
    assert "All 18 runs generated exactly the same tokens." in text


def test_sentences_state_missing_repeats_and_failures():
    single_runs = [run(0, 0, {"seed": 1}, 100.0), run(1, 0, {"seed": 2}, 90.0)]
    single_runs[1]["metrics"]["tokens_sha256"] = "other"
    text = sentences(single_runs)
    no_best_point = "No point is shown to have the highest output throughput, as a point that ran once has no known noise: "
    best = (
        "seed=1 has the best median, 100 tokens/s (one run); no difference is shown from the other"
    )
    assert f"{no_best_point}{best} point; " in text
    assert "The 2 runs generated 2 different sets of tokens." in text
    equal = [run(order, 0, {"seed": order}, 100.0) for order in range(3)]
    assert "All 3 points have the same output throughput, 100 tokens/s (one run)." in sentences(
        equal
    )
    broken = [run(0, 0, {}, 1.0, failed="x", metrics=None)]
    assert sentences(broken) == "All 1 runs failed; there is no result."
    assert "1 of 3 runs failed and are left out." in sentences([*single_runs, *broken])


def test_targets_come_first():
    text = sentences(POLICIES)
    assert text.startswith(
        "90 % of the requests met the targets. No point is shown to have the highest goodput: "
    )
    assert "over 3 repeats); no difference is shown from policy=mine, rate=2.0; the other" in text
    half_met = [
        {**row, "metrics": {**row["metrics"], "goodput": {"share": 0.5}}} for row in POLICIES[:3]
    ]
    both_ends = "50 to 90 % of the requests met the targets (medians of the points)."
    assert sentences([*half_met, *POLICIES[3:]]).startswith(both_ends)
    page = page_of(POLICIES)
    assert "highest goodput" in page
    assert "policy=fcfs, rate=2.0; not shown against 1 other point<" in page


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_pareto_front_matches_brute_force(points: list[tuple[int, int]]):
    def dominated(at: tuple[int, int]) -> bool:
        return any(cost <= at[0] and gain >= at[1] and (cost, gain) != at for cost, gain in points)

    front = sweep_points.pareto(points)
    assert sorted(front) == [place for place, at in enumerate(points) if not dominated(at)]
    assert [points[place] for place in front] == sorted(points[place] for place in front)


def page_of(runs: list[dict[str, Any]]) -> str:
    drawn = report.prepare(runs, report.Choice())
    sections = report.draw(ABOUT, runs, drawn)
    return report.page(ABOUT, runs, [{}] * len(runs), drawn, sections)


class Tags(html.parser.HTMLParser):
    """Fails on a tag that is closed out of order, and collects addresses."""

    VOID = ("meta", "wbr", "br", "hr", "link", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_self_contained():
    swept = {"engine.block_size": 4, "engine.max_num_batched_tokens": 64}
    failed = run(9, 0, swept, 1.0, failed="a < b", metrics=None)
    page = page_of([*GRID, failed])
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    assert all(address.startswith("#") for address in tags.addresses)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    assert "unit &lt;test&gt;" in page
    assert "a &lt; b" in page
    assert page.count("<svg") == 13  # all figures of a grid
    # every placeholder became a variable
    assert re.findall(r"#0[12][0-9a-f]{4}\b", page.partition("<main>")[2]) == []
    assert page.count("var(--s1)") > page.count("var(--s7)")


def test_report_is_written_from_run_folder(tmp_path):
    """The fastest run has a plot of its steps; a speculating one, the numbers of its drafts."""
    drafts = {"drafts": 40, "accepted": 30, "acceptance": 0.75, "tokens_per_decode": 2.5}
    runs = [run(order, 0, {"engine.max_num_seqs": 2**order}, 100.0 + order) for order in (0, 1)]
    for summary in runs:
        summary["metrics"]["speculation"] = drafts
    store.write_file(tmp_path / "runs.jsonl", store.json_lines(runs))
    env = {"commit": "c0ffee", "dirty": True, "python": "3.11.0", "stolen_share": 0.02}
    env |= {"device": {"platform": "cpu", "kind": "cpu"}}
    env |= {"cpu": {"model": "A processor", "usable_cores": 2}}
    step = {"sequences": 2, "waiting": 1, "tokens": 5, "padded_tokens": 8}
    step |= {"blocks_used": 3, "num_blocks": 12, "drafts": 3, "accepted": 2}
    steps = [{**step, "started": 0.5 * i, "seconds": 0.5} for i in range(300)]
    for order in (0, 1):
        facts = {"engine": {"max_num_seqs": 2**order}, "startup": {"compile": 20.0 + order}}
        files = {
            "env.json": store.json_text({**env, **facts}),
            "steps.jsonl": store.json_lines(steps),
        }
        store.write_run(tmp_path / f"p{order}" / "0", files)
    page = report.write(tmp_path).read_text()
    assert "of the point with the highest median throughput, max_num_seqs=2." in page
    assert "c0ffee, with uncommitted changes" in page
    assert "compile 20 to 21 s" in page
    assert re.search(r"acceptance<small>%</small>.*>75<", page, re.DOTALL)
    table = sweep_points.text_table(sweep_points.points(runs)).splitlines()
    assert table[1].split()[-2:] == ["75", "2.50"]


def test_folders_without_results_are_reported(tmp_path, capsys):
    failed = run(0, 0, {}, 1.0, failed="x", metrics=None)
    assert "there is no result" in page_of([failed])
    with pytest.raises(ValueError, match="contains no runs"):
        report.write(tmp_path)
    assert report.main([str(tmp_path / "no")]) == 2
    assert "error: there is no folder" in capsys.readouterr().err


def test_marks_say_where_curves_differ():
    drawn = report.prepare(POLICIES, report.Choice())
    plot = plots.metric_plot(drawn.rows, drawn.axes, THROUGHPUT)
    assert plot is not None
    tips = re.findall(r"<title>policy=mine: (.*)</title>", plot.svg())
    assert len(tips) == 2
    assert all(tip.endswith("higher: shown, over 3 pairs of repeats") for tip in tips)
    equal = plots.metric_plot(drawn.rows, drawn.axes, TTFT)
    assert equal is not None
    assert equal.svg().count(", the same in every repeat, over 3 pairs") == 2
    note = report_figures.axes_note(drawn.rows, drawn.axes)
    assert "compare each other line with policy=fcfs" in note
    alone = report.prepare([row for row in POLICIES if row["repeat"] == 0], report.Choice())
    assert "Marks above" not in report_figures.axes_note(alone.rows, alone.axes)


@pytest.mark.parametrize(
    ("lacking", "marked"), [("fcfs", []), ("mine", [2, 2]), ("", [1, 1, 2, 2])]
)
def test_marks_have_the_colour_of_their_line(lacking: str, marked: list[int], monkeypatch):
    third_policy = [
        {**row, "point": f"third{row['point']}", "swept": {**row["swept"], "engine.policy": "z"}}
        for row in POLICIES[6:]
    ]
    runs = [
        {**row, "metrics": {**row["metrics"], "goodput": None}}
        if row["swept"]["engine.policy"] == lacking
        else row
        for row in [*POLICIES, *third_policy]
    ]
    marks = []

    def mark_above(self, x, height, index, kind, words) -> None:
        marks.append((index, words))

    monkeypatch.setattr(plots.Plot, "mark_above", mark_above)
    drawn = report.prepare(runs, report.Choice())
    plots.metric_plot(drawn.rows, drawn.axes, GOODPUT)
    assert [index for index, _ in marks] == marked
    names = {1: "policy=mine: ", 2: "policy=z: "}
    assert all(words.startswith(names[index]) for index, words in marks)
    assert all("policy=fcfs, " in words for _, words in marks)
    assert "line with policy=fcfs" in report_figures.axes_note(drawn.rows, drawn.axes)


def test_x_facet_and_y_are_chosen():
    choice = report.Choice(facet="engine.policy", y=("ttft_p99", "steps"))
    drawn = report.prepare(POLICIES, choice)
    assert drawn.axes == Axes("rate", (), "policy")
    figures = [
        figure
        for metric in drawn.chosen
        for figure in report_figures.metric_figures(drawn.rows, drawn.axes, metric)
    ]
    assert [figure.title for figure in figures] == [
        "Time to first token, p99, policy=fcfs",
        "Time to first token, p99, policy=mine",
        "Steps, policy=fcfs",
        "Steps, policy=mine",
    ]
    drawings = [figure.draw() for figure in figures[:2]]
    limits = {drawing.axes.get_ylim() for drawing in drawings if drawing is not None}
    assert len(limits) == 1, "facets compare"
    by_policy = report.prepare(POLICIES, report.Choice(x="policy"))
    assert by_policy.axes == Axes("policy", ("rate",))
    (figure,) = report_figures.metric_figures(by_policy.rows, by_policy.axes, THROUGHPUT)
    plot = figure.draw()
    assert plot is not None
    names = [label.get_text() for label in plot.axes.get_xticklabels()]
    assert names == ["fcfs", "mine"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--x", "rates"], r"--x is 'rates'; it must be one of 'engine.policy', 'workload.arr"),
        (["--facet", "engine.polcy"], r"--facet is 'engine.polcy'.*did you mean 'engine.policy'"),
        (["--x", "rate", "--facet", "workload.arrivals.rate"], "--x and --facet are both 'rate'"),
        (["--y", "ttft_s.p98"], r"--y is 'ttft_s.p98'.*did you mean 'ttft_s.p9"),
    ],
)
def test_unknown_choice_names_what_there_is(options: list[str], words: str, tmp_path, capsys):
    store.write_file(tmp_path / "runs.jsonl", store.json_lines(POLICIES))
    assert report.main([str(tmp_path), *options]) == 2
    assert re.search(words, capsys.readouterr().err)
    single = tmp_path / "single"
    store.write_file(single / "runs.jsonl", store.json_lines([run(0, 0, {}, 1.0)]))
    assert report.main([str(single), "--x", "rate"]) == 2
    assert "--x is 'rate', and nothing is swept; leave it out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")  # of matplotlib: nothing is left of the axes
def test_long_names_leave_room_for_the_axes(tmp_path):
    policies = ["fcfs", *({"name": "deadline", "targets": [["chat", n]] * 4} for n in (1.5, 2.5))]
    runs = [run(i, 0, {"engine.policy": policy}, 100.0 + i) for i, policy in enumerate(policies)]
    store.write_file(tmp_path / "runs.jsonl", store.json_lines(runs))
    assert report.main([str(tmp_path), "--format", "svg"]) == 0


def test_figures_are_written_as_files(tmp_path, capsys):
    store.write_file(tmp_path / "runs.jsonl", store.json_lines(POLICIES[:1]))
    assert report.main([str(tmp_path), "--format", "svg", "pdf"]) == 0
    name = tmp_path / "figures" / "time-of-a-step-mean-time-of-a-step"
    svg = name.with_suffix(".svg")
    pdf = name.with_suffix(".pdf")
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths == [tmp_path / "report.html", svg, pdf]
    text = svg.read_text()
    assert "#0b6fb0" in text
    assert not re.search(r"#01020\d|#02..07|var\(--|tip-", text), "placeholders and targets"
    assert pdf.read_bytes().startswith(b"%PDF")


def test_chosen_figures_are_written_alone(tmp_path, capsys):
    store.write_file(tmp_path / "runs.jsonl", store.json_lines(POLICIES))
    store.write_file(tmp_path / "figures" / "earlier.svg", "")
    assert report.main([str(tmp_path), "--y", "ttft_p99", "--format", "svg"]) == 0
    path = tmp_path / "figures" / "chosen-numbers-time-to-first-token-p99.svg"
    note = f"note: 1 other files in {path.parent} are of earlier commands"
    assert capsys.readouterr().out.splitlines() == [str(path), note]
    assert not (tmp_path / "report.html").exists()


def test_files_name_their_axes_and_the_key_of_their_colours(tmp_path):
    drawn = report.prepare(POLICIES, report.Choice(y=("goodput",)))
    texts = []
    for section in report.draw_chosen(drawn):
        for figure in section.figures:
            plot = figure.draw(palette=plots.PRINT)
            assert plot is not None
            key, entries = section.legend or ("", ())
            plot.save(tmp_path / "figure.svg", figure.title, entries, key)
            (legend,) = plot.figure.legends
            texts += [legend.get_title().get_text(), *[text.get_text() for text in legend.texts]]
            texts.append(plot.axes.get_ylabel())
            on_page = figure.draw()
            assert on_page is not None
            assert on_page.axes.get_ylabel() == "", "the caption has it"
    assert texts == ["policy", "fcfs", "mine", "Goodput, requests/s"]


@pytest.mark.slow
def test_a_page_has_the_fairness_between_users_and_the_service_of_classes(tmp_path, capsys):
    classes = [{"name": "chat", "ttft": 0.02, "itl": 0.01}, {"name": "batch", "e2e": 30.0}]
    raw = {
        **BASE,
        "workload": {**changed_workload(count=12), "users": 3, "classes": classes},
        "sweep": {"grid": {"engine.policy": ["fcfs", "fair"]}},
    }
    folder = run_files(tmp_path, raw)
    named = fairness.with_fairness(store.read_runs(folder))
    assert all(1 / 3 < row["metrics"]["fairness"]["jain"] <= 1 for row in named)
    page = report.write(folder).read_text()
    assert "<h2>Fairness</h2>" in page
    assert "Jain&#39;s index of users&#39; speeds" in page
    assert "Jain's index of n users" in page
    for words in (
        "<h2>Classes</h2>",
        "Requests of chat that met its targets",
        "Mean QoE of chat",
        "<h2>Service of users</h2>",
        "Service, policy=fcfs",
        "Largest difference of service of two backlogged users",
    ):
        assert words in page
    assert "Mean QoE of batch" not in page, "it has no targets of tokens"
    without_users = page_of(POLICIES)
    for words in ("Jain", "Classes", "QoE", "Service"):
        assert words not in without_users
    sides = [str(folder), "policy=fcfs", str(folder), "policy=fair"]
    assert compare.main([*sides, "--metric", "classes.chat.goodput.share"]) == 0
    assert "classes.chat.goodput.share" in capsys.readouterr().out


def test_figures_with_like_titles_have_files_of_their_own(tmp_path):
    figures = [
        report_figures.Figure(title, lambda palette, title=title: plots.Plot(title, palette))
        for title in ("x=mine.py:A", "x=mine.py:a", "x=Ж", "x=Я")
    ]
    section = report_figures.Section("Latency", "", figures)
    paths = report_figures.export([section], tmp_path, "svg", simulated=False)
    assert len(paths) == 4
    assert sorted(tmp_path.iterdir()) == sorted(set(paths))
    assert paths[0].name == "latency-x=mine.py-a.svg"


@pytest.mark.parametrize(
    ("waiting", "sentence"),
    [
        ({}, "No request waited: the policy decided nothing."),
        ({2.0: '"waiting":3'}, "No request waited at rate=1.0: the policy decided nothing there."),
        ({1.0: '"preempted":1', 2.0: '"waiting":1'}, ""),
        ({1.0: None, 2.0: None}, ""),
    ],
)
def test_report_says_where_a_policy_decided_nothing(waiting: Any, sentence: str, tmp_path):
    runs = []
    for row in POLICIES:
        folder = tmp_path / row["run"]
        runs.append({**row, "run": str(folder)})
        fields = waiting.get(row["swept"]["workload.arrivals.rate"], '"waiting":0,"preempted":0')
        if fields is not None:
            steps = ['{"step":0,"waiting":0,"preempted":0}\n', "{" + fields + "}\n"]
            store.write_run(folder, {"steps.jsonl": "".join(steps)})
    assert report.policy_idle(runs) == sentence
    other_keys = [{**row, "swept": {"seed": 1}} for row in runs]
    assert report.policy_idle(other_keys) == ""
