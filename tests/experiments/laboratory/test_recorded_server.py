"""A recording of the real server under `bench serve`, as a laboratory and in the viewer. It has
times and no prompts.
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import httpx
import pytest

from experiments import blame, diff, whatif
from experiments.laboratory import past
from experiments.laboratory.prediction import reading
from experiments.laboratory.rerun import run, unchanged
from pagedjax.commands import cli
from tests.server.support import start_server

pytestmark = pytest.mark.slow

USERS = ("ann", "bob", "carl")
WORDS = "--num-blocks 64 --max-num-seqs 3 --max-num-batched-tokens 32 --max-model-len 256"
TINY = "--served-model-name tiny --allow-user"


def trace(path: Path, count: int) -> None:
    """Requests of three users, one of whom sends long ones."""
    draw = random.Random(3)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens,User"]
    for i in range(count):
        user = draw.choice(USERS)
        length = draw.randint(60, 120) if user == "carl" else draw.randint(5, 30)
        second = f"{0.02 * i:09.6f}"
        lines.append(f"2026-01-01 12:00:{second},{length},{draw.randint(2, 40)},{user}")
    path.write_text("\n".join([*lines, ""]))


@pytest.fixture(scope="module")
def recording(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    path = folder / "run.jsonl"
    trace(folder / "trace.csv", 60)
    words = [*WORDS.split(), *TINY.split(), "--record", str(path)]
    process, url = start_server(str(tiny_folder), *words)
    try:
        options = ["--trace", str(folder / "trace.csv"), "--vocab", "300", "--ignore-eos"]
        assert cli.main(["bench", "serve", "--url", url, *options]) == 0
        with httpx.Client(base_url=url, timeout=60) as client:
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 30, "user": "ann"}
            branches = body | {"n": 3, "temperature": 1.0, "seed": 1, "stop": ["e", "t"]}
            assert client.post("/v1/completions", json=branches).status_code == 200
            endless = body | {"stream": True, "max_tokens": 240, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=endless) as answer:
                next(answer.iter_lines())  # and the client leaves
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    return path


def test_a_recording_of_a_server_runs_again_as_it_ran(recording: Path):
    recorded = past.read(recording)
    assert recorded.timed
    assert not recorded.prompts
    assert {request.user for request in recorded.requests.values()} == set(USERS)
    assert len(recorded.requests) == 62
    assert {output.ended for output in recorded.outputs.values()} >= {"length", "abort"}
    assert reading(run(recorded, unchanged(recorded))).parting is None


def test_whatif_diff_and_blame_read_it_and_the_viewer_opens_what_they_write(
    recording: Path, tmp_path: Path
):
    changed = tmp_path / "changed.jsonl"
    page = tmp_path / "whatif.html"
    report = tmp_path / "whatif.json"
    words = ["--policy", "shortest", "--draws", "2", "--record", str(changed)]
    outputs = ["--page", str(page), "--json", str(report)]
    assert whatif.main([str(recording), *words, *outputs]) == 0
    result = json.loads(report.read_text())
    assert result["unit"] == "s"
    assert len(result["requests"]) == 62
    assert "whatif.steps.html" in page.read_text()

    small = [str(tmp_path / "small_a.jsonl"), str(tmp_path / "small_b.jsonl")]
    page_file = tmp_path / "both.html"
    files = [str(recording), str(changed)]
    assert diff.main([*files, "--page", str(page_file), "--shrink", *small]) == 1

    cases = tmp_path / "cases"
    page = tmp_path / "blame.html"
    assert blame.main([str(recording), "--record", str(cases), "--page", str(page)]) == 0
    for pair in (files, small, [str(path) for path in sorted(cases.iterdir())[:2]]):
        assert cli.main(["view", *pair, "-o", str(tmp_path / "pair.html")]) == 0
    assert cli.main(["view", str(recording), "-o", str(tmp_path / "one.html")]) == 0


def test_other_limits_run_and_blocks_that_need_prompts_are_refused(recording: Path, capsys):
    for words in (
        ["--set", "block_size=32", "--set", "num_blocks=32"],
        ["--set", "block_size=8", "--set", "num_blocks=128", "--without-caching"],
        ["--set", "max_num_seqs=8", "--set", "max_num_batched_tokens=64"],
        ["--loop", "sessions", "--policy", "fair"],
        ["--replicas", "2"],
    ):
        assert whatif.main([str(recording), "--draws", "0", *words]) == 0
    assert whatif.main([str(recording), "--set", "block_size=8", "--set", "num_blocks=128"]) == 2
    error = capsys.readouterr().err
    assert "which was not recorded; choose a multiple of the recorded block size 16" in error
    assert "(a server records no prompts)" in error
