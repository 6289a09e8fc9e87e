"""Values of a user's own: "module:NAME", or "folder/file.py:NAME". This module imports no jax.

A file may import others of its folder, whatever the current folder is. It is run anew for each
engine, and so are they.
"""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")
PROJECT = ("pagedjax", "pallas_kernels", "experiments")  # their versions are known
Stamps = tuple[tuple[str, int, int], ...]  # of each file: its path, time of change and size


def names_own_value(value: Any) -> bool:
    """Returns whether a value may name a user's own one, as in `own_value`."""
    return isinstance(value, str) and ":" in value


def own_value(
    field: str, name: str, kind: type[Value], built_in: Iterable[str], *, shared: bool = False
) -> Value:
    """Returns the user's own value for a field.

    A file is run anew, so that no engine sees what another one left in its globals.

    Args:
        name: "module:NAME" or "folder/file.py:NAME".
        built_in: the names of the built-in values, for error messages.
        shared: the file is run again only after it, or a file that it imports from its folder, has
            changed. So all that name a value of it get the same one, as functions must be from
            which programs are compiled.

    Raises:
        ValueError: there is no such module, file or value, or the value is not of that kind.
    """
    module, _, attribute = name.rpartition(":")
    choices = "".join(f"{choice}, " for choice in built_in)
    usage = f"write {f'one of {choices}' if choices else ''}module:NAME, or folder/file.py:NAME"
    if not module or not attribute:
        raise ValueError(f"{field} is {name!r}; {usage}")
    is_file = module.endswith(".py")
    try:
        if not is_file:
            values = vars(importlib.import_module(module))
        else:
            values = _shared_values(module) if shared else _run_file(module)
    except ImportError as error:
        if is_file:
            usage = "install what it imports, or put it into the file's folder"
        raise ValueError(
            f"{field} is {name!r}, but {module} cannot be imported ({error}); {usage}"
        ) from error
    except FileNotFoundError:
        raise ValueError(f"{field} is {name!r}, but there is no file {module}; {usage}") from None
    value = values.get(attribute)
    if not isinstance(value, kind):
        names = sorted(key for key, item in values.items() if isinstance(item, kind))
        raise ValueError(
            f"{field} is {name!r}, but {attribute} in {module} is no {kind.__name__}; "
            f"those in it: {names or 'none'}"
        )
    return value


def source_files(file: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Returns a Python file, and behind it the files of its folder that it imports, at any depth.

    They are found in the text, so nothing is run. A file that cannot be parsed imports nothing.
    What is installed, and the packages of this project, are not among them.
    """
    first = Path(os.path.abspath(file))
    if first.parent.name == "site-packages":
        return (first,)
    files = [first]
    for importer in files:  # grows
        for module in _imported_modules(importer, first.parent):
            for path in (module.with_suffix(".py"), module / "__init__.py"):
                if path.is_file() and path not in files:
                    files.append(path)
    return (first, *sorted(files[1:]))


def _imported_modules(importer: Path, folder: Path) -> Iterator[Path]:
    """The places in `folder` of all modules that the text of a file may import, without suffix."""
    try:
        tree = ast.parse(importer.read_bytes())
    except (SyntaxError, ValueError):  # said when the file is run
        return
    for node in ast.walk(tree):
        names: list[str] = []
        base = folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
            if node.level:
                base = importer.parents[node.level - 1]
        for name in names:
            parts = name.split(".")
            if base == folder and parts[0] in PROJECT:
                continue
            for count in range(1, len(parts) + 1):
                yield base.joinpath(*parts[:count])


def _shared_values(path: str) -> dict[str, Any]:
    """Returns the global values of a file, which is run again only after a change."""
    stats = [(str(file), file.stat()) for file in source_files(path)]
    return _values_of(path, tuple([(file, s.st_mtime_ns, s.st_size) for file, s in stats]))


@cache
def _values_of(path: str, stamps: Stamps) -> dict[str, Any]:
    return _run_file(path)


def _run_file(path: str) -> dict[str, Any]:
    """Runs a file, and anew what it imports from its folder -> its global values."""
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    helpers = {str(file) for file in source_files(path)[1:]}
    folder = os.path.dirname(os.path.abspath(path))
    _forget_modules(helpers)
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(path)
    finally:
        sys.path.remove(folder)
        _forget_modules(helpers)


def _forget_modules(files: set[str]) -> None:
    """Remove the modules of some files, so that the next import runs them."""
    if not files:
        return
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and os.path.abspath(file) in files:
            del sys.modules[name]
