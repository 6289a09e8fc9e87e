"""Runs are chosen by the values of swept keys; a wrong choice says what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.core import config, selection
from experiments.core.selection import Selection, choose, split
from pagedjax.text import yaml_words
from tests.experiments.test_compare import put


def runs_of(*points: dict[str, Any], repeats: int = 1) -> list[dict[str, Any]]:
    return [
        {"swept": point, "repeat": repeat, "run": f"x/{place}/{repeat}"}
        for place, point in enumerate(points)
        for repeat in range(repeats)
    ]


POLICIES = (("fcfs", 2.0), ("fcfs", 4.0), ("shortest", 4.0), ("mine.py:AGED", 2.0))
GRID = runs_of(
    *({"engine.policy": policy, "workload.arrivals.rate": rate} for policy, rate in POLICIES),
    repeats=2,
)


@pytest.mark.parametrize(
    ("conditions", "places"),
    [
        ((), [0, 0, 1, 1, 2, 2, 3, 3]),
        (("engine.policy=fcfs",), [0, 0, 1, 1]),
        (("policy=fcfs", "rate=4"), [1, 1]),  # last names, and 4 is 4.0
        (("policy=mine.py:AGED", "repeat=1"), [3]),
        (("rate=2",), [0, 0, 3, 3]),
    ],
)
def test_conditions_choose_runs(conditions: tuple[str, ...], places: list[int]):
    runs, _ = choose(GRID, Selection("x", conditions))
    assert [int(run["run"].split("/")[1]) for run in runs] == places


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (
            ("engine.polcy=fcfs",),
            "the key of a selection in x is 'engine.polcy'; it must be one of 'engine.policy', "
            "'workload.arrivals.rate', 'repeat' (did you mean 'engine.policy'?)",
        ),
        (
            ("policy=shortst",),
            "engine.policy=shortst selects no run of x; engine.policy has fcfs, shortest, "
            "mine.py:AGED (the nearest: engine.policy=shortest)",
        ),
        (
            ("rate=3.5",),
            "workload.arrivals.rate has 2.0, 4.0 (the nearest: workload.arrivals.rate=4.0)",
        ),
        (
            ("policy=shortest", "rate=2"),
            "workload.arrivals.rate=2 selects no run of x with engine.policy=shortest; "
            "workload.arrivals.rate has 4.0 (the nearest: workload.arrivals.rate=4.0)",
        ),
        (("repeat=2",), "repeat=2 selects no run of x; repeat has 0, 1 (the nearest: repeat=1)"),
        (("rate=2", "workload.arrivals.rate=4"), "gives workload.arrivals.rate twice; give it"),
    ],
)
def test_a_choice_without_runs_says_which_values_there_are(
    conditions: tuple[str, ...], message: str
):
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(GRID, Selection("x", conditions))


def test_the_key_is_not_one_of_the_chosen_runs():
    runs = runs_of({"engine.policy": "fcfs"}, {"engine.policy": "aged", "engine.policy.worth": 64})
    message = "the runs of x with engine.policy=fcfs do not have engine.policy.worth; leave engine"
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(runs, Selection("x", ("policy=fcfs", "worth=64")))


@pytest.mark.parametrize("value", [None, "None"])
def test_none_is_chosen_as_labels_show_it(value: Any):
    runs = runs_of({"key": value}, {"key": "another"}, {"key": None})
    chosen, _ = choose(runs, Selection("x", (f"key={value}",)))
    assert all(run["swept"]["key"] == value for run in chosen)


def test_numbers_of_a_table_are_values():
    numbers = [np.int64(4), np.float64(0.5), np.bool_(True)]
    assert list(map(selection.value_text, numbers)) == ["4", "0.5", "true"]


def test_nothing_is_swept():
    with pytest.raises(ValueError, match=r"^the key of a selection in x is 'rate'; it must be one"):
        choose(runs_of({}), Selection("x", ("rate=2",)))


@pytest.mark.parametrize(
    "value", [None, True, 1e-5, 2.0, "a b", "[1", [1, 2], {"name": "f", "of": None}], ids=repr
)
def test_a_printed_label_is_a_selection(value: Any):
    swept = {"engine.key": value, "other": 1}
    label = config.Point(None, swept, "", "", "").label  # pyright: ignore[reportArgumentType]
    condition, _, _ = label.rpartition(", other=1")
    runs = runs_of({"engine.key": "another", "other": 1}, swept)
    chosen, _ = choose(runs, Selection("x", (condition,)))
    assert chosen == [runs[1]]


VALUES = st.one_of(
    st.booleans(), st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=5))
@example([None, "null", "'null'"])
@example([4, "4", "'4'"])
def test_every_value_is_chosen_by_its_text(values: list[Any]):
    runs = runs_of(*({"key": value} for value in values))
    for value in values:
        text = yaml_words.dump(value, default_flow_style=True, width=1 << 20)
        condition = f"key={text.removesuffix('...' + chr(10)).strip()}"
        chosen, _ = choose(runs, Selection("x", (condition,)))
        assert {repr(run["swept"]["key"]) for run in chosen} <= {
            repr(candidate) for candidate in values if candidate == value
        }
        assert any(run["swept"]["key"] == value for run in chosen)


@pytest.mark.parametrize("values", [[True, 1], [1, True], [False, 0.0], [0, False]])
def test_a_number_is_no_truth(values: list[Any]):
    runs = runs_of(*({"key": value} for value in values))
    for place, value in enumerate(values):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        chosen, _ = choose(runs, Selection("x", (f"key={text}",)))
        assert chosen == [runs[place]]


def test_words_follow_their_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["runs/a", "policy=fcfs", "rate=2", "runs/b", "k=v"]
    assert split(words) == [
        Selection("runs/a", ("policy=fcfs", "rate=2")),
        Selection("runs/b", ("k=v",)),
    ]
    (tmp_path / "k=v").mkdir()
    assert split(words)[-1] == Selection("k=v"), "a folder of this name"
    with pytest.raises(ValueError, match=r"^rate=2 comes before any folder; name the folder"):
        split(["rate=2", "runs/a"])


def test_a_fit_names_its_run_by_values(tmp_path):
    for size in (8, 16):
        for repeat in range(2):
            put(tmp_path / "runs", repeat, 1.0, {"engine.block_size": size}, point=f"point{size}")
    step = {
        "seconds": 0.5, "tokens": 8, "padded_tokens": 0, "sequences": 2, "context_tokens": 9, "pairs": 9,
        "prompt_tokens": 8, "sampled": 2, "decodes": 0, "compilations": 0,
    }  # fmt: skip
    run = tmp_path / "runs" / "point16" / "1"
    (run / "steps.jsonl").write_text(f"{json.dumps(step)}\n" * 8)
    raw = {
        "name": "fit",
        "workload": {
            "kind": "synthetic",
            "count": 2,
            "prompt": {"dist": "fixed", "value": 8},
            "output": {"dist": "fixed", "value": 2},
        },
        "sampling": {"ignore_eos": True},
    }

    def fitted(text: str) -> str | None:
        (point,) = config.expand({**raw, "simulate": {"fit": text}}, tmp_path)
        assert point.experiment.simulate is not None
        return point.experiment.simulate.fit

    assert fitted("runs block_size=16 repeat=1") == fitted("runs/point16/1") == str(run)
    differ = re.escape(
        "selects 2 runs, which differ in repeat (0, 1); add a value, such as repeat=0"
    )
    with pytest.raises(ValueError, match=rf"simulate\.fit: runs block_size=16 {differ}"):
        fitted("runs block_size=16")
    with pytest.raises(ValueError, match=r"simulate\.fit: there is no steps\.jsonl in .*point8/0"):
        fitted("runs block_size=8 repeat=0")
    with pytest.raises(ValueError, match=r"simulate\.fit: there is no folder .* give a folder of"):
        fitted("run block_size=8")


def test_many_values_are_listed_in_part():
    assert selection.value_list(range(14)).endswith("10, 11 and 2 more")
    assert Path(str(Selection("a"))) == Path("a")
