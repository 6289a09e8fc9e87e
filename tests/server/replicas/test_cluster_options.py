"""The options of a cluster are checked before anything starts, and a mistake says what to do
instead.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import yaml

from pagedjax.commands import cli
from pagedjax.server.ray.command import options_of
from pagedjax.server.ray.options import ClusterOptions, check_room, default_resources, of_args
from tests.refusals import refused

ROOT = Path(__file__).parents[3]
WRONG = yaml.safe_load(Path(__file__).with_name("wrong_options.yaml").read_text("utf-8"))


@pytest.mark.parametrize("case", WRONG, ids=lambda case: str(case["args"]))
def test_a_wrong_option_is_an_error_with_a_remedy(case):
    with refused(f"(?s){case['error']}"):
        of_args(case["args"])


def test_words_of_serve_run_are_read_as_yaml():
    options = of_args(
        {"model": "1234", "replicas": "2", "engine": "{max_num_seqs: 4}", "record": "run.jsonl"}
    )
    assert (options.model, options.replicas, options.record) == ("1234", 2, "run.jsonl")
    assert options.engine == {"max_num_seqs": 4}


def test_autoscaling_has_the_engines_batch_as_its_target():
    scaling = of_args(
        {"replicas": 2, "autoscaling": {"max_replicas": 4}, "engine": {"max_num_seqs": 12}}
    ).scaling()
    assert scaling is not None
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (
        2,
        4,
        12,
    )
    assert of_args({}).scaling() is None


@pytest.mark.parametrize(
    ("cluster", "mesh", "resources"),
    [
        ({"CPU": 8.0}, None, {"num_cpus": 1}),
        ({"CPU": 8.0}, {"tensor": 4}, {"num_cpus": 1}),
        ({"CPU": 8.0, "GPU": 8.0}, None, {"num_gpus": 1}),
        ({"CPU": 8.0, "GPU": 8.0}, {"tensor": 4}, {"num_gpus": 4}),
        ({"CPU": 8.0, "TPU": 8.0}, {"tensor": 2, "data": 2}, {"resources": {"TPU": 4}}),
    ],
)
def test_a_replica_asks_for_the_devices_of_its_mesh(cluster, mesh, resources):
    assert default_resources(cluster, mesh) == resources


def test_replicas_that_have_no_room_are_refused():
    options = ClusterOptions(replicas=3)
    check_room(options, {"num_gpus": 2}, {"CPU": 1.0, "GPU": 6.0})
    message = "replicas is 3, and each needs 2 GPU, but Ray has 4; start fewer, or ask for less with --replica-resources"
    with refused(re.escape(message)):
        check_room(options, {"num_gpus": 2}, {"CPU": 8.0, "GPU": 4.0})
    with refused("replicas need an accelerator 'A100', which Ray does not have"):
        check_room(options, {"accelerator_type": "A100"}, {"CPU": 8.0})
    with refused(r"each needs 1e\+12 memory, but Ray has 2e\+10"):
        check_room(options, {"memory": 1e12}, {"CPU": 8.0, "memory": 2e10})
    with refused("each needs 1 TPU, but Ray has 0"):
        check_room(options, {"resources": {"TPU": 1}}, {"CPU": 8.0})


def parse(*words: str) -> ClusterOptions:
    return options_of(cli.parser().parse_args(["serve", *words]), {"max_num_seqs": 8})


def test_the_command_line_has_the_same_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    options = parse(*shlex.split("model --replicas 3 --router least_loaded --drain-seconds 5"))
    assert (options.replicas, options.router, options.drain_seconds) == (3, "least_loaded", 5)
    assert options.model == str(tmp_path / "model")  # replicas have another working folder
    assert options.of_server().name == "model"
    assert options.engine == {"max_num_seqs": 8}
    assert parse("--replica-resources", "num_gpus=2,num_cpus=0.5").resources == {
        "num_gpus": 2,
        "num_cpus": 0.5,
    }


def test_a_router_of_ones_own_has_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "from pagedjax.routing import Router\nFIRST = Router('first', lambda state, request: state.replicas[0])\n"
    (tmp_path / "mine.py").write_text(text, "utf-8")
    assert (
        parse("--replicas", "2", "--router", "mine.py:FIRST").router
        == f"{tmp_path / 'mine.py'}:FIRST"
    )


def test_files_of_ones_own_in_the_engine_have_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = {"model_family": "mine.py:FAMILY", "attention_impl": "own.py:MINE", "dtype": "float32"}
    options = options_of(cli.parser().parse_args(["serve"]), engine).engine
    paths = {
        "model_family": f"{tmp_path}/mine.py:FAMILY",
        "attention_impl": f"{tmp_path}/own.py:MINE",
    }
    assert options == {**paths, "dtype": "float32"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--replicas 0", "replicas is 0; it must be at least 1"),
        ("--replicas 2 --processes 2", "leave --coordinator and --processes out"),
        (
            "--replicas 2 --allow-runtime-lora-updating",
            "name the adapters at the start, with --lora-modules",
        ),
        ("--replicas 2 --lora-modules a=x a=y", "--lora-modules has a name twice"),
        ("--router prefix", "--router is given, and there is one engine; add --replicas N"),
        ("--record-routing r.jsonl", "--record-routing is given, and there is one engine"),
        (
            "--replicas 2 --api-key-file missing",
            "the API key file 'missing' cannot be read: No such file",
        ),
        ("--replicas 2 --port 70000", "port is 70000"),
        (
            "--replicas 2 --record-routing missing/a.jsonl",
            "its folder does not exist or cannot be written",
        ),
        (
            "--replicas 2 --record-routing pyproject.toml",
            "exists; name a new file, or delete it",
        ),
        (
            "--replicas 2 --enable-lora --lora-modules a=missing",
            "a=missing: there is no such folder",
        ),
        (
            "--replicas 2 --ray-address 127.0.0.1:1 --port 0",
            "--port is 0; on a cluster it must be",
        ),
    ],
)
def test_a_wrong_command_line_ends_before_ray_starts(words, message, capsys):
    assert cli.main(["serve", *shlex.split(words)]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_key_is_refused(tmp_path):
    (tmp_path / "key").write_text("\n", "utf-8")
    with refused("is empty; write the key into it, or leave it out to need no key"):
        ClusterOptions(api_key_file=str(tmp_path / "key")).api_key()
    (tmp_path / "key").write_text("secret\n", "utf-8")
    assert ClusterOptions(api_key_file=str(tmp_path / "key")).api_key() == "secret"


def test_without_ray_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "ray" else object()
    )
    assert cli.main(["serve", "--replicas", "2"]) == 2
    assert "pip install 'pagedjax[ray]'" in capsys.readouterr().err


def test_the_yaml_of_the_repository_is_one_that_serve_deploys():
    from ray.serve.schema import ServeDeploySchema

    for path in (ROOT / "configs" / "serve").glob("*.yaml"):
        deployed = ServeDeploySchema(**yaml.safe_load(path.read_text("utf-8")))
        (application,) = deployed.applications
        assert application.import_path == "pagedjax.server.ray:app"
        assert dataclasses.asdict(of_args(application.args))["replicas"] == 2
