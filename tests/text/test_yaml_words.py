"""One table of what a word means, for every surface that takes words: configs, --set, NAME=VALUE,
`serve run`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from experiments.core import overrides, strict_yaml
from pagedjax.commands import options
from pagedjax.text import yaml_words
from tests import drawn
from tests.refusals import refused

MEANINGS: dict[str, Any] = {
    "10": 10,
    "010": 10,
    "0256": 256,
    "-3": -3,
    "+3": 3,
    "0x10": 16,
    "0o17": 15,
    "0.5": 0.5,
    "00.5": 0.5,
    "1e-3": 0.001,
    "1.0e-3": 0.001,
    ".5": 0.5,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    # texts, some of which are numbers and truths in YAML 1.1 or in Python
    "1:30": "1:30",
    "0b11": "0b11",
    "1_0": "1_0",
    "1_000.5": "1_000.5",
    "on": "on",
    "off": "off",
    "yes": "yes",
    "No": "No",
    "y": "y",
    "2026-11-26": "2026-11-26",
    "١٢": "١٢",
    "nan": "nan",
    "infinity": "infinity",
    "<<a": "<<a",
    "=": "=",
    "policy": "policy",
}


def in_a_file(text: str) -> Any:
    return strict_yaml.load_text(f"a: {{b: [{text}]}}", "config.yaml")["a"]["b"][0]


def by_set(text: str) -> Any:
    raw: dict[str, Any] = {}
    overrides.override(raw, f"a.b={text}")
    return raw["a"]["b"]


def swept(text: str) -> Any:
    raw: dict[str, Any] = {}
    overrides.override(raw, f"sweep.grid.a.b=[{text}]")
    return overrides.combinations(raw["sweep"])[0]["a.b"]


def on_the_command_line(text: str) -> Any:
    value = options.mapping("a=1")(f"a={text}")["a"]
    return None if value in ("null", "~") else value  # NAME=VALUE has no word for nothing


def of_serve_run(text: str) -> Any:
    module = pytest.importorskip(
        "pagedjax.server.ray.options", reason="the extra `ray` is not installed"
    )
    return module._read("replicas", text)


SURFACES = [
    yaml_words.load,
    yaml_words.word,
    in_a_file,
    by_set,
    swept,
    on_the_command_line,
    of_serve_run,
]


@pytest.mark.parametrize("read", SURFACES)
def test_a_word_means_the_same_everywhere(read):
    for text, meaning in MEANINGS.items():
        value = read(text)
        assert (type(value), value) == (type(meaning), meaning), text


def test_numbers_that_are_no_numbers_are_named():
    assert math.isinf(yaml_words.load("-.inf"))
    assert math.isnan(yaml_words.load(".nan"))
    for text, error in {
        "!!int 1_0": "line 1: '1_0' is no integer; write it in decimal",
        "!!float 1:30.5": "line 1: '1:30.5' is no number",
    }.items():
        with refused(error):
            yaml_words.load(text)
        with refused(f"config.yaml: {error}"):
            strict_yaml.load_text(text, "config.yaml")


@pytest.mark.parametrize("text", ["1_0", "1:30", "0b11", "on", "١٢", "1e2", "nan"])
def test_options_of_the_command_line_are_decimal(text):
    with refused(text):
        options.decimal(int)(text)
    assert options.decimal(int)("010") == 10
    assert options.decimal(float)("010") == 10.0
    assert options.decimal(float)("1e-3") == 0.001


@pytest.mark.parametrize("form", ["grid", "zip", "list"])
def test_a_swept_key_is_a_text(form):
    for key in (8, True, None, 0.5):
        part = [{key: 1}] if form == "list" else {key: [1]}
        with refused(f"sweep has the key {key!r}; a key is a path"):
            overrides.combinations({form: part})
    part = [{"on": 1}] if form == "list" else {"on": [1]}
    assert overrides.combinations(strict_yaml.load_text(yaml_words.dump({form: part}), "x")) == [
        {"on": 1}
    ]


@drawn.examples(100, 1_500)
def test_what_is_written_is_read_as_it_was(number):
    scalars = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
    )
    words = scalars | st.sampled_from([*MEANINGS])
    values = st.recursive(
        words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)
    )

    def holds(value: Any) -> None:
        text = yaml_words.dump(value, allow_unicode=True)
        assert yaml_words.load(text) == value

    drawn.check(number, holds, values)


def test_a_written_text_is_no_number_of_yaml_1_1():
    for text in MEANINGS:
        assert yaml.safe_load(yaml_words.dump(text)) == text
