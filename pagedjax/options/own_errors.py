"""An error inside a user's own function, with the place in the user's file. This module imports no
jax.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parents[2]
CALLERS = ("pagedjax", "pallas_kernels", "experiments/core", "experiments/simulation")
PACKAGE_FOLDERS = tuple(f"{PACKAGES / name}{os.sep}" for name in CALLERS)
LIBRARIES = tuple(
    f"{folder}{os.sep}" for name, folder in sysconfig.get_paths().items() if name.endswith("lib")
)


class OwnError(ValueError):
    """A user's own function raised. The message names the file, the line and the function; the
    cause is chained.
    """


class placed:
    """A context in which a user's function is called. An error of the function becomes an
    `OwnError` with its place in the user's file. If no line of a user's file raised the error, it
    is an error of the package, and stays as it is.

        with placed(f"admit of the policy {policy.name!r}"):
            return policy.admit(seq, need, free)
    """

    __slots__ = ("_function",)

    def __init__(self, function: str) -> None:
        """function: which function is called, in words."""
        self._function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, OwnError):
            return
        place = place_of(error)
        if place:
            message = (str(error) or "no message") + place + _existing_names(error)
            raise OwnError(f"{self._function} raised {type(error).__name__}: {message}") from error


def place_of(error: BaseException, *, installed: bool = False) -> str:
    """Returns the innermost line of a user's file on the way to an error, in words: " in order
    (mine.py, line 12)"; "" if there is none.

    installed: whether a file of an installed package may be the user's.
    """
    skipped = PACKAGE_FOLDERS if installed else (*PACKAGE_FOLDERS, *LIBRARIES, "<frozen")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(skipped)
    ]
    if not frames:
        return ""
    file, line, function, _ = frames[-1]
    return f" in {function} ({file}, line {line})"


def _existing_names(error: Exception) -> str:
    """The attributes that a record of the package has, in words, if the error is that it lacks one;
    else "". The nearest name is first. A field that is a record gives its names too.
    """
    if not isinstance(error, AttributeError):
        return ""
    record = error.obj
    kind = type(record)
    if not (
        isinstance(record, tuple) and kind.__module__.startswith(("pagedjax.", "experiments."))
    ):
        return ""
    names = [name for name in dir(kind) if not (name.startswith("_") or hasattr(tuple, name))]
    for name in getattr(record, "_fields", ()):
        names += [f"{name}.{field}" for field in getattr(getattr(record, name), "_fields", ())]
    similarity = {
        name: SequenceMatcher(None, name.rpartition(".")[2], str(error.name)).ratio()
        for name in names
    }
    names.sort(key=lambda name: -similarity[name])
    return f"; a {kind.__name__} has {', '.join(names)}"
