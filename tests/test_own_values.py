"""Values of a user's own files: what such a file imports from its folder belongs to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from experiments.core import config
from pagedjax.host import policies
from pagedjax.options.own_values import bound_parameters, own_value, source_files
from tests.refusals import refused

POLICY = "from pagedjax.policies import by_key\nfrom weights import age\n"
POLICY += "MINE = by_key('mine', age)\n"
CONFIG = """name: helped
engine: {policy: 'mine.py:MINE'}
workload: {kind: synthetic, count: 2, prompt: {dist: fixed, value: 8}, output: {dist: fixed, value: 8}}
"""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_files_of_the_folder_are_found_at_any_depth_and_no_others(tmp_path):
    write(
        tmp_path,
        mine="import numpy, json\nimport a, parts.b as b\nfrom parts import c\nimport pagedjax.llm\n",
        a="def f():\n    import deep\n",
        deep="import mine\n",
        parts__b="from . import d\nfrom .d import x\n",
        parts__c="",
        parts__d="x = 1",
        pagedjax__llm="",
        unused="",
        broken="def (",
    )
    (tmp_path / "parts" / "__init__.py").write_text("")
    names = ["mine", "a", "deep", "parts/__init__", "parts/b", "parts/c", "parts/d"]
    assert source_files(tmp_path / "mine.py") == tuple(tmp_path / f"{name}.py" for name in names)
    assert source_files(tmp_path / "broken.py") == (tmp_path / "broken.py",)


@pytest.mark.parametrize("shared", [False, True], ids=["anew", "shared"])
def test_helpers_are_imported_from_any_current_folder_and_run_again_after_a_change(
    tmp_path, monkeypatch, shared
):
    write(tmp_path, mine="import helper_of_mine\nMINE = helper_of_mine.LIST\n")
    write(tmp_path, helper_of_mine="LIST = [1]\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def read() -> list[int]:
        return own_value("policy", f"{tmp_path}/mine.py:MINE", list, (), shared=shared)

    first = read()
    assert first == [1]
    assert (read() is first) == shared
    first.append(9)
    assert (read() == [1]) == (not shared)
    write(tmp_path, helper_of_mine="LIST = [1, 2]\n")
    assert read() == [1, 2]
    assert "helper_of_mine" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_an_import_that_exists_nowhere_is_named(tmp_path):
    write(tmp_path, mine="import no_such_module\n")
    with refused(
        r"mine\.py cannot be imported \(No module named 'no_such_module'\); install what it "
        r"imports, or put it into the file's folder$"
    ):
        own_value("policy", f"{tmp_path}/mine.py:MINE", list, ())
    assert str(tmp_path) not in sys.path


def test_the_key_of_a_point_has_what_the_file_imports(tmp_path, monkeypatch):
    write(tmp_path, mine=POLICY, weights="def age(seq):\n    return seq.arrival\n", unused="")
    (tmp_path / "helped.yaml").write_text(CONFIG)

    def key() -> str:
        (point,) = config.load(tmp_path / "helped.yaml")
        return point.key

    first = key()
    assert key() == first
    write(tmp_path, unused="x = 1\n")
    assert key() == first
    monkeypatch.chdir(os.path.dirname(tmp_path))
    assert key() == first
    write(tmp_path, weights="def age(seq):\n    return -seq.arrival\n")
    assert key() != first
    assert policies.find(f"{tmp_path}/mine.py:MINE").name == "mine"


def test_options_are_given_by_their_names():
    def first(a, /, b: int, *, c: float = 3, **further):
        return a, b, c, further

    options = {"b": 2, "c": 4, "d": 4}
    assert bound_parameters("x", first, 1, options) == options
    for options, message in (
        ({}, r"^x\.b is missing: first .* has no default of it; set it, or give it one$"),
        ({"b": "3"}, r"^x\.b is '3'; it must be an integer$"),
    ):
        with refused(message):
            bound_parameters("x", first, 1, options)
    with refused(r"^x\.b is no parameter of first .*; its parameters are c$"):
        bound_parameters("x", first, 2, {"b": 2})
    with refused(r"^x\.a is no parameter of len; it has none$"):
        bound_parameters("x", len, 1, {"a": 2})
