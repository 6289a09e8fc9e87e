"""Parameters of a user's own values are axes of a sweep: keys, labels, tables and resolved configs
have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import run
from experiments.core import config, what_ran
from experiments.core.overrides import override_all, put
from pagedjax.host import policies

MINE = """
from pagedjax.policies import KVPolicy, by_key
from pagedjax.routing import Router

def aged(worth: int = 64, slack: float = 1.0):
    return by_key("aged", lambda seq: worth * seq.arrival + slack * seq.request.prompt_len)

def nth(n: int = 0):
    return Router("nth", lambda state, request: state.replicas[n])

def strided(stride):
    return KVPolicy("strided", 64, lambda start: start % stride == 0)

def impure(worth=1):
    calls = []
    return aged()._replace(preempt=lambda running: calls.append(1) or running[0])
"""
BASE = {
    "name": "swept",
    "model": "llama-3-8b",
    "simulate": {"chip": "a100-80g", "model": "llama-3-8b"},
    "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256},
    "cache_tokens": 512,
    "workload": {
        "kind": "synthetic",
        "count": 6,
        "prompt": {"dist": "uniform", "low": 8, "high": 60},
        "output": {"dist": "fixed", "value": 4},
        "arrivals": {"process": "poisson", "rate": 100.0},
    },
    "sampling": {"temperature": 0.0, "ignore_eos": True},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def points(folder: Path, *overrides: str, engine=(), **sections) -> list[config.Point]:
    path = folder / "swept.yaml"
    sections = {**BASE, "engine": BASE["engine"] | dict(engine), **sections}
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return config.load(path, overrides)


def test_a_parameter_is_an_axis_and_points_never_share_a_key(folder):
    swept = points(
        folder,
        engine={"policy": "mine.py:aged"},
        sweep={"grid": {"engine.policy.worth": [16, 64], "engine.policy.slack": [1.0, 2.0]}},
    )
    assert [point.label for point in swept[:2]] == ["worth=16, slack=1.0", "worth=16, slack=2.0"]
    assert [point.experiment.engine.policy for point in swept[2:]] == [
        f"{folder}/mine.py:aged(slack=1.0, worth=64)",
        f"{folder}/mine.py:aged(slack=2.0, worth=64)",
    ]
    assert len({point.key for point in swept}) == 4
    assert policies.find(swept[0].experiment.engine.policy).name == "aged"
    facts = dict(what_ran.facts(swept[:2]))
    texts = "mine.py:aged(slack=1.0, worth=16), mine.py:aged(slack=2.0, worth=16)"
    assert f"policy {texts}" in facts["Engine options"]


def test_a_list_of_mappings_is_swept_and_names_its_points(folder):
    aged = "mine.py:aged"
    policies_ = ["fcfs", aged, {"name": aged, "worth": 16}, {"name": aged, "worth": 64}]
    swept = points(folder, sweep={"grid": {"engine.policy": policies_}})
    assert [point.label for point in swept] == [
        "policy=fcfs",
        "policy=mine.py:aged",
        "policy=mine.py:aged(worth=16)",
        "policy=mine.py:aged(worth=64)",
    ]
    assert len({point.key for point in swept}) == 4
    (equal_point,) = points(folder, "engine.policy={worth: 16, name: mine.py:aged}")
    assert equal_point.key == swept[2].key
    with pytest.raises(ValueError, match=r"points 1 .policy=mine.py:aged.worth=16.. and 2 are the"):
        points(folder, sweep={"grid": {"engine.policy": [policies_[2], policies_[2]]}})


def test_a_name_and_its_parameter_may_both_be_axes_in_any_order(folder):
    (folder / "other.py").write_text(MINE.replace("64", "65"))
    grid = {"engine.policy.worth": [1, 2], "engine.policy": ["mine.py:aged", "other.py:aged"]}
    swept = points(folder, sweep={"grid": grid})
    assert [point.experiment.engine.policy.rpartition("/")[2] for point in swept] == [
        "mine.py:aged(worth=1)",
        "other.py:aged(worth=1)",
        "mine.py:aged(worth=2)",
        "other.py:aged(worth=2)",
    ]


def test_other_values_are_swept_too(folder):
    router = {"count": 2, "router": {"name": "mine.py:nth", "n": 1}}
    swept = points(folder, replicas=router, sweep={"grid": {"replicas.router.n": [0, 1]}})
    assert [p.experiment.replicas.router[-4:] for p in swept if p.experiment.replicas] == [
        "n=0)",
        "n=1)",
    ]
    kv = {"name": "mine.py:strided", "stride": 32}
    swept = points(
        folder, engine={"kv_policy": kv}, sweep={"grid": {"engine.kv_policy.stride": [16, 32]}}
    )
    assert len({point.key for point in swept}) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "engine.policy={name: mine.py:aged, wort: 3}",
            r"^engine\.policy\.wort is no parameter of aged .*; did you mean 'worth'",
        ),
        (
            "engine.policy={name: mine.py:aged, worth: x}",
            r"^engine\.policy\.worth is 'x'; it must be an integer",
        ),
        ("engine.policy={name: fcfs, worth: 3}", r"engine\.policy is 'fcfs', which has no param"),
        ("engine.policy.worth=3", r"engine\.policy is {'worth': 3}; it must have a name"),
        ("engine.policy={name: mine.py:impure, worth: 2}", r"mine.py:impure\(worth=2\)': preempt"),
        (
            "replicas={router: {name: mine.py:nth, m: 1}}",
            r"^replicas\.router\.m is no parameter of nth .*",
        ),
    ],
)
def test_a_wrong_parameter_is_refused_when_the_config_is_loaded(folder, override, message):
    with pytest.raises(ValueError, match=message):
        points(folder, override)


def test_a_run_keeps_the_parameters_and_its_config_runs_again(folder, monkeypatch):
    monkeypatch.chdir(folder)
    grid = {"engine.policy.worth": [16, 64]}
    points(folder, engine={"policy": "mine.py:aged"}, sweep={"grid": grid})
    assert run.main(["swept.yaml", "--quiet", "--no-report"]) == 0
    runs = [json.loads(line) for line in Path("runs/swept/runs.jsonl").read_text().splitlines()]
    assert [(row["label"], row["swept"], row["failed"]) for row in runs] == [
        ("worth=16", {"engine.policy.worth": 16}, None),
        ("worth=64", {"engine.policy.worth": 64}, None),
    ]
    run_folder = Path("runs/swept") / runs[1]["run"]
    resolved = yaml.safe_load((run_folder / "config.yaml").read_text())
    assert resolved["engine"]["policy"] == "policy.py:aged(worth=64)"
    assert json.loads((run_folder / "env.json").read_text())["engine"]["policy"].endswith(
        "(worth=64)"
    )
    (repeated_point,) = config.load(run_folder / "config.yaml", ("engine.policy.worth=16",))
    assert (
        repeated_point.experiment.engine.policy
        == f"{run_folder.resolve()}/policy.py:aged(worth=16)"
    )


def test_a_policy_that_raises_in_a_run_is_named_with_its_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    text = MINE + "\ndef late():\n    return aged()._replace(order=lambda w, r, c: w[99])\n"
    (folder / "mine.py").write_text(text)
    points(folder, engine={"policy": "mine.py:late"})
    assert run.main(["swept.yaml", "--quiet"]) != 0
    error = capsys.readouterr().err
    assert "OwnError: order of the policy 'aged' raised IndexError" in error
    assert "mine.py, line 19)" in error


@pytest.mark.parametrize("value", ["mine.py:other", "{name: mine.py:other, rest: 3}"])
def test_a_policy_that_is_set_keeps_the_sweep_over_its_parameter(value):
    raw: dict[str, Any] = {
        "engine": {"policy": "mine.py:aged"},
        "sweep": {"grid": {"engine.policy.worth": [1, 2]}},
    }
    override_all(raw, (f"engine.policy={value}",))
    assert raw["sweep"] == {"grid": {"engine.policy.worth": [1, 2]}}
    put(raw, "engine.policy.worth", 2)
    assert raw["engine"]["policy"]["name"] == "mine.py:other"
    overrides = ("sweep.grid.engine.policy.worth=[3, 4]", f"engine.policy={value}")
    override_all(raw, overrides)
    assert raw["sweep"] == {"grid": {"engine.policy.worth": [3, 4]}}


@pytest.mark.parametrize("value", ["fcfs", "{name: mine.py:other, worth: 3}"])
def test_a_policy_without_the_swept_parameter_or_with_a_value_of_it_is_refused(value):
    raw = {"sweep": {"grid": {"engine.policy.worth": [1, 2]}}}
    with pytest.raises(
        ValueError, match=r"the config sweeps engine\.policy\.worth; add --set sweep"
    ):
        override_all(raw, (f"engine.policy={value}",))
