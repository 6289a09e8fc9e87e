"""The report: axes from the data, sentences that match the numbers, a self-contained page."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import report
from experiments.analysis import plots, sweep_points
from experiments.analysis.sweep_points import Axes
from experiments.core import store
from experiments.core.config import short_names


def run(
    order: int, repeat: int, swept: dict[str, Any], rate: float, gap: float = 0.05, **fields: Any
) -> dict[str, Any]:
    label = (
        ", ".join(f"{name}={swept[path]}" for path, name in short_names(swept).items())
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
        "goodput": None,
        "tokens_sha256": "same",
    }
    head = {
        "schema": 1,
        "name": "unit",
        "label": label,
        "swept": swept,
        "point": f"p{order}",
        "repeat": repeat,
    }
    return {
        **head,
        "order": order,
        "run": f"p{order}/{repeat}",
        "failed": None,
        "metrics": metrics,
        **fields,
    }


GRID = [
    run(
        2 * i + j,
        repeat,
        {"engine.block_size": size, "engine.max_num_batched_tokens": budget},
        rate + repeat,
        gap,
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


def test_repeats_fold_into_points() -> None:
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
        ([{"engine.max_num_batched_tokens": t, "engine.block_size": b} for b in (8, 16) for t in (1, 2)],
         Axes("block_size", ("max_num_batched_tokens",))),
        ([{"seed": s, "engine.dtype": d, "workload.rate": r} for s in (1, 2) for d in "ab" for r in (0.5, 2.0)],
         Axes("seed", ("dtype", "rate"))),
        ([{"engine.dtype": d, "engine.max_num_batched_tokens": t} for d in "ab" for t in (1, 2)],
         Axes("max_num_batched_tokens", ("dtype",))),
        ([{"engine.dtype": d} for d in "ab"], Axes(None, ("dtype",))),
        ([{"engine.block_size": 8, "seed": s} for s in (1, 2)], Axes("seed", ())),
        ([{"seed": 1}, {"engine.block_size": 8}], Axes(None, ("seed", "block_size"))),
        ([{}], Axes(None, ())),
    ],
)  # fmt: skip
def test_axes_follow_swept_keys(swept: list[dict[str, Any]], axes: Axes) -> None:
    rows = sweep_points.points([run(i, 0, values, 100.0) for i, values in enumerate(swept)])
    assert sweep_points.choose_axes(rows) == axes
    assert sum(map(len, sweep_points.lines(rows, axes).values())) == len(rows)


def test_sentences_match_numbers() -> None:
    rows = sweep_points.points(GRID)
    text = " ".join(sweep_points.result_sentences(GRID, rows, sweep_points.choose_axes(rows)))
    best = "block_size=128, max_num_batched_tokens=256"
    worst = "block_size=8, max_num_batched_tokens=64"
    assert (
        f"Fastest is {best} with 281 output tokens/s (280 to 282 over 3 repeats): 2.78 times the slowest"
        in text
    )
    assert f"the slowest, {worst} (101)" in text
    assert (
        "Repeats of one point differ by up to 2.0%; no other point reaches into the range of the fastest."
        in text
    )
    assert (
        "block_size alone changes throughput by a factor of 1.02 to 1.40, most at max_num_batched_tokens=256"
        in text
    )
    assert (
        "the median gap between tokens at block_size=8, max_num_batched_tokens=256 (40 ms)" in text
    )
    assert "All 18 runs generated exactly the same tokens." in text


def test_sentences_state_missing_repeats_and_failures() -> None:
    single_runs = [run(0, 0, {"seed": 1}, 100.0), run(1, 0, {"seed": 2}, 90.0)]
    single_runs[1]["metrics"]["tokens_sha256"] = "other"
    rows = sweep_points.points(single_runs)
    text = " ".join(
        sweep_points.result_sentences(single_runs, rows, sweep_points.choose_axes(rows))
    )
    assert "Each point ran once, so how much of a difference is noise is not known." in text
    assert "The 2 runs generated 2 different sets of tokens." in text
    near = [
        run(0, 0, {"seed": 1}, 100.0),
        run(0, 1, {"seed": 1}, 110.0),
        run(1, 0, {"seed": 2}, 101.0),
    ]
    rows = sweep_points.points(near)
    assert "one other point reaches into the range" in " ".join(
        sweep_points.result_sentences(near, rows, sweep_points.choose_axes(rows))
    )
    broken = [run(0, 0, {}, 1.0, failed="x", metrics=None)]
    assert sweep_points.result_sentences(broken, [], Axes(None, ())) == [
        "All 1 runs failed; there is no result."
    ]
    mixed = [*single_runs, *broken]
    assert "1 of 3 runs failed and are left out." in sweep_points.result_sentences(
        mixed, sweep_points.points(mixed), Axes(None, ())
    )


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_pareto_front_matches_brute_force(points: list[tuple[int, int]]) -> None:
    def dominated(at: tuple[int, int]) -> bool:
        return any(cost <= at[0] and gain >= at[1] and (cost, gain) != at for cost, gain in points)

    front = sweep_points.pareto(points)
    assert sorted(front) == [place for place, at in enumerate(points) if not dominated(at)]
    assert [points[place] for place in front] == sorted(points[place] for place in front)


def test_pareto_plots_need_three_points() -> None:
    rows = sweep_points.points(GRID)
    axes = sweep_points.choose_axes(rows)
    svg = plots.pareto_plot(rows, axes, sweep_points.ITL_P99)
    assert svg is not None
    assert 'aria-label="Output throughput against Inter-token latency, p99"' in svg
    assert svg.count("<title>") == 6
    # the largest budget and the largest blocks are the fastest, and the slowest in latency
    best = rows[-1]
    # in its tooltip, and as a label because no point dominates it
    assert svg.count(best.label) == 2
    # another is faster and no slower: no name
    assert svg.count("block_size=8, max_num_batched_tokens=64") == 1
    assert plots.pareto_plot(rows[:2], axes, sweep_points.ITL_P99) is None
    wide = [run(i, 0, {"seed": i}, 50.0 + i, gap=0.01 * 4**i) for i in range(4)]
    rows = sweep_points.points(wide)
    # by factors
    assert "1000" in (
        plots.pareto_plot(rows, sweep_points.choose_axes(rows), sweep_points.TTFT_P99) or ""
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (71.0, "71"),
        (0.01234, "0.0123"),
        (5.25, "5.25"),
        (123.4, "123"),
        (12345.6, "12\u2009346"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert sweep_points.number(value) == text
    assert sweep_points.number(float("nan")) == "-"


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


def test_page_is_well_formed_and_self_contained() -> None:
    failed = run(
        9,
        0,
        {"engine.block_size": 4, "engine.max_num_batched_tokens": 64},
        1.0,
        failed="a < b",
        metrics=None,
    )
    page = report.page(ABOUT, [*GRID, failed], [{}] * 19)
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    assert all(address.startswith("#") for address in tags.addresses)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    assert "unit &lt;test&gt;" in page
    assert "a &lt; b" in page
    assert ABOUT["command"] in page
    assert page.count("<svg") == 3 + 2 + 3 + 1
    # every placeholder became a variable
    assert re.findall(r"#0[12][0-9a-f]{4}\b", page.partition("<main>")[2]) == []
    assert page.count("var(--s1)") > page.count("var(--s7)")


def test_pages_without_axes_or_results(tmp_path: Path) -> None:
    by_name = [
        run(i, r, {"engine.dtype": d}, 90.0 + r)
        for i, d in enumerate(("float32", "bfloat16"))
        for r in (0, 1)
    ]
    assert "No numeric key is swept, so the points are side by side." in report.page(
        ABOUT, by_name, [{}] * 4
    )
    assert "dtype=bfloat16" in report.page(ABOUT, by_name, [{}] * 4)
    assert report.page(ABOUT, [run(0, 0, {}, 90.0)], [{}]).count("<svg") == 1
    assert "there is no result" in report.page(
        ABOUT, [run(0, 0, {}, 1.0, failed="x", metrics=None)], [{}]
    )
    with pytest.raises(ValueError, match="contains no runs"):
        report.write(tmp_path)


def test_plots_with_many_lines_and_values() -> None:
    runs = [
        run(10 * i + j, 0, {"seed": i, "workload.count": j}, 5.0 + i)
        for i in range(14)
        for j in range(10)
    ]
    rows = sweep_points.points(runs)
    svg = plots.metric_plot(rows, sweep_points.choose_axes(rows), sweep_points.THROUGHPUT)
    assert svg is not None
    assert svg.count("<title>") == 140


def test_report_is_written_from_run_folder(tmp_path: Path) -> None:
    store.write_file(tmp_path / "runs.jsonl", store.json_lines(GRID))
    env = {
        "commit": "c0ffee",
        "dirty": True,
        "python": "3.11.0",
        "device": {"platform": "cpu", "kind": "cpu"},
        "cpu": {"model": "A processor", "usable_cores": 2},
        "stolen_share": 0.02,
        "engine": {"block_size": 8},
        "startup": {"load": 1.0, "compile": 20.0, "compilations": 7},
    }
    store.write_run(tmp_path / "p0" / "0", {"env.json": store.json_text(env)})
    env["engine"] = {"block_size": 16}
    env["startup"] = {"load": 1.0, "compile": 30.0, "compilations": 7}
    store.write_run(tmp_path / "p1" / "0", {"env.json": store.json_text(env)})
    page = report.write(tmp_path).read_text()
    assert re.search(r"saved by sharing<small>%</small>.*>8\.53<", page, re.DOTALL)
    assert "One run over time" not in page  # the fastest point left no steps
    assert "c0ffee, with uncommitted changes" in page
    assert "A processor, 2 cores" in page
    assert "2 to 2 % a run" in page
    assert "load 1 s, compile 20 to 30 s, compilations 7" in page


def test_timeline_shows_fastest_run(tmp_path: Path) -> None:
    store.write_file(tmp_path / "runs.jsonl", store.json_lines(GRID[-3:]))
    step = {
        "sequences": 2,
        "waiting": 1,
        "tokens": 5,
        "padded_tokens": 8,
        "blocks_used": 3,
        "num_blocks": 12,
    }
    steps = [{**step, "started": 0.5 * i, "seconds": 0.5} for i in range(300)]
    store.write_run(tmp_path / "p5" / "0", {"steps.jsonl": store.json_lines(steps)})
    page = report.write(tmp_path).read_text()
    assert (
        "The first repeat of the fastest point, block_size=128, max_num_batched_tokens=256." in page
    )
    assert "0.250 s: 25 % of blocks with an owner" in page


def speculating(order: int, repeat: int, rate: float, acceptance: float | None) -> dict[str, Any]:
    drafts = {
        "drafts": 40,
        "accepted": 30,
        "acceptance": acceptance,
        "tokens_per_decode": 2.5 + repeat,
    }
    summary = run(order, repeat, {"engine.max_num_seqs": 2**order}, rate)
    return {**summary, "metrics": {**summary["metrics"], "speculation": drafts}}


def test_numbers_of_drafts_are_shown_if_a_point_has_them(tmp_path: Path) -> None:
    words = ("Speculation", "acceptance", "decode row", "guesses of next tokens")
    plain = report.page(ABOUT, GRID, [{}] * len(GRID))
    assert not any(word in plain for word in words)
    runs = [
        speculating(order, repeat, 100.0 + order, 0.75) for order in (0, 1) for repeat in (0, 1)
    ]
    page = report.page(ABOUT, runs, [{}] * len(runs))
    assert all(word in page for word in words)
    assert re.search(
        r"acceptance<small>%</small>.*decode row<small>tokens</small>.*>75<.*>3<", page, re.DOTALL
    )
    assert "Accepted share of drafts" in page
    head, *lines = sweep_points.text_table(sweep_points.points(runs)).splitlines()
    assert head.endswith("acceptance %  decode row tokens")
    assert [line.split()[-2:] for line in lines] == [["75", "3"]] * 2
    none = sweep_points.points([speculating(0, 0, 1.0, None)])  # nothing was drafted
    assert "acceptance" not in sweep_points.text_table(none)


def test_timeline_shows_drafts(tmp_path: Path) -> None:
    runs = [speculating(order, 0, 100.0 + order, 0.75) for order in (0, 1)]
    step = {
        "sequences": 2,
        "waiting": 1,
        "tokens": 5,
        "padded_tokens": 8,
        "blocks_used": 3,
        "num_blocks": 12,
    }
    steps = [
        {**step, "started": 0.5 * i, "seconds": 0.5, "drafts": 3, "accepted": 2} for i in range(3)
    ]
    assert "3 drafts, 2 accepted" in report.page(ABOUT, runs, [{}] * 2, steps)
    assert "accepted" not in report.page(
        ABOUT, GRID[-3:], [{}] * 3, [{**step, "started": 0.0, "seconds": 1.0}] * 3
    )


def test_clipped_lengths_are_shown() -> None:
    swept = {"engine.block_size": 8}
    workload = {"clipped_prompts": 3, "clipped_outputs": 4}
    for runs, values in (
        ([run(0, 0, swept, 1.0)], []),
        ([run(0, 0, swept, 1.0, workload=workload)], ["7"]),
    ):
        tiles = report.tiles(runs, sweep_points.points(runs))
        assert [tile["value"] for tile in tiles if tile["title"] == "clipped lengths"] == values


def test_terminal_table() -> None:
    text = sweep_points.text_table(sweep_points.points(GRID)).splitlines()
    assert text[0].split()[:6] == ["point", "output", "tokens/s", "TTFT", "p50", "ms"]
    assert text[1].split()[:7] == [
        "block_size=8,",
        "max_num_batched_tokens=64",
        "101",
        "(100",
        "to",
        "102)",
        "500",
    ]
    assert sweep_points.text_table([]) == "no good run"


def test_report_command_help_and_missing_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        report.main(["--help"])
    assert "usage: python -m experiments.report" in capsys.readouterr().out
    assert report.main([str(tmp_path / "no")]) == 2
    assert "error: there is no folder" in capsys.readouterr().err
