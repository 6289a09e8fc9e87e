"""A page, a table and a comparison say what ran, and a simulated one says so first."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from experiments import capacity, compare, report, run
from experiments.core import config, what_ran

SIMULATED = """name: small
simulate: {chip: h100, model: llama-3-8b}
engine: {max_num_seqs: 8, max_model_len: 512}
cache_tokens: 4096
workload:
  kind: synthetic
  count: 6
  prompt: {dist: fixed, value: 64}
  output: {dist: fixed, value: 16}
  arrivals: {process: poisson, rate: 50}
sampling: {ignore_eos: true, temperature: 0.0}
slo: {ttft: 0.5}
sweep: {grid: {engine.block_size: [16, 32]}}
"""
DEVICE = "simulated h100, times of llama-3-8b"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("what_ran")
    (folder / "small.yaml").write_text(SIMULATED)
    assert run.main([str(folder / "small.yaml"), "--out", str(folder / "runs"), "--quiet"]) == 0
    return folder / "runs" / "small"


def text_of(page: str) -> str:
    """The words of a page, without its style and its scripts."""
    page = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_facts_name_all_that_differs_from_the_defaults_and_all_swept_values():
    points = config.expand(config.load_file(Path("configs/quickstart.yaml")), Path("configs"))
    assert what_ran.simulated_devices(points) == ""
    facts = dict(what_ran.facts(points))
    assert facts["Model"] == "smollm2-135m"
    assert facts["Workload"].startswith("prompts; file prompts/english.txt; count 24")
    assert facts["Arrivals"] == "process at_once"
    assert (
        "block_size 8, 16, 32, 128; max_num_batched_tokens 24, 64, 256" in (facts["Engine options"])
    )
    assert facts["Engine options"].startswith("cache_tokens 1024; block_size")
    assert "policy" not in facts["Engine options"]
    assert facts["Repeats"] == "3 of seed 0"
    assert {"Targets", "Simulation", "Engines"}.isdisjoint(facts)


@pytest.mark.parametrize(
    ("file", "device", "name", "words"),
    [
        ("routers", DEVICE, "Engines", "count 4; router round_robin, least_loaded, prefix"),
        ("pools", DEVICE, "Engines", "prefill none, {count: 2}; decode none, {count: 2}"),
        ("speculation", DEVICE, "Simulation", "chip h100; acceptance none, 0.7"),
    ],
)
def test_facts_of_simulated_engines(file, device, name, words):
    points = config.load(Path("configs") / f"{file}.yaml")
    assert what_ran.simulated_devices(points) == device
    facts = dict(what_ran.facts(points))
    assert facts["Model"] == "llama-3-8b"
    assert words in facts[name]


def test_a_simulated_report_says_so_in_its_first_line_and_in_each_figure(sweep):
    page = (sweep / "report.html").read_text()
    text = text_of(page)
    title = "small "
    assert text.startswith(
        f"{title}Simulated h100, times of llama-3-8b: no step ran, and every time is calculated."
    )
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert len(captions) >= 3
    assert all("<span>simulated" in caption for caption in captions)
    assert "Simulated. Medians over repeats" in text
    assert "Where it was calculated" in text
    assert "Calculated on" in text
    for words in (
        "Model llama-3-8b",
        "Simulation chip h100",
        "Workload synthetic; count 6; prompt {dist: fixed, value: 64}",
        "Arrivals process poisson; rate 50",
        "Targets ttft 0.5",
        "block_size 16, 32; max_num_seqs 8",
    ):
        assert words in text


def test_a_report_of_a_sweep_without_these_facts_knows_by_its_runs_that_it_is_simulated(sweep):
    about = json.loads((sweep / "sweep.json").read_text())
    del about["simulated"], about["facts"]
    runs = report.store.read_runs(sweep)
    text = text_of(report.page(about, runs, [{}] * len(runs)))
    assert "Simulated h100: no step ran" in text
    assert "What ran" not in text
    measured = [{**run, "device": "NVIDIA H100"} for run in runs]
    assert "imulated" not in text_of(report.page(about, measured, [{}] * len(runs)))


def test_tables_of_a_terminal_say_it_too(sweep, tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(SIMULATED)
    runs = str(sweep.parent)
    assert run.main([str(tmp_path / "small.yaml"), "--out", runs, "--no-report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{DEVICE}: every time is calculated" in lines
    assert compare.main([str(sweep), str(sweep)]) == 0
    assert "simulated h100: every time is calculated" in capsys.readouterr().out
    (summary,) = {(run["device"], run["model"]) for run in report.store.read_runs(sweep)}
    assert summary == ("simulated h100", "llama-3-8b")


def test_a_capacity_says_it_too(tmp_path, capsys):
    text = SIMULATED.replace("sweep: {grid: {engine.block_size: [16, 32]}}\n", "")
    (tmp_path / "small.yaml").write_text(text)
    words = [str(tmp_path / "small.yaml"), "--out", str(tmp_path / "runs"), "--quiet"]
    capacity.main([*words, "--tolerance", "0.5"])
    assert f"{DEVICE}: every time is calculated" in capsys.readouterr().out


def test_a_model_whose_times_are_not_used_is_refused(tmp_path):
    (tmp_path / "small.yaml").write_text(SIMULATED)
    settings = ("model=opt-13b",)
    with pytest.raises(
        ValueError,
        match=r"^model is 'opt-13b' and simulate\.model is 'llama-3-8b', from which all times come; "
        "leave model out, or make them equal$",
    ):
        config.load(tmp_path / "small.yaml", settings)
    assert config.load(tmp_path / "small.yaml", ("model=llama-3-8b",))
    assert config.load(tmp_path / "small.yaml", ("model=smollm2-135m",)), "the default"
    assert config.load(tmp_path / "small.yaml", ("model=opt-13b", "simulate.model=null"))


@pytest.mark.slow
def test_a_policy_that_knows_the_length_of_an_output_is_called_an_oracle(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from pagedjax.policies import RATE, by_key\n"
        "LEAST_WORK = by_key('least_work', lambda seq: RATE * seq.arrival + seq.limit)\n"
        "SHORT = by_key('short', lambda seq: RATE * seq.arrival + seq.request.prompt_len)\n"
    )
    (tmp_path / "small.yaml").write_text(SIMULATED)
    sentence = "mine.py:LEAST_WORK reads the limit of a request, which is the length of its output"
    for name, is_oracle in (("LEAST_WORK", True), ("SHORT", False)):
        out = tmp_path / name
        words = [str(tmp_path / "small.yaml"), "--set", f"engine.policy=mine.py:{name}"]
        assert run.main([*words, "--out", str(out)]) == 0
        assert (sentence in capsys.readouterr().out) == is_oracle
        text = text_of((out / "small" / "report.html").read_text())
        assert (text.count(sentence) == 2) == is_oracle
        assert ("oracle" in text.lower()) == is_oracle
    settings = ("engine.policy=mine.py:LEAST_WORK", "simulate=null", "model=smollm2-135m")
    for ignores_eos in (True, False):  # else an output may end before its limit
        points = config.load(
            tmp_path / "small.yaml", (*settings, f"sampling.ignore_eos={str(ignores_eos).lower()}")
        )
        assert ("Oracle" in dict(what_ran.facts(points))) == ignores_eos
    for limits, number in (("500", ""), ("{dist: multiple, times: 2}", "a multiple of the length")):
        settings = ("engine.policy=mine.py:LEAST_WORK", f"workload.max_tokens={limits}")
        points = config.load(tmp_path / "small.yaml", settings)
        assert number in dict(what_ran.facts(points)).get("Oracle", "none" if number else "")
        assert ("Oracle" in dict(what_ran.facts(points))) == bool(number)


@pytest.mark.parametrize(
    ("seeds", "example"),
    [("[3, 4, 5]", "seed: 3, repeats: 3"), ("7", "repeats: 3"), ("[a]", "repeats: 3")],
)
def test_a_list_of_seeds_is_answered_with_repeats_and_reseed(tmp_path, seeds, example):
    (tmp_path / "small.yaml").write_text(SIMULATED)
    with pytest.raises(
        ValueError,
        match=rf"^seeds is .*, and there is no such key; write {example} and reseed: true: repeat r "
        r"draws its workload from seed \+ r$",
    ):
        config.load(tmp_path / "small.yaml", (f"seeds={seeds}",))


def test_an_oracle_is_said_once_for_all_parameters_and_at_the_error_it_is_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from pagedjax.policies import by_key\n"
        "def aged(weight):\n"
        "    return by_key('aged', lambda seq: weight * seq.arrival + seq.predicted)\n"
    )
    policy = "engine: {policy: {name: mine.py:aged, weight: 4}, "
    (tmp_path / "aged.yaml").write_text(SIMULATED.replace("engine: {", policy))
    axes = "sweep={grid: {engine.policy.weight: [4, 64], workload.predicted.error: [0.0, 0.5]}}"
    facts = dict(what_ran.facts(config.load(tmp_path / "aged.yaml", (axes,))))
    assert facts["Oracle"].startswith(
        "mine.py:aged reads the predicted length of a request where its error is 0, which is"
    )
    assert facts["Oracle"].count("aged") == 1


def test_equal_repeats_of_a_recorded_load_are_said(tmp_path):
    rows = "".join(f"2023-11-16 18:15:0{i},{20 + i},4\n" for i in range(5))
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    (tmp_path / "trace.csv").write_text(head + rows)
    (tmp_path / "small.yaml").write_text(SIMULATED)
    trace = ("workload={kind: trace, file: trace.csv}", "repeats=3", "reseed=true")
    equal = "the 3 repeats of a point are equal: a simulated run of a recorded load draws nothing"
    drawn = "workload.max_tokens={dist: uniform, low: 5, high: 50}"
    for settings, says_so in (
        (trace, True),
        ((*trace, "repeats=1"), False),
        ((*trace, "workload.predicted={error: 0.5}"), False),
        ((*trace, drawn), False),
        (("repeats=3", "reseed=true"), False),
    ):
        points = config.load(tmp_path / "small.yaml", settings)
        assert (equal in dict(what_ran.facts(points))["Repeats"]) == says_so, settings
