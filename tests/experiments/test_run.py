"""The command line, on the real engine with a tiny random model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import experiments
from experiments import report, run
from experiments.core import config, overrides, store
from pagedjax.host import replay
from pagedjax.options.config import NONE_STAYS
from tests.experiments.core.summaries import MEASURED
from tests.experiments.training.child import killed
from tests.weights.tiny import tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # untied: a random model with tied embeddings repeats its last token
    return str(
        tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=1, max_len=64, tied=False)
    )


def write_config(folder: Path, model: str, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "unit.yaml"
    path.write_text(yaml.safe_dump({**MEASURED, "model": model, **sections}, sort_keys=False))
    return path


def json_lines(summary: Any, name: str) -> list[dict[str, Any]]:
    """A file of JSON lines of the run of a summary."""
    return [json.loads(line) for line in (Path(summary["run"]) / name).read_text().splitlines()]


def test_sweep_end_to_end(tmp_path, model: str, monkeypatch, capsys):
    sweep = {"grid": {"engine.block_size": [4, 16], "seed": [1, 2]}}
    path = write_config(
        tmp_path,
        model,
        repeats=1,
        sweep=sweep,
        question="Does it run?",
        slo={"ttft": 60.0},
        record=True,
    )
    command = [str(path), "--out", str(tmp_path / "runs"), "--quiet"]
    assert run.main(command) == 0
    assert str(tmp_path / "runs" / "unit" / "report.html") in capsys.readouterr().out
    frame = experiments.load_runs(tmp_path / "runs" / "unit")
    assert len(frame) == 4
    assert frame["failed"].isna().all()
    assert (frame["compilations"] == 0).all()
    assert (frame["goodput.share"] == 1.0).all()
    assert (frame["blocks_total"] * frame["block_size"] == 256).all()
    # Greedy tokens do not depend on the block size, only on the workload's seed.
    assert frame.groupby("seed")["tokens_sha256"].nunique().tolist() == [1, 1]
    assert frame["tokens_sha256"].nunique() == 2

    folder = Path(frame["run"].iloc[0])
    env = json.loads((folder / "env.json").read_text())
    assert env["engine"]["block_size"] == 4
    assert {name for name, value in env["engine"].items() if value is None} == set(NONE_STAYS)
    requests = json_lines({"run": folder}, "requests.jsonl")
    lengths = [[len(branch["token_ids"]) for branch in request["branches"]] for request in requests]
    assert lengths == [[request["max_tokens"]] for request in requests]
    assert not {"replica", "transfers"} & set(requests[0]), "columns of simulated runs"
    steps = json_lines({"run": folder}, "steps.jsonl")
    assert sum(step["sampled"] for step in steps) == frame["output_tokens"].iloc[0]

    verified = replay.verify(folder / "recording.jsonl")
    assert verified.identical
    assert verified.requests == len(requests), "no request of the warm-up"
    assert (folder / "recording.html").is_file()

    # The saved config can be loaded: an engine without open choices.
    (repeated,) = config.load(folder / "config.yaml")
    assert repeated.experiment.engine.num_blocks == 64

    # A second time measures nothing; more repeats add only what is missing.
    command.append("--no-report")
    before = {entry: entry.stat().st_mtime_ns for entry in tmp_path.rglob("summary.json")}
    assert run.main(command) == 0
    assert {entry: entry.stat().st_mtime_ns for entry in tmp_path.rglob("summary.json")} == before
    assert run.main([*command, "--set", "repeats=3", "--dry-run"]) == 0
    assert "12 runs, 4 of them done" in capsys.readouterr().out


def test_runs_with_speculation_have_columns_of_drafts(tmp_path):
    points = [
        {"engine.speculative": None, "simulate.acceptance": None},
        {"engine.speculative": {"num_tokens": 3}, "simulate.acceptance": 0.7},
    ]
    sections = {**SIMULATED, "name": "unit", "repeats": 1, "sweep": {"list": points}}
    path = write_config(tmp_path, "llama-3-8b", **sections)
    assert run.main([str(path), "--out", str(tmp_path), "--quiet", "--no-report"]) == 0
    plain, drafted = store.read_runs(tmp_path / "unit")
    assert "speculation" not in plain["metrics"]
    of_plain, of_drafted = (json_lines(summary, "steps.jsonl") for summary in (plain, drafted))
    assert not any({"drafts", "accepted", "decodes"} & set(step) for step in of_plain)
    for name in ("drafts", "accepted"):
        assert sum(step[name] for step in of_drafted) == drafted["metrics"]["speculation"][name] > 0


@pytest.mark.slow
def test_a_mesh_is_swept_and_written_into_results(tmp_path, model: str):
    path = write_config(tmp_path, model, sweep={"grid": {"engine.mesh": [None, {"tensor": 2}]}})
    assert run.main([str(path), "--out", str(tmp_path / "runs"), "--quiet"]) == 0
    meshes = {}
    for file in (tmp_path / "runs/unit").rglob("env.json"):
        facts = json.loads(file.read_text())
        resolved = yaml.safe_load((file.parent / "config.yaml").read_text())
        assert facts["engine"]["mesh"] == resolved["engine"]["mesh"]
        meshes[facts.get("placement")] = facts["engine"]["mesh"]
    placement = "2 devices (cpu; 0, 1), each with 2 heads, 1 key heads, MLP width 48, 160 tokens"
    assert meshes == {None: None, placement: {"tensor": 2, "expert": 1}}


def test_branch_i_uses_seed_plus_i(tmp_path, model: str):
    drawn = {"temperature": 0.9, "ignore_eos": True}
    branches = [{"sampling.n": 3, "sampling.seed": 5}, {"sampling.seed": 6}, {"sampling.n": 5}]
    path = write_config(tmp_path, model, sampling=drawn, sweep={"list": branches})
    assert run.main([str(path), "--out", str(tmp_path), "--quiet", "--no-report"]) == 1
    together, alone, too_many = (row for _, row in experiments.load_runs(tmp_path).iterrows())
    assert "5 branches, but at most 4 sequences run at a time" in too_many["failed"]

    def tokens(row: Any, branch: int) -> list[list[int]]:
        requests = json_lines(row, "requests.jsonl")
        return [request["branches"][branch]["token_ids"] for request in requests]

    assert tokens(together, 1) == tokens(alone, 0) != tokens(together, 0)
    assert (together["requests"], together["branches"], together["finished.length"]) == (5, 15, 15)
    assert together["output_tokens"] == 3 * alone["output_tokens"]
    assert together["blocks_saved_share"] > 0 == alone["blocks_saved_share"]


def test_impossible_request_fails_its_point_only(tmp_path, model: str, capsys):
    sweep = {
        "grid": {"workload.prompt": [{"dist": "fixed", "value": 4}, {"dist": "fixed", "value": 99}]}
    }
    path = write_config(tmp_path, model, sweep=sweep)
    assert run.main([str(path), "--out", str(tmp_path), "--quiet", "--no-report"]) == 1
    assert "refused r00000 (99 prompt tokens" in capsys.readouterr().err
    _, bad = experiments.load_runs(tmp_path)["failed"]
    assert experiments.load_runs(tmp_path)["failed"].isna().tolist() == [True, False]
    assert "Bound the workload's lengths" in bad
    (error,) = tmp_path.rglob("error.txt")
    assert "Traceback" in error.read_text()
    assert run.main([str(path), "--out", str(tmp_path), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "2 runs, 1 of them done" in printed.out  # a failed run is tried again
    assert "a prompt has 99 tokens, and engine.max_model_len is" in printed.err


def test_compilation_in_measured_run_fails_it(tmp_path, model: str, monkeypatch, capsys):
    import jax
    import jax.numpy as jnp

    from pagedjax.llm import LLM

    calls = []

    def order(waiting: Any, running: Any, cached: Any) -> Any:
        """First come first served, by a researcher who thinks with jnp: a new shape each time is a
        new program.
        """
        calls.append(1)
        jax.block_until_ready(jnp.arange(17 + len(calls)) * 3)
        return waiting

    def make(**fields: Any) -> LLM:
        llm = LLM(**fields)
        engine = llm.engine
        engine.runtime = replace(engine.runtime, policy=engine.runtime.policy._replace(order=order))
        return llm

    monkeypatch.setattr("pagedjax.llm.LLM", make)
    path = write_config(tmp_path, model)
    assert run.main([str(path), "--out", str(tmp_path), "--quiet", "--no-report"]) == 1
    assert "failed: one point, repeat 0: compiled in the measured run: " in capsys.readouterr().err
    frame = experiments.load_runs(tmp_path)
    assert frame["failed"][0].startswith("compiled in the measured run")
    assert frame["compilations"][0] > 0


@pytest.mark.slow
def test_log_probabilities_of_prompts_compile_in_the_warm_up(tmp_path, model: str):
    """Programs of all sizes: the warm-up has one request of four tokens, and a later step several."""
    workload = MEASURED["workload"] | {
        "prompt": {"dist": "uniform", "low": 4, "high": 4},
        "arrivals": {"process": "poisson", "rate": 1e6},
    }
    path = write_config(
        tmp_path,
        model,
        engine=MEASURED["engine"] | {"token_buckets": [4, 8, 12, 16]},
        workload=workload,
        sampling=MEASURED["sampling"] | {"prompt_logprobs": 0},
    )
    assert run.main([str(path), "--out", str(tmp_path), "--quiet"]) == 0
    assert experiments.load_runs(tmp_path)["compilations"][0] == 0


@pytest.mark.parametrize(
    ("sections", "arguments", "message"),
    [
        ({"engine": {"block_sise": 3}}, [], "unknown key engine.'block_sise'; did you mean"),
        ({}, ["--engines", "0"], "--engines is 0; it must be at least 1"),
        ({}, ["--jobs", "0"], "--jobs is 0; it must be at least 1"),
        ({}, ["--jobs", "2"], "--jobs is 2, but 1 of 1 points are measured (such as one point)"),
        ({}, ["--set", "x"], "--set 'x': write it as section.key=value"),
        ({}, ["--out", __file__], f"cannot write to --out {__file__}: {__file__} is a file; name"),
        ({}, ["--dry-run"], "model: there is no model 'no-model'; a model is a directory"),
        ({}, ["--backend", "ray"], "--backend is ray, which is not installed: pip install 'paged"),
    ],
)
def test_bad_arguments_fail_before_anything_runs(
    tmp_path, monkeypatch, capsys, sections: dict[str, Any], arguments: list[str], message: str
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = write_config(tmp_path, "no-model", **sections)
    assert run.main([str(path), "--out", str(tmp_path), *arguments]) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize(
    ("name", "reason"), [("no.yaml", "No such file or directory"), (".", "Is a directory")]
)
def test_config_that_cannot_be_read_is_an_error(tmp_path, capsys, name: str, reason: str):
    path = tmp_path / name
    assert run.main([str(path), "--out", str(tmp_path)]) == 2
    message = f"error: cannot read the config {path}: {reason}; name a YAML file"
    assert message in capsys.readouterr().err


SIMULATED = {
    "name": "side-by-side",
    "workload": {**MEASURED["workload"], "count": 20},
    "engine": {"max_num_seqs": 4, "max_model_len": 64},
    "simulate": {"chip": "h200", "model": "llama-3-8b"},
    "repeats": 2,
    "reseed": True,
    # the last is refused
    "sweep": {"grid": {"engine.block_size": [4, 16], "engine.max_model_len": [64, 9999]}},
}


# a process that kills itself in its fourth run, after some of its files
CHILD = """
import os, signal, sys
from pathlib import Path
from experiments import report, run
from experiments.core import store

original, folders = store.write_run, []
def write(folder, files):
    if len(folders) == 3:
        text, written = Path.write_text, []
        def killing(path, *rest, **options):
            written.append(path)
            if len(written) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return text(path, *rest, **options)
        Path.write_text = killing
    folders.append(folder)
    original(folder, files)
store.write_run = write
run.main(sys.argv[1:])
"""


def test_killed_sweep_resumes_without_lost_or_double_runs(tmp_path, monkeypatch):
    sections = {**SIMULATED, "reseed": False, "repeats": 3, "sweep": {"grid": {"seed": [1, 2, 3]}}}
    path = write_config(tmp_path, "llama-3-8b", **sections)
    command = [str(path), "--out", str(tmp_path / "runs"), "--quiet"]

    def summaries() -> dict[Path, int]:
        return {
            entry: entry.stat().st_mtime_ns
            for entry in (tmp_path / "runs").rglob("[0-9]/summary.json")
        }

    killed(CHILD, *command)
    survived = summaries()
    assert len(survived) == 3
    assert list((tmp_path / "runs").rglob(".writing-*")), "it was killed while it wrote a run"
    for entry in survived:
        assert store.read_summary(entry.parent)
        assert (entry.parent / "steps.jsonl").read_text().endswith("\n")

    assert run.main([*command, "--no-report"]) == 0
    finished = summaries()
    assert len(finished) == 9
    assert {entry: finished[entry] for entry in survived} == survived  # not one was measured again
    index = store.read_runs(tmp_path / "runs" / "side-by-side")
    assert [(row["order"], row["repeat"]) for row in index] == [
        (i, r) for i in range(3) for r in range(3)
    ]
    assert not [entry for entry in (tmp_path / "runs").rglob(".writing-*")]


@pytest.mark.slow
def test_parallel_runs_equal_single_process_runs(tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, "llama-3-8b", **SIMULATED)

    def files(folder: str) -> dict[str, str]:
        paths = [entry for entry in (tmp_path / folder).rglob("*") if entry.is_file()]
        apart = ("env.json", "sweep.json")  # when it started, and by which command
        return {
            str(e.relative_to(tmp_path / folder)): e.read_text()
            for e in paths
            if e.name not in apart
        }

    def measured(folder: str, *arguments: str) -> int:
        command = [str(path), "--out", str(tmp_path / folder), "--quiet", "--no-report"]
        return run.main([*command, *arguments])

    assert measured("one") == 1  # the points that a model cannot hold
    write_run = store.write_run
    written = []

    def write(folder: Path, texts: dict[str, str]) -> None:
        if len(written) == 6:
            # as SIGINT does in the main thread; this test may run in another thread
            raise KeyboardInterrupt
        written.append(folder)
        write_run(folder, texts)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_run", write)
        assert measured("two", "--jobs", "2") == 130
    alone = files("one")
    together = files("two")
    assert len([name for name in together if name.endswith("summary.json")]) == 6
    assert [name for name, text in together.items() if alone[name] != text] == [
        "side-by-side/runs.jsonl"
    ]
    assert len(experiments.load_runs(tmp_path / "two")) == 6
    assert "stopped; the same command resumes the sweep" in capsys.readouterr().err
    assert measured("two") == 1  # in this process: failed and missing runs
    assert files("two") == alone
    assert len([name for name in files("two") if name.endswith("error.txt")]) == 4
    assert not [entry for entry in (tmp_path / "two").rglob(".writing-*")]


@pytest.fixture
def simulated(tmp_path) -> Any:
    """Runs a small simulated sweep, of two points and two repeats, into tmp_path/runs without
    drawing a report.
    """
    sweep = {"grid": {"engine.block_size": [4, 16]}}
    path = write_config(tmp_path, "llama-3-8b", **SIMULATED | {"sweep": sweep})
    command = [str(path), "--out", str(tmp_path / "runs"), "--quiet", "--no-report"]

    def measure(*options: str) -> int:
        return run.main([*command, *options])

    return measure


def test_a_sweep_without_a_report_needs_no_package_of_it(tmp_path, simulated, monkeypatch, capsys):
    folder = tmp_path / "runs/side-by-side"
    with monkeypatch.context() as patch:
        for module in ("pandas", "matplotlib"):
            patch.setitem(sys.modules, module, None)
        assert simulated() == 0
        with pytest.raises(ImportError, match=r"pip install 'pagedjax\[experiments\]'"):
            run.main([str(tmp_path / "unit.yaml"), "--out", str(tmp_path / "runs"), "--quiet"])
    assert not (folder / "report.html").exists()
    command = f"python -m experiments.report {folder}"
    assert f"results: {folder}; {command} draws their report" in capsys.readouterr().out
    assert report.main([str(folder)]) == 0
    assert (folder / "report.html").exists()


def modification_times(tmp_path) -> dict[str, int]:
    """When each run was made."""
    return {str(entry.parent): entry.stat().st_mtime_ns for entry in tmp_path.rglob("summary.json")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "attribute", ["experiments.core.environment.source", "experiments.core.environment._version"]
)
def test_runs_of_other_code_are_named_and_not_mixed_with_new_repeats(
    attribute: str, simulated: Any, tmp_path, monkeypatch, capsys
):
    assert simulated() == 0
    first = modification_times(tmp_path)
    assert simulated() == 0
    assert "NOTE" not in capsys.readouterr().err

    monkeypatch.setattr(attribute, lambda *_: "other")  # edited, and not committed; or another JAX
    assert simulated() == 0  # nothing is missing, so nothing is measured; a note is printed
    errors = capsys.readouterr().err
    assert "NOTE: 4 finished runs were made by other code than this: " in errors
    assert all(folder in errors for folder in first)
    assert "--no-resume measures them again" in errors
    assert modification_times(tmp_path) == first

    assert simulated("--set", "engine.block_size=4", "--set", "repeats=3", "--dry-run") == 0
    assert "3 runs, 0 of them done" in capsys.readouterr().out
    assert simulated("--set", "engine.block_size=4", "--set", "repeats=3") == 0
    assert "They are measured again, because other repeats" in capsys.readouterr().err
    later = modification_times(tmp_path)
    assert len(later) == 5
    # the other point
    assert len([folder for folder in first if later[folder] == first[folder]]) == 2
    assert simulated("--no-resume") == 0
    capsys.readouterr()
    assert simulated() == 0
    assert "NOTE" not in capsys.readouterr().err


@pytest.mark.slow
def test_stopped_no_resume_leaves_unreached_runs_missing(
    simulated: Any, tmp_path, monkeypatch, capsys
):
    assert simulated() == 0
    write_run = store.write_run
    written = []

    def write(folder: Path, texts: dict[str, str]) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(folder)
        write_run(folder, texts)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_run", write)
        assert simulated("--no-resume") == 130
    assert (
        "stopped; the same command without --no-resume resumes the sweep" in capsys.readouterr().err
    )
    assert simulated("--dry-run") == 0
    assert "4 runs, 1 of them done" in capsys.readouterr().out
    aside = list(tmp_path.rglob("stale.json"))
    assert len(aside) == 3, "hours of measuring are not thrown away before others are there"
    assert all((path.parent / "steps.jsonl").is_file() for path in aside)


def test_points_of_another_sweep_are_reported(simulated: Any, capsys):
    assert simulated() == 0
    assert "note" not in capsys.readouterr().err
    assert simulated("--set", "engine.block_size=32") == 0
    assert (
        "do not belong to this sweep and are not in its report; --set name=..."
        in capsys.readouterr().err
    )


def test_request_beyond_max_model_len_fails(simulated: Any, tmp_path, capsys):
    assert simulated("--set", "workload.output={dist: fixed, value: 2000}") == 1
    message = "20 of 20 requests would be cut off at engine.max_model_len, 64 tokens: r00000 has"
    assert message in capsys.readouterr().err
    assert simulated("--set", "workload.output={dist: fixed, value: 2000, max: 50}") == 0
    summaries = [
        store.read_summary(Path(row)) for row in experiments.load_runs(tmp_path / "runs")["run"]
    ]
    assert {summary["workload"]["clipped_outputs"] for summary in summaries if summary} == {20}


def test_run_folder_has_copies_of_named_files(tmp_path):
    (tmp_path / "w1.json").write_text(json.dumps([{"prompt": [20, 30], "max_tokens": 3}]))
    (tmp_path / "mine.py").write_text(
        "from pagedjax.host.policies import FCFS\nMINE = FCFS._replace(name='mine')\n"
    )
    tokens = {"kind": "tokens", "file": "w1.json"}
    plain = {**SIMULATED, "sweep": None, "workload": tokens, "repeats": 1}
    path = write_config(tmp_path, "llama-3-8b", **plain | {"engine": {"policy": "mine.py:MINE"}})
    (point,) = config.load(path)
    assert run.main([str(path), "--out", str(tmp_path / "runs"), "--quiet", "--no-report"]) == 0
    (copied,) = tmp_path.rglob("config.yaml")
    for name in ("w1.json", "mine.py", "unit.yaml"):
        (tmp_path / name).unlink()
    assert {"workload.json", "policy.py"} <= {file.name for file in copied.parent.iterdir()}
    (repeated,) = config.load(copied)
    assert repeated.content == point.content
    assert repeated.experiment.workload.file == "workload.json"
    assert run.main([str(copied), "--out", str(tmp_path / "again"), "--quiet", "--no-report"]) == 0
    first, second = (
        experiments.load_runs(tmp_path / name)["tokens_sha256"][0] for name in ("runs", "again")
    )
    assert first == second


@pytest.mark.slow
def test_measure_is_the_command_as_a_function(tmp_path):
    sweep = {"grid": {"engine.block_size": [8, 16]}}
    path = write_config(tmp_path, "llama-3-8b", **SIMULATED | {"sweep": sweep, "repeats": 1})
    folder = tmp_path / "runs" / "side-by-side"
    runs = experiments.measure(path, out=tmp_path / "runs")
    assert sorted(runs["block_size"]) == [8, 16]
    assert runs["failed"].isna().all()
    assert (folder / "report.html").is_file()
    # nothing is measured again
    assert experiments.measure(path, out=tmp_path / "runs", jobs=2).equals(runs)
    settings = {"sweep": None, "engine.block_size": 32}
    table = experiments.measure(path, settings, out=tmp_path / "runs")
    assert table["tokens_sha256"].tolist() == runs["tokens_sha256"].tolist()[:1]
    assert experiments.load_runs(folder).equals(table)
    command = json.loads((folder / "sweep.json").read_text())["command"]
    assert command.startswith("python -m experiments.run ")
    assert "engine.block_size=32" in command
    with pytest.raises(ValueError, match=r"jobs is 0; it must be at least 1"):
        experiments.measure(path, out=tmp_path / "runs", jobs=0)


def test_values_of_python_are_settings():
    values = {
        "a": 1e-5,
        "b": np.int64(4),
        "c": Path("x"),
        "d": None,
        "e": [8, (1, 2)],
        "f": {"g": "1e-5"},
    }
    raw: dict[str, Any] = {}
    overrides.override_all(raw, [run._setting(key, value) for key, value in values.items()])
    assert raw == {**values, "c": "x", "e": [8, [1, 2]]}
    with pytest.raises(
        ValueError, match=r"settings has a: .*, which is no value of YAML; give a number"
    ):
        run._setting("a", object())
