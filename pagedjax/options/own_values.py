"""Values of a user's own: "module:NAME", or "folder/file.py:NAME". This module imports no jax.

A file may import others of its folder, whatever the current folder is. It is run anew for each
engine, and so are they.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def call_with_options(
    where: str, function: Callable[..., Any], given: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Calls a user's function with options of a config as keyword arguments -> its result.

    Args:
        where: the path of the options in the config, for errors.
        given: the arguments before the options.

    Raises:
        ValueError: see `check_options`.
    """
    check_options(where, function, len(given), options)
    return function(*given, **options)


def check_options(
    where: str, function: Callable[..., Any], given: int, options: Mapping[str, Any]
) -> None:
    """Checks that a function takes `given` arguments, and then these options by their names.

    Raises:
        ValueError: an option that it does not have (with the near name), one that is missing, or
            fewer arguments than `given`.
    """
    name = getattr(function, "__name__", str(function))
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if len(positional) < given and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ValueError(
            f"{where}: {name} takes {len(positional)} arguments before its options, and it gets "
            f"{given}; correct its signature"
        )
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    named += [p for p in positional[given:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in named]
    for key in options:
        if key not in names and not takes_all:
            near = difflib.get_close_matches(str(key), names, n=1)
            known = f"its options are {', '.join(names)}" if names else "it has no options"
            hint = f"did you mean {near[0]!r}?" if near else known
            raise ValueError(f"{where}.{key} is no option of {name}; {hint}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{where}.{missing[0]} is missing: {name} has no default of it; set it")


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
