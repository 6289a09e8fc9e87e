"""Values of a user's own: "module:NAME", or "folder/file.py:NAME". NAME is the value, or a function
that returns the value and may have parameters (own_names.py). This module imports no jax.

A file may import other files of its folder, whatever the current folder is. The file and these
imports are run anew for each engine; those of a `shared` value, only after one of them has changed.
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
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pagedjax.options.own_errors import place_of, placed
from pagedjax.options.own_names import OwnName, name_in_one_line, own_name, parameters_of

Value = TypeVar("Value")
# packages whose files are no part of a user's value: they are neither run anew nor part of a key
PROJECT = ("pagedjax", "pallas_kernels", "experiments")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
Stamps = tuple[tuple[str, int, int], ...]  # of each file: its path, time of change and size


def own_value(
    field: str, name: str, kind: type[Value], built_in: Iterable[str], *, shared: bool = False
) -> Value:
    """Returns the user's own value for a field.

    A file is run anew, so that no engine sees what another one left in its globals.

    Args:
        name: "module:NAME" or "folder/file.py:NAME"; behind it the parameters, in parentheses, if
            NAME is a function that returns the value.
        built_in: the names of the built-in values, for error messages.
        shared: the file is run again only after it, or a file that it imports from its folder, has
            changed. So equal names give the same object. Compiled programs need this, because they
            are looked up by their functions.

    Raises:
        ValueError: there is no such module, file or value, the file or the function raises, the
            value is not of that kind, or a parameter is none of the function's, or is missing, or
            has another type.
    """
    parts = own_name(name)
    usage = "module:NAME, or folder/file.py:NAME"
    built_in_names = ", ".join(built_in)
    usage = f"write one of {built_in_names}, {usage}" if built_in_names else f"write {usage}"
    if not parts.module or not parts.attribute:
        raise ValueError(f"{field} is {name!r}; {usage}")
    values = _values_in(field, parts, usage, shared=shared)
    value = values.get(parts.attribute)
    if not isinstance(value, kind):
        names = sorted(key for key, item in values.items() if isinstance(item, kind))
        error = (
            f"{field} is {name!r}, but {parts.attribute} in {parts.module} is no {kind.__name__}; "
            f"those in it: {names or 'none'}"
        )
        if not callable(value) or isinstance(value, type):
            raise ValueError(error)
        parameters = parameters_of(field, parts)
        arguments = bound_parameters(field, value, 0, parameters, error)
        result_of = _shared_result if shared else _result
        value = result_of(field, name, value, tuple(arguments.items()))
        if not isinstance(value, kind):
            raise ValueError(
                f"{field} is {name!r}, and {parts.attribute} in {parts.module} returned "
                f"{value!r:.80}; it must return a {kind.__name__}"
            )
    elif parts.call:
        raise ValueError(
            f"{field} is {name!r}, and {parts.attribute} in {parts.module} is a {kind.__name__}, "
            f"which takes no parameters; write a function of them that returns a {kind.__name__}"
        )
    return value


def named_value(
    field: str,
    value: Any,
    kind: type[Value],
    shipped: Mapping[str, Any],
    *,
    shared: bool = False,
) -> Value:
    """Returns the value that a name stands for: a shipped one, or the user's own, with parameters
    as in a mapping {"name": "mine.py:aged", "worth": 64}. A value of the kind is returned as it is.

    Args:
        shipped: the values of the package by their names. None: the caller finds the value of this
            name itself.
        shared: see `own_value`.

    Raises:
        ValueError: see `own_value`; or the user's own value has the name of a shipped one.
    """
    value = name_in_one_line(field, value)
    if isinstance(value, kind):
        result = value
    elif not isinstance(value, str):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(
            f"{field} is {value!r:.200}; it must be one of {', '.join(map(repr, shipped))}, "
            f"FILE.py:NAME, or {article} {kind.__name__}"
        )
    elif value in shipped:
        return shipped[value]
    else:
        result = own_value(field, value, kind, shipped, shared=shared)
    name = getattr(result, "name", "")
    # a recording has only the name: with this one it would be replayed with the shipped value
    shipped_value = shipped.get(name)
    if shipped_value is not None and shipped_value != result:
        text = value if isinstance(value, str) else name
        raise ValueError(f"{field} {text!r} calls itself {name!r}, which is another one; rename it")
    return result


def check_call(start: str, function: Callable[..., Any], count: int, usage: str) -> None:
    """Raises ValueError, beginning with `start`, unless a user's function takes so many arguments.
    usage: what the error says to write.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a type of another language, such as immutables.Map, has no signature
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise ValueError(f"{start} takes other arguments; write {usage}") from None


def true_or_false(function: str, result: Any) -> bool:
    """Returns the result of a user's function as a bool.

    Args:
        function: which function returned it, in words.

    Raises:
        ValueError: the result is neither True nor False.
    """
    if isinstance(result, int) and result in (0, 1):
        return bool(result)
    # a numpy.bool is taken, and an array of them is not
    dtype = getattr(result, "dtype", None)
    if str(dtype) != "bool" or getattr(result, "shape", None) != ():
        raise ValueError(f"{function} returned {result!r:.200}; return True or False")
    return bool(result)


def own_function(
    field: str, name: str, num_arguments: int, options: Mapping[str, Any] = NO_OPTIONS
) -> Callable[..., Any]:
    """Returns the user's own function of a field, with its parameters.

    Args:
        name: "module:NAME" or "folder/file.py:NAME", with parameters in parentheses.
        num_arguments: with how many arguments the function is called.
        options: keyword arguments that the field itself gives.

    Raises:
        ValueError: see `own_value`; or the function takes fewer arguments.
    """
    parts = own_name(name)
    function = own_value(field, parts._replace(call="").text, FunctionType, ())
    parameters = parameters_of(field, parts)
    repeated = next((key for key in options if key in parameters), None)
    if repeated:
        raise ValueError(f"{field}.{repeated} is given, and the section gives it too; leave it out")
    arguments = bound_parameters(field, function, num_arguments, {**parameters, **options})
    return partial(function, **arguments)


def _values_in(field: str, name: OwnName, usage: str, *, shared: bool) -> Mapping[str, Any]:
    """Returns the values of a module or file. Errors: see `own_value`.

    Args:
        usage: what an error says to write.
    """
    module = name.module
    if name.is_file and not os.path.isfile(module):
        raise ValueError(f"{field} is {name.text!r}, but there is no file {module}; {usage}")
    try:
        if not name.is_file:
            return vars(importlib.import_module(module))
        return _shared_values(module) if shared else _run_file(module)
    except ImportError as error:
        if name.is_file:
            usage = "install what it imports, or put it into the file's folder"
        raise ValueError(
            f"{field} is {name.text!r}, but {module} cannot be imported ({error}); {usage}"
        ) from error
    except Exception as error:  # a user's file may raise anything
        kind = "file" if name.is_file else "module"
        raise ValueError(
            f"{field} is {name.text!r}, whose {kind} raises {type(error).__name__}: "
            f"{error}{place_of(error)}; correct the {kind}"
        ) from error


def bound_parameters(
    place: str,
    function: Callable[..., Any],
    num_arguments: int,
    values: Mapping[str, Any],
    missing_error: str = "",
) -> dict[str, Any]:
    """Returns the keyword arguments of a user's function: the values of its parameters, converted
    to their types.

    Args:
        place: the path of the parameters in the config, for errors.
        num_arguments: how many arguments the function gets before them.
        missing_error: how the error begins if a parameter is missing and there are no values.

    Raises:
        ValueError: the function has no such parameter (the error suggests the nearest name), a
            parameter is missing or has another type, or the function takes fewer arguments.
    """
    name = _name_and_place(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of some compiled functions
        error = missing_error or f"{place}: {name} has no signature; write a def"
        raise ValueError(error) from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes_any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) < num_arguments and not takes_any_number:
        raise ValueError(
            f"{place}: {name} takes {len(positional)} arguments before its parameters, and it gets "
            f"{num_arguments}; correct its signature"
        )
    arguments = [p.name for p in positional[:num_arguments] if p.kind is p.POSITIONAL_OR_KEYWORD]
    settable = positional[num_arguments:]
    settable += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    names = [p.name for p in settable if p.kind is not p.POSITIONAL_ONLY]
    for key in values:
        if key in arguments or (key not in names and not takes_all):
            raise ValueError(f"{place}.{key} is no parameter of {name}; {_hint(key, names)}")
    missing = [p.name for p in settable if p.default is p.empty and p.name not in values]
    if missing and missing_error and not values:
        raise ValueError(f"{missing_error}; as a function that returns one, it needs {missing[0]}")
    if missing:
        raise ValueError(
            f"{place}.{missing[0]} is missing: {name} has no default of it; set it, or give it one"
        )
    return _typed_values(place, function, values)


def _typed_values(
    place: str, function: Callable[..., Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of a function's parameters, converted to their types. Errors: see
    `bound_parameters`.
    """
    try:
        types = get_type_hints(function, include_extras=True)
    except Exception:  # a type that is not there when the file runs: then no type is checked
        types = {}
    return {key: _as_type(f"{place}.{key}", types.get(key), values[key]) for key in values}


def _name_and_place(function: Callable[..., Any]) -> str:
    """The name of a user's function, with its file and line if it has one."""
    name = getattr(function, "__name__", str(function))
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    return f"{name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def _hint(key: str, names: Sequence[str]) -> str:
    """What to write in place of a parameter that a function does not have."""
    close_names = difflib.get_close_matches(str(key), names, n=1)
    if close_names:
        return f"did you mean {close_names[0]!r}?"
    return f"its parameters are {', '.join(names)}" if names else "it has none"


def _as_type(start: str, kind: Any, value: Any) -> Any:
    """Returns the value as the type `kind` of a parameter. Types without a rule take any value.

    Raises:
        ValueError: the value is of another type, or outside of the bounds of an `Annotated`.
    """
    if get_origin(kind) is Annotated:
        base, *bounds = get_args(kind)
        value = _as_type(start, base, value)
        for bound in bounds:
            if hasattr(bound, "check"):
                bound.check(start, value)
        return value
    if not _fits(kind, value):
        raise ValueError(f"{start} is {value!r}; it must be {_words(kind)}")
    return float(value) if kind is float else value


def _fits(kind: Any, value: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_fits(member, value) for member in get_args(kind))
    if origin is Annotated:
        return _fits(get_args(kind)[0], value)
    if origin is Literal:
        return value in get_args(kind)
    if kind is float:
        return type(value) in (int, float)
    if kind in (int, bool, str, NoneType):
        return type(value) is kind
    return True


def _words(kind: Any) -> str:
    """What a value of a type must be, in words."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, get_args(kind)))
    if origin is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    return words.get(kind, "null")


def _result(
    field: str, name: str, function: Callable[..., Any], arguments: tuple[tuple[str, Any], ...]
) -> Any:
    """Calls a user's function that returns an own value."""
    with placed(f"{field} is {name!r}, which"):
        return function(**dict(arguments))


# `name` is part of the cache's key: it tells the arguments 1 and True apart, which are equal
_shared_result = cache(_result)


def source_files(file: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Returns a Python file, and behind it the files of its folder that it imports, at any depth.

    The imports are found in the text, so nothing is run. A file that cannot be parsed imports
    nothing. Installed packages, and the packages of this project, are left out.
    """
    first = Path(os.path.abspath(file))
    if first.parent.name == "site-packages":
        return (first,)
    files = [first]
    for importer in files:  # the list grows in the loop
        for module in _imported_modules(importer, first.parent):
            for path in (module.with_suffix(".py"), module / "__init__.py"):
                if path.is_file() and path not in files:
                    files.append(path)
    return (first, *sorted(files[1:]))


def _imported_modules(importer: Path, folder: Path) -> Iterator[Path]:
    """The places in `folder` of all modules that the text of a file may import, without suffix."""
    try:
        tree = ast.parse(importer.read_bytes())
    except (SyntaxError, ValueError):  # the user sees the error when the file is run
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
    stamps = tuple([(file, stat.st_mtime_ns, stat.st_size) for file, stat in stats])
    return _values_of(path, stamps)


@cache
def _values_of(path: str, stamps: Stamps) -> dict[str, Any]:
    return _run_file(path)


def _run_file(path: str) -> dict[str, Any]:
    """Runs a file, and anew what it imports from its folder -> its global values."""
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
