"""Libraries of the `experiments` extra, imported when they are first needed."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str) -> Any:
    """The imported module. Raises ImportError that names the extra which installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"experiments needs {module.split('.')[0]}, which is not installed: pip install "
            "'pagedjax[experiments]'"
        ) from error
