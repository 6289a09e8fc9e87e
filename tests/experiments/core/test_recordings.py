"""`record: true`: it changes no number of a simulated run, and what it keeps replays."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from experiments import report
from experiments.core import recordings, store
from experiments.core.config import expand
from pagedjax import viewer
from pagedjax.commands import cli
from pagedjax.host import replay
from tests.experiments.core.summaries import (
    BASE,
    MEASURED,
    changed_workload,
    run_files,
    simulated_run,
)

SMALL = {**BASE, "workload": changed_workload(count=12)}


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {**BASE["engine"], "max_num_seqs": 3}},
        {"workload": changed_workload(count=12, shared_prefix=16)},
        {
            "engine": {**BASE["engine"], "speculative": {"num_tokens": 3}},
            "simulate": {**BASE["simulate"], "acceptance": 0.7},
        },
        {"sampling": {**BASE["sampling"], "n": 2}, "replicas": {"count": 2}},
        {
            "engine": {**BASE["engine"], "preemption": "swap", "max_model_len": 60},
            "cache_tokens": 80,
        },
        {
            "engine": {**BASE["engine"], "policy": "static"},
            "simulate": {**BASE["simulate"], "whole_batches": True},
        },
    ],
    ids=["queue", "prefixes", "drafts", "branches-replicas", "swap", "whole-batches"],
)
def test_recording_changes_nothing_and_replays(changes: dict[str, Any], tmp_path):
    raw = {**SMALL, **changes}
    plain = simulated_run(raw)
    recorded = simulated_run({**raw, "record": True})
    assert plain.logs == ()
    assert recorded._replace(logs=()) == plain
    num_requests = 0
    for log in recorded.logs:
        path = tmp_path / "run.jsonl"
        path.write_text(log)
        verified = replay.verify(path)
        assert verified.identical
        num_requests += verified.requests
    assert num_requests == 12
    steps = [json.loads(line) for log in recorded.logs for line in log.splitlines()]
    ends = [line["at"] for line in steps if "commit" in line]
    assert max(ends) == pytest.approx(plain.summary["duration_s"], abs=1e-6)
    if "cache_tokens" in changes:
        assert plain.summary["preemptions"] > 0


def key_of(raw: dict[str, Any]) -> str:
    (point,) = expand(raw, folder=Path())
    return point.key


def test_recording_is_another_point_of_measured_runs_alone():
    assert key_of({**SMALL, "record": True}) == key_of(SMALL)
    measured = {**MEASURED, "model": "smollm2-135m"}
    assert key_of({**measured, "record": True}) != key_of(measured)
    assert key_of({**measured, "record": False}) == key_of(measured)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"pools": {"prefill": {"count": 1}, "decode": {"count": 1}}},
            "record is true, and the config has pools: .*; leave record out",
        ),
        (
            {"records": "sums"},
            "record is true and records is 'sums', but a recording .*; leave one of them out",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        expand({**SMALL, **changes, "record": True}, folder=Path())


def test_finished_run_without_recording_is_made_again(tmp_path, capsys):
    folder = run_files(tmp_path, SMALL)
    (summary,) = store.read_runs(folder)
    run_folder = Path(summary["run"])
    before = (run_folder / "requests.jsonl").read_bytes()
    assert not (run_folder / "recording.jsonl").exists()
    assert report.recording_rows([summary], folder) == []

    run_files(tmp_path, {**SMALL, "record": True})
    note = "NOTE: 1 finished runs were made without a recording: "
    assert note in capsys.readouterr().err
    assert (run_folder / "requests.jsonl").read_bytes() == before
    recording_time = (run_folder / "recording.jsonl").stat().st_mtime_ns
    run_files(tmp_path, SMALL)  # a recording is no reason to run again
    run_files(tmp_path, {**SMALL, "record": True})
    assert "NOTE" not in capsys.readouterr().err
    assert (run_folder / "recording.jsonl").stat().st_mtime_ns == recording_time

    requests = store.read_requests(run_folder)
    slowest = max(requests, key=lambda request: request.ttft or 0.0)
    runs = store.read_runs(folder)
    about = {"name": "unit", "question": "", "command": ""}
    page = report.page(about, runs, [{}], recorded=report.recording_rows(runs, folder))
    step = runs[0]["recording"]["slowest"]["ttft_s"]["step"]
    address = (
        f"{summary['point'][:12]}/0/recording.html#step={step}&amp;request={slowest.request_id}"
    )
    assert f'<a href="{address}">{slowest.request_id}</a>' in page
    assert slowest.request_id in (run_folder / "recording.jsonl").read_text()
    assert f"pagedjax view {shlex.quote(str(run_folder / 'recording.jsonl'))}</code>" in page


@pytest.mark.parametrize("replicas", [None, {"count": 2, "router": "round_robin"}])
def test_the_link_to_a_slow_request_opens_where_it_begins_to_wait(tmp_path, replicas):
    engine = {**BASE["engine"], "max_num_seqs": 2}
    folder = run_files(tmp_path, {**SMALL, "engine": engine, "record": True, "replicas": replicas})
    (summary,) = store.read_runs(folder)
    worst = summary["recording"]["slowest"]["ttft_s"]
    run = viewer.read(Path(summary["run"]) / worst["file"])
    waits = []  # steps in which the request waits
    numbers = {}
    queue: list[int] = []
    for frame in run.frames:
        numbers |= {record[1]: record[0] for record in frame.get("came", ())}
        front, back, new = frame.get("waiting", (len(queue), 0, []))
        queue = [*queue[:front], *new, *queue[len(queue) - back :]]
        if numbers.get(worst["request"]) in queue:
            waits.append(frame["step"])
    assert len(waits) > 3
    assert worst["step"] == waits[0] > 0


def test_own_policy_is_shown_by_the_command_of_the_report(tmp_path):
    policy = (
        "from pagedjax.policies import by_key\nMINE = by_key('mine', lambda seq: seq.arrival)\n"
    )
    (tmp_path / "mine.py").write_text(policy)
    engine = {**BASE["engine"], "policy": "mine.py:MINE"}
    folder = run_files(tmp_path, {**SMALL, "engine": engine, "record": True})
    (row,) = report.recording_rows(store.read_runs(folder), folder)
    (file,) = row["files"]
    name, *words = shlex.split(file["command"])
    assert name == "pagedjax"
    assert words[2] == "--policy"
    (folder / file["page"]).unlink()
    assert cli.main(words) == 0
    assert (folder / file["page"]).is_file()


def test_two_runs_with_parameters_of_one_policy_are_shown_together(tmp_path, capsys):
    policy = (
        "from pagedjax.policies import by_key\n"
        "def mine(sign): return by_key('mine', lambda seq: sign * seq.arrival)\n"
    )
    (tmp_path / "mine.py").write_text(policy)
    engine = {**BASE["engine"], "max_num_seqs": 2, "policy": {"name": "mine.py:mine", "sign": 1}}
    sweep = {"grid": {"engine.policy.sign": [1, -1]}}
    folder = run_files(tmp_path, {**SMALL, "engine": engine, "record": True, "sweep": sweep})
    paths = [Path(run["run"]) / "recording.jsonl" for run in store.read_runs(folder)]
    options = []
    for path, sign in zip(paths, (1, -1), strict=True):
        own_policy = replay.header(path)["own_policy"]
        assert own_policy.endswith(f"mine.py:mine(sign={sign})")
        options += ["--policy", own_policy]
    capsys.readouterr()
    assert cli.main(["view", *map(str, paths), *options]) == 0
    names = [path.relative_to(folder).as_posix() for path in paths]
    page = Path(capsys.readouterr().out.strip())
    assert f"<title>{names[0]} and {names[1]}" in page.read_text()
    ending = names[1].replace("/", "-").replace(".jsonl", ".html")
    assert page == paths[0].with_name(f"recording-{ending}")
    assert cli.main(["view", *map(str, paths)]) == 2
    error = capsys.readouterr().err
    for option in options[1::2]:
        assert f"add --policy {shlex.quote(option)}" in error
    assert "give one --policy for each recording, in their order" in error
    assert cli.main(["view", *map(str, paths), *options[:2]]) == 2
    error = capsys.readouterr().err
    assert (
        f"the run had the policy {options[3]}, so give --policy {shlex.quote(options[3])}" in error
    )
    assert cli.main(["view", str(paths[0]), *options]) == 2
    assert "--policy is given 2 times, and there are 1 recordings" in capsys.readouterr().err


def test_policy_of_a_module_is_in_the_command_of_the_report(tmp_path):
    (tmp_path / "recording.jsonl").touch()
    recording = {"policy": "lab.mine:aged(worth=1)"}
    run = {"run": str(tmp_path), "label": "one point", "repeat": 0, "recording": recording}
    (row,) = report.recording_rows([run], tmp_path)
    words = shlex.split(row["files"][0]["command"])
    assert words[3:] == ["--policy", "lab.mine:aged(worth=1)"]


def test_slowest_request_is_in_the_recording_of_its_replica(tmp_path):
    raw = {**SMALL, "record": True, "replicas": {"count": 2, "router": "round_robin"}}
    folder = run_files(tmp_path, raw)
    (summary,) = store.read_runs(folder)
    for worst in summary["recording"]["slowest"].values():
        text = (Path(summary["run"]) / worst["file"]).read_text()
        assert f'{{"submit":{{"request_id":"{worst["request"]}"' in text
    (row,) = report.recording_rows([summary], folder)
    assert [file["name"] for file in row["files"]] == ["recording.0.jsonl", "recording.1.jsonl"]


def test_errors_of_the_viewer_lose_no_run(tmp_path, monkeypatch, capsys):
    pages = []

    def page(*arguments: Any) -> str:
        pages.append(arguments)
        raise KeyError("frame")

    monkeypatch.setattr("pagedjax.viewer.page", page)
    raw = {**SMALL, "record": True}
    folder = run_files(tmp_path, raw)
    assert "recording.jsonl has no page, because of KeyError: 'frame'" in capsys.readouterr().err
    (summary,) = store.read_runs(folder)
    assert summary["failed"] is None
    assert len(pages) == 1
    assert [path.name for path in recordings.paths(Path(summary["run"]))] == ["recording.jsonl"]

    monkeypatch.setattr(recordings, "MOST_BYTES", 100)
    recordings.write_pages(Path(summary["run"]), "fcfs")
    assert len(pages) == 1, "too long"
