"""Imports inside calls, which Ctrl-C may interrupt."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any


def imported(name: str) -> ModuleType:
    """Import a module, whole or not at all: a package that is half imported fails ever after.

    Ctrl-C interrupts the main thread, which waits here, and not the thread that imports. Libraries
    that load their modules lazily are not made for several threads, so one thread imports at a
    time.

    Raises:
        ImportError, and whatever the module raises.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        return module
    if _IMPORTS.get(threading.get_ident()):  # this thread runs `load`, for a module that needs this
        return importlib.import_module(name)
    outcome: dict[str, Any] = {}

    def load() -> None:
        try:
            with _ONE_AT_A_TIME:
                _IMPORTS[threading.get_ident()] = True
                outcome["module"] = importlib.import_module(name)
        except BaseException as error:
            outcome["error"] = error
        finally:
            _IMPORTS.pop(threading.get_ident(), None)

    thread = threading.Thread(target=load, name=f"import of {name}")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["module"]


_ONE_AT_A_TIME = threading.Lock()
_IMPORTS: dict[int, bool] = {}  # threads that import
