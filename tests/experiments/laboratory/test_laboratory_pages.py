"""The pages of `whatif`, `blame` and `diff`: their numbers are those of the recordings, and their
links open what they name.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import random
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from experiments import blame, diff, whatif
from experiments.laboratory import blame_page, command, past, whatif_page
from experiments.laboratory.blame import Audit
from pagedjax.host.event_log import Commit, Schedule, Submit
from pagedjax.host.policies import FCFS, SHORTEST
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Finished, Request, Sampled
from pagedjax.options.params import SamplingParams
from tests.experiments.laboratory import simulated, world

POLICY_FILE = "tests/experiments/laboratory/faults.py"
NASTY = '</script><script>alert(1)</script>"&'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A timed recording of two users, one request of which has a hostile id."""
    path = tmp_path / "run.jsonl"
    requests = simulated.requests(random.Random(5), 30)
    requests[3][1]["request_id"] = NASTY
    requests[4][1]["params"] = SamplingParams(max_tokens=9, n=2, ignore_eos=True)
    requests[4][1]["forks"] = ("r4/1",)
    simulated.record(path, simulated.engine(), requests)
    return path


def page_of(main: Any, path: Path, *words: str, name: str = "page.html") -> str:
    page = path.with_name(name)
    assert main([str(path), "--page", str(page), *words]) == 0
    return page.read_text()


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def cells_of(table: str) -> list[list[str]]:
    """The texts of the cells of each row of a table."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.S)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]*>", " ", cell)).strip() for cell in row] for row in cells]


def tables_of(page: str) -> list[list[list[str]]]:
    return [cells_of(table) for table in re.findall(r"<table.*?</table>", page, re.S)]


def steps_page_of(page: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the viewer's page says in front, and its data."""
    (about,) = re.findall(r'id="about">(.*?)</script>', page)
    (packed,) = re.findall(r'id="data">([^<]*)<', page)
    return json.loads(about), json.loads(gzip.decompress(base64.b64decode(packed)))


def check_it_loads_nothing(page: str) -> None:
    assert not re.search(r"https?:|[\"'`]//|@import|url\(|\bsrc\s*=|<link|<iframe|<img", page)
    assert "alert(1)</script>" not in page


class Naive:
    """The bars of a recording, read from its transitions: one dictionary a time."""

    def __init__(self, path: Path) -> None:
        self.came: dict[str, float] = {}
        self.admitted: dict[str, tuple[float, int]] = {}
        self.tokens: dict[str, list[float]] = {}
        self.ended: dict[str, float] = {}
        for recorded in past.read(path).entries:
            entry = recorded.entry
            if isinstance(entry, Submit):
                self.came[entry.request.request_id] = recorded.at
            elif isinstance(entry, Schedule):
                for name in entry.plan.admitted:
                    self.admitted.setdefault(name, (recorded.at, entry.plan.step))
            elif isinstance(entry, Commit):
                for event in entry.events:
                    if isinstance(event, Sampled):
                        for name in event.request_ids:
                            self.tokens.setdefault(name, []).append(recorded.at)
                    elif isinstance(event, Finished):
                        self.ended[event.request_id] = recorded.at


def test_the_bars_are_those_of_both_recordings(run: Path, tmp_path: Path):
    other_recording = tmp_path / "other.jsonl"
    page = page_of(
        whatif.main,
        run,
        "--set",
        "max_num_seqs=2",
        "--draws",
        "0",
        "--record",
        str(other_recording),
    )
    check_it_loads_nothing(page)
    data = data_of(page)
    assert len(data["requests"]) == 30
    came_at = Naive(run).came
    for k, path in enumerate((run, other_recording)):
        naive = Naive(path)
        assert data["ends"][k] == pytest.approx(max(naive.ended.values()), abs=1e-5)
        for name, _, _, *bars in data["requests"]:
            bar = whatif_page.Bar(*bars[k])
            came = came_at[name]
            assert bar.came == pytest.approx(came, abs=1e-5)
            assert (bar.admitted, bar.step) == pytest.approx(naive.admitted[name], abs=1e-5)
            tokens = (
                naive.tokens[name]
                if name != "r4"
                else min(naive.tokens[name], naive.tokens["r4/1"])
            )
            assert bar.first_token == pytest.approx(tokens[0] - came, abs=1e-5)
            ended = max(naive.ended[name], naive.ended.get(f"{name}/1", 0.0))
            assert bar.ended == pytest.approx(ended, abs=1e-5)
            assert bar.end == pytest.approx(ended - came, abs=1e-5)


def test_the_page_has_the_table_the_totals_and_the_step_where_the_runs_part(
    run: Path, tmp_path: Path
):
    report = tmp_path / "result.json"
    page = page_of(
        whatif.main,
        run,
        "--policy",
        "shortest",
        "--set",
        "max_num_seqs=2",
        "--draws",
        "3",
        "--json",
        str(report),
    )
    result = json.loads(report.read_text())
    text = html.unescape(page)
    assert "Changed: policy fcfs -&gt; shortest; max_num_seqs 8 -&gt; 2" in page
    assert f"The runs differ from step {result['parts_at_step']} on, first in" in text
    assert f'<a href="page.steps.html#step={result["parts_at_step"]}">' in page
    for note in result["notes"]:
        assert f"{note[0].upper()}{note[1:]}" in text
    (table,) = tables_of(page)
    assert len(table) == 1 + len(result["table"])
    for cells, row in zip(table[1:], result["table"], strict=True):
        assert cells[:2] == [row["group"], row["measure"].replace("_", " ")]
        assert cells[-1] == str(row["requests"])
        median = cells[2].split()
        assert float(median[0]) == pytest.approx(row["differences"][0], rel=0.01, abs=1e-5)
        assert float(median[1]) == pytest.approx(row["low"][0], rel=0.01, abs=1e-5)
    about, steps = steps_page_of((tmp_path / "page.steps.html").read_text())
    assert (about["policy"], about["second"]["policy"]) == ("fcfs", "shortest")
    first, _ = steps["parting"]
    assert steps["frames"][first]["step"] == result["parts_at_step"]
    assert f"pagedjax whatif {run} --page {tmp_path}/page.html --policy shortest" in text


def test_without_a_change_the_page_says_identical(run: Path):
    page = page_of(whatif.main, run)
    assert "Changed: nothing" in page
    assert "Identical: none of" in page
    assert '<a href="page.steps.html">' in page


def test_a_page_draws_the_requests_that_differ_most(run: Path, monkeypatch):
    words = ["--set", "max_num_seqs=2", "--draws", "0"]
    every = data_of(page_of(whatif.main, run, *words))["requests"]
    monkeypatch.setattr(whatif_page, "MOST_REQUESTS", 4)
    page = page_of(whatif.main, run, *words)
    drawn = data_of(page)["requests"]
    assert "The 4 of 30 requests whose times differ most; --json has all." in page

    def distance(request: list[Any]) -> float:
        bars = [whatif_page.Bar(*bar) for bar in request[3:]]
        return abs(bars[1].end - bars[0].end)  # type: ignore[operator]

    assert sorted(map(distance, drawn)) == sorted(map(distance, every))[-4:]


def test_where_there_is_no_page_of_steps_the_page_says_why(run: Path, tmp_path: Path, monkeypatch):
    page = page_of(whatif.main, run, "--replicas", "2", "--draws", "0", name="two.html")
    assert "The viewer shows the steps of one engine" in page
    assert data_of(page)["steps"] == ""
    monkeypatch.setattr(command, "MOST_BYTES", 100)
    page = page_of(whatif.main, run, "--policy", "shortest", "--draws", "0", name="long.html")
    assert "The recording has more than" in page
    page = page_of(blame.main, run, name="blame.html")
    assert "--record FOLDER writes their recordings, for pagedjax view" in page
    assert "<a " not in page
    assert [path.name for path in tmp_path.glob("*.html") if "." in path.stem] == []


def test_a_request_that_was_cut_off_has_a_bar_without_an_end(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    config = SchedulerConfig(4, 24, 12, max_num_seqs=1, max_model_len=32)
    arrivals = [
        world.Arrival(0, Request("a", 4, 8), aborted_at=4),
        world.Arrival(0, Request("b", 4, 8)),
    ]
    world.drive(path, config, FCFS, arrivals, timed=True)
    ((_, _, _, *cut), (_, _, _, *late)) = data_of(page_of(whatif.main, path))["requests"]
    bar = whatif_page.Bar(*cut[0])
    assert (bar.ended, bar.first_token, bar.end) == (4.0, 1.0, None)
    assert whatif_page.Bar(*late[0]).admitted == 4.0


def test_the_matrices_are_those_of_the_result(run: Path, tmp_path: Path):
    report = tmp_path / "blame.json"
    page = page_of(blame.main, run, "--json", str(report))
    check_it_loads_nothing(page)
    result = json.loads(report.read_text())
    added, shares, worst = tables_of(page)
    for table, matrix in ((added, result["without"]), (shares, result["shares"])):
        names = [name.removeprefix("to ") for name in table[0][2:]]
        sums = {name: sum(row.values()) for name, row in matrix.items()}
        assert [row[0] for row in table[1:-1]] == names == sorted(names, key=sums.get)[::-1]
        for name, total, *cells in table[1:-1]:
            assert float(total) == pytest.approx(sums[name], rel=0.01)
            for sufferer, cell in zip(names, cells, strict=True):
                if sufferer == name:
                    assert cell == ""
                else:
                    assert float(cell) == pytest.approx(matrix[name][sufferer], rel=0.01)
    assert shares[-1][0] == "delay"
    for name, cell in zip(names, shares[-1][2:], strict=True):
        assert float(cell) == pytest.approx(result["delays"][name], rel=0.01)
    assert [row[0] for row in worst[1:]] == [case["request_id"] for case in result["worst"]]


def test_a_link_of_a_worst_case_opens_its_longest_wait(run: Path, tmp_path: Path):
    page = page_of(blame.main, run, "--record", str(tmp_path / "cases"))
    naive = Naive(tmp_path / "cases" / "all.jsonl")
    links = re.findall(r'<td><a href="([^"#]+)#step=(\d+)&amp;request=([^"]+)">', page)
    assert len(links) == 5
    begins = {
        entry.plan.step: recorded.at
        for recorded in past.read(tmp_path / "cases" / "all.jsonl").entries
        if isinstance(entry := recorded.entry, Schedule)
    }
    for file, step, name in links:
        about, data = steps_page_of((tmp_path / unquote(file)).read_text())
        assert about["name"] == "all"
        assert about["second"]["name"].startswith("without ")
        name = unquote(name)
        assert name in {record[1] for frame in data["frames"] for record in frame.get("came", ())}
        times = [naive.came[name], naive.admitted[name][0], *naive.tokens[name], naive.ended[name]]
        start = max(range(len(times) - 1), key=lambda i: times[i + 1] - times[i])
        assert int(step) == min(k for k, at in begins.items() if at >= times[start])


def test_a_matrix_has_intervals_where_orders_are_drawn_and_a_limit(tmp_path: Path, monkeypatch):
    path = tmp_path / "run.jsonl"
    draw = random.Random(1)
    requests = [
        Request(f"r{i}", draw.randint(2, 9), draw.randint(2, 9), user=f"user {i % 8}")
        for i in range(16)
    ]
    config = SchedulerConfig(4, 24, 12, max_num_seqs=4, max_model_len=32)
    world.drive(path, config, FCFS, [world.Arrival(0, request) for request in requests])
    monkeypatch.setattr(blame_page, "MOST_GROUPS", 3)
    page = page_of(blame.main, path, "--permutations", "4")
    assert "By user, in steps" in page
    assert "Of 8 groups, the rows are the 3 that cause most" in page
    added, shares, _ = tables_of(page)
    assert len(added) == len(shares) == 1 + 3 + 1
    assert all("±" not in cell for row in added for cell in row)
    assert all("±" in row[1] for row in shares[1:-1])
    audit = Audit(past.read(path), "user")
    sampled = audit.sampled_shares(4, 0)
    name = shares[1][0]
    half = float(shares[1][1].split("±")[1])
    assert half == pytest.approx(sampled.error[name], rel=0.05)


def test_names_of_groups_that_are_alike_have_files_of_their_own(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    requests = [
        Request(f"r{i}", 8, 8, user=user) for i, user in enumerate(["a b", "a_b", "a b", "a_b"])
    ]
    config = SchedulerConfig(4, 24, 12, max_num_seqs=1, max_model_len=32)
    world.drive(path, config, FCFS, [world.Arrival(0, request) for request in requests])
    page_of(blame.main, path, "--record", str(tmp_path / "cases"))
    names = {file.name for file in (tmp_path / "cases").iterdir()}
    assert names == {"all.jsonl", "without-a_b.jsonl", "without-a_b_.jsonl"}
    pages = {file.name for file in tmp_path.glob("page.*.html")}
    assert pages == {"page.without-a_b.html", "page.without-a_b_.html"}


def test_the_page_of_a_difference_opens_at_its_step(tmp_path: Path, capsys):
    config = SchedulerConfig(4, 24, 12, max_num_seqs=1, max_model_len=32)
    requests = [Request("long", 8, 8), Request("middle", 24, 4), Request("short", 2, 4)]
    for name, policy in (("a", FCFS), ("b", SHORTEST)):
        arrivals = [world.Arrival(i, request) for i, request in enumerate(requests)]
        world.drive(tmp_path / f"{name}.jsonl", config, policy, arrivals)
    page = tmp_path / "both.html"
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    report = tmp_path / "diff.json"
    assert diff.main([*files, "--page", str(page), "--json", str(report)]) == 1
    step = json.loads(report.read_text())["step"]
    about, data = steps_page_of(page.read_text())
    assert about["opens"] == f"step={step}"
    assert data["frames"][data["parting"][0]]["step"] == step
    assert (about["name"], about["second"]["name"]) == ("a.jsonl", "b.jsonl")
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("A "))
    differing = [line.split("|") for line in lines[start + 1 :] if "|" in line]
    assert ["admitted: middle", "admitted: short"] in [[a.strip(), b.strip()] for a, b in differing]
    pools = re.findall(r"\[(#+)\.*\] (\d+) of 24 blocks free", "\n".join(lines))
    assert pools  # a bar of ten characters is the blocks in use
    assert all(len(bar) == round((24 - int(free)) / 2.4) for bar, free in pools)


def test_the_policy_of_a_recording_is_named_by_its_own_option(tmp_path: Path, capsys):
    path = tmp_path / "run.jsonl"
    requests = simulated.requests(random.Random(1), 12)
    simulated.record(path, simulated.engine(policy=f"{POLICY_FILE}:WRONG_ORDER"), requests)
    for main in (whatif.main, blame.main):
        assert main([str(path)]) == 2
        error = capsys.readouterr().err
        assert f"add --recorded-policy {POLICY_FILE}:WRONG_ORDER, or where that file is" in error
        assert main([str(path), "--recorded-policy", f"{POLICY_FILE}:WRONG_ORDER"]) == 0
    other_recording = tmp_path / "other.jsonl"
    words = ["--recorded-policy", f"{POLICY_FILE}:WRONG_ORDER", "--policy", "fcfs", "--draws", "0"]
    page_of(whatif.main, path, *words, "--record", str(other_recording))
    assert f"`pagedjax view {path} {other_recording} --policy {POLICY_FILE}:WRONG_ORDER` shows" in (
        capsys.readouterr().out
    )


def test_no_result_overwrites_the_recording(run: Path, tmp_path: Path, capsys):
    before = run.read_bytes()
    for main in (whatif.main, blame.main):
        for option in ("--page", "--json"):
            assert main([str(run), option, str(run)]) == 2
            assert "is the recording that is read" in capsys.readouterr().err
        assert main([str(run), "--page", str(tmp_path / "no" / "page.html")]) == 2
        assert "has no folder" in capsys.readouterr().err
    assert diff.main([str(run), str(run), "--page", str(run)]) == 2
    assert "is the recording that is read" in capsys.readouterr().err
    case = run.rename(tmp_path / "all.jsonl")
    assert blame.main([str(case), "--record", str(tmp_path)]) == 2
    assert "whose all.jsonl is the recording that is read" in capsys.readouterr().err
    assert case.read_bytes() == before


def test_without_times_the_page_counts_steps(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    config = SchedulerConfig(4, 24, 12, max_num_seqs=1, max_model_len=32)
    requests = [Request("long", 20, 4), Request("short", 4, 4)]
    world.drive(path, config, FCFS, [world.Arrival(0, request) for request in requests])
    page = page_of(whatif.main, path, "--set", "max_num_seqs=2")
    assert "request by request, in steps" in page
    assert "fit to the recorded steps" not in page
    data = data_of(page)
    assert data["unit"] == "steps"
    (_, _, _, *late) = data["requests"][1]
    recorded, changed = [whatif_page.Bar(*bar) for bar in late]
    assert recorded.admitted == 5.0  # 20 tokens of the prompt take two steps, and the others three
    assert changed.admitted == 1.0
