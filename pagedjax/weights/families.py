"""Which family reads a model: a built-in one, by its config.json's model_type, or one of the user's own."""

from __future__ import annotations

import os
from functools import cache

from pagedjax.config import one_of, own_value
from pagedjax.weights.architectures import ARCHITECTURES, Family
from pagedjax.weights.checkpoint import Checkpoint


def own_family(name: str | None) -> Family | None:
    """The family that "module:NAME" or "folder/file.py:NAME" names; None is none.

    Raises:
        ValueError: there is no such module, file or value.
    """
    if name is None:
        return None
    file = name.rpartition(":")[0]
    return _own(name, os.path.abspath(file), os.stat(file).st_mtime_ns if os.path.isfile(file) else 0)


@cache  # one record for all callers, so that its classes are the same ones; a new one if the file changes
def _own(name: str, file: str, changed: int) -> Family:
    return own_value("model_family", name, Family, ())


def built_in(model_type: str) -> Family:
    """The built-in family of a `model_type`.

    Raises:
        ValueError: there is none.
    """
    from pagedjax.device.models import FAMILIES

    one_of("model_type", model_type, tuple(FAMILIES))
    module = FAMILIES[model_type]
    return Family(model_type, module.from_hf, module.param_table, ARCHITECTURES[model_type], module.IGNORED)


def family_of(checkpoint: Checkpoint) -> Family:
    """The family that reads a checkpoint."""
    return checkpoint.family or built_in(checkpoint.config["model_type"])
