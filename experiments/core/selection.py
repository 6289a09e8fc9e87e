"""Runs chosen by the values of their swept keys, in place of the hash in the name of a folder:
`runs/x engine.policy=fcfs workload.arrivals.rate=4`.

A key is the whole path, or its last name if no other swept key ends in it. `repeat` is a key too.
Pure functions, but for `is_condition` and `one_run`, which look at folders.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.core import store
from experiments.core.overrides import short_names
from experiments.core.strict_yaml import load_text
from pagedjax.options.config import one_of
from pagedjax.text import yaml_words

REPEAT = "repeat"
SHOWN = 12  # values that an error lists

Run = dict[str, Any]  # a summary, as store.read_runs returns it


class Selection(NamedTuple):
    """A folder of runs (or a glob), and `KEY=VALUE` words that choose some of them."""

    folder: str
    conditions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.folder, *self.conditions])


def is_condition(word: str) -> bool:
    """Whether a word is KEY=VALUE and not the name of a folder."""
    return re.match(r"[A-Za-z_][\w.]*=", word) is not None and not Path(word).exists()


def split(words: Sequence[str]) -> list[Selection]:
    """The folders among the words of a command line, each with the conditions that follow it.

    Raises:
        ValueError: the first word is a condition.
    """
    selections: list[Selection] = []
    for word in words:
        if not is_condition(word):
            selections.append(Selection(word))
        elif not selections:
            raise ValueError(
                f"{word} comes before any folder; name the folder of a sweep first, such as "
                f"runs/NAME {word}"
            )
        else:
            folder, conditions = selections[-1]
            selections[-1] = Selection(folder, (*conditions, word))
    return selections


def choose(runs: Sequence[Run], selection: Selection) -> tuple[list[Run], dict[str, Any]]:
    """The runs that meet every condition, and the value of each chosen key.

    Raises:
        ValueError: no run has such a key or value. The message lists those that exist, and the
            nearest.
    """
    chosen = list(runs)
    values: dict[str, Any] = {}
    for condition in selection.conditions:
        name, _, text = condition.partition("=")
        option = f"the key of a selection in {selection.folder}"
        key = key_of(option, name, [*swept_keys(runs), REPEAT])
        if key in values:
            raise ValueError(
                f"{selection} gives {key} twice; give it once, or name the folder again for the "
                "other side"
            )
        values[key] = value_of(key, text, chosen, _source_text(selection.folder, values))
        chosen = [run for run in chosen if _same(value_in(run, key), values[key])]
    return chosen, values


def key_of(option: str, name: str, keys: Sequence[str]) -> str:
    """The path of a key, which is given by its path or by its last part.

    Args:
        option: the option that gives the name, for an error.
        keys: the paths that exist.

    Raises:
        ValueError: there is no such key; the message lists the existing keys.
    """
    if not keys:
        raise ValueError(f"{option} is {name!r}, and nothing is swept; leave it out")
    paths = {short: path for path, short in short_names(keys).items()}
    path = name if name in keys else paths.get(name, name)
    one_of(option, path, tuple(keys))
    return path


def value_of(key: str, text: str, runs: Sequence[Run], source: str) -> Any:
    """The value that a text of YAML names, among the values that the runs have for a key.

    Args:
        source: where the runs are, in words, for an error.

    Raises:
        ValueError: there is no such value; the message lists the values and the nearest one.
    """
    values = values_in(runs, key)
    if not values:
        raise ValueError(f"the runs of {source} do not have {key}; leave {key}={text} out")
    # a label may be no YAML; labels of earlier versions have "None" for null
    labelled = [value for value in values if text in (value_text(value), str(value))]
    try:
        parsed_value = load_text(text, f"{key}={text}")
    except ValueError:
        if labelled:
            return labelled[0]
        raise
    for value in values:
        if _same(value, parsed_value):
            return value
    if labelled:
        return labelled[0]
    nearest = nearest_value(parsed_value, values)
    raise ValueError(
        f"{key}={text} selects no run of {source}; {key} has {value_list(values)} (the nearest: "
        f"{key}={value_text(nearest)})"
    )


def swept_keys(runs: Iterable[Run]) -> list[str]:
    """Every swept key, each once, in the order of the runs."""
    return list(dict.fromkeys(path for run in runs for path in run["swept"]))


def value_in(run: Run, key: str) -> Any:
    """The value of a swept key in a run; None if the run's sweep does not have the key."""
    return run["repeat"] if key == REPEAT else run["swept"].get(key)


def values_in(runs: Iterable[Run], key: str) -> list[Any]:
    """The values that a key has, each once, in the order of the runs."""
    values = [value_in(run, key) for run in runs if key == REPEAT or key in run["swept"]]
    # null and the text "null" are written in the same way, and so are 4 and "4"
    by_text = {(isinstance(value, str), value_text(value)): value for value in values}
    return list(by_text.values())


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The keys in which the runs differ, with their values."""
    values_by_key = {key: values_in(runs, key) for key in (*swept_keys(runs), REPEAT)}
    return {key: values for key, values in values_by_key.items() if len(values) > 1}


def ambiguity(keys: Mapping[str, Sequence[Any]]) -> str:
    """What several chosen runs differ in, and the condition to add."""
    texts = [f"{key} ({value_list(values)})" for key, values in keys.items()]
    example = " ".join(f"{key}={value_text(values[0])}" for key, values in keys.items())
    if not keys:
        return "which have equal keys; give the folder of one sweep"
    return f"which differ in {' and '.join(texts)}; add a value, such as {example}"


def one_run(text: str, folders: Sequence[Path]) -> Path:
    """The folder of the one run that a text such as "runs/x block_size=16 repeat=0" chooses.

    Args:
        folders: the text's own folder is searched in each of them, in their order.

    Raises:
        ValueError: the text chooses no run, or several.
    """
    first, *conditions = shlex.split(text)
    places = [folder / first for folder in folders]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise ValueError(
            f"there is no folder {' or '.join(map(str, places))}; give a folder of a sweep"
        )
    runs, _ = choose(store.read_runs(place), Selection(str(place), tuple(conditions)))
    if len(runs) > 1:
        raise ValueError(f"{text} selects {len(runs)} runs, {ambiguity(differing(runs))}")
    return Path(runs[0]["run"])


def nearest_value(value: Any, values: Sequence[Any]) -> Any:
    """The one of `values` that is nearest to `value`: the nearest number, else the nearest text."""
    numbers = [number for number in values if type(number) in (int, float)]
    if type(value) in (int, float) and numbers:
        return min(numbers, key=lambda number: abs(number - value))
    texts = {value_text(candidate): candidate for candidate in values}
    (text,) = difflib.get_close_matches(value_text(value), list(texts), n=1, cutoff=0.0)
    return texts[text]


def value_text(value: Any) -> str:
    """A value as YAML writes it, in one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, np.generic):  # a value from a DataFrame
        value = value.item()
    text = yaml_words.dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.removesuffix("...\n").strip()


def value_list(values: Sequence[Any]) -> str:
    """Values in one line; of many values, the first ones and the number of the others."""
    text = ", ".join(map(value_text, values[:SHOWN]))
    return text if len(values) <= SHOWN else f"{text} and {len(values) - SHOWN} more"


def _same(value: Any, expected: Any) -> bool:
    """Whether two values of YAML are equal: 4 and 4.0 are, and 1 and true are not."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _source_text(folder: str, values: Mapping[str, Any]) -> str:
    """A folder and the values that were chosen before, in words."""
    chosen = " and ".join(f"{key}={value_text(value)}" for key, value in values.items())
    return f"{folder} with {chosen}" if chosen else folder
