"""Experiment configs: strict YAML, overrides, sweeps and the hash that keys a point."""

from __future__ import annotations

import contextlib
import json
import os
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from experiments.bench import peers
from experiments.core import config, point_key
from experiments.core.strict_yaml import load_file, load_text, parse
from experiments.core.workloads import Lengths, Synthetic, Trace
from tests import drawn

BASE: dict[str, Any] = {
    "name": "unit",
    "workload": {
        "kind": "synthetic",
        "count": 4,
        "prompt": {"dist": "fixed", "value": 8},
        "output": {"dist": "uniform", "low": 2, "high": 5},
    },
}


def points(tmp_path, *overrides: str, **sections: Any) -> list[config.Point]:
    path = tmp_path / "unit.yaml"
    path.write_text(yaml.safe_dump({**BASE, **sections}, sort_keys=False))
    return config.load(path, overrides)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"engine": {"block_sise": 16}},
            r"unknown key engine\.'block_sise'; did you mean 'block_size'",
        ),
        (
            {"engine": {"block_size": "16"}},
            r"engine\.block_size is '16'; it must be an integer \(write it without quo",
        ),
        ({"engine": {"block_size": True}}, r"engine\.block_size is True; it must be an integer"),
        (
            {"engine": {"block_size": 0}},
            r"engine\.block_size is 0; it must be an integer of at least 1",
        ),
        (
            {"engine": {"compilation": "background"}},
            r"engine\.compilation is 'background', and a measured run compiles everything first; set it to eager",
        ),
        (
            {"engine": {"mesh": {"tensor": 0}}},
            r"^engine\.mesh\.tensor is 0; it must be an integer of at least 1",
        ),
        (
            {"engine": 3},
            r"engine is 3; it must be a mapping, such as \{block_size: 16\}, with keys from: block_size",
        ),
        (
            {"workload": 12},
            r"workload is 12; it must be a mapping, such as \{kind: prompts, file: \.\.\.\}",
        ),
        (
            {"sampling": {"temperature": 3.0}},
            r"sampling\.temperature is 3\.0; it must be between 0 \(greedy\) and 2",
        ),
        (
            {"sampling": {"max_tokens": 3}},
            r"sampling\.max_tokens: output lengths belong to the workload",
        ),
        (
            {"sampling": {"stop": ["\n"]}},
            r"sampling\.stop: an experiment runs on token ids.*use sampling\.stop_token_ids",
        ),
        (
            {"sampling": {"bad_words": ["x"]}},
            r"sampling\.bad_words: an experiment.*use sampling\.bad_words_token_ids",
        ),
        (
            {"sampling": {"truncate_prompt_tokens": 3}},
            r"truncate_prompt_tokens: .*the workload has the lengths",
        ),
        (
            {"sampling": {"stop_token_ids": [1, "x"]}},
            r"sampling\.stop_token_ids\[1\] is 'x'; it must be an integer",
        ),
        ({"repeats": 0}, r"repeats is 0; it must be at least 1"),
        ({"seed": -1}, r"seed is -1; it must be at least 0"),
        ({"warmup": {"requests": -1}}, r"warmup\.requests is -1; it must be at least 0"),
        ({"workload": {"count": 2}}, r"workload\.kind is missing; it must be one of 'prompts'"),
        ({"sweep": {"list": [3]}}, r"sweep\.list is \[3\]"),
        ({"name": "a/b"}, r"name is 'a/b'"),
        ({"slo": {"ttft": 0}}, r"slo\.ttft is 0\.0; it must be above 0 seconds"),
        (
            {"cache_tokens": 100},
            r"100; it must be a multiple of engine\.block_size \(16\), and at least 16",
        ),
        ({"cache_tokens": 64, "engine": {"num_blocks": 4}}, r"both given; give one"),
        (
            {"workload": {"kind": "synthetik"}},
            r"workload\.kind is 'synthetik'.*did you mean 'synthetic'",
        ),
        (
            {"workload": {"count": 2}},
            r"workload\.kind is missing; it must be one of 'prompts', 'synthetic'",
        ),
        (
            {"workload": {**BASE["workload"], "prompt": {"dist": "fixed"}}},
            r"workload\.prompt\.value is missing",
        ),
        ({"workload": {**BASE["workload"], "max_token": 2}}, r"unknown key workload\.'max_token'"),
        (
            {"workload": {"kind": "trace", "file": "no.csv"}},
            r"there is no file .*no\.csv.*Azure Public Dataset, CC-BY",
        ),
        ({"sweep": {"gird": {}}}, r"sweep is .*keys from: grid, zip, list"),
        ({"sweep": {"grid": {"seed": 3}}}, r"sweep\.grid is .*list of one value or more"),
        (
            {"sweep": {"zip": {"seed": [1], "engine.block_size": [1, 2]}}},
            r"seed has 1, engine\.block_size has 2",
        ),
        ({"sweep": {"grid": {"repeats": [1, 2]}}}, r"'repeats'.*cannot be swept"),
        (
            {"sweep": {"grid": {"seed": [1, 2]}, "zip": {"seed": [3]}}},
            r"one key in two of its parts",
        ),
        ({"sweep": {"list": [{"seed": 0}, {}]}}, r"points 1 \(seed=0\) and 2 are the same"),
    ],
)
def test_config_error_has_path_value_and_limit(tmp_path, sections: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        points(tmp_path, **sections)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: smollm2-135m", "^name is missing; it must be text"),
        ("- 1", "a config is a mapping"),
        (None, "cannot read the config"),
    ],
)
def test_file_that_holds_no_config_is_an_error(tmp_path, text: str | None, message: str):
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        config.load(path)


def test_duplicate_key_error_has_both_lines():
    with pytest.raises(
        ValueError, match="line 3: the key 'seed' is given twice \\(first in line 1\\)"
    ):
        load_text("seed: 1\nname: a\nseed: 2", "x.yaml")
    assert load_text("x: &x {a: 1}\ny: {<<: *x, a: 2}", "x.yaml") == {"x": {"a": 1}, "y": {"a": 2}}


def test_values_are_converted_to_field_types(tmp_path):
    raw_sampling = {
        "temperature": 0,
        "stop_token_ids": [5, 4],
        "min_tokens": 40,
        "logit_bias": {3: 1},
    }
    (point,) = points(tmp_path, sampling=raw_sampling)
    sampling = point.experiment.sampling
    assert sampling.temperature == 0.0
    assert sampling.stop_token_ids == (5, 4)
    assert sampling.logit_bias == {3: 1.0}
    assert parse(Lengths, {"dist": "exponential", "mean": 3}, "x").mean == 3.0
    assert isinstance(point.experiment.workload, Synthetic)


def test_sweep_expands_in_order_and_labels_swept_keys(tmp_path):
    sweep = {
        "grid": {"engine.block_size": [8, 16], "engine.max_num_batched_tokens": [64, 256]},
        "zip": {"seed": [1, 2], "workload.count": [3, 4]},
    }
    expanded = points(tmp_path, sweep=sweep, cache_tokens=256)
    assert [p.label for p in expanded[:3]] == [
        "seed=1, count=3, block_size=8, max_num_batched_tokens=64",
        "seed=1, count=3, block_size=8, max_num_batched_tokens=256",
        "seed=1, count=3, block_size=16, max_num_batched_tokens=64",
    ]
    assert len(expanded) == 8
    assert {
        (p.experiment.engine.block_size, p.experiment.engine_config.num_blocks) for p in expanded
    } == {(8, 32), (16, 16)}
    assert points(tmp_path)[0].label == "one point"
    assert config.short_names(["a.seed", "b.seed", "c"]) == {
        "a.seed": "a.seed",
        "b.seed": "b.seed",
        "c": "c",
    }


def test_overrides_are_yaml_and_conflict_with_swept_keys(tmp_path):
    sweep = {"grid": {"engine.block_size": [8, 16]}}
    (point,) = points(
        tmp_path, "engine.max_num_seqs=4", "workload.prompt={dist: fixed, value: 3}", "slo.ttft=1.5"
    )
    assert point.experiment.engine.max_num_seqs == 4
    assert point.experiment.slo.ttft == 1.5
    two_keys = {"grid": {"engine.block_size": [8, 16], "seed": [1, 2]}}
    # set by hand: no longer swept
    expanded = points(tmp_path, "engine.block_size=32", sweep=two_keys)
    assert [p.label for p in expanded] == ["seed=1", "seed=2"]
    assert {p.experiment.engine.block_size for p in expanded} == {32}
    lengths = {"workload.prompt": [{"dist": "fixed", "value": n} for n in (3, 4)]}
    for form, text in (
        ({"zip": sweep["grid"]}, "engine.block_size=32"),
        ({"grid": lengths}, "workload.prompt.value=9"),
        (sweep, "engine={block_size: 32}"),
    ):
        with pytest.raises(ValueError, match=r"the config sweeps .*; add --set sweep=null"):
            points(tmp_path, text, sweep=form)
    expanded = points(tmp_path, "sweep.grid.engine.block_size=[32]", sweep=sweep)
    assert [p.swept for p in expanded] == [{"engine.block_size": 32}]
    for texts in (("sweep=null", "engine.block_size=32"), ("engine.block_size=32", "sweep=null")):
        assert len(points(tmp_path, *texts, sweep=sweep)) == 1
    for new in (
        "sweep={grid: {engine.block_size: [8]}}",
        "sweep.grid.engine.block_size=[8]",
        "sweep.grid={engine.block_size: [8]}",
    ):
        for texts in ((new, "engine.block_size=32"), ("engine={}", new)):
            with pytest.raises(
                ValueError,
                match=r"another --set sweeps engine\.block_size; leave one of the two out",
            ):
                points(tmp_path, *texts, sweep=two_keys)
    assert len(points(tmp_path, "sweep.zip.seed=[1, 2]")) == 2
    for text, message in (
        ("seed", "write it as"),
        ("name.x=1", "no keys inside"),
        ("seed=[1", "--set seed"),
    ):
        with pytest.raises(ValueError, match=message):
            points(tmp_path, text)
    with pytest.raises(ValueError, match="not a mapping of lists"):
        points(tmp_path, "sweep.grid.seed=[1]", sweep=[1])


def test_point_key_covers_exactly_measured_values(tmp_path):
    def key(**sections: Any) -> str:
        return points(tmp_path, **sections)[0].key

    base_key = key()
    assert len(base_key) == 64
    assert key(name="other", question="Why?", repeats=7) == base_key
    assert key(engine={"block_size": 16, "seed": 0}, seed=0) == base_key  # defaults written out
    assert key(workload=dict(reversed(BASE["workload"].items()))) == base_key
    assert key(cache_tokens=256) == key(engine={"num_blocks": 16})
    changed_keys = [
        key(seed=1),
        key(reseed=True),
        key(model="other"),
        key(engine={"block_size": 8}),
        key(slo={"ttft": 1.0}),
        key(warmup={"requests": 1}),
        key(sampling={"temperature": 0.5}),
        key(workload={**BASE["workload"], "count": 5}),
    ]
    assert len({base_key, *changed_keys}) == len(changed_keys) + 1


EARLIER_KEYS = {  # of the version before any field of `experiments.core.point_key.LATER_FIELDS`
    "a8d6b235305f884fa77d0707fcf159c321ed2d0a066a2db5c09ea44059b097a6": {},
    "5f636962a2f155e5eec98fcea169f2282db3d89ad273bdf5d426a0d129439684": {
        "engine": {"block_size": 8, "speculative": {"method": "ngram"}}
    },
    "94f94df0a4912fe72ac6cd51e196547cf1d5c9e920bfb4f0dde3d187e6832004": {
        "simulate": {"chip": "h200", "model": "llama-3-8b"}
    },
    "9bdc7aad2e4663107dc45cac5da570ace77ac233948b6af33532e5f77ba123d3": {
        "simulate": {"step_s": 1.0, "model": "llama-3-8b"}
    },
    "bd0a7d5c1e0b2570b1e4588a0eb00c2c6e93c700e055e66f75450278cffcf22b": {
        "simulate": {"chip": "a100-80g", "chips": 2, "model": "opt-13b"}
    },
}


def test_point_key_without_later_fields_is_that_of_earlier_versions(tmp_path):
    for key, sections in EARLIER_KEYS.items():
        ends = {"sampling": {"ignore_eos": True}} if "simulate" in sections else {}
        assert points(tmp_path, **sections, **ends)[0].key == key


def test_point_key_depends_on_file_content_not_path(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("one\n")
    (tmp_path / "c.txt").write_text("two\n")
    a, b, c = (points(tmp_path, workload={"kind": "prompts", "file": f"{n}.txt"})[0] for n in "abc")
    assert a.key == b.key != c.key
    assert c.content == "two\n"


def write_model(folder: Path) -> None:
    """Write files of one length and time."""
    (folder / "params").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for file in ("model.safetensors", "params/0"):
        (folder / file).write_bytes(b"1234")
        os.utime(folder / file, ns=(10**18, 10**18))


def test_point_key_depends_on_local_model_files_or_hub_name(tmp_path):
    assert [point_key._model_source(name) for name in ("smollm2-135m", "org/name")] == [
        "smollm2-135m",
        "org/name",
    ]

    def key(model: str) -> str:
        return points(tmp_path, model=model)[0].key

    for name in ("a", "b"):
        write_model(tmp_path / name)
    first = str(tmp_path / "a")
    base_key = key(first)
    assert base_key == key(str(tmp_path / "b")) != key("smollm2-135m")
    keys = [base_key]
    # written again by a trainer: as long as before, at another time
    for file in ("model.safetensors", "params/0"):
        os.utime(tmp_path / "a" / file)
        keys.append(key(first))
    (tmp_path / "a/config.json").write_text("{ }")
    keys.append(key(first))
    (tmp_path / "model.gguf").write_bytes(b"1")
    keys.append(key(str(tmp_path / "model.gguf")))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "path", ["attention_impl", "linear_impl", "model_family", "speculative.method"]
)
def test_point_key_depends_on_the_content_of_a_file_of_ones_own(tmp_path, path: str):
    def point_of(value: str) -> config.Point:
        section, _, field = path.partition(".")
        return points(tmp_path, engine={section: {field: value} if field else value})[0]

    def key(name: str, text: str, source: str = "own.py") -> str:
        (tmp_path / source).write_text(text)
        point = point_of(f"{source}:{name}")
        value = attrgetter(path)(point.experiment.engine)
        assert value == f"{(tmp_path / source).resolve()}:{name}"
        return point.key

    first = key("A", "A = 1")
    assert first == key("A", "A = 1", "moved.py")
    assert len({first, key("A", "A = 2"), key("B", "A = 1"), points(tmp_path)[0].key}) == 4
    message = rf"engine\.{re.escape(path)} is 'none\.py:A', but there is no file none\.py"
    with pytest.raises(ValueError, match=message):
        point_of("none.py:A")


def test_point_key_depends_on_the_content_of_a_draft_model(tmp_path):
    """A head that was trained again is another measurement, though its folder has the same name."""

    def key(name: str) -> str:
        return points(tmp_path, engine={"speculative": {"method": "eagle", "model": name}})[0].key

    for name in ("a", "b"):
        write_model(tmp_path / name)
    first = key(str(tmp_path / "a"))
    assert first == key(str(tmp_path / "b")) != key("org/name")
    os.utime(tmp_path / "a/params/0")
    assert key(str(tmp_path / "a")) != first


def test_error_in_policy_file_is_reported(tmp_path):
    for text, message in (
        (
            "raise KeyError('x')",
            r"engine\.policy is '.*p\.py:P', whose file raises KeyError: 'x' in <module> \(.*p\.py, line 1\); correct",
        ),
        ("P = 5", r"engine\.policy is '.*P in .* is no Policy"),
    ):
        (tmp_path / "p.py").write_text(text)
        with pytest.raises(ValueError, match=message):
            points(tmp_path, engine={"policy": "p.py:P"})


def test_unreadable_file_fails_when_config_is_loaded(tmp_path):
    def refused(message: str, **sections: Any) -> None:
        with pytest.raises(ValueError, match=message):
            points(tmp_path, **sections)

    simulated = {"simulate": {"fit": str(tmp_path)}, "sampling": {"ignore_eos": True}}
    for text in ("{", '{"pairs": 1}\n' * 9):
        (tmp_path / "steps.jsonl").write_text(text)
        refused(
            r"simulate\.fit: .*steps\.jsonl cannot be fitted \(.*; give another run's folder",
            **simulated,
        )
    file = tmp_path / "w"
    for kind, content, message in (
        ("prompts", b"\n\n", "w holds no prompts"),
        ("prompts", b"\xff", r"workload\.file: .*w cannot be read as UTF-8 text"),
    ):
        file.write_bytes(content)
        refused(message, workload={"kind": kind, "file": "w"})
    (tmp_path / "bad.yaml").write_bytes(b"name: \xff")
    with pytest.raises(
        ValueError, match=r"cannot read the config .*bad\.yaml: it is not UTF-8 text"
    ):
        config.load(tmp_path / "bad.yaml")


def test_relative_file_is_found_in_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "t.csv").write_text("x")
    monkeypatch.chdir(tmp_path / "here")
    content = config.read_content(Trace("trace", "t.csv"), tmp_path)
    assert content == ("x", str((tmp_path / "here" / "t.csv").resolve()))


def test_point_key_of_a_trace_is_that_of_versions_without_rounds(tmp_path):
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,3,4\n"
    )
    raw = {
        "name": "unit",
        "workload": {"kind": "trace", "file": "t.csv"},
        "replicas": {"count": 2},
        "sampling": {"ignore_eos": True},
        "simulate": {"step_s": 1.0, "model": "llama-3-8b"},
    }
    (point,) = config.expand(raw, tmp_path)
    # of commit ae39054
    assert point.key == "b59a679c062a47748029e4ceb58297237c8ea93d86a50fab6d7da6f06c855a2d"


def test_every_shipped_config_loads_and_has_its_command(tmp_path):
    folder = Path(__file__).parents[3] / "configs"
    trace = tmp_path / "trace.csv"
    rows = "2026-01-05 09:00:00.0,3,4\n2026-01-05 09:00:01.0,3,4\n"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    files = sorted(folder.glob("*.yaml"))
    assert {"quickstart", "w1", "azure_conv", "synthetic_conv", "synthetic_code"} <= {
        path.stem for path in files
    }
    for path in files:
        if path.stem.startswith("peers"):
            command = "bench.peers"
            assert parse(peers.Config, load_file(path), "").contenders
        else:
            command = "run"
            overrides = (f"workload.file={trace}",) if "kind: trace" in path.read_text() else ()
            assert config.load(path, overrides)
        first, second = path.read_text().splitlines()[:2]
        assert f"python -m experiments.{command} configs/{path.name}" in first
        assert second.startswith("# Hardware: ")
        assert "# Expected: " in path.read_text()


scalars = (
    st.integers() | st.booleans() | st.text(max_size=3) | st.none() | st.floats(allow_nan=False)
)


@drawn.given(
    40,
    100,
    st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    ),
)
def test_any_section_value_gives_a_config_or_value_error(value: Any):
    for section in (
        "engine",
        "workload",
        "sampling",
        "sweep",
        "warmup",
        "slo",
        "seed",
        "cache_tokens",
    ):
        with contextlib.suppress(ValueError):  # anything else escapes and fails
            expanded = config.expand({**BASE, section: value}, Path("."))
            assert all(json.dumps(p.swept) and len(p.key) == 64 for p in expanded)
