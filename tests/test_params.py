"""Sampling parameters: their checks do not depend on how the module writes its annotations."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from pagedjax.options import params
from tests.refusals import refused

SOURCE = Path(params.__file__).read_text("utf-8")
POSTPONED = "from __future__ import annotations\n"


@pytest.fixture(params=["postponed", "evaluated"])
def sampling_params(request, monkeypatch):
    """`SamplingParams` from a copy of the module, with its annotations as text and as types."""
    assert POSTPONED in SOURCE
    module = types.ModuleType("copy_of_params")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    evaluated = SOURCE.replace(POSTPONED, "").replace("-> SamplingParams:", '-> "SamplingParams":')
    source = SOURCE if request.param == "postponed" else evaluated
    exec(compile(source, "copy_of_params", "exec", dont_inherit=True), module.__dict__)
    return module.SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tokens", 1.5, "an integer"),
        ("n", True, "an integer"),
        ("temperature", float("nan"), "a finite number"),
        ("top_p", "0.5", "a finite number"),
        ("ignore_eos", 1, "True or False"),
    ],
)
def test_types_are_checked_however_annotations_are_written(sampling_params, name, value, rule):
    with refused(f"{name} is {value!r}; it must be {rule}"):
        sampling_params(**{name: value})
    assert sampling_params().max_tokens == 16
