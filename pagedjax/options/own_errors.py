"""An error inside a user's own function, with the place in the user's file. This module imports no
jax.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

PACKAGES = Path(__file__).parents[2]
CALLERS = ("pagedjax", "pallas_kernels", "experiments/core", "experiments/simulation")
OURS = tuple(f"{PACKAGES / name}{os.sep}" for name in CALLERS)
LIBRARIES = tuple(
    f"{folder}{os.sep}" for name, folder in sysconfig.get_paths().items() if name.endswith("lib")
)


class OwnError(ValueError):
    """A user's own function raised. The message names the file, the line and the function; the
    cause is chained.
    """


def raise_with_place(function: str, error: Exception) -> None:
    """Raises an error of a user's function again, as an `OwnError` with its place in the user's
    file. Does nothing if no line of a user's file raised it: then the package is to blame, and its
    error stays as it is.

        try:
            return policy.admit(seq, need, free)
        except Exception as error:
            raise_with_place(f"admit of the policy {policy.name!r}", error)
            raise

    Args:
        function: which one was called, in words.
    """
    place = place_of(error)
    if place and not isinstance(error, OwnError):
        message = str(error) or "no message"
        raise OwnError(f"{function} raised {type(error).__name__}: {message}{place}") from error


def place_of(error: BaseException) -> str:
    """Returns the innermost line of a user's file on the way to an error, in words: " in order
    (mine.py, line 12)"; "" if there is none.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*OURS, *LIBRARIES, "<frozen"))
    ]
    if not frames:
        return ""
    file, line, function, _ = frames[-1]
    return f" in {function} ({file}, line {line})"
