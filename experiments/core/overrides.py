"""Changes to a raw config before it is checked: `--set a.b=c`, and the combinations of a sweep.

A raw config is what YAML gives: nested mappings. A path such as `engine.block_size` names a key
inside sections.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.core.strict_yaml import load_text
from pagedjax.options.own_names import as_mapping, name_in_one_line, names_own_value

_ONE_KEY = ("sweep.grid.", "sweep.zip.")  # prefixes of --set that are followed by one swept key


def override_all(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply every `a.b=value`. Sweeps are applied first, so the order of the options has no effect.

    Raises:
        ValueError: see `override`; or one option sets a key that another one sweeps.
    """
    paths = [(text.partition("=")[0], text) for text in overrides]
    sweeps = [path for path, text in paths if path == "sweep" or path.startswith("sweep.")]
    for path, text in paths:
        if path in sweeps:
            override(raw, text)
    if all(path.startswith(_ONE_KEY) for path in sweeps):
        swept = {path.split(".", 2)[-1] for path in sweeps}
    else:  # --set sweep=... or sweep.grid=...
        swept = {key for point in combinations(raw.get("sweep")) for key in point}
    for path, text in paths:
        if path not in sweeps:
            overlapping = [key for key in swept if _conflict(text, key)]
            if overlapping:
                raise ValueError(
                    f"--set {path}: another --set sweeps {overlapping[0]}; leave one of the two out"
                )
            override(raw, text)


def override(raw: dict[str, Any], text: str) -> None:
    """Apply `a.b=value` (the value is YAML) to the raw config in place.

    If the key is in the grid, it is no longer swept.

    After `sweep.grid.` and `sweep.zip.` the rest of the path is one key:
    sweep.grid.engine.block_size=[8, 16].
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ValueError(
            f"--set {text!r}: write it as section.key=value, such as engine.block_size=16"
        )
    if path.startswith(_ONE_KEY):  # the rest of the path is one key
        _, form, key = path.split(".", 2)
        sweep = raw.setdefault("sweep", {})
        if not isinstance(sweep, dict) or not isinstance(sweep.setdefault(form, {}), dict):
            raise ValueError(f"--set {path}: the config's sweep is not a mapping of lists")
        sweep[form][key] = load_text(value, f"--set {path}")
        return
    if path != "sweep":
        _remove_from_grid(raw, path, text)
    put(raw, path, load_text(value, f"--set {path}"))


def _remove_from_grid(raw: dict[str, Any], path: str, text: str) -> None:
    """Remove the key `path`, which --set gives, from the grid.

    Raises:
        ValueError: the key, a part of it or a section around it is swept elsewhere. The sweep would
            override it without a message.
    """
    points = combinations(raw.get("sweep"))
    grid = (raw.get("sweep") or {}).get("grid") or {}
    if path in grid:
        raw["sweep"] = {
            **raw["sweep"],
            "grid": {key: values for key, values in grid.items() if key != path},
        }
        return
    for swept in {key for point in points for key in point}:
        if _conflict(text, swept):
            raise ValueError(
                f"--set {path}: the config sweeps {swept}; add --set sweep=null, or set the sweep "
                "itself"
            )


def _conflict(text: str, key: str) -> bool:
    """Whether `a.b=value` and a swept key set the same value: the keys are equal, or one is a
    section around the other.

    A user's own value may have swept parameters: `policy=mine.py:aged` and a swept `policy.worth`
    do not conflict. They do if the text gives `worth` itself.
    """
    path, _, value = text.partition("=")
    if not key.startswith(f"{path}."):
        return f"{path}.".startswith(f"{key}.")
    loaded = load_text(value, f"--set {path}")
    own_value = loaded.get("name") if isinstance(loaded, dict) else loaded
    if not names_own_value(own_value):
        return True
    parameter = key.removeprefix(f"{path}.")
    return parameter in as_mapping(name_in_one_line(path, loaded))


def put(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set the nested key `path` of `raw`; missing sections are created, and the name of a user's own
    value becomes a mapping of it and its parameters.
    """
    *sections, last = path.split(".")
    for section in sections:
        if names_own_value(raw.get(section)):  # a key inside is a parameter of the value
            raw[section] = as_mapping(raw[section])
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: {section!r} is {raw!r}, which has no keys inside")
    raw[last] = value


def short_names(paths: Any) -> dict[str, str]:
    """Path -> its last name, or the whole path if two paths have the same last name."""
    names = [path.rsplit(".", 1)[-1] for path in paths]
    return {
        path: name if names.count(name) == 1 else path
        for path, name in zip(paths, names, strict=True)
    }


def combinations(sweep: Any) -> list[dict[str, Any]]:
    """Every point of a sweep as {path: value}: the product of `list` entries, `zip` rows and `grid`
    combinations.
    """
    if sweep is None:
        return [{}]
    if not isinstance(sweep, dict) or not sweep or not set(sweep) <= {"grid", "zip", "list"}:
        raise ValueError(
            f"sweep is {sweep!r}; it must be a mapping with keys from: grid, zip, list"
        )
    for form in ("grid", "zip"):
        _check_lists(form, sweep.get(form, {}))
    grid = sweep.get("grid", {})
    zipped = sweep.get("zip", {})
    entries = sweep.get("list", [{}])
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        raise ValueError(
            f"sweep.list is {entries!r}; it must be a list of mappings from keys to values"
        )
    for part in (grid, zipped, *entries):
        _check_keys(part)
    if len({len(values) for values in zipped.values()}) > 1:
        sizes = ", ".join(f"{key} has {len(values)}" for key, values in zipped.items())
        raise ValueError(
            f"sweep.zip walks its lists together, so they must be equally long: {sizes}"
        )
    zip_rows = [dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)]
    grid_rows = [dict(zip(grid, row, strict=True)) for row in itertools.product(*grid.values())]
    points = []
    for parts in itertools.product(entries, zip_rows or [{}], grid_rows):
        point = {key: value for part in parts for key, value in part.items()}
        if len(point) < sum(len(part) for part in parts):
            raise ValueError(f"sweep gives one key in two of its parts: {parts}")
        points.append(point)
    return points


def _check_lists(form: str, part: Any) -> None:
    if not isinstance(part, dict) or not all(isinstance(v, list) and v for v in part.values()):
        raise ValueError(
            f"sweep.{form} is {part!r}; it must map each swept key to a list of one value or more"
        )


def _check_keys(part: dict[Any, Any]) -> None:
    for key in part:
        if not isinstance(key, str):
            raise ValueError(
                f"sweep has the key {key!r}; a key is a path, such as engine.block_size"
            )
